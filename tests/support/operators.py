"""What torch_npu (2.14) declares of its operators, in few words, and sample calls of those that are here."""

import inspect
from typing import Any

import torch

from fusion_attention.contract import Tensors
from fusion_attention.contract.sampling import sample
from fusion_attention.npu.surface.modules import functions
from fusion_attention.ops import COMPANIONS, CONTRACTS

from .records import by_name

_TYPES = {
    "Tensor": "query key value dy weights sparse_indices d_out query_index key_index softmax_max_index "
    "softmax_sum_index prev_attn_out prev_softmax_max prev_softmax_sum cur_attn_out cur_softmax_max cur_softmax_sum "
    "self",
    "Tensor?": "pse padding_mask atten_mask sink dropout_mask softmax_max softmax_sum softmax_in attention_in "
    "query_rope key_rope workspace pse_shift antiquant_scale antiquant_offset block_table dequant_scale1 quant_scale1 "
    "dequant_scale2 quant_scale2 quant_offset2 kv_padding_size key_antiquant_scale key_antiquant_offset "
    "value_antiquant_scale value_antiquant_offset query_padding_size key_shared_prefix value_shared_prefix "
    "key_rope_antiquant_scale dequant_scale_query dequant_scale_key dequant_offset_key dequant_scale_value "
    "dequant_offset_value dequant_scale_key_rope quant_scale_out quant_offset_out quant_scale_p learnable_sink "
    "deq_scale1 deq_scale2 actual_seq_lengths_query actual_seq_lengths_key sinks",
    "int": "head_num pre_tockens next_tockens inner_precise sparse_mode seed offset numels pre_tokens next_tokens "
    "pse_type num_heads num_key_value_heads block_size antiquant_mode key_antiquant_mode value_antiquant_mode "
    "num_query_heads query_quant_mode key_quant_mode value_quant_mode sparse_count sparse_block_size attention_mode "
    "update_type",
    "int?": "query_dtype key_dtype value_dtype query_rope_dtype key_rope_dtype key_shared_prefix_dtype "
    "value_shared_prefix_dtype dequant_scale_query_dtype dequant_scale_key_dtype dequant_scale_value_dtype "
    "dequant_scale_key_rope_dtype out_dtype",
    "float": "scale keep_prob scale_value softmax_scale p",
    "bool": "gen_mask_parallel sync softmax_lse_flag return_softmax_lse return_value",
    "str": "input_layout softmax_layout layout_query layout_key layout_kv input_softmax_layout",
    "str?": "layout",
    "SymInt[]": "size",
    "SymInt[]?": "prefix actual_seq_qlen actual_seq_kvlen q_start_idx kv_start_idx actual_seq_lengths "
    "actual_seq_lengths_kv actual_shared_prefix_len actual_seq_klen",
    "Tensor[]": "out lse local_out",
}
_USUAL = {name: kind for kind, names in _TYPES.items() for name in names.split()}
_OPTIONAL = {name: f"{_USUAL[name]}?" for name in ("sparse_mode", "pre_tokens", "next_tokens")}
_STATISTICS = {"softmax_max": "Tensor", "softmax_sum": "Tensor"}
_ENDS = {"actual_seq_qlen": "Tensor?", "actual_seq_kvlen": "Tensor?"}
_OTHERS = {
    "_npu_dropout_gen_mask.Tensor": {"parallel": "bool?", "sync": "bool?"},
    "npu_fusion_attention_v3": _ENDS,
    "npu_fusion_attention_grad_v3": {**_ENDS, "seed": "Tensor?", "offset": "Tensor?"},
    "npu_ring_attention_update": _ENDS,
    "npu_sparse_flash_attention": {"value": "Tensor?", "actual_seq_lengths_kv": "Tensor?"},
    "npu_sparse_flash_attention_grad": {
        **(_OPTIONAL | _STATISTICS | _ENDS),
        "value": "Tensor?",
        "attention_mode": "int?",
        "out": "Tensor",
    },
    "npu_lightning_indexer_grad": _OPTIONAL,
    "npu_dense_lightning_indexer_softmax_lse": _OPTIONAL,
    "npu_dense_lightning_indexer_grad_kl_loss": _OPTIONAL | _STATISTICS,
    "npu_sparse_lightning_indexer_grad_kl_loss": _OPTIONAL | _STATISTICS,
}
_NUMBERS = "Tensor Tensor Tensor Tensor int int int"
_RETURNS = {
    "get_npu_format": "int",
    "npu_fusion_attention": _NUMBERS,
    "npu_fusion_attention_v2": _NUMBERS,
    "npu_fusion_attention_v3": "Tensor " * 6,
    "npu_fusion_attention_grad": "Tensor " * 5,
    "npu_fusion_attention_grad_v2": "Tensor " * 7,
    "npu_fusion_attention_grad_v3": "Tensor " * 5,
    "npu_lightning_indexer": "Tensor " * 2,
    "npu_lightning_indexer_grad": "Tensor " * 3,
    "npu_sparse_flash_attention": "Tensor " * 3,
    "npu_sparse_flash_attention_grad": "Tensor " * 5,
    "npu_sparse_lightning_indexer_grad_kl_loss": "Tensor " * 4,
    "npu_dense_lightning_indexer_grad_kl_loss": "Tensor " * 4,
    "npu_dense_lightning_indexer_softmax_lse": "Tensor " * 2,
    "npu_ring_attention_update": "Tensor " * 3,
    "npu_attention_update": "Tensor " * 2,
    "npu_fused_infer_attention_score": "Tensor " * 2,
    "npu_fused_infer_attention_score.out": "Tensor " * 2,
    "npu_fused_infer_attention_score_v2": "Tensor " * 2,
    "npu_fused_infer_attention_score_v2.out": "Tensor " * 2,
    "_npu_fused_infer_attention_score_infer_output": "Tensor " * 2,
    "_npu_fused_infer_attention_score_v2_infer_output": "Tensor " * 2,
}


def declared(name: str, arguments: list[str]) -> tuple[list[str], list[str]]:
    """The types of an operator's arguments and results, as torch_npu declares them."""
    others = _OTHERS.get(name, {})
    return [others.get(a) or _USUAL[a] for a in arguments], _RETURNS.get(name, "Tensor").split()


def sampled(name: str) -> dict[str, Any]:
    """Arguments of a legal call of an operator by its names; gradients are wanted where it has them."""
    op = CONTRACTS[name]
    args = sample(op)
    dense = ("query", "key", "value") if "fusion_attention" in name and "grad" not in name else ()
    for trained in {*dense, *(name for names in op.trains.values() for name in names)}:
        if isinstance(args[trained], torch.Tensor):
            args[trained].requires_grad_()
    needed = {p.name for p in inspect.signature(functions()[name]).parameters.values() if p.default is p.empty}
    given = by_name(op, args)
    for p in op.params:
        value = given.get(p.shown)
        if isinstance(p, Tensors) and value is not None:  # attention's lists of keys are declared as tensors
            first = value if isinstance(value, torch.Tensor) else value[0]
            given[p.shown] = [first] if op.name in COMPANIONS else first
    outputs = {p.shown for p in op.tensors(output=True)} - needed
    return {name: value for name, value in given.items() if name in needed or not (value is None or name in outputs)}


CHECKED = [name for name in functions() if name in CONTRACTS]
OF_ATTENTION = [name for name in functions() if name not in COMPANIONS]

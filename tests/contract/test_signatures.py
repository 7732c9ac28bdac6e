"""Signatures: the functions against their records, and the records against CANN's and torch_npu's declarations."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
from support.operators import declared
from support.records import INTERFACES
from support.sources import SOURCE

import fusion_attention
from fusion_attention.captures.capture import HOOKED
from fusion_attention.contract import REQUIRED, Attr, Tensor
from fusion_attention.npu.surface import cann_ops
from fusion_attention.ops import RECORDS

# Parameters of our own functions that no record has.
OURS = {"return_lse", "backend", "foreign"}
# What may be None, but stands before parameters that may not.
POSITIONAL = {(f"npu_sparse_flash_attention{end}", "value") for end in ("", "_grad")} | {("sparse_attention", "v")}


@pytest.mark.parametrize("name", INTERFACES)
def test_a_signature_is_its_record(name: str) -> None:
    op, extra = RECORDS[name], set() if name.startswith(("npu", "cann_ops")) else OURS
    inputs = [p for p in op.params if not (isinstance(p, Tensor) and p.output)]
    given = [p for p in inspect.signature(INTERFACES[name]).parameters.values() if p.name not in extra]
    assert [p.name for p in given] == [p.shown for p in inputs]
    for parameter, p in zip(given, inputs, strict=True):
        # torch_npu declares what its gradients need as optional.
        saved = p.name in ("softmax_max", "softmax_sum", "attention_in") and "fusion" in name
        default = p.default if isinstance(p, Attr) else None if p.optional or saved else REQUIRED
        if (name, p.shown) in POSITIONAL:
            default = REQUIRED
        default = inspect.Parameter.empty if default is REQUIRED else default
        assert parameter.default == default, p.name
        assert type(parameter.default) is type(default), p.name


class Passed(Exception):
    """The arguments that a function hands on, instead of a result."""


def passed(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """The arguments by canonical name of a call with these values."""

    def stop(*args: Any, **how: Any) -> Any:
        raise Passed(next(value for value in args if isinstance(value, dict)))

    for owner, name in HOOKED:
        monkeypatch.setattr(owner, name, stop)
    with pytest.raises(Passed) as result:
        function(**given)
    return result.value.args[0]


@pytest.mark.parametrize("name", INTERFACES)
def test_every_parameter_reaches_its_record(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the record's name for it, and nothing else does: bind() takes what it does not find as None."""
    parameters = dict(inspect.signature(INTERFACES[name]).parameters)
    parameters.pop("foreign", None)
    given = {shown: f"the value of {shown}" for shown in parameters}
    inputs = {p.name: given[p.shown] for p in RECORDS[name].params if p.shown in given}
    assert passed(monkeypatch, INTERFACES[name], given) == inputs
    assert len(inputs) == len(parameters) - len((OURS - {"foreign"}) & parameters.keys())


def test_every_parameter_of_decode_attention_reaches_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    function = fusion_attention.decode_attention
    given = {name: f"the value of {name}" for name in inspect.signature(function).parameters}
    given |= {"cache": ("the keys", "the values"), "sequences": None}  # type: ignore[dict-item]
    inputs = {p.name: given.get(p.name) for p in RECORDS["decode_attention"].params}
    assert passed(monkeypatch, function, given) == inputs | {"k": "the keys", "v": "the values"}


# The functions of CANN's package, as its own Python has them: parameters by name, with defaults except None; those
# after * are keyword-only. git has the other functions' parameters in the stubs of type checkers, and the C headers.
LENGTHS_OF_TWO = "cu_seqlens_q cu_seqlens_ori_kv cu_seqlens_cmp_kv seqused_q seqused_ori_kv seqused_cmp_kv"
SHARED_TAIL = "cmp_residual_kv ori_topk_length cmp_topk_length sinks metadata"
MODES_OF_TWO = "ori_mask_mode=0 cmp_mask_mode=0 ori_win_left=-1 ori_win_right=-1 layout_q='BSND' layout_kv='BSND'"
OF_ONE = "* cu_seqlens_q cu_seqlens_k seqused_q seqused_k cmp_residual_k metadata"
OF_LOSS = f"{OF_ONE} layout_q='TND' layout_k='TND' mask_mode=3 cmp_ratio=1"
CANN_OPS = {
    "cann_ops_transformer.block_sparse_attention": "query key value block_sparse_mask block_shape *"
    " q_input_layout='TND' kv_input_layout='TND' num_key_value_heads=1 scale_value=1.0 inner_precise=1"
    " actual_seq_lengths actual_seq_lengths_kv return_softmax_lse=False mask_type=0 quant_mode=0 block_size=0"
    " pre_tokens=2147483647 next_tokens=2147483647 dst_type_max=0.0 atten_mask block_table q_dequant_scale"
    " k_dequant_scale v_dequant_scale p_quant_scale attention_out_dtype",
    "cann_ops_transformer.block_sparse_attention_grad": "d_out query key value attention_out softmax_lse"
    " block_sparse_mask block_shape * q_input_layout='BNSD' kv_input_layout='BNSD' num_key_value_heads=1"
    " scale_value=1.0 actual_seq_lengths actual_seq_lengths_kv atten_mask mask_type=0",
    "cann_ops_transformer.lightning_indexer": "q k w topk * cu_seqlens_q cu_seqlens_k seqused_q seqused_k"
    " cmp_residual_k block_table output_idx_offset metadata max_seqlen_q=-1 layout_q='BSND' layout_k='BSND'"
    " mask_mode=0 cmp_ratio=1 return_value=0",
    "cann_ops_transformer.sparse_lightning_indexer_kl_loss_grad": "q k w sparse_indices attn_softmax_l1_norm "
    + OF_LOSS,
    "cann_ops_transformer.dense_lightning_indexer_kl_loss_grad": "q k w attn_softmax_l1_norm softmax_lse " + OF_LOSS,
    "cann_ops_transformer.dense_lightning_indexer_softmax_lse": "query_index key_index weight "
    f"{OF_ONE} layout_q='BSND' layout_k='BSND' mask_mode=0 cmp_ratio=1",
    "cann_ops_transformer.sparse_flash_mla": "q ori_kv cmp_kv ori_sparse_indices cmp_sparse_indices ori_block_table"
    f" cmp_block_table {LENGTHS_OF_TWO} {SHARED_TAIL} softmax_scale=1.0 cmp_ratio=1 {MODES_OF_TWO} topk_value_mode=1"
    " return_softmax_lse=False",
    "cann_ops_transformer.sparse_flash_mla_grad": "q dout attn_out softmax_lse ori_kv cmp_kv ori_sparse_indices"
    f" cmp_sparse_indices {LENGTHS_OF_TWO} {SHARED_TAIL} softmax_scale cmp_ratio {MODES_OF_TWO}",
    "cann_ops_transformer.sparse_flash_mla_softmax_l1_norm": "q k softmax_lse * sparse_indices cu_seqlens_q"
    " cu_seqlens_k seqused_q seqused_k cmp_residual_k topk_length metadata softmax_scale=1.0 max_seqlen_k=0 cmp_ratio=1"
    " mask_mode=0 layout_q='BSND' layout_k='BSND'",
}


# The first keyword-only parameter of our own functions.
KEYWORDS = {"compressed_attention": "ratio"} | dict.fromkeys(
    ("attention", "lightning_indexer", "sparse_attention", "indexer_loss", "indexer_target_loss"), "layout"
)


@pytest.mark.parametrize("name", [*CANN_OPS, *KEYWORDS])
def test_signatures(name: str) -> None:
    parameters = list(inspect.signature(INTERFACES[name]).parameters.values())
    words = [p.name if p.default in (p.empty, None) else f"{p.name}={p.default!r}" for p in parameters]
    keyword_only = [p.kind is p.KEYWORD_ONLY for p in parameters]
    if name in KEYWORDS:
        assert parameters[keyword_only.index(True)].name == KEYWORDS[name]
        return
    if any(keyword_only):
        words.insert(keyword_only.index(True), "*")
    assert words == CANN_OPS[name].split()


def test_every_signature_is_compared() -> None:
    """Here, or in the stubs that git holds: npu/__init__.pyi of torch_npu's functions, _aclnn.pyi of aclnn's."""
    assert set(CANN_OPS) == {name for name in RECORDS if name.startswith(f"{cann_ops.NAME}.")}
    stub = (SOURCE / "npu" / "__init__.pyi").read_text(encoding="utf-8")
    in_stub = set(re.findall(r"^def (npu_\w+)", stub, re.MULTILINE))
    assert {*CANN_OPS, *KEYWORDS} == set(INTERFACES) - set(declared()) - in_stub

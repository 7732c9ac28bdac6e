"""Signatures of functions match their operator definitions, and the definitions match CANN's and torch_npu's."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from clauses.pages import PAGES
from support.contract_failures import INTERFACES
from support.operators import declared

import fusion_attention
from fusion_attention.captures.capture import HOOKED
from fusion_attention.contract import REQUIRED, Attr, Tensor
from fusion_attention.npu.surface import cann_ops
from fusion_attention.ops import RECORDS

# Parameters of this package's functions that no operator definition has.
OURS = {"return_lse", "backend", "foreign"}
# Parameters that may be None, but precede required ones.
POSITIONAL = {(f"npu_sparse_flash_attention{end}", "value") for end in ("", "_grad")} | {("sparse_attention", "v")}


@pytest.mark.parametrize("name", INTERFACES)
def test_python_signature_matches_operator_definition(name: str) -> None:
    op, extra = RECORDS[name], set() if name.startswith(("npu", "cann_ops")) else OURS
    inputs = [p for p in op.params if not (isinstance(p, Tensor) and p.output)]
    given = [p for p in inspect.signature(INTERFACES[name]).parameters.values() if p.name not in extra]
    assert [p.name for p in given] == [p.shown for p in inputs]
    for parameter, p in zip(given, inputs, strict=True):
        # torch_npu declares the inputs of its gradient functions as optional.
        saved = p.name in ("softmax_max", "softmax_sum", "attention_in") and "fusion" in name
        default = p.default if isinstance(p, Attr) else None if p.optional or saved else REQUIRED
        if (name, p.shown) in POSITIONAL:
            default = REQUIRED
        default = inspect.Parameter.empty if default is REQUIRED else default
        assert parameter.default == default, p.name
        assert type(parameter.default) is type(default), p.name


class Passed(Exception):
    """Raised in place of a call, with the arguments that a function passes to bind()."""


def passed(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """Calls a function with these values; returns the arguments that it passes on, by canonical name."""

    def stop(*args: Any, **how: Any) -> Any:
        raise Passed(next(value for value in args if isinstance(value, dict)))

    for owner, name in HOOKED:
        monkeypatch.setattr(owner, name, stop)
    with pytest.raises(Passed) as result:
        function(**given)
    return result.value.args[0]


@pytest.mark.parametrize("name", INTERFACES)
def test_every_parameter_is_passed_under_its_canonical_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelled name would go unnoticed, because bind() treats missing arguments as None."""
    parameters = dict(inspect.signature(INTERFACES[name]).parameters)
    parameters.pop("foreign", None)
    given = {shown: f"the value of {shown}" for shown in parameters}
    inputs = {p.name: given[p.shown] for p in RECORDS[name].params if p.shown in given}
    assert passed(monkeypatch, INTERFACES[name], given) == inputs
    assert len(inputs) == len(parameters) - len((OURS - {"foreign"}) & parameters.keys())


def test_decode_attention_parameters_are_passed_under_canonical_names(monkeypatch: pytest.MonkeyPatch) -> None:
    function = fusion_attention.decode_attention
    given = {name: f"the value of {name}" for name in inspect.signature(function).parameters}
    given |= {"cache": ("the keys", "the values"), "sequences": None}  # type: ignore[dict-item]
    inputs = {p.name: given.get(p.name) for p in RECORDS["decode_attention"].params}
    assert passed(monkeypatch, function, given) == inputs | {"k": "the keys", "v": "the values"}


# Parameters by name, with defaults except None; those after * are keyword-only. The functions here are only in
# torch_npu's op_plugin_functions.yaml; tests/npu/test_torch_operators.py has the others.
TORCH_NPU = {
    "npu_block_sparse_attention": "query key value block_sparse_mask block_shape * q_input_layout='TND'"
    " kv_input_layout='TND' num_key_value_heads=1 scale_value=0.0 inner_precise=1 actual_seq_lengths"
    " actual_seq_lengths_kv softmax_lse_flag=0",
    "npu_block_sparse_attention_backward": "d_out query key value attention_out softmax_lse block_sparse_mask"
    " block_shape actual_seq_lengths actual_seq_lengths_kv q_input_layout='TND' kv_input_layout='TND'"
    " num_key_value_heads=1 scale_value=0.0",
}


# Functions of CANN's package, with the parameters of its Python sources.
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


# First keyword-only parameter of functions of this package.
KEYWORDS = {"compressed_attention": "ratio"} | dict.fromkeys(
    ("attention", "lightning_indexer", "sparse_attention", "indexer_loss", "indexer_target_loss"), "layout"
)


@pytest.mark.parametrize("name", [*TORCH_NPU, *CANN_OPS, *KEYWORDS])
def test_python_signature_matches_declaration_of_torch_npu_or_cann(name: str) -> None:
    parameters = list(inspect.signature(INTERFACES[name]).parameters.values())
    words = [p.name if p.default in (p.empty, None) else f"{p.name}={p.default!r}" for p in parameters]
    keyword_only = [p.kind is p.KEYWORD_ONLY for p in parameters]
    if name in KEYWORDS:
        assert parameters[keyword_only.index(True)].name == KEYWORDS[name]
        return
    if any(keyword_only):
        words.insert(keyword_only.index(True), "*")
    assert words == (TORCH_NPU | CANN_OPS)[name].split()


FUSED_INPUTS = """query key value pse_shift atten_mask actual_seq_lengths actual_seq_lengths_kv dequant_scale1
    quant_scale1 dequant_scale2 quant_scale2 quant_offset2 antiquant_scale antiquant_offset block_table
    query_padding_size kv_padding_size"""
FUSED_NUMBERS = """num_heads scale_value pre_tokens next_tokens input_layout num_key_value_heads sparse_mode
    inner_precise block_size antiquant_mode softmax_lse_flag"""
FUSED_SIDES = """key_antiquant_scale key_antiquant_offset value_antiquant_scale value_antiquant_offset
    key_shared_prefix value_shared_prefix actual_shared_prefix_len"""
FUSED_ROPES, FUSED_MODES = "query_rope key_rope key_rope_antiquant_scale", "key_antiquant_mode value_antiquant_mode"
FUSED_OUT = "attention_out softmax_lse"

# C declarations of the phase-1 functions, with canonical names, without workspaceSize and executor.
BLOCKS = "block_sparse_mask atten_mask block_shape actual_seq_lengths actual_seq_lengths_kv"
BLOCK_INPUTS = f"query key value {BLOCKS} block_table"
BLOCK_SCALES = " q_dequant_scale k_dequant_scale v_dequant_scale"
BLOCK_NUMBERS = """ q_input_layout kv_input_layout num_key_value_heads mask_type scale_value inner_precise block_size
    pre_tokens next_tokens softmax_lse_flag"""
BLOCK_OUT = " attention_out softmax_lse"
MATRICES = "pse drop_mask padding_mask atten_mask"
ENDS = "actual_seq_qlen actual_seq_kvlen"
BEGINS = "q_start_idx kv_start_idx"
NUMBERS = "scale keep_prob pre_tokens next_tokens head_num input_layout inner_precise sparse_mode"
SAVED = "softmax_max softmax_sum softmax_in attention_in"
SCORE_OUT = "softmax_max softmax_sum softmax_out attention_out"
ROPE_ROWS = "query query_rope key key_rope value"
STEP = "query key value pse_shift atten_mask actual_seq_lengths"
INTEGERS = "dequant_scale1 quant_scale1 dequant_scale2 quant_scale2 quant_offset2"
STEP_NUMBERS = "num_heads scale_value input_layout num_key_value_heads"
PROMPT_NUMBERS = "num_heads scale_value pre_tokens next_tokens input_layout num_key_value_heads"
OF_LENGTHS = "cu_seqlens_q cu_seqlens_k seqused_q seqused_k cmp_residual_k"
SIZES = "batch_size max_seqlen_q max_seqlen_k num_heads_q num_heads_k head_dim"
LAYOUTS = "layout_q layout_k mask_mode cmp_ratio"
WINDOW = "sparse_mode pre_tokens next_tokens"
KEY_LENGTHS = "actual_seq_lengths_query actual_seq_lengths_key"
ACLNN = {
    "aclnnBlockSparseAttentionV2": BLOCK_INPUTS + BLOCK_SCALES + BLOCK_NUMBERS + BLOCK_OUT,
    "aclnnBlockSparseAttentionV3": BLOCK_INPUTS
    + f"{BLOCK_SCALES} p_quant_scale{BLOCK_NUMBERS} quant_mode dst_type_max{BLOCK_OUT}",
    "aclnnFlashAttentionScore": f"query key value {MATRICES} prefix {NUMBERS} {SCORE_OUT}",
    "aclnnFlashAttentionScoreV3": f"query key value {MATRICES} sink prefix {BEGINS} {NUMBERS} pse_type {SCORE_OUT}",
    "aclnnFlashAttentionVarLenScore": f"query key value {MATRICES} prefix {ENDS} {NUMBERS} {SCORE_OUT}",
    "aclnnFlashAttentionVarLenScoreV2": f"query key value {MATRICES} prefix {ENDS} {BEGINS} {NUMBERS} pse_type"
    f" {SCORE_OUT}",
    "aclnnFlashAttentionVarLenScoreV3": f"{ROPE_ROWS} {MATRICES} prefix {ENDS} {BEGINS} {NUMBERS} pse_type {SCORE_OUT}",
    "aclnnFlashAttentionVarLenScoreV4": f"query key value {MATRICES} prefix {ENDS} {NUMBERS} softmax_layout"
    f" {SCORE_OUT}",
    "aclnnFlashAttentionVarLenScoreV5": f"{ROPE_ROWS} {MATRICES} sink prefix {ENDS} {BEGINS} {NUMBERS} pse_type"
    f" softmax_layout {SCORE_OUT}",
    "aclnnFlashAttentionScoreGrad": f"query key value dy {MATRICES} {SAVED} prefix {NUMBERS} dq dk dv dpse",
    "aclnnFlashAttentionScoreGradV2": f"query key value dy {MATRICES} {SAVED} prefix {BEGINS} {NUMBERS} pse_type dq"
    " dk dv dpse",
    "aclnnFlashAttentionScoreGradV3": f"query key value dy {MATRICES} {SAVED} sink prefix {BEGINS} {NUMBERS} pse_type"
    " dq dk dv dpse dsink",
    "aclnnFlashAttentionUnpaddingScoreGrad": f"query key value dy {MATRICES} {SAVED} prefix {ENDS} {NUMBERS} dq dk dv"
    " dpse",
    "aclnnFlashAttentionUnpaddingScoreGradV2": f"query key value dy {MATRICES} {SAVED} prefix {ENDS} {BEGINS}"
    f" {NUMBERS} pse_type dq dk dv dpse",
    "aclnnFlashAttentionUnpaddingScoreGradV4": f"query key value dy {MATRICES} {SAVED} prefix {ENDS} {NUMBERS} dq dk"
    " dv dpse softmax_layout",
    "aclnnFlashAttentionUnpaddingScoreGradV5": f"{ROPE_ROWS} dy {MATRICES} {SAVED} sink prefix {ENDS} {BEGINS}"
    f" {NUMBERS} pse_type softmax_layout dq dq_rope dk dk_rope dv dpse dsink",
    "aclnnIncreFlashAttention": f"{STEP} {STEP_NUMBERS} attention_out",
    "aclnnIncreFlashAttentionV2": f"{STEP} {INTEGERS} {STEP_NUMBERS} attention_out",
    "aclnnIncreFlashAttentionV3": f"{STEP} {INTEGERS} antiquant_scale antiquant_offset block_table {STEP_NUMBERS}"
    " block_size inner_precise attention_out",
    "aclnnPromptFlashAttention": f"{STEP} {PROMPT_NUMBERS} attention_out",
    "aclnnPromptFlashAttentionV2": f"{STEP} actual_seq_lengths_kv {INTEGERS} {PROMPT_NUMBERS} sparse_mode"
    " attention_out",
    "aclnnPromptFlashAttentionV3": f"{STEP} actual_seq_lengths_kv {INTEGERS} {PROMPT_NUMBERS} sparse_mode"
    " inner_precise attention_out",
    "aclnnFusedInferAttentionScore": f"{FUSED_INPUTS} {FUSED_NUMBERS} {FUSED_OUT}",
    "aclnnFusedInferAttentionScoreV2": f"{FUSED_INPUTS} {FUSED_SIDES} {FUSED_NUMBERS} {FUSED_MODES} {FUSED_OUT}",
    "aclnnFusedInferAttentionScoreV3": f"{FUSED_INPUTS} {FUSED_SIDES} {FUSED_ROPES} {FUSED_NUMBERS} {FUSED_MODES}"
    f" {FUSED_OUT}",
    "aclnnFusedInferAttentionScoreV4": f"{FUSED_INPUTS} {FUSED_SIDES} {FUSED_ROPES} dequant_scale_query learnable_sink"
    f" {FUSED_NUMBERS} {FUSED_MODES} query_quant_mode {FUSED_OUT}",
    "aclnnFusedInferAttentionScoreV5": f"{FUSED_INPUTS} {FUSED_SIDES} {FUSED_ROPES} dequant_scale_query learnable_sink"
    f" q_start_idx kv_start_idx {FUSED_NUMBERS} {FUSED_MODES} query_quant_mode pse_type {FUSED_OUT}",
    "aclnnLightningIndexer": f"query key weights {KEY_LENGTHS} block_table layout_query layout_key sparse_count"
    f" {WINDOW} return_values sparse_indices_out sparse_values_out",
    "aclnnLightningIndexerGrad": f"query key dy sparse_indices weights {KEY_LENGTHS} head_num layout {WINDOW}"
    " deterministic dquery dkey dweights",
    "aclnnSparseFlashAttention": f"query key value sparse_indices block_table actual_seq_lengths_query"
    f" actual_seq_lengths_kv query_rope key_rope scale_value sparse_block_size layout_query layout_kv {WINDOW}"
    " attention_mode return_softmax_lse attention_out softmax_max softmax_sum",
    "aclnnDenseLightningIndexerKLLossGrad": f"q k w attn_softmax_l1_norm softmax_lse {OF_LENGTHS} metadata {LAYOUTS}"
    " dq dk dw softmax_out",
    "aclnnDenseLightningIndexerSoftmaxLseV2": f"query_index key_index weight {OF_LENGTHS} metadata {LAYOUTS}"
    " softmax_lse",
    "aclnnSparseLightningIndexerKLLossGradMetadata": f"{OF_LENGTHS} {SIZES} topk {LAYOUTS} meta_data",
    "aclnnDenseLightningIndexerKLLossGradMetadata": f"{OF_LENGTHS} {SIZES} {LAYOUTS} meta_data",
    "aclnnDenseLightningIndexerSoftmaxLseV2Metadata": f"{OF_LENGTHS} {SIZES} {LAYOUTS} meta_data",
    "aclnnDenseLightningIndexerSoftmaxLse": f"query_index key_index weight {KEY_LENGTHS} layout {WINDOW} softmax_max"
    " softmax_sum",
    "aclnnDenseLightningIndexerGradKLLoss": f"query key query_index key_index weights softmax_max softmax_sum"
    f" softmax_max_index softmax_sum_index query_rope key_rope {KEY_LENGTHS} scale_value layout {WINDOW} dquery_index"
    " dkey_index dweights loss",
    **{
        f"aclnnSparseFlashMla{suffix}Metadata": """
        cu_seqlens_q cu_seqlens_ori_kv cu_seqlens_cmp_kv seqused_q seqused_ori_kv seqused_cmp_kv cmp_residual_kv
        ori_topk_length cmp_topk_length num_heads_q num_heads_kv head_dim batch_size max_seqlen_q max_seqlen_ori_kv
        max_seqlen_cmp_kv ori_topk cmp_topk cmp_ratio ori_mask_mode cmp_mask_mode ori_win_left ori_win_right layout_q
        layout_kv has_ori_kv has_cmp_kv meta_data"""
        for suffix in ("", "Grad")
    },
    "aclnnSparseFlashMlaSoftmaxL1NormMetadata": f"{OF_LENGTHS} topk_length num_heads_q num_heads_k head_dim"
    f" batch_size max_seqlen_q max_seqlen_k topk {LAYOUTS} meta_data",
}


@pytest.mark.parametrize("name", ACLNN)
def test_aclnn_parameter_order_matches_c_declaration(name: str) -> None:
    assert [p.shown for p in RECORDS[name].params] == ACLNN[name].split()


def test_every_operator_signature_is_compared_with_a_declaration() -> None:
    pages = {page.operator for page in PAGES}  # test_clauses.py compares their prototypes
    ours = {"decode_attention", "compress", *INTERFACES}
    assert set(ACLNN) | pages | set(TORCH_NPU) | ours | set(CANN_OPS) == set(RECORDS)
    assert set(CANN_OPS) == {name for name in RECORDS if name.startswith(f"{cann_ops.NAME}.")}
    assert set(TORCH_NPU) == {name for name in RECORDS if name.startswith("npu_") and name not in declared()}
    assert {*TORCH_NPU, *CANN_OPS, *KEYWORDS} == set(INTERFACES) - set(declared())

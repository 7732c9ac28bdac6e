"""The functions of aclnn. Written by `python -m codegen`; `fusion-attention ops NAME` explains the parameters.

Phase 1 of an operator checks and plans, and returns a code, the bytes of workspace that phase 2 needs, and an executor.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from fusion_attention import acl

_Tensor = acl.Tensor | None
_Tensors = acl.TensorList | None
_Numbers = acl.IntArray | acl.Tensor | Sequence[int] | None
_Planned = tuple[int, int, acl.Executor | None]

class _Run(Protocol):
    """Phase 2: runs what phase 1 planned, into its output tensors, and returns 0 or a code."""

    def __call__(
        self, workspace: Any, workspace_size: int, executor: acl.Executor | None, stream: acl.Stream | None
    ) -> int: ...

def aclnnFlashAttentionScoreGetWorkspaceSize(query: _Tensor, key: _Tensor, value: _Tensor, pse: _Tensor,
    drop_mask: _Tensor, padding_mask: _Tensor, atten_mask: _Tensor, prefix: _Numbers, scale: float, keep_prob: float,
    pre_tokens: int, next_tokens: int, head_num: int, input_layout: str, inner_precise: int, sparse_mode: int,
    softmax_max: _Tensor, softmax_sum: _Tensor, softmax_out: _Tensor, attention_out: _Tensor, *, strict: bool = True,
    check_content: bool = False) -> _Planned:
    """Attention for training, forward, padded layouts."""
aclnnFlashAttentionScore: _Run
def aclnnFlashAttentionScoreV2GetWorkspaceSize(query: _Tensor, key: _Tensor, value: _Tensor, pse: _Tensor,
    drop_mask: _Tensor, padding_mask: _Tensor, atten_mask: _Tensor, prefix: _Numbers, q_start_idx: _Numbers,
    kv_start_idx: _Numbers, scale: float, keep_prob: float, pre_tokens: int, next_tokens: int, head_num: int,
    input_layout: str, inner_precise: int, sparse_mode: int, pse_type: int, softmax_max: _Tensor,
    softmax_sum: _Tensor, softmax_out: _Tensor, attention_out: _Tensor, *, strict: bool = True,
    check_content: bool = False) -> _Planned:
    """FlashAttentionScore with pse_type and start indices."""
aclnnFlashAttentionScoreV2: _Run
def aclnnFlashAttentionScoreV3GetWorkspaceSize(query: _Tensor, key: _Tensor, value: _Tensor, pse: _Tensor,
    drop_mask: _Tensor, padding_mask: _Tensor, atten_mask: _Tensor, sink: _Tensor, prefix: _Numbers,
    q_start_idx: _Numbers, kv_start_idx: _Numbers, scale: float, keep_prob: float, pre_tokens: int, next_tokens: int,
    head_num: int, input_layout: str, inner_precise: int, sparse_mode: int, pse_type: int, softmax_max: _Tensor,
    softmax_sum: _Tensor, softmax_out: _Tensor, attention_out: _Tensor, *, strict: bool = True,
    check_content: bool = False) -> _Planned:
    """FlashAttentionScoreV2 with sinks."""
aclnnFlashAttentionScoreV3: _Run
def aclnnFlashAttentionVarLenScoreGetWorkspaceSize(query: _Tensor, key: _Tensor, value: _Tensor, pse: _Tensor,
    drop_mask: _Tensor, padding_mask: _Tensor, atten_mask: _Tensor, prefix: _Numbers, actual_seq_qlen: _Numbers,
    actual_seq_kvlen: _Numbers, scale: float, keep_prob: float, pre_tokens: int, next_tokens: int, head_num: int,
    input_layout: str, inner_precise: int, sparse_mode: int, softmax_max: _Tensor, softmax_sum: _Tensor,
    softmax_out: _Tensor, attention_out: _Tensor, *, strict: bool = True, check_content: bool = False) -> _Planned:
    """Attention for training, forward, packed sequences."""
aclnnFlashAttentionVarLenScore: _Run
def aclnnFlashAttentionVarLenScoreV2GetWorkspaceSize(query: _Tensor, key: _Tensor, value: _Tensor, pse: _Tensor,
    drop_mask: _Tensor, padding_mask: _Tensor, atten_mask: _Tensor, prefix: _Numbers, actual_seq_qlen: _Numbers,
    actual_seq_kvlen: _Numbers, q_start_idx: _Numbers, kv_start_idx: _Numbers, scale: float, keep_prob: float,
    pre_tokens: int, next_tokens: int, head_num: int, input_layout: str, inner_precise: int, sparse_mode: int,
    pse_type: int, softmax_max: _Tensor, softmax_sum: _Tensor, softmax_out: _Tensor, attention_out: _Tensor, *,
    strict: bool = True, check_content: bool = False) -> _Planned:
    """VarLenScore with pse_type and start indices."""
aclnnFlashAttentionVarLenScoreV2: _Run
def aclnnFlashAttentionVarLenScoreV3GetWorkspaceSize(query: _Tensor, query_rope: _Tensor, key: _Tensor,
    key_rope: _Tensor, value: _Tensor, pse: _Tensor, drop_mask: _Tensor, padding_mask: _Tensor, atten_mask: _Tensor,
    prefix: _Numbers, actual_seq_qlen: _Numbers, actual_seq_kvlen: _Numbers, q_start_idx: _Numbers,
    kv_start_idx: _Numbers, scale: float, keep_prob: float, pre_tokens: int, next_tokens: int, head_num: int,
    input_layout: str, inner_precise: int, sparse_mode: int, pse_type: int, softmax_max: _Tensor,
    softmax_sum: _Tensor, softmax_out: _Tensor, attention_out: _Tensor, *, strict: bool = True,
    check_content: bool = False) -> _Planned:
    """VarLenScoreV2 with rope parts of query and key."""
aclnnFlashAttentionVarLenScoreV3: _Run
def aclnnFlashAttentionVarLenScoreV4GetWorkspaceSize(query: _Tensor, key: _Tensor, value: _Tensor, pse: _Tensor,
    drop_mask: _Tensor, padding_mask: _Tensor, atten_mask: _Tensor, prefix: _Numbers, actual_seq_qlen: _Numbers,
    actual_seq_kvlen: _Numbers, scale: float, keep_prob: float, pre_tokens: int, next_tokens: int, head_num: int,
    input_layout: str, inner_precise: int, sparse_mode: int, softmax_layout: str, softmax_max: _Tensor,
    softmax_sum: _Tensor, softmax_out: _Tensor, attention_out: _Tensor, *, strict: bool = True,
    check_content: bool = False) -> _Planned:
    """VarLenScore with softmax_layout, the order of statistics."""
aclnnFlashAttentionVarLenScoreV4: _Run
def aclnnFlashAttentionVarLenScoreV5GetWorkspaceSize(query: _Tensor, query_rope: _Tensor, key: _Tensor,
    key_rope: _Tensor, value: _Tensor, pse: _Tensor, drop_mask: _Tensor, padding_mask: _Tensor, atten_mask: _Tensor,
    sink: _Tensor, prefix: _Numbers, actual_seq_qlen: _Numbers, actual_seq_kvlen: _Numbers, q_start_idx: _Numbers,
    kv_start_idx: _Numbers, scale: float, keep_prob: float, pre_tokens: int, next_tokens: int, head_num: int,
    input_layout: str, inner_precise: int, sparse_mode: int, pse_type: int, softmax_layout: str, softmax_max: _Tensor,
    softmax_sum: _Tensor, softmax_out: _Tensor, attention_out: _Tensor, *, strict: bool = True,
    check_content: bool = False) -> _Planned:
    """VarLenScoreV3 with sinks and softmax_layout."""
aclnnFlashAttentionVarLenScoreV5: _Run
def aclnnFlashAttentionScoreGradGetWorkspaceSize(query: _Tensor, key: _Tensor, value: _Tensor, dy: _Tensor,
    pse: _Tensor, drop_mask: _Tensor, padding_mask: _Tensor, atten_mask: _Tensor, softmax_max: _Tensor,
    softmax_sum: _Tensor, softmax_in: _Tensor, attention_in: _Tensor, prefix: _Numbers, scale: float,
    keep_prob: float, pre_tokens: int, next_tokens: int, head_num: int, input_layout: str, inner_precise: int,
    sparse_mode: int, dq: _Tensor, dk: _Tensor, dv: _Tensor, dpse: _Tensor, *, strict: bool = True,
    check_content: bool = False) -> _Planned:
    """Gradients of FlashAttentionScore."""
aclnnFlashAttentionScoreGrad: _Run
def aclnnFlashAttentionScoreGradV2GetWorkspaceSize(query: _Tensor, key: _Tensor, value: _Tensor, dy: _Tensor,
    pse: _Tensor, drop_mask: _Tensor, padding_mask: _Tensor, atten_mask: _Tensor, softmax_max: _Tensor,
    softmax_sum: _Tensor, softmax_in: _Tensor, attention_in: _Tensor, prefix: _Numbers, q_start_idx: _Numbers,
    kv_start_idx: _Numbers, scale: float, keep_prob: float, pre_tokens: int, next_tokens: int, head_num: int,
    input_layout: str, inner_precise: int, sparse_mode: int, pse_type: int, dq: _Tensor, dk: _Tensor, dv: _Tensor,
    dpse: _Tensor, *, strict: bool = True, check_content: bool = False) -> _Planned:
    """FlashAttentionScoreGrad with pse_type and start indices."""
aclnnFlashAttentionScoreGradV2: _Run
def aclnnFlashAttentionScoreGradV3GetWorkspaceSize(query: _Tensor, key: _Tensor, value: _Tensor, dy: _Tensor,
    pse: _Tensor, drop_mask: _Tensor, padding_mask: _Tensor, atten_mask: _Tensor, softmax_max: _Tensor,
    softmax_sum: _Tensor, softmax_in: _Tensor, attention_in: _Tensor, sink: _Tensor, prefix: _Numbers,
    q_start_idx: _Numbers, kv_start_idx: _Numbers, scale: float, keep_prob: float, pre_tokens: int, next_tokens: int,
    head_num: int, input_layout: str, inner_precise: int, sparse_mode: int, pse_type: int, dq: _Tensor, dk: _Tensor,
    dv: _Tensor, dpse: _Tensor, dsink: _Tensor, *, strict: bool = True, check_content: bool = False) -> _Planned:
    """FlashAttentionScoreGradV2 with sinks."""
aclnnFlashAttentionScoreGradV3: _Run
def aclnnFlashAttentionUnpaddingScoreGradGetWorkspaceSize(query: _Tensor, key: _Tensor, value: _Tensor, dy: _Tensor,
    pse: _Tensor, drop_mask: _Tensor, padding_mask: _Tensor, atten_mask: _Tensor, softmax_max: _Tensor,
    softmax_sum: _Tensor, softmax_in: _Tensor, attention_in: _Tensor, prefix: _Numbers, actual_seq_qlen: _Numbers,
    actual_seq_kvlen: _Numbers, scale: float, keep_prob: float, pre_tokens: int, next_tokens: int, head_num: int,
    input_layout: str, inner_precise: int, sparse_mode: int, dq: _Tensor, dk: _Tensor, dv: _Tensor, dpse: _Tensor, *,
    strict: bool = True, check_content: bool = False) -> _Planned:
    """Gradients of FlashAttentionVarLenScore."""
aclnnFlashAttentionUnpaddingScoreGrad: _Run
def aclnnFlashAttentionUnpaddingScoreGradV2GetWorkspaceSize(query: _Tensor, key: _Tensor, value: _Tensor, dy: _Tensor,
    pse: _Tensor, drop_mask: _Tensor, padding_mask: _Tensor, atten_mask: _Tensor, softmax_max: _Tensor,
    softmax_sum: _Tensor, softmax_in: _Tensor, attention_in: _Tensor, prefix: _Numbers, actual_seq_qlen: _Numbers,
    actual_seq_kvlen: _Numbers, q_start_idx: _Numbers, kv_start_idx: _Numbers, scale: float, keep_prob: float,
    pre_tokens: int, next_tokens: int, head_num: int, input_layout: str, inner_precise: int, sparse_mode: int,
    pse_type: int, dq: _Tensor, dk: _Tensor, dv: _Tensor, dpse: _Tensor, *, strict: bool = True,
    check_content: bool = False) -> _Planned:
    """UnpaddingScoreGrad with pse_type and start indices."""
aclnnFlashAttentionUnpaddingScoreGradV2: _Run
def aclnnFlashAttentionUnpaddingScoreGradV3GetWorkspaceSize(query: _Tensor, query_rope: _Tensor, key: _Tensor,
    key_rope: _Tensor, value: _Tensor, dy: _Tensor, pse: _Tensor, drop_mask: _Tensor, padding_mask: _Tensor,
    atten_mask: _Tensor, softmax_max: _Tensor, softmax_sum: _Tensor, softmax_in: _Tensor, attention_in: _Tensor,
    prefix: _Numbers, actual_seq_qlen: _Numbers, actual_seq_kvlen: _Numbers, q_start_idx: _Numbers,
    kv_start_idx: _Numbers, scale: float, keep_prob: float, pre_tokens: int, next_tokens: int, head_num: int,
    input_layout: str, inner_precise: int, sparse_mode: int, pse_type: int, dq: _Tensor, dq_rope: _Tensor,
    dk: _Tensor, dk_rope: _Tensor, dv: _Tensor, dpse: _Tensor, *, strict: bool = True,
    check_content: bool = False) -> _Planned:
    """UnpaddingScoreGradV2 with rope parts of query and key."""
aclnnFlashAttentionUnpaddingScoreGradV3: _Run
def aclnnFlashAttentionUnpaddingScoreGradV4GetWorkspaceSize(query: _Tensor, key: _Tensor, value: _Tensor, dy: _Tensor,
    pse: _Tensor, drop_mask: _Tensor, padding_mask: _Tensor, atten_mask: _Tensor, softmax_max: _Tensor,
    softmax_sum: _Tensor, softmax_in: _Tensor, attention_in: _Tensor, prefix: _Numbers, actual_seq_qlen: _Numbers,
    actual_seq_kvlen: _Numbers, scale: float, keep_prob: float, pre_tokens: int, next_tokens: int, head_num: int,
    input_layout: str, inner_precise: int, sparse_mode: int, dq: _Tensor, dk: _Tensor, dv: _Tensor, dpse: _Tensor,
    softmax_layout: str, *, strict: bool = True, check_content: bool = False) -> _Planned:
    """UnpaddingScoreGrad with softmax_layout, the order of statistics."""
aclnnFlashAttentionUnpaddingScoreGradV4: _Run
def aclnnFlashAttentionUnpaddingScoreGradV5GetWorkspaceSize(query: _Tensor, query_rope: _Tensor, key: _Tensor,
    key_rope: _Tensor, value: _Tensor, dy: _Tensor, pse: _Tensor, drop_mask: _Tensor, padding_mask: _Tensor,
    atten_mask: _Tensor, softmax_max: _Tensor, softmax_sum: _Tensor, softmax_in: _Tensor, attention_in: _Tensor,
    sink: _Tensor, prefix: _Numbers, actual_seq_qlen: _Numbers, actual_seq_kvlen: _Numbers, q_start_idx: _Numbers,
    kv_start_idx: _Numbers, scale: float, keep_prob: float, pre_tokens: int, next_tokens: int, head_num: int,
    input_layout: str, inner_precise: int, sparse_mode: int, pse_type: int, softmax_layout: str, dq: _Tensor,
    dq_rope: _Tensor, dk: _Tensor, dk_rope: _Tensor, dv: _Tensor, dpse: _Tensor, dsink: _Tensor, *,
    strict: bool = True, check_content: bool = False) -> _Planned:
    """UnpaddingScoreGradV3 with sinks and softmax_layout."""
aclnnFlashAttentionUnpaddingScoreGradV5: _Run
def aclnnFlashAttentionScoreV4GetWorkspaceSize(query: _Tensor, key: _Tensor, value: _Tensor, pse: _Tensor,
    drop_mask: _Tensor, padding_mask: _Tensor, atten_mask: _Tensor, query_rope: _Tensor, key_rope: _Tensor,
    d_scale_q: _Tensor, d_scale_k: _Tensor, d_scale_v: _Tensor, sink: _Tensor, prefix: _Numbers,
    actual_seq_qlen: _Numbers, actual_seq_kvlen: _Numbers, q_start_idx: _Numbers, kv_start_idx: _Numbers,
    scale: float, keep_prob: float, pre_tokens: int, next_tokens: int, head_num: int, input_layout: str,
    inner_precise: int, sparse_mode: int, out_dtype: int, pse_type: int, softmax_layout: str, seed: int, offset: int,
    softmax_max: _Tensor, softmax_sum: _Tensor, softmax_out: _Tensor, attention_out: _Tensor, *, strict: bool = True,
    check_content: bool = False) -> _Planned:
    """FlashAttentionScoreV3 and VarLenScoreV5 in one, with drawn dropout."""
aclnnFlashAttentionScoreV4: _Run
def aclnnFlashAttentionScoreGradV4GetWorkspaceSize(query: _Tensor, key: _Tensor, value: _Tensor, dy: _Tensor,
    pse: _Tensor, drop_mask: _Tensor, padding_mask: _Tensor, atten_mask: _Tensor, softmax_max: _Tensor,
    softmax_sum: _Tensor, softmax_in: _Tensor, attention_in: _Tensor, sink: _Tensor, query_rope: _Tensor,
    key_rope: _Tensor, d_scale_q: _Tensor, d_scale_k: _Tensor, d_scale_v: _Tensor, d_scale_dy: _Tensor,
    d_scale_o: _Tensor, prefix: _Numbers, actual_seq_qlen: _Numbers, actual_seq_kvlen: _Numbers,
    q_start_idx: _Numbers, kv_start_idx: _Numbers, scale: float, keep_prob: float, pre_tokens: int, next_tokens: int,
    head_num: int, input_layout: str, softmax_layout: str, inner_precise: int, sparse_mode: int, pse_type: int,
    seed: int, offset: int, out_dtype: int, dq: _Tensor, dk: _Tensor, dv: _Tensor, dq_rope: _Tensor, dk_rope: _Tensor,
    dpse: _Tensor, dsink: _Tensor, *, strict: bool = True, check_content: bool = False) -> _Planned:
    """Gradients of FlashAttentionScoreV4."""
aclnnFlashAttentionScoreGradV4: _Run
def aclnnBlockSparseAttentionGetWorkspaceSize(query: _Tensor, key: _Tensor, value: _Tensor,
    block_sparse_mask: _Tensor, atten_mask: _Tensor, block_shape: _Numbers, actual_seq_lengths: _Numbers,
    actual_seq_lengths_kv: _Numbers, block_table: _Tensor, q_input_layout: str, kv_input_layout: str,
    num_key_value_heads: int, mask_type: int, scale_value: float, inner_precise: int, block_size: int,
    pre_tokens: int, next_tokens: int, softmax_lse_flag: int, attention_out: _Tensor, softmax_lse: _Tensor, *,
    strict: bool = True, check_content: bool = False) -> _Planned:
    """Softmax attention of each block of query rows to the blocks of keys that a block mask makes visible."""
aclnnBlockSparseAttention: _Run
def aclnnBlockSparseAttentionV2GetWorkspaceSize(query: _Tensor, key: _Tensor, value: _Tensor,
    block_sparse_mask: _Tensor, atten_mask: _Tensor, block_shape: _Numbers, actual_seq_lengths: _Numbers,
    actual_seq_lengths_kv: _Numbers, block_table: _Tensor, q_dequant_scale: _Tensor, k_dequant_scale: _Tensor,
    v_dequant_scale: _Tensor, q_input_layout: str, kv_input_layout: str, num_key_value_heads: int, mask_type: int,
    scale_value: float, inner_precise: int, block_size: int, pre_tokens: int, next_tokens: int, softmax_lse_flag: int,
    attention_out: _Tensor, softmax_lse: _Tensor, *, strict: bool = True, check_content: bool = False) -> _Planned:
    """BlockSparseAttention with scales of fp8 tensors, and layout BSND."""
aclnnBlockSparseAttentionV2: _Run
def aclnnBlockSparseAttentionV3GetWorkspaceSize(query: _Tensor, key: _Tensor, value: _Tensor,
    block_sparse_mask: _Tensor, atten_mask: _Tensor, block_shape: _Numbers, actual_seq_lengths: _Numbers,
    actual_seq_lengths_kv: _Numbers, block_table: _Tensor, q_dequant_scale: _Tensor, k_dequant_scale: _Tensor,
    v_dequant_scale: _Tensor, p_quant_scale: _Tensor, q_input_layout: str, kv_input_layout: str,
    num_key_value_heads: int, mask_type: int, scale_value: float, inner_precise: int, block_size: int,
    pre_tokens: int, next_tokens: int, softmax_lse_flag: int, quant_mode: int, dst_type_max: float,
    attention_out: _Tensor, softmax_lse: _Tensor, *, strict: bool = True, check_content: bool = False) -> _Planned:
    """BlockSparseAttentionV2 with quant_mode, dst_type_max and p_quant_scale."""
aclnnBlockSparseAttentionV3: _Run
def aclnnBlockSparseAttentionGradGetWorkspaceSize(dout: _Tensor, query: _Tensor, key: _Tensor, value: _Tensor,
    attention_out: _Tensor, softmax_lse: _Tensor, block_sparse_mask: _Tensor, atten_mask: _Tensor,
    block_shape: _Numbers, actual_seq_lengths: _Numbers, actual_seq_lengths_kv: _Numbers, q_input_layout: str,
    kv_input_layout: str, num_key_value_heads: int, mask_type: int, scale_value: float, pre_tokens: int,
    next_tokens: int, dq: _Tensor, dk: _Tensor, dv: _Tensor, *, strict: bool = True,
    check_content: bool = False) -> _Planned:
    """Gradients of BlockSparseAttention, from its output and its softmax_lse."""
aclnnBlockSparseAttentionGrad: _Run
def aclnnIncreFlashAttentionGetWorkspaceSize(query: _Tensor, key: _Tensors, value: _Tensors, pse_shift: _Tensor,
    atten_mask: _Tensor, actual_seq_lengths: _Numbers, num_heads: int, scale_value: float, input_layout: str,
    num_key_value_heads: int, attention_out: _Tensor, *, strict: bool = True,
    check_content: bool = False) -> _Planned:
    """Softmax attention of one new token per sequence to the keys in its cache."""
aclnnIncreFlashAttention: _Run
def aclnnIncreFlashAttentionV2GetWorkspaceSize(query: _Tensor, key: _Tensors, value: _Tensors, pse_shift: _Tensor,
    atten_mask: _Tensor, actual_seq_lengths: _Numbers, dequant_scale1: _Tensor, quant_scale1: _Tensor,
    dequant_scale2: _Tensor, quant_scale2: _Tensor, quant_offset2: _Tensor, num_heads: int, scale_value: float,
    input_layout: str, num_key_value_heads: int, attention_out: _Tensor, *, strict: bool = True,
    check_content: bool = False) -> _Planned:
    """IncreFlashAttention with int8 output."""
aclnnIncreFlashAttentionV2: _Run
def aclnnIncreFlashAttentionV3GetWorkspaceSize(query: _Tensor, key: _Tensors, value: _Tensors, pse_shift: _Tensor,
    atten_mask: _Tensor, actual_seq_lengths: _Numbers, dequant_scale1: _Tensor, quant_scale1: _Tensor,
    dequant_scale2: _Tensor, quant_scale2: _Tensor, quant_offset2: _Tensor, antiquant_scale: _Tensor,
    antiquant_offset: _Tensor, block_table: _Tensor, num_heads: int, scale_value: float, input_layout: str,
    num_key_value_heads: int, block_size: int, inner_precise: int, attention_out: _Tensor, *, strict: bool = True,
    check_content: bool = False) -> _Planned:
    """IncreFlashAttentionV2 with pse_shift, an int8 cache and pages."""
aclnnIncreFlashAttentionV3: _Run
def aclnnIncreFlashAttentionV4GetWorkspaceSize(query: _Tensor, key: _Tensors, value: _Tensors, pse_shift: _Tensor,
    atten_mask: _Tensor, actual_seq_lengths: _Numbers, dequant_scale1: _Tensor, quant_scale1: _Tensor,
    dequant_scale2: _Tensor, quant_scale2: _Tensor, quant_offset2: _Tensor, antiquant_scale: _Tensor,
    antiquant_offset: _Tensor, block_table: _Tensor, kv_padding_size: _Numbers, num_heads: int, scale_value: float,
    input_layout: str, num_key_value_heads: int, block_size: int, inner_precise: int, attention_out: _Tensor, *,
    strict: bool = True, check_content: bool = False) -> _Planned:
    """IncreFlashAttentionV3 with left padding."""
aclnnIncreFlashAttentionV4: _Run
def aclnnPromptFlashAttentionGetWorkspaceSize(query: _Tensor, key: _Tensor, value: _Tensor, pse_shift: _Tensor,
    atten_mask: _Tensor, actual_seq_lengths: _Numbers, num_heads: int, scale_value: float, pre_tokens: int,
    next_tokens: int, input_layout: str, num_key_value_heads: int, attention_out: _Tensor, *, strict: bool = True,
    check_content: bool = False) -> _Planned:
    """Softmax attention of prompts."""
aclnnPromptFlashAttention: _Run
def aclnnPromptFlashAttentionV2GetWorkspaceSize(query: _Tensor, key: _Tensor, value: _Tensor, pse_shift: _Tensor,
    atten_mask: _Tensor, actual_seq_lengths: _Numbers, actual_seq_lengths_kv: _Numbers, dequant_scale1: _Tensor,
    quant_scale1: _Tensor, dequant_scale2: _Tensor, quant_scale2: _Tensor, quant_offset2: _Tensor, num_heads: int,
    scale_value: float, pre_tokens: int, next_tokens: int, input_layout: str, num_key_value_heads: int,
    sparse_mode: int, attention_out: _Tensor, *, strict: bool = True, check_content: bool = False) -> _Planned:
    """PromptFlashAttention with key lengths, sparse modes, int8 queries and int8 output."""
aclnnPromptFlashAttentionV2: _Run
def aclnnPromptFlashAttentionV3GetWorkspaceSize(query: _Tensor, key: _Tensor, value: _Tensor, pse_shift: _Tensor,
    atten_mask: _Tensor, actual_seq_lengths: _Numbers, actual_seq_lengths_kv: _Numbers, dequant_scale1: _Tensor,
    quant_scale1: _Tensor, dequant_scale2: _Tensor, quant_scale2: _Tensor, quant_offset2: _Tensor, num_heads: int,
    scale_value: float, pre_tokens: int, next_tokens: int, input_layout: str, num_key_value_heads: int,
    sparse_mode: int, inner_precise: int, attention_out: _Tensor, *, strict: bool = True,
    check_content: bool = False) -> _Planned:
    """PromptFlashAttentionV2 with pse_shift, inner_precise and packed rows."""
aclnnPromptFlashAttentionV3: _Run
def aclnnFusedInferAttentionScoreGetWorkspaceSize(query: _Tensor, key: _Tensors, value: _Tensors, pse_shift: _Tensor,
    atten_mask: _Tensor, actual_seq_lengths: _Numbers, actual_seq_lengths_kv: _Numbers, dequant_scale1: _Tensor,
    quant_scale1: _Tensor, dequant_scale2: _Tensor, quant_scale2: _Tensor, quant_offset2: _Tensor,
    antiquant_scale: _Tensor, antiquant_offset: _Tensor, block_table: _Tensor, query_padding_size: _Numbers,
    kv_padding_size: _Numbers, num_heads: int, scale_value: float, pre_tokens: int, next_tokens: int,
    input_layout: str, num_key_value_heads: int, sparse_mode: int, inner_precise: int, block_size: int,
    antiquant_mode: int, softmax_lse_flag: bool, attention_out: _Tensor, softmax_lse: _Tensor, *, strict: bool = True,
    check_content: bool = False) -> _Planned:
    """Softmax attention of prompts and of new tokens to the keys of a cache: padded, packed, a list of tensors, or
    pages; floats or integers."""
aclnnFusedInferAttentionScore: _Run
def aclnnFusedInferAttentionScoreV2GetWorkspaceSize(query: _Tensor, key: _Tensors, value: _Tensors,
    pse_shift: _Tensor, atten_mask: _Tensor, actual_seq_lengths: _Numbers, actual_seq_lengths_kv: _Numbers,
    dequant_scale1: _Tensor, quant_scale1: _Tensor, dequant_scale2: _Tensor, quant_scale2: _Tensor,
    quant_offset2: _Tensor, antiquant_scale: _Tensor, antiquant_offset: _Tensor, block_table: _Tensor,
    query_padding_size: _Numbers, kv_padding_size: _Numbers, key_antiquant_scale: _Tensor,
    key_antiquant_offset: _Tensor, value_antiquant_scale: _Tensor, value_antiquant_offset: _Tensor,
    key_shared_prefix: _Tensor, value_shared_prefix: _Tensor, actual_shared_prefix_len: _Numbers, num_heads: int,
    scale_value: float, pre_tokens: int, next_tokens: int, input_layout: str, num_key_value_heads: int,
    sparse_mode: int, inner_precise: int, block_size: int, antiquant_mode: int, softmax_lse_flag: bool,
    key_antiquant_mode: int, value_antiquant_mode: int, attention_out: _Tensor, softmax_lse: _Tensor, *,
    strict: bool = True, check_content: bool = False) -> _Planned:
    """FusedInferAttentionScore with separate scales of keys and of values, and a shared prefix."""
aclnnFusedInferAttentionScoreV2: _Run
def aclnnFusedInferAttentionScoreV3GetWorkspaceSize(query: _Tensor, key: _Tensors, value: _Tensors,
    pse_shift: _Tensor, atten_mask: _Tensor, actual_seq_lengths: _Numbers, actual_seq_lengths_kv: _Numbers,
    dequant_scale1: _Tensor, quant_scale1: _Tensor, dequant_scale2: _Tensor, quant_scale2: _Tensor,
    quant_offset2: _Tensor, antiquant_scale: _Tensor, antiquant_offset: _Tensor, block_table: _Tensor,
    query_padding_size: _Numbers, kv_padding_size: _Numbers, key_antiquant_scale: _Tensor,
    key_antiquant_offset: _Tensor, value_antiquant_scale: _Tensor, value_antiquant_offset: _Tensor,
    key_shared_prefix: _Tensor, value_shared_prefix: _Tensor, actual_shared_prefix_len: _Numbers, query_rope: _Tensor,
    key_rope: _Tensor, key_rope_antiquant_scale: _Tensor, num_heads: int, scale_value: float, pre_tokens: int,
    next_tokens: int, input_layout: str, num_key_value_heads: int, sparse_mode: int, inner_precise: int,
    block_size: int, antiquant_mode: int, softmax_lse_flag: bool, key_antiquant_mode: int, value_antiquant_mode: int,
    attention_out: _Tensor, softmax_lse: _Tensor, *, strict: bool = True, check_content: bool = False) -> _Planned:
    """FusedInferAttentionScoreV2 with rope parts as separate tensors."""
aclnnFusedInferAttentionScoreV3: _Run
def aclnnFusedInferAttentionScoreV4GetWorkspaceSize(query: _Tensor, key: _Tensors, value: _Tensors,
    pse_shift: _Tensor, atten_mask: _Tensor, actual_seq_lengths: _Numbers, actual_seq_lengths_kv: _Numbers,
    dequant_scale1: _Tensor, quant_scale1: _Tensor, dequant_scale2: _Tensor, quant_scale2: _Tensor,
    quant_offset2: _Tensor, antiquant_scale: _Tensor, antiquant_offset: _Tensor, block_table: _Tensor,
    query_padding_size: _Numbers, kv_padding_size: _Numbers, key_antiquant_scale: _Tensor,
    key_antiquant_offset: _Tensor, value_antiquant_scale: _Tensor, value_antiquant_offset: _Tensor,
    key_shared_prefix: _Tensor, value_shared_prefix: _Tensor, actual_shared_prefix_len: _Numbers, query_rope: _Tensor,
    key_rope: _Tensor, key_rope_antiquant_scale: _Tensor, dequant_scale_query: _Tensor, learnable_sink: _Tensor,
    num_heads: int, scale_value: float, pre_tokens: int, next_tokens: int, input_layout: str,
    num_key_value_heads: int, sparse_mode: int, inner_precise: int, block_size: int, antiquant_mode: int,
    softmax_lse_flag: bool, key_antiquant_mode: int, value_antiquant_mode: int, query_quant_mode: int,
    attention_out: _Tensor, softmax_lse: _Tensor, *, strict: bool = True, check_content: bool = False) -> _Planned:
    """FusedInferAttentionScoreV3 with a scale per query row, and sinks."""
aclnnFusedInferAttentionScoreV4: _Run
def aclnnFusedInferAttentionScoreV5GetWorkspaceSize(query: _Tensor, key: _Tensors, value: _Tensors,
    pse_shift: _Tensor, atten_mask: _Tensor, actual_seq_lengths: _Numbers, actual_seq_lengths_kv: _Numbers,
    dequant_scale1: _Tensor, quant_scale1: _Tensor, dequant_scale2: _Tensor, quant_scale2: _Tensor,
    quant_offset2: _Tensor, antiquant_scale: _Tensor, antiquant_offset: _Tensor, block_table: _Tensor,
    query_padding_size: _Numbers, kv_padding_size: _Numbers, key_antiquant_scale: _Tensor,
    key_antiquant_offset: _Tensor, value_antiquant_scale: _Tensor, value_antiquant_offset: _Tensor,
    key_shared_prefix: _Tensor, value_shared_prefix: _Tensor, actual_shared_prefix_len: _Numbers, query_rope: _Tensor,
    key_rope: _Tensor, key_rope_antiquant_scale: _Tensor, dequant_scale_query: _Tensor, learnable_sink: _Tensor,
    q_start_idx: _Numbers, kv_start_idx: _Numbers, num_heads: int, scale_value: float, pre_tokens: int,
    next_tokens: int, input_layout: str, num_key_value_heads: int, sparse_mode: int, inner_precise: int,
    block_size: int, antiquant_mode: int, softmax_lse_flag: bool, key_antiquant_mode: int, value_antiquant_mode: int,
    query_quant_mode: int, pse_type: int, attention_out: _Tensor, softmax_lse: _Tensor, *, strict: bool = True,
    check_content: bool = False) -> _Planned:
    """FusedInferAttentionScoreV4 on Ascend 950; forms that only Ascend 950 has are not computed."""
aclnnFusedInferAttentionScoreV5: _Run
def aclnnLightningIndexerGetWorkspaceSize(query: _Tensor, key: _Tensor, weights: _Tensor,
    actual_seq_lengths_query: _Numbers, actual_seq_lengths_key: _Numbers, block_table: _Tensor, layout_query: str,
    layout_key: str, sparse_count: int, sparse_mode: int, pre_tokens: int, next_tokens: int, return_values: bool,
    sparse_indices_out: _Tensor, sparse_values_out: _Tensor, *, strict: bool = True,
    check_content: bool = False) -> _Planned:
    """Selects the keys with the highest scores for each row; a score is a weighted sum of ReLU(q . k) over heads."""
aclnnLightningIndexer: _Run
def aclnnLightningIndexerGradGetWorkspaceSize(query: _Tensor, key: _Tensor, dy: _Tensor, sparse_indices: _Tensor,
    weights: _Tensor, actual_seq_lengths_query: _Numbers, actual_seq_lengths_key: _Numbers, head_num: int,
    layout: str, sparse_mode: int, pre_tokens: int, next_tokens: int, deterministic: bool, dquery: _Tensor,
    dkey: _Tensor, dweights: _Tensor, *, strict: bool = True, check_content: bool = False) -> _Planned:
    """Gradients of the values that LightningIndexer returned, for padded or packed keys."""
aclnnLightningIndexerGrad: _Run
def aclnnLightningIndexerV2GetWorkspaceSize(q: _Tensor, k: _Tensor, w: _Tensor, cu_seqlens_q: _Numbers,
    cu_seqlens_k: _Numbers, seqused_q: _Numbers, seqused_k: _Numbers, cmp_residual_k: _Numbers, block_table: _Tensor,
    output_idx_offset: _Tensor, metadata: _Tensor, topk: int, max_seqlen_q: int, layout_q: str, layout_k: str,
    mask_mode: int, cmp_ratio: int, return_value: int, sparse_indices: _Tensor, sparse_values: _Tensor, *,
    strict: bool = True, check_content: bool = False) -> _Planned:
    """Selects the keys with the highest scores for each row; a key may stand for several tokens."""
aclnnLightningIndexerV2: _Run
def aclnnSparseFlashAttentionGetWorkspaceSize(query: _Tensor, key: _Tensor, value: _Tensor, sparse_indices: _Tensor,
    block_table: _Tensor, actual_seq_lengths_query: _Numbers, actual_seq_lengths_kv: _Numbers, query_rope: _Tensor,
    key_rope: _Tensor, scale_value: float, sparse_block_size: int, layout_query: str, layout_kv: str,
    sparse_mode: int, pre_tokens: int, next_tokens: int, attention_mode: int, return_softmax_lse: bool,
    attention_out: _Tensor, softmax_max: _Tensor, softmax_sum: _Tensor, *, strict: bool = True,
    check_content: bool = False) -> _Planned:
    """Softmax attention over the blocks of keys that every row selects."""
aclnnSparseFlashAttention: _Run
def aclnnSparseFlashAttentionGradGetWorkspaceSize(query: _Tensor, key: _Tensor, value: _Tensor,
    sparse_indices: _Tensor, d_out: _Tensor, out: _Tensor, softmax_max: _Tensor, softmax_sum: _Tensor,
    actual_seq_lengths_query: _Numbers, actual_seq_lengths_kv: _Numbers, query_rope: _Tensor, key_rope: _Tensor,
    scale_value: float, sparse_block_size: int, layout: str, sparse_mode: int, pre_tokens: int, next_tokens: int,
    deterministic: bool, dquery: _Tensor, dkey: _Tensor, dvalue: _Tensor, dquery_rope: _Tensor, dkey_rope: _Tensor, *,
    strict: bool = True, check_content: bool = False) -> _Planned:
    """Gradients of SparseFlashAttention, padded or packed."""
aclnnSparseFlashAttentionGrad: _Run
def aclnnSparseFlashMlaGetWorkspaceSize(q: _Tensor, ori_kv: _Tensor, cmp_kv: _Tensor, ori_sparse_indices: _Tensor,
    cmp_sparse_indices: _Tensor, ori_block_table: _Tensor, cmp_block_table: _Tensor, cu_seqlens_q: _Numbers,
    cu_seqlens_ori_kv: _Numbers, cu_seqlens_cmp_kv: _Numbers, seqused_q: _Numbers, seqused_ori_kv: _Numbers,
    seqused_cmp_kv: _Numbers, cmp_residual_kv: _Numbers, ori_topk_length: _Tensor, cmp_topk_length: _Tensor,
    sinks: _Tensor, metadata: _Tensor, softmax_scale: float, cmp_ratio: int, ori_mask_mode: int, cmp_mask_mode: int,
    ori_win_left: int, ori_win_right: int, layout_q: str, layout_kv: str, topk_value_mode: int,
    return_softmax_lse: bool, attn_out: _Tensor, softmax_lse: _Tensor, *, strict: bool = True,
    check_content: bool = False) -> _Planned:
    """One softmax attention over a window of keys and over compressed keys; keys are also the values."""
aclnnSparseFlashMla: _Run
def aclnnSparseFlashMlaGradGetWorkspaceSize(query: _Tensor, dout: _Tensor, out: _Tensor, lse: _Tensor,
    ori_kv: _Tensor, cmp_kv: _Tensor, ori_sparse_indices: _Tensor, cmp_sparse_indices: _Tensor,
    cu_seqlens_q: _Numbers, cu_seqlens_ori_kv: _Numbers, cu_seqlens_cmp_kv: _Numbers, seqused_q: _Numbers,
    seqused_ori_kv: _Numbers, seqused_cmp_kv: _Numbers, cmp_residual_kv: _Numbers, ori_topk_length: _Tensor,
    cmp_topk_length: _Tensor, sinks: _Tensor, metadata: _Tensor, scale_value: float, cmp_ratio: int,
    ori_mask_mode: int, cmp_mask_mode: int, ori_win_left: int, ori_win_right: int, layout_q: str, layout_kv: str,
    dquery: _Tensor, dori_kv: _Tensor, dcmp_kv: _Tensor, dsinks: _Tensor, ori_softmax_l1_norm: _Tensor,
    cmp_softmax_l1_norm: _Tensor, *, strict: bool = True, check_content: bool = False) -> _Planned:
    """Gradients of SparseFlashMla, from its output and its softmax_lse."""
aclnnSparseFlashMlaGrad: _Run
def aclnnSparseFlashMlaMetadataGetWorkspaceSize(cu_seqlens_q: _Numbers, cu_seqlens_ori_kv: _Numbers,
    cu_seqlens_cmp_kv: _Numbers, seqused_q: _Numbers, seqused_ori_kv: _Numbers, seqused_cmp_kv: _Numbers,
    cmp_residual_kv: _Numbers, ori_topk_length: _Tensor, cmp_topk_length: _Tensor, num_heads_q: int,
    num_heads_kv: int, head_dim: int, batch_size: int, max_seqlen_q: int, max_seqlen_ori_kv: int,
    max_seqlen_cmp_kv: int, ori_topk: int, cmp_topk: int, cmp_ratio: int, ori_mask_mode: int, cmp_mask_mode: int,
    ori_win_left: int, ori_win_right: int, layout_q: str, layout_kv: str, has_ori_kv: bool, has_cmp_kv: bool,
    meta_data: _Tensor, *, strict: bool = True, check_content: bool = False) -> _Planned:
    """Metadata of SparseFlashMla: zeros, because back ends here divide the work themselves."""
aclnnSparseFlashMlaMetadata: _Run
def aclnnSparseFlashMlaGradMetadataGetWorkspaceSize(cu_seqlens_q: _Numbers, cu_seqlens_ori_kv: _Numbers,
    cu_seqlens_cmp_kv: _Numbers, seqused_q: _Numbers, seqused_ori_kv: _Numbers, seqused_cmp_kv: _Numbers,
    cmp_residual_kv: _Numbers, ori_topk_length: _Tensor, cmp_topk_length: _Tensor, num_heads_q: int,
    num_heads_kv: int, head_dim: int, batch_size: int, max_seqlen_q: int, max_seqlen_ori_kv: int,
    max_seqlen_cmp_kv: int, ori_topk: int, cmp_topk: int, cmp_ratio: int, ori_mask_mode: int, cmp_mask_mode: int,
    ori_win_left: int, ori_win_right: int, layout_q: str, layout_kv: str, has_ori_kv: bool, has_cmp_kv: bool,
    meta_data: _Tensor, *, strict: bool = True, check_content: bool = False) -> _Planned:
    """Metadata of SparseFlashMlaGrad: zeros, because back ends here divide the work themselves."""
aclnnSparseFlashMlaGradMetadata: _Run
def aclnnSparseFlashMlaSoftmaxL1NormGetWorkspaceSize(q: _Tensor, k: _Tensor, softmax_lse: _Tensor,
    sparse_indices: _Tensor, cu_seqlens_q: _Numbers, cu_seqlens_k: _Numbers, seqused_q: _Numbers, seqused_k: _Numbers,
    cmp_residual_k: _Numbers, topk_length: _Tensor, metadata: _Tensor, softmax_scale: float, max_seqlen_k: int,
    cmp_ratio: int, mask_mode: int, layout_q: str, layout_k: str, out: _Tensor, *, strict: bool = True,
    check_content: bool = False) -> _Planned:
    """Probabilities of compressed keys in SparseFlashMla's softmax, a mean over heads."""
aclnnSparseFlashMlaSoftmaxL1Norm: _Run
def aclnnSparseFlashMlaSoftmaxL1NormMetadataGetWorkspaceSize(cu_seqlens_q: _Numbers, cu_seqlens_k: _Numbers,
    seqused_q: _Numbers, seqused_k: _Numbers, cmp_residual_k: _Numbers, topk_length: _Tensor, num_heads_q: int,
    num_heads_k: int, head_dim: int, batch_size: int, max_seqlen_q: int, max_seqlen_k: int, topk: int, layout_q: str,
    layout_k: str, mask_mode: int, cmp_ratio: int, meta_data: _Tensor, *, strict: bool = True,
    check_content: bool = False) -> _Planned:
    """Metadata of SparseFlashMlaSoftmaxL1Norm: zeros, because back ends here divide the work themselves."""
aclnnSparseFlashMlaSoftmaxL1NormMetadata: _Run
def aclnnCompressorGetWorkspaceSize(x: _Tensor, wkv: _Tensor, wgate: _Tensor, state_cache: _Tensor, ape: _Tensor,
    state_block_table: _Tensor, cu_seqlens: _Numbers, seqused: _Numbers, start_pos: _Numbers, cmp_ratio: int,
    coff: int, cache_mode: int, state_cache_stride_dim0: int, grad_enabled: bool, cmp_kv: _Tensor,
    softmax_score: _Tensor, kv: _Tensor, *, strict: bool = True, check_content: bool = False) -> _Planned:
    """Projects rows to keys and gates, and pools every window of cmp_ratio rows to one compressed key."""
aclnnCompressor: _Run
def aclnnCompressorGradGetWorkspaceSize(x: _Tensor, wkv: _Tensor, wgate: _Tensor, dcmp_kv: _Tensor,
    softmax_score: _Tensor, kv: _Tensor, cu_seqlens: _Numbers, seqused: _Numbers, start_pos: _Numbers, cmp_ratio: int,
    coff: int, dx: _Tensor, dwkv: _Tensor, dwgate: _Tensor, dape: _Tensor, *, strict: bool = True,
    check_content: bool = False) -> _Planned:
    """Gradients of Compressor, from the rows that it saved."""
aclnnCompressorGrad: _Run
def aclnnSparseLightningIndexerGradKLLossGetWorkspaceSize(query: _Tensor, key: _Tensor, query_index: _Tensor,
    key_index: _Tensor, weights: _Tensor, sparse_indices: _Tensor, softmax_max: _Tensor, softmax_sum: _Tensor,
    query_rope: _Tensor, key_rope: _Tensor, actual_seq_lengths_query: _Numbers, actual_seq_lengths_key: _Numbers,
    scale_value: float, layout: str, sparse_mode: int, pre_tokens: int, next_tokens: int, deterministic: bool,
    dquery_index: _Tensor, dkey_index: _Tensor, dweights: _Tensor, loss: _Tensor, *, strict: bool = True,
    check_content: bool = False) -> _Planned:
    """Kullback-Leibler divergence of the indexer's distribution over the selected keys from the attention's, and its
    gradients."""
aclnnSparseLightningIndexerGradKLLoss: _Run
def aclnnDenseLightningIndexerGradKLLossGetWorkspaceSize(query: _Tensor, key: _Tensor, query_index: _Tensor,
    key_index: _Tensor, weights: _Tensor, softmax_max: _Tensor, softmax_sum: _Tensor, softmax_max_index: _Tensor,
    softmax_sum_index: _Tensor, query_rope: _Tensor, key_rope: _Tensor, actual_seq_lengths_query: _Numbers,
    actual_seq_lengths_key: _Numbers, scale_value: float, layout: str, sparse_mode: int, pre_tokens: int,
    next_tokens: int, dquery_index: _Tensor, dkey_index: _Tensor, dweights: _Tensor, loss: _Tensor, *,
    strict: bool = True, check_content: bool = False) -> _Planned:
    """Kullback-Leibler divergence of the indexer's distribution over all keys from the attention's, and its
    gradients."""
aclnnDenseLightningIndexerGradKLLoss: _Run
def aclnnDenseLightningIndexerSoftmaxLseGetWorkspaceSize(query_index: _Tensor, key_index: _Tensor, weight: _Tensor,
    actual_seq_lengths_query: _Numbers, actual_seq_lengths_key: _Numbers, layout: str, sparse_mode: int,
    pre_tokens: int, next_tokens: int, softmax_max: _Tensor, softmax_sum: _Tensor, *, strict: bool = True,
    check_content: bool = False) -> _Planned:
    """The softmax statistics of an indexer's scores over all keys of a row."""
aclnnDenseLightningIndexerSoftmaxLse: _Run
def aclnnSparseLightningIndexerKLLossGradGetWorkspaceSize(q: _Tensor, k: _Tensor, w: _Tensor, sparse_indices: _Tensor,
    attn_softmax_l1_norm: _Tensor, cu_seqlens_q: _Numbers, cu_seqlens_k: _Numbers, seqused_q: _Numbers,
    seqused_k: _Numbers, cmp_residual_k: _Numbers, metadata: _Tensor, layout_q: str, layout_k: str, mask_mode: int,
    cmp_ratio: int, dq: _Tensor, dk: _Tensor, dw: _Tensor, softmax_out: _Tensor, *, strict: bool = True,
    check_content: bool = False) -> _Planned:
    """Gradients of the Kullback-Leibler divergence of the indexer's distribution over selected keys from a target."""
aclnnSparseLightningIndexerKLLossGrad: _Run
def aclnnDenseLightningIndexerKLLossGradGetWorkspaceSize(q: _Tensor, k: _Tensor, w: _Tensor,
    attn_softmax_l1_norm: _Tensor, softmax_lse: _Tensor, cu_seqlens_q: _Numbers, cu_seqlens_k: _Numbers,
    seqused_q: _Numbers, seqused_k: _Numbers, cmp_residual_k: _Numbers, metadata: _Tensor, layout_q: str,
    layout_k: str, mask_mode: int, cmp_ratio: int, dq: _Tensor, dk: _Tensor, dw: _Tensor, softmax_out: _Tensor, *,
    strict: bool = True, check_content: bool = False) -> _Planned:
    """Gradients of the Kullback-Leibler divergence of the indexer's distribution over all keys from a target."""
aclnnDenseLightningIndexerKLLossGrad: _Run
def aclnnDenseLightningIndexerSoftmaxLseV2GetWorkspaceSize(query_index: _Tensor, key_index: _Tensor, weight: _Tensor,
    cu_seqlens_q: _Numbers, cu_seqlens_k: _Numbers, seqused_q: _Numbers, seqused_k: _Numbers,
    cmp_residual_k: _Numbers, metadata: _Tensor, layout_q: str, layout_k: str, mask_mode: int, cmp_ratio: int,
    softmax_lse: _Tensor, *, strict: bool = True, check_content: bool = False) -> _Planned:
    """The log-sum-exp of an indexer's scores over all keys of a row."""
aclnnDenseLightningIndexerSoftmaxLseV2: _Run
def aclnnSparseLightningIndexerKLLossGradMetadataGetWorkspaceSize(cu_seqlens_q: _Numbers, cu_seqlens_k: _Numbers,
    seqused_q: _Numbers, seqused_k: _Numbers, cmp_residual_k: _Numbers, batch_size: int, max_seqlen_q: int,
    max_seqlen_k: int, num_heads_q: int, num_heads_k: int, head_dim: int, topk: int, layout_q: str, layout_k: str,
    mask_mode: int, cmp_ratio: int, meta_data: _Tensor, *, strict: bool = True,
    check_content: bool = False) -> _Planned:
    """Metadata of SparseLightningIndexerKLLossGrad: zeros, because back ends here divide the work themselves."""
aclnnSparseLightningIndexerKLLossGradMetadata: _Run
def aclnnDenseLightningIndexerKLLossGradMetadataGetWorkspaceSize(cu_seqlens_q: _Numbers, cu_seqlens_k: _Numbers,
    seqused_q: _Numbers, seqused_k: _Numbers, cmp_residual_k: _Numbers, batch_size: int, max_seqlen_q: int,
    max_seqlen_k: int, num_heads_q: int, num_heads_k: int, head_dim: int, layout_q: str, layout_k: str,
    mask_mode: int, cmp_ratio: int, meta_data: _Tensor, *, strict: bool = True,
    check_content: bool = False) -> _Planned:
    """Metadata of DenseLightningIndexerKLLossGrad: zeros, because back ends here divide the work themselves."""
aclnnDenseLightningIndexerKLLossGradMetadata: _Run
def aclnnDenseLightningIndexerSoftmaxLseV2MetadataGetWorkspaceSize(cu_seqlens_q: _Numbers, cu_seqlens_k: _Numbers,
    seqused_q: _Numbers, seqused_k: _Numbers, cmp_residual_k: _Numbers, batch_size: int, max_seqlen_q: int,
    max_seqlen_k: int, num_heads_q: int, num_heads_k: int, head_dim: int, layout_q: str, layout_k: str,
    mask_mode: int, cmp_ratio: int, meta_data: _Tensor, *, strict: bool = True,
    check_content: bool = False) -> _Planned:
    """Metadata of DenseLightningIndexerSoftmaxLseV2: zeros, because back ends here divide the work themselves."""
aclnnDenseLightningIndexerSoftmaxLseV2Metadata: _Run

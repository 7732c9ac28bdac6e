"""The functions of aclnn. Written by `python -m codegen`; `fusion-attention ops NAME` explains the parameters."""

from collections.abc import Sequence
from typing import Any, Protocol

from fusion_attention import acl

class _Run(Protocol):
    """Phase 2: runs what phase 1 planned, into its output tensors, and returns 0 or a code."""

    def __call__(
        self, workspace: Any, workspace_size: int, executor: acl.Executor | None, stream: acl.Stream | None
    ) -> int: ...

def aclnnFlashAttentionScoreGetWorkspaceSize(
    query: acl.Tensor | None, key: acl.Tensor | None, value: acl.Tensor | None, pse: acl.Tensor | None,
    drop_mask: acl.Tensor | None, padding_mask: acl.Tensor | None, atten_mask: acl.Tensor | None,
    prefix: acl.IntArray | acl.Tensor | Sequence[int] | None, scale: float, keep_prob: float, pre_tokens: int,
    next_tokens: int, head_num: int, input_layout: str, inner_precise: int, sparse_mode: int,
    softmax_max: acl.Tensor | None, softmax_sum: acl.Tensor | None, softmax_out: acl.Tensor | None,
    attention_out: acl.Tensor | None, *, strict: bool = True, check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """Attention for training, forward, padded layouts. Phase 1: checks, plans, and says how much workspace phase 2
    needs."""

aclnnFlashAttentionScore: _Run

def aclnnFlashAttentionScoreV2GetWorkspaceSize(
    query: acl.Tensor | None, key: acl.Tensor | None, value: acl.Tensor | None, pse: acl.Tensor | None,
    drop_mask: acl.Tensor | None, padding_mask: acl.Tensor | None, atten_mask: acl.Tensor | None,
    prefix: acl.IntArray | acl.Tensor | Sequence[int] | None,
    q_start_idx: acl.IntArray | acl.Tensor | Sequence[int] | None,
    kv_start_idx: acl.IntArray | acl.Tensor | Sequence[int] | None, scale: float, keep_prob: float, pre_tokens: int,
    next_tokens: int, head_num: int, input_layout: str, inner_precise: int, sparse_mode: int, pse_type: int,
    softmax_max: acl.Tensor | None, softmax_sum: acl.Tensor | None, softmax_out: acl.Tensor | None,
    attention_out: acl.Tensor | None, *, strict: bool = True, check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """FlashAttentionScore with pse_type and start indices. Phase 1: checks, plans, and says how much workspace phase
    2 needs."""

aclnnFlashAttentionScoreV2: _Run

def aclnnFlashAttentionScoreV3GetWorkspaceSize(
    query: acl.Tensor | None, key: acl.Tensor | None, value: acl.Tensor | None, pse: acl.Tensor | None,
    drop_mask: acl.Tensor | None, padding_mask: acl.Tensor | None, atten_mask: acl.Tensor | None,
    sink: acl.Tensor | None, prefix: acl.IntArray | acl.Tensor | Sequence[int] | None,
    q_start_idx: acl.IntArray | acl.Tensor | Sequence[int] | None,
    kv_start_idx: acl.IntArray | acl.Tensor | Sequence[int] | None, scale: float, keep_prob: float, pre_tokens: int,
    next_tokens: int, head_num: int, input_layout: str, inner_precise: int, sparse_mode: int, pse_type: int,
    softmax_max: acl.Tensor | None, softmax_sum: acl.Tensor | None, softmax_out: acl.Tensor | None,
    attention_out: acl.Tensor | None, *, strict: bool = True, check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """FlashAttentionScoreV2 with sinks. Phase 1: checks, plans, and says how much workspace phase 2 needs."""

aclnnFlashAttentionScoreV3: _Run

def aclnnFlashAttentionVarLenScoreGetWorkspaceSize(
    query: acl.Tensor | None, key: acl.Tensor | None, value: acl.Tensor | None, pse: acl.Tensor | None,
    drop_mask: acl.Tensor | None, padding_mask: acl.Tensor | None, atten_mask: acl.Tensor | None,
    prefix: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_qlen: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_kvlen: acl.IntArray | acl.Tensor | Sequence[int] | None, scale: float, keep_prob: float,
    pre_tokens: int, next_tokens: int, head_num: int, input_layout: str, inner_precise: int, sparse_mode: int,
    softmax_max: acl.Tensor | None, softmax_sum: acl.Tensor | None, softmax_out: acl.Tensor | None,
    attention_out: acl.Tensor | None, *, strict: bool = True, check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """Attention for training, forward, packed sequences. Phase 1: checks, plans, and says how much workspace phase 2
    needs."""

aclnnFlashAttentionVarLenScore: _Run

def aclnnFlashAttentionVarLenScoreV2GetWorkspaceSize(
    query: acl.Tensor | None, key: acl.Tensor | None, value: acl.Tensor | None, pse: acl.Tensor | None,
    drop_mask: acl.Tensor | None, padding_mask: acl.Tensor | None, atten_mask: acl.Tensor | None,
    prefix: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_qlen: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_kvlen: acl.IntArray | acl.Tensor | Sequence[int] | None,
    q_start_idx: acl.IntArray | acl.Tensor | Sequence[int] | None,
    kv_start_idx: acl.IntArray | acl.Tensor | Sequence[int] | None, scale: float, keep_prob: float, pre_tokens: int,
    next_tokens: int, head_num: int, input_layout: str, inner_precise: int, sparse_mode: int, pse_type: int,
    softmax_max: acl.Tensor | None, softmax_sum: acl.Tensor | None, softmax_out: acl.Tensor | None,
    attention_out: acl.Tensor | None, *, strict: bool = True, check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """VarLenScore with pse_type and start indices. Phase 1: checks, plans, and says how much workspace phase 2
    needs."""

aclnnFlashAttentionVarLenScoreV2: _Run

def aclnnFlashAttentionVarLenScoreV3GetWorkspaceSize(
    query: acl.Tensor | None, query_rope: acl.Tensor | None, key: acl.Tensor | None, key_rope: acl.Tensor | None,
    value: acl.Tensor | None, pse: acl.Tensor | None, drop_mask: acl.Tensor | None, padding_mask: acl.Tensor | None,
    atten_mask: acl.Tensor | None, prefix: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_qlen: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_kvlen: acl.IntArray | acl.Tensor | Sequence[int] | None,
    q_start_idx: acl.IntArray | acl.Tensor | Sequence[int] | None,
    kv_start_idx: acl.IntArray | acl.Tensor | Sequence[int] | None, scale: float, keep_prob: float, pre_tokens: int,
    next_tokens: int, head_num: int, input_layout: str, inner_precise: int, sparse_mode: int, pse_type: int,
    softmax_max: acl.Tensor | None, softmax_sum: acl.Tensor | None, softmax_out: acl.Tensor | None,
    attention_out: acl.Tensor | None, *, strict: bool = True, check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """VarLenScoreV2 with rope parts of query and key. Phase 1: checks, plans, and says how much workspace phase 2
    needs."""

aclnnFlashAttentionVarLenScoreV3: _Run

def aclnnFlashAttentionVarLenScoreV4GetWorkspaceSize(
    query: acl.Tensor | None, key: acl.Tensor | None, value: acl.Tensor | None, pse: acl.Tensor | None,
    drop_mask: acl.Tensor | None, padding_mask: acl.Tensor | None, atten_mask: acl.Tensor | None,
    prefix: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_qlen: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_kvlen: acl.IntArray | acl.Tensor | Sequence[int] | None, scale: float, keep_prob: float,
    pre_tokens: int, next_tokens: int, head_num: int, input_layout: str, inner_precise: int, sparse_mode: int,
    softmax_layout: str, softmax_max: acl.Tensor | None, softmax_sum: acl.Tensor | None,
    softmax_out: acl.Tensor | None, attention_out: acl.Tensor | None, *, strict: bool = True,
    check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """VarLenScore with a choice of the statistics' order. Phase 1: checks, plans, and says how much workspace phase 2
    needs."""

aclnnFlashAttentionVarLenScoreV4: _Run

def aclnnFlashAttentionVarLenScoreV5GetWorkspaceSize(
    query: acl.Tensor | None, query_rope: acl.Tensor | None, key: acl.Tensor | None, key_rope: acl.Tensor | None,
    value: acl.Tensor | None, pse: acl.Tensor | None, drop_mask: acl.Tensor | None, padding_mask: acl.Tensor | None,
    atten_mask: acl.Tensor | None, sink: acl.Tensor | None, prefix: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_qlen: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_kvlen: acl.IntArray | acl.Tensor | Sequence[int] | None,
    q_start_idx: acl.IntArray | acl.Tensor | Sequence[int] | None,
    kv_start_idx: acl.IntArray | acl.Tensor | Sequence[int] | None, scale: float, keep_prob: float, pre_tokens: int,
    next_tokens: int, head_num: int, input_layout: str, inner_precise: int, sparse_mode: int, pse_type: int,
    softmax_layout: str, softmax_max: acl.Tensor | None, softmax_sum: acl.Tensor | None,
    softmax_out: acl.Tensor | None, attention_out: acl.Tensor | None, *, strict: bool = True,
    check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """VarLenScoreV3 with sinks and a choice of the statistics' order. Phase 1: checks, plans, and says how much
    workspace phase 2 needs."""

aclnnFlashAttentionVarLenScoreV5: _Run

def aclnnFlashAttentionScoreGradGetWorkspaceSize(
    query: acl.Tensor | None, key: acl.Tensor | None, value: acl.Tensor | None, dy: acl.Tensor | None,
    pse: acl.Tensor | None, drop_mask: acl.Tensor | None, padding_mask: acl.Tensor | None,
    atten_mask: acl.Tensor | None, softmax_max: acl.Tensor | None, softmax_sum: acl.Tensor | None,
    softmax_in: acl.Tensor | None, attention_in: acl.Tensor | None,
    prefix: acl.IntArray | acl.Tensor | Sequence[int] | None, scale: float, keep_prob: float, pre_tokens: int,
    next_tokens: int, head_num: int, input_layout: str, inner_precise: int, sparse_mode: int, dq: acl.Tensor | None,
    dk: acl.Tensor | None, dv: acl.Tensor | None, dpse: acl.Tensor | None, *, strict: bool = True,
    check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """Gradients of FlashAttentionScore. Phase 1: checks, plans, and says how much workspace phase 2 needs."""

aclnnFlashAttentionScoreGrad: _Run

def aclnnFlashAttentionScoreGradV2GetWorkspaceSize(
    query: acl.Tensor | None, key: acl.Tensor | None, value: acl.Tensor | None, dy: acl.Tensor | None,
    pse: acl.Tensor | None, drop_mask: acl.Tensor | None, padding_mask: acl.Tensor | None,
    atten_mask: acl.Tensor | None, softmax_max: acl.Tensor | None, softmax_sum: acl.Tensor | None,
    softmax_in: acl.Tensor | None, attention_in: acl.Tensor | None,
    prefix: acl.IntArray | acl.Tensor | Sequence[int] | None,
    q_start_idx: acl.IntArray | acl.Tensor | Sequence[int] | None,
    kv_start_idx: acl.IntArray | acl.Tensor | Sequence[int] | None, scale: float, keep_prob: float, pre_tokens: int,
    next_tokens: int, head_num: int, input_layout: str, inner_precise: int, sparse_mode: int, pse_type: int,
    dq: acl.Tensor | None, dk: acl.Tensor | None, dv: acl.Tensor | None, dpse: acl.Tensor | None, *,
    strict: bool = True, check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """FlashAttentionScoreGrad with pse_type and start indices. Phase 1: checks, plans, and says how much workspace
    phase 2 needs."""

aclnnFlashAttentionScoreGradV2: _Run

def aclnnFlashAttentionScoreGradV3GetWorkspaceSize(
    query: acl.Tensor | None, key: acl.Tensor | None, value: acl.Tensor | None, dy: acl.Tensor | None,
    pse: acl.Tensor | None, drop_mask: acl.Tensor | None, padding_mask: acl.Tensor | None,
    atten_mask: acl.Tensor | None, softmax_max: acl.Tensor | None, softmax_sum: acl.Tensor | None,
    softmax_in: acl.Tensor | None, attention_in: acl.Tensor | None, sink: acl.Tensor | None,
    prefix: acl.IntArray | acl.Tensor | Sequence[int] | None,
    q_start_idx: acl.IntArray | acl.Tensor | Sequence[int] | None,
    kv_start_idx: acl.IntArray | acl.Tensor | Sequence[int] | None, scale: float, keep_prob: float, pre_tokens: int,
    next_tokens: int, head_num: int, input_layout: str, inner_precise: int, sparse_mode: int, pse_type: int,
    dq: acl.Tensor | None, dk: acl.Tensor | None, dv: acl.Tensor | None, dpse: acl.Tensor | None,
    dsink: acl.Tensor | None, *, strict: bool = True, check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """FlashAttentionScoreGradV2 with sinks. Phase 1: checks, plans, and says how much workspace phase 2 needs."""

aclnnFlashAttentionScoreGradV3: _Run

def aclnnFlashAttentionUnpaddingScoreGradGetWorkspaceSize(
    query: acl.Tensor | None, key: acl.Tensor | None, value: acl.Tensor | None, dy: acl.Tensor | None,
    pse: acl.Tensor | None, drop_mask: acl.Tensor | None, padding_mask: acl.Tensor | None,
    atten_mask: acl.Tensor | None, softmax_max: acl.Tensor | None, softmax_sum: acl.Tensor | None,
    softmax_in: acl.Tensor | None, attention_in: acl.Tensor | None,
    prefix: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_qlen: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_kvlen: acl.IntArray | acl.Tensor | Sequence[int] | None, scale: float, keep_prob: float,
    pre_tokens: int, next_tokens: int, head_num: int, input_layout: str, inner_precise: int, sparse_mode: int,
    dq: acl.Tensor | None, dk: acl.Tensor | None, dv: acl.Tensor | None, dpse: acl.Tensor | None, *,
    strict: bool = True, check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """Gradients of FlashAttentionVarLenScore. Phase 1: checks, plans, and says how much workspace phase 2 needs."""

aclnnFlashAttentionUnpaddingScoreGrad: _Run

def aclnnFlashAttentionUnpaddingScoreGradV2GetWorkspaceSize(
    query: acl.Tensor | None, key: acl.Tensor | None, value: acl.Tensor | None, dy: acl.Tensor | None,
    pse: acl.Tensor | None, drop_mask: acl.Tensor | None, padding_mask: acl.Tensor | None,
    atten_mask: acl.Tensor | None, softmax_max: acl.Tensor | None, softmax_sum: acl.Tensor | None,
    softmax_in: acl.Tensor | None, attention_in: acl.Tensor | None,
    prefix: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_qlen: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_kvlen: acl.IntArray | acl.Tensor | Sequence[int] | None,
    q_start_idx: acl.IntArray | acl.Tensor | Sequence[int] | None,
    kv_start_idx: acl.IntArray | acl.Tensor | Sequence[int] | None, scale: float, keep_prob: float, pre_tokens: int,
    next_tokens: int, head_num: int, input_layout: str, inner_precise: int, sparse_mode: int, pse_type: int,
    dq: acl.Tensor | None, dk: acl.Tensor | None, dv: acl.Tensor | None, dpse: acl.Tensor | None, *,
    strict: bool = True, check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """UnpaddingScoreGrad with pse_type and start indices. Phase 1: checks, plans, and says how much workspace phase 2
    needs."""

aclnnFlashAttentionUnpaddingScoreGradV2: _Run

def aclnnFlashAttentionUnpaddingScoreGradV3GetWorkspaceSize(
    query: acl.Tensor | None, query_rope: acl.Tensor | None, key: acl.Tensor | None, key_rope: acl.Tensor | None,
    value: acl.Tensor | None, dy: acl.Tensor | None, pse: acl.Tensor | None, drop_mask: acl.Tensor | None,
    padding_mask: acl.Tensor | None, atten_mask: acl.Tensor | None, softmax_max: acl.Tensor | None,
    softmax_sum: acl.Tensor | None, softmax_in: acl.Tensor | None, attention_in: acl.Tensor | None,
    prefix: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_qlen: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_kvlen: acl.IntArray | acl.Tensor | Sequence[int] | None,
    q_start_idx: acl.IntArray | acl.Tensor | Sequence[int] | None,
    kv_start_idx: acl.IntArray | acl.Tensor | Sequence[int] | None, scale: float, keep_prob: float, pre_tokens: int,
    next_tokens: int, head_num: int, input_layout: str, inner_precise: int, sparse_mode: int, pse_type: int,
    dq: acl.Tensor | None, dq_rope: acl.Tensor | None, dk: acl.Tensor | None, dk_rope: acl.Tensor | None,
    dv: acl.Tensor | None, dpse: acl.Tensor | None, *, strict: bool = True, check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """UnpaddingScoreGradV2 with rope parts of query and key. Phase 1: checks, plans, and says how much workspace
    phase 2 needs."""

aclnnFlashAttentionUnpaddingScoreGradV3: _Run

def aclnnFlashAttentionUnpaddingScoreGradV4GetWorkspaceSize(
    query: acl.Tensor | None, key: acl.Tensor | None, value: acl.Tensor | None, dy: acl.Tensor | None,
    pse: acl.Tensor | None, drop_mask: acl.Tensor | None, padding_mask: acl.Tensor | None,
    atten_mask: acl.Tensor | None, softmax_max: acl.Tensor | None, softmax_sum: acl.Tensor | None,
    softmax_in: acl.Tensor | None, attention_in: acl.Tensor | None,
    prefix: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_qlen: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_kvlen: acl.IntArray | acl.Tensor | Sequence[int] | None, scale: float, keep_prob: float,
    pre_tokens: int, next_tokens: int, head_num: int, input_layout: str, inner_precise: int, sparse_mode: int,
    dq: acl.Tensor | None, dk: acl.Tensor | None, dv: acl.Tensor | None, dpse: acl.Tensor | None, softmax_layout: str,
    *, strict: bool = True, check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """UnpaddingScoreGrad with a choice of the statistics' order. Phase 1: checks, plans, and says how much workspace
    phase 2 needs."""

aclnnFlashAttentionUnpaddingScoreGradV4: _Run

def aclnnFlashAttentionUnpaddingScoreGradV5GetWorkspaceSize(
    query: acl.Tensor | None, query_rope: acl.Tensor | None, key: acl.Tensor | None, key_rope: acl.Tensor | None,
    value: acl.Tensor | None, dy: acl.Tensor | None, pse: acl.Tensor | None, drop_mask: acl.Tensor | None,
    padding_mask: acl.Tensor | None, atten_mask: acl.Tensor | None, softmax_max: acl.Tensor | None,
    softmax_sum: acl.Tensor | None, softmax_in: acl.Tensor | None, attention_in: acl.Tensor | None,
    sink: acl.Tensor | None, prefix: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_qlen: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_kvlen: acl.IntArray | acl.Tensor | Sequence[int] | None,
    q_start_idx: acl.IntArray | acl.Tensor | Sequence[int] | None,
    kv_start_idx: acl.IntArray | acl.Tensor | Sequence[int] | None, scale: float, keep_prob: float, pre_tokens: int,
    next_tokens: int, head_num: int, input_layout: str, inner_precise: int, sparse_mode: int, pse_type: int,
    softmax_layout: str, dq: acl.Tensor | None, dq_rope: acl.Tensor | None, dk: acl.Tensor | None,
    dk_rope: acl.Tensor | None, dv: acl.Tensor | None, dpse: acl.Tensor | None, dsink: acl.Tensor | None, *,
    strict: bool = True, check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """UnpaddingScoreGradV3 with sinks and a choice of the statistics' order. Phase 1: checks, plans, and says how
    much workspace phase 2 needs."""

aclnnFlashAttentionUnpaddingScoreGradV5: _Run

def aclnnFlashAttentionScoreV4GetWorkspaceSize(
    query: acl.Tensor | None, key: acl.Tensor | None, value: acl.Tensor | None, pse: acl.Tensor | None,
    drop_mask: acl.Tensor | None, padding_mask: acl.Tensor | None, atten_mask: acl.Tensor | None,
    query_rope: acl.Tensor | None, key_rope: acl.Tensor | None, d_scale_q: acl.Tensor | None,
    d_scale_k: acl.Tensor | None, d_scale_v: acl.Tensor | None, sink: acl.Tensor | None,
    prefix: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_qlen: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_kvlen: acl.IntArray | acl.Tensor | Sequence[int] | None,
    q_start_idx: acl.IntArray | acl.Tensor | Sequence[int] | None,
    kv_start_idx: acl.IntArray | acl.Tensor | Sequence[int] | None, scale: float, keep_prob: float, pre_tokens: int,
    next_tokens: int, head_num: int, input_layout: str, inner_precise: int, sparse_mode: int, out_dtype: int,
    pse_type: int, softmax_layout: str, seed: int, offset: int, softmax_max: acl.Tensor | None,
    softmax_sum: acl.Tensor | None, softmax_out: acl.Tensor | None, attention_out: acl.Tensor | None, *,
    strict: bool = True, check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """FlashAttentionScoreV3 and VarLenScoreV5 in one, with drawn dropout. Phase 1: checks, plans, and says how much
    workspace phase 2 needs."""

aclnnFlashAttentionScoreV4: _Run

def aclnnFlashAttentionScoreGradV4GetWorkspaceSize(
    query: acl.Tensor | None, key: acl.Tensor | None, value: acl.Tensor | None, dy: acl.Tensor | None,
    pse: acl.Tensor | None, drop_mask: acl.Tensor | None, padding_mask: acl.Tensor | None,
    atten_mask: acl.Tensor | None, softmax_max: acl.Tensor | None, softmax_sum: acl.Tensor | None,
    softmax_in: acl.Tensor | None, attention_in: acl.Tensor | None, sink: acl.Tensor | None,
    query_rope: acl.Tensor | None, key_rope: acl.Tensor | None, d_scale_q: acl.Tensor | None,
    d_scale_k: acl.Tensor | None, d_scale_v: acl.Tensor | None, d_scale_dy: acl.Tensor | None,
    d_scale_o: acl.Tensor | None, prefix: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_qlen: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_kvlen: acl.IntArray | acl.Tensor | Sequence[int] | None,
    q_start_idx: acl.IntArray | acl.Tensor | Sequence[int] | None,
    kv_start_idx: acl.IntArray | acl.Tensor | Sequence[int] | None, scale: float, keep_prob: float, pre_tokens: int,
    next_tokens: int, head_num: int, input_layout: str, softmax_layout: str, inner_precise: int, sparse_mode: int,
    pse_type: int, seed: int, offset: int, out_dtype: int, dq: acl.Tensor | None, dk: acl.Tensor | None,
    dv: acl.Tensor | None, dq_rope: acl.Tensor | None, dk_rope: acl.Tensor | None, dpse: acl.Tensor | None,
    dsink: acl.Tensor | None, *, strict: bool = True, check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """Gradients of FlashAttentionScoreV4. Phase 1: checks, plans, and says how much workspace phase 2 needs."""

aclnnFlashAttentionScoreGradV4: _Run

def aclnnBlockSparseAttentionGetWorkspaceSize(
    query: acl.Tensor | None, key: acl.Tensor | None, value: acl.Tensor | None, block_sparse_mask: acl.Tensor | None,
    atten_mask: acl.Tensor | None, block_shape: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_lengths: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_lengths_kv: acl.IntArray | acl.Tensor | Sequence[int] | None, block_table: acl.Tensor | None,
    q_input_layout: str, kv_input_layout: str, num_key_value_heads: int, mask_type: int, scale_value: float,
    inner_precise: int, block_size: int, pre_tokens: int, next_tokens: int, softmax_lse_flag: int,
    attention_out: acl.Tensor | None, softmax_lse: acl.Tensor | None, *, strict: bool = True,
    check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """Attention to the blocks of keys that a mask leaves to each block of query rows. Phase 1: checks, plans, and
    says how much workspace phase 2 needs."""

aclnnBlockSparseAttention: _Run

def aclnnBlockSparseAttentionV2GetWorkspaceSize(
    query: acl.Tensor | None, key: acl.Tensor | None, value: acl.Tensor | None, block_sparse_mask: acl.Tensor | None,
    atten_mask: acl.Tensor | None, block_shape: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_lengths: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_lengths_kv: acl.IntArray | acl.Tensor | Sequence[int] | None, block_table: acl.Tensor | None,
    q_dequant_scale: acl.Tensor | None, k_dequant_scale: acl.Tensor | None, v_dequant_scale: acl.Tensor | None,
    q_input_layout: str, kv_input_layout: str, num_key_value_heads: int, mask_type: int, scale_value: float,
    inner_precise: int, block_size: int, pre_tokens: int, next_tokens: int, softmax_lse_flag: int,
    attention_out: acl.Tensor | None, softmax_lse: acl.Tensor | None, *, strict: bool = True,
    check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """BlockSparseAttention with scales of fp8 tensors, in one layout more. Phase 1: checks, plans, and says how much
    workspace phase 2 needs."""

aclnnBlockSparseAttentionV2: _Run

def aclnnBlockSparseAttentionV3GetWorkspaceSize(
    query: acl.Tensor | None, key: acl.Tensor | None, value: acl.Tensor | None, block_sparse_mask: acl.Tensor | None,
    atten_mask: acl.Tensor | None, block_shape: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_lengths: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_lengths_kv: acl.IntArray | acl.Tensor | Sequence[int] | None, block_table: acl.Tensor | None,
    q_dequant_scale: acl.Tensor | None, k_dequant_scale: acl.Tensor | None, v_dequant_scale: acl.Tensor | None,
    p_quant_scale: acl.Tensor | None, q_input_layout: str, kv_input_layout: str, num_key_value_heads: int,
    mask_type: int, scale_value: float, inner_precise: int, block_size: int, pre_tokens: int, next_tokens: int,
    softmax_lse_flag: int, quant_mode: int, dst_type_max: float, attention_out: acl.Tensor | None,
    softmax_lse: acl.Tensor | None, *, strict: bool = True, check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """BlockSparseAttentionV2 with kinds of quantisation. Phase 1: checks, plans, and says how much workspace phase 2
    needs."""

aclnnBlockSparseAttentionV3: _Run

def aclnnBlockSparseAttentionGradGetWorkspaceSize(
    dout: acl.Tensor | None, query: acl.Tensor | None, key: acl.Tensor | None, value: acl.Tensor | None,
    attention_out: acl.Tensor | None, softmax_lse: acl.Tensor | None, block_sparse_mask: acl.Tensor | None,
    atten_mask: acl.Tensor | None, block_shape: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_lengths: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_lengths_kv: acl.IntArray | acl.Tensor | Sequence[int] | None, q_input_layout: str,
    kv_input_layout: str, num_key_value_heads: int, mask_type: int, scale_value: float, pre_tokens: int,
    next_tokens: int, dq: acl.Tensor | None, dk: acl.Tensor | None, dv: acl.Tensor | None, *, strict: bool = True,
    check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """Gradients of BlockSparseAttention, from its output and its softmax_lse. Phase 1: checks, plans, and says how
    much workspace phase 2 needs."""

aclnnBlockSparseAttentionGrad: _Run

def aclnnIncreFlashAttentionGetWorkspaceSize(
    query: acl.Tensor | None, key: acl.TensorList | None, value: acl.TensorList | None, pse_shift: acl.Tensor | None,
    atten_mask: acl.Tensor | None, actual_seq_lengths: acl.IntArray | acl.Tensor | Sequence[int] | None,
    num_heads: int, scale_value: float, input_layout: str, num_key_value_heads: int, attention_out: acl.Tensor | None,
    *, strict: bool = True, check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """Attention of one new token per item over its cache. Phase 1: checks, plans, and says how much workspace phase 2
    needs."""

aclnnIncreFlashAttention: _Run

def aclnnIncreFlashAttentionV2GetWorkspaceSize(
    query: acl.Tensor | None, key: acl.TensorList | None, value: acl.TensorList | None, pse_shift: acl.Tensor | None,
    atten_mask: acl.Tensor | None, actual_seq_lengths: acl.IntArray | acl.Tensor | Sequence[int] | None,
    dequant_scale1: acl.Tensor | None, quant_scale1: acl.Tensor | None, dequant_scale2: acl.Tensor | None,
    quant_scale2: acl.Tensor | None, quant_offset2: acl.Tensor | None, num_heads: int, scale_value: float,
    input_layout: str, num_key_value_heads: int, attention_out: acl.Tensor | None, *, strict: bool = True,
    check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """IncreFlashAttention with int8 output. Phase 1: checks, plans, and says how much workspace phase 2 needs."""

aclnnIncreFlashAttentionV2: _Run

def aclnnIncreFlashAttentionV3GetWorkspaceSize(
    query: acl.Tensor | None, key: acl.TensorList | None, value: acl.TensorList | None, pse_shift: acl.Tensor | None,
    atten_mask: acl.Tensor | None, actual_seq_lengths: acl.IntArray | acl.Tensor | Sequence[int] | None,
    dequant_scale1: acl.Tensor | None, quant_scale1: acl.Tensor | None, dequant_scale2: acl.Tensor | None,
    quant_scale2: acl.Tensor | None, quant_offset2: acl.Tensor | None, antiquant_scale: acl.Tensor | None,
    antiquant_offset: acl.Tensor | None, block_table: acl.Tensor | None, num_heads: int, scale_value: float,
    input_layout: str, num_key_value_heads: int, block_size: int, inner_precise: int,
    attention_out: acl.Tensor | None, *, strict: bool = True, check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """IncreFlashAttentionV2 with pse_shift, an int8 cache and pages. Phase 1: checks, plans, and says how much
    workspace phase 2 needs."""

aclnnIncreFlashAttentionV3: _Run

def aclnnIncreFlashAttentionV4GetWorkspaceSize(
    query: acl.Tensor | None, key: acl.TensorList | None, value: acl.TensorList | None, pse_shift: acl.Tensor | None,
    atten_mask: acl.Tensor | None, actual_seq_lengths: acl.IntArray | acl.Tensor | Sequence[int] | None,
    dequant_scale1: acl.Tensor | None, quant_scale1: acl.Tensor | None, dequant_scale2: acl.Tensor | None,
    quant_scale2: acl.Tensor | None, quant_offset2: acl.Tensor | None, antiquant_scale: acl.Tensor | None,
    antiquant_offset: acl.Tensor | None, block_table: acl.Tensor | None,
    kv_padding_size: acl.IntArray | acl.Tensor | Sequence[int] | None, num_heads: int, scale_value: float,
    input_layout: str, num_key_value_heads: int, block_size: int, inner_precise: int,
    attention_out: acl.Tensor | None, *, strict: bool = True, check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """IncreFlashAttentionV3 with left padding. Phase 1: checks, plans, and says how much workspace phase 2 needs."""

aclnnIncreFlashAttentionV4: _Run

def aclnnPromptFlashAttentionGetWorkspaceSize(
    query: acl.Tensor | None, key: acl.Tensor | None, value: acl.Tensor | None, pse_shift: acl.Tensor | None,
    atten_mask: acl.Tensor | None, actual_seq_lengths: acl.IntArray | acl.Tensor | Sequence[int] | None,
    num_heads: int, scale_value: float, pre_tokens: int, next_tokens: int, input_layout: str,
    num_key_value_heads: int, attention_out: acl.Tensor | None, *, strict: bool = True, check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """Attention of prompts. Phase 1: checks, plans, and says how much workspace phase 2 needs."""

aclnnPromptFlashAttention: _Run

def aclnnPromptFlashAttentionV2GetWorkspaceSize(
    query: acl.Tensor | None, key: acl.Tensor | None, value: acl.Tensor | None, pse_shift: acl.Tensor | None,
    atten_mask: acl.Tensor | None, actual_seq_lengths: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_lengths_kv: acl.IntArray | acl.Tensor | Sequence[int] | None, dequant_scale1: acl.Tensor | None,
    quant_scale1: acl.Tensor | None, dequant_scale2: acl.Tensor | None, quant_scale2: acl.Tensor | None,
    quant_offset2: acl.Tensor | None, num_heads: int, scale_value: float, pre_tokens: int, next_tokens: int,
    input_layout: str, num_key_value_heads: int, sparse_mode: int, attention_out: acl.Tensor | None, *,
    strict: bool = True, check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """PromptFlashAttention with key lengths, sparse modes, int8 queries and int8 output. Phase 1: checks, plans, and
    says how much workspace phase 2 needs."""

aclnnPromptFlashAttentionV2: _Run

def aclnnPromptFlashAttentionV3GetWorkspaceSize(
    query: acl.Tensor | None, key: acl.Tensor | None, value: acl.Tensor | None, pse_shift: acl.Tensor | None,
    atten_mask: acl.Tensor | None, actual_seq_lengths: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_lengths_kv: acl.IntArray | acl.Tensor | Sequence[int] | None, dequant_scale1: acl.Tensor | None,
    quant_scale1: acl.Tensor | None, dequant_scale2: acl.Tensor | None, quant_scale2: acl.Tensor | None,
    quant_offset2: acl.Tensor | None, num_heads: int, scale_value: float, pre_tokens: int, next_tokens: int,
    input_layout: str, num_key_value_heads: int, sparse_mode: int, inner_precise: int,
    attention_out: acl.Tensor | None, *, strict: bool = True, check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """PromptFlashAttentionV2 with pse_shift, inner_precise and packed rows. Phase 1: checks, plans, and says how much
    workspace phase 2 needs."""

aclnnPromptFlashAttentionV3: _Run

def aclnnFusedInferAttentionScoreGetWorkspaceSize(
    query: acl.Tensor | None, key: acl.TensorList | None, value: acl.TensorList | None, pse_shift: acl.Tensor | None,
    atten_mask: acl.Tensor | None, actual_seq_lengths: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_lengths_kv: acl.IntArray | acl.Tensor | Sequence[int] | None, dequant_scale1: acl.Tensor | None,
    quant_scale1: acl.Tensor | None, dequant_scale2: acl.Tensor | None, quant_scale2: acl.Tensor | None,
    quant_offset2: acl.Tensor | None, antiquant_scale: acl.Tensor | None, antiquant_offset: acl.Tensor | None,
    block_table: acl.Tensor | None, query_padding_size: acl.IntArray | acl.Tensor | Sequence[int] | None,
    kv_padding_size: acl.IntArray | acl.Tensor | Sequence[int] | None, num_heads: int, scale_value: float,
    pre_tokens: int, next_tokens: int, input_layout: str, num_key_value_heads: int, sparse_mode: int,
    inner_precise: int, block_size: int, antiquant_mode: int, softmax_lse_flag: bool,
    attention_out: acl.Tensor | None, softmax_lse: acl.Tensor | None, *, strict: bool = True,
    check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """Attention of prompts and of new tokens over a cache: stacked, packed, listed or paged, of floats or integers.
    Phase 1: checks, plans, and says how much workspace phase 2 needs."""

aclnnFusedInferAttentionScore: _Run

def aclnnFusedInferAttentionScoreV2GetWorkspaceSize(
    query: acl.Tensor | None, key: acl.TensorList | None, value: acl.TensorList | None, pse_shift: acl.Tensor | None,
    atten_mask: acl.Tensor | None, actual_seq_lengths: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_lengths_kv: acl.IntArray | acl.Tensor | Sequence[int] | None, dequant_scale1: acl.Tensor | None,
    quant_scale1: acl.Tensor | None, dequant_scale2: acl.Tensor | None, quant_scale2: acl.Tensor | None,
    quant_offset2: acl.Tensor | None, antiquant_scale: acl.Tensor | None, antiquant_offset: acl.Tensor | None,
    block_table: acl.Tensor | None, query_padding_size: acl.IntArray | acl.Tensor | Sequence[int] | None,
    kv_padding_size: acl.IntArray | acl.Tensor | Sequence[int] | None, key_antiquant_scale: acl.Tensor | None,
    key_antiquant_offset: acl.Tensor | None, value_antiquant_scale: acl.Tensor | None,
    value_antiquant_offset: acl.Tensor | None, key_shared_prefix: acl.Tensor | None,
    value_shared_prefix: acl.Tensor | None,
    actual_shared_prefix_len: acl.IntArray | acl.Tensor | Sequence[int] | None, num_heads: int, scale_value: float,
    pre_tokens: int, next_tokens: int, input_layout: str, num_key_value_heads: int, sparse_mode: int,
    inner_precise: int, block_size: int, antiquant_mode: int, softmax_lse_flag: bool, key_antiquant_mode: int,
    value_antiquant_mode: int, attention_out: acl.Tensor | None, softmax_lse: acl.Tensor | None, *,
    strict: bool = True, check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """FusedInferAttentionScore with scales of keys and values apart, and a shared prefix. Phase 1: checks, plans, and
    says how much workspace phase 2 needs."""

aclnnFusedInferAttentionScoreV2: _Run

def aclnnFusedInferAttentionScoreV3GetWorkspaceSize(
    query: acl.Tensor | None, key: acl.TensorList | None, value: acl.TensorList | None, pse_shift: acl.Tensor | None,
    atten_mask: acl.Tensor | None, actual_seq_lengths: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_lengths_kv: acl.IntArray | acl.Tensor | Sequence[int] | None, dequant_scale1: acl.Tensor | None,
    quant_scale1: acl.Tensor | None, dequant_scale2: acl.Tensor | None, quant_scale2: acl.Tensor | None,
    quant_offset2: acl.Tensor | None, antiquant_scale: acl.Tensor | None, antiquant_offset: acl.Tensor | None,
    block_table: acl.Tensor | None, query_padding_size: acl.IntArray | acl.Tensor | Sequence[int] | None,
    kv_padding_size: acl.IntArray | acl.Tensor | Sequence[int] | None, key_antiquant_scale: acl.Tensor | None,
    key_antiquant_offset: acl.Tensor | None, value_antiquant_scale: acl.Tensor | None,
    value_antiquant_offset: acl.Tensor | None, key_shared_prefix: acl.Tensor | None,
    value_shared_prefix: acl.Tensor | None,
    actual_shared_prefix_len: acl.IntArray | acl.Tensor | Sequence[int] | None, query_rope: acl.Tensor | None,
    key_rope: acl.Tensor | None, key_rope_antiquant_scale: acl.Tensor | None, num_heads: int, scale_value: float,
    pre_tokens: int, next_tokens: int, input_layout: str, num_key_value_heads: int, sparse_mode: int,
    inner_precise: int, block_size: int, antiquant_mode: int, softmax_lse_flag: bool, key_antiquant_mode: int,
    value_antiquant_mode: int, attention_out: acl.Tensor | None, softmax_lse: acl.Tensor | None, *,
    strict: bool = True, check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """FusedInferAttentionScoreV2 with rope parts of their own. Phase 1: checks, plans, and says how much workspace
    phase 2 needs."""

aclnnFusedInferAttentionScoreV3: _Run

def aclnnFusedInferAttentionScoreV4GetWorkspaceSize(
    query: acl.Tensor | None, key: acl.TensorList | None, value: acl.TensorList | None, pse_shift: acl.Tensor | None,
    atten_mask: acl.Tensor | None, actual_seq_lengths: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_lengths_kv: acl.IntArray | acl.Tensor | Sequence[int] | None, dequant_scale1: acl.Tensor | None,
    quant_scale1: acl.Tensor | None, dequant_scale2: acl.Tensor | None, quant_scale2: acl.Tensor | None,
    quant_offset2: acl.Tensor | None, antiquant_scale: acl.Tensor | None, antiquant_offset: acl.Tensor | None,
    block_table: acl.Tensor | None, query_padding_size: acl.IntArray | acl.Tensor | Sequence[int] | None,
    kv_padding_size: acl.IntArray | acl.Tensor | Sequence[int] | None, key_antiquant_scale: acl.Tensor | None,
    key_antiquant_offset: acl.Tensor | None, value_antiquant_scale: acl.Tensor | None,
    value_antiquant_offset: acl.Tensor | None, key_shared_prefix: acl.Tensor | None,
    value_shared_prefix: acl.Tensor | None,
    actual_shared_prefix_len: acl.IntArray | acl.Tensor | Sequence[int] | None, query_rope: acl.Tensor | None,
    key_rope: acl.Tensor | None, key_rope_antiquant_scale: acl.Tensor | None, dequant_scale_query: acl.Tensor | None,
    learnable_sink: acl.Tensor | None, num_heads: int, scale_value: float, pre_tokens: int, next_tokens: int,
    input_layout: str, num_key_value_heads: int, sparse_mode: int, inner_precise: int, block_size: int,
    antiquant_mode: int, softmax_lse_flag: bool, key_antiquant_mode: int, value_antiquant_mode: int,
    query_quant_mode: int, attention_out: acl.Tensor | None, softmax_lse: acl.Tensor | None, *, strict: bool = True,
    check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """FusedInferAttentionScoreV3 with a scale per query row, and sinks. Phase 1: checks, plans, and says how much
    workspace phase 2 needs."""

aclnnFusedInferAttentionScoreV4: _Run

def aclnnFusedInferAttentionScoreV5GetWorkspaceSize(
    query: acl.Tensor | None, key: acl.TensorList | None, value: acl.TensorList | None, pse_shift: acl.Tensor | None,
    atten_mask: acl.Tensor | None, actual_seq_lengths: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_lengths_kv: acl.IntArray | acl.Tensor | Sequence[int] | None, dequant_scale1: acl.Tensor | None,
    quant_scale1: acl.Tensor | None, dequant_scale2: acl.Tensor | None, quant_scale2: acl.Tensor | None,
    quant_offset2: acl.Tensor | None, antiquant_scale: acl.Tensor | None, antiquant_offset: acl.Tensor | None,
    block_table: acl.Tensor | None, query_padding_size: acl.IntArray | acl.Tensor | Sequence[int] | None,
    kv_padding_size: acl.IntArray | acl.Tensor | Sequence[int] | None, key_antiquant_scale: acl.Tensor | None,
    key_antiquant_offset: acl.Tensor | None, value_antiquant_scale: acl.Tensor | None,
    value_antiquant_offset: acl.Tensor | None, key_shared_prefix: acl.Tensor | None,
    value_shared_prefix: acl.Tensor | None,
    actual_shared_prefix_len: acl.IntArray | acl.Tensor | Sequence[int] | None, query_rope: acl.Tensor | None,
    key_rope: acl.Tensor | None, key_rope_antiquant_scale: acl.Tensor | None, dequant_scale_query: acl.Tensor | None,
    learnable_sink: acl.Tensor | None, q_start_idx: acl.IntArray | acl.Tensor | Sequence[int] | None,
    kv_start_idx: acl.IntArray | acl.Tensor | Sequence[int] | None, num_heads: int, scale_value: float,
    pre_tokens: int, next_tokens: int, input_layout: str, num_key_value_heads: int, sparse_mode: int,
    inner_precise: int, block_size: int, antiquant_mode: int, softmax_lse_flag: bool, key_antiquant_mode: int,
    value_antiquant_mode: int, query_quant_mode: int, pse_type: int, attention_out: acl.Tensor | None,
    softmax_lse: acl.Tensor | None, *, strict: bool = True, check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """FusedInferAttentionScoreV4 on Ascend 950: this library computes what both chips know. Phase 1: checks, plans,
    and says how much workspace phase 2 needs."""

aclnnFusedInferAttentionScoreV5: _Run

def aclnnLightningIndexerGetWorkspaceSize(
    query: acl.Tensor | None, key: acl.Tensor | None, weights: acl.Tensor | None,
    actual_seq_lengths_query: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_lengths_key: acl.IntArray | acl.Tensor | Sequence[int] | None, block_table: acl.Tensor | None,
    layout_query: str, layout_key: str, sparse_count: int, sparse_mode: int, pre_tokens: int, next_tokens: int,
    return_values: bool, sparse_indices_out: acl.Tensor | None, sparse_values_out: acl.Tensor | None, *,
    strict: bool = True, check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """Scores of keys by ReLU-weighted heads, and per row the keys that score highest. Phase 1: checks, plans, and
    says how much workspace phase 2 needs."""

aclnnLightningIndexer: _Run

def aclnnLightningIndexerGradGetWorkspaceSize(
    query: acl.Tensor | None, key: acl.Tensor | None, dy: acl.Tensor | None, sparse_indices: acl.Tensor | None,
    weights: acl.Tensor | None, actual_seq_lengths_query: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_lengths_key: acl.IntArray | acl.Tensor | Sequence[int] | None, head_num: int, layout: str,
    sparse_mode: int, pre_tokens: int, next_tokens: int, deterministic: bool, dquery: acl.Tensor | None,
    dkey: acl.Tensor | None, dweights: acl.Tensor | None, *, strict: bool = True, check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """Gradients of the values that LightningIndexer chose, padded or packed. Phase 1: checks, plans, and says how
    much workspace phase 2 needs."""

aclnnLightningIndexerGrad: _Run

def aclnnLightningIndexerV2GetWorkspaceSize(
    q: acl.Tensor | None, k: acl.Tensor | None, w: acl.Tensor | None,
    cu_seqlens_q: acl.IntArray | acl.Tensor | Sequence[int] | None,
    cu_seqlens_k: acl.IntArray | acl.Tensor | Sequence[int] | None,
    seqused_q: acl.IntArray | acl.Tensor | Sequence[int] | None,
    seqused_k: acl.IntArray | acl.Tensor | Sequence[int] | None,
    cmp_residual_k: acl.IntArray | acl.Tensor | Sequence[int] | None, block_table: acl.Tensor | None,
    output_idx_offset: acl.Tensor | None, metadata: acl.Tensor | None, topk: int, max_seqlen_q: int, layout_q: str,
    layout_k: str, mask_mode: int, cmp_ratio: int, return_value: int, sparse_indices: acl.Tensor | None,
    sparse_values: acl.Tensor | None, *, strict: bool = True, check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """Scores of keys that may stand for several tokens each, and per row the keys that score highest. Phase 1:
    checks, plans, and says how much workspace phase 2 needs."""

aclnnLightningIndexerV2: _Run

def aclnnSparseFlashAttentionGetWorkspaceSize(
    query: acl.Tensor | None, key: acl.Tensor | None, value: acl.Tensor | None, sparse_indices: acl.Tensor | None,
    block_table: acl.Tensor | None, actual_seq_lengths_query: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_lengths_kv: acl.IntArray | acl.Tensor | Sequence[int] | None, query_rope: acl.Tensor | None,
    key_rope: acl.Tensor | None, scale_value: float, sparse_block_size: int, layout_query: str, layout_kv: str,
    sparse_mode: int, pre_tokens: int, next_tokens: int, attention_mode: int, return_softmax_lse: bool,
    attention_out: acl.Tensor | None, softmax_max: acl.Tensor | None, softmax_sum: acl.Tensor | None, *,
    strict: bool = True, check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """Attention over the blocks of keys that every row selects. Phase 1: checks, plans, and says how much workspace
    phase 2 needs."""

aclnnSparseFlashAttention: _Run

def aclnnSparseFlashAttentionGradGetWorkspaceSize(
    query: acl.Tensor | None, key: acl.Tensor | None, value: acl.Tensor | None, sparse_indices: acl.Tensor | None,
    d_out: acl.Tensor | None, out: acl.Tensor | None, softmax_max: acl.Tensor | None, softmax_sum: acl.Tensor | None,
    actual_seq_lengths_query: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_lengths_kv: acl.IntArray | acl.Tensor | Sequence[int] | None, query_rope: acl.Tensor | None,
    key_rope: acl.Tensor | None, scale_value: float, sparse_block_size: int, layout: str, sparse_mode: int,
    pre_tokens: int, next_tokens: int, deterministic: bool, dquery: acl.Tensor | None, dkey: acl.Tensor | None,
    dvalue: acl.Tensor | None, dquery_rope: acl.Tensor | None, dkey_rope: acl.Tensor | None, *, strict: bool = True,
    check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """Gradients of SparseFlashAttention, padded or packed. Phase 1: checks, plans, and says how much workspace phase
    2 needs."""

aclnnSparseFlashAttentionGrad: _Run

def aclnnSparseFlashMlaGetWorkspaceSize(
    q: acl.Tensor | None, ori_kv: acl.Tensor | None, cmp_kv: acl.Tensor | None, ori_sparse_indices: acl.Tensor | None,
    cmp_sparse_indices: acl.Tensor | None, ori_block_table: acl.Tensor | None, cmp_block_table: acl.Tensor | None,
    cu_seqlens_q: acl.IntArray | acl.Tensor | Sequence[int] | None,
    cu_seqlens_ori_kv: acl.IntArray | acl.Tensor | Sequence[int] | None,
    cu_seqlens_cmp_kv: acl.IntArray | acl.Tensor | Sequence[int] | None,
    seqused_q: acl.IntArray | acl.Tensor | Sequence[int] | None,
    seqused_ori_kv: acl.IntArray | acl.Tensor | Sequence[int] | None,
    seqused_cmp_kv: acl.IntArray | acl.Tensor | Sequence[int] | None,
    cmp_residual_kv: acl.IntArray | acl.Tensor | Sequence[int] | None, ori_topk_length: acl.Tensor | None,
    cmp_topk_length: acl.Tensor | None, sinks: acl.Tensor | None, metadata: acl.Tensor | None, softmax_scale: float,
    cmp_ratio: int, ori_mask_mode: int, cmp_mask_mode: int, ori_win_left: int, ori_win_right: int, layout_q: str,
    layout_kv: str, topk_value_mode: int, return_softmax_lse: bool, attn_out: acl.Tensor | None,
    softmax_lse: acl.Tensor | None, *, strict: bool = True, check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """Attention to a window of keys and to compressed keys in one softmax; keys are values. Phase 1: checks, plans,
    and says how much workspace phase 2 needs."""

aclnnSparseFlashMla: _Run

def aclnnSparseFlashMlaGradGetWorkspaceSize(
    query: acl.Tensor | None, dout: acl.Tensor | None, out: acl.Tensor | None, lse: acl.Tensor | None,
    ori_kv: acl.Tensor | None, cmp_kv: acl.Tensor | None, ori_sparse_indices: acl.Tensor | None,
    cmp_sparse_indices: acl.Tensor | None, cu_seqlens_q: acl.IntArray | acl.Tensor | Sequence[int] | None,
    cu_seqlens_ori_kv: acl.IntArray | acl.Tensor | Sequence[int] | None,
    cu_seqlens_cmp_kv: acl.IntArray | acl.Tensor | Sequence[int] | None,
    seqused_q: acl.IntArray | acl.Tensor | Sequence[int] | None,
    seqused_ori_kv: acl.IntArray | acl.Tensor | Sequence[int] | None,
    seqused_cmp_kv: acl.IntArray | acl.Tensor | Sequence[int] | None,
    cmp_residual_kv: acl.IntArray | acl.Tensor | Sequence[int] | None, ori_topk_length: acl.Tensor | None,
    cmp_topk_length: acl.Tensor | None, sinks: acl.Tensor | None, metadata: acl.Tensor | None, scale_value: float,
    cmp_ratio: int, ori_mask_mode: int, cmp_mask_mode: int, ori_win_left: int, ori_win_right: int, layout_q: str,
    layout_kv: str, dquery: acl.Tensor | None, dori_kv: acl.Tensor | None, dcmp_kv: acl.Tensor | None,
    dsinks: acl.Tensor | None, ori_softmax_l1_norm: acl.Tensor | None, cmp_softmax_l1_norm: acl.Tensor | None, *,
    strict: bool = True, check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """Gradients of SparseFlashMla, from its output and its softmax_lse. Phase 1: checks, plans, and says how much
    workspace phase 2 needs."""

aclnnSparseFlashMlaGrad: _Run

def aclnnSparseFlashMlaMetadataGetWorkspaceSize(
    cu_seqlens_q: acl.IntArray | acl.Tensor | Sequence[int] | None,
    cu_seqlens_ori_kv: acl.IntArray | acl.Tensor | Sequence[int] | None,
    cu_seqlens_cmp_kv: acl.IntArray | acl.Tensor | Sequence[int] | None,
    seqused_q: acl.IntArray | acl.Tensor | Sequence[int] | None,
    seqused_ori_kv: acl.IntArray | acl.Tensor | Sequence[int] | None,
    seqused_cmp_kv: acl.IntArray | acl.Tensor | Sequence[int] | None,
    cmp_residual_kv: acl.IntArray | acl.Tensor | Sequence[int] | None, ori_topk_length: acl.Tensor | None,
    cmp_topk_length: acl.Tensor | None, num_heads_q: int, num_heads_kv: int, head_dim: int, batch_size: int,
    max_seqlen_q: int, max_seqlen_ori_kv: int, max_seqlen_cmp_kv: int, ori_topk: int, cmp_topk: int, cmp_ratio: int,
    ori_mask_mode: int, cmp_mask_mode: int, ori_win_left: int, ori_win_right: int, layout_q: str, layout_kv: str,
    has_ori_kv: bool, has_cmp_kv: bool, meta_data: acl.Tensor | None, *, strict: bool = True,
    check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """Metadata of SparseFlashMla: zeros, for no work is divided here. Phase 1: checks, plans, and says how much
    workspace phase 2 needs."""

aclnnSparseFlashMlaMetadata: _Run

def aclnnSparseFlashMlaGradMetadataGetWorkspaceSize(
    cu_seqlens_q: acl.IntArray | acl.Tensor | Sequence[int] | None,
    cu_seqlens_ori_kv: acl.IntArray | acl.Tensor | Sequence[int] | None,
    cu_seqlens_cmp_kv: acl.IntArray | acl.Tensor | Sequence[int] | None,
    seqused_q: acl.IntArray | acl.Tensor | Sequence[int] | None,
    seqused_ori_kv: acl.IntArray | acl.Tensor | Sequence[int] | None,
    seqused_cmp_kv: acl.IntArray | acl.Tensor | Sequence[int] | None,
    cmp_residual_kv: acl.IntArray | acl.Tensor | Sequence[int] | None, ori_topk_length: acl.Tensor | None,
    cmp_topk_length: acl.Tensor | None, num_heads_q: int, num_heads_kv: int, head_dim: int, batch_size: int,
    max_seqlen_q: int, max_seqlen_ori_kv: int, max_seqlen_cmp_kv: int, ori_topk: int, cmp_topk: int, cmp_ratio: int,
    ori_mask_mode: int, cmp_mask_mode: int, ori_win_left: int, ori_win_right: int, layout_q: str, layout_kv: str,
    has_ori_kv: bool, has_cmp_kv: bool, meta_data: acl.Tensor | None, *, strict: bool = True,
    check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """Metadata of SparseFlashMlaGrad: zeros, for no work is divided here. Phase 1: checks, plans, and says how much
    workspace phase 2 needs."""

aclnnSparseFlashMlaGradMetadata: _Run

def aclnnSparseFlashMlaSoftmaxL1NormGetWorkspaceSize(
    q: acl.Tensor | None, k: acl.Tensor | None, softmax_lse: acl.Tensor | None, sparse_indices: acl.Tensor | None,
    cu_seqlens_q: acl.IntArray | acl.Tensor | Sequence[int] | None,
    cu_seqlens_k: acl.IntArray | acl.Tensor | Sequence[int] | None,
    seqused_q: acl.IntArray | acl.Tensor | Sequence[int] | None,
    seqused_k: acl.IntArray | acl.Tensor | Sequence[int] | None,
    cmp_residual_k: acl.IntArray | acl.Tensor | Sequence[int] | None, topk_length: acl.Tensor | None,
    metadata: acl.Tensor | None, softmax_scale: float, max_seqlen_k: int, cmp_ratio: int, mask_mode: int,
    layout_q: str, layout_k: str, out: acl.Tensor | None, *, strict: bool = True, check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """Probabilities of compressed keys in SparseFlashMla's softmax, a mean over heads. Phase 1: checks, plans, and
    says how much workspace phase 2 needs."""

aclnnSparseFlashMlaSoftmaxL1Norm: _Run

def aclnnSparseFlashMlaSoftmaxL1NormMetadataGetWorkspaceSize(
    cu_seqlens_q: acl.IntArray | acl.Tensor | Sequence[int] | None,
    cu_seqlens_k: acl.IntArray | acl.Tensor | Sequence[int] | None,
    seqused_q: acl.IntArray | acl.Tensor | Sequence[int] | None,
    seqused_k: acl.IntArray | acl.Tensor | Sequence[int] | None,
    cmp_residual_k: acl.IntArray | acl.Tensor | Sequence[int] | None, topk_length: acl.Tensor | None,
    num_heads_q: int, num_heads_k: int, head_dim: int, batch_size: int, max_seqlen_q: int, max_seqlen_k: int,
    topk: int, layout_q: str, layout_k: str, mask_mode: int, cmp_ratio: int, meta_data: acl.Tensor | None, *,
    strict: bool = True, check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """Metadata of SparseFlashMlaSoftmaxL1Norm: zeros, for no work is divided here. Phase 1: checks, plans, and says
    how much workspace phase 2 needs."""

aclnnSparseFlashMlaSoftmaxL1NormMetadata: _Run

def aclnnCompressorGetWorkspaceSize(
    x: acl.Tensor | None, wkv: acl.Tensor | None, wgate: acl.Tensor | None, state_cache: acl.Tensor | None,
    ape: acl.Tensor | None, state_block_table: acl.Tensor | None,
    cu_seqlens: acl.IntArray | acl.Tensor | Sequence[int] | None,
    seqused: acl.IntArray | acl.Tensor | Sequence[int] | None,
    start_pos: acl.IntArray | acl.Tensor | Sequence[int] | None, cmp_ratio: int, coff: int, cache_mode: int,
    state_cache_stride_dim0: int, grad_enabled: bool, cmp_kv: acl.Tensor | None, softmax_score: acl.Tensor | None,
    kv: acl.Tensor | None, *, strict: bool = True, check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """Projects rows to keys and gates, and pools every window of cmp_ratio rows to one compressed key. Phase 1:
    checks, plans, and says how much workspace phase 2 needs."""

aclnnCompressor: _Run

def aclnnCompressorGradGetWorkspaceSize(
    x: acl.Tensor | None, wkv: acl.Tensor | None, wgate: acl.Tensor | None, dcmp_kv: acl.Tensor | None,
    softmax_score: acl.Tensor | None, kv: acl.Tensor | None,
    cu_seqlens: acl.IntArray | acl.Tensor | Sequence[int] | None,
    seqused: acl.IntArray | acl.Tensor | Sequence[int] | None,
    start_pos: acl.IntArray | acl.Tensor | Sequence[int] | None, cmp_ratio: int, coff: int, dx: acl.Tensor | None,
    dwkv: acl.Tensor | None, dwgate: acl.Tensor | None, dape: acl.Tensor | None, *, strict: bool = True,
    check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """Gradients of Compressor, from the rows that it saved. Phase 1: checks, plans, and says how much workspace phase
    2 needs."""

aclnnCompressorGrad: _Run

def aclnnSparseLightningIndexerGradKLLossGetWorkspaceSize(
    query: acl.Tensor | None, key: acl.Tensor | None, query_index: acl.Tensor | None, key_index: acl.Tensor | None,
    weights: acl.Tensor | None, sparse_indices: acl.Tensor | None, softmax_max: acl.Tensor | None,
    softmax_sum: acl.Tensor | None, query_rope: acl.Tensor | None, key_rope: acl.Tensor | None,
    actual_seq_lengths_query: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_lengths_key: acl.IntArray | acl.Tensor | Sequence[int] | None, scale_value: float, layout: str,
    sparse_mode: int, pre_tokens: int, next_tokens: int, deterministic: bool, dquery_index: acl.Tensor | None,
    dkey_index: acl.Tensor | None, dweights: acl.Tensor | None, loss: acl.Tensor | None, *, strict: bool = True,
    check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """How far the indexer's distribution over the selected keys is from the attention's, and the gradients. Phase 1:
    checks, plans, and says how much workspace phase 2 needs."""

aclnnSparseLightningIndexerGradKLLoss: _Run

def aclnnDenseLightningIndexerGradKLLossGetWorkspaceSize(
    query: acl.Tensor | None, key: acl.Tensor | None, query_index: acl.Tensor | None, key_index: acl.Tensor | None,
    weights: acl.Tensor | None, softmax_max: acl.Tensor | None, softmax_sum: acl.Tensor | None,
    softmax_max_index: acl.Tensor | None, softmax_sum_index: acl.Tensor | None, query_rope: acl.Tensor | None,
    key_rope: acl.Tensor | None, actual_seq_lengths_query: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_lengths_key: acl.IntArray | acl.Tensor | Sequence[int] | None, scale_value: float, layout: str,
    sparse_mode: int, pre_tokens: int, next_tokens: int, dquery_index: acl.Tensor | None,
    dkey_index: acl.Tensor | None, dweights: acl.Tensor | None, loss: acl.Tensor | None, *, strict: bool = True,
    check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """How far the indexer's distribution over all keys is from the attention's, and the gradients. Phase 1: checks,
    plans, and says how much workspace phase 2 needs."""

aclnnDenseLightningIndexerGradKLLoss: _Run

def aclnnDenseLightningIndexerSoftmaxLseGetWorkspaceSize(
    query_index: acl.Tensor | None, key_index: acl.Tensor | None, weight: acl.Tensor | None,
    actual_seq_lengths_query: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_lengths_key: acl.IntArray | acl.Tensor | Sequence[int] | None, layout: str, sparse_mode: int,
    pre_tokens: int, next_tokens: int, softmax_max: acl.Tensor | None, softmax_sum: acl.Tensor | None, *,
    strict: bool = True, check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """The softmax statistics of an indexer's scores over all keys of a row. Phase 1: checks, plans, and says how much
    workspace phase 2 needs."""

aclnnDenseLightningIndexerSoftmaxLse: _Run

def aclnnSparseLightningIndexerKLLossGradGetWorkspaceSize(
    q: acl.Tensor | None, k: acl.Tensor | None, w: acl.Tensor | None, sparse_indices: acl.Tensor | None,
    attn_softmax_l1_norm: acl.Tensor | None, cu_seqlens_q: acl.IntArray | acl.Tensor | Sequence[int] | None,
    cu_seqlens_k: acl.IntArray | acl.Tensor | Sequence[int] | None,
    seqused_q: acl.IntArray | acl.Tensor | Sequence[int] | None,
    seqused_k: acl.IntArray | acl.Tensor | Sequence[int] | None,
    cmp_residual_k: acl.IntArray | acl.Tensor | Sequence[int] | None, metadata: acl.Tensor | None, layout_q: str,
    layout_k: str, mask_mode: int, cmp_ratio: int, dq: acl.Tensor | None, dk: acl.Tensor | None,
    dw: acl.Tensor | None, softmax_out: acl.Tensor | None, *, strict: bool = True, check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """The gradients that bring the indexer's distribution over selected keys nearer to a given target. Phase 1:
    checks, plans, and says how much workspace phase 2 needs."""

aclnnSparseLightningIndexerKLLossGrad: _Run

def aclnnDenseLightningIndexerKLLossGradGetWorkspaceSize(
    q: acl.Tensor | None, k: acl.Tensor | None, w: acl.Tensor | None, attn_softmax_l1_norm: acl.Tensor | None,
    softmax_lse: acl.Tensor | None, cu_seqlens_q: acl.IntArray | acl.Tensor | Sequence[int] | None,
    cu_seqlens_k: acl.IntArray | acl.Tensor | Sequence[int] | None,
    seqused_q: acl.IntArray | acl.Tensor | Sequence[int] | None,
    seqused_k: acl.IntArray | acl.Tensor | Sequence[int] | None,
    cmp_residual_k: acl.IntArray | acl.Tensor | Sequence[int] | None, metadata: acl.Tensor | None, layout_q: str,
    layout_k: str, mask_mode: int, cmp_ratio: int, dq: acl.Tensor | None, dk: acl.Tensor | None,
    dw: acl.Tensor | None, softmax_out: acl.Tensor | None, *, strict: bool = True, check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """The gradients that bring the indexer's distribution over all keys nearer to a given target. Phase 1: checks,
    plans, and says how much workspace phase 2 needs."""

aclnnDenseLightningIndexerKLLossGrad: _Run

def aclnnDenseLightningIndexerSoftmaxLseV2GetWorkspaceSize(
    query_index: acl.Tensor | None, key_index: acl.Tensor | None, weight: acl.Tensor | None,
    cu_seqlens_q: acl.IntArray | acl.Tensor | Sequence[int] | None,
    cu_seqlens_k: acl.IntArray | acl.Tensor | Sequence[int] | None,
    seqused_q: acl.IntArray | acl.Tensor | Sequence[int] | None,
    seqused_k: acl.IntArray | acl.Tensor | Sequence[int] | None,
    cmp_residual_k: acl.IntArray | acl.Tensor | Sequence[int] | None, metadata: acl.Tensor | None, layout_q: str,
    layout_k: str, mask_mode: int, cmp_ratio: int, softmax_lse: acl.Tensor | None, *, strict: bool = True,
    check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """The log-sum-exp of an indexer's scores over all keys of a row. Phase 1: checks, plans, and says how much
    workspace phase 2 needs."""

aclnnDenseLightningIndexerSoftmaxLseV2: _Run

def aclnnSparseLightningIndexerKLLossGradMetadataGetWorkspaceSize(
    cu_seqlens_q: acl.IntArray | acl.Tensor | Sequence[int] | None,
    cu_seqlens_k: acl.IntArray | acl.Tensor | Sequence[int] | None,
    seqused_q: acl.IntArray | acl.Tensor | Sequence[int] | None,
    seqused_k: acl.IntArray | acl.Tensor | Sequence[int] | None,
    cmp_residual_k: acl.IntArray | acl.Tensor | Sequence[int] | None, batch_size: int, max_seqlen_q: int,
    max_seqlen_k: int, num_heads_q: int, num_heads_k: int, head_dim: int, topk: int, layout_q: str, layout_k: str,
    mask_mode: int, cmp_ratio: int, meta_data: acl.Tensor | None, *, strict: bool = True, check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """Metadata of SparseLightningIndexerKLLossGrad: zeros, for no work is divided here. Phase 1: checks, plans, and
    says how much workspace phase 2 needs."""

aclnnSparseLightningIndexerKLLossGradMetadata: _Run

def aclnnDenseLightningIndexerKLLossGradMetadataGetWorkspaceSize(
    cu_seqlens_q: acl.IntArray | acl.Tensor | Sequence[int] | None,
    cu_seqlens_k: acl.IntArray | acl.Tensor | Sequence[int] | None,
    seqused_q: acl.IntArray | acl.Tensor | Sequence[int] | None,
    seqused_k: acl.IntArray | acl.Tensor | Sequence[int] | None,
    cmp_residual_k: acl.IntArray | acl.Tensor | Sequence[int] | None, batch_size: int, max_seqlen_q: int,
    max_seqlen_k: int, num_heads_q: int, num_heads_k: int, head_dim: int, layout_q: str, layout_k: str,
    mask_mode: int, cmp_ratio: int, meta_data: acl.Tensor | None, *, strict: bool = True, check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """Metadata of DenseLightningIndexerKLLossGrad: zeros, for no work is divided here. Phase 1: checks, plans, and
    says how much workspace phase 2 needs."""

aclnnDenseLightningIndexerKLLossGradMetadata: _Run

def aclnnDenseLightningIndexerSoftmaxLseV2MetadataGetWorkspaceSize(
    cu_seqlens_q: acl.IntArray | acl.Tensor | Sequence[int] | None,
    cu_seqlens_k: acl.IntArray | acl.Tensor | Sequence[int] | None,
    seqused_q: acl.IntArray | acl.Tensor | Sequence[int] | None,
    seqused_k: acl.IntArray | acl.Tensor | Sequence[int] | None,
    cmp_residual_k: acl.IntArray | acl.Tensor | Sequence[int] | None, batch_size: int, max_seqlen_q: int,
    max_seqlen_k: int, num_heads_q: int, num_heads_k: int, head_dim: int, layout_q: str, layout_k: str,
    mask_mode: int, cmp_ratio: int, meta_data: acl.Tensor | None, *, strict: bool = True, check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """Metadata of DenseLightningIndexerSoftmaxLseV2: zeros, for no work is divided here. Phase 1: checks, plans, and
    says how much workspace phase 2 needs."""

aclnnDenseLightningIndexerSoftmaxLseV2Metadata: _Run


"""The functions of aclnn, for type checkers; generated from the records by `fusion-attention ops --write --stub`."""

from collections.abc import Sequence
from typing import Any

from fusion_attention import acl

def aclnnFlashAttentionScoreGetWorkspaceSize(
    query: acl.Tensor | None,
    key: acl.Tensor | None,
    value: acl.Tensor | None,
    pse: acl.Tensor | None,
    drop_mask: acl.Tensor | None,
    padding_mask: acl.Tensor | None,
    atten_mask: acl.Tensor | None,
    prefix: acl.IntArray | acl.Tensor | Sequence[int] | None,
    scale: float,
    keep_prob: float,
    pre_tokens: int,
    next_tokens: int,
    head_num: int,
    input_layout: str,
    inner_precise: int,
    sparse_mode: int,
    softmax_max: acl.Tensor | None,
    softmax_sum: acl.Tensor | None,
    softmax_out: acl.Tensor | None,
    attention_out: acl.Tensor | None,
    *,
    strict: bool = True,
    check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """Attention for training, forward, padded layouts. Phase 1: checks, plans, and says how much workspace phase 2 needs.

    Args:
        query: Query rows.
        key: Key rows.
        value: Value rows.
        pse: Bias on the scores; slopes for pse_type 2 and 3. May be None.
        drop_mask: One bit per score, 1 = kept. May be None.
        padding_mask: Reserved. May be None.
        atten_mask: 1 = this score is removed. May be None.
        prefix: Per sequence the keys that every row sees (modes 5 and 6). May be None.
        scale: Factor on query . key.
        keep_prob: Share of probabilities that dropout keeps.
        pre_tokens: Window to the left (modes 0 and 4).
        next_tokens: Window to the right (modes 0, 4, 7, 8).
        head_num: Query heads.
        input_layout: Axis order of query, key, value and the output.
        inner_precise: 2: rows that see no key return zeros.
        sparse_mode: How mask, window and prefix combine (docs/sparse_modes.md).
        softmax_max: Row maxima of the scores, eight equal lanes.
        softmax_sum: Row sums of exp(score - max), eight equal lanes.
        softmax_out: Reserved: empty.
        attention_out: The output rows.
        strict: the chip's limits are errors too.
        check_content: phase 2 checks tensor content too.

    Returns:
        (ret, workspace_size, executor): 0, bytes and what phase 2 takes; or a code, 0 and None.

    Source: CANN, aclnnFlashAttentionScore.
    """

def aclnnFlashAttentionScore(
    workspace: Any,
    workspace_size: int,
    executor: acl.Executor | None,
    stream: acl.Stream | None,
) -> int:
    """Attention for training, forward, padded layouts. Phase 2: runs what phase 1 planned, into its output tensors.

    Args:
        workspace: address of device memory (or a torch tensor) of at least workspace_size bytes; None where that is 0.
        workspace_size: as phase 1 returned it, or more.
        executor: as phase 1 returned it; one run each, unless made repeatable.
        stream: from acl.rt.create_stream(); None is the default one.

    Returns:
        ret: 0, or a code; acl.get_recent_err_msg() says why, and nothing was written.

    Source: CANN, aclnnFlashAttentionScore.
    """

def aclnnFlashAttentionScoreV2GetWorkspaceSize(
    query: acl.Tensor | None,
    key: acl.Tensor | None,
    value: acl.Tensor | None,
    pse: acl.Tensor | None,
    drop_mask: acl.Tensor | None,
    padding_mask: acl.Tensor | None,
    atten_mask: acl.Tensor | None,
    prefix: acl.IntArray | acl.Tensor | Sequence[int] | None,
    q_start_idx: acl.IntArray | acl.Tensor | Sequence[int] | None,
    kv_start_idx: acl.IntArray | acl.Tensor | Sequence[int] | None,
    scale: float,
    keep_prob: float,
    pre_tokens: int,
    next_tokens: int,
    head_num: int,
    input_layout: str,
    inner_precise: int,
    sparse_mode: int,
    pse_type: int,
    softmax_max: acl.Tensor | None,
    softmax_sum: acl.Tensor | None,
    softmax_out: acl.Tensor | None,
    attention_out: acl.Tensor | None,
    *,
    strict: bool = True,
    check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """FlashAttentionScore with pse_type and start indices. Phase 1: checks, plans, and says how much workspace phase 2 needs.

    Args:
        query: Query rows.
        key: Key rows.
        value: Value rows.
        pse: Bias on the scores; slopes for pse_type 2 and 3. May be None.
        drop_mask: One bit per score, 1 = kept. May be None.
        padding_mask: Reserved. May be None.
        atten_mask: 1 = this score is removed. May be None.
        prefix: Per sequence the keys that every row sees (modes 5 and 6). May be None.
        q_start_idx: Position of the first query row in its sequence (element 0 is read); None: 0. May be None.
        kv_start_idx: Position of the first key in its sequence (element 0 is read); None: 0. May be None.
        scale: Factor on query . key.
        keep_prob: Share of probabilities that dropout keeps.
        pre_tokens: Window to the left (modes 0 and 4).
        next_tokens: Window to the right (modes 0, 4, 7, 8).
        head_num: Query heads.
        input_layout: Axis order of query, key, value and the output.
        inner_precise: 2: rows that see no key return zeros.
        sparse_mode: How mask, window and prefix combine (docs/sparse_modes.md).
        pse_type: 1 scale*(qk+pse), 0 scale*qk+pse, 2 and 3 computed from slopes.
        softmax_max: Row maxima of the scores, eight equal lanes.
        softmax_sum: Row sums of exp(score - max), eight equal lanes.
        softmax_out: Reserved: empty.
        attention_out: The output rows.
        strict: the chip's limits are errors too.
        check_content: phase 2 checks tensor content too.

    Returns:
        (ret, workspace_size, executor): 0, bytes and what phase 2 takes; or a code, 0 and None.

    Source: CANN, aclnnFlashAttentionScoreV2.
    """

def aclnnFlashAttentionScoreV2(
    workspace: Any,
    workspace_size: int,
    executor: acl.Executor | None,
    stream: acl.Stream | None,
) -> int:
    """FlashAttentionScore with pse_type and start indices. Phase 2: runs what phase 1 planned, into its output tensors.

    Args:
        workspace: address of device memory (or a torch tensor) of at least workspace_size bytes; None where that is 0.
        workspace_size: as phase 1 returned it, or more.
        executor: as phase 1 returned it; one run each, unless made repeatable.
        stream: from acl.rt.create_stream(); None is the default one.

    Returns:
        ret: 0, or a code; acl.get_recent_err_msg() says why, and nothing was written.

    Source: CANN, aclnnFlashAttentionScoreV2.
    """

def aclnnFlashAttentionScoreV3GetWorkspaceSize(
    query: acl.Tensor | None,
    key: acl.Tensor | None,
    value: acl.Tensor | None,
    pse: acl.Tensor | None,
    drop_mask: acl.Tensor | None,
    padding_mask: acl.Tensor | None,
    atten_mask: acl.Tensor | None,
    sink: acl.Tensor | None,
    prefix: acl.IntArray | acl.Tensor | Sequence[int] | None,
    q_start_idx: acl.IntArray | acl.Tensor | Sequence[int] | None,
    kv_start_idx: acl.IntArray | acl.Tensor | Sequence[int] | None,
    scale: float,
    keep_prob: float,
    pre_tokens: int,
    next_tokens: int,
    head_num: int,
    input_layout: str,
    inner_precise: int,
    sparse_mode: int,
    pse_type: int,
    softmax_max: acl.Tensor | None,
    softmax_sum: acl.Tensor | None,
    softmax_out: acl.Tensor | None,
    attention_out: acl.Tensor | None,
    *,
    strict: bool = True,
    check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """FlashAttentionScoreV2 with sinks. Phase 1: checks, plans, and says how much workspace phase 2 needs.

    Args:
        query: Query rows.
        key: Key rows.
        value: Value rows.
        pse: Bias on the scores; slopes for pse_type 2 and 3. May be None.
        drop_mask: One bit per score, 1 = kept. May be None.
        padding_mask: Reserved. May be None.
        atten_mask: 1 = this score is removed. May be None.
        sink: One more logit per query head in every denominator. May be None.
        prefix: Per sequence the keys that every row sees (modes 5 and 6). May be None.
        q_start_idx: Position of the first query row in its sequence (element 0 is read); None: 0. May be None.
        kv_start_idx: Position of the first key in its sequence (element 0 is read); None: 0. May be None.
        scale: Factor on query . key.
        keep_prob: Share of probabilities that dropout keeps.
        pre_tokens: Window to the left (modes 0 and 4).
        next_tokens: Window to the right (modes 0, 4, 7, 8).
        head_num: Query heads.
        input_layout: Axis order of query, key, value and the output.
        inner_precise: 2: rows that see no key return zeros.
        sparse_mode: How mask, window and prefix combine (docs/sparse_modes.md).
        pse_type: 1 scale*(qk+pse), 0 scale*qk+pse, 2 and 3 computed from slopes.
        softmax_max: Row maxima of the scores, eight equal lanes.
        softmax_sum: Row sums of exp(score - max), eight equal lanes.
        softmax_out: Reserved: empty.
        attention_out: The output rows.
        strict: the chip's limits are errors too.
        check_content: phase 2 checks tensor content too.

    Returns:
        (ret, workspace_size, executor): 0, bytes and what phase 2 takes; or a code, 0 and None.

    Source: CANN, aclnnFlashAttentionScoreV3.
    """

def aclnnFlashAttentionScoreV3(
    workspace: Any,
    workspace_size: int,
    executor: acl.Executor | None,
    stream: acl.Stream | None,
) -> int:
    """FlashAttentionScoreV2 with sinks. Phase 2: runs what phase 1 planned, into its output tensors.

    Args:
        workspace: address of device memory (or a torch tensor) of at least workspace_size bytes; None where that is 0.
        workspace_size: as phase 1 returned it, or more.
        executor: as phase 1 returned it; one run each, unless made repeatable.
        stream: from acl.rt.create_stream(); None is the default one.

    Returns:
        ret: 0, or a code; acl.get_recent_err_msg() says why, and nothing was written.

    Source: CANN, aclnnFlashAttentionScoreV3.
    """

def aclnnFlashAttentionVarLenScoreGetWorkspaceSize(
    query: acl.Tensor | None,
    key: acl.Tensor | None,
    value: acl.Tensor | None,
    pse: acl.Tensor | None,
    drop_mask: acl.Tensor | None,
    padding_mask: acl.Tensor | None,
    atten_mask: acl.Tensor | None,
    prefix: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_qlen: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_kvlen: acl.IntArray | acl.Tensor | Sequence[int] | None,
    scale: float,
    keep_prob: float,
    pre_tokens: int,
    next_tokens: int,
    head_num: int,
    input_layout: str,
    inner_precise: int,
    sparse_mode: int,
    softmax_max: acl.Tensor | None,
    softmax_sum: acl.Tensor | None,
    softmax_out: acl.Tensor | None,
    attention_out: acl.Tensor | None,
    *,
    strict: bool = True,
    check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """Attention for training, forward, packed sequences. Phase 1: checks, plans, and says how much workspace phase 2 needs.

    Args:
        query: Query rows.
        key: Key rows.
        value: Value rows.
        pse: Bias on the scores; slopes for pse_type 2 and 3. May be None.
        drop_mask: One bit per score, 1 = kept. May be None.
        padding_mask: Reserved. May be None.
        atten_mask: 1 = this score is removed. May be None.
        prefix: Per sequence the keys that every row sees (modes 5 and 6). May be None.
        actual_seq_qlen: Cumulative end of every sequence's query rows. May be None.
        actual_seq_kvlen: Cumulative end of every sequence's keys. May be None.
        scale: Factor on query . key.
        keep_prob: Share of probabilities that dropout keeps.
        pre_tokens: Window to the left (modes 0 and 4).
        next_tokens: Window to the right (modes 0, 4, 7, 8).
        head_num: Query heads.
        input_layout: Axis order of query, key, value and the output.
        inner_precise: 2: rows that see no key return zeros.
        sparse_mode: How mask, window and prefix combine (docs/sparse_modes.md).
        softmax_max: Row maxima of the scores, eight equal lanes. TND: [N1, q_len, 8] of each sequence end to end, token by token only where a softmax_layout asks for it.
        softmax_sum: Row sums of exp(score - max), eight equal lanes. TND: [N1, q_len, 8] of each sequence end to end, token by token only where a softmax_layout asks for it.
        softmax_out: Reserved: empty.
        attention_out: The output rows.
        strict: the chip's limits are errors too.
        check_content: phase 2 checks tensor content too.

    Returns:
        (ret, workspace_size, executor): 0, bytes and what phase 2 takes; or a code, 0 and None.

    Source: CANN, aclnnFlashAttentionVarLenScore.
    """

def aclnnFlashAttentionVarLenScore(
    workspace: Any,
    workspace_size: int,
    executor: acl.Executor | None,
    stream: acl.Stream | None,
) -> int:
    """Attention for training, forward, packed sequences. Phase 2: runs what phase 1 planned, into its output tensors.

    Args:
        workspace: address of device memory (or a torch tensor) of at least workspace_size bytes; None where that is 0.
        workspace_size: as phase 1 returned it, or more.
        executor: as phase 1 returned it; one run each, unless made repeatable.
        stream: from acl.rt.create_stream(); None is the default one.

    Returns:
        ret: 0, or a code; acl.get_recent_err_msg() says why, and nothing was written.

    Source: CANN, aclnnFlashAttentionVarLenScore.
    """

def aclnnFlashAttentionVarLenScoreV2GetWorkspaceSize(
    query: acl.Tensor | None,
    key: acl.Tensor | None,
    value: acl.Tensor | None,
    pse: acl.Tensor | None,
    drop_mask: acl.Tensor | None,
    padding_mask: acl.Tensor | None,
    atten_mask: acl.Tensor | None,
    prefix: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_qlen: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_kvlen: acl.IntArray | acl.Tensor | Sequence[int] | None,
    q_start_idx: acl.IntArray | acl.Tensor | Sequence[int] | None,
    kv_start_idx: acl.IntArray | acl.Tensor | Sequence[int] | None,
    scale: float,
    keep_prob: float,
    pre_tokens: int,
    next_tokens: int,
    head_num: int,
    input_layout: str,
    inner_precise: int,
    sparse_mode: int,
    pse_type: int,
    softmax_max: acl.Tensor | None,
    softmax_sum: acl.Tensor | None,
    softmax_out: acl.Tensor | None,
    attention_out: acl.Tensor | None,
    *,
    strict: bool = True,
    check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """VarLenScore with pse_type and start indices. Phase 1: checks, plans, and says how much workspace phase 2 needs.

    Args:
        query: Query rows.
        key: Key rows.
        value: Value rows.
        pse: Bias on the scores; slopes for pse_type 2 and 3. May be None.
        drop_mask: One bit per score, 1 = kept. May be None.
        padding_mask: Reserved. May be None.
        atten_mask: 1 = this score is removed. May be None.
        prefix: Per sequence the keys that every row sees (modes 5 and 6). May be None.
        actual_seq_qlen: Cumulative end of every sequence's query rows. May be None.
        actual_seq_kvlen: Cumulative end of every sequence's keys. May be None.
        q_start_idx: Position of the first query row in its sequence (element 0 is read); None: 0. May be None.
        kv_start_idx: Position of the first key in its sequence (element 0 is read); None: 0. May be None.
        scale: Factor on query . key.
        keep_prob: Share of probabilities that dropout keeps.
        pre_tokens: Window to the left (modes 0 and 4).
        next_tokens: Window to the right (modes 0, 4, 7, 8).
        head_num: Query heads.
        input_layout: Axis order of query, key, value and the output.
        inner_precise: 2: rows that see no key return zeros.
        sparse_mode: How mask, window and prefix combine (docs/sparse_modes.md).
        pse_type: 1 scale*(qk+pse), 0 scale*qk+pse, 2 and 3 computed from slopes.
        softmax_max: Row maxima of the scores, eight equal lanes. TND: [N1, q_len, 8] of each sequence end to end, token by token only where a softmax_layout asks for it.
        softmax_sum: Row sums of exp(score - max), eight equal lanes. TND: [N1, q_len, 8] of each sequence end to end, token by token only where a softmax_layout asks for it.
        softmax_out: Reserved: empty.
        attention_out: The output rows.
        strict: the chip's limits are errors too.
        check_content: phase 2 checks tensor content too.

    Returns:
        (ret, workspace_size, executor): 0, bytes and what phase 2 takes; or a code, 0 and None.

    Source: CANN, aclnnFlashAttentionVarLenScoreV2.
    """

def aclnnFlashAttentionVarLenScoreV2(
    workspace: Any,
    workspace_size: int,
    executor: acl.Executor | None,
    stream: acl.Stream | None,
) -> int:
    """VarLenScore with pse_type and start indices. Phase 2: runs what phase 1 planned, into its output tensors.

    Args:
        workspace: address of device memory (or a torch tensor) of at least workspace_size bytes; None where that is 0.
        workspace_size: as phase 1 returned it, or more.
        executor: as phase 1 returned it; one run each, unless made repeatable.
        stream: from acl.rt.create_stream(); None is the default one.

    Returns:
        ret: 0, or a code; acl.get_recent_err_msg() says why, and nothing was written.

    Source: CANN, aclnnFlashAttentionVarLenScoreV2.
    """

def aclnnFlashAttentionVarLenScoreV3GetWorkspaceSize(
    query: acl.Tensor | None,
    query_rope: acl.Tensor | None,
    key: acl.Tensor | None,
    key_rope: acl.Tensor | None,
    value: acl.Tensor | None,
    pse: acl.Tensor | None,
    drop_mask: acl.Tensor | None,
    padding_mask: acl.Tensor | None,
    atten_mask: acl.Tensor | None,
    prefix: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_qlen: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_kvlen: acl.IntArray | acl.Tensor | Sequence[int] | None,
    q_start_idx: acl.IntArray | acl.Tensor | Sequence[int] | None,
    kv_start_idx: acl.IntArray | acl.Tensor | Sequence[int] | None,
    scale: float,
    keep_prob: float,
    pre_tokens: int,
    next_tokens: int,
    head_num: int,
    input_layout: str,
    inner_precise: int,
    sparse_mode: int,
    pse_type: int,
    softmax_max: acl.Tensor | None,
    softmax_sum: acl.Tensor | None,
    softmax_out: acl.Tensor | None,
    attention_out: acl.Tensor | None,
    *,
    strict: bool = True,
    check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """VarLenScoreV2 with rope parts of query and key. Phase 1: checks, plans, and says how much workspace phase 2 needs.

    Args:
        query: Query rows.
        query_rope: Rope part of the query rows. May be None.
        key: Key rows.
        key_rope: Rope part of the key rows. May be None.
        value: Value rows.
        pse: Bias on the scores; slopes for pse_type 2 and 3. May be None.
        drop_mask: One bit per score, 1 = kept. May be None.
        padding_mask: Reserved. May be None.
        atten_mask: 1 = this score is removed. May be None.
        prefix: Per sequence the keys that every row sees (modes 5 and 6). May be None.
        actual_seq_qlen: Cumulative end of every sequence's query rows. May be None.
        actual_seq_kvlen: Cumulative end of every sequence's keys. May be None.
        q_start_idx: Position of the first query row in its sequence (element 0 is read); None: 0. May be None.
        kv_start_idx: Position of the first key in its sequence (element 0 is read); None: 0. May be None.
        scale: Factor on query . key.
        keep_prob: Share of probabilities that dropout keeps.
        pre_tokens: Window to the left (modes 0 and 4).
        next_tokens: Window to the right (modes 0, 4, 7, 8).
        head_num: Query heads.
        input_layout: Axis order of query, key, value and the output.
        inner_precise: 2: rows that see no key return zeros.
        sparse_mode: How mask, window and prefix combine (docs/sparse_modes.md).
        pse_type: 1 scale*(qk+pse), 0 scale*qk+pse, 2 and 3 computed from slopes.
        softmax_max: Row maxima of the scores, eight equal lanes. TND: [N1, q_len, 8] of each sequence end to end, token by token only where a softmax_layout asks for it.
        softmax_sum: Row sums of exp(score - max), eight equal lanes. TND: [N1, q_len, 8] of each sequence end to end, token by token only where a softmax_layout asks for it.
        softmax_out: Reserved: empty.
        attention_out: The output rows.
        strict: the chip's limits are errors too.
        check_content: phase 2 checks tensor content too.

    Returns:
        (ret, workspace_size, executor): 0, bytes and what phase 2 takes; or a code, 0 and None.

    Source: CANN, aclnnFlashAttentionVarLenScoreV3.
    """

def aclnnFlashAttentionVarLenScoreV3(
    workspace: Any,
    workspace_size: int,
    executor: acl.Executor | None,
    stream: acl.Stream | None,
) -> int:
    """VarLenScoreV2 with rope parts of query and key. Phase 2: runs what phase 1 planned, into its output tensors.

    Args:
        workspace: address of device memory (or a torch tensor) of at least workspace_size bytes; None where that is 0.
        workspace_size: as phase 1 returned it, or more.
        executor: as phase 1 returned it; one run each, unless made repeatable.
        stream: from acl.rt.create_stream(); None is the default one.

    Returns:
        ret: 0, or a code; acl.get_recent_err_msg() says why, and nothing was written.

    Source: CANN, aclnnFlashAttentionVarLenScoreV3.
    """

def aclnnFlashAttentionVarLenScoreV4GetWorkspaceSize(
    query: acl.Tensor | None,
    key: acl.Tensor | None,
    value: acl.Tensor | None,
    pse: acl.Tensor | None,
    drop_mask: acl.Tensor | None,
    padding_mask: acl.Tensor | None,
    atten_mask: acl.Tensor | None,
    prefix: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_qlen: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_kvlen: acl.IntArray | acl.Tensor | Sequence[int] | None,
    scale: float,
    keep_prob: float,
    pre_tokens: int,
    next_tokens: int,
    head_num: int,
    input_layout: str,
    inner_precise: int,
    sparse_mode: int,
    softmax_layout: str,
    softmax_max: acl.Tensor | None,
    softmax_sum: acl.Tensor | None,
    softmax_out: acl.Tensor | None,
    attention_out: acl.Tensor | None,
    *,
    strict: bool = True,
    check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """VarLenScore with a choice of the statistics' order. Phase 1: checks, plans, and says how much workspace phase 2 needs.

    Args:
        query: Query rows.
        key: Key rows.
        value: Value rows.
        pse: Bias on the scores; slopes for pse_type 2 and 3. May be None.
        drop_mask: One bit per score, 1 = kept. May be None.
        padding_mask: Reserved. May be None.
        atten_mask: 1 = this score is removed. May be None.
        prefix: Per sequence the keys that every row sees (modes 5 and 6). May be None.
        actual_seq_qlen: Cumulative end of every sequence's query rows. May be None.
        actual_seq_kvlen: Cumulative end of every sequence's keys. May be None.
        scale: Factor on query . key.
        keep_prob: Share of probabilities that dropout keeps.
        pre_tokens: Window to the left (modes 0 and 4).
        next_tokens: Window to the right (modes 0, 4, 7, 8).
        head_num: Query heads.
        input_layout: Axis order of query, key, value and the output.
        inner_precise: 2: rows that see no key return zeros.
        sparse_mode: How mask, window and prefix combine (docs/sparse_modes.md).
        softmax_layout: Order of packed statistics: per sequence head-major, or token-major.
        softmax_max: Row maxima of the scores, eight equal lanes. TND: [N1, q_len, 8] of each sequence end to end, token by token only where a softmax_layout asks for it.
        softmax_sum: Row sums of exp(score - max), eight equal lanes. TND: [N1, q_len, 8] of each sequence end to end, token by token only where a softmax_layout asks for it.
        softmax_out: Reserved: empty.
        attention_out: The output rows.
        strict: the chip's limits are errors too.
        check_content: phase 2 checks tensor content too.

    Returns:
        (ret, workspace_size, executor): 0, bytes and what phase 2 takes; or a code, 0 and None.

    Source: CANN, aclnnFlashAttentionVarLenScoreV4.
    """

def aclnnFlashAttentionVarLenScoreV4(
    workspace: Any,
    workspace_size: int,
    executor: acl.Executor | None,
    stream: acl.Stream | None,
) -> int:
    """VarLenScore with a choice of the statistics' order. Phase 2: runs what phase 1 planned, into its output tensors.

    Args:
        workspace: address of device memory (or a torch tensor) of at least workspace_size bytes; None where that is 0.
        workspace_size: as phase 1 returned it, or more.
        executor: as phase 1 returned it; one run each, unless made repeatable.
        stream: from acl.rt.create_stream(); None is the default one.

    Returns:
        ret: 0, or a code; acl.get_recent_err_msg() says why, and nothing was written.

    Source: CANN, aclnnFlashAttentionVarLenScoreV4.
    """

def aclnnFlashAttentionVarLenScoreV5GetWorkspaceSize(
    query: acl.Tensor | None,
    query_rope: acl.Tensor | None,
    key: acl.Tensor | None,
    key_rope: acl.Tensor | None,
    value: acl.Tensor | None,
    pse: acl.Tensor | None,
    drop_mask: acl.Tensor | None,
    padding_mask: acl.Tensor | None,
    atten_mask: acl.Tensor | None,
    sink: acl.Tensor | None,
    prefix: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_qlen: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_kvlen: acl.IntArray | acl.Tensor | Sequence[int] | None,
    q_start_idx: acl.IntArray | acl.Tensor | Sequence[int] | None,
    kv_start_idx: acl.IntArray | acl.Tensor | Sequence[int] | None,
    scale: float,
    keep_prob: float,
    pre_tokens: int,
    next_tokens: int,
    head_num: int,
    input_layout: str,
    inner_precise: int,
    sparse_mode: int,
    pse_type: int,
    softmax_layout: str,
    softmax_max: acl.Tensor | None,
    softmax_sum: acl.Tensor | None,
    softmax_out: acl.Tensor | None,
    attention_out: acl.Tensor | None,
    *,
    strict: bool = True,
    check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """VarLenScoreV3 with sinks and a choice of the statistics' order. Phase 1: checks, plans, and says how much workspace phase 2 needs.

    Args:
        query: Query rows.
        query_rope: Rope part of the query rows. May be None.
        key: Key rows.
        key_rope: Rope part of the key rows. May be None.
        value: Value rows.
        pse: Bias on the scores; slopes for pse_type 2 and 3. May be None.
        drop_mask: One bit per score, 1 = kept. May be None.
        padding_mask: Reserved. May be None.
        atten_mask: 1 = this score is removed. May be None.
        sink: One more logit per query head in every denominator. May be None.
        prefix: Per sequence the keys that every row sees (modes 5 and 6). May be None.
        actual_seq_qlen: Cumulative end of every sequence's query rows. May be None.
        actual_seq_kvlen: Cumulative end of every sequence's keys. May be None.
        q_start_idx: Position of the first query row in its sequence (element 0 is read); None: 0. May be None.
        kv_start_idx: Position of the first key in its sequence (element 0 is read); None: 0. May be None.
        scale: Factor on query . key.
        keep_prob: Share of probabilities that dropout keeps.
        pre_tokens: Window to the left (modes 0 and 4).
        next_tokens: Window to the right (modes 0, 4, 7, 8).
        head_num: Query heads.
        input_layout: Axis order of query, key, value and the output.
        inner_precise: 2: rows that see no key return zeros.
        sparse_mode: How mask, window and prefix combine (docs/sparse_modes.md).
        pse_type: 1 scale*(qk+pse), 0 scale*qk+pse, 2 and 3 computed from slopes.
        softmax_layout: Order of packed statistics: per sequence head-major, or token-major.
        softmax_max: Row maxima of the scores, eight equal lanes. TND: [N1, q_len, 8] of each sequence end to end, token by token only where a softmax_layout asks for it.
        softmax_sum: Row sums of exp(score - max), eight equal lanes. TND: [N1, q_len, 8] of each sequence end to end, token by token only where a softmax_layout asks for it.
        softmax_out: Reserved: empty.
        attention_out: The output rows.
        strict: the chip's limits are errors too.
        check_content: phase 2 checks tensor content too.

    Returns:
        (ret, workspace_size, executor): 0, bytes and what phase 2 takes; or a code, 0 and None.

    Source: CANN, aclnnFlashAttentionVarLenScoreV5.
    """

def aclnnFlashAttentionVarLenScoreV5(
    workspace: Any,
    workspace_size: int,
    executor: acl.Executor | None,
    stream: acl.Stream | None,
) -> int:
    """VarLenScoreV3 with sinks and a choice of the statistics' order. Phase 2: runs what phase 1 planned, into its output tensors.

    Args:
        workspace: address of device memory (or a torch tensor) of at least workspace_size bytes; None where that is 0.
        workspace_size: as phase 1 returned it, or more.
        executor: as phase 1 returned it; one run each, unless made repeatable.
        stream: from acl.rt.create_stream(); None is the default one.

    Returns:
        ret: 0, or a code; acl.get_recent_err_msg() says why, and nothing was written.

    Source: CANN, aclnnFlashAttentionVarLenScoreV5.
    """

def aclnnFlashAttentionScoreGradGetWorkspaceSize(
    query: acl.Tensor | None,
    key: acl.Tensor | None,
    value: acl.Tensor | None,
    dy: acl.Tensor | None,
    pse: acl.Tensor | None,
    drop_mask: acl.Tensor | None,
    padding_mask: acl.Tensor | None,
    atten_mask: acl.Tensor | None,
    softmax_max: acl.Tensor | None,
    softmax_sum: acl.Tensor | None,
    softmax_in: acl.Tensor | None,
    attention_in: acl.Tensor | None,
    prefix: acl.IntArray | acl.Tensor | Sequence[int] | None,
    scale: float,
    keep_prob: float,
    pre_tokens: int,
    next_tokens: int,
    head_num: int,
    input_layout: str,
    inner_precise: int,
    sparse_mode: int,
    dq: acl.Tensor | None,
    dk: acl.Tensor | None,
    dv: acl.Tensor | None,
    dpse: acl.Tensor | None,
    *,
    strict: bool = True,
    check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """Gradients of FlashAttentionScore. Phase 1: checks, plans, and says how much workspace phase 2 needs.

    Args:
        query: Query rows.
        key: Key rows.
        value: Value rows.
        dy: Gradient of the output.
        pse: Bias on the scores; slopes for pse_type 2 and 3. May be None.
        drop_mask: One bit per score, 1 = kept. May be None.
        padding_mask: Reserved. May be None.
        atten_mask: 1 = this score is removed. May be None.
        softmax_max: Row maxima that the forward returned.
        softmax_sum: Row sums that the forward returned.
        softmax_in: Reserved. May be None.
        attention_in: The forward's output.
        prefix: Per sequence the keys that every row sees (modes 5 and 6). May be None.
        scale: Factor on query . key.
        keep_prob: Share of probabilities that dropout keeps.
        pre_tokens: Window to the left (modes 0 and 4).
        next_tokens: Window to the right (modes 0, 4, 7, 8).
        head_num: Query heads.
        input_layout: Axis order of query, key, value and the output.
        inner_precise: 2: rows that see no key return zeros.
        sparse_mode: How mask, window and prefix combine (docs/sparse_modes.md).
        dq: Gradient of query.
        dk: Gradient of key.
        dv: Gradient of value.
        dpse: Gradient of pse, in its shape.
        strict: the chip's limits are errors too.
        check_content: phase 2 checks tensor content too.

    Returns:
        (ret, workspace_size, executor): 0, bytes and what phase 2 takes; or a code, 0 and None.

    Source: CANN, aclnnFlashAttentionScoreGrad.
    """

def aclnnFlashAttentionScoreGrad(
    workspace: Any,
    workspace_size: int,
    executor: acl.Executor | None,
    stream: acl.Stream | None,
) -> int:
    """Gradients of FlashAttentionScore. Phase 2: runs what phase 1 planned, into its output tensors.

    Args:
        workspace: address of device memory (or a torch tensor) of at least workspace_size bytes; None where that is 0.
        workspace_size: as phase 1 returned it, or more.
        executor: as phase 1 returned it; one run each, unless made repeatable.
        stream: from acl.rt.create_stream(); None is the default one.

    Returns:
        ret: 0, or a code; acl.get_recent_err_msg() says why, and nothing was written.

    Source: CANN, aclnnFlashAttentionScoreGrad.
    """

def aclnnFlashAttentionScoreGradV2GetWorkspaceSize(
    query: acl.Tensor | None,
    key: acl.Tensor | None,
    value: acl.Tensor | None,
    dy: acl.Tensor | None,
    pse: acl.Tensor | None,
    drop_mask: acl.Tensor | None,
    padding_mask: acl.Tensor | None,
    atten_mask: acl.Tensor | None,
    softmax_max: acl.Tensor | None,
    softmax_sum: acl.Tensor | None,
    softmax_in: acl.Tensor | None,
    attention_in: acl.Tensor | None,
    prefix: acl.IntArray | acl.Tensor | Sequence[int] | None,
    q_start_idx: acl.IntArray | acl.Tensor | Sequence[int] | None,
    kv_start_idx: acl.IntArray | acl.Tensor | Sequence[int] | None,
    scale: float,
    keep_prob: float,
    pre_tokens: int,
    next_tokens: int,
    head_num: int,
    input_layout: str,
    inner_precise: int,
    sparse_mode: int,
    pse_type: int,
    dq: acl.Tensor | None,
    dk: acl.Tensor | None,
    dv: acl.Tensor | None,
    dpse: acl.Tensor | None,
    *,
    strict: bool = True,
    check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """FlashAttentionScoreGrad with pse_type and start indices. Phase 1: checks, plans, and says how much workspace phase 2 needs.

    Args:
        query: Query rows.
        key: Key rows.
        value: Value rows.
        dy: Gradient of the output.
        pse: Bias on the scores; slopes for pse_type 2 and 3. May be None.
        drop_mask: One bit per score, 1 = kept. May be None.
        padding_mask: Reserved. May be None.
        atten_mask: 1 = this score is removed. May be None.
        softmax_max: Row maxima that the forward returned.
        softmax_sum: Row sums that the forward returned.
        softmax_in: Reserved. May be None.
        attention_in: The forward's output.
        prefix: Per sequence the keys that every row sees (modes 5 and 6). May be None.
        q_start_idx: Position of the first query row in its sequence (element 0 is read); None: 0. May be None.
        kv_start_idx: Position of the first key in its sequence (element 0 is read); None: 0. May be None.
        scale: Factor on query . key.
        keep_prob: Share of probabilities that dropout keeps.
        pre_tokens: Window to the left (modes 0 and 4).
        next_tokens: Window to the right (modes 0, 4, 7, 8).
        head_num: Query heads.
        input_layout: Axis order of query, key, value and the output.
        inner_precise: 2: rows that see no key return zeros.
        sparse_mode: How mask, window and prefix combine (docs/sparse_modes.md).
        pse_type: 1 scale*(qk+pse), 0 scale*qk+pse, 2 and 3 computed from slopes.
        dq: Gradient of query.
        dk: Gradient of key.
        dv: Gradient of value.
        dpse: Gradient of pse, in its shape.
        strict: the chip's limits are errors too.
        check_content: phase 2 checks tensor content too.

    Returns:
        (ret, workspace_size, executor): 0, bytes and what phase 2 takes; or a code, 0 and None.

    Source: CANN, aclnnFlashAttentionScoreGradV2.
    """

def aclnnFlashAttentionScoreGradV2(
    workspace: Any,
    workspace_size: int,
    executor: acl.Executor | None,
    stream: acl.Stream | None,
) -> int:
    """FlashAttentionScoreGrad with pse_type and start indices. Phase 2: runs what phase 1 planned, into its output tensors.

    Args:
        workspace: address of device memory (or a torch tensor) of at least workspace_size bytes; None where that is 0.
        workspace_size: as phase 1 returned it, or more.
        executor: as phase 1 returned it; one run each, unless made repeatable.
        stream: from acl.rt.create_stream(); None is the default one.

    Returns:
        ret: 0, or a code; acl.get_recent_err_msg() says why, and nothing was written.

    Source: CANN, aclnnFlashAttentionScoreGradV2.
    """

def aclnnFlashAttentionScoreGradV3GetWorkspaceSize(
    query: acl.Tensor | None,
    key: acl.Tensor | None,
    value: acl.Tensor | None,
    dy: acl.Tensor | None,
    pse: acl.Tensor | None,
    drop_mask: acl.Tensor | None,
    padding_mask: acl.Tensor | None,
    atten_mask: acl.Tensor | None,
    softmax_max: acl.Tensor | None,
    softmax_sum: acl.Tensor | None,
    softmax_in: acl.Tensor | None,
    attention_in: acl.Tensor | None,
    sink: acl.Tensor | None,
    prefix: acl.IntArray | acl.Tensor | Sequence[int] | None,
    q_start_idx: acl.IntArray | acl.Tensor | Sequence[int] | None,
    kv_start_idx: acl.IntArray | acl.Tensor | Sequence[int] | None,
    scale: float,
    keep_prob: float,
    pre_tokens: int,
    next_tokens: int,
    head_num: int,
    input_layout: str,
    inner_precise: int,
    sparse_mode: int,
    pse_type: int,
    dq: acl.Tensor | None,
    dk: acl.Tensor | None,
    dv: acl.Tensor | None,
    dpse: acl.Tensor | None,
    dsink: acl.Tensor | None,
    *,
    strict: bool = True,
    check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """FlashAttentionScoreGradV2 with sinks. Phase 1: checks, plans, and says how much workspace phase 2 needs.

    Args:
        query: Query rows.
        key: Key rows.
        value: Value rows.
        dy: Gradient of the output.
        pse: Bias on the scores; slopes for pse_type 2 and 3. May be None.
        drop_mask: One bit per score, 1 = kept. May be None.
        padding_mask: Reserved. May be None.
        atten_mask: 1 = this score is removed. May be None.
        softmax_max: Row maxima that the forward returned.
        softmax_sum: Row sums that the forward returned.
        softmax_in: Reserved. May be None.
        attention_in: The forward's output.
        sink: One more logit per query head in every denominator. May be None.
        prefix: Per sequence the keys that every row sees (modes 5 and 6). May be None.
        q_start_idx: Position of the first query row in its sequence (element 0 is read); None: 0. May be None.
        kv_start_idx: Position of the first key in its sequence (element 0 is read); None: 0. May be None.
        scale: Factor on query . key.
        keep_prob: Share of probabilities that dropout keeps.
        pre_tokens: Window to the left (modes 0 and 4).
        next_tokens: Window to the right (modes 0, 4, 7, 8).
        head_num: Query heads.
        input_layout: Axis order of query, key, value and the output.
        inner_precise: 2: rows that see no key return zeros.
        sparse_mode: How mask, window and prefix combine (docs/sparse_modes.md).
        pse_type: 1 scale*(qk+pse), 0 scale*qk+pse, 2 and 3 computed from slopes.
        dq: Gradient of query.
        dk: Gradient of key.
        dv: Gradient of value.
        dpse: Gradient of pse, in its shape.
        dsink: Gradient of sink.
        strict: the chip's limits are errors too.
        check_content: phase 2 checks tensor content too.

    Returns:
        (ret, workspace_size, executor): 0, bytes and what phase 2 takes; or a code, 0 and None.

    Source: CANN, aclnnFlashAttentionScoreGradV3.
    """

def aclnnFlashAttentionScoreGradV3(
    workspace: Any,
    workspace_size: int,
    executor: acl.Executor | None,
    stream: acl.Stream | None,
) -> int:
    """FlashAttentionScoreGradV2 with sinks. Phase 2: runs what phase 1 planned, into its output tensors.

    Args:
        workspace: address of device memory (or a torch tensor) of at least workspace_size bytes; None where that is 0.
        workspace_size: as phase 1 returned it, or more.
        executor: as phase 1 returned it; one run each, unless made repeatable.
        stream: from acl.rt.create_stream(); None is the default one.

    Returns:
        ret: 0, or a code; acl.get_recent_err_msg() says why, and nothing was written.

    Source: CANN, aclnnFlashAttentionScoreGradV3.
    """

def aclnnFlashAttentionUnpaddingScoreGradGetWorkspaceSize(
    query: acl.Tensor | None,
    key: acl.Tensor | None,
    value: acl.Tensor | None,
    dy: acl.Tensor | None,
    pse: acl.Tensor | None,
    drop_mask: acl.Tensor | None,
    padding_mask: acl.Tensor | None,
    atten_mask: acl.Tensor | None,
    softmax_max: acl.Tensor | None,
    softmax_sum: acl.Tensor | None,
    softmax_in: acl.Tensor | None,
    attention_in: acl.Tensor | None,
    prefix: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_qlen: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_kvlen: acl.IntArray | acl.Tensor | Sequence[int] | None,
    scale: float,
    keep_prob: float,
    pre_tokens: int,
    next_tokens: int,
    head_num: int,
    input_layout: str,
    inner_precise: int,
    sparse_mode: int,
    dq: acl.Tensor | None,
    dk: acl.Tensor | None,
    dv: acl.Tensor | None,
    dpse: acl.Tensor | None,
    *,
    strict: bool = True,
    check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """Gradients of FlashAttentionVarLenScore. Phase 1: checks, plans, and says how much workspace phase 2 needs.

    Args:
        query: Query rows.
        key: Key rows.
        value: Value rows.
        dy: Gradient of the output.
        pse: Bias on the scores; slopes for pse_type 2 and 3. May be None.
        drop_mask: One bit per score, 1 = kept. May be None.
        padding_mask: Reserved. May be None.
        atten_mask: 1 = this score is removed. May be None.
        softmax_max: Row maxima that the forward returned. TND: [N1, q_len, 8] of each sequence end to end, token by token only where a softmax_layout asks for it.
        softmax_sum: Row sums that the forward returned. TND: [N1, q_len, 8] of each sequence end to end, token by token only where a softmax_layout asks for it.
        softmax_in: Reserved. May be None.
        attention_in: The forward's output.
        prefix: Per sequence the keys that every row sees (modes 5 and 6). May be None.
        actual_seq_qlen: Cumulative end of every sequence's query rows. May be None.
        actual_seq_kvlen: Cumulative end of every sequence's keys. May be None.
        scale: Factor on query . key.
        keep_prob: Share of probabilities that dropout keeps.
        pre_tokens: Window to the left (modes 0 and 4).
        next_tokens: Window to the right (modes 0, 4, 7, 8).
        head_num: Query heads.
        input_layout: Axis order of query, key, value and the output.
        inner_precise: 2: rows that see no key return zeros.
        sparse_mode: How mask, window and prefix combine (docs/sparse_modes.md).
        dq: Gradient of query.
        dk: Gradient of key.
        dv: Gradient of value.
        dpse: Gradient of pse, in its shape.
        strict: the chip's limits are errors too.
        check_content: phase 2 checks tensor content too.

    Returns:
        (ret, workspace_size, executor): 0, bytes and what phase 2 takes; or a code, 0 and None.

    Source: CANN, aclnnFlashAttentionUnpaddingScoreGrad.
    """

def aclnnFlashAttentionUnpaddingScoreGrad(
    workspace: Any,
    workspace_size: int,
    executor: acl.Executor | None,
    stream: acl.Stream | None,
) -> int:
    """Gradients of FlashAttentionVarLenScore. Phase 2: runs what phase 1 planned, into its output tensors.

    Args:
        workspace: address of device memory (or a torch tensor) of at least workspace_size bytes; None where that is 0.
        workspace_size: as phase 1 returned it, or more.
        executor: as phase 1 returned it; one run each, unless made repeatable.
        stream: from acl.rt.create_stream(); None is the default one.

    Returns:
        ret: 0, or a code; acl.get_recent_err_msg() says why, and nothing was written.

    Source: CANN, aclnnFlashAttentionUnpaddingScoreGrad.
    """

def aclnnFlashAttentionUnpaddingScoreGradV2GetWorkspaceSize(
    query: acl.Tensor | None,
    key: acl.Tensor | None,
    value: acl.Tensor | None,
    dy: acl.Tensor | None,
    pse: acl.Tensor | None,
    drop_mask: acl.Tensor | None,
    padding_mask: acl.Tensor | None,
    atten_mask: acl.Tensor | None,
    softmax_max: acl.Tensor | None,
    softmax_sum: acl.Tensor | None,
    softmax_in: acl.Tensor | None,
    attention_in: acl.Tensor | None,
    prefix: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_qlen: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_kvlen: acl.IntArray | acl.Tensor | Sequence[int] | None,
    q_start_idx: acl.IntArray | acl.Tensor | Sequence[int] | None,
    kv_start_idx: acl.IntArray | acl.Tensor | Sequence[int] | None,
    scale: float,
    keep_prob: float,
    pre_tokens: int,
    next_tokens: int,
    head_num: int,
    input_layout: str,
    inner_precise: int,
    sparse_mode: int,
    pse_type: int,
    dq: acl.Tensor | None,
    dk: acl.Tensor | None,
    dv: acl.Tensor | None,
    dpse: acl.Tensor | None,
    *,
    strict: bool = True,
    check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """UnpaddingScoreGrad with pse_type and start indices. Phase 1: checks, plans, and says how much workspace phase 2 needs.

    Args:
        query: Query rows.
        key: Key rows.
        value: Value rows.
        dy: Gradient of the output.
        pse: Bias on the scores; slopes for pse_type 2 and 3. May be None.
        drop_mask: One bit per score, 1 = kept. May be None.
        padding_mask: Reserved. May be None.
        atten_mask: 1 = this score is removed. May be None.
        softmax_max: Row maxima that the forward returned. TND: [N1, q_len, 8] of each sequence end to end, token by token only where a softmax_layout asks for it.
        softmax_sum: Row sums that the forward returned. TND: [N1, q_len, 8] of each sequence end to end, token by token only where a softmax_layout asks for it.
        softmax_in: Reserved. May be None.
        attention_in: The forward's output.
        prefix: Per sequence the keys that every row sees (modes 5 and 6). May be None.
        actual_seq_qlen: Cumulative end of every sequence's query rows. May be None.
        actual_seq_kvlen: Cumulative end of every sequence's keys. May be None.
        q_start_idx: Position of the first query row in its sequence (element 0 is read); None: 0. May be None.
        kv_start_idx: Position of the first key in its sequence (element 0 is read); None: 0. May be None.
        scale: Factor on query . key.
        keep_prob: Share of probabilities that dropout keeps.
        pre_tokens: Window to the left (modes 0 and 4).
        next_tokens: Window to the right (modes 0, 4, 7, 8).
        head_num: Query heads.
        input_layout: Axis order of query, key, value and the output.
        inner_precise: 2: rows that see no key return zeros.
        sparse_mode: How mask, window and prefix combine (docs/sparse_modes.md).
        pse_type: 1 scale*(qk+pse), 0 scale*qk+pse, 2 and 3 computed from slopes.
        dq: Gradient of query.
        dk: Gradient of key.
        dv: Gradient of value.
        dpse: Gradient of pse, in its shape.
        strict: the chip's limits are errors too.
        check_content: phase 2 checks tensor content too.

    Returns:
        (ret, workspace_size, executor): 0, bytes and what phase 2 takes; or a code, 0 and None.

    Source: CANN, aclnnFlashAttentionUnpaddingScoreGradV2.
    """

def aclnnFlashAttentionUnpaddingScoreGradV2(
    workspace: Any,
    workspace_size: int,
    executor: acl.Executor | None,
    stream: acl.Stream | None,
) -> int:
    """UnpaddingScoreGrad with pse_type and start indices. Phase 2: runs what phase 1 planned, into its output tensors.

    Args:
        workspace: address of device memory (or a torch tensor) of at least workspace_size bytes; None where that is 0.
        workspace_size: as phase 1 returned it, or more.
        executor: as phase 1 returned it; one run each, unless made repeatable.
        stream: from acl.rt.create_stream(); None is the default one.

    Returns:
        ret: 0, or a code; acl.get_recent_err_msg() says why, and nothing was written.

    Source: CANN, aclnnFlashAttentionUnpaddingScoreGradV2.
    """

def aclnnFlashAttentionUnpaddingScoreGradV3GetWorkspaceSize(
    query: acl.Tensor | None,
    query_rope: acl.Tensor | None,
    key: acl.Tensor | None,
    key_rope: acl.Tensor | None,
    value: acl.Tensor | None,
    dy: acl.Tensor | None,
    pse: acl.Tensor | None,
    drop_mask: acl.Tensor | None,
    padding_mask: acl.Tensor | None,
    atten_mask: acl.Tensor | None,
    softmax_max: acl.Tensor | None,
    softmax_sum: acl.Tensor | None,
    softmax_in: acl.Tensor | None,
    attention_in: acl.Tensor | None,
    prefix: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_qlen: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_kvlen: acl.IntArray | acl.Tensor | Sequence[int] | None,
    q_start_idx: acl.IntArray | acl.Tensor | Sequence[int] | None,
    kv_start_idx: acl.IntArray | acl.Tensor | Sequence[int] | None,
    scale: float,
    keep_prob: float,
    pre_tokens: int,
    next_tokens: int,
    head_num: int,
    input_layout: str,
    inner_precise: int,
    sparse_mode: int,
    pse_type: int,
    dq: acl.Tensor | None,
    dq_rope: acl.Tensor | None,
    dk: acl.Tensor | None,
    dk_rope: acl.Tensor | None,
    dv: acl.Tensor | None,
    dpse: acl.Tensor | None,
    *,
    strict: bool = True,
    check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """UnpaddingScoreGradV2 with rope parts of query and key. Phase 1: checks, plans, and says how much workspace phase 2 needs.

    Args:
        query: Query rows.
        query_rope: Rope part of the query rows. May be None.
        key: Key rows.
        key_rope: Rope part of the key rows. May be None.
        value: Value rows.
        dy: Gradient of the output.
        pse: Bias on the scores; slopes for pse_type 2 and 3. May be None.
        drop_mask: One bit per score, 1 = kept. May be None.
        padding_mask: Reserved. May be None.
        atten_mask: 1 = this score is removed. May be None.
        softmax_max: Row maxima that the forward returned. TND: [N1, q_len, 8] of each sequence end to end, token by token only where a softmax_layout asks for it.
        softmax_sum: Row sums that the forward returned. TND: [N1, q_len, 8] of each sequence end to end, token by token only where a softmax_layout asks for it.
        softmax_in: Reserved. May be None.
        attention_in: The forward's output.
        prefix: Per sequence the keys that every row sees (modes 5 and 6). May be None.
        actual_seq_qlen: Cumulative end of every sequence's query rows. May be None.
        actual_seq_kvlen: Cumulative end of every sequence's keys. May be None.
        q_start_idx: Position of the first query row in its sequence (element 0 is read); None: 0. May be None.
        kv_start_idx: Position of the first key in its sequence (element 0 is read); None: 0. May be None.
        scale: Factor on query . key.
        keep_prob: Share of probabilities that dropout keeps.
        pre_tokens: Window to the left (modes 0 and 4).
        next_tokens: Window to the right (modes 0, 4, 7, 8).
        head_num: Query heads.
        input_layout: Axis order of query, key, value and the output.
        inner_precise: 2: rows that see no key return zeros.
        sparse_mode: How mask, window and prefix combine (docs/sparse_modes.md).
        pse_type: 1 scale*(qk+pse), 0 scale*qk+pse, 2 and 3 computed from slopes.
        dq: Gradient of query.
        dq_rope: Gradient of query_rope.
        dk: Gradient of key.
        dk_rope: Gradient of key_rope.
        dv: Gradient of value.
        dpse: Gradient of pse, in its shape.
        strict: the chip's limits are errors too.
        check_content: phase 2 checks tensor content too.

    Returns:
        (ret, workspace_size, executor): 0, bytes and what phase 2 takes; or a code, 0 and None.

    Source: CANN, aclnnFlashAttentionUnpaddingScoreGradV3.
    """

def aclnnFlashAttentionUnpaddingScoreGradV3(
    workspace: Any,
    workspace_size: int,
    executor: acl.Executor | None,
    stream: acl.Stream | None,
) -> int:
    """UnpaddingScoreGradV2 with rope parts of query and key. Phase 2: runs what phase 1 planned, into its output tensors.

    Args:
        workspace: address of device memory (or a torch tensor) of at least workspace_size bytes; None where that is 0.
        workspace_size: as phase 1 returned it, or more.
        executor: as phase 1 returned it; one run each, unless made repeatable.
        stream: from acl.rt.create_stream(); None is the default one.

    Returns:
        ret: 0, or a code; acl.get_recent_err_msg() says why, and nothing was written.

    Source: CANN, aclnnFlashAttentionUnpaddingScoreGradV3.
    """

def aclnnFlashAttentionUnpaddingScoreGradV4GetWorkspaceSize(
    query: acl.Tensor | None,
    key: acl.Tensor | None,
    value: acl.Tensor | None,
    dy: acl.Tensor | None,
    pse: acl.Tensor | None,
    drop_mask: acl.Tensor | None,
    padding_mask: acl.Tensor | None,
    atten_mask: acl.Tensor | None,
    softmax_max: acl.Tensor | None,
    softmax_sum: acl.Tensor | None,
    softmax_in: acl.Tensor | None,
    attention_in: acl.Tensor | None,
    prefix: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_qlen: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_kvlen: acl.IntArray | acl.Tensor | Sequence[int] | None,
    scale: float,
    keep_prob: float,
    pre_tokens: int,
    next_tokens: int,
    head_num: int,
    input_layout: str,
    inner_precise: int,
    sparse_mode: int,
    dq: acl.Tensor | None,
    dk: acl.Tensor | None,
    dv: acl.Tensor | None,
    dpse: acl.Tensor | None,
    softmax_layout: str,
    *,
    strict: bool = True,
    check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """UnpaddingScoreGrad with a choice of the statistics' order. Phase 1: checks, plans, and says how much workspace phase 2 needs.

    Args:
        query: Query rows.
        key: Key rows.
        value: Value rows.
        dy: Gradient of the output.
        pse: Bias on the scores; slopes for pse_type 2 and 3. May be None.
        drop_mask: One bit per score, 1 = kept. May be None.
        padding_mask: Reserved. May be None.
        atten_mask: 1 = this score is removed. May be None.
        softmax_max: Row maxima that the forward returned. TND: [N1, q_len, 8] of each sequence end to end, token by token only where a softmax_layout asks for it.
        softmax_sum: Row sums that the forward returned. TND: [N1, q_len, 8] of each sequence end to end, token by token only where a softmax_layout asks for it.
        softmax_in: Reserved. May be None.
        attention_in: The forward's output.
        prefix: Per sequence the keys that every row sees (modes 5 and 6). May be None.
        actual_seq_qlen: Cumulative end of every sequence's query rows. May be None.
        actual_seq_kvlen: Cumulative end of every sequence's keys. May be None.
        scale: Factor on query . key.
        keep_prob: Share of probabilities that dropout keeps.
        pre_tokens: Window to the left (modes 0 and 4).
        next_tokens: Window to the right (modes 0, 4, 7, 8).
        head_num: Query heads.
        input_layout: Axis order of query, key, value and the output.
        inner_precise: 2: rows that see no key return zeros.
        sparse_mode: How mask, window and prefix combine (docs/sparse_modes.md).
        dq: Gradient of query.
        dk: Gradient of key.
        dv: Gradient of value.
        dpse: Gradient of pse, in its shape.
        softmax_layout: Order of packed statistics: per sequence head-major, or token-major.
        strict: the chip's limits are errors too.
        check_content: phase 2 checks tensor content too.

    Returns:
        (ret, workspace_size, executor): 0, bytes and what phase 2 takes; or a code, 0 and None.

    Source: CANN, aclnnFlashAttentionUnpaddingScoreGradV4.
    """

def aclnnFlashAttentionUnpaddingScoreGradV4(
    workspace: Any,
    workspace_size: int,
    executor: acl.Executor | None,
    stream: acl.Stream | None,
) -> int:
    """UnpaddingScoreGrad with a choice of the statistics' order. Phase 2: runs what phase 1 planned, into its output tensors.

    Args:
        workspace: address of device memory (or a torch tensor) of at least workspace_size bytes; None where that is 0.
        workspace_size: as phase 1 returned it, or more.
        executor: as phase 1 returned it; one run each, unless made repeatable.
        stream: from acl.rt.create_stream(); None is the default one.

    Returns:
        ret: 0, or a code; acl.get_recent_err_msg() says why, and nothing was written.

    Source: CANN, aclnnFlashAttentionUnpaddingScoreGradV4.
    """

def aclnnFlashAttentionUnpaddingScoreGradV5GetWorkspaceSize(
    query: acl.Tensor | None,
    query_rope: acl.Tensor | None,
    key: acl.Tensor | None,
    key_rope: acl.Tensor | None,
    value: acl.Tensor | None,
    dy: acl.Tensor | None,
    pse: acl.Tensor | None,
    drop_mask: acl.Tensor | None,
    padding_mask: acl.Tensor | None,
    atten_mask: acl.Tensor | None,
    softmax_max: acl.Tensor | None,
    softmax_sum: acl.Tensor | None,
    softmax_in: acl.Tensor | None,
    attention_in: acl.Tensor | None,
    sink: acl.Tensor | None,
    prefix: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_qlen: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_kvlen: acl.IntArray | acl.Tensor | Sequence[int] | None,
    q_start_idx: acl.IntArray | acl.Tensor | Sequence[int] | None,
    kv_start_idx: acl.IntArray | acl.Tensor | Sequence[int] | None,
    scale: float,
    keep_prob: float,
    pre_tokens: int,
    next_tokens: int,
    head_num: int,
    input_layout: str,
    inner_precise: int,
    sparse_mode: int,
    pse_type: int,
    softmax_layout: str,
    dq: acl.Tensor | None,
    dq_rope: acl.Tensor | None,
    dk: acl.Tensor | None,
    dk_rope: acl.Tensor | None,
    dv: acl.Tensor | None,
    dpse: acl.Tensor | None,
    dsink: acl.Tensor | None,
    *,
    strict: bool = True,
    check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """UnpaddingScoreGradV3 with sinks and a choice of the statistics' order. Phase 1: checks, plans, and says how much workspace phase 2 needs.

    Args:
        query: Query rows.
        query_rope: Rope part of the query rows. May be None.
        key: Key rows.
        key_rope: Rope part of the key rows. May be None.
        value: Value rows.
        dy: Gradient of the output.
        pse: Bias on the scores; slopes for pse_type 2 and 3. May be None.
        drop_mask: One bit per score, 1 = kept. May be None.
        padding_mask: Reserved. May be None.
        atten_mask: 1 = this score is removed. May be None.
        softmax_max: Row maxima that the forward returned. TND: [N1, q_len, 8] of each sequence end to end, token by token only where a softmax_layout asks for it.
        softmax_sum: Row sums that the forward returned. TND: [N1, q_len, 8] of each sequence end to end, token by token only where a softmax_layout asks for it.
        softmax_in: Reserved. May be None.
        attention_in: The forward's output.
        sink: One more logit per query head in every denominator. May be None.
        prefix: Per sequence the keys that every row sees (modes 5 and 6). May be None.
        actual_seq_qlen: Cumulative end of every sequence's query rows. May be None.
        actual_seq_kvlen: Cumulative end of every sequence's keys. May be None.
        q_start_idx: Position of the first query row in its sequence (element 0 is read); None: 0. May be None.
        kv_start_idx: Position of the first key in its sequence (element 0 is read); None: 0. May be None.
        scale: Factor on query . key.
        keep_prob: Share of probabilities that dropout keeps.
        pre_tokens: Window to the left (modes 0 and 4).
        next_tokens: Window to the right (modes 0, 4, 7, 8).
        head_num: Query heads.
        input_layout: Axis order of query, key, value and the output.
        inner_precise: 2: rows that see no key return zeros.
        sparse_mode: How mask, window and prefix combine (docs/sparse_modes.md).
        pse_type: 1 scale*(qk+pse), 0 scale*qk+pse, 2 and 3 computed from slopes.
        softmax_layout: Order of packed statistics: per sequence head-major, or token-major.
        dq: Gradient of query.
        dq_rope: Gradient of query_rope.
        dk: Gradient of key.
        dk_rope: Gradient of key_rope.
        dv: Gradient of value.
        dpse: Gradient of pse, in its shape.
        dsink: Gradient of sink.
        strict: the chip's limits are errors too.
        check_content: phase 2 checks tensor content too.

    Returns:
        (ret, workspace_size, executor): 0, bytes and what phase 2 takes; or a code, 0 and None.

    Source: CANN, aclnnFlashAttentionUnpaddingScoreGradV5.
    """

def aclnnFlashAttentionUnpaddingScoreGradV5(
    workspace: Any,
    workspace_size: int,
    executor: acl.Executor | None,
    stream: acl.Stream | None,
) -> int:
    """UnpaddingScoreGradV3 with sinks and a choice of the statistics' order. Phase 2: runs what phase 1 planned, into its output tensors.

    Args:
        workspace: address of device memory (or a torch tensor) of at least workspace_size bytes; None where that is 0.
        workspace_size: as phase 1 returned it, or more.
        executor: as phase 1 returned it; one run each, unless made repeatable.
        stream: from acl.rt.create_stream(); None is the default one.

    Returns:
        ret: 0, or a code; acl.get_recent_err_msg() says why, and nothing was written.

    Source: CANN, aclnnFlashAttentionUnpaddingScoreGradV5.
    """

def aclnnIncreFlashAttentionGetWorkspaceSize(
    query: acl.Tensor | None,
    key: acl.TensorList | None,
    value: acl.TensorList | None,
    pse_shift: acl.Tensor | None,
    atten_mask: acl.Tensor | None,
    actual_seq_lengths: acl.IntArray | acl.Tensor | Sequence[int] | None,
    num_heads: int,
    scale_value: float,
    input_layout: str,
    num_key_value_heads: int,
    attention_out: acl.Tensor | None,
    *,
    strict: bool = True,
    check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """Attention of one new token per item over its cache. Phase 1: checks, plans, and says how much workspace phase 2 needs.

    Args:
        query: Query rows, one per item.
        key: Key rows: one tensor, one per item, or pages.
        value: Value rows, as the keys lie.
        pse_shift: Added to the scaled scores. May be None.
        atten_mask: 1 = this token is not seen. May be None.
        actual_seq_lengths: Tokens of every item in the cache; one number serves all. May be None.
        num_heads: Query heads.
        scale_value: Factor on query . key.
        input_layout: Axis order of query, the output, and a cache without pages.
        num_key_value_heads: Key heads; 0: as many as query heads.
        attention_out: The output rows.
        strict: the chip's limits are errors too.
        check_content: phase 2 checks tensor content too.

    Returns:
        (ret, workspace_size, executor): 0, bytes and what phase 2 takes; or a code, 0 and None.

    Source: CANN, aclnnIncreFlashAttention.
    """

def aclnnIncreFlashAttention(
    workspace: Any,
    workspace_size: int,
    executor: acl.Executor | None,
    stream: acl.Stream | None,
) -> int:
    """Attention of one new token per item over its cache. Phase 2: runs what phase 1 planned, into its output tensors.

    Args:
        workspace: address of device memory (or a torch tensor) of at least workspace_size bytes; None where that is 0.
        workspace_size: as phase 1 returned it, or more.
        executor: as phase 1 returned it; one run each, unless made repeatable.
        stream: from acl.rt.create_stream(); None is the default one.

    Returns:
        ret: 0, or a code; acl.get_recent_err_msg() says why, and nothing was written.

    Source: CANN, aclnnIncreFlashAttention.
    """

def aclnnIncreFlashAttentionV2GetWorkspaceSize(
    query: acl.Tensor | None,
    key: acl.TensorList | None,
    value: acl.TensorList | None,
    pse_shift: acl.Tensor | None,
    atten_mask: acl.Tensor | None,
    actual_seq_lengths: acl.IntArray | acl.Tensor | Sequence[int] | None,
    dequant_scale1: acl.Tensor | None,
    quant_scale1: acl.Tensor | None,
    dequant_scale2: acl.Tensor | None,
    quant_scale2: acl.Tensor | None,
    quant_offset2: acl.Tensor | None,
    num_heads: int,
    scale_value: float,
    input_layout: str,
    num_key_value_heads: int,
    attention_out: acl.Tensor | None,
    *,
    strict: bool = True,
    check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """IncreFlashAttention with int8 output. Phase 1: checks, plans, and says how much workspace phase 2 needs.

    Args:
        query: Query rows, one per item.
        key: Key rows: one tensor, one per item, or pages.
        value: Value rows, as the keys lie.
        pse_shift: Added to the scaled scores. May be None.
        atten_mask: 1 = this token is not seen. May be None.
        actual_seq_lengths: Tokens of every item in the cache; one number serves all. May be None.
        dequant_scale1: Of an int8 query: reserved. May be None.
        quant_scale1: Of an int8 query: reserved. May be None.
        dequant_scale2: Of an int8 query: reserved. May be None.
        quant_scale2: Scale of int8 output, 1 or N1*D elements. May be None.
        quant_offset2: Offset of int8 output. May be None.
        num_heads: Query heads.
        scale_value: Factor on query . key.
        input_layout: Axis order of query, the output, and a cache without pages.
        num_key_value_heads: Key heads; 0: as many as query heads.
        attention_out: The output rows.
        strict: the chip's limits are errors too.
        check_content: phase 2 checks tensor content too.

    Returns:
        (ret, workspace_size, executor): 0, bytes and what phase 2 takes; or a code, 0 and None.

    Source: CANN, aclnnIncreFlashAttentionV2.
    """

def aclnnIncreFlashAttentionV2(
    workspace: Any,
    workspace_size: int,
    executor: acl.Executor | None,
    stream: acl.Stream | None,
) -> int:
    """IncreFlashAttention with int8 output. Phase 2: runs what phase 1 planned, into its output tensors.

    Args:
        workspace: address of device memory (or a torch tensor) of at least workspace_size bytes; None where that is 0.
        workspace_size: as phase 1 returned it, or more.
        executor: as phase 1 returned it; one run each, unless made repeatable.
        stream: from acl.rt.create_stream(); None is the default one.

    Returns:
        ret: 0, or a code; acl.get_recent_err_msg() says why, and nothing was written.

    Source: CANN, aclnnIncreFlashAttentionV2.
    """

def aclnnIncreFlashAttentionV3GetWorkspaceSize(
    query: acl.Tensor | None,
    key: acl.TensorList | None,
    value: acl.TensorList | None,
    pse_shift: acl.Tensor | None,
    atten_mask: acl.Tensor | None,
    actual_seq_lengths: acl.IntArray | acl.Tensor | Sequence[int] | None,
    dequant_scale1: acl.Tensor | None,
    quant_scale1: acl.Tensor | None,
    dequant_scale2: acl.Tensor | None,
    quant_scale2: acl.Tensor | None,
    quant_offset2: acl.Tensor | None,
    antiquant_scale: acl.Tensor | None,
    antiquant_offset: acl.Tensor | None,
    block_table: acl.Tensor | None,
    num_heads: int,
    scale_value: float,
    input_layout: str,
    num_key_value_heads: int,
    block_size: int,
    inner_precise: int,
    attention_out: acl.Tensor | None,
    *,
    strict: bool = True,
    check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """IncreFlashAttentionV2 with pse_shift, an int8 cache and pages. Phase 1: checks, plans, and says how much workspace phase 2 needs.

    Args:
        query: Query rows, one per item.
        key: Key rows: one tensor, one per item, or pages.
        value: Value rows, as the keys lie.
        pse_shift: Added to the scaled scores. May be None.
        atten_mask: 1 = this token is not seen. May be None.
        actual_seq_lengths: Tokens of every item in the cache; one number serves all. May be None.
        dequant_scale1: Of an int8 query: reserved. May be None.
        quant_scale1: Of an int8 query: reserved. May be None.
        dequant_scale2: Of an int8 query: reserved. May be None.
        quant_scale2: Scale of int8 output, 1 or N1*D elements. May be None.
        quant_offset2: Offset of int8 output. May be None.
        antiquant_scale: Scales of an int8 cache, keys then values. May be None.
        antiquant_offset: Added to the integers before scaling. May be None.
        block_table: The pages of every item, in order. May be None.
        num_heads: Query heads.
        scale_value: Factor on query . key.
        input_layout: Axis order of query, the output, and a cache without pages.
        num_key_value_heads: Key heads; 0: as many as query heads.
        block_size: Tokens of a page; ignored without a block table.
        inner_precise: 0 or 1; both compute in float32.
        attention_out: The output rows.
        strict: the chip's limits are errors too.
        check_content: phase 2 checks tensor content too.

    Returns:
        (ret, workspace_size, executor): 0, bytes and what phase 2 takes; or a code, 0 and None.

    Source: CANN, aclnnIncreFlashAttentionV3.
    """

def aclnnIncreFlashAttentionV3(
    workspace: Any,
    workspace_size: int,
    executor: acl.Executor | None,
    stream: acl.Stream | None,
) -> int:
    """IncreFlashAttentionV2 with pse_shift, an int8 cache and pages. Phase 2: runs what phase 1 planned, into its output tensors.

    Args:
        workspace: address of device memory (or a torch tensor) of at least workspace_size bytes; None where that is 0.
        workspace_size: as phase 1 returned it, or more.
        executor: as phase 1 returned it; one run each, unless made repeatable.
        stream: from acl.rt.create_stream(); None is the default one.

    Returns:
        ret: 0, or a code; acl.get_recent_err_msg() says why, and nothing was written.

    Source: CANN, aclnnIncreFlashAttentionV3.
    """

def aclnnIncreFlashAttentionV4GetWorkspaceSize(
    query: acl.Tensor | None,
    key: acl.TensorList | None,
    value: acl.TensorList | None,
    pse_shift: acl.Tensor | None,
    atten_mask: acl.Tensor | None,
    actual_seq_lengths: acl.IntArray | acl.Tensor | Sequence[int] | None,
    dequant_scale1: acl.Tensor | None,
    quant_scale1: acl.Tensor | None,
    dequant_scale2: acl.Tensor | None,
    quant_scale2: acl.Tensor | None,
    quant_offset2: acl.Tensor | None,
    antiquant_scale: acl.Tensor | None,
    antiquant_offset: acl.Tensor | None,
    block_table: acl.Tensor | None,
    kv_padding_size: acl.IntArray | acl.Tensor | Sequence[int] | None,
    num_heads: int,
    scale_value: float,
    input_layout: str,
    num_key_value_heads: int,
    block_size: int,
    inner_precise: int,
    attention_out: acl.Tensor | None,
    *,
    strict: bool = True,
    check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """IncreFlashAttentionV3 with left padding. Phase 1: checks, plans, and says how much workspace phase 2 needs.

    Args:
        query: Query rows, one per item.
        key: Key rows: one tensor, one per item, or pages.
        value: Value rows, as the keys lie.
        pse_shift: Added to the scaled scores. May be None.
        atten_mask: 1 = this token is not seen. May be None.
        actual_seq_lengths: Tokens of every item in the cache; one number serves all. May be None.
        dequant_scale1: Of an int8 query: reserved. May be None.
        quant_scale1: Of an int8 query: reserved. May be None.
        dequant_scale2: Of an int8 query: reserved. May be None.
        quant_scale2: Scale of int8 output, 1 or N1*D elements. May be None.
        quant_offset2: Offset of int8 output. May be None.
        antiquant_scale: Scales of an int8 cache, keys then values. May be None.
        antiquant_offset: Added to the integers before scaling. May be None.
        block_table: The pages of every item, in order. May be None.
        kv_padding_size: Unused slots behind every item, which ends there (left padding). May be None.
        num_heads: Query heads.
        scale_value: Factor on query . key.
        input_layout: Axis order of query, the output, and a cache without pages.
        num_key_value_heads: Key heads; 0: as many as query heads.
        block_size: Tokens of a page; ignored without a block table.
        inner_precise: 0 or 1; both compute in float32.
        attention_out: The output rows.
        strict: the chip's limits are errors too.
        check_content: phase 2 checks tensor content too.

    Returns:
        (ret, workspace_size, executor): 0, bytes and what phase 2 takes; or a code, 0 and None.

    Source: CANN, aclnnIncreFlashAttentionV4.
    """

def aclnnIncreFlashAttentionV4(
    workspace: Any,
    workspace_size: int,
    executor: acl.Executor | None,
    stream: acl.Stream | None,
) -> int:
    """IncreFlashAttentionV3 with left padding. Phase 2: runs what phase 1 planned, into its output tensors.

    Args:
        workspace: address of device memory (or a torch tensor) of at least workspace_size bytes; None where that is 0.
        workspace_size: as phase 1 returned it, or more.
        executor: as phase 1 returned it; one run each, unless made repeatable.
        stream: from acl.rt.create_stream(); None is the default one.

    Returns:
        ret: 0, or a code; acl.get_recent_err_msg() says why, and nothing was written.

    Source: CANN, aclnnIncreFlashAttentionV4.
    """

def aclnnPromptFlashAttentionGetWorkspaceSize(
    query: acl.Tensor | None,
    key: acl.Tensor | None,
    value: acl.Tensor | None,
    pse_shift: acl.Tensor | None,
    atten_mask: acl.Tensor | None,
    actual_seq_lengths: acl.IntArray | acl.Tensor | Sequence[int] | None,
    num_heads: int,
    scale_value: float,
    pre_tokens: int,
    next_tokens: int,
    input_layout: str,
    num_key_value_heads: int,
    attention_out: acl.Tensor | None,
    *,
    strict: bool = True,
    check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """Attention of prompts. Phase 1: checks, plans, and says how much workspace phase 2 needs.

    Args:
        query: Query rows.
        key: Key rows.
        value: Value rows.
        pse_shift: Added to the scaled scores. May be None.
        atten_mask: 1 = this key is not seen; sparse_mode 2, 3 and 4 take a 2048 x 2048 triangle. May be None.
        actual_seq_lengths: Query rows of every item; packed rows: cumulative ends. May be None.
        num_heads: Query heads.
        scale_value: Factor on query . key.
        pre_tokens: Window to the left (modes 0 with a mask, and 4).
        next_tokens: Window to the right (modes 0 with a mask, and 4).
        input_layout: Axis order of query, key and value; behind a _ that of the output.
        num_key_value_heads: Key heads; 0: as many as query heads.
        attention_out: The output rows.
        strict: the chip's limits are errors too.
        check_content: phase 2 checks tensor content too.

    Returns:
        (ret, workspace_size, executor): 0, bytes and what phase 2 takes; or a code, 0 and None.

    Source: CANN, aclnnPromptFlashAttention.
    """

def aclnnPromptFlashAttention(
    workspace: Any,
    workspace_size: int,
    executor: acl.Executor | None,
    stream: acl.Stream | None,
) -> int:
    """Attention of prompts. Phase 2: runs what phase 1 planned, into its output tensors.

    Args:
        workspace: address of device memory (or a torch tensor) of at least workspace_size bytes; None where that is 0.
        workspace_size: as phase 1 returned it, or more.
        executor: as phase 1 returned it; one run each, unless made repeatable.
        stream: from acl.rt.create_stream(); None is the default one.

    Returns:
        ret: 0, or a code; acl.get_recent_err_msg() says why, and nothing was written.

    Source: CANN, aclnnPromptFlashAttention.
    """

def aclnnPromptFlashAttentionV2GetWorkspaceSize(
    query: acl.Tensor | None,
    key: acl.Tensor | None,
    value: acl.Tensor | None,
    pse_shift: acl.Tensor | None,
    atten_mask: acl.Tensor | None,
    actual_seq_lengths: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_lengths_kv: acl.IntArray | acl.Tensor | Sequence[int] | None,
    dequant_scale1: acl.Tensor | None,
    quant_scale1: acl.Tensor | None,
    dequant_scale2: acl.Tensor | None,
    quant_scale2: acl.Tensor | None,
    quant_offset2: acl.Tensor | None,
    num_heads: int,
    scale_value: float,
    pre_tokens: int,
    next_tokens: int,
    input_layout: str,
    num_key_value_heads: int,
    sparse_mode: int,
    attention_out: acl.Tensor | None,
    *,
    strict: bool = True,
    check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """PromptFlashAttention with key lengths, sparse modes, int8 queries and int8 output. Phase 1: checks, plans, and says how much workspace phase 2 needs.

    Args:
        query: Query rows.
        key: Key rows.
        value: Value rows.
        pse_shift: Added to the scaled scores. May be None.
        atten_mask: 1 = this key is not seen; sparse_mode 2, 3 and 4 take a 2048 x 2048 triangle. May be None.
        actual_seq_lengths: Query rows of every item; packed rows: cumulative ends. May be None.
        actual_seq_lengths_kv: Keys of every item; packed keys: cumulative ends; pages: lengths always. May be None.
        dequant_scale1: Of an int8 query: scale of the integer scores. May be None.
        quant_scale1: Of an int8 query: scale that makes the weights int8. May be None.
        dequant_scale2: Of an int8 query: scale of the integer output, which undoes quant_scale1 too. May be None.
        quant_scale2: Scale of int8 output, 1 or N1*Dv elements. May be None.
        quant_offset2: Offset of int8 output. May be None.
        num_heads: Query heads.
        scale_value: Factor on query . key.
        pre_tokens: Window to the left (modes 0 with a mask, and 4).
        next_tokens: Window to the right (modes 0 with a mask, and 4).
        input_layout: Axis order of query, key and value; behind a _ that of the output.
        num_key_value_heads: Key heads; 0: as many as query heads.
        sparse_mode: 0 mask and window, 1 mask alone, 2 causal from the upper left, 3 to the lower right, 4 window to the lower right.
        attention_out: The output rows.
        strict: the chip's limits are errors too.
        check_content: phase 2 checks tensor content too.

    Returns:
        (ret, workspace_size, executor): 0, bytes and what phase 2 takes; or a code, 0 and None.

    Source: CANN, aclnnPromptFlashAttentionV2.
    """

def aclnnPromptFlashAttentionV2(
    workspace: Any,
    workspace_size: int,
    executor: acl.Executor | None,
    stream: acl.Stream | None,
) -> int:
    """PromptFlashAttention with key lengths, sparse modes, int8 queries and int8 output. Phase 2: runs what phase 1 planned, into its output tensors.

    Args:
        workspace: address of device memory (or a torch tensor) of at least workspace_size bytes; None where that is 0.
        workspace_size: as phase 1 returned it, or more.
        executor: as phase 1 returned it; one run each, unless made repeatable.
        stream: from acl.rt.create_stream(); None is the default one.

    Returns:
        ret: 0, or a code; acl.get_recent_err_msg() says why, and nothing was written.

    Source: CANN, aclnnPromptFlashAttentionV2.
    """

def aclnnPromptFlashAttentionV3GetWorkspaceSize(
    query: acl.Tensor | None,
    key: acl.Tensor | None,
    value: acl.Tensor | None,
    pse_shift: acl.Tensor | None,
    atten_mask: acl.Tensor | None,
    actual_seq_lengths: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_lengths_kv: acl.IntArray | acl.Tensor | Sequence[int] | None,
    dequant_scale1: acl.Tensor | None,
    quant_scale1: acl.Tensor | None,
    dequant_scale2: acl.Tensor | None,
    quant_scale2: acl.Tensor | None,
    quant_offset2: acl.Tensor | None,
    num_heads: int,
    scale_value: float,
    pre_tokens: int,
    next_tokens: int,
    input_layout: str,
    num_key_value_heads: int,
    sparse_mode: int,
    inner_precise: int,
    attention_out: acl.Tensor | None,
    *,
    strict: bool = True,
    check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """PromptFlashAttentionV2 with pse_shift, inner_precise and packed rows. Phase 1: checks, plans, and says how much workspace phase 2 needs.

    Args:
        query: Query rows.
        key: Key rows.
        value: Value rows.
        pse_shift: Added to the scaled scores. May be None.
        atten_mask: 1 = this key is not seen; sparse_mode 2, 3 and 4 take a 2048 x 2048 triangle. May be None.
        actual_seq_lengths: Query rows of every item; packed rows: cumulative ends. May be None.
        actual_seq_lengths_kv: Keys of every item; packed keys: cumulative ends; pages: lengths always. May be None.
        dequant_scale1: Of an int8 query: scale of the integer scores. May be None.
        quant_scale1: Of an int8 query: scale that makes the weights int8. May be None.
        dequant_scale2: Of an int8 query: scale of the integer output, which undoes quant_scale1 too. May be None.
        quant_scale2: Scale of int8 output, 1 or N1*Dv elements. May be None.
        quant_offset2: Offset of int8 output. May be None.
        num_heads: Query heads.
        scale_value: Factor on query . key.
        pre_tokens: Window to the left (modes 0 with a mask, and 4).
        next_tokens: Window to the right (modes 0 with a mask, and 4).
        input_layout: Axis order of query, key and value; behind a _ that of the output.
        num_key_value_heads: Key heads; 0: as many as query heads.
        sparse_mode: 0 mask and window, 1 mask alone, 2 causal from the upper left, 3 to the lower right, 4 window to the lower right.
        inner_precise: Bit 1: rows that a mask empties are zeros, not the mean of the values. Bit 0 has no effect.
        attention_out: The output rows.
        strict: the chip's limits are errors too.
        check_content: phase 2 checks tensor content too.

    Returns:
        (ret, workspace_size, executor): 0, bytes and what phase 2 takes; or a code, 0 and None.

    Source: CANN, aclnnPromptFlashAttentionV3.
    """

def aclnnPromptFlashAttentionV3(
    workspace: Any,
    workspace_size: int,
    executor: acl.Executor | None,
    stream: acl.Stream | None,
) -> int:
    """PromptFlashAttentionV2 with pse_shift, inner_precise and packed rows. Phase 2: runs what phase 1 planned, into its output tensors.

    Args:
        workspace: address of device memory (or a torch tensor) of at least workspace_size bytes; None where that is 0.
        workspace_size: as phase 1 returned it, or more.
        executor: as phase 1 returned it; one run each, unless made repeatable.
        stream: from acl.rt.create_stream(); None is the default one.

    Returns:
        ret: 0, or a code; acl.get_recent_err_msg() says why, and nothing was written.

    Source: CANN, aclnnPromptFlashAttentionV3.
    """

def aclnnFusedInferAttentionScoreGetWorkspaceSize(
    query: acl.Tensor | None,
    key: acl.TensorList | None,
    value: acl.TensorList | None,
    pse_shift: acl.Tensor | None,
    atten_mask: acl.Tensor | None,
    actual_seq_lengths: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_lengths_kv: acl.IntArray | acl.Tensor | Sequence[int] | None,
    dequant_scale1: acl.Tensor | None,
    quant_scale1: acl.Tensor | None,
    dequant_scale2: acl.Tensor | None,
    quant_scale2: acl.Tensor | None,
    quant_offset2: acl.Tensor | None,
    antiquant_scale: acl.Tensor | None,
    antiquant_offset: acl.Tensor | None,
    block_table: acl.Tensor | None,
    query_padding_size: acl.IntArray | acl.Tensor | Sequence[int] | None,
    kv_padding_size: acl.IntArray | acl.Tensor | Sequence[int] | None,
    num_heads: int,
    scale_value: float,
    pre_tokens: int,
    next_tokens: int,
    input_layout: str,
    num_key_value_heads: int,
    sparse_mode: int,
    inner_precise: int,
    block_size: int,
    antiquant_mode: int,
    softmax_lse_flag: bool,
    attention_out: acl.Tensor | None,
    softmax_lse: acl.Tensor | None,
    *,
    strict: bool = True,
    check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """Attention of prompts and of new tokens over a cache: stacked, packed, listed or paged, of floats or integers. Phase 1: checks, plans, and says how much workspace phase 2 needs.

    Args:
        query: Query rows.
        key: Key rows: one tensor, one per item, or pages.
        value: Value rows, as the keys lie.
        pse_shift: Added to the scaled scores. May be None.
        atten_mask: 1 = this key is not seen; sparse_mode 2, 3 and 4 take a 2048 x 2048 triangle. May be None.
        actual_seq_lengths: Query rows of every item; packed rows: cumulative ends. May be None.
        actual_seq_lengths_kv: Keys of every item; packed keys: cumulative ends; pages: lengths always. May be None.
        dequant_scale1: Of an int8 query: scale of the integer scores. May be None.
        quant_scale1: Of an int8 query: scale that makes the weights int8. May be None.
        dequant_scale2: Of an int8 query: scale of the integer output, which undoes quant_scale1 too. May be None.
        quant_scale2: Scale of int8 output, 1 or N1*Dv elements. May be None.
        quant_offset2: Offset of int8 output. May be None.
        antiquant_scale: Scales of an int8 cache, keys then values. May be None.
        antiquant_offset: Added to the integers before scaling. May be None.
        block_table: The pages of every item, in order. May be None.
        query_padding_size: Unused slots behind every item's rows, which end there (left padding). May be None.
        kv_padding_size: Unused slots behind every item's keys, which end there (left padding). May be None.
        num_heads: Query heads.
        scale_value: Factor on query . key.
        pre_tokens: Window to the left (modes 0 with a mask, and 4).
        next_tokens: Window to the right (modes 0 with a mask, and 4).
        input_layout: Axis order of query, key and value; behind a _ that of the output.
        num_key_value_heads: Key heads; 0: as many as query heads.
        sparse_mode: 0 mask and window, 1 mask alone, 2 causal from the upper left, 3 to the lower right, 4 window to the lower right, 9 tree.
        inner_precise: Bit 1: rows that a mask empties are zeros, not the mean of the values. Bit 0 has no effect.
        block_size: Tokens of a page; ignored without a block table.
        antiquant_mode: Of antiquant_scale: 0 per channel or one number, 1 per token.
        softmax_lse_flag: Whether softmax_lse is written.
        attention_out: The output rows.
        softmax_lse: max + ln(sum) of every row's scores; +inf where it has no key. Written where asked for. May be None.
        strict: the chip's limits are errors too.
        check_content: phase 2 checks tensor content too.

    Returns:
        (ret, workspace_size, executor): 0, bytes and what phase 2 takes; or a code, 0 and None.

    Source: CANN, aclnnFusedInferAttentionScore.
    """

def aclnnFusedInferAttentionScore(
    workspace: Any,
    workspace_size: int,
    executor: acl.Executor | None,
    stream: acl.Stream | None,
) -> int:
    """Attention of prompts and of new tokens over a cache: stacked, packed, listed or paged, of floats or integers. Phase 2: runs what phase 1 planned, into its output tensors.

    Args:
        workspace: address of device memory (or a torch tensor) of at least workspace_size bytes; None where that is 0.
        workspace_size: as phase 1 returned it, or more.
        executor: as phase 1 returned it; one run each, unless made repeatable.
        stream: from acl.rt.create_stream(); None is the default one.

    Returns:
        ret: 0, or a code; acl.get_recent_err_msg() says why, and nothing was written.

    Source: CANN, aclnnFusedInferAttentionScore.
    """

def aclnnFusedInferAttentionScoreV2GetWorkspaceSize(
    query: acl.Tensor | None,
    key: acl.TensorList | None,
    value: acl.TensorList | None,
    pse_shift: acl.Tensor | None,
    atten_mask: acl.Tensor | None,
    actual_seq_lengths: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_lengths_kv: acl.IntArray | acl.Tensor | Sequence[int] | None,
    dequant_scale1: acl.Tensor | None,
    quant_scale1: acl.Tensor | None,
    dequant_scale2: acl.Tensor | None,
    quant_scale2: acl.Tensor | None,
    quant_offset2: acl.Tensor | None,
    antiquant_scale: acl.Tensor | None,
    antiquant_offset: acl.Tensor | None,
    block_table: acl.Tensor | None,
    query_padding_size: acl.IntArray | acl.Tensor | Sequence[int] | None,
    kv_padding_size: acl.IntArray | acl.Tensor | Sequence[int] | None,
    key_antiquant_scale: acl.Tensor | None,
    key_antiquant_offset: acl.Tensor | None,
    value_antiquant_scale: acl.Tensor | None,
    value_antiquant_offset: acl.Tensor | None,
    key_shared_prefix: acl.Tensor | None,
    value_shared_prefix: acl.Tensor | None,
    actual_shared_prefix_len: acl.IntArray | acl.Tensor | Sequence[int] | None,
    num_heads: int,
    scale_value: float,
    pre_tokens: int,
    next_tokens: int,
    input_layout: str,
    num_key_value_heads: int,
    sparse_mode: int,
    inner_precise: int,
    block_size: int,
    antiquant_mode: int,
    softmax_lse_flag: bool,
    key_antiquant_mode: int,
    value_antiquant_mode: int,
    attention_out: acl.Tensor | None,
    softmax_lse: acl.Tensor | None,
    *,
    strict: bool = True,
    check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """FusedInferAttentionScore with scales of keys and values apart, and a shared prefix. Phase 1: checks, plans, and says how much workspace phase 2 needs.

    Args:
        query: Query rows.
        key: Key rows: one tensor, one per item, or pages.
        value: Value rows, as the keys lie.
        pse_shift: Added to the scaled scores. May be None.
        atten_mask: 1 = this key is not seen; sparse_mode 2, 3 and 4 take a 2048 x 2048 triangle. May be None.
        actual_seq_lengths: Query rows of every item; packed rows: cumulative ends. May be None.
        actual_seq_lengths_kv: Keys of every item; packed keys: cumulative ends; pages: lengths always. May be None.
        dequant_scale1: Of an int8 query: scale of the integer scores. May be None.
        quant_scale1: Of an int8 query: scale that makes the weights int8. May be None.
        dequant_scale2: Of an int8 query: scale of the integer output, which undoes quant_scale1 too. May be None.
        quant_scale2: Scale of int8 output, 1 or N1*Dv elements. May be None.
        quant_offset2: Offset of int8 output. May be None.
        antiquant_scale: Scales of an int8 cache, keys then values. May be None.
        antiquant_offset: Added to the integers before scaling. May be None.
        block_table: The pages of every item, in order. May be None.
        query_padding_size: Unused slots behind every item's rows, which end there (left padding). May be None.
        kv_padding_size: Unused slots behind every item's keys, which end there (left padding). May be None.
        key_antiquant_scale: Scales of integer keys. May be None.
        key_antiquant_offset: Added to integer keys before scaling. May be None.
        value_antiquant_scale: Scales of integer values. May be None.
        value_antiquant_offset: Added to integer values before scaling. May be None.
        key_shared_prefix: Keys in front of every item's own. May be None.
        value_shared_prefix: Values in front of every item's own. May be None.
        actual_shared_prefix_len: Keys of the shared prefix that count, one number; None: all. May be None.
        num_heads: Query heads.
        scale_value: Factor on query . key.
        pre_tokens: Window to the left (modes 0 with a mask, and 4).
        next_tokens: Window to the right (modes 0 with a mask, and 4).
        input_layout: Axis order of query, key and value; behind a _ that of the output.
        num_key_value_heads: Key heads; 0: as many as query heads.
        sparse_mode: 0 mask and window, 1 mask alone, 2 causal from the upper left, 3 to the lower right, 4 window to the lower right, 9 tree.
        inner_precise: Bit 1: rows that a mask empties are zeros, not the mean of the values. Bit 0 has no effect.
        block_size: Tokens of a page; ignored without a block table.
        antiquant_mode: Of antiquant_scale: 0 per channel or one number, 1 per token.
        softmax_lse_flag: Whether softmax_lse is written.
        key_antiquant_mode: Of key_antiquant_scale: 0 per channel or one number, 1 per token, 2 per head, 3 per token and head, 4 and 5 as 1 and 3 in pages.
        value_antiquant_mode: Of value_antiquant_scale: 0 per channel or one number, 1 per token, 2 per head, 3 per token and head, 4 and 5 as 1 and 3 in pages.
        attention_out: The output rows.
        softmax_lse: max + ln(sum) of every row's scores; +inf where it has no key. Written where asked for. May be None.
        strict: the chip's limits are errors too.
        check_content: phase 2 checks tensor content too.

    Returns:
        (ret, workspace_size, executor): 0, bytes and what phase 2 takes; or a code, 0 and None.

    Source: CANN, aclnnFusedInferAttentionScoreV2.
    """

def aclnnFusedInferAttentionScoreV2(
    workspace: Any,
    workspace_size: int,
    executor: acl.Executor | None,
    stream: acl.Stream | None,
) -> int:
    """FusedInferAttentionScore with scales of keys and values apart, and a shared prefix. Phase 2: runs what phase 1 planned, into its output tensors.

    Args:
        workspace: address of device memory (or a torch tensor) of at least workspace_size bytes; None where that is 0.
        workspace_size: as phase 1 returned it, or more.
        executor: as phase 1 returned it; one run each, unless made repeatable.
        stream: from acl.rt.create_stream(); None is the default one.

    Returns:
        ret: 0, or a code; acl.get_recent_err_msg() says why, and nothing was written.

    Source: CANN, aclnnFusedInferAttentionScoreV2.
    """

def aclnnFusedInferAttentionScoreV3GetWorkspaceSize(
    query: acl.Tensor | None,
    key: acl.TensorList | None,
    value: acl.TensorList | None,
    pse_shift: acl.Tensor | None,
    atten_mask: acl.Tensor | None,
    actual_seq_lengths: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_lengths_kv: acl.IntArray | acl.Tensor | Sequence[int] | None,
    dequant_scale1: acl.Tensor | None,
    quant_scale1: acl.Tensor | None,
    dequant_scale2: acl.Tensor | None,
    quant_scale2: acl.Tensor | None,
    quant_offset2: acl.Tensor | None,
    antiquant_scale: acl.Tensor | None,
    antiquant_offset: acl.Tensor | None,
    block_table: acl.Tensor | None,
    query_padding_size: acl.IntArray | acl.Tensor | Sequence[int] | None,
    kv_padding_size: acl.IntArray | acl.Tensor | Sequence[int] | None,
    key_antiquant_scale: acl.Tensor | None,
    key_antiquant_offset: acl.Tensor | None,
    value_antiquant_scale: acl.Tensor | None,
    value_antiquant_offset: acl.Tensor | None,
    key_shared_prefix: acl.Tensor | None,
    value_shared_prefix: acl.Tensor | None,
    actual_shared_prefix_len: acl.IntArray | acl.Tensor | Sequence[int] | None,
    query_rope: acl.Tensor | None,
    key_rope: acl.Tensor | None,
    key_rope_antiquant_scale: acl.Tensor | None,
    num_heads: int,
    scale_value: float,
    pre_tokens: int,
    next_tokens: int,
    input_layout: str,
    num_key_value_heads: int,
    sparse_mode: int,
    inner_precise: int,
    block_size: int,
    antiquant_mode: int,
    softmax_lse_flag: bool,
    key_antiquant_mode: int,
    value_antiquant_mode: int,
    attention_out: acl.Tensor | None,
    softmax_lse: acl.Tensor | None,
    *,
    strict: bool = True,
    check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """FusedInferAttentionScoreV2 with rope parts of their own. Phase 1: checks, plans, and says how much workspace phase 2 needs.

    Args:
        query: Query rows.
        key: Key rows: one tensor, one per item, or pages.
        value: Value rows, as the keys lie.
        pse_shift: Added to the scaled scores. May be None.
        atten_mask: 1 = this key is not seen; sparse_mode 2, 3 and 4 take a 2048 x 2048 triangle. May be None.
        actual_seq_lengths: Query rows of every item; packed rows: cumulative ends. May be None.
        actual_seq_lengths_kv: Keys of every item; packed keys: cumulative ends; pages: lengths always. May be None.
        dequant_scale1: Of an int8 query: scale of the integer scores. May be None.
        quant_scale1: Of an int8 query: scale that makes the weights int8. May be None.
        dequant_scale2: Of an int8 query: scale of the integer output, which undoes quant_scale1 too. May be None.
        quant_scale2: Scale of int8 output, 1 or N1*Dv elements. May be None.
        quant_offset2: Offset of int8 output. May be None.
        antiquant_scale: Scales of an int8 cache, keys then values. May be None.
        antiquant_offset: Added to the integers before scaling. May be None.
        block_table: The pages of every item, in order. May be None.
        query_padding_size: Unused slots behind every item's rows, which end there (left padding). May be None.
        kv_padding_size: Unused slots behind every item's keys, which end there (left padding). May be None.
        key_antiquant_scale: Scales of integer keys. May be None.
        key_antiquant_offset: Added to integer keys before scaling. May be None.
        value_antiquant_scale: Scales of integer values. May be None.
        value_antiquant_offset: Added to integer values before scaling. May be None.
        key_shared_prefix: Keys in front of every item's own. May be None.
        value_shared_prefix: Values in front of every item's own. May be None.
        actual_shared_prefix_len: Keys of the shared prefix that count, one number; None: all. May be None.
        query_rope: Rope part of the query rows. May be None.
        key_rope: Rope part of the key rows, as the keys lie. May be None.
        key_rope_antiquant_scale: Reserved. May be None.
        num_heads: Query heads.
        scale_value: Factor on query . key.
        pre_tokens: Window to the left (modes 0 with a mask, and 4).
        next_tokens: Window to the right (modes 0 with a mask, and 4).
        input_layout: Axis order of query, key and value; behind a _ that of the output.
        num_key_value_heads: Key heads; 0: as many as query heads.
        sparse_mode: 0 mask and window, 1 mask alone, 2 causal from the upper left, 3 to the lower right, 4 window to the lower right, 9 tree.
        inner_precise: Bit 1: rows that a mask empties are zeros, not the mean of the values. Bit 0 has no effect.
        block_size: Tokens of a page; ignored without a block table.
        antiquant_mode: Of antiquant_scale: 0 per channel or one number, 1 per token.
        softmax_lse_flag: Whether softmax_lse is written.
        key_antiquant_mode: Of key_antiquant_scale: 0 per channel or one number, 1 per token, 2 per head, 3 per token and head, 4 and 5 as 1 and 3 in pages.
        value_antiquant_mode: Of value_antiquant_scale: 0 per channel or one number, 1 per token, 2 per head, 3 per token and head, 4 and 5 as 1 and 3 in pages.
        attention_out: The output rows.
        softmax_lse: max + ln(sum) of every row's scores; +inf where it has no key. Written where asked for. May be None.
        strict: the chip's limits are errors too.
        check_content: phase 2 checks tensor content too.

    Returns:
        (ret, workspace_size, executor): 0, bytes and what phase 2 takes; or a code, 0 and None.

    Source: CANN, aclnnFusedInferAttentionScoreV3.
    """

def aclnnFusedInferAttentionScoreV3(
    workspace: Any,
    workspace_size: int,
    executor: acl.Executor | None,
    stream: acl.Stream | None,
) -> int:
    """FusedInferAttentionScoreV2 with rope parts of their own. Phase 2: runs what phase 1 planned, into its output tensors.

    Args:
        workspace: address of device memory (or a torch tensor) of at least workspace_size bytes; None where that is 0.
        workspace_size: as phase 1 returned it, or more.
        executor: as phase 1 returned it; one run each, unless made repeatable.
        stream: from acl.rt.create_stream(); None is the default one.

    Returns:
        ret: 0, or a code; acl.get_recent_err_msg() says why, and nothing was written.

    Source: CANN, aclnnFusedInferAttentionScoreV3.
    """

def aclnnFusedInferAttentionScoreV4GetWorkspaceSize(
    query: acl.Tensor | None,
    key: acl.TensorList | None,
    value: acl.TensorList | None,
    pse_shift: acl.Tensor | None,
    atten_mask: acl.Tensor | None,
    actual_seq_lengths: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_lengths_kv: acl.IntArray | acl.Tensor | Sequence[int] | None,
    dequant_scale1: acl.Tensor | None,
    quant_scale1: acl.Tensor | None,
    dequant_scale2: acl.Tensor | None,
    quant_scale2: acl.Tensor | None,
    quant_offset2: acl.Tensor | None,
    antiquant_scale: acl.Tensor | None,
    antiquant_offset: acl.Tensor | None,
    block_table: acl.Tensor | None,
    query_padding_size: acl.IntArray | acl.Tensor | Sequence[int] | None,
    kv_padding_size: acl.IntArray | acl.Tensor | Sequence[int] | None,
    key_antiquant_scale: acl.Tensor | None,
    key_antiquant_offset: acl.Tensor | None,
    value_antiquant_scale: acl.Tensor | None,
    value_antiquant_offset: acl.Tensor | None,
    key_shared_prefix: acl.Tensor | None,
    value_shared_prefix: acl.Tensor | None,
    actual_shared_prefix_len: acl.IntArray | acl.Tensor | Sequence[int] | None,
    query_rope: acl.Tensor | None,
    key_rope: acl.Tensor | None,
    key_rope_antiquant_scale: acl.Tensor | None,
    dequant_scale_query: acl.Tensor | None,
    learnable_sink: acl.Tensor | None,
    num_heads: int,
    scale_value: float,
    pre_tokens: int,
    next_tokens: int,
    input_layout: str,
    num_key_value_heads: int,
    sparse_mode: int,
    inner_precise: int,
    block_size: int,
    antiquant_mode: int,
    softmax_lse_flag: bool,
    key_antiquant_mode: int,
    value_antiquant_mode: int,
    query_quant_mode: int,
    attention_out: acl.Tensor | None,
    softmax_lse: acl.Tensor | None,
    *,
    strict: bool = True,
    check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """FusedInferAttentionScoreV3 with a scale per query row, and sinks. Phase 1: checks, plans, and says how much workspace phase 2 needs.

    Args:
        query: Query rows.
        key: Key rows: one tensor, one per item, or pages.
        value: Value rows, as the keys lie.
        pse_shift: Added to the scaled scores. May be None.
        atten_mask: 1 = this key is not seen; sparse_mode 2, 3 and 4 take a 2048 x 2048 triangle. May be None.
        actual_seq_lengths: Query rows of every item; packed rows: cumulative ends. May be None.
        actual_seq_lengths_kv: Keys of every item; packed keys: cumulative ends; pages: lengths always. May be None.
        dequant_scale1: Of an int8 query: scale of the integer scores. May be None.
        quant_scale1: Of an int8 query: scale that makes the weights int8. May be None.
        dequant_scale2: Of an int8 query: scale of the integer output, which undoes quant_scale1 too. May be None.
        quant_scale2: Scale of int8 output, 1 or N1*Dv elements. May be None.
        quant_offset2: Offset of int8 output. May be None.
        antiquant_scale: Scales of an int8 cache, keys then values. May be None.
        antiquant_offset: Added to the integers before scaling. May be None.
        block_table: The pages of every item, in order. May be None.
        query_padding_size: Unused slots behind every item's rows, which end there (left padding). May be None.
        kv_padding_size: Unused slots behind every item's keys, which end there (left padding). May be None.
        key_antiquant_scale: Scales of integer keys. May be None.
        key_antiquant_offset: Added to integer keys before scaling. May be None.
        value_antiquant_scale: Scales of integer values. May be None.
        value_antiquant_offset: Added to integer values before scaling. May be None.
        key_shared_prefix: Keys in front of every item's own. May be None.
        value_shared_prefix: Values in front of every item's own. May be None.
        actual_shared_prefix_len: Keys of the shared prefix that count, one number; None: all. May be None.
        query_rope: Rope part of the query rows. May be None.
        key_rope: Rope part of the key rows, as the keys lie. May be None.
        key_rope_antiquant_scale: Reserved. May be None.
        dequant_scale_query: Scale of an int8 query, per row and head. May be None.
        learnable_sink: One more logit per query head, without a value. May be None.
        num_heads: Query heads.
        scale_value: Factor on query . key.
        pre_tokens: Window to the left (modes 0 with a mask, and 4).
        next_tokens: Window to the right (modes 0 with a mask, and 4).
        input_layout: Axis order of query, key and value; behind a _ that of the output.
        num_key_value_heads: Key heads; 0: as many as query heads.
        sparse_mode: 0 mask and window, 1 mask alone, 2 causal from the upper left, 3 to the lower right, 4 window to the lower right, 9 tree.
        inner_precise: Bit 1: rows that a mask empties are zeros, not the mean of the values. Bit 0 has no effect.
        block_size: Tokens of a page; ignored without a block table.
        antiquant_mode: Of antiquant_scale: 0 per channel or one number, 1 per token.
        softmax_lse_flag: Whether softmax_lse is written.
        key_antiquant_mode: Of key_antiquant_scale: 0 per channel or one number, 1 per token, 2 per head, 3 per token and head, 4 and 5 as 1 and 3 in pages.
        value_antiquant_mode: Of value_antiquant_scale: 0 per channel or one number, 1 per token, 2 per head, 3 per token and head, 4 and 5 as 1 and 3 in pages.
        query_quant_mode: 3: an int8 query with a scale per row and head (rope parts beside it); else 0.
        attention_out: The output rows.
        softmax_lse: max + ln(sum) of every row's scores; +inf where it has no key. Written where asked for. May be None.
        strict: the chip's limits are errors too.
        check_content: phase 2 checks tensor content too.

    Returns:
        (ret, workspace_size, executor): 0, bytes and what phase 2 takes; or a code, 0 and None.

    Source: CANN, aclnnFusedInferAttentionScoreV4.
    """

def aclnnFusedInferAttentionScoreV4(
    workspace: Any,
    workspace_size: int,
    executor: acl.Executor | None,
    stream: acl.Stream | None,
) -> int:
    """FusedInferAttentionScoreV3 with a scale per query row, and sinks. Phase 2: runs what phase 1 planned, into its output tensors.

    Args:
        workspace: address of device memory (or a torch tensor) of at least workspace_size bytes; None where that is 0.
        workspace_size: as phase 1 returned it, or more.
        executor: as phase 1 returned it; one run each, unless made repeatable.
        stream: from acl.rt.create_stream(); None is the default one.

    Returns:
        ret: 0, or a code; acl.get_recent_err_msg() says why, and nothing was written.

    Source: CANN, aclnnFusedInferAttentionScoreV4.
    """

def aclnnFusedInferAttentionScoreV5GetWorkspaceSize(
    query: acl.Tensor | None,
    key: acl.TensorList | None,
    value: acl.TensorList | None,
    pse_shift: acl.Tensor | None,
    atten_mask: acl.Tensor | None,
    actual_seq_lengths: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_lengths_kv: acl.IntArray | acl.Tensor | Sequence[int] | None,
    dequant_scale1: acl.Tensor | None,
    quant_scale1: acl.Tensor | None,
    dequant_scale2: acl.Tensor | None,
    quant_scale2: acl.Tensor | None,
    quant_offset2: acl.Tensor | None,
    antiquant_scale: acl.Tensor | None,
    antiquant_offset: acl.Tensor | None,
    block_table: acl.Tensor | None,
    query_padding_size: acl.IntArray | acl.Tensor | Sequence[int] | None,
    kv_padding_size: acl.IntArray | acl.Tensor | Sequence[int] | None,
    key_antiquant_scale: acl.Tensor | None,
    key_antiquant_offset: acl.Tensor | None,
    value_antiquant_scale: acl.Tensor | None,
    value_antiquant_offset: acl.Tensor | None,
    key_shared_prefix: acl.Tensor | None,
    value_shared_prefix: acl.Tensor | None,
    actual_shared_prefix_len: acl.IntArray | acl.Tensor | Sequence[int] | None,
    query_rope: acl.Tensor | None,
    key_rope: acl.Tensor | None,
    key_rope_antiquant_scale: acl.Tensor | None,
    dequant_scale_query: acl.Tensor | None,
    learnable_sink: acl.Tensor | None,
    q_start_idx: acl.IntArray | acl.Tensor | Sequence[int] | None,
    kv_start_idx: acl.IntArray | acl.Tensor | Sequence[int] | None,
    num_heads: int,
    scale_value: float,
    pre_tokens: int,
    next_tokens: int,
    input_layout: str,
    num_key_value_heads: int,
    sparse_mode: int,
    inner_precise: int,
    block_size: int,
    antiquant_mode: int,
    softmax_lse_flag: bool,
    key_antiquant_mode: int,
    value_antiquant_mode: int,
    query_quant_mode: int,
    pse_type: int,
    attention_out: acl.Tensor | None,
    softmax_lse: acl.Tensor | None,
    *,
    strict: bool = True,
    check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """FusedInferAttentionScoreV4 on Ascend 950: this library computes what both chips know. Phase 1: checks, plans, and says how much workspace phase 2 needs.

    Args:
        query: Query rows.
        key: Key rows: one tensor, one per item, or pages.
        value: Value rows, as the keys lie.
        pse_shift: Added to the scaled scores. May be None.
        atten_mask: 1 = this key is not seen; sparse_mode 2, 3 and 4 take a 2048 x 2048 triangle. May be None.
        actual_seq_lengths: Query rows of every item; packed rows: cumulative ends. May be None.
        actual_seq_lengths_kv: Keys of every item; packed keys: cumulative ends; pages: lengths always. May be None.
        dequant_scale1: Of an int8 query: scale of the integer scores. May be None.
        quant_scale1: Of an int8 query: scale that makes the weights int8. May be None.
        dequant_scale2: Of an int8 query: scale of the integer output, which undoes quant_scale1 too. May be None.
        quant_scale2: Scale of int8 output, 1 or N1*Dv elements. May be None.
        quant_offset2: Offset of int8 output. May be None.
        antiquant_scale: Scales of an int8 cache, keys then values. May be None.
        antiquant_offset: Added to the integers before scaling. May be None.
        block_table: The pages of every item, in order. May be None.
        query_padding_size: Unused slots behind every item's rows, which end there (left padding). May be None.
        kv_padding_size: Unused slots behind every item's keys, which end there (left padding). May be None.
        key_antiquant_scale: Scales of integer keys. May be None.
        key_antiquant_offset: Added to integer keys before scaling. May be None.
        value_antiquant_scale: Scales of integer values. May be None.
        value_antiquant_offset: Added to integer values before scaling. May be None.
        key_shared_prefix: Keys in front of every item's own. May be None.
        value_shared_prefix: Values in front of every item's own. May be None.
        actual_shared_prefix_len: Keys of the shared prefix that count, one number; None: all. May be None.
        query_rope: Rope part of the query rows. May be None.
        key_rope: Rope part of the key rows, as the keys lie. May be None.
        key_rope_antiquant_scale: Reserved. May be None.
        dequant_scale_query: Scale of an int8 query, per row and head. May be None.
        learnable_sink: One more logit per query head, without a value. May be None.
        q_start_idx: Of pse_type 2 and 3, which there are not. May be None.
        kv_start_idx: Of pse_type 2 and 3, which there are not. May be None.
        num_heads: Query heads.
        scale_value: Factor on query . key.
        pre_tokens: Window to the left (modes 0 with a mask, and 4).
        next_tokens: Window to the right (modes 0 with a mask, and 4).
        input_layout: Axis order of query, key and value; behind a _ that of the output.
        num_key_value_heads: Key heads; 0: as many as query heads.
        sparse_mode: 0 mask and window, 1 mask alone, 2 causal from the upper left, 3 to the lower right, 4 window to the lower right, 9 tree.
        inner_precise: Bit 1: rows that a mask empties are zeros, not the mean of the values. Bit 0 has no effect.
        block_size: Tokens of a page; ignored without a block table.
        antiquant_mode: Of antiquant_scale: 0 per channel or one number, 1 per token.
        softmax_lse_flag: Whether softmax_lse is written.
        key_antiquant_mode: Of key_antiquant_scale: 0 per channel or one number, 1 per token, 2 per head, 3 per token and head, 4 and 5 as 1 and 3 in pages.
        value_antiquant_mode: Of value_antiquant_scale: 0 per channel or one number, 1 per token, 2 per head, 3 per token and head, 4 and 5 as 1 and 3 in pages.
        query_quant_mode: 3: an int8 query with a scale per row and head (rope parts beside it); else 0.
        pse_type: 0: pse_shift is added to the scaled scores.
        attention_out: The output rows.
        softmax_lse: max + ln(sum) of every row's scores; +inf where it has no key. Written where asked for. May be None.
        strict: the chip's limits are errors too.
        check_content: phase 2 checks tensor content too.

    Returns:
        (ret, workspace_size, executor): 0, bytes and what phase 2 takes; or a code, 0 and None.

    Source: CANN, aclnnFusedInferAttentionScoreV5.
    """

def aclnnFusedInferAttentionScoreV5(
    workspace: Any,
    workspace_size: int,
    executor: acl.Executor | None,
    stream: acl.Stream | None,
) -> int:
    """FusedInferAttentionScoreV4 on Ascend 950: this library computes what both chips know. Phase 2: runs what phase 1 planned, into its output tensors.

    Args:
        workspace: address of device memory (or a torch tensor) of at least workspace_size bytes; None where that is 0.
        workspace_size: as phase 1 returned it, or more.
        executor: as phase 1 returned it; one run each, unless made repeatable.
        stream: from acl.rt.create_stream(); None is the default one.

    Returns:
        ret: 0, or a code; acl.get_recent_err_msg() says why, and nothing was written.

    Source: CANN, aclnnFusedInferAttentionScoreV5.
    """

def aclnnLightningIndexerGetWorkspaceSize(
    query: acl.Tensor | None,
    key: acl.Tensor | None,
    weights: acl.Tensor | None,
    actual_seq_lengths_query: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_lengths_key: acl.IntArray | acl.Tensor | Sequence[int] | None,
    block_table: acl.Tensor | None,
    layout_query: str,
    layout_key: str,
    sparse_count: int,
    sparse_mode: int,
    pre_tokens: int,
    next_tokens: int,
    return_values: bool,
    sparse_indices_out: acl.Tensor | None,
    sparse_values_out: acl.Tensor | None,
    *,
    strict: bool = True,
    check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """Scores of keys by ReLU-weighted heads, and per row the keys that score highest. Phase 1: checks, plans, and says how much workspace phase 2 needs.

    Args:
        query: Query rows.
        key: Key rows, one head for all query heads.
        weights: Weight of every query head, in the query's dtype or float32; scale factors belong into it.
        actual_seq_lengths_query: Query rows of every sequence; TND (needed): their cumulative ends. May be None.
        actual_seq_lengths_key: Keys of every sequence; TND (needed): their cumulative ends. May be None.
        block_table: The pages of every sequence, for keys in layout PA_BSND. May be None.
        layout_query: Axis order of query rows.
        layout_key: Axis order of key rows: as the queries', or PA_BSND.
        sparse_count: Keys that a row chooses.
        sparse_mode: 0: rows see all keys; 3: causal, the last row sees the last key.
        pre_tokens: Without effect.
        next_tokens: Without effect.
        return_values: Return the scores of the chosen keys.
        sparse_indices_out: The keys chosen, best first; -1 behind the last.
        sparse_values_out: Their scores; -inf behind the last.
        strict: the chip's limits are errors too.
        check_content: phase 2 checks tensor content too.

    Returns:
        (ret, workspace_size, executor): 0, bytes and what phase 2 takes; or a code, 0 and None.

    Source: CANN, aclnnLightningIndexer.
    """

def aclnnLightningIndexer(
    workspace: Any,
    workspace_size: int,
    executor: acl.Executor | None,
    stream: acl.Stream | None,
) -> int:
    """Scores of keys by ReLU-weighted heads, and per row the keys that score highest. Phase 2: runs what phase 1 planned, into its output tensors.

    Args:
        workspace: address of device memory (or a torch tensor) of at least workspace_size bytes; None where that is 0.
        workspace_size: as phase 1 returned it, or more.
        executor: as phase 1 returned it; one run each, unless made repeatable.
        stream: from acl.rt.create_stream(); None is the default one.

    Returns:
        ret: 0, or a code; acl.get_recent_err_msg() says why, and nothing was written.

    Source: CANN, aclnnLightningIndexer.
    """

def aclnnLightningIndexerGradGetWorkspaceSize(
    query: acl.Tensor | None,
    key: acl.Tensor | None,
    dy: acl.Tensor | None,
    sparse_indices: acl.Tensor | None,
    weights: acl.Tensor | None,
    actual_seq_lengths_query: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_lengths_key: acl.IntArray | acl.Tensor | Sequence[int] | None,
    head_num: int,
    layout: str,
    sparse_mode: int,
    pre_tokens: int,
    next_tokens: int,
    deterministic: bool,
    dquery: acl.Tensor | None,
    dkey: acl.Tensor | None,
    dweights: acl.Tensor | None,
    *,
    strict: bool = True,
    check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """Gradients of the values that LightningIndexer chose, padded or packed. Phase 1: checks, plans, and says how much workspace phase 2 needs.

    Args:
        query: Query rows.
        key: Key rows, one head for all query heads.
        dy: Gradient of the values.
        sparse_indices: The forward's indices.
        weights: Weight of every query head, in the query's dtype or float32; scale factors belong into it.
        actual_seq_lengths_query: Query rows of every sequence; TND (needed): their cumulative ends. May be None.
        actual_seq_lengths_key: Keys of every sequence; TND (needed): their cumulative ends. May be None.
        head_num: Query heads.
        layout: Axis order of query rows.
        sparse_mode: 0: rows see all keys; 3: causal, the last row sees the last key.
        pre_tokens: Without effect.
        next_tokens: Without effect.
        deterministic: Accepted; results are always reproducible on the CPU.
        dquery: Gradient of query.
        dkey: Gradient of key.
        dweights: Gradient of weights.
        strict: the chip's limits are errors too.
        check_content: phase 2 checks tensor content too.

    Returns:
        (ret, workspace_size, executor): 0, bytes and what phase 2 takes; or a code, 0 and None.

    Source: CANN, aclnnLightningIndexerGrad.
    """

def aclnnLightningIndexerGrad(
    workspace: Any,
    workspace_size: int,
    executor: acl.Executor | None,
    stream: acl.Stream | None,
) -> int:
    """Gradients of the values that LightningIndexer chose, padded or packed. Phase 2: runs what phase 1 planned, into its output tensors.

    Args:
        workspace: address of device memory (or a torch tensor) of at least workspace_size bytes; None where that is 0.
        workspace_size: as phase 1 returned it, or more.
        executor: as phase 1 returned it; one run each, unless made repeatable.
        stream: from acl.rt.create_stream(); None is the default one.

    Returns:
        ret: 0, or a code; acl.get_recent_err_msg() says why, and nothing was written.

    Source: CANN, aclnnLightningIndexerGrad.
    """

def aclnnSparseFlashAttentionGetWorkspaceSize(
    query: acl.Tensor | None,
    key: acl.Tensor | None,
    value: acl.Tensor | None,
    sparse_indices: acl.Tensor | None,
    block_table: acl.Tensor | None,
    actual_seq_lengths_query: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_lengths_kv: acl.IntArray | acl.Tensor | Sequence[int] | None,
    query_rope: acl.Tensor | None,
    key_rope: acl.Tensor | None,
    scale_value: float,
    sparse_block_size: int,
    layout_query: str,
    layout_kv: str,
    sparse_mode: int,
    pre_tokens: int,
    next_tokens: int,
    attention_mode: int,
    return_softmax_lse: bool,
    attention_out: acl.Tensor | None,
    softmax_max: acl.Tensor | None,
    softmax_sum: acl.Tensor | None,
    *,
    strict: bool = True,
    check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """Attention over the blocks of keys that every row selects. Phase 1: checks, plans, and says how much workspace phase 2 needs.

    Args:
        query: Query rows.
        key: Key rows.
        value: Value rows; None: the first Dv elements of the key rows, whose gradient then holds both. May be None.
        sparse_indices: Per row and key head the selected blocks, numbered from the sequence's first; -1 ends a list.
        block_table: The pages of every sequence, for keys in layout PA_BSND. May be None.
        actual_seq_lengths_query: Query rows of every sequence; TND (needed): their cumulative ends. May be None.
        actual_seq_lengths_kv: Keys of every sequence; TND (needed): their cumulative ends. May be None.
        query_rope: Rope part of the query rows. May be None.
        key_rope: Rope part of the key rows. May be None.
        scale_value: Factor on query . key.
        sparse_block_size: Tokens of a selected block.
        layout_query: Axis order of query rows.
        layout_kv: Axis order of key rows: as the queries', or PA_BSND.
        sparse_mode: 0: rows see all keys; 3: causal, the last row sees the last key.
        pre_tokens: Without effect.
        next_tokens: Without effect.
        attention_mode: 2: value is the key's first part, as everywhere here; the chip takes no other.
        return_softmax_lse: Return row maxima and sums.
        attention_out: The output rows.
        softmax_max: Row maxima of the scaled scores; 0 where a row sees no key.
        softmax_sum: Row sums of exp(score - max); 0 where a row sees no key.
        strict: the chip's limits are errors too.
        check_content: phase 2 checks tensor content too.

    Returns:
        (ret, workspace_size, executor): 0, bytes and what phase 2 takes; or a code, 0 and None.

    Source: CANN, aclnnSparseFlashAttention.
    """

def aclnnSparseFlashAttention(
    workspace: Any,
    workspace_size: int,
    executor: acl.Executor | None,
    stream: acl.Stream | None,
) -> int:
    """Attention over the blocks of keys that every row selects. Phase 2: runs what phase 1 planned, into its output tensors.

    Args:
        workspace: address of device memory (or a torch tensor) of at least workspace_size bytes; None where that is 0.
        workspace_size: as phase 1 returned it, or more.
        executor: as phase 1 returned it; one run each, unless made repeatable.
        stream: from acl.rt.create_stream(); None is the default one.

    Returns:
        ret: 0, or a code; acl.get_recent_err_msg() says why, and nothing was written.

    Source: CANN, aclnnSparseFlashAttention.
    """

def aclnnSparseFlashAttentionGradGetWorkspaceSize(
    query: acl.Tensor | None,
    key: acl.Tensor | None,
    value: acl.Tensor | None,
    sparse_indices: acl.Tensor | None,
    d_out: acl.Tensor | None,
    out: acl.Tensor | None,
    softmax_max: acl.Tensor | None,
    softmax_sum: acl.Tensor | None,
    actual_seq_lengths_query: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_lengths_kv: acl.IntArray | acl.Tensor | Sequence[int] | None,
    query_rope: acl.Tensor | None,
    key_rope: acl.Tensor | None,
    scale_value: float,
    sparse_block_size: int,
    layout: str,
    sparse_mode: int,
    pre_tokens: int,
    next_tokens: int,
    deterministic: bool,
    dquery: acl.Tensor | None,
    dkey: acl.Tensor | None,
    dvalue: acl.Tensor | None,
    dquery_rope: acl.Tensor | None,
    dkey_rope: acl.Tensor | None,
    *,
    strict: bool = True,
    check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """Gradients of SparseFlashAttention, padded or packed. Phase 1: checks, plans, and says how much workspace phase 2 needs.

    Args:
        query: Query rows.
        key: Key rows.
        value: Value rows; None: the first Dv elements of the key rows, whose gradient then holds both. May be None.
        sparse_indices: Per row and key head the selected blocks, numbered from the sequence's first; -1 ends a list.
        d_out: Gradient of the output.
        out: The forward's output.
        softmax_max: Row maxima that the forward returned.
        softmax_sum: Row sums that the forward returned.
        actual_seq_lengths_query: Query rows of every sequence; TND (needed): their cumulative ends. May be None.
        actual_seq_lengths_kv: Keys of every sequence; TND (needed): their cumulative ends. May be None.
        query_rope: Rope part of the query rows. May be None.
        key_rope: Rope part of the key rows. May be None.
        scale_value: Factor on query . key.
        sparse_block_size: Tokens of a selected block.
        layout: Axis order of query rows.
        sparse_mode: 0: rows see all keys; 3: causal, the last row sees the last key.
        pre_tokens: Without effect.
        next_tokens: Without effect.
        deterministic: Accepted; results are always reproducible on the CPU.
        dquery: Gradient of query.
        dkey: Gradient of key.
        dvalue: Gradient of value.
        dquery_rope: Gradient of query_rope.
        dkey_rope: Gradient of key_rope.
        strict: the chip's limits are errors too.
        check_content: phase 2 checks tensor content too.

    Returns:
        (ret, workspace_size, executor): 0, bytes and what phase 2 takes; or a code, 0 and None.

    Source: CANN, aclnnSparseFlashAttentionGrad.
    """

def aclnnSparseFlashAttentionGrad(
    workspace: Any,
    workspace_size: int,
    executor: acl.Executor | None,
    stream: acl.Stream | None,
) -> int:
    """Gradients of SparseFlashAttention, padded or packed. Phase 2: runs what phase 1 planned, into its output tensors.

    Args:
        workspace: address of device memory (or a torch tensor) of at least workspace_size bytes; None where that is 0.
        workspace_size: as phase 1 returned it, or more.
        executor: as phase 1 returned it; one run each, unless made repeatable.
        stream: from acl.rt.create_stream(); None is the default one.

    Returns:
        ret: 0, or a code; acl.get_recent_err_msg() says why, and nothing was written.

    Source: CANN, aclnnSparseFlashAttentionGrad.
    """

def aclnnSparseLightningIndexerGradKLLossGetWorkspaceSize(
    query: acl.Tensor | None,
    key: acl.Tensor | None,
    query_index: acl.Tensor | None,
    key_index: acl.Tensor | None,
    weights: acl.Tensor | None,
    sparse_indices: acl.Tensor | None,
    softmax_max: acl.Tensor | None,
    softmax_sum: acl.Tensor | None,
    query_rope: acl.Tensor | None,
    key_rope: acl.Tensor | None,
    actual_seq_lengths_query: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_lengths_key: acl.IntArray | acl.Tensor | Sequence[int] | None,
    scale_value: float,
    layout: str,
    sparse_mode: int,
    pre_tokens: int,
    next_tokens: int,
    deterministic: bool,
    dquery_index: acl.Tensor | None,
    dkey_index: acl.Tensor | None,
    dweights: acl.Tensor | None,
    loss: acl.Tensor | None,
    *,
    strict: bool = True,
    check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """How far the indexer's distribution over the selected keys is from the attention's, and the gradients. Phase 1: checks, plans, and says how much workspace phase 2 needs.

    Args:
        query: Query rows.
        key: Key rows.
        query_index: Query rows of the indexer.
        key_index: Key rows of the indexer, one head for all of its query heads.
        weights: Weight of every head of the indexer, in its query's dtype or float32; scale factors belong into it.
        sparse_indices: The keys that every row selects, for all heads; -1 ends a list.
        softmax_max: Row maxima that the forward returned.
        softmax_sum: Row sums that the forward returned.
        query_rope: Rope part of the query rows. May be None.
        key_rope: Rope part of the key rows. May be None.
        actual_seq_lengths_query: Query rows of every sequence; TND (needed): their cumulative ends. May be None.
        actual_seq_lengths_key: Keys of every sequence; TND (needed): their cumulative ends. May be None.
        scale_value: Factor on query . key.
        layout: Axis order of query rows.
        sparse_mode: 0: rows see all keys; 3: causal, the last row sees the last key.
        pre_tokens: Without effect.
        next_tokens: Without effect.
        deterministic: Accepted; results are always reproducible on the CPU.
        dquery_index: Gradient of query_index.
        dkey_index: Gradient of key_index.
        dweights: Gradient of weights.
        loss: The loss, summed over all rows.
        strict: the chip's limits are errors too.
        check_content: phase 2 checks tensor content too.

    Returns:
        (ret, workspace_size, executor): 0, bytes and what phase 2 takes; or a code, 0 and None.

    Source: CANN, aclnnSparseLightningIndexerGradKLLoss.
    """

def aclnnSparseLightningIndexerGradKLLoss(
    workspace: Any,
    workspace_size: int,
    executor: acl.Executor | None,
    stream: acl.Stream | None,
) -> int:
    """How far the indexer's distribution over the selected keys is from the attention's, and the gradients. Phase 2: runs what phase 1 planned, into its output tensors.

    Args:
        workspace: address of device memory (or a torch tensor) of at least workspace_size bytes; None where that is 0.
        workspace_size: as phase 1 returned it, or more.
        executor: as phase 1 returned it; one run each, unless made repeatable.
        stream: from acl.rt.create_stream(); None is the default one.

    Returns:
        ret: 0, or a code; acl.get_recent_err_msg() says why, and nothing was written.

    Source: CANN, aclnnSparseLightningIndexerGradKLLoss.
    """

def aclnnDenseLightningIndexerGradKLLossGetWorkspaceSize(
    query: acl.Tensor | None,
    key: acl.Tensor | None,
    query_index: acl.Tensor | None,
    key_index: acl.Tensor | None,
    weights: acl.Tensor | None,
    softmax_max: acl.Tensor | None,
    softmax_sum: acl.Tensor | None,
    softmax_max_index: acl.Tensor | None,
    softmax_sum_index: acl.Tensor | None,
    query_rope: acl.Tensor | None,
    key_rope: acl.Tensor | None,
    actual_seq_lengths_query: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_lengths_key: acl.IntArray | acl.Tensor | Sequence[int] | None,
    scale_value: float,
    layout: str,
    sparse_mode: int,
    pre_tokens: int,
    next_tokens: int,
    dquery_index: acl.Tensor | None,
    dkey_index: acl.Tensor | None,
    dweights: acl.Tensor | None,
    loss: acl.Tensor | None,
    *,
    strict: bool = True,
    check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """How far the indexer's distribution over all keys is from the attention's, and the gradients. Phase 1: checks, plans, and says how much workspace phase 2 needs.

    Args:
        query: Query rows.
        key: Key rows.
        query_index: Query rows of the indexer.
        key_index: Key rows of the indexer, one head for all of its query heads.
        weights: Weight of every head of the indexer, in its query's dtype or float32; scale factors belong into it.
        softmax_max: Row maxima that the forward returned.
        softmax_sum: Row sums that the forward returned.
        softmax_max_index: Row maxima of the indexer's scores.
        softmax_sum_index: Row sums of exp(score - max) of the indexer.
        query_rope: Rope part of the query rows. May be None.
        key_rope: Rope part of the key rows. May be None.
        actual_seq_lengths_query: Query rows of every sequence; TND (needed): their cumulative ends. May be None.
        actual_seq_lengths_key: Keys of every sequence; TND (needed): their cumulative ends. May be None.
        scale_value: Factor on query . key.
        layout: Axis order of query rows.
        sparse_mode: 0: rows see all keys; 3: causal, the last row sees the last key.
        pre_tokens: Without effect.
        next_tokens: Without effect.
        dquery_index: Gradient of query_index.
        dkey_index: Gradient of key_index.
        dweights: Gradient of weights.
        loss: The loss, summed over all rows.
        strict: the chip's limits are errors too.
        check_content: phase 2 checks tensor content too.

    Returns:
        (ret, workspace_size, executor): 0, bytes and what phase 2 takes; or a code, 0 and None.

    Source: CANN, aclnnDenseLightningIndexerGradKLLoss.
    """

def aclnnDenseLightningIndexerGradKLLoss(
    workspace: Any,
    workspace_size: int,
    executor: acl.Executor | None,
    stream: acl.Stream | None,
) -> int:
    """How far the indexer's distribution over all keys is from the attention's, and the gradients. Phase 2: runs what phase 1 planned, into its output tensors.

    Args:
        workspace: address of device memory (or a torch tensor) of at least workspace_size bytes; None where that is 0.
        workspace_size: as phase 1 returned it, or more.
        executor: as phase 1 returned it; one run each, unless made repeatable.
        stream: from acl.rt.create_stream(); None is the default one.

    Returns:
        ret: 0, or a code; acl.get_recent_err_msg() says why, and nothing was written.

    Source: CANN, aclnnDenseLightningIndexerGradKLLoss.
    """

def aclnnDenseLightningIndexerSoftmaxLseGetWorkspaceSize(
    query_index: acl.Tensor | None,
    key_index: acl.Tensor | None,
    weight: acl.Tensor | None,
    actual_seq_lengths_query: acl.IntArray | acl.Tensor | Sequence[int] | None,
    actual_seq_lengths_key: acl.IntArray | acl.Tensor | Sequence[int] | None,
    layout: str,
    sparse_mode: int,
    pre_tokens: int,
    next_tokens: int,
    softmax_max: acl.Tensor | None,
    softmax_sum: acl.Tensor | None,
    *,
    strict: bool = True,
    check_content: bool = False,
) -> tuple[int, int, acl.Executor | None]:
    """The softmax statistics of an indexer's scores over all keys of a row. Phase 1: checks, plans, and says how much workspace phase 2 needs.

    Args:
        query_index: Query rows of the indexer.
        key_index: Key rows of the indexer, one head for all of its query heads.
        weight: Weight of every head of the indexer, in its query's dtype or float32; scale factors belong into it.
        actual_seq_lengths_query: Query rows of every sequence; TND (needed): their cumulative ends. May be None.
        actual_seq_lengths_key: Keys of every sequence; TND (needed): their cumulative ends. May be None.
        layout: Axis order of query rows.
        sparse_mode: 0: rows see all keys; 3: causal, the last row sees the last key.
        pre_tokens: Without effect.
        next_tokens: Without effect.
        softmax_max: Row maxima of the scores; 0 where a row sees no key.
        softmax_sum: Row sums of exp(score - max); 0 where a row sees none.
        strict: the chip's limits are errors too.
        check_content: phase 2 checks tensor content too.

    Returns:
        (ret, workspace_size, executor): 0, bytes and what phase 2 takes; or a code, 0 and None.

    Source: CANN, aclnnDenseLightningIndexerSoftmaxLse.
    """

def aclnnDenseLightningIndexerSoftmaxLse(
    workspace: Any,
    workspace_size: int,
    executor: acl.Executor | None,
    stream: acl.Stream | None,
) -> int:
    """The softmax statistics of an indexer's scores over all keys of a row. Phase 2: runs what phase 1 planned, into its output tensors.

    Args:
        workspace: address of device memory (or a torch tensor) of at least workspace_size bytes; None where that is 0.
        workspace_size: as phase 1 returned it, or more.
        executor: as phase 1 returned it; one run each, unless made repeatable.
        stream: from acl.rt.create_stream(); None is the default one.

    Returns:
        ret: 0, or a code; acl.get_recent_err_msg() says why, and nothing was written.

    Source: CANN, aclnnDenseLightningIndexerSoftmaxLse.
    """

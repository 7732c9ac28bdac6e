"""cann_ops_transformer's scores of blocks of keys (MiniMax's sparse attention), by torch's operators in float32."""

from itertools import pairwise
from typing import Any

import torch

from fusion_attention.npu.auxiliary.call import as_given, computed
from fusion_attention.ops.auxiliary_definitions.block_scores import BLOCK, FIRST, INDEX_SCORE, LOCAL, NOT_SCORED

Tensor = torch.Tensor
_SCORES = 1 << 24  # maximum number of scores in memory at once


@computed(INDEX_SCORE)
def msa_index_score(
    query: Tensor,
    key: Tensor,
    start_loc: Tensor,
    block_table: Tensor | None,
    scale: Tensor | None,
    actual_seq_qlen: Any,
    actual_seq_klen: Any,
    sparse_mode: int,
    init_blocks: int,
    local_blocks: int,
) -> Tensor:
    q_ends, k_lengths = (torch.as_tensor(given).tolist() for given in (actual_seq_qlen, actual_seq_klen))
    starts = k_lengths
    if block_table is None:
        k_lengths = [end - start for start, end in pairwise(k_lengths)]
    blocks = max((-(-n // BLOCK) for n in k_lengths), default=0) if block_table is None else block_table.shape[1]
    tokens, heads = query.shape[:2]
    result = query.new_full((heads, tokens, -(-blocks // 16) * 16), NOT_SCORED, dtype=torch.float32)
    for b, (first, end) in enumerate(pairwise(q_ends)):
        count = -(-k_lengths[b] // BLOCK)
        if end == first or not count:
            continue
        at: slice | Tensor = slice(starts[b], starts[b] + k_lengths[b])
        if block_table is not None:
            at = block_table[b, :count].long().clamp(0, len(key) - 1)  # invalid page numbers read the last page
        rows = key[at].reshape(-1, query.shape[-1])[: k_lengths[b]].float()
        if scale is not None:
            rows = rows * scale[at].reshape(-1, 1)[: k_lengths[b]]
        out = result[:, first:end, :count]
        with as_given(query):
            _write_scores(out, query[first:end].float(), rows, sparse_mode == 3)
        # FIRST and LOCAL exceed all usual scores, so that these blocks are selected, visible or not.
        block, last = torch.arange(count, device=out.device), start_loc[b]
        out.masked_fill_(block < init_blocks, FIRST)
        out.masked_fill_((block >= last + 1 - local_blocks) & (block <= last), LOCAL)
    return result


def _write_scores(out: Tensor, query: Tensor, keys: Tensor, causal: bool) -> None:
    """Writes to out [heads, rows, blocks] the largest score q . k of each row in each block of 128 keys of one
    sequence, or float32's lowest number if no key of the block is visible. query: [rows, heads, D]. keys: [keys, D].
    causal: the last row sees the last key. Rows are computed in chunks, which limits the memory."""
    count, length = len(query), len(keys)
    key = torch.arange(out.shape[-1] * BLOCK, device=keys.device)
    step = max(1, _SCORES // (out.shape[-1] * BLOCK * query.shape[1]))
    for first in range(0, count, step):
        some = query[first : first + step].transpose(0, 1)  # [heads, rows, D]
        row = torch.arange(first, first + some.shape[1], device=keys.device)
        visible = key < ((row + length - count + 1).clamp(0, length) if causal else row * 0 + length)[:, None]
        scores = torch.nn.functional.pad(some @ keys.T, (0, len(key) - length)).masked_fill(~visible, -torch.inf)
        best = scores.unflatten(-1, (-1, BLOCK)).amax(-1)
        out[:, first : first + step] = best.masked_fill(~visible.unflatten(-1, (-1, BLOCK)).any(-1), NOT_SCORED)

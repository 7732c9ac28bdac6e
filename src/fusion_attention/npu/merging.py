"""torch_npu's functions that merge partial attention results: of two steps of a ring, or of a list of ranks.

ir/merge.py computes the merge; this module converts layouts, lanes (equal copies of statistics), and statistics of
empty rows.
"""

from collections.abc import Sequence
from typing import Any

import torch

from fusion_attention.contract import to_array
from fusion_attention.ir.merge import Partial, empty_partial, merge
from fusion_attention.npu.auxiliary.call import checked, computed
from fusion_attention.npu.functions_from_definitions import Args, from_record
from fusion_attention.ops.auxiliary_definitions import merging

Tensor = torch.Tensor
_LOWEST, _LARGEST = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max


@computed(merging.RING, host=0)
def npu_ring_attention_update(
    prev_attn_out: Tensor,
    prev_softmax_max: Tensor,
    prev_softmax_sum: Tensor,
    cur_attn_out: Tensor,
    cur_softmax_max: Tensor,
    cur_softmax_sum: Tensor,
    actual_seq_qlen: Any,
    input_layout: str,
    input_softmax_layout: str,
) -> tuple[Tensor, Tensor, Tensor]:
    stats = prev_softmax_max, prev_softmax_sum, cur_softmax_max, cur_softmax_sum
    outs = prev_attn_out, cur_attn_out
    heads = prev_softmax_max.shape[1]
    order = None
    if input_layout == "TND" and input_softmax_layout != "TND":
        order = _head_major(to_array(actual_seq_qlen).tolist(), heads).to(prev_attn_out.device)
    with torch.no_grad():
        prev, cur = (
            _partial(out, _by_token(max_, order), _by_token(sum_, order), heads)
            for out, max_, sum_ in zip(outs, stats[::2], stats[1::2], strict=True)
        )
        stats_by_token = [_by_token(t, order) for t in stats[:2]]
        merge(prev, cur)
        has_keys = prev.sum != 0  # NaN too
        mean = prev.max == -torch.inf
        results = (
            torch.where(has_keys, torch.where(mean, _LOWEST, prev.max), stats_by_token[0]),
            torch.where(has_keys, prev.sum, stats_by_token[1]),
        )
        max_, sum_ = (_in_lanes(t, stats[0], order) for t in results)
        return prev.out.reshape(prev_attn_out.shape).to(prev_attn_out.dtype), max_, sum_


@from_record(merging.UPDATE)
def npu_attention_update(args: Args) -> tuple[Tensor, Tensor | None]:
    given = {**args, **checked(merging.UPDATE, args)}  # a single tensor becomes a list
    lse, local_out = given["lse"], given["local_out"]
    with torch.no_grad():
        out = local_out[0]
        result = empty_partial(out, tuple(out.shape[:1]), out.shape[1])
        for peak, partial_out in zip(lse, local_out, strict=True):
            top = torch.where(peak == torch.inf, -torch.inf, peak)
            merge(result, Partial(partial_out.float(), top, (top != -torch.inf).float()))
        return result.out.to(out.dtype), result.max + result.sum.log() if given["update_type"] == 1 else None


# ---------------------------------------------------------------------------------------------------- from lanes, back


def _head_major(ends: Sequence[int], heads: int) -> Tensor:
    """Returns int64 [tokens * heads]: for (token, head) at index token * heads + head, the position of its statistic if
    each sequence is stored as [heads, tokens].

    ends: cumulative ends of the sequences. heads: number of heads.
    """
    positions, start = [], 0
    for end in ends:
        token, head = torch.arange(end - start)[:, None], torch.arange(heads)
        positions.append((start * heads + head * (end - start) + token).flatten())
        start = end
    return torch.cat(positions) if positions else torch.zeros(0, dtype=torch.int64)


def _by_token(lanes: Tensor, order: Tensor | None) -> Tensor:
    """Returns a softmax statistic ordered by token, [S, B, N] or [T, N], from `lanes`, [B, N, S, 8] or [T, N, 8], which
    has eight equal copies of it.
    order: the result of _head_major() if each sequence is stored as [heads, tokens]; None: as [tokens, heads]."""
    one = lanes[..., 0]
    if one.dim() == 3:
        return one.permute(2, 0, 1)
    if order is None:
        return one
    result = one.flatten().clone()  # tokens outside all sequences do not change
    result[: len(order)] = one.flatten()[order]
    return result.view(one.shape)


def _in_lanes(one: Tensor, like: Tensor, order: Tensor | None) -> Tensor:
    """Returns the statistic `one`, [S, B, N] or [T, N], as eight equal copies, [B, N, S, 8] or [T, N, 8], as `like`
    has; the inverse of _by_token(). order: the result of _head_major() if each sequence is stored as [heads, tokens];
    None: as [tokens, heads]."""
    if like.dim() == 4:
        one = one.permute(1, 2, 0)
    elif order is not None:
        result = one.flatten().clone()
        result[order] = one.flatten()[: len(order)]
        one = result.view(one.shape)
    return one.unsqueeze(-1).repeat_interleave(merging.LANES, -1)


def _partial(out: Tensor, max_: Tensor, sum_: Tensor, heads: int) -> Partial:
    """Returns float32 copies of partial attention: out as [..., heads, D], max_ and sum_ [..., heads]. Rows without
    keys get max -inf and sum 0 in place of CANN's lowest and largest float32."""
    empty = max_ == _LOWEST
    total = torch.where(empty & (sum_ == _LARGEST), 0.0, sum_)
    peak = torch.where(empty | (total == 0), -torch.inf, max_)
    rows = out.reshape(*max_.shape[:-1], heads, -1).to(torch.float32, copy=True)
    return Partial(rows, peak.contiguous().clone(), total.contiguous().clone())

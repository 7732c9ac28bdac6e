"""Check functions for rules of SparseFlashMla: each returns True for a legal call, else a text with the value."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fusion_attention.ir.mask import UNLIMITED
from fusion_attention.ops.shared.checks import Outcome
from fusion_attention.ops.shared.cu_seqlens import ends_fit, within
from fusion_attention.ops.sparse.checks import FUNCTIONS as OF_LISTS
from fusion_attention.ops.sparse.checks import lists_of, visible_keys

Lengths = np.ndarray


def used_fit(used: Lengths | None, count: int, ends: Lengths | None, longest: int | None) -> Outcome:
    """True (else the fault as text) if each of `count` sequences has a length between 0 and its rows in memory.

    Args:
        used: the lengths; None is legal.
        ends: 0, then the cumulative ends of packed sequences in memory; None: rows are not packed.
        longest: rows of each sequence if they are not packed; None: no limit.
    """
    if used is None:
        return True
    if len(used) != count:
        return f"{len(used)} lengths for {count} sequences"
    capacity = np.full(count, UNLIMITED if longest is None else longest)
    if ends is not None and len(ends) == count + 1:
        capacity = np.diff(ends)
    return within(used, capacity)


def tokens_agree(kv_len: Lengths, c_len: Lengths, ratio: int, residual: Lengths) -> Outcome:
    """True (else the fault as text) if kv_len, all tokens, is ratio * c_len (compressed keys) + residual; each [B]."""
    tokens = c_len * ratio + residual
    wrong = np.flatnonzero(tokens != kv_len)
    if not len(wrong):
        return True
    b = wrong[0]
    return f"{c_len[b]} * {ratio} + {residual[b]} = {tokens[b]} tokens of sequence {b}, whose keys are {kv_len[b]}"


def sees_entries(
    lists: torch.Tensor, layout: str, q_len: Lengths, q_start: Lengths, c_len: Lengths, tokens: Lengths, ratio: int
) -> Outcome:
    """True (else the fault as text) if each row's list of selected compressed keys has only visible ones, and no more
    entries than these.
    Per sequence: q_len rows from q_start on, c_len keys of `ratio` tokens each, and `tokens` in all."""
    count, first = 0, ""
    for b, listed in lists_of(lists, layout, q_len, q_start):
        entries, keys = listed[:, 0], int(c_len[b])
        bound = visible_keys(3, len(entries), keys, lists.device, ratio, int(tokens[b]) - keys * ratio)[:, 0]
        slot = torch.arange(entries.shape[-1], device=entries.device)
        past = ((entries >= 0) & ((entries >= bound) | (slot >= bound))).nonzero()
        if len(past) and not first:
            i, n = past[0].tolist()
            first = f"the first {int(entries[i, n])} at batch {b}, row {i}, slot {n}, which sees {int(bound[i, 0])}"
        count += len(past)
    return not count or f"{count} entries past their rows' bound, {first}"


FUNCTIONS: dict[str, Callable[..., Any]] = OF_LISTS | {
    f.__name__: f for f in (ends_fit, used_fit, tokens_agree, sees_entries)
}

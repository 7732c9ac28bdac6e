"""Check functions for the lists of keys of losses whose target is an argument.

A key may stand for several tokens, and sequences may have unused rows in memory (q_capacity).
"""

from collections.abc import Iterator

import numpy as np
import torch

from fusion_attention.ops.shared.checks import Outcome, stays_unread


def _lists(
    indices: torch.Tensor, layout: str, q_len: np.ndarray, q_capacity: np.ndarray | None
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields (b, the lists [rows, entries] of sequence b) for sequences with lists, from `indices` in a layout.

    q_len: rows per sequence; q_capacity: its rows in memory, None: as many.
    """
    capacity = q_len if q_capacity is None else q_capacity
    for b, (start, count) in enumerate(zip(np.cumsum(capacity) - capacity, q_len, strict=True)):
        listed = indices[b, :count] if layout == "BSND" else indices[start : start + count]
        if listed.numel():
            yield b, listed.squeeze(-2)


def _first(bad: torch.Tensor, listed: torch.Tensor, b: int) -> str:
    row, slot = bad.nonzero()[0].tolist()
    return f"{int(listed[row, slot])} at batch {b}, row {row}, slot {slot}"


def keys_exist(
    indices: torch.Tensor, layout: str, q_len: np.ndarray, q_capacity: np.ndarray | None, kv_len: np.ndarray
) -> Outcome:
    """True if every entry of the lists of selected keys is -1 or the index of a key of its row's sequence.

    They are not read if stays_unread(indices). q_len, kv_len: lengths per sequence; q_capacity: rows in memory.
    """
    if stays_unread(indices):
        return True
    for b, listed in _lists(indices, layout, q_len, q_capacity):
        low, high = (int(edge) for edge in listed.aminmax())
        if low < -1 or high >= kv_len[b]:
            return f"{_first((listed < -1) | (listed >= int(kv_len[b])), listed, b)}, outside [-1, {kv_len[b]})"
    return True


def keys_read(
    indices: torch.Tensor, layout: str, q_len: np.ndarray, q_capacity: np.ndarray | None, kv_len: np.ndarray,
    mode: int, ratio: int, residual: np.ndarray | None,
) -> Outcome:  # fmt: skip
    """True if every list has at most as many entries as its row has visible keys, all of them visible.

    A key stands for `ratio` tokens, after which `residual` follow; mode: sparse_mode; others: as in keys_exist().
    """
    for b, listed in _lists(indices, layout, q_len, q_capacity):
        keys, rows = int(kv_len[b]), len(listed)
        behind = rows % ratio if residual is None else int(residual[b])
        row = torch.arange(rows, device=listed.device)[:, None]
        visible = (row + keys * ratio + behind - rows + 1).div(ratio, rounding_mode="floor").clamp(0, keys)
        visible = visible if mode == 3 else torch.full_like(visible, keys)
        slot = torch.arange(listed.shape[-1], device=listed.device)
        bad = (listed >= 0) & ((slot >= visible) | (listed >= visible))
        if bool(bad.any()):
            return f"{_first(bad, listed, b)}, which its row does not read"
    return True


FUNCTIONS = {f.__name__: f for f in (keys_exist, keys_read)}

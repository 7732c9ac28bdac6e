"""Checks of the lists of keys of losses against a target, where a key may be compressed from several tokens and packed
sequences may be shorter than their memory."""

from collections.abc import Iterator

import numpy as np
import torch

from fusion_attention.ops.shared.checks import Outcome, stays_unread


def _lists(
    indices: torch.Tensor, layout: str, q_len: np.ndarray, q_room: np.ndarray | None
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields (b, lists [rows, entries] of sequence b)."""
    room = q_len if q_room is None else q_room
    for b, (start, count) in enumerate(zip(np.cumsum(room) - room, q_len, strict=True)):
        listed = indices[b, :count] if layout == "BSND" else indices[start : start + count]
        if listed.numel():
            yield b, listed.squeeze(-2)


def _first(bad: torch.Tensor, listed: torch.Tensor, b: int) -> str:
    row, slot = bad.nonzero()[0].tolist()
    return f"{int(listed[row, slot])} at batch {b}, row {row}, slot {slot}"


def keys_exist(
    indices: torch.Tensor, layout: str, q_len: np.ndarray, q_room: np.ndarray | None, kv_len: np.ndarray
) -> Outcome:
    """True if every entry is -1 or the number of a key of its row's sequence, else the first that is not.

    Reads the lists, unless stays_unread() excludes them.
    """
    if stays_unread(indices):
        return True
    for b, listed in _lists(indices, layout, q_len, q_room):
        low, high = (int(edge) for edge in listed.aminmax())
        if low < -1 or high >= kv_len[b]:
            return f"{_first((listed < -1) | (listed >= int(kv_len[b])), listed, b)}, outside [-1, {kv_len[b]})"
    return True


def keys_read(
    indices: torch.Tensor, layout: str, q_len: np.ndarray, q_room: np.ndarray | None, kv_len: np.ndarray,
    mode: int, ratio: int, residual: np.ndarray | None,
) -> Outcome:  # fmt: skip
    """True if every list has at most as many entries as its row has visible keys and no hidden key, else an example."""
    for b, listed in _lists(indices, layout, q_len, q_room):
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

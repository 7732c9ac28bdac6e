"""The questions that rules of several families ask of a call; each answers True, or says what came instead."""

from __future__ import annotations

import numpy as np
import torch

from fusion_attention.contract import show
from fusion_attention.ir.mask import INFINITE, Band
from fusion_attention.ops.shared.lengths import last_end, rising
from fusion_attention.settings import current

Outcome = bool | str


def float32(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of float32."""
    return tensor.dtype == torch.float32


def int32(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of int32."""
    return tensor.dtype == torch.int32


def lengths_fit(
    given: np.ndarray | None, ends: bool, count: int | None, longest: int | None, tokens: int | None
) -> Outcome:
    """Whether lengths, or cumulative ends, lie in their ranges.

    Args:
        given: None is legal: what is not needed is not asked.
        ends: they are cumulative.
        count: sequences, where tensors show them; longest: the most tokens of one; tokens: of all together.
    """
    if given is None:
        return True
    if ends:
        risen = rising(given) if len(given) else "no sequence"
        last = last_end(given)
        return risen if risen is not True else last <= (tokens or 0) or f"{last} tokens in all, {tokens} in the tensor"
    if count is not None and len(given) != count:
        return f"{len(given)} lengths for {count} sequences"
    most = tokens if longest is None else longest
    bad = np.flatnonzero((given < 0) | (given > (most or 0)))
    if len(bad):
        return f"length {given[bad[0]]} of sequence {bad[0]}, outside [0, {most}]"
    total = int(given.sum())
    return longest is not None or total <= (tokens or 0) or f"{total} tokens in all, {tokens} in the tensor"


def broadcasts(tensor: torch.Tensor, *sizes_allowed: int) -> Outcome:
    """Whether a tensor broadcasts to [B, N1, S1, S2]."""
    sizes = (1,) * (4 - tensor.dim()) + tuple(tensor.shape)
    fits = 1 <= tensor.dim() <= 4 and all(size in (1, axis) for size, axis in zip(sizes, sizes_allowed, strict=True))
    return fits or f"{list(tensor.shape)} for {list(sizes_allowed)}"


def band_fits(band: Band | None, count: int) -> Outcome:
    """Whether a band has whole edges, and no prefix or one per sequence."""
    if band is None:
        return True
    if not all(isinstance(n, int) and abs(n) <= INFINITE for n in (band.lo, band.hi, *band.prefix)):
        return f"edges {show((band.lo, band.hi))} and prefixes {show(band.prefix)}"
    return len(band.prefix) in (0, count) or f"{len(band.prefix)} prefixes for {count} sequences"


def stays_unread(tensor: torch.Tensor) -> bool:
    """Whether a tensor of indices or pages has no content, or has it on a device where no check was requested.

    Reading would wait for the device, which a captured graph cannot; kernels there reach nothing outside whatever it
    holds.
    """
    return tensor.is_meta or not (tensor.is_cpu or current().check_content)


def pages_exist(table: torch.Tensor, kv_len: np.ndarray, page_size: int, pages: int) -> Outcome:
    """Whether every page that some token lies in exists; reads the table, unless it stays_unread()."""
    if page_size < 1 or stays_unread(table):
        return True
    ids = table.numpy() if table.is_cpu else table.cpu().numpy()
    # Below zero is beyond all where bits are read without a sign. The usual case needs no lengths.
    bad = ids.view(np.uint32 if ids.itemsize == 4 else np.uint64) >= pages
    if not np.count_nonzero(bad):
        return True
    bad &= np.arange(ids.shape[1]) * page_size < kv_len[:, None]
    if not bad.any():
        return True
    row, column = (int(n) for n in np.argwhere(bad)[0])
    return f"{ids[row, column]} at [{row}, {column}], outside [0, {pages})"

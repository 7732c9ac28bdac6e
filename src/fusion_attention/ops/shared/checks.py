"""Functions in rules of several operators: each returns True for a legal call, else False, or text with the illegal
value."""

import numpy as np
import torch

from fusion_attention.contract import show
from fusion_attention.ir.mask import INFINITE, Band
from fusion_attention.ops.shared.cumulative_ends import last_end, rising
from fusion_attention.settings import current

Outcome = bool | str


def float32(tensor: torch.Tensor) -> bool:
    """True if a tensor has dtype float32."""
    return tensor.dtype == torch.float32


def int32(tensor: torch.Tensor) -> bool:
    """True if a tensor has dtype int32."""
    return tensor.dtype == torch.int32


def lengths_fit(
    given: np.ndarray | None, ends: bool, count: int | None, longest: int | None, tokens: int | None
) -> Outcome:
    """True (else the fault as text) if the lengths of a batch's sequences, or their cumulative ends, are in range.

    Args:
        given: int64, one number per sequence; None (not passed) is legal.
        ends: True if `given` has cumulative ends, not lengths.
        count: required number of lengths; None: any.
        longest: largest legal length; None: sequences are packed in one axis of `tokens` rows.
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
    """True (else error text) if a tensor of at most four dimensions broadcasts to sizes_allowed, [B, N1, S1, S2]."""
    sizes = (1,) * (4 - tensor.dim()) + tuple(tensor.shape)
    fits = 1 <= tensor.dim() <= 4 and all(size in (1, axis) for size, axis in zip(sizes, sizes_allowed, strict=True))
    return fits or f"{list(tensor.shape)} for {list(sizes_allowed)}"


def band_fits(band: Band | None, count: int) -> Outcome:
    """True (else the fault as text) if a band has integer edges, and no prefix or one for each of `count` sequences."""
    if band is None:
        return True
    if not all(isinstance(n, int) and abs(n) <= INFINITE for n in (band.lo, band.hi, *band.prefix)):
        return f"edges {show((band.lo, band.hi))} and prefixes {show(band.prefix)}"
    return len(band.prefix) in (0, count) or f"{len(band.prefix)} prefixes for {count} sequences"


def stays_unread(tensor: torch.Tensor) -> bool:
    """True if rules must not read a tensor of indices or page numbers: it is on the meta device, or on a GPU while the
    setting check_content is off. Reading would synchronize with the GPU, which a captured CUDA graph forbids. GPU
    kernels never access memory outside the tensors, for any content."""
    return tensor.is_meta or not (tensor.is_cpu or current().check_content)


def within(numbers: torch.Tensor, low: int, high: int) -> bool:
    """True if the C++ extension finds all elements of an int32 or int64 tensor in [low, high].
    False also without the extension, and for a tensor on another device or without contiguous memory."""
    try:
        from fusion_attention import _native
    except ImportError:
        return False
    if not (numbers.is_cpu and numbers.is_contiguous()):
        return False
    return _native.within(numbers.data_ptr(), numbers.numel(), numbers.itemsize, low, max(high, low - 1))


def pages_exist(table: torch.Tensor, kv_len: np.ndarray, page_size: int, pages: int) -> Outcome:
    """True (else error text) if page numbers of cached tokens are in [0, pages), or the page table must not be read.

    Args:
        table: int32 or int64 [B, pages of a sequence].
        kv_len: cached tokens of each sequence.
        page_size: tokens of a page.
    """
    if page_size < 1 or stays_unread(table) or within(table, 0, pages - 1):
        return True
    ids = table.numpy() if table.is_cpu else table.cpu().numpy()
    bad = (ids < 0) | (ids >= pages)
    bad &= np.arange(ids.shape[1]) * page_size < kv_len[:, None]
    if not bad.any():
        return True
    row, column = (int(n) for n in np.argwhere(bad)[0])
    return f"{ids[row, column]} at [{row}, {column}], outside [0, {pages})"

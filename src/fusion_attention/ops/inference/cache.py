"""Views of a KV cache (one tensor, one tensor per sequence, or pages), and of the scales of stored integers."""

from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from fusion_attention.ir.memory_views import Dequant, PagedView, RowView
from fusion_attention.ir.problem import Extents
from fusion_attention.ops.shared.layouts import LAYOUTS, keep

Tensor = torch.Tensor
View = TypeVar("View", RowView, PagedView, RowView | PagedView)

NZ = "NZ"  # pages [pages, heads, dim / d0, page size, d0]: a row is split into fragments of d0 elements


@dataclass(frozen=True)
class Cache:
    """The memory layout of keys and values in a KV cache.

    Args:
        layout: layout of each tensor, a key of LAYOUTS, or NZ; in a paged cache the batch axis is pages.
        page_size: tokens of a page; 0: not paged.
    """

    layout: str
    page_size: int = 0


class Scales(NamedTuple):
    """Scale and offset of stored integers.

    Args:
        scale, offset: of one shape; per channel [heads_kv, dim], per token in the shape that `counts` selects.
        counts: shape of scales per token: "slots": k.shape[:-1]; "tokens": [sequences or 1, heads_kv or
            1, tokens], by position in the sequence; "pages": [pages, heads_kv or 1, page size].
    """

    scale: Tensor | None = None
    offset: Tensor | None = None
    counts: str = "slots"


UNSCALED = Scales()


@dataclass(eq=False)
class CacheViews:
    """Makes views of a call's KV cache.

    Args:
        table: page table [sequences, pages] of a paged cache.
        first: int64 [sequences], the index of each sequence's first token in a padded cache; None: 0.
        common: number of keys of a prefix that all sequences share, which are not in the cache.
        halves: a byte stores two elements.
    """

    cache: Cache
    extents: Extents
    table: Tensor | None = None
    first: np.ndarray | None = None
    common: int = 0
    halves: bool = False

    def rows(self, tensors: tuple[Tensor, ...], dim: int) -> RowView | PagedView:
        """Returns a view of the rows of keys or values in the cache; dim: elements of a row, also if bytes hold two."""
        tensors = tuple(map(_bytes_of, tensors))
        if any(t.stride(-1) != 1 and t.shape[-1] > 1 for t in tensors):
            tensors = tuple(t.contiguous() for t in tensors)  # Kernels read contiguous rows.
        if self.cache.page_size:
            return self._pages(tensors[0], dim)
        batch, token, head = LAYOUTS[self.cache.layout]
        if len({t.stride(token) for t in tensors if t.shape[token] > 1}) > 1:
            tensors = tuple(t.contiguous() for t in tensors)  # A view has one token stride for all sequences.
        # The stride of a tensor with at most one token is arbitrary, so the longest tensor's is used.
        one, e = max(tensors, key=lambda t: t.shape[token]), self.extents
        key = ("cache", self.cache.layout, dim, *((t.shape, t.stride()) for t in tensors))
        view = e.call_cache.get(key)
        if view is None:
            listed = len(tensors) > 1
            if batch is None:
                address = self._start() * one.stride(token)
            else:
                address = np.arange(len(e)) * (0 if listed else one.stride(batch))
            if self.first is not None:
                address = address + self.first * one.stride(token)
            strides = [self._bytes(dim) if head is None else t.stride(head) for t in tensors]
            heads = np.array(strides if listed else strides * len(e), np.int64)
            view = keep(e, key, RowView((), address.astype(np.int64), one.stride(token), heads, dim))
        return RowView(tensors, view.address, view.stride_token, view.stride_head, view.dim)

    def common_rows(self, tensor: Tensor, layout: str, dim: int) -> RowView:
        """Returns a view of the rows, of dim elements, of a prefix that all sequences share, stored as one sequence."""
        tensor, (_, token, head) = _bytes_of(tensor), LAYOUTS[layout]
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            tensor = tensor.contiguous()  # Kernels read contiguous rows.
        stride = self._bytes(dim) if head is None else tensor.stride(head)
        return RowView((tensor,), np.zeros(1, np.int64), tensor.stride(token), np.array([stride], np.int64), dim)

    def dequant(self, scales: Scales, kind: str, dim: int) -> Dequant:
        """Returns views of scale and offset of rows of `dim` elements; kind: "channel" or "token", their axis."""
        views = [None if t is None else self._scale(as_float(t), scales.counts, kind, dim) for t in scales[:2]]
        assert views[0] is not None
        return Dequant(views[0], views[1])

    def _scale(self, scale: Tensor, counts: str, kind: str, dim: int) -> RowView | PagedView:
        count = len(self.extents)
        if kind == "channel":
            scale = scale[:, :dim].contiguous()  # Kernels read one number per element; inputs may be broadcast.
            heads = np.full(count, scale.shape[1], np.int64)
            return RowView((scale,), np.zeros(count, np.int64), 0, heads, dim)
        if counts == "slots":
            return self.rows((scale.unsqueeze(-1),), 1)
        first, head, token = (s if n > 1 else 0 for s, n in zip(scale.stride(), scale.shape, strict=True))
        if counts == "pages":
            return PagedView(scale, self._table(), self.cache.page_size, scale.stride(0), token, head, 1)
        address = np.arange(count, dtype=np.int64) * first
        return RowView((scale,), address, token, np.full(count, head, np.int64), 1)

    def _pages(self, pool: Tensor, dim: int) -> PagedView:
        size = self.cache.page_size
        if self.cache.layout == NZ:
            block, head, fragment, token, _ = pool.stride()
            fragments = (pool.shape[4], fragment) if pool.shape[2] > 1 else (0, 0)
            return PagedView(pool, self._table(), size, block, token, head, dim, *fragments)
        batch, tokens, heads = LAYOUTS[self.cache.layout]
        assert batch is not None
        stride = self._bytes(dim) if heads is None else pool.stride(heads)
        return PagedView(pool, self._table(), size, pool.stride(batch), pool.stride(tokens), stride, dim)

    def _table(self) -> Tensor:
        table = self.table
        assert table is not None
        if table.dtype != torch.int32:
            table = table.to(torch.int32)  # Kernels read 32 bits; pages_exist() has checked the range.
        if table.stride(-1) != 1 and table.shape[-1] > 1:
            table = table.contiguous()  # Kernels read contiguous rows of page numbers.
        return table

    def _start(self) -> np.ndarray:
        """Returns the index of each sequence's first token in a packed cache, which lacks the prefix that all share."""
        suffix_len = np.maximum(self.extents.kv_len - self.common, 0)
        return np.cumsum(suffix_len) - suffix_len

    def _bytes(self, dim: int) -> int:
        """Returns the number of stored elements in a row of `dim` elements: half as many if a byte stores two."""
        return (dim + 1) // 2 if self.halves else dim


def _bytes_of(tensor: Tensor) -> Tensor:
    """Returns a cache tensor as kernels read it: an int32 of eight int4 as four bytes, the first in the low half."""
    if tensor.dtype != torch.int32:
        return tensor
    return (tensor if tensor.stride(-1) == 1 else tensor.contiguous()).view(torch.uint8)


def narrowed(view: View, dim: int) -> View:
    """Returns a memory view of the first dim elements of every row of a memory view."""
    return replace(view, dim=dim)


def per_channel(scale: Tensor | None, offset: Tensor | None, heads: int, dim: int) -> Scales:
    """Returns scale and offset, expanded to [heads, dim] from one number, one per head, or one per head and element."""

    def expanded(t: Tensor | None) -> Tensor | None:
        if t is None:
            return None
        each = t.numel() in (heads * dim, heads) and t.numel() > 1
        return (t.reshape(heads, -1) if each else t.reshape(1, 1)).expand(heads, dim)

    return Scales(expanded(scale), expanded(offset))


def as_float(scale: Tensor) -> Tensor:
    """Returns a scale as float32; in a uint64, CANN's hardware word, bits 13 to 31 are the upper bits of a float32."""
    if scale.dtype == torch.uint64:
        return (scale.view(torch.int64) & 0xFFFFE000).to(torch.int32).view(torch.float32)
    return scale.float()


def stored_as(tensor: Tensor, dtype: torch.dtype) -> str:
    """Returns the stored format of a KV cache tensor: "int8", "int4", or "" if not quantised; dtype: the query's."""
    return (
        {torch.int8: "int8", torch.uint8: "int4", torch.int32: "int4"}.get(tensor.dtype, "")
        if tensor.dtype != dtype
        else ""
    )

"""Views of rows and matrices in memory: one address per sequence, and strides.

Every layout of an interface is a RowView, a PagedView or a MatrixView, without a copy; back ends read nothing else.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(eq=False, slots=True)
class RowView:
    """Vectors of `dim` contiguous elements in memory: row (sequence b, head h, token t) starts at

        address[b] + h * stride_head[b] + t * stride_token        (elements, from the first one of the tensor in keep)

    Args:
        keep: the tensors that hold the rows: one for all sequences, or one per sequence.
        address: int64 [sequences].
        stride_token: elements from one token's row to the next.
        stride_head: int64 [sequences], elements from one head's row to the next.
        dim: elements of a row.
    """

    keep: tuple[torch.Tensor, ...]
    address: np.ndarray
    stride_token: int
    stride_head: np.ndarray
    dim: int

    def over(self, tensor: torch.Tensor) -> RowView:
        """Returns a view with the same addresses and strides in another tensor, which holds all sequences."""
        return RowView((tensor,), self.address, self.stride_token, self.stride_head, self.dim)

    def sequence(self, b: int, heads: int, length: int) -> torch.Tensor:
        """Returns the rows of sequence b as a tensor [heads, length, dim] that shares the memory."""
        base = self.keep[b] if len(self.keep) > 1 else self.keep[0]
        start = base.storage_offset() + int(self.address[b])
        return base.as_strided((heads, length, self.dim), (int(self.stride_head[b]), self.stride_token, 1), start)


@dataclass(eq=False, slots=True)
class PagedView:
    """Vectors of a paged KV cache in memory: row (sequence b, head h, token t) starts at

        table[b, t // page_size] * stride_page + h * stride_head + t % page_size * stride_token

    (elements, from the pool's first one). A row is contiguous, or split into fragments: element d of a row is at

        d // fragment * stride_fragment + d % fragment

    (elements, from the row's first one). Table entries beyond a sequence's length, pages without an entry and slots
    behind a sequence's last token are never read, so their content is arbitrary.

    Args:
        pool: the tensor that holds all pages.
        table: int32 [sequences, pages], contiguous in a row; checked when the view is built.
        page_size: tokens of a page.
        stride_page, stride_token, stride_head: elements.
        dim: elements of a row.
        fragment: elements of a fragment; 0: rows are contiguous.
        stride_fragment: elements from one fragment to the next; 0 without fragments.
    """

    pool: torch.Tensor
    table: torch.Tensor
    page_size: int
    stride_page: int
    stride_token: int
    stride_head: int
    dim: int
    fragment: int = 0
    stride_fragment: int = 0

    def over(self, tensor: torch.Tensor) -> PagedView:
        """Returns a view with the same page table and strides in another pool of pages, `tensor`."""
        return dataclasses.replace(self, pool=tensor)

    def sequence(self, b: int, heads: int, length: int) -> torch.Tensor:
        """Returns the rows of sequence b as a new tensor [heads, length, dim], gathered from the pages."""
        size = self.page_size
        pages = self.table[b, : -(-length // size)].long()
        count = int(pages.max()) + 1 if len(pages) else 0
        fragment = self.fragment or self.dim
        strides = self.stride_page, self.stride_head, self.stride_token, self.stride_fragment, 1
        full = self.pool.as_strided(
            (count, heads, size, -(-self.dim // fragment), fragment), strides, self.pool.storage_offset()
        )
        rows = full[pages].flatten(-2)[..., : self.dim]
        return rows.transpose(0, 1).reshape(heads, len(pages) * size, self.dim)[:, :length]


@dataclass(eq=False, slots=True)
class Dequant:
    """Scales and offsets of quantised keys or values: value = (stored + offset) * scale, computed when a row is loaded.

    Args:
        scale, offset: float32. Per channel: rows of the same dim that all tokens share (stride_token 0). Per token:
            rows of one element, which heads may share (stride 0). Their layout may differ from that of the integers:
            a RowView counts tokens by position in the sequence, even if the keys are paged. offset None: 0.
    """

    scale: RowView | PagedView
    offset: RowView | PagedView | None = None


@dataclass(eq=False, slots=True)
class MatrixView:
    """One value per (head, row, key) of each sequence; broadcast axes have stride 0. Element (b, h, i, j) is at

        address[b] + h * stride_head[b] + i * stride_row[b] + j * stride_key

    Dropout bits use the same arithmetic, counted in bits of a uint8 tensor.

    Args:
        keep: the tensor that holds the values.
        address, stride_head, stride_row: int64 [sequences].
        stride_key: 1, or 0 if one value applies to all keys.
        first: for a mask, int64 [sequences]: keys before `first` have no element and are not blocked, so a sequence's
            address may point before the tensor. None: 0.
    """

    keep: torch.Tensor
    address: np.ndarray
    stride_head: np.ndarray
    stride_row: np.ndarray
    stride_key: int
    first: np.ndarray | None = None

    def sequence(self, b: int, heads: int, rows: int, keys: int) -> torch.Tensor:
        """Returns a view [heads, rows, keys - first] of the values of sequence b from key `first` on."""
        strides = (int(self.stride_head[b]), int(self.stride_row[b]), self.stride_key)
        start, first = self.keep.storage_offset() + int(self.address[b]), self.first_of(b)
        return self.keep.as_strided((heads, rows, keys - first), strides, start + first * self.stride_key)

    def first_of(self, b: int) -> int:
        """Returns the index of the first key of sequence b for which the matrix has elements."""
        return 0 if self.first is None else int(self.first[b])

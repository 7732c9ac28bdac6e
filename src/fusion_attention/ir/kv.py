"""Where rows and matrices lie in memory: one address per sequence, and strides.

Every layout becomes a RowView or a MatrixView without a copy; what computes knows no other layout.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(eq=False, slots=True)
class RowView:
    """Rows of `dim` neighbouring elements: row (sequence b, head h, token t) starts at

        address[b] + h * stride_head[b] + t * stride_token        (elements, from the kept tensor's first one)

    Args:
        keep: the tensors that the addresses point into: one for all sequences, or one per sequence.
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
        """The same rows of another tensor, for all sequences."""
        return RowView((tensor,), self.address, self.stride_token, self.stride_head, self.dim)

    def sequence(self, b: int, heads: int, length: int) -> torch.Tensor:
        """Sequence b as a view [heads, length, dim] on the kept memory."""
        base = self.keep[b] if len(self.keep) > 1 else self.keep[0]
        start = base.storage_offset() + int(self.address[b])
        return base.as_strided((heads, length, self.dim), (int(self.stride_head[b]), self.stride_token, 1), start)


@dataclass(eq=False, slots=True)
class PagedView:
    """Rows of a paged cache: row (sequence b, head h, token t) starts at

        table[b, t // page_size] * stride_page + h * stride_head + t % page_size * stride_token

    elements from the pool's first one. Its elements are neighbours, or lie in fragments: element d of the row is

        d // fragment * stride_fragment + d % fragment

    elements behind the first. Table entries beyond a sequence's length, pages that no entry names and slots
    behind a sequence's last token are never read: anything may lie there.

    Args:
        pool: the tensor that holds all pages.
        table: int32 [sequences, pages], neighbouring elements in a row; checked when the view is built.
        page_size: tokens of a page.
        stride_page, stride_token, stride_head: elements.
        dim: elements of a row.
        fragment: neighbouring elements of a row that lies in fragments; 0: all of them.
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
        """The same rows of another pool."""
        return dataclasses.replace(self, pool=tensor)

    def sequence(self, b: int, heads: int, length: int) -> torch.Tensor:
        """Sequence b as a copy [heads, length, dim], gathered page by page."""
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
    """What stored integers mean: value = (stored + offset) * scale, applied where a row is loaded and nowhere else.

    Args:
        scale, offset: float32. Per channel: rows of the same dim that all tokens share (stride_token 0). Per token:
            rows of one element, which heads may share (stride 0); they need not lie as the rows that they serve do:
            a RowView counts tokens by their place in the sequence, beside paged keys too. offset None: 0.
    """

    scale: RowView | PagedView
    offset: RowView | PagedView | None = None


@dataclass(eq=False, slots=True)
class MatrixView:
    """A value per (head, row, key) of each sequence; broadcast axes have stride 0. Element (b, h, i, j) lies at

        address[b] + h * stride_head[b] + i * stride_row[b] + j * stride_key

    Drop bits use the same arithmetic, counted in bits of a uint8 tensor.

    Args:
        keep: the tensor that the addresses point into.
        address, stride_head, stride_row: int64 [sequences].
        stride_key: 1, or 0 where one value serves all keys.
        first: of a blocked matrix, int64 [sequences]: keys before it have no element here, and are not blocked; a
            sequence's address may then lie before the memory. None: 0.
    """

    keep: torch.Tensor
    address: np.ndarray
    stride_head: np.ndarray
    stride_row: np.ndarray
    stride_key: int
    first: np.ndarray | None = None

    def sequence(self, b: int, heads: int, rows: int, keys: int) -> torch.Tensor:
        """Sequence b from its first key on, as a view [heads, rows, keys - first] on the kept memory."""
        strides = (int(self.stride_head[b]), int(self.stride_row[b]), self.stride_key)
        start, first = self.keep.storage_offset() + int(self.address[b]), self.first_of(b)
        return self.keep.as_strided((heads, rows, keys - first), strides, start + first * self.stride_key)

    def first_of(self, b: int) -> int:
        """The first key of sequence b that has elements."""
        return 0 if self.first is None else int(self.first[b])

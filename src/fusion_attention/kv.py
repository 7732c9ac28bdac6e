"""Where rows and matrices lie in memory: one address per sequence, and strides.

Every layout becomes a RowView or a MatrixView without a copy; what computes knows no other layout. Refuses to know
what the rows mean.
"""

from __future__ import annotations

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
class MatrixView:
    """A value per (head, row, key) of each sequence; broadcast axes have stride 0. Element (b, h, i, j) lies at

        address[b] + h * stride_head[b] + i * stride_row[b] + j * stride_key

    Drop bits use the same arithmetic, counted in bits of a uint8 tensor.

    Args:
        keep: the tensor that the addresses point into.
        address, stride_head, stride_row: int64 [sequences].
        stride_key: 1, or 0 where one value serves all keys.
    """

    keep: torch.Tensor
    address: np.ndarray
    stride_head: np.ndarray
    stride_row: np.ndarray
    stride_key: int

    def sequence(self, b: int, heads: int, rows: int, keys: int) -> torch.Tensor:
        """Sequence b as a view [heads, rows, keys] on the kept memory."""
        strides = (int(self.stride_head[b]), int(self.stride_row[b]), self.stride_key)
        return self.keep.as_strided((heads, rows, keys), strides, self.keep.storage_offset() + int(self.address[b]))

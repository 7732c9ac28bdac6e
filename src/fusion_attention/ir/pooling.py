"""Pooling of windows of rows to compressed keys, in terms of the intermediate representation."""

from dataclasses import dataclass

import torch

from fusion_attention.ir.kv import RowView


@dataclass(frozen=True)
class PoolingProblem:
    """A softmax per channel over the rows of a window, which weighs these rows.

        z_p = gate[p] + bias[p % ratio],  out[w, d] = sum_p exp(z[p, d]) kv[p, d] / sum_p exp(z[p, d])

    summed over the rows p of window w, those from w * ratio to w * ratio + ratio - 1. With overlap, rows have 2 dim
    elements, and the sums also include the first dim of the rows of the window before, if there is one; of its own rows
    window w then has the last dim.

    In Extents, kv_len counts rows in memory and q_len results; result i is that of window i + lo. Rows outside the
    windows of results are not read, and their gradients are 0.

    Args:
        heads, dim: heads, and elements of a result.
        ratio: rows of a window.
        overlap: windows overlap as above.
        dtype: of rows, gates and results.
        has_bias: gates have a bias by position.
    """

    heads: int
    dim: int
    ratio: int
    overlap: bool = False
    dtype: str = "float32"
    has_bias: bool = False

    @property
    def channels(self) -> int:
        """Elements of a row."""
        return self.dim * (1 + self.overlap)


@dataclass(eq=False)
class PoolingOperands:
    """The memory of one call; pooling writes out."""

    kv: RowView
    gate: RowView
    out: RowView | None = None
    bias: torch.Tensor | None = None  # contiguous float32 (float64: as kv) [ratio, channels]


@dataclass(eq=False)
class PoolingGrads:
    """The gradients that the backward reads (dout) and writes; dbias None: not wanted."""

    dout: RowView
    dkv: RowView
    dgate: RowView
    dbias: torch.Tensor | None = None  # contiguous, as bias, overwritten

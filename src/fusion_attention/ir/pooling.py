"""Pooling of windows of tokens to compressed keys: its parameters, and the views of its tensors in memory."""

from dataclasses import dataclass

import torch

from fusion_attention.ir.memory_views import RowView


@dataclass(frozen=True)
class PoolingProblem:
    """Pooling of each window of tokens to one compressed key, a sum weighted per channel by a softmax of gates.

        z_p = gate[p] + bias[p % ratio],  out[w, d] = sum_p exp(z[p, d]) kv[p, d] / sum_p exp(z[p, d])

    summed over the rows p of window w, from w * ratio to w * ratio + ratio - 1. With overlap, rows have 2 * dim
    elements: window w sums the last dim elements of these rows, and the first dim elements of the rows of window w - 1,
    if there is one.

    Of the sequences' lengths, kv_len counts rows in memory, q_len counts results, and result i is that of window i +
    lo. Rows outside the windows of results are not read, and their gradients are 0.

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
        """Elements per token of keys or gates: dim, or with overlapping windows 2 * dim."""
        return self.dim * (1 + self.overlap)


@dataclass(eq=False)
class PoolingOperands:
    """The memory of one pooling of tokens to compressed keys, which reads kv, gates and bias, and writes out."""

    kv: RowView
    gate: RowView
    out: RowView | None = None
    bias: torch.Tensor | None = None  # contiguous float32 (float64: as kv) [ratio, channels]


@dataclass(eq=False)
class PoolingGrads:
    """The gradients that the backward of key pooling reads (dout) and writes; dbias is None if it is not wanted."""

    dout: RowView
    dkv: RowView
    dgate: RowView
    dbias: torch.Tensor | None = None  # contiguous, as bias, overwritten

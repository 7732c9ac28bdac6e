"""From a tensor in some layout to the rows that kernels read: here the words BSND, BNSD and TND end.

Views depend on lengths and strides alone, and are kept with the lengths. Loops over nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from fusion_attention.ir.kv import MatrixView, RowView
from fusion_attention.ir.problem import Extents

Result = TypeVar("Result")

# Axis order of each layout: batch, sequence, head (None: head and element share the last axis).
LAYOUTS: dict[str, tuple[int | None, int, int | None]] = {
    "BSH": (0, 1, None),
    "SBH": (1, 0, None),
    "BSND": (0, 1, 2),
    "BNSD": (0, 2, 1),
    "NBSD": (1, 2, 0),
    "TND": (None, 0, 1),
    "NTD": (None, 1, 0),
    "SH": (None, 0, None),
}
# Views kept for one set of lengths; a caller whose strides change all the time starts over.
_ENTRIES = 256


@dataclass(frozen=True)
class Form:
    """How the tensors of a call lie, which kernels do not ask. Crosses an operator's boundary as one line of text.

    Args:
        layout: of q, k, v, rope tensors, out and their gradients.
        bias: "none"; "broadcast" (4-D, size 1 repeats; packed sequences read the upper left corner); packed blocks
            end to end: "blocks" ([N, S1, S2] each) or "row_blocks" ([N, 1, S2] each); "aligned" (4-D, the right
            columns are a sequence's own).
        blocked: "none", "broadcast" (2-D or 4-D), or "diagonal" ([T1, T2], a sequence's block on the diagonal).
        stats: order of packed statistics: "item" (head-major in each sequence) or "token".
    """

    layout: str = "BSND"
    bias: str = "none"
    blocked: str = "none"
    stats: str = "token"

    @property
    def packed(self) -> bool:
        """Sequences lie end to end on one axis."""
        return LAYOUTS[self.layout][0] is None


def row_shape(tensor: torch.Tensor, layout: str, heads: int, dim: int) -> tuple[int, ...]:
    """The shape of a tensor with the batch and sequence axes of another, and rows of dim elements per head."""
    return (*tensor.shape[:-1], dim if LAYOUTS[layout][2] is not None else heads * dim)


def rows_shape(layout: str, batch: int, tokens: int, heads: int, dim: int) -> tuple[int, ...]:
    """The shape of a tensor of rows in a layout; where rows are packed, tokens are those of all sequences together."""
    at_batch, at_token, at_head = LAYOUTS[layout]
    axes = {at_token: tokens} | ({} if at_batch is None else {at_batch: batch})
    axes |= {len(axes): heads * dim} if at_head is None else {at_head: heads, len(axes) + 1: dim}
    return tuple(axes[axis] for axis in range(len(axes)))


def wide(tensor: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor | None:
    """A sink or slopes as kernels read them: in float32, however they came; float64 beside rows of float64."""
    if tensor is None or tensor.dtype == torch.float32 or tensor.dtype == q.dtype == torch.float64:
        return tensor
    return tensor.float()


def row_view(tensor: torch.Tensor, layout: str, heads: int, extents: Extents, side: str) -> RowView:
    """The rows of a tensor of the query ("q") or key ("kv") side."""
    stride = tensor.stride()
    if stride[-1] != 1 and tensor.shape[-1] > 1:
        # Kernels read rows of neighbouring elements; any other last axis is copied, here and nowhere else.
        tensor = tensor.contiguous()
        stride = tensor.stride()
    key = (layout, heads, side, tensor.shape, stride)
    view = extents.call_cache.get(key) or keep(extents, key, _row_view(tensor, layout, heads, extents, side))
    return view.over(tensor)


def keep(extents: Extents, key: Any, result: Result) -> Result:
    """Stores a view that depends on lengths and strides alone in extents.call_cache."""
    if len(extents.call_cache) >= _ENTRIES:
        extents.call_cache.clear()
    extents.call_cache[key] = result
    return result


def _row_view(tensor: torch.Tensor, layout: str, heads: int, extents: Extents, side: str) -> RowView:
    batch, token, head = LAYOUTS[layout]
    start = extents.q_start if side == "q" else extents.kv_start
    stride_token = tensor.stride(token)
    address = start * stride_token if batch is None else np.arange(len(start)) * tensor.stride(batch)
    dim = tensor.shape[-1] if head is not None else tensor.shape[-1] // max(heads, 1)
    stride_head = tensor.stride(head) if head is not None else dim
    return RowView((), address.astype(np.int64), stride_token, np.full(len(start), stride_head, np.int64), dim)


def matrix_view(tensor: torch.Tensor, form: str, heads: int, extents: Extents) -> MatrixView:
    """A bias or a blocked matrix in one of the forms of Form."""
    count = np.arange(len(extents))
    if form in ("blocks", "row_blocks"):
        return _blocks(tensor.reshape(-1), heads, extents.q_len if form == "blocks" else None, extents.kv_len)
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        # Kernels read along keys with stride 1 or 0. clone() sees to the strides of what has no rows, too.
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    if form == "diagonal":
        address = extents.q_start * tensor.stride(0) + extents.kv_start
        return MatrixView(tensor, address, np.zeros_like(address), np.full_like(address, tensor.stride(0)), 1)
    tensor = tensor.reshape((1,) * (4 - tensor.dim()) + tuple(tensor.shape))
    batch, head, row, key = (s if n > 1 else 0 for s, n in zip(tensor.stride(), tensor.shape, strict=True))
    address = (count * batch).astype(np.int64)
    if form == "aligned":
        address += tensor.shape[-1] - extents.kv_len
    return MatrixView(tensor, address, np.full_like(address, head), np.full_like(address, row), key)


def _blocks(flat: torch.Tensor, heads: int, rows: np.ndarray | None, keys: np.ndarray) -> MatrixView:
    """Blocks [heads, rows, keys] of the sequences, end to end; rows None: one row serves all."""
    if flat.stride(0) != 1:
        flat = flat.contiguous()  # Kernels count a block's elements one by one.
    head = keys if rows is None else rows * keys
    size = heads * head
    row = np.zeros_like(keys) if rows is None else keys
    return MatrixView(flat, np.cumsum(size) - size, head.astype(np.int64), row.astype(np.int64), 1)


def bits_view(bits: torch.Tensor, heads: int, form: Form, sizes: tuple[int, int], extents: Extents) -> MatrixView:
    """Packed drop bits, linear over [B, N, S1, S2] (sizes = S1, S2), or sequence by sequence where rows are packed."""
    if form.packed:
        return _blocks(bits.reshape(-1), heads, extents.q_len, extents.kv_len)
    return _blocks(bits.reshape(-1), heads, np.full(len(extents), sizes[0]), np.full(len(extents), sizes[1]))


def stats_shape(q: torch.Tensor, form: Form, heads: int) -> tuple[int, ...]:
    """[B, N1, S1], or [T1, N1] where rows are packed."""
    batch, token, _ = LAYOUTS[form.layout]
    return (q.shape[token], heads) if batch is None else (q.shape[batch], heads, q.shape[token])


def stats_view(tensor: torch.Tensor, form: Form, heads: int, extents: Extents) -> RowView:
    """Statistics that stats_shape() describes, in the order of form.stats."""
    key = (form.layout, form.stats, heads, tensor.shape)
    view = extents.call_cache.get(key) or keep(extents, key, _stats_view(tensor, form, heads, extents))
    return view.over(tensor)


def _stats_view(tensor: torch.Tensor, form: Form, heads: int, extents: Extents) -> RowView:
    count = len(extents)
    if not form.packed:
        rows = tensor.shape[-1]
        return RowView((), np.arange(count) * (heads * rows), 1, np.full(count, rows), 1)
    if form.stats == "token":
        return RowView((), extents.q_start * heads, heads, np.ones(count, np.int64), 1)
    return RowView((), extents.q_start * heads, 1, extents.q_len, 1)


def covered(tensor: torch.Tensor, layout: str, extents: Extents, side: str) -> bool:
    """Whether every token of a tensor of the query ("q") or key ("kv") side belongs to a sequence.

    The outputs of others are zero.
    """
    batch, token, _ = LAYOUTS[layout]
    tokens = tensor.shape[token]
    key = ("covered", side, batch is None, tokens)
    result: bool | None = extents.call_cache.get(key)
    if result is None:
        lengths = extents.q_len if side == "q" else extents.kv_len
        result = int(lengths.sum()) == tokens if batch is None else bool((lengths == tokens).all())
        keep(extents, key, result)
    return result

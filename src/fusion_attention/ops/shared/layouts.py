"""Conversion of tensors in layouts such as BSND, BNSD and TND to the pointer-and-stride views that kernels read.

Views depend only on lengths and strides, and are cached with the lengths.
"""

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from fusion_attention.ir.memory_views import MatrixView, RowView
from fusion_attention.ir.problem import Extents
from fusion_attention.ops.shared.params import WORDS

Result = TypeVar("Result")


def _positions(words: str) -> tuple[int | None, int, int | None]:
    """Returns the positions of the batch, token and head axes in names such as "B S N D"; None if an axis is absent."""
    at = {axis: position for position, axis in enumerate(words.split())}
    return at.get("B"), at["S" if "S" in at else "T"], at.get("N")


# Axis order of each layout: batch, sequence, head (None: head and element share the last axis).
LAYOUTS = {layout: _positions(words) for layout, words in WORDS.items()}
# Maximum number of cached views per Extents; a full cache is cleared.
_ENTRIES = 256


@dataclass(frozen=True)
class Form:
    """Axis orders and shapes of the tensors of an attention call, from which views of their memory are made.

    Args:
        layout: axis order of q, k, v, rope tensors, out and their gradients, a key of LAYOUTS.
        bias: "none"; "broadcast": broadcasts to [B, N, S, S_kv], of which packed sequences read the upper left corner;
            "blocks": the matrices [N, q_len, kv_len] of packed sequences, concatenated; "row_blocks": the same with
            one row [N, 1, kv_len]; "aligned": 4-D, a sequence reads the last kv_len columns.
        blocked: "none"; "broadcast", as bias; or "diagonal": [T1, T2], with each sequence's matrix on the diagonal.
        stats: order of packed statistics: "item", [N, q_len] of each sequence, concatenated; or "token", [T1, N].
        block: (rows, keys) of a block, if blocked_tiles is a mask over blocks of this size (nonzero: visible keys);
            (): blocked_tiles has a number per 128 x 128 tile, or is None.
    """

    layout: str = "BSND"
    bias: str = "none"
    blocked: str = "none"
    stats: str = "token"
    block: tuple[int, ...] = ()

    @property
    def packed(self) -> bool:
        """True if sequences are concatenated along one axis."""
        return LAYOUTS[self.layout][0] is None


def row_shape(tensor: torch.Tensor, layout: str, heads: int, dim: int) -> tuple[int, ...]:
    """Returns the shape of `tensor`, in a layout with this number of heads, but with `dim` elements per head."""
    return (*tensor.shape[:-1], dim if LAYOUTS[layout][2] is not None else heads * dim)


def rows_shape(layout: str, batch: int, tokens: int, heads: int, dim: int) -> tuple[int, ...]:
    """Returns the shape of a tensor in a layout, with `dim` elements for each of `heads` heads of a token; tokens: of
    each of `batch` padded sequences, or of all packed ones."""
    sizes = {"B": batch, "S": tokens, "T": tokens, "N": heads, "D": dim, "N*D": heads * dim}
    return tuple(sizes[axis] for axis in WORDS[layout].split())


def form_of(tensor: torch.Tensor, layout: str, heads: int) -> tuple[int, int, int, int] | None:
    """Returns (batch or pages, heads, tokens, elements of a row) of a tensor in a layout ("NZ": [pages, heads, elements
    / e, tokens, e]); None if its shape does not fit. heads: if it has no head axis. An int32 stores eight elements."""
    shape, each = tuple(tensor.shape), 8 if tensor.dtype == torch.int32 else 1
    if layout == "NZ":
        return (shape[0], shape[1], shape[3], shape[2] * shape[4] * each) if len(shape) == 5 else None
    batch, token, head = LAYOUTS[layout]
    if len(shape) != 4 - (batch is None) - (head is None) or (head is None and (heads < 1 or shape[-1] % heads)):
        return None
    heads, elements = (heads, shape[-1] // heads) if head is None else (shape[head], shape[-1])
    return 1 if batch is None else shape[batch], heads, shape[token], elements * each


def to_float32(tensor: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor | None:
    """Returns attention sinks or ALiBi slopes in float32, which kernels read, or in float64 if the query q is."""
    if tensor is None or tensor.dtype == torch.float32 or tensor.dtype == q.dtype == torch.float64:
        return tensor
    return tensor.float()


def row_view(tensor: torch.Tensor, layout: str, heads: int, extents: Extents, side: str) -> RowView:
    """Returns a pointer-and-stride view of a tensor with `heads` rows per token of queries ("q") or keys ("kv")."""
    stride = tensor.stride()
    if stride[-1] != 1 and tensor.shape[-1] > 1:
        # Kernels read contiguous rows, so a tensor with another stride of the last axis is copied here.
        tensor = tensor.contiguous()
        stride = tensor.stride()
    key = (layout, heads, side, tensor.shape, stride)
    view = extents.call_cache.get(key) or keep(extents, key, _row_view(tensor, layout, heads, extents, side))
    return view.over(tensor)


def keep(extents: Extents, key: Any, result: Result) -> Result:
    """Returns `result` after storing it under a key in extents.call_cache; it depends only on lengths and strides."""
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
    """Returns a pointer-and-stride view of a bias or mask; form: its shape, a value of Form.bias or Form.blocked."""
    count = np.arange(len(extents))
    if form in ("blocks", "row_blocks"):
        return _blocks(tensor.reshape(-1), heads, extents.q_len if form == "blocks" else None, extents.kv_len)
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        # Kernels read along keys with stride 1 or 0. clone() also normalizes strides of tensors without rows.
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
    """Returns a view of matrices [heads, rows, keys], one per sequence, concatenated; rows None: one row for all."""
    if flat.stride(0) != 1:
        flat = flat.contiguous()  # Kernels require contiguous blocks.
    head = keys if rows is None else rows * keys
    size = heads * head
    row = np.zeros_like(keys) if rows is None else keys
    return MatrixView(flat, np.cumsum(size) - size, head.astype(np.int64), row.astype(np.int64), 1)


def bits_view(bits: torch.Tensor, heads: int, form: Form, sizes: tuple[int, int], extents: Extents) -> MatrixView:
    """Returns a view of a dropout mask's bits in row-major order over [B, N, S1, S2] (sizes = S1, S2); if rows are
    packed, over [N, q_len, kv_len] of each sequence, concatenated."""
    if form.packed:
        return _blocks(bits.reshape(-1), heads, extents.q_len, extents.kv_len)
    return _blocks(bits.reshape(-1), heads, np.full(len(extents), sizes[0]), np.full(len(extents), sizes[1]))


def stats_shape(q: torch.Tensor, layout: str, heads: int) -> tuple[int, ...]:
    """Returns the shape of softmax statistics: [B, N1, S1], or [T1, N1] if rows are packed; layout: that of q."""
    batch, token, _ = LAYOUTS[layout]
    return (q.shape[token], heads) if batch is None else (q.shape[batch], heads, q.shape[token])


def stats_view(tensor: torch.Tensor, form: Form, heads: int, extents: Extents) -> RowView:
    """Returns a view of softmax statistics, [B, N1, S1], or [T1, N1] if packed; form: layout and packed order."""
    key, count = (form.layout, form.stats, heads, tensor.shape), len(extents)
    view: RowView | None = extents.call_cache.get(key)
    if view is None:
        if not form.packed:
            rows = tensor.shape[-1]
            view = RowView((), np.arange(count) * (heads * rows), 1, np.full(count, rows), 1)
        elif form.stats == "token":
            view = RowView((), extents.q_start * heads, heads, np.ones(count, np.int64), 1)
        else:
            view = RowView((), extents.q_start * heads, 1, extents.q_len, 1)
        keep(extents, key, view)
    return view.over(tensor)


def covered(tensor: torch.Tensor, layout: str, extents: Extents, side: str) -> bool:
    """True if every token of a tensor of query rows (side "q") or of keys ("kv") belongs to a sequence.
    Outputs of other tokens are zero. layout: layout of the tensor."""
    batch, token, _ = LAYOUTS[layout]
    tokens = tensor.shape[token]
    key = ("covered", side, batch is None, tokens)
    result: bool | None = extents.call_cache.get(key)
    if result is None:
        lengths = extents.q_len if side == "q" else extents.kv_len
        result = int(lengths.sum()) == tokens if batch is None else bool((lengths == tokens).all())
        keep(extents, key, result)
    return result

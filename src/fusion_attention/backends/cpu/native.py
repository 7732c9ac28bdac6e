"""Plans and runs the C++ core's dense attention, forward and backward; converts views of memory to its arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import fusion_attention._native as _native
from fusion_attention.ir import dropout
from fusion_attention.ir.mask import TILE
from fusion_attention.ir.memory_views import MatrixView, PagedView, RowView
from fusion_attention.ir.problem import EXTENT_ROWS, ORIGIN_ROWS, Extents, Grads, Operands, Problem
from fusion_attention.ir.tiles import by_query
from fusion_attention.memory import empty

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_BIASES = {"none": 0, "matrix": 1, "table": 2, "slopes": 3, "slopes_sqrt": 4}
_DROPOUTS = {"none": 0, "bits": 1, "philox": 2}

_Rows = tuple[int, np.ndarray, np.ndarray, int, int]
_Matrix = tuple[Any, ...]


def plan_forward(problem: Problem, extents: Extents, variant: str | None) -> _native.ForwardPlan:
    """Returns the C++ core's plan of a dense attention forward; variant: an instruction set, None: the fastest."""
    t = by_query(extents, _native.TILE_ROWS)
    tiles = t.seq, t.row0, t.row1, t.begin, t.end
    return _native.ForwardPlan(problem_of(problem), extents_of(extents), tiles, variant)


def plan_backward(problem: Problem, extents: Extents, variant: str | None) -> _native.BackwardPlan:
    """Returns the C++ core's plan of a dense attention backward; variant: an instruction set, None: the fastest."""
    return _native.BackwardPlan(problem_of(problem), extents_of(extents), variant)


def run_forward(plan: _native.ForwardPlan, problem: Problem, operands: Operands) -> int:
    """Writes attention's out, max and sum to `operands`; returns the number of rows without visible keys (out is 0)."""
    with Floats() as floats:
        return plan.run(torch.get_num_threads(), core_arguments(_operands, problem, operands, floats))


def prepare_forward(
    plan: _native.ForwardPlan, problem: Problem, operands: Operands, names: tuple[str, ...]
) -> _native.PreparedForward:
    """Returns an object whose run() repeats run_forward() on other tensors of equal shapes and strides, in the order of
    `names`. operands: views of the first call's tensors."""
    with Floats() as floats:
        return plan.prepare(_operands(problem, operands, floats), names)


def run_backward(plan: _native.BackwardPlan, problem: Problem, operands: Operands, grads: Grads) -> int:
    """Writes attention's gradients to `grads`; dbias is overwritten if grads.owns_dbias, else added to. Rows without
    visible keys whose result is the mean of V add nothing (add_mean_gradients() adds it); returns their number."""
    p, g, dtype = problem, grads, problem.torch_dtype
    result_dtype = torch.float32 if p.wide_results else dtype
    dsink = empty(g.dout.keep[0], (p.heads_q,), torch.float32)
    if g.dbias is not None and not g.owns_dbias and g.dbias.keep.dtype is not torch.float32:
        raise TypeError(f"fusion_attention: native core: expected dbias in float32, got {g.dbias.keep.dtype}")
    gradients = (
        rows_of(g.dout, dtype),
        rows_of(g.dlse, torch.float32) if g.dlse else None,
        *(rows_of(view, result_dtype) for view in (g.dq, g.dk, g.dv)),
        rows_of(g.dq_rope, result_dtype) if p.dim_rope and g.dq_rope else None,
        rows_of(g.dk_rope, result_dtype) if p.dim_rope and g.dk_rope else None,
        matrix_of(g.dbias, DTYPES[g.dbias.keep.dtype]) if p.bias in ("matrix", "table") and g.dbias else None,
        dsink.data_ptr() if p.has_sink else 0,
        g.owns_dbias,
    )
    with Floats() as floats:
        means = plan.run(torch.get_num_threads(), _operands(p, operands, floats, dtype), gradients)
    if g.dsink is not None:
        g.dsink.copy_(dsink)
    return means


class Floats:
    """A context whose address() converts tensors to float32; the copies live until the context ends."""

    def __enter__(self) -> Floats:
        self._references: list[torch.Tensor] = []
        self.copied = False
        return self

    def __exit__(self, *_: object) -> None:
        self._references.clear()

    def address(self, values: torch.Tensor | None) -> int:
        """Returns the address of a contiguous float32 array of the values, a copy if necessary; 0 for None."""
        if values is None:
            return 0
        self._references.append(values.to(torch.float32).contiguous())
        self.copied = self.copied or self._references[-1] is not values
        return self._references[-1].data_ptr()


def problem_of(p: Problem) -> tuple[Any, ...]:
    """Returns sizes, dtype, scale and options of dense attention as a tuple of numbers that the C++ core reads."""
    kinds = DTYPES[p.torch_dtype], p.scale, _BIASES[p.bias], p.bias_scaled, p.has_blocked, p.has_sink
    drops = _DROPOUTS[p.dropout], p.keep_prob, dropout.threshold(p.keep_prob)
    more = p.softcap, p.has_blocked_tiles, p.wide_results
    return p.heads_q, p.heads_kv, p.dim_qk, p.dim_v, p.dim_rope, *kinds, *drops, *more


def extents_of(extents: Extents) -> tuple[np.ndarray, ...]:
    """Returns int64 arrays [sequences] for the C++ core: q_len, kv_len, lo, hi, prefix (row i sees keys i + lo to
    before max(i + hi, prefix)), ALiBi's shift; then lengths of compressed keys or positions of a chunk, if any."""
    rows = tuple(getattr(extents, name) for name in EXTENT_ROWS)
    if extents.compressed is not None:
        return *rows, extents.compressed.kv_len, extents.compressed.hi
    origin = extents.chunk_origin
    return rows if origin is None else (*rows, *(getattr(origin, name) for name in ORIGIN_ROWS[:3]))


@dataclass(eq=False)
class KeptOperands(Operands):
    """Operands that many runs use, with a cache of the addresses and strides that the native core reads."""

    arguments: dict[Any, tuple[Any, ...]] = field(default_factory=dict)


def core_arguments(
    make: Callable[[Problem, Operands, Floats], tuple[Any, ...]], p: Problem, o: Operands, floats: Floats
) -> tuple[Any, ...]:
    """Returns make(p, o, floats), addresses and strides of operands `o` for the native core; cached in `o` if it is
    KeptOperands and no float32 copy was made. floats: makes float32 copies and keeps them alive."""
    if not isinstance(o, KeptOperands):
        return make(p, o, floats)
    result = o.arguments.get(make)
    if result is None:
        result = make(p, o, floats)
        if not floats.copied:
            o.arguments[make] = result
    return result


def _operands(p: Problem, o: Operands, floats: Floats, out: torch.dtype | None = None) -> tuple[Any, ...]:
    """Returns addresses and strides of all operands, in the order of the native core's arguments; floats: keeps float32
    copies alive. out: the dtype of o.out, None: that of the problem's results."""
    dtype = p.torch_dtype
    out = out or (torch.float32 if p.wide_results else dtype)
    return (
        rows_of(o.q, dtype),
        rows_of(o.k, dtype),
        rows_of(o.v, dtype),
        rows_of(o.out, out),
        rows_of(o.stats.max, torch.float32),
        rows_of(o.stats.sum, torch.float32),
        rows_of(o.q_rope, dtype) if p.dim_rope and o.q_rope else None,
        rows_of(o.k_rope, dtype) if p.dim_rope and o.k_rope else None,
        matrix_of(o.bias, DTYPES[o.bias.keep.dtype]) if p.bias in ("matrix", "table") and o.bias else None,
        floats.address(o.slopes) if p.bias in ("slopes", "slopes_sqrt") else 0,
        matrix_of(o.blocked, 0) if p.has_blocked and o.blocked else None,
        matrix_of(o.drop_bits, 0) if p.dropout == "bits" and o.drop_bits else None,
        o.seed & 0xFFFFFFFFFFFFFFFF,
        o.offset & 0xFFFFFFFF,
        floats.address(o.sink) if p.has_sink else 0,
        *(_tiles_of(o.blocked_tiles, o.blocked_bits) if p.has_blocked_tiles and o.blocked_tiles else (None, 0, 0)),
    )


def _tiles_of(tiles: MatrixView, bits: torch.Tensor | None) -> tuple[_Matrix, int, int]:
    """Returns the native core's arguments for a mask of tiles: (address and strides of the tile indices, address of the
    bits of partly masked tiles, number of such tiles)."""
    if tiles.keep.dtype is not torch.int32:
        raise TypeError(f"fusion_attention: native core: expected numbers of tiles in int32, got {tiles.keep.dtype}")
    if bits is None:
        return matrix_of(tiles, 0), 0, 0
    if bits.dtype is not torch.uint8 or bits.shape[1:] != (TILE, TILE // 8) or not bits.is_contiguous():
        raise TypeError(f"fusion_attention: native core: expected bits of tiles, got {bits.dtype} {list(bits.shape)}")
    return matrix_of(tiles, 0), bits.data_ptr(), len(bits)


def rows_of(view: RowView | PagedView | None, dtype: torch.dtype) -> _Rows:
    """Returns (base address, offsets of sequences, stride of a head, stride of a token, dim) of contiguous rows, for
    the native core; raises TypeError if their dtype is not `dtype`."""
    if not isinstance(view, RowView):
        raise TypeError(f"fusion_attention: native core: expected a view of contiguous rows, got {type(view).__name__}")
    first, address = view.keep[0], view.address
    if first.dtype is not dtype:
        raise TypeError(f"fusion_attention: native core: expected {dtype} in memory, got {first.dtype}")
    start = first.data_ptr()
    if len(view.keep) > 1:
        address = address + np.array([(t.data_ptr() - start) // t.itemsize for t in view.keep], np.int64)
    return start, address, view.stride_head, view.stride_token, view.dim


def matrix_of(view: MatrixView, dtype: int) -> _Matrix:
    """Returns (base address, offsets of sequences, strides of head, row and key, dtype) of a matrix over (row, key)
    pairs, for the native core; dtype: the core's number of it."""
    first = () if view.first is None else (view.first,)
    return view.keep.data_ptr(), view.address, view.stride_head, view.stride_row, view.stride_key, dtype, *first

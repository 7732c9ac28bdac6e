"""The forward by the native core: views become addresses, a plan holds what does not change from call to call.

Knows memory and the core's numbering of kinds. Refuses to know what is computed.
"""

from __future__ import annotations

import numpy as np
import torch

from fusion_attention import _native, dropout
from fusion_attention.kv import MatrixView, RowView
from fusion_attention.problem import EXTENT_ROWS, Extents, Operands, Problem
from fusion_attention.tiles import Tiles

TILE_ROWS: int = _native.TILE_ROWS
_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_BIASES = {"none": 0, "matrix": 1, "table": 2, "slopes": 3, "slopes_sqrt": 4}
_DROPOUTS = {"none": 0, "bits": 1, "philox": 2}

_Rows = tuple[int, np.ndarray, np.ndarray, int, int]
_Matrix = tuple[int, np.ndarray, np.ndarray, np.ndarray, int, int]


def plan_forward(problem: Problem, extents: Extents, tiles: Tiles, variant: str | None) -> _native.ForwardPlan:
    """The core's plan; variant: None for the strongest instruction set that runs here, or one of the runnable ones."""
    p = problem
    kinds = _DTYPES[p.torch_dtype], p.scale, _BIASES[p.bias], p.bias_scaled, p.has_blocked, p.has_sink
    drops = _DROPOUTS[p.dropout], p.keep_prob, dropout.threshold(p.keep_prob)
    return _native.ForwardPlan(
        (p.heads_q, p.heads_kv, p.dim_qk, p.dim_v, p.dim_rope, *kinds, *drops),
        tuple(getattr(extents, name) for name in EXTENT_ROWS),
        (tiles.seq, tiles.row0, tiles.row1, tiles.begin, tiles.end),
        variant,
    )


def run_forward(plan: _native.ForwardPlan, problem: Problem, operands: Operands) -> int:
    """Writes out and statistics of every row of every sequence; empty rows are 0. Returns how many there are."""
    p, o = problem, operands
    dtype = p.torch_dtype
    slopes, sink = _floats(o.slopes), _floats(o.sink)
    sloped = p.bias in ("slopes", "slopes_sqrt")
    return plan.run(
        torch.get_num_threads(),
        _rows(o.q, dtype),
        _rows(o.k, dtype),
        _rows(o.v, dtype),
        _rows(o.out, dtype),
        _rows(o.stats.max, torch.float32),
        _rows(o.stats.sum, torch.float32),
        _rows(o.q_rope, dtype) if p.dim_rope and o.q_rope else None,
        _rows(o.k_rope, dtype) if p.dim_rope and o.k_rope else None,
        _matrix(o.bias, _DTYPES[o.bias.keep.dtype]) if p.bias in ("matrix", "table") and o.bias else None,
        slopes.data_ptr() if sloped and slopes is not None else 0,
        _matrix(o.blocked, 0) if p.has_blocked and o.blocked else None,
        _matrix(o.drop_bits, 0) if p.dropout == "bits" and o.drop_bits else None,
        o.seed & 0xFFFFFFFFFFFFFFFF,
        o.offset & 0xFFFFFFFF,
        sink.data_ptr() if p.has_sink and sink is not None else 0,
    )


def _floats(values: torch.Tensor | None) -> torch.Tensor | None:
    # One value per head, often a row that serves all sequences: the kernel reads them as one float32 array.
    return None if values is None else values.to(torch.float32).contiguous()


def _rows(view: RowView, dtype: torch.dtype) -> _Rows:
    first, address = view.keep[0], view.address
    if first.dtype is not dtype:
        raise TypeError(f"fusion_attention: native forward: expected {dtype} in memory, got {first.dtype}")
    start = first.data_ptr()
    if len(view.keep) > 1:
        address = address + np.array([(t.data_ptr() - start) // t.itemsize for t in view.keep], np.int64)
    return start, address, view.stride_head, view.stride_token, view.dim


def _matrix(view: MatrixView, dtype: int) -> _Matrix:
    return view.keep.data_ptr(), view.address, view.stride_head, view.stride_row, view.stride_key, dtype

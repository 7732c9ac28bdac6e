"""How a problem is cut: the tiles of query rows, the step over keys, and the memory that this takes.

Boundaries depend on the Problem and on each sequence's own lengths, so a sequence's bits do not depend on its
neighbours, on packing or on threads. Refuses to know what a tile computes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fusion_attention import _native
from fusion_attention.backends.cpu.native import TILE_ROWS, plan_forward
from fusion_attention.problem import Extents, Problem
from fusion_attention.tiles import Tiles, by_query

# Measured at 2048 tokens, 8 heads of 64 (float32) and of 128 (bfloat16): 256 x 256 is as fast forward as 256 x 512
# (within 5 %), 5 to 10 % faster backward, and meets fewer keys in vain at a causal edge.
KEYS = 256
MOST_ROWS = 256
FEWEST_ROWS = 16
# Scores of one tile, all heads together: 4 MiB of float32 stay in a server's last-level cache.
TILE_SCORES = 1 << 20
FLOAT = 4  # bytes


@dataclass(frozen=True, eq=False)
class Schedule:
    """Tiles of query rows, and how many keys a tile meets at a time.

    Backward keeps dq in the tile and adds dk and dv to float32 buffers of one sequence (five matmuls), which are no
    larger than dq's would be and much smaller with grouped heads.

    Args:
        tiles: tiles of query rows, sequence after sequence.
        first: int64 [sequences + 1], where each sequence's tiles start.
        keys: keys per step of what torch computes.
        native: forward only, the core's plan.
    """

    tiles: Tiles
    first: np.ndarray
    keys: int
    native: _native.ForwardPlan | None = None


def rows_per_tile(problem: Problem) -> int:
    """Query rows of a backward tile: fewer for many heads, so that all heads' scores of a tile stay in cache."""
    return min(MOST_ROWS, max(FEWEST_ROWS, TILE_SCORES // (KEYS * problem.heads_q)))


def schedule(problem: Problem, extents: Extents, backward: bool, variant: str | None = None) -> Schedule:
    """The work list of one verb; variant: the instruction set of the native core, by default the strongest."""
    tiles = by_query(extents, rows_per_tile(problem) if backward else TILE_ROWS)
    native = None if backward else plan_forward(problem, extents, tiles, variant)
    return Schedule(tiles, np.searchsorted(tiles.seq, np.arange(len(extents) + 1)), KEYS, native)


def workspace_bytes(problem: Problem, extents: Extents, backward: bool) -> int:
    """What a verb allocates besides operands and results, with torch's present number of threads."""
    if not backward:
        native = schedule(problem, extents, backward).native
        assert native is not None
        return native.workspace_bytes(torch.get_num_threads())
    return _backward_bytes(problem, extents)


# Bytes per score of a tile that are alive at once, found by counting and checked against the allocator.
_SCORE_BYTES, _NARROW_BYTES = 13, 3
_BIAS_BYTES = {"none": 0, "matrix": 0, "table": 8, "slopes": 5, "slopes_sqrt": 5}
_BLOCKED_BYTES = 3
_DROPOUT_BYTES = {"none": 0, "bits": 32, "philox": 18}


def _backward_bytes(problem: Problem, extents: Extents) -> int:
    """About one tile's panels and scores, and one sequence's dk and dv in float32.

    A key tile that holds inf or NaN next to masks takes some more (its indicators), for as long as it lasts.
    """
    if len(extents) == 0:
        return 0
    p, qk = problem, problem.dim_qk + problem.dim_rope
    rows = np.minimum(extents.q_len, rows_per_tile(p))
    keys = np.minimum(extents.kv_len, KEYS)
    row = FLOAT * (2 * (qk + p.dim_v) + 8)  # q, dq, dout and out
    key = FLOAT * (qk + p.dim_v)
    score = _SCORE_BYTES + _BIAS_BYTES[p.bias] + _BLOCKED_BYTES * p.has_blocked + _DROPOUT_BYTES[p.dropout]
    score += _NARROW_BYTES * (p.dtype == "bfloat16") + FLOAT * p.bias_scaled
    tile = rows * (p.heads_q * row) + keys * (p.heads_kv * key) + rows * keys * (p.heads_q * score)
    tile = tile + extents.kv_len * (p.heads_kv * FLOAT * (qk + p.dim_v))
    return int(tile.max())

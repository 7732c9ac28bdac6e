"""Empty rows in mean form: out = (1/n) sum_j M_j v_j over all n keys, seen or not, and a sum of n.

Added after the kernel has left such rows as 0 with a maximum of -inf. Refuses to know why a row is empty.
"""

from __future__ import annotations

import math

import torch

from fusion_attention.backends.cpu import panels
from fusion_attention.backends.cpu.rows import RowTile, row_tiles, steps
from fusion_attention.backends.cpu.tiling import Schedule
from fusion_attention.problem import Extents, Operands, Problem


@torch.no_grad()
def add_means(problem: Problem, extents: Extents, schedule: Schedule, operands: Operands) -> None:
    """Overwrites out and sum of the empty rows that problem.empty_rows wants as means."""
    for b in range(len(extents)):
        for tile in row_tiles(problem, extents, schedule, operands, b):
            empty = tile.load(operands.stats.max) == -math.inf
            if problem.empty_rows == "mean_in_band":
                empty &= tile.fold(tile.sees_band())
            if tile.kv_len and empty.any():
                out, total = tile.load(operands.out), tile.load(operands.stats.sum)
                tile.store(operands.out, torch.where(empty, _mean(tile, schedule.keys), out))
                tile.store(operands.stats.sum, total.masked_fill(empty, float(tile.kv_len)))


def _mean(tile: RowTile, size: int) -> torch.Tensor:
    """[heads_kv, group * rows or 1, dim_v]"""
    mean: torch.Tensor | float = 0.0
    for keys in steps(0, tile.kv_len, size):
        v = tile.load_keys(tile.operands.v, None, keys)
        kept = tile.kept(keys)
        if kept is None:
            mean = mean + v.sum(1, keepdim=True)
        else:
            live = None if panels.is_finite(v) else tile.fold(kept)
            mean = mean + panels.multiply(tile.fold(kept).float(), v, live)
    assert isinstance(mean, torch.Tensor)
    return mean / (tile.kv_len * tile.problem.keep_prob)

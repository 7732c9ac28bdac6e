"""When the Gluon kernel computes a forward, and what it knows while compiling."""

from __future__ import annotations

from typing import Any

import torch

from fusion_attention.backends.triton.shapes import TMA, Tile
from fusion_attention.waist.problem import Problem

# Gluon has no interpreter, and no compiler shows a race between two barriers: until the cases of tests/gpu have passed
# on a GPU, and it was faster there, plain Triton computes everything.
MEASURED = False
# By elements of a row; num_stages: buffers of each ring. One program takes the registers of a processor.
TILES = {64: Tile(128, 128, 4, 3, TMA), 128: Tile(128, 128, 4, 2, TMA)}
# Registers of a thread: as launched, and as a thread that multiplies then has, once the loading warp gave up its own.
OPTIONS = {"maxnreg": 168}
MULTIPLYING = 240
_CAPABILITY = (9, 0)  # wgmma is Hopper's alone


def kernel() -> Any:
    """The kernel; None: this Triton has no Gluon for Hopper."""
    try:
        from fusion_attention.backends.triton.gluon_forward import gluon_forward
    except (ImportError, AttributeError):
        return None
    return gluon_forward


def has_nothing_but_a_band(problem: Problem) -> bool:
    """Whether rows of a size that the kernel has meet the keys of a band, as the product gave them."""
    p = problem
    plain = p.bias == "none" and p.dropout == "none" and not p.softcap and not p.has_blocked and not p.dim_rope
    return plain and p.empty_rows == "zero" and p.scale > 1e-30 and p.dim_qk == p.dim_v and p.dim_qk in TILES


def serves(problem: Problem, device: torch.device, tile: Tile) -> bool:
    """Whether the kernel computes what plain Triton would with a tile."""
    if not MEASURED or not tile.TMA or device.type != "cuda" or not has_nothing_but_a_band(problem):
        return False
    return torch.cuda.get_device_capability(device) == _CAPABILITY and kernel() is not None


def constants(problem: Problem, align: int) -> dict[str, Any]:
    """What the kernel knows while compiling; align: elements of which every row's start is a multiple."""
    p, tile = problem, TILES[problem.dim_qk]
    return {
        "GROUP": p.group, "SINK": p.has_sink, "DIM": p.dim_qk, "ALIGN": align, "BN": tile.BN,
        "STAGES": tile.num_stages, "REGISTERS": MULTIPLYING,
    }  # fmt: skip

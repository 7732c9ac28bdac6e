"""Selection of the Gluon kernel (Hopper GPUs) for a dense attention forward, and its compile-time constants."""

from typing import Any

import torch

from fusion_attention.backends.triton.common.shapes import TMA, Tile
from fusion_attention.ir.problem import Problem

# On an H100 this kernel is 1.2 to 1.3 times as fast as the Triton kernel for rows of 128 elements; for 64 it is not.
DIM = 128
TILE = Tile(128, 128, 4, 2, TMA)  # num_stages: buffers of each ring. One program takes the registers of a processor.
# Registers of a thread: at launch, and of a multiplying thread after the loading warp has released some.
OPTIONS = {"maxnreg": 168}
MULTIPLYING = 240
_CAPABILITY = (9, 0)  # only Hopper has wgmma


def kernel() -> Any:
    """Returns the Gluon forward kernel; None if the installed Triton has no Gluon for Hopper."""
    try:
        from fusion_attention.backends.triton.dense.gluon_forward import gluon_forward
    except (ImportError, AttributeError):
        return None
    return gluon_forward


def serves(problem: Problem, device: torch.device, tile: Tile) -> bool:
    """Returns True if the Gluon kernel can replace the Triton forward kernel with this tile shape: rows have the one
    dim that it supports, and nothing but a band masks or changes scores."""
    p = problem
    is_unmodified = p.bias == "none" and p.dropout == "none" and not p.softcap and not p.has_blocked and not p.dim_rope
    has_size = p.empty_rows != "mean" and p.scale > 1e-30 and p.dim_qk == p.dim_v == DIM
    if not tile.TMA or device.type != "cuda" or not is_unmodified or not has_size:
        return False
    return torch.cuda.get_device_capability(device) == _CAPABILITY and kernel() is not None


def constants(problem: Problem, align: int) -> dict[str, Any]:
    """Returns the compile-time arguments of the Gluon kernel; align: alignment of rows, in elements of q."""
    p = problem
    return {
        "GROUP": p.group, "SINK": p.has_sink, "MEAN": p.empty_rows != "zero", "DIM": DIM, "ALIGN": align, "BN": TILE.BN,
        "STAGES": TILE.num_stages, "REGISTERS": MULTIPLYING,
    }  # fmt: skip

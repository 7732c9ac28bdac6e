"""Runs a case on a GPU."""

import dataclasses
from typing import Any

import torch

from fusion_attention.ops.training.lowered_call import DenseCall
from fusion_attention.testing import Case, lowered, run


def copied(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Copies a tensor with its whole storage to the GPU, so that strides and NaN in gaps remain."""
    if tensor is None:
        return None
    everything = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return everything.cuda().as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def moved(call: DenseCall) -> DenseCall:
    tensors = {name: copied(getattr(call, name)) for name in ("q", "k", "v")}
    return dataclasses.replace(call, **tensors, extras=tuple(map(copied, call.extras)))


def on_gpu(case: Case, args: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Computes results and gradients of a case on the GPU."""
    dy = copied(args["dy"])
    assert dy is not None
    result = run(moved(lowered(case, args)), dy, "auto")
    return {name: tensor.cpu() for name, tensor in result.items()}

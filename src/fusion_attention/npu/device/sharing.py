"""Pickling of tensors on "npu" for other processes, which share the memory, as with tensors of the computing device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from fusion_attention.patches import Changes, Layer

Tensor = torch.Tensor


def enter(changes: Changes) -> None:
    """Makes queues, pipes and the workers of a DataLoader accept tensors on "npu", until the patches are removed."""
    for kind in (Tensor, torch.nn.Parameter):
        changes.wrap(ForkingPickler._extra_reducers, kind, _reducing)  # type: ignore[arg-type, attr-defined]


def _reducing(layer: Layer) -> Callable[[Tensor], Any]:
    """Wraps the pickler's function for tensors: a tensor on "npu" is sent as memory that both processes share."""

    @functools.wraps(layer.below)
    def reduce(tensor: Tensor) -> Any:
        if tensor.device.type != "npu":
            return layer.below(tensor)
        if tensor.requires_grad and not tensor.is_leaf:
            return layer.below(tensor)  # torch's own error
        alias = torch.ops.fusion_attention_npu.to_base(tensor.detach()).share_memory_()
        tensor.detach()  # any operator makes the tensor's storage follow its memory, which has moved
        return _rebuilt, (alias, tensor.device.index, type(tensor) is torch.nn.Parameter, tensor.requires_grad)

    return reduce


def _rebuilt(alias: Tensor, number: int, parameter: bool, requires_grad: bool) -> Tensor:
    """Returns the received tensor: on "npu:{number}", in the memory of `alias`; parameter: as an nn.Parameter."""
    if not torch.accelerator.is_available() or torch.accelerator.current_accelerator() != torch.device("npu"):
        raise RuntimeError(
            'device "npu": expected fusion_attention.npu.install() in the process that receives the tensor, got none '
            "(call install() there first, or start the program with python -m fusion_attention.npu)"
        )
    with torch.npu.device(number):  # type: ignore[attr-defined]
        tensor: Tensor = torch.ops.fusion_attention_npu.to_npu(alias, [])
    return torch.nn.Parameter(tensor, requires_grad) if parameter else tensor.requires_grad_(requires_grad)

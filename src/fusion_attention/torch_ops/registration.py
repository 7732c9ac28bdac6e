"""Registration of operators with torch: implementations, also for fake tensors, autograd and vmap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fusion_attention.torch_ops.autograd_guards import below, no_tangents, once

_LIBRARY = torch.library.Library("fusion_attention", "DEF")


def register(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    autograd: Callable[..., Any] | None = None,
    library: torch.library.Library = _LIBRARY,
    keys: tuple[str, ...] = ("CPU", "CUDA"),
) -> None:
    """Registers a torch operator: its schema, an implementation (run) for the devices `keys`, a fake implementation for
    traces, and autograd; without `autograd` the operator computes gradients, and differentiating it raises."""
    name = schema.partition("(")[0]
    library.define(schema)
    for key in keys:
        library.impl(name, run, key)
    torch.library.register_fake(f"{library.ns}::{name}", fake, lib=library)
    library.impl(name, autograd or _once_of(name), "Autograd")
    library.impl(name, _no_vmap, "FuncTorchBatched")


def _once_of(operator: str) -> Callable[..., list[torch.Tensor]]:
    """Returns the autograd implementation of an operator that computes gradients: differentiating these raises."""

    def call(*args: Any) -> list[torch.Tensor]:
        tensors = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
        no_tangents(tensors)

        def compute() -> list[torch.Tensor]:
            with below():
                result: list[torch.Tensor] = getattr(torch.ops.fusion_attention, operator)(*args)
                return result

        return list(once(compute, tensors))  # type: ignore[arg-type]

    return call


def _no_vmap(*args: Any) -> Any:
    """Raises NotImplementedError; it is the implementation of torch.vmap for operators that do not support it."""
    raise NotImplementedError(
        "fusion_attention: vmap is not supported: make the mapped axis part of the batch axis of one call"
    )

"""Registration of our operators with torch: kernels, fakes, autograd and vmap."""

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
    """Registers an operator.

    Args:
        schema: its name and arguments, as torch.library wants them.
        run: computes it, on every device that has memory.
        fake: its results without values.
        autograd: what notes its derivative; None where it computes gradients, which have none.
        library: whose operator it is.
        keys: the devices that have memory.
    """
    name = schema.partition("(")[0]
    library.define(schema)
    for key in keys:
        library.impl(name, run, key)
    torch.library.register_fake(f"{library.ns}::{name}", fake, lib=library)
    library.impl(name, autograd or _once_of(name), "Autograd")
    library.impl(name, _no_vmap, "FuncTorchBatched")


def _once_of(operator: str) -> Callable[..., list[torch.Tensor]]:
    """What autograd calls for an operator of ours that computes gradients."""

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
    """What answers torch.vmap."""
    raise NotImplementedError(
        "fusion_attention: vmap is not supported: make the mapped axis part of the batch axis of one call"
    )

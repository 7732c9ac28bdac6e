"""Compares compiled functions with eager ones (one graph, same bits of results and gradients); records operators."""

from collections.abc import Callable
from typing import Any

import torch
from support.bits import same_bits
from torch.utils._python_dispatch import TorchDispatchMode

Tensors = tuple[torch.Tensor, ...]


def draw(*shape: int, seed: int = 0, count: int = 3) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator).requires_grad_() for _ in range(count))


def compiled(function: Callable[..., Any], **options: Any) -> tuple[Callable[..., Any], list[int]]:
    """Returns the function compiled as one graph, and a list to which every compiled graph appends an item."""
    graphs: list[int] = []

    def backend(module: Any, inputs: Any) -> Any:
        graphs.append(len(inputs))
        return torch._dynamo.lookup_backend("aot_eager")(module, inputs)

    return torch.compile(function, fullgraph=True, backend=backend, **options), graphs


def same(function: Callable[..., Any], other: Callable[..., Any], leaves: Tensors, *rest: Any) -> None:
    """Asserts that both functions return the same bits and have gradients with the same bits."""
    one, two = function(*leaves, *rest), other(*leaves, *rest)
    same_bits(one, two)
    weight = torch.linspace(-1, 1, one.numel()).view_as(one)
    same_bits(torch.autograd.grad(one, leaves, weight), torch.autograd.grad(two, leaves, weight))


class Recorder(TorchDispatchMode):
    """Records the operators that run, with their arguments; the active mode makes the interfaces call operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[torch._ops.OpOverload, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fusion_attention":
            assert not kwargs
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))

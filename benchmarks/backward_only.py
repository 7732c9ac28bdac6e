"""Gradients of a result, computed any number of times."""

import functools
from collections.abc import Callable

import torch

Call = Callable[[], object]


def gradient(forward: Callable[[], torch.Tensor], leaves: tuple[torch.Tensor, ...]) -> Call:
    """Returns a function that computes gradients; its first call, which is no measurement, computes the forward. So the
    errors of a peer, such as too little memory, count for its row and do not end the run."""
    calls: list[Call] = []

    def call() -> object:
        if not calls:
            out = forward()
            calls.append(functools.partial(torch.autograd.grad, out, leaves, torch.randn_like(out), retain_graph=True))
        return calls[0]()

    return call

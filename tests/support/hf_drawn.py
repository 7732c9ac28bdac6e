"""Models of transformers in float64, and many copies of one at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from support.hf_models import Family

Tensor = torch.Tensor


class Float64Torch:
    """torch, in which what is called float32 is float64: their modules go through float32 in any dtype."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextlib.contextmanager
def in_float64(family: Family) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(family.module, "torch", Float64Torch())
        patch.setattr(Tensor, "float", Tensor.double)
        yield


def parameters_together(model: Any, count: int) -> dict[str, Tensor]:
    """A copy of every parameter that is trained for each of many models."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return {name: p.detach().expand(count, *p.shape).clone().requires_grad_() for name, p in trained.items()}


def together(
    model: Any, parameters: Mapping[str, Tensor], batch: Mapping[str, Any], output: Callable[[Any], Any]
) -> Any:
    """output(model(**batch)) of every copy."""

    def one(weights_of_item: Mapping[str, Tensor]) -> Any:
        return output(torch.func.functional_call(model, weights_of_item, (), dict(batch)))

    return torch.vmap(one)(dict(parameters))

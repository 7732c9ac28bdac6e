"""Models of transformers in float64, and how large their errors are: many copies of a model at once, each with errors.

As testing.drawn, whose programs run once per draw: most of the time of a tiny model is spent between its operations.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from support.hf_models import Family
from torch.nn.attention import SDPBackend, sdpa_kernel

from fusion_attention.judging.error_bound import Expected
from fusion_attention.testing import compare
from fusion_attention.testing.roundings import Roundings, quantum

Tensor = torch.Tensor
DRAWS = 12


class Wide:
    """torch, in which what is called float32 is float64: their modules go through float32 in any dtype."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextlib.contextmanager
def wide(family: Family) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(family.module, "torch", Wide())
        patch.setattr(Tensor, "float", Tensor.double)
        yield


def expected_together(program: Callable[[int], Mapping[str, Tensor]], dtype: torch.dtype) -> dict[str, Expected]:
    """What a program in float64 computes, and how large its errors are in a dtype.

    Args:
        program: of a number of copies: results [copies, ..] by name, each of which shares no operation with another.
        dtype: in which the results of operations are rounded.
    """
    found = {}
    with sdpa_kernel(SDPBackend.MATH):
        values = program(1)
        with Roundings(dtype, torch.Generator().manual_seed(0)):
            moved = program(DRAWS)
    assert values.keys() == moved.keys()
    for name, value in values.items():
        value = value.detach().double()[0]
        drawn = (moved[name].detach().double() - value).masked_fill(~value.isfinite(), 0).square().mean(0)
        stored = (torch.finfo(dtype).eps / 2 * value.masked_fill(~value.isfinite(), 0)).square() / 3
        found[name] = Expected(value, (drawn + stored + quantum(dtype) ** 2 / 12).sqrt(), DRAWS)
    return found


def check(ours: Mapping[str, Tensor], expected: Mapping[str, Expected]) -> None:
    assert ours.keys() == expected.keys()
    for name, wanted in expected.items():
        compare(name, ours[name].detach(), wanted)


def parameters_together(model: Any, count: int) -> dict[str, Tensor]:
    """A copy of every parameter that is trained for each of many models."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return {name: p.detach().expand(count, *p.shape).clone().requires_grad_() for name, p in trained.items()}


def together(
    model: Any, parameters: Mapping[str, Tensor], batch: Mapping[str, Any], output: Callable[[Any], Any]
) -> Any:
    """output(model(**batch)) of every copy."""

    def one(own: Mapping[str, Tensor]) -> Any:
        return output(torch.func.functional_call(model, own, (), dict(batch)))

    return torch.vmap(one)(dict(parameters))

"""Families by name; drawing a call from a number, its expected results, and the comparison."""

import importlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fusion_attention import ContractWarning

FAMILIES = ("attention", "training", "decode", "infer", "sparse", "indexer", "loss")
Tensor = torch.Tensor
Results = dict[str, Tensor]


@dataclass(frozen=True)
class Value:
    """Expected value and largest allowed error, float64 tensors of one shape; dtype: required dtype of the result."""

    value: Tensor
    error: Tensor
    dtype: torch.dtype | None = None


def exact(value: Tensor) -> Value:
    """Returns a value that a result must equal bit by bit, except for the sign of 0."""
    return Value(value.double(), torch.zeros_like(value, dtype=torch.float64), value.dtype)


@dataclass(frozen=True)
class Drawn:
    """A call: run() makes it, expect(results) returns expected values (those of gradients depend on saved results)."""

    about: Mapping[str, Any]
    run: Callable[[], Results]
    expect: Callable[[Results], Mapping[str, Value]]


class Mismatch(AssertionError):
    """A result outside the error bounds."""


def compare(got: Mapping[str, Tensor], expected: Mapping[str, Value]) -> None:
    """Raises Mismatch if a result exceeds its error bound; reports the worst element of the first such result."""
    if missing := expected.keys() - got.keys():
        raise Mismatch(f"no {sorted(missing)} came back")
    for name, want in expected.items():
        have = got[name]
        if have.shape != want.value.shape:
            raise Mismatch(f"{name}: shape {list(have.shape)} for {list(want.value.shape)}")
        if want.dtype is not None and have.dtype != want.dtype:
            raise Mismatch(f"{name}: {have.dtype} for {want.dtype}")
        value, mine = want.value, have.detach().double()
        same = (mine == value) | (mine.isnan() & value.isnan())
        off = (mine - value).abs()
        wrong = ~(same | (off <= want.error))
        if bool(wrong.any()):
            beyond = torch.where(wrong, off.nan_to_num(torch.inf) / want.error.clamp_min(1e-300), 0.0)
            at = tuple(int(n) for n in np.unravel_index(int(beyond.argmax()), tuple(beyond.shape)))
            raise Mismatch(
                f"{name}{list(at)}: expected {value[at]:.9g} to within {want.error[at]:.3g}, got {mine[at]:.9g} "
                f"(off by {off[at]:.3g}; {int(wrong.sum())} of {wrong.numel()} elements are wrong)"
            )


def judge(call: Drawn) -> None:
    """Makes a call and compares its results; an error of a call is a failure, because all drawn calls are legal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ContractWarning)
        got = call.run()
    compare(got, call.expect(got))


def drawn(family: str, number: int) -> Drawn:
    """Draws call `number` of a family; equal numbers draw equal calls."""
    rng = np.random.default_rng([*family.encode(), number])
    return importlib.import_module(f".{family}", __package__).draw(rng)  # type: ignore[no-any-return]


def description(about: Mapping[str, Any]) -> str:
    """Describes a call: names, and tensors by dtype, shape, strides and offset."""
    return "\n".join(f"  {name} = {_describe(value)}" for name, value in about.items() if value is not None)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        where = f"strides {list(value.stride())}, offset {value.storage_offset()}"
        small = f" = {value.detach().tolist()}" if value.numel() <= 8 else ""
        return f"{kind} {list(value.shape)}, {where}{', requires grad' * value.requires_grad}{small}"
    if isinstance(value, (list, tuple)) and any(isinstance(member, Tensor) for member in value):
        return "[" + "; ".join(_describe(member) for member in value) + "]"
    return repr(value)

"""Compares tensors bit by bit: -0 differs from 0, and a NaN equals only a NaN with the same payload."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Returns True if two tensors have the same dtype, shape and bits; strides may differ."""
    return got.dtype == want.dtype and got.shape == want.shape and not _differ(got, want).any()


def same_bits(got: Any, want: Any, what: str = "") -> None:
    """Asserts same() for two tensors, or for all tensors in two dictionaries, lists or tuples of the same form."""
    if isinstance(want, Mapping):
        assert isinstance(got, Mapping), what
        assert got.keys() == want.keys(), what
        for name in want:
            same_bits(got[name], want[name], f"{what} {name}")
    elif isinstance(want, Sequence):
        assert isinstance(got, Sequence), what
        assert len(got) == len(want) > 0, what
        for i, value in enumerate(want):
            same_bits(got[i], value, f"{what}[{i}]")
    else:
        assert isinstance(got, torch.Tensor), what
        assert (got.dtype, got.shape) == (want.dtype, want.shape), what
        if (differ := _differ(got, want)).any():
            at = tuple(differ.nonzero()[0].tolist())
            raise AssertionError(f"{what}: {int(differ.sum())} elements, first {at}: {got[at]!r}, not {want[at]!r}")


def same_where_not_finite(got: Mapping[str, Sequence[torch.Tensor]], want: Any, what: str) -> None:
    """Asserts that the results of two calls have NaN, inf and -inf in the same places; dtypes may differ."""
    for name in got:
        for b, (one, other) in enumerate(zip(got[name], want[name], strict=True)):
            assert torch.equal(one.isnan(), other.isnan()), (what, name, b)
            assert torch.equal(one.isinf(), other.isinf()), (what, name, b)
            assert torch.equal(one[one.isinf()].double(), other[other.isinf()]), (what, name, b)


def _differ(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    one, other = (t.detach().contiguous().view(size) for t in (got, want))
    return one != other

"""compare() and check(): compare results with the float64 reference's, relative to the expected rounding errors."""

from collections.abc import Iterator, Mapping

import numpy as np
import torch

from fusion_attention.judging.chi_square_limits import Errors, Expected, ratios
from fusion_attention.judging.standards import FLT_MAX
from fusion_attention.testing.cases import Tensor

__all__ = ["check", "compare"]


def compare(name: str, ours: Tensor, expected: Expected) -> None:
    """Asserts that a result differs from the float64 reference's only by rounding: per element, row, tile and overall.

    Args:
        name: name of the output, for the message.
        ours: the result.
        expected: the reference's values, with the expected size of each element's rounding error.

    Raises:
        AssertionError: the message has the output, the elements that fail, coordinates and values.
    """
    value = expected.value
    assert ours.shape == value.shape == expected.size.shape, f"{name}: shapes {ours.shape}, {value.shape}"
    if not value.numel():
        return
    words = value.abs() == FLT_MAX  # statistics of rows without keys, which must be exact
    assert torch.equal(ours[words].double(), value[words]), (
        f"{name}: expected {FLT_MAX:.6g}, or minus that, where a row has no keys"
    )
    result = ratios(ours, value, expected.size)
    for arranged in _arranged(result):
        rows = arranged.reshape(1, -1, arranged.shape[-1])
        errors = Errors([rows.shape[1]], 1, rows.shape[2])
        errors.add(0, slice(0, 1), slice(0, rows.shape[1]), rows)
        failing = errors.fails(expected.draws)
        if failing:
            look = failing[0][1]
            at = tuple(int(n) for n in np.unravel_index(int(result.argmax()), tuple(result.shape)))
            raise AssertionError(
                f"{name}: the error of a {look.kind} is {look.z:.3g} of its expected size, more than {look.limit:.3g}; "
                f"most at {list(at)}: ours {float(ours[at]):.9g}, golden {float(value[at]):.9g}, expected error "
                f"{float(expected.size[at]):.3g}"
            )


def _arranged(tensor: Tensor) -> Iterator[Tensor]:
    """Yields a tensor [a, b, d] and its view [b, a, d], as consecutive rows, which form tiles, differ in b or a."""
    tensor = tensor.reshape(-1, 1) if tensor.dim() < 2 else tensor
    yield tensor
    if tensor.dim() > 2 and min(tensor.shape[:-1]) < tensor.shape[:-1].numel():
        yield tensor.permute(*reversed(range(tensor.dim() - 1)), tensor.dim() - 1)


def check(name: str, ours: Mapping[str, Tensor], expected: Mapping[str, Expected]) -> None:
    """Asserts that every result differs from the float64 reference's only by rounding errors.

    Args:
        name: name of the call, for the message.
        ours: results by name. expected: the reference's values, with the expected sizes of rounding errors, by name.
    """
    assert ours.keys() == expected.keys(), f"{name}: {[*ours]}, {[*expected]}"
    for output, wanted in expected.items():
        compare(f"{name}: {output}", ours[output], wanted)

"""How large the errors of a program are, found by running many copies of it at once, each with errors of its own.

As testing.drawn, whose programs run once per draw: where numbers are few, most of the time is spent between operations.
"""

from collections.abc import Callable, Mapping

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from fusion_attention.judging.error_bound import Expected
from fusion_attention.testing import compare
from fusion_attention.testing.roundings import Roundings, quantum

Tensor = torch.Tensor
DRAWS = 12


def expected_together(program: Callable[[int], Mapping[str, Tensor]], dtype: torch.dtype) -> dict[str, Expected]:
    """What a program in float64 computes, and how large its errors are in a dtype.

    Args:
        program: of a number of copies: results [copies, ..] by name, each of which shares no operation with another.
        dtype: in which the results of operations are rounded.
    """
    results = {}
    with sdpa_kernel(SDPBackend.MATH):
        values = program(1)
        with Roundings(dtype, torch.Generator().manual_seed(0)):
            moved = program(DRAWS)
    assert values.keys() == moved.keys()
    for name, value in values.items():
        value = value.detach().double()[0]
        drawn = (moved[name].detach().double() - value).masked_fill(~value.isfinite(), 0).square().mean(0)
        stored = (torch.finfo(dtype).eps / 2 * value.masked_fill(~value.isfinite(), 0)).square() / 3
        results[name] = Expected(value, (drawn + stored + quantum(dtype) ** 2 / 12).sqrt(), DRAWS)
    return results


def check(ours: Mapping[str, Tensor], expected: Mapping[str, Expected]) -> None:
    assert ours.keys() == expected.keys()
    for name, wanted in expected.items():
        compare(name, ours[name].detach(), wanted)

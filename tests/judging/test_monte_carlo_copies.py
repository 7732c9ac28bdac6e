"""Monte Carlo copies of a program's tensors: error-free operations treat each copy like a single tensor."""

from collections.abc import Callable

import pytest
import torch
from support.bits import same_bits

from fusion_attention.testing.monte_carlo_arithmetic import Copies, Noise, Roundings

Tensor = torch.Tensor
ROWS = torch.tensor([2, 0, 2])
EXACT: dict[str, Callable[[Tensor], Tensor]] = {
    "transpose": lambda x: x.mT.contiguous(),
    "index": lambda x: x[:, ROWS],
    "index_select": lambda x: x.index_select(1, ROWS),
    "gather": lambda x: x.gather(-1, x.argsort(-1)),
    "sort": lambda x: x.sort(-1).values,
    "topk": lambda x: x.topk(2, -1).values,
    "amax": lambda x: x.amax(0),
    "cat": lambda x: torch.cat((x, -x[1:]), 0),
    "where": lambda x: torch.where(x > 0.77, x, x.new_zeros(())),
    "masked_fill": lambda x: x.masked_fill(x < 0.77, -torch.inf),
    "pad": lambda x: torch.nn.functional.pad(x, (1, 2)),
    "embedding": lambda x: torch.nn.functional.embedding(ROWS, x[0]),
    "roll": lambda x: x.roll(1, 0),
    "clamp": lambda x: x.clamp(min=0.77),
}


@pytest.fixture
def copies() -> Copies:
    return Copies(5)


@pytest.fixture
def mode(copies: Copies) -> Roundings:
    return Roundings(torch.bfloat16, copies, Noise(3))


@pytest.mark.parametrize("name", EXACT)
def test_exact_operations_are_applied_to_every_copy(name: str, copies: Copies, mode: Roundings) -> None:
    with mode:
        x = torch.full((3, 4, 5), 0.7, dtype=torch.float64) * 1.1  # errors alone order the elements of a copy
        result = EXACT[name](x)
    before, after = copies.of(x), copies.of(result)
    assert before is not None
    assert after is not None
    assert len({copy.numpy().tobytes() for copy in before}) == copies.count
    for one, other in zip(before, after, strict=True):
        same_bits(other.contiguous(), EXACT[name](one).contiguous())
    same_bits(result, EXACT[name](x))


def test_writing_to_a_view_changes_the_copies_of_the_base(copies: Copies, mode: Roundings) -> None:
    with mode:
        x = torch.randn(4, 6, dtype=torch.float64) * 1.1
        before = copies.writable(x).clone()
        x[1:, ::2].mul_(1.3)
    after = copies.of(x)
    assert after is not None
    same_bits(after[:, 0], before[:, 0])
    same_bits(after[:, 1:, 1::2].contiguous(), before[:, 1:, 1::2].contiguous())
    assert (after[:, 1:, ::2] != before[:, 1:, ::2]).all()


def test_overwritten_elements_have_no_rounding_errors(copies: Copies, mode: Roundings) -> None:
    with mode:
        x = torch.randn(4, 6, dtype=torch.float64) * 1.1
        x[0] = 2.5
        x[1].zero_()
        x[2].copy_(torch.arange(6.0, dtype=torch.float64))
    after = copies.of(x)
    assert after is not None
    same_bits(after[:, :3].contiguous(), x[:3].expand(copies.count, -1, -1).contiguous())
    assert (after[:, 3] != x[3]).any()

"""Types of planted faults: a call with wrong results, and edits of results after they are computed."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from fusion_attention.judging.judge import diagnose
from fusion_attention.judging.verdict import Judgement

Tensor = torch.Tensor


@dataclass(frozen=True)
class Capture:
    """A call with its results."""

    operator: str
    inputs: dict[str, Any]
    outputs: dict[str, Tensor]

    def diagnosed(self) -> Judgement:
        return diagnose(self.operator, self.inputs, self.outputs)


# A call with a fault, names of the mistakes that describe the fault, texts of the fault's parameters in the diagnosis.
Planted = tuple[Capture, tuple[str, ...], tuple[str, ...]]
C = TypeVar("C")
R = TypeVar("R")
P = ParamSpec("P")
# Changes a result [B, heads, rows, elements] in place; returns the text of the change's parameters in the diagnosis.
Edit = Callable[[Tensor, random.Random], str]


def fault(program: Callable[Concatenate[C, P], R]) -> Callable[P, Callable[[C], R]]:
    """Splits the parameters of a fault's function: f(call, a, b) becomes f(a, b)(call)."""

    def given(*parameters: P.args, **options: P.kwargs) -> Callable[[C], R]:
        return lambda call: program(call, *parameters, **options)

    return given


def moved(change: Callable[[Tensor], Tensor], word: str) -> Edit:
    def edit(result: Tensor, rng: random.Random) -> str:
        result.copy_(change(result))
        return word

    return edit


def shifted_rows(*distances: int) -> Edit:
    def edit(result: Tensor, rng: random.Random) -> str:
        by = rng.choice(distances)
        result.copy_(result.roll(by, 2))
        return f"row r {'-' if by > 0 else '+'} {abs(by)}"

    return edit


def rolled_columns(result: Tensor, rng: random.Random) -> str:
    by = rng.choice([1, 4, 8])
    result.copy_(result.roll(by, 3))
    return f"columns rolled by {by}"


def head_factor(result: Tensor, rng: random.Random) -> str:
    by = rng.choice([0.5, 2.0, -1.0])
    result[:, rng.randrange(result.shape[1])] *= by
    return f"{by:g} times"


def zero_tail(result: Tensor, rng: random.Random) -> str:
    result[:, :, result.shape[2] // 16 * 16 - 16 :] = 0
    return ""

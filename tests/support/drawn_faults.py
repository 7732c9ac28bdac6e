"""Draws faults and correct results from all families of planted programs, and judges them."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from support import (
    faulty_list_kernels,
    planted_compressed,
    planted_decodes,
    planted_dense,
    planted_gradients,
    planted_tiles,
    right_gradients,
    right_results,
)
from support.planted import Capture
from torch.overrides import TorchFunctionMode

from fusion_attention.judging.calls import Recorded
from fusion_attention.judging.judge import diagnose, judged
from fusion_attention.judging.verdict import Judgement

Tensor = torch.Tensor
Program = Callable[[int], tuple[Capture | Recorded, tuple[str, ...], tuple[str, ...]]]
LOW = torch.bfloat16


class Roundings(TorchFunctionMode):
    """Replaces rounding to any dtype by rounding to bfloat16, with errors `times` as large.

    The error of rounding is uniform over the distance of two adjacent numbers; a normal error is added before it.
    """

    def __init__(self, times: float, seed: int) -> None:
        super().__init__()
        self.more = ((times**2 - 1) / 12) ** 0.5
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        to = args[1] if func is Tensor.to and len(args) > 1 else None
        if not isinstance(to, torch.dtype) or not to.is_floating_point or args[0].dtype == LOW:
            return func(*args, **(kwargs or {}))
        x = args[0].double()
        distance = torch.ldexp(torch.ones_like(x), torch.frexp(x).exponent - 8).where(x != 0, 0.0)
        return (x + self.more * distance * torch.randn(x.shape, generator=self.generator, dtype=x.dtype)).to(LOW)


def kinds(low: bool) -> dict[str, Program]:
    """Returns the faults by name; low: only faults of cases in bfloat16."""
    modules = [planted_tiles, planted_gradients, planted_decodes, faulty_list_kernels]
    modules += [] if low else [planted_compressed]  # its model is in float32
    results: dict[str, Program] = {
        f"{module.__name__.rpartition('planted_')[2]}: {fault}": partial(module.planted, fault)
        for module in modules
        for fault in module.FAULTS
    }
    return results | {f"calls: {name}": partial(planted_dense.planted, name, low=low) for name in planted_dense.FAULTS}


@dataclass(frozen=True)
class Named:
    """A drawn fault and its verdict.

    Attributes:
        family: True if the first explanation is correct.
        parameters: True if one of the explanations has the correct parameters.
        has_parameters: True if the fault has parameters.
        wrongly: True if all explanations are wrong.
    """

    fault: str
    family: bool
    parameters: bool
    has_parameters: bool
    wrongly: bool
    verdict: Judgement


def _verdict(call: Capture | Recorded) -> Judgement:
    if isinstance(call, Recorded):
        return judged(call, search=True, backends=False)
    return diagnose(call.operator, call.inputs, call.outputs)


def faults(count: int, seed: int, noise: float) -> Iterator[Named]:
    """Yields random faults; noise: factor of the errors of rounding, in bfloat16; 1: faults in any dtype."""
    rng, drawn = random.Random(seed), kinds(noise != 1)
    for _ in range(count):
        fault, number = rng.choice([*drawn]), rng.randrange(1000)
        with nullcontext() if noise == 1 else Roundings(noise, number):
            call, names, words = drawn[fault](number)
        result = _verdict(call)
        named = [m.name in names for m in result.mistakes]
        exact = any(m.name in names and all(word in m.detail for word in words) for m in result.mistakes)
        yield Named(
            f"{fault}, {number}", named[:1] == [True], exact, any(words), bool(named) and not any(named), result
        )


def rights(count: int, seed: int) -> Iterator[tuple[str, Judgement]]:
    """Yields random correct results and their verdicts."""
    rng = random.Random(seed)
    sources: dict[str, Callable[[int], tuple[str, Judgement]]] = {
        "forward": right_results.right,
        "backward": right_gradients.right,
        "tiles": lambda n: ("", _verdict(planted_tiles.right(n))),
        "decode": lambda n: ("", _verdict(planted_decodes.right(n))),
        "lists": lambda n: ("", _verdict(faulty_list_kernels.right(n))),
        "calls": lambda n: ("", _verdict(planted_dense.right(n))),
    }
    for _ in range(count):
        source, number = rng.choice([*sources]), rng.randrange(100_000)
        what, result = sources[source](number)
        yield f"{source} {number} {what}", result

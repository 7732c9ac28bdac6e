"""Draw planted faults and right results, and print the fractions that the judge names and that it falsely rejects.

python -m tests.judging --faults 200                 # of all dtypes
python -m tests.judging --faults 200 --noise 1.5     # bfloat16 with roundings 1.5 times as large
python -m tests.judging --right 1000
"""

import argparse
import random
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

sys.path.insert(0, str(Path(__file__).parents[1]))
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
from support.planted import Planted

from fusion_attention.judging.verdict import Judgement

Tensor = torch.Tensor
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


def kinds(low: bool) -> dict[str, Callable[[int], Planted]]:
    """Returns the faults by name; low: only faults of cases in bfloat16."""
    modules = [planted_tiles, planted_gradients, planted_decodes, faulty_list_kernels]
    modules += [] if low else [planted_compressed]  # its model is in float32
    results: dict[str, Callable[[int], Planted]] = {
        f"{module.__name__.rpartition('planted_')[2]}: {fault}": partial(module.planted, fault)
        for module in modules
        for fault in module.FAULTS
    }
    return results | {f"calls: {name}": partial(planted_dense.planted, name, low=low) for name in planted_dense.FAULTS}


def _write(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _faults(count: int, seed: int, noise: float) -> None:
    """Judges random faults; noise: factor of the errors of rounding, in bfloat16; 1: faults in any dtype."""
    rng, drawn = random.Random(seed), kinds(noise != 1)
    first = detailed = exact = wrongly = 0
    for _ in range(count):
        fault, number = rng.choice([*drawn]), rng.randrange(1000)
        with nullcontext() if noise == 1 else Roundings(noise, number):
            call, names, words = drawn[fault](number)
        result = call.diagnosed()
        named = [m for m in result.mistakes if m.name in names]
        is_first = bool(named) and result.mistakes[0] is named[0]
        is_exact = any(all(word in m.detail for word in words) for m in named)
        first, wrongly = first + is_first, wrongly + (bool(result.mistakes) and not named)
        detailed, exact = detailed + any(words), exact + (any(words) and is_exact)
        if not is_first or (any(words) and not is_exact):
            _write(f"{fault}, {number}: {result.verdict}: {'; '.join(map(str, result.mistakes)) or 'no mistake'}")
    _write(f"{count} faults: {first} named first, {exact} of {detailed} with their parameters, {wrongly} named wrongly")


def _right(count: int, seed: int) -> None:
    """Judges random correct results."""
    rng, accused = random.Random(seed), 0
    modules = {"tiles": planted_tiles, "decode": planted_decodes, "lists": faulty_list_kernels, "calls": planted_dense}
    sources: dict[str, Callable[[int], tuple[str, Judgement]]] = {
        "forward": right_results.right, "backward": right_gradients.right,
        **{name: lambda n, module=module: ("", module.right(n).diagnosed()) for name, module in modules.items()},
    }  # fmt: skip
    for _ in range(count):
        source, number = rng.choice([*sources]), rng.randrange(100_000)
        program, result = sources[source](number)
        if result.verdict != "right":
            accused += 1
            _write(f"{source} {number} {program}: {result}")
    _write(f"{count} right results: {accused} accused")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("faults", "right"):
        parser.add_argument(f"--{name}", type=int, default=0, metavar="COUNT")
    parser.add_argument("--noise", type=float, default=1.0, help="of bfloat16, in a good kernel's")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "flex_attention called without")
    torch.set_num_threads(1)
    if options.faults:
        _faults(options.faults, options.seed, options.noise)
    if options.right:
        _right(options.right, options.seed)


if __name__ == "__main__":
    main()

"""Standards for correct outputs: the error bound, and the criteria that CANN publishes for tests of its operators.

Outputs are processed block by block, so that no complete float64 copy is in memory.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from fusion_attention.judging.chi_square_limits import Errors, Look, ratios
from fusion_attention.judging.outputs import Wanted

Tensor = torch.Tensor
FLT_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Judged:
    """The result of one standard, the error bound or a criterion of CANN's tests, for one output tensor."""

    standard: str  # the standard's name
    passes: bool  # True if the output is correct by it
    reason: str = ""  # the reason of a failure; "" if it passes


class Marks(NamedTuple):
    """Properties of rows of one sequence of an output, each [heads, rows]: nan, infinite and zero (bool) are true for a
    row with NaN, with infinities, and of zeros only; golden (float64): marked() of the exact result's row."""

    nan: Tensor
    infinite: Tensor
    zero: Tensor
    golden: Tensor


def marked(rows: Tensor) -> Tensor:
    """Returns float64 [..] for rows [.., elements]: products with a fixed vector; equal rows have equal products."""
    return rows @ torch.arange(rows.shape[-1], dtype=torch.float64).cos()


_MARKS = (torch.bool, torch.bool, torch.bool, torch.float64)


@dataclass(eq=False)
class Tally:
    """The errors of an output against the exact (float64) result, accumulated over ranges of its rows."""

    dtype: torch.dtype  # the output's dtype
    errors: Errors  # squared ratios of errors to their expected sizes
    terms: int = 1  # number of terms of the longest sum
    count: int = 0  # number of elements
    strange: int = 0  # number of elements that are finite in only one of output and exact result
    huge: int = 0  # number of elements for which the exact result exceeds float32's range and the output does not
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])  # sum, sum of squares and largest of errors
    # Sum of the baseline's squared errors, and the largest exact value.
    baseline: list[float] = field(default_factory=lambda: [0.0, 0.0])
    size: float = 0.0  # sum of the exact values' squares
    beyond: int = 0
    # Sum and largest of our relative errors, then of the baseline's.
    relative: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0, 0.0])
    small: list[int] = field(default_factory=lambda: [0, 0])
    # (sequence, head, row, element, output's value, exact value, expected error) at the largest ratio.
    worst: tuple[int, int, int, int, float, float, float] | None = None
    peak: float = 0.0
    # Per sequence, rows with NaN, infinities or only zeros where the exact result has none, and marked() of its rows.
    marks: list[Marks] = field(default_factory=list)

    def add(self, place: tuple[int, slice, slice] | None, ours: Tensor, wanted: Wanted) -> None:
        """Adds the errors of a range of the output, `ours` [heads, rows, elements], against the exact values and the
        variances of expected errors in `wanted`. place: the range's (index of the sequence, slice of heads, slice of
        rows); None for sampled rows, whose errors need no positions."""
        value = wanted.value.double()
        if not value.numel():
            return
        size = wanted.variance.sqrt()
        result = ratios(ours, value, size)
        if place is None:
            self.errors.append(result)
        else:
            self.errors.add(*place, result)
            self._mark(*place, ours.double(), value)
        largest = float(result.amax())
        if largest > self.peak:
            head, row, element = (int(n) for n in np.unravel_index(int(result.argmax()), result.shape))
            b, first, start = (0, 0, 0) if place is None else (place[0], place[1].start or 0, place[2].start or 0)
            mine, golden, least = (float(t[head, row, element]) for t in (ours, value, size))
            self.peak, self.worst = largest, (b, head + first, row + start, element, mine, golden, least)
        self.strange += int(result.isinf().sum()) if math.isinf(largest) else 0
        self._magnitudes(ours.double(), value, wanted.baseline)

    def _mark(self, b: int, heads: slice, rows: slice, mine: Tensor, value: Tensor) -> None:
        if not self.marks:
            self.marks = [Marks(*(torch.zeros(p.shape, dtype=d) for d in _MARKS)) for p in self.errors.peaks]
        results = (
            (mine.isnan() & ~value.isnan()).any(-1),
            (mine.isinf() & (mine != value)).any(-1),
            (mine == 0).all(-1) & (value != 0).any(-1),
            marked(value.nan_to_num(0.0, 0.0, 0.0)),
        )
        for mark, new in zip(self.marks[b], results, strict=True):
            mark[heads, rows] = new

    def _magnitudes(self, mine: Tensor, value: Tensor, baseline: Tensor | None) -> None:
        """Adds the absolute errors of a range of the output to the totals, and the counts and relative errors that the
        criteria of CANN's tests limit. mine, value, baseline: the output in float64, the exact values, and a float32
        program's results or None; of one shape."""
        beyond = value.abs() >= FLT_MAX
        self.huge += int((beyond & (mine.abs() < FLT_MAX)).sum())
        odd = ~(value.isfinite() & mine.isfinite()) | beyond
        error = (mine - value).abs_()
        size = value.abs()
        if bool(odd.any()):
            error, size = error.masked_fill(odd, 0), size.masked_fill(odd, 0)
        self.count += value.numel()
        self.sums = [self.sums[0] + float(error.sum()), self.sums[1] + float(error.square().sum()),
                     max(self.sums[2], float(error.amax()))]  # fmt: skip
        self.size += float(size.square().sum())
        larger = torch.maximum(size, mine.abs().nan_to_num(nan=0.0, posinf=0.0))
        self.beyond += int((error > (0.005 * larger).clamp(min=2.5e-5)).sum())
        if baseline is None:
            return
        allowed = (baseline.double() - value).abs().nan_to_num(nan=0.0, posinf=0.0).masked_fill(odd, 0)
        self.baseline = [self.baseline[0] + float(allowed.square().sum()), max(self.baseline[1], float(size.amax()))]
        floor, tiny = (2.0**-20, 2.0**-30) if self.dtype == torch.float32 else (2.0**-10, 2.0**-16)
        normal = size >= floor
        for at, result in ((0, error), (2, allowed)):
            relative = (result / size.clamp(min=floor)).where(normal, 0)
            self.relative[at] += float(relative.sum())
            self.relative[at + 1] = max(self.relative[at + 1], float(relative.amax()))
        for at, result in ((0, error), (1, allowed)):
            self.small[at] += int(((result > tiny) & ~normal).sum())

    @property
    def mean(self) -> float:
        """Mean absolute error of the output against the exact result."""
        return self.sums[0] / max(self.count, 1)

    @property
    def rms(self) -> float:
        """Root mean square error of the output against the exact result."""
        return math.sqrt(self.sums[1] / max(self.count, 1))

    @property
    def largest(self) -> float:
        """Largest absolute error; inf if an element is finite in only one of the output and the exact result."""
        return math.inf if self.strange else self.sums[2]

    @property
    def z(self) -> float:
        """Root mean square, over all elements, of error / (size of the error that rounding is expected to cause)."""
        return math.inf if self.strange else self.errors.z

    @property
    def relative_rms(self) -> float:
        """Root mean square error, divided by the root mean square of the exact result."""
        return math.inf if self.strange else math.sqrt(self.sums[1] / self.size) if self.size else self.rms

    @property
    def passes(self) -> bool:
        """True if no element, row, tile of 32 rows or head, nor the complete output, has an error beyond rounding."""
        return not self.errors.fails()

    def bound(self) -> Judged:
        """Returns the verdict of the error bound: it fails if an element, row, tile of 32 rows, head or the complete
        output has a larger error than rounding explains."""
        failing = self.errors.fails()
        if not failing:
            return Judged("error-bound", passes=True)
        return Judged("error-bound", False, sentence(*failing[0]))

    def cann_share(self) -> Judged:
        """Returns the verdict of CANN's tests: at most 0.5 % of elements err by over 2.5e-5 and 0.5 % of the value."""
        fraction = (self.beyond + self.strange) / max(self.count, 1)
        broken = [f"{fraction:.2%} of elements beyond 0.5 %"] if fraction > 0.005 else []
        return self._published("cann-0.5%", broken)

    def cann_double(self) -> Judged:
        """Returns the verdict of CANN's double benchmark: errors against float64 are at most a multiple of a float32
        program's errors. The factor is 10 for the largest relative error, and 2 for the mean relative error, the root
        mean square error and the number of errors of small values."""
        n = max(self.count, 1)
        ratios = (
            ("largest relative error", self.relative[1], self.relative[3], 10),
            ("mean relative error", self.relative[0] / n, self.relative[2] / n, 2),
            ("RMS error", self.rms, math.sqrt(self.baseline[0] / n), 2),
            ("errors of small values", self.small[0], max(self.small[1], 1), 2),
        )
        # Errors of rounding to float32 are accepted for any baseline.
        floor = 2.0**-24 * math.sqrt(max(self.terms, 1))
        broken = [
            f"{what} {result:.3g} > {times} x {base:.3g}"
            for what, result, base, times in ratios
            if not result <= times * max(base, floor * (self.baseline[1] if what == "RMS error" else 1))
        ]
        return self._published("cann-double", broken)

    def _published(self, name: str, broken: list[str]) -> Judged:
        """Returns the verdict of the standard `name`, which fails for the reasons `broken`, if there are any. It also
        fails if an element is finite in only one of the output and the exact result."""
        strange = [f"{self.strange} values are not finite, or should not be"] if self.strange else []
        return Judged(name, not (strange or broken), "; ".join(strange + broken))


def sentence(b: int, look: Look) -> str:
    """Returns a sentence about the failing group of elements `look` of sequence b: its place, error and limit."""
    head, row = look.place
    where = {
        "element": f"a number of row {row}, head {head}", "row": f"row {row} of head {head}",
        "tile": f"32 rows from {row} of head {head}", "columns": f"16 columns of 32 rows from {row}, head {head}",
        "head": f"head {head}", "whole": "the whole",
    }[look.kind]  # fmt: skip
    size = "not finite" if math.isinf(look.z) or look.z > 1e14 else f"{look.z:.3g} times what roundings make it"
    return f"the error of {where} is {size} (at most {look.limit:.2g})"


STANDARDS = {"error-bound": Tally.bound, "cann-0.5%": Tally.cann_share, "cann-double": Tally.cann_double}

"""By which measure an output is right: the house law, and those that CANN's own tests publish.

Values come piece by piece, so that no whole float64 copy of an output need be in memory. Refuses to know what was
computed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

Tensor = torch.Tensor
FLT_MAX = torch.finfo(torch.float32).max
# The house law: how often a plain program's mean and RMS error, and its largest error, a result may have.
MEAN, LARGEST = 2, 10


def epsilon(dtype: torch.dtype, golden: Tensor, kv_len: int) -> Tensor:
    """What no implementation can be asked to resolve: a number, or (low dtypes) one per row of the last axis."""
    size = golden.abs().masked_fill(~golden.isfinite() | (golden.abs() >= FLT_MAX), 0)
    if dtype in (torch.float32, torch.float64):
        return 2.0**-24 * math.sqrt(kv_len) * size.amax()
    if not dtype.is_floating_point:
        return torch.ones((), dtype=torch.float64)  # A value beside the middle of two integers may become either.
    info = torch.finfo(dtype)
    exponent = torch.frexp(size.amax(-1, keepdim=True).clamp(min=info.smallest_normal))[1] - 1
    return torch.exp2(exponent.double()) * (info.eps / 2)


@dataclass(frozen=True)
class Judged:
    """One output by one standard.

    Attributes:
        standard: its name. passes: whether the output is right by it.
        reason: what breaks it, in words; "" where nothing does.
    """

    standard: str
    passes: bool
    reason: str = ""


@dataclass(eq=False)
class Tally:
    """The errors of an output and of a plain program's against golden, gathered piece by piece."""

    dtype: torch.dtype
    kv_len: int
    count: int = 0
    strange: int = 0  # places that are not finite, or as large as FLT_MAX, where golden says otherwise
    errors: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])  # sum, sum of squares, largest: ours
    plain: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    slack: list[float] = field(default_factory=lambda: [0.0, 0.0])  # of epsilon: sum, sum of squares
    beyond: float = 0.0  # the largest of error - epsilon
    size: list[float] = field(default_factory=lambda: [0.0, 0.0])  # of golden: largest, sum of squares
    yc: int = 0
    relative: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0, 0.0])  # ours: sum, largest; plain's
    small: list[int] = field(default_factory=lambda: [0, 0])

    def add(self, ours: Tensor, golden: Tensor, plain: Tensor) -> None:
        """A further piece, [..., elements of a row]; golden in float64 (or the widest that there is)."""
        if not golden.numel():
            return
        golden, mine, measure = golden.double(), ours.double(), plain.double()
        special = ~golden.isfinite() | (golden.abs() >= FLT_MAX)
        odd = ~mine.isfinite() | (mine.abs() >= FLT_MAX)
        same = (odd == special) & ((mine == golden) | (mine.isnan() & golden.isnan()) | ~special)
        self.strange += int((~same).sum())
        out = special | odd
        error, allowed = ((t - golden).masked_fill(out, 0).abs() for t in (mine, measure))
        allowed = allowed.nan_to_num(nan=0.0, posinf=0.0)
        eps = epsilon(self.dtype, golden, self.kv_len).to(golden)
        wide = eps.expand_as(error) if eps.dim() else eps
        self.count += golden.numel()
        for kept, found in ((self.errors, error), (self.plain, allowed)):
            kept[0] += float(found.sum())
            kept[1] += float(found.square().sum())
            kept[2] = max(kept[2], float(found.amax()))
        self.slack[0] += float(eps.mean()) * golden.numel()
        self.slack[1] += float(eps.square().mean()) * golden.numel()
        self.beyond = max(self.beyond, float((error - wide).amax()))
        size = golden.abs().masked_fill(out, 0)
        self.size = [max(self.size[0], float(size.amax())), self.size[1] + float(size.square().sum())]
        self._published(error, allowed, size, mine)

    def _published(self, error: Tensor, allowed: Tensor, size: Tensor, mine: Tensor) -> None:
        """What CANN's standards count."""
        larger = torch.maximum(size, mine.abs().nan_to_num(nan=0.0, posinf=0.0))
        self.yc += int((error > (0.005 * larger).clamp(min=2.5e-5)).sum())
        floor, tiny = (2.0**-20, 2.0**-30) if self.dtype == torch.float32 else (2.0**-10, 2.0**-16)
        normal = size >= floor
        for place, found in ((0, error), (2, allowed)):
            part = (found / size.clamp(min=floor)).where(normal, 0)
            self.relative[place] += float(part.sum())
            self.relative[place + 1] = max(self.relative[place + 1], float(part.amax()))
        for place, found in ((0, error), (1, allowed)):
            self.small[place] += int(((found > tiny) & ~normal).sum())

    @property
    def mean(self) -> float:
        """Mean absolute error."""
        return self.errors[0] / max(self.count, 1)

    @property
    def rms(self) -> float:
        """Root of the mean square error."""
        return math.sqrt(self.errors[1] / max(self.count, 1))

    @property
    def largest(self) -> float:
        """Largest absolute error; inf where a place that should be finite is not, or the other way round."""
        return math.inf if self.strange else self.errors[2]

    @property
    def plain_rms(self) -> float:
        """The plain program's, with what nobody can resolve."""
        n = max(self.count, 1)
        return math.sqrt(self.plain[1] / n) + self._eps_rms

    @property
    def times_plain(self) -> float:
        """RMS error, counted in the plain program's."""
        if self.strange or (self.rms and not self.plain_rms):
            return math.inf
        return self.rms / self.plain_rms if self.rms else 0.0

    @property
    def relative_rms(self) -> float:
        """RMS error as a share of golden's RMS."""
        return math.inf if self.strange else math.sqrt(self.errors[1] / self.size[1]) if self.size[1] else self.rms

    @property
    def _eps_rms(self) -> float:
        if self.dtype in (torch.float32, torch.float64):
            return 2.0**-24 * math.sqrt(self.kv_len) * self.size[0]
        return math.sqrt(self.slack[1] / max(self.count, 1))

    def house(self) -> Judged:
        """The house law: error <= 2 * plain's in mean and RMS, 10 * in its largest element, each plus epsilon."""
        n, wide = max(self.count, 1), self.dtype in (torch.float32, torch.float64)
        eps_mean = self._eps_rms if wide else self.slack[0] / n
        beyond = self.errors[2] - self._eps_rms if wide else self.beyond
        checks = (
            ("mean error", self.mean, MEAN * self.plain[0] / n + eps_mean),
            ("RMS error", self.rms, MEAN * math.sqrt(self.plain[1] / n) + self._eps_rms),
            ("largest error beyond rounding", beyond, LARGEST * self.plain[2]),
        )
        if self.strange:
            return Judged("house", False, f"{self.strange} values are not finite, or should not be")
        broken = [f"{what} {found:.3g} > {limit:.3g}" for what, found, limit in checks if not found <= limit]
        return Judged("house", not broken, "; ".join(broken))

    def cann_share(self) -> Judged:
        """CANN's operator tests: at most 0.5 % of elements differ by more than 0.5 % (or 2.5e-5)."""
        share = (self.yc + self.strange) / max(self.count, 1)
        return Judged("cann-0.5%", share <= 0.005, "" if share <= 0.005 else f"{share:.2%} of elements beyond 0.5 %")

    def cann_double(self) -> Judged:
        """CANN's double benchmark: relative errors beside those of a plain run: 10 x largest, 2 x mean, RMS, small."""
        n = max(self.count, 1)
        ratios = (
            ("largest relative error", self.relative[1], self.relative[3], 10),
            ("mean relative error", self.relative[0] / n, self.relative[2] / n, 2),
            ("RMS error", self.rms, math.sqrt(self.plain[1] / n), 2),
            ("errors of small values", self.small[0], max(self.small[1], 1), 2),
        )
        # What both lose to float32 itself is no difference between them.
        floor = 2.0**-24 * math.sqrt(max(self.kv_len, 1))
        broken = [
            f"{what} {found:.3g} > {limit} x {base:.3g}"
            for what, found, base, limit in ratios
            if not found <= limit * max(base, floor * (self.size[0] if what == "RMS error" else 1))
        ]
        broken += [f"{self.strange} values not finite"] if self.strange else []
        return Judged("cann-double", not broken, "; ".join(broken))


STANDARDS = {"house": Tally.house, "cann-0.5%": Tally.cann_share, "cann-double": Tally.cann_double}

"""What the judge says of a call: per output, per back end, and which mistakes explain it; as text and as JSON.

Holds numbers and words, never a tensor of a call (pictures aside). Refuses to compute.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fusion_attention.judging.places import Map
from fusion_attention.judging.standards import STANDARDS, Judged, Tally

RIGHT, NOISY, WRONG = "right", "noisy", "wrong"


@dataclass(frozen=True, eq=False)
class Opinion:
    """One output.

    Attributes:
        by: what each standard says.
        mean, rms, largest: absolute errors against golden; times_plain: RMS error, counted in a plain program's.
        where: in words, where it is wrong. worst: sequence, head, row, element, and the three values there.
    """

    name: str
    by: dict[str, Judged]
    mean: float
    rms: float
    largest: float
    times_plain: float
    where: tuple[str, ...] = ()
    worst: tuple[Any, ...] | None = None
    map: Map | None = field(default=None, repr=False)

    @property
    def passes(self) -> bool:
        """By the house law."""
        return self.by["house"].passes


def opinion(name: str, tally: Tally, map_: Map | None = None) -> Opinion:
    """What a tally says."""
    by = {standard: ask(tally) for standard, ask in STANDARDS.items()}
    wrong = map_ is not None and not by["house"].passes
    where = tuple(map_.sentences()) if wrong and map_ is not None else ()
    worst = map_.worst if wrong and map_ is not None else None
    return Opinion(name, by, tally.mean, tally.rms, tally.largest, tally.times_plain, where, worst, map_)


@dataclass(frozen=True)
class Explanation:
    """A mistake with which the captured outputs are what they should be.

    Attributes:
        name, means, mend: the mistake's. detail: which way of making it.
        outputs: what it explains. error: what is left of their error, counted in a plain program's.
        confirmed: on the whole call; else on rows and heads drawn from it.
        noisy: it explains them but for noise.
    """

    name: str
    detail: str
    means: str
    mend: str
    outputs: tuple[str, ...]
    error: float
    confirmed: bool = False
    noisy: bool = False

    def __str__(self) -> str:
        return f"{self.name}{f' ({self.detail})' if self.detail else ''}: {self.means}"


@dataclass(frozen=True, eq=False)
class Judgement:
    """A call, judged.

    Attributes:
        operator: the record's name; source: where it came from.
        verdict: "right", "noisy" (as near as a program that rounds everything to 16 bits) or "wrong".
        outputs: by name. unjudged: outputs of which nothing was said, and why.
        backends: per back end of this machine, its error by output, counted in a plain program's, or why it has none.
        mistakes: what explains the outputs, best first; empty where nobody looked, or nothing does.
        searched: whether mistakes were looked for.
    """

    operator: str
    source: str
    verdict: str
    outputs: dict[str, Opinion]
    unjudged: dict[str, str]
    backends: dict[str, Any]
    mistakes: tuple[Explanation, ...] = ()
    searched: bool = False
    notes: tuple[str, ...] = ()

    @property
    def passes(self) -> bool:
        """Every output is right by the house law."""
        return self.verdict == RIGHT

    def failing(self, standard: str = "house") -> list[str]:
        """The outputs that a standard refuses."""
        return [name for name, found in self.outputs.items() if not found.by[standard].passes]

    def __str__(self) -> str:
        return "\n".join(self.lines())

    __repr__ = __str__

    def lines(self) -> list[str]:
        """Five lines: what it is, the verdict, the outputs, where, and why."""
        bad = self.failing()
        worst = max(self.outputs.values(), key=lambda o: o.times_plain, default=None)
        each = ", ".join(f"{o.name} {times(o.times_plain)}" for o in self.outputs.values()) or "none"
        head = f"{self.source}: {self.operator}" if self.source else self.operator
        where = "; ".join(worst.where) if worst is not None and worst.where else "nowhere" if not bad else "throughout"
        why = "not looked for (fusion_attention.diagnose)" if bad and not self.searched else "nothing to explain"
        if self.searched and bad:
            why = " or ".join(map(str, self.mistakes)) or "no known mistake explains it"
            why = "rounding: as near as 16 bits throughout" if self.verdict == NOISY else why
        return [
            head,
            f"verdict  {self.verdict}" + (f" ({', '.join(bad)})" if bad else ""),
            f"error    {each} (RMS, counted in a plain program's)",
            f"where    {where}",
            f"why      {why}",
        ]

    def json(self) -> dict[str, Any]:
        """Everything but pictures, as JSON has it: numbers that it does not know are words."""

        def number(value: float) -> Any:
            return value if math.isfinite(value) else str(value)

        outputs = {
            o.name: {
                "standards": {n: {"passes": j.passes, "reason": j.reason} for n, j in o.by.items()},
                **{n: number(getattr(o, n)) for n in ("mean", "rms", "largest", "times_plain")},
                "where": list(o.where),
                "worst": None if o.worst is None else [number(v) for v in o.worst],
            }
            for o in self.outputs.values()
        }
        return {
            "operator": self.operator,
            "source": self.source,
            "verdict": self.verdict,
            "outputs": outputs,
            "unjudged": self.unjudged,
            "backends": {
                n: found if isinstance(found, str) else {o: number(t) for o, t in found.items()}
                for n, found in self.backends.items()
            },
            "mistakes": [
                {**{n: getattr(m, n) for n in ("name", "detail", "means", "mend", "confirmed", "noisy")},
                 "outputs": list(m.outputs), "error": number(m.error)}
                for m in self.mistakes
            ],
            "searched": self.searched,
            "notes": list(self.notes),
        }  # fmt: skip


def times(value: float) -> str:
    """A factor in few letters."""
    return "not finite" if math.isinf(value) else f"{value:.2g}x" if value < 1000 else f"{value:.0e}x"


Backends = Mapping[str, Any]

"""The verdict on an operator's outputs against the float64 reference, and explanations of errors; as text and as JSON.

A verdict contains numbers and text, and no tensors except the errors that pictures show.
"""

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fusion_attention.judging.error_heatmap import Mask, Surface, figure, text
from fusion_attention.judging.expected_error import Grade
from fusion_attention.judging.standards import STANDARDS, Judged, Tally

RIGHT, NOISY, WRONG = "right", "noisy", "wrong"


@dataclass(frozen=True, eq=False)
class Opinion:
    """The verdict on one output tensor of an operator, with the sizes and positions of its errors.

    Attributes:
        judged: the verdict of the requested standard.
        grade: result of the error bound: "as exact as a kernel that sums in float32", "as exact as a program in
            bfloat16", or "wrong".
        mean, rms, largest: absolute errors against the exact result.
        z: root mean square of (error / expected size) over all elements.
        z_tile: the same in the worst tile of 32 rows.
        where: descriptions of the location of errors.
        worst: (sequence, head, row, element, output's value, exact value, expected error) at the largest ratio of error
            and expected error.
        surface: the errors by position, for drawings; None for an output without an axis of rows.
    """

    name: str
    judged: Judged
    grade: str
    mean: float
    rms: float
    largest: float
    z: float
    z_tile: float
    where: tuple[str, ...] = ()
    worst: tuple[Any, ...] | None = None
    surface: Surface | None = field(default=None, repr=False)

    @property
    def passes(self) -> bool:
        """True if the output is correct by the requested standard, such as the error bound."""
        return self.judged.passes


def opinion(
    name: str, tally: Tally, grade: Grade, standard: str, where: Sequence[str], surface: Surface | None
) -> Opinion:
    """Returns the verdict of the criterion named `standard` on an output. tally: its accumulated errors; grade: the
    precision of the program whose rounding gives the expected errors; where: texts on the errors' location; surface:
    the errors by position, for drawings."""
    words = grade.words.replace("the dtype", str(tally.dtype).removeprefix("torch."))
    sizes = (tally.mean, tally.rms, tally.largest, tally.z, tally.errors.z_tile)
    wrong = not tally.passes
    grade_words, worst = (WRONG, tally.worst) if wrong else (words, None)
    return Opinion(name, STANDARDS[standard](tally), grade_words, *sizes, tuple(where), worst, surface)


@dataclass(frozen=True)
class Explanation:
    """A mistake that explains the outputs: a program with this mistake would have computed them.

    Attributes:
        name, means, fix: the mistake's name, a sentence that describes the wrong kernel, and advice.
        detail: the way of making the mistake.
        outputs: the explained outputs.
        error: their remaining error, divided by its expected size.
        confirmed: True if the mistake was tried on the complete call, False if on sampled rows.
        noisy: True if the remaining errors are those of sums in 16 bits.
    """

    name: str
    detail: str
    means: str
    fix: str
    outputs: tuple[str, ...]
    error: float
    confirmed: bool = False
    noisy: bool = False

    def __str__(self) -> str:
        return f"{self.name}{f' ({self.detail})' if self.detail else ''}: {self.means}"


def one_per_mistake(explanations: Iterable[Explanation]) -> tuple[Explanation, ...]:
    """Returns the explanations with the smallest error first; of several ways to make a mistake, only the best one."""
    by_name: dict[str, Explanation] = {}
    for e in sorted(explanations, key=lambda e: e.error):
        by_name.setdefault(e.name, e)
    return tuple(by_name.values())


@dataclass(frozen=True, eq=False)
class Judgement:
    """The verdict on the outputs of an operator's call, compared with the float64 reference.

    Attributes:
        operator: the operator's name.
        source: name of the file with the recorded call, or "".
        verdict: "right", "wrong", or, after a search for mistakes, "noisy": wrong, but as exact as sums in 16 bits.
        outputs: the verdict on each output, by name.
        unjudged: the reason why each other output is not judged, by name.
        backends: for each back end of this machine, (error / expected size) by output, or the reason for none.
        mistakes: explanations, best first; empty if not searched, or if none explains the errors.
        searched: True if mistakes were searched.
        notes: remarks.
        standard: the requested standard.
        mask: the mask of the first sequence with an error, for drawings, or None.
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
    standard: str = "error-bound"
    mask: Mask | None = field(default=None, repr=False)

    @property
    def passes(self) -> bool:
        """True if every output is correct by the requested standard, such as the error bound."""
        return self.verdict == RIGHT

    @property
    def grade(self) -> str:
        """The precision, in words, of the least exact output: of a float32 kernel, of a 16-bit program, or "wrong"."""
        return max((o.grade for o in self.outputs.values()), key=lambda g: (g == WRONG, "program" in g), default="")

    def failing(self) -> list[str]:
        """Returns the names of incorrect outputs."""
        return [name for name, result in self.outputs.items() if not result.passes]

    def __str__(self) -> str:
        return "\n".join(self.lines())

    __repr__ = __str__

    def lines(self) -> list[str]:
        """Returns five lines of text: the operator, the verdict, and the errors' sizes, location and explanation."""
        bad = self.failing()
        worst = max(self.outputs.values(), key=lambda o: (not o.passes, o.z), default=None)
        each = ", ".join(f"{o.name} {times(o.z)}" for o in self.outputs.values()) or "none"
        left = f"; not judged: {', '.join(sorted(self.unjudged))}" if self.unjudged else ""
        head = f"{self.source}: {self.operator}" if self.source else self.operator
        where = "; ".join(worst.where) if worst is not None and worst.where else "nowhere" if not bad else "throughout"
        why = "not looked for (fusion_attention.diagnose)" if bad and not self.searched else "nothing to explain"
        if self.searched and bad:
            why = self._why(bad)
            why = "rounding: as exact as sums in 16 bits" if self.verdict == NOISY else why
        by = "" if self.standard == "error-bound" else f" by {self.standard}"
        suffix = f" ({', '.join(bad)})" if bad else f": {self.grade}" if not by and self.outputs else ""
        return [
            head,
            f"verdict  {self.verdict}{by}{suffix}",
            f"error    {each} (RMS, in expected sizes){left}",
            f"where    {where}",
            f"why      {why}",
        ]

    def _why(self, bad: list[str]) -> str:
        """Returns the explanations of the outputs `bad` as one text; outputs are named if their explanations differ."""
        unknown = "no known mistake explains it"
        by_outputs: dict[tuple[str, ...], list[str]] = {}
        for m in self.mistakes:
            by_outputs.setdefault(m.outputs, []).append(str(m))
        explained = {name for outputs in by_outputs for name in outputs}
        if len(by_outputs) <= 1 and (not explained or explained >= {*bad}):
            return " or ".join(map(str, self.mistakes)) or unknown
        sentences = [f"{', '.join(outputs)}: {' or '.join(texts)}" for outputs, texts in by_outputs.items()]
        return "; ".join([*sentences, *(f"{name}: {unknown}" for name in bad if name not in explained)])

    @property
    def drawn(self) -> dict[str, Surface]:
        """The errors of wrong outputs by position, as matrices to be drawn, by output name."""
        surfaces = {o.name: o.surface for o in self.outputs.values() if not o.passes and o.surface is not None}
        return {name: surface for name, surface in surfaces.items() if surface.order()}

    def pictures(self) -> str:
        """Returns block-character drawings of the errors of wrong outputs, heads by rows (or keys), and of the mask."""
        drawn = [str(text(name, surface)) for name, surface in self.drawn.items()]
        return "\n".join([*drawn, *([] if self.mask is None else self.mask.lines())]).rstrip()

    def _repr_html_(self) -> str:
        """Returns the verdict's five lines of text, and pictures of the errors, as HTML for a notebook."""
        figures = (figure(name, surface, surface.order()[0]) for name, surface in self.drawn.items())
        return f"<pre>{html.escape(str(self))}</pre>{''.join(figures)}{self.mask_in_html()}"

    def mask_in_html(self) -> str:
        """Returns a drawing of the mask as preformatted HTML text; "" without a mask."""
        return "" if self.mask is None else f"<pre>{html.escape(chr(10).join(self.mask.lines()))}</pre>"

    def json(self) -> dict[str, Any]:
        """Returns the verdict except pictures as JSON values; numbers that are not finite become strings."""

        def number(value: float) -> Any:
            return value if math.isfinite(value) else str(value)

        outputs = {
            o.name: {
                "passes": o.passes,
                "reason": o.judged.reason,
                "grade": o.grade,
                **{n: number(getattr(o, n)) for n in ("mean", "rms", "largest", "z", "z_tile")},
                "where": list(o.where),
                "worst": None if o.worst is None else [number(v) for v in o.worst],
            }
            for o in self.outputs.values()
        }
        return {
            "operator": self.operator,
            "source": self.source,
            "verdict": self.verdict,
            "standard": self.standard,
            "outputs": outputs,
            "unjudged": self.unjudged,
            "backends": {
                n: result if isinstance(result, str) else {o: number(t) for o, t in result.items()}
                for n, result in self.backends.items()
            },
            "mistakes": [
                {**{n: getattr(m, n) for n in ("name", "detail", "means", "fix", "confirmed", "noisy")},
                 "outputs": list(m.outputs), "error": number(m.error)}
                for m in self.mistakes
            ],
            "searched": self.searched,
            "notes": list(self.notes),
        }  # fmt: skip


def times(value: float) -> str:
    """Returns a factor as short text, such as "1.5x" or "2e+03x"; "not finite" for infinity."""
    return "not finite" if math.isinf(value) else f"{value:.2g}x" if value < 1000 else f"{value:.0e}x"

"""Computes the errors of a call's outputs by formulas, perhaps with a kernel mistake, in all rows or in samples."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from fusion_attention.judging.chi_square_limits import Errors
from fusion_attention.judging.editable_call import Setting
from fusion_attention.judging.error_heatmap import Mask, Surface
from fusion_attention.judging.error_location import Map, looks_like
from fusion_attention.judging.expected_error import KERNEL, LEFT, PROGRAM, Grade
from fusion_attention.judging.outputs import Output, Unit, Wanted, computed, of_heads, totals
from fusion_attention.judging.standards import Tally
from fusion_attention.judging.verdict import Explanation, one_per_mistake

Tensor = torch.Tensor
Beside = Mapping[str, Mapping[str, Tensor]]  # results of other back ends: by back end, by name


@dataclass(frozen=True, eq=False)
class Result:
    """The errors of a call's outputs, in total and by row, and those of other programs' outputs."""

    tallies: dict[str, Tally]  # errors of each output
    maps: dict[str, Map]  # errors by row of each output; only if the complete call was measured
    beside: dict[str, dict[str, Tally]]  # errors of each output of other programs, by program

    @property
    def passes(self) -> bool:
        """True if every output is within the error bound."""
        return all(tally.passes for tally in self.tallies.values())

    @property
    def failing(self) -> list[str]:
        """The names of the outputs that exceed the error bound."""
        return [name for name, tally in self.tallies.items() if not tally.passes]

    @property
    def z(self) -> float:
        """The largest z of all outputs; z is the root mean square of (error / expected size) over an output."""
        return max((tally.z for tally in self.tallies.values()), default=0.0)


def measured(
    setting: Setting,
    outputs: Sequence[Output],
    pieces: Iterable[Unit],
    *,
    grade: Grade = KERNEL,
    complete: bool = False,
    with_baseline: bool = False,
    beside: Mapping[str, Sequence[Output]] = MappingProxyType({}),
) -> Result:
    """Returns the errors of recorded outputs in parts (`pieces`) of a call; setting: the call, perhaps with a mistake.

    grade: precision of the judged program; with_baseline: also compute a float32 program; beside: other programs'
    outputs; complete: True if `pieces` are the whole call; then errors by row are returned too.
    """

    def fresh(results: Sequence[Output]) -> dict[str, Tally]:
        return {o.name: _tally(setting, o, complete=complete) for o in results if complete or o.view is not None}

    programs = {who: (fresh(results), results) for who, results in {"": outputs, **beside}.items()}
    for unit in pieces:
        wanted = computed(setting, unit, list(outputs), grade, with_baseline=with_baseline, exact=complete)
        heads = of_heads(setting, unit)
        for tallies, results in programs.values():
            for o in results:
                if o.name in wanted and o.of_unit(unit):
                    place = (unit.b, heads, o.unit_of(setting, unit).rows) if complete else None
                    tallies[o.name].add(place, o.rows(setting, unit.b, heads, unit.rows), wanted[o.name])
    for o in (o for o in outputs if complete and o.view is None):
        total = totals(setting, o, grade)
        for tallies, results in programs.values():
            for other in results:
                if other.name == o.name:
                    tallies[o.name].add((0, slice(0, 1), slice(None)), *_of_total(other, total))
    tallies, _ = programs.pop("")
    maps = {o.name: Map(tallies[o.name], "keys" if o.by_keys else "rows") for o in outputs if complete and o.view}
    return Result(tallies, maps, {who: of_program for who, (of_program, _) in programs.items()})


class Subject(ABC):
    """A recorded call with the methods that judge it; the subclasses are for attention, indexers and key pooling.

    Attributes:
        captured: the recorded outputs that have a formula to judge them by, by name.
    """

    captured: Mapping[str, Tensor]

    @abstractmethod
    def measured(
        self, names: Sequence[str] | None, grade: Grade, beside: Beside = MappingProxyType({}), *,
        with_baseline: bool = False,
    ) -> Result:  # fmt: skip
        """Returns the errors of the named outputs (None: of all), and of other back ends' results.

        Args:
            names: the outputs.
            grade: the steps in which a correct program rounds; determines the expected errors.
            beside: results by name, for each other back end.
            with_baseline: True to also compute a float32 program, with which the standard "cann-double" compares.
        """

    @abstractmethod
    def explained(self, base: Result) -> tuple[tuple[Explanation, ...], bool]:
        """Returns (mistakes that explain the errors `base`; True if none does, but the errors are those of a program
        that sums in 16 bits)."""

    def looks(self, name: str, tally: Tally) -> list[str]:
        """Returns sentences about the errors (`tally`) of the output `name`, such as zero rows."""
        return looks_like(tally)

    def surface(self, name: str, tally: Tally) -> Surface | None:
        """Returns the errors of an output without an axis of rows as matrices to be drawn, or None."""
        return None

    def notes(self, base: Result) -> tuple[str, ...]:
        """Returns remarks on outputs whose errors (`base`) no mistake explains."""
        return ()

    def mask(self, base: Result) -> Mask | None:
        """Returns the mask of the first sequence with an error, to be drawn, or None."""
        return None


def explanations(
    tries: Iterable[tuple[str, str, str, str, Subject]], base: Result, size: Callable[[Tally], float]
) -> tuple[Explanation, ...]:
    """Returns the mistakes that explain a call's errors (`base`), best first: with such a mistake every output passes,
    and of each wrong output's error at most a quarter (LEFT) remains.

    Args:
        tries: (mistake's name, detail, meaning and advice, and the call with this mistake).
        base: the errors without a mistake.
        size: returns the size of an output's error.
    """
    results, failing = [], base.failing
    for name, detail, means, fix, subject in tries:
        result = subject.measured(None, PROGRAM)
        left = (size(result.tallies[n]) / size(base.tallies[n]) for n in failing if size(base.tallies[n]))
        if result.passes and all(fraction <= LEFT for fraction in left):
            error = max(result.tallies[n].z for n in failing)
            results.append(Explanation(name, detail, means, fix, tuple(failing), error, confirmed=True))
    return one_per_mistake(results)


def graded(measure: Callable[[Sequence[str] | None, Grade], Result]) -> tuple[Result, dict[str, Grade]]:
    """Measures outputs with the expected errors of a float32 kernel, and those that fail with those of a 16-bit
    program. measure(names, grade) returns the errors of the named outputs (None: of all). Returns (the errors; output's
    name -> the program precision with which it was last measured)."""
    base = measure(None, KERNEL)
    grades = dict.fromkeys(base.tallies, KERNEL)
    if base.passes:
        return base, grades
    again = measure(base.failing, PROGRAM)
    result = Result(base.tallies | again.tallies, base.maps | again.maps, base.beside)
    return result, grades | dict.fromkeys(again.tallies, PROGRAM)


def _tally(setting: Setting, o: Output, *, complete: bool) -> Tally:
    p, e = setting.problem, setting.extents
    terms = int(e.kv_len.max(initial=1))
    if o.view is None:
        columns = o.tensor.shape[-1] if o.tensor.dim() > 1 else 1
        return Tally(o.tensor.dtype, Errors([o.tensor.numel() // max(columns, 1)], 1, columns), terms)
    heads = p.heads_kv if o.by_keys else p.heads_q
    return Tally(o.tensor.dtype, Errors(o.lengths(e) if complete else [], heads, o.view.dim), terms)


def of_total(setting: Setting, o: Output, wanted: Wanted) -> Tally:
    """Returns the errors of output o, a sum over sequences such as a bias's gradient, against expected values."""
    tally = _tally(setting, o, complete=True)
    tally.add((0, slice(0, 1), slice(None)), *_of_total(o, wanted))
    return tally


def _of_total(o: Output, wanted: Wanted) -> tuple[Tensor, Wanted]:
    """Returns output o, a sum over sequences (a bias's gradient), and its expected values as [1, rows, columns]."""
    shape = (1, -1, o.tensor.shape[-1] if o.tensor.dim() > 1 else 1)
    value, variance = (t.reshape(shape) for t in (wanted.value, wanted.variance))
    return o.tensor.reshape(shape), Wanted(value, variance, None if wanted.baseline is None else value)


def drawn(maps: dict[str, Map], outputs: Sequence[Output], setting: Setting, generator: torch.Generator) -> list[Unit]:
    """Returns randomly chosen ranges of heads and rows of the judged call, with wrong and with correct rows.
    maps: the errors by row of the outputs, by name; the first and the last wrong row of each output are included."""
    results: set[tuple[int, int, int, int, int, bool, bool]] = set()
    for o in outputs:
        if o.name not in maps:
            continue
        wrong = maps[o.name].wrong
        for want, count in ((True, 6), (False, 3)):
            cells = [
                (b, int(h), int(r)) for b, w in enumerate(wrong) for h, r in _some(w == want, count * 3, generator)
            ]
            order = torch.randperm(len(cells), generator=generator).tolist()
            chosen = [cells[0], cells[-1], *(cells[i] for i in order[: count - 2])] if cells else []
            for b, head, row in chosen:
                group, length, before = setting.group, o.lengths(setting.extents)[b], o.before(setting.extents, b)
                heads = (head * group, head * group + group) if o.by_keys else (head, head + 1)
                first = row // 4 * 4
                results.add((b, *heads, before + first, before + min(first + 4, length), o.by_keys, o.second))
    return [Unit(b, slice(h, z), slice(first, end), *of) for b, h, z, first, end, *of in sorted(results)]


def _some(marks: Tensor, count: int, generator: torch.Generator) -> list[list[int]]:
    """Returns [head, row] of true elements of marks [heads, rows]: the first, the last, and `count` at random."""
    flat = marks.flatten().nonzero().flatten()
    if not len(flat):
        return []
    picked = flat[torch.randint(len(flat), (count,), generator=generator)]
    both = torch.cat((flat[:1], flat[-1:], picked)).unique()
    return [[int(n) // marks.shape[1], int(n) % marks.shape[1]] for n in both]

"""Finds the mistakes that explain a call's wrong outputs.

Every mistake is tried on sampled rows; the mistakes that explain these are tried on the complete call.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fusion_attention.contract import ContractError
from fusion_attention.judging.expected_error import LEFT, POOR, PROGRAM
from fusion_attention.judging.measure import Result, drawn, measured
from fusion_attention.judging.mistakes import MISTAKES, Case, Mistake, Try, sink_and_bias_gradients
from fusion_attention.judging.outputs import Output, Unit, units
from fusion_attention.judging.progress import Watch, over, silent
from fusion_attention.judging.verdict import Explanation, one_per_mistake

_CONFIRMED = 6  # number of mistakes tried on the complete call; of a large call, only the best one
_LARGE = 1 << 28  # pairs of rows and keys, of all heads
_IMPOSSIBLE = (RuntimeError, IndexError, ValueError, ContractError)


@dataclass(frozen=True, eq=False)
class Match:
    """One well-known kernel mistake, made in one way, that may explain wrong outputs, and the outputs' remaining errors
    if the judge's formulas make it too."""

    mistake: Mistake
    way: Try
    result: Result

    def outputs(self, case: Case) -> tuple[Output, ...]:
        """Returns the outputs of the judged call `case`, in another layout if the mistake is a wrong layout."""
        return case.outputs if self.way.outputs is None else self.way.outputs

    def explained(self, outputs: tuple[str, ...], *, confirmed: bool = False, noisy: bool = False) -> Explanation:
        """Returns this mistake as the explanation of the named outputs; confirmed: tried on all outputs; noisy: errors
        remain, of 16-bit sums."""
        m = self.mistake
        error = max((self.result.tallies[name].z for name in outputs), default=0.0)
        return Explanation(m.name, self.way.detail, m.means, m.fix, outputs, error, confirmed, noisy)


def diagnosed(case: Case, base: Result, seed: int = 0, watch: Watch = silent) -> tuple[tuple[Explanation, ...], bool]:
    """Returns (mistakes that explain the wrong outputs of the judged call `case`, best first; True if none is needed
    because outputs are as exact as sums in 16 bits). base: the outputs' errors without a mistake; seed: of the choice
    of sampled rows; watch: called with the progress."""
    of_totals = sink_and_bias_gradients.explained(case.setting, case.outputs, base.failing)
    case = replace(case, outputs=tuple(o for o in case.outputs if o.view is not None))
    explained, noisy = _of_rows(case, base, seed, watch)
    return (*explained, *of_totals), noisy and not of_totals


def _of_rows(case: Case, base: Result, seed: int, watch: Watch) -> tuple[tuple[Explanation, ...], bool]:
    if case.setting.grads is not None:  # kernels of different gradients have different faults
        case = replace(case, outputs=tuple(o for o in case.outputs if o.name in base.failing))
    generator = torch.Generator().manual_seed(seed)
    pieces = drawn(base.maps, case.outputs, case.setting, generator)
    sample = measured(case.setting, case.outputs, pieces, grade=PROGRAM)
    failing = tuple(name for name in base.failing if name in sample.tallies)
    if not failing:  # only outputs without rows fail
        return (), False
    tried = _tried(case, base, pieces, watch)
    full = [f for f in tried if f.result.passes and _left(f.result, sample, failing) <= LEFT]
    confirmed = _confirmed(case, full, sample, failing)
    if confirmed:
        return confirmed, False
    if measured(case.setting, case.outputs, pieces, grade=POOR).passes:
        return (), True
    noisy = one_per_mistake(
        f.explained(failing, noisy=True)
        for f in tried
        if _left(f.result, sample, failing) <= LEFT
        and measured(f.way.setting, f.outputs(case), pieces, grade=POOR).passes
    )
    return noisy or _alone(case, tried, sample, failing), False


def _tried(case: Case, base: Result, pieces: Sequence[Unit], watch: Watch) -> list[Match]:
    """Returns the mistakes that may explain wrong outputs of the judged call `case`, by errors on its sampled parts
    `pieces`. Each mistake is measured first on the queries and keys with the largest error in `base`, the errors
    without a mistake. Mistakes that explain no output there, or are impossible in the call, are omitted. `watch` is
    called with the progress."""
    results = []
    kinds = itertools.product((False, True), repeat=2)  # of rows: query rows, keys, compressed keys
    axes = ([p for p in pieces if (p.by_keys, p.second) == kind] for kind in kinds)
    quick = [max(some, key=lambda p: _worst(case, base, p)) for some in axes if some]
    here = measured(case.setting, case.outputs, quick, grade=PROGRAM)
    failing = here.failing or [*here.tallies]
    for mistake in over(watch, "mistakes tried", MISTAKES):
        for way in mistake.tries(case):
            outputs = case.outputs if way.outputs is None else way.outputs
            try:
                first = measured(way.setting, outputs, quick, grade=PROGRAM)
                if not any(first.tallies[name].passes or _left(first, here, [name]) <= LEFT for name in failing):
                    continue
                results.append(Match(mistake, way, measured(way.setting, outputs, pieces, grade=PROGRAM)))
            except _IMPOSSIBLE:
                continue  # the mistake is impossible with this memory
    return results


def _worst(case: Case, base: Result, unit: Unit) -> float:
    """Returns the largest error, of all outputs, in a range of rows (`unit`) of the judged call `case`; `base` has the
    errors by row."""
    at = [(o, o.unit_of(case.setting, unit)) for o in case.outputs if o.of_unit(unit)]
    return max(float(base.maps[o.name].off[u.b][u.heads, u.rows].amax()) for o, u in at)


def _left(candidate: Result, sample: Result, names: Sequence[str]) -> float:
    """Returns the largest fraction, over the outputs `names`, of the root mean square error that a mistake leaves.
    candidate: the errors with the mistake; sample: the errors without it, of the same rows."""
    shares = [0.0]
    for name in names:
        before, after = sample.tallies[name], candidate.tallies[name]
        if after.strange or after.huge > before.huge:
            return 1.0
        if not before.strange and before.rms:
            shares.append(after.rms / before.rms)
    return max(shares)


def _confirmed(case: Case, matches: list[Match], sample: Result, failing: tuple[str, ...]) -> tuple[Explanation, ...]:
    """Returns explanations of the judged call `case` by those mistakes with which all its outputs pass, best first. The
    mistakes `matches` explain samples. Those that leave less of the error are tried first. If there are more than six
    (one in large calls), the others are returned untried if one of the first passes. sample: the errors without a
    mistake; failing: the names of the wrong outputs."""

    def order(f: Match) -> tuple[bool, float]:
        return f.mistake.general, float(f"{_left(f.result, sample, failing):.2g}")

    e = case.setting.extents
    left = _CONFIRMED if case.setting.problem.heads_q * int(e.q_len @ e.kv_len) < _LARGE else 1
    named: dict[str, Explanation] = {}
    for f in sorted(matches, key=order):
        name = f.mistake.name
        if name in named:
            continue
        if not left:
            named[name] = f.explained(failing)
            continue
        left -= 1
        outputs = [o for o in f.outputs(case) if o.name in {o.name for o in case.outputs}]
        try:
            result = measured(f.way.setting, outputs, units(f.way.setting, outputs), grade=PROGRAM)
        except _IMPOSSIBLE:
            continue
        if result.passes:
            named[name] = Match(f.mistake, f.way, result).explained(failing, confirmed=True)
    return tuple(named.values()) if any(m.confirmed for m in named.values()) else ()


def _alone(case: Case, tried: list[Match], sample: Result, failing: tuple[str, ...]) -> tuple[Explanation, ...]:
    """Returns explanations of single outputs (`failing`) of the judged call `case`: mistakes that change no correct
    output. tried: the mistakes with their remaining errors on samples; sample: the errors there without a mistake."""
    results: dict[tuple[str, str], Explanation] = {}
    for name in failing:
        passing = [f for f in tried if {*f.result.failing} <= {*failing} and f.result.tallies[name].passes]
        matches = [f for f in passing if _left(f.result, sample, [name]) <= LEFT]
        one = replace(case, outputs=tuple(o for o in case.outputs if o.name == name))
        for e in _confirmed(one, matches, sample, (name,)):
            same = results.get((e.name, e.detail))
            results[e.name, e.detail] = e if same is None else replace(e, outputs=(*same.outputs, name))
    return tuple(results.values())

"""Finds the mistake that explains a call's outputs: all are tried on some rows, matching mistakes on the complete
call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fusion_attention.contract import ContractError
from fusion_attention.judging.evaluate import Result, drawn, measured
from fusion_attention.judging.expected_error import POOR, PROGRAM
from fusion_attention.judging.mistakes import MISTAKES, Case, Mistake, Try
from fusion_attention.judging.outputs import Unit, of_heads, units
from fusion_attention.judging.progress import Watch, over, silent
from fusion_attention.judging.verdict import Explanation

# A mistake explains an error only if at most this fraction of the error remains, even within the error bound.
LEFT = 0.25
_CONFIRMED = 6  # explanations tried on the complete call; for a large call, only the best
_LARGE = 1 << 28  # pairs of rows and keys, of all heads
_IMPOSSIBLE = (RuntimeError, IndexError, ValueError, ContractError)


@dataclass(frozen=True, eq=False)
class Match:
    """A mistake, one way of making it, and its measured errors."""

    mistake: Mistake
    way: Try
    result: Result

    def explained(self, outputs: tuple[str, ...], *, confirmed: bool = False, noisy: bool = False) -> Explanation:
        """Converts the match to an explanation for reports."""
        m = self.mistake
        error = max((self.result.tallies[name].z for name in outputs), default=0.0)
        return Explanation(m.name, self.way.detail, m.means, m.fix, outputs, error, confirmed, noisy)


def diagnosed(case: Case, base: Result, seed: int = 0, watch: Watch = silent) -> tuple[tuple[Explanation, ...], bool]:
    """Returns (explanations of the outputs, best first; True if the outputs are only noisy)."""
    generator = torch.Generator().manual_seed(seed)
    pieces = drawn(base.maps, case.outputs, case.setting, generator)
    sample = measured(case.setting, case.outputs, pieces, grade=PROGRAM)
    failing = tuple(name for name in base.failing if name in sample.tallies)
    tried = [Match(m, way, result) for m, way, result in _tried(case, pieces, failing, watch)]
    full = [f for f in tried if f.result.passes and _left(f.result, sample, failing) <= LEFT]
    confirmed = _confirmed(case, full, failing)
    if confirmed:
        return confirmed, False
    if measured(case.setting, case.outputs, pieces, grade=POOR).passes:
        return (), True
    return _lesser(case, tried, pieces, sample, failing), False


def _tried(
    case: Case, pieces: Sequence[Unit], failing: tuple[str, ...], watch: Watch
) -> list[tuple[Mistake, Try, Result]]:
    """Measures every way of every mistake on sampled rows; drops mistakes that are impossible or explain too little.

    A way is measured on all sampled rows only if it explains an output where the first of them are wrong.
    """
    results = []
    quick = _first_wrong(case, pieces)
    before = measured(case.setting, case.outputs, quick, grade=PROGRAM)
    wrong = [name for name in failing if not before.tallies[name].passes]
    for mistake in over(watch, "mistakes tried", MISTAKES):
        for way in mistake.tries(case):
            outputs = case.outputs if way.outputs is None else way.outputs
            try:
                first = measured(way.setting, outputs, quick, grade=PROGRAM)
                explained = (first.tallies[n].passes or _left(first, before, [n]) <= LEFT for n in wrong)
                if wrong and not any(explained):
                    continue
                results.append((mistake, way, measured(way.setting, outputs, pieces, grade=PROGRAM)))
            except _IMPOSSIBLE:
                continue  # the mistake is impossible with this memory
    return results


def _first_wrong(case: Case, pieces: Sequence[Unit]) -> list[Unit]:
    """Returns the first piece of rows and the first of keys, with an error if there is one."""

    def errors(unit: Unit) -> bool:
        heads, before = of_heads(case.setting, unit), int(case.setting.extents.kv_len[unit.b]) if unit.second else 0
        rows = slice(unit.rows.start - before, unit.rows.stop - before)
        marks = (case.wrong[o.name][unit.b] for o in case.outputs if o.of_unit(unit) and o.name in case.wrong)
        return any(bool(wrong[heads, rows].any()) for wrong in marks)

    kinds = ([p for p in pieces if p.by_keys == by_keys] for by_keys in (False, True))
    return [max(kind, key=errors) for kind in kinds if kind]


def _left(candidate: Result, sample: Result, names: Sequence[str]) -> float:
    """Returns the largest fraction of an output's error that remains under a mistake."""
    shares = [0.0]
    for name in names:
        before, after = sample.tallies[name], candidate.tallies[name]
        if after.strange:
            return 1.0
        if not before.strange and before.rms:
            shares.append(after.rms / before.rms)
    return max(shares)


def _confirmed(case: Case, matches: list[Match], failing: tuple[str, ...]) -> tuple[Explanation, ...]:
    """Returns the matches that pass on the complete call, with all that explain it equally."""
    e = case.setting.extents
    left = _CONFIRMED if case.setting.problem.heads_q * int(e.q_len @ e.kv_len) < _LARGE else 1
    named: dict[str, Explanation] = {}
    for f in sorted(matches, key=lambda f: (f.mistake.general, f.result.z)):
        name = f.mistake.name
        if name in named:
            continue
        if not left:
            named[name] = f.explained(failing)
            continue
        left -= 1
        outputs = case.outputs if f.way.outputs is None else f.way.outputs
        try:
            result = measured(f.way.setting, outputs, units(f.way.setting, list(outputs)), grade=PROGRAM)
        except _IMPOSSIBLE:
            continue
        if result.passes:
            named[name] = Match(f.mistake, f.way, result).explained(failing, confirmed=True)
    return tuple(named.values()) if any(m.confirmed for m in named.values()) else ()


def _unlike(explanations: list[Explanation]) -> list[Explanation]:
    """Returns the best way of each mistake."""
    by_name: dict[str, Explanation] = {}
    for e in sorted(explanations, key=lambda e: e.error):
        by_name.setdefault(e.name, e)
    return list(by_name.values())


def _lesser(
    case: Case, tried: list[Match], pieces: Sequence[Unit], sample: Result, failing: tuple[str, ...]
) -> tuple[Explanation, ...]:
    """Returns explanations that leave only noise; if none, explanations of some outputs."""
    noisy = []
    for f in tried:
        if _left(f.result, sample, failing) <= LEFT:
            outputs = case.outputs if f.way.outputs is None else f.way.outputs
            if measured(f.way.setting, outputs, pieces, grade=POOR).passes:
                noisy.append(f.explained(failing, noisy=True))
    if noisy:
        return tuple(_unlike(noisy))
    partial: list[tuple[int, Explanation]] = []
    for f in tried:
        if not {*f.result.failing} <= {*failing}:
            continue  # it would make correct outputs wrong
        right = tuple(n for n in failing if f.result.tallies[n].passes and _left(f.result, sample, [n]) <= LEFT)
        if right:
            partial.append((len(right), f.explained(right)))
    most = max((count for count, _ in partial), default=0)
    return tuple(_unlike([e for count, e in partial if count == most]))

"""Which mistake explains the outputs of a call: all are tried on drawn pieces, those that fit on the whole call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fusion_attention.contract import ContractError
from fusion_attention.judging.evaluate import Result, drawn, measured
from fusion_attention.judging.expected_error import POOR, PROGRAM
from fusion_attention.judging.mistakes import MISTAKES, Case, Mistake, Try
from fusion_attention.judging.outputs import Unit, units
from fusion_attention.judging.verdict import Explanation

# A mistake that leaves more than this share of the error explains nothing, however near the bound allows it to be.
LEFT = 0.25
# From here on, in expected sizes, a first piece is not worth a second one.
HOPELESS = 60.0
_CONFIRMED = 6  # explanations that are tried on the whole call; of a large one, the best alone
_LARGE = 1 << 28  # pairs of rows and keys, of all heads
_IMPOSSIBLE = (RuntimeError, IndexError, ValueError, ContractError)


@dataclass(frozen=True, eq=False)
class Match:
    """A mistake, the way of making it, and what it gave."""

    mistake: Mistake
    way: Try
    result: Result

    def explained(self, outputs: tuple[str, ...], *, confirmed: bool = False, noisy: bool = False) -> Explanation:
        """As reports have it."""
        m = self.mistake
        error = max((self.result.tallies[name].z for name in outputs), default=0.0)
        return Explanation(m.name, self.way.detail, m.means, m.fix, outputs, error, confirmed, noisy)


def diagnosed(case: Case, base: Result, seed: int = 0) -> tuple[tuple[Explanation, ...], bool]:
    """(what explains the outputs, best first; whether they are merely noisy)."""
    generator = torch.Generator().manual_seed(seed)
    pieces = drawn(base.maps, case.outputs, case.setting, generator)
    sample = measured(case.setting, case.outputs, pieces, grade=PROGRAM)
    tried = [Match(m, way, result) for m, way, result in _tried(case, pieces, sample)]
    failing = tuple(name for name in base.failing if name in sample.tallies)
    full = [f for f in tried if f.result.passes and _left(f.result, sample, failing) <= LEFT]
    confirmed = _confirmed(case, full, failing)
    if confirmed:
        return confirmed, False
    if measured(case.setting, case.outputs, pieces, grade=POOR).passes:
        return (), True
    return _lesser(case, tried, pieces, sample, failing), False


def _tried(case: Case, pieces: Sequence[Unit], sample: Result) -> list[tuple[Mistake, Try, Result]]:
    """Every way of every mistake that gives anything on the pieces."""
    results = []
    quick = [p for p in pieces if not p.by_keys][:1] + [p for p in pieces if p.by_keys][:1]
    for mistake in MISTAKES:
        for way in mistake.tries(case):
            outputs = case.outputs if way.outputs is None else way.outputs
            try:
                first = measured(way.setting, outputs, quick, grade=PROGRAM)
                best = min((t.z for t in first.tallies.values() if t.count), default=0.0)
                if best > HOPELESS and first.z > HOPELESS:
                    continue
                results.append((mistake, way, measured(way.setting, outputs, pieces, grade=PROGRAM)))
            except _IMPOSSIBLE:
                continue  # No such memory: the mistake is impossible here.
    return results


def _left(candidate: Result, sample: Result, names: Sequence[str]) -> float:
    """The largest share of an output's error that a mistake leaves."""
    shares = [0.0]
    for name in names:
        before, after = sample.tallies[name], candidate.tallies[name]
        if after.strange:
            return 1.0
        if not before.strange and before.rms:
            shares.append(after.rms / before.rms)
    return max(shares)


def _confirmed(case: Case, matches: list[Match], failing: tuple[str, ...]) -> tuple[Explanation, ...]:
    """Those that hold on the whole call; what explains it equally stays beside the best."""
    e = case.setting.extents
    left = _CONFIRMED if case.setting.problem.heads_q * int(e.q_len @ e.kv_len) < _LARGE else 1
    named: dict[str, Explanation] = {}
    for f in sorted(matches, key=lambda f: f.result.z):
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
    """One way of each mistake, the best."""
    by_name: dict[str, Explanation] = {}
    for e in sorted(explanations, key=lambda e: e.error):
        by_name.setdefault(e.name, e)
    return list(by_name.values())


def _lesser(
    case: Case, tried: list[Match], pieces: Sequence[Unit], sample: Result, failing: tuple[str, ...]
) -> tuple[Explanation, ...]:
    """The explanations of the outputs but for noise; else those of some outputs."""
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
            continue  # What is right it would make wrong.
        right = tuple(n for n in failing if f.result.tallies[n].passes and _left(f.result, sample, [n]) <= LEFT)
        if right:
            partial.append((len(right), f.explained(right)))
    most = max((count for count, _ in partial), default=0)
    return tuple(_unlike([e for count, e in partial if count == most]))

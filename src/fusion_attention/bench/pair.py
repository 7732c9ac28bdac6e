"""Times two ways to compute the same result in alternation, A B A B ..., so that drift affects both equally."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

# A figure reaches its goal at this fraction of it: two runs on one machine differ by 3 %.
REACHED = 0.97
# Seconds; shorter calls are repeated within a turn, the peer's as often as ours.
SHORTEST = 0.01
# A row without a goal gets this many seconds of alternations, but at least FEWEST turns.
PATIENCE, FEWEST = 2.0, 2


@dataclass(frozen=True)
class Pair:
    """Two computations to compare, ours and a peer's, with the number of operations of ours.

    Args:
        group: heading of the rows that a chart shows together.
        name: description of the computation.
        peer_name: name of the alternative, which may be another computation by this library.
        ours, peer: functions that compute the result once.
        flops: operations of ours; a multiply-add is two.
        peak: the dtype of the peak rate, "float32" or "bfloat16"; "" for none. variant: the instruction set of the
            peak, None for the active one.
        peer_flops: operations of a peer that computes a different problem: rates are compared. 0: times are compared.
        goal, share_goal: the goals for the ratio and for the fraction of the peak; 0 for none.
    """

    group: str
    name: str
    peer_name: str
    ours: Callable[[], object]
    peer: Callable[[], object]
    flops: int
    peak: str = ""
    variant: str | None = None
    peer_flops: int = 0
    goal: float = 0.0
    share_goal: float = 0.0


@dataclass(frozen=True)
class Timing:
    """Median milliseconds of both; medians over turns of the ratio (peer's time / ours, or our rate / the peer's) and
    of the fraction of the peak; our rate; and the range of the ratios without the highest and lowest eighth."""

    group: str
    name: str
    peer_name: str
    ours_ms: float
    peer_ms: float
    ratio: float
    gflops: float
    share_of_peak: float
    goal: float
    share_goal: float
    low: float = 0.0
    high: float = 0.0

    @property
    def reached(self) -> bool | None:
        """True if every goal is reached; None without a goal."""
        wanted = [(self.ratio, self.goal), (self.share_of_peak, self.share_goal)]
        results = [value >= REACHED * goal for value, goal in wanted if goal]
        return all(results) if results else None


def seconds(call: Callable[[], object], times: int = 1) -> float:
    """Measures the mean wall time of a call over a number of repetitions."""
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times


class Probe:
    """Measures the machine's rate of multiply-adds in registers, for about as long as a call takes."""

    def __init__(self, dtype: str, variant: str | None, like: float) -> None:
        from fusion_attention import _native  # machines without the native core can still time other back ends

        self._multiply_adds, self._given = _native.multiply_adds, (dtype, variant)
        self._turns = 100_000
        for _ in range(2):
            self._turns = max(1000, round(self._turns * like / seconds(self._work)))

    def _work(self) -> float:
        dtype, variant = self._given
        return self._multiply_adds(dtype, torch.get_num_threads(), self._turns, variant)

    def rate(self) -> float:
        """Returns the operations per second, measured now."""
        start = time.perf_counter()
        return self._work() / (time.perf_counter() - start)


def measure(pair: Pair, turns: int) -> Timing:
    """Times a pair and the probe over a number of alternations, after one warm-up of each; fewer if a pair takes long
    and has no goal."""
    pair.ours()
    other = seconds(pair.peer)
    once = seconds(pair.ours)
    if not pair.goal and not pair.share_goal:
        turns = min(turns, max(FEWEST, int(PATIENCE / (once + other))))
    times = math.ceil(SHORTEST / once)
    probe = Probe(pair.peak, pair.variant, once * times) if pair.peak else None
    rows = [
        (seconds(pair.ours, times), seconds(pair.peer, times), probe.rate() if probe else 0.0) for _ in range(turns)
    ]
    work = pair.flops / pair.peer_flops if pair.peer_flops else 1.0
    median = statistics.median
    ratios = sorted(b / a * work for a, b, _ in rows)
    ours, peer = median(a for a, _, _ in rows), median(b for _, b, _ in rows)
    return Timing(
        pair.group,
        pair.name,
        pair.peer_name,
        ours * 1e3,
        peer * 1e3,
        median(ratios),
        pair.flops / ours / 1e9,
        median(pair.flops / a / rate if rate else 0.0 for a, _, rate in rows),
        pair.goal,
        pair.share_goal,
        ratios[len(ratios) // 8],
        ratios[-1 - len(ratios) // 8],
    )

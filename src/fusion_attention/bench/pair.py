"""measure(): times two functions alternately, A B A B ..., so changes of the machine's speed affect both equally."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

# A figure counts as reaching its goal from this fraction on, because two runs on one machine differ by 3 %.
REACHED = 0.97
# In seconds. Shorter calls of this library are repeated within a turn, and the peer's call as often.
SHORTEST = 0.01
# A row without a goal is timed for PATIENCE seconds, but for at least FEWEST turns.
PATIENCE, FEWEST = 2.0, 2


@dataclass(frozen=True)
class Pair:
    """Two functions whose times are compared: of this library, and of an alternative (the peer)."""

    group: str  # heading of the rows that tables and charts show together
    name: str  # description of the computation
    peer_name: str  # name of the peer, which may be another computation by this library
    # ours, peer: functions that compute the result once.
    ours: Callable[[], object]
    peer: Callable[[], object]
    flops: int  # floating-point operations of `ours`; a multiply-add is two
    peak: str = ""  # the dtype of the peak rate to compare with, "float32" or "bfloat16"; "": none
    variant: str | None = None  # the instruction set of the peak rate; None: the active one
    peer_flops: int = 0  # operations of a peer that computes another problem: rates are compared; 0: times are compared
    # goal, share_goal: the goals for the ratio and for the fraction of the peak; 0: none.
    goal: float = 0.0
    share_goal: float = 0.0


@dataclass(frozen=True)
class Timing:
    """The measured figures of two timed functions (a Pair): median milliseconds, ratio, GFLOP/s, and the goals."""

    # group, name, peer_name, goal, share_goal: those of the Pair.
    group: str
    name: str
    peer_name: str
    # ours_ms, peer_ms: median milliseconds.
    ours_ms: float
    peer_ms: float
    ratio: float  # median over turns of peer's time / ours (or our rate / the peer's)
    gflops: float  # the rate of this library in GFLOP/s
    share_of_peak: float  # median over turns of the rate divided by the peak rate; 0.0 without a peak
    goal: float
    share_goal: float
    # low, high: the range of the ratio, without the lowest and the highest eighth.
    low: float = 0.0
    high: float = 0.0

    @property
    def reached(self) -> bool | None:
        """True if this timing reaches every goal of its pair (ratio, fraction of the peak); None without a goal."""
        wanted = [(self.ratio, self.goal), (self.share_of_peak, self.share_goal)]
        results = [value >= REACHED * goal for value, goal in wanted if goal]
        return all(results) if results else None


def seconds(call: Callable[[], object], times: int = 1) -> float:
    """Returns the mean wall time of one run of a function, in seconds; times: number of runs."""
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times


class Probe:
    """Measures the peak arithmetic rate of one instruction set by a loop of multiply-adds in registers.

    Args:
        dtype, variant: dtype and instruction set of the loop.
        like: the time in seconds that one measurement takes, about that of the benchmark.
    """

    def __init__(self, dtype: str, variant: str | None, like: float) -> None:
        from fusion_attention import _native  # here, because other back ends are timed without the native core too

        self._multiply_adds, self._given = _native.multiply_adds, (dtype, variant)
        self._turns = 100_000
        for _ in range(2):
            self._turns = max(1000, round(self._turns * like / seconds(self._work)))

    def _work(self) -> float:
        dtype, variant = self._given
        return self._multiply_adds(dtype, torch.get_num_threads(), self._turns, variant)

    def rate(self) -> float:
        """Measures and returns the number of floating-point operations per second."""
        start = time.perf_counter()
        return self._work() / (time.perf_counter() - start)


def measure(pair: Pair, turns: int) -> Timing:
    """Times both functions of a pair, and the peak arithmetic rate, in turn after one warm-up; returns the medians.
    turns: the number of turns; fewer if the pair takes long and has no goal."""
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

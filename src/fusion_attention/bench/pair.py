"""How benchmarks time: two ways to compute one thing in turns, A B A B ...; a drifting machine slows both alike."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

# A figure reaches its goal from this share of it on: what two runs on one machine differ by.
REACHED = 0.97
# Seconds; shorter calls are made several times in a row, the peer's as often as ours, as a model's layers make them.
SHORTEST = 0.01
# Seconds of alternations that a row without a goal is worth, once it has FEWEST.
PATIENCE, FEWEST = 2.0, 2


@dataclass(frozen=True)
class Pair:
    """What is compared: our way and a peer's, and the arithmetic that ours does.

    Args:
        group: rows that a chart shows together.
        name: what is computed.
        peer_name: how a user would compute it otherwise; or ours in another form.
        ours, peer: compute it once.
        flops: of ours, multiply-adds counted twice.
        peak: the dtype whose multiply-adds are the peak: "float32" or "bfloat16", "" for none; variant: of which
            instruction set, None for the one that computes.
        peer_flops: of a peer that computes something else, so that rates are compared; 0: times are.
        goal, share_goal: the ratio and the share of the peak that we want to reach; 0 for none.
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
    """Median milliseconds of both, medians over neighbouring turns of the ratio (peer's time / ours, or our rate / the
    peer's) and of our share of the peak, our rate, and what all ratios lie between but an eighth at each end."""

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
        """Whether what has a goal reaches it; None without a goal."""
        wanted = [(self.ratio, self.goal), (self.share_of_peak, self.share_goal)]
        results = [value >= REACHED * goal for value, goal in wanted if goal]
        return all(results) if results else None


def seconds(call: Callable[[], object], times: int = 1) -> float:
    """Wall time of one call, out of so many in a row."""
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times


class Probe:
    """The machine's multiply-adds in registers, for about as long as a call takes: what its rate is a share of."""

    def __init__(self, dtype: str, variant: str | None, like: float) -> None:
        from fusion_attention import _native  # a machine without the core times other back ends

        self._multiply_adds, self._given = _native.multiply_adds, (dtype, variant)
        self._turns = 100_000
        for _ in range(2):
            self._turns = max(1000, round(self._turns * like / seconds(self._work)))

    def _work(self) -> float:
        dtype, variant = self._given
        return self._multiply_adds(dtype, torch.get_num_threads(), self._turns, variant)

    def rate(self) -> float:
        """Operations in a second, measured now."""
        start = time.perf_counter()
        return self._work() / (time.perf_counter() - start)


def measure(pair: Pair, turns: int) -> Timing:
    """Times a pair and the probe over `turns` alternations, after one of each that does not count; fewer of a pair that
    takes long and has no goal to reach."""
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

"""Two ways to compute one thing, timed in turns: A B A B ..., so that a drifting machine slows both alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Pair:
    """What is compared: ours and a peer's way, and the arithmetic that both do (0 where they differ)."""

    name: str
    ours: Callable[[], object]
    peer: Callable[[], object]
    flops: int = 0


@dataclass(frozen=True)
class Timing:
    """Median seconds of both, and the median of the ratios peer / ours of neighbouring turns."""

    name: str
    ours: float
    peer: float
    ratio: float
    gflops: float


def seconds(call: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(pair: Pair, turns: int) -> Timing:
    """Times a pair over `turns` alternations, after one of each that does not count."""
    pair.ours(), pair.peer()
    ours, peer = zip(*((seconds(pair.ours), seconds(pair.peer)) for _ in range(turns)), strict=True)
    ratio = statistics.median(b / a for a, b in zip(ours, peer, strict=True))
    mine = statistics.median(ours)
    return Timing(pair.name, mine, statistics.median(peer), ratio, pair.flops / mine / 1e9)

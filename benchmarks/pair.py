"""Two ways to compute one thing, timed in turns: A B A B ..., so that a drifting machine slows both alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Pair:
    """What is compared: our way and a peer's, and the arithmetic that ours does.

    Args:
        group: rows that a chart shows together.
        name: what is computed.
        peer_name: how a user would compute it otherwise.
        ours, peer: compute it once.
        flops: of ours, multiply-adds counted twice; peak: the machine's rate for them in GFLOP/s, 0 if not measured.
        peer_flops: of the peer where it does other work, and the ratio shall compare rates; else 0.
    """

    group: str
    name: str
    peer_name: str
    ours: Callable[[], object]
    peer: Callable[[], object]
    flops: int
    peak: float = 0.0
    peer_flops: int = 0


@dataclass(frozen=True)
class Timing:
    """Median milliseconds of both, the median of the ratios peer / ours of neighbouring turns, and our rate.

    Where the peer does other work, the ratio is our rate / the peer's.
    """

    group: str
    name: str
    peer_name: str
    ours_ms: float
    peer_ms: float
    ratio: float
    gflops: float
    share_of_peak: float


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
    if pair.peer_flops:
        ratio *= pair.flops / pair.peer_flops
    mine = statistics.median(ours)
    gflops = pair.flops / mine / 1e9
    share = gflops / pair.peak if pair.peak else 0.0
    milliseconds = (mine * 1e3, statistics.median(peer) * 1e3)
    return Timing(pair.group, pair.name, pair.peer_name, *milliseconds, ratio, gflops, share)

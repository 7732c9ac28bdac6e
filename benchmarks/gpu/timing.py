"""Times on a GPU: events around many launches, and the rates that the machine reaches in the same run."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

Call = Callable[[], object]
ROUNDS = 7
TARGET_MS = 60.0  # of one round


def _elapsed(call: Call, count: int) -> float:
    """Milliseconds of one of `count` calls in a row."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count


def milliseconds(call: Call) -> float:
    """The median of several rounds, each long enough to be timed; compiled and warm before."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    count = max(1, int(TARGET_MS / max(_elapsed(call, 2), 1e-3)))
    return statistics.median(_elapsed(call, count) for _ in range(ROUNDS))


def matmul_rate() -> float:
    """FLOP/s of an 8192-cubed bfloat16 product: what this machine's tensor cores give to torch."""
    n = 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * n**3 / milliseconds(lambda: a @ b) * 1e3


def read_rate() -> float:
    """Bytes per second of a sum over 4 GiB, far more than the caches hold."""
    values = torch.ones(1 << 30, device="cuda", dtype=torch.float32)
    return values.numel() * 4 / milliseconds(values.sum) * 1e3

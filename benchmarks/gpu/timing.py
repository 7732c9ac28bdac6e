"""Measures times on a GPU with events around many launches, and the machine's rates of products and of reading."""

import statistics
from dataclasses import dataclass

import torch

from benchmarks.backward_only import Call

ROUNDS = 7
TARGET_MS = 60.0  # duration of one round


@dataclass(frozen=True)
class Row:
    """A case: functions for us and for alternatives, and our operations and bytes (0: bytes are no limit)."""

    group: str
    name: str
    ours: Call
    peers: dict[str, Call]
    flops: int
    bytes: int = 0


def _elapsed(call: Call, count: int) -> float:
    """Returns the milliseconds per call of `count` consecutive calls."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count


def milliseconds(call: Call) -> float:
    """Returns the median of several rounds, each long enough to be timed, after compilation and warm-up."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    count = max(1, int(TARGET_MS / max(_elapsed(call, 2), 1e-3)))
    return statistics.median(_elapsed(call, count) for _ in range(ROUNDS))


def matmul_rate() -> float:
    """Returns the FLOP/s of an 8192-cubed bfloat16 product in torch, as the peak of the tensor cores."""
    n = 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * n**3 / milliseconds(lambda: a @ b) * 1e3


def read_rate() -> float:
    """Returns the bytes per second of a sum over 4 GiB, which is far larger than the caches."""
    values = torch.ones(1 << 30, device="cuda", dtype=torch.float32)
    return values.numel() * 4 / milliseconds(values.sum) * 1e3

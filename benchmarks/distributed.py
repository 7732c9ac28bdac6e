"""Times attention over sequences sharded across processes; measures memory, balance and overhead.

python -m benchmarks.distributed RANK WORLD STORE       # runs a rank, which reads commands from standard input
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

import fusion_attention as fa
from benchmarks.memory import resident
from fusion_attention import Band
from fusion_attention.bench.report import Report
from fusion_attention.distributed import attention
from fusion_attention.distributed.layout import layout_of

HEADS, DIM = 4, 128
TITLE = "Sequences sharded across processes of one thread each, causal, bfloat16, forward and backward"
COLUMNS = {"what": -52, "ours": 10, "measure": 10, "ratio": 6, "goal": 6}


@dataclass(frozen=True)
class Shared:
    """A measured value of sharded attention and its reference value."""

    what: str  # name of the measured value
    # ours, measure: value and reference in milliseconds, megabytes, pairs or microseconds.
    ours: float
    measure: float
    ratio: float  # ratio or difference of the two, which is compared with the goal
    goal: float  # lower limit of rates, upper limit of all others; 0: none


class Ranks:
    """The processes of one world, which execute commands; leaving the context ends them."""

    def __init__(self, world: int) -> None:
        store = str(Path(tempfile.mkdtemp()) / "store")
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        words = [sys.executable, "-m", "benchmarks.distributed"]
        self._all = [
            subprocess.Popen(
                [*words, str(rank), str(world), store],
                env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for rank in range(world)
        ]  # fmt: skip

    def ask(self, what: str, **words: Any) -> list[dict[str, float]]:
        """Sends a command to all ranks and returns the measurements of each."""
        for process in self._all:
            assert process.stdin is not None
            process.stdin.write(json.dumps({"what": what, **words}) + "\n")
            process.stdin.flush()
        return [json.loads(process.stdout.readline()) for process in self._all if process.stdout]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._all:
            process.kill()
            process.wait()


def _tensors(length: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, length, HEADS, DIM).bfloat16() for _ in range(4)]


def _step(call: Callable[..., Any], given: list[torch.Tensor]) -> None:
    *inputs, upstream = given
    q, k, v = (t.detach().requires_grad_() for t in inputs)
    call(q, k, v, band=Band.causal()).backward(upstream)


def _rank(rank: int, world: int, store: str) -> None:
    """Executes commands: "step" of a schedule, "alone" (fa.attention on each rank), "send" (bytes in a ring)."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    state: tuple[Any, list[torch.Tensor]] = (None, [])
    for line in sys.stdin:
        command = json.loads(line)
        length, schedule = command["length"], command.get("schedule", "")
        if state[0] != command:
            tokens = layout_of(schedule, (length,), (world,)).sizes[rank] if command["what"] == "step" else length
            state = (
                command,
                [torch.zeros(length, dtype=torch.uint8) for _ in range(2)]
                if command["what"] == "send"
                else _tensors(tokens),
            )

        def call(*tensors: torch.Tensor, length: int = length, schedule: str = schedule, **words: Any) -> Any:
            return attention(*tensors, schedule=schedule, tokens=length, **words)

        dist.barrier()
        before, begun, cpu = resident("VmRSS"), time.perf_counter(), time.process_time()
        if command["what"] == "send":
            out, into = state[1]
            around = dist.P2POp(dist.isend, out, (rank + 1) % world), dist.P2POp(dist.irecv, into, (rank - 1) % world)
            for work in dist.batch_isend_irecv(list(around)):
                work.wait()
        else:
            _step(call if command["what"] == "step" else fa.attention, state[1])
        taken, used = time.perf_counter() - begun, time.process_time() - cpu
        results = {"ms": taken * 1e3, "cpu_ms": used * 1e3, "mb": (resident("VmHWM") - before) / 1e6}
        print(json.dumps(results), flush=True)


def rates(quick: bool, turns: int) -> list[Shared]:
    """Times two processes of one thread beside one process of two threads: wall time, and CPU time of all threads."""
    length, result = 2048 if quick else 16384, []
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    one = partial(_step, fa.attention, _tensors(length))
    try:
        with Ranks(2) as ranks:
            for schedule, goal in (("zigzag", 0.9), ("ring", 0.0), ("allgather", 0.0), ("ulysses", 0.0)):
                ours, measure = [], []
                for turn in range(turns + 1):
                    begun, cpu = time.perf_counter(), time.process_time()
                    one()
                    taken = ((time.perf_counter() - begun) * 1e3, (time.process_time() - cpu) * 1e3)
                    each = ranks.ask("step", length=length, schedule=schedule)
                    if turn:  # the first turn is a warm-up
                        measure.append(taken)
                        ours.append((max(rank["ms"] for rank in each), sum(rank["cpu_ms"] for rank in each)))
                for at, clock, bound in ((0, "wall ms", goal), (1, "CPU ms", 0.0)):
                    a, b = (statistics.median(pair[at] for pair in pairs) for pairs in (ours, measure))
                    ratio = statistics.median(m[at] / o[at] for o, m in zip(ours, measure, strict=True))
                    result.append(Shared(f"{schedule}, 2 ranks, S {length}, {clock}", a, b, ratio, bound))
    finally:
        torch.set_num_threads(threads)
    return result


def memory(quick: bool) -> list[Shared]:
    """Measures the memory of a rank beyond its tensors, with equal tensors per rank in worlds of three and four."""
    tokens, grown = 1024 if quick else 8192, []
    for world in (3, 4):  # with two ranks, only one block arrives from other ranks
        with Ranks(world) as ranks:
            grown.append(max(rank["mb"] for rank in ranks.ask("step", length=tokens * world, schedule="zigzag")))
    return [Shared(f"zigzag, growth of a rank with {tokens} tokens, 4 ranks beside 3, MB", grown[1], grown[0],
                   grown[1] / grown[0], 0.0)]  # fmt: skip


def balance(length: int = 16384) -> list[Shared]:
    """Counts the causal pairs of the busiest rank relative to the mean."""
    results = []
    for schedule, goal in (("zigzag", 1.05), ("ring", 0.0)):
        placement = layout_of(schedule, (length,), (8,))
        pairs = [sum((end * (end + 1) - at * (at + 1)) / 2 for _, at, end in chunks) for chunks in placement.ranks]
        mean = sum(pairs) / len(pairs)
        results.append(Shared(f"{schedule}, 8 ranks, S {length}, pairs", max(pairs), mean, max(pairs) / mean, goal))
    return results


def overhead() -> list[Shared]:
    """Compares a world of one rank with fusion_attention.attention for a tiny call, in microseconds."""
    store = str(Path(tempfile.mkdtemp()) / "store")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    try:
        q = torch.randn(1, 4, 2, 32)
        taken: dict[str, list[float]] = {"ours": [], "measure": []}
        for _ in range(200):
            for name, call in (("ours", attention), ("measure", fa.attention)):
                begun = time.perf_counter()
                for _ in range(50):
                    call(q, q, q)
                taken[name].append((time.perf_counter() - begun) / 50 * 1e6)
        ours, measure = (statistics.median(times) for times in taken.values())
    finally:
        dist.destroy_process_group()
    return [Shared("one rank, us per call; goal: at most 20 more", ours, measure, ours - measure, 20.0)]


def show(quick: bool, turns: int, console: Console) -> list[Shared]:
    """Measures and prints every row."""
    report, result = Report(console, TITLE, COLUMNS), []
    for rows in (balance, overhead, lambda: rates(quick, turns), lambda: memory(quick)):
        for row in rows():
            report.add(row.what, f"{row.ours:.1f}", f"{row.measure:.1f}", f"{row.ratio:.2f}", f"{row.goal or ''}")
            result.append(row)
    return result


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _rank(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])

"""Defines the decode cases of `make bench` and their goals, and measures them.

Runs of each case alternate with its alternatives, other forms of the call, reading of memory and multiplication in
registers, so that changes of the machine's speed affect all equally. bandwidth_share is our rate of reading the cache
divided by the rate of reading memory in pages of the same size.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from rich.console import Console

from benchmarks.decode import READ_BYTES, Shape, onnx_peer, peers, reader, step
from fusion_attention import npu
from fusion_attention import plan as planning
from fusion_attention.bench.pair import REACHED, Probe, seconds
from fusion_attention.bench.report import Report

# Memory that reads faster than this, in GB/s, has a lower goal for bandwidth_share.
FAST = 40.0


@dataclass(frozen=True)
class Case:
    """A shape and its goals.

    Args:
        peers: measure the alternatives; ratios are their time / ours.
        others: other forms of the call by name; ratios are our rate of reading / theirs.
        by_time: ratios to `others` are their time / ours.
        goals: lower limits of ratios, by the names of peers and others.
        slow, fast: the goal of bandwidth_share where memory is slower or faster than FAST; 0: none.
        read_part: factor of that goal, or of the rate that 0.75 of the peak arithmetic allows where that is less.
    """

    shape: Shape
    peers: bool = False
    others: dict[str, Shape] = field(default_factory=dict)
    by_time: bool = False
    goals: dict[str, float] = field(default_factory=dict)
    slow: float = 0.85
    fast: float = 0.7
    read_part: float = 1.0


@dataclass(frozen=True)
class Row:
    """The medians of a case over all turns.

    Attributes:
        ms: our time in milliseconds.
        rate, read: GB/s of our reading of the cache, and of reading memory.
        bandwidth_share: their ratio.
        gflops, share_of_peak: our GFLOP/s, and their fraction of the peak.
        ratios: comparisons with peers and other forms, by name.
        goals: lower limits of ratios by name; "share": of bandwidth_share.
    """

    name: str
    ms: float
    rate: float
    read: float
    bandwidth_share: float
    gflops: float
    share_of_peak: float
    ratios: dict[str, float]
    goals: dict[str, float]

    @property
    def reached(self) -> bool | None:
        """True if every goal is met; None without a goal."""
        results = {"share": self.bandwidth_share, **self.ratios}
        return (
            all(results[n] >= REACHED * goal for n, goal in self.goals.items() if n in results) if self.goals else None
        )


@dataclass(frozen=True)
class Latency:
    """The median microseconds of a call, and their upper limit."""

    name: str
    us: float
    goal: float


FOLDED, ROWS, PAGES, INT8, BATCH8, PLANNED = "SDPA folded", "rows", "pages", "int8", "batch 8", "planned, huge pages"
CACHED = "in a cache"
BF16, INT = Shape("bf16 pages"), Shape("int8 pages", kind="int8")
_REST = {"read_part": 0.75}
CASES = (
    Case(BF16, peers=True, others={ROWS: replace(BF16, page=0)}, by_time=True, goals={FOLDED: 3.2, ROWS: 1 / 1.05}),
    Case(Shape("fp16 pages", kind="float16"), slow=0, fast=0),
    Case(INT, peers=True, others={ROWS: replace(INT, page=0)}, by_time=True, goals={FOLDED: 6, ROWS: 1 / 1.05},
         slow=0, fast=0.6),
    Case(replace(BF16, name="bf16 pages, as called", called=True), peers=True, by_time=True, goals={FOLDED: 3.2},
         slow=0, fast=0, others={PLANNED: BF16, CACHED: replace(BF16, cached=True)}),
    Case(replace(INT, name="int8 pages, as called", called=True), peers=True, by_time=True, goals={FOLDED: 6},
         slow=0, fast=0, others={PLANNED: INT, CACHED: replace(INT, cached=True)}),
    Case(Shape("int4 pages", kind="int4"), others={INT8: INT}, by_time=True, goals={INT8: 1.0}, slow=0, fast=0),
    Case(Shape("bf16 batch 1", batch=1, keys=32768), others={BATCH8: BF16}, goals={BATCH8: 0.85}, slow=0, fast=0),
    Case(Shape("int8 batch 1", batch=1, keys=65536, kind="int8"), others={BATCH8: INT}, goals={BATCH8: 0.85}, slow=0,
         fast=0),
    Case(Shape("bf16 last page partly filled", keys=4001), **_REST),
    *(Case(Shape(f"bf16 group {g}", batch=8 if g < 32 else 4, group=g), **_REST) for g in (1, 2, 8, 16, 32, 64)),
    *(Case(Shape(f"bf16 D{d}", dim=d), **_REST) for d in (64, 96, 256)),
    Case(Shape("bf16 D576/512, 16 heads", heads_kv=1, group=16, dim=576, dim_v=512, keys=8192, shares=True), **_REST),
    Case(Shape("bf16 D576/512, 128 heads", heads_kv=1, group=128, dim=576, dim_v=512, shares=True), **_REST),
    *(Case(Shape(f"int8 group {g}", batch=8 if g < 32 else 4, group=g, kind="int8"), slow=0, fast=0)
      for g in (1, 8, 16, 64)),
)  # fmt: skip


def measure(case: Case, turns: int) -> Row:
    """Times a case, its alternatives, other forms, reading and multiplication in alternating runs, after a warm-up."""
    s, t = case.shape, step(case.shape)
    calls: dict[str, Callable[[], object]] = {"ours": t.ours, "read": reader(s.called)}
    named = {name: step(other) for name, other in case.others.items()}
    calls |= {name: other.ours for name, other in named.items()}
    if case.peers and s.stored:
        calls[FOLDED] = peers(step(replace(s, kind="bfloat16")))[FOLDED]
    elif case.peers:
        calls |= peers(t)
        if (peer := onnx_peer(s)) is not None:
            calls["onnxruntime float32"] = peer
    with torch.no_grad():
        for call in calls.values():
            call()
        probe = Probe("bfloat16", None, seconds(t.ours))
        taken = [({n: seconds(call) for n, call in calls.items()}, probe.rate()) for _ in range(turns)]

    def middle(of: Callable[[dict[str, float]], float]) -> float:
        return statistics.median(of(turn) for turn, _ in taken)

    ours, read = middle(lambda turn: turn["ours"]), READ_BYTES / middle(lambda turn: turn["read"])
    ratios = {}
    for name in calls.keys() - {"ours", "read"}:
        work = s.bytes / case.others[name].bytes if name in case.others and not case.by_time else 1.0
        ratios[name] = middle(lambda turn, name=name, work=work: work * turn[name] / turn["ours"])
    peak = statistics.median(rate for _, rate in taken)
    goals = dict(case.goals)
    if goal_share := case.fast if read >= FAST * 1e9 else case.slow:
        by_arithmetic = 0.75 * peak / (s.flops / s.bytes) / read if case.read_part < 1 else 1.0
        goals["share"] = case.read_part * min(goal_share, by_arithmetic)
    return Row(
        s.name, ours * 1e3, s.bytes / ours / 1e9, read / 1e9,
        middle(lambda turn: s.bytes / turn["ours"] / (READ_BYTES / turn["read"])), s.flops / ours / 1e9,
        statistics.median(s.flops / turn["ours"] / rate for turn, rate in taken),
        {name: ratios[name] for name in calls if name in ratios}, goals,
    )  # fmt: skip


def smaller(case: Case) -> Case:
    """Returns the case with one sequence, for quick runs."""
    others = {name: replace(other, batch=1) for name, other in case.others.items()}
    return replace(case, shape=replace(case.shape, batch=1), others=others)


def table(quick: bool, turns: int) -> Iterator[Row]:
    """Measures every row; int8 is compared with bfloat16 alternatives of the same shape."""
    for case in CASES:
        yield measure(smaller(case) if quick else case, turns)


def latencies(turns: int = 3000) -> list[Latency]:
    """Times a call for one sequence, one head and 16 tokens."""
    t = step(Shape("small", batch=1, heads_kv=1, group=1, keys=16, page=16))
    plan = planning.plan(t.plan.problem, t.plan.extents, torch.device("cpu"), updatable=True)
    lengths = np.array([16])

    def both() -> None:
        plan.update(lengths)
        plan.run(t.operands)

    q, cache = torch.randn(1, 1, 128).bfloat16(), torch.randn(1, 16, 128).bfloat16()

    def interface() -> object:
        return npu.npu_incre_flash_attention(q, cache, cache, num_heads=1, scale_value=0.1)

    results = []
    for name, call, goal in (("plan.update + run", both, 12.0), ("npu_incre_flash_attention", interface, 15.0)):
        call()
        results.append(Latency(name, statistics.median(seconds(call) for _ in range(turns)) * 1e6, goal))
    return results


TITLE = "Decode: medians of alternating turns; share = our rate of reading / the machine's; ratio = peer's / ours"
COLUMNS = {
    "case": -36,
    "ms": 7,
    "GB/s": 6,
    "read": 6,
    "share": 6,
    "of peak": 7,
    "reached": 7,
    "ratios": -52,
    "goal": -40,
}


def show(row: Row, report: Report) -> None:
    """Prints a row of the decode table."""

    def listed(values: dict[str, float]) -> str:
        return ", ".join(f"{name} {value:.2f}" for name, value in values.items())

    figures = (
        f"{row.ms:.2f}",
        f"{row.rate:.1f}",
        f"{row.read:.1f}",
        f"{row.bandwidth_share:.2f}",
        f"{row.share_of_peak:.2f}",
    )
    reached = "" if row.reached is None else "yes" if row.reached else "no"
    report.add(row.name, *figures, reached, listed(row.ratios), listed(row.goals))


def measured(quick: bool, turns: int, console: Console) -> tuple[list[Row], list[Latency]]:
    """Measures and prints every row."""
    report, result = Report(console, TITLE, COLUMNS), []
    for row in table(quick, turns):
        show(row, report)
        result.append(row)
    waits = latencies()
    for wait in waits:
        console.print(f"{wait.name}: {wait.us:.1f} us (goal: below {wait.goal:.0f})")
    return result, waits

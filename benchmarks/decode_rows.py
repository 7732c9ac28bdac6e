"""Defines the decode cases of `make bench` and their goals: pairs with reading of memory, alternatives and other forms.

The ratio to reading memory is our rate of reading the cache divided by the rate of reading memory in pages of the same
size.
"""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import torch

from benchmarks.decode import READ_BYTES, Shape, onnx_peer, peers, reader, step
from benchmarks.figures import Figure
from fusion_attention import _native, npu
from fusion_attention import plan as planning
from fusion_attention.bench.pair import Pair, seconds

GROUP = "decode"
# Memory that reads faster than this, in GB/s, has a lower goal for our rate of reading.
FAST = 40.0


@dataclass(frozen=True)
class Case:
    """A shape and its goals.

    Args:
        peers: measure the alternatives.
        others: other forms of the call by name.
        by_time: ratios to `others` are their time / ours; else our rate / theirs.
        goals: lower limits of ratios, by the names of peers and others.
        slow, fast: the goal of the rate of reading where memory is slower or faster than FAST; 0: none.
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


FOLDED, ROWS, INT8, BATCH8, PLANNED = "SDPA folded", "rows", "int8", "batch 8", "planned, huge pages"
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


@cache
def peak() -> dict[str, float]:
    """Returns the machine's peak rates in GFLOP/s by dtype, and "read" in GB/s."""
    return _native.machine_peak(torch.get_num_threads())


def goal_of_reading(case: Case) -> float:
    """Returns the goal of our rate of reading, as a fraction of the memory's; 0: none."""
    goal, read = case.fast if peak()["read"] >= FAST else case.slow, peak()["read"]
    by_arithmetic = 0.75 * peak()["bfloat16"] / (case.shape.flops / case.shape.bytes) / read
    return case.read_part * (min(goal, by_arithmetic) if case.read_part < 1 else goal)


def pairs_of(case: Case) -> Iterator[Pair]:
    """Yields the pairs of a case: reading of memory, alternatives and other forms of the call."""
    s, ours, reading = case.shape, torch.no_grad()(step(case.shape).ours), goal_of_reading(case)
    read, cached = reader(s.called), round(s.bytes)
    yield Pair(GROUP, f"{s.name}, GB/s", "reading memory", ours, read, cached, peer_flops=READ_BYTES, goal=reading)
    calls = {}
    if case.peers:
        given = step(replace(s, kind="bfloat16") if s.stored else s)
        calls = {name: call for name, call in peers(given).items() if name == FOLDED or not s.stored}
        if not s.stored and (peer := onnx_peer(s)) is not None:
            calls["onnxruntime float32"] = peer
    work = dict.fromkeys(calls, 0)
    for name, other in case.others.items():
        calls[name], work[name] = step(other).ours, 0 if case.by_time else other.flops
    for name, call in calls.items():
        theirs, goal = torch.no_grad()(call), case.goals.get(name, 0.0)
        yield Pair(GROUP, s.name, name, ours, theirs, s.flops, "bfloat16", peer_flops=work[name], goal=goal)


def rows(quick: bool) -> Iterator[Pair]:
    """Times every case; int8 is compared with bfloat16 alternatives of the same shape; quick: one sequence each."""
    for case in CASES:
        if quick:
            others = {name: replace(other, batch=1) for name, other in case.others.items()}
            case = replace(case, shape=replace(case.shape, batch=1), others=others)
        yield from pairs_of(case)


def latencies(turns: int = 3000) -> Iterator[Figure]:
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

    for name, call, goal in (("plan.update + run", both, 12.0), ("npu_incre_flash_attention", interface, 15.0)):
        call()
        yield Figure(name, "us", statistics.median(seconds(call) for _ in range(turns)) * 1e6, goal)

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

from benchmarks.decode import READ_BYTES, called, onnx_peer, peers, reader, step_of
from benchmarks.figures_with_goals import Figure
from benchmarks.kv_cache_calls import Case, call, operands_of
from fusion_attention import _native, npu
from fusion_attention import plan as planning
from fusion_attention.bench.pair import Pair, seconds

GROUP = "decode"
# Memory that reads faster than this, in GB/s, has a lower goal for our rate of reading.
FAST = 40.0


@dataclass(frozen=True)
class Row:
    """A decode step and its goals."""

    name: str
    case: Case  # with small pages the public function is called, else a plan
    peers: bool = False  # measure the alternatives
    others: dict[str, Case] = field(default_factory=dict)  # other forms of the call by name
    by_time: bool = False  # ratios to `others` are their time / ours; else our rate / theirs
    goals: dict[str, float] = field(default_factory=dict)  # lower limits of ratios, by the names of peers and others
    # slow, fast: the goal of the rate of reading where memory is slower or faster than FAST; 0: none.
    slow: float = 0.85
    fast: float = 0.7
    # Factor of that goal, or of the rate that 0.75 of the peak arithmetic allows where that is less.
    read_part: float = 1.0


FOLDED, ROWS, INT8, BATCH8, PLANNED = "SDPA folded", "rows", "int8", "batch 8", "planned, huge pages"
CACHED = "in a cache"
BF16, INT = step_of("bf16"), step_of("int8")
_REST = {"read_part": 0.75}
_MLA = {"heads_kv": 1, "dim": 576, "dim_v": 512, "shares": True}


def as_called(name: str, case: Case, goal: float) -> Row:
    """Returns a row of the public function beside a plan, and beside a plan over a cache that the CPU's cache holds."""
    others = {PLANNED: case, CACHED: replace(case, cached=True)}
    called = replace(case, small_pages=True)
    return Row(f"{name} pages, as called", called, True, others, True, {FOLDED: goal}, slow=0, fast=0)


ROWS_OF_ALL = (
    Row("bf16 pages", BF16, True, {ROWS: replace(BF16, page=0)}, True, {FOLDED: 3.2, ROWS: 1 / 1.05}),
    Row("fp16 pages", step_of("fp16"), slow=0, fast=0),
    Row("int8 pages", INT, True, {ROWS: replace(INT, page=0)}, True, {FOLDED: 6, ROWS: 1 / 1.05}, slow=0, fast=0.6),
    as_called("bf16", BF16, 3.2),
    as_called("int8", INT, 6),
    Row("int4 pages", step_of("int4"), others={INT8: INT}, by_time=True, goals={INT8: 1.0}, slow=0, fast=0),
    Row("bf16 batch 1", step_of("bf16", 1, keys=32768), others={BATCH8: BF16}, goals={BATCH8: 0.85}, slow=0, fast=0),
    Row("int8 batch 1", step_of("int8", 1, keys=65536), others={BATCH8: INT}, goals={BATCH8: 0.85}, slow=0, fast=0),
    Row("bf16 last page partly filled", step_of("bf16", keys=4001), **_REST),
    *(Row(f"bf16 group {g}", step_of("bf16", 8 if g < 32 else 4, group=g), **_REST) for g in (1, 2, 8, 16, 32, 64)),
    *(Row(f"bf16 D{d}", step_of("bf16", dim=d), **_REST) for d in (64, 96, 256)),
    Row("bf16 D576/512, 16 heads", step_of("bf16", group=16, keys=8192, **_MLA), **_REST),
    Row("bf16 D576/512, 128 heads", step_of("bf16", group=128, **_MLA), **_REST),
    *(Row(f"int8 group {g}", step_of("int8", 8 if g < 32 else 4, group=g), slow=0, fast=0) for g in (1, 8, 16, 64)),
)


@cache
def peak() -> dict[str, float]:
    """Returns the machine's peak rates in GFLOP/s by dtype, and "read" in GB/s."""
    return _native.machine_peak(torch.get_num_threads())


def goal_of_reading(row: Row) -> float:
    """Returns the goal of our rate of reading, as a fraction of the memory's; 0: none."""
    goal, read = row.fast if peak()["read"] >= FAST else row.slow, peak()["read"]
    by_arithmetic = 0.75 * peak()["bfloat16"] / (row.case.flops / row.case.bytes) / read
    return row.read_part * (min(goal, by_arithmetic) if row.read_part < 1 else goal)


def pairs_of(row: Row) -> Iterator[Pair]:
    """Yields the pairs of a row: reading of memory, alternatives and other forms of the call."""
    c = row.case
    ours = torch.no_grad()((called if c.small_pages else call)(c))
    read, reading = reader(c.small_pages), goal_of_reading(row)
    name, size = f"{row.name}, GB/s", round(c.bytes)
    yield Pair(GROUP, name, "reading memory", ours, read, size, peer_flops=READ_BYTES, goal=reading)
    calls = {}
    if row.peers:
        theirs = peers(replace(c, kind="bfloat16") if c.stored else c)
        calls = {name: peer for name, peer in theirs.items() if name == FOLDED or not c.stored}
        if not c.stored and (peer := onnx_peer(c)) is not None:
            calls["onnxruntime float32"] = peer
    work = dict.fromkeys(calls, 0)
    for name, other in row.others.items():
        calls[name], work[name] = call(other), 0 if row.by_time else other.flops
    for name, peer in calls.items():
        theirs, goal = torch.no_grad()(peer), row.goals.get(name, 0.0)
        yield Pair(GROUP, row.name, name, ours, theirs, c.flops, "bfloat16", peer_flops=work[name], goal=goal)


def rows(quick: bool) -> Iterator[Pair]:
    """Times every row; int8 is compared with bfloat16 alternatives of the same shape; quick: one sequence each."""

    def short(case: Case) -> Case:
        return replace(case, q_len=case.q_len[:1], kv_len=case.kv_len[:1]) if quick else case

    for row in ROWS_OF_ALL:
        others = {name: short(other) for name, other in row.others.items()}
        yield from pairs_of(replace(row, case=short(row.case), others=others))


def latencies(turns: int = 3000) -> Iterator[Figure]:
    """Times a call for one sequence, one head and 16 tokens."""
    case = step_of("bf16", 1, 1, 1, 16, page=16)
    plan = planning.plan(case.problem, case.extents, torch.device("cpu"), updatable=True)
    operands, lengths = operands_of(case), np.array([16])

    def both() -> None:
        plan.update(lengths)
        plan.run(operands)

    q, cache = torch.randn(1, 1, 128).bfloat16(), torch.randn(1, 16, 128).bfloat16()

    def interface() -> object:
        return npu.npu_incre_flash_attention(q, cache, cache, num_heads=1, scale_value=0.1)

    for name, step, goal in (("plan.update + run", both, 12.0), ("npu_incre_flash_attention", interface, 15.0)):
        step()
        yield Figure(name, "us", statistics.median(seconds(step) for _ in range(turns)) * 1e6, goal)

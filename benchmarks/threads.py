"""Times calls on all threads beside one thread, and the time that a planned call adds to its kernels."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import fusion_attention as fa
from benchmarks.dense import arithmetic, forward, rows, triangle
from fusion_attention import _native
from fusion_attention.backends import cpu
from fusion_attention.bench.pair import Pair
from fusion_attention.contract import bind
from fusion_attention.ops.training import api_definition as record
from fusion_attention.ops.training.lowered_call import operands_of
from fusion_attention.plan import Plan, plan

BF16 = torch.bfloat16


def with_threads(count: int, call: Callable[[], object]) -> Callable[[], object]:
    """Returns a function that runs the call with `count` threads of torch."""

    def run() -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        call()
        torch.set_num_threads(before)

    return run


def threads(quick: bool) -> Iterator[Pair]:
    """Times all threads beside one thread, and the AVX2 kernels beside their peak."""
    size, count = 512 if quick else 2048, torch.get_num_threads()
    for heads in (8, 1):
        q, k, v = rows(BF16, (heads, heads), size, 128)
        for causal in (False, True):
            ours = forward(q, k, v, band=fa.Band.causal() if causal else None)
            flops = arithmetic(q, triangle(size) if causal else size * size, 2)
            name = f"{count} threads, {heads} heads, S{size} {'causal' if causal else 'full'}"
            goal = 0.0 if count == 1 else 0.95 * count
            yield Pair("threads", name, "one thread", ours, with_threads(1, ours), flops, "bfloat16", goal=goal)
    if "v3" in _native.cpu_features()["runnable"]:
        q, k, v = rows(torch.float32, (8, 8), size, 128)
        forward_plan, operands = planned(q, k, v)
        v3 = dataclasses.replace(
            forward_plan, schedule=cpu.schedule(forward_plan.problem, forward_plan.extents, forward_plan.op_kind, "v3")
        )
        flops = arithmetic(q, size * size, 2)
        ours = functools.partial(v3.run, operands)
        peer = forward(q, k, v)
        yield Pair("threads", "AVX2, fp32 D128", "ours", ours, peer, flops, "float32", "v3", share_goal=0.80)


def planned(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[Plan, Any]:
    """Returns the plan of a simple call and its operands."""
    call = record.dense_call(bind(record.RECORD, {"q": q, "k": k, "v": v, "layout": "BNSD"}))
    stats = [q.new_empty(q.shape[:3], dtype=torch.float32) for _ in range(2)]
    return plan(call.problem, call.extents, q.device), operands_of(call, torch.empty_like(q), *stats)


def overhead_us() -> float:
    """Returns microseconds of plan.run() for sixteen rows of one head, where the kernels take almost no time."""
    forward_plan, operands = planned(*rows(torch.float32, (1, 1), 16, 64))
    best = 1e9
    for _ in range(200):
        start = time.perf_counter()
        for _ in range(10):
            forward_plan.run(operands)
        best = min(best, (time.perf_counter() - start) / 10)
    return best * 1e6

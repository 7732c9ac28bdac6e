"""Times optional features, shapes and bands beside a plain call."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

import fusion_attention as fa
from benchmarks.dense import arithmetic, forward, rows, triangle
from fusion_attention import _native
from fusion_attention.backends import cpu
from fusion_attention.bench.pair import Pair
from fusion_attention.contract import bind
from fusion_attention.npu import npu_fusion_attention, npu_fusion_attention_v2
from fusion_attention.ops.shared.sparse_modes import mode_band
from fusion_attention.ops.training import api_definition as record
from fusion_attention.ops.training.call import operands_of
from fusion_attention.plan import Plan, plan

BF16 = torch.bfloat16


def costs(quick: bool) -> Iterator[Pair]:
    """Times features beside the same call without them; ratio: relative speed."""
    size = 512 if quick else 2048
    q, k, v = rows(BF16, (8, 8), size, 128)
    flops, half, causal = arithmetic(q, size * size, 2), arithmetic(q, triangle(size), 2), fa.Band.causal()
    slopes = torch.tensor([2.0 ** -(h + 1) for h in range(8)])

    def pair(name: str, ours: Callable[[], object], baseline: Callable[[], object], flops: int, loss: float) -> Pair:
        goal = 0.0 if quick else 1 / (1 + loss)
        return Pair("costs", f"{name}, S{size}", "ours without", ours, baseline, flops, "bfloat16", goal=goal)

    baseline = forward(q, k, v, band=causal)
    yield pair("causal ALiBi", forward(q, k, v, band=causal, alibi_slopes=slopes), baseline, half, 0.08)
    yield pair("causal softcap", forward(q, k, v, band=causal, softcap=50.0), baseline, half, 0.20)
    mask = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
    rooted: dict[str, Any] = dict(pse=slopes, pse_type=3, q_start_idx=[0], kv_start_idx=[0])
    calls = []
    for bias in ({}, rooted):
        given: dict[str, Any] = dict(scale=128**-0.5, atten_mask=mask, sparse_mode=2, **bias)
        calls.append(torch.no_grad()(lambda given=given: npu_fusion_attention_v2(q, k, v, 8, "BNSD", **given)))
    yield pair("causal ALiBi, square root", calls[1], calls[0], half, 0.20)
    bits = torch.randint(0, 256, (8 * size * size // 8,), dtype=torch.uint8)
    baseline = forward(q, k, v)
    yield pair("dropout, bits", forward(q, k, v, keep_prob=0.9, drop_bits=bits), baseline, flops, 0.20)
    yield pair("dropout, drawn", forward(q, k, v, keep_prob=0.9, seed=1), baseline, flops, 0.20)


def rates(quick: bool) -> Iterator[Pair]:
    """Measures rates of shapes and bands; ratio: GFLOP/s over visible pairs relative to a full call."""
    size, long = (512, 2048) if quick else (2048, 16384)
    q, k, v = rows(BF16, (8, 8), size, 128)
    baseline, flops = forward(q, k, v), arithmetic(q, size * size, 2)

    def pair(name: str, ours: Callable[[], object], work: int, goal: float) -> Pair:
        other = f"ours full D128 S{size}"
        goal = 0.0 if quick else goal
        return Pair("rates", name, other, ours, baseline, work, "bfloat16", peer_flops=flops, goal=goal)

    many = rows(BF16, (32, 8), size // 2, 128)
    yield pair(f"32/8 heads S{size // 2}", forward(*many), arithmetic(many[0], size * size // 4, 2), 0.95)
    for dim, goal in ((72, 0.7), (80, 0.7), (96, 0.85), (256, 0.85)):
        given = rows(BF16, (8, 8), size, dim)
        yield pair(f"D{dim}", forward(*given), arithmetic(given[0], size * size, 2), goal)
    wider_keys = rows(BF16, (8, 8), size, 192)
    yield pair("D192/128", forward(*wider_keys[:2], v), 2 * 8 * size * size * (192 + 128), 0.85)
    cost = 1 / 1.25  # limit for the rate over the visible pairs of a band
    given = rows(BF16, (8, 8), long, 128)
    pairs = 256 * long - triangle(255)
    yield pair(f"window 256, S{long}", forward(*given, band=fa.Band.window(255, 0)), arithmetic(q, pairs, 2), cost)
    prefix = size // 4
    ours = forward(q, k, v, band=fa.Band.prefix_causal([prefix]))
    yield pair(f"prefix {prefix}, S{size}", ours, arithmetic(q, triangle(size) + triangle(prefix - 1), 2), cost)
    mask = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
    for mode in (7, 8):  # two sequences; one continues on another device, so its diagonal is shifted
        q_len, kv_len = np.array([size, size]), np.array([size + size // 2, size + size // 2])
        given = [torch.randn(int(n.sum()), 8, 128, dtype=BF16) for n in (q_len, kv_len, kv_len)]
        ends = dict(actual_seq_qlen=np.cumsum(q_len).tolist(), actual_seq_kvlen=np.cumsum(kv_len).tolist())
        shape: dict[str, Any] = dict(atten_mask=mask, sparse_mode=mode, next_tockens=-size // 4)
        options = dict(ends, **shape, scale=128**-0.5)
        ours = torch.no_grad()(lambda given=given, options=options: npu_fusion_attention(*given, 8, "TND", **options))
        yield pair(f"mode {mode}, 2 x S{size}", ours, _visible(q_len, kv_len, mode, -size // 4) * 8 * 512, cost)


def _visible(q_len: np.ndarray, kv_len: np.ndarray, mode: int, next_: int) -> int:
    """Returns the number of visible pairs of a sparse mode."""
    lo, hi, prefix = mode_band(mode, True, 2**31 - 1, next_, None, q_len, kv_len)
    total = 0
    for b in range(len(q_len)):
        row = np.arange(q_len[b])
        ends = np.clip(np.maximum(row + hi[b], prefix[b]), 0, kv_len[b])
        total += int(np.maximum(ends - np.maximum(row + lo[b], 0), 0).sum())
    return total


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
            goal = 0.0 if quick or count == 1 else 0.95 * count
            yield Pair("threads", name, "one thread", ours, with_threads(1, ours), flops, "bfloat16", goal=goal)
    if "v3" in _native.cpu_features()["runnable"]:
        q, k, v = rows(torch.float32, (8, 8), size, 128)
        forward_plan, operands = planned(q, k, v)
        v3 = dataclasses.replace(
            forward_plan, schedule=cpu.schedule(forward_plan.problem, forward_plan.extents, forward_plan.op_kind, "v3")
        )
        flops = arithmetic(q, size * size, 2)
        ours = functools.partial(v3.run, operands)
        goal = 0.0 if quick else 0.80
        yield Pair(
            "threads", "AVX2, fp32 D128", "ours", ours, forward(q, k, v), flops, "float32", "v3", share_goal=goal
        )


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

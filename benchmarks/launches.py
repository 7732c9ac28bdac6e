"""Measures the CPU time of a planned call of the Triton back end without its kernel launches; needs no GPU.

Launches are counted and skipped; all other code runs as on a GPU, with tensors in the CPU's memory. Times are CPU time
of one thread, which other processes affect little.
"""

import contextlib
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.figures import Figure
from fusion_attention.ir.kv import Dequant, PagedView, RowView
from fusion_attention.ir.mask import INFINITE
from fusion_attention.ir.problem import Extents, Grads, Operands, Problem, Stats
from fusion_attention.plan import plan

TITLE = "CPU time of a planned call of the Triton back end without its launches; medians"
SEQUENCES, TOKENS, PAGE, GOAL_US = 4, 64, 64, 25.0
CPU, BF16 = torch.device("cpu"), torch.bfloat16


def of_rows(heads: int, dim: int = 128, tokens: int = TOKENS, dtype: torch.dtype = BF16) -> RowView:
    """Returns a view of a zero tensor with the rows of all sequences."""
    memory = torch.zeros(SEQUENCES, tokens, heads, dim, dtype=dtype)
    at, heads_apart = np.arange(SEQUENCES) * memory.stride(0), np.full(SEQUENCES, memory.stride(2))
    return RowView((memory,), at, memory.stride(1), heads_apart, dim)


def stats_of(heads: int, tokens: int) -> Stats:
    """Returns zero statistics of all sequences."""
    return Stats(*(of_rows(heads, 1, tokens, torch.float32) for _ in range(2)))


def causal(rows: int, keys: int) -> Extents:
    """Returns causal visibility in which the last row attends to all keys."""
    q, kv = np.full(SEQUENCES, rows), np.full(SEQUENCES, keys)
    return Extents(q, kv, q * 0 - INFINITE, kv - q + 1, q * 0, kv - q)


def dense() -> tuple[Problem, Extents, Operands, Grads]:
    """Makes the calls of a layer in a training step."""
    operands = Operands(of_rows(8), of_rows(2), of_rows(2), of_rows(8), stats_of(8, TOKENS))
    grads = Grads(of_rows(8), of_rows(8), of_rows(2), of_rows(2))
    return Problem(8, 2, 128, 128, dtype="bfloat16", scale=0.1), causal(TOKENS, TOKENS), operands, grads


def decoding(int8: bool) -> tuple[Problem, Extents, Operands]:
    """Makes a call with one token of every sequence over pages; int8: integers with a scale for every token."""
    keys = 10 * PAGE
    table = torch.arange(SEQUENCES * keys // PAGE, dtype=torch.int32).view(SEQUENCES, -1)

    def pages(dim: int, dtype: torch.dtype) -> PagedView:
        pool = torch.zeros(table.numel(), PAGE, 2, dim, dtype=dtype)
        return PagedView(pool, table, PAGE, pool.stride(0), pool.stride(1), pool.stride(2), dim)

    stored, scaled = torch.int8 if int8 else BF16, {"kv_dtype": "int8", "dequant_k": "token", "dequant_v": "token"}
    scales = [Dequant(pages(1, torch.float32)) if int8 else None for _ in range(2)]
    problem = Problem(8, 2, 128, 128, dtype="bfloat16", scale=0.1, page_size=PAGE, **(scaled if int8 else {}))  # type: ignore[arg-type]
    rows, stats = [of_rows(8, tokens=1) for _ in range(2)], stats_of(8, 1)
    k, v = pages(128, stored), pages(128, stored)
    return problem, causal(1, keys), Operands(rows[0], k, v, rows[1], stats, dequant_k=scales[0], dequant_v=scales[1])


@contextlib.contextmanager
def without_launches() -> Iterator[list[Any]]:
    """Context manager that skips kernel launches and records them."""
    import triton

    launched: list[Any] = []
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True  # makes the back end accept tensors in the CPU's memory
        from fusion_attention.backends.triton.common import launching

        real = launching.launch
        launching.launch = lambda kernel, *_: launched.append(kernel)
        try:
            yield launched
        finally:
            launching.launch = real


def figures(quick: bool, turns: int) -> Iterator[Figure]:
    """Measures every call on one thread of torch; nothing without Triton."""
    if importlib.util.find_spec("triton") is None:
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with without_launches() as launched:
            problem, extents, operands, grads = dense()
            op_kinds = ("attention_forward", "attention_backward")
            forward, backward = (plan(problem, extents, CPU, "triton", op_kind) for op_kind in op_kinds)
            calls = {"forward": partial(forward.run, operands), "backward": partial(backward.run, operands, grads)}
            for name, int8 in (("decode, bfloat16", False), ("decode, int8", True)):
                problem, extents, operands = decoding(int8)
                calls[name] = partial(plan(problem, extents, CPU, "triton").run, operands)
            for name, call in calls.items():
                yield cost_of(name, call, launched, 30 if quick else 300, turns)
    finally:
        torch.set_num_threads(threads)


def cost_of(name: str, call: Callable[[], None], launched: list[Any], count: int, turns: int) -> Figure:
    """Measures the microseconds of a call after a warm-up, and names its number of launches."""
    call()
    launched.clear()
    call()
    launches, result = len(launched), []
    for _ in range(turns):
        began = time.thread_time()
        for _ in range(count):
            call()
        result.append(1e6 * (time.thread_time() - began) / count)
    return Figure(f"{name}, {launches} launches", "us", statistics.median(result), GOAL_US)

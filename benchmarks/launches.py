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

import torch

from benchmarks.figures_with_goals import Figure
from benchmarks.kv_cache_calls import Case, operands_of
from fusion_attention.ir.problem import Grads

TITLE = "CPU time of a planned call of the Triton back end without its launches; medians"
GOAL_US = 25.0
TRAINING = Case((64,) * 4, (64,) * 4, heads_kv=2, heads=8, page=0)
DECODES = tuple(Case((1,) * 4, (640,) * 4, 2, 8, page=64, kind=kind) for kind in ("bfloat16", "int8"))


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
            training, operands = TRAINING.plan("triton"), operands_of(TRAINING)
            backward = TRAINING.plan("triton", "attention_backward")
            grads = Grads(operands.out, operands.q, operands.k, operands.v)  # the inputs' memory is overwritten
            calls = {"forward": partial(training.run, operands), "backward": partial(backward.run, operands, grads)}
            calls |= {f"decode, {c.kind}": partial(c.plan("triton").run, operands_of(c)) for c in DECODES}
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

"""Draws random dense calls, runs them on a given variant of the native core, and compares them with error bounds.

The calls cover all features, dtypes, bands and lengths; the bounds allow the errors of rounding.
"""

import math
import random
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from support.oracle import INPUTS, Call, Results, backward, load, make, read, results
from support.oracle import run as specified

from fusion_attention import _native
from fusion_attention.backends import cpu
from fusion_attention.ir.mask import INFINITE, Band
from fusion_attention.ir.memory_views import RowView
from fusion_attention.ir.problem import Extents, Grads, Operands, Problem, Stats
from fusion_attention.judging.chi_square_limits import Expected
from fusion_attention.judging.expected_error import FLOAT32
from fusion_attention.testing import compare
from fusion_attention.testing.expected import sizes

DECODE_VARIANTS = _native.cpu_features()["runnable"]
# The other variants only replace another variant's decode kernels.
VARIANTS = [name for name in DECODE_VARIANTS if "dense" in _native.cpu_features()["parts"][name]]
# (seed of a call, softcap that changes all scores, some, or only the largest).
CAPPED = [(seed, softcap) for seed in range(3000, 3010) for softcap in (0.4, 3.0, 50.0)]
AXES = ["hij", "ij", "hj", "hi", "i", "j", "h", ""]


def draw_problem(rng: random.Random) -> Problem:
    heads_kv = rng.choice([1, 2, 3])
    dim = rng.choice([1, 2, 3, 5, 8, 16, 24, 31, 33, 40, 64, 72, 80, 96, 128, 192])
    usual = 1 / math.sqrt(dim)
    drops = rng.choice(["none", "none", "bits", "philox"])
    bias = rng.choice(["none", "none", "matrix", "table", "slopes", "slopes_sqrt"])
    return Problem(
        heads_q=heads_kv * rng.choice([1, 1, 2, 3]),
        heads_kv=heads_kv,
        dim_qk=dim,
        dim_v=rng.choice([dim, dim, 1, 7, 32, 48, 100]),
        dim_rope=rng.choice([0, 0, 0, 1, 3, 16, 64]),
        dtype=rng.choice(["float32", "float16", "bfloat16"]),
        scale=rng.choice([usual, usual, usual, 0.05, -0.3 * usual, 0.0]),
        bias=bias,
        bias_scaled=bias != "none" and rng.random() < 0.4,
        has_blocked=rng.random() < 0.3,
        has_sink=rng.random() < 0.25,
        dropout=drops,
        keep_prob=1.0 if drops == "none" else rng.choice([0.5, 0.8, 0.9]),
        empty_rows=rng.choice(["zero", "zero", "mean", "mean_in_band"]),
        has_blocked_tiles=rng.random() < 0.3,
    )


def draw_call(seed: int) -> Call:
    """Draws a call whose values have low precision."""
    rng = random.Random(seed)
    problem = draw_problem(rng)
    longest = rng.choice([10, 60, 130, 300])
    count = rng.choice([1, 2, 3])

    def length() -> int:
        return rng.choice([0, 1, *(rng.randint(1, longest) for _ in range(4))])

    q_len = tuple(length() for _ in range(count))
    kv_len = tuple(rng.choice([length(), length(), n]) for n in q_len)
    window = Band.window(rng.randint(-20, longest), rng.randint(-20, longest), rng.choice(["start", "end"]))
    causal = Band.causal(rng.choice(["start", "end"]))
    band = rng.choice([None, causal, window, window, Band.prefix_causal([rng.randint(0, n + 3) for n in kv_len])])
    axes = rng.choice(AXES), rng.choice(AXES)
    call = make(problem, q_len, kv_len, band, axes[0], False, axes[1], rng.choice([0, 0, -7, 11]), seed)
    return converted(call, problem.torch_dtype)


def with_cap(call: Call, softcap: float) -> Call:
    """Returns the call with a softcap."""
    return replace(call, problem=replace(call.problem, softcap=softcap))


def converted(call: Call, dtype: torch.dtype) -> Call:
    tensors = {name: [t.to(dtype) for t in getattr(call, name)] for name in (*INPUTS, "bias", "dout")}
    slopes, sink = (None if t is None else t.float() for t in (call.slopes, call.sink))
    return replace(call, **tensors, slopes=slopes, sink=sink)


def invalid(call: Call, seed: int) -> None:
    """Replaces random elements of random inputs by inf, -inf or NaN."""
    rng = random.Random(seed)
    value = rng.choice([math.nan, math.inf, -math.inf])
    for _ in range(rng.randint(1, 3)):
        tensors = [t for t in getattr(call, rng.choice(["q", "k", "v", "v", "v", "k_rope", "bias"])) if t.numel()]
        if tensors:
            tensor = rng.choice(tensors)
            tensor[tuple(rng.randrange(n) for n in tensor.shape)] = value


def native(call: Call, variant: str | None = None, packed: bool = True, threads: int = 2) -> Results:
    p, operands = call.problem, load(call, call.problem.torch_dtype, torch.float32, packed)
    torch.set_num_threads(threads)
    plan = cpu.schedule(p, call.extents, "attention_forward", variant)
    cpu.attention_forward(p, call.extents, plan, operands)
    return results(call, operands)


def judge(call: Call, got: Results, want: Results, at: Any) -> None:
    """Compares results: empty rows exactly, all other rows within the errors of rounding."""
    for b in range(len(call.extents)):
        if call.extents.q_len[b] == 0 or call.extents.kv_len[b] == 0:
            for name in got:
                assert torch.equal(got[name][b].double(), want[name][b]), (at, name, b)
            continue
        assert torch.equal(got["max"][b] == -math.inf, want["max"][b] == -math.inf), (at, b)
        for name, values in got.items():
            compare(f"{at} {name}", values[b], Expected(want[name][b], call.sizes[name][b]))


def unit_views(problem: Problem, q_len: int, kv_len: int) -> tuple[Extents, Operands]:
    """Makes a sequence with zeros in q and k and the identity as v, so that out is the matrix of probabilities."""

    def view(values: torch.Tensor) -> RowView:  # [heads, length, dim]
        zero = np.zeros(1, np.int64)
        return RowView((values,), zero, values.shape[2], zero + values.shape[1] * values.shape[2], values.shape[2])

    p, one = problem, np.ones(1, np.int64)
    extents = Extents(one * q_len, one * kv_len, one * -INFINITE, one * INFINITE, one * 0, one * 0)
    q, k = torch.zeros(p.heads_q, q_len, p.dim_qk), torch.zeros(p.heads_kv, kv_len, p.dim_qk)
    v = torch.eye(kv_len).expand(p.heads_kv, -1, -1).contiguous()
    stats = Stats(*(view(torch.empty(p.heads_q, q_len, 1)) for _ in range(2)))
    out = view(torch.empty(p.heads_q, q_len, p.dim_v))
    return extents, Operands(view(q), view(k), view(v), out, stats)


def gradients(
    call: Call,
    saved: Results,
    variant: str | None = None,
    packed: bool = True,
    threads: int = 2,
    shared: bool = False,
    owned: bool = False,
) -> Results:
    """Computes gradients from the saved results of a forward; shared, owned: as in backward()."""
    torch.set_num_threads(threads)
    plan = cpu.schedule(call.problem, call.extents, "attention_backward", variant)
    compute = partial(cpu.attention_backward, call.problem, call.extents, plan)
    return backward(call, saved, compute, call.problem.torch_dtype, torch.float32, packed, shared, owned)


def wanted(call: Call, saved: Results) -> Results:
    inputs64 = {n: [t.double() for t in getattr(call, n)] for n in (*INPUTS, "bias", "dout")}
    single = {n: None if (t := getattr(call, n)) is None else t.double() for n in ("slopes", "sink")}
    return specified(replace(call, **inputs64, **single), {n: [t.double() for t in saved[n]] for n in saved})


def gradient_sizes(call: Call, saved: Results) -> Results:
    """Returns the expected errors of gradients(); the gradient of a bias is added to ones."""
    p, e, result = call.problem, call.extents, Results()

    def compute(operands: Operands, grads: Grads) -> None:
        size = sizes(p, e, operands, grads)
        for name in INPUTS:
            if like := getattr(call, name):
                result[f"d{name}"] = read(getattr(grads, f"d{name}").over(size[f"d{name}"]), like)
        if (view := grads.dbias) is not None:
            terms = int(e.q_len @ e.kv_len) * p.heads_q // max(sum(t.numel() for t in call.bias), 1)
            added = (size["dpse"].square() + FLOAT32 * max(terms, 1)).sqrt()
            result["dbias"] = [replace(view, keep=added).sequence(b, *t.shape) for b, t in enumerate(call.bias)]
        if grads.dsink is not None:
            result["dsink"] = [size["dsink"]]

    backward(call, saved, compute)
    return result

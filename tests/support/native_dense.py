"""Dense calls of the native core: drawn at random, run by a forced variant, and the errors that they may have.

Calls have every feature, dtype, band and length; the error allowed is measured on the same call computed plainly in
float32, never set by hand.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from support.witness import INPUTS, Call, Results, backward, load, make, results
from support.witness import run as specified

from fusion_attention import _native
from fusion_attention.backends import cpu
from fusion_attention.testing import beside_plain
from fusion_attention.waist import bias, dropout
from fusion_attention.waist.kv import RowView
from fusion_attention.waist.mask import INFINITE, Band, interval_matrix
from fusion_attention.waist.problem import Extents, Operands, Problem, Stats

DECODE_VARIANTS = _native.cpu_features()["runnable"]
# The others are another one's with a decode of their own.
VARIANTS = [name for name in DECODE_VARIANTS if name not in ("v4+avx512vnni", "asimddp")]
# Seeds of calls, and a cap that bends all of their scores, some, and none but the largest.
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
    """A call of low-precision values."""
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
    """The call with a cap on its scores."""
    return replace(call, problem=replace(call.problem, softcap=softcap))


def converted(call: Call, dtype: torch.dtype) -> Call:
    tensors = {name: [t.to(dtype) for t in getattr(call, name)] for name in (*INPUTS, "bias")}
    slopes, sink = (None if t is None else t.float() for t in (call.slopes, call.sink))
    return replace(call, **tensors, slopes=slopes, sink=sink)


def spoil(call: Call, seed: int) -> None:
    """Some elements of some inputs become inf or NaN."""
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


def plain_bias(call: Call, b: int, row: slice, key: slice) -> torch.Tensor | float:
    if call.slopes is not None:
        root = call.problem.bias == "slopes_sqrt"
        return bias.from_slopes(call.slopes[b], int(call.extents.shift[b]), row, key, root)
    if not call.bias:
        return 0.0
    stored = call.bias[b].float()
    if call.problem.bias == "matrix":
        return stored
    at, column = bias.table_position(row.stop, row, key)
    return stored.expand(-1, 1024, key.stop)[:, at, column.clamp(max=key.stop - 1)]


def plain_keep(call: Call, b: int, row_count: int, key_count: int) -> torch.Tensor | float:
    p, spans = call.problem, (slice(0, row_count), slice(0, key_count))
    if p.dropout == "philox":
        return dropout.keep_from_philox(call.seed, call.offset, p.keep_prob, b * p.heads_q, p.heads_q, *spans)
    return call.keep[b] if call.keep else 1.0


def capped(p: Problem, products: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Scaled products beneath the cap, and their slope by what they were without it."""
    scores = products * p.scale
    if not p.softcap:
        return scores, 1.0
    part = (scores / p.softcap).tanh()
    return p.softcap * part, 1 - part * part


def plain_products(call: Call, b: int) -> torch.Tensor:
    """By whole float32 matrices."""
    own = torch.arange(call.problem.heads_q) // call.problem.group
    products = call.q[b].float() @ call.k[b].float()[own].mT
    if call.problem.dim_rope:
        products += call.q_rope[b].float() @ call.k_rope[b].float()[own].mT
    return products


def plain_scores(call: Call, b: int) -> torch.Tensor:
    """By whole float32 matrices, -inf where nothing is seen."""
    p, scores = call.problem, plain_products(call, b)
    added = plain_bias(call, b, slice(0, scores.shape[1]), slice(0, scores.shape[2]))
    scores = capped(p, scores)[0] + (added * p.scale if p.bias_scaled else added)
    edges = (int(getattr(call.extents, name)[b]) for name in ("lo", "hi", "prefix"))
    seen = interval_matrix(scores.shape[1], scores.shape[2], *edges)
    for blocked in (call.blocked, call.tiled):
        seen = seen & ~blocked[b] if blocked else seen
    return scores.masked_fill(~seen, -math.inf)


def plain(call: Call, b: int, want: Results) -> dict[str, torch.Tensor]:
    """The same by whole float32 matrices, P and out rounded where the core may; empty rows as specified."""
    p = call.problem
    q, k, v = call.q[b], call.k[b], call.v[b].float()[torch.arange(p.heads_q) // p.group]
    scores = plain_scores(call, b)
    if call.sink is not None:
        scores = torch.cat((scores, call.sink[:, None, None].expand(-1, scores.shape[1], 1)), -1)
    peak = scores.amax(-1, keepdim=True)
    weights = (scores - peak).exp()
    total = weights.sum(-1, keepdim=True)
    weights = weights[..., : k.shape[1]] * plain_keep(call, b, q.shape[1], k.shape[1])
    weights = weights.bfloat16().float() if p.dtype == "bfloat16" else weights
    found = {"out": weights @ v / (total * p.keep_prob), "max": peak, "sum": total}
    empty = want["max"][b] == -math.inf
    found = {name: torch.where(empty, want[name][b].float(), value) for name, value in found.items()}
    return found | {"out": found["out"].to(p.torch_dtype)}


def product_size(call: Call) -> float:
    """The largest sum of absolute products behind a score: what cancels in it may be larger than what remains."""
    own = torch.arange(call.problem.heads_q) // call.problem.group
    q, k = call.q, call.k
    if call.problem.dim_rope:
        q, k = (
            [torch.cat(pair, -1) for pair in zip(*both, strict=True)] for both in ((q, call.q_rope), (k, call.k_rope))
        )
    sizes = [x.double().abs() @ y.double().abs()[own].mT for x, y in zip(q, k, strict=True) if x.numel() and y.numel()]
    return abs(call.problem.scale) * max(float(size.max()) for size in sizes)


def judge(call: Call, got: Results, want: Results, at: Any) -> None:
    """Empty rows exactly; all other rows of all sequences together, since one number's error is luck."""
    pieces: dict[str, list[tuple[torch.Tensor, ...]]] = {name: [] for name in got}
    for b in range(len(call.extents)):
        if call.extents.q_len[b] == 0 or call.extents.kv_len[b] == 0:
            for name in got:
                assert torch.equal(got[name][b].double(), want[name][b]), (at, name, b)
            continue
        plainly, empty = plain(call, b, want), want["max"][b] == -math.inf
        assert torch.equal(got["max"][b] == -math.inf, empty), (at, b)
        for name, values in got.items():
            triple = values[b], plainly[name], want[name][b]
            pieces[name].append(tuple(t[~empty.expand_as(t)].view(-1, t.shape[-1]) for t in triple))
            if name != "max" and empty.any():
                nothing, by_plain, right = (t[empty.expand_as(t)] for t in triple)
                beside_plain(f"{at} {name} of empty rows", nothing, right, by_plain, int(call.extents.kv_len[b]))
    for name, triples in pieces.items():
        if triples:
            ours, by_plain, right = (torch.cat(t) for t in zip(*triples, strict=True))
            terms = product_size(call) if name == "max" else 0.0
            beside_plain(f"{at} {name}", ours, right, by_plain, int(call.extents.kv_len.max()), terms)


def unit_views(problem: Problem, q_len: int, kv_len: int) -> tuple[Extents, Operands]:
    """One sequence of zeros in q and k, whose v is the identity: out is the matrix of probabilities."""

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


def drawn(seed: int) -> Call:
    call = draw_call(seed)
    return replace(call, dout=[t.to(call.problem.torch_dtype) for t in call.dout])


def gradients(
    call: Call,
    saved: Results,
    variant: str | None = None,
    packed: bool = True,
    threads: int = 2,
    shared: bool = False,
    owned: bool = False,
) -> Results:
    """From what a forward saved; shared and owned: as backward()."""
    torch.set_num_threads(threads)
    plan = cpu.schedule(call.problem, call.extents, "attention_backward", variant)
    compute = partial(cpu.attention_backward, call.problem, call.extents, plan)
    return backward(call, saved, compute, call.problem.torch_dtype, torch.float32, packed, shared, owned)


def wanted(call: Call, saved: Results) -> Results:
    wide = {n: [t.double() for t in getattr(call, n)] for n in (*INPUTS, "bias", "dout")}
    single = {n: None if (t := getattr(call, n)) is None else t.double() for n in ("slopes", "sink")}
    return specified(replace(call, **wide, **single), {n: [t.double() for t in saved[n]] for n in saved})

"""Chunks of sequences in one process: split at multiples of CHUNK_UNIT they have the bits of the full call, and merged
partial results are within the error bound.

Communication between processes is tested with groups and schedules.
"""

import random
from collections import OrderedDict
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.bits import same_bits
from support.native_dense import VARIANTS
from support.pieces import Call, draw, each, expected, place, run, subset

import fusion_attention.plan as plans
from fusion_attention.backends import cpu
from fusion_attention.distributed import chunk_attention
from fusion_attention.distributed.chunk_attention import Gradients
from fusion_attention.ir.mask import Band
from fusion_attention.ir.merge import Partial, empty_partial, join_sink, merge
from fusion_attention.ir.problem import CHUNK_UNIT
from fusion_attention.testing import compare

ROW_GRADIENTS, KEY_GRADIENTS = ("dq", "dq_rope"), ("dk", "dv", "dk_rope")


def cuts_of(rng: random.Random) -> Any:
    """Function from a length to random multiples of CHUNK_UNIT below it."""
    return lambda length: [n for n in range(CHUNK_UNIT, length, CHUNK_UNIT) if rng.random() < 0.6]


@pytest.fixture
def forced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Force one instruction set of the native core in new plans."""
    monkeypatch.setattr(cpu, "schedule", partial(cpu.schedule, variant=request.param))
    monkeypatch.setattr(plans, "_PLANS", OrderedDict())


def gradient(g: Gradients, name: str) -> torch.Tensor:
    result: torch.Tensor = getattr(g, name)
    return result


@pytest.mark.parametrize("forced", VARIANTS, indirect=True)
@pytest.mark.parametrize("seed", range(12))
def test_chunk_results_equal_the_full_call_bitwise(forced: None, seed: int) -> None:
    """Chunks of rows get all keys, and chunks of keys all rows; one chunk at a time, and all at once."""
    call, rng = draw(seed), random.Random(seed)
    torch.set_num_threads(2)
    want, full = run(call), call.full()
    saved, cuts = call.saved(want), cuts_of(rng)
    all_rows, all_keys = call.chunks("q"), call.chunks("kv")
    torch.set_num_threads(1)
    rows, keys = call.chunks("q", cuts), call.chunks("kv", cuts)
    together = chunk_attention.forward(full, call.rows(rows), call.keys(all_keys))
    for chunk in each(rows):
        b, at = place(chunk)
        alone = chunk_attention.forward(full, call.rows(chunk), call.keys(all_keys))
        g = chunk_attention.backward(full, call.rows(chunk), saved, call.keys(all_keys), dbias="dbias" in want)
        for name, one, other in zip(("out", "max", "sum"), together, alone, strict=True):
            expected = call.tokens(want[name])[b, at]
            same_bits(one[b, at], expected, f"{name}, chunks together")
            same_bits(other[b, at], expected, f"{name}, a chunk alone")
        for name in ROW_GRADIENTS:
            if name in want:
                same_bits(gradient(g, name)[b, at], call.tokens(want[name])[b, at], name)
    for chunk in each(keys):
        b, at = place(chunk)
        g = chunk_attention.backward(full, call.rows(all_rows), saved, call.keys(chunk), dbias="dbias" in want)
        for name in KEY_GRADIENTS:
            if name in want:
                same_bits(gradient(g, name)[b, at], call.tokens(want[name])[b, at], name)
    if "dsink" in want:
        same_bits(chunk_attention.sink_gradient(full, call.rows(all_rows), saved), want["dsink"], "dsink")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_windowed_chunks_equal_the_full_call_bitwise(dtype: torch.dtype) -> None:
    """Rows see more keys than a step has, every tile has another first key, and the last chunk has five rows."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1413, 2, 16, generator=generator).to(dtype) for _ in "qkv")
    args = {"layout": "TND", "q_len": [1413], "kv_len": [1413], "q": q, "k": k, "v": v, "band": Band.window(800)}
    call = Call(args, q)
    rows = call.rows(call.chunks("q", lambda length: [CHUNK_UNIT, 1024 + CHUNK_UNIT, 1413 // CHUNK_UNIT * CHUNK_UNIT]))
    result = chunk_attention.forward(call.full(), rows, call.keys(call.chunks("kv")))
    same_bits(result.out[0], run(call)["out"])


@pytest.mark.parametrize("seed", range(4))
def test_float64_reference_chunks_match_the_full_call(seed: int) -> None:
    """Dropout bits and visible keys of a chunk depend on its position in the full call."""
    call, rng = draw(40 + seed), random.Random(seed)
    call.args["keep_prob"] = 0.6
    full, cuts = call.full(), cuts_of(rng)
    rows, keys = call.rows(call.chunks("q", cuts)), call.keys(call.chunks("kv", cuts))
    result = chunk_attention.forward(full, rows, keys, backend="golden", partial=True)
    if full.sink is not None:
        join_sink(result, full.sink)
    wanted = expected(call)["out"].map(call.tokens)
    for chunk in each(call.chunks("q")):
        b, at = place(chunk)
        compare("out", result.out[b, at].to(call.dout.dtype), wanted[b, at])


def merged(call: Call, rng: random.Random) -> tuple[Partial, list[chunk_attention.Keys]]:
    """(partial result of all rows merged over three random groups of key chunks, the groups)."""
    full, cuts = call.full(), cuts_of(rng)
    rows, keys = call.rows(call.chunks("q", cuts)), call.chunks("kv", cuts)
    lots = [call.keys(subset(keys, lot)) for lot in np.array_split(rng.sample(range(len(keys)), len(keys)), 3)]
    batch, tokens, heads, _ = rows.q.shape
    result = empty_partial(rows.q, (batch, tokens, heads), full.problem.dim_v)
    for lot in lots:
        if len(lot.chunks):
            merge(result, chunk_attention.forward(full, rows, lot, partial=True))
    if full.sink is not None:
        join_sink(result, full.sink)
    return result, lots


EVERY_FEATURE = (100, 102, 107, 113, 136, 144)  # the calls of these seeds have all features that draw() knows


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.slow] * (seed not in EVERY_FEATURE)) for seed in range(100, 160)]
)
def test_merged_partial_results_match_the_full_call(seed: int) -> None:
    """Errors are as small as in one process; the merged statistics serve gradients of any keys."""
    call, rng = draw(seed), random.Random(seed)
    full, wanted = call.full(), expected(call)
    result, lots = merged(call, rng)
    covered = call.chunks("q")
    ours = {"out": result.out.to(call.dout.dtype)}
    all_rows = call.rows(covered)
    saved = chunk_attention.Saved(call.tokens(call.dout), ours["out"], result.max, result.sum)
    added: dict[str, Any] = {}
    for lot in lots:
        g = chunk_attention.backward(full, all_rows, saved, lot, partial=True, dbias="dbias" in wanted)
        for name, t in vars(g).items():
            if t is not None:
                assert t.dtype == torch.float32 or (name == "dbias" and full.owns_bias)
                added[name] = added[name] + t if name in added else t
    dtypes = {"dbias": call.args["bias"].dtype} if "dbias" in wanted else {}
    ours |= {name: t.to(dtypes.get(name, call.dout.dtype)) for name, t in added.items()}
    assert ours.keys() == wanted.keys() - {"max", "sum", "lse", "dsink"}  # statistics are below, a sink's is no chunk's
    for name in ours:
        of_rows = name in ("out", *ROW_GRADIENTS, *KEY_GRADIENTS)
        compare(name, ours[name], wanted[name].map(call.tokens) if of_rows else wanted[name])
    lse = wanted["lse"].map(call.tokens)
    for chunk in each(covered):
        b, at = place(chunk)
        compare("lse", (result.max + result.sum.log())[b, at], lse[b, at])

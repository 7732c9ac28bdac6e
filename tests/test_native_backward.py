"""The native core's backward: every instruction-set variant that runs here, forced, against the float64 specification.

Calls are test_native's random ones; what the forward saved is the input, so that only the backward is judged. The error
allowed is that of a few roundings of the operand dtype, relative to the largest gradient of the call.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from test_native import VARIANTS, converted, draw_call, native, spoil, threads_as_before, unit_views
from witness import Call, Results, load, make, read, room, rows
from witness import run as specified

from fusion_attention.backends import cpu
from fusion_attention.kv import MatrixView, RowView
from fusion_attention.mask import INFINITE, Band
from fusion_attention.problem import Extents, Grads, Operands, Problem, Stats

__all__ = ["threads_as_before"]
# The specification adds up a table that lies broadcast.
pytestmark = pytest.mark.filterwarnings("ignore:Use of index_put_")

TOLERANCE = {"float32": 3e-5, "float16": 3e-3, "bfloat16": 3e-2}
INPUTS = ("q", "k", "v", "q_rope", "k_rope")


def drawn(seed: int) -> Call:
    call = draw_call(seed)
    return replace(call, dout=[t.to(call.problem.torch_dtype) for t in call.dout])


def gradients(
    call: Call, saved: Results, variant: str | None = None, packed: bool = True, threads: int = 2, shared: bool = False
) -> Results:
    """From what a forward saved; shared: dbias is one buffer, as it lies in memory."""
    p, dtype = call.problem, call.problem.torch_dtype
    views = {name: rows([t.to(torch.float32) for t in saved[name]]) for name in ("max", "sum")}
    operands = replace(load(call, dtype), out=rows([t.to(dtype) for t in saved["out"]]), stats=Stats(**views))
    if not packed:
        operands = replace(operands, q=rows(call.q, False), k=rows(call.k), v=rows(call.v, False))
    inputs = {name: getattr(call, name) for name in INPUTS if getattr(call, name)}
    found = {f"d{name}": room(like, like[0].shape[2], dtype) for name, like in inputs.items()}
    dbias = operands.bias
    if dbias is not None:
        dbias = replace(dbias, keep=torch.ones_like(dbias.keep, dtype=torch.float32))
    dsink = None if call.sink is None else torch.full_like(call.sink, math.nan)
    grads = Grads(rows([t.to(dtype) for t in call.dout], packed=not packed), dbias=dbias, dsink=dsink, **found)
    torch.set_num_threads(threads)
    plan = cpu.schedule(p, call.extents, "attention_backward", variant)
    cpu.attention_backward(p, call.extents, plan, operands, grads)
    results = {name: [t.clone() for t in read(view, inputs[name[1:]])] for name, view in found.items()}
    if dbias is not None:
        views_of = [dbias.sequence(b, *t.shape) - 1 for b, t in enumerate(call.bias)]
        results["dbias"] = [dbias.keep] if shared else views_of
    return results if dsink is None else results | {"dsink": [dsink]}


def wanted(call: Call, saved: Results) -> Results:
    wide = {n: [t.double() for t in getattr(call, n)] for n in (*INPUTS, "bias", "dout")}
    single = {n: None if (t := getattr(call, n)) is None else t.double() for n in ("slopes", "sink")}
    return specified(replace(call, **wide, **single), {n: [t.double() for t in saved[n]] for n in saved})


def same_bits(got: Results, want: Results) -> None:
    assert got.keys() == want.keys()
    for name in want:
        for a, b in zip(got[name], want[name], strict=True):
            assert torch.equal(a.isnan(), b.isnan()), name
            assert torch.equal(a.nan_to_num(nan=0.5), b.nan_to_num(nan=0.5)), name


@pytest.mark.parametrize("seed", range(60))
def test_random_calls_against_the_specification(seed: int) -> None:
    call = drawn(seed)
    saved = native(call)
    want = wanted(call, saved)
    # The gradients of one key cancel to nothing: what cancels is as large as dout . v.
    largest = max((t.abs().max().item() for n in want for t in want[n] if n[0] == "d" and t.numel()), default=0.0)
    for variant in VARIANTS:
        got = gradients(call, saved, variant, packed=seed % 2 == 0)
        for name in got:
            for a, b in zip(got[name], want[name], strict=True):
                off = (a.double() - b).abs().max().item() if a.numel() else 0.0
                assert off <= TOLERANCE[call.problem.dtype] * max(largest, 1.0), (variant, name, call.problem)


@pytest.mark.parametrize("seed", range(2000, 2030))
def test_what_is_not_finite_reaches_exactly_the_gradients_that_see_it(seed: int) -> None:
    call, rng = drawn(seed), random.Random(seed)
    spoil(call, seed)
    if (tensors := [t for t in call.dout if t.numel()]) and rng.random() < 0.5:
        tensor = rng.choice(tensors)
        tensor[tuple(rng.randrange(n) for n in tensor.shape)] = rng.choice([math.nan, math.inf])
    saved = native(call)
    want = wanted(call, saved)
    for variant in VARIANTS:
        got = gradients(call, saved, variant)
        for name in got:
            for a, b in zip(got[name], want[name], strict=True):
                assert torch.equal(a.isfinite(), b.isfinite()), (variant, name, call.problem)


# ----------------------------------------------------------------------------------------------------------- same bits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_threads_and_layouts_do_not_change_a_bit(variant: str, dtype: str) -> None:
    problem = Problem(4, 2, 40, 24, 8, dtype, 0.2, "slopes", has_sink=True, dropout="philox", keep_prob=0.7)
    call = converted(make(problem, (200, 0, 3, 411), (311, 4, 0, 530), Band.window(350, 3)), problem.torch_dtype)
    saved = native(call)
    want = gradients(call, saved, variant, packed=True, threads=1)
    assert not any(t.isnan().any() for t in want["dq"] + want["dk"] + want["dv"])
    for packed, threads in ((False, 1), (True, 2), (False, 2), (True, 5)):
        same_bits(gradients(call, saved, variant, packed, threads), want)


@pytest.mark.parametrize(
    ("axes", "shared"), [("hij", False), ("hij", True), ("ij", True), ("hj", False), ("hi", False)]
)
def test_every_form_of_dbias_is_the_same_for_any_threads(axes: str, shared: bool) -> None:
    problem = Problem(6, 3, 16, 16, dtype="float32", scale=0.25, bias="matrix", bias_scaled=True)
    call = converted(make(problem, (400, 400), (300, 300), Band.causal(), axes, shared), torch.float32)
    saved = native(call)
    want = gradients(call, saved, threads=1, shared=True)
    for _ in range(3):
        same_bits(gradients(call, saved, threads=3, shared=True), want)


@pytest.mark.parametrize("bias", ["none", "matrix", "slopes", "slopes_sqrt"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_probability_of_an_only_key_is_exactly_one(variant: str, dtype: str, bias: str) -> None:
    # Scores like 1000 / 3: an ulp of them shows. dv is then dout, to the last bit.
    problem = Problem(2, 2, 33, 9, 5, dtype, 37.3, bias, bias_scaled=bias == "matrix")
    call = converted(make(problem, (1, 1), (1, 1), shift=7), problem.torch_dtype)
    saved = native(call, variant)
    got = gradients(call, saved, variant)
    for a, b in zip(got["dv"], call.dout, strict=True):
        assert torch.equal(a, b.to(a.dtype))


# ------------------------------------------------------------------------------------------------- memory and bad calls


def test_workspace_grows_with_length_not_with_its_square() -> None:
    def workspace(length: int, dtype: str) -> int:
        n = np.array([length])
        extents = Extents(n, n, n * 0 - INFINITE, n * 0 + 1, n * 0, n * 0)
        return cpu.workspace_bytes(Problem(1, 1, 64, 64, dtype=dtype), extents, "attention_backward")

    assert workspace(65536, "bfloat16") < 120_000_000
    assert workspace(65536, "float32") < 220_000_000
    assert workspace(65536, "bfloat16") < 2.1 * workspace(32768, "bfloat16")


def test_memory_that_is_not_there_is_an_error() -> None:
    none = np.zeros(1, np.int64)
    problem, extents = Problem(1, 1, 64, 64), Extents(none + (1 << 48), none + 1, *[none] * 4)
    view, one = RowView((torch.zeros(64),), none, 64, none, 64), RowView((torch.zeros(1),), none, 1, none, 1)
    operands = Operands(view, view, view, view, Stats(one, one))
    plan = cpu.schedule(problem, extents, "attention_backward")
    with pytest.raises(MemoryError):
        cpu.attention_backward(problem, extents, plan, operands, Grads(view, view, view, view))


def small() -> tuple[Problem, Extents, Operands, Grads]:
    problem = Problem(1, 1, 4, 30, bias="matrix")
    extents, operands = unit_views(problem, 5, 30)
    zero = np.zeros(1, np.int64)
    operands = replace(operands, bias=MatrixView(torch.zeros(150), zero, zero, zero + 30, 1))
    cpu.attention_forward(problem, extents, cpu.schedule(problem, extents, "attention_forward"), operands)
    views = (operands.out, operands.q, operands.k, operands.v)
    return problem, extents, operands, Grads(*(v.over(torch.zeros_like(v.keep[0])) for v in views))


def bad_gradients() -> dict[str, tuple[dict[str, Any], type[Exception], str]]:
    two, one = np.zeros(2, np.int64), np.zeros(1, np.int64)
    memory = torch.zeros(900)
    return {
        "too many addresses": ({"dq": RowView((memory,), two, 4, two, 4)}, ValueError, "dq has 2 elements, expected 1"),
        "another dim": ({"dk": RowView((memory,), one, 4, one, 3)}, ValueError, "dk has rows of another length"),
        "another dtype": ({"dv": RowView((memory.double(),), one, 30, one, 30)}, TypeError, "float64"),
        "narrow dbias": ({"dbias": MatrixView(memory.half(), one, one, one, 1)}, TypeError, "dbias in float32"),
        "keys apart": ({"dbias": MatrixView(memory, one, one, one, 2)}, ValueError, "dbias has keys that are not"),
    }


@pytest.mark.parametrize("name", bad_gradients())
def test_sizes_that_disagree_are_an_error(name: str) -> None:
    problem, extents, operands, grads = small()
    plan = cpu.schedule(problem, extents, "attention_backward")
    changes, kind, message = bad_gradients()[name]
    with pytest.raises(kind, match=message):
        cpu.attention_backward(problem, extents, plan, operands, replace(grads, **changes))
    assert not grads.dq.keep[0].any()
    cpu.attention_backward(problem, extents, plan, operands, grads)


def test_long_sequences_of_several_waves() -> None:
    problem = Problem(2, 1, 128, 128, dtype="float32", scale=0.09)
    call = converted(make(problem, (9000, 40, 3000), (300, 70, 10), Band.full()), torch.float32)
    saved = native(call)
    want, got = wanted(call, saved), gradients(call, saved)
    for name in ("dq", "dk", "dv"):
        for a, b in zip(got[name], want[name], strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4 * b.abs().max().item())

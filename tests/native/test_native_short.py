"""The native forward of thousands of packed sequences of few tokens, with scores in registers: every variant, forced,
against the float64 reference, and bit by bit against the general path, which an all-false mask selects.
"""

import math
import random
from dataclasses import replace

import pytest
import torch
from support.bits import same_bits, same_where_not_finite
from support.native_dense import VARIANTS, converted, judge, native
from support.oracle import Call, alone, forward, make

from fusion_attention import attention
from fusion_attention._native import ForwardPlan
from fusion_attention.backends import cpu
from fusion_attention.backends.cpu import decode
from fusion_attention.ir.mask import Band
from fusion_attention.ir.problem import Problem

DTYPES = ["bfloat16", "float16", "float32"]
EVERY = (0, *random.Random(0).sample(range(1, 41), 40), 0)
LENGTHS = (16, 0, 1, 33, 12, 31, 3, 17, 32, 8, 0, 25)
BANDS = [None, Band.causal(), Band.window(5, 3), Band.window(40, -20)]


def packed(
    dtype: str, band: Band | None, q_len: tuple[int, ...] = LENGTHS, kv_len: tuple[int, ...] = (), **more: object
) -> Call:
    """Returns a call of short and empty sequences; heads are grouped, and rows are no complete vectors."""
    problem = replace(Problem(4, 2, 40, 72, dtype=dtype, scale=0.4), **more)  # type: ignore[arg-type]
    return converted(make(problem, q_len, kv_len or q_len, band), problem.torch_dtype)


def in_general(call: Call) -> Call:
    """Returns the call with an all-false mask, which selects the general path."""
    blocked = [torch.zeros(*q.shape[:2], k.shape[1], dtype=torch.bool) for q, k in zip(call.q, call.k, strict=True)]
    return replace(call, problem=replace(call.problem, has_blocked=True), blocked=blocked)


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_short_sequence_path_is_bitwise_equal_to_general_path(variant: str, dtype: str, band: Band | None) -> None:
    lengths = (EVERY,) if band is None else (LENGTHS, LENGTHS[::-1])
    call = packed(dtype, band, *lengths, dim_rope=8, has_sink=band is not None)  # with rope no rows are the decode's
    same_bits(native(call, variant), native(in_general(call), variant))


@pytest.mark.parametrize("dtype", DTYPES)
def test_short_sequences_are_bitwise_equal_for_any_thread_count_and_batch(dtype: str) -> None:
    call = packed(dtype, Band.causal())
    want = native(call, threads=1)
    judge(call, want, forward(call), dtype)
    for threads in (2, 3, 5, 8):
        same_bits(native(call, threads=threads), want)
    for b in (0, 4, 7):
        same_bits(native(alone(call, b), threads=1), {name: values[b : b + 1] for name, values in want.items()})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_in_short_sequences_reach_exactly_rows_of_reference(dtype: str, value: float) -> None:
    for name in ("q", "k", "v"):
        call = packed(dtype, Band.causal())
        for tensor in getattr(call, name)[::2]:
            if tensor.numel():
                tensor[-1, tensor.shape[1] // 2, 3] = value
        want = forward(call)
        for variant in VARIANTS:
            same_where_not_finite(native(call, variant), want, f"{variant} {name}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_short_sequences_with_overflowing_scores_equal_general_path(dtype: str) -> None:
    call = packed(dtype, None, dim_rope=8)
    for tensor in (*call.q[::2], *call.k[::2]):
        tensor.mul_(2.0**12 if dtype == "float16" else 2.0**61)
    for variant in VARIANTS:
        result, want = native(call, variant), native(in_general(call), variant)
        same_where_not_finite(result, want, variant)
        same_bits(*({name: [t.nan_to_num(0.0) for t in each[name]] for name in each} for each in (result, want)))


@pytest.mark.parametrize("length", [1, 2, 16, 17, 32, 33])
def test_short_sequence_does_not_read_neighbouring_memory(length: int) -> None:
    rows = [torch.full((length + 64, 3, 64), math.nan, dtype=torch.bfloat16) for _ in range(3)]
    for i, tensor in enumerate(rows):
        tensor[32 : 32 + length] = torch.randn(length, 3, 64, generator=torch.Generator().manual_seed(i))
    lengths = [32, length, 32]
    out = attention(*rows, layout="TND", q_len=lengths, backend="cpu")[32 : 32 + length]
    inner = [tensor[32 : 32 + length].clone() for tensor in rows]
    same_bits(out, attention(*inner, layout="TND", q_len=[length], backend="cpu"))
    assert out.isfinite().all()


def test_short_prompts_use_the_dense_forward_and_single_rows_the_decode() -> None:
    problem = Problem(12, 12, 64, 64, dtype="bfloat16")
    call = make(problem, (16, 0, 3, 32), (16, 0, 3, 32))
    assert isinstance(cpu.schedule(problem, call.extents, "attention_forward"), ForwardPlan)
    few = cpu.schedule(problem, make(problem, (1, 0), (16, 0)).extents, "attention_forward")
    assert isinstance(few, decode.Schedule)
    assert few.decoded.all()

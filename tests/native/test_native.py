"""The native core's forward: each instruction-set variant that runs here, forced, against the float64 reference."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.bits import same_bits, same_where_not_finite
from support.native_dense import CAPPED, VARIANTS, converted, draw_call, invalid, judge, native, unit_views, with_cap
from support.oracle import forward, make

from fusion_attention import _native, attention
from fusion_attention.backends import cpu
from fusion_attention.ir import dropout
from fusion_attention.ir.mask import INFINITE, Band
from fusion_attention.ir.memory_views import MatrixView, RowView
from fusion_attention.ir.problem import Extents, Grads, Operands, Problem, Stats


@pytest.mark.parametrize(("seed", "softcap"), [*((n, 0.0) for n in range(60)), *CAPPED])
def test_forward_of_random_calls_matches_float64_reference(seed: int, softcap: float) -> None:
    call = with_cap(draw_call(seed), softcap)
    want = forward(call)
    for variant in VARIANTS:
        judge(call, native(call, variant, packed=seed % 2 == 0), want, (variant, call.problem))


@pytest.mark.parametrize("seed", range(1000, 1040))
def test_forward_nan_and_infinity_appear_exactly_as_in_reference(seed: int) -> None:
    call = with_cap(draw_call(seed), 0.0 if seed < 1030 else 0.9)
    invalid(call, seed)
    want = forward(call)
    for variant in VARIANTS:
        same_where_not_finite(native(call, variant), want, f"{variant} {call.problem}")


@pytest.mark.parametrize("variant", VARIANTS)
def test_softcapped_score_is_within_two_ulps_of_tanh_formula(variant: str) -> None:
    """The maximum of a row with one key is its score. Scale and cap are powers of two: products are exact."""
    sizes = torch.cat((torch.logspace(-30, 1.2, 4000), torch.linspace(0.5, 12, 4000), torch.tensor([math.inf])))
    q = torch.cat((sizes, -sizes)).view(1, -1, 1, 1)
    problem, extents = Problem(1, 1, 1, 1, scale=0.25, softcap=16.0), Extents(*(np.array([n]) for n in (
        q.numel(), 1, -INFINITE, INFINITE, 0, 0)))  # fmt: skip

    def view(values: torch.Tensor) -> RowView:
        return RowView((values,), np.zeros(1, np.int64), 1, np.zeros(1, np.int64), 1)

    one, stats = torch.ones(1), Stats(view(torch.empty(q.numel())), view(torch.empty(q.numel())))
    operands = Operands(view(q.flatten() * 64), view(one), view(one), view(torch.empty(q.numel())), stats)
    cpu.attention_forward(problem, extents, cpu.schedule(problem, extents, "attention_forward", variant), operands)
    got, want = stats.max.keep[0].double(), 16 * q.flatten().double().tanh()
    unit = torch.finfo(torch.float32).eps * 2 ** want.abs().log2().floor()
    assert ((got - want).abs() <= 2 * unit).all()
    assert torch.equal(got[q.flatten().abs() == math.inf], torch.tensor([16.0, -16.0]).double())


def test_softcap_far_above_the_scale_leaves_scores_unchanged() -> None:
    """scale / softcap is subnormal and has few bits."""
    q = torch.tensor([3.0, -2.0]).view(1, 1, 1, 2) * 1e5
    k = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]).view(1, 3, 1, 2) * 1e5
    v = torch.arange(3.0).view(1, 3, 1, 1)
    for rows in (1, 40):  # of a decode, and not
        many = q.expand(1, rows, 1, 2)
        got, want = (attention(many, k, v, scale=1e-10, softcap=c, backend="cpu") for c in (1e29, 0.0))
        torch.testing.assert_close(got, want, rtol=4 * torch.finfo(torch.float32).eps, atol=0)


# ----------------------------------------------------------------------------------------------------------- same bits

BASE_PROBLEM = Problem(4, 2, 40, 24, scale=0.2)
LONG = ((200, 0, 3, 97), (311, 4, 0, 97))


# Work units of single threads, with very different lengths; units that threads share; more shared units, of grouped
# heads, than are packed at a time.
@pytest.mark.parametrize(
    ("problem", "q_len", "kv_len"),
    [
        (Problem(3, 3, 64, 64, dtype="bfloat16", scale=0.1), (300, 16, 16, 40), (300, 16, 16, 40)),
        (Problem(2, 2, 128, 128, scale=0.1), (200,), (1100,)),
        (Problem(4, 2, 256, 256, scale=0.1), (40,) * 6, (2000,) * 6),
    ],
    ids=["own", "shared", "waves"],
)
def test_forward_on_up_to_64_threads_is_bitwise_equal_to_one_thread(
    problem: Problem, q_len: tuple[int, ...], kv_len: tuple[int, ...]
) -> None:
    band = Band.causal() if q_len == kv_len else None
    call = converted(make(problem, q_len, kv_len, band), problem.torch_dtype)
    want = native(call, threads=1)
    for threads in (2, 3, 5, 8, 16, 64):
        same_bits(native(call, threads=threads), want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_forward_is_bitwise_equal_for_any_layout_and_thread_count(variant: str, dtype: str) -> None:
    problem = Problem(4, 2, 40, 24, 8, dtype, 0.2, "slopes", has_sink=True, dropout="philox", keep_prob=0.7)
    call = converted(make(problem, *LONG, Band.window(150, 3)), problem.torch_dtype)
    want = native(call, variant, packed=True, threads=1)
    for packed, threads in ((False, 1), (True, 2), (False, 2), (True, 5)):
        same_bits(native(call, variant, packed, threads), want)


@pytest.mark.parametrize("keep_prob", [0.5, 0.999, 1e-6, 0.999999])
@pytest.mark.parametrize("variant", VARIANTS)
def test_dropout_mask_of_forward_matches_philox_reference(variant: str, keep_prob: float) -> None:
    problem = Problem(3, 1, 4, 300, dropout="philox", keep_prob=keep_prob)
    extents, operands = unit_views(problem, 30, 300)
    operands = replace(operands, seed=-5, offset=2**32 + 77)
    cpu.attention_forward(problem, extents, cpu.schedule(problem, extents, "attention_forward", variant), operands)
    got = operands.out.sequence(0, 3, 30) > 0
    want = dropout.keep_from_philox(-5, 2**32 + 77, keep_prob, 0, 3, slice(0, 30), slice(0, 300))
    assert torch.equal(got, want)


def test_forward_rebuilds_bias_rows_that_bias_table_does_not_store() -> None:
    call = make(Problem(2, 1, 8, 8, bias="table"), (1200, 1024, 70), (1200, 1024, 70), Band.causal())
    call = converted(call, torch.float32)
    want = forward(call)
    for variant in VARIANTS:
        judge(call, native(call, variant), want, variant)


@pytest.mark.parametrize(("dim", "dim_v"), [(768, 768), (513, 17), (1, 768), (192, 128)])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_forward_of_head_dims_up_to_768_matches_float64_reference(dim: int, dim_v: int, dtype: str) -> None:
    problem = Problem(2, 1, dim, dim_v, dtype=dtype, scale=dim**-0.5)
    call = converted(make(problem, (13,), (70,), Band.causal()), problem.torch_dtype)
    want = forward(call)
    for variant in VARIANTS:
        judge(call, native(call, variant), want, variant)


# A band so narrow that keys are packed in pieces: one thread packs an overlap of pieces once, 64 threads twice.
@pytest.mark.parametrize(("dtype", "dim_v"), [("float32", 136), ("bfloat16", 264)])
def test_keys_shared_by_window_tiles_give_same_bits_on_1_and_64_threads(dtype: str, dim_v: int) -> None:
    rows = (1500, 900)
    problem = Problem(1, 1, 264, dim_v, dtype=dtype, scale=0.06)
    call = converted(make(problem, rows, rows, Band.window(170, 3)), problem.torch_dtype)
    call.v[0][:, 700, 5] = float("inf")  # which rows see it is noted beside what is packed
    want = forward(call)
    for variant in VARIANTS:
        got = native(call, variant, threads=1)
        same_where_not_finite(got, want, variant)
        same_bits(native(call, variant, threads=64), got)


# ------------------------------------------------------------------------------------------------- memory and threads


def test_calls_from_two_threads_do_not_disturb_each_other() -> None:
    calls = [converted(make(BASE_PROBLEM, *LONG, seed=seed), torch.float32) for seed in range(2)]
    want = [native(call)["out"] for call in calls]
    with ThreadPoolExecutor(2) as pool:
        for i, got in enumerate(pool.map(lambda i: native(calls[i % 2])["out"], range(40))):
            same_bits(got, want[i % 2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_with_scores_near_float32_max_returns_exact_results(dtype: torch.dtype) -> None:
    q = torch.zeros(1, 1, 1, 8, dtype=dtype)
    q[..., :3] = 2.0**63  # with itself: 3 * 2^126 = 2.6e38
    v = torch.tensor([1.0, 2.0, 6.0], dtype=dtype)[None, :, None, None].expand(1, 3, 1, 8)
    for signs, want in (((1, 0, -1), 1.0), ((1, -1, 1), 3.5), ((-1, -1, -1), 3.0)):
        k = torch.cat([q * sign for sign in signs], dim=1)
        out, lse = attention(q, k, v, scale=1.0, backend="cpu", return_lse=True)
        assert torch.equal(out, torch.full_like(out, want))
        assert lse.item() == (q.float() ** 2).sum().item() * max(signs)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("power", [14, 15, 20, 45])
def test_forward_returns_value_of_best_key_if_scores_are_huge(variant: str, power: int, sign: int) -> None:
    """Neighbouring scores differ by so much that all other weights are 0; maxima rise from tile to tile."""
    problem = Problem(2, 1, 16, 16, dtype="bfloat16", scale=1.0)
    call = converted(make(problem, (3, 40, 13), (33, 40, 1300)), problem.torch_dtype)
    for q, k in zip(call.q, call.k, strict=True):
        number = 100 + torch.randperm(k.shape[1], generator=torch.Generator().manual_seed(power))
        q.fill_(2.0**power), k.zero_()
        k[..., 0], k[..., 1] = (summand * sign * 2.0**power for summand in (number // 256 * 256, number % 256))
    result = native(call, variant)["out"]
    for out, q, k, v in zip(result, call.q, call.k, call.v, strict=True):
        best = (q[:1, :1].double() @ k.double().mT)[0, 0].argmax()
        same_bits(out, v[:, best].expand_as(out).to(out.dtype))


@pytest.mark.parametrize(
    ("op_kind", "dtype", "most"),
    [
        ("attention_forward", "bfloat16", 60_000_000),
        ("attention_backward", "bfloat16", 120_000_000),
        ("attention_backward", "float32", 220_000_000),
    ],
)
def test_attention_workspace_grows_linearly_with_sequence_length(op_kind: str, dtype: str, most: int) -> None:
    def workspace(length: int) -> int:
        n = np.array([length])
        extents = Extents(n, n, n * 0 - INFINITE, n * 0 + 1, n * 0, n * 0)
        return cpu.workspace_bytes(Problem(1, 1, 64, 64, dtype=dtype), extents, op_kind)

    assert workspace(65536) < most
    assert workspace(65536) < 2.1 * workspace(32768)


@pytest.mark.parametrize("op_kind", ["attention_forward", "attention_backward"])
def test_workspace_too_large_to_allocate_raises_memory_error(op_kind: str) -> None:
    none, many = np.zeros(1, np.int64), np.array([1 << 48])
    problem, lengths = Problem(1, 1, 64, 64), (none + 1, many) if op_kind == "attention_forward" else (many, none + 1)
    extents = Extents(*lengths, none - INFINITE, none + INFINITE, none, none)
    view, one = RowView((torch.zeros(64),), none, 64, none, 64), RowView((torch.zeros(1),), none, 1, none, 1)
    grads = (Grads(view, view, view, view),) if op_kind == "attention_backward" else ()
    operands = Operands(view, view, view, view, Stats(one, one))
    with pytest.raises(MemoryError):
        getattr(cpu, op_kind)(problem, extents, cpu.schedule(problem, extents, op_kind), operands, *grads)


# ----------------------------------------------------------------------------------------------------------- bad calls


def bad_calls() -> dict[str, tuple[dict[str, Any], str]]:
    two, one, strided = np.zeros(2, np.int64), np.zeros(1, np.int64), np.zeros(1, np.int32)
    memory, bytes_ = (torch.zeros(64),), MatrixView(torch.zeros(9, dtype=torch.uint8), one, one, one, 2)
    return {
        "too many addresses": ({"q": RowView(memory, two, 4, two, 4)}, "q has 2 elements, expected 1"),
        "int32 addresses": ({"k": RowView(memory, strided, 4, strided, 4)}, "k is no one-dimensional"),
        "another dim": ({"k": RowView(memory, one, 4, one, 3)}, "k has rows of another length"),
        "another dtype": ({"q": RowView((memory[0].double(),), one, 4, one, 4)}, "float64"),
        "no sink": ({"sink": None}, "sink is missing"),
        "no blocked": ({"blocked": None}, "blocked is missing"),
        "keys apart": ({"blocked": bytes_}, "blocked has keys that are not neighbours"),
    }


@pytest.mark.parametrize("name", bad_calls())
def test_forward_refuses_operands_of_wrong_size_or_dtype(name: str) -> None:
    problem = Problem(1, 1, 4, 300, has_sink=True, has_blocked=True)
    extents, operands = unit_views(problem, 5, 300)
    blocked = MatrixView(torch.zeros(300, dtype=torch.uint8), *[np.zeros(1, np.int64)] * 3, 1)
    operands = replace(operands, sink=torch.zeros(1), blocked=blocked)
    schedule = cpu.schedule(problem, extents, "attention_forward")
    cpu.attention_forward(problem, extents, schedule, operands)
    out = operands.out.sequence(0, 1, 5).clone()
    changes, message = bad_calls()[name]
    with pytest.raises(TypeError if "dtype" in name else ValueError, match=message):
        cpu.attention_forward(problem, extents, schedule, replace(operands, **changes))
    assert torch.equal(operands.out.sequence(0, 1, 5), out)


@pytest.mark.parametrize(
    ("change", "message"), [({"heads_q": 3, "heads_kv": 2}, "no multiple"), ({"dim_qk": 0}, "head dim")]
)
def test_schedule_refuses_invalid_head_counts_and_head_dims(change: dict[str, Any], message: str) -> None:
    problem = Problem(2, 2, 4, 4)
    n = np.array([5])
    extents = Extents(n, n, n - INFINITE, n + INFINITE, n * 0, n * 0)
    with pytest.raises(ValueError, match=message):
        cpu.schedule(replace(problem, **change), extents, "attention_forward")


def test_forward_plan_refuses_tiles_outside_their_sequence() -> None:
    one, none = np.array([1]), np.array([0])
    problem = (1, 1, 4, 4, 0, 0, 1.0, 0, False, False, False, 0, 1.0, 65536, 0.0, False, False)
    extents = (one * 9, one * 9, none, one, none, none)
    _native.ForwardPlan(problem, extents, (none, none, one * 9, none, one * 9))
    for tiles in (
        (one, none, one * 9, none, one),
        (none, none, one * 10, none, one),
        (none, none, one, none, one * 10),
    ):
        with pytest.raises(ValueError, match="tile"):
            _native.ForwardPlan(problem, extents, tiles)
    with pytest.raises(ValueError, match="does not run here"):
        _native.ForwardPlan(problem, extents, (none, none, one, none, one), "v9")

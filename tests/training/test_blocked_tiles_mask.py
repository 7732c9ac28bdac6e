"""Blocked tiles: every case against golden, golden against formulas without tiles, other ways to pass the mask."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from support.bits import same_bits
from support.cases import BITS, CAUSAL, DRAWN, DTYPES, operands

import fusion_attention as fa
from fusion_attention.backends import cpu, triton
from fusion_attention.contract import bind
from fusion_attention.ir.problem import Problem
from fusion_attention.ops.training import api_definition
from fusion_attention.testing import Case, check, cut_tiles, expected, golden, lowered, plain, run
from fusion_attention.testing.run_case import attention

Tensor = torch.Tensor
# Some cases are legal calls that warn (rows behind the last sequence).
pytestmark = pytest.mark.filterwarnings("ignore::fusion_attention.ContractWarning")

BASE = Case(mask="tiles", q_len=(300,), kv_len=(520,), heads_q=2, heads_kv=1)
PACKED = replace(BASE, layout="TND", softmax_layout="TND", q_len=(300, 0, 5, 140), kv_len=(290, 7, 260, 0))
TILED = [
    *(replace(BASE, dtype=d, blank=b) for d in DTYPES for b in (False, True)),
    *(replace(BASE, dtype=d, q_len=(130,), kv_len=(1500,), dim_qk=16) for d in DTYPES),
    *(replace(PACKED, dtype=d) for d in DTYPES),
    replace(BASE, **{**CAUSAL, "mask": "tiles"}),
    replace(BASE, layout="BNSD", q_len=(200, 131), kv_len=(260, 129), sink=True, blank=True, dtype="bfloat16"),
    replace(BASE, sparse_mode=4, pre=150, next=-40, dim_rope=4, dtype="bfloat16"),
    replace(BASE, sparse_mode=0, pre=-20, next=200, layout="SBH", q_len=(129, 129), kv_len=(257, 257)),
    replace(BASE, pse="full", pse_type=0, heads_q=4, heads_kv=2, blank=True),
    replace(BASE, pse="row", pse_type=0, dtype="bfloat16", q_len=(140, 140), kv_len=(300, 300)),
    replace(BASE, pse="slopes_flat", pse_type=2, dtype="float16"),
    replace(PACKED, dtype="bfloat16", sink=True, dim_rope=8, **BITS),
    replace(PACKED, heads_q=6, heads_kv=2, q_rest=3, kv_rest=2, **DRAWN),
    replace(BASE, q_len=(3, 9), kv_len=(700, 260)),
    replace(BASE, q_len=(2, 2), kv_len=(3, 3)),
    replace(BASE, q_len=(0, 0), kv_len=(200, 200)),
    replace(BASE, q_len=(200, 200), kv_len=(0, 0)),
]


@cache
def truth(case: Case) -> dict[str, Tensor]:
    return golden(case, operands(case))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", {replace(case, dtype="float32"): case for case in TILED}.values(), ids=lambda c: c.id)
def test_golden_with_blocked_tiles_matches_dense_mask_formula(case: Case) -> None:
    want = plain(case, operands(case))
    for name, value in truth(case).items():
        size = value.masked_fill(value.abs() > 1e38, 0).abs().amax().clamp(min=1.0).item() if value.numel() else 1.0
        torch.testing.assert_close(value, want[name], rtol=1e-12, atol=1e-12 * size, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("case", TILED, ids=lambda case: case.id)
def test_cpu_back_end_with_blocked_tiles_matches_reference_for_any_thread_count(case: Case) -> None:
    args = operands(case)
    got = run(lowered(case, args), args["dy"], "cpu")
    check(case.id, got, expected(case, args, truth(case)))
    torch.set_num_threads(3)
    same_bits(run(lowered(case, args), args["dy"], "cpu"), got)


def documents(lengths: tuple[int, ...]) -> Tensor:
    """Returns [tokens, tokens] bool: true if two tokens belong to different documents."""
    of = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return of[:, None] != of


def leaves(dtype: torch.dtype, rows: int, keys: int) -> tuple[Tensor, ...]:
    """Returns q, k, v and a gradient of out, [1, S, N, 24], with two query heads per key head."""
    generator = torch.Generator().manual_seed(rows + keys)
    shapes = ((rows, 4), (keys, 2), (keys, 2), (rows, 4))
    return tuple(torch.randn(1, *shape, 24, generator=generator).to(dtype).requires_grad_() for shape in shapes)


def results(of: tuple[Tensor, ...], **words: Any) -> dict[str, Tensor]:
    q, k, v, dy = of
    out = fa.attention(q, k, v, **words)
    return {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, (q, k, v), dy), strict=True))}


@pytest.mark.parametrize("empty_rows", ["zero", "mean"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocked_tiles_give_same_bits_as_blocked_matrix(dtype: str, empty_rows: str) -> None:
    blocked = documents((300, 5, 129, 500))[:700]
    blocked[130:140] = True
    tiles, bits = cut_tiles(blocked[None, None])
    of = leaves(getattr(torch, dtype), *blocked.shape)
    want = results(of, blocked=blocked, empty_rows=empty_rows)
    for name, value in results(of, blocked_tiles=tiles, blocked_bits=bits, empty_rows=empty_rows).items():
        same_bits(value, want[name], name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_ignore_nan_and_infinity_in_keys_hidden_by_tiles(dtype: str) -> None:
    blocked = torch.rand(200, 700, generator=torch.Generator().manual_seed(1)) < 0.3
    blocked[:, 128:300], blocked[:, 513:520], blocked[:, 690:] = True, True, True
    tiles, bits = cut_tiles(blocked[None, None])
    of = leaves(getattr(torch, dtype), *blocked.shape)
    want = results(of, blocked_tiles=tiles, blocked_bits=bits)
    q, k, v, dy = (t.detach().clone() for t in of)
    k[:, blocked.all(0)], v[:, blocked.all(0)] = torch.nan, torch.inf
    for name, value in results(
        tuple(t.requires_grad_() for t in (q, k, v, dy)), blocked_tiles=tiles, blocked_bits=bits
    ).items():
        same_bits(value, want[name], name)


def test_invalid_tile_entries_written_after_check_hide_the_whole_tile() -> None:
    q, k, v, _ = (t.detach() for t in leaves(torch.float32, 200, 300))
    tiles, bits = cut_tiles(torch.zeros(1, 1, 200, 300, dtype=torch.bool))
    call = api_definition.dense_call(
        bind(api_definition.RECORD, {"q": q, "k": k, "v": v, "blocked_tiles": tiles, "blocked_bits": bits})
    )
    tiles[0, 0, 1] = torch.tensor([1 << 30, 0, -(1 << 31)])
    out, max_, _ = attention(call, "cpu")
    assert out[:, 128:].count_nonzero() == 0
    assert (max_[:, :, 128:] == -torch.inf).all()
    assert out[:, :128].isfinite().all()


def test_compiled_attention_with_blocked_tiles_equals_eager() -> None:
    blocked = documents((100, 3, 200))
    tiles, bits = cut_tiles(blocked[None, None])
    of = leaves(torch.float32, *blocked.shape)
    want = results(of, blocked_tiles=tiles, blocked_bits=bits)
    traced = torch.compile(fa.attention, fullgraph=True, backend="aot_eager")
    out = traced(*of[:3], blocked_tiles=tiles, blocked_bits=bits)
    same_bits(out.detach(), want["out"], "out")
    for name, value in zip(("dq", "dk", "dv"), torch.autograd.grad(out, of[:3], of[3]), strict=True):
        same_bits(value, want[name], name)


def test_triton_back_end_refuses_blocked_tiles_and_suggests_matrix() -> None:
    problem = Problem(1, 1, 8, 8, has_blocked_tiles=True)
    sentence = "the triton back end computes no blocked tiles: give them as a matrix, blocked."
    assert sentence in triton.reasons_against(problem, "cuda")
    assert sentence not in triton.reasons_against(replace(problem, has_blocked_tiles=False), "cuda")


def test_cpu_back_end_refuses_blocked_tiles_with_paged_cache() -> None:
    problem = Problem(1, 1, 8, 8, has_blocked_tiles=True, page_size=16)
    assert any("blocked tiles" in reason for reason in cpu.reasons_against(problem, "cpu"))

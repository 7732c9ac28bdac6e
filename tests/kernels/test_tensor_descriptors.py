"""Rows loaded by tensor descriptors, or by pointers if no descriptor has their strides; the backward's masks in tiles
that rows see completely or partly; dS in float16; under Triton's interpreter."""

from typing import Any

import pytest
import torch
from support.aligned import aligned
from support.bits import same_bits
from support.cases import BITS
from support.launches import watch
from support.lse_calls import dense, judge, lists
from support.pieces import Call
from support.pieces import expected as expected_of_call

import fusion_attention as fa
from fusion_attention.backends.triton.common import shapes
from fusion_attention.backends.triton.dense import launch as launch_dense
from fusion_attention.backends.triton.dense.backward import backward_key, backward_query
from fusion_attention.backends.triton.dense.forward import forward
from fusion_attention.contract import bind
from fusion_attention.ir.mask import INFINITE, Band
from fusion_attention.ops.training import api_definition
from fusion_attention.ops.training.forward_backward import DenseForward
from fusion_attention.testing import Case, arguments, check, compare, expected, expected_of, golden, lowered, run

CAUSAL = {"sparse_mode": 3, "mask": "compressed", "heads_q": 2, "heads_kv": 1}
LONG, HIGH = shapes.Tile(16, 32, 4, 1, shapes.TMA), shapes.Tile(32, 16, 4, 1, shapes.TMA)
HIGHEST = shapes.Tile(64, 16, 4, 1, shapes.TMA)  # from 64 rows on q comes by a descriptor too


@pytest.fixture
def by_descriptors(monkeypatch: pytest.MonkeyPatch) -> dict[Any, list[bool]]:
    """Records for each launch of the forward and of the backward's two loops if descriptors load the rows."""
    used: dict[Any, list[bool]] = {forward: [], backward_query: [], backward_key: []}
    watch(monkeypatch, lambda kernel, named: used[kernel].append(named["TMA"]) if kernel in used else None)
    return used


@pytest.mark.parametrize(
    "case",
    [
        Case("TND", "float16", (70, 0, 9), (100, 5, 40), dim_qk=24, dim_v=96, dim_rope=16, **CAUSAL),
        Case("BNSD", "bfloat16", (20,), (40,), dim_qk=576, dim_v=48, scale=0.04, **CAUSAL),
    ],
    ids=lambda case: case.id,
)
def test_attention_with_tallest_tiles_by_descriptors_matches_reference(
    case: Case, by_descriptors: dict[Any, list[bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shapes, "row_of", lambda *_: (HIGHEST, HIGHEST, 1))
    args = aligned(arguments(case))
    check(case.id, run(lowered(case, args), args["dy"], "triton"), expected(case, args))
    assert by_descriptors[forward] == [True]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "case",
    [
        Case("TND", "float16", (35, 0, 9), (50, 5, 40), dim_qk=24, dim_v=96, dim_rope=16, sink=True, **CAUSAL),
        Case("BNSD", "bfloat16", (34,), (70,), dim_qk=40, pse="slopes", pse_type=2, **CAUSAL),
        Case("BNSD", "bfloat16", (34,), (40,), heads_q=2, heads_kv=1, softcap=1.5, sparse_mode=6, mask="compressed",
             prefix=(21,)),
        Case("BSH", "float16", (20,), (40,), heads_q=2, heads_kv=2, mask="head", blank=True, pse="full", pse_type=0),
        Case("BNSD", "float16", (20,), (40,), heads_q=2, heads_kv=1, mask="matrix", blank=True, **BITS),
    ],
    ids=lambda case: case.id,
)  # fmt: skip
@pytest.mark.parametrize("tile", [LONG, pytest.param(HIGH, marks=pytest.mark.slow)], ids=["16 x 32", "32 x 16"])
def test_attention_of_rows_read_by_tensor_descriptors_matches_reference(
    case: Case, tile: shapes.Tile, by_descriptors: dict[Any, list[bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed sequences with lengths that are no multiples of a tile."""
    monkeypatch.setattr(shapes, "row_of", lambda *_: (tile, tile, 1))
    args = aligned(arguments(case))
    check(case.id, run(lowered(case, args), args["dy"], "triton"), expected(case, args))
    assert list(by_descriptors.values()) == [[True]] * 3


def rows(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("key", "described"),
    [
        (rows(1, 40, 2, 16), True),
        (rows(1, 1, 2, 16).expand(1, 40, 2, 16), False),  # one row for all keys
        (rows(1, 80, 1, 16).as_strided((1, 40, 2, 16), (1280, 8, 16, 1)), False),  # a row of 16 at every eighth element
        (rows(1, 40, 2, 18)[..., :16], False),  # rows of 72 bytes
    ],
    ids=["apart", "expanded", "overlapping", "odd strides"],
)
def test_keys_with_unsupported_strides_are_read_by_pointers(
    key: torch.Tensor, described: bool, by_descriptors: dict[Any, list[bool]]
) -> None:
    q, v = rows(1, 20, 2, 16, seed=4), rows(1, 40, 2, 16, seed=5)
    out = fa.attention(q, key, v, band=Band.causal(), backend="triton")
    assert by_descriptors[forward] == [described]
    call = api_definition.dense_call(bind(api_definition.RECORD, {"q": q, "k": key, "v": v, "band": Band.causal()}))
    compare("out", out, expected_of(DenseForward(call))["out"])


@pytest.mark.parametrize(
    ("dout", "described"),
    [
        (rows(1, 20, 2, 16), [[True], [True]]),
        (rows(1, 20, 1, 16).expand(1, 20, 2, 16), [[True], [False]]),  # one gradient for both heads
        (rows(1, 1, 2, 16).expand(1, 20, 2, 16), [[False], [False]]),
        (rows(1, 20, 2, 18)[..., :16], [[False], [False]]),
    ],
    ids=["apart", "heads expanded", "tokens expanded", "odd strides"],
)
def test_output_gradients_with_unsupported_strides_are_read_by_pointers(
    dout: torch.Tensor, described: list[list[bool]], by_descriptors: dict[Any, list[bool]]
) -> None:
    given = [rows(1, 20, 2, 16, seed=4), rows(1, 40, 1, 16, seed=5), rows(1, 40, 1, 16, seed=6)]
    leaves = [t.clone().requires_grad_() for t in given]
    out = fa.attention(*leaves, band=Band.causal(), backend="triton")
    results = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, leaves, dout), strict=True))
    assert list(by_descriptors.values())[1:] == described
    args = dict(zip("qkv", given, strict=True)) | {"layout": "BSND", "band": Band.causal()}
    wanted = expected_of_call(Call(args, dout))
    check("gradients", results, {name: wanted[name] for name in results})


def test_float16_gradients_of_scaled_loss_do_not_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that recompute are off: they would replace rows that overflow."""
    monkeypatch.setattr(launch_dense, "launch_recompute", lambda *_: [])
    case = Case("TND", "float16", (20, 9), (40, 30), dim_qk=16, dim_v=16, scale=1e-3, **CAUSAL)
    args = aligned(arguments(case))
    args["dy"][:20] *= 4096  # of one sequence: the other one's gradients keep their small parts
    args["value"] *= 64
    want = golden(case, args)
    check(case.id, run(lowered(case, args), args["dy"], "triton"), expected(case, args, want))
    assert args["dy"].abs().max() > 10_000
    assert want["dq"].isfinite().all()


def test_gradients_are_bitwise_equal_by_descriptors_and_by_pointers(by_descriptors: dict[Any, list[bool]]) -> None:
    case = Case("TND", "float16", (20, 9), (40, 30), dim_qk=24, dim_v=16, **CAUSAL)
    args = aligned(arguments(case))
    odd = args | {name: torch.nn.functional.pad(args[name], (0, 1))[..., :-1] for name in ("query", "dy")}
    same_bits(*(run(lowered(case, given), given["dy"], "triton") for given in (args, odd)))
    assert list(by_descriptors.values()) == [[True, False]] * 3


def gradients(band: Band) -> list[torch.Tensor]:
    leaves = [rows(1, n, heads, 16, seed=n + heads).requires_grad_() for n, heads in ((20, 2), (40, 1), (40, 1))]
    out = fa.attention(*leaves, band=band, backend="triton")
    return list(torch.autograd.grad(out, leaves, rows(1, 20, 2, 16)))


@pytest.mark.parametrize(
    "edge", [(1 << 31) - 2, *(pytest.param(n, marks=pytest.mark.slow) for n in (41, (1 << 30) + 1))]
)
def test_band_edges_near_int32_limits_act_as_unbounded_or_empty_bands(edge: int) -> None:
    """Kernels count rows in int32: edges beyond all rows and keys are clamped to the ends."""
    everything = gradients(Band())
    assert all(grad.any() for grad in everything)
    same_bits(gradients(Band(lo=-edge, hi=edge)), everything)
    assert not any(grad.any() for band in (Band(lo=edge, hi=INFINITE), Band(hi=-edge)) for grad in gradients(band))


@pytest.mark.parametrize("parts", ["both", pytest.param("lse", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["sink", "lists"])
def test_triton_gradients_through_lse_match_formula(name: str, parts: str) -> None:
    judge(name, *(lists(torch.float32) if name == "lists" else dense(name, torch.float32)), parts, ("triton",))

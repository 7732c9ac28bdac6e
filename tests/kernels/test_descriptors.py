"""Rows by tensor descriptors, and by pointers where a descriptor cannot say how they lie."""

import pytest
import torch
from support.aligned import aligned
from support.launches import watch

import fusion_attention as fa
from fusion_attention.backends.triton.common import shapes
from fusion_attention.backends.triton.dense.forward import forward
from fusion_attention.contract import bind
from fusion_attention.ir.mask import Band
from fusion_attention.ops.training import api_definition
from fusion_attention.ops.training.forward_backward import DenseForward
from fusion_attention.testing import Case, arguments, check, compare, expected, expected_of, lowered, run

HIGH = shapes.Tile(64, 16, 4, 1, shapes.TMA)  # from 64 rows on q comes by a descriptor too
CAUSAL = {"sparse_mode": 3, "mask": "compressed", "heads_q": 2, "heads_kv": 1}


@pytest.fixture
def by_descriptors(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of every launch of the forward, whether rows came by descriptors."""
    descriptors_used: list[bool] = []
    watch(monkeypatch, lambda kernel, named: descriptors_used.append(named["TMA"]) if kernel is forward else None)
    return descriptors_used


@pytest.mark.parametrize(
    "case",
    [
        Case("TND", "float16", (70, 0, 9), (100, 5, 40), dim_qk=24, dim_v=96, dim_rope=16, **CAUSAL),
        Case("BNSD", "bfloat16", (20,), (40,), dim_qk=576, dim_v=48, scale=0.04, **CAUSAL),
    ],
    ids=lambda case: case.id,
)
def test_high_tiles(case: Case, by_descriptors: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "row_of", lambda *_: (HIGH, HIGH, 1))
    args = aligned(arguments(case))
    check(case.id, run(lowered(case, args), args["dy"], "triton"), expected(case, args))
    assert by_descriptors == [True]


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
def test_rows_that_no_descriptor_describes(key: torch.Tensor, described: bool, by_descriptors: list[bool]) -> None:
    q, v = rows(1, 20, 2, 16, seed=4), rows(1, 40, 2, 16, seed=5)
    out = fa.attention(q, key, v, band=Band.causal(), backend="triton")
    assert by_descriptors == [described]
    call = api_definition.dense_call(bind(api_definition.RECORD, {"q": q, "k": key, "v": v, "band": Band.causal()}))
    compare("out", out, expected_of(DenseForward(call))["out"])

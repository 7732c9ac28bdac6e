"""The indexer's kernels under Triton's interpreter against golden: what is chosen, in order, and its gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.selected import good_choice, operands, ordered

from fusion_attention.backends.triton import shapes_sparse
from fusion_attention.backends.triton.shapes import Tile
from fusion_attention.testing import compare
from fusion_attention.testing.sparse import (
    IndexerCase,
    chosen,
    indexer_gradients,
    lowered_indexer,
    plain_indexer_gradients,
    promoted,
)

PACKED = IndexerCase(layout="TND", q_len=(3, 6, 4), kv_len=(5, 6, 9))
HALF = {"dtype": "bfloat16", "weights": "bfloat16"}
FLOAT16 = {"dtype": "float16", "weights": "float16"}

EXACT = [
    IndexerCase(exact=True, top_k=6, q_len=(7, 7), **FLOAT16),
    *(replace(PACKED, exact=True, dim=4, heads=h, top_k=k, mode=m) for h, k, m in ((1, 1, 3), (4, 3, 0), (3, 9, 3))),
    IndexerCase(exact=True, q_len=(4,), kv_len=(150,), dim=4, top_k=20, **HALF),  # candidates are sorted out twice
    IndexerCase(exact=True, page=16, kv_len=(65, 20), q_len=(3, 5), dim=4, top_k=40),
]
CASES = [
    *(IndexerCase(dtype=d) for d in ("float32", "float16", "bfloat16")),
    replace(PACKED, heads=33, dim=24, top_k=5, **FLOAT16),
    replace(PACKED, heads=16, dim=80, top_k=5, **HALF),
    IndexerCase(q_len=(9, 9), kv_len=(4, 4), top_k=6),  # rows without keys
    replace(PACKED, q_len=(9, 2, 0, 3), kv_len=(4, 0, 5, 8), q_rest=2, kv_rest=3, **HALF),
    IndexerCase(q_len=(0, 0), kv_len=(4, 4)),
    IndexerCase(page=16, kv_len=(33, 7), q_len=(3, 5), top_k=8, **HALF),
]

PIECE = Tile(0, 16, 4, 1)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so low that a case of a few rows has several of them."""
    for name, value in (("CANDIDATES", 16), ("CHOICE", PIECE), ("WRITE", PIECE), ("FEWEST", 4)):
        monkeypatch.setattr(shapes_sparse, name, value)
    for name in ("scores_tile", "gradient_tile"):
        monkeypatch.setattr(shapes_sparse, name, lambda *_: Tile(16, 16, 4, 1))


@pytest.mark.parametrize("case", EXACT, ids=lambda case: case.id)
def test_the_order_is_exact(case: IndexerCase) -> None:
    """Whole numbers add up alike everywhere."""
    args = operands(case)
    indices, values = chosen(lowered_indexer(args), "triton")
    ordered(case, args, indices, values, "triton")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_what_is_chosen(case: IndexerCase) -> None:
    args = operands(case)
    good_choice(case, args, *chosen(lowered_indexer(args), "triton"), "triton")


@pytest.mark.parametrize("case", [c for c in (*EXACT[:2], *CASES) if not c.page], ids=lambda case: case.id)
def test_gradients(case: IndexerCase) -> None:
    args = operands(case)
    call, dy = lowered_indexer(args), args["dy"]
    indices = chosen(promoted(call), "golden")[0]
    got = indexer_gradients(call, dy, indices, "triton")
    want = indexer_gradients(promoted(call), dy.double(), indices, "golden")
    measure = plain_indexer_gradients(case, args, indices)
    for name, value in got.items():
        compare(f"{case.id}: {name}", value, want[name], measure[name], case.top_k)

"""The indexer's kernels under Triton's interpreter against golden: selected keys, their order, gradients."""

import math
from dataclasses import replace

import pytest
import torch
from support.bits import same_bits
from support.launches import fresh_plans
from support.sparse_checks import cloned, operands, ordered

from fusion_attention.backends.triton.indexer import choice as indexer_choice
from fusion_attention.backends.triton.indexer import launch as launch_indexer
from fusion_attention.backends.triton.selected import launch_key_sum
from fusion_attention.backends.triton.selected import shapes as shapes_sparse
from fusion_attention.ops.indexer.lowered_call import IndexerBackward
from fusion_attention.testing.expected_indexer import check_index
from fusion_attention.testing.sparse import IndexerCase, chosen, in_float64, indexer_gradients, lowered_indexer
from fusion_attention.torch_ops.eager import run

pytestmark = pytest.mark.filterwarnings("ignore::fusion_attention.contract.ContractWarning")
PACKED = IndexerCase(layout="TND", q_len=(3, 6, 4), kv_len=(5, 6, 9))
HALF = {"dtype": "bfloat16", "weights": "bfloat16"}
FLOAT16 = {"dtype": "float16", "weights": "float16"}

# Compressed keys, each for several tokens: rows without a key, residuals, row tiles that start after key tiles.
COMPRESSED = [
    IndexerCase(ratio=4, q_len=(23, 20), kv_len=(5, 5), residual=(3, 0), top_k=3),
    replace(PACKED, ratio=3, q_len=(9, 2, 0), kv_len=(40, 0, 5), residual=(2, 0, 1), q_rest=2, top_k=20, **HALF),
    IndexerCase(ratio=2, q_len=(1, 9), kv_len=(33, 20), residual=(1, 0), page=16, top_k=8, **HALF),
]
EXACT = [
    *(replace(case, exact=True) for case in COMPRESSED),
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
    *COMPRESSED,
]


@pytest.mark.parametrize("case", EXACT, ids=lambda case: case.id)
def test_triton_indexer_selects_keys_in_exact_order_for_integer_scores(case: IndexerCase) -> None:
    args = operands(case)
    indices, values = chosen(lowered_indexer(args), "triton")
    ordered(case, args, indices, values, "triton")


def test_indexer_candidate_count_never_exceeds_the_counter_limit() -> None:
    most = launch_indexer.candidates(shapes_sparse.MOST_CHOSEN, 2048)
    assert most <= indexer_choice.MOST_COUNTED.value


@pytest.mark.parametrize("case", [EXACT[6], EXACT[8]], ids=lambda case: case.id)
def test_triton_indexer_sorts_lists_too_long_for_one_program(
    case: IndexerCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh_plans(monkeypatch)
    monkeypatch.setattr(shapes_sparse, "MOST_SORTED", 2)
    args = operands(case)
    ordered(case, args, *chosen(lowered_indexer(args), "triton"), "triton")


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_triton_indexer_selection_matches_reference(case: IndexerCase) -> None:
    call = lowered_indexer(operands(case))
    check_index(call, {case.id: run(call, "triton")})


@pytest.mark.sampled(8)
@pytest.mark.parametrize("case", [c for c in (*EXACT[3:5], *CASES) if not c.page], ids=lambda case: case.id)
def test_triton_indexer_gradients_match_reference(case: IndexerCase) -> None:
    args = operands(case)
    call = lowered_indexer(args)
    backward = IndexerBackward(call, args["dy"], chosen(in_float64(call), "golden")[0])
    check_index(backward, {case.id: run(backward, "triton")})


def test_triton_indexer_is_bitwise_equal_for_any_chunk_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest chunk is one tile of rows, or one token."""
    monkeypatch.setattr(launch_key_sum, "BLOCK", 1)  # of one token
    case = replace(PACKED, heads=3, dim=24, top_k=5, **FLOAT16)
    args = operands(case)
    call, result = lowered_indexer(args), []
    for size in (launch_indexer.CHUNK, 1):
        fresh_plans(monkeypatch)
        monkeypatch.setattr(launch_indexer, "CHUNK", size)
        indices, values = chosen(call, "triton")
        result.append({"indices": indices, "values": values, **indexer_gradients(call, args["dy"], indices, "triton")})
    same_bits(result[1], result[0])


def test_triton_indexer_gradient_ignores_list_entries_out_of_range() -> None:
    """List entries are not checked: those behind the band add no gradient, a negative one ends the list."""
    case = IndexerCase("TND", q_len=(3, 5), kv_len=(7, 20), top_k=9)
    args = operands(case)
    lists = torch.randint(0, 24, (8, 1, 9), generator=torch.Generator().manual_seed(0)).int()
    lists[0, 0, 1], lists[1, 0, 2], lists[4, 0, 3] = 2**31 - 1, -(2**31), 1 << 20
    call = IndexerBackward(lowered_indexer(args), args["dy"], lists)
    check_index(call, {case.id: run(call, "triton")})


def test_triton_indexer_ranks_nan_first_and_drops_score_minus_infinity() -> None:
    case = IndexerCase("TND", q_len=(4,), kv_len=(40,), heads=1, top_k=36, exact=True, mode=0)
    args = cloned(operands(case))
    args["query"].fill_(1.0), args["weights"].fill_(1.0)
    args["key"][3], args["key"][20] = math.nan, math.nan
    args["key"][5], args["weights"][2] = math.inf, -math.inf
    call = lowered_indexer(args)
    (indices, values), (want, scores) = chosen(call, "triton"), chosen(in_float64(call), "golden")
    assert want[0, 0, :3].tolist() == [3, 20, 5]
    assert (want[2] == -1).any()
    assert torch.equal(indices, want)
    assert torch.equal(values.nan_to_num(7.0), scores.to(values.dtype).nan_to_num(7.0))

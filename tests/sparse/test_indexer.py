"""The lightning indexer: order of selected keys, gradients against autograd, back ends against golden, interfaces."""

import math
from dataclasses import replace

import pytest
import torch
from support.bits import same_bits
from support.contract_failures import by_name
from support.sparse_checks import Args, backends, close, leaves_of, operands, ordered, shown

import fusion_attention as fa
from fusion_attention import npu
from fusion_attention.ops.indexer import api_definition as own_indexer
from fusion_attention.ops.indexer import definitions as indexer
from fusion_attention.ops.indexer.lowered_call import IndexerBackward
from fusion_attention.testing.expected_indexer import check_index, golden_of
from fusion_attention.testing.sparse import (
    IndexerCase,
    chosen,
    in_float64,
    indexer_gradients,
    keys_of,
    lowered_indexer,
    sequence_of,
)
from fusion_attention.torch_ops.eager import run

PACKED = IndexerCase(layout="TND", q_len=(3, 6, 4), kv_len=(5, 6, 9))
HALF = {"dtype": "bfloat16", "weights": "bfloat16"}

# Compressed keys, each for several tokens: from position 0, behind earlier ones, rows without a key, pages, decoding.
COMPRESSED = [
    IndexerCase(ratio=4, q_len=(23, 20), kv_len=(5, 5), residual=(3, 0), top_k=3),
    IndexerCase(ratio=3, q_len=(4, 1), kv_len=(9, 9), residual=(0, 2), top_k=12, **HALF),
    replace(PACKED, ratio=2, q_len=(5, 0, 9), kv_len=(2, 3, 0), residual=(1, 1, 1), q_rest=2, top_k=5, dtype="float16"),
    *(
        IndexerCase(ratio=4, q_len=(1,) * 4, kv_len=(n,) * 4, residual=(0, 1, 2, 3), page=page)
        for n, page in ((40, 0), (33, 16))
    ),
    replace(PACKED, ratio=128, q_len=(300, 130), kv_len=(2, 1), residual=(44, 2), top_k=2),
]

CASES = [
    *(IndexerCase(layout=layout, dtype=d) for layout in ("BSND", "TND") for d in ("float32", "float16", "bfloat16")),
    replace(PACKED, top_k=5),
    *(IndexerCase(mode=mode, top_k=k, **HALF) for mode in (0, 3) for k in (1, 9, 20)),
    *(
        replace(PACKED, heads=h, dim=d, top_k=5, dtype="float16", weights="float16")
        for h, d in ((1, 1), (3, 7), (8, 128))
    ),
    IndexerCase(q_len=(9, 9), kv_len=(4, 4), top_k=6),  # rows without keys
    replace(PACKED, q_len=(9, 2, 0, 3), kv_len=(4, 0, 5, 8), q_rest=2, kv_rest=3, **HALF),
    IndexerCase(q_len=(5, 2, 0), kv_len=(3, 9, 4), q_rest=1, kv_rest=2),
    IndexerCase(q_len=(0, 0), kv_len=(4, 4)),
    replace(PACKED, q_len=(0,), kv_len=(0,)),
    IndexerCase(q_len=(70,), kv_len=(300,), heads=16, dim=64, top_k=100, **HALF),
    IndexerCase(q_len=(1, 1), kv_len=(700, 700), heads=8, dim=32, top_k=512),
    *(IndexerCase(page=16, kv_len=(33, 7), q_len=(3, 5), layout=layout, top_k=8, **HALF) for layout in ("BSND", "TND")),
    *COMPRESSED,
]
EXACT = [
    IndexerCase(exact=True, top_k=6, q_len=(7, 7)),
    IndexerCase(exact=True, top_k=6, q_len=(7, 7), dtype="float16", weights="float16"),
    IndexerCase(exact=True, top_k=6, q_len=(7, 7), dtype="bfloat16"),
    *(replace(PACKED, exact=True, dim=4, heads=h, top_k=k, mode=m) for h in (1, 4) for k in (1, 3, 9) for m in (0, 3)),
    IndexerCase(exact=True, q_len=(40,), kv_len=(400,), dim=4, top_k=300, **HALF),
    IndexerCase(exact=True, q_len=(3,), kv_len=(2500,), dim=4, heads=2, top_k=2048, mode=0),
    IndexerCase(exact=True, page=16, kv_len=(65, 20), q_len=(3, 5), dim=4, top_k=40),
    *(replace(case, exact=True) for case in COMPRESSED),
]


@pytest.mark.parametrize("case", EXACT, ids=lambda case: case.id)
def test_indexer_selects_keys_in_exact_order_for_integer_scores(case: IndexerCase) -> None:
    args = operands(case)
    for backend in backends(case):
        indices, values = chosen(lowered_indexer(args), backend)
        assert indices.dtype == torch.int32
        ordered(case, args, indices, values, backend)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_indexer_selects_best_visible_keys_with_their_scores(case: IndexerCase) -> None:
    """Rows that belong to no sequence get -1 and -inf."""
    call = lowered_indexer(operands(case))
    results = {backend: run(call, backend) for backend in backends(case)}
    check_index(call, results)
    for result in results.values():
        for output, nothing in zip(result.values(), (-1, -math.inf), strict=True):
            ends = [output[sum(case.q_len) :]] if case.packed else [output[b, n:] for b, n in enumerate(case.q_len)]
            assert all((end == nothing).all() for end in ends)


GRADIENTS = [case for case in (*CASES, *EXACT) if not case.page and max(case.kv_len) < 1000]


def lists_of(case: IndexerCase, args: Args) -> torch.Tensor:
    return chosen(in_float64(lowered_indexer(args)), "golden")[0]


@pytest.mark.parametrize("case", GRADIENTS, ids=lambda case: case.id)
def test_indexer_gradients_match_reference(case: IndexerCase) -> None:
    args = operands(case)
    backward = IndexerBackward(lowered_indexer(args), args["dy"], lists_of(case, args))
    check_index(backward, {backend: run(backward, backend) for backend in backends(case)})


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", GRADIENTS, ids=lambda case: case.id)
def test_golden_indexer_gradients_match_autograd(case: IndexerCase) -> None:
    args = operands(case)
    indices = lists_of(case, args)
    leaves = {n: args[n].double().detach().requires_grad_() for n in ("query", "key", "weights")}
    total = torch.zeros((), dtype=torch.float64)
    for b in range(len(case.q_len)):
        q, w = (sequence_of(case, leaves[n], "q", b) for n in ("query", "weights"))
        k = keys_of(case, {**args, **leaves}, "key", b)[:, 0]
        if len(q) and len(k):
            scores = (torch.einsum("rhd,kd->rhk", q, k).relu() * w[..., None]).sum(1)
            entries = sequence_of(case, indices, "q", b)[:, 0].long()
            dy = sequence_of(case, args["dy"].double(), "q", b)[:, 0]
            total = total + (scores.gather(1, entries.clamp(min=0)) * dy).masked_fill(entries < 0, 0).sum()
    got = indexer_gradients(in_float64(lowered_indexer(args)), args["dy"].double(), indices, "golden")
    nothing = [torch.zeros_like(t) for t in got.values()]
    want = torch.autograd.grad(total, list(leaves.values())) if total.requires_grad else nothing
    close(got, dict(zip(got, want, strict=True)))


def test_indexer_gradient_ignores_list_entries_behind_the_end() -> None:
    """Entries after -1, or beyond the count of visible keys, are ignored; an entry listed twice counts twice."""
    q, k, w = torch.randn(1, 2, 3, 4), torch.randn(1, 5, 1, 4), torch.randn(1, 2, 3)
    dy = torch.tensor([[[1.0, 2.0, 4.0, torch.nan], [1.0, torch.nan, torch.nan, torch.nan]]])
    indices = torch.tensor([[[3, 0, 3, -1], [2, -1, 1, 1]]])
    args = {"query": q, "key": k, "weights": w, "dy": dy, "sparse_indices": indices, "layout": "BSND", "sparse_mode": 3}
    call = lowered_indexer({**args, "sparse_count": 4, "return_values": True})
    backward = IndexerBackward(call, dy, indices)
    float64_leaves = [t.double().requires_grad_() for t in (q, k, w)]
    close(golden_of(backward), dict(zip(("dquery", "dkey", "dweights"), read_by_hand(float64_leaves), strict=True)))
    check_index(backward, {backend: run(backward, backend) for backend in backends(IndexerCase())})


def read_by_hand(leaves: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Returns the gradients of the weighted sum over the entries of those lists that count."""
    scores = (torch.einsum("brhd,bkzd->brhk", *leaves[:2]).relu() * leaves[2][..., None]).sum(2)
    return torch.autograd.grad(5 * scores[0, 0, 3] + 2 * scores[0, 0, 0] + scores[0, 1, 2], leaves)


def test_golden_indexer_ranks_nan_first_and_drops_score_minus_infinity() -> None:
    q, w = torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1)
    k = torch.tensor([1.0, 5.0, 3.0, 2.0])[None, :, None, None].repeat(1, 1, 1, 2)
    k[0, 3] = torch.nan
    indices, values = fa.lightning_indexer(q, k, w, 3, backend="golden")
    assert indices.flatten().tolist() == [3, 1, 2]
    assert values.flatten()[0].isnan()
    k[0, 3] = torch.inf
    w.neg_()  # now the last key scores -inf: it is not seen
    indices, values = fa.lightning_indexer(q, k, w, 4, backend="golden")
    assert indices.flatten().tolist() == [0, 2, 1, -1]
    assert values.flatten().tolist() == [-2.0, -6.0, -10.0, -math.inf]


# ----------------------------------------------------------------------------------------------------------- interfaces


@pytest.mark.parametrize("case", [c for c in CASES if max(c.kv_len) < 100], ids=lambda case: case.id)
def test_indexer_interfaces_are_bitwise_equal_to_lowered_call(case: IndexerCase) -> None:
    args = operands(case)
    leaves = leaves_of(args, "query", "key", "weights")
    call = lowered_indexer(args)
    indices, values = chosen(call, "auto")
    results = [fa.lightning_indexer(**shown(own_indexer.RECORD, case, {**args, **leaves}))]
    if case.ratio == 1:
        results.append(npu.npu_lightning_indexer(**by_name(indexer.TORCH, {**args, **leaves})))
        alone, nothing = npu.npu_lightning_indexer(**by_name(indexer.TORCH, {**args, "return_values": False}))
        same_bits(alone, indices, "indices without values")
        assert nothing.shape == (0,)
    for own_indices, own_values in results:
        same_bits(own_indices, indices, "indices")
        same_bits(own_values.detach(), values, "values")
        assert not own_indices.requires_grad
    if case.page:
        return
    want = indexer_gradients(call, args["dy"], indices, "auto")
    gradients = [torch.autograd.grad(own_values, list(leaves.values()), args["dy"]) for _, own_values in results]
    if case.ratio == 1:
        saved = {**args, "sparse_indices": indices}
        bare = {**saved, "dy": args["dy"].squeeze(-2), "sparse_indices": indices.squeeze(-2).long()}
        gradients += [npu.npu_lightning_indexer_grad(**by_name(indexer.TORCH_GRAD, given)) for given in (saved, bare)]
    for each in gradients:
        for name, gradient in zip(want, each, strict=True):
            same_bits(gradient, want[name], name)


# ----------------------------------------------------------------------------------------------------------- bad input


def test_indexer_refuses_invalid_arguments() -> None:
    q, k, w = torch.zeros(1, 2, 3, 4), torch.zeros(1, 5, 1, 4), torch.zeros(1, 2, 3)
    dy, indices = torch.zeros(1, 2, 4), torch.zeros(1, 2, 4, dtype=torch.int32)
    with pytest.raises(
        fa.ContractError, match="npu_lightning_indexer: weights: expected the dtype of query, or float32"
    ):
        npu.npu_lightning_indexer(q, k, w.half())
    with pytest.raises(fa.ContractError, match="sparse_count: expected 1 <= sparse_count <= 1048576, got 0"):
        npu.npu_lightning_indexer(q, k, w, sparse_count=0)
    with pytest.raises(fa.ContractError, match="key: expected axis 2 to be 1, got 2"):
        npu.npu_lightning_indexer(q, torch.zeros(1, 5, 2, 4), w)
    with pytest.raises(fa.ContractError, match=r"lightning_indexer: kv_len: expected .* got length 6 of sequence 0"):
        fa.lightning_indexer(q, k, w, 2, kv_len=[6])
    indices[0, 1, 2] = 5
    with pytest.raises(fa.ContractError, match=r"got 5 at batch 0, row 1, slot 2, outside \[-1, 5\)"):
        npu.npu_lightning_indexer_grad(q, k, dy, indices, w)
    with pytest.raises(fa.ContractError, match="sparse_indices: expected axis 2 to be K=4 as in dy, got 3"):
        npu.npu_lightning_indexer_grad(q, k, dy, indices[..., :3], w)


def test_indexer_over_page_table_without_columns_returns_empty_selection() -> None:
    q, pages, weights = torch.randn(1, 3, 2, 8), torch.randn(2, 4, 1, 8), torch.ones(1, 3, 2)
    given = {"kv_len": [0], "page_table": torch.zeros(1, 0, dtype=torch.int32)}
    indices, values = fa.lightning_indexer(q, pages, weights, 2, **given)
    assert (indices == -1).all()
    assert (values == -torch.inf).all()
    assert not fa.sparse_attention(q, pages, pages, indices, **given).any()

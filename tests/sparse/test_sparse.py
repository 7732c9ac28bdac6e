"""Sparse attention: golden against autograd, back ends against golden, changes that must not affect results."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.bits import same_bits
from support.contract_failures import by_name
from support.sparse_checks import Args, backends, cloned, close, leaves_of, operands, shown

import fusion_attention as fa
from fusion_attention import npu
from fusion_attention.ops.sparse import api_definition
from fusion_attention.ops.sparse import definitions as sparse
from fusion_attention.ops.sparse.checks import entries_fit
from fusion_attention.ops.sparse.lowered_call import DIFFERENTIABLE, SparseBackward
from fusion_attention.testing import call_interface, check
from fusion_attention.testing.sparse import (
    SparseCase,
    compute,
    expected,
    golden,
    in_float64,
    keys_of,
    lowered,
    selected,
    sequence_of,
)
from fusion_attention.torch_ops.eager import run

PACKED = SparseCase(layout="TND", q_len=(3, 6, 4), kv_len=(5, 6, 9))
MLA = {"dim_qk": 32, "dim_v": 32, "dim_rope": 8, "shares_kv": True, "heads_q": 8}
PAGED = {"page": 16, "kv_len": (33, 7)}

CASES = [
    *(SparseCase(dtype=d, layout=layout) for d in ("float32", "float16", "bfloat16") for layout in ("BSND", "TND")),
    *(SparseCase(dtype=d, **MLA, lists="all", count=9) for d in ("float32", "float16", "bfloat16")),
    *(
        SparseCase(lists=lists, count=7, mode=mode)
        for lists in ("all", "repeated", "short", "none", "wild")
        for mode in (0, 3)
    ),
    *(
        replace(PACKED, lists=lists, count=7, dtype="bfloat16")
        for lists in ("all", "repeated", "short", "none", "wild")
    ),
    *(SparseCase(block=n, count=5, lists="all", kv_len=(40, 40)) for n in (2, 3, 8, 64, 128)),
    *(SparseCase(block=n, count=5, lists="wild", q_len=(40, 7), kv_len=(40, 40), layout="TND") for n in (4, 64)),
    replace(PACKED, q_len=(70, 3), kv_len=(130, 3), block=64, count=4, lists="all", dtype="bfloat16", **MLA),
    SparseCase(heads_q=6, heads_kv=3, dim_qk=7, dim_v=5, sink=True),
    SparseCase(heads_q=4, heads_kv=2, lists="repeated", dim_v=12, dtype="float16", wide=True),
    SparseCase(
        heads_q=1,
        dim_qk=80,
        dim_v=3,
        dim_rope=5,
        q_len=(1, 6),
        kv_len=(50, 50),
        layout="TND",
        count=60,
        lists="all",
        wide=True,
    ),
    SparseCase(shares_kv=True, dim_v=5, lists="repeated"),
    SparseCase(q_len=(9, 9), kv_len=(4, 4), lists="all"),  # rows without keys
    SparseCase(q_len=(9, 9), kv_len=(4, 4), lists="all", sink=True, dtype="bfloat16"),
    replace(PACKED, q_len=(9, 2, 0, 3), kv_len=(4, 0, 5, 8), q_rest=2, kv_rest=3, lists="all", sink=True, dim_rope=4),
    SparseCase(q_len=(5, 2, 0), kv_len=(3, 9, 4), q_rest=1, kv_rest=2, lists="all", dtype="bfloat16"),
    SparseCase(q_len=(0, 0), kv_len=(4, 4)),
    SparseCase(q_len=(4, 4), kv_len=(0, 0), sink=True),
    replace(PACKED, q_len=(0,), kv_len=(0,)),
    SparseCase(q_len=(2, 2), kv_len=(300, 300), count=200, dtype="bfloat16", **MLA),
    SparseCase(q_len=(130,), kv_len=(150,), count=64, heads_q=3, lists="random"),
    *(
        SparseCase(**PAGED, q_len=(3, 5), block=n, count=5, lists="all", dtype=d, **MLA)
        for n, d in ((1, "bfloat16"), (8, "float32"), (64, "float16"))
    ),
    replace(PACKED, **PAGED, q_len=(3, 9), count=7, lists="wild", heads_kv=2, sink=True),
]


# ------------------------------------------------------------------------------------------------- golden, back ends


def witness(case: SparseCase, args: Args) -> dict[str, torch.Tensor]:
    """Returns all results in float64, row by row and key head by key head: gathered keys, a softmax, torch.autograd."""
    leaves = {name: leaf.detach().double().requires_grad_() for name, leaf in leaves_of(args, *DIFFERENTIABLE).items()}
    given, group = {**args, **leaves}, case.heads_q // case.heads_kv
    out, loss = torch.zeros(args["dy"].shape, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    top, total = torch.zeros_like(out[..., 0]), torch.zeros_like(out[..., 0])
    for b, rows in enumerate(case.q_len):
        lists, dy = sequence_of(case, args["sparse_indices"], "q", b), sequence_of(case, args["dy"].double(), "q", b)
        for row, kv in np.ndindex(rows, case.heads_kv):
            heads, at = slice(kv * group, (kv + 1) * group), selected(case, lists[row, kv].tolist(), b, row)
            q, k = sequence_of(case, given["query"], "q", b)[row, heads], keys_of(case, given, "key", b)[at, kv]
            v = k[:, : case.dim_v] if case.shares_kv else keys_of(case, given, "value", b)[at, kv]
            s = q @ k.mT
            if case.dim_rope:
                k_rope = keys_of(case, given, "key_rope", b)[at, kv]
                s = s + sequence_of(case, given["query_rope"], "q", b)[row, heads] @ k_rope.mT
            s = s * case.scale
            s = torch.cat((s, given["sinks"][heads, None]), -1) if case.sink else s
            if not s.shape[-1] or not case.kv_len[b]:
                continue  # neither a key nor a sink: all results stay zero
            result = s.softmax(-1)[:, : len(at)] @ v
            loss = loss + (result * dy[row, heads]).sum()
            values = (result, s.amax(-1), (s - s.amax(-1, keepdim=True)).exp().sum(-1))
            for tensor, value in zip((out, top, total), values, strict=True):
                sequence_of(case, tensor, "q", b)[row, heads] = value.detach()
    stats = {"max": top, "sum": total}
    results = {n: t.unflatten(-1, (-1, group)).movedim(-2, 0 if case.packed else 1) for n, t in stats.items()}
    results["out"] = out
    if case.page:
        return results
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True) if loss.requires_grad else None
    zeros = [torch.zeros_like(t) for t in leaves.values()]
    pairs = zip(leaves, grads or zeros, zeros, strict=True)
    return results | {f"d{name}": zero if grad is None else grad for name, grad, zero in pairs}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_golden_sparse_attention_matches_autograd(case: SparseCase) -> None:
    """witness() gathers the keys of a list; golden counts how often each key is listed."""
    args = operands(case)
    close(golden(case, args), witness(case, args))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_sparse_attention_of_every_back_end_matches_reference(case: SparseCase) -> None:
    judge(case, operands(case))


def judge(case: SparseCase, args: Args) -> None:
    """Compares every back end with golden."""
    call = lowered(args)
    want = expected(call, None if case.page else args["dy"])
    for backend in backends(case)[1:]:
        check(f"{backend}: {case.id}", compute(case, call, args["dy"], backend), want)


def test_golden_rounds_sparse_attention_output_once() -> None:
    case = SparseCase(dtype="bfloat16", sink=True, dim_rope=4)
    args = operands(case)
    got, want = compute(case, lowered(args), args["dy"], "golden"), golden(case, args)
    same_bits(got["out"], want["out"].bfloat16(), "out")


# ----------------------------------------------------------------------------------------------------------- identities


def lse_of(case: SparseCase, statistics: dict[str, torch.Tensor]) -> torch.Tensor:
    """Returns lse = max + log(sum) in the shape that functions return: [T, N] packed, else [B, N, S]."""
    lse = statistics["max"] + statistics["sum"].log()
    return lse.movedim(0, 1).flatten(1) if case.packed else lse.mT.flatten(1, 2)


def test_sparse_attention_ignores_list_entries_behind_the_end_or_in_the_future() -> None:
    """A list ends at -1, or after as many entries as the row sees blocks."""
    q, k = torch.randn(1, 2, 2, 8), torch.randn(1, 6, 1, 8)
    plain_list = torch.tensor([[[[3, 1, -1, -1, -1, -1]], [[5, 2, 0, -1, -1, -1]]]])
    odd_list = torch.tensor([[[[3, 5, 1, -1, 4, 2]], [[5, 2, 0, -1, 1, 1]]]])  # row 0 sees the keys 0 to 4
    want = fa.sparse_attention(q, k, None, plain_list, backend="golden")
    same_bits(fa.sparse_attention(q, k, None, odd_list, backend="golden"), want, "odd")
    first = fa.sparse_attention(q[:, :1], k[:, :1], None, torch.zeros(1, 1, 1, 4, dtype=torch.int32), backend="golden")
    assert torch.equal(first, k[:, :1].expand(1, 1, 2, 8))  # one key seen: one entry read


def test_sparse_attention_ignores_nan_and_infinity_in_unselected_keys() -> None:
    case = SparseCase(lists="random", count=2, mode=0)
    args = cloned(operands(case))
    args["sparse_indices"].remainder_(4)
    want = {backend: compute(case, lowered(args), args["dy"], backend) for backend in backends(case)}
    args["key"][:, 4:] = torch.nan
    args["value"][:, 4:] = torch.inf
    for backend, before in want.items():
        same_bits(compute(case, lowered(args), args["dy"], backend), before)


def test_sparse_gradients_of_list_halves_add_up_with_whole_statistics() -> None:
    case = SparseCase(lists="all", count=8, mode=0, kv_len=(8, 8), heads_kv=2, dtype="float32")
    args = operands(case)
    call, dy = in_float64(lowered(args)), args["dy"].double()
    full = run(call, "golden")
    want = run(SparseBackward(call, dy, *full.values()), "golden")
    halves = [in_float64(lowered({**args, "sparse_indices": half})) for half in args["sparse_indices"].chunk(2, -1)]
    first, second = (run(SparseBackward(half, dy, *full.values()), "golden") for half in halves)
    close({name: first[name] + second[name] for name in want}, want)


# ----------------------------------------------------------------------------------------------------------- interfaces

INTERFACE_CASES = [case for case in CASES if max(case.q_len, default=0) < 20]


@pytest.mark.parametrize("case", INTERFACE_CASES, ids=lambda case: case.id)
def test_sparse_attention_interfaces_are_bitwise_equal_to_lowered_call(case: SparseCase) -> None:
    args = operands(case)
    want, leaves = compute(case, lowered(args), args["dy"], "auto"), leaves_of(args, *DIFFERENTIABLE)
    first, lse = fa.sparse_attention(**shown(api_definition.RECORD, case, {**args, **leaves}), return_lse=True)
    same_bits(lse.detach(), lse_of(case, want), "lse")
    outs = [first]
    if not args["dim_v"]:
        out, max_, sum_ = npu.npu_sparse_flash_attention(**by_name(sparse.TORCH, {**args, **leaves}))
        outs.append(out)
        same_bits([max_, sum_], [want["max"], want["sum"]], "statistics")
        assert not max_.requires_grad
        assert not sum_.requires_grad
    if not args["dim_v"] and not case.page:
        saved = {"attention_in": out.detach(), "softmax_max": max_, "softmax_sum": sum_}
        explicit = npu.npu_sparse_flash_attention_grad(**by_name(sparse.TORCH_GRAD, {**args, **saved}))
        for name, gradient in zip(("dquery", "dkey", "dvalue", "dquery_rope", "dkey_rope"), explicit, strict=True):
            same_bits(gradient, want.get(name, args["query"].new_empty(0)), name)
    for out in outs:
        same_bits(out.detach(), want["out"], "out")
        if not case.page:
            for name, gradient in zip(leaves, torch.autograd.grad(out, list(leaves.values()), args["dy"]), strict=True):
                same_bits(gradient, want[f"d{name}"], name)


def test_npu_sparse_flash_attention_returns_statistics_only_on_request() -> None:
    args = operands(SparseCase())
    given = {p.shown: args[p.name] for p in sparse.TORCH.params if args.get(p.name) is not None}
    out, max_, sum_ = npu.npu_sparse_flash_attention(**{**given, "return_softmax_lse": False})
    assert max_.shape == sum_.shape == (0,)
    same_bits(out, npu.npu_sparse_flash_attention(**given)[0], "out")


def test_sparse_attention_backward_over_paged_keys_raises() -> None:
    args = operands(next(case for case in CASES if case.page and not case.packed))
    k = args["key"].float().requires_grad_()
    q, rope, k_rope = (args[n].float() for n in ("query", "query_rope", "key_rope"))
    indices = args["sparse_indices"]
    more = {"q_rope": rope, "k_rope": k_rope, "page_table": args["block_table"], "kv_len": (33, 7), "q_len": (3, 5)}
    out = fa.sparse_attention(q, k, None, indices, **more, backend="golden")
    with pytest.raises(NotImplementedError, match="paged keys have no gradient"):
        out.sum().backward()


# ----------------------------------------------------------------------------------------------------------- bad input

BAD = [
    ({"sparse_indices": torch.tensor([[[[0, 9]]]])}, r"got 9 at batch 0, row 0, slot 1, outside \[-1, 9\)"),
    ({"sparse_indices": torch.tensor([[[[0, -2]]]])}, r"got -2 at batch 0, row 0, slot 1"),
    ({"sparse_indices": torch.tensor([[[[1 << 40, 0]]]])}, r"got 1099511627776 at batch 0, row 0, slot 0"),
    ({"sparse_indices": torch.zeros(1, 1, 1, 2)}, "int32 or int64, got float32"),
    ({"sparse_indices": torch.zeros(1, 2, 1, 2, dtype=torch.int32)}, "axis 1 to be S1=1 as in query, got 2"),
    ({"actual_seq_kvlen": [10]}, r"length 10 of sequence 0, outside \[0, 9\]"),
    ({"actual_seq_qlen": [1, 1]}, "2 lengths for 1 sequences"),
    ({"sparse_block_size": 0}, "1 <= sparse_block_size <= 128, got 0"),
    ({"sparse_mode": 2}, r"sparse_mode in \(0, 3\), got 2"),
    ({"scale_value": float("nan")}, "a finite scale, got nan"),
    ({"layout_kv": "PA_BSND"}, "a table if keys are PA_BSND, otherwise None"),
]


@pytest.mark.parametrize(("wrong", "text"), BAD, ids=[text[:40] for _, text in BAD])
def test_npu_sparse_flash_attention_refuses_invalid_arguments(wrong: Args, text: str) -> None:
    q, k = torch.zeros(1, 1, 2, 4), torch.zeros(1, 9, 1, 4)
    lists = torch.zeros(1, 1, 1, 2, dtype=torch.int32)
    args = {"query": q, "key": k, "value": k, "sparse_indices": lists, "scale_value": 0.5}
    if wrong.get("layout_kv"):
        wrong = {**wrong, "actual_seq_kvlen": [9]}
    with pytest.raises(fa.ContractError, match=f"npu_sparse_flash_attention: .*expected .*{text}"):
        call_interface(npu.npu_sparse_flash_attention, sparse.TORCH, {**args, **wrong})


def test_sparse_attention_error_names_first_invalid_list_entry() -> None:
    case = replace(PACKED, heads_q=4, heads_kv=2)
    args = operands(case)
    indices = args["sparse_indices"].clone()
    indices[5, 1, 2] = 77  # sequence 1 has rows 3 to 8
    indices[9, 0, 1] = -5
    with pytest.raises(fa.ContractError, match=r"got 77 at batch 1, row 2, head 1, slot 2, outside \[-1, 6\)"):
        lowered({**args, "sparse_indices": indices})


def test_npu_sparse_flash_attention_grad_refuses_statistics_of_wrong_shape() -> None:
    q, k = torch.zeros(1, 1, 2, 4), torch.zeros(1, 9, 1, 4)
    indices, stats = torch.zeros(1, 1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 1, 3)
    with pytest.raises(fa.ContractError, match=r"softmax_max: expected a last axis of N1 / N2, got .*G=3"):
        npu.npu_sparse_flash_attention_grad(q, k, k, indices, q, q, stats, stats, 0.5, 1)
    with pytest.raises(fa.ContractError, match="softmax_max: expected 4 dimensions"):
        npu.npu_sparse_flash_attention_grad(q, k, k, indices, q, q, stats[0], stats[0], 0.5, 1)


# --------------------------------------------------------------------------------------------------------------- lists


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(0,), (1,), (40, 3, 17)], ids=str)
def test_pack_lists_moves_valid_entries_to_the_front(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    lists = torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = lists.clone()
    packed = fa.pack_lists(lists)
    assert (packed.dtype, packed.shape) == (dtype, lists.shape)
    width = max(shape[-1], 1)
    for result, given in zip(packed.reshape(-1, width).tolist(), lists.reshape(-1, width).tolist(), strict=True):
        valid = [n for n in given if n >= 0]
        assert result == valid + [-1] * (len(given) - len(valid))
    assert torch.equal(lists, before)


@pytest.mark.parametrize("wrong", [torch.zeros(3), torch.tensor(1), torch.zeros(2, dtype=torch.int16)], ids=str)
def test_pack_lists_refuses_wrong_dtypes_and_scalars(wrong: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="pack_lists: indices: expected int32 or int64"):
        fa.pack_lists(wrong)


@pytest.mark.parametrize("backend", ["cpu", "golden"])
def test_lists_without_entries_give_zero_output_and_gradient(backend: Any) -> None:
    q, k = torch.randn(1, 5, 2, 16, requires_grad=True), torch.randn(1, 7, 1, 16)
    lists = torch.zeros(1, 5, 1, 0, dtype=torch.int32)
    out, lse = fa.sparse_attention(q, k, None, lists, return_lse=True, backend=backend)
    assert not out.any()
    assert lse.isneginf().all()
    assert not torch.autograd.grad(out.sum(), q)[0].any()


@pytest.mark.parametrize(
    ("entries", "keys", "fault"),
    [
        ([-1, -1], -(2**63), "-1 at batch 0, row 0, slot 0"),
        ([-1, -1], -(2**40), "-1 at batch 0, row 0, slot 0"),
        ([5, -2], 2**63 - 1, "-2 at batch 0, row 0, slot 1"),
        ([5, -2], 2**31 + 1, "-2 at batch 0, row 0, slot 1"),
    ],
)
def test_list_entries_are_compared_with_64_bit_lengths(entries: list[int], keys: int, fault: str) -> None:
    lists = torch.tensor([[entries]], dtype=torch.int32)
    text = f"{fault}, outside [-1, {keys})"
    assert entries_fit(lists, "TND", np.array([1]), np.array([keys])) == text

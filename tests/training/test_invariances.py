"""Strides, unseen memory, neighbours, packing, threads and repetition change no bit of a result; values that are not
finite reach no other rows.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.bits import same_bits
from support.cases import BITS, CAUSAL, DRAWN, FLOATS, PACKED, Args, compute, operands

import fusion_attention as fa
from fusion_attention import npu
from fusion_attention.testing import Case, arguments, check, expected, golden, hostile, part, seen, stats_part

pytestmark = pytest.mark.filterwarnings("ignore::fusion_attention.ContractWarning")


def changed(args: Args, change: Callable[[torch.Tensor], torch.Tensor], *names: str) -> Args:
    """Returns the arguments with the named tensors, unless None, replaced by change(tensor)."""
    return {**args, **{n: change(args[n]) for n in names if args[n] is not None}}


SAMPLES = [
    Case(mask="head", blank=True, pse="full", sink=True, dim_rope=4, **DRAWN),
    Case(layout="SBH", dtype="bfloat16", pse="shared_row", **BITS),
    Case(layout="BSH", dtype="float16", sparse_mode=4, mask="compressed", pre=3, next=1, pse="slopes_flat", pse_type=2),
    Case(layout="BNSD", mask="batch", blank=True, **BITS),
    replace(PACKED, mask="tokens", blank=True, pse="blocks", softmax_layout="TND", q_rest=2, kv_rest=1, **DRAWN),
    replace(PACKED, dtype="bfloat16", pse="shared_table", sink=True, dim_rope=3, **CAUSAL),
    replace(PACKED, q_len=(0, 3, 5), kv_len=(2, 0, 6), pse="row_blocks", **BITS),
]
samples = pytest.mark.parametrize("case", SAMPLES, ids=lambda case: case.id)

# -------------------------------------------------------------------------------------------------------------- memory


def transposed(t: torch.Tensor) -> torch.Tensor:
    """Returns the same values with the elements of a row far apart in memory."""
    return t.mT.contiguous().mT if t.dim() > 1 else t


@samples
@pytest.mark.parametrize("change", [torch.Tensor.contiguous, transposed], ids=["contiguous", "transposed"])
def test_input_strides_do_not_change_attention_results(
    case: Case, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    args = operands(case)
    names = (*FLOATS, "drop_mask") + (() if case.mask == "compressed" else ("atten_mask",))
    same_bits(compute(case, changed(args, change, *names)), compute(case, args))


def test_expanded_inputs_give_same_bits_as_contiguous_copies() -> None:
    case = Case(layout="BNSD", pse="full")
    args = operands(case)
    args = {**args, **{n: args[n][:1].expand_as(args[n]) for n in ("key", "value", "pse")}}
    same_bits(
        compute(case, args), compute(case, {**args, **{n: args[n].contiguous() for n in ("key", "value", "pse")}})
    )


@pytest.mark.parametrize("shape", [(2, 4, 0, 16), (1, 1, 0, 16), (0, 16)])
@pytest.mark.parametrize("name", ["bias", "blocked"])
@pytest.mark.parametrize("backend", ["auto", "golden"])
def test_attention_with_mask_or_bias_without_rows_returns_empty_result(
    shape: tuple[int, ...], name: str, backend: str
) -> None:
    q, k = torch.randn(2, 0, 4, 8, requires_grad=True), torch.randn(2, 16, 2, 8, requires_grad=True)
    matrix = torch.zeros(*shape[:-1], 32, dtype=torch.bool if name == "blocked" else torch.float32)[..., ::2]
    out = fa.attention(q, k, k, backend=backend, **{name: matrix})
    assert out.shape == q.shape
    dq, dk = torch.autograd.grad(out.sum(), (q, k))
    assert dq.shape == q.shape
    assert not dk.any()
    if len(shape) == 4:
        rows = {"pse": matrix, "pse_type": 0} if name == "bias" else {"atten_mask": matrix}
        if name == "blocked" or shape[1] == 4:
            assert npu.npu_fusion_attention_v2(q, k, k, 4, "BSND", **rows)[0].shape == q.shape
        cache = (k.detach(), k.detach())
        assert (
            fa.decode_attention(q.detach(), cache, kv_len=[16, 16], backend=backend, **{name: matrix}).shape == q.shape
        )


@samples
def test_inputs_are_not_written(case: Case) -> None:
    args = arguments(case)
    tensors = [
        t for t in args.values() if (isinstance(t, torch.Tensor) and case.mask != "compressed") or t is args["query"]
    ]
    memory = [t._base if t._base is not None else t for t in tensors]
    before = [m.clone() for m in memory]
    compute(case, args)
    for now, then in zip(memory, before, strict=True):
        same_bits(now, then, "an input or the memory around it")


def fill_unseen(case: Case, args: Args, value: float) -> Args:
    """Returns the arguments with `value` in all float elements that no row sees: keys, rows and biases."""
    filled = {n: hostile(t) if isinstance(t, torch.Tensor) and n in FLOATS else t for n, t in args.items()}
    for b in range(len(case.q_len)):
        visible = seen(case, args, b)
        dead = ~visible.unflatten(0, (case.heads_kv, -1)).any(1).any(1)
        for name in ("key", "value", "key_rope"):
            if args[name] is not None:
                part(case, filled[name], "kv", case.heads_kv, b)[dead] = value
        blind = ~visible.any(-1)
        for name in ("query", "query_rope", "dy"):
            if args[name] is not None:
                part(case, filled[name], "q", case.heads_q, b)[blind] = value
        if case.pse == "full":
            filled["pse"][b][~visible] = value
    return filled


@pytest.mark.parametrize(
    "case",
    [
        Case(sparse_mode=4, mask="compressed", pre=1, next=-1, q_len=(6, 6), kv_len=(9, 9), pse="full", dim_rope=2),
        Case(layout="BNSD", sparse_mode=2, mask="compressed", q_len=(4, 4), kv_len=(9, 9), sink=True, **DRAWN),
        Case(q_len=(7, 7), kv_len=(3, 3), pse="full", dtype="bfloat16", **CAUSAL),
        Case(mask="head", blank=True, inner_precise=2, pse="full", dtype="float16"),
        Case(layout="SBH", sparse_mode=0, mask="batch", pre=1, next=1, q_len=(4, 4), kv_len=(9, 9), inner_precise=2),
        replace(PACKED, sparse_mode=4, mask="compressed", pre=1, next=-1, kv_len=(8, 9, 7), **BITS),
    ],
    ids=lambda case: case.id,
)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_results_ignore_nan_and_infinity_in_memory_that_rows_cannot_see(case: Case, value: float) -> None:
    args = operands(case)
    poisoned = fill_unseen(case, args, value)
    count = sum(int(poisoned[n].isnan().sum() + poisoned[n].isinf().sum()) for n in ("query", "key", "value"))
    assert count > sum(int(args[n].isnan().sum()) for n in ("query", "key", "value"))
    same_bits(compute(case, poisoned), compute(case, fill_unseen(case, args, 0.0)))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["query", "key", "value", "query_rope", "key_rope", "dy"])
@pytest.mark.parametrize(
    "case",
    [
        Case(dim_rope=2, mask="head", blank=True, **BITS),
        Case(layout="BNSD", dim_rope=2, dtype="bfloat16", sink=True, **CAUSAL),
        replace(PACKED, dim_rope=2, sparse_mode=4, mask="compressed", pre=1, next=1, dtype="float16", **DRAWN),
    ],
    ids=lambda case: case.id,
)
def test_row_with_nan_or_infinity_reaches_exactly_the_reference_rows(case: Case, name: str, value: float) -> None:
    args = changed(operands(case), hostile, *FLOATS)
    met = {"query": "key", "key": "query", "query_rope": "key_rope", "key_rope": "query_rope"}.get(name)
    if met is not None:  # most products are not -inf, which would hide their keys
        of, n = ("kv", case.heads_kv) if met.startswith("key") else ("q", case.heads_q)
        for start in (0, 1):
            part(case, args[met], of, n, 1)[:, start::3, 0] = math.copysign(1, value)
    poisoned = changed(args, hostile, *FLOATS)
    side, heads = ("kv", case.heads_kv) if name in ("key", "value", "key_rope") else ("q", case.heads_q)
    part(case, poisoned[name], side, heads, 1)[1, 2 if side == "kv" else 1, 0] = value
    want = golden(case, poisoned)
    assert any(not t.isfinite().all() for t in want.values())
    check(case.id, compute(case, poisoned), expected(case, poisoned, want))


# -------------------------------------------------------------------------------------------- neighbours, threads, runs

LONG = Case("TND", "float32", (290, 3, 270, 40), (310, 270, 5, 40), dim_qk=24, dim_v=16, sink=True, **CAUSAL)
LARGE = [LONG, replace(LONG, dtype="bfloat16", pse="shared_slopes", pse_type=2, dim_rope=8)]


def split(case: Case, results: dict[str, torch.Tensor], b: int) -> dict[str, torch.Tensor]:
    """Returns one sequence's part of every result that has a batch or token axis."""
    sides = {"out": "q", "dq": "q", "dq_rope": "q", "dk": "kv", "dv": "kv", "dk_rope": "kv"}
    heads = {"q": case.heads_q, "kv": case.heads_kv}
    parts = {n: part(case, results[n], s, heads[s], b) for n, s in sides.items() if n in results}
    return parts | {n: stats_part(case, results[n], b) for n in ("max", "sum")}


@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.id)
def test_sequence_result_does_not_depend_on_other_sequences_of_the_batch(case: Case) -> None:
    args = operands(case)
    together = compute(case, args)
    for b in range(len(case.q_len)):
        alone = replace(case, q_len=case.q_len[b : b + 1], kv_len=case.kv_len[b : b + 1])
        args_of_item = {"actual_seq_qlen": [case.q_len[b]], "actual_seq_kvlen": [case.kv_len[b]]}
        for side, names in (("q", ("query", "query_rope", "dy")), ("kv", ("key", "value", "key_rope"))):
            first, n = sum(case.lengths(side)[:b]), case.lengths(side)[b]
            args_of_item |= {name: args[name][first : first + n] for name in names if args[name] is not None}
        same_bits(split(alone, compute(alone, {**args, **args_of_item}), 0), split(case, together, b))

"""A loss may depend on the lse of attention, as on its output: gradients against the formula in float64."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.lse_calls import CASES, DIM, HEADS, HEADS_KV, dense, drawn, formula, judge, lists, results
from torch.utils.checkpoint import checkpoint

import fusion_attention as fa
from fusion_attention.judging.judge import judged
from fusion_attention.judging.loaders import Reading, read_calls

Tensor = torch.Tensor


@pytest.mark.sampled(4)
@pytest.mark.parametrize("parts", ["both", "lse"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_through_lse_match_float64_formula(name: str, parts: str) -> None:
    judge(name, *dense(name, torch.float32), parts)


@pytest.mark.parametrize("parts", ["both", "lse"])
def test_gradients_through_lse_of_sparse_attention_match_formula(parts: str) -> None:
    given, ours, wanted = lists(torch.float32)
    judge("lists", given, ours, wanted, parts)
    if parts == "both":
        graph = torch.compile(partial(ours, "cpu"), backend="aot_eager", fullgraph=True)
        got, again = (results(call, given, None, parts) for call in (partial(ours, "cpu"), graph))
        assert all(torch.equal(again[n], got[n]) for n in got)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", [*CASES, "lists"])
def test_captured_backward_is_judged_right_only_with_lse_gradient(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    given, ours, _ = lists(dtype) if name == "lists" else dense(name, dtype)
    leaves = {n: t.requires_grad_() for n, t in given.items()}
    with fa.capture(tmp_path):
        out, lse = ours("cpu", **leaves)
        lse = lse.masked_fill(lse == -torch.inf, 0)
        ((out.float() ** 2).sum() + lse.square().sum()).backward()
    (file,) = tmp_path.glob("*backward*")
    (call,) = read_calls(file, Reading())
    assert len(call.upstream) == 2
    assert judged(call, search=False).verdict == "right"
    of_out = {n: t for n, t in call.upstream.items() if n.endswith("out")}
    assert judged(replace(call, upstream=of_out), search=False).verdict == "wrong"


def test_gradients_through_lse_of_packed_rows_match_formula_also_compiled() -> None:
    lengths, sizes = [13, 1, 40], {"q": HEADS, "k": HEADS_KV, "v": HEADS_KV}
    given = drawn(4, torch.float32, **{n: (sum(lengths), h, DIM) for n, h in sizes.items()})
    sequence = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    visible = (sequence[:, None] == sequence) & torch.ones(sum(lengths), sum(lengths), dtype=torch.bool).tril()

    def ours(backend: str, **leaves: Tensor) -> Any:
        how = {"layout": "TND", "q_len": lengths, "band": fa.Band.causal(), "backend": backend}
        return fa.attention(**leaves, **how, return_lse=True)  # type: ignore[call-overload]

    def wanted(**leaves: Tensor) -> Any:
        out, lse = formula(**{n: t.transpose(0, 1) for n, t in leaves.items()}, visible=visible)
        return out.transpose(0, 1), lse.mT

    judge("packed", given, ours, wanted, "both")
    graph = torch.compile(partial(ours, "cpu"), backend="aot_eager", fullgraph=True)
    got, again = (results(call, given, None, "both") for call in (partial(ours, "cpu"), graph))
    assert all(torch.equal(again[n], got[n]) for n in got)


@pytest.mark.parametrize("reentrant", [False, True])
def test_lse_gradient_works_in_checkpoint_and_refuses_second_derivative(reentrant: bool) -> None:
    given = drawn(9, torch.float32, q=(1, 6, 2, 8))
    alone, through = (given["q"].clone().requires_grad_() for _ in range(2))

    def interface(q: Tensor) -> Any:
        return fa.attention(q, q, q, return_lse=True)

    interface(alone)[1].sin().sum().backward()
    checkpoint(interface, through, use_reentrant=reentrant)[1].sin().sum().backward()
    assert torch.equal(through.grad, alone.grad)  # type: ignore[arg-type]
    q = given["q"].clone().requires_grad_()
    (first,) = torch.autograd.grad(interface(q)[1].sin().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiate twice"):
        first.sum().backward()

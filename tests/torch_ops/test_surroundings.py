"""Settings of torch around a call: defaults, threads and modes change no result, or raise an error."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as forward_ad

import fusion_attention as fa
from fusion_attention import plan as plans
from fusion_attention.ir.mask import INFINITE
from fusion_attention.ir.problem import Extents, Problem

Tensor = torch.Tensor


def rows(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float32)


LISTS = torch.arange(4, dtype=torch.int32).expand(2, 6, 2, 4)


def sink_of_attention() -> Tensor:
    sink = rows(4).requires_grad_()
    out = fa.attention(rows(2, 6, 4, 16), rows(2, 9, 2, 16), rows(2, 9, 2, 16), sink=sink)
    return torch.autograd.grad(out.sum(), sink)[0]


def sink_of_selections() -> Tensor:
    sink = rows(4).requires_grad_()
    out = fa.sparse_attention(rows(2, 6, 4, 16), rows(2, 6, 2, 16), rows(2, 6, 2, 16), LISTS, sink=sink)
    return torch.autograd.grad(out.sum(), sink)[0]


def loss() -> Tensor:
    q, k, lists = rows(2, 6, 4, 16), rows(2, 6, 2, 16), LISTS[:, :, :1]
    _, lse = fa.sparse_attention(q, k, k, LISTS, return_lse=True)
    return fa.indexer_loss(q, k, lse, rows(2, 6, 3, 8), rows(2, 6, 1, 8), rows(2, 6, 3), lists)


def means() -> Tensor:
    q, k = rows(2, 6, 4, 16), rows(2, 9, 2, 16)
    return fa.attention(q, k, k, blocked=torch.ones(6, 9, dtype=torch.bool), empty_rows="mean")


def from_integers() -> Tensor:
    cache = fa.PagedKVCache(2, 16, 8, page_size=4, dtype=torch.float32, stored="int8")
    cache.append([cache.allocate()], rows(1, 9, 2, 16), rows(1, 9, 2, 16))
    return fa.decode_attention(rows(1, 1, 4, 16), cache)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("call", [sink_of_attention, sink_of_selections, loss, means, from_integers])
def test_results_do_not_depend_on_torch_default_dtype(call: Callable[[], Tensor], dtype: torch.dtype) -> None:
    """Model loaders change the default dtype."""
    want = call()
    torch.set_default_dtype(dtype)
    try:
        got = call()
    finally:
        torch.set_default_dtype(torch.float32)
    assert got.dtype == want.dtype
    assert torch.equal(got, want)


def test_plan_cache_eviction_by_another_thread_is_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, zero = Problem(heads_q=2, heads_kv=1, dim_qk=8, dim_v=8), np.zeros(1, np.int64)
    long, short = (Extents(n, n, zero - INFINITE, zero + INFINITE, zero, zero) for n in (zero + 7, zero + 3))
    others: list[threading.Thread] = []

    class Watched(OrderedDict[Any, plans.Plan]):
        def get(self, key: Any, default: Any = None) -> Any:
            result = super().get(key, default)
            if result is not None and not others:
                others.append(threading.Thread(target=ask, args=(short,)))
                others[0].start()
                others[0].join(0.5)  # longer only if it has to wait for us
            return result

    def ask(extents: Extents) -> plans.Plan:
        return plans.plan(problem, extents, torch.device("cpu"), "golden")

    monkeypatch.setattr(plans, "_PLANS", Watched())
    monkeypatch.setattr(plans, "_PLANS_KEPT", 1)
    plan_made = ask(long)
    assert ask(long) is plan_made
    others[0].join()
    assert [p.extents for p in plans._PLANS.values()] == [short]


# --------------------------------------------------------------------------------------------------------- derivatives

Function = Callable[[Tensor], Tensor]


def dense(q: Tensor) -> Tensor:
    return fa.attention(q, rows(2, 6, 2, 16), rows(2, 6, 2, 16)).sum()


def selected(q: Tensor) -> Tensor:
    return fa.sparse_attention(q, rows(2, 6, 2, 16), rows(2, 6, 2, 16), LISTS).sum()


families = pytest.mark.parametrize("f", [dense, selected], ids=["dense", "selected"])


@families
def test_double_backward_raises_not_implemented(f: Function) -> None:
    """The upstream gradient is a constant, so once_differentiable would treat the gradients as constants."""
    q = rows(2, 6, 4, 16).requires_grad_()
    (gradient,) = torch.autograd.grad(f(q), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="cannot differentiate twice"):
        gradient.square().sum().backward()


@families
def test_nested_torch_func_grad_raises_not_implemented(f: Function) -> None:
    q = rows(2, 6, 4, 16)
    with pytest.raises(NotImplementedError, match="cannot differentiate twice"):
        torch.func.grad(lambda a: torch.func.grad(f)(a).square().sum())(q)

    def first_order(a: Tensor) -> Tensor:
        return f(a - torch.func.grad(f)(a.detach()))

    inner = torch.func.grad(f)(q)
    assert torch.equal(torch.func.grad(first_order)(q), torch.func.grad(f)(q - inner))


@families
def test_forward_mode_differentiation_raises_not_implemented(f: Function) -> None:
    q = rows(2, 6, 4, 16)
    for function in (f, torch.func.grad(f)):
        with pytest.raises(NotImplementedError, match="forward-mode"):
            torch.func.jvp(function, (q,), (q,))
    with forward_ad.dual_level():
        assert torch.equal(f(q), f(q))
        with pytest.raises(NotImplementedError, match="forward-mode"):
            f(forward_ad.make_dual(q, q))


# ------------------------------------------------------------------------------------------ lazy negation, zero tensors

PRETENDED = [torch._neg_view, lambda t: torch._efficientzerotensor(t.shape)]
pretended = pytest.mark.parametrize("view", PRETENDED, ids=["negated", "zeros"])


@pretended
def test_refuses_negative_views_and_zero_tensors_without_memory(view: Function) -> None:
    q, k = rows(2, 6, 4, 16), rows(2, 6, 2, 16)
    fa.attention(q, k, k)
    with pytest.raises(fa.ContractError, match="attention: k: expected a tensor whose values are in memory"):
        fa.attention(q, view(k), k)
    with pytest.raises(fa.ContractError, match="k: expected a tensor whose values"):
        fa.decode_attention(q[:, :1], (view(k), k))
    with pytest.raises(fa.ContractError, match="sink: expected a tensor whose values"):
        fa.sparse_attention(q, k, k, LISTS, sink=view(rows(4)))


@families
@pretended
def test_upstream_gradient_may_be_a_negative_view_or_zero_tensor(f: Function, view: Function) -> None:
    def gradient(upstream: Tensor) -> Tensor:
        q, k = rows(2, 6, 4, 16).requires_grad_(), rows(2, 6, 2, 16)
        out = fa.attention(q, k, k) if f is dense else fa.sparse_attention(q, k, k, LISTS)
        return torch.autograd.grad(out, q, upstream)[0]

    upstream = view(rows(2, 6, 4, 16))
    assert torch.equal(gradient(upstream), gradient(upstream.clone()))

"""Sparse attention and the indexer under torch.compile: equal bits, one graph, lengths as inputs, clear errors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.bits import same_bits
from support.compiled import compiled, draw, same

import fusion_attention as fa
from fusion_attention import npu

pytestmark = pytest.mark.usefixtures("fresh")
LISTS = torch.tensor([3, 0, 5, 1]).expand(2, 6, 1, 4)
ROWS, KEYS = torch.linspace(-1, 1, 2 * 6 * 4 * 8).reshape(2, 6, 4, 8), torch.linspace(1, -1, 112).reshape(2, 7, 1, 8)
TND = {"layout_query": "TND", "layout_kv": "TND"}


def shared(q: Any, k: Any, sink: Any) -> torch.Tensor:
    return fa.sparse_attention(q, k, None, LISTS, sink=sink, return_lse=True)[0]


def apart(q: Any, k: Any, v: Any, q_rope: Any, k_rope: Any) -> torch.Tensor:
    given = {"query_rope": q_rope, "key_rope": k_rope, "sparse_block_size": 2, "return_softmax_lse": True}
    return npu.npu_sparse_flash_attention(q, k, v, LISTS.clamp(max=2), 0.3, attention_mode=2, **given)[0]


def choose(q: Any, k: Any, w: Any) -> torch.Tensor:
    indices, values = fa.lightning_indexer(q, k, w, 3, causal=False)
    return values * (indices + 1)


def choose_npu(q: Any, k: Any, w: Any) -> torch.Tensor:
    return npu.npu_lightning_indexer(q, k, w, sparse_count=3, sparse_mode=0, return_value=True)[1]


def teach(index_q: Any, index_k: Any, w: Any) -> torch.Tensor:
    lse = torch.full((2, 4, 6), 4.0)
    chosen = fa.indexer_loss(ROWS, KEYS, lse, index_q, index_k, w, LISTS[..., :3].int(), scale=0.3, causal=False)
    return chosen + 2 * fa.indexer_loss(ROWS, KEYS, lse, index_q, index_k, w, q_rope=ROWS, k_rope=KEYS)


def leaves_of(function: Callable[..., Any]) -> tuple[torch.Tensor, ...]:
    (q,) = draw(2, 6, 4, 16, count=1)
    k, v = draw(2, 7, 1, 16, count=2, seed=1)
    if function is shared:
        return q, k, *draw(4, count=1)
    if function is apart:
        return q, k, v, *draw(2, 6, 4, 8, count=1), *draw(2, 7, 1, 8, count=1)
    return q, k, *draw(2, 6, 4, count=1)


@pytest.mark.parametrize("function", [shared, apart, choose, choose_npu, teach], ids=lambda f: f.__name__)
def test_sparse_functions_compile_to_one_graph_with_same_bits(function: Callable[..., Any]) -> None:
    fast, graphs = compiled(function)
    same(function, fast, leaves_of(function))
    assert len(graphs) == 1


def test_npu_sparse_flash_attention_compiles_once_for_all_lengths() -> None:
    def packed(q: Any, k: Any, lists: Any, ends: Any) -> torch.Tensor:
        lengths = {"actual_seq_lengths_query": ends, "actual_seq_lengths_kv": ends}
        return npu.npu_sparse_flash_attention(q, k, k, lists, 0.3, **lengths, **TND, return_softmax_lse=True)[0]

    fast, graphs = compiled(packed)
    lists = torch.arange(3, dtype=torch.int32).expand(32, 1, 3)
    (q,), (k,) = draw(32, 4, 16, count=1), draw(32, 1, 16, count=1)
    for ends in ([9, 32], [3, 20], [32, 32]):
        same(packed, fast, (q, k), lists, torch.tensor(ends))
    assert len(graphs) == 1


def gradients(q: Any, k: Any, w: Any) -> Any:
    lists = torch.arange(3).expand(2, 6, 1, 3)
    out, *stats = npu.npu_sparse_flash_attention(q, k, k, lists, 0.3, return_softmax_lse=True)
    grads = npu.npu_sparse_flash_attention_grad(q, k, k, lists, out, out, *stats, 0.3, 1)
    return (*grads, *npu.npu_lightning_indexer_grad(q, k, torch.ones(2, 6, 3), lists[:, :, 0], w))


def losses(q: Any, k: Any, w: Any) -> Any:
    lists, stats = torch.arange(3).expand(2, 6, 1, 3), [torch.full((2, 1, 6, 4), n) for n in (3.0, 2.0)]
    index_stats = npu.npu_dense_lightning_indexer_softmax_lse(q, k, w)
    dense = npu.npu_dense_lightning_indexer_grad_kl_loss(ROWS, KEYS, q, k, w, *stats, *index_stats, 0.3)
    return *index_stats, *dense, *npu.npu_sparse_lightning_indexer_grad_kl_loss(ROWS, KEYS, q, k, w, lists, *stats, 0.3)


@pytest.mark.parametrize("function", [gradients, losses], ids=lambda f: f.__name__)
def test_compiled_sparse_grad_and_loss_functions_equal_eager(function: Callable[..., Any]) -> None:
    leaves = [t.detach() for t in leaves_of(choose)]
    fast, _ = compiled(function)
    same_bits(fast(*leaves), function(*leaves))


@pytest.mark.parametrize("function", [shared, apart, choose, choose_npu, teach], ids=lambda f: f.__name__)
def test_torch_func_grad_of_sparse_functions_equals_autograd(function: Callable[..., Any]) -> None:
    leaves = leaves_of(function)
    want = torch.autograd.grad(function(*leaves).square().sum(), leaves)
    functional = torch.func.grad(lambda *t: function(*t).square().sum(), argnums=tuple(range(len(leaves))))
    detached = [t.detach() for t in leaves]
    same_bits(functional(*detached), want)
    if function in (apart, teach):  # results that are differentiated one by one, and a loss with its gradients
        same_bits(compiled(functional)[0](*detached), want)


def test_compiled_sparse_functions_refuse_invalid_arguments() -> None:
    q, k, w = (t.detach() for t in leaves_of(choose))
    with pytest.raises(Exception, match=r"lightning_indexer: weights: expected axis 1 to be S1=6 as in q, got 5"):
        compiled(lambda q, k, w: fa.lightning_indexer(q, k, w, 3))[0](q, k, w[:, :5])
    with pytest.raises(fa.ContractError, match="got 7 at batch 0, row 0, slot 0"):
        compiled(lambda q, k, lists: fa.sparse_attention(q, k, None, lists))[0](q, k, LISTS + 4)

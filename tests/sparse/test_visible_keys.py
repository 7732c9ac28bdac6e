"""lightning_indexer() where each row says how many keys it sees."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fusion_attention as fa
from fusion_attention.contract import ContractError

B, S, KEYS, N, D, TOP, RATIO = 2, 37, 9, 4, 16, 3, 4


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(7)
    q, k = torch.randn(B, S, N, D, generator=g), torch.randn(B, KEYS, 1, D, generator=g)
    return tuple(t.to(dtype) for t in (q, k, torch.randn(B, S, N, generator=g)))


def closed() -> torch.Tensor:
    """Of compressed keys, those whose tokens a row has seen; the second sequence is later by three tokens."""
    return ((torch.arange(S) + 1 + 3 * torch.arange(B)[:, None]) // RATIO).clamp(max=KEYS)


def scores(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[B, S, KEYS] in float64, -inf where a row does not see a key."""
    dots = torch.einsum("bsnd,bkod->bsnk", q.double(), k.double()).relu()
    return torch.einsum("bsnk,bsn->bsk", dots, weights.double()).masked_fill(
        torch.arange(KEYS) >= closed()[..., None], -torch.inf
    )


def test_rows_choose_among_the_keys_that_they_see() -> None:
    q, k, weights = inputs()
    indices, values = fa.lightning_indexer(q, k, weights, TOP, visible=closed())
    assert indices.shape == values.shape == (B, S, 1, TOP)
    best = scores(q, k, weights).topk(TOP)
    there = best.values > -torch.inf
    assert torch.equal(indices[:, :, 0], best.indices.masked_fill(~there, -1).int())
    assert torch.equal(values[:, :, 0] > -torch.inf, there)
    wide = [t.double() for t in (q, k, weights)]
    golden = fa.lightning_indexer(*wide, TOP, visible=closed(), backend="golden")[1]  # type: ignore[arg-type]
    assert (golden[:, :, 0] - best.values)[there].abs().max() <= 1e-12 * best.values[there].max()


def test_all_keys_are_those_of_a_call_without_counts() -> None:
    q, k, weights = inputs(torch.bfloat16)
    every = torch.full((B, S), KEYS, dtype=torch.int32)
    plain = fa.lightning_indexer(q, k, weights, TOP, causal=False)
    for ours, theirs in zip(fa.lightning_indexer(q, k, weights, TOP, visible=every), plain, strict=True):
        assert torch.equal(ours, theirs)


def test_gradients_of_values() -> None:
    given = [t.double().requires_grad_() for t in inputs()]
    indices, values = fa.lightning_indexer(*given, TOP, visible=closed(), backend="golden")  # type: ignore[arg-type]
    there = indices >= 0
    upstream = torch.randn(values.shape, generator=torch.Generator().manual_seed(8)).double()
    loss = (values.masked_fill(~there, 0) * upstream).sum()
    ours = torch.autograd.grad(loss, given)
    chosen = scores(*given).gather(-1, indices[:, :, 0].clamp(min=0).long())  # type: ignore[arg-type]
    wanted = torch.autograd.grad((chosen.masked_fill(~there[:, :, 0], 0) * upstream[:, :, 0]).sum(), given)
    for one, other in zip(ours, wanted, strict=True):
        assert (one - other).abs().max() <= 1e-12 * other.abs().max()


def test_gradients_on_a_cpu_are_those_of_the_same_lists() -> None:
    given = [t.requires_grad_() for t in inputs()]
    every = torch.full((B, S), KEYS)
    by_counts = fa.lightning_indexer(*given, TOP, visible=every)[1]  # type: ignore[arg-type]
    plain = fa.lightning_indexer(*given, TOP, causal=False)[1]  # type: ignore[arg-type]
    for one, other in zip(*(torch.autograd.grad(v.sum(), given) for v in (by_counts, plain)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"visible": [1, 2]}, r"lightning_indexer: visible: expected an int32 or int64 tensor"),
        ({"visible": torch.ones(B, S)}, r"visible: expected an int32 or int64 tensor, got torch.float32"),
        ({"visible": torch.ones(B, S + 1).int()}, rf"visible: expected shape \[B, S1\] = \[{B}, {S}\]"),
        ({"visible": torch.full((B, S), KEYS + 1)}, rf"visible: expected 0 to {KEYS} keys"),
        ({"visible": torch.full((B, S), -1)}, rf"visible: expected 0 to {KEYS} keys"),
        ({"layout": "TND"}, "layout: expected 'BSND' beside visible"),
        ({"kv_len": [KEYS, KEYS]}, "kv_len: expected none beside visible"),
        ({"kv_len": torch.full((B,), KEYS)}, "kv_len: expected none beside visible"),
        ({"page_table": torch.zeros(B, 1, dtype=torch.int32)}, "page_table: expected none beside visible"),
    ],
)
def test_wrong_counts(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ContractError, match=text):
        fa.lightning_indexer(*inputs(), TOP, **{"visible": closed(), **changes})  # type: ignore[arg-type]


def test_tensors_that_are_none() -> None:
    q, k, weights = inputs()
    with pytest.raises(ContractError, match="lightning_indexer: q: expected"):
        fa.lightning_indexer(q[0], k, weights, TOP, visible=closed())
    with pytest.raises(ContractError, match="lightning_indexer: k: expected 2 batch elements, as q, got 1"):
        fa.lightning_indexer(q, k[:1], weights, TOP, visible=closed())


def test_gradients_in_a_graph() -> None:
    given = [t.requires_grad_() for t in inputs()]

    def loss(*tensors: torch.Tensor) -> torch.Tensor:
        values = fa.lightning_indexer(*tensors, TOP, visible=closed())[1]  # type: ignore[arg-type]
        return values.nan_to_num(neginf=0).sum()

    traced = torch.compile(loss, backend="aot_eager")
    for one, other in zip(*(torch.autograd.grad(f(*given), given) for f in (traced, loss)), strict=True):
        assert torch.equal(one, other)


def test_one_graph_for_all_counts() -> None:
    q, k, weights = inputs()
    choose = torch.compile(lambda counts: fa.lightning_indexer(q, k, weights, TOP, visible=counts), backend="aot_eager")
    for counts in (closed(), closed().clamp(max=2)):
        for ours, theirs in zip(choose(counts), fa.lightning_indexer(q, k, weights, TOP, visible=counts), strict=True):
            assert torch.equal(ours, theirs)

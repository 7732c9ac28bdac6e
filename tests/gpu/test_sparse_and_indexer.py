"""Attention to selected keys, the indexer and its loss on a real GPU, against golden on the CPU."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.bits import same_bits
from support.launches import fresh_plans
from support.lse_calls import dense, judge, lists
from support.reference_layers import output_and_loss
from support.run_case_on_gpu import copied

import fusion_attention as fa
from fusion_attention import nn
from fusion_attention.backends.triton.selected import launch_backward as launch_sparse_backward
from fusion_attention.ops.indexer.lowered_call import IndexerBackward
from fusion_attention.ops.sparse.lowered_call import SparseBackward
from fusion_attention.testing import check, indexer_loss, sparse
from fusion_attention.testing.estimated_rounding_errors import compare_with
from fusion_attention.testing.expected_indexer import check_index
from fusion_attention.testing.indexer_loss import LossCase
from fusion_attention.testing.sparse import IndexerCase, SparseCase
from fusion_attention.torch_ops.eager import run

pytestmark = pytest.mark.filterwarnings("ignore::fusion_attention.contract.ContractWarning")
Results = dict[str, torch.Tensor]
MLA: dict[str, Any] = {"dim_qk": 512, "dim_v": 512, "dim_rope": 64, "shares_kv": True, "scale": 0.04}
SMALL: dict[str, Any] = {"layout": "TND", "q_len": (33, 0, 7), "kv_len": (90, 5, 40)}
CASES = [
    *(SparseCase(**SMALL, dtype=d, lists=lists, count=40) for d in ("float32", "float16", "bfloat16")
      for lists in ("random", "repeated", "wild", "none")),
    *(SparseCase(dtype="bfloat16", heads_q=heads, q_len=(5,), kv_len=(700,), count=300, lists="all", **MLA)
      for heads in (1, 8, 16, 33, 64, 128)),
    SparseCase(**SMALL, dtype="float16", heads_q=6, heads_kv=3, dim_qk=128, dim_v=128, scale=0.09, sink=True, block=8),
    SparseCase(**SMALL, dtype="bfloat16", heads_q=40, dim_qk=192, dim_v=128, scale=0.07, block=64, lists="all", mode=0),
    SparseCase(**SMALL, dtype="bfloat16", dim_qk=768, dim_v=768, scale=0.036, count=50),
    SparseCase("BSND", page=64, dtype="bfloat16", heads_q=128, q_len=(2, 1), kv_len=(700, 90), count=90, **MLA),
    SparseCase(page=16, dtype="float16", heads_q=8, heads_kv=2, q_len=(3,), kv_len=(80,), block=4, lists="wild"),
]  # fmt: skip


def on_gpu(call: Any) -> Any:
    return replace(call, tensors={name: copied(t) for name, t in call.tensors.items()})


def home(results: Any) -> Results:
    return {name: t.cpu() for name, t in results.items()}


def compute(case: SparseCase, args: dict[str, Any]) -> Results:
    """Returns out, max, sum and (without pages) the gradients, computed on the GPU."""
    call, dy = on_gpu(sparse.lowered(args)), copied(args["dy"])
    results = run(call, "triton")
    result = home(dict(zip(("out", "max", "sum"), results.values(), strict=True)))
    return result if case.page else result | home(run(SparseBackward(call, dy, *results.values()), "triton"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_sparse_attention_matches_float64_reference(case: SparseCase) -> None:
    args = sparse.arguments(case)
    want = sparse.expected(sparse.lowered(args), None if case.page else args["dy"])
    check(case.id, compute(case, args), want)


def test_sparse_gradients_are_bitwise_equal_across_runs_and_chunk_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    case = SparseCase(**SMALL, dtype="bfloat16", heads_q=64, count=80, lists="all", mode=0, **MLA)
    args = sparse.arguments(case)
    first = compute(case, args)
    for budget in (1 << 30, 1 << 22):
        monkeypatch.setattr(launch_sparse_backward, "BUDGET", budget)
        fresh_plans(monkeypatch)
        same_bits(compute(case, args), first)


INDEXERS = [
    *(IndexerCase(**SMALL, dtype=d, heads=h, dim=64, top_k=k, exact=True) for d in ("float16", "bfloat16")
      for h in (3, 64) for k in (20, 70)),
    IndexerCase("BSND", dtype="bfloat16", q_len=(3,), kv_len=(9000,), heads=4, dim=16, top_k=2048, mode=0, exact=True),
    IndexerCase(page=16, dtype="bfloat16", q_len=(3, 5), kv_len=(65, 20), heads=8, dim=32, top_k=40, exact=True),
]  # fmt: skip


@pytest.mark.parametrize("case", INDEXERS, ids=lambda case: case.id)
def test_indexer_selects_the_same_keys_as_float64_reference(case: IndexerCase) -> None:
    args = sparse.indexer_arguments(case)
    want = sparse.chosen(sparse.in_float64(sparse.lowered_indexer(args)), "golden")
    result = sparse.chosen(on_gpu(sparse.lowered_indexer(args)), "triton")
    assert torch.equal(result[0].cpu(), want[0])
    same_bits({"values": result[1].cpu()}, {"values": want[1].to(result[1].dtype)})


@pytest.mark.parametrize("case", [INDEXERS[1], INDEXERS[6]], ids=lambda case: case.id)
def test_indexer_gradients_match_float64_reference(case: IndexerCase) -> None:
    args = sparse.indexer_arguments(replace(case, exact=False))
    call, dy = sparse.lowered_indexer(args), args["dy"]
    indices, _ = sparse.chosen(sparse.in_float64(call), "golden")
    result = home(run(IndexerBackward(on_gpu(call), dy.cuda(), indices.cuda()), "triton"))
    check_index(IndexerBackward(call, dy, indices), {case.id: result})


LOSSES = [
    LossCase(**SMALL, dtype=d, weights=d, heads_q=heads, dim_qk=64, heads=8, dim=64, count=count, sink=True)
    for d in ("float32", "bfloat16")
    for heads in (4, 128)
    for count in (0, 30)
]


@pytest.mark.parametrize("case", LOSSES, ids=lambda case: case.id)
def test_indexer_loss_matches_float64_reference(case: LossCase) -> None:
    call = indexer_loss.lowered(case, indexer_loss.arguments(case))
    check_index(call, {case.id: home(run(on_gpu(call), "triton"))})


def trained(layer: nn.SparseAttention, out: torch.Tensor, loss: torch.Tensor) -> Results:
    """Returns the output and gradients of a layer."""
    layer.zero_grad()
    (out.square().mean() + loss).backward()
    return {"out": out.detach()} | {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("stage", ["warmup", "sparse"])
def test_sparse_self_attention_gradients_match_reference_layer(stage: str) -> None:
    torch.manual_seed(0)
    layer = nn.SparseSelfAttention(256, 8, kv_heads=2, index_heads=4, index_dim=64, top_k=64)
    nn.set_stage(layer, stage)
    x, rope, layer64 = torch.randn(1, 200, 256), nn.rope_table(torch.arange(200), 16), copy.deepcopy(layer).double()
    layer.cuda()
    with fa.use_backend("triton"):
        got = home(trained(layer, *layer(x.cuda(), rope=tuple(t.cuda() for t in rope))))

    def program() -> Results:
        out, loss = output_and_loss(layer64, x[0].double(), 16)
        return trained(layer64, out[None], loss / 200)

    compare_with(stage, got, program)


def test_sparse_attention_does_not_synchronize_with_the_gpu() -> None:
    case = SparseCase(**SMALL, dtype="bfloat16", heads_q=16, dim_qk=64, dim_v=64)
    args = sparse.arguments(case)
    call, dy = on_gpu(sparse.lowered(args)), copied(args["dy"])
    saved = run(call, "triton")
    backward = SparseBackward(call, dy, *saved.values())
    run(backward, "triton")
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(call, "triton")
        run(backward, "triton")
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_captured_cuda_graph_equals_eager_bitwise() -> None:
    case = SparseCase(**SMALL, dtype="bfloat16", heads_q=16, dim_qk=64, dim_v=64, count=40)
    args = sparse.arguments(case)
    call, dy = on_gpu(sparse.lowered(args)), copied(args["dy"])

    def both() -> Results:
        saved = run(call, "triton")
        return {**saved, **run(SparseBackward(call, dy, *saved.values()), "triton")}

    want = home(both())  # compiles, and copies the tables
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = both()
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        same_bits(home(result), want)


@pytest.mark.parametrize("parts", ["both", "lse"])
@pytest.mark.parametrize("name", ["plain", "sink", "lists"])
def test_gradients_through_lse_match_float64_reference(name: str, parts: str) -> None:
    case = lists(torch.float32, "cuda") if name == "lists" else dense(name, torch.float32, "cuda")
    judge(name, *case, parts, ("triton",))

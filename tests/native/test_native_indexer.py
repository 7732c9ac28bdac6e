"""The native core's lightning indexer: every variant, forced, against the formulas in float64.

Where the order is tested, scores are small whole numbers: every format and order of summation computes them exactly,
and ties are frequent. Keys that no row sees, gaps between rows and unused pages hold NaN; results lie in poison.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import pytest
import torch
from support.bits import same_bits
from support.native_dense import VARIANTS
from support.sparse_calls import Results, Tensors, extents_of, int_rows, pages_of, scan
from support.witness import read, room, rows

from fusion_attention.backends import cpu
from fusion_attention.testing import compare
from fusion_attention.waist.problem import Extents, IndexerGrads, IndexerOperands, IndexerProblem


@dataclass(eq=False)
class IndexerCall:
    problem: IndexerProblem
    extents: Extents
    q: Tensors  # [heads, q_len, dim]
    k: Tensors  # [1, kv_len, dim]
    weights: Tensors  # [1, q_len, heads]
    dvalues: Tensors  # [1, q_len, top_k]


def vis(call: IndexerCall, b: int, row: int) -> int:
    return max(0, min(int(call.extents.kv_len[b]), row + int(call.extents.hi[b])))


def make_indexer(
    problem: IndexerProblem,
    q_len: tuple[int, ...],
    kv_len: tuple[int, ...],
    causal: bool,
    seed: int,
    whole: bool = False,
) -> IndexerCall:
    """Random tensors; whole: small whole numbers."""
    p, generator, extents = problem, torch.Generator().manual_seed(seed), extents_of(q_len, kv_len, causal)

    def tensors(heads: int, lengths: tuple[int, ...], dim: int, dtype: torch.dtype) -> Tensors:
        shapes = [(heads, n, dim) for n in lengths]
        if whole:
            return [torch.randint(-1, 2, shape, generator=generator).to(dtype) for shape in shapes]
        return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]

    call = IndexerCall(
        problem,
        extents,
        tensors(p.heads, q_len, p.dim, p.torch_dtype),
        tensors(1, kv_len, p.dim, p.torch_dtype),
        tensors(1, q_len, p.heads, getattr(torch, p.weights_dtype)),
        tensors(1, q_len, p.top_k, p.torch_dtype),
    )
    for b in range(len(extents)):
        seen = max((vis(call, b, i) for i in range(q_len[b])), default=0)
        call.k[b][:, seen:] = math.nan
    return call


def operands_of(call: IndexerCall, indices: Tensors, page_size: int, packed: bool) -> IndexerOperands:
    p = call.problem
    return IndexerOperands(
        rows(call.q, packed),
        pages_of(call.k, page_size, 3) if page_size else rows(call.k, not packed),
        rows(call.weights, packed),
        int_rows(indices),
        room(call.weights, p.top_k, p.torch_dtype) if p.has_values else None,
    )


def choose(
    call: IndexerCall, variant: str | None = None, threads: int = 2, page_size: int = 0, packed: bool = True
) -> Results:
    p = replace(call.problem, page_size=page_size)
    poison = [torch.full((1, t.shape[1], p.top_k), -7, dtype=torch.int32) for t in call.q]
    operands = operands_of(call, poison, page_size, packed)
    torch.set_num_threads(threads)
    cpu.indexer_topk(p, call.extents, cpu.schedule(p, call.extents, "indexer_topk", variant), operands)
    found = {"indices": operands.indices, "values": operands.values}
    lists = [t[:1] for t in call.q]
    return {name: [t.clone() for t in read(view, lists)] for name, view in found.items() if view is not None}


def gradients(call: IndexerCall, indices: Tensors, variant: str | None = None, threads: int = 2) -> Results:
    p, operands = call.problem, operands_of(call, indices, 0, True)
    written = {
        "dq": (room(call.q, p.dim, p.torch_dtype), call.q),
        "dk": (room(call.k, p.dim, p.torch_dtype), call.k),
        "dweights": (room(call.weights, p.heads, getattr(torch, p.weights_dtype)), call.weights),
    }
    grads = IndexerGrads(dvalues=rows(call.dvalues), **{name: view for name, (view, _) in written.items()})
    torch.set_num_threads(threads)
    plan = cpu.schedule(p, call.extents, "indexer_backward", variant)
    cpu.indexer_backward(p, call.extents, plan, operands, grads)
    return {name: [t.clone() for t in read(view, like)] for name, (view, like) in written.items()}


def scores_of(call: IndexerCall, b: int, row: int, wide: torch.dtype) -> torch.Tensor:
    q, w = call.q[b][:, row].to(wide), call.weights[b][0, row].to(wide)
    return (w[:, None] * (q @ call.k[b][0, : vis(call, b, row)].to(wide).mT).relu()).sum(0)


def formulas(call: IndexerCall, indices: Tensors, wide: torch.dtype) -> Results:
    """The gradients, row by row."""
    p, low = call.problem, call.problem.torch_dtype if wide == torch.float32 else wide
    results = {n: [torch.zeros(t.shape, dtype=wide) for t in getattr(call, n[1:])] for n in ("dq", "dk", "dweights")}
    for b in range(len(call.extents)):
        for i in range(int(call.extents.q_len[b])):
            listed = indices[b][0, i].tolist()
            js, seen = scan(listed, vis(call, b, i), 1), vis(call, b, i)
            slots = [
                slot
                for slot, entry in enumerate(listed[: listed.index(-1) if -1 in listed else None][:seen])
                if entry < seen
            ]
            q, k, w = call.q[b][:, i].to(wide), call.k[b][0, js].to(wide), call.weights[b][0, i].to(wide)
            s, dy = q @ k.mT, call.dvalues[b][0, i, slots].to(wide)
            ds = torch.where(s > 0, dy * w[:, None], 0)
            ds = ds.to(low).to(wide) if p.dtype == "bfloat16" else ds
            results["dweights"][b][0, i] = (dy * s.relu()).sum(-1)
            results["dq"][b][:, i] = ds @ k
            results["dk"][b][0].index_add_(0, torch.tensor(js, dtype=torch.long), ds.mT @ q)
    narrow = {"dweights": getattr(torch, p.weights_dtype)}
    return {n: [t.to(narrow.get(n, low) if wide == torch.float32 else wide) for t in r] for n, r in results.items()}


def draw(seed: int, whole: bool) -> IndexerCall:
    rng = random.Random(seed)
    dtype = rng.choice(["float32", "float16", "bfloat16"])
    problem = IndexerProblem(
        heads=rng.choice([1, 2, 5, 8, 13, 32, 64]),
        dim=rng.choice([1, 8, 20, 33, 64]),
        dtype=dtype,
        weights_dtype=rng.choice([dtype, "float32"]),
        top_k=rng.choice([1, 3, 17, 64, 300]),
        has_values=True,
    )
    count = rng.choice([1, 2, 3])
    q_len = tuple(rng.choice([0, 1, 2, 5, 19]) for _ in range(count))
    kv_len = tuple(rng.choice([0, 1, 9, 60, 700, 2100]) for _ in range(count))
    return make_indexer(problem, q_len, kv_len, rng.random() < 0.6, seed, whole)


@pytest.mark.parametrize("seed", range(30))
def test_the_order_is_exact(seed: int) -> None:
    call = draw(seed, whole=True)
    for variant in VARIANTS:
        got = choose(call, variant, threads=1 + seed % 3, page_size=(seed % 4) * 8, packed=seed % 2 == 0)
        for b in range(len(call.extents)):
            for i in range(int(call.extents.q_len[b])):
                order = torch.sort(scores_of(call, b, i, torch.float64), descending=True, stable=True)
                n = min(call.problem.top_k, len(order.values))
                assert got["indices"][b][0, i, :n].tolist() == order.indices[:n].tolist(), (variant, b, i)
                assert got["values"][b][0, i, :n].tolist() == order.values[:n].to(call.problem.torch_dtype).tolist()
                assert (got["indices"][b][0, i, n:] == -1).all()
                assert (got["values"][b][0, i, n:] == -math.inf).all()


@pytest.mark.parametrize("seed", range(50, 62))
def test_the_choice_is_as_good_as_float32_can_tell(seed: int) -> None:
    call = draw(seed, whole=False)
    for variant in VARIANTS:
        got = choose(call, variant)
        for b in range(len(call.extents)):
            for i in range(int(call.extents.q_len[b])):
                scores = scores_of(call, b, i, torch.float64)
                best = scores.sort(descending=True).values[: call.problem.top_k]
                listed = got["indices"][b][0, i, : len(best)].long()
                assert len(set(listed.tolist())) == len(best)
                slack = 1e-5 * call.problem.heads * max(1.0, float(best.abs().max()) if len(best) else 1.0)
                assert (scores[listed] - best).abs().le(slack).all()


@pytest.mark.parametrize("seed", range(70, 90))
def test_gradients_against_the_formulas(seed: int) -> None:
    call = draw(seed, whole=False)
    indices = choose(call)["indices"]
    wanted, plain = formulas(call, indices, torch.float64), formulas(call, indices, torch.float32)
    for variant in VARIANTS:
        for name, tensors in gradients(call, indices, variant).items():
            for b, tensor in enumerate(tensors):
                at = f"{call.problem} {name}[{b}]"
                compare(at, tensor, wanted[name][b], plain[name][b], int(call.extents.kv_len.max()))


@pytest.mark.parametrize("seed", range(90, 96))
def test_a_value_keeps_its_gradient_behind_entries_that_its_row_does_not_see(seed: int) -> None:
    call = make_indexer(IndexerProblem(3, 8, "float32", "float32", 17), (9, 4), (30, 12), True, seed)
    rng = torch.Generator().manual_seed(seed)
    indices = [torch.randint(-1 + seed % 2, n, (1, m, 17), generator=rng).int() for m, n in ((9, 30), (4, 12))]
    assert any((own[0, 0] >= vis(call, b, 0)).any() for b, own in enumerate(indices))
    wanted, plain = formulas(call, indices, torch.float64), formulas(call, indices, torch.float32)
    for variant in VARIANTS:
        for name, tensors in gradients(call, indices, variant).items():
            for b, tensor in enumerate(tensors):
                compare(f"{name}[{b}]", tensor, wanted[name][b], plain[name][b], 30)


def test_threads_change_no_bit() -> None:
    problem = IndexerProblem(40, 33, "bfloat16", "float32", 130, has_values=True)
    for q_len, kv_len in (((1,), (5000,)), ((30, 0, 1), (700, 5, 3000))):
        call = make_indexer(problem, q_len, kv_len, True, 4)
        want = choose(call, threads=1)
        dwant = gradients(call, want["indices"], threads=1)
        for threads in (2, 3, 7):
            got, dgot = choose(call, threads=threads), gradients(call, want["indices"], threads=threads)
            same_bits(got, want)
            same_bits(dgot, dwant)


def test_scores_that_are_no_numbers_have_a_place() -> None:
    problem = IndexerProblem(1, 1, "float32", top_k=6, has_values=True)
    call = make_indexer(problem, (1,), (7,), False, 0)
    call.q[0], call.weights[0] = torch.ones(1, 1, 1), torch.ones(1, 1, 1)
    call.k[0] = torch.tensor([0.0, math.inf, -0.0, math.nan, 2.0, math.nan, 2.0]).view(1, 7, 1)
    for variant in VARIANTS:
        got = choose(call, variant)
        assert got["indices"][0].flatten().tolist() == [3, 5, 1, 4, 6, 0]
    call.weights[0] = -torch.ones(1, 1, 1)  # a score of -inf is a key not seen; -0 is 0
    call.k[0] = torch.tensor([3.0, math.inf, -1.0, 0.0, 2.0, math.inf, 2.0]).view(1, 7, 1)
    for variant in VARIANTS:
        got = choose(call, variant)
        assert got["indices"][0].flatten().tolist() == [2, 3, 4, 6, 0, -1]
        assert got["values"][0].flatten().tolist() == [0.0, 0.0, -2.0, -2.0, -3.0, -math.inf]


@pytest.mark.parametrize("verb", ["indexer_topk", "indexer_backward"])
def test_memory_stays_under_a_gigabyte(verb: str) -> None:
    for dtype in ("float32", "bfloat16"):
        problem = IndexerProblem(64, 128, dtype, dtype, 2048)
        assert cpu.workspace_bytes(problem, extents_of((32768,), (32768,), True), verb) < 200_000_000


def test_what_this_back_end_does_not_compute_is_said() -> None:
    assert len(cpu.reasons_against(IndexerProblem(1, 8, "float64", "float64"), "cpu")) == 2
    assert not cpu.reasons_against(IndexerProblem(1, 8, "bfloat16", "float32", page_size=16), "cpu")

"""The native core's loss of the indexer, and the statistics that it reads: every variant, forced, against the formulas.

Rows are computed one by one from gathered keys. Keys that no row weighs and gaps between rows hold NaN; results lie in
poison. What the attention saved is computed here too, and given to all in float32.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace

import pytest
import torch
from support.bits import same_bits
from support.native_dense import VARIANTS
from support.sparse_calls import Results, Tensors, draw_list, extents_of, int_rows, scan
from support.witness import read, room, rows

from fusion_attention.backends import cpu
from fusion_attention.testing import compare
from fusion_attention.waist.problem import (
    Extents,
    IndexerGrads,
    IndexerLossOperands,
    IndexerLossProblem,
    IndexerOperands,
    IndexerProblem,
    Stats,
)

LEAST = 1e-8


@dataclass(eq=False)
class LossCall:
    """One tensor per sequence: q [heads_q, q_len, dim_qk], k [heads_kv, kv_len, dim_qk]; qi, ki, w of the indexer."""

    problem: IndexerLossProblem
    extents: Extents
    q: Tensors
    k: Tensors
    qi: Tensors  # [heads_index, q_len, dim_index]
    ki: Tensors  # [1, kv_len, dim_index]
    w: Tensors  # [1, q_len, heads_index]
    indices: Tensors  # [1, q_len, select_count], if any
    q_rope: Tensors = field(default_factory=list)
    k_rope: Tensors = field(default_factory=list)
    sink: torch.Tensor | None = None
    saved: Results = field(default_factory=dict)  # max, sum [heads_q, q_len, 1]; own_max, own_sum [1, q_len, 1]


def keys_of(call: LossCall, b: int, row: int) -> list[int]:
    """The keys that a row weighs, with repetitions."""
    first, end = (int(edge) for edge in call.extents.row_interval(b, row))
    if call.problem.select_count:
        return [j for j in scan(call.indices[b][0, row].tolist(), end, 1) if j >= first]
    return list(range(first, end))


def scores_of(call: LossCall, b: int, i: int, js: list[int], wide: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(the attention's [heads_q, keys], products of the indexer [heads_index, keys])."""
    p, group = call.problem, call.problem.heads_q // call.problem.heads_kv
    s = torch.einsum("hd,hjd->hj", call.q[b][:, i].to(wide), call.k[b][:, js].to(wide).repeat_interleave(group, 0))
    if p.dim_rope:
        tails = call.k_rope[b][:, js].to(wide).repeat_interleave(group, 0)
        s = s + torch.einsum("hd,hjd->hj", call.q_rope[b][:, i].to(wide), tails)
    return p.scale * s, call.qi[b][:, i].to(wide) @ call.ki[b][0, js].to(wide).mT


def statistics(call: LossCall, wide: torch.dtype) -> Results:
    """Of attention and indexer; 0 in rows without keys."""
    names = {"max": call.q, "sum": call.q, "own_max": call.w, "own_sum": call.w}
    found = {n: [torch.zeros(*t.shape[:2], 1, dtype=wide) for t in like] for n, like in names.items()}
    for b in range(len(call.extents)):
        for i in range(int(call.extents.q_len[b])):
            js = keys_of(call, b, i)
            s, dots = scores_of(call, b, i, js, wide)
            own = (call.w[b][0, i].to(wide)[:, None] * dots.relu()).sum(0, keepdim=True)
            sink = None if call.sink is None else call.sink[:, None].to(wide)
            for name, values, more in (("", s, sink), ("own_", own, None)):
                joined = values if more is None else torch.cat((values, more), -1)
                top = joined.amax(-1) if joined.shape[1] else torch.full((len(joined),), -math.inf, dtype=wide)
                total = (joined - top[:, None]).exp().sum(-1)
                found[f"{name}max"][b][:, i, 0], found[f"{name}sum"][b][:, i, 0] = top, total
    return found


def save(call: LossCall) -> None:
    """The statistics in float64, stored as float32."""
    call.saved = {n: [t.float() for t in tensors] for n, tensors in statistics(call, torch.float64).items()}


def make_loss(
    problem: IndexerLossProblem,
    q_len: tuple[int, ...],
    kv_len: tuple[int, ...],
    causal: bool,
    seed: int,
    duplicates: bool = False,
    window: int | None = None,
) -> LossCall:
    """Random tensors; keys that no row weighs are NaN. window: keys before the diagonal that a row sees."""
    p, rng, generator = problem, random.Random(seed), torch.Generator().manual_seed(seed)
    extents = extents_of(q_len, kv_len, causal)
    if window is not None:
        extents = replace(extents, lo=extents.kv_len - extents.q_len - window)

    def tensors(heads: int, lengths: tuple[int, ...], dim: int, dtype: torch.dtype = p.torch_dtype) -> Tensors:
        shapes = [(heads, n, dim) for n in lengths] if dim else []
        return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]

    lists = [
        torch.tensor([draw_list(rng, n, p.select_count, 1, duplicates) for _ in range(m)], dtype=torch.int32)
        for m, n in zip(q_len, kv_len, strict=True)
        if p.select_count
    ]
    call = LossCall(
        problem,
        extents,
        tensors(p.heads_q, q_len, p.dim_qk),
        tensors(p.heads_kv, kv_len, p.dim_qk),
        tensors(p.heads_index, q_len, p.dim_index),
        tensors(1, kv_len, p.dim_index),
        [t * p.dim_index**-0.5 for t in tensors(1, q_len, p.heads_index, getattr(torch, p.weights_dtype))],
        [t.reshape(1, -1, p.select_count) for t in lists],
        tensors(p.heads_q, q_len, p.dim_rope),
        tensors(p.heads_kv, kv_len, p.dim_rope),
        torch.randn(p.heads_q, generator=generator) if p.has_sink else None,
    )
    for b in range(len(extents)):
        weighed = {j for i in range(q_len[b]) for j in keys_of(call, b, i)}
        unseen = [j for j in range(kv_len[b]) if j not in weighed]
        for tensor in (call.k, call.k_rope, call.ki):
            if tensor:
                tensor[b][:, unseen] = math.nan
    save(call)
    return call


def formulas(call: LossCall, wide: torch.dtype) -> Results:
    """Everything, row by row; in float32 as a plain program rounds, which narrows dS of bfloat16."""
    p, low = call.problem, call.problem.torch_dtype if wide == torch.float32 else wide
    results = {"dq": call.qi, "dk": call.ki, "dweights": call.w}
    results = {n: [torch.zeros(t.shape, dtype=wide) for t in like] for n, like in results.items()}
    loss = torch.zeros(1, dtype=wide)
    for b in range(len(call.extents)):
        for i in range(int(call.extents.q_len[b])):
            js = keys_of(call, b, i)
            if not js:
                continue
            top, total = (call.saved[n][b][:, i].to(wide) for n in ("max", "sum"))
            s, dots = scores_of(call, b, i, js, wide)
            heads = (
                p.heads_q
                if call.sink is None
                else p.heads_q - ((call.sink.to(wide) - top[:, 0]).exp() / total[:, 0]).sum()
            )
            target = ((s - top).exp() / total).sum(0) / heads
            w, k = call.w[b][0, i].to(wide), call.ki[b][0, js].to(wide)
            scores = (w[:, None] * dots.relu()).sum(0)
            y = torch.softmax(scores, -1)
            if not p.select_count:
                y = (scores - call.saved["own_max"][b][0, i].to(wide)).exp() / call.saved["own_sum"][b][0, i].to(wide)
            factor = target.clamp(min=LEAST) if p.select_count else target
            loss += (factor * (target.clamp(min=LEAST).log() - y.clamp(min=LEAST).log())).sum()
            di = y - target
            ds = torch.where(dots > 0, di * w[:, None], 0)
            ds = ds.to(low).to(wide) if p.dtype == "bfloat16" else ds
            results["dweights"][b][0, i] = (di * dots.relu()).sum(-1)
            results["dq"][b][:, i] = ds @ k
            results["dk"][b][0].index_add_(0, torch.tensor(js), ds.mT @ call.qi[b][:, i].to(wide))
    narrow = {"dweights": getattr(torch, p.weights_dtype)}
    found = {n: [t.to(narrow.get(n, low) if wide == torch.float32 else wide) for t in r] for n, r in results.items()}
    return found | {"loss": [loss]}


def operands_of(call: LossCall, packed: bool = True) -> IndexerLossOperands:
    p, ropes = call.problem, call.q_rope or None
    own = None if p.select_count else Stats(*(rows(call.saved[n], packed) for n in ("own_max", "own_sum")))
    index = IndexerOperands(
        rows(call.qi, packed),
        rows(call.ki, not packed),
        rows(call.w, packed),
        int_rows(call.indices) if p.select_count else None,
        stats=own,
    )
    return IndexerLossOperands(
        rows(call.q, packed),
        rows(call.k, packed),
        Stats(*(rows(call.saved[n], not packed) for n in ("max", "sum"))),
        index,
        torch.full((1,), math.nan),
        rows(call.q_rope, not packed) if ropes else None,
        rows(call.k_rope, packed) if ropes else None,
        call.sink,
    )


def run(call: LossCall, variant: str | None = None, threads: int = 2, packed: bool = True) -> Results:
    p, operands = call.problem, operands_of(call, packed)
    written = {
        "dq": (room(call.qi, p.dim_index, p.torch_dtype), call.qi),
        "dk": (room(call.ki, p.dim_index, p.torch_dtype), call.ki),
        "dweights": (room(call.w, p.heads_index, getattr(torch, p.weights_dtype)), call.w),
    }
    torch.set_num_threads(threads)
    plan = cpu.schedule(p, call.extents, "indexer_loss", variant)
    grads = IndexerGrads(**{name: view for name, (view, _) in written.items()})
    cpu.indexer_loss(p, call.extents, plan, operands, grads)
    results = {name: [t.clone() for t in read(view, like)] for name, (view, like) in written.items()}
    return results | {"loss": [operands.loss]}


def compare_losses(call: LossCall, *three: torch.Tensor) -> None:
    """A row's terms cancel, so its loss is known as well as its probabilities, which add up to 1 twice."""
    alive = sum(bool(keys_of(call, b, i)) for b in range(len(call.extents)) for i in range(int(call.extents.q_len[b])))
    compare(f"{call.problem} loss", *three, int(call.extents.kv_len.max()), 2.0 * alive)


def draw(seed: int, selected: bool) -> LossCall:
    """The first sequence has rows and keys enough to measure errors by, and for two tiles; the others any number."""
    rng = random.Random(seed)
    dtype, heads_kv = rng.choice(["float32", "float16", "bfloat16"]), rng.choice([1, 1, 2, 4])
    problem = IndexerLossProblem(
        heads_q=heads_kv * rng.choice([1, 3, 8, 17]),
        heads_kv=heads_kv,
        dim_qk=rng.choice([1, 16, 33, 64, 129]),
        heads_index=rng.choice([2, 5, 8, 13, 32, 64]),
        dim_index=rng.choice([1, 8, 20, 33, 64]),
        dim_rope=rng.choice([0, 7, 16]),
        dtype=dtype,
        weights_dtype=rng.choice([dtype, "float32"]),
        scale=rng.choice([0.1, 0.25]),
        has_sink=rng.random() < 0.3,
        select_count=rng.choice([17, 64, 130, 300]) if selected else 0,
    )
    count = rng.choice([0, 1, 2])
    q_len = 19 if selected else 150, *(rng.choice([0, 1, 7]) for _ in range(count))
    kv_len = rng.choice([120, 300]), *(rng.choice([0, 1, 9, 60]) for _ in range(count))
    window = rng.choice([None, None, 5, 70]) if not selected else None
    return make_loss(problem, q_len, kv_len, rng.random() < 0.6, seed, rng.random() < 0.3, window)


def check(call: LossCall, seed: int) -> None:
    wanted, plain = formulas(call, torch.float64), formulas(call, torch.float32)
    for variant in VARIANTS:
        got = run(call, variant, 1 + seed % 3, seed % 2 == 0)
        compare_losses(call, *(results["loss"][0] for results in (got, wanted, plain)))
        for name in ("dq", "dk", "dweights"):
            three = (torch.cat([t.flatten(0, 1) for t in results[name]]) for results in (got, wanted, plain))
            compare(f"{variant} {call.problem} {name}", *three, int(call.extents.kv_len.max()))


@pytest.mark.parametrize("seed", range(16))
def test_selected_keys_against_the_formulas(seed: int) -> None:
    check(draw(seed, selected=True), seed)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_batches_of_rows_over_ranges_of_keys(dtype: str) -> None:
    """Batches of 16 rows end inside sequences, and keys are more than the 512 whose sums are added together."""
    problem = IndexerLossProblem(3, 1, 16, 5, 24, dtype=dtype, scale=0.2, select_count=300)
    for seed in range(3):
        check(make_loss(problem, (5, 0, 23, 1, 14), (1100, 7, 513, 0, 512), seed == 1, seed), seed)


@pytest.mark.parametrize("seed", range(30, 42))
def test_bands_against_the_formulas(seed: int) -> None:
    check(draw(seed, selected=False), seed)


@pytest.mark.parametrize("select_count", [0, 1, 3])
def test_rows_of_one_key_give_nothing(select_count: int) -> None:
    """Whole numbers: scores, and the statistics of them, are exact, and both distributions are 1."""
    for dtype in ("float32", "float16", "bfloat16"):
        problem = IndexerLossProblem(3, 1, 1, 1, 1, dtype=dtype, scale=0.25, select_count=select_count)
        call = make_loss(problem, (1, 1, 2), (1, 1, 0), True, 5)
        for name in ("q", "k", "qi", "ki", "w"):
            setattr(call, name, [t.round() for t in getattr(call, name)])
        save(call)
        for variant in VARIANTS:
            assert not any(t.any() for tensors in run(call, variant).values() for t in tensors)


def lse(call: LossCall, variant: str | None = None, threads: int = 2) -> Results:
    p = call.problem
    problem = IndexerProblem(p.heads_index, p.dim_index, p.dtype, p.weights_dtype, top_k=0)
    stats = Stats(*(room(call.w, 1, torch.float32) for _ in range(2)))
    operands = IndexerOperands(rows(call.qi), rows(call.ki), rows(call.w), stats=stats)
    torch.set_num_threads(threads)
    plan = cpu.schedule(problem, call.extents, "indexer_lse", variant)
    cpu.indexer_lse(problem, call.extents, plan, operands)
    return {n: [t.clone() for t in read(getattr(stats, n), [t[..., :1] for t in call.w])] for n in ("max", "sum")}


def lse_of(found: Results, own: str = "") -> list[torch.Tensor]:
    """max + log(sum), which is known as well as the scores are."""
    pairs = zip(found[f"{own}max"], found[f"{own}sum"], strict=True)
    return [top.double() + total.double().log() for top, total in pairs]


def score_size(call: LossCall) -> float:
    """The largest sum of absolute products behind a score of the indexer."""
    sizes = []
    for q, k, w in zip(call.qi, call.ki, call.w, strict=True):
        products = q.double().abs() @ k.double().abs().nan_to_num(nan=0.0).mT
        sizes.append((w[0].double().abs().mT[..., None] * products).sum(0).flatten())
    return float(torch.cat(sizes).amax())


@pytest.mark.parametrize("seed", range(60, 72))
def test_statistics_against_the_formulas(seed: int) -> None:
    call = draw(seed, selected=False)
    wanted, plain = statistics(call, torch.float64), statistics(call, torch.float32)
    for variant in VARIANTS:
        got = lse(call, variant, 1 + seed % 3)
        for what, three in {
            "max": (got["max"], wanted["own_max"], plain["own_max"]),
            "lse": (lse_of(got), lse_of(wanted, "own_"), lse_of(plain, "own_")),
        }.items():
            joined = (torch.cat([t.flatten() for t in tensors]) for tensors in three)
            compare(f"{variant} {call.problem} {what}", *joined, int(call.extents.kv_len.max()), score_size(call))


@pytest.mark.parametrize("selected", [True, False])
def test_threads_change_no_bit(selected: bool) -> None:
    problem = IndexerLossProblem(6, 2, 40, 9, 33, 8, "bfloat16", scale=0.2, select_count=150 if selected else 0)
    call = make_loss(problem, (160, 0, 33), (1200 if selected else 300, 5, 70), True, 4)
    for compute in (run,) if selected else (run, lse):
        want = compute(call, threads=1)
        for threads in (2, 3, 7, 20):
            got = compute(call, threads=threads)
            same_bits(got, want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_key_that_is_no_number_reaches_only_rows_that_see_it(dtype: str) -> None:
    problem = IndexerLossProblem(4, 2, 16, 5, 24, dtype=dtype, scale=0.2)
    call = make_loss(problem, (150,), (170,), True, 2)
    clean, at = run(call), 61
    call.ki[0][0, at, ::3] = math.nan
    call.k[0][0, at] = math.inf
    dirty = run(call)
    before = at - 20  # the first row that sees the key
    for name in ("dq", "dweights"):
        same_bits(dirty[name][0][:, :before], clean[name][0][:, :before])
    assert dirty["dweights"][0][:, before:].isnan().all()
    assert dirty["loss"][0].isnan()


def test_keys_of_minus_infinity_weigh_nothing() -> None:
    problem = IndexerLossProblem(1, 1, 4, 1, 4, dtype="float32")
    call = make_loss(problem, (3,), (3,), False, 2)
    call.qi[0], call.w[0] = torch.ones(1, 3, 4), torch.ones(1, 3, 1)
    call.ki[0][0, 1] = -math.inf  # a score of -inf, which the ReLU makes 0
    save(call)
    wanted, plain = formulas(call, torch.float64), formulas(call, torch.float32)
    for variant in VARIANTS:
        got = run(call, variant)
        assert got["dq"][0].isfinite().all()
        assert got["dk"][0].isfinite().all()
        assert (got["dk"][0][0, 1] == 0).all()
        compare_losses(call, *(results["loss"][0] for results in (got, wanted, plain)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lists_of_all_keys_are_the_band(dtype: str) -> None:
    listed = IndexerLossProblem(5, 1, 24, 6, 16, 8, dtype, scale=0.2, has_sink=True, select_count=90)
    call = make_loss(listed, (40,), (90,), True, 9)
    for i in range(40):
        call.indices[0][0, i] = torch.cat((torch.randperm(51 + i), torch.full((39 - i,), -1)))
    call.k, call.ki = ([torch.nan_to_num(t) for t in tensors] for tensors in (call.k, call.ki))
    call.saved = statistics(call, torch.float64)
    whole = replace(call, problem=replace(listed, select_count=0))
    band = formulas(whole, torch.float64)
    for name, tensors in formulas(call, torch.float64).items():
        # The two differ in the factor before the loss's logarithms alone: max(p, 1e-8) and p.
        bound = 40 * 90 * 1e-8 * abs(math.log(1e-8)) if name == "loss" else 1e-12
        for one, other in zip(tensors, band[name], strict=True):
            assert (one - other).abs().max() <= bound
    save(call)
    for one in (call, replace(whole, saved=call.saved)):
        check(one, 0)


def test_no_sequence_has_no_loss() -> None:
    call = draw(3, selected=True)
    empty = Extents(*(getattr(call.extents, n)[:0] for n in ("q_len", "kv_len", "lo", "hi", "prefix", "shift")))
    operands = operands_of(call)
    plan = cpu.schedule(call.problem, empty, "indexer_loss")
    cpu.indexer_loss(call.problem, empty, plan, operands, IndexerGrads(*(rows(t) for t in (call.qi, call.ki, call.w))))
    assert operands.loss.item() == 0


@pytest.mark.parametrize("select_count", [0, 2048])
def test_memory_stays_under_a_gigabyte(select_count: int) -> None:
    extents = extents_of((32768,), (32768,), True)
    for dtype in ("float32", "bfloat16"):
        heads_kv, dim = (1, 512) if select_count else (128, 128)
        problem = IndexerLossProblem(128, heads_kv, dim, 64, 128, 64, dtype, dtype, select_count=select_count)
        assert cpu.workspace_bytes(problem, extents, "indexer_loss") < 100_000_000
        statistics = IndexerProblem(64, 128, dtype, dtype, top_k=0)
        assert cpu.workspace_bytes(statistics, extents, "indexer_lse") < 100_000_000


def test_what_this_back_end_does_not_compute_is_said() -> None:
    assert (
        len(cpu.reasons_against(IndexerLossProblem(1, 1, 8, 1, 8, dtype="float64", weights_dtype="float64"), "cpu"))
        == 2
    )
    assert not cpu.reasons_against(IndexerLossProblem(1, 1, 8, 1, 8, dtype="bfloat16"), "cpu")

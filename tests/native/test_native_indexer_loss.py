"""The native core's indexer loss, and the statistics that it reads: every variant, forced, against golden.

Unused keys and gaps between rows hold NaN; results are poisoned. The attention's saved float32 results are inputs.
"""

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from support.bits import same_bits
from support.native_dense import VARIANTS
from support.native_lowered import Args, extents_of, hostile, run

from fusion_attention.backends import cpu
from fusion_attention.ir.problem import IndexerProblem
from fusion_attention.ops.indexer_loss.lowered_call import DIFFERENTIABLE, INDEX_STATISTICS, Loss, Statistics
from fusion_attention.testing.expected_indexer import check_index
from fusion_attention.testing.indexer_loss import LossCase, arguments, lowered, statistics, tokens_of

DTYPES = ("float32", "float16", "bfloat16")


def drawn(case: LossCase) -> Args:
    args = arguments(case)
    return hostile(case, args, lambda b, row, _: tokens_of(case, args, b, row), 1)


def loss_of(case: LossCase, args: Args) -> Loss:
    """Returns the lowered call; without lists, statistics of the indexer are inputs."""
    call = lowered(case, args)
    given = {} if case.count else {name: args[name] for name in INDEX_STATISTICS}
    return Loss(call.extents, call.layout, {**call.tensors, **given}, call.problem)


def draw(seed: int, selected: bool) -> LossCase:
    """Returns a random case; the first sequence has enough rows and keys for error bounds and two tiles."""
    rng = random.Random(seed)
    dtype, heads_kv, count = rng.choice(DTYPES), rng.choice([1, 1, 2, 4]), rng.choice([0, 1, 2])
    return LossCase(
        layout="TND",
        dtype=dtype,
        q_len=(19 if selected else 150, *(rng.choice([0, 1, 7]) for _ in range(count))),
        kv_len=(rng.choice([120, 300]), *(rng.choice([0, 1, 9, 60]) for _ in range(count))),
        mode=rng.choice([0, 0, 3, 3, 3]),
        heads_q=heads_kv * rng.choice([1, 3, 8, 17]),
        heads_kv=heads_kv,
        dim_qk=rng.choice([1, 16, 33, 64, 129]),
        dim_rope=rng.choice([0, 7, 16]),
        heads=rng.choice([2, 5, 8, 13, 32, 64]),
        dim=rng.choice([1, 8, 20, 33, 64]),
        weights=rng.choice([dtype, "float32"]),
        scale=rng.choice([0.1, 0.25]),
        sink=rng.random() < 0.3,
        count=rng.choice([17, 64, 130, 300]) if selected else 0,
        lists=rng.choice(["random", "random", "short", "repeated", "wild"]),
        window=None if selected else rng.choice([None, None, 5, 70]),
    )


def compressed(case: LossCase, seed: int) -> LossCase:
    """Returns the case with compressed keys, each for `ratio` tokens."""
    rng = random.Random(seed)
    ratio = rng.choice([2, 3, 4, 128])
    return replace(case, mode=3, window=None, ratio=ratio, residual=tuple(rng.randrange(ratio) for _ in case.q_len))


def check(case: LossCase, args: Args, seed: int = 0) -> None:
    call = loss_of(case, args)
    check_index(call, {variant: run(call, variant, 1 + seed % 3, apart=seed % 2 == 1) for variant in VARIANTS})


@pytest.mark.parametrize("seed", range(22))
def test_indexer_loss_over_selected_keys_matches_reference(seed: int) -> None:
    case = draw(seed, selected=True)
    case = compressed(case, seed) if seed >= 16 else case
    check(case, drawn(case), seed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_indexer_loss_of_row_batches_over_1100_keys_matches_reference(dtype: str) -> None:
    """Batches of 16 rows end inside sequences; keys exceed the 512 that are summed together."""
    sizes = {"heads_q": 3, "dim_qk": 16, "heads": 5, "dim": 24, "scale": 0.2, "count": 300}
    for seed, (mode, lists) in enumerate(((0, "random"), (3, "random"), (0, "short"))):
        case = LossCase("TND", 0, dtype, (5, 0, 23, 1, 14), (1100, 7, 513, 0, 512), mode=mode, lists=lists, **sizes)
        check(case, drawn(case), seed)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", range(30, 48))
def test_indexer_loss_over_bands_matches_reference(seed: int) -> None:
    case = draw(seed, selected=False)
    case = compressed(case, seed) if seed >= 42 else case
    check(case, drawn(case), seed)


@pytest.mark.parametrize("select_count", [0, 1, 3])
def test_indexer_loss_and_gradients_of_rows_with_one_key_are_zero(select_count: int) -> None:
    """Operands are whole numbers: scores and statistics are exact, and the two distributions are 1."""
    for dtype in DTYPES:
        sizes = {"heads_q": 3, "dim_qk": 1, "heads": 1, "dim": 1, "scale": 0.25}
        case = LossCase("TND", 0, dtype, (1, 1, 2), (1, 1, 0), count=select_count, **sizes)
        args = drawn(case)
        for name in ("query", "key", "query_index", "key_index", "weights"):
            args[name] = args[name].round()
        args |= statistics(case, args)
        for variant in VARIANTS:
            assert not any(tensor.any() for tensor in run(loss_of(case, args), variant).values())


def lse(case: LossCase, args: Args) -> Statistics:
    """Returns the lowered call that computes the statistics."""
    call, dtypes = lowered(case, args), (case.dtype, case.weights)
    problem = IndexerProblem(case.heads, case.dim, *dtypes, top_k=0, ratio=case.ratio)
    return Statistics(call.extents, call.layout, {name: args[name] for name in DIFFERENTIABLE}, problem)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", range(60, 76))
def test_indexer_statistics_match_reference(seed: int) -> None:
    case = draw(seed, selected=False)
    case = compressed(case, seed) if seed >= 72 else case
    call = lse(case, drawn(case))
    check_index(call, {variant: run(call, variant, 1 + seed % 3) for variant in VARIANTS})


@pytest.mark.parametrize("selected", [True, False])
def test_indexer_loss_is_bitwise_equal_for_any_thread_count(selected: bool) -> None:
    sizes = {"heads_q": 6, "heads_kv": 2, "dim_qk": 40, "heads": 9, "dim": 33, "dim_rope": 8, "scale": 0.2}
    kv_len = (1200 if selected else 300, 5, 70)
    case = LossCase("TND", 0, "bfloat16", (160, 0, 33), kv_len, count=150 if selected else 0, **sizes)
    args = drawn(case)
    want, statistic = run(loss_of(case, args), threads=1), run(lse(case, args), threads=1)
    for threads in (2, 3, 5, 8, 16, 64):
        same_bits(run(loss_of(case, args), threads=threads), want)
        if not selected:
            same_bits(run(lse(case, args), threads=threads), statistic)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_indexer_loss_nan_key_reaches_only_rows_that_see_the_key(dtype: str) -> None:
    sizes = {"heads_q": 4, "heads_kv": 2, "dim_qk": 16, "heads": 5, "dim": 24, "scale": 0.2, "count": 0}
    case = LossCase("TND", 0, dtype, (150,), (170,), **sizes)
    args, at = drawn(case), 61
    call = loss_of(case, args)
    clean = run(call)
    args["key_index"][at, :, ::3] = math.nan
    args["key"][at] = math.inf
    dirty = run(call)
    before = at - 20  # the first row that sees the key
    for name in ("dquery_index", "dweights"):
        same_bits(dirty[name][:before], clean[name][:before])
    assert dirty["dweights"][before:].isnan().all()
    assert dirty["loss"].isnan()


def test_indexer_loss_key_of_minus_infinity_gets_zero_gradient() -> None:
    sizes = {"heads_q": 1, "dim_qk": 4, "heads": 1, "dim": 4, "scale": 1.0, "count": 0}
    case = LossCase("TND", 0, "float32", (3,), (3,), mode=0, **sizes)
    args = drawn(case)
    args["query_index"].fill_(1), args["weights"].fill_(1)
    args["key_index"][1] = -math.inf  # a score of -inf, which the ReLU makes 0
    args |= statistics(case, args)
    call = loss_of(case, args)
    results = {variant: run(call, variant) for variant in VARIANTS}
    check_index(call, results)
    for got in results.values():
        assert got["dquery_index"].isfinite().all()
        assert got["dkey_index"].isfinite().all()
        assert (got["dkey_index"][1] == 0).all()


def test_indexer_loss_of_empty_batch_is_zero() -> None:
    case = draw(3, selected=True)
    call = loss_of(case, drawn(case))
    empty = replace(call, extents=extents_of((), ()))
    filled = call.fill(call.results())
    cpu.indexer_loss(
        empty.problem, empty.extents, cpu.schedule(empty.problem, empty.extents, empty.op_kind), *filled.operands
    )
    assert filled.operands[0].loss.item() == 0


@pytest.mark.parametrize(("at", "name"), [(10, "values"), (26, "target")])
def test_indexer_loss_refuses_view_of_wrong_size(at: int, name: str) -> None:
    call = loss_of(case := LossCase(q_len=(3,), kv_len=(5,), count=2), drawn(case))
    filled = call.fill(call.results())
    plan: Any = cpu.schedule(call.problem, call.extents, call.op_kind, None)

    class Changed:
        def run(self, threads: int, index_arguments: tuple[Any, ...], *others: Any) -> None:
            plan.run(threads, (*index_arguments[:at], (1,), *index_arguments[at + 1 :]), *others)

    changed: Any = Changed()
    with pytest.raises(ValueError, match=f"{name} is no view"):
        cpu.indexer_loss(call.problem, call.extents, changed, *filled.operands)

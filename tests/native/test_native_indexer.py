"""The native core's lightning indexer: every variant, forced, against golden.

Tests of the order use small whole scores, which are exact in every format and order of summation, and often equal.
Keys that no row sees, gaps between rows and unused pages hold NaN; memory of results is poisoned.
"""

import math
import random
from dataclasses import replace

import pytest
import torch
from support.bits import same_bits
from support.native_dense import VARIANTS
from support.native_lowered import Args, Results, far, in_pages, run
from support.sparse_checks import ordered

from fusion_attention.ops.indexer.lowered_call import IndexerBackward
from fusion_attention.testing.expected_indexer import check_index
from fusion_attention.testing.sparse import IndexerCase, indexer_arguments, lowered_indexer, sequence_of


def drawn(case: IndexerCase) -> Args:
    """Returns the arguments of a case; keys that no row sees are NaN."""
    args = indexer_arguments(case)
    for b, rows in enumerate(case.q_len):
        sequence_of(case, args["key"], "kv", b)[max((case.seen(b, row) for row in range(rows)), default=0) :] = math.nan
    return args


def choose(args: Args, variant: str | None = None, threads: int = 2, apart: bool = False) -> tuple[torch.Tensor, ...]:
    """Returns the selected indices and values."""
    return tuple(run(lowered_indexer(args), variant, threads, apart).values())


def gradients(args: Args, indices: torch.Tensor, variant: str | None = None, threads: int = 2) -> Results:
    return run(IndexerBackward(lowered_indexer(args), args["dy"], far(indices)), variant, threads)


def draw(seed: int, exact: bool) -> IndexerCase:
    rng = random.Random(seed)
    dtype, count = rng.choice(["float32", "float16", "bfloat16"]), rng.choice([1, 2, 3])
    return IndexerCase(
        layout="TND",
        dtype=dtype,
        q_len=tuple(rng.choice([0, 1, 2, 5, 19]) for _ in range(count)),
        kv_len=tuple(rng.choice([0, 1, 9, 60, 700, 2100]) for _ in range(count)),
        mode=rng.choice([0, 0, 3, 3, 3]),
        heads=rng.choice([1, 2, 5, 8, 13, 32, 64]),
        dim=rng.choice([1, 8, 20, 33, 64]),
        weights=rng.choice([dtype, "float32"]),
        top_k=rng.choice([1, 3, 17, 64, 300]),
        exact=exact,
    )


def compressed(case: IndexerCase, seed: int) -> IndexerCase:
    """Returns the case with compressed keys, each for `ratio` tokens."""
    rng = random.Random(seed)
    ratio = rng.choice([2, 3, 4, 128])
    return replace(case, mode=3, ratio=ratio, residual=tuple(rng.randrange(ratio) for _ in case.q_len))


@pytest.mark.parametrize("seed", range(45))
def test_indexer_selects_keys_in_exact_order_including_ties(seed: int) -> None:
    case = draw(seed, exact=True)
    case = compressed(case, seed) if seed >= 30 else case
    args, size = drawn(case), seed % 4 * 8
    given = in_pages(case, args, size) if size else args
    for variant in VARIANTS:
        ordered(case, args, *choose(given, variant, 1 + seed % 3, apart=seed % 2 == 1), variant)


@pytest.mark.parametrize("seed", range(50, 68))
def test_indexer_selected_keys_and_scores_match_reference(seed: int) -> None:
    case = draw(seed, exact=False)
    call = lowered_indexer(drawn(compressed(case, seed) if seed >= 62 else case))
    check_index(call, {variant: run(call, variant) for variant in VARIANTS})


def judge(args: Args, indices: torch.Tensor) -> None:
    """Compares the gradients of every variant with golden."""
    call = IndexerBackward(lowered_indexer(args), args["dy"], far(indices))
    check_index(call, {variant: run(call, variant) for variant in VARIANTS})


@pytest.mark.parametrize("seed", range(68, 90))
def test_indexer_gradients_match_reference(seed: int) -> None:
    case = draw(seed, exact=False)
    args = drawn(compressed(case, seed) if seed % 3 == 0 else case)
    judge(args, choose(args)[0])


@pytest.mark.parametrize("seed", range(90, 96))
def test_indexer_gradient_continues_after_list_entry_outside_the_band(seed: int) -> None:
    case = IndexerCase("TND", q_len=(9, 4), kv_len=(30, 12), heads=3, top_k=17)
    args, rng = drawn(case), torch.Generator().manual_seed(seed)
    lists = [torch.randint(-1 + seed % 2, n, (m, 1, 17), generator=rng).int() for m, n in ((9, 30), (4, 12))]
    assert any((entries[0, 0] >= case.seen(b, 0)).any() for b, entries in enumerate(lists))
    judge(args, torch.cat(lists))


def test_indexer_is_bitwise_equal_for_any_thread_count() -> None:
    for q_len, kv_len in (((1,), (5000,)), ((30, 0, 1), (700, 5, 3000))):
        args = drawn(IndexerCase("TND", 0, "bfloat16", q_len, kv_len, heads=40, dim=33, top_k=130))
        want = choose(args, threads=1)
        dwant = gradients(args, want[0], threads=1)
        for threads in (2, 3, 64):
            same_bits(choose(args, threads=threads), want)
            same_bits(gradients(args, want[0], threads=threads), dwant)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("keys", "size"), [(5, 0), (1100, 0), (1100, 16), (300, 40)])
def test_indexer_selection_of_few_rows_is_bitwise_equal_to_many_rows(keys: int, size: int, dtype: str) -> None:
    """If rows are few, each row packs its visible keys, a panel at a time."""
    case = IndexerCase("TND", 0, dtype, (9,), (keys,), mode=0, heads=13, dim=33, top_k=130)
    args = drawn(case)
    for variant in VARIANTS:
        indices, values = choose(args, variant, threads=1)
        for rows, threads in ((1, 1), (1, 2), (3, 1), (8, 1), (4, 2), (8, 2), (4, 9)):
            few = replace(case, q_len=(rows,))
            some = {**drawn(few), **args, "query": args["query"][:rows], "weights": args["weights"][:rows]}
            some["actual_seq_qlen"] = [rows]
            given = in_pages(few, some, size) if size else some
            same_bits(choose(given, variant, threads), (indices[:rows], values[:rows]))


def test_indexer_orders_nan_first_and_drops_keys_with_score_minus_infinity() -> None:
    args = drawn(IndexerCase("TND", q_len=(1,), kv_len=(7,), mode=0, heads=1, dim=1, top_k=6))
    args["query"].fill_(1), args["weights"].fill_(1)
    args["key"][:] = torch.tensor([0.0, math.inf, -0.0, math.nan, 2.0, math.nan, 2.0]).view(7, 1, 1)
    for variant in VARIANTS:
        assert choose(args, variant)[0].flatten().tolist() == [3, 5, 1, 4, 6, 0]
    args["weights"].fill_(-1)  # a score of -inf is a key not seen; -0 is 0
    args["key"][:] = torch.tensor([3.0, math.inf, -1.0, 0.0, 2.0, math.inf, 2.0]).view(7, 1, 1)
    for variant in VARIANTS:
        indices, values = choose(args, variant)
        assert indices.flatten().tolist() == [2, 3, 4, 6, 0, -1]
        assert values.flatten().tolist() == [0.0, 0.0, -2.0, -2.0, -3.0, -math.inf]

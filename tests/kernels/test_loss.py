"""The indexer's loss, with and without a given target, under the interpreter: against golden, equal bits by chunks."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.bits import same_bits
from support.launches import fresh_plans
from support.sparse_checks import cloned, operands

from fusion_attention.backends.triton.common import launching
from fusion_attention.backends.triton.common.shapes import Tile
from fusion_attention.backends.triton.indexer import launch_dense_kl_loss, launch_loss, shapes_loss
from fusion_attention.backends.triton.selected import launch_key_sum
from fusion_attention.backends.triton.selected import shapes as shapes_sparse
from fusion_attention.ir.mask import Band
from fusion_attention.ir.problem import Extents, IndexerLossProblem
from fusion_attention.ops.indexer_loss.lowered_call import RESULTS, TARGET_RESULTS, Loss
from fusion_attention.testing import target_loss
from fusion_attention.testing.cases import Results
from fusion_attention.testing.expected_indexer import check_index
from fusion_attention.testing.indexer_loss import LossCase, lowered
from fusion_attention.testing.target_loss import TargetCase
from fusion_attention.torch_ops.eager import run

pytestmark = pytest.mark.filterwarnings("ignore::fusion_attention.contract.ContractWarning")

PACKED = LossCase(layout="TND", q_len=(3, 6, 4), kv_len=(5, 6, 9))
HALF = {"dtype": "bfloat16", "weights": "bfloat16"}
WARM = [
    LossCase(count=0),
    LossCase(
        count=0, dtype="float16", weights="float16", q_len=(20,), kv_len=(40,), heads_q=6, heads_kv=3, dim_qk=7, dim=5
    ),
    replace(PACKED, count=0, sink=True, heads_kv=2, dim_rope=3),
    replace(PACKED, q_len=(9, 2, 0, 3), kv_len=(4, 0, 5, 8), q_rest=2, kv_rest=3, count=0, **HALF),
    LossCase(q_len=(5, 2, 0), kv_len=(3, 9, 4), q_rest=1, kv_rest=2, count=0, heads_q=1, heads=1, dim=1, dim_qk=20),
    LossCase(q_len=(40,), kv_len=(70,), count=0, window=21, dim_qk=24, dim_rope=8, heads_q=2, heads=5, dim=16, **HALF),
    LossCase(q_len=(0, 0), kv_len=(4, 4), count=0),
    replace(PACKED, q_len=(0,), kv_len=(0,), count=0),
    LossCase(q_len=(70, 20), kv_len=(37, 37), count=0, ratio=2, residual=(1, 0)),
    replace(PACKED, q_len=(9, 2, 3), kv_len=(40, 0, 5), count=0, ratio=3, residual=(2, 1, 0), **HALF),
]

LISTS = ("all", "repeated", "short", "none", "wild")
SELECTED = [
    LossCase(),
    *(LossCase(lists=lists, count=7, mode=mode) for lists, mode in zip(LISTS, (0, 3, 3, 0, 3), strict=True)),
    replace(PACKED, lists="wild", count=7, **HALF),
    LossCase(lists="all", count=9, dim_qk=32, dim_rope=8, heads_q=8, heads=4, dim=16, **HALF),
    LossCase(dtype="float16", weights="float16", lists="repeated", wide=True, heads_q=6, heads_kv=3, dim_qk=7, dim=5),
    replace(PACKED, sink=True, count=5, heads_kv=2, dim_rope=3),
    LossCase(q_len=(9, 9), kv_len=(4, 4), count=6, lists="all", sink=True),
    replace(PACKED, q_len=(9, 2, 0, 3), kv_len=(4, 0, 5, 8), q_rest=2, kv_rest=3, lists="all", count=6, **HALF),
    LossCase(q_len=(5, 2, 0), kv_len=(3, 9, 4), q_rest=1, kv_rest=2, count=6, heads_q=1, heads=1, dim=1),
    LossCase(q_len=(3,), kv_len=(90,), count=40, lists="all", heads_q=33, heads=33, mode=0, window=60),
    LossCase(q_len=(0, 0), kv_len=(4, 4), count=6),
    replace(PACKED, q_len=(0,), kv_len=(0,), count=6),
    LossCase(q_len=(9, 7), kv_len=(3, 3), count=6, lists="all", ratio=3, residual=(0, 2)),
    replace(PACKED, q_len=(9, 2, 3), kv_len=(40, 0, 5), count=7, lists="wild", ratio=4, residual=(2, 1, 0), **HALF),
]
GIVEN = TargetCase(layout="TND", q_len=(3, 6, 4), kv_len=(5, 6, 9))
TARGETS = [
    *(TargetCase(count=count) for count in (0, 6)),
    *(replace(GIVEN, count=count, **HALF) for count in (0, 4)),
    *(TargetCase(dtype="float16", weights="float16", q_len=(20,), kv_len=(40,), count=count) for count in (0, 18)),
    *(TargetCase(lists=lists, count=7, mode=mode) for lists, mode in (("repeated", 3), ("short", 0), ("wild", 3))),
    *(TargetCase(target=target, count=count) for target in ("zero", "nan") for count in (0, 6)),
    *(replace(GIVEN, q_len=(9, 2, 0, 3), kv_len=(4, 0, 5, 8), q_rest=2, kv_rest=3, count=n) for n in (0, 6)),
    *(TargetCase(q_len=(0, 0), kv_len=(4, 4), count=count) for count in (0, 6)),
    *(TargetCase(q_len=(70, 20), kv_len=(17, 17), ratio=4, residual=(2, 0), count=count) for count in (0, 5)),
]


ON_GPU = {name: getattr(shapes_sparse, name) for name in ("gradient_tile", "ONE_LAUNCH")}


@pytest.fixture(autouse=True)
def gradient_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores a GPU's tiles of the gradient: one launch for all heads. test_indexer_kernels.py has several."""
    for name, value in ON_GPU.items():
        monkeypatch.setattr(shapes_sparse, name, value)


@pytest.mark.parametrize("case", [*WARM, *SELECTED], ids=lambda case: case.id)
def test_triton_indexer_loss_matches_reference(case: LossCase) -> None:
    judge(lowered(case, operands(case)))


def of_target(case: TargetCase, results: tuple[str, ...] = TARGET_RESULTS) -> Loss:
    return target_loss.lowered(case, target_loss.arguments(case), results)


@pytest.mark.parametrize("results", [RESULTS, TARGET_RESULTS], ids=["loss", "softmax"])
@pytest.mark.parametrize("case", TARGETS, ids=lambda case: case.id)
def test_triton_target_loss_matches_reference(case: TargetCase, results: tuple[str, ...]) -> None:
    judge(of_target(case, results))


def test_triton_target_loss_with_unit_target_matches_reference() -> None:
    call = of_target(TARGETS[0])
    judge(replace(call, problem=replace(call.problem, unit_target=True)))


def judge(call: Loss) -> Results:
    """Returns the results of the Triton back end, after a comparison with golden."""
    result = run(call, "triton")
    check_index(call, {"triton": result})
    return result


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "case", [WARM[2], WARM[5], SELECTED[6], SELECTED[7], TARGETS[2], TARGETS[3]], ids=lambda case: case.id
)
def test_triton_indexer_loss_is_bitwise_equal_for_any_chunk_size(
    case: LossCase | TargetCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smallest chunk is one tile of rows, or one row."""
    monkeypatch.setattr(launch_key_sum, "BLOCK", 1)  # of one token
    call = of_target(case) if isinstance(case, TargetCase) else lowered(case, operands(case))
    result = []
    for size in (1 << 25, 1):
        fresh_plans(monkeypatch)
        monkeypatch.setattr(launch_loss, "BUFFER", size)
        monkeypatch.setattr(launch_dense_kl_loss, "BUFFER", size)
        result.append(dict(run(call, "triton")))
    same_bits(result[1], result[0])


def test_warmup_loss_buffers_of_every_tile_fit_the_announced_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The alignment of rows selects the tile, and the tile determines the size of chunks."""
    n, m = np.array([5000, 2048, 1, 300]), np.array([8192, 1, 100, 20000])
    e = Extents(n, m, *Band.causal().resolve(n, m), n * 0)
    p = IndexerLossProblem(64, 1, 64, 64, 128, dtype="bfloat16")
    monkeypatch.undo()  # the tiles of a GPU
    served = [rows[1].target for rows in shapes_loss.WARM[90, 2]]
    taken = [
        launch_dense_kl_loss.buffers_of(p, launch_dense_kl_loss.Work.of(e, t), t, 128, int(n.sum())) for t in served
    ]
    assert launch_dense_kl_loss.warm_bytes(p, e) >= max(map(launching.bytes_of, taken))


def test_triton_indexer_loss_ignores_list_entries_out_of_range() -> None:
    """List entries are not checked: those behind the band do not count, a negative one ends the list."""
    case = LossCase("TND", q_len=(3, 5), kv_len=(7, 20), count=18, lists="all", mode=0)
    args = cloned(operands(case))
    call = lowered(case, args)
    lists = args["sparse_indices"]
    lists.copy_(torch.randint(0, 24, lists.shape, generator=torch.Generator().manual_seed(0)))
    lists[0, :, 1], lists[1, :, 2], lists[4, :, 3], lists[2] = 2**31 - 1, -(2**31), 1 << 20, -1
    judge(call)


NARROW = LossCase(q_len=(6,), kv_len=(9,), heads=2, heads_q=2, count=0)
CHOSEN = replace(NARROW, count=9, lists="all")
# Padded lanes of heads multiply zeros by keys: an infinite key must not make a score NaN through them.
STRANGE = [
    *((case, name, math.nan) for case in (NARROW, CHOSEN) for name in ("query_index", "key_index", "weights")),
    *((case, name, fill) for case in (NARROW, CHOSEN) for name in ("query", "key") for fill in (math.nan, math.inf)),
]
EVERYDAY = [(NARROW, "query_index", math.nan), (CHOSEN, "key_index", math.nan), (CHOSEN, "key", math.inf)]
REST = [pytest.param(*item, marks=pytest.mark.slow) for item in STRANGE if item not in EVERYDAY]


@pytest.mark.parametrize(("case", "name", "fill"), [*EVERYDAY, *REST])
def test_triton_indexer_loss_nan_or_infinity_reaches_exactly_reference_rows(
    case: LossCase, name: str, fill: float
) -> None:
    args = cloned(operands(case))
    args[name][(0, 3, *(0,) * (args[name].dim() - 2))] = fill
    assert any(not t.isfinite().all() for t in judge(lowered(case, args)).values())


def test_indexer_key_of_minus_infinity_with_negative_products_scores_zero() -> None:
    """Lanes beyond the last head must not make the score NaN."""
    args = cloned(operands(CHOSEN))
    args["query_index"].abs_()
    args["key_index"][0, 3] = -math.inf
    assert all(value.isfinite().all() for value in judge(lowered(CHOSEN, args)).values())


@pytest.mark.parametrize("count", [0, 4])
def test_triton_indexer_loss_of_weights_below_float16_range_matches_reference(count: int) -> None:
    """Differences are scaled by a power of two of the largest weight, which must stay finite for such weights."""
    case = LossCase(q_len=(6,), kv_len=(9,), count=count, dtype="float16")
    args = cloned(operands(case))
    args["weights"] *= 1e-40
    judge(lowered(case, args))


def test_float16_indexer_loss_with_statistics_of_fewer_keys_matches_reference() -> None:
    """With such statistics y exceeds 1; y times the unit of 256 must not overflow float16."""
    case = LossCase(q_len=(6,), kv_len=(9,), count=0, dtype="float16", weights="float16")
    args = cloned(operands(case))
    args["softmax_sum_index"] /= 100
    judge(lowered(case, args))


def test_rows_of_scratch_are_numbered_without_rows_between_sequences() -> None:
    q_len, kv_len = np.array([3, 40]), np.array([9, 50])
    band = Band.causal().resolve(q_len, kv_len)
    e = Extents(q_len, kv_len, *band, np.zeros_like(q_len), starts=(np.array([0, 90]), np.array([0, 9])))
    tables = (launch_loss.row_table(e), *launch_dense_kl_loss.key_ranges(e, Tile(16, 16, 4, 1), 1))
    for table in tables:
        sequence, first_row, number = table[:, 0], table[:, 1], table[:, 7]
        assert (number == 3 * sequence + first_row).all()

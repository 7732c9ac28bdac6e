"""The Triton kernels compiled for sm_80 to sm_90 without a GPU: registers, spills, shared memory, instructions.

The compiled runs cover every row of the tables of tiles; `make test` compiles a part of them, which covers every dense
kernel, dtype, class of head dims and feature, on and off. Recorded figures are in support/resources:

    python tests/support/triton_ahead.py     records new ones
"""

import pytest

triton = pytest.importorskip("triton")

from support import ahead_dense, ahead_indexer, ahead_sparse
from support import triton_ahead as ahead

from fusion_attention.backends.triton.common import shapes
from fusion_attention.backends.triton.decode import launch as launch_decode
from fusion_attention.ir.problem import Problem

# Most instructions in one iteration over a complete tile: per score, or (decode) of all warps per 64 keys.
GOALS = {
    "forward 128 plain sm_90": 7.8,
    "forward 64 plain sm_90": 7.2,
    "query 128 plain sm_90": 9.5,
    "key 128 plain sm_90": 13,
    "key 192 plain sm_90": 26,
    "decode 128 16 rows sm_90": 1700,
    "decode 128 16 rows int8 sm_90": 3700,
}
# Runs that spill registers to the stack, with this Triton or another, and why no tile without spills is used.
OUTSIDE = "written before the main loop and read behind it"
WITHIN = "with Triton 3.7.1; at most 4 instructions of hundreds in a turn touch it"
SPILLED = {
    **dict.fromkeys(("forward 64 read sm_80", "forward 128 drawn sm_90", "forward 128 mean sm_90"), OUTSIDE),
    **dict.fromkeys(("forward 192 read sm_90", "forward 256 mean sm_90"), OUTSIDE),
    **dict.fromkeys(("forward 128 blocked sm_90", "forward 192 blocked sm_90"), OUTSIDE),
    **dict.fromkeys(("prefill 192 read sm_90", "prefill 256 read sm_90"), OUTSIDE),
    **dict.fromkeys(("query 576 read sm_80", "query 768 read sm_80"), OUTSIDE),
    **dict.fromkeys(("key 576 read sm_90", "key 768 read sm_90"), OUTSIDE),
    **dict.fromkeys(("forward 192 sm_86", "key 768 read sm_80"), OUTSIDE),
    "forward 192 capped sm_90": f"{WITHIN}; 64 keys keep none and issue two fifths more",
    "query 128 read sm_90": f"{WITHIN}; 32 rows keep none, without wgmma, and issue 213 for each score instead of 166",
    **dict.fromkeys(
        ("query 256 sm_90", "key 128 ungrouped sm_90", "key 192 sm_90"), f"{WITHIN}; no tile without found"
    ),
}
STACKED = 4
# Runs that spill with Triton 3.7.1 or 3.8.0, for which no tiles are chosen yet; 3.6.0 spills at most 8 bytes, outside
# loops. Worst: forwards that read `blocked` on sm_80 and sm_86; up to 45 stack accesses in an iteration.
LATER = {
    *("forward 128 mean sm_80", "forward 256 mean sm_80", "forward 256 sm_90", "key 192 mean sm_90"),
    *(f"forward {size} blocked sm_{chip}" for size in (128, 192, 256) for chip in (80, 86)),
    *(f"forward {size} read sm_86" for size in (64, 128, 192)),
    *("forward 192 blocked sm_90", "forward 128 read sm_90", "query 128 read sm_90"),
    *("decode 768 read sm_86", "prefill 128 int8 read sm_90"),
}
EVERYDAY = (*ahead_dense.EVERYDAY, *ahead_sparse.EVERYDAY, *ahead_indexer.EVERYDAY)
OF_AREA = {area: ahead.recorded(area) for area in ahead.AREAS}
RECORDED = {run: row for rows in OF_AREA.values() for run, row in rows.items()}
recorded = pytest.mark.skipif(not RECORDED, reason=f"nothing is recorded of Triton {triton.__version__}")
unrecorded = pytest.mark.skip(reason=f"not recorded of Triton {triton.__version__}")


def is_everyday(run: str) -> bool:
    _, name, chip = ahead.RUNS[run]
    return name in EVERYDAY and (chip == 90 or (chip == 80 and name in ahead_dense.OLDER))


def marks(run: str) -> list[pytest.MarkDecorator]:
    return ([] if is_everyday(run) else [pytest.mark.slow]) + ([] if run in RECORDED else [unrecorded])


RUNS = [pytest.param(run, marks=marks(run)) for run in ahead.RUNS]


@pytest.mark.sampled(8)
@recorded
@pytest.mark.parametrize("run", RUNS)
def test_compiled_kernel_resources_do_not_exceed_recorded_figures(run: str) -> None:
    assert ahead.worse(ahead.figures(run), RECORDED[run], ahead.SHARED[ahead.RUNS[run][2]]) == {}


@pytest.mark.slow
@pytest.mark.parametrize("chip", ahead.OTHERS)
@pytest.mark.parametrize(
    "name", ["forward 128 read", "forward 192", "query 128 plain", "key 128 drawn", *ahead_dense.OLDER]
)
def test_kernel_tiles_fit_shared_memory_of_similar_chips_without_spills(name: str, chip: int) -> None:
    like = ahead.OTHERS[chip]
    result = ahead.figures_of(ahead.CONFIGS[name].launched(like), chip)
    assert result["shared"] <= ahead.SHARED[like]
    assert (result["stacked"], result["spilled"] <= 8) == (0, True)


@recorded
def test_kernel_loops_issue_at_most_the_target_number_of_instructions() -> None:
    assert {run: RECORDED[run]["whole"] for run, most in GOALS.items() if RECORDED[run]["whole"] > most} == {}


@recorded
def test_kernels_with_register_spills_or_stack_use_are_all_listed() -> None:
    listed = {*SPILLED, *LATER, *ahead_sparse.SPILLED, *ahead_indexer.SPILLED}
    assert {run: row["spilled"] for run, row in RECORDED.items() if row["spilled"] and run not in listed} == {}
    outside = [run for run, reason in SPILLED.items() if reason == OUTSIDE and run not in LATER]
    assert [run for run in outside if RECORDED.get(run, {"stacked": 0})["stacked"]] == []
    stacked = {run: row["stacked"] for run, row in RECORDED.items() if row["stacked"] > STACKED and run not in LATER}
    assert stacked in ({}, {"two sources pages sm_90": 7})  # ahead_sparse.PAGES says why
    assert [run for run in GOALS if RECORDED[run]["spilled"]] == []


@recorded
def test_every_compiled_kernel_run_has_recorded_figures() -> None:
    """Counts areas with figures for this Triton version; of the dense area only the runs of `make test`."""
    runs = [run for run, (area, _, _) in ahead.RUNS.items() if OF_AREA[area] and (area != "dense" or is_everyday(run))]
    assert [run for run in runs if run not in RECORDED] == []


# By kernel: the constant that is the row count of its products' first factor; "BM" for all others.
FACTORS = {"index_scores": "BN", "backward_slots": "BN", "weigh_slots": "BH", "backward_rows": "BH"}
FACTORS |= {"target": "BK", "score": "BK", "warm_key": "BR"}
# Kernels with one stage less in flight than stages ahead of the first product, and runs with none in flight: a loop of
# one iteration, and rows that are copied two bytes at a time.
FEWER = ("index_scores", "index_gradient", "score", "warm_difference", "warm_lse")
NONE = ("sparse slots 16 ", "indexer gradient odd strides ")


@recorded
@pytest.mark.parametrize(
    "chip", [pytest.param(80, marks=pytest.mark.slow), pytest.param(86, marks=pytest.mark.slow), 90]
)
def test_tall_tiles_use_wgmma_and_prefetch_loads(chip: int) -> None:
    for run, (area, name, of) in ahead.RUNS.items():
        if of != chip or area == "dense" or run not in RECORDED:
            continue
        one, row = ahead.CONFIGS[name].launched(chip), RECORDED[run]
        kernel, stages = one.kernel.__name__, one.options["num_stages"]
        if kernel not in ahead.LOOPS or ahead.CONFIGS[name].problem.dtype == "float32":
            continue
        if chip == 90 and one.arguments[FACTORS.get(kernel, "BM")] >= 64:
            assert row["wgmma"], run
        if stages > 2 and not run.startswith(NONE):
            assert row["ahead"] >= stages - 1 - (kernel in FEWER), run


@recorded
def test_recorded_shared_memory_fits_the_size_in_the_tile_tables() -> None:
    for run, (area, name, chip) in ahead.RUNS.items():
        table = table_of(name, chip)
        if area == "dense" and table in shapes.TABLES and run in RECORDED:
            row = shapes.row_of(table, ahead.CONFIGS[name].problem, chip)
            assert row is not None
            assert RECORDED[run]["shared"] <= row[-1] * 1024, run


def table_of(name: str, chip: int) -> str:
    """Returns the name of the table of tiles of a dense entry."""
    config = ahead.CONFIGS[name]
    if config.kernel == "decode":
        assert isinstance(config.problem, Problem)
        tables = launch_decode.tables_for(config.problem, config.rows * config.problem.group)
        return next(table for table in tables if shapes.row_of(table, config.problem, chip))
    return config.kernel.removeprefix("backward_")


def test_forward_with_bias_and_mask_matrix_uses_tiles_of_half_the_rows() -> None:
    one, two = ({"has_blocked": True}, {"has_blocked": True, "bias": "matrix"})
    rows = [
        shapes.tile_of("forward", ahead_dense.problem(128, **more), 90, 8) for more in ({"bias": "matrix"}, one, two)
    ]
    assert [tile and tile.BM for tile in rows] == [128, 128, 64]


def test_compiled_kernels_cover_every_tile_of_the_tile_tables() -> None:
    chosen = {
        (table_of(name, chip), chip, ahead.launched(run).tile)
        for run, (area, name, chip) in ahead.RUNS.items()
        if area == "dense"
    }
    for kernel, table in shapes.TABLES.items():
        for (chip, _), rows in table.items():
            for _, _, light, heavy, _ in rows:
                assert (kernel, chip, light) in chosen, f"{kernel} sm_{chip} {light}"
                assert (kernel, chip, heavy) in chosen, f"{kernel} sm_{chip} {heavy}"

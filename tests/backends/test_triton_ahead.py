"""The Triton kernels compiled for sm_80 and sm_90 without either: registers, spills, shared memory, instructions.

The list covers every row of the tables of tiles; the everyday suite compiles a part that covers every kernel, dtype,
class of head dims and feature, on and off. What each took when it was last recorded stands in support/resources, a
file for each Triton:

    python tests/support/triton_ahead.py     records it anew
"""

from __future__ import annotations

import json
from concurrent.futures import Future, ProcessPoolExecutor
from functools import cache

import pytest

triton = pytest.importorskip("triton")

from support import triton_ahead as ahead

RUNS = [
    pytest.param(run, marks=[] if name in ahead.EVERYDAY and chip in ahead.EVERYDAY_CHIPS else pytest.mark.slow)
    for run, (name, chip) in ahead.RUNS.items()
]
# Instructions of a whole tile's turn per score, or of decode's warps per 64 keys, that no compiler may exceed.
GOALS = {
    "forward 128 plain sm_90": 7.8,
    "forward 64 plain sm_90": 7.2,
    "query 128 plain sm_90": 9.5,
    "key 128 plain sm_90": 13,
    "key 192 plain sm_90": 26,
    "decode 128 16 rows sm_90": 1700,
    "decode 128 16 rows int8 sm_90": 3700,
}
# Bytes on the stack that are known and stay outside the loops, or cost less than a tile that keeps none.
SPILLED = 128
RECORDED = json.loads(ahead.RESOURCES.read_text(encoding="utf-8")) if ahead.RESOURCES.exists() else {}
recorded = pytest.mark.skipif(not RECORDED, reason=f"nothing is recorded of Triton {triton.__version__}")


@cache
def pool() -> ProcessPoolExecutor:
    return ahead.workers()


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> dict[str, Future[ahead.Figures]]:
    """Everything that this run's tests will ask for, under way."""
    asked = [item.callspec.params.get("run") for item in request.session.items if hasattr(item, "callspec")]
    return {run: pool().submit(ahead.figures, run) for run in ahead.RUNS if run in asked}


@recorded
@pytest.mark.parametrize("run", RUNS)
def test_resources(run: str, compiled: dict[str, Future[ahead.Figures]]) -> None:
    found, before = compiled[run].result(), RECORDED[run]
    assert found["shared"] <= ahead.SHARED[ahead.RUNS[run][1]]
    assert found["registers"] <= before["registers"] + 8
    assert {key: found[key] for key in ("wgmma", "mma")} == {key: before[key] for key in ("wgmma", "mma")}
    assert found["ahead"] >= before["ahead"]
    # wgmma that the assembler runs one after the other waits after each.
    risen = [key for key in ("spilled", "shared", "waits", "cut", "whole") if found[key] > before[key]]
    assert risen == []


@recorded
def test_loops_issue_no_more_than_they_are_meant_to() -> None:
    assert {run: RECORDED[run]["whole"] for run, most in GOALS.items() if RECORDED[run]["whole"] > most} == {}


@recorded
def test_hardly_anything_recorded_spills() -> None:
    assert [run for run, row in RECORDED.items() if row["spilled"] > SPILLED] == []
    assert [run for run in GOALS if RECORDED[run]["spilled"]] == []
    everyday = [run for run, (name, _) in ahead.RUNS.items() if name in ahead.EVERYDAY]
    assert [run for run in everyday if RECORDED[run]["spilled"]] == []


@recorded
def test_the_tables_say_how_much_memory_their_kernels_take() -> None:
    for run, (name, chip) in ahead.RUNS.items():
        config = ahead.CONFIGS[name]
        table = config.table or config.kernel
        if table in ahead.shapes.TABLES and run in RECORDED:
            row = ahead.shapes.row_of(table, config.problem, chip)
            assert row is not None
            assert RECORDED[run]["shared"] <= row[-1] * 1024, run


def test_the_list_covers_the_tables() -> None:
    """Every tile that a launch can choose is compiled by some entry, and the list stays short."""
    assert len(ahead.CONFIGS) <= 110
    chosen = {
        (config.table or config.kernel, chip, config.tile(chip))
        for config in ahead.CONFIGS.values()
        for chip in ahead.CHIPS
    }
    for kernel, table in ahead.shapes.TABLES.items():
        for (chip, _), rows in table.items():
            for _, _, light, heavy, _ in rows:
                assert (kernel, chip, light) in chosen, f"{kernel} sm_{chip} {light}"
                assert (kernel, chip, heavy) in chosen, f"{kernel} sm_{chip} {heavy}"


def test_the_everyday_list_covers_the_features() -> None:
    assert len(ahead.EVERYDAY) * len(ahead.EVERYDAY_CHIPS) <= 40
    configs = [ahead.CONFIGS[name] for name in ahead.EVERYDAY]
    problems = [config.problem for config in configs]
    assert {config.kernel for config in configs} == set(ahead.KERNELS)
    assert {p.dtype for p in problems} == {"float32", "float16", "bfloat16"}
    assert {64, 96, 128, 192, 576, 768} <= {p.dim_qk + p.dim_rope for p in problems}
    assert {p.bias for p in problems} == {"none", "matrix", "table", "slopes_sqrt"}
    assert {p.dropout for p in problems} == {"none", "bits", "philox"}
    for flag in ("softcap", "has_sink", "has_blocked", "dim_rope", "page_size", "kv_dtype"):
        assert {bool(getattr(p, flag)) for p in problems} == {False, True}, flag
    assert {p.empty_rows for p in problems} >= {"zero", "mean"}

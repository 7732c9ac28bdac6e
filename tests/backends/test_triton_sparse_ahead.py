"""The kernels of lists, of the indexer and of its loss compiled without a GPU: what each takes, and how it multiplies.

As test_triton_ahead.py does for the dense ones; `python tests/support/sparse_ahead.py` records anew.
"""

import pytest

triton = pytest.importorskip("triton")

from support import sparse_ahead as ahead
from support.triton_ahead import SHARED, recorded, worse

BY_AREA = {area: recorded(ahead.resources(area)) for area in ahead.AREAS}
RECORDED = {run: row for rows in BY_AREA.values() for run, row in rows.items()}
unrecorded = pytest.mark.skip(reason=f"not recorded of Triton {triton.__version__}")
EVERYDAY_CHIP = 90
STACKED = 4


def is_everyday(run: str) -> bool:
    _, name, chip = ahead.RUNS[run]
    return name in ahead.EVERYDAY and chip == EVERYDAY_CHIP


def marks(run: str) -> list[pytest.MarkDecorator]:
    return ([] if is_everyday(run) else [pytest.mark.slow]) + ([] if run in RECORDED else [unrecorded])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("run", [pytest.param(run, marks=marks(run)) for run in ahead.RUNS])
def test_resources(run: str) -> None:
    assert worse(ahead.figures(run), RECORDED[run], SHARED[ahead.RUNS[run][2]]) == {}


def test_every_run_is_recorded() -> None:
    areas = [area for area, rows in BY_AREA.items() if rows]  # of this Triton
    assert [run for run, (area, _, _) in ahead.RUNS.items() if area in areas and run not in RECORDED] == []


def test_what_spills_is_known() -> None:
    """Bytes on the stack are recorded, and rise no more; each run that keeps some says why."""
    assert {run: row["spilled"] for run, row in RECORDED.items() if row["spilled"] and run not in ahead.SPILLED} == {}
    stacked = {run: row["stacked"] for run, row in RECORDED.items() if row["stacked"] > STACKED}
    assert stacked == {"two sources pages sm_90": 7}  # ahead_sparse_forward.PAGES says why


def test_tall_tiles_multiply_by_wgmma_and_loads_are_in_flight() -> None:
    recorded = {run: RECORDED[run] for run in ahead.RUNS if run in RECORDED}
    rows = {run: ahead.compiled(run).rows or ahead.compiled(run).tile.BM for run in recorded}
    tall = [run for run in recorded if ahead.RUNS[run][2] == 90 and rows[run] >= 64]
    narrow = [
        run for run in tall if "fp32" not in str(ahead.compiled(run).types.get("q")) and not recorded[run]["wgmma"]
    ]
    assert [run for run in narrow if ahead.compiled(run).counted] == []
    assert [run for run, row in recorded.items() if row["ahead"] < ahead.compiled(run).ahead] == []

"""Compiles the kernels of sparse attention, of the indexer and of its loss for a GPU without having one.

`python tests/support/sparse_ahead.py [NAME...]` compiles all areas, or the named areas or entries, and writes the
figures of this version of Triton to a file for each area in resources/.
"""

import sys
from pathlib import Path

import triton

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from support import ahead_indexer, ahead_indexer_loss, ahead_sparse_backward, ahead_sparse_forward, ahead_windows
from support.ahead_run import Compiled
from support.triton_ahead import CHIPS, RESOURCES, Figures, of_types, record, recorded, taken, workers

AREAS = {
    "sparse_forward": ahead_sparse_forward,
    "sparse_backward": ahead_sparse_backward,
    "indexer": ahead_indexer,
    "indexer_loss": ahead_indexer_loss,
    "windows": ahead_windows,
}
RUNS = {
    f"{name} sm_{chip}": (area, name, chip)
    for area, module in AREAS.items()
    for name, config in module.CONFIGS.items()
    for chip in CHIPS
    if config(chip) is not None
}
EVERYDAY = tuple(name for module in AREAS.values() for name in module.EVERYDAY)
SPILLED = {run: reason for module in AREAS.values() for run, reason in module.SPILLED.items()}


def compiled(run: str) -> Compiled:
    """Returns the compilation of an entry of RUNS."""
    area, name, chip = RUNS[run]
    result = AREAS[area].CONFIGS[name](chip)
    assert result is not None
    return result


def figures(run: str) -> Figures:
    """Returns the figures of an entry of RUNS."""
    one = compiled(run)
    return taken(of_types(one.kernel, one.constants, one.types.get), one.tile, RUNS[run][2], one.counted)


def resources(area: str) -> Path:
    """Returns the file of an area's figures for this version of Triton."""
    return RESOURCES / f"{area}-{triton.__version__}.json"


def main() -> None:
    """Compiles all entries, or those of the given areas or names, and records their figures."""
    requested = sys.argv[1:] or list(AREAS)
    rows = {area: recorded(resources(area)) for area in AREAS}
    with workers() as pool:
        running = {
            run: pool.submit(figures, run)
            for run, (area, name, _) in RUNS.items()
            if area in requested or name in requested
        }
        for run, future in running.items():
            area = RUNS[run][0]
            rows[area][run] = future.result()
            print(f"{run:44} {rows[area][run]}", flush=True)  # noqa: T201 (a tool's report)
            record(resources(area), {run: rows[area][run] for run in RUNS if run in rows[area]})


if __name__ == "__main__":
    main()

"""Compiles the kernels for a GPU without having one, and reads figures of registers, memory and instructions.

    figures("forward 128 sm_90") -> {"registers": 255, "spilled": 0, "shared": 131072, "whole": 13.09, ...}

`python tests/support/triton_ahead.py [NAME...]` compiles all entries, or the named areas or entries, and writes the
figures of this version of Triton to a file for each area in resources/.

A kernel is compiled with the arguments of a launch that ahead_calls.py records. Binaries are read with the cuobjdump of
Triton's wheel.
"""

import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from support import ahead_dense, ahead_indexer, ahead_sparse, sass
from support.ahead_calls import Launched

Figures = dict[str, float]
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
RESOURCES = Path(__file__).parent / "resources"
# The kernels whose main loop is counted: in the dense area per score of a thread, in others per iteration.
DENSE = ("forward", "backward_query", "backward_key", "decode")
LOOPS = (
    *(*DENSE, "sparse_forward", "weigh_slots", "backward_rows", "backward_slots", "index_scores", "index_gradient"),
    *("warm_lse", "warm_target", "warm_difference", "warm_query", "warm_key", "target", "score"),
)
TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}
AREAS = {
    "dense": ahead_dense.CONFIGS,
    "sparse_forward": ahead_sparse.FORWARD,
    "sparse_backward": ahead_sparse.BACKWARD,
    "windows": ahead_sparse.POOLS,
    "indexer": ahead_indexer.INDEXER,
    "indexer_loss": ahead_indexer.LOSS,
}
CONFIGS = {name: config for configs in AREAS.values() for name, config in configs.items()}
CHIPS = (80, 86, 90)
SHARED = {80: 166912, 86: 101376, 90: 232448}  # bytes of shared memory of a program
OTHERS = {89: 86, 100: 90, 120: 86}  # chips that use another one's tiles (shapes.CHIPS)
RUNS = {
    f"{name} sm_{chip}": (area, name, chip)
    for area, configs in AREAS.items()
    for name, config in configs.items()
    for chip in CHIPS
    if config.has_tile(chip)
}


def launched(run: str) -> Launched:
    _, name, chip = RUNS[run]
    return CONFIGS[name].launched(chip)


def source(one: Launched, of: type[ASTSource] = ASTSource) -> ASTSource:
    """Returns the source of a kernel with the types of its arguments; pointers are aligned to 16 bytes."""
    signature: dict[str, str] = {}
    fixed: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for at, param in enumerate(one.kernel.params):
        value = one.arguments[param.name]
        if param.is_constexpr or value is None:
            signature[param.name], fixed[(at,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[param.name], attributes[(at,)] = "*" + TYPES[value.dtype], [["tt.divisibility", 16]]
        else:
            signature[param.name] = param.annotation_type
    return of(one.kernel, signature, fixed, attributes)


def figures(run: str) -> Figures:
    """Returns the figures of an entry of RUNS."""
    return figures_of(launched(run), RUNS[run][2])


def figures_of(one: Launched, chip: int) -> Figures:
    """Returns the figures of a kernel on a chip (80 for sm_80), including the kinds of its multiplications; cut, whole:
    instructions of an iteration of its main loop that takes every branch, and of one that skips all optional
    branches, as for tiles without a mask."""
    compiled = triton.compile(source(one), target=GPUTarget("cuda", chip, 32), options=one.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run([CUOBJDUMP, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        )
    registers, stack, local = (
        int(re.search(rf"{word}:(\d+)", usage).group(1))  # type: ignore[union-attr]
        for word in ("REG", "STACK", "LOCAL")
    )
    turns = sass.loops(code) if one.kernel.__name__ in LOOPS else []
    return {
        "registers": registers,
        "spilled": stack + local,
        "stacked": max((loop.stacked for loop in turns), default=0),
        "shared": compiled.metadata.shared,
        "wgmma": "HGMMA" in code,
        "mma": bool(re.search(r"\bHMMA\.", code)),
        "copies": len(re.findall(r"\bLDGSTS", code)) + len(re.findall(r"\bUTMALDG", code)),
        "waits": len(re.findall(r"WARPGROUP\.DEPBAR", code)),
        "ahead": ahead(compiled.asm["ttgir"]),
        "cut": issued(one, max((loop.most for loop in turns), default=0)),
        "whole": issued(one, min((loop.least for loop in turns), default=0)),
    }


def issued(one: Launched, instructions: int) -> float:
    """Returns the instructions of an iteration of the main loop: of a dense kernel per score of a thread; of decode, of
    all warps per 64 keys."""
    tile, name = one.tile, one.kernel.__name__
    if name == "decode":
        return instructions * tile.num_warps * 64 / tile.BN
    return round(instructions * 32 * tile.num_warps / (tile.BM * tile.BN), 2) if name in DENSE else instructions


def ahead(intermediate: str) -> int:
    """Returns the number of loads that a loop keeps in flight: groups of asynchronous copies, or further TMA tiles."""
    groups = [int(n) for n in re.findall(r"async_wait .*?num = (\d+)", intermediate)]
    copied = "async_tma_copy_global_to_local" in intermediate
    stages = [int(n) for n in re.findall(r"memdesc_index .*?memdesc<(\d+)x\d+x\d+x", intermediate)] if copied else []
    return max([*groups, *(n - 1 for n in stages)], default=0)


def resources(area: str) -> Path:
    """Returns the file of an area's figures for this version of Triton."""
    return RESOURCES / f"{'' if area == 'dense' else f'{area}-'}{triton.__version__}.json"


def recorded(area: str) -> dict[str, Figures]:
    """Returns the recorded figures of an area by run; {} if none are recorded for this version of Triton."""
    path = resources(area)
    table = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"columns": []}
    columns = table.pop("columns")
    return {
        f"{name} {chip}": dict(zip(columns, row, strict=True))
        for name, chips in table.items()
        for chip, row in chips.items()
    }


def record(area: str, rows: dict[str, Figures]) -> None:
    """Writes an area's figures: the names of the columns, then a line for each kernel with a row for each chip."""
    lines: dict[str, Any] = {"columns": list(next(iter(rows.values())))}
    for run in (run for run in RUNS if run in rows):
        name, _, chip = run.rpartition(" ")
        lines.setdefault(name, {})[chip] = list(rows[run].values())
    text = ",\n".join(f"{json.dumps(name)}: {json.dumps(line)}" for name, line in lines.items())
    resources(area).write_text(f"{{\n{text}\n}}\n", encoding="utf-8")


def worse(result: Figures, before: Figures, shared: int) -> dict[str, tuple[float, float]]:
    """Returns (current, previous) of the figures that became worse; shared: the chip's limit of shared memory.

    More waits mean that the assembler serialised wgmma, with a wait after each.
    """
    most = before | {"registers": before["registers"] + 8, "shared": min(before["shared"], shared)}
    risen = {key for key in most if key != "copies" and result[key] > most[key]} - {"ahead"}
    fallen = {key for key in ("ahead", "wgmma", "mma") if result[key] < before[key]}
    return {key: (result[key], before[key]) for key in risen | fallen}


def main() -> None:
    """Compiles all entries, or those of the named areas or names, and records their figures."""
    requested = sys.argv[1:] or list(AREAS)
    # Processes are spawned, because a fork of a process with threads may hang.
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        for area in AREAS:
            names = {run for run, (of, name, _) in RUNS.items() if of == area and {area, name} & {*requested}}
            running = {run: pool.submit(figures, run) for run in RUNS if run in names}
            rows = recorded(area)
            for run, future in running.items():
                rows[run] = future.result()
                print(f"{run:44} {rows[run]}", flush=True)  # noqa: T201 (a tool's report)
                record(area, rows)


if __name__ == "__main__":
    main()

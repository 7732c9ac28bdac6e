"""Compiles the kernels for a GPU without having one, and reads figures of registers, memory and instructions.

    figures("forward 128 sm_90") -> {"registers": 255, "spilled": 0, "shared": 131072, "whole": 13.09, ...}

`python tests/support/triton_ahead.py [NAME...]` compiles all entries, or the named ones, and writes the figures of this
version of Triton to resources/.

The constants are those of a launch (launch_dense.py). Properties of arguments that a launch detects (absent ones,
pointers aligned to 16 bytes) are specified here. Binaries are read with the cuobjdump of Triton's wheel.
"""

import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from support import sass

from fusion_attention.backends.triton.common import launching, shapes
from fusion_attention.backends.triton.common.shapes import Tile
from fusion_attention.backends.triton.decode import kernel as decode
from fusion_attention.backends.triton.decode import launch as launch_decode
from fusion_attention.backends.triton.dense import backward, forward, recompute
from fusion_attention.backends.triton.dense import launch as launch_dense
from fusion_attention.ir.problem import Problem

Figures = dict[str, float]
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
LOOPS = ("forward", "query", "key", "decode")  # the kernels whose main loop is counted
TYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "int8": "i8"}
KERNELS = {
    "forward": forward.forward,
    "prepare": backward.prepare,
    "query": backward.backward_query,
    "key": backward.backward_key,
    "decode": decode.decode,
    "join": decode.join,
    "recompute_out": recompute.recompute_out,
    "recompute_query": recompute.recompute_query,
    "recompute_key": recompute.recompute_key,
}


def constexprs_of(kernel: str, problem: Problem, tile: Tile, align: int = 0) -> launching.Constants:
    """Returns a kernel's constexpr arguments; align: elements to which rows are aligned; 0: 16 bytes."""
    align = align or shapes.widest(problem)
    if kernel == "forward":
        return launch_dense.forward_constants(problem, tile, align)
    if kernel in ("decode", "join"):
        both = launch_decode.decode_constants(problem, tile, align)
        return dict(zip(("decode", "join"), both, strict=True))[kernel]
    if kernel == "recompute_out":
        return launch_dense.recompute_out_constants(problem, align)
    if kernel in shapes.RECOMPUTE:
        return launch_dense.recompute_constants(kernel, problem, align)
    prepare, query, key = launch_dense.backward_constants(problem, tile, align)
    return {"prepare": prepare, "query": query, "key": key}[kernel]


def pointer(kernel: str, name: str, p: Problem) -> str | None:
    """Returns the type of a pointer argument, or None if the problem does not have it."""
    stored = p.bias in ("matrix", "table")
    lacking = {
        **dict.fromkeys(("q_rope", "k_rope", "dq_rope", "dk_rope"), not p.dim_rope),
        **dict.fromkeys(("bias", "dbias"), not stored),
        "slopes": p.bias not in ("slopes", "slopes_sqrt"),
        "blocked": not p.has_blocked,
        "bits": p.dropout != "bits",
        "sink": not p.has_sink,
        "dlse": True,
        "partials": kernel == "prepare" and not p.has_sink,
        "large": p.dtype != "float16",
        "table": not p.page_size,
        **dict.fromkeys(("scale_k", "offset_k"), p.dequant_k == "none"),
        **dict.fromkeys(("scale_v", "offset_v"), p.dequant_v == "none"),
    }
    if lacking.get(name, False):
        return None
    rows = ("q", "k", "v", "out", "dout", "dq", "dk", "dv", "q_rope", "k_rope", "dq_rope", "dk_rope", "bias")
    types = {"blocked": "u8", "bits": "u8", "strides": "i64", "lengths": "i64"}
    types |= dict.fromkeys(("tiles", "table", "large", "work"), "i32")
    types |= dict.fromkeys(rows, TYPES[p.dtype])
    if p.kv_dtype:
        types |= dict.fromkeys(("k", "v"), TYPES[p.kv_dtype])
    return "*" + types.get(name, "fp32")


def source(kernel: str, problem: Problem, constants: launching.Constants) -> ASTSource:
    """Returns a kernel's source with the types of its arguments."""
    return of_types(KERNELS[kernel], constants, lambda name: pointer(kernel, name, problem))


def of_types(function: Any, constants: launching.Constants, typed: Callable[[str], str | None]) -> ASTSource:
    """Returns a kernel's source; typed: returns the type of an argument without annotation, or None if absent."""
    signature: dict[str, str] = {}
    fixed: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for at, (name, param) in enumerate(zip(function.arg_names, function.params, strict=True)):
        kind = None if name in constants else param.annotation_type or typed(name)
        if kind is None:
            signature[name], fixed[(at,)] = "constexpr", constants.get(name)
        else:
            signature[name] = kind
            if kind.startswith("*"):
                attributes[(at,)] = [["tt.divisibility", 16]]
    return ASTSource(fn=function, signature=signature, constexprs=fixed, attrs=attributes)


def measure(kernel: str, problem: Problem, tile: Tile, chip: int, align: int = 0) -> Figures:
    """Returns a kernel's figures on a chip (80 for sm_80), including the kinds of its multiplications."""
    result = taken(source(kernel, problem, constexprs_of(kernel, problem, tile, align)), tile, chip, kernel in LOOPS)
    return result | {way: issued(kernel, tile, int(result[way])) for way in ("cut", "whole")}


def taken(given: ASTSource, tile: Tile, chip: int, counted: bool) -> Figures:
    """Returns the figures of a source; cut, whole: instructions of an iteration of its main loop, if counted."""
    compiled = triton.compile(
        given, target=GPUTarget("cuda", chip, 32), options={"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    )
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
    turns = sass.loops(code) if counted else []
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
        "cut": max((loop.most for loop in turns), default=0),
        "whole": min((loop.least for loop in turns), default=0),
    }


def issued(kernel: str, tile: Tile, instructions: int) -> float:
    """Returns the instructions of an iteration of the main loop, per score of a thread; decode: of all warps, per 64
    keys.

    cut: an iteration that takes every branch; whole: one that skips all optional branches, as for tiles without a mask.
    """
    if not instructions:  # the kernel's loop is not counted
        return 0.0
    if kernel == "decode":
        return instructions * tile.num_warps * 64 / tile.BN
    return round(instructions * 32 * tile.num_warps / (tile.BM * tile.BN), 2)


def ahead(intermediate: str) -> int:
    """Returns the number of loads that a loop keeps in flight: groups of asynchronous copies, or further TMA tiles."""
    groups = [int(n) for n in re.findall(r"async_wait .*?num = (\d+)", intermediate)]
    copied = "async_tma_copy_global_to_local" in intermediate
    stages = [int(n) for n in re.findall(r"memdesc_index .*?memdesc<(\d+)x\d+x\d+x", intermediate)] if copied else []
    return max([*groups, *(n - 1 for n in stages)], default=0)


# ---------------------------------------------------------------------------------------------------------- the list


@dataclass(frozen=True)
class Config:
    """A kernel for a problem; align: as in constexprs_of(); rows: BM of decode instead of its table's; table: table of
    the tile instead of the kernel's own."""

    kernel: str
    problem: Problem
    align: int = 0
    rows: int = 0
    table: str = ""

    def tile(self, chip: int) -> Tile | None:
        """Returns the tile that a launch selects; None if the chip's table has none."""
        if self.kernel in shapes.RECOMPUTE:
            return shapes.recompute_tile(self.kernel, self.problem)
        if self.kernel == "join":
            return launch_decode.JOIN
        kernel = self.table or {"prepare": "query"}.get(self.kernel, self.kernel)
        tile = shapes.tile_of(kernel, self.problem, chip, self.align or shapes.widest(self.problem))
        return tile._replace(BM=self.rows) if self.rows and tile is not None else tile


def problem(dim: int, dim_v: int = 0, **more: Any) -> Problem:
    given = {"dtype": "bfloat16", "scale": 0.1, "heads_q": 16, "heads_kv": 4} | more
    return Problem(dim_qk=dim, dim_v=dim_v or dim, **given)


LIGHT = {"bias": "slopes_sqrt", "has_sink": True}
DRAWN = {"bias": "matrix", "dropout": "philox", "keep_prob": 0.9}
READ = {"bias": "table", "has_blocked": True, "dropout": "bits", "keep_prob": 0.9, "has_sink": True}
SIZES = {
    "64": {"dim": 64},
    "128": {"dim": 128},
    "192": {"dim": 128, "dim_rope": 64},
    "256": {"dim": 256},
    "576": {"dim": 512, "dim_rope": 64},
}
MEAN, MEAN_IN_BAND = {"empty_rows": "mean"}, {"empty_rows": "mean_in_band"}
FLOAT32 = {"dtype": "float32"}
PAGES = {"page_size": 64}
PAGED_READ = {"bias": "matrix", "has_blocked": True}
LATENT = {"dim_rope": 64, "shares_kv": True}
INT8 = {"kv_dtype": "int8", "dequant_k": "channel", "dequant_v": "token"}


def configs() -> dict[str, Config]:
    """Returns the entries by name: every kernel with every row of its table, without and with features."""
    results: dict[str, Config] = {}
    for kernel in ("forward", "query", "key"):
        for name, size in SIZES.items():
            results[f"{kernel} {name}"] = Config(kernel, problem(**size, **LIGHT))
            results[f"{kernel} {name} read"] = Config(kernel, problem(**size, **READ, **MEAN))
        results[f"{kernel} 128 plain"] = Config(kernel, problem(128))
        results[f"{kernel} 128 capped"] = Config(kernel, problem(128, softcap=50.0))
        results[f"{kernel} 128 drawn"] = Config(kernel, problem(128, dtype="float16", **DRAWN))
        results[f"{kernel} 768"] = Config(kernel, problem(768, **LIGHT))
        results[f"{kernel} 768 read"] = Config(kernel, problem(768, **READ, **MEAN_IN_BAND))
        results[f"{kernel} 128 odd strides"] = Config(kernel, problem(128, **LIGHT), align=1)
        results[f"{kernel} 128 even strides"] = Config(kernel, problem(128, **LIGHT), align=2)
        results[f"{kernel} float32"] = Config(kernel, problem(128, **FLOAT32, **LIGHT))
        results[f"{kernel} float32 read"] = Config(kernel, problem(128, **FLOAT32, **READ, **MEAN))
    for name in ("64", "128", "192", "256"):  # one value is read for every pair of row and key
        results[f"forward {name} blocked"] = Config("forward", problem(**SIZES[name], has_blocked=True))
    # Scores that are only a product have different tiles.
    results["forward 64 plain"] = Config("forward", problem(64))
    results["query 64 plain"] = Config("query", problem(64))
    results["query 192 plain"] = Config("query", problem(128, dim_rope=64))
    for name in ("64", "192", "256"):
        results[f"key {name} plain"] = Config("key", problem(**SIZES[name]))
    results["key 128 float16"] = Config("key", problem(128, dtype="float16"))
    results["key 128 mean"] = Config("key", problem(128, **MEAN))
    results["forward 128 mean"] = Config("forward", problem(128, **LIGHT, **MEAN_IN_BAND))
    # Combinations that no entry above has: no group, a softcap or means with the largest tiles.
    results["key 128 ungrouped"] = Config("key", problem(128, heads_kv=16))
    results["key 192 mean"] = Config("key", problem(**SIZES["192"], **LIGHT, **MEAN))
    results["forward 192 capped"] = Config("forward", problem(**SIZES["192"], softcap=50.0))
    results["forward 256 mean"] = Config("forward", problem(256, **LIGHT, **MEAN_IN_BAND))
    results["forward 96"] = Config("forward", problem(96, dtype="float16"))
    results["prepare 128"] = Config("prepare", problem(128, has_sink=True))
    results |= of_caches()
    for kernel in shapes.RECOMPUTE:
        results[f"{kernel} 128"] = Config(kernel, problem(128, softcap=50.0, **LIGHT))
        results[f"{kernel} 768 read"] = Config(kernel, problem(768, **READ))
        results[f"{kernel} 576 drawn"] = Config(kernel, problem(512, dim_rope=64, dtype="float16", **DRAWN))
    results["recompute_out 576 int8"] = Config("recompute_out", problem(512, dim_rope=64, **PAGES, **INT8))
    results["join 128"] = Config("join", problem(128, **PAGES, has_sink=True))
    return results


def of_caches() -> dict[str, Config]:
    """Returns the entries of decode, prefill and latents."""
    results: dict[str, Config] = {}
    results["decode 128"] = Config("decode", problem(128, **PAGES))
    results["decode 128 16 rows"] = Config("decode", problem(128, **PAGES), rows=16)
    results["decode 128 16 rows int8"] = Config("decode", problem(128, **PAGES, **INT8), rows=16)
    results["decode 128 capped"] = Config("decode", problem(128, **PAGES, softcap=50.0))
    results["decode 128 slopes"] = Config("decode", problem(128, **PAGES, **LIGHT))
    results["decode 128 int8"] = Config("decode", problem(128, **PAGES, **INT8))
    results["decode 128 read"] = Config("decode", problem(128, **PAGES, bias="matrix", has_blocked=True))
    results["decode 256"] = Config("decode", problem(256, **PAGES))
    for name, size in (("64", {"dim": 64}), ("128", {"dim": 128}), ("192", SIZES["192"]), ("256", {"dim": 256})):
        results[f"prefill {name}"] = Config("decode", problem(**size, **PAGES, **LIGHT), table="prefill")
        results[f"prefill {name} read"] = Config("decode", problem(**size, **PAGES, **PAGED_READ), table="prefill")
    results["prefill 128 int8"] = Config("decode", problem(128, **PAGES, **INT8), table="prefill int8")
    results["prefill 128 int8 read"] = Config(
        "decode", problem(128, **PAGES, **INT8, **PAGED_READ), table="prefill int8"
    )
    results["latent"] = Config("decode", problem(512, **PAGES, **LATENT), table="latent")
    results["latent read"] = Config("decode", problem(512, **PAGES, **LATENT, **PAGED_READ), table="latent")
    results["decode 576"] = Config("decode", problem(512, dim_rope=64, **PAGES))
    results["decode 576 int8"] = Config("decode", problem(512, dim_rope=64, **PAGES, **INT8))
    results["decode 768"] = Config("decode", problem(768, **PAGES))
    results["decode 768 int8"] = Config("decode", problem(768, **PAGES, **INT8))
    results["decode 576 read"] = Config("decode", problem(512, dim_rope=64, **PAGES, bias="matrix", has_blocked=True))
    results["decode 768 read"] = Config("decode", problem(768, **PAGES, bias="matrix", has_blocked=True))
    results["decode float32"] = Config("decode", problem(128, **FLOAT32, **PAGES, bias="matrix", has_blocked=True))
    return results


CONFIGS = configs()
EVERYDAY = (
    *("forward 128 plain", "forward 128 capped", "forward 128 drawn", "forward 128 read", "forward 96"),
    "forward 192",
    *("query 128 plain", "query 64 read", "query float32", "key 128 plain", "key 128 drawn", "key 768", "prepare 128"),
    *("decode 128", "decode 576", "decode 128 16 rows int8", "join 128"),
    *("recompute_out 128", "recompute_query 128", "recompute_key 768 read"),
)
OLDER = (
    "forward 128 plain",
    "query 64 read",
    "key 128 drawn",
    "decode 128 16 rows int8",
    "recompute_out 128",
)  # on sm_80 too
CHIPS = (80, 86, 90)
SHARED = {80: 166912, 86: 101376, 90: 232448}  # bytes of shared memory of a program
OTHERS = {89: 86, 100: 90, 120: 86}  # chips that use another one's tiles (shapes.CHIPS)
RUNS = {
    f"{name} sm_{chip}": (name, chip)
    for name, config in CONFIGS.items()
    for chip in CHIPS
    if config.tile(chip) is not None
}
RESOURCES = Path(__file__).parent / "resources"
OF_DENSE = RESOURCES / f"{triton.__version__}.json"


def figures(run: str) -> Figures:
    """Returns measure() of an entry of RUNS."""
    name, chip = RUNS[run]
    config = CONFIGS[name]
    tile = config.tile(chip)
    assert tile is not None
    return measure(config.kernel, config.problem, tile, chip, config.align)


def recorded(path: Path) -> dict[str, Figures]:
    """Returns the figures in a file by run; {} if the file does not exist."""
    table = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"columns": []}
    columns = table.pop("columns")
    return {
        f"{name} {chip}": dict(zip(columns, row, strict=True))
        for name, chips in table.items()
        for chip, row in chips.items()
    }


def record(path: Path, rows: Mapping[str, Figures]) -> None:
    """Writes figures to a file: the names of the columns, then a line for each kernel with a row for each chip."""
    lines: dict[str, Any] = {"columns": list(next(iter(rows.values())))}
    for run, row in rows.items():
        name, _, chip = run.rpartition(" ")
        lines.setdefault(name, {})[chip] = list(row.values())
    text = ",\n".join(f"{json.dumps(name)}: {json.dumps(line)}" for name, line in lines.items())
    path.write_text(f"{{\n{text}\n}}\n", encoding="utf-8")


def worse(result: Figures, before: Figures, shared: int) -> dict[str, tuple[float, float]]:
    """Returns (current, previous) of the figures that became worse; shared: the chip's limit of shared memory.

    More waits mean that the assembler serialised wgmma, with a wait after each.
    """
    most = before | {"registers": before["registers"] + 8, "shared": min(before["shared"], shared)}
    risen = {key for key in most if key != "copies" and result[key] > most[key]} - {"ahead"}
    fallen = {key for key in ("ahead", "wgmma", "mma") if result[key] < before[key]}
    return {key: (result[key], before[key]) for key in risen | fallen}


def workers() -> ProcessPoolExecutor:
    """Returns processes that compile; they are spawned, because a fork of a process with threads may hang."""
    return ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn"))


def main() -> None:
    """Compiles all entries, or the named ones, and records their figures."""
    requested = sys.argv[1:] or list(CONFIGS)
    rows = recorded(OF_DENSE)
    with workers() as pool:
        running = {run: pool.submit(figures, run) for run, (name, _) in RUNS.items() if name in requested}
        for run, future in running.items():
            rows[run] = future.result()
            print(f"{run:34} {rows[run]}", flush=True)  # noqa: T201 (a tool's report)
            record(OF_DENSE, {run: rows[run] for run in RUNS if run in rows})


if __name__ == "__main__":
    main()

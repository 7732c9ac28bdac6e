"""Measures the errors of this library and of other programs, relative to expected errors, for docs/accuracy.md.

    .venv/bin/python -m benchmarks.accuracy --output docs/figures/accuracy.json    # minutes; then: make docs

Every program computes the same calls. fusion_attention.judging provides correct results and the expected error of each
number; z is the root mean square of error / expected error, over all numbers and in the worst tile of 32 rows. Eager
programs and SDPA's gradients, which accumulate in the dtype, are compared with the errors of such programs; all others
with those of kernels that accumulate in float32.
"""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from benchmarks import accuracy_programs as programs
from benchmarks.accuracy_calls import CAUSAL, FAMILIES, backward, forward
from fusion_attention import _native
from fusion_attention.backends import cpu
from fusion_attention.bench.report import Report
from fusion_attention.contract import BackendError
from fusion_attention.ir.call import Lowered
from fusion_attention.judging import indexer, measure
from fusion_attention.judging.chi_square_limits import Errors
from fusion_attention.judging.editable_call import Edit
from fusion_attention.judging.expected_error import KERNEL, PROGRAM, Grade
from fusion_attention.judging.outputs import setting_of, units
from fusion_attention.torch_ops.eager import run

Tensor = torch.Tensor
Results = dict[str, Tensor]
DTYPES = ("bfloat16", "float16", "float32")
# Instruction sets that run here and have their own dense kernels; some only replace another set's decode kernels.
CORE = _native.cpu_features()
VARIANTS = [name for name in CORE["runnable"] if "dense" in CORE["parts"][name]]
LENGTH, SHORT, LONG = 256, 64, 2048  # keys of most calls, of the Triton kernels' calls, and of the figure
BINS, LOW, HIGH = 16, 0.1, 1000.0  # bins for each factor of ten; the drawn range


FAULTS = ("the last 64 keys never read", "one token of dv not written", "10 % more on 64 tokens of dk")


@dataclass(frozen=True)
class Row:
    """The z of each output of one call by one program, overall and for the worst tile; call: index in family."""

    family: str
    call: int
    dtype: str
    program: str
    z: dict[str, float]
    tile: dict[str, float]


def core(call: Lowered, outputs: Mapping[str, Tensor], variant: str) -> None:
    """Computes a call with one instruction set of the native core."""
    filled = call.fill(outputs)
    if filled.first is not None:
        core(*filled.first, variant)
    with torch.no_grad():
        filled.begin()
        plan = cpu.schedule(call.problem, call.extents, call.op_kind, variant)
        getattr(cpu, call.op_kind)(call.problem, call.extents, plan, *filled.operands)
        filled.finish()


def ours(call: Lowered, triton: bool) -> Iterator[tuple[str, Results]]:
    """Yields (program, results) for each of this library's implementations."""
    if triton:
        with suppress(BackendError):  # the back end does not support some calls
            yield "Triton", run(call, "triton")
        return
    for variant in VARIANTS:
        outputs = call.results()
        core(call, outputs, variant)
        yield f"core {variant}", outputs
    yield "golden", run(call, "golden")


def every(call: Lowered, triton: bool = False) -> Iterator[tuple[str, str, Errors]]:
    """Yields (program, output, errors) for every program that supports a call."""
    results: dict[str, Results] = dict(ours(call, triton))
    if not triton:
        results |= {who: program_results for who in programs.NAMES if (program_results := programs.results(who, call))}
    low = ("eager", "SDPA") if call.op_kind.endswith("backward") else ("eager",)
    rounded = {who: results.pop(who) for who in low if who in results}
    for grade, theirs in ((KERNEL, results), (PROGRAM, rounded)):
        if theirs:
            yield from measured(call, theirs, grade)


def measured(call: Any, by_program: Mapping[str, Results], grade: Grade) -> Iterator[tuple[str, str, Errors]]:
    """Yields (program, output, errors) for the outputs that each program computes."""
    output_names = {name for results in by_program.values() for name in results}
    given = {name: t for name, t in call.results().items() if name in output_names}
    if indexer.serves(call):
        result = indexer.Indexed(indexer.setting_of(call), call, given).measured(None, grade, by_program)
    else:
        setting, outputs = setting_of(call, given)
        outputs_of = {who: setting_of(call, results)[1] for who, results in by_program.items()}
        result = measure.measured(
            setting, outputs, units(setting, outputs), grade=grade, complete=True, beside=outputs_of
        )
    for who, theirs in result.beside.items():
        yield from ((who, name, tally.errors) for name, tally in theirs.items() if tally.count)


def rows(
    length: int, triton: bool = False, families: tuple[str, ...] = tuple(FAMILIES), dtypes: tuple[str, ...] = DTYPES
) -> Iterator[Row]:
    """Measures every family, dtype and program."""
    for family in families:
        for dtype in dtypes:
            for place, make in enumerate(FAMILIES[family]):
                measured_rows: dict[str, Row] = {}
                for who, name, errors in every(make(dtype, length), triton):
                    row = measured_rows.setdefault(who, Row(family, place, dtype, who, {}, {}))
                    row.z[name], row.tile[name] = round(errors.z, 4), round(errors.z_tile, 4)
                yield from measured_rows.values()


def of_triton(length: int) -> list[Row]:
    """Measures the Triton kernels in a separate process, where TRITON_INTERPRET is set before Triton is imported."""
    command = [sys.executable, "-m", "benchmarks.accuracy", "--triton", "--length", str(length)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [Row(**row) for row in json.loads(done.stdout)]


def worst(results: list[Row]) -> dict[str, dict[str, list[float | None]]]:
    """Returns the largest z of a tile over all calls, outputs and instruction sets, by family, program and dtype."""
    tiles: dict[str, dict[str, list[float | None]]] = {}
    for row in results:
        of_dtypes = tiles.setdefault(row.family, {}).setdefault(row.program.split()[0], [None] * len(DTYPES))
        place = DTYPES.index(row.dtype)
        of_dtypes[place] = max(of_dtypes[place] or 0.0, *row.tile.values())
    return tiles


# ---------------------------------------------------------------------------------------------------------- the figure


def right_and_wrong(length: int) -> dict[str, Any]:
    """Returns histograms of the tiles' z in bfloat16, for correct results and for each error of FAULTS."""
    sizes = {**CAUSAL, "heads_q": 2, "heads_kv": 1}
    call, gradients = forward("bfloat16", length, **sizes), backward("bfloat16", length, **sizes)
    attended, result = run(call, "cpu"), run(gradients, "cpu")
    unwritten, larger = result["dv"].clone(), result["dk"].clone()
    unwritten[:, length // 2] = 0
    larger[:, length // 2 : length // 2 + 64] *= 1.1
    outs = {who: programs.results(who, call) for who in ("SDPA", "tiles")}
    outs |= {"core": {"out": attended["out"]}, FAULTS[0]: programs.results("tiles", call, blind(length))}
    grads = {"core": result, "tiles": programs.results("tiles", gradients)}
    grads |= {FAULTS[1]: {"dv": unwritten}, FAULTS[2]: {"dk": larger}}
    tiles: dict[str, list[float]] = {}
    wrong, largest = {}, 0.0
    for who, _, errors in (*measured(call, outs, KERNEL), *measured(gradients, grads, KERNEL)):
        of_tiles = (rows.unflatten(-1, (-1, 32)).mean(-1).sqrt() for rows in errors.of_rows)
        tiles.setdefault(who, []).extend(float(z) for of_sequence in of_tiles for z in of_sequence.flatten())
        if who in FAULTS:
            most = next(look.limit for _, look in errors.worst() if look.kind == "tile")
            wrong[who] = {"z": errors.z, "tile": errors.z_tile, "limit": most}
        else:
            largest = max(largest, errors.z_tile)
    counts = {who: _counts(each) for who, each in tiles.items()}
    return {"length": length, "bins": BINS, "low": LOW, "wrong": wrong, "largest": largest, "counts": counts}


def blind(length: int) -> Edit:
    """Returns an edit that hides the last 64 keys, except from rows that would then have no key."""
    return lambda x: replace(x, visible=x.visible & ((x.positions < length - 64) | (x.positions == 0)))


def _counts(tiles: list[float]) -> list[int]:
    """Counts the values in each bin of a logarithmic axis."""
    decades = torch.log10(torch.tensor([HIGH / LOW])).item()
    bins = ((torch.tensor(tiles) / LOW).log10() * BINS).floor().clamp(0, BINS * decades - 1).long()
    return torch.bincount(bins, minlength=round(BINS * decades)).tolist()


# ---------------------------------------------------------------------------------------------------------- the command


COLUMNS = {"dtype": -9, "program": -10, "output": -20, "z": 7, "worst tile": 10}


def main(
    length: Annotated[int, typer.Option(help="Number of keys of most calls.")] = LENGTH,
    short: Annotated[int, typer.Option(help="Number of keys of the Triton kernels' calls.")] = SHORT,
    long: Annotated[int, typer.Option(help="Number of keys of the figure's calls.")] = LONG,
    output: Annotated[Path | None, typer.Option(help="Write all figures as JSON.")] = None,
    triton: Annotated[bool, typer.Option(help="Print only Triton's figures; needs TRITON_INTERPRET=1.")] = False,
) -> None:
    """Measures every family, dtype and program."""
    warnings.simplefilter("ignore")
    if triton:
        from tests.support import interpreter  # Triton's interpreter has errors in bfloat16

        interpreter.repair()
        print(json.dumps([asdict(row) for row in rows(length, triton=True)]))
        return
    console = Console(width=None if sys.stdout.isatty() else 150)
    report = Report(console, "Error / expected error, over all numbers and in the worst tile of 32 rows", COLUMNS)
    results = [*rows(length), *of_triton(short)]
    for row in results:
        for name, z in row.z.items():
            report.add(row.dtype, row.program, name, f"{z:.3f}", f"{row.tile[name]:.3f}", section=row.family)
    if output:
        facts = {"torch": torch.__version__, "variants": VARIANTS, "length": length, "short": short}
        facts |= {"picture": right_and_wrong(long), "worst": worst(results)}
        output.write_text(json.dumps(facts).replace("}, ", "},\n") + "\n", encoding="utf-8")  # a family per line


if __name__ == "__main__":
    typer.run(main)

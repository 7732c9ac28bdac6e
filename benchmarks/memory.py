"""Measures the workspace of a long sequence's forward and backward as the growth of a process's peak memory.

python -m benchmarks.memory bf16 65536      # prints one row as JSON
"""

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

import fusion_attention as fa
from benchmarks.dense import DTYPES, rows
from fusion_attention.backends import cpu
from fusion_attention.bench.report import Report
from fusion_attention.ir.mask import INFINITE
from fusion_attention.ir.problem import Extents, Problem

DIM = 64
STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Memory:
    """The memory of one head of one causal sequence, forward and backward; megabytes of 1e6 bytes."""

    dtype: str  # of q, k and v
    length: int
    operands_mb: float  # q, k, v, dout, the output with its statistics, and the gradients
    extra_mb: float  # growth of the process beyond them at its peak
    # forward_mb, backward_mb: workspaces of the plans.
    forward_mb: float
    backward_mb: float


def resident(field: str) -> int:
    """Returns bytes of this process's resident memory; field: VmRSS (current) or VmHWM (peak)."""
    line = next(line for line in STATUS.read_text(encoding="ascii").splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def workspaces(dtype: torch.dtype, length: int) -> tuple[int, int]:
    """Returns the workspace bytes of the forward and backward plans."""
    n = np.array([length])
    extents = Extents(n, n, n * 0 - INFINITE, n * 0 + 1, n * 0, n * 0)
    problem = Problem(1, 1, DIM, DIM, dtype=str(dtype).removeprefix("torch."))
    forward, backward = (cpu.workspace_bytes(problem, extents, f"attention_{way}") for way in ("forward", "backward"))
    return forward, backward


def measure_here(name: str, length: int) -> Memory:
    """Runs the call in this process and returns its memory; the process must not have run a large call before."""
    dtype = DTYPES[name]

    def run(size: int) -> tuple[int, int]:
        inputs = rows(dtype, (1, 1), size, DIM, grad=True)
        dout = torch.randn_like(inputs[0])
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        out = fa.attention(*inputs, layout="BNSD", band=fa.Band.causal())
        grads = torch.autograd.grad(out, inputs, dout)
        statistics = 2 * 4 * size
        results = sum(t.nbytes for t in (out, *grads)) + statistics
        return results + sum(t.nbytes for t in (*inputs, dout)), resident("VmHWM") - before - results

    run(64)  # fills caches that every call needs
    operands, extra = run(length)
    return Memory(name, length, *(round(n / 1e6, 1) for n in (operands, extra, *workspaces(dtype, length))))


COLUMNS = ("dtype", "length", "inputs, outputs, gradients", "beyond them", "workspace forward", "backward")


def show(rows: Iterable[Memory], console: Console) -> list[Memory]:
    """Measures and prints every row and returns them."""
    title = "One head, D 64, causal, forward and backward; MB of resident memory"
    report, result = Report(console, title, {name: max(len(name), 7) for name in COLUMNS}), []
    for m in rows:
        figures = (m.operands_mb, m.extra_mb, m.forward_mb, m.backward_mb)
        report.add(m.dtype, str(m.length), *(f"{n:.1f}" for n in figures))
        result.append(m)
    return result


def measured(length: int, names: Iterable[str] = DTYPES) -> Iterator[Memory]:
    """Yields a row for every dtype."""
    for name in names:
        command = [sys.executable, "-m", "benchmarks.memory", name, str(length)]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        yield Memory(**json.loads(run.stdout))


if __name__ == "__main__":
    print(json.dumps(asdict(measure_here(sys.argv[1], int(sys.argv[2])))))

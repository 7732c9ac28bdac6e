"""Times the C API: process start, the two phases of a call, and its share of the time of a large problem.

benchmarks/capi_calls.cpp is the program. Most times are CPU time of one thread, which other processes affect little.
"""

import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.figures_with_goals import Figure
from benchmarks.schedule import compiler
from fusion_attention import acl, aclnn
from fusion_attention.capi import environment

TITLE = "The C API; medians, on one thread"
SOURCE = Path(__file__).with_name("capi_calls.cpp")
ONE = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


def build(folder: Path) -> Path:
    """Compiles and links the C++ program as a user of CANN would.

    Raises:
        FileNotFoundError: there is no C++ compiler.
    """
    result = compiler()
    if result is None:
        raise FileNotFoundError("no C++ compiler for the benchmark of the C API: install g++, or set CXX to a compiler")
    program = folder / "calls"
    flags = ["-std=c++17", "-O2", *shlex.split(environment.cflags())]
    subprocess.run([result, *flags, str(SOURCE), "-o", str(program), *shlex.split(environment.libs())], check=True)
    return program


def seconds(command: Sequence[str]) -> tuple[float, float]:
    """Returns (wall, CPU) seconds of a process from start to end."""
    began, before = time.perf_counter(), os.times()
    subprocess.run(command, check=True, env=ONE, stdout=subprocess.DEVNULL)
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return time.perf_counter() - began, used


def figures_of(program: Path, *words: str) -> list[list[float]]:
    """Runs the program and returns the numbers of each printed line."""
    run = subprocess.run([str(program), *words], check=True, env=ONE, capture_output=True, text=True)
    return [[float(word) for word in line.split()] for line in run.stdout.splitlines()]


def in_python(tokens: int, turns: int) -> tuple[float, float]:
    """Returns microseconds of the same call on one thread in Python: phase 2, and the computation alone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    acl.init()
    acl.rt.set_device(0)
    rows, statistic = [torch.zeros(1, tokens, 2, 64) for _ in range(4)], torch.zeros(1, 2, tokens, 8)
    q, k, v, out = map(acl.Tensor.of, rows)
    top, total = acl.Tensor.of(statistic), acl.Tensor.of(statistic.clone())
    first = aclnn.aclnnFlashAttentionScoreGetWorkspaceSize
    ret, size, executor = first(q, k, v, *[None] * 5, 0.125, 1.0, 65536, 65536, 2, "BSND", 0, 0, top, total, None, out)
    assert ret == 0, acl.get_recent_err_msg()
    acl.set_acl_op_executor_repeatable(executor)
    workspace = acl.rt.malloc(size)[0] if size else None
    count = 1 if tokens > 256 else 200
    phases, runs = [], []
    for turn in range(turns + 1):
        for result, work in (
            (phases, lambda: aclnn.aclnnFlashAttentionScore(workspace, size, executor, None)),
            (runs, executor.job.run),
        ):
            began = time.thread_time()
            for _ in range(count):
                work()
            if turn:
                result.append(1e6 * (time.thread_time() - began) / count)
    acl.finalize()
    torch.set_num_threads(threads)
    return statistics.median(phases), statistics.median(runs)


def figures(quick: bool, turns: int) -> list[Figure]:
    """Returns medians of all times; pairs are measured in alternation."""
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder))
        start = [figures_of(program, "start")[0][0] for _ in range(turns)]
        ours, torchs = [], []
        for _ in range(turns):
            ours.append(seconds([str(program), "16", "0"]))
            torchs.append(seconds([sys.executable, "-c", "import torch"]))
        fresh, repeated, second = map(statistics.median, zip(*figures_of(program, "16", str(turns)), strict=True))
        _, computed = in_python(16, turns)
        large = 512 if quick else 2048
        in_c = statistics.median(row[2] for row in figures_of(program, str(large), str(turns)))
        beside, _ = in_python(large, turns)
    wall, used = ([statistics.median(pair[i] for pair in side) for side in (ours, torchs)] for i in (0, 1))
    return [
        Figure("aclInit to aclrtMalloc", "s", statistics.median(start) / 1e6, 0.3),
        Figure("smallest program, CPU time", "s", used[0]),
        Figure("  python -c 'import torch'", "s", used[1]),
        Figure("  the difference", "s", used[0] - used[1], 1.0),
        Figure("  the difference in wall time", "s", wall[0] - wall[1], 1.0),
        Figure("phase 1 on new tensors", "us", fresh, 60.0),
        Figure("phase 1 on unchanged tensors", "us", repeated, 60.0),
        Figure("phase 2 on 16 tokens", "us", second),
        Figure("  without the computation", "us", second - computed, 30.0),
        Figure(f"phase 2 on {large} tokens / Python's time", "x", in_c / beside, 1.05),
    ]

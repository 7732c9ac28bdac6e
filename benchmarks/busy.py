"""Times short calls while another process computes on every core."""

import subprocess
import sys
import time
from dataclasses import dataclass

import numpy as np
import torch
from rich.console import Console

import fusion_attention as fa
from fusion_attention.bench.report import Report

CALLS = 6000
TITLE = "Decode of 512 keys, 8 heads of 128, bfloat16, while a process computes on every core: microseconds per call"
COLUMNS = {"threads": -8, "p50": 8, "p90": 8, "p99": 8, "mean": 8, "CPU time": 9}


@dataclass(frozen=True)
class Waits:
    """Microseconds of a call: percentiles and mean of wall time, and mean CPU time of all threads."""

    threads: int
    p50: float
    p90: float
    p99: float
    mean: float
    cpu: float


def _measured(calls: int) -> Waits:
    """Times `calls` calls with torch's current number of threads."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, tokens, 8, 128, dtype=torch.bfloat16) for tokens in (1, 512, 512))
    taken = np.empty(calls)
    fa.decode_attention(q, (k, v))
    before = time.process_time()
    for i in range(calls):
        begun = time.perf_counter()
        fa.decode_attention(q, (k, v))
        taken[i] = time.perf_counter() - begun
    cpu = (time.process_time() - before) / calls * 1e6
    p50, p90, p99 = np.percentile(taken * 1e6, (50, 90, 99))
    return Waits(torch.get_num_threads(), p50, p90, p99, float(taken.mean()) * 1e6, cpu)


def show(quick: bool, console: Console) -> list[Waits]:
    """Measures one thread and all threads, twice, because outliers are random."""
    report, result, all_threads = Report(console, TITLE, COLUMNS), [], torch.get_num_threads()
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(all_threads)]
    try:
        for threads in (1, all_threads) * 2:
            torch.set_num_threads(threads)
            waits = _measured(CALLS // 20 if quick else CALLS)
            report.add(str(threads), *(f"{us:.0f}" for us in (waits.p50, waits.p90, waits.p99, waits.mean, waits.cpu)))
            result.append(waits)
    finally:
        torch.set_num_threads(all_threads)
        for other in others:
            other.kill()
            other.wait()
    return result

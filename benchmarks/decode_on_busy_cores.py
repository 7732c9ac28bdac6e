"""Times short calls while another process computes on every core."""

import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import torch

import fusion_attention as fa
from benchmarks.figures_with_goals import Figure

CALLS = 6000
TITLE = "Decode of 512 keys, 8 heads of 128, bfloat16, while a process computes on every core: one call"


def _measured(calls: int) -> Iterator[Figure]:
    """Times `calls` calls with torch's current number of threads: wall time, and CPU time of all threads."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, tokens, 8, 128, dtype=torch.bfloat16) for tokens in (1, 512, 512))
    taken = np.empty(calls)
    fa.decode_attention(q, (k, v))
    before = time.process_time()
    for i in range(calls):
        begun = time.perf_counter()
        fa.decode_attention(q, (k, v))
        taken[i] = time.perf_counter() - begun
    cpu = (time.process_time() - before) / calls
    figures = {f"p{rank}": np.percentile(taken, rank) for rank in (50, 90, 99)} | {
        "mean": taken.mean(),
        "CPU time": cpu,
    }
    for name, seconds in figures.items():
        yield Figure(f"{torch.get_num_threads()} threads, {name}", "us", float(seconds) * 1e6)


def figures(quick: bool) -> Iterator[Figure]:
    """Measures one thread and all threads, twice, because outliers are random."""
    all_threads = torch.get_num_threads()
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(all_threads)]
    try:
        for threads in (1, all_threads) * 2:
            torch.set_num_threads(threads)
            yield from _measured(CALLS // 20 if quick else CALLS)
    finally:
        torch.set_num_threads(all_threads)
        for other in others:
            other.kill()
            other.wait()

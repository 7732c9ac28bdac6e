"""Times the recording of a small call in an empty folder and in a folder of 20,000 files.

python -m benchmarks.captures      # prints the lowest time of all turns, in microseconds
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import fusion_attention as fa

FILES, TURNS = 20_000, 300
ALONE, EMPTY, FULL, DISK = "without recording", "recorded, empty folder", "recorded, {} files", "writing the file"


def lowest(call: Callable[[], object], turns: int) -> tuple[float, float]:
    """Returns the lowest (wall, CPU) microseconds of a call."""
    best = float("inf"), float("inf")
    for _ in range(turns):
        wall, cpu = time.perf_counter(), time.process_time()
        call()
        took = 1e6 * (time.perf_counter() - wall), 1e6 * (time.process_time() - cpu)
        best = min(best[0], took[0]), min(best[1], took[1])
    return best


def costs(files: int = FILES, turns: int = TURNS) -> dict[str, tuple[float, float]]:
    """Returns (wall, CPU) microseconds of a call of two tokens without and with recording, and of writing its file."""
    q = torch.ones(1, 2, 1, 8)
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        for number in range(files - 1):
            Path(other, f"{number:04}-attention.safetensors").touch()
        empty, full = fa.capture(one), fa.capture(other)
        with empty:
            fa.attention(q, q, q)
        content, unfinished = empty.files[0].read_bytes(), Path(one, "file.part")

        def write() -> None:
            unfinished.write_bytes(content)
            unfinished.replace(unfinished.with_suffix(".safetensors"))

        def call() -> object:
            return fa.attention(q, q, q)

        results = {ALONE: lowest(call, turns), DISK: lowest(write, turns)}
        for name, recorder in ((EMPTY, empty), (FULL.format(files), full)):
            with recorder:
                results[name] = lowest(call, turns)
        return results


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"{'':28} wall us   CPU us")
    for name, (wall, cpu) in costs().items():
        print(f"{name:28} {wall:7.0f}  {cpu:7.0f}")

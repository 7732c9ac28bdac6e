"""examples/train_context_parallel.py on several ranks has the losses of one process, and restarts after a rank dies."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.sources import ROOT

SCRIPT = ROOT / "examples" / "train_context_parallel.py"
RUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
TEXT = ["--tokens", "768", "--every", "2"]


def torchrun(ranks: int, *arguments: str) -> list[str]:
    return [*RUN, "--nproc-per-node", str(ranks), "--max-restarts", "2", str(SCRIPT), *TEXT, *arguments]


def last(folder: Path) -> dict[str, object]:
    result: dict[str, object] = json.loads((folder / "last.json").read_text())
    return result


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["allgather", "zigzag", "ring", "ulysses"])
def test_losses_on_two_ranks_match_one_process(schedule: str, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    alone = [sys.executable, str(SCRIPT), *TEXT, "--steps", "3", "--folder", str(one)]
    subprocess.run(alone, check=True, timeout=120, capture_output=True)
    more = ["--steps", "3", "--schedule", schedule, "--folder", str(two), "--compare", str(one)]
    run = subprocess.run(torchrun(2, *more), timeout=200, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "the curves agree" in run.stdout


@pytest.mark.slow
def test_training_resumes_after_rank_is_killed_and_on_more_ranks(tmp_path: Path) -> None:
    full, interrupted = tmp_path / "whole", tmp_path / "cut"
    alone = [sys.executable, str(SCRIPT), *TEXT, "--steps", "12", "--folder", str(full)]
    subprocess.run(alone, check=True, timeout=200, capture_output=True)
    command = torchrun(2, "--steps", "10", "--folder", str(interrupted))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        try:
            assert run.stdout is not None
            victim = next(int(result[1]) for line in run.stdout if (result := re.search(r"process (\d+)", line)))
            until = time.monotonic() + 120
            while not (interrupted / "last.json").exists() and time.monotonic() < until:
                time.sleep(0.02)
            os.kill(victim, signal.SIGKILL)
            rest, _ = run.communicate(timeout=200)
            assert run.returncode == 0, rest
        finally:
            run.kill()
    assert re.search(r"begins at\s+step [2-9]", rest), rest
    assert last(interrupted)["step"] == 10
    more = torchrun(3, "--steps", "12", "--folder", str(interrupted), "--compare", str(full))
    run3 = subprocess.run(more, timeout=200, capture_output=True, text=True, check=False)
    assert run3.returncode == 0, run3.stdout + run3.stderr
    assert "the curves agree" in run3.stdout

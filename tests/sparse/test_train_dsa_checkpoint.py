"""examples/train_dsa.py: the next run after a kill, and errors."""

import os
import runpy
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train_dsa.py"
STEPS = 4  # dense; then 2 of warm-up and 2 of sparse training


def train(folder: Path, steps: int = STEPS) -> dict[str, Any]:
    """Runs the example to its end in this process, without the picture; returns its last checkpoint."""
    main = runpy.run_path(str(SCRIPT))["main"]
    main.__globals__["picture"] = lambda *_: None
    with pytest.raises(typer.Exit) as end:
        main(steps=steps, folder=folder, save_every=1, seed=0)
    assert end.value.exit_code == 0
    checkpoint: dict[str, Any] = torch.load(folder / "checkpoint.pt", weights_only=True)
    return checkpoint


def kill(folder: Path, step: int) -> int:
    """Kills a run when its checkpoint reaches a step; returns the step of the last checkpoint."""
    checkpoint = folder / "checkpoint.pt"
    command = [sys.executable, str(SCRIPT), "--steps", str(STEPS), "--save-every", "1", "--folder", str(folder)]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    deadline, reached = time.monotonic() + 60, 0
    while reached < step and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
        if checkpoint.exists():
            reached = torch.load(checkpoint, weights_only=True)["step"]  # whole, whatever is going on
    process.kill()
    process.wait()
    last: int = torch.load(checkpoint, weights_only=True)["step"]
    return last


@pytest.mark.slow
def test_train_dsa_resumes_after_kill_with_same_losses_and_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs are killed in the dense and in the sparse stage."""
    full = train(tmp_path / "whole")
    folder = tmp_path / "killed"
    first, second = kill(folder, 1), kill(folder, 7)
    assert 1 <= first < STEPS < second < full["step"] == 8
    capsys.readouterr()
    resumed = train(folder)
    assert f"continues after step {second}" in " ".join(capsys.readouterr().out.split())
    assert resumed["losses"] == full["losses"]
    assert resumed["recalls"] == full["recalls"]
    for name in ("learner", "baseline"):
        for key, value in full[name]["model"].items():
            assert torch.equal(resumed[name]["model"][key], value), (name, key)


@pytest.mark.slow
def test_train_dsa_refuses_corrupt_checkpoint_and_changed_options(tmp_path: Path) -> None:
    main = runpy.run_path(str(SCRIPT))["main"]
    checkpoint = tmp_path / "checkpoint.pt"
    checkpoint.write_bytes(b"not a checkpoint")
    with pytest.raises(SystemExit, match="is no checkpoint"):
        main(steps=1, folder=tmp_path, save_every=1, seed=0)
    checkpoint.unlink()
    train(tmp_path, steps=1)
    with pytest.raises(SystemExit, match="was written with other options"):
        main(steps=2, folder=tmp_path, save_every=1, seed=0)

"""Programs that the steps of a release run, and the end of a step that fails."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]


def run(*command: object, **environment: str) -> str:
    """Returns a command's output; if it fails, prints the output and exits."""
    print("  $", *(Path(str(word)).name if str(word).startswith("/") else word for word in command), flush=True)
    done = subprocess.run(
        [str(word) for word in command], env={**os.environ, **environment}, cwd=ROOT, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode:
        fail(f"{command[0]} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def fail(why: str) -> NoReturn:
    sys.exit(f"make wheels: {why}")

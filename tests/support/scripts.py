"""Runs scripts in processes forked from one that has imported torch, the package and transformers."""

import contextlib
import multiprocessing
import os
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path

PRELOADED = ["torch", "fusion_attention", "transformers.modeling_utils"]
SECONDS = 120


@dataclass(frozen=True)
class Run:
    """The exit code and output of a script."""

    code: int | None
    stdout: str
    stderr: str


def run(script: Path, arguments: list[str], folder: Path) -> Run:
    """Runs a script as a program; its output is written to files in a folder."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=_main, args=(str(script), arguments, str(folder)))
    process.start()
    process.join(SECONDS)
    if process.exitcode is None:
        process.kill()
        process.join()
    stdout, stderr = ((folder / name).read_text(encoding="utf-8") for name in ("stdout", "stderr"))
    return Run(process.exitcode, stdout, stderr)


def _main(script: str, arguments: list[str], folder: str) -> None:
    with contextlib.ExitStack() as files:
        for name, number in (("stdout", 1), ("stderr", 2)):
            os.dup2(files.enter_context((Path(folder) / name).open("w")).fileno(), number)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        sys.stdout.flush()

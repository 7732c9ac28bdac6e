"""Runs programs in processes forked from one with imported modules, because importing torch takes 2 seconds."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

# Reads a job per line, and answers with the exit code of the child that ran it.
_SERVER = """
import importlib, json, os, runpy, signal, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if child:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    signal.alarm(job["seconds"])
    for number, file in enumerate((os.devnull, *job["outputs"])):
        os.dup2(os.open(file, os.O_WRONLY if number else os.O_RDONLY), number)
    os.environ.clear(), os.environ.update(job["environment"])
    first, *sys.argv = job["arguments"]
    if first == "-c":
        program, sys.argv[0] = sys.argv[0], first
        exec(compile(program, "<string>", "exec"), globals())
    else:
        sys.argv.insert(0, first), sys.path.insert(0, os.path.dirname(first))
        runpy.run_path(first, run_name="__main__")
    sys.exit()
"""


@cache
def _server(*modules: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _SERVER, *modules]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def python(
    *arguments: str | Path,
    modules: tuple[str, ...] = ("torch",),
    environment: Mapping[str, str] | None = None,
    seconds: int = 600,
) -> subprocess.CompletedProcess[str]:
    """Runs `python script ...` or `python -c program ...`, in a process that has imported `modules` and no others."""
    server = _server(*modules)
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / name for name in ("stdout", "stderr")]
        for output in outputs:
            output.touch()
        job = {"arguments": [*map(str, arguments)], "outputs": [*map(str, outputs)], "seconds": seconds}
        server.stdin.write(json.dumps(job | {"environment": dict(os.environ if environment is None else environment)}))
        server.stdin.write("\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        return subprocess.CompletedProcess([*arguments], code, *(output.read_text() for output in outputs))

"""Builds and runs C and C++ programs that use the C API: a compiler with the include and library folders, no Python."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from support.sources import ROOT

from fusion_attention.capi.environment import cflags, libs, missing

RECORDER = ROOT / "tests/native/capi/recorder.c"
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None or bool(missing()), reason="no C++ compiler, or a package without the C libraries"
)


def compiled(source: Path, program: Path, *flags: str) -> Path:
    """Compiles a source file, links it with the three libraries and returns the program."""
    command = ["gcc" if source.suffix == ".c" else "g++", "-O0", "-w", *shlex.split(cflags()), *flags, str(source)]
    command += ["-o", str(program), *shlex.split(libs()), "-ldl", "-lpthread"]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return program


def ended(program: Path | list[str], **settings: str) -> subprocess.CompletedProcess[str]:
    """Runs a program with the variables of a plain shell, the cap of instruction sets, and `settings`."""
    names = ("PATH", "HOME", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "FUSION_ATTENTION_CPU")
    variables = {name: os.environ[name] for name in names if name in os.environ} | settings
    command = [str(program)] if isinstance(program, Path) else program
    return subprocess.run(
        command, capture_output=True, text=True, errors="replace", env=variables, timeout=120, check=False
    )

"""The Python interpreter in C programs: choice of the interpreter, side effects, and the error without one."""

import os
import shutil
import sys
from pathlib import Path

import pytest
from support.c_programs import compiled, ended, needs_compiler
from support.sources import ROOT

from fusion_attention.capi import environment

pytestmark = needs_compiler
# Calls an operator with null arguments, which starts Python, and prints the code and the message.
ASKS = """
#include <cstdio>
#include "acl/acl.h"
#include "aclnnop/aclnn_lightning_indexer.h"
int main() {
    uint64_t size; aclOpExecutor *executor;
    if (aclInit(nullptr) || aclrtSetDevice(0)) return 1;
    const int ret = aclnnLightningIndexerGetWorkspaceSize(nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
        nullptr, 1, 0, 0, 0, false, nullptr, nullptr, &size, &executor);
    std::printf("%d %s", ret, aclGetRecentErrMsg());
}
"""
# Finalizes the runtime, which frees torch's memory, while a thread that holds the GIL calls operators.
LOCKED = """
import ctypes, sys, threading, time
from fusion_attention.capi.environment import LIBRARY
acl, operators = ctypes.CDLL(f"{LIBRARY}/libascendcl.so"), ctypes.PyDLL(f"{LIBRARY}/libopapi.so")
assert acl.aclInit(None) == acl.aclrtSetDevice(0) == 0
for _ in range(100):
    assert acl.aclrtMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(64), 0) == 0
sys.setswitchinterval(100)
ends = threading.Thread(target=acl.aclFinalize)
ends.start()
until = time.monotonic() + 0.2
while time.monotonic() < until:
    operators.aclnnLightningIndexerGetWorkspaceSize(*[None] * 17)
ends.join()
print("ended")
"""
# Fake interpreter that answers the library's questions: its path, and the name of a missing shared library.
FAKE = "#!/bin/sh\necho {path}\necho libpython9.9.so.1.0\n"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("asks")
    (folder / "asks.cpp").write_text(ASKS)
    return compiled(folder / "asks.cpp", folder / "asks")


def interpreter(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(FAKE.format(path=path))
    path.chmod(0o755)
    return path


def package(folder: Path) -> Path:
    """Copies the libraries to a package below a folder; returns the folder of the copies."""
    libraries = folder / "fusion_attention/capi/lib64"
    libraries.mkdir(parents=True)
    for path in environment.LIBRARY.glob("*.so"):
        shutil.copy(path, libraries)
    return libraries


def answer(program: Path, libraries: Path, **settings: str) -> str:
    """Runs the program with preloaded libraries of a folder; returns its output."""
    preloaded = ":".join(str(libraries / f"lib{name}.so") for name in ("ascendcl", "nnopbase", "opapi"))
    run = ended(program, LD_PRELOAD=preloaded, **settings)
    assert run.returncode == 0, run
    return run.stdout


@pytest.mark.parametrize("kind", ["environment", "no environment", "source tree", "user's packages", "variable"])
def test_c_library_finds_the_expected_python_interpreter(kind: str, program: Path, tmp_path: Path) -> None:
    settings: dict[str, str] = {}
    if kind in ("environment", "no environment"):
        libraries, result = package(tmp_path / "lib/python3.99/site-packages"), tmp_path / "bin/python3.99"
        if kind == "environment":
            (tmp_path / "pyvenv.cfg").touch()
            result = tmp_path / "bin/python3"
            libraries = package(tmp_path / "lib/elsewhere/site-packages")
    elif kind == "source tree":
        libraries, result = package(tmp_path / "src"), tmp_path / ".venv/bin/python3"
        result.parent.mkdir(parents=True)
        (tmp_path / ".venv/pyvenv.cfg").touch()
    elif kind == "user's packages":
        libraries, result = package(tmp_path / "home/lib/python3.9/site-packages"), tmp_path / "other/python3.9"
        settings["PATH"] = f"{result.parent}:{os.environ['PATH']}"
    else:
        libraries, result = package(tmp_path / "lib/python3.99/site-packages"), tmp_path / "named/python"
        interpreter(tmp_path / "bin/python3.99")
        settings["FUSION_ATTENTION_PYTHON"] = str(result)
    interpreter(result)
    text = answer(program, libraries, **settings)
    assert text.startswith("361001 aclnnLightningIndexerGetWorkspaceSize: Python: "), text
    assert f"got {result} without libpython9.9.so.1.0 (install libpython9.9, " in text, text


def test_missing_python_interpreter_returns_error_message(program: Path, tmp_path: Path) -> None:
    text = answer(program, environment.LIBRARY, FUSION_ATTENTION_PYTHON=str(tmp_path / "nowhere"))
    assert text == (
        "361001 aclnnLightningIndexerGetWorkspaceSize: Python: expected an interpreter that runs, got "
        f"{tmp_path}/nowhere (set FUSION_ATTENTION_PYTHON to the one that fusion-attention is installed in)"
    )


def test_interpreter_without_fusion_attention_returns_error_message(program: Path, tmp_path: Path) -> None:
    """The interpreter starts, and the program must still report the error."""
    bare = tmp_path / "bare"
    (bare / "bin").mkdir(parents=True)
    (bare / "bin/python3").symlink_to(Path(sys.executable).resolve())
    (bare / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).resolve().parent}\n")
    text = answer(program, environment.LIBRARY, FUSION_ATTENTION_PYTHON=str(bare / "bin/python3"))
    assert text.startswith("361001 ")
    assert f"Python: fusion_attention cannot be imported by {bare}/bin/python3: No module named" in text
    assert "(install it there, or set FUSION_ATTENTION_PYTHON to the interpreter that has it)" in text


def test_embedded_python_keeps_threads_signals_and_locale(tmp_path: Path) -> None:
    """Environment variables (PYTHONHOME, PYTHONPATH) point to another Python."""
    program = compiled(ROOT / "tests/native/capi/embedded.cpp", tmp_path / "embedded", "-std=c++17")
    ours = {"FUSION_ATTENTION_PYTHON": sys.executable}  # a copy of the sources lies beside no environment
    run = ended(program, PYTHONHOME="/nowhere", PYTHONPATH="/nowhere", LC_ALL="C.UTF-8", **ours)
    lines = ["before", *(f"{what}: ok" for what in ("threads", "after its starter has ended", "signals", "locale"))]
    assert run.stdout.splitlines() == [*lines, "finalize: ok", "initialised again: ok"], run
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.slow
def test_acl_finalize_does_not_deadlock_with_a_thread_holding_the_gil() -> None:
    run = ended([sys.executable, "-c", LOCKED], FUSION_ATTENTION_MEMORY="torch")
    assert (run.returncode, run.stdout, run.stderr) == (0, "ended\n", "")

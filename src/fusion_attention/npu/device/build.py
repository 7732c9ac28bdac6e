"""Compiles the C++ sources of the device "npu" for the installed torch; torch's folder of extensions caches the result.

The wheel contains the sources, because the compiled file depends on torch's version and on the compiler.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

SOURCES = Path(__file__).parent / "cpp"
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-w")


class BuildError(RuntimeError):
    """The C++ library of the device "npu" cannot be compiled; the message states the reason."""


def library() -> str:
    """Returns the path of the C++ library of the device "npu"; compiles it if needed.

    If several processes call this at the same time, one compiles and the others wait.

    Raises:
        BuildError: there is no compiler, it fails, or the cache folder cannot be written.
    """
    target = folder() / "npu.so"
    if target.exists():
        return str(target)
    command_set = os.environ.get("CXX", "").split()
    commands = (command_set,) if command_set else (["c++"], ["g++"], ["clang++"])
    compiler = next((command for command in commands if shutil.which(command[0])), None)
    if compiler is None:
        got = f"CXX={command_set[0]}, which is not found" if command_set else "none"
        raise BuildError(
            f"npu.install: expected a C++ compiler (c++, g++ or clang++, or one that CXX names), got {got}"
        )
    import fcntl  # Windows has none

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with (target.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                _compile(compiler, target)
    except OSError as error:
        raise BuildError(
            f"npu.install: expected a writable folder for the compiled device, got {error} (set TORCH_EXTENSIONS_DIR)"
        ) from error
    return str(target)


def folder() -> Path:
    """Returns the cache folder of the compiled device "npu", named by torch's version, the flags and the sources."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or Path(
        os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "torch_extensions"
    )
    digest = hashlib.sha256(" ".join((*_FLAGS, platform.machine())).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return Path(root) / f"fusion_attention_npu-torch{torch.__version__}-{digest.hexdigest()[:16]}"


def _compile(compiler: list[str], target: Path) -> None:
    """Compiles all C++ sources as one file to `target`, so that torch's headers, which are slow, are read once."""
    torch_folder = Path(torch.__file__).parent
    include = torch_folder / "include"
    sources = sorted(SOURCES.glob("*.cpp"))
    print("fusion_attention: compiling the device npu for this torch, once (half a minute)", file=sys.stderr)  # noqa: T201
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        full, compiled = Path(scratch, "whole.cpp"), Path(scratch, target.name)
        full.write_text("".join(f'#include "{source}"\n' for source in sources))
        command = [
            *compiler, *_FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            *(f"-I{path}" for path in (SOURCES, include, include / "torch" / "csrc" / "api" / "include")),
            "-o", str(compiled), str(full), f"-L{torch_folder / 'lib'}",
            "-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python",
        ]  # fmt: skip
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            raise BuildError(
                f"npu.install: expected {compiler[0]} to compile device npu for torch {torch.__version__}, got: "
                + "\n".join(line for line in run.stderr.splitlines() if "error" in line)[:2000]
            )
        compiled.replace(target)

"""Where compilers, CMake and pkg-config find the C API. Loads nothing: build systems ask often.

Laid out as CANN's own folder is (include, lib64), so that a build that takes CANN's path takes this one.
"""

from __future__ import annotations

import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parent
INCLUDE, LIBRARY, CMAKE, PKG_CONFIG = ROOT / "include", ROOT / "lib64", ROOT / "cmake", ROOT / "pkgconfig"
LIBRARIES = ("opapi", "nnopbase", "ascendcl")  # each needs those behind it


def cflags() -> str:
    """What a compiler is told."""
    return shlex.join([f"-I{INCLUDE}"])


def libs() -> str:
    """What a linker is told; programs find the libraries where they are now."""
    return shlex.join([f"-L{LIBRARY}", f"-Wl,-rpath,{LIBRARY}", *(f"-l{name}" for name in LIBRARIES)])


def missing() -> list[Path]:
    """Libraries that were not built with this package."""
    paths = [LIBRARY / f"lib{name}.so" for name in LIBRARIES]
    return [path for path in paths if not path.is_file()]

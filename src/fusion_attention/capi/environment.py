"""Paths and flags of the C API for compilers, CMake and pkg-config; imports no large modules, so it answers quickly.

The folders have the names of CANN's (include, lib64), so a build that uses CANN's path can use this one.
"""

import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parent
INCLUDE, LIBRARY, CMAKE, PKG_CONFIG = ROOT / "include", ROOT / "lib64", ROOT / "cmake", ROOT / "pkgconfig"
LIBRARIES = ("opapi", "nnopbase", "ascendcl")  # in link order: each depends on the following ones


def cflags() -> str:
    """Returns the compiler flags for C programs that use this library's CANN headers."""
    return shlex.join([f"-I{INCLUDE}"])


def libs() -> str:
    """Returns the linker flags for C programs that use this library, with a run path to the installed libraries."""
    return shlex.join([f"-L{LIBRARY}", f"-Wl,-rpath,{LIBRARY}", *(f"-l{name}" for name in LIBRARIES)])


def missing() -> list[Path]:
    """Returns the paths of the C libraries that were not built with this package."""
    paths = [LIBRARY / f"lib{name}.so" for name in LIBRARIES]
    return [path for path in paths if not path.is_file()]

"""The native module and the C libraries load on other systems than the build machine, beside any torch."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fusion_attention import _native
from fusion_attention.capi import environment

MODULE = Path(_native.__file__ or "")
LIBRARIES = [environment.LIBRARY / f"lib{name}.so" for name in environment.LIBRARIES]
FILES = [MODULE, *(path for path in LIBRARIES if path not in environment.missing())]
every_file = pytest.mark.parametrize("file", FILES, ids=lambda path: path.name.partition(".")[0])
READER = shutil.which("readelf") or ""
linux = pytest.mark.skipif(
    sys.platform != "linux" or not READER, reason="asks readelf, of binutils, about a module of Linux"
)


def of_elf(option: str, file: Path = MODULE) -> str:
    return subprocess.run([READER, "--wide", option, str(file)], capture_output=True, text=True, check=True).stdout


@linux
@every_file
def test_shared_library_requires_at_most_glibc_2_28(file: Path) -> None:
    """manylinux_2_28 allows no later version; csrc/old_glibc.cpp binds newer symbols to old versions."""
    result = re.findall(r"GLIBC_(\d+)\.(\d+)", of_elf("--version-info", file))
    versions = {tuple(map(int, version)) for version in result}
    assert versions
    assert max(versions) <= (2, 28), of_elf("--dyn-syms", file)


@linux
@every_file
def test_shared_library_depends_only_on_base_system_libraries(file: Path) -> None:
    """Another libstdc++ may be loaded, torch's libgomp has any name, and libraries of torch may be absent."""
    needed = set(re.findall(r"\(NEEDED\).*\[(.*?)\]", of_elf("--dynamic", file)))
    system = {"libc.so.6", "libdl.so.2", "libgcc_s.so.1", "libm.so.6"}
    others = {path.name for path in LIBRARIES} if file != MODULE else set()  # each lies beside those that it needs
    assert {name for name in needed if not name.startswith("ld-linux-")} - others - {"libpthread.so.0"} <= system


BOTH_COMPUTE = """
import importlib, os, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
import torch, fusion_attention as fa
x = torch.randn(4, 512, 8, 64)
torch.set_num_threads(1)
fa.attention(x, x, x)
torch.set_num_threads(2)
torch.ones(1 << 22).sum()
threads = len(os.listdir("/proc/self/task"))
fa.attention(x, x, x)
lines = open("/proc/self/maps").read().splitlines()
print(len({l.split()[-1] for l in lines if "gomp" in l or "iomp" in l or "libomp" in l}))
print(len(os.listdir("/proc/self/task")) - threads)
"""


@pytest.mark.sampled(4)
@linux
@pytest.mark.parametrize("order", [("torch", "fusion_attention._native"), ("fusion_attention._native", "torch")])
def test_one_openmp_runtime_serves_torch_and_the_core(order: tuple[str, str]) -> None:
    """Counts OpenMP runtimes, and threads that the core adds, after torch and the core have computed."""
    done = subprocess.run([sys.executable, "-c", BOTH_COMPUTE, *order], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n0\n"


@linux
def test_importing_native_core_does_not_load_openmp() -> None:
    program = "from fusion_attention import _native; print('gomp' in open('/proc/self/maps').read())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"

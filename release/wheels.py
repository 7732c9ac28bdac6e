"""`make wheels`: builds the source archive, a wheel per system, processor and Python from it, and tests each.

Whatever is not as docs/dev/release.md says ends it with an error. What is built lies in dist/ afterwards.
"""

import argparse
import os
import re
import shutil
import struct
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import cross
from programs import ROOT, fail, run

GLIBC = 28  # of manylinux_2_28
MEGABYTES, SECONDS = 15, 30  # of a wheel; of its installation
LIBRARIES = {f"fusion_attention/capi/lib64/lib{name}.so" for name in ("ascendcl", "nnopbase", "opapi")}
MACHINES = {"x86_64": 62, "aarch64": 183}  # as an ELF file says it


def interpreter(name: str) -> str:
    """Returns the path of a Python, because some versions of pip accept no name."""
    return shutil.which(name) or fail(f"{name}: expected a Python by name or path, found no such program")


def build(python: str, machine: str, archive: Path, work: Path) -> Path:
    """Builds a wheel for one Python and processor, with this machine's platform tag."""
    folder = work / f"{machine}-{Path(python).name}"
    shutil.rmtree(folder, ignore_errors=True)
    cross = {}
    if machine != os.uname().machine:
        suffix = run(python, "-c", "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))").strip()
        cross = {
            "CMAKE_TOOLCHAIN_FILE": str(ROOT / f"release/{machine}.cmake"),
            "SETUPTOOLS_EXT_SUFFIX": suffix.replace(os.uname().machine, machine),
            "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
            "CPLUS_INCLUDE_PATH": str(debian_headers(python, machine, work)),
        }
    command = [sys.executable, "-m", "pip", "--python", python, "wheel", "--quiet", "--no-deps"]
    run(*command, "--wheel-dir", folder, archive, **cross)
    (wheel,) = folder.glob("*.whl")
    return wheel


def debian_headers(python: str, machine: str, work: Path) -> Path:
    """Creates the header folder, named after the processor, that Debian's pyconfig.h includes."""
    question = "import sysconfig; print(sysconfig.get_config_h_filename())"
    include = Path(run(python, "-c", question).strip()).parent
    folder = work / f"headers-{machine}"
    of_machine = include.parent / f"{os.uname().machine}-linux-gnu" / include.name / "pyconfig.h"
    if of_machine.is_file():
        other = folder / f"{machine}-linux-gnu" / include.name
        other.mkdir(parents=True, exist_ok=True)
        shutil.copy(of_machine, other)
    return folder


def tagged(wheel: Path, machine: str, dist: Path) -> Path:
    """Returns the wheel with manylinux's tag, after auditwheel accepted it."""
    result = run(sys.executable, "-m", "auditwheel", "show", wheel)
    allowed = re.search(rf'following platform tag:\s+"manylinux_2_(\d+)_{machine}"', result)
    if not allowed or int(allowed[1]) > GLIBC:
        fail(f"{wheel.name} cannot be manylinux_2_{GLIBC}_{machine}: give what forbids it an old version in "
             f"csrc/old_glibc.cpp\n{result}")  # fmt: skip
    copy = shutil.copy(wheel, dist)
    words = run(sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag",
                f"manylinux_2_{GLIBC}_{machine}", copy)  # fmt: skip
    return dist / words.split()[-1]


def check_contents(wheel: Path, suffix: str, libraries: set[str]) -> dict[str, bytes]:
    """Checks that a wheel contains only the package, one module and libraries; returns what is native."""
    if wheel.stat().st_size > MEGABYTES << 20:
        fail(f"{wheel.name} has {wheel.stat().st_size >> 20} MB, expected at most {MEGABYTES}")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        natives = {name: archive.read(name) for name in names if name.endswith((".so", ".pyd", ".dylib", ".dll"))}
    source = ROOT / "src"
    expected = {
        path.relative_to(source).as_posix()
        for path in (source / "fusion_attention").rglob("*")
        if path.is_file() and path.suffix not in (".so", ".pyc")
    }
    if set(names) - set(natives) != expected:
        odd = sorted((set(names) - set(natives)) ^ expected)
        fail(f"{wheel.name}: expected what src/ holds, these are too many or missing: {odd}")
    modules = set(natives) - libraries
    if len(modules) != 1 or not modules.pop().endswith(suffix) or not set(natives) > libraries:
        fail(
            f"{wheel.name}: expected one module named *{suffix} and {libraries or 'no library'}, got {sorted(natives)}"
        )
    return natives


def linux_wheel(python: str, machine: str, archive: Path, work: Path, dist: Path) -> Path:
    wheel = tagged(build(python, machine, archive, work), machine, dist)
    suffix = ".abi3.so" if "-abi3-" in wheel.name else f"-{machine}-linux-gnu.so"
    for name, content in check_contents(wheel, suffix, LIBRARIES).items():
        if struct.unpack_from("<H", content, 18)[0] != MACHINES[machine]:
            fail(f"{wheel.name}: {name} is for another processor than {machine}")
    return wheel


def other_wheel(python: str, system: str, archive: Path, work: Path, dist: Path) -> Path:
    wheel = cross.build(python, system, archive, work)
    check_contents(wheel, f"/{cross.SYSTEMS[system].module}", set())
    cross.check_module(wheel, system)
    return Path(shutil.copy(wheel, dist))


def check_metadata(files: list[Path]) -> None:
    run(sys.executable, "-m", "twine", "check", "--strict", *files)
    for wheel in files:
        if "-abi3-" in wheel.name:
            run(sys.executable, "-m", "abi3audit", "--strict", wheel)


def installed(python: str, wheel: Path, work: Path, pip: list[str]) -> None:
    """Installs a wheel and torch in a new environment without a compiler; measures the time and runs a test."""
    folder = work / f"environment-{Path(python).name}"
    run(python, "-m", "venv", "--clear", folder)
    interpreter = folder / "bin/python"
    install = [interpreter, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *pip]
    # torch with CUDA requires another Triton than the one whose kernels the tests compare.
    pins = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
    constraints = work / "constraints.txt"
    constraints.write_text("".join(line for line in pins if not line.startswith("triton==")))
    run(*install, "-c", constraints, "torch")
    begun = time.monotonic()
    run(*install, "-c", constraints, wheel, PATH=str(folder / "bin"))
    took = time.monotonic() - begun
    if took > SECONDS:
        fail(f"{wheel.name} took {took:.0f} s to install, expected at most {SECONDS}")
    print(f"  {wheel.name}: installed in {took:.1f} s without a compiler")
    smoke = shutil.copy(ROOT / "release/smoke.py", work)
    for first in ("torch", "core"):
        print("  " + run(interpreter, smoke, first).strip())


def for_python(version: str, wheels: list[Path], machine: str) -> Path:
    """Returns the wheel that Python of this version, for example "3.12", accepts."""
    minor = int(version.split(".")[1])
    tag = "cp312-abi3" if minor >= 12 else f"cp3{minor}-cp3{minor}"
    return next(wheel for wheel in wheels if tag in wheel.name and wheel.name.endswith(f"{machine}.whl"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--pythons", nargs="+", required=True, help="CPython 3.10, 3.11, and 3.12 or later, to build by"
    )
    parser.add_argument("--machines", nargs="*", default=list(MACHINES), choices=list(MACHINES), help="of Linux")
    parser.add_argument("--systems", nargs="*", default=list(cross.SYSTEMS), choices=list(cross.SYSTEMS))
    parser.add_argument("--test", nargs="*", default=[], help="Pythons to install a wheel for, with torch, and run it")
    parser.add_argument("--pip", default="", help="options of these installations")
    given = parser.parse_args()
    # pip builds each wheel in a new temporary folder: ccache must compare paths below it.
    os.environ.setdefault("CCACHE_BASEDIR", tempfile.gettempdir())
    pythons, tests = [interpreter(name) for name in given.pythons], [interpreter(name) for name in given.test]
    work, dist = ROOT / "build/wheels", ROOT / "dist"
    for folder in (work, dist):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    run(sys.executable, "-m", "build", "--sdist", "--outdir", dist)
    (archive,) = dist.glob("*.tar.gz")
    wheels = [linux_wheel(python, machine, archive, work, dist) for machine in given.machines for python in pythons]
    wheels += [other_wheel(pythons[-1], system, archive, work, dist) for system in given.systems]
    for wheel in wheels:
        print(f"  {wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")
    check_metadata([archive, *wheels])
    for python in tests:
        version = run(python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])").strip()
        installed(python, for_python(version, wheels, os.uname().machine), work, given.pip.split())
    print(f"make wheels: {len(wheels)} wheels and the source archive in dist/; docs/dev/release.md says what is next")


if __name__ == "__main__":
    main()

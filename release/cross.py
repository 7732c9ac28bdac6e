"""Wheels for macOS and Windows: built by the compiler of the package ziglang, and checked without either system.

One wheel of the stable ABI for each system. Its module is compiled with the headers of the Python that builds, which
must be CPython 3.12 or later.
"""

import shutil
import struct
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from programs import ROOT, fail, run


@dataclass(frozen=True)
class System:
    target: str  # as zig calls it
    platform: str  # as Python calls it, and as tags do
    tag: str
    module: str


SYSTEMS = {
    "macos": System("aarch64-macos.11.0", "macosx-11.0-arm64", "macosx_11_0_arm64", "_native.abi3.so"),
    "windows": System("x86_64-windows-gnu", "win-amd64", "win_amd64", "_native.pyd"),
}
# Windows' own libraries, of which the second is a name for several: the C library of Windows 10.
WINDOWS = ("kernel32.dll", "api-ms-win-crt-")
# What a module exports besides. macOS: C++'s replaceable functions, operator new and delete, and two names of the file
# itself, none of which zig's linker can hide; the functions take memory from malloc as those of the system do. Windows:
# exceptions that nanobind marks for export.
BESIDES = {"macos": ("_Zn", "_Zd", "_mh_dylib_header", "__dso_handle"), "windows": ("_ZTVN8nanobind",)}
MACOS = ("/usr/lib/libSystem.B.dylib", "/usr/lib/libc++.1.dylib")


def build(python: str, name: str, archive: Path, work: Path) -> Path:
    """Builds the wheel of a system."""
    system, folder = SYSTEMS[name], work / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    definitions: dict[str, object] = {
        "CMAKE_TOOLCHAIN_FILE": ROOT / "release/zig.cmake",
        "FUSION_PYTHON": sys.executable,
        "FUSION_TARGET": system.target,
    }
    if name == "windows":
        definitions |= {"Python_INCLUDE_DIR": headers(python, folder), "Python_SABI_LIBRARY": import_library(folder)}
        # CMake reads the version from the name of a library that the module is not linked to.
        version = run(python, "-c", "import sys; print('%d%d' % sys.version_info[:2])").strip()
        definitions["Python_LIBRARY"] = shutil.copy(folder / "python3.lib", folder / f"python{version}.lib")
    settings = [f"--config-settings=cmake.define.{key}={value}" for key, value in definitions.items()]
    settings.append(f"--config-settings=build-dir={folder}/objects")
    command = [sys.executable, "-m", "pip", "--python", python, "wheel", "--quiet", "--no-deps", *settings]
    # On Windows scikit-build-core would take another generator for the default.
    run(*command, "--wheel-dir", folder, archive, _PYTHON_HOST_PLATFORM=system.platform, CMAKE_GENERATOR="Ninja")
    (wheel,) = folder.glob("*.whl")
    if name == "macos":
        check_leaks(folder / "objects")
    if not wheel.name.endswith(f"-cp312-abi3-{system.tag}.whl"):
        fail(f"{wheel.name}: expected the tags cp312-abi3-{system.tag}")
    return wheel


def check_leaks(objects: Path) -> None:
    """Does csrc/check_leaks.cmake's work, because this system's nm cannot read objects of macOS."""
    paths = list(objects.rglob("fusion_variant_asimddp*/**/*.o"))
    if not paths:
        fail(f"{objects}: expected objects of the variants asimddp and asimddp+bf16, found none")
    for path in paths:
        entry = f"{path.relative_to(objects / 'CMakeFiles').parts[0].removesuffix('.dir')}_{part_of(path)}"
        if (names := MachO(path.read_bytes()).defined()) != [entry]:
            fail(f"{path} defines {names}: make all but {entry} local (anonymous namespace) or force it inline")


def part_of(path: Path) -> str:
    return path.name.split(".")[0].removeprefix("variant_")


def headers(python: str, folder: Path) -> Path:
    """Returns a copy of Python's headers with Windows' configuration."""
    question = "import sysconfig; print(sysconfig.get_path('include'))"
    result = folder / "include"
    shutil.copytree(run(python, "-c", question).strip(), result)
    shutil.copy(ROOT / "release/pyconfig_windows.h", result / "pyconfig.h")
    return result


def import_library(folder: Path) -> Path:
    """Makes the library by which a module finds the functions and data of the stable ABI in python3.dll."""
    from abi3info import DATAS, FUNCTIONS

    names = [symbol.name for symbol in FUNCTIONS] + [f"{symbol.name} DATA" for symbol in DATAS]
    listing, result = folder / "python3.def", folder / "python3.lib"
    listing.write_text("LIBRARY python3.dll\nEXPORTS\n" + "".join(f"  {name}\n" for name in names))
    run(sys.executable, "-m", "ziglang", "dlltool", "-m", "i386:x86-64", "-d", listing, "-l", result)
    return result


def check_module(wheel: Path, name: str) -> None:
    """Checks what a wheel's module exports, and the libraries that it needs."""
    with zipfile.ZipFile(wheel) as archive:
        content = archive.read(f"fusion_attention/{SYSTEMS[name].module}")
    exports, libraries = (of_windows if name == "windows" else of_macos)(wheel.name, content)
    if [export for export in exports if not export.startswith(BESIDES[name])] != ["PyInit__native"]:
        fail(f"{wheel.name}: expected a module that exports PyInit__native alone, got {exports}")
    allowed = ("python3.dll", *WINDOWS) if name == "windows" else MACOS
    if foreign := [library for library in libraries if not library.startswith(allowed)]:
        fail(f"{wheel.name}: expected a module that needs libraries of the system alone, got {foreign}")


def of_windows(wheel: str, content: bytes) -> tuple[list[str], list[str]]:
    """Returns the exported names and the libraries of a module for x86-64."""
    import pefile

    file = pefile.PE(data=content)
    if file.FILE_HEADER.Machine != pefile.MACHINE_TYPE["IMAGE_FILE_MACHINE_AMD64"]:
        fail(f"{wheel}: expected a module for x86-64, got the machine {file.FILE_HEADER.Machine:#x}")
    libraries = [entry.dll.decode().lower() for entry in file.DIRECTORY_ENTRY_IMPORT]
    if "python3.dll" not in libraries:
        fail(f"{wheel}: expected a module that needs python3.dll, got {libraries}")
    return [symbol.name.decode() for symbol in file.DIRECTORY_ENTRY_EXPORT.symbols], libraries


def of_macos(wheel: str, content: bytes) -> tuple[list[str], list[str]]:
    """Returns the exported names and the libraries of a module for arm64 and macOS 11."""
    file = MachO(content)
    if file.processor != 0x0100000C:
        fail(f"{wheel}: expected a module for arm64, got the processor {file.processor:#x}")
    least = [struct.unpack("<2I", data[:8]) for data in file.commands(0x32)]  # LC_BUILD_VERSION
    if least != [(1, 11 << 16)]:
        fail(f"{wheel}: expected a module for macOS (1) 11.0, got the platform and version {least}")
    if not list(file.commands(0x1D)):  # LC_CODE_SIGNATURE
        fail(f"{wheel}: expected a signed module, since macOS loads no other on arm64")
    loads = (0xC, 0x80000018, 0x8000001F)  # LC_LOAD_DYLIB, LC_LOAD_WEAK_DYLIB, LC_REEXPORT_DYLIB
    libraries = [data[16:].split(b"\0")[0].decode() for data in file.commands(*loads)]
    return file.defined(hidden=False), libraries


class MachO:
    """A file of macOS for one 64-bit processor."""

    def __init__(self, content: bytes) -> None:
        magic, self.processor, _, _, self._count = struct.unpack_from("<5I", content)
        if magic != 0xFEEDFACF:
            fail(f"expected a Mach-O file, got one that begins with {magic:#x}")
        self._content = content

    def commands(self, *kinds: int) -> Iterator[bytes]:
        """Yields what follows the two first words of the load commands of some kinds."""
        at = 32
        for _ in range(self._count):
            kind, size = struct.unpack_from("<2I", self._content, at)
            if kind in kinds:
                yield self._content[at + 8 : at + size]
            at += size

    def defined(self, *, hidden: bool = True) -> list[str]:
        """Returns the external names that the file defines, hidden ones (N_PEXT) too unless told otherwise."""
        kinds = (0xF, 0x1F) if hidden else (0xF,)  # N_SECT | N_EXT, N_PEXT
        result = []
        for data in self.commands(0x2):  # LC_SYMTAB
            symbols, count, names, _ = struct.unpack("<4I", data)
            for at in range(symbols, symbols + 16 * count, 16):
                name, kind = struct.unpack_from("<IB", self._content, at)
                if kind in kinds:
                    end = self._content.index(b"\0", names + name)
                    result.append(self._content[names + name : end].decode().removeprefix("_"))
        return result

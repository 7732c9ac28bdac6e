"""The device "npu" is compiled once for each torch version; without a compiler, "npu" is an alias of the CPU."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from fusion_attention import npu
from fusion_attention.contract import ContractWarning
from fusion_attention.npu.device import backend, build


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fast fake compiler: it appends a line to the file `calls` and writes a word to its output path."""
    script = tmp_path / "compiler"
    script.write_text(
        f'#!/bin/sh\necho >> {tmp_path}/calls\nwhile [ "$1" != -o ]; do shift; done\nsleep 0.1\necho made > "$2"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "kept"))
    return script


def test_concurrent_builds_run_the_compiler_once(compiler: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        results = set(pool.map(lambda _: build.library(), range(4)))
    assert [Path(path).read_text() for path in results] == ["made\n"]
    assert len((tmp_path / "calls").read_text().splitlines()) == 1
    left = sorted(path.name for path in build.folder().iterdir())
    assert left == ["lock", "npu.so"]


def test_build_folder_depends_on_torch_version_and_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = build.folder()
    assert torch.__version__ in before.name
    (tmp_path / "cpp").mkdir()
    for path in build.SOURCES.iterdir():
        (tmp_path / "cpp" / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(build, "SOURCES", tmp_path / "cpp")
    assert build.folder() == before
    source = next((tmp_path / "cpp").iterdir())
    source.write_bytes(source.read_bytes() + b"\n")
    assert build.folder() != before


def test_build_error_shows_compiler_or_folder_problem(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler.write_text('#!/bin/sh\necho "runtime.h:3: error: no such thing" >&2\nexit 1\n')
    with pytest.raises(build.BuildError, match=r"to compile device npu for torch .*, got: runtime.h:3: error: no such"):
        build.library()
    monkeypatch.setenv("CXX", "/nowhere/c++ -O2")
    with pytest.raises(build.BuildError, match=r"expected a C.. compiler .*, got CXX=/nowhere/c.., which is not found"):
        build.library()
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(compiler))  # a file, where a folder should be
    with pytest.raises(build.BuildError, match=r"expected a writable folder for the compiled device, got .* \(set"):
        build.library()


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the compiled device fail to load, as in a process without a C++ compiler."""

    def load(base: str) -> None:
        raise build.BuildError("npu.install: expected a C++ compiler, got none")

    monkeypatch.setattr(backend, "load", load)
    yield
    npu.uninstall()


@pytest.mark.usefixtures("uncompiled")
def test_install_without_compiler_warns_once_and_aliases_cpu() -> None:
    with pytest.warns(ContractWarning, match='got none. Until then "npu" is another name of cpu') as warned:
        npu.install()
    npu.install()  # and says nothing more
    assert len(warned) == 1
    x = torch.ones(2, 2, device="npu")
    assert x.is_npu
    assert x.device.type == "cpu"

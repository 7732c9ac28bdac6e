"""`fusion-attention capi` prints options for build systems."""

import json
import shlex
from pathlib import Path

import pytest
from support.commands import run

import fusion_attention as fa
from fusion_attention.capi import environment


def invoke(*arguments: str | Path) -> tuple[int, str]:
    outcome = run("capi", *arguments)
    return outcome.code, outcome.out + outcome.err


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of libraries with a space in its path, at which a shell would split it."""
    folder = tmp_path / "a place" / "lib64"
    folder.mkdir(parents=True)
    for name in environment.LIBRARIES:
        (folder / f"lib{name}.so").touch()
    monkeypatch.setattr(environment, "LIBRARY", folder)
    return folder


def test_capi_prints_existing_include_library_and_cmake_paths(built: Path) -> None:
    assert invoke("--include-dir") == (0, f"{environment.INCLUDE}\n")
    assert (environment.INCLUDE / "acl/acl.h").is_file()
    assert invoke("--lib-dir", "--prefix") == (0, f"{environment.ROOT}\n{built}\n")
    assert (Path(invoke("--cmake-dir")[1].strip()) / "fusion_attention-config.cmake").is_file()
    assert (Path(invoke("--pkg-config-dir")[1].strip()) / "fusion_attention.pc").is_file()


def test_libs_and_cflags_print_one_shell_quoted_line(built: Path) -> None:
    code, text = invoke("--libs", "--cflags")
    assert code == 0
    assert text.count("\n") == 1
    links = [f"-L{built}", f"-Wl,-rpath,{built}", "-lopapi", "-lnnopbase", "-lascendcl"]
    assert shlex.split(text) == [f"-I{environment.INCLUDE}", *links]


def test_missing_libraries_are_named(built: Path) -> None:
    (built / "libnnopbase.so").unlink()
    code, text = invoke("--libs")
    assert code == 2
    assert "libnnopbase.so: not in" in text
    assert "libopapi" not in text
    assert invoke("--cflags")[0] == 0


def test_capi_json_contains_paths_flags_and_missing_libraries(built: Path) -> None:
    (built / "libopapi.so").unlink()
    code, text = invoke("--json")
    result = json.loads(text)
    assert code == 0
    assert result["missing"] == [str(built / "libopapi.so")]
    assert result["lib_dir"] == str(built)
    assert result["libs"] in text


def test_capi_without_options_is_an_error() -> None:
    code, text = invoke()
    assert code == 2
    assert "expected an option" in text


def test_cmake_and_pkg_config_files_have_the_package_version() -> None:
    cmake = environment.CMAKE / "fusion_attention-config-version.cmake"
    assert f'set(PACKAGE_VERSION "{fa.__version__}")' in cmake.read_text(encoding="utf-8")
    package = environment.PKG_CONFIG / "fusion_attention.pc"
    assert f"Version: {fa.__version__}\n" in package.read_text(encoding="utf-8")

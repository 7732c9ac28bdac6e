"""Builds of C programs: examples/capi by the commands of its README, CMakeLists in the style of CANN's samples and with
find_package, pkg-config; the libraries export all functions that the headers declare.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.markdown import blocks
from support.sources import ROOT

from fusion_attention.capi import environment

TOOLS = ("cc", "c++", "cmake", "nm")
pytestmark = [
    pytest.mark.skipif(bool(environment.missing()), reason="installed without its C API"),
    pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason=f"one of {', '.join(TOOLS)} is not there"),
]
EXAMPLES = ROOT / "examples/capi"
PROGRAMS = sorted(path.stem for path in EXAMPLES.glob("*.c"))
# CMakeLists in the style of CANN's samples: paths below ASCEND_CUSTOM_PATH, libraries as files, no package. A second
# program finds the package.
CMAKE = """
cmake_minimum_required(VERSION 3.14)
project(ACLNN_EXAMPLE)
add_compile_options(-std=c++11)
set(CMAKE_CXX_FLAGS_RELEASE "-fPIC -O0 -Wall")
add_executable(opapi_test program.cpp)
set(ASCEND_PATH $ENV{ASCEND_CUSTOM_PATH})
set(INCLUDE_BASE_DIR "${ASCEND_PATH}/include")
include_directories(${INCLUDE_BASE_DIR} ${INCLUDE_BASE_DIR}/aclnn)
target_link_libraries(opapi_test PRIVATE ${ASCEND_PATH}/lib64/libascendcl.so ${ASCEND_PATH}/lib64/libnnopbase.so
                      ${ASCEND_PATH}/lib64/libopapi.so)
find_package(fusion_attention REQUIRED)
add_executable(packaged program.cpp)
target_link_libraries(packaged PRIVATE fusion_attention::fusion_attention)
"""
# Calls the operator with invalid arguments before aclInit: the library must answer without starting Python.
PROGRAM = """
#include <stdio.h>
#include "acl/acl.h"
#include "aclnnop/aclnn_flash_attention_score.h"
#ifdef __cplusplus
#include <vector>
#include "acl_meta.h"
#include "aclnn/opdev/fp16_t.h"
static bool halves() {
    const std::vector<op::fp16_t> data = {0.1, 1, -2.5f};
    return sizeof(op::fp16_t) == 2 && data[0].val == 0x2E66 && data[1].val == 0x3C00 && data[2] == -2.5f;
}
#else
static bool halves(void) { return true; }
#endif
int main(void) {
    void *memory = NULL;
    if (!halves()) return 4;
    if (aclnnFlashAttentionScore(NULL, 0, NULL, NULL) == ACL_SUCCESS) return 1;
    if (aclInit(NULL) || aclrtSetDevice(0) || aclrtMalloc(&memory, 64, ACL_MEM_MALLOC_HUGE_FIRST)) return 2;
    if (aclrtFree(memory) || aclrtResetDevice(0) || aclFinalize()) return 3;
    puts("ran");
    return 0;
}
"""


def run(*command: str | Path, cwd: Path | None = None, **more: str) -> str:
    """Runs a command without LD_LIBRARY_PATH; returns its output."""
    variables = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"} | more
    words = [*map(str, command)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=cwd, env=variables, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_c_examples_compile_without_warnings_and_are_in_the_readme() -> None:
    flags = ["-std=c11", "-Wall", "-Wextra", "-pedantic", "-Werror", "-fsyntax-only", f"-I{environment.INCLUDE}"]
    run("cc", *flags, *(EXAMPLES / f"{name}.c" for name in PROGRAMS))
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert [name for name in PROGRAMS if f"| `{name}.c` |" not in text] == []


@pytest.mark.slow
def test_every_c_example_passes(tmp_path: Path) -> None:
    """The commands of the README build and run the programs."""
    folder = tmp_path / "c examples/build"
    folder.parent.mkdir()
    tool = folder.parent / "bin/fusion-attention"  # of this Python, installed or not
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m fusion_attention "$@"\n', encoding="utf-8")
    tool.chmod(0o755)
    (commands,) = blocks((EXAMPLES / "README.md").read_text(encoding="utf-8"), "sh")
    build, test = (line.replace("build/capi", f"'{folder}'") for line in commands.splitlines())
    assert str(folder) in build
    assert str(folder) in test
    path = f"{tool.parent}{os.pathsep}{os.environ['PATH']}"
    run("bash", "-ec", build, cwd=ROOT, CFLAGS="-O0", PATH=path)
    assert f"100% tests passed, 0 tests failed out of {len(PROGRAMS)}" in run("bash", "-ec", test, cwd=ROOT)


@pytest.mark.slow
@pytest.mark.parametrize(("program", "poisoned"), [("decode", "-Dexp=exp2"), ("kl_loss", "-Dfmax=fmin")])
def test_c_example_with_wrong_formula_exits_with_1(program: str, poisoned: str, tmp_path: Path) -> None:
    flags = shlex.split(f"{environment.cflags()} {environment.libs()} -lm")
    run("cc", "-std=c11", poisoned, EXAMPLES / f"{program}.c", *flags, "-o", tmp_path / program)
    done = subprocess.run([tmp_path / program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "WRONG" in done.stdout


def test_programs_build_and_run_with_cann_style_cmake_and_the_package(tmp_path: Path) -> None:
    """A CANN project needs no change except ASCEND_CUSTOM_PATH."""
    (tmp_path / "CMakeLists.txt").write_text(CMAKE, encoding="utf-8")
    (tmp_path / "program.cpp").write_text(PROGRAM, encoding="utf-8")
    paths = {"ASCEND_CUSTOM_PATH": str(environment.ROOT), "CMAKE_PREFIX_PATH": str(environment.CMAKE)}
    run("cmake", "-S", ".", "-B", "build", cwd=tmp_path, **paths)
    run("cmake", "--build", "build", cwd=tmp_path)
    assert [run(tmp_path / "build" / name) for name in ("opapi_test", "packaged")] == ["ran\n"] * 2


@pytest.mark.skipif(not shutil.which("pkg-config"), reason="no pkg-config")
def test_program_builds_and_runs_with_pkg_config(tmp_path: Path) -> None:
    (tmp_path / "program.c").write_text(PROGRAM, encoding="utf-8")
    words = ("--cflags", "--libs", "fusion_attention")
    result = run("pkg-config", *words, PKG_CONFIG_PATH=str(environment.PKG_CONFIG)).split()
    run("cc", "program.c", "-o", "program", *result, cwd=tmp_path)
    assert run(tmp_path / "program") == "ran\n"


def test_libraries_export_exactly_the_declared_functions() -> None:
    texts = [path.read_text(encoding="utf-8") for path in environment.INCLUDE.rglob("*.h")]
    declared = set(re.findall(r"(?:ACL_FUNC_VISIBILITY|ACLNN_FUNCTION) [\w ]+?[ *](\w+)\(", "".join(texts)))
    assert {"aclInit", "aclCreateTensor", "aclnnFlashAttentionScore", "aclGetRecentErrMsg"} <= declared
    exported = set()
    for name in environment.LIBRARIES:
        lines = run("nm", "-D", "--defined-only", environment.LIBRARY / f"lib{name}.so").splitlines()
        exported |= {line.split()[-1].partition("@")[0] for line in lines if line.split()[-2] in "TW"}
    assert {name for name in exported if name.lower().startswith("acl")} == declared

"""The runtime under sanitizers: hostile.c calls all functions in random order with invalid arguments from four threads.

Slow, because all sources are compiled; tests/capi/test_handles.py tests the installed libraries likewise.
"""

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.c_runtime import sources
from support.sources import ROOT

from fusion_attention.capi.environment import INCLUDE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux" or shutil.which("g++") is None, reason="builds with GCC, for Linux"),
]
# Memory that the library allocates by new[] can only be released by free() in a C program.
OPTIONS = {"ASAN_OPTIONS": "alloc_dealloc_mismatch=0:allocator_may_return_null=1", "TSAN_OPTIONS": "halt_on_error=1"}


def run(*command: str | Path, **more: str) -> str:
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False, env=more or None
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_c_runtime_under_sanitizers_survives_hostile_calls(tmp_path: Path, sanitizers: str) -> None:
    flags = ["-O1", "-g", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", f"-I{ROOT / 'csrc'}", f"-I{INCLUDE}"]
    results = [path for name in ("ascendcl", "nnopbase") for path in sources(name)]
    objects = [tmp_path / f"{path.stem}.o" for path in results]
    with ThreadPoolExecutor(2) as pool:
        for _ in pool.map(lambda s, o: run("g++", "-std=c++20", *flags, "-c", s, "-o", o), results, objects):
            pass
    driver, program = tmp_path / "hostile.o", tmp_path / "hostile"
    run("gcc", "-std=c11", "-Wall", "-Wextra", "-Werror", *flags, "-c", ROOT / "tests/capi/hostile.c", "-o", driver)
    run("g++", *flags[:3], *objects, driver, "-ldl", "-lpthread", "-o", program)
    for seed in range(1, 4):
        assert run(program, "20000", str(seed), **OPTIONS) == ""
    output = run(program, "2000", "4", FUSION_ATTENTION_CHECKED="1", **OPTIONS)
    assert all(line.startswith("fusion_attention: checked: ") for line in output.splitlines())

"""The GPU tests and the benchmark need torch, triton and the package's sources, and nothing else that a GPU's image may
lack: neither the native core nor any other package.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
LACKING = ("fusion_attention._native", "safetensors", "rich", "typer", "hypothesis", "matplotlib", "transformers")
BARE = f"""
import sys
sys.modules.update(dict.fromkeys({LACKING}))  # what is None there is not found
sys.path[:0] = [{str(ROOT / "src")!r}, {str(ROOT)!r}]
"""


def bare(program: str) -> subprocess.CompletedProcess[str]:
    """The program in a process that finds none of LACKING."""
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # a bare image has no plugins to load
    program = BARE + program
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, env=environment, check=False
    )


def test_the_gpu_tests_and_the_benchmark_load_and_say_that_there_is_no_gpu() -> None:
    done = bare("""
import pytest, runpy
code = pytest.main(["tests/gpu", "-q", "-rs", "-p", "no:cacheprovider"])
assert code == 0, code
sys.argv = ["benchmarks.gpu"]
runpy.run_module("benchmarks.gpu", run_name="__main__")
""")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "torch finds no GPU" in done.stdout
    assert "torch finds no GPU" in done.stderr

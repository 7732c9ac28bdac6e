"""The GPU tests and the benchmark need only torch, triton and the package's sources, without the native core."""

import os
from pathlib import Path

import pytest
from support.scripts import python

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
LACKING = ("fusion_attention._native", "safetensors", "rich", "typer", "hypothesis", "matplotlib", "transformers")
BARE = f"""
import os, sys
os.chdir({str(ROOT)!r})
sys.modules.update(dict.fromkeys({LACKING}))  # what is None there is not found
sys.path[:0] = [{str(ROOT / "src")!r}, {str(ROOT)!r}]
"""


def test_gpu_tests_and_benchmark_report_a_missing_gpu_on_a_bare_install() -> None:
    program = """
import pytest, runpy
code = pytest.main(["tests/gpu", "-q", "-rs", "-p", "no:cacheprovider"])
assert code == 0, code
sys.argv = ["benchmarks.gpu"]
runpy.run_module("benchmarks.gpu", run_name="__main__")
"""
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # a bare image has no plugins to load
    done = python("-c", BARE + program, environment=environment)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "torch finds no GPU" in done.stdout
    assert "torch finds no GPU" in done.stderr

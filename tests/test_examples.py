"""Every example runs: scripts, docstrings, and the python blocks of README and docs pages."""

import doctest
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTED = ("api", "api_sparse", "npu.training", "npu.sparse", "npu.install", "capture", "mask", "sampling")


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_examples_run(path: Path) -> None:
    run = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout


@pytest.mark.parametrize("name", DOCUMENTED)
def test_docstrings_say_what_happens(name: str) -> None:
    module = importlib.import_module(f"fusion_attention.{name}")
    found = doctest.testmod(module, extraglobs={"torch": importlib.import_module("torch")})
    assert found.attempted > 0
    assert found.failed == 0


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda path: path.stem
)
def test_pages_run(path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(path), "exec"), names)


def test_benchmarks_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "--quick", "--turns", "1", "--only", "packed"]
    command += ["--output", str(tmp_path / "figures")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    figures = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    assert [row["group"] for row in figures["rows"]] == ["packed", "packed"]
    assert all(row["ratio"] > 0 for row in figures["rows"])
    assert (tmp_path / "figures.png").read_bytes().startswith(b"\x89PNG")

"""The benchmarks run and write their results, and the memory of a long sequence stays within its limit."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as command
from benchmarks import captures, memory
from fusion_attention.bench.pair import Pair, measure

ROOT = Path(__file__).resolve().parents[2]
slow = pytest.mark.slow


def figures(folder: Path, group: str) -> dict[str, list[dict[str, Any]]]:
    command = [sys.executable, "-m", "benchmarks", "--quick", "--turns", "1", "--only", group]
    command += ["--output", str(folder / "figures")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    result = json.loads((folder / "figures.json").read_text(encoding="utf-8"))
    assert not result["rows"] or (folder / "figures.png").read_bytes().startswith(b"\x89PNG")
    return result


def test_benchmark_group_names_are_unique() -> None:
    """The test imports the command; the slow tests run it."""
    assert len({*command.NAMES}) == len(command.GROUPS) + len(command.TABLES) == 23


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "title", "count"),
    [
        *(("packed", "packed", 7), ("gradients", "gradients", 20), ("steps", "steps", 4), ("threads", "threads", 9)),
        *(("loss", "indexer's loss", 10), ("compressed", "compressed keys", 7), ("npu", "npu", 2)),
        ("integrations", "integrations", 8),
    ],
)
def test_benchmark_group_writes_the_expected_rows(group: str, title: str, count: int, tmp_path: Path) -> None:
    result = figures(tmp_path, group)
    assert [title in str(row["group"]) for row in result["rows"]] == [True] * count
    assert all(row["ratio"] > 0 and row["gflops"] > 0 for row in result["rows"])
    assert result["memory"] == []


@slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_launches_benchmark_reports_triton_launch_counts(tmp_path: Path) -> None:
    launches = [row["name"].rpartition(", ")[2] for row in figures(tmp_path, "launches")["launches"]]
    assert launches == ["2 launches", "5 launches", "3 launches", "3 launches"]


def test_peer_with_other_flops_is_compared_by_flop_rate() -> None:
    pair = Pair("", "", "", lambda: sum(range(200_000)), lambda: sum(range(200_000)), flops=100, peer_flops=400)
    result = measure(pair, 9)
    assert 0.1 < result.ratio < 0.6  # as long for a quarter of the work
    assert 0 < result.low <= result.ratio <= result.high


@pytest.mark.slow
def test_measured_memory_is_within_the_planned_memory() -> None:
    (row,) = memory.measured(4096, ["fp32"])
    assert row.length == 4096
    assert 0 < row.extra_mb <= max(row.forward_mb, row.backward_mb) + 2


@slow
def test_memory_benchmark_reports_every_dtype(tmp_path: Path) -> None:
    result = figures(tmp_path, "memory")
    assert [row["dtype"] for row in result["memory"]] == ["bf16", "fp32", "fp16"]
    assert result["rows"] == []


@slow
def test_memory_of_a_long_sequence_stays_within_its_limits() -> None:
    limits = {"bf16": 120, "fp32": 220, "fp16": 220}
    results = {row.dtype: row.extra_mb for row in memory.measured(65536)}
    assert results.keys() == limits.keys()
    assert all(results[dtype] < limits[dtype] for dtype in limits), results


def test_capture_benchmark_measures_every_recording_mode() -> None:
    result = captures.costs(files=30, turns=5)
    assert list(result) == [captures.ALONE, captures.DISK, captures.EMPTY, "recorded, 30 files"]
    assert result[captures.ALONE] < result[captures.EMPTY]
    assert all(cpu > 0 for _, cpu in result.values())

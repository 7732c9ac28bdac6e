"""`fusion-attention bench`: rows, files, charts, and the comparison of two runs."""

import json
import math
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import run as command

from fusion_attention.bench import cases
from fusion_attention.bench.changes import FiguresError, compared, figures
from fusion_attention.bench.pair import Timing
from fusion_attention.cli import bench as module
from fusion_attention.cli import machine

CPU = torch.device("cpu")


def run(*arguments: str) -> tuple[int, str, str]:
    return command("bench", *arguments)


# ---------------------------------------------------------------------------------------------------------------- rows


@pytest.mark.parametrize("group", cases.GROUPS)
def test_each_benchmark_and_peer_compute_equal_results(group: str) -> None:
    make, count = cases.GROUPS[group]
    pairs = list(make(CPU, True))
    assert len(pairs) == count
    for pair in pairs:
        assert pair.group == group
        assert pair.flops > 0
        ours, theirs = pair.ours(), pair.peer()
        if group == "packed":
            theirs = unpadded(theirs, ours)
        if group == "decoding":
            theirs = theirs.transpose(1, 2)
        for one, other in zip(*(t if isinstance(t, tuple) else (t,) for t in (ours, theirs)), strict=True):
            assert one.shape == other.shape
            # Another mask or scale changes results by about their size; sums of 512 terms differ only by rounding.
            assert (one - other).norm() < torch.finfo(one.dtype).eps * math.sqrt(512) * other.norm()


def unpadded(padded: Any, packed: Any) -> torch.Tensor:
    """Rows of `padded` [B, N, S, D] without padding, as [T, N, D]; the lengths are those in the benchmark's source."""
    lengths = [16, 40, 7, 120, 64, 33, 200, 12]
    assert sum(lengths) == packed.shape[0]
    return torch.cat([padded[b, :, :n].transpose(0, 1) for b, n in enumerate(lengths)])


def test_peers_lists_versions_or_reasons_for_absence(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cases.peers(CPU)["torch SDPA"] == torch.__version__
    assert cases.peers(CPU)["FlashAttention (flash_attn)"] == "computes only on GPUs"
    monkeypatch.setattr(cases.importlib.util, "find_spec", lambda name: None)
    assert cases.peers(torch.device("cuda"))["FlashAttention (flash_attn)"] == "not installed"


def test_bench_writes_json_and_chart_and_prints_table(tmp_path: Path) -> None:
    code, out, _ = run("--quick", "--turns", "1", "--only", "packed", "--output", str(tmp_path / "run.v1"))
    assert code == 0
    assert "padded torch SDPA" in out
    assert "peer torch SDPA" in out
    assert (tmp_path / "run.v1.png").read_bytes().startswith(b"\x89PNG")
    result = json.loads((tmp_path / "run.v1.json").read_text(encoding="utf-8"))
    assert [row["group"] for row in result["rows"]] == ["packed"] * 2
    assert result["peers"].keys() == cases.peers(CPU).keys()
    assert result["torch"] == torch.__version__
    assert len(figures(tmp_path / "run.v1.json")) == 2


def test_json_option_prints_only_json_and_without_matplotlib_there_is_no_chart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(machine, "peaks", lambda threads: {})
    output = ("--output", str(tmp_path / "figures"), "--json")
    code, out, err = run("--quick", "--turns", "1", "--only", "windows", *output)
    assert code == 0
    assert json.loads(out)["rows"][0]["group"] == "windows"
    assert "pip install matplotlib" in err
    assert [file.name for file in tmp_path.iterdir()] == ["figures.json"]


def test_bench_repository_option_requires_a_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REPOSITORY", tmp_path)
    code, _, err = run("--repository")
    assert code == 2
    assert "expected a clone of the repository" in err


@pytest.mark.slow
def test_bench_repository_option_runs_repository_benchmarks() -> None:
    program = "from fusion_attention.cli import main; main()"
    command = [sys.executable, "-c", program, "bench", "--repository", "--only", "packed", "--quick", "--turns", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=os.sep)
    assert done.returncode == 0, done.stderr
    assert "128 of 16 tokens" in done.stdout


# ------------------------------------------------------------------------------------------------------------- changes


def row(name: str, ours: float, peer: float, spread: float = 0.01) -> dict[str, Any]:
    ratio = peer / ours
    low, high = ratio * (1 - spread), ratio * (1 + spread)
    return asdict(Timing("forward", name, "SDPA", ours, peer, ratio, 1.0, 0.0, 0.0, 0.0, low, high))


def file(path: Path, *timings: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"rows": timings}))
    return path


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ((2.0, 8.0), (1.0, 8.0), "faster"),
        ((1.0, 8.0), (2.0, 8.0), "slower"),
        ((1.0, 8.0), (2.0, 16.0), "same"),  # the machine is slower
        ((1.0, 8.0), (1.0, 4.0), "slower"),  # the machine is faster, and we are not
        ((1.0, 8.0), (1.02, 8.0), "same"),  # what two runs differ by
    ],
)
def test_compare_classifies_changes_as_faster_slower_or_same(
    before: tuple[float, float], after: tuple[float, float], says: str, tmp_path: Path
) -> None:
    one, other = file(tmp_path / "a.json", row("x", *before)), file(tmp_path / "b.json", row("x", *after))
    (change,), gone, new = compared(one, other)
    assert change.says == says
    assert (gone, new) == ([], [])
    assert change.faster == before[0] / after[0]
    assert change.net == (after[1] / after[0]) / (before[1] / before[0])


def test_overlapping_timing_ranges_count_as_same(tmp_path: Path) -> None:
    one = file(tmp_path / "a.json", row("x", 1.0, 8.0, 0.4))
    other = file(tmp_path / "b.json", row("x", 1.3, 8.0, 0.4))
    assert [change.says for change in compared(one, other)[0]] == ["same"]
    assert [change.says for change in compared(other, one)[0]] == ["same"]


def test_bench_compare_prints_changes_and_unmatched_rows(tmp_path: Path) -> None:
    one = file(tmp_path / "a.json", row("x", 2.0, 8.0), row("old", 1.0, 1.0), row("y", 1.0, 2.0))
    other = file(tmp_path / "b.json", row("x", 1.0, 8.0), row("new", 1.0, 1.0), row("y", 1.0, 2.0))
    code, out, _ = run("--compare", str(one), str(other))
    assert code == 0
    assert "1 faster, 0 slower, 1 same" in out
    assert f"only in {one}: forward: old" in out
    assert f"only in {other}: forward: new" in out
    result = json.loads(run("--compare", str(one), str(other), "--json")[1])
    assert [change["says"] for change in result["changes"]] == ["faster", "same"]
    assert result["only_after"] == ["forward: new"]


BAD = [
    "", "[", "[]", "{}", "null", '{"rows": []}', '{"rows": {}}', '{"rows": [1]}', '{"rows": [{}]}', "[" * 100_000,
    *(json.dumps({"rows": [{**row("x", 1.0, 2.0), word: value}]})
      for word, value in (("ours_ms", 0), ("ours_ms", -1), ("peer_ms", None), ("ratio", "2"), ("group", 3),
                          ("name", None), ("ours_ms", True), ("ratio", float("nan")), ("peer_ms", float("inf")))),
]  # fmt: skip


@pytest.mark.parametrize("text", BAD, ids=range(len(BAD)))
def test_bench_compare_refuses_invalid_result_files(text: str, tmp_path: Path) -> None:
    bad, good = tmp_path / "bad.json", file(tmp_path / "good.json", row("x", 1.0, 2.0))
    bad.write_text(text)
    with pytest.raises(FiguresError) as error:
        compared(good, bad)
    assert str(bad) in str(error.value)
    assert run("--compare", str(bad), str(good))[0] == 2


def test_bench_compare_refuses_files_without_common_rows(tmp_path: Path) -> None:
    one, other = file(tmp_path / "a.json", row("x", 1.0, 2.0)), file(tmp_path / "b.json", row("y", 1.0, 2.0))
    with pytest.raises(FiguresError, match="no row in common"):
        compared(one, other)


def test_bench_compare_accepts_older_files_without_ranges(tmp_path: Path) -> None:
    old = {word: value for word, value in row("x", 2.0, 8.0).items() if word not in ("low", "high")}
    one, other = file(tmp_path / "a.json", old), file(tmp_path / "b.json", row("x", 1.0, 8.0))
    assert [change.says for change in compared(one, other)[0]] == ["faster"]

"""`fusion-attention replay` computes captured calls again in order, with times and verdicts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.commands import content_of
from support.commands import run as command

import fusion_attention as fa
from fusion_attention import npu
from fusion_attention.cli.replay import session


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder with four captured calls of three operators, one with dropout."""
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(2, 40, 4, 64, generator=generator).bfloat16()
    with fa.capture(tmp_path / "calls"):
        npu.npu_fusion_attention(q, q, q, 4, "BSND", scale=0.125)
        fa.attention(q, q, q, band=fa.Band.causal())
        fa.decode_attention(q[:, :1], (q, q), kv_len=[40, 7])
        npu.npu_fusion_attention(q, q, q, 4, "BSND", scale=0.125, keep_prob=0.9, seed=5)
    return tmp_path / "calls"


def run(*arguments: str) -> tuple[int, str, str]:
    return command("replay", *arguments)


def report_of(*arguments: str) -> tuple[int, dict[str, Any]]:
    code, out, _ = run(*arguments, "--json")
    return code, json.loads(out)


def changed(file: Path, output: str) -> None:
    """Reverse the heads of an output in a capture file."""
    tensors, text = content_of(file)
    tensors[output] = tensors[output].flip(2).contiguous()
    save_file(tensors, file, text)


@pytest.mark.parametrize("backend", ["auto", "golden"])
def test_replay_of_correct_captures_reports_all_right(backend: str, folder: Path) -> None:
    code, report = report_of(str(folder), "--backend", backend)
    assert code == 0
    assert report["right"] == 4
    assert report["wrong"] == report["unreadable"] == 0
    names = ["npu_fusion_attention", "attention", "decode_attention", "npu_fusion_attention"]
    assert [call["operator"] for call in report["calls"]] == names
    assert all(call["milliseconds"] > 0 for call in report["calls"])
    assert report["milliseconds"] == sum(call["milliseconds"] for call in report["calls"])
    assert (max(call["worst"] for call in report["calls"]) == 0) == (backend == "auto")


def test_replay_reports_a_wrong_call_among_right_calls(folder: Path) -> None:
    changed(folder / "0001-attention.safetensors", "output.out")
    code, report = report_of(str(folder), "--runs", "0")
    assert code == 1
    assert [call["verdict"] for call in report["calls"]] == ["right", "wrong", "right", "right"]
    assert report["calls"][1]["reason"]
    assert report["calls"][1]["worst"] > 0.1
    assert [call["milliseconds"] for call in report["calls"]] == [0.0] * 4
    code, out, _ = run(str(folder))
    assert code == 1
    assert "3 right, 1 wrong" in out
    (line,) = [line for line in out.splitlines() if "0001-" in line]
    assert line.startswith("wrong")


@pytest.mark.parametrize("rows", [0, 1])
def test_output_of_wrong_shape_is_reported_as_unjudged(rows: int, folder: Path) -> None:
    tensors, text = content_of(file := folder / "0001-attention.safetensors")
    tensors["output.out"] = tensors["output.out"][:, :rows].contiguous()
    save_file(tensors, file, text)
    code, report = report_of(str(folder), "--runs", "0")
    assert code == 2
    assert [call["verdict"] for call in report["calls"]] == ["right", "unjudged", "right", "right"]
    assert "output out: expected bfloat16 [2, 40, 4, 64]" in report["calls"][1]["reason"]


def test_unreadable_files_do_not_stop_replay(folder: Path) -> None:
    (folder / "0002-decode_attention.safetensors").write_bytes(b"\0" * 40)
    (folder / "10000-x.safetensors").write_bytes(b"")
    code, report = report_of(str(folder))
    assert code == 2
    assert [call["verdict"] for call in report["calls"]] == ["right", "right", "unreadable", "right", "unreadable"]
    assert all("\n" not in call["reason"] for call in report["calls"])


def test_captures_are_replayed_in_numeric_order(tmp_path: Path) -> None:
    names = ["10000-a", "0002-b", "9999-c", "x", "0002-a"]
    for name in names:
        (tmp_path / f"{name}.safetensors").touch()
    (tmp_path / "notes.txt").touch()
    assert [file.stem for file in session([tmp_path])] == ["0002-a", "0002-b", "9999-c", "10000-a", "x"]
    chosen = [tmp_path / "x.safetensors", tmp_path / "9999-c.safetensors"]
    assert session(chosen) == chosen

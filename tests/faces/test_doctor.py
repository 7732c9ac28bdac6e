"""`fusion-attention doctor`: what it says of the processor."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.text import Text
from typer.testing import CliRunner

from fusion_attention import _native
from fusion_attention.cli import app
from fusion_attention.cli import doctor as module

FOUND = _native.cpu_features()


def said() -> str:
    outcome = CliRunner(env={"FORCE_COLOR": None}).invoke(app, ["doctor"], terminal_width=200)
    assert outcome.exit_code == 0
    return " ".join(Text.from_ansi(outcome.output).plain.split())


def test_it_names_features_and_instruction_sets() -> None:
    text = said()
    for name in (*FOUND["features"], *FOUND["built"]):
        assert f" {name} " in text
    assert f"chosen {FOUND['chosen']} " in text


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="no /proc/cpuinfo to compare with")
def test_features_are_those_of_the_system() -> None:
    named = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    old = {"sse4_2", "avx2", "fma", "f16c", "bmi2", "avx512f", "avx512vl", "asimd", "asimddp"}
    assert old & set(FOUND["features"]) == old & named
    # A system may be too old to know these by name.
    new = {"avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile", "amx_bf16", "i8mm", "bf16", "sve"}
    assert new & named <= set(FOUND["features"])


def test_a_note_on_processors_with_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    amx = [*FOUND["features"], "amx_tile", "amx_bf16"]
    monkeypatch.setattr(_native, "cpu_features", lambda: {**FOUND, "features": amx})
    assert " ".join(module.AMX_NOTE.split()) in said()
    assert module.notes(["avx2", "avx512_bf16"]) == []

"""`fusion-attention doctor`: its report on the machine, and its self test."""

import itertools
import json
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.commands import run
from support.sources import ROOT

from fusion_attention import _native
from fusion_attention.cli import doctor as module
from fusion_attention.cli import machine, selftest

FEATURES = _native.cpu_features()


def output_of(code: int = 0) -> str:
    outcome = run("doctor", "--quick")
    assert outcome.code == code, outcome
    return outcome.line


def facts(*arguments: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(run("doctor", "--json", *(arguments or ("--quick",))).out)
    return result


def test_doctor_lists_cpu_features_and_instruction_sets() -> None:
    text = output_of()
    for name in (*FEATURES["features"], *FEATURES["built"]):
        assert f" {name} " in text
    assert f"chosen {FEATURES['chosen']} " in text
    assert "Experimental" not in text
    assert facts()["native"] == FEATURES


@pytest.mark.skipif(bool(FEATURES["forced"]), reason="FUSION_ATTENTION_CPU hides features")
@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="no /proc/cpuinfo to compare with")
def test_cpu_features_match_proc_cpuinfo() -> None:
    named = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    old = {"sse4_2", "avx2", "fma", "f16c", "bmi2", "avx512f", "avx512vl", "asimd", "asimddp"}
    assert old & set(FEATURES["features"]) == old & named
    # Operating systems may be too old to know these names.
    new = {"avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile", "amx_bf16", "i8mm", "bf16", "sve"}
    assert new & named <= set(FEATURES["features"])


def test_doctor_prints_a_note_on_processors_with_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    amx = [*FEATURES["features"], "amx_tile", "amx_bf16"]
    monkeypatch.setattr(_native, "cpu_features", lambda: {**FEATURES, "features": amx})
    assert module.AMX_NOTE in output_of()
    why = "the system refuses memory for tiles (Invalid argument)"
    monkeypatch.setattr(_native, "cpu_features", lambda: {**FEATURES, "features": amx, "tiles_refused": why})
    assert f"This processor has AMX, but {why}: the library computes without it." in output_of()
    monkeypatch.setattr(_native, "cpu_features", lambda: {**FEATURES, "features": ["avx2", "avx512_bf16"]})
    assert "AMX" not in " ".join(facts()["notes"])


@pytest.mark.parametrize(
    ("system", "words"), [("darwin", "never run on a Mac"), ("win32", "never run with torch on Windows")]
)
def test_doctor_notes_that_macos_and_windows_are_untested(
    system: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "sys", SimpleNamespace(platform=system))
    (note,) = (note for note in facts()["notes"] if words in note)
    assert note.endswith("fusion-attention doctor --json")


# ------------------------------------------------------------------------------------------------------------- threads


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc/self/maps")
def test_doctor_lists_loaded_openmp_runtimes() -> None:
    result = facts()["openmp"]
    assert result
    assert all(re.search(r"lib(gomp|iomp5|omp)", Path(path).name) for path in result)
    assert result == machine.openmp_runtimes()


def test_doctor_notes_several_openmp_runtimes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maps = tmp_path / "maps"
    line = "7f00-7f01 r-xp 00000000 08:01 1 {}\n"
    files = ("/a/libgomp.so.1", "/b/libiomp5.so", "/b/libiomp5.so", "/c/libgomp-a34b3233.so.1", "/d/libcompress.so")
    maps.write_text("".join(line.format(file) for file in files))
    result = machine.openmp_runtimes(str(maps))
    assert result == ["/a/libgomp.so.1", "/b/libiomp5.so", "/c/libgomp-a34b3233.so.1"]
    assert machine.openmp_runtimes(str(tmp_path / "gone")) == []
    monkeypatch.setattr(machine, "openmp_runtimes", lambda: result)
    assert module.RUNTIMES_NOTE in facts()["notes"]
    assert facts()["problems"] == []


def test_doctor_notes_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cores", lambda: {"system": 64, "usable": 64, "quota": 1.0})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    result = facts()
    assert "set OMP_NUM_THREADS=1." in " ".join(result["notes"])
    assert result["environment"]["OMP_NUM_THREADS"] == "4"
    assert "64 of 64, a quota of 1" in output_of()


# ------------------------------------------------------------------------------------------------- packages and devices


@pytest.mark.parametrize(
    ("name", "installed", "says"),
    [
        ("torch", "2.13.0+cpu", "tested"),
        ("torch", "2.6.0", "tested"),
        ("torch", "2.5.1", "older than tested"),
        ("torch", "2.15.3", "tested"),
        ("torch", "2.16.0.dev1+cu130", "newer than tested"),
        ("torch", "3.0", "newer than tested"),
        ("torch", "", "missing"),
        ("triton", "", "not installed"),
    ],
)
def test_package_releases_are_compared_with_tested_range(name: str, installed: str, says: str) -> None:
    assert machine.release(name, installed).says == says


def test_doctor_reports_old_or_missing_packages_as_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "releases", lambda: [machine.release("torch", "2.1.0"), machine.release("numpy", "")])
    text = output_of(1)
    assert "PROBLEM: torch 2.1.0 is older than the tested 2.6 to 2.15" in text
    assert "PROBLEM: numpy is not installed" in text


def test_tested_release_ranges_match_constraints_and_pyproject() -> None:
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    for name in ("torch", "numpy", "triton", "transformers", "safetensors"):
        for pinned in re.findall(rf"^{name}==([\d.]+)", pins, re.M):
            assert machine.release(name, pinned).says == "tested", name
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"torch>={machine.TESTED["torch"][0]}"' in project
    assert f'requires-python = ">={machine.TESTED["python"][0]}"' in project
    assert re.findall(r"Python :: (3\.\d+)", project)[-1] == machine.TESTED["python"][1]


def test_doctor_explains_why_no_gpu_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = facts()["gpus"]
    assert not result["computes"]
    assert result["devices"] == []
    assert "the triton back end finds no GPU" in result["why_not"]
    if torch.version.cuda is None:
        assert "built without CUDA" in result["why_not"]
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    assert "triton is not installed" in machine.gpus()["why_not"]


def test_cuda_driver_error_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> int:
        raise RuntimeError("the driver is too old\nsecond line")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", fails)
    assert machine.gpus() == {"devices": [], "computes": False, "why_not": "the driver is too old"}


def test_doctor_reports_native_core_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    import fusion_attention

    monkeypatch.setitem(sys.modules, "fusion_attention._native", None)
    monkeypatch.delattr(fusion_attention, "_native", raising=False)
    result = module.facts()
    assert any("the native core cannot be loaded" in problem for problem in result["problems"])
    assert result["native"]["chosen"] == ""


# ----------------------------------------------------------------------------------------------------------- self test


def test_self_test_ends_at_the_time_limit() -> None:
    start = time.monotonic()
    outcomes = list(selftest.outcomes(["cpu"], 1.0))
    assert time.monotonic() - start < 20  # the last step may begin just before
    assert outcomes
    assert list(selftest.outcomes([], 1.0)) == []


@pytest.fixture
def a_second_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clock on which every step of the self test takes a second, on any machine."""
    gone = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: next(gone), perf_counter=time.perf_counter)
    monkeypatch.setattr(selftest, "time", clock)


def test_doctor_self_test_passes_and_measures_peaks(a_second_a_step: None, monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = list(selftest._of("cpu"))
    names = {step.name for step in fixed}
    assert {"decoding over pages", "the indexer's choice", f"instruction set {FEATURES['chosen']}"} <= names
    monkeypatch.setattr(selftest, "_of", lambda backend: fixed)
    result = facts("--seconds", str(len(fixed) + 4))
    assert result["problems"] == []
    assert set(result["peaks"]) == {"float32", "float16", "bfloat16", "read"}
    assert all(rate > 0 for rate in result["peaks"].values())
    test = result["self_test"]
    assert (test["wrong"], test["steps"], test["back_ends"]) == ([], len(fixed) + 4, ["cpu"])


def test_drawn_self_test_steps_are_deterministic() -> None:
    drawn = ([step.name for step, _ in zip(selftest._drawn(["cpu"]), range(9), strict=False)] for _ in range(2))
    assert next(drawn) == next(drawn)


@pytest.mark.parametrize("output_name", ["out", "dq", "indices"])
def test_doctor_self_test_detects_wrong_results(
    output_name: str, a_second_a_step: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if output_name == "indices":
        from fusion_attention.testing import sparse

        steps = [step for step in selftest._of("cpu") if "indexer" in step.name]
        monkeypatch.setattr(selftest, "_of", lambda backend: steps)
        chosen = sparse.chosen
        monkeypatch.setattr(sparse, "chosen", lambda call, name: (chosen(call, name)[0] + (name == "cpu"), None))
    else:
        run_ = selftest.run

        def wrong(*args: Any) -> dict[str, torch.Tensor]:
            result = run_(*args)
            result[output_name].view(-1)[1] += 1
            return result

        monkeypatch.setattr(selftest, "run", wrong)
    monkeypatch.setattr(machine, "peaks", lambda threads: {})
    result = facts("--seconds", "3")
    assert result["self_test"]["wrong"]
    assert result["problems"][0].startswith("self test: ")
    assert len(result["problems"]) <= module.SHOWN + 1

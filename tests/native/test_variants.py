"""The native module: instruction sets, the cap on them, and exports."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.scripts import python
from support.sources import ROOT

from fusion_attention import _native

FEATURES = _native.cpu_features()
BUILT, RUNNABLE = FEATURES["built"], FEATURES["runnable"]
NEEDS = FEATURES["needs"]


def test_chosen_instruction_set_is_strongest_fast_runnable_variant() -> None:
    """Intel's products of bfloat16 pairs are slow: a variant that adds only these is not chosen there."""
    assert BUILT[0] == RUNNABLE[0] == "base"
    assert list(NEEDS) == BUILT
    assert [name for name in BUILT if name in RUNNABLE] == RUNNABLE
    vendor = Path("/proc/cpuinfo")
    intel = vendor.exists() and "GenuineIntel" in vendor.read_text(encoding="utf-8")
    slow = {"v4+avx512bf16"} if intel and not FEATURES["forced"] else set()
    assert FEATURES["chosen"] == [name for name in RUNNABLE if name not in slow][-1]


def test_variant_is_runnable_if_cpu_has_all_required_features() -> None:
    defined_features = set(re.findall(r'\{"(\w+)", ', (ROOT / "csrc/cpu_features.cpp").read_text(encoding="utf-8")))
    refused = {"v4+amx"} if FEATURES["tiles_refused"] else set()
    runs = [name for name in BUILT if set(NEEDS[name]) <= set(FEATURES["features"]) and name not in refused]
    assert runs == RUNNABLE
    assert set().union(*NEEDS.values()) <= defined_features | {"amx_model"}, "a feature that is never found"


uncapped = pytest.mark.skipif(bool(FEATURES["forced"]), reason="FUSION_ATTENTION_CPU caps this process")


def capped(name: str, program: str) -> subprocess.CompletedProcess[str]:
    """Runs a program in a process with the instruction sets capped at `name` by FUSION_ATTENTION_CPU."""
    return python("-c", program, environment=os.environ | {"FUSION_ATTENTION_CPU": name})


@uncapped
@pytest.mark.parametrize("name", ["", *RUNNABLE])
def test_environment_variable_caps_runnable_variants(name: str) -> None:
    run = capped(name, "import json\nfrom fusion_attention import _native\nprint(json.dumps(_native.cpu_features()))")
    assert run.returncode == 0, run.stderr
    features = json.loads(run.stdout)
    assert (features["forced"], features["built"]) == (name, BUILT)
    if name:
        assert features["runnable"] == RUNNABLE[: RUNNABLE.index(name) + 1]
        assert features["chosen"] == name
        assert set(features["features"]) == set(NEEDS[name])


@pytest.mark.sampled(12)
@uncapped
@pytest.mark.parametrize("name", ["nonsense", "v3 ", *(n for n in BUILT if n not in RUNNABLE and n != "amx_model")])
def test_invalid_variant_cap_raises_error_that_lists_runnable_variants(name: str) -> None:
    says = f"FUSION_ATTENTION_CPU: expected a variant that this machine runs ({', '.join(RUNNABLE)}), got '{name}'"
    run = capped(name, "from fusion_attention import _native")
    assert run.returncode == 1
    assert f"ImportError: {says}" in run.stderr
    run = capped(name, "import torch, fusion_attention as fa\nx = torch.ones(1, 2, 1, 8)\nfa.attention(x, x, x)")
    assert run.returncode == 1
    assert "BackendError" in run.stderr
    assert says in run.stderr


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm is not installed")
def test_native_module_exports_only_the_init_function() -> None:
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", str(_native.__file__)], capture_output=True, text=True, check=True
    ).stdout
    assert [line.split()[-1] for line in listing.splitlines()] == ["PyInit__native"]

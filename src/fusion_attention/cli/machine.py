"""Facts about this machine: processor, threads, OpenMP runtimes, packages, GPUs, peaks.

Functions change nothing and raise no errors; facts that are not available are marked as missing.
"""

import importlib.util
import os
import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Oldest and newest tested releases; others may work too.
TESTED: dict[str, tuple[str, str]] = {
    "python": ("3.10", "3.14"),
    "torch": ("2.6", "2.15"),
    "numpy": ("2.2", "2.5"),
    "safetensors": ("0.8", "0.8"),
    "triton": ("3.6", "3.6"),
    "transformers": ("5.23", "5.23"),
}
NEEDED = ("python", "torch", "numpy", "safetensors")
# Environment variables that affect threads and devices.
_VARIABLES = (
    *("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"),
    *("KMP_BLOCKTIME", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "TRITON_INTERPRET", "FUSION_ATTENTION_TEAM"),
)
_RUNTIME = re.compile(r"(/\S*/lib(?:gomp|iomp5|omp|libomp)[-\w.]*\.(?:so|dylib)\S*)")


@dataclass(frozen=True)
class Release:
    """A package with its installed release, the range of tested releases, and the comparison of both."""

    name: str  # the package
    installed: str  # the installed release; "" if there is none
    tested: str  # the range of tested releases
    says: str  # the comparison of both: "tested", "older than tested", "missing" ...


def processor() -> str:
    """Returns the processor's name if the system has one, else its architecture."""
    names = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return f"{names[0]} ({platform.machine()})" if names else platform.machine()


def cores() -> dict[str, Any]:
    """Returns by name: the system's cores, those that this process may use, the container's quota (None: no limit)."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = None
    fields = " ".join(_lines("/sys/fs/cgroup/cpu.max")).split()
    if len(fields) == 2 and all(field.isdigit() for field in fields) and int(fields[1]):
        quota = int(fields[0]) / int(fields[1])
    return {"system": os.cpu_count(), "usable": usable, "quota": quota}


def settings() -> dict[str, str]:
    """Returns the environment variables that affect threads and devices, by name."""
    return {name: os.environ[name] for name in _VARIABLES if name in os.environ}


def openmp_runtimes(maps: str = "/proc/self/maps") -> list[str]:
    """Returns the paths of the OpenMP runtimes that this process has loaded; maps: Linux's list of mapped files."""
    result = (match[1] for line in _lines(maps) if (match := _RUNTIME.search(line)))
    return sorted(dict.fromkeys(result))


def releases() -> list[Release]:
    """Returns the installed and the tested releases of every package in TESTED."""
    return [release(name, _installed(name)) for name in TESTED]


def release(name: str, installed: str) -> Release:
    """Returns a comparison of package `name`'s installed release ("": none) with the range of tested ones."""
    oldest, newest = TESTED[name]
    tested = oldest if oldest == newest else f"{oldest} to {newest}"
    if not installed:
        return Release(name, "", tested, "missing" if name in NEEDED else "not installed")
    number = _number(installed)
    if number < _number(oldest):
        says = "older than tested"
    else:
        says = "newer than tested" if number[:2] > _number(newest)[:2] else "tested"
    return Release(name, installed, tested, says)


def gpus() -> dict[str, Any]:
    """Returns by name: the GPUs, True if this library can compute on them, and otherwise the reason."""
    import torch

    results: list[dict[str, Any]] = []
    try:
        if torch.cuda.is_available():
            for number in range(torch.cuda.device_count()):
                properties = torch.cuda.get_device_properties(number)
                memory = round(properties.total_memory / 2**30, 1)
                capability = f"{properties.major}.{properties.minor}"
                results.append({"name": properties.name, "capability": capability, "memory_gib": memory})
    except (RuntimeError, AssertionError) as error:  # an incompatible driver
        return {"devices": [], "computes": False, "why_not": (str(error) or type(error).__name__).splitlines()[0]}
    why = back_ends()["triton"]
    reasons = [] if why == "yes" else [why]
    if reasons and importlib.util.find_spec("triton") is None:
        reasons.insert(0, 'triton is not installed: pip install "fusion-attention[triton]"')
    if reasons and not results and torch.version.cuda is None:
        reasons.insert(0, f"torch {torch.__version__} is built without CUDA")
    elif reasons and not results and not Path("/dev/nvidiactl").exists():
        reasons.insert(0, "the system has no NVIDIA driver (/dev/nvidiactl)")
    return {"devices": results, "computes": not reasons, "why_not": "; ".join(reasons)}


def npu() -> str:
    """Returns a sentence about torch_npu: installed, missing, or provided by this library."""
    if vars(sys.modules.get("torch_npu", object)).get("__fusion_attention__"):
        return "fusion_attention provides torch_npu in this process"
    try:
        result = importlib.util.find_spec("torch_npu")
    except (ValueError, ImportError):
        result = None
    return "torch_npu is installed" if result else "no torch_npu: fusion_attention.npu has its functions"


def back_ends() -> dict[str, str]:
    """Returns for every back end "yes", or the reasons why it cannot compute on this machine."""
    import torch

    from fusion_attention.backends import BACKENDS, reasons_of
    from fusion_attention.ir.problem import Problem

    problem = Problem(heads_q=1, heads_kv=1, dim_qk=64, dim_v=64, scale=0.125)
    results = {}
    for name in BACKENDS:
        reasons = reasons_of(name, problem, torch.device("cuda" if name == "triton" else "cpu"))
        results[name] = " ".join(reasons) or "yes"
    return results


def peaks(threads: int) -> dict[str, float]:
    """Measures peak rates with a number of threads: multiply-adds by dtype in GFLOP/s, reading memory in GB/s."""
    from fusion_attention import _native

    return {name: round(rate, 1) for name, rate in _native.machine_peak(threads).items()}


def _installed(name: str) -> str:
    if name == "python":
        return platform.python_version()
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _number(text: str) -> tuple[int, ...]:
    """Returns the numbers of a version text: (2, 13, 0) for "2.13.0+cpu"."""
    return tuple(int(digits) for digits in re.findall(r"\d+", text.split("+")[0])[:3])


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []

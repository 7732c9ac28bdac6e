"""torch_npu.profiler: torch's profiler with torch_npu's names.

Settings for the chip alone (levels, counters of its cores) are accepted without effect.
"""

import warnings
from collections.abc import Callable, Iterable
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch
from torch import profiler as torchs


class ProfilerActivity(Enum):
    """Profiled activities; NPU is CUDA if there is a GPU, else the host, because operators run there."""

    CPU = "CPU"
    NPU = "NPU"


class ProfilerLevel:
    """Levels of detail of a profile; without effect."""

    Level0, Level1, Level2, Level_none = "Level0", "Level1", "Level2", "Level_none"


class AiCMetrics:
    """Names of counters of an NPU's cores in a profile; without effect."""

    PipeUtilization = "PipeUtilization"
    ArithmeticUtilization = "ArithmeticUtilization"
    Memory, MemoryL0, MemoryUB, MemoryAccess = "Memory", "MemoryL0", "MemoryUB", "MemoryAccess"
    ResourceConflictRatio, L2Cache, AiCoreNone = "ResourceConflictRatio", "L2Cache", "AiCoreNone"


class ExportType:
    """Formats of the chip's trace files; without effect: traces are torch's JSON."""

    Text, Db = "text", "db"


class HostSystem:
    """Names of the host's resources in a profile; without effect."""

    CPU, MEM, DISK, NETWORK, OSRT = "cpu", "mem", "disk", "network", "osrt"


class _ExperimentalConfig(SimpleNamespace):
    """Accepts every setting of a chip's profile, without effect."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)


class profile(torchs.profile):
    """torch.profiler.profile with torch_npu's arguments; it measures this machine."""

    def __init__(
        self,
        *,
        activities: Iterable[Any] | None = None,
        schedule: Callable[[int], Any] | None = None,
        on_trace_ready: Callable[..., Any] | None = None,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
        with_flops: bool = False,
        with_modules: bool = False,
        experimental_config: Any = None,
        use_cuda: bool | None = None,
        **_: Any,
    ) -> None:
        cpu, cuda = torchs.ProfilerActivity.CPU, torchs.ProfilerActivity.CUDA
        device = cuda if cuda in torchs.supported_activities() and torch.cuda.is_available() else cpu
        words = {ProfilerActivity.CPU: cpu, ProfilerActivity.NPU: device}
        super().__init__(
            activities=None if activities is None else list(dict.fromkeys(words.get(one, one) for one in activities)),
            schedule=schedule,
            on_trace_ready=on_trace_ready,
            record_shapes=record_shapes,
            profile_memory=profile_memory,
            with_stack=with_stack,
            with_flops=with_flops,
            with_modules=with_modules,
        )


def schedule(
    wait: int, active: int, warmup: int = 0, repeat: int = 0, skip_first: int = 0, **_: Any
) -> Callable[[int], Any]:
    """Returns torch.profiler.schedule(...), from step to profiler action, for arguments in torch_npu's order."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about a warm-up of 0, torch_npu's default
        return torchs.schedule(wait=wait, warmup=warmup, active=active, repeat=repeat, skip_first=skip_first)


def tensorboard_trace_handler(
    dir_name: str | None = None, worker_name: str | None = None, analyse_flag: bool = True, async_mode: bool = False
) -> Callable[..., None]:
    """Returns a handler that writes each trace to a folder (default: the current one), for Chrome and TensorBoard."""
    return torchs.tensorboard_trace_handler(dir_name or ".", worker_name)


def analyse(profiler_path: str, max_process_number: int = 0, **_: Any) -> None:
    """Does nothing: traces need no further analysis; the parameters are torch_npu's."""


NAMES: dict[str, Any] = {
    "profile": profile,
    "_KinetoProfile": torchs.profiler._KinetoProfile,
    "ProfilerActivity": ProfilerActivity,
    "ProfilerAction": torchs.ProfilerAction,
    "ProfilerLevel": ProfilerLevel,
    "AiCMetrics": AiCMetrics,
    "ExportType": ExportType,
    "HostSystem": HostSystem,
    "_ExperimentalConfig": _ExperimentalConfig,
    "schedule": schedule,
    "tensorboard_trace_handler": tensorboard_trace_handler,
    "supported_activities": lambda: set(ProfilerActivity),
    "supported_profiler_level": lambda: {ProfilerLevel.Level0, ProfilerLevel.Level1, ProfilerLevel.Level2},
    "supported_ai_core_metrics": lambda: {n for n in vars(AiCMetrics) if n[0] != "_" and n != "AiCoreNone"},
    "supported_export_type": lambda: {ExportType.Text, ExportType.Db},
    "analyse": analyse,
}

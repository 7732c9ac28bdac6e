"""Names of torch.npu and torch_npu.utils for memory statistics, profiler marks and counters.

device_module.py has those for devices, streams and seeds. On a host, statistics are the host's, or empty.
"""

from __future__ import annotations

import copy
import enum
import functools
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import collect_env

from fusion_attention import memory
from fusion_attention.acl.tensors import Format as AclFormat
from fusion_attention.npu.surface import graphs
from fusion_attention.npu.surface.device_module import number

_OPEN: dict[int, Any] = {}  # started ranges by number; global, because another thread may end a range
_NUMBERS = itertools.count(1)

# torch_npu's names of dtypes; a name for which torch has no dtype becomes a string, which no function accepts.
_TYPES = (
    "float8_e8m0fnu float8_e8m0 float8_e4m3fn float8_e5m2 float4_e2m1fn_x2 float4_e1m2fn_x2 float4_e1m2 hifloat8 int4"
)


Format = enum.IntEnum(  # type: ignore[misc]
    "Format", {one.name.removeprefix("ACL_").removeprefix("FORMAT_"): one.value for one in AclFormat}
)
Format.__doc__ = "The chip's memory layouts of a tensor, such as ND and NZ, as npu_format_cast numbers them."


class mstx:
    """Marks in a profile, made by torch.profiler.record_function."""

    @staticmethod
    def mark(message: str = "", stream: Any = None, domain: str = "default") -> None:
        """Marks a point in time in torch's profile, with a message."""
        with torch.profiler.record_function(message):
            pass

    @staticmethod
    def range_start(message: str, stream: Any = None, domain: str = "default") -> int:
        """Starts a range in torch's profile, and returns its number; 0 for an empty message."""
        if not message or not isinstance(message, str):
            return 0
        result = next(_NUMBERS)
        _OPEN[result] = torch.profiler.record_function(message)
        _OPEN[result].__enter__()
        return result

    @staticmethod
    def range_end(range_id: int, domain: str = "default") -> None:
        """Ends the range with the number range_id; unknown numbers are ignored."""
        if (result := _OPEN.pop(range_id, None)) is not None:
            result.__exit__(None, None, None)

    @staticmethod
    def mstx_range(message: str, stream: Any = None, domain: str = "default") -> Callable[..., Any]:
        """Returns a decorator that marks each call of a function as a range."""

        def marked(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                with torch.profiler.record_function(message):
                    return function(*args, **kwargs)

            return wrapper

        return marked


class FlopsCounter:
    """Counts floating-point operations between start() and stop() by torch's formulas.
    torch has formulas for matrix products and for its attention. Operators of this library count as 0."""

    def __init__(self) -> None:
        self._mode: Any = None
        self._before = 0

    def __enter__(self) -> FlopsCounter:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.pause()

    def start(self) -> None:
        """Starts counting floating-point operations from 0."""
        self.stop()
        self.resume()

    def stop(self) -> None:
        """Stops counting, and resets the count."""
        self.pause()
        self._before = 0

    def pause(self) -> None:
        """Stops counting; the count is kept."""
        if self._mode is not None:
            self._before = self._count()
            self._mode.__exit__(None, None, None)
            self._mode = None

    def resume(self) -> None:
        """Continues counting, after pause()."""
        if self._mode is None:
            from torch.utils.flop_counter import FlopCounterMode  # which loads Triton

            self._mode = FlopCounterMode(display=False)
            self._mode.__enter__()

    def _count(self) -> int:
        return self._before + (self._mode.get_total_flops() if self._mode is not None else 0)

    def get_flops(self) -> list[int]:
        """Returns torch_npu's pair [recorded, traversed] of counts, which are equal here."""
        return [self._count(), self._count()]


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Returns (free, total) bytes of the machine's memory."""
    number(device)
    return memory.of_machine()


def _of_device(result: Any, why: str = "the host's memory is not counted") -> Callable[..., Any]:
    """Returns a function that checks a device and returns a copy of `result`; why: the reason, for its docstring."""

    def function(device: Any = None, *_: Any, **__: Any) -> Any:
        number(device)
        return copy.copy(result)

    function.__doc__ = f"Returns {result!r}: {why}."
    return function


def can_device_access_peer(device: Any, peer: Any) -> bool:
    """True for two different devices, which share one memory."""
    return number(device) != number(peer)


def get_pretty_env_info() -> str:
    """Returns torch's report of this machine, with a line that this library replaces torch_npu."""
    report = collect_env.get_pretty_env_info()
    return f"{report}\n\ntorch_npu: implemented by fusion_attention, version {_version()}; CANN: none"


def _nothing(*_: Any, **__: Any) -> None:
    """Accepts any arguments, without effect."""


# Functions about compilation, dumps, checks and caches of the chip; they accept all arguments, without effect.
_WITHOUT_EFFECT = (
    "init_dump finalize_dump set_dump set_aoe set_mm_bmm_format_nd set_sync_debug_mode ipc_collect "
    "empty_virt_addr_cache enable_deterministic_with_backward disable_deterministic_with_backward "
    "clear_npu_overflow_flag set_op_timeout_ms "
    "set_per_process_memory_fraction reset_max_memory_allocated reset_max_memory_cached host_empty_cache "
    "reset_accumulated_memory_stats set_deterministic_level set_device_limit set_stream_limit reset_stream_limit"
)

_COUNTERS = "memory_allocated max_memory_allocated memory_reserved max_memory_reserved memory_cached max_memory_cached"


def names() -> dict[str, Any]:
    """Returns {name: object} of torch.npu for statistics, marks, graphs; on a GPU torch.cuda's names replace some."""
    return {
        **graphs.NAMES,
        **dict.fromkeys(_WITHOUT_EFFECT.split(), _nothing),
        "mstx": mstx,
        "mem_get_info": mem_get_info,
        "memory_stats": _of_device({}),
        "memory_summary": _of_device("fusion_attention does not count the host's memory"),
        **dict.fromkeys((*_COUNTERS.split(), "utilization"), _of_device(0)),
        "reset_peak_memory_stats": _of_device(None),
        "get_device_capability": _of_device(None, "so does torch_npu by default"),
        "can_device_access_peer": can_device_access_peer,
        "get_sync_debug_mode": lambda: 0,
        "get_mm_bmm_format_nd": lambda: True,
        "is_jit_compile_false": lambda: True,
        "get_npu_overflow_flag": lambda: False,  # overflow gives infinities and sets no flag
        "matmul": SimpleNamespace(allow_hf32=False),
        "conv": SimpleNamespace(allow_hf32=False),
    }


def utils() -> dict[str, dict[str, Any]]:
    """Returns {module name without "torch_npu.": {name: object}} of torch_npu.utils and its submodules."""
    environment = {"get_pretty_env_info": get_pretty_env_info, "get_env_info": collect_env.get_env_info}
    environment |= {"get_cann_version": lambda: "not known", "get_torch_npu_version": _version, "main": _print}
    return {
        "utils": {
            "FlopsCounter": FlopsCounter,
            "set_thread_affinity": _nothing,
            "reset_thread_affinity": _nothing,
            "get_cann_version": lambda module="CANN": "",  # torch_npu's value without CANN
        },
        "utils.flops_count": {"FlopsCounter": FlopsCounter},
        "utils.collect_env": environment,
    }


def _version() -> str:
    import importlib.metadata

    return importlib.metadata.version("torch_npu")


def _print() -> None:
    print(get_pretty_env_info())  # noqa: T201  (the output of a program)


def types() -> dict[str, Any]:
    """Returns {torch_npu's name of a dtype: torch's dtype, or a string if torch has no such dtype}."""
    return {name: getattr(torch, name, f"torch_npu.{name}") for name in _TYPES.split()}

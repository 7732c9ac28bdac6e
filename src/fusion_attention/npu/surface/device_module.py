"""The content of the module torch.npu: devices, streams, events and random generators.

On a host, devices share one memory, and a stream's work is complete when a call returns. On a GPU, they are CUDA's.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from fusion_attention.ir.dropout import signed

DEVICES = 8  # number of NPUs in a usual Ascend machine
OFFSET_STEP = 12  # increment of a generator's offset by a call with dropout: ten draws, rounded up to a multiple of 4


def visible() -> int:
    """Returns the number of devices "npu" that this process shows. It is the number of leading integers in
    ASCEND_RT_VISIBLE_DEVICES, if that is set; else 8, or the launcher's number of processes if that is larger."""
    named = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    if named is not None:
        return len(list(itertools.takewhile(str.isdigit, map(str.strip, named.split(",")))))
    processes = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(DEVICES, int(processes) if processes.isdigit() else 0)


class Stream(torch.Stream):
    """A synchronous stream of the host: work is complete when a call returns."""

    priority: int

    def __new__(cls, device: Any = None, priority: int = 0, **ids: Any) -> Stream:
        """Returns a new stream on a device, or the stream with the ids (stream_id, device_index, device_type) of an
        existing one. priority: stored, without effect."""
        given = ids if "stream_id" in ids else {"device": torch.device(f"npu:{number(device)}")}
        stream: Stream = super().__new__(cls, **given)
        stream.priority = priority
        return stream

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device "npu:i" of the stream."""
        return torch.device(f"npu:{max(self.device_index, 0)}")

    def synchronize(self) -> None:
        """Does nothing: no work is pending."""

    def wait_stream(self, stream: Any) -> None:
        """Does nothing: no work is pending on the other stream."""

    def wait_event(self, event: Any) -> None:
        """Does nothing: a recorded event is complete."""

    def record_event(self, event: Any = None) -> Any:
        """Records an event, by default a new one, and returns it."""
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        """Returns True: no work is pending on a host's stream."""
        return True


class Event(torch.Event):
    """An event, which stores a time of the host's clock."""

    def __new__(cls, enable_timing: bool = False, *_: Any, **__: Any) -> Event:
        """Returns a new event that has not been recorded; enable_timing has no effect."""
        return super().__new__(cls, device=torch.device("npu"), enable_timing=enable_timing)

    def __init__(self, *_: Any, **__: Any) -> None:
        self.moment: float | None = None

    def record(self, stream: Any = None) -> None:
        """Stores the current time of the host's clock; `stream` has no effect."""
        self.moment = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Does nothing, on any stream: a recorded event is complete."""

    def synchronize(self) -> None:
        """Does nothing: a recorded event is complete."""

    def query(self) -> bool:
        """True: a recorded event is complete."""
        return True

    def elapsed_time(self, end: Any) -> float:
        """Returns the milliseconds from this event to `end`; both must have been recorded."""
        if self.moment is None or end.moment is None:
            raise RuntimeError("torch.npu.Event: elapsed_time: expected two recorded events")
        return float(1000 * (end.moment - self.moment))


class _Chosen(threading.local):
    """The current device of each thread, if "npu" is another name of the host."""

    device = 0


class _Host:
    """The functions of the module torch.npu on a host without a GPU, with the names that torch.cuda has."""

    def __init__(self, *, registers_device: bool) -> None:
        self.Stream, self.Event = Stream, Event
        self._registers_device, self._chosen, self._count, self._offset = registers_device, _Chosen(), 0, 0

    def is_available(self) -> bool:
        """True if there is a device."""
        return self.device_count() > 0

    def init(self) -> None:
        """Fixes the number of devices that later calls report; before, environment variables may still change it."""
        if not self._count:
            self._count = visible()
            if self._registers_device:
                torch.ops.fusion_attention_npu.set_count(self._count)

    def device_count(self) -> int:
        """Returns the number of devices, which all share the host's memory."""
        return self._count or visible()

    def current_device(self) -> int:
        """Returns the number of this thread's current device."""
        return torch.accelerator.current_device_index() if self._registers_device else self._chosen.device

    def set_device(self, device: Any) -> None:
        """Makes a device (its number, "npu:i" or a torch.device) this thread's current one."""
        self.init()
        self._chosen.device = number(device)
        if self._registers_device:
            torch.accelerator.set_device_index(self._chosen.device)

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        """Context in which this thread's current device is the given one; the previous one returns afterwards."""
        before = self.current_device()
        self.set_device(device)
        try:
            yield
        finally:
            self.set_device(before)

    def device_of(self, tensor: Any) -> AbstractContextManager[None]:
        """Returns a context in which the device of `tensor` is the current one; no change if it is not on "npu"."""
        return self.device(tensor.device if tensor.is_npu else None)

    def synchronize(self, device: Any = None) -> None:
        """Raises if `device` does not exist; else does nothing, since no work is pending."""
        number(device)

    def current_stream(self, device: Any = None) -> Stream:
        """Returns this thread's current stream of a device."""
        number_of_device = number(device)
        if not self._registers_device:
            return Stream(number_of_device)
        result = torch.accelerator.current_stream(number_of_device)
        return Stream(stream_id=result.stream_id, device_index=result.device_index, device_type=result.device_type)

    def default_stream(self, device: Any = None) -> Stream:
        """Returns the default stream of a device."""
        result = self.current_stream(device)
        return Stream(stream_id=0, device_index=result.device_index, device_type=result.device_type)

    def set_stream(self, stream: Stream) -> None:
        """Makes a stream the current one of its device."""
        if self._registers_device:
            torch.accelerator.set_stream(stream)

    @contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        """Context in which a stream and its device are the current ones."""
        if stream is None:
            yield
            return
        with self.device(stream.device_index if self._registers_device else None):
            before = self.current_stream()
            self.set_stream(stream)
            try:
                yield
            finally:
                self.set_stream(before)

    def manual_seed(self, seed: int) -> None:
        """Seeds the host's generator, which all devices "npu" share; sets the offset of dropout to 0."""
        torch.default_generator.manual_seed(int(seed))
        self._offset = 0

    manual_seed_all = manual_seed

    def seed(self) -> None:
        """Seeds the host's generator with a random number."""
        self.manual_seed(torch.default_generator.seed())

    seed_all = seed

    def initial_seed(self) -> int:
        """Returns the seed of the host's generator."""
        return torch.default_generator.initial_seed()

    def draw_pair(self) -> tuple[int, int]:
        """Returns (seed, offset) for the next attention with dropout; advances the offset as the chip does."""
        offset, self._offset = self._offset, (self._offset + OFFSET_STEP) % (1 << 32)
        return signed(self.initial_seed()), offset

    def get_rng_state_all(self) -> list[torch.Tensor]:
        """Returns the generator states of all devices, which share one generator."""
        return [self.get_rng_state()] * self.device_count()

    def set_rng_state_all(self, states: Sequence[torch.Tensor]) -> None:
        """Sets the generator that all devices share to the first of `states`."""
        self.set_rng_state(states[0])

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """Returns uint8 [bytes]: the state of the host's generator, followed by the offset of dropout in eight bytes.

        device: checked only, because all devices share one generator.
        """
        number(device)
        offset = torch.tensor([self._offset]).view(torch.uint8)
        return torch.cat([torch.default_generator.get_state(), offset])

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        """Sets the state of the host's generator, and the offset of dropout if `state` has one.
        state: uint8 [bytes] from get_rng_state(), or from torch.get_rng_state(), which has no offset: the offset then
        does not change. device: checked only, because all devices share one generator."""
        number(device)
        of_host = torch.default_generator.get_state().numel()
        torch.default_generator.set_state(state[:of_host])
        if state.numel() > of_host:
            self._offset = int(state[of_host:].clone().view(torch.int64))

    def get_device_name(self, device: Any = None) -> str:
        """Returns "fusion_attention on cpu", so that no program takes this device for an Ascend NPU."""
        number(device)
        return "fusion_attention on cpu"

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        """Returns a device's name, memory 0, and capability 0.0, which torch compares with those of CUDA devices."""
        return SimpleNamespace(name=self.get_device_name(device), total_memory=0, major=0, minor=0)

    def empty_cache(self) -> None:
        """Does nothing: no memory is cached."""

    def is_initialized(self) -> bool:
        """Returns True: a host needs no initialization."""
        return True

    def is_bf16_supported(self) -> bool:
        """Returns True: every back end of a host computes bfloat16."""
        return True


def number(device: Any) -> int:
    """Returns the number of a device of torch.npu; None: the current device."""
    npu: Any = torch.npu  # type: ignore[attr-defined]
    return index(device, npu.device_count(), npu.current_device())


def index(device: Any, count: int, current: int = 0) -> int:
    """Returns the number of a device given as "npu:1", 1 or a torch.device; for "npu" and None, `current`.

    count: number of devices.

    Raises:
        RuntimeError: there is no such device.
    """
    device_name = device
    if isinstance(device, torch.device):
        device_name = str(device).replace(torch.device("npu").type, "npu")  # torch.device("npu") may be another device
    if isinstance(device_name, str):
        name, colon, tail = device_name.partition(":")
        device_name = (int(tail) if tail.isdigit() else None if not colon else -1) if name == "npu" else -1
    if device_name is None:
        device_name = current
    if not isinstance(device_name, int) or not 0 <= device_name < count:
        raise RuntimeError(f"torch.npu: device: expected npu:0 to npu:{count - 1}, got {device!r}")
    return device_name


def names(base: torch.device, kind: str) -> dict[str, Any]:
    """Returns {name: object} for the module torch.npu: attributes of _Host on a CPU, of torch.cuda on a GPU.

    Args:
        base: the computing device.
        kind: device type of tensors on "npu": "npu", or that of base.
    """
    source: Any = _Host(registers_device=kind == "npu") if base.type == "cpu" else torch.cuda
    results = {name: getattr(source, name) for name in dir(source) if not name.startswith("_")}
    return results | {
        # Accepted without effect: options for the compilation of the chip's kernels.
        "set_compile_mode": lambda **_: None,
        "set_option": lambda _: None,
        "config": SimpleNamespace(allow_internal_format=False),
        "_lazy_call": lambda call: call(),  # Megatron's random.py calls it
        "_lazy_init": results["init"],
        "_initialized": True,  # torch.utils.checkpoint reads it before it saves the generator's state
        "_is_in_bad_fork": lambda: False,  # a host may be forked
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16, torch.float32],
    }


def amp(kind: str) -> dict[str, Any]:
    """Returns {name: object} of the module torch.npu.amp, for tensors on device type `kind`."""

    def autocast(enabled: bool = True, dtype: Any = None, cache_enabled: bool | None = None) -> torch.autocast:
        return torch.autocast(kind, dtype, enabled, cache_enabled)

    class GradScaler(torch.amp.GradScaler):
        """torch.amp.GradScaler for the device that represents the NPU."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            if not kwargs.pop("dynamic", True):
                raise NotImplementedError("torch.npu.amp.GradScaler: expected dynamic=True, got False")
            super().__init__(kind, *args, **kwargs)

    return {"autocast": autocast, "GradScaler": GradScaler}


def npu_check_overflow(grad: Any) -> bool:
    """True if a number `grad`, or the sum of the elements of a tensor `grad`, is infinite or NaN.

    Raises:
        RuntimeError: the argument is neither a float nor a tensor.
    """
    if not isinstance(grad, (float, torch.Tensor)):
        raise RuntimeError(f"torch.npu: npu_check_overflow: expected a float or a tensor, got {type(grad).__name__}")
    return not math.isfinite(float(grad if isinstance(grad, float) else grad.float().sum()))


CHECKS: dict[str, Any] = {
    "npu_check_overflow": npu_check_overflow,
    "is_support_inf_nan": lambda: True,  # overflow gives infinities and sets no flag
    "get_soc_version": lambda: -1,  # torch_npu's value for an unknown chip
}

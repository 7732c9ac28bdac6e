"""What the module that stands for torch.npu holds: devices over one memory (or CUDA's), streams that run in order."""

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

DEVICES = 8  # of a machine of the chip's
OFFSET_STEP = 12  # of a generator, by each call that drops: ten draws, in fours


def visible() -> int:
    """How many devices a host has: as many as a launcher starts processes here, and no less than a machine of the
    chip's; where ASCEND_RT_VISIBLE_DEVICES is set, as many as it names before something that is no number.
    """
    named = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    if named is not None:
        return len(list(itertools.takewhile(str.isdigit, map(str.strip, named.split(",")))))
    processes = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(DEVICES, int(processes) if processes.isdigit() else 0)


class Stream(torch.Stream):
    """A stream of the host: what it is given has run by the time the call returns."""

    priority: int

    def __new__(cls, device: Any = None, priority: int = 0, **ids: Any) -> Stream:
        """A new one on a device, or that of given ids."""
        stream: Stream = super().__new__(cls, **(ids if "stream_id" in ids else {"device": _device(device)}))
        stream.priority = priority
        return stream

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """That of tensors on "npu"."""
        return torch.device(f"npu:{max(self.device_index, 0)}")

    def synchronize(self) -> None:
        """Returns: nothing is pending."""

    def wait_stream(self, stream: Any) -> None:
        """Returns: nothing is pending on the other one."""

    def wait_event(self, event: Any) -> None:
        """Returns: the event has happened."""

    def record_event(self, event: Any = None) -> Any:
        """An event of now."""
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        """True: nothing is pending."""
        return True


class Event(torch.Event):
    """A moment on the host's clock."""

    def __new__(cls, enable_timing: bool = False, *_: Any, **__: Any) -> Event:
        """One that has not been recorded."""
        return super().__new__(cls, device=torch.device("npu"), enable_timing=enable_timing)

    def __init__(self, *_: Any, **__: Any) -> None:
        self.moment: float | None = None

    def record(self, stream: Any = None) -> None:
        """Takes the time."""
        self.moment = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Returns: the event has happened."""

    def synchronize(self) -> None:
        """Returns: the event has happened."""

    def query(self) -> bool:
        """True: the event has happened."""
        return True

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this event to another; both must have been recorded."""
        if self.moment is None or end.moment is None:
            raise RuntimeError("torch.npu.Event: elapsed_time: expected two recorded events")
        return float(1000 * (end.moment - self.moment))


class _Chosen(threading.local):
    """What torch keeps of a thread's device, where "npu" is another name of the host."""

    device = 0


class _Host:
    """torch.npu over the host: what torch.cuda offers, as far as it means something."""

    def __init__(self, *, registers_device: bool) -> None:
        self.Stream, self.Event = Stream, Event
        self._registers_device, self._chosen, self._count, self._offset = registers_device, _Chosen(), 0, 0

    def is_available(self) -> bool:
        """Whether there is a device."""
        return self.device_count() > 0

    def init(self) -> None:
        """Settles how many devices there are; programs say so in the environment before they use one."""
        if not self._count:
            self._count = visible()
            if self._registers_device:
                torch.ops.fusion_attention_npu.set_count(self._count)

    def device_count(self) -> int:
        """How many devices there are, all over the host's memory."""
        return self._count or visible()

    def current_device(self) -> int:
        """The number of the device that this thread has chosen."""
        return torch.accelerator.current_device_index() if self._registers_device else self._chosen.device

    def set_device(self, device: Any) -> None:
        """Chooses a device for this thread."""
        self.init()
        self._chosen.device = number(device)
        if self._registers_device:
            torch.accelerator.set_device_index(self._chosen.device)

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        """A block on a device."""
        before = self.current_device()
        self.set_device(device)
        try:
            yield
        finally:
            self.set_device(before)

    def device_of(self, tensor: Any) -> AbstractContextManager[None]:
        """A block on the device of a tensor, if it is one of these."""
        return self.device(tensor.device if tensor.is_npu else None)

    def synchronize(self, device: Any = None) -> None:
        """Returns: nothing is pending."""
        number(device)

    def current_stream(self, device: Any = None) -> Stream:
        """This thread's stream of a device."""
        number_of_device = number(device)
        if not self._registers_device:
            return Stream(number_of_device)
        result = torch.accelerator.current_stream(number_of_device)
        return Stream(stream_id=result.stream_id, device_index=result.device_index, device_type=result.device_type)

    def default_stream(self, device: Any = None) -> Stream:
        """The stream of a device where none was chosen."""
        result = self.current_stream(device)
        return Stream(stream_id=0, device_index=result.device_index, device_type=result.device_type)

    def set_stream(self, stream: Stream) -> None:
        """Makes a stream the current one of its device."""
        if self._registers_device:
            torch.accelerator.set_stream(stream)

    @contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        """A block with another current stream, on its device."""
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
        """Seeds the host's generator, which is this device's, and sets the offset of its draws to 0."""
        torch.default_generator.manual_seed(int(seed))
        self._offset = 0

    manual_seed_all = manual_seed

    def seed(self) -> None:
        """Seeds the host's generator by chance."""
        self.manual_seed(torch.default_generator.seed())

    seed_all = seed

    def initial_seed(self) -> int:
        """What the host's generator was seeded with."""
        return torch.default_generator.initial_seed()

    def draw_pair(self) -> tuple[int, int]:
        """The (seed, offset) that the next dropout of attention draws from; the offset grows as on the chip."""
        offset, self._offset = self._offset, (self._offset + OFFSET_STEP) % (1 << 32)
        return signed(self.initial_seed()), offset

    def get_rng_state_all(self) -> list[torch.Tensor]:
        """The state of every device: of the one generator that they have."""
        return [self.get_rng_state()] * self.device_count()

    def set_rng_state_all(self, states: Sequence[torch.Tensor]) -> None:
        """Puts the generator of all devices back into the state of the first."""
        self.set_rng_state(states[0])

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """The state of the host's generator, and the offset of its draws in eight bytes."""
        number(device)
        offset = torch.tensor([self._offset]).view(torch.uint8)
        return torch.cat([torch.default_generator.get_state(), offset])

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        """Puts the host's generator back into a state; one of torch.get_rng_state() leaves the offset of draws."""
        number(device)
        of_host = torch.default_generator.get_state().numel()
        torch.default_generator.set_state(state[:of_host])
        if state.numel() > of_host:
            self._offset = int(state[of_host:].clone().view(torch.int64))

    def get_device_name(self, device: Any = None) -> str:
        """What computes: never a chip's name."""
        number(device)
        return "fusion_attention on cpu"

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        """The name; a version below every one of CUDA's, which torch asks of programs for it; nothing is counted."""
        return SimpleNamespace(name=self.get_device_name(device), total_memory=0, major=0, minor=0)

    def empty_cache(self) -> None:
        """Nothing is cached."""

    def is_initialized(self) -> bool:
        """True."""
        return True

    def is_bf16_supported(self) -> bool:
        """True."""
        return True


def number(device: Any) -> int:
    """The number of a device of torch.npu as it is installed; the current one's for None."""
    npu: Any = torch.npu  # type: ignore[attr-defined]
    return index(device, npu.device_count(), npu.current_device())


def _device(device: Any) -> torch.device:
    return torch.device(f"npu:{number(device)}")


def index(device: Any, count: int, current: int = 0) -> int:
    """The number that "npu:1", 1, a torch.device, or "npu" or None (the current one) names.

    Raises:
        RuntimeError: there is no such device.
    """
    device_name = device
    if isinstance(device, torch.device):
        device_name = str(device).replace(torch.device("npu").type, "npu")  # which may be another name
    if isinstance(device_name, str):
        name, colon, tail = device_name.partition(":")
        device_name = (int(tail) if tail.isdigit() else None if not colon else -1) if name == "npu" else -1
    if device_name is None:
        device_name = current
    if not isinstance(device_name, int) or not 0 <= device_name < count:
        raise RuntimeError(f"torch.npu: device: expected npu:0 to npu:{count - 1}, got {device!r}")
    return device_name


def names(base: torch.device, kind: str) -> dict[str, Any]:
    """What the module torch.npu holds: over the host, or CUDA (whose own functions it then has).

    Args:
        base: the device that computes.
        kind: the type of device that tensors on "npu" have: "npu", or the base's.
    """
    source: Any = _Host(registers_device=kind == "npu") if base.type == "cpu" else torch.cuda
    results = {name: getattr(source, name) for name in dir(source) if not name.startswith("_")}
    return results | {
        # Accepted and without effect: how a chip compiles its kernels.
        "set_compile_mode": lambda **_: None,
        "set_option": lambda _: None,
        "config": SimpleNamespace(allow_internal_format=False),
        "_lazy_call": lambda call: call(),  # Megatron's random.py asks for it: nothing has to be waited for
        "_lazy_init": results["init"],
        "_initialized": True,  # torch.utils.checkpoint asks it before it keeps the generator's state
        "_is_in_bad_fork": lambda: False,  # a host may be forked
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16, torch.float32],
    }


def amp(kind: str) -> dict[str, Any]:
    """What the module torch.npu.amp holds, for a type of device."""

    def autocast(enabled: bool = True, dtype: Any = None, cache_enabled: bool | None = None) -> torch.autocast:
        return torch.autocast(kind, dtype, enabled, cache_enabled)

    class GradScaler(torch.amp.GradScaler):
        """torch's, of the device that stands for the NPU."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            if not kwargs.pop("dynamic", True):
                raise NotImplementedError("torch.npu.amp.GradScaler: expected dynamic=True, got False")
            super().__init__(kind, *args, **kwargs)

    return {"autocast": autocast, "GradScaler": GradScaler}


def npu_check_overflow(grad: Any) -> bool:
    """Whether a number, or the sum of a tensor, is infinite or NaN.

    Raises:
        RuntimeError: neither a number nor a tensor.
    """
    if not isinstance(grad, (float, torch.Tensor)):
        raise RuntimeError(f"torch.npu: npu_check_overflow: expected a float or a tensor, got {type(grad).__name__}")
    return not math.isfinite(float(grad if isinstance(grad, float) else grad.float().sum()))


CHECKS: dict[str, Any] = {
    "npu_check_overflow": npu_check_overflow,
    "is_support_inf_nan": lambda: True,  # what overflows is infinite, and no flag is raised
    "get_soc_version": lambda: -1,  # what torch_npu says of a chip that it does not know
}

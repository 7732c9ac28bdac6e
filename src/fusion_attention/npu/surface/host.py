"""What the module that stands for torch.npu holds: one device (or CUDA's), streams that run in order, counters.

Knows torch.cuda's interface, which torch.npu follows. Refuses to know attention, and how it gets its
place (install.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch


class Stream:
    """A stream of the host: what it is given has run by the time the call returns."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.priority = priority

    @property
    def device(self) -> torch.device:
        """That of tensors on "npu"."""
        return torch.empty(0, device="npu").device

    def synchronize(self) -> None:
        """Returns: nothing is pending."""

    def wait_stream(self, stream: Any) -> None:
        """Returns: nothing is pending on the other one."""

    def wait_event(self, event: Any) -> None:
        """Returns: the event has happened."""

    def record_event(self, event: Event | None = None) -> Event:
        """An event of now."""
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        """True: nothing is pending."""
        return True


class Event:
    """A moment on the host's clock."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
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

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to another; both must have been recorded."""
        if self.moment is None or end.moment is None:
            raise RuntimeError("torch.npu.Event: elapsed_time: expected two recorded events")
        return 1000 * (end.moment - self.moment)


class _Host:
    """torch.npu over the host: what torch.cuda offers, as far as it means something."""

    def __init__(self) -> None:
        self.Stream, self.Event = Stream, Event
        self.present = Stream()

    def is_available(self) -> bool:
        """True."""
        return True

    def device_count(self) -> int:
        """1."""
        return 1

    def current_device(self) -> int:
        """0."""
        return 0

    def set_device(self, device: Any) -> None:
        """Chooses device 0, the only one."""
        index(device, 1)

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        """A block on device 0, the only one."""
        index(device, 1)
        yield

    @contextmanager
    def device_of(self, tensor: Any) -> Iterator[None]:
        """A block on the device of a tensor, which is the only one."""
        yield

    def synchronize(self, device: Any = None) -> None:
        """Returns: nothing is pending."""

    def current_stream(self, device: Any = None) -> Stream:
        """The stream of this block."""
        return self.present

    default_stream = current_stream

    def set_stream(self, stream: Stream) -> None:
        """Makes a stream the current one."""
        self.present = stream

    @contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        """A block with another current stream."""
        before, self.present = self.present, stream or self.present
        try:
            yield
        finally:
            self.present = before

    def manual_seed(self, seed: int) -> None:
        """Seeds the host's generator, which is this device's."""
        torch.default_generator.manual_seed(int(seed))

    manual_seed_all = manual_seed

    def seed(self) -> None:
        """Seeds the host's generator by chance."""
        torch.default_generator.seed()

    seed_all = seed

    def initial_seed(self) -> int:
        """What the host's generator was seeded with."""
        return torch.default_generator.initial_seed()

    def get_rng_state_all(self) -> list[torch.Tensor]:
        """The state of every device: of one."""
        return [self.get_rng_state()]

    def set_rng_state_all(self, states: Sequence[torch.Tensor]) -> None:
        """Puts the only device's generator back into a state."""
        (state,) = states
        self.set_rng_state(state)

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """The state of the host's generator."""
        return torch.default_generator.get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        """Puts the host's generator back into a state."""
        torch.default_generator.set_state(state)

    def get_device_name(self, device: Any = None) -> str:
        """What computes: never a chip's name."""
        return "fusion_attention on cpu"

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        """The name; a version below every one of CUDA's, which torch asks of programs for it; nothing is counted."""
        return SimpleNamespace(name=self.get_device_name(), total_memory=0, major=0, minor=0)

    def empty_cache(self) -> None:
        """Nothing is cached."""

    def memory_allocated(self, device: Any = None) -> int:
        """0: the host's memory is not counted."""
        return 0

    max_memory_allocated = memory_reserved = max_memory_reserved = memory_allocated

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """Nothing is counted."""

    def is_initialized(self) -> bool:
        """True."""
        return True

    def init(self) -> None:
        """Nothing to do."""

    def is_bf16_supported(self) -> bool:
        """True."""
        return True


def index(device: Any, count: int) -> int:
    """The index that "npu:1", 1, a torch.device or None (0) names.

    Raises:
        RuntimeError: there is no such device.
    """
    number = device
    if device is None or isinstance(device, torch.device):
        number = device.index or 0 if device is not None else 0
    elif isinstance(device, str):
        name, _, tail = device.partition(":")
        number = int(tail or 0) if name == "npu" and (not tail or tail.isdigit()) else -1
    if not isinstance(number, int) or not 0 <= number < count:
        raise RuntimeError(f"torch.npu: device: expected npu:0 to npu:{count - 1}, got {device!r}")
    return number


def names(base: torch.device) -> dict[str, Any]:
    """What the module torch.npu holds: over the host, or CUDA (whose own functions it then has)."""
    source: Any = _Host() if base.type == "cpu" else torch.cuda
    found = {name: getattr(source, name) for name in dir(source) if not name.startswith("_")}
    return found | {
        # Accepted and without effect: how a chip compiles its kernels.
        "set_compile_mode": lambda **_: None,
        "set_option": lambda _: None,
        "config": SimpleNamespace(allow_internal_format=False),
        "_lazy_call": lambda call: call(),  # Megatron's random.py asks for it: nothing has to be waited for
        "_lazy_init": found["init"],
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

"""install() and uninstall(): this library as the module `torch_npu`, so that Ascend code runs without the chip.

The one place of the house that changes torch: every change is written down when it is made, and taken back from the
list. Refuses to touch a real torch_npu.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from fusion_attention.npu import device as npu_device
from fusion_attention.npu import dropout, indexer_loss, inference, sparse, training

NAME = "torch_npu"
_DEVICE = re.compile(r"npu(:\d+)?")
_ABSENT = object()


class _Devices(TorchFunctionMode):
    """Reads "npu" and "npu:0" as the device that computes, wherever torch is given a device."""

    def __init__(self, base: torch.device) -> None:
        super().__init__()
        self.base = base

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.device:
            return self.device(*args, **kwargs)
        device = kwargs.get("device")
        if type(device) is str and _DEVICE.fullmatch(device):
            kwargs = {**kwargs, "device": self.device(device)}
        if any(type(a) is str and _DEVICE.fullmatch(a) for a in args):
            args = tuple(self.device(a) if type(a) is str and _DEVICE.fullmatch(a) else a for a in args)
        return func(*args, **kwargs)

    def device(self, type: Any = None, index: int | None = None, **kwargs: Any) -> torch.device:
        """torch.device(...), with "npu" understood."""
        if not isinstance(type, str) or not _DEVICE.fullmatch(type):
            given = [a for a in (type, index) if a is not None]
            return torch.device(*given, **kwargs)
        name = type if index is None else f"{type}:{index}"
        count = torch.cuda.device_count() if self.base.type == "cuda" else 1
        number = npu_device.index(name, count)
        return self.base if self.base.type == "cpu" or name == "npu" else torch.device(self.base.type, number)


class _Distribution(importlib.metadata.Distribution):
    """What importlib.metadata finds of torch_npu: a name and a version."""

    def __init__(self, version: str) -> None:
        self.texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {version}\n",
            "top_level.txt": f"{NAME}\n",
        }

    def read_text(self, filename: str) -> str | None:
        """One of the files of a distribution."""
        return self.texts.get(filename)

    def locate_file(self, path: Any) -> Any:
        """Nothing lies anywhere."""
        raise FileNotFoundError(f"{NAME} is played by fusion_attention and has no files")


class _Finder:
    """Finds the modules and the distribution on sys.meta_path; loading hands out what install() made."""

    def __init__(self, modules: dict[str, ModuleType], version: str) -> None:
        self.modules, self.distribution = modules, _Distribution(version)
        for name, module in modules.items():
            module.__spec__ = importlib.machinery.ModuleSpec(name, self, origin="fusion_attention", is_package=True)  # type: ignore[arg-type]
            module.__loader__ = self  # type: ignore[assignment]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """The spec of one of the modules."""
        module = self.modules.get(name)
        return None if module is None else module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """The module itself."""
        return self.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: it is complete."""

    def find_distributions(self, context: Any = None) -> Iterable[importlib.metadata.Distribution]:
        """The distribution, if it is what is asked for."""
        asked = getattr(context, "name", None)
        if asked is None or re.sub(r"[-_.]+", "_", asked).lower() == NAME:
            yield self.distribution


class _Installed:
    """What install() changed, to take it back."""

    def __init__(self, base: torch.device) -> None:
        self.base = base
        self.changes: list[tuple[Any, str, Any]] = []
        self.mode = _Devices(base)
        self.modules = _modules(base)
        self.modules_before: dict[str, Any] = {}
        self.finder = _Finder(self.modules, self.modules[NAME].__version__)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Sets an attribute, and remembers what was there."""
        self.changes.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def begin(self) -> None:
        """Makes all changes."""
        base = self.base

        def npu(self: Any, device: Any = None, non_blocking: bool = False, **_: Any) -> Any:
            """A copy of the tensor on the device that stands for the NPU; the tensor itself if it lies there."""
            return self.to(_place(base, device), non_blocking=non_blocking)

        def module_npu(self: torch.nn.Module, device: Any = None) -> torch.nn.Module:
            """Moves all parameters and buffers to the device that stands for the NPU."""
            return self.to(_place(base, device))

        for name, module in self.modules.items():
            self.modules_before[name] = sys.modules.get(name, _ABSENT)
            sys.modules[name] = module
        sys.meta_path.append(self.finder)
        self.set(torch, "npu", self.modules[f"{NAME}.npu"])
        self.set(torch.Tensor, "npu", npu)
        self.set(torch.Tensor, "is_npu", property(lambda self: self.device.type == base.type))
        self.set(torch.nn.Module, "npu", module_npu)
        self.set(torch.autocast, "__init__", _mapped(torch.autocast.__init__, 1, "device_type", self.word))
        self.set(torch, "load", _mapped(torch.load, 1, "map_location", self.word))
        self.mode.__enter__()

    def word(self, value: Any) -> Any:
        """A device string with "npu" replaced."""
        if isinstance(value, str) and _DEVICE.fullmatch(value):
            device = self.mode.device(value)
            return device.type if value == "npu" else str(device)
        return value

    def end(self) -> None:
        """Takes all changes back, the last one first."""
        above = []
        while (mode := _pop_mode()) is not self.mode:
            above.append(mode)
        for mode in reversed(above):
            _push_mode(mode)
        for owner, name, before in reversed(self.changes):
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        sys.meta_path.remove(self.finder)
        for name, before in self.modules_before.items():
            if before is _ABSENT:
                del sys.modules[name]
            else:
                sys.modules[name] = before


_installed: _Installed | None = None


def _place(base: torch.device, device: Any) -> torch.device:
    if base.type == "cpu":
        npu_device.index(device, 1)
        return base
    return base if device is None else torch.device(base.type, npu_device.index(device, torch.cuda.device_count()))


def _mapped(function: Callable[..., Any], position: int, name: str, word: Callable[[Any], Any]) -> Callable[..., Any]:
    """A function whose argument at a position, or of a name, may say "npu"."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if name in kwargs:
            kwargs[name] = word(kwargs[name])
        elif len(args) > position:
            args = (*args[:position], word(args[position]), *args[position + 1 :])
        return function(*args, **kwargs)

    return wrapper


def _modules(base: torch.device) -> dict[str, ModuleType]:
    """torch_npu and torch_npu.npu."""
    torch_npu = ModuleType(NAME, "torch_npu, played by fusion_attention: the same calls on any machine.")
    npu = npu_device.module(base)
    functions = {
        name: getattr(module, name)
        for module in (training, dropout, inference, sparse, indexer_loss)
        for name in module.__all__
    }
    vars(torch_npu).update(functions, npu=npu, __path__=[], __all__=[*functions, "npu"])
    vars(npu).update(functions, __path__=[])
    torch_npu.__version__ = f"{torch.__version__.split('+')[0]}+fusion.attention"  # type: ignore[attr-defined]
    return {NAME: torch_npu, f"{NAME}.npu": npu}


def install(device: str | torch.device = "cpu") -> None:
    """Makes this library the module `torch_npu`, and "npu" another name of a device that is here.

    From then on `import torch_npu`, `torch.npu`, `x.npu()`, `x.is_npu`, `module.npu()` and the device strings "npu" and
    "npu:0" work, the last wherever torch dispatches a function (factories, to(), torch.device) or loads a file, in the
    thread that installs. A tensor's own device keeps its true name. A library that looked for torch_npu before
    remembers that there was none: install first, then import it. A second call changes nothing, or the device.

    Args:
        device: what computes: "cpu", or "cuda" where there is one.

    Raises:
        RuntimeError: a real torch_npu is installed here.
        ValueError: a device that cannot compute, or that is not here.

    Example:
        >>> install()
        >>> import torch_npu
        >>> q = torch.randn(1, 16, 2, 64, device="npu:0")
        >>> torch_npu.npu_fusion_attention(q, q, q, 2, "BSND", scale=0.125)[0].is_npu
        True
        >>> uninstall()
    """
    global _installed  # noqa: PLW0603  (the one place that changes torch has one state)
    base = torch.device(device)
    if base.type not in ("cpu", "cuda") or (base.type == "cuda" and not torch.cuda.is_available()):
        raise ValueError(f'npu.install: device: expected "cpu", or "cuda" where there is one, got {str(device)!r}')
    if _installed is not None:
        if _installed.base == base:
            return
        uninstall()
    if NAME in sys.modules or importlib.util.find_spec(NAME) is not None:
        raise RuntimeError("npu.install: a real torch_npu is installed here: import that one, or uninstall it first")
    _installed = _Installed(base)
    _installed.begin()


def uninstall() -> None:
    """Takes back everything that install() changed; nothing where nothing is installed.

    Example:
        >>> uninstall()
        >>> hasattr(torch, "npu")
        False
    """
    global _installed
    if _installed is not None:
        installed, _installed = _installed, None
        installed.end()

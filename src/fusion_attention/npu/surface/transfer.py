"""torch_npu.contrib.transfer_to_npu: importing it makes programs that were written for CUDA run on "npu".

uninstall() removes its patches, because install()'s Changes (patches.py) record them.
"""

from __future__ import annotations

import functools
import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from fusion_attention.patches import Changes, Layer

NAME = "torch_npu.contrib.transfer_to_npu"

# Functions and methods with a device argument, by position or keyword.
_FACTORIES = (
    "arange as_tensor asarray empty empty_like empty_permuted empty_strided eye from_file full full_like hann_window "
    "hamming_window kaiser_window bartlett_window blackman_window linspace logspace normal ones ones_like rand "
    "rand_like randint randint_like randn randn_like randperm scalar_tensor sparse_coo_tensor sparse_csr_tensor tensor "
    "tril_indices triu_indices zeros zeros_like range load set_default_device"
)
_METHODS = "to new_empty new_empty_strided new_full new_ones new_tensor new_zeros pin_memory"
_MODULES = "to to_empty"
_PROCESS_GROUPS = "init_process_group new_group"


class Finder:
    """An entry of sys.meta_path that finds the module transfer_to_npu, and applies the patches when it is imported."""

    def __init__(self, changes: Changes) -> None:
        self.changes = changes

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Returns the spec of transfer_to_npu; None for other modules."""
        return importlib.machinery.ModuleSpec(name, self, origin=__package__) if name == NAME else None  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Returns None, so that Python makes an empty module."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Applies the patches when transfer_to_npu is imported; module: its empty module, which is unchanged."""
        self.changes.after(sys.modules.pop, NAME, None)
        _transfer(self.changes)


def _npu(value: Any) -> Any:
    """Returns a device, device string or dictionary with "npu" in place of "cuda"; other values unchanged."""
    if isinstance(value, str):
        return value.replace("cuda", "npu") if value == "cuda" or value.startswith("cuda:") else value
    if isinstance(value, torch.device) and value.type == "cuda":
        return "npu" if value.index is None else f"npu:{value.index}"
    if isinstance(value, dict):
        return {_npu(key): _npu(one) for key, one in value.items()}
    return value


def _hccl(value: Any) -> Any:
    """Returns a string with "hccl" and "npu" in place of "nccl" and "cuda"; other values unchanged."""
    return value.replace("nccl", "hccl").replace("cuda", "npu") if isinstance(value, str) else value


def _translating(layer: Layer, word: Callable[[Any], Any] = _npu, *, numbers: bool = False) -> Callable[..., Any]:
    """Wraps the patched function layer.below: word() converts each argument. numbers: True if an integer is the index
    of a device, and becomes "npu:index"."""

    def translate(value: Any) -> Any:
        return f"npu:{value}" if numbers and type(value) is int else word(value)

    @functools.wraps(layer.below, updated=())
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return layer.below(*map(translate, args), **{name: word(value) for name, value in kwargs.items()})

    return wrapper


def _translating_class(layer: Layer) -> type:
    """Returns a class in place of torch's class layer.below, which cannot be patched: its constructor makes an object
    of that class with "npu" for "cuda", and isinstance() and annotations accept both."""

    class Meta(type):
        def __instancecheck__(cls, one: object) -> bool:
            return isinstance(one, layer.below)

    def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:
        return _translating(layer)(*args, **kwargs)

    return Meta(layer.below.__name__, (), {"__new__": __new__, "__doc__": layer.below.__doc__})


def _transfer(changes: Changes) -> None:
    """Makes the names of torch.cuda those of torch.npu, and "cuda" another name of "npu", by patches."""
    npu: Any = sys.modules["torch_npu.npu"]
    given = {
        name: value for name, value in vars(npu).items() if not name.startswith("_") and not name.startswith("npu_")
    }
    for name, value in given.items():
        if not isinstance(value, ModuleType):
            changes.set(torch.cuda, name, value)
    changes.set(torch.cuda, "get_device_capability", lambda device=None: (0, 0))  # programs compare it with a pair
    for submodule in ("amp", "random", "memory", "streams"):
        for name, value in vars(getattr(npu, submodule)).items():
            if not name.startswith("_") and not isinstance(value, ModuleType):
                changes.set(getattr(torch.cuda, submodule), name, value)
    for name in _FACTORIES.split():
        changes.wrap(torch, name, _translating)
    changes.wrap(torch, "Generator", _translating_class)
    for name in _METHODS.split():
        changes.wrap(torch.Tensor, name, functools.partial(_translating, numbers=name == "to"))
    for name in _MODULES.split():
        changes.wrap(torch.nn.Module, name, functools.partial(_translating, numbers=True))
    owners: tuple[Any, ...] = (torch.Tensor, torch.nn.Module, torch.storage._StorageBase, torch.storage.TypedStorage)
    for owner in owners:
        changes.set(owner, "cuda", owner.npu)
    changes.set(torch.Tensor, "is_cuda", torch.Tensor.is_npu)  # type: ignore[attr-defined]
    changes.wrap(torch.autocast, "__init__", _translating)
    changes.wrap(torch.amp.GradScaler, "__init__", _scaler)
    changes.wrap(torch.autograd.profiler.profile, "__init__", _profile)
    if torch.distributed.is_available():
        for name in _PROCESS_GROUPS.split():
            changes.wrap(torch.distributed, name, functools.partial(_translating, word=_hccl))
        changes.set(torch.distributed, "is_nccl_available", lambda: True)


def _profile(layer: Layer) -> Callable[..., Any]:
    """Wraps the constructor of torch's profiler: a request for CUDA's times gives the host's if there is no GPU."""

    @functools.wraps(layer.below)
    def wrapper(
        self: Any, enabled: bool = True, *, use_cuda: bool = False, use_device: Any = None, **rest: Any
    ) -> None:
        if use_cuda or use_device == "cuda":
            cuda = torch.profiler.ProfilerActivity.CUDA
            use_device = "cuda" if cuda in torch.profiler.supported_activities() else None
        layer.below(self, enabled, use_device=use_device, **rest)

    return wrapper


def _scaler(layer: Layer) -> Callable[..., Any]:
    """Wraps the constructor of GradScaler: the device "cuda", also by default, becomes "npu"."""

    @functools.wraps(layer.below)
    def wrapper(self: Any, device: Any = "cuda", *args: Any, **kwargs: Any) -> None:
        layer.below(self, _npu(device), *args, **kwargs)

    return wrapper

"""Returns the state that npu.install() changes in this thread, and records calls of torch functions."""

import sys
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack


def modes() -> list[Any]:
    return list(_get_current_function_mode_stack())


def surroundings() -> list[Any]:
    owners = (torch, torch.Tensor, torch.nn.Module, torch.autocast)
    return [*(dict(vars(owner)) for owner in owners), list(sys.meta_path), sorted(sys.modules), modes()]


def there() -> bool:
    """Returns True if torch.npu works, because torch keeps the name of a removed device."""
    return bool(hasattr(torch, "npu") and torch.npu.is_available())


class Recorded(TorchFunctionMode):
    """Records the names of functions that are called in its context."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))

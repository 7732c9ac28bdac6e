"""Everything that npu.install() changes, in this thread, and a mode that sees what torch is asked."""

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
    """Whether there is a torch.npu that works: torch keeps the name of a device that it has heard of."""
    return bool(hasattr(torch, "npu") and torch.npu.is_available())


class Recorded(TorchFunctionMode):
    """The names of functions that are called under it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))

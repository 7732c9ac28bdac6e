"""A warning where transformers' own NPU attention leaves out a window or a sink: wrong numbers, on the chip too.

transformers asks an attention function's signature what it can do, and leaves out what it cannot: its functions for an
NPU know no window and no sink. Refuses to compute anything: the call is made as it always was.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from fusion_attention.contract import ContractWarning

MODULE = "transformers.integrations.npu_flash_attention"
FUNCTIONS = ("npu_flash_attn_func", "npu_flash_attn_varlen_func")
DROPPED = {
    "window_size": "every row sees all keys as if the model had no sliding_window",
    "s_aux": "the softmax has no attention sinks",
}


class Watch:
    """On sys.meta_path, before others: wraps transformers' functions as soon as they are loaded."""

    def __init__(self) -> None:
        self.changes: list[tuple[ModuleType, str, Any, Any]] = []

    def begin(self) -> None:
        """Wraps them now if transformers has loaded them, or when it does."""
        sys.meta_path.insert(0, self)
        if (module := sys.modules.get(MODULE)) is not None:
            self.wrap(module)

    def end(self) -> None:
        """Takes it back; what transformers has fetched meanwhile goes on warning, and is right."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        while self.changes:
            module, name, before, wrapper = self.changes.pop()
            if vars(module).get(name) is wrapper:
                setattr(module, name, before)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The spec that others find of the one module, with a loader that wraps."""
        if name != MODULE:
            return None
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                if module.__name__ == MODULE and self in sys.meta_path:  # a loader may serve many, and outlive us
                    self.wrap(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def wrap(self, module: ModuleType) -> None:
        """Wraps the functions of the module that leave something out."""
        for name in FUNCTIONS:
            function = vars(module).get(name)
            if function is not None and (wrapper := _warning(function)) is not function:
                self.changes.append((module, name, function, wrapper))
                setattr(module, name, wrapper)


def _tell(name: str) -> bool:
    warnings.warn(
        f"transformers' attention for an NPU leaves out {name}: {DROPPED[name]}, here and on the chip "
        '(load the model with attn_implementation="eager" or "sdpa")',
        ContractWarning,
        stacklevel=3,
    )
    return True


def _warning(function: Any) -> Any:
    """The function, with parameters for what it leaves out, which warn; itself if it leaves out nothing."""
    signature = inspect.signature(function)
    dropped = [name for name in DROPPED if name not in signature.parameters]
    if not dropped:
        return function

    tell = torch.compiler.assume_constant_result(_tell)  # called by the compiler, not compiled

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        for name in dropped:
            value = kwargs.pop(name, None)
            if value is not None and not (isinstance(value, tuple) and value == (-1, -1)):
                tell(name)
        return function(*args, **kwargs)

    parameters = list(signature.parameters.values())
    at = next((i for i, p in enumerate(parameters) if p.kind is p.VAR_KEYWORD), len(parameters))
    parameters[at:at] = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in dropped]
    wrapper.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return wrapper

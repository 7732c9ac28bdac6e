"""Warns when transformers' attention for NPUs ignores a sliding window or a sink; its results are then wrong.

transformers inspects the signature of an attention function and omits arguments that it does not have. Its functions
for NPUs have neither windows nor sinks, so this happens on the chip too. The warning does not change the call.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from types import ModuleType
from typing import Any

import torch

from fusion_attention.contract import ContractWarning
from fusion_attention.patches import Changes

MODULE = "transformers.integrations.npu_flash_attention"
FUNCTIONS = ("npu_flash_attn_func", "npu_flash_attn_varlen_func")
DROPPED = {
    "window_size": "every row sees all keys as if the model had no sliding_window",
    "s_aux": "the softmax has no attention sinks",
}


def watch(changes: Changes) -> None:
    """Makes transformers' attention functions for NPUs warn about ignored arguments, from the time when their module is
    loaded; `changes` records the patches. Other modules of transformers may still refer to a wrapped function after the
    changes are removed; it then still warns, which is correct."""

    def wrap(module: ModuleType) -> None:
        for name in FUNCTIONS:
            function = vars(module).get(name)
            if function is not None and (wrapper := _warning(function)) is not function:
                changes.set(module, name, wrapper)

    changes.when_loaded(MODULE, wrap)


def _tell(name: str) -> bool:
    warnings.warn(
        f"transformers' attention for an NPU ignores {name}: {DROPPED[name]}, here and on the chip "
        '(load the model with attn_implementation="eager" or "sdpa")',
        ContractWarning,
        stacklevel=3,
    )
    return True


def _warning(function: Any) -> Any:
    """Returns a function that accepts and ignores a window and a sink, with a warning; `function` if it has both."""
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

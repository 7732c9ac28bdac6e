"""fusion_attention: CANN's fused attention operators, with the same meaning, on any machine.

Importing this package loads neither torch nor anything else; a name, or a submodule, is loaded when it is first used.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fusion_attention.api import (
        BackendError,
        Band,
        CacheFullError,
        ContractError,
        ContractWarning,
        PagedKVCache,
        attention,
        decode_attention,
        indexer_loss,
        lightning_indexer,
        sparse_attention,
        strict,
        use_backend,
    )
    from fusion_attention.capture import CaptureError, Replay, capture, replay

__all__ = [
    "BackendError",
    "Band",
    "CacheFullError",
    "CaptureError",
    "ContractError",
    "ContractWarning",
    "PagedKVCache",
    "Replay",
    "attention",
    "capture",
    "decode_attention",
    "indexer_loss",
    "lightning_indexer",
    "replay",
    "sparse_attention",
    "strict",
    "use_backend",
]
__version__ = "0.1.0"

# The names that are not api's.
_OF_CAPTURE = ("CaptureError", "Replay", "capture", "replay")


class _Face(ModuleType):
    """Importing a submodule that is called as a name of the face is (capture) leaves the face's name in its place."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in __all__ or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Face


def _load(name: str) -> Any:
    if name in __all__:
        module = importlib.import_module(f"{__name__}.{'capture' if name in _OF_CAPTURE else 'api'}")
        # Kept: the next use costs what any attribute does.
        return globals().setdefault(name, getattr(module, name))
    if not name.startswith("_"):
        try:
            return importlib.import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if not TYPE_CHECKING:  # A name that is not shown above is an error for checkers.
    __getattr__ = _load


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})

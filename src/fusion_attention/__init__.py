"""fusion_attention: attention operators of CANN (for Huawei's Ascend chips), with the same results, on any machine.

Importing this package does not import torch; each name and submodule is loaded when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fusion_attention.api.attention import attention
    from fusion_attention.api.cache import CacheFullError, PagedKVCache
    from fusion_attention.api.compress import CompressionState, compress
    from fusion_attention.api.compressed import compressed_attention
    from fusion_attention.api.decode import decode_attention
    from fusion_attention.api.divide_rope_by_scales import divided_rope
    from fusion_attention.api.sparse import (
        indexer_loss,
        indexer_target_loss,
        lightning_indexer,
        pack_lists,
        sparse_attention,
    )
    from fusion_attention.backends import use_backend
    from fusion_attention.captures.capture import capture
    from fusion_attention.captures.reader import CaptureError
    from fusion_attention.contract import BackendError, ContractError, ContractWarning
    from fusion_attention.ir.mask import Band
    from fusion_attention.judging.calls import JudgeError
    from fusion_attention.judging.judge import diagnose, judge
    from fusion_attention.judging.replay import Replay, replay
    from fusion_attention.judging.verdict import Judgement
    from fusion_attention.refusals.explanation import explain
    from fusion_attention.settings import strict

__all__ = [
    "BackendError",
    "Band",
    "CacheFullError",
    "CaptureError",
    "CompressionState",
    "ContractError",
    "ContractWarning",
    "JudgeError",
    "Judgement",
    "PagedKVCache",
    "Replay",
    "attention",
    "capture",
    "compress",
    "compressed_attention",
    "decode_attention",
    "diagnose",
    "divided_rope",
    "explain",
    "indexer_loss",
    "indexer_target_loss",
    "judge",
    "lightning_indexer",
    "pack_lists",
    "replay",
    "sparse_attention",
    "strict",
    "use_backend",
]
__version__ = "0.1.0"

# Public name -> the module that defines it, which is imported when the name is first used.
_MODULES = {
    "BackendError": "contract",
    "Band": "ir.mask",
    "CacheFullError": "api.cache",
    "CaptureError": "captures.reader",
    "CompressionState": "api.compress",
    "ContractError": "contract",
    "ContractWarning": "contract",
    "JudgeError": "judging.calls",
    "Judgement": "judging.verdict",
    "PagedKVCache": "api.cache",
    "Replay": "judging.replay",
    "attention": "api.attention",
    "capture": "captures.capture",
    "compress": "api.compress",
    "compressed_attention": "api.compressed",
    "decode_attention": "api.decode",
    "diagnose": "judging.judge",
    "divided_rope": "api.divide_rope_by_scales",
    "explain": "refusals.explanation",
    "indexer_loss": "api.sparse",
    "indexer_target_loss": "api.sparse",
    "judge": "judging.judge",
    "lightning_indexer": "api.sparse",
    "pack_lists": "api.sparse",
    "replay": "judging.replay",
    "sparse_attention": "api.sparse",
    "strict": "settings",
    "use_backend": "backends",
}


def _load(name: str) -> Any:
    if name in _MODULES:
        module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
        # Stored, so that the next use is an ordinary attribute access.
        return globals().setdefault(name, getattr(module, name))
    if not name.startswith("_"):
        try:
            return importlib.import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if not TYPE_CHECKING:  # Type checkers see only the imports above, so an unknown name is an error for them.
    __getattr__ = _load


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})

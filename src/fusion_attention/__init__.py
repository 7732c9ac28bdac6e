"""fusion_attention: CANN's fused attention operators, with the same meaning, on any machine."""

from fusion_attention.api import (
    BackendError,
    Band,
    CacheFullError,
    ContractError,
    ContractWarning,
    PagedKVCache,
    attention,
    decode_attention,
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
    "replay",
]
__version__ = "0.1.0"

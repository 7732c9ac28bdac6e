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

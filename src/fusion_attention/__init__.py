"""fusion_attention: CANN's fused attention operators, with the same meaning, on any machine."""

from fusion_attention.api import (
    BackendError,
    Band,
    ContractError,
    ContractWarning,
    attention,
    lightning_indexer,
    sparse_attention,
)
from fusion_attention.capture import CaptureError, Replay, capture, replay

__all__ = [
    "BackendError",
    "Band",
    "CaptureError",
    "ContractError",
    "ContractWarning",
    "Replay",
    "attention",
    "capture",
    "lightning_indexer",
    "replay",
    "sparse_attention",
]
__version__ = "0.1.0"

"""fusion_attention: CANN's fused attention operators, with the same meaning, on any machine."""

from fusion_attention.api import BackendError, Band, ContractError, ContractWarning, attention

__all__ = ["BackendError", "Band", "ContractError", "ContractWarning", "attention"]
__version__ = "0.1.0"

"""Every function of torch_npu that is here, gathered from its modules; functions.pyi says their types."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from fusion_attention.npu import (
    dropout,
    fused_inference,
    indexer_loss,
    inference,
    merging,
    sparse,
    training,
)
from fusion_attention.npu.auxiliary import (
    atb,
    atb_rows,
    caches,
    experts,
    gates,
    losses,
    norms,
    products,
    prolog,
    quantised,
    quantised_sparse,
    rotary,
    routing,
    shapes,
    softmax,
)

MODULES: tuple[ModuleType, ...] = (training, inference, fused_inference, sparse, indexer_loss, merging, dropout)
MODULES += (atb, atb_rows, caches, experts, gates, losses, norms, products, prolog, quantised, quantised_sparse)
MODULES += (rotary, routing, shapes, softmax)
FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: getattr(module, name) for module in MODULES for name in module.__all__
}

globals().update(FUNCTIONS)
__all__ = list(FUNCTIONS)

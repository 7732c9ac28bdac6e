"""The operators: a contract record each, and their lowering to the waist; and records of what stands around them."""

from __future__ import annotations

from fusion_attention.contract import Op
from fusion_attention.ops.companions import (
    atb,
    caches,
    experts,
    gates,
    losses,
    norms,
    products,
    quantised,
    quantised_sparse,
    rotary,
    routing,
    shapes,
    softmax,
)
from fusion_attention.ops.fused import records as fused_inference
from fusion_attention.ops.indexer import own as lightning_indexer
from fusion_attention.ops.indexer import records as indexer
from fusion_attention.ops.indexer_loss import own as own_indexer_loss
from fusion_attention.ops.indexer_loss import records as indexer_loss
from fusion_attention.ops.inference import own as decode_attention
from fusion_attention.ops.inference import records as inference
from fusion_attention.ops.sparse import own as sparse_attention
from fusion_attention.ops.sparse import records as sparse
from fusion_attention.ops.training import own as attention
from fusion_attention.ops.training import records as training

FAMILIES = (
    *(attention, decode_attention, training, inference, fused_inference),
    *(indexer, lightning_indexer, sparse, sparse_attention, indexer_loss, own_indexer_loss),
)
RECORDS: dict[str, Op] = {record.name: record for family in FAMILIES for record in family.RECORDS}
# Functions that torch itself computes, or another function that is here: records without a lowering (ops/companions).
AROUND = (
    norms,
    gates,
    rotary,
    caches,
    shapes,
    softmax,
    experts,
    routing,
    quantised,
    products,
    losses,
    atb,
    quantised_sparse,
)
COMPANIONS: dict[str, Op] = {record.name: record for family in AROUND for record in family.RECORDS}
CONTRACTS: dict[str, Op] = {**RECORDS, **COMPANIONS}

"""The definitions of auxiliary operators, and all definitions by name; loaded on first use."""

from fusion_attention.contract import Op
from fusion_attention.ops import RECORDS
from fusion_attention.ops.auxiliary import (
    atb,
    atb_rows,
    block_scores,
    caches,
    compressor,
    experts,
    gates,
    latent_caches,
    losses,
    merging,
    norms,
    products,
    prolog,
    quantised,
    quantised_sparse,
    rotary,
    routing,
    softmax,
    transposes,
)

FAMILIES = (
    *(norms, gates, rotary, caches, latent_caches, transposes, softmax, experts, routing, quantised, products),
    *(losses, atb, atb_rows, block_scores, compressor, quantised_sparse, merging, prolog),
)
AUXILIARY: dict[str, Op] = {record.name: record for family in FAMILIES for record in family.RECORDS}
# All operator definitions by name.
CONTRACTS: dict[str, Op] = {**RECORDS, **AUXILIARY}

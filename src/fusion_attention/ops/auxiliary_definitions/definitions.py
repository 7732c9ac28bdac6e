"""The definitions of auxiliary operators, and all definitions by name; loaded on first use."""

import importlib

from fusion_attention.contract import Op
from fusion_attention.ops import RECORDS

FAMILIES = (
    *("norms", "activations", "rotary", "caches", "latent_caches", "transposes", "softmax", "token_permute", "routing"),
    *(
        "quantised",
        "grouped_matmul",
        "losses",
        "atb",
        "atb_cache_and_rotary",
        "block_scores",
        "compressor",
        "quantised_sparse",
    ),
    *("merging", "prolog"),
)
_LOADED = (importlib.import_module(f"fusion_attention.ops.auxiliary_definitions.{name}") for name in FAMILIES)
AUXILIARY: dict[str, Op] = {record.name: record for family in _LOADED for record in family.RECORDS}
# All operator definitions by name.
CONTRACTS: dict[str, Op] = {**RECORDS, **AUXILIARY}

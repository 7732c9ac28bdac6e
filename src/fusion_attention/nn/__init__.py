"""Attention layers with a lightning indexer, which learns to select keys, and the stages of its training."""

from fusion_attention.nn.cache import Cache
from fusion_attention.nn.indexer import Index, LightningIndexer
from fusion_attention.nn.layers import STAGES, SparseAttention, SparseLatentAttention, SparseSelfAttention, set_stage
from fusion_attention.nn.layers import Stage as Stage
from fusion_attention.nn.rope import apply_rope, rope_table

__all__ = [
    "STAGES",
    "Cache",
    "Index",
    "LightningIndexer",
    "SparseAttention",
    "SparseLatentAttention",
    "SparseSelfAttention",
    "apply_rope",
    "rope_table",
    "set_stage",
]

"""Attention layers whose lightning indexer learns to select keys, with the stages of its training and KV caches."""

from fusion_attention.nn.cache import Cache
from fusion_attention.nn.compressed import CompressedAttention
from fusion_attention.nn.compressed_cache import CompressedCache
from fusion_attention.nn.indexer import Index, LightningIndexer
from fusion_attention.nn.layers import SparseAttention, SparseLatentAttention, SparseSelfAttention
from fusion_attention.nn.rope import apply_rope, rope_table
from fusion_attention.nn.stages import STAGES, set_stage
from fusion_attention.nn.stages import Stage as Stage

__all__ = [
    "STAGES",
    "Cache",
    "CompressedAttention",
    "CompressedCache",
    "Index",
    "LightningIndexer",
    "SparseAttention",
    "SparseLatentAttention",
    "SparseSelfAttention",
    "apply_rope",
    "rope_table",
    "set_stage",
]

"""The operators: their definitions, by name, and their lowering to the intermediate representation."""

from __future__ import annotations

from fusion_attention.contract import Op
from fusion_attention.ops.block_sparse import records as block_sparse
from fusion_attention.ops.compressed import compressor
from fusion_attention.ops.compressed import fa_record as compressed_attention
from fusion_attention.ops.compressed import l1_norm as compressed_l1_norm
from fusion_attention.ops.compressed import pooling as compress
from fusion_attention.ops.compressed import records as compressed
from fusion_attention.ops.fused import records as fused_inference
from fusion_attention.ops.indexer import fa_record as lightning_indexer
from fusion_attention.ops.indexer import records as indexer
from fusion_attention.ops.indexer import second as indexer_of_ratio
from fusion_attention.ops.indexer_loss import fa_record as own_indexer_loss
from fusion_attention.ops.indexer_loss import fa_target_record as own_target_loss
from fusion_attention.ops.indexer_loss import records as indexer_loss
from fusion_attention.ops.indexer_loss import target_records as target_loss
from fusion_attention.ops.inference import fa_record as decode_attention
from fusion_attention.ops.inference import records as inference
from fusion_attention.ops.sparse import fa_record as sparse_attention
from fusion_attention.ops.sparse import records as sparse
from fusion_attention.ops.training import fa_record as attention
from fusion_attention.ops.training import records as training
from fusion_attention.ops.training import score_v4

FAMILIES = (
    *(attention, decode_attention, training, score_v4, block_sparse, inference, fused_inference),
    *(indexer, indexer_of_ratio, lightning_indexer),
    *(sparse, sparse_attention, compressed, compressed_l1_norm, compressed_attention, compressor, compress),
    *(indexer_loss, own_indexer_loss, target_loss, own_target_loss),
)
RECORDS: dict[str, Op] = {record.name: record for family in FAMILIES for record in family.RECORDS}

"""The operators: a contract record each, and their lowering to the waist."""

from __future__ import annotations

from fusion_attention.contract import Op
from fusion_attention.ops import attention, decode_attention, flash, indexer, indexer_loss, infer, sparse

FAMILIES = (attention, decode_attention, flash, infer, indexer, sparse, indexer_loss)
RECORDS: dict[str, Op] = {record.name: record for family in FAMILIES for record in family.RECORDS}

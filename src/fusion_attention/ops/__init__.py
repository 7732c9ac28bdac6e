"""The operators: a contract record each, and their lowering to the waist."""

from __future__ import annotations

from fusion_attention.ops import attention, flash, indexer, sparse
from fusion_attention.record import Op

RECORDS: dict[str, Op] = {
    record.name: record for record in (*attention.RECORDS, *flash.RECORDS, *indexer.RECORDS, *sparse.RECORDS)
}

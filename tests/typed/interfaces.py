"""Types of the interfaces as type checkers infer them: read by mypy and basedpyright (`make lint`), never run.

assert_type() says what a call gives; `type: ignore` stands where a call must be an error, and both checkers complain
about one that is not needed.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import assert_type

import fusion_attention as fa
from fusion_attention import Band, acl, aclnn, npu
from fusion_attention.nn import (
    Cache,
    Index,
    LightningIndexer,
    SparseAttention,
    SparseLatentAttention,
    SparseSelfAttention,
)

Both = tuple[Tensor, Tensor]


def dense(q: Tensor, lengths: Sequence[int], wanted: bool) -> None:
    assert_type(fa.attention(q, q, q), Tensor)
    assert_type(fa.attention(q, q, q, layout="TND", q_len=lengths, band=fa.Band.causal(), seed=3), Tensor)
    assert_type(fa.attention(q, q, q, return_lse=False), Tensor)
    assert_type(fa.attention(q, q, q, return_lse=True, empty_rows="mean", backend="golden"), Both)
    assert_type(fa.attention(q, q, q, return_lse=wanted), Tensor | Both)
    fa.attention(q, q, q, foo=1)  # type: ignore[call-overload]
    fa.attention(q, q, q, return_lse=True, foo=1)  # type: ignore[call-overload]
    fa.attention(q, q, q, layout="bsnd")  # type: ignore[call-overload]
    fa.attention(q, q, q, empty_rows="nan")  # type: ignore[call-overload]
    fa.attention(q, q, q, backend="cuda")  # type: ignore[call-overload]
    fa.attention(q, q, q, "BSND")  # type: ignore[call-overload]
    fa.attention(q, q)  # type: ignore[call-overload]


def selected(q: Tensor, indices: Tensor, wanted: bool) -> None:
    assert_type(fa.sparse_attention(q, q, None, indices).shape, torch.Size)
    assert_type(fa.sparse_attention(q, q, None, indices, return_lse=True), Both)
    assert_type(fa.sparse_attention(q, q, None, indices, return_lse=wanted), Tensor | Both)
    assert_type(fa.lightning_indexer(q, q, q, 16, layout="TND", q_len=[3]), Both)
    assert_type(fa.indexer_loss(q, q, q, q, q, q), Tensor)
    fa.sparse_attention(q, q, None, indices, foo=1)  # type: ignore[call-overload]
    fa.sparse_attention(q, q, None, indices, layout="BSH")  # type: ignore[call-overload]
    fa.lightning_indexer(q, q, q, foo=1)  # type: ignore[call-arg]
    fa.lightning_indexer(q, q, q, layout="BSH")  # type: ignore[arg-type]
    fa.indexer_loss(q, q, q, q, q, q, foo=1)  # type: ignore[call-arg]


def decoding(q: Tensor, cache: fa.PagedKVCache, wanted: bool) -> None:
    assert_type(fa.decode_attention(q, cache).shape, torch.Size)
    assert_type(fa.decode_attention(q, (q, q), kv_len=[3], cache_layout="BNSD"), Tensor)
    assert_type(fa.decode_attention(q, ([q, q], [q, q]), return_lse=True), Both)
    assert_type(fa.decode_attention(q, q, dim_v=8, return_lse=wanted), Tensor | Both)
    fa.decode_attention(q, cache, foo=1)  # type: ignore[call-overload]
    fa.decode_attention(q, cache, layout="TND")  # type: ignore[call-overload]


def interface(folder: Path) -> None:
    """The names that come late are those of the modules."""
    assert_type(fa.Band.window(3, 0), Band)
    with fa.capture(folder) as recorded:
        assert_type(recorded, fa.capture)
    assert_type(fa.replay(recorded.files[0]).worst, float)
    print(fa.atention)  # type: ignore[attr-defined]


def torch_npu(q: Tensor) -> None:
    assert_type(npu.npu_fusion_attention(q, q, q, 2, "BSND")[0], Tensor)
    npu.npu_fusion_attention(q, q, q, 2, "BSND", foo=1)  # type: ignore[call-arg]


def two_phase(q: acl.Tensor, stream: acl.Stream) -> None:
    result = aclnn.aclnnLightningIndexerGetWorkspaceSize(
        q, q, q, None, [1, 2], None, "BSND", "BSND", 8, 3, 9, 9, True, q, q, strict=False
    )
    assert_type(result, tuple[int, int, acl.Executor | None])
    assert_type(aclnn.aclnnLightningIndexer(None, result[1], result[2], stream), int)
    aclnn.aclnnLightningIndexer(None, result[1], result[2], stream, foo=1)  # type: ignore[call-arg]
    aclnn.aclnnLightningIndexerGetWorkspaceSize(q)  # type: ignore[call-arg]
    print(aclnn.aclnnFlashAttentionScoreV9)  # type: ignore[attr-defined]


def layers(x: Tensor, rope: Both, sizes: dict[str, Any]) -> None:
    indexer = LightningIndexer(64, heads=4, head_dim=16, top_k=8)
    assert_type(indexer(x, rope=rope), Index)
    assert_type(SparseAttention(indexer)(x, x, x, scale=0.1), Both)
    layer = SparseSelfAttention(64, 4, index_heads=2, index_dim=16, top_k=8, stage="warmup")
    assert_type(layer(x, lengths=[3], cache=Cache(1, max_length=8)), Both)
    assert_type(SparseLatentAttention(64, 4, **sizes)(x, rope=rope), Both)
    indexer(x, foo=1)  # type: ignore[call-arg]
    layer(x, foo=1)  # type: ignore[call-arg]
    SparseAttention(indexer)(x, x, x, foo=1)  # type: ignore[call-arg]
    SparseLatentAttention(64, 4, **sizes)(x)  # type: ignore[call-arg]
    SparseAttention(indexer, stage="warm-up")  # type: ignore[arg-type]

"""Gradients of keys in float32 with operands of another dtype: rounded, they have the bits of the usual ones."""

from typing import Any

import pytest
import torch
from support.bits import same_bits

from fusion_attention.contract import bind
from fusion_attention.ops.indexer import api_definition as indexer_record
from fusion_attention.ops.indexer.lower import indexer_call
from fusion_attention.ops.indexer.lowered_call import IndexerBackward
from fusion_attention.ops.indexer_loss import api_definition as loss_record
from fusion_attention.ops.sparse import api_definition as sparse_record
from fusion_attention.ops.sparse.lower import sparse_call
from fusion_attention.ops.sparse.lowered_call import RESULTS, SparseBackward
from fusion_attention.plan import compute
from fusion_attention.torch_ops.eager import run

B, S = 2, 70
KEYS = ("dkey", "dvalue", "dkey_rope", "dkey_index")


def rounded(call: Any) -> None:
    """Checks that key gradients in float32, once rounded, have the bits of those in the call's dtype."""
    usual, float32_results = run(call, "cpu"), call.results()
    dtype = usual[next(name for name in KEYS if name in usual)].dtype
    float32_results = {name: t.to(torch.float32) if name in KEYS else t for name, t in float32_results.items()}
    compute(call, float32_results, "cpu")
    for name, tensor in usual.items():
        same_bits(float32_results[name].to(dtype) if name in KEYS else float32_results[name], tensor, name)
    assert any(
        (float32_results[name] != float32_results[name].to(dtype)).any() for name in KEYS if name in float32_results
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_key_gradients_rounded_equal_narrow_dtype_gradients(dtype: torch.dtype) -> None:
    def rows(*inner: int) -> torch.Tensor:
        return torch.randn(B, S, *inner).to(dtype)

    index = {"query": rows(3, 16), "key": rows(1, 16), "weights": torch.randn(B, S, 3)}
    choice = indexer_call(bind(indexer_record.RECORD, {**index, "sparse_count": 12}))
    lists = run(choice, "cpu")["sparse_indices_out"]
    rounded(IndexerBackward(choice, rows(1, 12), lists))
    args = {"query": rows(4, 24), "key": rows(1, 24), "query_rope": rows(4, 8), "key_rope": rows(1, 8)}
    for value in (None, rows(1, 16)):
        bound = bind(sparse_record.RECORD, {**args, "value": value, "sparse_indices": lists})
        attention = sparse_call(bound).complete()
        result = run(attention, "cpu")
        dout = torch.randn(result["attention_out"].shape).to(dtype)
        rounded(SparseBackward(attention, dout, *(result[name] for name in RESULTS)))
    lse = torch.randn(B, 4, S) + 5
    index = {"query_index": index["query"], "key_index": index["key"], "weights": index["weights"]}
    for selected in (lists, None):
        bound = bind(loss_record.RECORD, {**args, **index, "lse": lse, "sparse_indices": selected})
        assert bound.op.lower is not None
        rounded(bound.op.lower(bound))

"""Makes a call of every native plan, for tests of threads that apply to all plans.

Gradients use arbitrary saved statistics, because their values do not matter to these tests.
"""

from collections.abc import Callable
from functools import partial

import torch

from fusion_attention import attention, decode_attention, indexer_loss, lightning_indexer, sparse_attention
from fusion_attention.npu import npu_fusion_attention_grad, npu_sparse_flash_attention_grad

Results = tuple[torch.Tensor, ...]
PAGE = 128


def families(
    rows: int, cached: int, heads: int = 8, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Callable[[], Results]]:
    """Returns calls by name; rows: numbers of query rows and keys; cached: number of keys of a decoded sequence."""
    torch.manual_seed(0)
    top_k = max(rows // 4, 1)
    q, k, v, dy, out = (torch.randn(1, rows, heads, 64, dtype=dtype) for _ in range(5))
    page = torch.randn(2, 1, PAGE, 2, 128, dtype=dtype)  # every page of the cache
    table = torch.zeros(3, -(-cached // PAGE), dtype=torch.int32)
    step = torch.randn(3, 1, heads, 128, dtype=dtype)
    lists = torch.rand(1, rows, 1, rows).topk(top_k).indices.int() if rows < 1000 else _strided(rows, top_k)
    weights = torch.rand(1, rows, heads, dtype=dtype)
    lse = torch.zeros(1, heads, rows)
    one, many = torch.ones(1, heads, rows, 8), torch.ones(1, 1, rows, heads)
    saved = {"softmax_max": one, "softmax_sum": one * rows, "attention_in": out}
    chosen = (q, k[:, :, :1], v[:, :, :1], lists, dy, out, many, many * top_k, 0.125, 1)

    def loss(indices: torch.Tensor | None) -> Results:
        return (indexer_loss(q, k[:, :, :1], lse, dy, v[:, :, :1], weights, indices),)

    return {
        "forward": lambda: (attention(q, k, v),),
        "backward": lambda: npu_fusion_attention_grad(q, k, v, dy, heads, "BSND", scale_value=0.125, **saved)[:3],
        "decode": lambda: (decode_attention(step, tuple(page), kv_len=[cached, cached, 1], block_table=table),),
        "selections": lambda: (sparse_attention(*chosen[:4], causal=False),),
        "their gradients": lambda: npu_sparse_flash_attention_grad(*chosen, sparse_mode=0)[:3],
        "indexer": lambda: lightning_indexer(q, k[:, :, :1], weights, top_k),
        "loss over lists": partial(loss, lists),
        "loss over all keys": partial(loss, None),
    }


def _strided(rows: int, top_k: int) -> torch.Tensor:
    return ((torch.arange(rows)[:, None] + torch.arange(top_k) * 4) % rows).int()[None, :, None]

"""Defines the calls whose errors benchmarks/accuracy.py measures: one or several for every family of operators."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fusion_attention.contract import bind
from fusion_attention.ir.call import Lowered
from fusion_attention.ops import RECORDS
from fusion_attention.ops.indexer.lowered_call import IndexerBackward
from fusion_attention.ops.sparse.lowered_call import SparseBackward
from fusion_attention.ops.training.forward_backward import DenseBackward, DenseForward
from fusion_attention.ops.training.lowered_call import BIAS
from fusion_attention.ops.training.statistics import to_lanes
from fusion_attention.testing import Case, arguments, lowered, sparse
from fusion_attention.testing import indexer_loss as loss
from fusion_attention.torch_ops.eager import run

PAGE = 128
CAUSAL: dict[str, Any] = {"sparse_mode": 3, "mask": "compressed"}
FEATURES: tuple[dict[str, Any], ...] = (
    {**CAUSAL, "sink": True, "dim_rope": 32},
    {"mask": "head", "pse": "full", "pse_type": 0, "softcap": 3.0},
    {"mask": "compressed", "sparse_mode": 4, "pre": 100, "next": 30, "dropout": "philox", "keep_prob": 0.8},
    {
        **CAUSAL,
        "q_len": (70, 33),
        "kv_len": (90, 140),
        "layout": "TND",
        "pse": "slopes",
        "pse_type": 2,
        "starts": (0, 0),
    },
)


def dense(dtype: str, length: int, **more: Any) -> tuple[Any, torch.Tensor]:
    """Returns (a dense call, the gradient of its output); two query heads use each key head."""
    sizes: dict[str, Any] = {"heads_q": 4, "heads_kv": 2, "dim_qk": 64, "dim_v": 64, "scale": 0.125}
    case = Case(dtype=dtype, **(sizes | {"q_len": (length,), "kv_len": (length,)} | more))
    args = arguments(case)
    return lowered(case, args), args["dy"]


def forward(dtype: str, length: int, **more: Any) -> Lowered:
    """Makes a call of dense attention."""
    return DenseForward(dense(dtype, length, **more)[0])


def backward(dtype: str, length: int, **more: Any) -> Lowered:
    """Makes a call of the gradients of dense attention, with outputs of the golden model."""
    call, dy = dense(dtype, length, **more)
    out, *stats = run(DenseForward(call), "golden").values()
    pse = call.extras[BIAS]
    return DenseBackward(call, (dy, out, *to_lanes(call, *stats)), None if pse is None or pse.dim() != 4 else pse)


def cached(dtype: str, length: int, rows: int, bits: int = 16, *, by: int = 1, int8_results: bool = False) -> Lowered:
    """Makes a call of fused inference over pages in random order. bits: size of a stored number; by: quantization mode
    of keys and values; int8_results: return the output as int8."""
    lengths, heads = [length, length // 3 + 1, length // 2 + 5], 2
    make = torch.Generator().manual_seed(bits + by + rows)
    kind, counts = getattr(torch, dtype), [-(-n // PAGE) for n in lengths]
    order, table = torch.randperm(sum(counts), generator=make).int(), torch.zeros(len(lengths), max(counts)).int()
    for b, taken in enumerate(order.split(counts)):
        table[b, : len(taken)] = taken

    def pool() -> torch.Tensor:
        shape = (sum(counts), PAGE, heads * 64)
        if bits == 16:
            return torch.randn(shape, generator=make).to(kind)
        stored = torch.randint(-(1 << bits - 1), 1 << bits - 1, shape, generator=make, dtype=torch.int8)
        if bits == 8:
            return stored
        words = ((stored & 15).long().unflatten(-1, (-1, 8)) << (4 * torch.arange(8))).sum(-1)  # first: lowest bits
        return (words - ((words >> 31) << 32)).int()

    args: dict[str, Any] = {
        "query": torch.randn(len(lengths), 4, rows, 64, generator=make).to(kind), "key": pool(), "value": pool(),
        "num_heads": 4, "num_key_value_heads": heads, "scale_value": 0.125, "input_layout": "BNSD",
        "block_table": table, "block_size": PAGE, "softmax_lse_flag": True, "actual_seq_lengths": [rows] * len(lengths),
        "actual_seq_lengths_kv": lengths, "sparse_mode": 3 if rows > 1 else 0,
        "atten_mask": torch.ones(2048, 2048, dtype=torch.bool).triu_(1) if rows > 1 else None,
    }  # fmt: skip
    if bits < 16:
        for name in ("key", "value"):
            shape = (heads, 64) if by == 0 else (len(lengths), max(lengths))
            scale = (torch.rand(shape, generator=make) + 0.5) * 4 / (1 << bits)
            args |= {f"{name}_antiquant_scale": scale if by else scale.to(kind), f"{name}_antiquant_mode": by}
    if int8_results:
        args["quant_scale2"] = torch.rand(4 * 64, generator=make) * 400
    record = RECORDS["npu_fused_infer_attention_score"]
    assert record.lower is not None
    result: Lowered = record.lower(bind(record, {n: v for n, v in args.items() if v is not None}))
    return result


def selections(dtype: str, length: int) -> tuple[Any, torch.Tensor]:
    """Returns (sparse attention over lists of a quarter of the keys, the gradient of its output)."""
    sizes: dict[str, Any] = {"dim_qk": 64, "dim_v": 64, "scale": 0.125, "heads_q": 8, "count": max(length // 4, 4)}
    args = sparse.arguments(sparse.SparseCase("BSND", 0, dtype, (length // 2,), (length,), sink=False, **sizes))
    return sparse.lowered(args), args["dy"]


def sparse_backward(dtype: str, length: int) -> Lowered:
    """Makes a call of the gradients of sparse attention, with outputs of the golden model."""
    call, dy = selections(dtype, length)
    return SparseBackward(call, dy, *run(call, "golden").values())


def indexer(dtype: str, length: int) -> tuple[Any, torch.Tensor]:
    """Returns (a call of the indexer, the gradient of its values)."""
    sizes: dict[str, Any] = {"heads": 8, "dim": 64, "top_k": max(length // 8, 4), "weights": dtype}
    args = sparse.indexer_arguments(sparse.IndexerCase("BSND", 0, dtype, (length // 2,), (length,), **sizes))
    return sparse.lowered_indexer(args), args["dy"]


def indexer_backward(dtype: str, length: int) -> Lowered:
    """Makes a call of the gradients of the indexer's values, for the keys that the golden model selects."""
    call, dy = indexer(dtype, length)
    return IndexerBackward(call, dy[..., : call.problem.top_k], next(iter(run(call, "golden").values())))


def losses(dtype: str, length: int, *, selected: bool) -> Lowered:
    """Makes a call of the indexer's loss with its gradients."""
    sizes: dict[str, Any] = {"heads_q": 4, "heads_kv": 2, "dim_qk": 64, "heads": 4, "dim": 32, "scale": 0.125}
    count = max(length // 4, 4) if selected else 0
    case = loss.LossCase("BSND", 0, dtype, (length // 2,), (length,), weights=dtype, count=count, **sizes)
    return loss.lowered(case, loss.arguments(case))


def of_each(make: Callable[..., Lowered], *more: dict[str, Any]) -> tuple[Callable[[str, int], Lowered], ...]:
    """Returns one function for each entry of `more`, which makes a call of half the length with these options."""
    return tuple(partial(lambda dtype, length, each: make(dtype, length // 2, **each), each=each) for each in more)


# Family of docs/accuracy.md: functions that make its calls.
FAMILIES: dict[str, tuple[Callable[[str, int], Lowered], ...]] = {
    "attention": (lambda d, n: forward(d, n, **CAUSAL),),
    "attention with features": of_each(forward, *FEATURES),
    "gradients": (lambda d, n: backward(d, n, **CAUSAL),),
    "gradients with features": of_each(backward, *FEATURES),
    "decode": (lambda d, n: cached(d, 4 * n, 1),),
    "decode, int8 cache": of_each(partial(cached, rows=1, bits=8), {"by": 0}, {"by": 1}),
    "decode, int4 cache": of_each(partial(cached, rows=1, bits=4), {"by": 0}, {"by": 1}),
    "decode, int8 results": (lambda d, n: cached(d, n, 1, int8_results=True),),
    "prompt over a cache": (lambda d, n: cached(d, n, n // 4),),
    "sparse attention": (lambda d, n: selections(d, n)[0],),
    "sparse gradients": (sparse_backward,),
    "indexer": (lambda d, n: indexer(d, n)[0],),
    "indexer gradients": (indexer_backward,),
    "indexer loss, chosen keys": (lambda d, n: losses(d, n // 2, selected=True),),
    "indexer loss, all keys": (lambda d, n: losses(d, n // 2, selected=False),),
}

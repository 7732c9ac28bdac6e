"""Triton's kernels on chunks of sequences: dropout as in the complete sequence, and float32 partial results."""

import random

import numpy as np
import pytest
import torch
from support.pieces import Call, expected

from fusion_attention.distributed import chunk_attention
from fusion_attention.ir.mask import Band
from fusion_attention.ir.merge import empty_partial, join_sink, merge
from fusion_attention.testing import compare


def call_of(dtype: torch.dtype, empty_rows: str, seed: int) -> Call:
    generator = torch.Generator().manual_seed(seed)

    def rows(tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, 16, generator=generator).to(dtype)

    args = {
        "layout": "TND", "q_len": [70, 20], "kv_len": [75, 9], "q": rows(90, 2), "k": rows(84, 1),
        "v": rows(84, 1), "band": Band.window(50), "sink": torch.randn(2, generator=generator), "keep_prob": 0.7,
        "alibi_slopes": torch.rand(2, generator=generator), "empty_rows": empty_rows,
    }  # fmt: skip
    return Call(args, rows(90, 2))


@pytest.mark.parametrize(
    ("dtype", "empty_rows"), [(torch.float32, "mean"), pytest.param(torch.bfloat16, "zero", marks=pytest.mark.slow)]
)
def test_triton_chunk_partials_merge_to_whole_attention_and_gradients(dtype: torch.dtype, empty_rows: str) -> None:
    call = call_of(dtype, empty_rows, 5)
    if empty_rows == "mean":
        del call.args["sink"]
    full, wanted = call.full(), expected(call)
    cuts, rng = (lambda length: list(range(64, length, 64))), random.Random(1)
    rows, keys = call.rows(call.chunks("q", cuts)), call.chunks("kv", cuts)
    result = empty_partial(rows.q, rows.q.shape[:3], 16)
    lots = [call.keys(chunk_attention.Chunks(*(a[lot] for a in vars(keys).values()))) for lot in halves(len(keys), rng)]
    for lot in lots:
        partial = chunk_attention.forward(full, rows, lot, backend="triton", partial=True)
        assert partial.out.dtype == torch.float32
        merge(result, partial)
    if full.sink is not None:
        join_sink(result, full.sink)
    out = result.out.to(dtype)
    compare("out", out[0], wanted["out"])
    saved = chunk_attention.Saved(call.tokens(call.dout), out, result.max, result.sum)
    parts = [chunk_attention.backward(full, rows, saved, lot, backend="triton", partial=True) for lot in lots]
    for name in ("dq", "dk", "dv"):
        total = sum(getattr(addend, name) for addend in parts).to(dtype)
        compare(name, total[0], wanted[name])


def halves(count: int, rng: random.Random) -> list[np.ndarray]:
    return np.array_split(np.array(rng.sample(range(count), count)), 2)


def test_triton_attention_of_query_chunks_equals_whole_queries() -> None:
    call = call_of(torch.float32, "zero", 6)
    everything = call.keys(call.chunks("kv"))
    rows = call.chunks("q", lambda length: list(range(64, length, 64)))
    result = chunk_attention.forward(call.full(), call.rows(rows), everything, backend="triton")
    compare("out", result.out[0], expected(call)["out"])

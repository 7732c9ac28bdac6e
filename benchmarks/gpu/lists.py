"""Times lists of selected keys, the indexer and its loss beside eager torch."""

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.backward_only import gradient
from benchmarks.gpu.timing import Row
from benchmarks.sparse_calls import (
    BACKWARD,
    CHOSEN,
    DIM,
    FORWARD,
    INDEX_DIM,
    ROPE,
    SCALE,
    Index,
    Selection,
    loss_with_gradients,
)

TOKENS, INDEX_HEADS = 4096, 64
CHUNK = 64  # tokens whose keys eager torch gathers at once


def eager(s: Selection) -> torch.Tensor:
    """Computes attention by gathers and batched products of a few tokens at a time."""
    parts = []
    for i in range(0, TOKENS, CHUNK):
        chosen = s.lists[i : i + CHUNK, 0].long()
        k, rope = s.k[:, 0][chosen], s.k_rope[:, 0][chosen]
        scores = s.q[i : i + CHUNK] @ k.mT + s.q_rope[i : i + CHUNK] @ rope.mT
        parts.append(torch.softmax(scores.float() * SCALE, -1).to(k.dtype) @ k)
    return torch.cat(parts)


def selected(quick: bool) -> Iterator[Row]:
    """Times forward and backward over lists; 8 heads are padded to 16, the smallest tile."""
    for heads in (8, 16, 64, 128):
        for keys in (8192,) if quick or heads < 128 else (8192, 32768):
            for local in (False, True):
                name, pairs = f"H{heads} S{keys} {'local' if local else 'random'}", TOKENS * CHOSEN * heads
                s = Selection.of(TOKENS, heads, keys, local, device="cuda")
                yield Row("lists", name, s.ours, {"eager": lambda s=s: eager(s)}, FORWARD * pairs)
                s = Selection.of(TOKENS, heads, keys, local, device="cuda", grad=True)
                ours, theirs = (gradient(way, s.leaves) for way in (s.ours, lambda s=s: eager(s)))
                yield Row("lists backward", name, ours, {"eager": theirs}, BACKWARD * pairs)


def indexer(quick: bool) -> Iterator[Row]:
    """Times scores and the selection of keys."""
    for keys in (8192,) if quick else (8192, 65536):
        index = Index.of(TOKENS, INDEX_HEADS, keys, device="cuda")
        flops, theirs = 2 * TOKENS * keys * INDEX_HEADS * INDEX_DIM, partial(index.eager, torch.float32)
        yield Row("indexer", f"S{keys} top {CHOSEN}", index.ours, {"eager": theirs}, flops)


def loss(quick: bool) -> Iterator[Row]:
    """Times the indexer's loss and gradients over lists and, for the warm-up stage, over all keys; 128 heads."""
    heads, lse = 128, torch.full((TOKENS, 128), 12.0, device="cuda")
    for keys in (8192,) if quick else (8192, 32768, 131072):
        for warm in (False, True):
            if warm and keys > 8192:
                continue
            rows = Selection.of(TOKENS, heads, keys, device="cuda")
            index = Index.of(TOKENS, INDEX_HEADS, keys, device="cuda", grad=True)
            call = loss_with_gradients(rows, index, lse, None if warm else rows.lists)
            flops = 2 * TOKENS * (keys if warm else CHOSEN) * (heads * (DIM + ROPE) + 3 * INDEX_HEADS * INDEX_DIM)
            yield Row("loss", f"{'warm-up' if warm else 'lists'} H{heads} S{keys}", call, {}, flops)

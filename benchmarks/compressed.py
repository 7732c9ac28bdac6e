"""Times DeepSeek-V4's attention: a window and compressed keys, a decode over them, and the selection of keys."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

import fusion_attention as fa
from benchmarks.backward_only import gradient
from benchmarks.compressed_layer_inputs import DIM, HEADS, KINDS, SCALE, WINDOW, Layer, visible
from fusion_attention import _native
from fusion_attention.bench.pair import Pair

GROUP, DECODE, INDEXER = "compressed keys", "decode of compressed keys", "indexer of compressed keys"
FEW = 16  # rows of the eager program, which stores rows x keys scores
# Fractions of the peak of a forward and of a backward on AVX512-BF16.
LAYERS = dict(zip(KINDS, ((0.75, 0.65), (0.7, 0.65)), strict=True))
OTHERS, EAGER, DECODED = 0.6, 10.0, 0.6  # fraction of the peak on other processors; speed relative to eager torch
INDEX_HEADS, INDEX_DIM = 64, 128


def eager(layer: Layer) -> torch.Tensor:
    """Computes the last FEW rows like transformers' layer: over all keys of both sources, with a mask."""
    q, k, compressed, sink = layer.leaves
    tokens = q.shape[1]
    row, key = torch.arange(tokens - FEW, tokens)[:, None], torch.arange(tokens)
    near = (key <= row) & (key > row - WINDOW)
    far = visible(tokens, layer.ratio, "cpu")[-FEW:]
    if layer.lists is not None:
        lists = layer.lists[0, -FEW:, 0].long()
        far = torch.zeros(FEW, far.shape[1] + 1, dtype=torch.bool).scatter_(1, lists % (far.shape[1] + 1), True)
        far = far[:, :-1]
    mask = torch.zeros(FEW, near.shape[1] + far.shape[1], dtype=q.dtype)
    mask.masked_fill_(~torch.cat((near, far), 1), torch.finfo(q.dtype).min)
    keys = torch.cat((k, compressed), 1).transpose(1, 2).expand(-1, HEADS, -1, -1)
    scores = q[:, -FEW:].transpose(1, 2) @ keys.mT * SCALE + mask
    scores = torch.cat((scores, sink.to(q.dtype).view(1, -1, 1, 1).expand(1, -1, FEW, -1)), -1)
    weights = torch.softmax(scores - scores.amax(-1, keepdim=True), -1)[..., :-1]
    return (weights @ keys).transpose(1, 2)


def layers(quick: bool) -> Iterator[Pair]:
    """Times both kinds of layers, forward and backward, beside transformers' eager program on FEW rows."""
    tokens, peak = 512 if quick else 4096, "bfloat16"
    native = _native.cpu_features()["chosen"].endswith("bf16")
    for (ratio, count), shares in LAYERS.items():
        layer = Layer.of(tokens, ratio, count)
        name = f"ratio {ratio}, {f'{count} chosen' if count else 'all'}"
        ways = layer.ours, partial(eager, layer)
        both = [torch.no_grad()(way) for way in ways], [gradient(way, layer.leaves) for way in ways]
        for way, calls, products, fraction in zip(("forward", "backward"), both, (2, 5), shares, strict=True):
            flops, peer_flops = (2 * products * HEADS * DIM * layer.pairs(rows) for rows in (tokens, FEW))
            yield Pair(
                GROUP, f"{way}, {name}", f"eager, {FEW} rows", *calls, flops, peak, peer_flops=peer_flops, goal=EAGER,
                share_goal=fraction if native else OTHERS,
            )  # fmt: skip


def decode(quick: bool) -> Iterator[Pair]:
    """Times a token of 8 sequences over compressed keys in pages, all or selected, beside the same keys in rows."""
    batch, tokens, page = 8, 4096 if quick else 32768, 64
    for ratio, count in LAYERS:
        torch.manual_seed(0)
        closed = tokens // ratio
        q, k = (torch.randn(batch, n, heads, DIM).bfloat16() for n, heads in ((1, HEADS), (WINDOW, 1)))
        compressed = torch.randn(batch, closed, 1, DIM).bfloat16()
        lists = None
        if count:
            lists = torch.stack([torch.randperm(closed)[:count] for _ in range(batch)]).int()[:, None, None]
        words = {"ratio": ratio, "band": fa.Band.window(WINDOW - 1), "scale": SCALE, "sink": torch.randn(HEADS)}
        words |= {"residual": [0] * batch}
        size = min(page, closed)
        pages = compressed.unflatten(1, (-1, size)).flatten(0, 1)
        near = k.unflatten(1, (-1, page)).flatten(0, 1)
        tables = {
            "compressed_page_table": torch.arange(len(pages)).int().view(batch, -1), "compressed_len": [closed] * batch,
            "page_table": torch.arange(len(near)).int().view(batch, -1), "kv_len": [WINDOW] * batch,
        }  # fmt: skip

        def paged(q=q, near=near, pages=pages, lists=lists, words=words, tables=tables) -> object:  # type: ignore[no-untyped-def]
            return fa.compressed_attention(q, near, pages, lists, **words, **tables)

        def in_rows(q=q, k=k, compressed=compressed, lists=lists, words=words) -> object:  # type: ignore[no-untyped-def]
            return fa.compressed_attention(q, k, compressed, lists, **words)

        keys = WINDOW + (count or closed)
        name = f"batch {batch}, {tokens} tokens in pages, ratio {ratio}, {f'{count} chosen' if count else 'all'}"
        flops = 2 * 2 * batch * HEADS * DIM * keys
        yield Pair(DECODE, name, "rows", paged, in_rows, flops, "bfloat16", share_goal=DECODED)


def indexing(quick: bool) -> Iterator[Pair]:
    """Times the selection of 512 keys, each compressed from 4 tokens, beside that of 512 of as many plain keys."""
    rows, keys = 256, 1024 if quick else 8192
    torch.manual_seed(0)
    q, k = torch.randn(1, rows, INDEX_HEADS, INDEX_DIM).bfloat16(), torch.randn(1, keys, 1, INDEX_DIM).bfloat16()
    weights = torch.rand(1, rows, INDEX_HEADS).bfloat16()

    def ours() -> object:
        return fa.lightning_indexer(q, k, weights, 512, ratio=4, residual=[0])

    def single() -> object:
        return fa.lightning_indexer(q, k, weights, 512)

    flops = 2 * rows * INDEX_HEADS * INDEX_DIM * keys
    yield Pair(INDEXER, "ratio 4", "ratio 1", ours, single, flops, "bfloat16", goal=1.0)

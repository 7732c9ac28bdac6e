"""Times attention to a window and compressed keys, with the sizes of DeepSeek-V4, beside eager torch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.backward_only import gradient
from benchmarks.compressed_layer_inputs import DIM, HEADS, KINDS, SCALE, WINDOW, Layer, visible
from benchmarks.gpu.timing import Row

TOKENS = 4096
CHUNK = 128  # rows whose keys eager torch gathers at once


def eager(layer: Layer) -> torch.Tensor:
    """Computes attention by gathers and batched products of CHUNK rows at a time."""
    q, k_rows, compressed_rows, sinks = layer.leaves
    parts, closed = [], visible(TOKENS, layer.ratio, "cuda")
    for i in range(0, TOKENS, CHUNK):
        row = torch.arange(i, i + CHUNK, device="cuda")[:, None]
        near = row - torch.arange(WINDOW, device="cuda")
        keys, valid = k_rows[0, near.clamp(min=0), 0], near >= 0
        if layer.lists is None:
            others, more = compressed_rows[0, :, 0].expand(CHUNK, -1, -1), closed[i : i + CHUNK]
        else:
            listed = layer.lists[0, i : i + CHUNK, 0].long()
            others, more = compressed_rows[0, listed.clamp(min=0), 0], listed >= 0
        k, valid = torch.cat((keys, others), 1), torch.cat((valid, more), 1)
        scores = (q[0, i : i + CHUNK] @ k.mT).float() * SCALE
        scores = scores.masked_fill(~valid[:, None], -torch.inf)
        scores = torch.cat((scores, sinks.view(1, -1, 1).expand(CHUNK, -1, -1)), -1)
        parts.append(torch.softmax(scores, -1)[..., :-1].to(k.dtype) @ k)
    return torch.cat(parts)[None]


def compressed(quick: bool) -> Iterator[Row]:
    """Times forward and backward of both kinds of layers."""
    for ratio, count in KINDS:
        name = f"ratio {ratio} {f'top {count}' if count else 'all'}"
        layer = Layer.of(TOKENS, ratio, count, "cuda")
        ways, products = (partial(layer.ours, "triton"), partial(eager, layer)), 2 * HEADS * DIM * layer.pairs(TOKENS)
        for label, calls, factor in (
            ("compressed", [torch.no_grad()(way) for way in ways], 2),
            ("compressed backward", [gradient(way, layer.leaves) for way in ways], 5),
        ):
            yield Row(label, name, calls[0], {"eager": calls[1]}, factor * products)

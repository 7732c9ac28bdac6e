"""Times attention to a window and compressed keys, with the sizes of DeepSeek-V4, beside eager torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks.gpu.timing import Row
from fusion_attention import Band, compressed_attention

HEADS, DIM, TOKENS, WINDOW = 64, 512, 4096, 128
SCALE = DIM**-0.5
CHUNK = 128  # rows whose keys eager torch gathers at once


@dataclass(frozen=True, eq=False)
class Layer:
    """The tensors of a layer for one sequence: queries, keys, compressed keys, sinks, and lists of compressed keys."""

    q: torch.Tensor
    k: torch.Tensor
    compressed: torch.Tensor
    sink: torch.Tensor
    ratio: int
    lists: torch.Tensor | None

    @classmethod
    def of(cls, ratio: int, count: int, grad: bool) -> Layer:
        """Makes a layer with random tensors; count: entries of each row's list, or 0 for no lists."""
        shapes = (1, TOKENS, HEADS, DIM), (1, TOKENS, 1, DIM), (1, TOKENS // ratio, 1, DIM)
        rows = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=grad) for shape in shapes]
        sink = torch.randn(HEADS, device="cuda", requires_grad=grad)
        lists = None
        if count:
            scores = torch.rand(TOKENS, TOKENS // ratio, device="cuda")
            lists = scores.masked_fill(~visible(ratio), -1).topk(count).indices.int()[None, :, None]
        return cls(*rows, sink, ratio, lists)

    @property
    def leaves(self) -> tuple[torch.Tensor, ...]:
        """Returns the tensors that require gradients."""
        return self.q, self.k, self.compressed, self.sink

    def pairs(self) -> int:
        """Returns the number of pairs of a row and a key that it reads."""
        window = torch.arange(1, TOKENS + 1).clamp(max=WINDOW).sum()
        closed = visible(self.ratio).sum(1)
        listed = closed if self.lists is None else closed.clamp(max=self.lists.shape[-1])
        return int(window + listed.sum())

    def ours(self) -> torch.Tensor:
        """Computes attention with our kernels."""
        out = compressed_attention(
            self.q, self.k, self.compressed, self.lists, ratio=self.ratio, band=Band.window(WINDOW - 1), scale=SCALE,
            sink=self.sink, backend="triton",
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        return out

    def eager(self) -> torch.Tensor:
        """Computes attention by gathers and batched products of CHUNK rows at a time."""
        parts, closed = [], visible(self.ratio)
        for i in range(0, TOKENS, CHUNK):
            row = torch.arange(i, i + CHUNK, device="cuda")[:, None]
            near = row - torch.arange(WINDOW, device="cuda")
            keys, valid = self.k[0, near.clamp(min=0), 0], near >= 0
            if self.lists is None:
                others, more = self.compressed[0, :, 0].expand(CHUNK, -1, -1), closed[i : i + CHUNK]
            else:
                listed = self.lists[0, i : i + CHUNK, 0].long()
                others, more = self.compressed[0, listed, 0], closed[i : i + CHUNK].gather(1, listed)
            k, valid = torch.cat((keys, others), 1), torch.cat((valid, more), 1)
            scores = (self.q[0, i : i + CHUNK] @ k.mT).float() * SCALE
            scores = scores.masked_fill(~valid[:, None], -torch.inf)
            scores = torch.cat((scores, self.sink.view(1, -1, 1).expand(CHUNK, -1, -1)), -1)
            parts.append(torch.softmax(scores, -1)[..., :-1].to(k.dtype) @ k)
        return torch.cat(parts)[None]


def visible(ratio: int) -> torch.Tensor:
    """Returns bool [TOKENS, compressed keys]: true where a row may attend to a compressed key."""
    row = torch.arange(TOKENS, device="cuda")[:, None]
    return torch.arange(TOKENS // ratio, device="cuda") < (row + 1) // ratio


def compressed(quick: bool) -> Iterator[Row]:
    """Times forward and backward of both kinds of layers."""
    for ratio, count in ((4, 512), (128, 0)):
        name = f"ratio {ratio} {f'top {count}' if count else 'all'}"
        layer, graded = Layer.of(ratio, count, grad=False), Layer.of(ratio, count, grad=True)
        products = 2 * HEADS * DIM * layer.pairs()
        yield Row("compressed", name, layer.ours, {"eager": layer.eager}, 2 * products)
        yield _backward(name, graded, 5 * products)


def _backward(name: str, layer: Layer, flops: int) -> Row:
    out = layer.ours()
    given = torch.randn_like(out)
    peer: list[torch.Tensor] = []

    def ours() -> object:
        return torch.autograd.grad(out, layer.leaves, given, retain_graph=True)

    def eager() -> object:
        if not peer:  # at the first call: a peer that runs out of memory must not end the run
            peer.append(layer.eager())
        return torch.autograd.grad(peer[0], layer.leaves, given, retain_graph=True)

    return Row("compressed backward", name, ours, {"eager": eager}, flops)

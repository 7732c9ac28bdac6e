"""A layer of DeepSeek-V4, whose rows attend to a window of keys and to compressed keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fusion_attention import Band, compressed_attention
from fusion_attention.backends import BackendName

HEADS, DIM, WINDOW = 64, 512, 128
SCALE = DIM**-0.5
# (ratio, entries of a row's list, or 0 for all compressed keys) of both kinds of layers.
KINDS = ((4, 512), (128, 0))


@dataclass(frozen=True, eq=False)
class Layer:
    """The tensors of a layer for one sequence, with lists of compressed keys or without."""

    leaves: tuple[torch.Tensor, ...]  # q, k, compressed keys and sinks, which require gradients
    ratio: int
    lists: torch.Tensor | None

    @classmethod
    def of(cls, tokens: int, ratio: int, count: int, device: str = "cpu") -> Layer:
        """Makes a layer with random tensors; count: entries of each row's list, or 0 for no lists."""
        torch.manual_seed(0)
        shapes = (1, tokens, HEADS, DIM), (1, tokens, 1, DIM), (1, tokens // ratio, 1, DIM)
        rows = (torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for shape in shapes)
        lists = None
        if count:
            shown = visible(tokens, ratio, device)
            best = torch.rand(shown.shape, device=device).masked_fill(~shown, -1).topk(min(count, tokens // ratio))
            lists = best.indices.masked_fill(best.values < 0, -1).int()[None, :, None]
        return cls((*rows, torch.randn(HEADS, device=device, requires_grad=True)), ratio, lists)

    def pairs(self, rows: int) -> int:
        """Returns the number of pairs of the last `rows` rows and the keys that they read."""
        tokens = self.leaves[0].shape[1]
        closed = visible(tokens, self.ratio, "cpu").sum(1)
        listed = closed if self.lists is None else closed.clamp(max=self.lists.shape[-1])
        return int((torch.arange(1, tokens + 1).clamp(max=WINDOW) + listed)[-rows:].sum())

    def ours(self, backend: BackendName = "auto") -> torch.Tensor:
        """Computes all rows with our function."""
        q, k, compressed, sink = self.leaves
        out = compressed_attention(
            q, k, compressed, self.lists, ratio=self.ratio, band=Band.window(WINDOW - 1), scale=SCALE, sink=sink,
            backend=backend,
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        return out


def visible(tokens: int, ratio: int, device: str) -> torch.Tensor:
    """Returns bool [tokens, compressed keys]: true where a row may attend to a compressed key."""
    row = torch.arange(tokens, device=device)[:, None]
    return torch.arange(tokens // ratio, device=device) < (row + 1) // ratio

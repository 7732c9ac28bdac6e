"""Keys of earlier tokens, with which a layer decodes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fusion_attention.memory import zeros


class Cache:
    """The key rows of one layer's earlier tokens: a call with it appends its own and attends to all.

    Memory for `capacity` tokens of each sequence is made by the first call, which decides batch, sizes, dtype and
    device. Every layer has a cache of its own; causal alignment is that of the last token with the last key.

    Args:
        capacity: tokens of a sequence.

    Attributes:
        lengths: stored tokens of each sequence; empty before the first call.

    Raises:
        ValueError: a capacity below 1.

    Source: this library.

    Example:
        >>> from fusion_attention.nn import SparseSelfAttention, rope_table
        >>> layer = SparseSelfAttention(64, heads=4, index_heads=2, index_dim=16, top_k=8).eval()
        >>> cache, prompt, token = Cache(32), torch.randn(2, 10, 64), torch.randn(2, 1, 64)
        >>> with torch.no_grad():
        ...     for x in (prompt, token):
        ...         out, _ = layer(x, rope=rope_table(cache.positions(x), 16), cache=cache)
        >>> out.shape, cache.lengths
        (torch.Size([2, 1, 64]), [11, 11])
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"nn.Cache: capacity: expected at least 1 token, got {capacity}")
        self.capacity = capacity
        self.lengths: list[int] = []
        self._rows: dict[str, Tensor] = {}

    def positions(self, x: Tensor) -> Tensor:
        """The positions [B, S] of the next tokens x [B, S, dim], for rope_table()."""
        starts = torch.tensor(self.lengths or [0] * x.shape[0], device=x.device)
        return starts[:, None] + torch.arange(x.shape[1], device=x.device)

    def write(self, rows: Mapping[str, Tensor | None], new: list[int]) -> tuple[dict[str, Tensor | None], list[int]]:
        """Writes rows [B, S, heads, dim] by name, new[b] tokens of sequence b, behind the stored ones.

        Returns all rows of each name, and the lengths that the caller sets once its call has succeeded.

        Raises:
            ValueError: too many tokens, or rows of another batch, size, dtype or device than those stored.
        """
        before = self.lengths or [0] * len(new)
        self._check(rows, before, new)
        if not self.lengths:
            with torch.inference_mode(False):  # memory made in inference mode could not be written outside it
                self._rows = {
                    name: zeros((len(new), self.capacity, *t.shape[2:]), t.dtype, t.device)
                    for name, t in rows.items()
                    if t is not None
                }
        for name, stored in self._rows.items():
            given = rows[name]
            assert given is not None
            for b, (start, count) in enumerate(zip(before, new, strict=True)):
                stored[b, start : start + count] = given[b, :count]
        lengths = [start + count for start, count in zip(before, new, strict=True)]
        longest = max(lengths, default=0)
        return {name: None if t is None else self._rows[name][:, :longest] for name, t in rows.items()}, lengths

    def _check(self, rows: Mapping[str, Tensor | None], before: list[int], new: list[int]) -> None:
        if len(before) != len(new):
            raise ValueError(f"nn.Cache: expected a batch of {len(before)} sequences, got {len(new)}")
        for b, (start, count) in enumerate(zip(before, new, strict=True)):
            if start + count > self.capacity:
                expected = f"at least {start + count} tokens for sequence {b}"
                raise ValueError(f"nn.Cache: capacity: expected {expected}, got {self.capacity}")
        if not self.lengths:
            return
        there = {name: t for name, t in rows.items() if t is not None}
        if there.keys() != self._rows.keys():
            raise ValueError(
                f"nn.Cache: expected rows {', '.join(self._rows)}, got {', '.join(there)} (a cache serves one layer in "
                "one stage)"
            )
        for name, t in there.items():
            stored = self._rows[name]
            want, got = ((x.shape[2:], x.dtype, x.device) for x in (stored, t))
            if want != got:
                raise ValueError(f"nn.Cache: {name}: expected rows {_said(stored)}, got {_said(t)}")


def _said(t: Tensor) -> str:
    return f"{list(t.shape[2:])} {str(t.dtype).removeprefix('torch.')} on {t.device}"

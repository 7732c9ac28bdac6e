"""Which probabilities are kept: the caller's packed bits, or bits drawn by Philox4x32-7.

The drawn bit of a position depends on (seed, offset, sequence and head, row, key) alone, never on a length or a tile,
so packed and padded batches, and all back ends, drop the same positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar

import torch

from fusion_attention.ir.kv import MatrixView

_MASK32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 7
KEYS_PER_DRAW = 8


def keep_from_bits(view: MatrixView, b: int, heads: int, rows: slice, keys: slice) -> torch.Tensor:
    """[heads, rows, keys] bool from packed bits, least significant bit first; addresses count bits."""
    head = torch.arange(heads)[:, None, None] * int(view.stride_head[b])
    row = torch.arange(rows.start, rows.stop)[:, None] * int(view.stride_row[b])
    bit = (int(view.address[b]) + head + row + torch.arange(keys.start, keys.stop)).to(view.keep.device)
    return ((view.keep.view(-1)[bit >> 3] >> (bit & 7)) & 1).bool()


def _high_low(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two 32-bit halves of a * b, both factors below 2**32; split so that no product leaves int64."""
    low = a * (b & 0xFFFF)
    high = a * (b >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def philox(counter: tuple[torch.Tensor, ...], key: tuple[int, int], rounds: int = ROUNDS) -> tuple[torch.Tensor, ...]:
    """The four 32-bit words (int64 tensors) of Philox4x32 for four 32-bit counter words and two key words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        high0, low0 = _high_low(_MULTIPLIERS[0], c0)
        high1, low1 = _high_low(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK32, (k1 + _WEYL[1]) & _MASK32
    return c0, c1, c2, c3


def threshold(keep_prob: float) -> int:
    """A 16-bit draw below this is kept."""
    return round(65536 * keep_prob)


def keep_from_philox(
    seed: int, offset: int, keep_prob: float, first_stream: int, heads: int, rows: slice, keys: slice
) -> torch.Tensor:
    """[heads, rows, keys] bool: drawn bits; stream first_stream + h serves head h, first_stream = sequence * heads.

    One draw (counter = key // 8, row, stream, offset) gives eight 16-bit halves, little endian, for keys 8m .. 8m+7.
    """
    stream = torch.arange(first_stream, first_stream + heads)[:, None, None]
    row = torch.arange(rows.start, rows.stop)[None, :, None]
    return _keep_mask(seed, offset, keep_prob, stream, row, keys)


def _keep_mask(
    seed: int, offset: int, keep_prob: float, stream: torch.Tensor, row: torch.Tensor, keys: slice
) -> torch.Tensor:
    """[.., keys] bool for streams and rows [.., 1], which broadcast."""
    first = keys.start // KEYS_PER_DRAW
    last = -(-keys.stop // KEYS_PER_DRAW)
    draw = torch.arange(first, last, device=row.device)
    counter = (draw, row, stream & _MASK32, torch.tensor(offset & _MASK32, device=row.device))
    # The words start as broadcast axes; the fourth round has mixed each of them into the full shape.
    words = torch.stack(philox(counter, (seed & _MASK32, (seed >> 32) & _MASK32)), dim=-1)
    halves = torch.stack((words & 0xFFFF, words >> 16), dim=-1)
    keep = (halves < threshold(keep_prob)).flatten(-3)
    return keep[..., keys.start - first * KEYS_PER_DRAW : keys.stop - first * KEYS_PER_DRAW]


def drawn_bits(
    size: Sequence[int], keep_prob: float, seed: int, offset: int, device: torch.device | None = None
) -> torch.Tensor:
    """uint8, least significant bit first: what is drawn for scores [.., rows, keys], linear over them.

    The leading axes, multiplied, count streams: [sequences, heads, rows, keys] has the bits that kernels draw.
    """
    *streams, rows, keys = (1, 1, *size)
    count = math.prod(streams) * rows
    if not count * keys:
        return torch.zeros(0, dtype=torch.uint8, device=device)
    weights = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=device)
    results = []
    # Eight rows end with a whole byte; as many of them at a time as keep the words of their draws small.
    step = max(8, (1 << 20) // keys // 8 * 8)
    for first in range(0, count, step):
        place = torch.arange(first, min(first + step, count), device=device)[:, None]
        keep = _keep_mask(seed, offset, keep_prob, place // rows, place % rows, slice(0, keys)).flatten()
        bits = torch.nn.functional.pad(keep.to(torch.uint8), (0, -keep.numel() % 8)).unflatten(0, (-1, 8))
        results.append((bits * weights).sum(-1, dtype=torch.uint8))
    return torch.cat(results)


def signed(seed: int) -> int:
    """The int64 of a seed's 64 bits: torch knows unsigned seeds, its operators do not."""
    return seed - (1 << 64) if 1 << 63 <= seed < 1 << 64 else seed


generator: ContextVar[Callable[[], tuple[int, int]] | None] = ContextVar("generator", default=None)


def draw_pair() -> tuple[int, int]:
    """The (seed, offset) of a call that names none: of the generator in force, by default (draw_seed(), 0)."""
    draw = generator.get()
    return (draw_seed(), 0) if draw is None else draw()


def draw_seed() -> int:
    """A seed for one call, from torch's default generator (torch.manual_seed makes it repeatable); never 0."""
    return int(draw_seed_tensor())


def draw_seed_tensor() -> torch.Tensor:
    """draw_seed() as an int64 tensor of no dimensions, for a trace that must draw anew at every run."""
    return torch.randint(1, 2**63 - 1, ())

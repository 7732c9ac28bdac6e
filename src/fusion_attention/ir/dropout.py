"""Dropout masks: the caller's packed bits, or bits drawn by the generator Philox4x32-7.

The drawn bit of a position depends only on (seed, offset, sequence and head, row, key), not on lengths or tiles, so
packed and padded batches, and all back ends, drop the same positions.
"""

import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar

import torch

from fusion_attention.ir.memory_views import MatrixView

_MASK32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 7
KEYS_PER_DRAW = 8


def keep_from_bits(view: MatrixView, b: int, heads: int, rows: slice, keys: slice) -> torch.Tensor:
    """Returns the dropout mask of a range of query rows and keys of sequence b, [heads, rows, keys] bool, True: kept.
    view: packed bits, the least significant of a byte first; its addresses and strides count bits."""
    head = torch.arange(heads)[:, None, None] * int(view.stride_head[b])
    row = torch.arange(rows.start, rows.stop)[:, None] * int(view.stride_row[b])
    bit = (int(view.address[b]) + head + row + torch.arange(keys.start, keys.stop)).to(view.keep.device)
    return ((view.keep.view(-1)[bit >> 3] >> (bit & 7)) & 1).bool()


def _high_low(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the high and low 32 bits of a * b, for factors below 2**32, without overflow of int64."""
    low = a * (b & 0xFFFF)
    high = a * (b >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def philox(counter: tuple[torch.Tensor, ...], key: tuple[int, int], rounds: int = ROUNDS) -> tuple[torch.Tensor, ...]:
    """Returns Philox4x32's four 32-bit random words (int64 tensors) from four counter words and two key words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        high0, low0 = _high_low(_MULTIPLIERS[0], c0)
        high1, low1 = _high_low(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK32, (k1 + _WEYL[1]) & _MASK32
    return c0, c1, c2, c3


def threshold(keep_prob: float) -> int:
    """Returns round(65536 * keep_prob): dropout keeps a weight if its 16-bit random number is below it."""
    return round(65536 * keep_prob)


def keep_from_philox(
    seed: int, offset: int, keep_prob: float, first_stream: int, heads: int, rows: slice, keys: slice
) -> torch.Tensor:
    """Draws the dropout mask [heads, rows, keys] bool, true (kept) with probability keep_prob.
    Head h has stream first_stream + h, where first_stream is sequence * heads. One draw of Philox4x32-7 (counter = key
    // 8, row, stream, offset) gives eight 16-bit numbers, little endian, for keys 8m .. 8m+7."""
    stream = torch.arange(first_stream, first_stream + heads)[:, None, None]
    row = torch.arange(rows.start, rows.stop)[None, :, None]
    return _keep_mask(seed, offset, keep_prob, stream, row, keys)


def _keep_mask(
    seed: int, offset: int, keep_prob: float, stream: torch.Tensor, row: torch.Tensor, keys: slice
) -> torch.Tensor:
    """Draws the mask [.., keys] bool, true (kept) with probability keep_prob; stream, row: [.., 1], broadcast."""
    first = keys.start // KEYS_PER_DRAW
    last = -(-keys.stop // KEYS_PER_DRAW)
    draw = torch.arange(first, last, device=row.device)
    counter = (draw, row, stream & _MASK32, torch.tensor(offset & _MASK32, device=row.device))
    # Counter words start with broadcast shapes; after four rounds each has the full shape.
    words = torch.stack(philox(counter, (seed & _MASK32, (seed >> 32) & _MASK32)), dim=-1)
    halves = torch.stack((words & 0xFFFF, words >> 16), dim=-1)
    keep = (halves < threshold(keep_prob)).flatten(-3)
    return keep[..., keys.start - first * KEYS_PER_DRAW : keys.stop - first * KEYS_PER_DRAW]


def drawn_bits(
    size: Sequence[int], keep_prob: float, seed: int, offset: int, device: torch.device | None = None
) -> torch.Tensor:
    """Draws the dropout mask of scores of shape size = [.., rows, keys] with Philox4x32-7, packed in uint8, row by row,
    least significant bit first; 1: kept. Streams number the leading axes in order, so for [sequences, heads, rows,
    keys] the bits are those that kernels draw."""
    *streams, rows, keys = (1, 1, *size)
    count = math.prod(streams) * rows
    if not count * keys:
        return torch.zeros(0, dtype=torch.uint8, device=device)
    weights = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=device)
    results = []
    # Eight rows end at a byte boundary; the number of rows at a time bounds the memory of the drawn words.
    step = max(8, (1 << 20) // keys // 8 * 8)
    for first in range(0, count, step):
        place = torch.arange(first, min(first + step, count), device=device)[:, None]
        keep = _keep_mask(seed, offset, keep_prob, place // rows, place % rows, slice(0, keys)).flatten()
        bits = torch.nn.functional.pad(keep.to(torch.uint8), (0, -keep.numel() % 8)).unflatten(0, (-1, 8))
        results.append((bits * weights).sum(-1, dtype=torch.uint8))
    return torch.cat(results)


def signed(seed: int) -> int:
    """Returns the 64 bits of an unsigned seed as an int64, the only integer type of torch's operators."""
    return seed - (1 << 64) if 1 << 63 <= seed < 1 << 64 else seed


generator: ContextVar[Callable[[], tuple[int, int]] | None] = ContextVar("generator", default=None)


def draw_pair() -> tuple[int, int]:
    """Returns (seed, offset) for a call without a seed, from the current `generator`; default: (draw_seed(), 0)."""
    draw = generator.get()
    return (draw_seed(), 0) if draw is None else draw()


def draw_seed() -> int:
    """Returns a seed for one call, from torch's default generator (torch.manual_seed makes it repeatable); never 0."""
    return int(draw_seed_tensor())


def draw_seed_tensor() -> torch.Tensor:
    """Returns a random seed as an int64 tensor [], for traced graphs, which draw it at every run."""
    return torch.randint(1, 2**63 - 1, ())

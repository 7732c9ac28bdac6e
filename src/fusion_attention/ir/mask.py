"""Visible keys of a query: an interval (Band), without the pairs that a matrix `blocked` hides, stored in tiles."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fusion_attention.ir.memory_views import MatrixView

# More tokens than any sequence has, and small enough that sums do not overflow int64.
INFINITE = 1 << 40
# The smallest token count that means "no limit" in every interface.
UNLIMITED = (1 << 31) - 1
# Rows and keys of a tile of blocked pairs, and the codes of tiles that are blocked completely or not at all.
TILE = 128
ALL_BLOCKED, NONE_BLOCKED = -1, -2


def tokens(count: int) -> int:
    """Converts pre_tokens or next_tokens, as a caller passed it, to a number of tokens: from 2**31 - 1 on INFINITE,
    from -(2**31 - 1) down -INFINITE, else unchanged."""
    if count >= UNLIMITED:
        return INFINITE
    return -INFINITE if count <= -UNLIMITED else count


@dataclass(frozen=True, repr=False)
class Band:
    """An interval of visible keys for every query, with an optional prefix that is visible to all queries.

    Query i of a sequence sees the keys

        max(0, i + lo + a)  <=  j  <  min(kv_len, max(prefix, i + hi + a))

    with a = 0 (align="start": the diagonal starts at the first key) or a = kv_len - q_len (align="end": the
    diagonal ends at the last key, the alignment of decoding and of chunked prompts).

    Args:
        lo: position of the first visible key, relative to the diagonal; -INFINITE: no left edge.
        hi: position of the key behind the last visible one, relative to the diagonal; INFINITE: no right edge.
        align: "start" or "end".
        prefix: per sequence, the number of leading keys that are visible to all queries; (): none. Requires lo =
            -INFINITE.

    Raises:
        ValueError: an unknown alignment, or a prefix together with a left edge.

    Example:
        >>> Band.causal().visible(2, 3).int().tolist()
        [[1, 1, 0], [1, 1, 1]]
    """

    lo: int = -INFINITE
    hi: int = INFINITE
    align: str = "end"
    prefix: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("lo", "hi"):
            object.__setattr__(self, name, _as_int(getattr(self, name)))
        with contextlib.suppress(TypeError):
            object.__setattr__(self, "prefix", tuple(map(_as_int, self.prefix)))
        if self.align not in ("start", "end"):
            raise ValueError(f'Band: align: expected "start" or "end", got {self.align!r}')
        if self.prefix and self.lo > -INFINITE:
            raise ValueError(
                f"Band: prefix: expected no left edge beside a prefix, got lo={self.lo} (drop one of the two)"
            )

    @classmethod
    def full(cls) -> Band:
        """Returns the band in which every query row sees every key."""
        return cls()

    @classmethod
    def causal(cls, align: str = "end") -> Band:
        """Returns the band in which query i sees the keys j <= i, or j <= i + kv_len - q_len if align is "end"."""
        return cls(hi=1, align=align)

    @classmethod
    def window(cls, left: int, right: int = 0, align: str = "end") -> Band:
        """Returns the band in which a query sees `left` keys before the diagonal (see align), its key, and `right` keys
        behind it. Negative counts move an edge across the diagonal; 2**31 - 1 or more means no edge."""
        return cls(-tokens(left), min(tokens(right) + 1, INFINITE), align)

    @classmethod
    def prefix_causal(cls, prefix: Sequence[int]) -> Band:
        """Returns the band (align "end") in which queries of sequence b see prefix[b] keys and the causal ones."""
        return cls(hi=1, prefix=tuple(int(n) for n in prefix))

    def resolve(self, q_len: np.ndarray, kv_len: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns (lo, hi, prefix), int64 [sequences]: query i sees the keys i + lo <= j < max(prefix, i + hi)."""
        shift = kv_len - q_len if self.align == "end" else np.zeros_like(q_len)
        prefix = np.zeros_like(q_len)
        if self.prefix:
            prefix[:] = np.asarray(self.prefix, np.int64)
        return saturate(self.lo, shift), saturate(self.hi, shift), prefix

    def __repr__(self) -> str:
        """Returns the expression that makes this band, with a constructor such as Band.causal() where one fits."""
        text = f"Band(lo={self.lo!r}, hi={self.hi!r}, align={self.align!r}, prefix={self.prefix!r})"
        if any(type(n) is not int for n in (self.lo, self.hi, *self.prefix)):
            return text  # constructors would fail on numbers that are not integers; bind() reports them
        left = UNLIMITED if self.lo == -INFINITE else -self.lo
        right = UNLIMITED if self.hi == INFINITE else self.hi - 1
        align = () if self.align == "end" else (self.align,)
        forms = {"full": (), "causal": align, "window": (left, right, *align), "prefix_causal": (list(self.prefix),)}
        for name, arguments in forms.items():
            if getattr(Band, name)(*arguments) == self:
                return f"Band.{name}({', '.join(map(repr, arguments))})"
        return text

    def visible(self, q_len: int, kv_len: int) -> torch.Tensor:
        """Returns the band of one sequence as a boolean matrix [q_len, kv_len], True where a query sees a key."""
        lo, hi, prefix = (int(edge[0]) for edge in self.resolve(np.array([q_len]), np.array([kv_len])))
        row, key = torch.arange(q_len)[:, None], torch.arange(kv_len)
        return (key >= row + lo) & (key < torch.clamp(row + hi, min=prefix))


def _as_int(number: Any) -> Any:
    """Returns an integral number of any type as an int, so that equal bands compare equal; other values unchanged."""
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if int(number) == number:
            return int(number)
    return number


def saturate(edge: int, shift: np.ndarray) -> np.ndarray:
    """Returns a band edge shifted for each sequence, edge + shift, int64; an infinite edge stays infinite."""
    if abs(edge) >= INFINITE:
        return np.full_like(shift, INFINITE if edge > 0 else -INFINITE)
    return np.clip(edge + shift, -INFINITE, INFINITE)


def blocked_by_tiles(
    tiles: MatrixView, bits: torch.Tensor | None, b: int, heads: int, rows: int, keys: int
) -> torch.Tensor:
    """Returns bool [heads, rows, keys] of sequence b, true for (query, key) pairs that a mask in 128 x 128 tiles hides;
    tiles: the number of each tile, or -1, -2 if it hides all or none; bits: the elements of partly hidden tiles."""
    numbers = tiles.sequence(b, heads, -(-rows // TILE), -(-keys // TILE)).long()
    full = torch.zeros(2, TILE, TILE, dtype=torch.bool, device=numbers.device)
    full[ALL_BLOCKED] = True
    if bits is not None:
        place = torch.arange(8, dtype=torch.uint8, device=bits.device)
        full = torch.cat(((bits[..., None] >> place & 1).flatten(-2).bool(), full))
    # ALL_BLOCKED (-1) and NONE_BLOCKED (-2) index the last two tiles of `full`.
    clipped = numbers.where((numbers >= NONE_BLOCKED) & (numbers < len(full) - 2), ALL_BLOCKED)
    return full[clipped].transpose(2, 3).flatten(3).flatten(1, 2)[:, :rows, :keys]

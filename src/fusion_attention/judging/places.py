"""Where a result is wrong: which sequence, heads, rows or keys, and whether they lie in a pattern.

Knows which places are wrong, not why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

Tensor = torch.Tensor
TILES = (16, 32, 64, 128, 256, 512)
_PICTURE = 96  # heads and rows of a heat map, at most


@dataclass(eq=False)
class Map:
    """How far each row of each head is off, as a multiple of what a plain program is off; per sequence.

    Attributes:
        off: [heads, rows] float32 per sequence; above 1 a row is wrong.
        worst: (sequence, head, row, element, ours, golden, plain) of the largest error.
    """

    lengths: Sequence[int]
    heads: int
    word: str = "rows"
    off: list[Tensor] = field(default_factory=list)
    worst: tuple[int, int, int, int, float, float, float] | None = None
    error: float = -1.0

    def __post_init__(self) -> None:
        self.off = [torch.zeros(self.heads, int(n)) for n in self.lengths]

    def add(self, b: int, heads: slice, rows: slice, values: tuple[Tensor, Tensor, Tensor], slack: Tensor) -> None:
        """A piece: (ours, golden, plain), and what no implementation can be asked to resolve."""
        ours, golden, plain = (t.double() for t in values)
        same = (ours == golden) | (ours.isnan() & golden.isnan())
        error = (ours - golden).abs().masked_fill(same, 0).nan_to_num(nan=torch.inf)
        theirs = (plain - golden).abs().nan_to_num(nan=0.0, posinf=0.0)
        rms = error.square().mean(-1).sqrt()
        base = theirs.square().mean().sqrt() + slack.double().square().mean().sqrt()
        self.off[b][heads, rows] = (rms / (4 * base).clamp(min=1e-45)).float()
        if not error.numel():
            return
        largest = float(error.amax())
        if largest > self.error:
            at = np.unravel_index(int(error.argmax()), tuple(error.shape))
            numbers = (float(t[tuple(at)]) for t in (ours, golden, plain))
            place = (b, int(at[0]) + heads.start, int(at[1]) + rows.start, int(at[2]))
            self.error, self.worst = largest, (*place, *numbers)

    @property
    def wrong(self) -> list[Tensor]:
        """[heads, rows] bool per sequence."""
        return [off > 1 for off in self.off]

    @property
    def share(self) -> float:
        """Of all rows of all heads that are wrong."""
        count = sum(off.numel() for off in self.off)
        return sum(int(w.sum()) for w in self.wrong) / count if count else 0.0

    def sentences(self) -> list[str]:
        """Where, in words; nothing where nothing is wrong."""
        wrong = self.wrong
        bad = [b for b, w in enumerate(wrong) if w.any()]
        if not bad:
            return []
        found = []
        if len(wrong) > 1:
            every = len(bad) == len(wrong)
            found.append("every sequence" if every else f"sequence {_ranges(bad)} of {len(wrong)}")
        heads = torch.stack([wrong[b].any(1) for b in bad]).any(0)
        found.append(_which(heads, "head"))
        rows = [wrong[b].any(0) for b in bad]
        longest = max(rows, key=len)
        found.append(_which(longest, self.word.removesuffix("s")) + _pattern(longest))
        if all(len(r) > 1 for r in rows) and all(bool(r[-1]) and int(r.sum()) == 1 for r in rows):
            found[-1] = f"the last {self.word.removesuffix('s')} alone"
        return found

    def picture(self, b: int) -> Tensor:
        """off of a sequence, at most 96 heads by 96 rows, each the largest of those it stands for."""
        off = self.off[b]
        if not off.numel():
            return off
        finite = off.nan_to_num(nan=torch.inf)[None, None]
        size = (min(off.shape[0], _PICTURE), min(off.shape[1], _PICTURE))
        return torch.nn.functional.adaptive_max_pool2d(finite, size)[0, 0]


def _ranges(numbers: Sequence[int]) -> str:
    """0-3, 7."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    text = [f"{a}" if a == z else f"{a}-{z}" for a, z in runs]
    return ", ".join(text[:4]) + (f" and {len(text) - 4} more" if len(text) > 4 else "")


def _which(bad: Tensor, word: str) -> str:
    numbers = bad.nonzero().flatten().tolist()
    if len(numbers) == len(bad):
        return f"all {len(bad)} {word}s" if len(bad) > 1 else f"its one {word}"
    if len(numbers) > 4 and numbers[-1] == len(bad) - 1 and len(numbers) == len(bad) - numbers[0]:
        return f"every {word} from {numbers[0]} on (of {len(bad)})"
    return f"{word}{'s' if len(numbers) > 1 else ''} {_ranges(numbers)} of {len(bad)}"


def _pattern(bad: Tensor) -> str:
    """What tiles say about rows: they begin at a tile's edge, or the same rows of every tile are wrong."""
    numbers = bad.nonzero().flatten()
    first = int(numbers[0])
    edge = max((tile for tile in TILES if first and first % tile == 0), default=0)
    if edge and len(numbers) == len(bad) - first:
        return f"; {first} is an edge of tiles of {edge}"
    for tile in reversed(TILES):
        if len(bad) >= 2 * tile and 0 < len(numbers) < len(bad):
            whole = bad[: len(bad) // tile * tile].view(-1, tile)
            if bool((whole == whole[0]).all()) and 0 < int(whole[0].sum()) < tile:
                return f"; the same rows ({_ranges(whole[0].nonzero().flatten().tolist())}) of every tile of {tile}"
            if bool((whole == whole[:, :1]).all()):
                return f"; whole tiles of {tile}: {_ranges(whole[:, 0].nonzero().flatten().tolist())}"
    return ""

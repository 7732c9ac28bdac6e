"""Describes where a result is wrong: in which sequences, heads, rows or keys, and in which pattern of tiles."""

from collections.abc import Callable, Sequence

import torch

from fusion_attention.judging.chi_square_limits import LEAST
from fusion_attention.judging.editable_call import Setting
from fusion_attention.judging.error_heatmap import OF_MASK, Mask, Surface, cells_of
from fusion_attention.judging.standards import Tally

Tensor = torch.Tensor
TILES = (16, 32, 64, 128, 256, 512)


class Map:
    """The error of each row of each head, per sequence.

    Attributes:
        off: [heads, rows] float32 per sequence: the row's error divided by its limit; a row is wrong if it exceeds 1.
        worst: (sequence, head, row, element, output's value, exact value, expected error) of the largest error.
    """

    def __init__(self, tally: Tally, word: str = "rows") -> None:
        self.word, self.worst = word, tally.worst
        self.off: list[Tensor] = []
        for rows, wrong in zip(tally.errors.of_rows, tally.errors.wrong(), strict=True):
            result = (rows.sqrt() / LEAST).float()
            self.off.append(torch.where(wrong, result.clamp(min=1.0001), result.clamp(max=1.0)))

    @property
    def wrong(self) -> list[Tensor]:
        """The rows with an error beyond their limit: bool [heads, rows] per sequence."""
        return [off > 1 for off in self.off]

    @property
    def fraction(self) -> float:
        """The fraction of an output's rows that have an error beyond their limit."""
        count = sum(off.numel() for off in self.off)
        return sum(int(w.sum()) for w in self.wrong) / count if count else 0.0

    def sentences(self) -> list[str]:
        """Returns phrases that name the sequences, heads and rows with errors; [] without errors."""
        wrong = self.wrong
        bad = [b for b, w in enumerate(wrong) if w.any()]
        if not bad:
            return []
        results = []
        if len(wrong) > 1:
            every = len(bad) == len(wrong)
            results.append("every sequence" if every else f"sequence {_ranges(bad)} of {len(wrong)}")
        heads = torch.stack([wrong[b].any(1) for b in bad]).any(0)
        results.append(_which(heads, "head"))
        rows = [wrong[b].any(0) for b in bad]
        longest = max(rows, key=len)
        results.append(_which(longest, self.word.removesuffix("s")) + _pattern(longest))
        if all(len(r) > 1 for r in rows) and all(bool(r[-1]) and int(r.sum()) == 1 for r in rows):
            results[-1] = f"the last {self.word.removesuffix('s')} alone"
        return results

    def surface(self) -> Surface:
        """Returns the errors [heads, rows] of each sequence as matrices to be drawn."""
        return Surface([off * LEAST for off in self.off], self.wrong, "heads", self.word)


def looks_like(tally: Tally, word: str = "row", rows: Callable[[int], Tensor] | None = None) -> list[str]:
    """Returns sentences about an output's wrong rows that are zero, NaN, infinite, or copies of other rows.

    Args:
        tally: the output's errors by row.
        word: the word for a row in the sentences: "row", "key" or "number".
        rows: returns a sequence's output [heads, rows, elements]; None: copies are not searched.
    """
    wrong = tally.errors.wrong()
    total = sum(int(w.sum()) for w in wrong)
    if not total or not tally.marks:
        return []
    sentences = []
    for mark, one, many in _LOOKS:
        count = sum(int((getattr(m, mark) & w).sum()) for m, w in zip(tally.marks, wrong, strict=True))
        if count:
            some = f"{count} of" if count < total else "all"
            who = f"the wrong {word}" if total == 1 else f"{some} {total} wrong {word}s"
            sentences.append(f"{who} {one if count == 1 else many}")
    for b, (bad, marks) in enumerate(zip(wrong, tally.marks, strict=True)):
        result = _copied(rows(b), bad, marks.golden) if rows is not None and bad.any() else None
        if result is not None:
            head, row, other, of = result
            return [*sentences, f"{word} {row} of head {head}, sequence {b}, is a copy of {word} {of} of head {other}"]
    return sentences


def mask_of(setting: Setting, b: int) -> Mask | None:
    """Returns the mask of the first head in sequence `b` of the judged call `setting`, reduced to cells for a drawing;
    None if queries see all keys."""
    sizes = int(setting.extents.q_len[b]), setting.extents.all_keys(b)
    if not all(sizes):
        return None
    steps = cells_of(sizes, OF_MASK)
    rows = (setting.block(b, slice(0, 1), slice(r, r + 1), slice(0, sizes[1])) for r in range(0, sizes[0], steps[0]))
    visible = torch.stack([x.visible[0, 0] for x in rows])
    fractions = torch.stack([cell.float().mean(-1) for cell in visible.split(steps[1], -1)], -1)
    count = len(setting.extents)
    return None if bool(visible.all()) else Mask(fractions, steps, f" of sequence {b}" if count > 1 else "")


_LOOKS = (("zero", "is zero", "are zero"), ("nan", "holds NaN", "hold NaN"),
          ("infinite", "holds infinities", "hold infinities"))  # fmt: skip


def most(tally: Tally, shape: Sequence[int]) -> list[str]:
    """Returns a sentence about the largest error of an output without an axis of rows, such as a bias's gradient.
    tally: the output's errors; shape: its shape, for the indices of the element."""
    if tally.worst is None:
        return []
    count = sum(int(w.sum()) for w in tally.errors.wrong())
    words = "rows" if tally.errors.columns > 1 else "numbers"
    at = torch.unravel_index(torch.tensor(tally.worst[2] * tally.errors.columns + tally.worst[3]), tuple(shape))
    place, (ours, golden) = [int(n) for n in at], tally.worst[4:6]
    return [f"{count} of its {tally.errors.count} {words}; most at {place}: {ours:.4g}, should be {golden:.4g}"]


def _copied(rows: Tensor, wrong: Tensor, golden: Tensor) -> tuple[int, int, int, int] | None:
    """Returns (head, row, other head, other row) of a wrong row that equals another row, though they differ in the
    float64 reference. rows: the output [heads, rows, elements]; wrong: bool [heads, rows]; golden: [heads, rows], a
    number that identifies the reference's row."""
    for head, row in wrong.nonzero()[:8].tolist():
        mine, right = rows[head, row], golden[head, row]
        if not (mine == mine[0]).all():
            apart = (golden - right).abs() > 1e-3 * (golden.abs() + right.abs())
            same = (rows == mine).all(-1) & apart
            if same.any():
                other, of = (int(n) for n in same.nonzero()[0])
                return head, row, other, of
    return None


def _ranges(numbers: Sequence[int]) -> str:
    """Formats ascending integers as ranges: [0, 1, 2, 3, 7] as "0-3, 7"; after four ranges, the number of others."""
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
    """Returns a phrase if wrong rows (true in bad [rows]) begin at a tile's edge or recur in every tile; else ""."""
    numbers = bad.nonzero().flatten()
    first = int(numbers[0])
    edge = max((tile for tile in TILES if first and first % tile == 0), default=0)
    if edge and len(numbers) == len(bad) - first:
        return f"; {first} is an edge of tiles of {edge}"
    for tile in reversed(TILES):
        if len(bad) >= 2 * tile and 0 < len(numbers) < len(bad):
            full = bad[: len(bad) // tile * tile].view(-1, tile)
            if bool((full == full[0]).all()) and 0 < int(full[0].sum()) < tile:
                return f"; the same rows ({_ranges(full[0].nonzero().flatten().tolist())}) of every tile of {tile}"
            if bool((full == full[:, :1]).all()):
                return f"; whole tiles of {tile}: {_ranges(full[:, 0].nonzero().flatten().tolist())}"
    return ""

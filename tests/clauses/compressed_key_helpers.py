"""Helpers of the indexer's pages: rows and keys of calls in which a key may represent several tokens."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import torch

from clauses.checks import Args, Clauses, computes, forbids
from clauses.dtype_abbreviations import I32
from clauses.values import GENERATOR, ints

Names = tuple[str, str]  # of the rows' and of the keys' parameter


def has_bound(ratio: int, mode: int) -> bool:
    """Returns True if a residual (tokens after the last full group) determines the positions of rows."""
    return ratio > 1 and mode == 3


def bound(row: int, rows: int, keys: int, ratio: int, residual: int, mode: int) -> int:
    """Returns the number of keys that a row sees: a key is visible if all its tokens are at or before the row."""
    return keys if mode == 0 else min(max((keys * ratio + residual - rows + row + 1) // ratio, 0), keys)


def ends_of(names: Names, *lengths: Sequence[int]) -> Args:
    """Returns the cumulative ends of packed sequences, with a leading 0."""
    return {name: torch.tensor([*accumulate(n, initial=0)], dtype=I32) for name, n in zip(names, lengths, strict=True)}


def lists_of(
    rows: Sequence[int], keys: Sequence[int], K: int, ratio: int, residual: Sequence[int], mode: int
) -> torch.Tensor:
    """Returns [rows, 1, K]: up to three random visible keys of each row, then -1."""
    lists = torch.full((sum(rows), 1, K), -1, dtype=I32)
    for b, (start, count) in enumerate(zip(accumulate(rows, initial=0), rows, strict=False)):
        left = residual[b] if has_bound(ratio, mode) else 0
        for i in range(count):
            visible = bound(i, count, keys[b], ratio, left, mode)
            entries = torch.randperm(visible, generator=GENERATOR)[: min(3, K)]
            lists[start + i, 0, : len(entries)] = entries.to(I32)
    return lists


def sequences(args: Args, tensor: str, ends: str, used: str) -> list[tuple[int, int]]:
    """Returns (first row, number of rows) of every sequence in a tensor with its batch axis flattened."""
    rows = args[tensor].shape[1]
    room = args[ends].tolist() if args[tensor].dim() == 3 else [b * rows for b in range(len(args[tensor]) + 1)]
    counts = [b - a for a, b in pairwise(room)] if args[used] is None else args[used].tolist()
    return list(zip(room, counts, strict=False))


def rows_of(args: Args, ends: Names, used: Names, residual: str) -> Iterator[tuple[int, int, int, int]]:
    """Yields (sequence, row of q, first key, number of visible keys) of every row."""
    sides = (sequences(args, *of) for of in zip("qk", ends, used, strict=True))
    for b, ((first, rows), (key, keys)) in enumerate(zip(*sides, strict=True)):
        left = 0 if args[residual] is None else int(args[residual][b])
        for i in range(rows):
            yield b, first + i, key, bound(i, rows, keys, args["cmpRatio"], left, args["maskMode"])


def of_lengths(ends: Names, used: Names, residual: str) -> Clauses:
    """Returns the statements of a page about the lengths of its sequences."""
    return {
        "Ends begin with 0 and reach the last token; used lengths and residuals are within bounds.": [
            computes(**{used[0]: ints(4, 0, d=I32)}),
            *(forbids(name, **{name: ints(*n, d=I32)}) for name in ends for n in ((1, 3, 12), (0, 3))),
            *(forbids(name, **{name: ints(1, 99, d=I32)}) for name in used),
            forbids(residual, **{residual: ints(4, 0, d=I32)}),
        ],
    }

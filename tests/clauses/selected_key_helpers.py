"""Helpers of two pages: lists of selected keys, sequences, and visible keys of a row."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from clauses.checks import NULL, Args, Clauses, computes, forbids, refuses
from clauses.dtype_abbreviations import I32
from clauses.values import GENERATOR, ends


class Item(NamedTuple):
    """Rows and keys of a sequence: first row in T1, number of rows, first key in T2, number of keys."""

    row: int
    rows: int
    key: int
    keys: int


def packed(q_ends: Sequence[int], kv_ends: Sequence[int]) -> Iterator[Item]:
    """Yields the sequences with these inclusive ends."""
    row = key = 0
    for q, k in zip(q_ends, kv_ends, strict=True):
        yield Item(row, q - row, key, k - key)
        row, key = q, k


def sequences_of(
    layout: str, q: Sequence[int], kv: Sequence[int], tokens: tuple[Sequence[int], Sequence[int]] | None
) -> tuple[list[Item], int, int, tuple[list[int], list[int]]]:
    """Returns (sequences, T1, T2, lengths as arguments); BSND: len(q) padded sequences with lengths `tokens`."""
    if layout == "TND":
        return list(packed(q, kv)), q[-1], kv[-1], (list(q), list(kv))
    rows, keys = tokens or ([q[0]] * len(q), [kv[0]] * len(q))
    items = [Item(b * q[0], rows[b], b * kv[0], keys[b]) for b in range(len(q))]
    return items, len(q) * q[0], len(q) * kv[0], (list(rows), list(keys))


def visible(item: Item, row: int, mode: int) -> int:
    """Returns the number of keys that a row may see: all, or up to the diagonal through the lower right corner."""
    return item.keys if mode == 0 else min(max(item.keys - item.rows + row + 1, 0), item.keys)


def lists(items: Sequence[Item], rows: int, mode: int, block: int, count: int) -> torch.Tensor:
    """Returns [rows, 1, 2048]: for every row up to `count` visible blocks in random order, then -1."""
    result = torch.full((rows, 1, 2048), -1, dtype=I32)
    for item in items:
        for row in range(item.rows):
            blocks = -(-visible(item, row, mode) // block)
            chosen = torch.randperm(blocks, generator=GENERATOR)[: min(count, 2048)]
            result[item.row + row, 0, : len(chosen)] = chosen.to(I32)
    return result


def flat(t: torch.Tensor) -> torch.Tensor:
    """Returns rows [T, N, D] of a tensor in BSND or TND."""
    return t if t.dim() == 3 else t.flatten(0, 1)


def items_of(args: Args, query: str, key: str) -> list[Item]:
    """Returns the sequences of a call by its shapes and lengths."""
    given = [args[name].tolist() if isinstance(args[name], torch.Tensor) else args[name] for name in (query, key)]
    if args["query"].dim() == 3:
        return list(packed(*given))
    (batch, s1), s2 = args["query"].shape[:2], args["key"].shape[1]
    rows, keys = given[0] or [s1] * batch, given[1] or [s2] * batch
    return [Item(b * s1, rows[b], b * s2, keys[b]) for b in range(batch)]


def selected(args: Args, item: Item, mode: int, block: int) -> torch.Tensor:
    """Returns bool [rows, keys]: True if a row sees a key and its list contains the key's block."""
    visible_pairs = torch.zeros(item.rows, item.keys, dtype=torch.bool)
    indices = flat(args["sparseIndices"])
    for row in range(item.rows):
        ids = indices[item.row + row, 0]
        ids = ids[: int((ids < 0).nonzero()[0]) if bool((ids < 0).any()) else None].long()
        positions = (ids[:, None] * block + torch.arange(block)).reshape(-1)
        visible_pairs[row, positions[positions < visible(item, row, mode)]] = True
    return visible_pairs


def of_lists(lengths: tuple[str, str], axes: str, numbers: Callable[..., Any], **small: Any) -> Clauses:
    """Returns the statements of both pages about sequences and lists.

    Args:
        lengths: names of the lengths of rows and of keys; numbers: makes a value of them.
        axes: the keyword of base() for the layout. small: changes of calls with many sequences.
    """
    query, key = lengths
    padded = {axes: "BSND"}
    return {
        "TND needs both lengths.": [
            *(refuses(NULL, name, **{name: None}) for name in lengths),
            refuses(NULL, " ".join(lengths), **dict.fromkeys(lengths)),
        ],
        "B is 1 to 256.": [
            computes(q=(0,) * 255 + (1,), kv=(0,) * 255 + (1,), **small),
            forbids(f"query {query}", q=ends(257), kv=ends(257), **small),
            forbids("query", **padded, q=(1,) * 257, kv=(1,), **small),
        ],
        "In TND lengths, of each sequence by the letter, are inclusive ends, one per item, to T1 and T2 (ruling 28).": [
            computes(q=(2, 2, 5), kv=(10, 20, 60)),
            *(forbids(query, **{query: numbers(*n)}) for n in ((3, 6), (5, 3))),
            *(forbids(key, **{key: numbers(*n)}) for n in ((70, 161), (160, 70))),
            forbids(" ".join(lengths), **{query: numbers(5)}),
            forbids(" ".join(lengths), **{key: numbers(70, 100, 160)}),
        ],
        "The ends add up to T1 and T2: none stops before its tensor does, as lengths per item would.": [
            *(forbids(query, **{query: numbers(*n)}) for n in ((2, 3), (3, 4))),
            forbids(key, **{key: numbers(70, 90)}, count=0),
        ],
        "sparseIndices names keys of the row's own sequence.": [
            forbids("sparseIndices", sparseIndices=lambda old, n=n: old.index_fill(-1, torch.tensor(0), n))
            for n in (160, 90, -2, 2**30)
        ],
        "Without query rows it returns at once (ruling 24).": [
            computes(q=(0,), kv=(20,)),
            computes(**padded, q=(0, 0), kv=(20,)),
        ],
    }

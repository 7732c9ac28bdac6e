"""Mistakes of single tiles of keys: a tile is omitted, counted twice, or read from another address."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from fusion_attention.judging.editable_call import Block
from fusion_attention.judging.expected_error import LEFT
from fusion_attention.judging.mistakes.kinds import SIZES, Case, Mistake, Try
from fusion_attention.judging.mistakes.online_softmax import (
    Loop,
    Sums,
    Way,
    by_program,
    explaining,
    exponentials,
    sampled,
    sizes_of,
    suits,
)

Tensor = torch.Tensor
_EXCHANGED = "its values and those of the next tile exchanged"
_STALE = ("the values", "the keys", "keys and values")
_OTHERS = ("of the tile before", "of the tile after", "from one key before", "from one key after")
# Kind of wrong treatment of a tile -> name of the mistake.
_KINDS = {
    "left out": "tile-left-out",
    "counted twice": "tile-twice",
    "left out of the product with V": "tile-left-out",
    "left out of the sum of weights": "tile-left-out",
    _EXCHANGED: "tile-stale",
    **{f"with {what} {other}": "tile-stale" for what in _STALE for other in _OTHERS},
}


@dataclass(frozen=True, eq=False)
class Treated:
    """The scores, softmax weights and values of all keys in a kernel that makes a mistake with them."""

    scores: Tensor  # the scores from which the maximum is computed
    # product, total: weights in the product with V and in the sum of weights, relative to the correct maximum, [heads,
    # rows, keys].
    product: Tensor
    total: Tensor
    values: Tensor  # values of the keys


def _treated(loop: Loop, kind: str, by: int) -> Treated:
    """Returns the scores, softmax weights and values of all keys of `loop`, each changed by the same mistake. kind: the
    mistake, such as "counted twice"; by: if it reads other keys, key j is read from key j - by."""
    right, scores, values = exponentials(loop.scores), loop.scores, loop.values
    none = torch.zeros_like(right)
    if kind == "left out":
        return Treated(torch.full_like(scores, -math.inf), none, none, values)
    if kind == "counted twice":
        return Treated(scores, 2 * right, 2 * right, values)
    if kind.startswith("left out of"):
        return Treated(scores, *((none, right) if "product" in kind else (right, none)), values)
    if "keys" in kind:
        scores = loop.every.roll(by, -1).where(loop.scores != -math.inf, -math.inf)
        right = (scores - loop.scores.amax(-1, keepdim=True)).exp().nan_to_num(0.0)
    return Treated(scores, right, right, values.roll(by, -2) if "values" in kind else values)


def _distances(kind: str, size: int) -> list[int]:
    """Returns the distances, in keys, to the keys that a wrong kernel reads in place of a tile of `size` keys. There is
    one distance for the tile, and a second one for the tile after it if both are exchanged. kind: the mistake."""
    if kind == _EXCHANGED:
        return [-size, size]
    return [(1 if "one key" in kind else size) * (1 if "before" in kind else -1)]


def _with(loop: Loop, kind: str, marks: list[Tensor], distances: list[int]) -> Sums:
    """Returns the softmax sums over the keys of `loop` if a mistake, such as kind "counted twice", is made with some of
    them. marks: bool [keys], true for such keys, for each of the distances from which keys are read."""
    scores, product = loop.scores, exponentials(loop.scores)
    total, results = product, []
    for at, by in zip(marks, distances, strict=True):
        other = _treated(loop, kind, by)
        scores, total = other.scores.where(at, scores), other.total.where(at, total)
        results.append((other.product * at) @ other.values)
        product = product * ~at
    top = scores.amax(-1, keepdim=True)
    fade = (loop.scores.amax(-1, keepdim=True) - top).exp().nan_to_num(0.0, posinf=0.0)
    values = sum(results, product @ loop.values)
    return Sums(values * fade, top, total.sum(-1, keepdim=True) * fade)


def _at(loop: Loop, kind: str, size: int, tile: int) -> Sums:
    distances, number = _distances(kind, size), loop.positions // size
    return _with(loop, kind, [number == tile + n for n in range(len(distances))], distances)


def _every(loop: Loop, kind: str, size: int) -> Sums:
    return _with(loop, kind, [loop.positions >= size], [size])


_Key = tuple[str, int, int]  # kind, size and number of a tile


def _candidates(case: Case, mistake: str) -> list[_Key]:
    """Returns the tiles, (kind of mistake, keys of a tile, number of the tile), that explain sampled wrong rows of a
    call if the named mistake is made with them, the one with the smallest remaining error first."""
    left: dict[_Key, float] = {}
    possible: set[_Key] | None = None
    for loop, mine, error in sampled(case, 8):
        results = {key: value / error for key, value in _without(loop, mine, mistake, possible)}
        possible = {key for key, value in results.items() if not value >= LEFT}
        left = {key: left.get(key, 0.0) + (0.0 if math.isnan(results[key]) else results[key]) for key in possible}
    return sorted((key for key in left if left[key]), key=lambda key: (left[key], -key[1]))[:4]


def _without(loop: Loop, mine: Tensor, mistake: str, possible: set[_Key] | None) -> Iterator[tuple[_Key, float]]:
    """Yields ((kind, size, number) of a tile, a row's remaining error) for each tile with which the mistake is made;
    NaN if no key remains. loop, mine: the row's keys and the recorded row; possible: the tiles that explain earlier
    rows, None for the first."""
    for kind, name in _KINDS.items():
        for size in SIZES if "tile" in kind else (1, *SIZES):
            if name == mistake and (possible is None or any(key[:2] == (kind, size) for key in possible)):
                errors = _errors(loop, mine, kind, size).tolist()
                for tile, error in enumerate(errors, loop.first // size):
                    key = kind, size, tile
                    skipped = kind == "left out" and size > 1 and (tile + 1) * size >= loop.length  # tile-skipped
                    if not (math.isinf(error) or skipped) and (possible is None or key in possible):
                        yield key, error


def _errors(loop: Loop, mine: Tensor, kind: str, size: int) -> Tensor:
    """Returns, per tile of `size` keys, the error of a row (mine: as recorded) that remains if the mistake `kind` is
    made with this tile: NaN for a tile with all visible keys of the row, infinite for a tile with none."""
    number = loop.positions // size - loop.first // size
    tiles = int(number[-1]) + 1

    def by_tile(t: Tensor) -> Tensor:
        return t.new_zeros(tiles, *t.shape[1:]).index_add_(0, number, t)

    weights, values, visible = exponentials(loop.scores)[0, 0], loop.values[0], loop.scores[0, 0] != -math.inf
    of_tile, result, total = by_tile(visible.double()), weights @ values, weights.sum()
    changed, divisor = torch.zeros(tiles, values.shape[-1], dtype=values.dtype), weights.new_zeros(tiles)
    for further, by in enumerate(_distances(kind, size)):
        other = _treated(loop, kind, by)
        product = by_tile(other.product[0, 0, :, None] * other.values[0] - weights[:, None] * values)
        sums = by_tile(other.total[0, 0] - weights)
        changed[: tiles - further] += product[further:]
        divisor[: tiles - further] += sums[further:]
    errors = ((result + changed) / (total + divisor)[:, None] - mine[0, 0]).norm(dim=-1)
    errors = errors.nan_to_num(math.nan, posinf=1e300)
    errors[of_tile == visible.sum()] = math.nan
    errors[of_tile == 0] = math.inf
    return errors


def _every_stale(case: Case) -> Iterator[Try]:
    """Yields variants of a call in which each tile except the first has the keys or values of the previous tile."""
    kinds = [f"with {what} of the tile before" for what in _STALE]
    return explaining(case, (
        Way(f"every tile of {size}, {kind}", partial(_every, kind=kind, size=size))
        for size in sizes_of(case) for kind in kinds
    ))  # fmt: skip


def _transposed(case: Case) -> Iterator[Try]:
    """Yields variants of a call in which all square tiles of keys or values are transposed; the last is zero-padded."""
    s = case.setting

    def turned(x: Block, *, name: str, size: int) -> Block:
        first = x.keys.start // size * size
        keys = slice(first, min(-(-x.keys.stop // size) * size, x.kv_len))
        rows = getattr(s.block(x.b, x.heads, x.rows, keys), name)
        squares = torch.nn.functional.pad(rows, (0, 0, 0, -rows.shape[-2] % size)).unflatten(-2, (-1, size)).mT
        return replace(x, **{name: squares.flatten(-3, -2)[..., x.keys.start - first : x.keys.stop - first, :]})

    for what, name, size in (("keys", "k", s.problem.dim_qk), ("values", "v", s.problem.dim_v)):
        if suits(case) and size > 1:
            yield Try(f"{what}, tiles of {size}", s.changed(partial(turned, name=name, size=size)))


def _mistake(
    name: str, means: str, fix: str, further: Callable[[Case], Iterator[Try]] = lambda case: iter(())
) -> Mistake:
    def tries(case: Case) -> Iterator[Try]:
        yield from further(case)
        for kind, size, tile in _candidates(case, name) if suits(case) else []:
            first = tile * size
            keys = f"key {first}" if size == 1 else f"keys {first} to {first + size - 1}, tile {tile} of {size}"
            yield by_program(case, f"{keys}, {kind}", partial(_at, kind=kind, size=size, tile=tile))

    return Mistake(name, means, fix, tries)


MISTAKES = (
    _mistake("tile-left-out", "A tile of keys, or one key, is omitted.",
             "Look at the bounds of the loop over tiles of keys."),
    _mistake("tile-twice", "A tile of keys, or one key, is counted twice.",
             "Look at the step and the first tile of the loop over tiles of keys."),
    _mistake("tile-stale", "A tile of keys is computed with keys or values of its neighbour.",
             "Look at the loads in the loop over tiles of keys: their offset, and the barrier before the product.",
             _every_stale),
    Mistake("tile-transposed", "Square tiles of keys or values are read with rows and columns exchanged.",
            "Look at the loads in the loop over tiles of keys: strides, and the flag that transposes an operand.",
            _transposed),
)  # fmt: skip

"""Finds wrong contributions to gradients, which are sums over query heads and tiles of keys or rows."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from fusion_attention.judging import formulas
from fusion_attention.judging.editable_call import Block, Setting
from fusion_attention.judging.expected_error import LEFT
from fusion_attention.judging.mistakes.kinds import SIZES, Case, Try, wrong_area, wrong_outputs
from fusion_attention.judging.outputs import Output

Tensor = torch.Tensor
_SAMPLES = 8
# The vectors whose weighted sum a gradient is: of keys for gradients of queries, else of rows.
_VECTORS = {"dq": "k", "dq_rope": "k_rope", "dk": "q", "dk_rope": "q_rope", "dv": "dout"}


class Subset(NamedTuple):
    """A subset of the contributions (of query heads and keys) to each row of a gradient."""

    head: int = -1  # number of the query head in its group; -1: all heads
    tiles: str = "all"  # "all", "tile" (number `number`), or the "first" or "last" tile of each row
    size: int = 0  # size of a tile
    number: int = 0  # number of the tile


class Change(NamedTuple):
    """A subset of a gradient's contributions, and its wrong treatment."""

    subset: Subset
    # "left out", "twice", "alone" (all others are missing), or "with the vectors of the tile before" or "after".
    word: str
    left: float = 0.0  # the fraction of the error that remains


@dataclass(frozen=True, eq=False)
class Sample:
    """A wrong row of a gradient, with the exact row and its contributions."""

    # mine, right: the wrong row and the exact row, [elements].
    mine: Tensor
    right: Tensor
    terms: Tensor  # exact contributions by query heads and tiles of 16, [heads, tiles, elements]
    # {distance d: the contributions if vectors are read from the keys (or rows) that are d before}.
    moved: dict[int, Tensor]
    # first, last: the first and last key (row) that contributes.
    first: int
    last: int

    def of(self, subset: Subset, by: int = 0) -> Tensor:
        """Returns the sum [elements] of the contributions in `subset`, computed with the vectors of the keys (or
        queries) `by` before."""
        terms = self.moved[by] if by else self.terms
        terms = terms if subset.head < 0 else terms[subset.head : subset.head + 1]
        if subset.tiles == "all":
            return terms.sum((0, 1))
        at = {"tile": subset.number, "first": self.first // subset.size, "last": self.last // subset.size}[subset.tiles]
        step = subset.size // 16
        return terms[:, at * step : (at + 1) * step].sum((0, 1))


def counted(x: Block, factor: Tensor) -> Block:
    """Returns block x with the contribution of each (query, key) pair to gradients multiplied by a factor. factor:
    [heads or 1, rows or 1, keys or 1]."""
    return replace(x, counted=factor if x.counted is None else x.counted * factor)


def _sampled(case: Case, o: Output) -> list[Sample]:
    """Returns the exact contributions to up to eight wrong rows of a gradient, output `o` of the judged call `case`."""
    s, e, results = case.setting, case.setting.extents, []
    for b, head, row in case.wrong_rows_of(o, _SAMPLES):
        at = slice(row, row + 1)
        mine = o.rows(s, b, slice(head, head + 1), at)[0, 0].double()
        if o.by_keys:
            x = s.block(b, slice(head * s.group, (head + 1) * s.group), slice(0, int(e.q_len[b])), at)
        else:
            x = s.block(b, slice(head, head + 1), at, slice(0, e.all_keys(b)))
        g = formulas.scored(x)
        pairs = g.dropped_weights if o.kind == "dv" else x.scores_by * g.dx
        pairs, some = (t[..., 0] if o.by_keys else t[:, 0] for t in (pairs, x.visible))
        vectors, visible = _vectors(x, o.kind), some.any(0).nonzero().flatten().tolist()
        if visible and mine.isfinite().all() and vectors.isfinite().all():
            terms = _by_tiles(pairs, vectors)
            moved = {by: _by_tiles(pairs, vectors.roll(by, -2)) for size in SIZES for by in (size, -size)}
            results.append(Sample(mine, terms.sum((0, 1)), terms, moved, visible[0], visible[-1]))
    return results


def _vectors(x: Block, kind: str) -> Tensor:
    """Returns block x's vectors, [heads or 1, queries or keys, elements], whose weighted sum is the gradient `kind`."""
    vectors: Tensor = x.saved[0] if kind == "dv" else getattr(x, _VECTORS[kind])
    return vectors


def _by_tiles(pairs: Tensor, vectors: Tensor) -> Tensor:
    """Returns the weighted sums of vectors over tiles of 16 of them, [heads, tiles, elements]. pairs: the weights
    [heads, n]; vectors: [heads or 1, n, elements]; n: rows or keys."""
    fill = -pairs.shape[-1] % 16
    pairs = torch.nn.functional.pad(pairs, (0, fill)).unflatten(-1, (-1, 16))
    vectors = torch.nn.functional.pad(vectors, (0, 0, 0, fill)).unflatten(-2, (-1, 16))
    return (pairs[..., None, :] @ vectors).squeeze(-2)


def _subsets(samples: list[Sample], group: int) -> Iterator[Subset]:
    """Yields subsets of the contributions to sampled gradient rows: by query head, by tile of keys, and by both."""
    length = 16 * max(x.terms.shape[1] for x in samples)
    for head in range(-1, group if group > 1 else 0):
        if head >= 0:
            yield Subset(head)
        for size in SIZES:
            if size < length:
                yield from (Subset(head, "tile", size, n) for n in range(-(-length // size)))
                yield from (Subset(head, word, size) for word in ("first", "last"))


def _changes(case: Case, o: Output) -> list[Change]:
    """Returns up to three wrong treatments of contributions that explain sampled wrong rows of a gradient, output `o`.
    The one with the smallest remaining error is first."""
    samples = _sampled(case, o)
    if not samples:
        return []
    mine, right = (torch.cat([getattr(x, name) for x in samples]) for name in ("mine", "right"))
    error, results = float((mine - right).norm()), []
    for subset in _subsets(samples, case.setting.group if o.by_keys else 1):
        terms = torch.cat([x.of(subset) for x in samples])
        if not terms.any():
            continue
        ways = {"left out": right - terms, "twice": right + terms, "alone": terms}
        if subset.tiles == "tile":
            for word, by in (("before", subset.size), ("after", -subset.size)):
                moved = torch.cat([x.of(subset, by) for x in samples])
                ways[f"with the vectors of the tile {word}"] = right - terms + moved
        for word, result in ways.items():
            left = float((mine - result).norm()) / error
            if left <= LEFT and not torch.equal(result, right):
                results.append(Change(subset, word, left))
    order = ("all", "tile", "first", "last")
    results.sort(key=lambda c: (round(c.left, 6), order.index(c.subset.tiles), c.subset.head >= 0, c.subset.size))
    return results[:3]


def ways(case: Case, suits: Callable[[Change], bool]) -> Iterator[Try]:
    """Yields a variant of a call for each wrong treatment of contributions that explains errors and suits() accepts."""
    s = case.setting
    if s.grads is None or s.problem.shares_kv:
        return
    for o in wrong_outputs(case):
        if o.kind in _VECTORS and not o.second:
            for change in filter(suits, case.once(_changes, o)):
                yield Try(_detail(o, change), s.changed(_edit(case, o, change)))


def _detail(o: Output, change: Change) -> str:
    subset, of = change.subset, "rows" if o.by_keys else "keys"
    words = [] if subset.head < 0 else [f"query head {subset.head} of each group"]
    if subset.tiles == "tile":
        first = subset.number * subset.size
        words.append(f"{of} {first} to {first + subset.size - 1}, tile {subset.number} of {subset.size}")
    elif subset.tiles != "all":
        words.append(f"the {subset.tiles} visible tile of {subset.size} {of}")
    return f"{', '.join(words)}, {change.word}"


def _edit(case: Case, o: Output, change: Change) -> Callable[[Block], Block]:
    """Returns a function from a block to one in which the contributions to the wrong rows of output o are changed."""
    subset, s, areas = change.subset, case.setting, wrong_area(case, o)

    def edit(x: Block) -> Block:
        heads = torch.arange(x.heads.start, x.heads.stop)
        rows, keys = (torch.arange(at.start, at.stop) for at in (x.rows, x.keys))
        of_terms, of_rows = (rows, keys) if o.by_keys else (keys, rows)
        if change.word.startswith("with"):
            by = subset.size if "before" in change.word else -subset.size
            return _with_others(s, x, o.kind, of_terms, of_terms // subset.size == subset.number, by)
        area = areas[x.b][heads // s.group if o.by_keys else heads]
        inside = of_rows < area.shape[1]  # keys of a second source are not
        area = area[:, of_rows.where(inside, 0)] & inside
        marks = _marked(s, x, o, subset, of_terms)
        marks = ~marks if change.word == "alone" else marks
        area = area[:, None] if o.by_keys else area[:, :, None]
        return counted(x, torch.where(area & marks, 2.0 if change.word == "twice" else 0.0, 1.0).double())

    return edit


def _marked(s: Setting, x: Block, o: Output, subset: Subset, of_terms: Tensor) -> Tensor:
    """Returns bool [heads, rows or 1, keys or 1], true for pairs of block x whose contributions are in a subset.
    of_terms: positions of the block's keys (of its rows, for gradients of keys), over which the output `o` sums."""
    heads = torch.arange(x.heads.start, x.heads.stop)
    marks = ((heads % s.group == subset.head) | (subset.head < 0))[:, None, None]
    if subset.tiles == "all":
        return marks
    axis = 1 if o.by_keys else 2
    at: Tensor | int = subset.number
    if subset.tiles != "tile":
        rows = slice(0, x.q_len) if o.by_keys else x.rows
        keys = x.keys if o.by_keys else slice(0, s.extents.all_keys(x.b))
        visible = s.block(x.b, x.heads, rows, keys).visible
        edge = visible.int().argmax(axis, keepdim=True)
        if subset.tiles == "last":
            edge = visible.shape[axis] - 1 - visible.flip(axis).int().argmax(axis, keepdim=True)
        at = edge // subset.size
    shape = (1, -1, 1) if o.by_keys else (1, 1, -1)
    return marks & (of_terms.view(shape) // subset.size == at)


def _with_others(s: Setting, x: Block, kind: str, of_terms: Tensor, stale: Tensor, by: int) -> Block:
    """Returns block x with the gradient `kind` computed from the vectors of a neighbouring tile in place of one tile's.
    of_terms: positions of the block's keys (or queries) that it sums; stale: bool, true for those of the tile; by: the
    distance from the vectors that are read to the tile's."""
    by_keys = kind in ("dk", "dk_rope", "dv")
    rows, keys = (slice(0, x.q_len), x.keys) if by_keys else (x.rows, slice(0, s.extents.all_keys(x.b)))
    every = _vectors(s.block(x.b, x.heads, rows, keys), kind)
    vectors = every.roll(by, -2)[:, of_terms].where(stale[:, None], every[:, of_terms])
    return replace(x, summed={**x.summed, kind: vectors})

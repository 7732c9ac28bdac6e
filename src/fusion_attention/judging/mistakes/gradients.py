"""Mistakes of backward kernels: dS = P (dP - delta) and its parts, sums over heads and tiles, exchanged gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from fusion_attention.judging import formulas
from fusion_attention.judging.mistakes.kinds import Case, Mistake, Try, wrong_area, wrong_outputs
from fusion_attention.judging.outputs import Output
from fusion_attention.judging.setting import Block

Tensor = torch.Tensor
SIZES = (16, 32, 64, 128, 256)
_SAMPLES = 8
# A candidate explains wrong rows if at most this fraction of their error remains.
_LEFT = 0.25
_LN2 = math.log(2)
# The vectors that a gradient sums, by its kind: of keys for queries' gradients, else of rows.
_VECTORS = {"dq": "k", "dq_rope": "k_rope", "dk": "q", "dk_rope": "q_rope", "dv": "dout"}


@partial(
    Mistake, "delta-missing", "The gradient of scores lacks its row sum: dS is P * (dP - sum(dO * O)).",
    "Is attention_in passed, and is it this call's output?",
)  # fmt: skip
def delta_missing(case: Case) -> Iterator[Try]:
    if case.setting.grads is not None:
        yield Try("", case.setting.changed(lambda x: replace(x, delta_by=0.0)))


@partial(
    Mistake, "delta-wrong", "The row sum in the gradient of scores is another: dS is P * (dP - sum(dO * O) + dlse).",
    "Look at the kernel that computes delta, and at the offset at which rows of delta are read.",
)  # fmt: skip
def delta_wrong(case: Case) -> Iterator[Try]:
    s, scale = case.setting, case.setting.problem.scale
    if s.grads is None:
        return
    yield Try("added, not subtracted", s.changed(lambda x: replace(x, delta_by=-1.0)))
    if scale not in (0.0, 1.0):
        yield Try("not scaled as dP is", s.changed(lambda x: replace(x, delta_by=1 / scale)))
        yield Try("scaled, dP is not", s.changed(lambda x: replace(x, delta_by=scale)))
    if s.grads.dlse is not None:
        yield Try("without the gradient of lse", s.changed(lambda x: replace(x, dlse=None)))
    for word, by in _neighbours(s.problem.heads_q):

        def of_other(x: Block, by: int = by) -> Block:
            dout, out = _of_other(case, x, by)[:2]
            here, there = ((a * o).sum(-1, keepdim=True) for a, o in (x.saved[:2], (dout, out)))
            return replace(x, dlse=here - there if x.dlse is None else x.dlse + here - there)

        yield Try(f"of the {word} head", s.changed(of_other))


def _neighbours(heads: int) -> list[tuple[str, int]]:
    return [] if heads == 1 else [("next", 1), ("previous", -1)][: heads - 1]


def _of_other(case: Case, x: Block, by: int) -> tuple[Tensor, ...]:
    """Returns what the forward saved and dout, of the heads that many further."""
    s = case.setting
    heads = (torch.arange(x.heads.start, x.heads.stop) + by) % s.problem.heads_q
    return tuple(t[heads] for t in s.block(x.b, slice(0, s.problem.heads_q), x.rows, slice(0, 0)).saved)


@partial(
    Mistake, "gradient-scale", "dq and dk lack the scale, or have it twice.",
    "dq = scale * dS k, dk = scale * dS^T q.",
)  # fmt: skip
def gradient_scale(case: Case) -> Iterator[Try]:
    s, scale = case.setting, case.setting.problem.scale
    if s.grads is None:
        return
    factors = {"times log2(e)": 1 / _LN2, "times ln 2": _LN2}
    if scale != 1.0:
        factors |= {"not at all": 1 / scale if scale else math.inf, "twice": scale}
    for detail, factor in factors.items():
        if math.isfinite(factor):

            def scaled(x: Block, factor: float = factor) -> Block:
                return replace(x, gradient_scale=factor * x.scores_by)

            yield Try(detail, s.changed(scaled))


@partial(
    Mistake, "probabilities-wrong", "The backward's probabilities are not those of the forward.",
    "P = exp(score - max) / sum, or exp(score - lse), of this row's statistics.",
)  # fmt: skip
def probabilities(case: Case) -> Iterator[Try]:
    s, p = case.setting, case.setting.problem
    if s.grads is None:
        return

    def saved(x: Block, top: Tensor, total: Tensor) -> Block:
        return replace(x, saved=(*x.saved[:2], top, total))

    yield Try("not divided by the sum", s.changed(lambda x: saved(x, x.saved[2], (x.saved[3] != 0).double())))
    yield Try("without the maximum", s.changed(lambda x: saved(x, x.saved[2].clamp(0, 0), x.saved[3])))
    if p.bias == "none" and not p.softcap:

        def base_two(x: Block) -> Block:
            powers = replace(x, scores_by=_LN2 * x.scores_by, gradient_scale=x.scores_by)
            return saved(powers, _LN2 * x.saved[2], x.saved[3])

        yield Try("2^s for e^s", s.changed(base_two))
    for word, by in _neighbours(p.heads_q):
        yield Try(
            f"of the statistics of the {word} head",
            s.changed(lambda x, by=by: saved(x, *_of_other(case, x, by)[2:])),  # type: ignore[misc]
        )


@partial(
    Mistake, "softcap-slope", "Gradients lack the slope of the cap.", "dS is multiplied by 1 - tanh^2(score / softcap)."
)
def softcap_slope(case: Case) -> Iterator[Try]:
    if case.setting.grads is not None and case.setting.problem.softcap:
        yield Try("", case.setting.changed(lambda x: replace(x, sloped=False)))


@partial(Mistake, "gradients-exchanged", "Gradients are in each other's place.", "The order is dq, dk, dv.")
def exchanged(case: Case) -> Iterator[Try]:
    s = case.setting
    kinds = {o.kind: o for o in case.outputs if o.view is not None and not o.second}
    for one, other in (("dk", "dv"), ("dq", "dk"), ("dq", "dv")):
        a, b = kinds.get(one), kinds.get(other)
        if s.grads is not None and a is not None and b is not None and a.tensor.shape == b.tensor.shape:
            places = {one: other, other: one}
            outputs = tuple(replace(o, kind=places.get(o.kind, o.kind)) for o in case.outputs)
            if a.by_keys == b.by_keys or a.lengths(s.extents) == b.lengths(s.extents):
                yield Try(f"{a.name} and {b.name}", s, outputs)


@partial(
    Mistake, "group-sum", "dk and dv are not summed over the query heads of a group.",
    "Key heads receive from N1 / N2 query heads.",
)  # fmt: skip
def group_sum(case: Case) -> Iterator[Try]:
    s = case.setting
    if s.grads is None or s.problem.group == 1:
        return
    yield Try("their mean, not their sum", s.changed(lambda x: _times(x, torch.tensor(1 / s.problem.group))))
    yield from _of_terms(case, lambda part: part.head >= 0 and part.tiles == "all")


# ------------------------------------------------------------------------------------------------- sums over tiles


class Part(NamedTuple):
    """Some contributions to the rows of a gradient.

    Attributes:
        head: the query head in its group; -1: all. tiles: "all", "tile", or "first" and "last" of each row's tiles.
        size: of a tile. number: of the tile.
    """

    head: int = -1
    tiles: str = "all"
    size: int = 0
    number: int = 0


@dataclass(frozen=True)
class Change:
    """A part of a gradient's contributions whose factor is another than 1; alone: all others are missing."""

    part: Part
    word: str
    left: float


def _times(x: Block, factor: Tensor) -> Block:
    return replace(x, counted=factor if x.counted is None else x.counted * factor)


@dataclass(frozen=True, eq=False)
class Sample:
    """A wrong row of a gradient and golden's, with the latter's contributions by query heads and tiles of 16
    [heads, tiles, elements]; first, last: the first and last key (row) that contributes."""

    mine: Tensor
    right: Tensor
    terms: Tensor
    first: int
    last: int

    def of(self, part: Part) -> Tensor:
        """Returns the sum of some contributions [elements]."""
        terms = self.terms if part.head < 0 else self.terms[part.head : part.head + 1]
        if part.tiles == "all":
            return terms.sum((0, 1))
        number = {"tile": part.number, "first": self.first // max(part.size, 1), "last": self.last // max(part.size, 1)}
        step, at = part.size // 16, number[part.tiles]
        return terms[:, at * step : (at + 1) * step].sum((0, 1))


def _sampled(case: Case, o: Output) -> list[Sample]:
    """Returns the contributions to some wrong rows of a gradient."""
    s, e, results = case.setting, case.setting.extents, []
    before = {b: o.before(e, b) for b in range(len(e))}
    for b, head, row in case.wrong_rows_of(o, _SAMPLES):
        at = slice(row + before[b], row + before[b] + 1)
        mine = o.rows(s, b, slice(head, head + 1), at)[0, 0].double()
        if o.by_keys:
            heads = slice(head * s.group, (head + 1) * s.group)
            x = s.block(b, heads, slice(0, int(e.q_len[b])), at)
        else:
            x = s.block(b, slice(head, head + 1), at, slice(0, e.all_keys(b)))
        pairs, vectors = _contributions(x, o)
        terms = _by_tiles(pairs, vectors)
        some = (pairs != 0).any(0).nonzero().flatten().tolist()
        if some and mine.isfinite().all():
            results.append(Sample(mine, terms.sum((0, 1)), terms, some[0], some[-1]))
    return results


def _contributions(x: Block, o: Output) -> tuple[Tensor, Tensor]:
    """Returns the factors [heads, n] and vectors [heads or 1, n, elements] whose products a gradient sums."""
    g = formulas.scored(x)
    vectors = x.saved[0] if o.kind == "dv" else getattr(x, _VECTORS[o.kind])
    pairs = g.dropped_weights if o.kind == "dv" else x.scores_by * g.dx
    return (pairs[..., 0] if o.by_keys else pairs[:, 0]), vectors


def _by_tiles(pairs: Tensor, vectors: Tensor) -> Tensor:
    """Returns sums over tiles of 16 [heads, tiles, elements]."""
    fill = -pairs.shape[-1] % 16
    pairs = torch.nn.functional.pad(pairs, (0, fill)).unflatten(-1, (-1, 16))
    vectors = torch.nn.functional.pad(vectors, (0, 0, 0, fill)).unflatten(-2, (-1, 16))
    return (pairs[..., None, :] @ vectors).squeeze(-2)


def _parts(samples: list[Sample], group: int) -> Iterator[Part]:
    """Yields parts by head, by tiles, and by both."""
    heads = range(-1, group if group > 1 else 0)
    count = max(x.terms.shape[1] for x in samples)
    for head in heads:
        if head >= 0:
            yield Part(head)
        for size in SIZES:
            if size < 16 * count:
                yield from (Part(head, "tile", size, n) for n in range(-(-16 * count // size)))
                yield from (Part(head, word, size) for word in ("first", "last"))


def _changes(case: Case, o: Output) -> list[Change]:
    """Returns the parts that are missing, counted twice, or alone in wrong rows, by the error that remains."""
    samples = _sampled(case, o)
    if not samples:
        return []
    mine, right = (torch.cat([getattr(x, name) for x in samples]) for name in ("mine", "right"))
    error = float((mine - right).norm())
    found = []
    for part in _parts(samples, case.setting.group if o.by_keys else 1):
        terms = torch.cat([x.of(part) for x in samples])
        for word, result in (("left out", right - terms), ("twice", right + terms), ("alone", terms)):
            left = float((mine - result).norm())
            if left <= _LEFT * error and float((result - right).norm()) > 0.0:
                found.append(Change(part, word, left / error))
    found.sort(key=lambda c: (round(c.left, 6), c.part.tiles not in ("all", "tile"), c.part.head >= 0, -c.part.size))
    return found[:3]


_WORDS = {"update-lost": "left out", "update-twice": "twice", "update-alone": "alone"}


def _of_terms(case: Case, suits: Callable[[Part], bool], word: str = "") -> Iterator[Try]:
    """Yields the changes of parts of contributions that explain a wrong gradient."""
    if case.setting.grads is None:
        return
    for o in wrong_outputs(case):
        if o.kind in _VECTORS and not o.second and not case.setting.problem.shares_kv:
            for change in _changes(case, o):
                if suits(change.part) and word in ("", change.word):
                    yield Try(_detail(o, change), case.setting.changed(_counted(case, o, change)))


def _detail(o: Output, change: Change) -> str:
    part, of = change.part, "rows" if o.by_keys else "keys"
    words = [] if part.head < 0 else [f"query head {part.head} of each group"]
    if part.tiles == "tile":
        first = part.number * part.size
        words.append(f"{of} {first} to {first + part.size - 1}, tile {part.number} of {part.size}")
    elif part.tiles != "all":
        words.append(f"the {part.tiles} visible tile of {part.size} {of}")
    return f"{', '.join(words)}, {change.word}"


def _counted(case: Case, o: Output, change: Change) -> Callable[[Block], Block]:
    """Returns an edit that changes the factor of some contributions to the wrong rows of a gradient."""
    part, e, areas = change.part, case.setting.extents, wrong_area(case, o)
    group, factor = case.setting.group, {"left out": 0.0, "twice": 2.0, "alone": 0.0}[change.word]

    def edit(x: Block) -> Block:
        heads = torch.arange(x.heads.start, x.heads.stop)
        rows, keys = (torch.arange(at.start, at.stop) for at in (x.rows, x.keys))
        terms, mine = (rows[:, None], keys[None]) if o.by_keys else (keys[None], rows[:, None])
        marks = torch.ones(len(heads), 1, 1, dtype=torch.bool)
        if part.head >= 0:
            marks = marks & (heads % group == part.head)[:, None, None]
        if part.tiles != "all":
            at = part.number if part.tiles == "tile" else _edges(e, x.b, mine, o, part.tiles) // part.size
            marks = marks & (terms // part.size == at)
        area = areas[x.b][heads // group if o.by_keys else heads]
        length = area.shape[1]
        area = (area[:, mine.flatten().clamp(max=length - 1)] & (mine.flatten() < length)).unflatten(1, mine.shape)
        chosen = ~marks if change.word == "alone" else marks
        return _times(x, torch.where(area & chosen, factor, 1.0).double())

    return edit


def _edges(e: object, b: int, numbers: Tensor, o: Output, which: str) -> Tensor:
    """Returns the first or last key that each row sees by its band, or the first or last row that sees each key."""
    q_len = int(e.q_len[b])  # type: ignore[attr-defined]
    first, end = (torch.from_numpy(edge) for edge in e.row_interval(b, np.arange(q_len)))  # type: ignore[attr-defined]
    if not o.by_keys:
        return (first if which == "first" else end - 1)[numbers]
    seen = (first[:, None] <= numbers) & (numbers < end[:, None])  # [rows, keys]
    row = torch.arange(q_len)[:, None]
    return (
        row.where(seen, q_len).amin(0, keepdim=True) if which == "first" else row.where(seen, -1).amax(0, keepdim=True)
    )


def _tile_mistake(name: str, means: str, fix: str) -> Mistake:
    return Mistake(name, means, fix, partial(_of_terms, suits=lambda part: part.tiles != "all", word=_WORDS[name]))


MISTAKES = (
    delta_missing,
    delta_wrong,
    gradient_scale,
    probabilities,
    softcap_slope,
    exchanged,
    group_sum,
    _tile_mistake(
        "update-lost", "The contributions of a tile to a gradient are missing.",
        "Look at the bounds of the loop, and at sums that several blocks add to at once: they need atomic additions.",
    ),
    _tile_mistake(
        "update-twice", "The contributions of a tile to a gradient are added twice.",
        "Look at the step of the loop, and at blocks that add the same tile.",
    ),
    _tile_mistake(
        "update-alone", "A gradient has the contributions of one tile alone.",
        "Sums over tiles are added to what is there: look for a store in place of an addition.",
    ),
)  # fmt: skip

"""Mistakes of loops over tiles of keys: in the online softmax, and helpers for other mistakes in such loops."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from fusion_attention.judging import formulas
from fusion_attention.judging.editable_call import Block, Setting
from fusion_attention.judging.expected_error import LEFT, Grade
from fusion_attention.judging.formulas import Precision
from fusion_attention.judging.mistakes.kinds import SIZES, Case, Mistake, Try, grown, out_of, returning, wrong_rows

Tensor = torch.Tensor
_SCREENED = 4  # number of wrong rows on which candidates are tried first


@dataclass(frozen=True, eq=False)
class Loop:
    """The scores and values of some query rows of a sequence, over which a kernel loops in tiles of keys."""

    scores: Tensor  # [heads, rows, keys], -inf for invisible keys
    every: Tensor  # scores including those of invisible keys
    values: Tensor  # [heads or 1, keys, elements]
    first: int  # position of the first key
    length: int  # keys of the sequence

    @property
    def positions(self) -> Tensor:
        """The position of each key in its sequence, int64 [keys]."""
        return torch.arange(self.first, self.first + self.scores.shape[-1])

    def tiles(self, size: int) -> Iterator[slice]:
        """Yields, as slices of these keys, the tiles of keys that begin at multiples of `size`."""
        end = self.first + self.scores.shape[-1]
        for start in range(self.first // size * size, end, size):
            yield slice(max(start - self.first, 0), min(start + size, end) - self.first)


@dataclass(frozen=True, eq=False)
class Sums:
    """The results of a kernel's softmax loop over keys: sums of weighted values and of weights, and the maximum."""

    values: Tensor  # weighted sums of values [heads, rows, elements], not yet divided by total
    # top, total: maxima of scores and sums of weights, [heads, rows, 1].
    top: Tensor
    total: Tensor

    def result(self, kind: str) -> Tensor:
        """Returns one of the outputs "out", "max", "sum" or "lse", [heads, rows, elements or 1]."""
        if kind == "out":
            return self.values / self.total
        return {"max": self.top, "sum": self.total, "lse": self.top + self.total.log()}[kind]


Program = Callable[[Loop], Sums]


def exponentials(scores: Tensor) -> Tensor:
    """Returns exp(score - maximum of the row) for scores [heads, rows, keys]; 0 in rows without visible keys."""
    top = scores.amax(-1, keepdim=True)
    return (scores - top.masked_fill(top == -math.inf, 0)).exp()


def summed(scores: Tensor, values: Tensor) -> Sums:
    """Returns the correct softmax sums over all keys, of scores [heads, rows, keys] and values [.., keys, elements]."""
    weights = exponentials(scores)
    return Sums(weights @ values, scores.amax(-1, keepdim=True), weights.sum(-1, keepdim=True))


def suits(case: Case) -> bool:
    """True if the judged call's attention output has wrong rows and its weights depend on the scores alone (no dropout,
    selected keys, sinks or quantised weights)."""
    p, s = case.setting.problem, case.setting
    return (
        s.grads is None and p.dropout == "none" and not p.selects and not p.compressed_ratio and not p.has_sink
        and p.out_quant == "none" and not p.has_weight_scale and out_of(case) is not None
    )  # fmt: skip


def loop_of(s: Setting, x: Block, p: Precision) -> Loop:
    """Returns the scores and values of the keys of block x and of adjacent tiles, which a wrong kernel may read."""
    keys = slice(max(x.keys.start - SIZES[-1], 0), min(x.keys.stop + SIZES[-1], x.kv_len))
    x = formulas.narrowed(s.block(x.b, x.heads, x.rows, keys), p)
    every = formulas.scores_of(replace(x, visible=torch.ones_like(x.visible)))[0]
    return Loop(every.masked_fill(~x.visible, -math.inf), every, x.v, keys.start, x.kv_len)


@dataclass(frozen=True)
class Way:
    """A wrong softmax loop over keys that may explain wrong output rows: a function that computes their sums."""

    detail: str  # the program, in a few words
    program: Program  # computes the softmax sums of some rows from their scores and values
    # Computes the keys' weights in these sums; None if no weight exceeds the exact one.
    weights: Callable[[Loop], Tensor] | None = None


def sampled(case: Case, count: int) -> Iterator[tuple[Loop, Tensor, float]]:
    """Yields (keys, output as recorded [1, 1, elements], norm of its error) of up to `count` wrong rows of a call."""
    s, o = case.setting, out_of(case)
    for b, head, row in [] if o is None else case.wrong_rows_of(o, count):
        assert o is not None
        at = b, slice(head, head + 1), slice(row, row + 1)
        loop, mine = loop_of(s, s.block(*at), formulas.GOLDEN), o.rows(s, *at).double()
        error = float((summed(loop.scores, loop.values).result("out") - mine).norm())
        if 0 < error < math.inf:  # NaN for a row without visible keys
            yield loop, mine, error


def explaining(case: Case, candidates: Iterable[Way]) -> Iterator[Try]:
    """Yields a variant of a call for each wrong program in `candidates` that explains its first wrong output rows."""
    samples = [*sampled(case, _SCREENED)] if suits(case) else []
    for way in candidates if samples else ():
        left = (float((way.program(loop).result("out") - mine).norm()) / error for loop, mine, error in samples)
        if all(not fraction > LEFT for fraction in left):
            yield by_program(case, way.detail, way.program, way.weights)


def by_program(case: Case, detail: str, program: Program, weights: Callable[[Loop], Tensor] | None = None) -> Try:
    """Returns a variant of a call in which `program` computes the wrong rows; weights: its softmax weights, or None."""
    o = out_of(case)
    wrong = wrong_rows(case, o)
    nan = o is not None and bool(o.tensor.isnan().any())  # of rows without visible keys

    def change(kind: str, value: Tensor, raw: dict[str, Tensor], x: Block, p: Precision) -> Tensor:
        changed = wrong(x) & ~(raw["max"] == -math.inf)
        if not changed.any():
            return value
        result = program(loop_of(case.setting, x, p)).result(kind)
        if kind == "out" and not nan:
            result = result.nan_to_num(0.0)
        return result.to(value.dtype).where(changed, value)

    def errors(kind: str, variance: Tensor, before: Tensor, after: Tensor, x: Block, grade: Grade) -> Tensor:
        if weights is None or kind != "out":
            return grown(kind, variance, before, after, x, grade)
        loop = loop_of(case.setting, x, formulas.GOLDEN)
        squares = loop.values.square()
        mine, right = (w.square() @ squares for w in (weights(loop), loop.scores.softmax(-1)))
        return variance * (mine / right).nan_to_num(1.0).clamp_min(1.0)

    return Try(detail, returning(case.setting, change, errors))


def sizes_of(case: Case) -> list[int]:
    return [size for size in SIZES if size < int(case.setting.extents.kv_len.max(initial=0))]


_ORDERS = {
    "": "", "last": ", the last tile first", "visible": ", the last visible tile first",
    "reversed": ", from the last tile on",
}  # fmt: skip


def _maxima(loop: Loop, size: int, order: str) -> Tensor:
    """Returns for each key the running maximum of an online softmax when the key's tile is added, [heads, rows, keys].
    size: keys of a tile; order: of tiles, "" (ascending), "reversed", or with one tile first ("last", "visible")."""
    tiles = [*loop.tiles(size)]
    tops = torch.stack([loop.scores[..., tile].amax(-1) for tile in tiles], -1)
    number = torch.arange(len(tiles))
    if order == "reversed":
        tops = tops.flip(-1).cummax(-1).values.flip(-1)
    elif order:
        live = tops != -math.inf if order == "visible" else number == (loop.length - 1) // size - loop.first // size
        live = live.expand(tops.shape)
        last = live.shape[-1] - 1 - live.flip(-1).int().argmax(-1, keepdim=True)
        first = tops.gather(-1, last).where(live.any(-1, keepdim=True), -math.inf)
        tops = torch.maximum(tops.cummax(-1).values, first).where(number != last, first)
    else:
        tops = tops.cummax(-1).values
    return tops.repeat_interleave(torch.tensor([tile.stop - tile.start for tile in tiles]), -1)


def _partly_rescaled(loop: Loop, size: int, order: str, rescaled: tuple[bool, bool]) -> tuple[Tensor, Tensor]:
    """Returns the weights of keys in the sum of values [heads, rows, keys], and the sum of weights [heads, rows, 1], of
    an online softmax. size: keys of a tile; order: of tiles, such as "reversed"; rescaled: for each of the two sums,
    True if it is rescaled when the maximum rises."""
    tops = _maxima(loop, size, order)
    right, wrong = exponentials(loop.scores), (loop.scores - tops.masked_fill(tops == -math.inf, 0)).exp()
    values, total = (right if is_rescaled else wrong for is_rescaled in rescaled)
    return values, total.sum(-1, keepdim=True)


def online(loop: Loop, **how: Any) -> Sums:
    """Returns the sums of an online softmax over the keys of `loop`, not all of them rescaled when the maximum rises;
    how: keys of a tile, order of tiles, and which sums are rescaled."""
    values, total = _partly_rescaled(loop, **how)
    return Sums(values @ loop.values, loop.scores.amax(-1, keepdim=True), total)


def _online_weights(loop: Loop, **how: Any) -> Tensor:
    values, total = _partly_rescaled(loop, **how)
    return values / total


def rescale_missing(case: Case) -> Iterator[Try]:
    sums = {"accumulator": (False, True), "sum of weights": (True, False),
            "accumulator and sum of weights": (False, False)}  # fmt: skip

    def candidates() -> Iterator[Way]:
        for (order, word), size, (what, rescaled) in itertools.product(_ORDERS.items(), sizes_of(case), sums.items()):
            how: dict[str, Any] = {"size": size, "order": order, "rescaled": rescaled}
            yield Way(f"{what}, key tiles of {size}{word}", partial(online, **how), partial(_online_weights, **how))

    return explaining(case, candidates())


def padded(loop: Loop, size: int) -> Sums:
    """Returns the softmax sums over the keys of `loop` if zero scores and values pad the last tile of `size` keys."""
    one = summed(loop.scores, loop.values)
    count = -loop.length % size
    top = one.top.clamp_min(0.0)
    fade = (one.top - top).exp()
    return Sums(one.values * fade, top, one.total * fade + count * (-top).exp())


def padding_weighed(case: Case) -> Iterator[Try]:
    sizes: dict[tuple[int, ...], list[int]] = {}  # tile sizes, by the numbers of missing keys of the sequences
    for size in (8, *SIZES):
        missing = tuple((-case.setting.extents.kv_len % size).tolist())
        if any(missing):
            sizes.setdefault(missing, []).append(size)
    ways = {" or ".join(map(str, same)): same[0] for same in sizes.values()}
    return explaining(case, (Way(f"key tiles of {of}", partial(padded, size=size)) for of, size in ways.items()))


def _powered(loop: Loop, factor: float, *, right_maximum: bool) -> Sums:
    result = summed(loop.scores * factor, loop.values)
    return replace(result, top=loop.scores.amax(-1, keepdim=True)) if right_maximum else result


def exponent_base(case: Case) -> Iterator[Try]:
    factors = ("2^s for e^s", math.log(2)), ("e^(s log2 e) for e^s", 1 / math.log(2))
    return explaining(case, (
        Way(f"{detail}{', the maximum right' * right}", partial(_powered, factor=factor, right_maximum=right))
        for right in (False, True) for detail, factor in factors
    ))  # fmt: skip


MISTAKES = (
    Mistake("rescale-missing", "Sums over tiles of keys are not rescaled when the maximum rises.",
            "In the loop over tiles of keys, multiply accumulator and sum by exp(old maximum - new maximum).",
            rescale_missing),
    Mistake("padding-weighed", "Missing keys of the last tile count as scores of zero.",
            "In the loop's last pass, set scores after the last key to -inf before the maximum and the exponentials.",
            padding_weighed),
    Mistake("exponent-base", "The base of the exponentials does not fit the factor of the scores.",
            "Inside the loop over tiles of keys: exp2 needs scores times log2(e), exp needs them without.",
            exponent_base),
)  # fmt: skip

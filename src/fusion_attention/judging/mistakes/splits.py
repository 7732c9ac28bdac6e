"""Mistakes of kernels that split a row's keys, compute a softmax of each split and merge the results."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from fusion_attention.ir.memory_views import PagedView
from fusion_attention.judging.mistakes.kinds import SIZES, Case, Mistake, Try
from fusion_attention.judging.mistakes.online_softmax import Loop, Sums, Way, explaining, exponentials, summed

Tensor = torch.Tensor
_COUNTS = (2, 3, 4, 5, 6, 7, 8, 12, 16)
_UNITS = (1, 16, 64, 128)


@dataclass(frozen=True)
class Split:
    """A division of a sequence's keys: `count` splits of multiples of `unit` keys; count 0: tiles of `unit` keys."""

    count: int
    unit: int

    def __str__(self) -> str:
        if not self.count:
            return f"key tiles of {self.unit}"
        return f"{self.count} splits of the keys" + (f", multiples of {self.unit}" if self.unit > 1 else "")

    def size(self, length: int) -> int:
        """Returns the number of keys of one split of a sequence with `length` keys."""
        each = -(-length // self.count) if self.count else self.unit
        return max(-(-each // self.unit) * self.unit, 1)

    def of(self, loop: Loop) -> list[slice]:
        """Returns the splits as slices of the keys of `loop`."""
        return [*loop.tiles(self.size(loop.length))]


def _splits(case: Case) -> list[Split]:
    """Returns the ways in which a kernel may split the keys of a call; of ways with equal splits, only one."""
    k, lengths = case.setting.operands.k, sorted({int(n) for n in case.setting.extents.kv_len})
    units = sorted({*_UNITS, *((k.page_size,) if isinstance(k, PagedView) else ())})
    splits = [Split(0, size) for size in SIZES] + [Split(count, unit) for count in _COUNTS for unit in units]
    results: dict[tuple[int, ...], Split] = {}
    for split in splits:
        sizes = tuple(split.size(n) for n in lengths)
        if any(size < n for size, n in zip(sizes, lengths, strict=True)):
            results.setdefault(sizes, split)
    return [*results.values()]


def _live(lse: Tensor) -> Tensor:
    return (lse != -math.inf).to(lse)


# Wrong weights of splits, computed from their lse, maximum and sum of weights, [splits, heads, rows, 1].
_WEIGHTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "mean of": lambda lse, top, total: _live(lse) / _live(lse).sum(0).clamp_min(1.0),
    "sum of": lambda lse, top, total: _live(lse),
    "weights 2^lse for e^lse of": lambda lse, top, total: (lse * math.log(2)).softmax(0),
    "weights without the maxima of": lambda lse, top, total: total / total.sum(0),
    "weights without the sums of": lambda lse, top, total: top.softmax(0),
}


def _merged(loop: Loop, split: Split, weigh: Callable[[Tensor, Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the attention outputs over each split's keys [splits, heads, rows, elements], and weigh()'s weights.
    weigh: computes the wrong weights with which a kernel merges splits, [splits, heads, rows, 1]."""
    each = [summed(loop.scores[..., keys], loop.values[:, keys]) for keys in split.of(loop)]
    out = torch.stack([(t.values / t.total).where(t.total > 0, 0.0) for t in each])
    top, total = (torch.stack([getattr(t, name) for t in each]) for name in ("top", "total"))
    return out, weigh(top + total.log(), top, total).nan_to_num(0.0)


def merged(loop: Loop, **how: Any) -> Sums:
    """Returns the softmax sums over the keys of `loop`, merged from splits with wrong weights; how: split, and weigh, a
    function of the splits' lse, max and sum."""
    one, (out, weights) = summed(loop.scores, loop.values), _merged(loop, **how)
    return replace(one, values=(out * weights).sum(0) * one.total)


def _merged_weights(loop: Loop, **how: Any) -> Tensor:
    tiles, (_, weights) = how["split"].of(loop), _merged(loop, **how)
    each = [exponentials(loop.scores[..., keys]) for keys in tiles]
    each = [t / t.sum(-1, keepdim=True).clamp_min(1e-300) * w for t, w in zip(each, weights, strict=True)]
    return torch.cat(each, -1)


def tile_softmax(case: Case) -> Iterator[Try]:
    def candidates() -> Iterator[Way]:
        for split in _splits(case):
            for word, weigh in _WEIGHTS.items():
                how: dict[str, Any] = {"split": split, "weigh": weigh}
                yield Way(f"{word} {split}", partial(merged, **how), partial(_merged_weights, **how))

    return explaining(case, candidates())


def without(loop: Loop, split: Split, number: int) -> Sums:
    """Returns the softmax sums over the keys of `loop` without those of split `number`."""
    missing = torch.zeros(loop.scores.shape[-1], dtype=torch.bool)
    for at in split.of(loop)[number : number + 1]:
        missing[at] = True
    return summed(loop.scores.masked_fill(missing, -math.inf), loop.values)


def split_left_out(case: Case) -> Iterator[Try]:
    splits = [split for split in _splits(case) if split.count]
    return explaining(case, (
        Way(f"split {n} of {split}", partial(without, split=split, number=n))
        for split in splits for n in range(split.count)
    ))  # fmt: skip


MISTAKES = (
    Mistake("tile-softmax",
            "Each tile or split of keys has a separate softmax, and the results are merged with wrong weights.",
            "After the loop, merge partial results with the weights exp(partial lse - total lse).", tile_softmax),
    Mistake("split-left-out", "The result of a split of the keys is omitted.",
            "Look at the number of splits that are merged, and at the address to which each stores its result.",
            split_left_out),
)  # fmt: skip

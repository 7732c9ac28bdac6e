"""Mistakes of backward kernels: in dS = P (dP - delta), in sums over heads and tiles, and exchanged gradients."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from fusion_attention.judging.mistakes.kinds import Case, Mistake, Try
from fusion_attention.judging.mistakes.sums import counted, ways
from fusion_attention.judging.setting import Block

Tensor = torch.Tensor
_LN2 = math.log(2)
_LOOP = "over tiles (of keys for dq, of rows for dk and dv)"


@partial(
    Mistake, "delta-missing", "The gradient of scores lacks its row sum: dS is P * (dP - sum(dO * O)).",
    "Is attention_in passed, and is it this call's output?",
)  # fmt: skip
def delta_missing(case: Case) -> Iterator[Try]:
    if case.setting.grads is not None:
        yield Try("", case.setting.changed(lambda x: replace(x, delta_by=0.0)))


@partial(
    Mistake, "delta-wrong", "The row sum in the gradient of scores is wrong: dS is P * (dP - sum(dO * O) + dlse).",
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
    """Returns (dout, out, max, sum) of the query heads that are `by` heads after those of block x of a call."""
    s = case.setting
    heads = (torch.arange(x.heads.start, x.heads.stop) + by) % s.problem.heads_q
    return tuple(t[heads] for t in s.block(x.b, slice(0, s.problem.heads_q), x.rows, slice(0, 0)).saved)


@partial(
    Mistake, "gradient-scale", "dq and dk lack the scale, or have it twice.",
    "After the loop: dq = scale * dS k, dk = scale * dS^T q.",
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


@partial(Mistake, "gradients-exchanged", "Gradients are exchanged.", "The order is dq, dk, dv.")
def exchanged(case: Case) -> Iterator[Try]:
    s = case.setting
    kinds = {o.kind: o for o in case.outputs if o.view is not None and not o.second}
    for one, other in (("dk", "dv"), ("dq", "dk"), ("dq", "dv")):
        a, b = kinds.get(one), kinds.get(other)
        if s.grads is not None and a is not None and b is not None and a.tensor.shape == b.tensor.shape:
            kinds_of = {one: other, other: one}
            outputs = tuple(replace(o, kind=kinds_of.get(o.kind, o.kind)) for o in case.outputs)
            if a.by_keys == b.by_keys or a.lengths(s.extents) == b.lengths(s.extents):
                yield Try(f"{a.name} and {b.name}", s, outputs)


@partial(
    Mistake, "group-sum", "dk and dv are not summed over the query heads of a group.",
    "Look at the loop over the query heads of a group: a key head's gradient is the sum over N1 / N2 of them.",
)  # fmt: skip
def group_sum(case: Case) -> Iterator[Try]:
    s = case.setting
    if s.grads is None or s.problem.group == 1:
        return
    yield Try("their mean, not their sum", s.changed(lambda x: counted(x, torch.tensor(1 / s.problem.group))))
    yield from ways(case, lambda change: change.subset.tiles == "all")


def _of_tiles(case: Case, word: str) -> Iterator[Try]:
    yield from ways(case, lambda change: change.subset.tiles != "all" and change.word.startswith(word))


MISTAKES = (
    delta_missing,
    delta_wrong,
    gradient_scale,
    probabilities,
    softcap_slope,
    exchanged,
    group_sum,
    Mistake(
        "update-lost", "The contributions of a tile to a gradient are missing.",
        f"Look at the bounds of the loop {_LOOP}, and at sums to which several blocks add at once: they need atomic "
        "additions.",
        partial(_of_tiles, word="left out"),
    ),
    Mistake(
        "update-twice", "The contributions of a tile to a gradient are added twice.",
        f"Look at the step of the loop {_LOOP}, and at blocks that add the same tile.",
        partial(_of_tiles, word="twice"),
    ),
    Mistake(
        "update-alone", "A gradient has the contributions of one tile alone.",
        f"Look for a store in place of an addition in the loop {_LOOP}.",
        partial(_of_tiles, word="alone"),
    ),
    Mistake(
        "update-stale", "A tile's contributions to a gradient are products with the vectors of its neighbour.",
        f"Look at the loads in the loop {_LOOP}: their offset, and the barrier between a copy and the product.",
        partial(_of_tiles, word="with"),
    ),
)  # fmt: skip

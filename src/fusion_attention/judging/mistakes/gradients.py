"""Mistakes of backward kernels: in dS = P (dP - delta), in sums over heads and tiles, and exchanged gradients."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch

from fusion_attention.ir.problem import Problem
from fusion_attention.judging.editable_call import Block, Setting
from fusion_attention.judging.mistakes.gradient_contributions import counted, ways
from fusion_attention.judging.mistakes.kinds import Case, Mistake, Try, changing

Tensor = torch.Tensor
_LN2 = math.log(2)
_LOOP = "over tiles (of keys for dq, of rows for dk and dv)"


def _of_backward(name: str, means: str, fix: str, ways: Callable[[Setting, Problem], Mapping[str, Setting]]) -> Mistake:
    """Returns a Mistake that only a backward can make; name, means, fix: its texts in reports; ways: takes a call and
    its parameters, returns {description: the call with the mistake}."""
    return changing(name, means, fix, lambda s, p: {} if s.grads is None else ways(s, p))


def delta_wrong(s: Setting, p: Problem) -> dict[str, Setting]:
    def of_other(x: Block, by: int) -> Block:
        dout, out = _of_other(s, x, by)[:2]
        here, there = ((a * o).sum(-1, keepdim=True) for a, o in (x.saved[:2], (dout, out)))
        return replace(x, dlse=here - there if x.dlse is None else x.dlse + here - there)

    ways = {"added, not subtracted": s.of_blocks(delta_by=-1.0)}
    if p.scale not in (0.0, 1.0):
        ways["not scaled as dP is"] = s.of_blocks(delta_by=1 / p.scale)
        ways["scaled, dP is not"] = s.of_blocks(delta_by=p.scale)
    if s.grads is not None and s.grads.dlse is not None:
        ways["without the gradient of lse"] = s.of_blocks(dlse=None)
    neighbours = {f"of the {word} head": s.changed(partial(of_other, by=by)) for word, by in _neighbours(p.heads_q)}
    return ways | neighbours


def _neighbours(heads: int) -> list[tuple[str, int]]:
    return [] if heads == 1 else [("next", 1), ("previous", -1)][: heads - 1]


def _of_other(s: Setting, x: Block, by: int) -> tuple[Tensor, ...]:
    """Returns (dout, out, max, sum), [heads, rows, ...], of the query heads that are `by` heads after block x's."""
    heads = (torch.arange(x.heads.start, x.heads.stop) + by) % s.problem.heads_q
    return tuple(t[heads] for t in s.block(x.b, slice(0, s.problem.heads_q), x.rows, slice(0, 0)).saved)


def gradient_scale(s: Setting, p: Problem) -> dict[str, Setting]:
    def scaled(x: Block, factor: float) -> Block:
        return replace(x, gradient_scale=factor * x.scores_by)

    factors = {"times log2(e)": 1 / _LN2, "times ln 2": _LN2}
    if p.scale != 1.0:
        factors |= {"not at all": 1 / p.scale if p.scale else math.inf, "twice": p.scale}
    return {n: s.changed(partial(scaled, factor=factor)) for n, factor in factors.items() if math.isfinite(factor)}


def probabilities(s: Setting, p: Problem) -> dict[str, Setting]:
    def saved(x: Block, top: Tensor, total: Tensor) -> Block:
        return replace(x, saved=(*x.saved[:2], top, total))

    def base_two(x: Block) -> Block:
        powers = replace(x, scores_by=_LN2 * x.scores_by, gradient_scale=x.scores_by)
        return saved(powers, _LN2 * x.saved[2], x.saved[3])

    def of_other(x: Block, by: int) -> Block:
        return saved(x, *_of_other(s, x, by)[2:])

    ways = {
        "not divided by the sum": s.changed(lambda x: saved(x, x.saved[2], (x.saved[3] != 0).double())),
        "without the maximum": s.changed(lambda x: saved(x, x.saved[2].clamp(0, 0), x.saved[3])),
    }
    if p.bias == "none" and not p.softcap:
        ways["2^s for e^s"] = s.changed(base_two)
    return ways | {
        f"of the statistics of the {word} head": s.changed(partial(of_other, by=by))
        for word, by in _neighbours(p.heads_q)
    }


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


def group_sum(case: Case) -> Iterator[Try]:
    s = case.setting
    if s.grads is None or s.problem.group == 1:
        return
    yield Try("their mean, not their sum", s.changed(lambda x: counted(x, torch.tensor(1 / s.problem.group))))
    yield from ways(case, lambda change: change.subset.tiles == "all")


def _of_tiles(case: Case, word: str) -> Iterator[Try]:
    yield from ways(case, lambda change: change.subset.tiles != "all" and change.word.startswith(word))


MISTAKES = (
    _of_backward("delta-missing", "The gradient of scores lacks its row sum: dS is P * (dP - sum(dO * O)).",
                 "Is attention_in passed, and is it this call's output?",
                 lambda s, p: {"": s.of_blocks(delta_by=0.0)}),
    _of_backward("delta-wrong", "The row sum in the gradient of scores is wrong: dS is P * (dP - sum(dO * O) + dlse).",
                 "Look at the kernel that computes delta, and at the offset at which rows of delta are read.",
                 delta_wrong),
    _of_backward("gradient-scale", "dq and dk lack the scale, or have it twice.",
                 "After the loop: dq = scale * dS k, dk = scale * dS^T q.", gradient_scale),
    _of_backward("probabilities-wrong", "The backward's probabilities are not those of the forward.",
                 "P = exp(score - max) / sum, or exp(score - lse), of this row's statistics.", probabilities),
    _of_backward("softcap-slope", "Gradients lack the slope of the cap.",
                 "dS is multiplied by 1 - tanh^2(score / softcap).",
                 lambda s, p: {"": s.of_blocks(sloped=False)} if p.softcap else {}),
    Mistake("gradients-exchanged", "Gradients are exchanged.", "The order is dq, dk, dv.", exchanged),
    Mistake("group-sum", "dk and dv are not summed over the query heads of a group.",
            "Look at the loop over the query heads of a group: a key head's gradient is the sum over N1 / N2 of them.",
            group_sum),
    Mistake("update-lost", "The contributions of a tile to a gradient are missing.",
            f"Look at the bounds of the loop {_LOOP}, and at sums to which several blocks add at once: they need "
            "atomic additions.", partial(_of_tiles, word="left out")),
    Mistake("update-twice", "The contributions of a tile to a gradient are added twice.",
            f"Look at the step of the loop {_LOOP}, and at blocks that add the same tile.",
            partial(_of_tiles, word="twice")),
    Mistake("update-alone", "A gradient has the contributions of one tile alone.",
            f"Look for a store in place of an addition in the loop {_LOOP}.", partial(_of_tiles, word="alone")),
    Mistake("update-stale", "A tile's contributions to a gradient are products with the vectors of its neighbour.",
            f"Look at the loads in the loop {_LOOP}: their offset, and the barrier between a copy and the product.",
            partial(_of_tiles, word="with")),
)  # fmt: skip

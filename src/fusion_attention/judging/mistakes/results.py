"""Mistakes in results: softmax statistics, their base and order, the output's layout."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch

from fusion_attention.judging import formulas
from fusion_attention.judging.editable_call import Block
from fusion_attention.judging.expected_error import Grade
from fusion_attention.judging.formulas import Precision
from fusion_attention.judging.mistakes.kinds import (
    Case,
    Mistake,
    Try,
    changing,
    grown,
    layouts,
    of_results,
    reread,
    returning,
)

Tensor = torch.Tensor
Raw = dict[str, Tensor]
_PAIR = ("max", "sum")


def _kinds(case: Case) -> set[str]:
    return {o.kind for o in case.outputs}


def base_two(case: Case) -> Iterator[Try]:
    if _kinds(case) & {"lse", "max"}:
        change = dict.fromkeys(("lse", "max"), lambda value, raw, x: value * (1 / math.log(2)))
        yield Try("", of_results(case.setting, change))


def _statistics_of(change: Callable[[Block], Block]) -> Callable[..., Tensor]:
    """Returns a function that replaces the softmax statistics max, sum and lse in a judged call's results by those of
    change(block), and leaves the output unchanged."""

    def changed(kind: str, value: Tensor, raw: Raw, x: Block, p: Precision) -> Tensor:
        if kind == "out":
            return value
        result = formulas.forward(change(x), p)
        return result["max"] + result["sum"].log() if kind == "lse" else result[kind]

    return changed


def unscaled(case: Case) -> Iterator[Try]:
    s = case.setting
    if s.problem.scale == 1.0 or not _kinds(case) & {"lse", "max", "sum"}:
        return

    def errors(kind: str, variance: Tensor, before: Tensor, after: Tensor, x: Block, grade: Grade) -> Tensor:
        return variance if kind == "out" else variance / x.scores_by**2

    yield Try("", returning(s, _statistics_of(lambda x: replace(x, scores_by=1.0)), errors))
    if "max" in _kinds(case):
        yield Try("the maximum alone", of_results(s, {"max": lambda value, raw, x: value / x.scores_by}))


def _lse(value: Tensor, raw: Raw, x: Block) -> Tensor:
    return raw["max"] + raw["sum"].log()


# (statistics that the call must return, detail, changed statistics)
_CONFUSED: tuple[tuple[set[str], str, dict[str, Callable[..., Tensor]]], ...] = (
    ({"lse"}, "log(sum) without the maximum", {"lse": lambda value, raw, x: raw["sum"].log()}),
    ({"lse"}, "the maximum alone", {"lse": lambda value, raw, x: raw["max"]}),
    ({"sum"}, "log(sum) for the sum", {"sum": lambda value, raw, x: raw["sum"].log()}),
    ({"sum"}, "the sum of exp(score), with no maximum", {
        "sum": lambda value, raw, x: raw["sum"] * raw["max"].exp(), "max": lambda value, raw, x: torch.zeros_like(value)
    }),
    ({"sum"}, "1 / sum for the sum", {"sum": lambda value, raw, x: 1 / raw["sum"]}),
    (set(), "the maximum starts at 0, not at -inf", {
        "max": lambda value, raw, x: raw["max"].clamp_min(0),
        "sum": lambda value, raw, x: raw["sum"] * (raw["max"] - raw["max"].clamp_min(0)).exp(),
    }),
    ({*_PAIR}, "max + log(sum) in both", dict.fromkeys(_PAIR, _lse)),
)  # fmt: skip


def lse_parts(case: Case) -> Iterator[Try]:
    for needed, detail, changes in _CONFUSED:
        if needed <= _kinds(case) and changes.keys() & _kinds(case):
            yield Try(detail, of_results(case.setting, changes))


def without_sink(case: Case) -> Iterator[Try]:
    def only_sum(value: Tensor, raw: Raw, x: Block) -> Tensor:
        return value if x.sink is None else value - (x.sink[:, None, None] - raw["max"]).exp()

    if case.setting.problem.has_sink and _kinds(case) & {"lse", *_PAIR}:
        yield Try("", returning(case.setting, _statistics_of(lambda x: replace(x, sink=None))))
        if "sum" in _kinds(case):
            yield Try("the sum alone", of_results(case.setting, {"sum": only_sum}))


def swapped(case: Case) -> Iterator[Try]:
    if {*_PAIR} <= _kinds(case) and case.setting.grads is None:
        other = {"max": "sum", "sum": "max"}
        outputs = tuple(replace(o, kind=other.get(o.kind, o.kind)) for o in case.outputs)
        yield Try("", case.setting, outputs)


def statistics_order(case: Case) -> Iterator[Try]:
    e, heads = case.setting.extents, case.setting.problem.heads_q
    stats = {o.name: o.view for o in case.outputs if o.kind in (*_PAIR, "lse") and o.view is not None}
    if not stats or heads == 1 or case.setting.grads is not None:
        return
    by_token, by_item = "token by token, the heads of a token adjacent", "head by head within each sequence"
    if case.layout in ("TND", "NTD"):
        first = e.q_start * heads
        orders = {by_token: (first, heads, 1), by_item: (first, 1, e.q_len)}
        orders["head by head over the whole batch"] = (e.q_start, 1, int(e.q_len.sum()))
    else:
        rows = int(case.names.get("S1") or e.q_len.max(initial=1))
        first = np.arange(len(e)) * heads * rows
        orders = {by_token: (first, heads, 1), by_item: (first, 1, rows)}
    views = {name: reread(view, orders) for name, view in stats.items()}
    for detail in orders:
        if all(detail in others for others in views.values()):
            outputs = (replace(o, view=views[o.name][detail]) if o.name in views else o for o in case.outputs)
            yield Try(detail, case.setting, tuple(outputs))


def output_layout(case: Case) -> Iterator[Try]:
    s = case.setting
    for o in case.outputs if s.grads is None else ():
        if o.kind == "out" and o.view is not None and o.tensor.is_contiguous():
            for layout, view in layouts(case, o.view, s.problem.heads_q):
                outputs = tuple(replace(o, view=view) if other is o else other for other in case.outputs)
                yield Try(f"as {layout} has them", s, outputs)


def unwritten(case: Case) -> Iterator[Try]:
    if case.setting.grads is None and any(o.kind == "out" and not o.tensor.any() for o in case.outputs):
        yield Try("", of_results(case.setting, {"out": lambda value, raw, x: torch.zeros_like(value)}))


MISTAKES = (
    Mistake("lse-base", "Statistics are logarithms to base 2.", "exp2 kernels: multiply by ln 2 before returning.",
            base_two),
    Mistake("lse-unscaled", "Statistics are those of scores before the scale.",
            "Maximum and log-sum-exp are of scale * q . k + bias.", unscaled),
    Mistake("lse-parts", "Maximum, sum and log-sum-exp are mistaken for one another.",
            "lse = max + log(sum); the sum is of exp(score - max).", lse_parts),
    Mistake("lse-sink", "Statistics lack the sink.",
            "The sink is one more logit of the row: it counts in maximum, sum and log-sum-exp.", without_sink),
    Mistake("statistics-swapped", "Maximum and sum are exchanged.", "softmax_max comes first.", swapped),
    Mistake("statistics-order", "Statistics of heads and rows are in another order.",
            'TND: head by head within each sequence, unless softmax_layout is "TND" (then token by token).',
            statistics_order),
    Mistake("output-layout", "The output's rows are in the order of another layout.", "Look at the output's strides.",
            output_layout),
    changing("unnormalised", "The output is not divided by the sum of its weights.",
             "Look at the last step of the row.",
             lambda s, p: {
                 "": of_results(s, {"out": lambda value, raw, x: value.to(raw["sum"].dtype) * raw["sum"]}, grown)
             } if not s.grads and p.out_quant == "none" else {}),
    Mistake("output-unwritten", "All elements of the output are zero.",
            "Nothing was written: look at the launch, and check that the kernel had ended when the output was read.",
            unwritten),
)  # fmt: skip

"""judge() and diagnose(): a call and its results, judged; and which well-known mistake explains them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from fusion_attention.judging import indexer
from fusion_attention.judging.calls import BACKENDS, JudgeError, Recorded, recorded
from fusion_attention.judging.diagnosis import diagnosed
from fusion_attention.judging.error_location import looks_like, most
from fusion_attention.judging.evaluate import Result, measured
from fusion_attention.judging.expected_error import KERNEL, PROGRAM
from fusion_attention.judging.mistakes import Case
from fusion_attention.judging.outputs import Output, setting_of, units
from fusion_attention.judging.setting import Setting
from fusion_attention.judging.standards import STANDARDS, Tally
from fusion_attention.judging.verdict import NOISY, RIGHT, WRONG, Explanation, Judgement, opinion

Tensor = torch.Tensor


def judge(
    operator: str,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Tensor],
    *,
    seed: int = 0,
    backends: bool = True,
    standard: str = "error-bound",
) -> Judgement:
    """Whether a call's results are right: no number, tile nor head is off by more than roundings make it.

        z = root mean square error / expected size <= 2, or what chance gives few numbers, in every row, tile and head

    Args:
        operator: the record's name, e.g. "npu_fusion_attention", "attention" (`fusion-attention ops` lists all).
        inputs: arguments by name. outputs: results by the record's names ("attention_out", "softmax_max", ...).
        seed: that dropout was drawn from, where the call gives no bits.
        backends: judge this machine's back ends beside it.
        standard: "error-bound" (docs/accuracy.md), or one of CANN's, "cann-0.5%" or "cann-double".

    Returns:
        A Judgement; printed, it is five lines.

    Raises:
        JudgeError: no such operator, argument or output, or not a call of the operator.

    Example:
        >>> import fusion_attention as fa
        >>> q = torch.randn(1, 16, 2, 64)
        >>> out = torch.nn.functional.scaled_dot_product_attention(*(q.transpose(1, 2),) * 3).transpose(1, 2)
        >>> fa.judge("attention", {"q": q, "k": q, "v": q}, {"out": out}).verdict
        'right'
    """
    return judged(recorded(operator, inputs, outputs, seed=seed), search=False, backends=backends, standard=standard)


def diagnose(
    operator: str,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Tensor],
    *,
    seed: int = 0,
    backends: bool = False,
    standard: str = "error-bound",
) -> Judgement:
    """judge(), and where results are wrong, which well-known mistakes explain them.

    Example:
        >>> import fusion_attention as fa
        >>> q, k = torch.randn(2, 1, 16, 2, 64)
        >>> out = fa.attention(q, k, k, scale=1.0)
        >>> fa.diagnose("attention", {"q": q, "k": k, "v": k}, {"out": out}).mistakes[0].name
        'scale-missing'
    """
    return judged(recorded(operator, inputs, outputs, seed=seed), search=True, backends=backends, standard=standard)


def judged(call: Recorded, *, search: bool, backends: bool = True, standard: str = "error-bound") -> Judgement:
    """A recorded call."""
    if standard not in STANDARDS:
        raise JudgeError(f"standard {standard!r} is not known: one of {', '.join(STANDARDS)}")
    lowered = call.lowered()
    captured = call.judgeable(lowered)
    if indexer.serves(lowered):
        return indexer.judged(call, lowered, search=search, backends=backends, standard=standard)
    setting, outputs = setting_of(lowered, captured)
    unjudged = call.unjudged({o.name for o in outputs})
    theirs, reasons = _beside(call, lowered, captured) if backends else ({}, {})
    with_baseline = standard == "cann-double"
    base = measured(
        setting, outputs, units(setting, outputs), complete=True, with_baseline=with_baseline, beside=theirs
    )
    grades = dict.fromkeys(base.tallies, KERNEL)
    result = base
    if not base.passes:
        failing = [o for o in outputs if o.name in base.failing]
        again = measured(
            setting, failing, units(setting, failing), grade=PROGRAM, complete=True, with_baseline=with_baseline
        )
        grades |= dict.fromkeys(again.tallies, PROGRAM)
        result = Result(base.tallies | again.tallies, base.maps | again.maps, base.beside)
    opinions = {}
    for o in outputs:
        tally, map_ = result.tallies[o.name], result.maps.get(o.name)
        like = [] if tally.passes else _looks(setting, o, tally)
        opinions[o.name] = opinion(o.name, tally, grades[o.name], standard, map_, like)
    mistakes: tuple[Explanation, ...] = ()
    noisy = False
    if search and not result.passes:
        mistakes, noisy = _searched(call, lowered, setting, [o for o in outputs if o.view is not None], result)
    right = all(o.passes for o in opinions.values())
    return Judgement(
        call.op.name,
        call.source,
        RIGHT if right else NOISY if noisy and not result.passes else WRONG,
        opinions,
        unjudged,
        reasons | {who: {n: t.z for n, t in tallies.items()} for who, tallies in result.beside.items()},
        mistakes,
        search,
        (*call.notes, *call.doubts()),
        standard,
    )


def _beside(
    call: Recorded, lowered: Any, captured: dict[str, Tensor]
) -> tuple[dict[str, list[Output]], dict[str, str]]:
    """What this machine's back ends give, and why others give nothing."""
    results, reasons = {}, {}
    for backend in BACKENDS:
        result = call.computed(backend, captured)
        if isinstance(result, str):
            reasons[backend] = result
        else:
            results[backend] = setting_of(lowered, result)[1]
    return results, reasons


def _looks(setting: Setting, o: Output, tally: Tally) -> list[str]:
    """What is wrong with an output looks like."""
    if o.view is None:
        return most(tally, o.tensor.shape) + looks_like(tally, "row" if tally.errors.columns > 1 else "number")
    p, e, word = setting.problem, setting.extents, "key" if o.by_keys else "row"
    heads, lengths = p.heads_kv if o.by_keys else p.heads_q, o.lengths(e)
    several, before = tally.errors.columns > 1, partial(o.before, e)
    return looks_like(
        tally, word if several else "number",
        (lambda b: o.rows(setting, b, slice(0, heads), slice(before(b), before(b) + lengths[b]))) if several else None,
    )  # fmt: skip


def _searched(
    call: Recorded, lowered: Any, setting: Setting, outputs: list[Output], base: Result
) -> tuple[tuple[Explanation, ...], bool]:
    names = dict(call.bound().names)
    layout = getattr(lowered, "out_layout", "") or getattr(lowered, "layout", "") or lowered.call.form.layout
    return diagnosed(Case(setting, tuple(outputs), names, layout), base)

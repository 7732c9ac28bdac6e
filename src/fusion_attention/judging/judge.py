"""judge() and diagnose(): judge the results of a call; diagnose() also explains errors by well-known mistakes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fusion_attention.judging import indexer, pooling
from fusion_attention.judging.calls import BACKENDS, JudgeError, Recorded, recorded
from fusion_attention.judging.diagnosis import diagnosed
from fusion_attention.judging.error_location import looks_like, mask_of, most
from fusion_attention.judging.expected_error import Grade
from fusion_attention.judging.grid import rows_by_columns
from fusion_attention.judging.measure import Result, graded, measured
from fusion_attention.judging.mistakes import Case
from fusion_attention.judging.outputs import Output, setting_of, units
from fusion_attention.judging.progress import Bar, Watch, over, silent
from fusion_attention.judging.screening import alien, remarks
from fusion_attention.judging.setting import Setting
from fusion_attention.judging.standards import STANDARDS, Tally
from fusion_attention.judging.verdict import Explanation, Judgement, judgement, opinion
from fusion_attention.ops.shared.call import NO_SEQUENCE, OfCall

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
    """Judges the results of a call: no element, row, tile or head may have a larger error than rounding explains.

        z = root mean square error / expected size <= 2 (more for few numbers) in every row, tile and head

    Args:
        operator: the operator's name, e.g. "npu_fusion_attention", "attention" (`fusion-attention ops` lists all).
        inputs: arguments by name.
        outputs: results by the operator's names ("attention_out", "softmax_max", ...).
        seed: seed of dropout, if the dropout mask is not among the inputs.
        backends: also judge the results of this machine's back ends.
        standard: "error-bound" (docs/accuracy.md), or one of CANN's, "cann-0.5%" or "cann-double".

    Returns:
        A Judgement, printed as five lines.

    Raises:
        JudgeError: an unknown operator, argument or output, or an invalid call.

    Example:
        >>> import fusion_attention as fa
        >>> q = torch.randn(1, 16, 2, 64)
        >>> out = torch.nn.functional.scaled_dot_product_attention(*(q.transpose(1, 2),) * 3).transpose(1, 2)
        >>> fa.judge("attention", {"q": q, "k": q, "v": q}, {"out": out}).verdict
        'right'
    """
    call = recorded(operator, inputs, outputs, seed=seed)
    with Bar() as watch:
        return judged(call, search=False, backends=backends, standard=standard, watch=watch)


def diagnose(
    operator: str,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Tensor],
    *,
    seed: int = 0,
    backends: bool = False,
    standard: str = "error-bound",
) -> Judgement:
    """Judges the results of a call like judge(), whose arguments it has, and explains errors by well-known mistakes.

    Example:
        >>> import fusion_attention as fa
        >>> q, k = torch.randn(2, 1, 16, 2, 64)
        >>> out = fa.attention(q, k, k, scale=1.0)
        >>> fa.diagnose("attention", {"q": q, "k": k, "v": k}, {"out": out}).mistakes[0].name
        'scale-missing'
    """
    call = recorded(operator, inputs, outputs, seed=seed)
    with Bar() as watch:
        return judged(call, search=True, backends=backends, standard=standard, watch=watch)


def judged(
    call: Recorded, *, search: bool, backends: bool = True, standard: str = "error-bound", watch: Watch = silent
) -> Judgement:
    """Returns the judgement of a recorded call.

    Args:
        call: the call.
        search: True to search mistakes that explain errors.
        backends, standard: as for judge().
        watch: is called with the progress.
    """
    if standard not in STANDARDS:
        raise JudgeError(f"standard {standard!r} is not known: one of {', '.join(STANDARDS)}")
    call = replace(call, notes=(*remarks(call), *call.notes))
    lowered = call.lowered()
    captured = call.judgeable(lowered)
    if lowered.extents is NO_SEQUENCE:
        raise JudgeError(f"{call.op.name}: the judge has no formula for it")
    for others in (indexer, pooling):
        if others.serves(lowered):
            return others.judged(call, lowered, search=search, backends=backends, standard=standard)
    setting, outputs = setting_of(lowered, captured)
    theirs, reasons = _beside(call, lowered, captured) if backends else ({}, {})

    def measure(names: Sequence[str] | None, grade: Grade) -> Result:
        chosen = [o for o in outputs if names is None or o.name in names]
        return measured(
            setting, chosen, over(watch, "measured", list(units(setting, chosen))), grade=grade, complete=True,
            with_baseline=standard == "cann-double", beside=theirs if names is None else {},
        )  # fmt: skip

    result, grades = graded(measure)
    opinions = {}
    for o in outputs:
        tally, map_ = result.tallies[o.name], result.maps.get(o.name)
        like = [] if tally.passes else _looks(setting, o, tally)
        of_total = None if o.view is not None else rows_by_columns(tally, o.tensor.shape)
        opinions[o.name] = opinion(o.name, tally, grades[o.name], standard, map_, like, of_total)
    mistakes: tuple[Explanation, ...] = ()
    noisy = False
    if search and not result.passes:
        mistakes, noisy = _searched(call, lowered, setting, outputs, result, watch)
    if not (mistakes or noisy):
        call = replace(call, notes=(*alien(result), *call.notes))
    errors = {who: {n: t.z for n, t in tallies.items()} for who, tallies in result.beside.items()}
    wrong = next((b for map_ in result.maps.values() for b, w in enumerate(map_.wrong) if w.any()), None)
    mask = None if wrong is None else mask_of(setting, wrong)
    return judgement(call, opinions, reasons | errors, [*opinions], standard, search, mistakes, noisy, mask)


def _beside(
    call: Recorded, lowered: Any, captured: dict[str, Tensor]
) -> tuple[dict[str, list[Output]], dict[str, str]]:
    """Returns (results of this machine's back ends for the outputs `captured`, reasons why others have none)."""
    results, reasons = {}, {}
    for backend in BACKENDS:
        result = call.computed(backend, captured)
        if isinstance(result, str):
            reasons[backend] = result
        else:
            results[backend] = setting_of(lowered, result)[1]
    return results, reasons


def _looks(setting: Setting, o: Output, tally: Tally) -> list[str]:
    """Returns sentences that describe the errors (`tally`) of output o of the call `setting`, such as rows of zeros."""
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
    call: Recorded, lowered: Any, setting: Setting, outputs: list[Output], base: Result, watch: Watch
) -> tuple[tuple[Explanation, ...], bool]:
    names = dict(call.bound().names)
    of = lowered.call if isinstance(lowered, OfCall) else lowered
    layout = getattr(of, "out_layout", "") or getattr(of, "layout", "") or of.form.layout
    wrong = {name: map_.wrong for name, map_ in base.maps.items()}
    marks = {name: [m.golden for m in tally.marks] for name, tally in base.tallies.items()}
    return diagnosed(Case(setting, tuple(outputs), names, layout, wrong, marks), base, watch=watch)

"""judge() and diagnose(): judge the results of a call; diagnose() also explains errors by well-known mistakes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from fusion_attention.judging import indexer, pooling
from fusion_attention.judging.calls import BACKENDS, JudgeError, Recorded, recorded
from fusion_attention.judging.capture_sanity import alien, remarks
from fusion_attention.judging.diagnosis import diagnosed
from fusion_attention.judging.error_heatmap import Mask, Surface, rows_by_columns
from fusion_attention.judging.error_location import looks_like, mask_of, most
from fusion_attention.judging.expected_error import Grade
from fusion_attention.judging.measure import Beside, Result, Subject, graded, measured
from fusion_attention.judging.mistakes import Case
from fusion_attention.judging.outputs import Output, setting_of, units
from fusion_attention.judging.progress import Bar, Watch, over, silent
from fusion_attention.judging.standards import STANDARDS, Tally
from fusion_attention.judging.verdict import NOISY, RIGHT, WRONG, Explanation, Judgement, opinion
from fusion_attention.ops.shared.lowered_call import NO_SEQUENCE, OfCall

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
    """Returns the judgement of a recorded call; with `search`, it explains errors by well-known mistakes of kernels.
    backends: also judge this machine's results; standard: "error-bound" or one of CANN's; watch: called with the
    progress."""
    if standard not in STANDARDS:
        raise JudgeError(f"standard {standard!r} is not known: one of {', '.join(STANDARDS)}")
    call = replace(call, notes=(*remarks(call), *call.notes))
    subject = _subject(call, watch)
    theirs: dict[str, Any] = {who: call.computed(who, subject.captured) for who in BACKENDS} if backends else {}
    others = {who: results for who, results in theirs.items() if not isinstance(results, str)}

    def measure(names: Sequence[str] | None, grade: Grade) -> Result:
        beside = others if names is None else {}
        return subject.measured(names, grade, beside, with_baseline=standard == "cann-double")

    result, grades = graded(measure)
    opinions = {}
    for name, tally in result.tallies.items():
        map_ = result.maps.get(name)
        where = []
        if not tally.passes:
            where = [*([] if map_ is None else map_.sentences()), *subject.looks(name, tally)]
        surface = subject.surface(name, tally) if map_ is None else map_.surface()
        opinions[name] = opinion(name, tally, grades[name], standard, where, surface)
    mistakes, noisy = subject.explained(result) if search and not result.passes else ((), False)
    if not (mistakes or noisy):
        call = replace(call, notes=(*subject.notes(result), *call.notes))
    errors = {who: {n: t.z for n, t in tallies.items()} for who, tallies in result.beside.items()}
    reasons = {who: why for who, why in theirs.items() if isinstance(why, str)}
    beside = (reasons if isinstance(subject, Attention) else theirs) | errors  # the order in reports
    right = all(o.passes for o in opinions.values())
    return Judgement(
        call.op.name, call.source, RIGHT if right else NOISY if noisy else WRONG, opinions, call.unjudged(opinions),
        beside, mistakes, search, (*call.notes, *call.doubts()), standard, subject.mask(result),
    )  # fmt: skip


def _subject(call: Recorded, watch: Watch) -> Subject:
    """Returns the object that judges a recorded call, by its operator (attention, indexer or pooling); `watch` is
    called with the progress."""
    lowered = call.lowered()
    captured = call.judgeable(lowered)
    if lowered.extents is NO_SEQUENCE:
        raise JudgeError(f"{call.op.name}: the judge has no formula for it")
    for family in (indexer, pooling):
        if family.serves(lowered):
            return family.subject_of(call.op.name, lowered, captured)
    return Attention(call, lowered, captured, watch)


class Attention(Subject):
    """Judges a call of dense, decode or sparse attention, or of its gradients."""

    def __init__(self, call: Recorded, lowered: Any, captured: dict[str, Tensor], watch: Watch) -> None:
        self.call, self.lowered, self.captured, self.watch = call, lowered, captured, watch
        self.setting, self.outputs = setting_of(lowered, captured)

    def measured(
        self, names: Sequence[str] | None, grade: Grade, beside: Beside = MappingProxyType({}), *,
        with_baseline: bool = False,
    ) -> Result:  # fmt: skip
        chosen = [o for o in self.outputs if names is None or o.name in names]
        return measured(
            self.setting, chosen, over(self.watch, "measured", list(units(self.setting, chosen))), grade=grade,
            complete=True, with_baseline=with_baseline,
            beside={who: setting_of(self.lowered, results)[1] for who, results in beside.items()},
        )  # fmt: skip

    def explained(self, base: Result) -> tuple[tuple[Explanation, ...], bool]:
        names = dict(self.call.bound().names)
        of = self.lowered.call if isinstance(self.lowered, OfCall) else self.lowered
        layout = getattr(of, "out_layout", "") or getattr(of, "layout", "") or of.form.layout
        wrong = {name: map_.wrong for name, map_ in base.maps.items()}
        marks = {name: [m.golden for m in tally.marks] for name, tally in base.tallies.items()}
        return diagnosed(Case(self.setting, tuple(self.outputs), names, layout, wrong, marks), base, watch=self.watch)

    def looks(self, name: str, tally: Tally) -> list[str]:
        o, several = self._output(name), tally.errors.columns > 1
        if o.view is None:
            return most(tally, o.tensor.shape) + looks_like(tally, "row" if several else "number")
        p, e, word = self.setting.problem, self.setting.extents, "key" if o.by_keys else "row"
        heads, lengths = p.heads_kv if o.by_keys else p.heads_q, o.lengths(e)

        def rows(b: int) -> Tensor:
            before = o.before(e, b)
            return o.rows(self.setting, b, slice(0, heads), slice(before, before + lengths[b]))

        return looks_like(tally, word, rows) if several else looks_like(tally, "number")

    def surface(self, name: str, tally: Tally) -> Surface | None:
        o = self._output(name)
        return None if o.view is not None else rows_by_columns(tally, o.tensor.shape)

    def notes(self, base: Result) -> tuple[str, ...]:
        return alien(base)

    def mask(self, base: Result) -> Mask | None:
        wrong = next((b for map_ in base.maps.values() for b, w in enumerate(map_.wrong) if w.any()), None)
        return None if wrong is None else mask_of(self.setting, wrong)

    def _output(self, name: str) -> Output:
        return next(o for o in self.outputs if o.name == name)

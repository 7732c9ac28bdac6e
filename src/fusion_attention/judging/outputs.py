"""The outputs of a call as rows of sequences and heads, for every layout, and their expected values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

import torch

from fusion_attention.ir import bias
from fusion_attention.ir.memory_views import RowView
from fusion_attention.ir.problem import Extents
from fusion_attention.judging import expected_error, formulas
from fusion_attention.judging.editable_call import Block, Setting
from fusion_attention.judging.expected_error import KERNEL, Grade
from fusion_attention.judging.formulas import Precision
from fusion_attention.ops.compressed.lowered_call import LSE as SHARED_LSE
from fusion_attention.ops.compressed.lowered_call import FlashMla
from fusion_attention.ops.inference.lowered_call import LSE, InferenceCall
from fusion_attention.ops.sparse.lowered_call import Sparse, SparseBackward
from fusion_attention.ops.training.forward_backward import DenseBackward, DenseForward

Tensor = torch.Tensor
FLT_MAX = torch.finfo(torch.float32).max
# Number of scores in one block; a few tensors of this size are in memory at once.
PAIRS = 1 << 19
_KEYS = {"dk", "dv", "dk_rope"}
TOTALS = ("dsink", "dpse")  # gradients that are sums over all sequences
_GRADS = {"dquery": "dq", "dkey": "dk", "dvalue": "dv", "dquery_rope": "dq_rope", "dkey_rope": "dk_rope",
          "dsinks": "dsink", "dkey_compressed": "dk_compressed", "dvalue_compressed": "dv_compressed"}  # fmt: skip
_SECOND = "_compressed"


@dataclass(frozen=True, eq=False)
class Output:
    """One output of a judged call: its tensor, its kind and its layout in memory."""

    name: str  # name among the operator's results
    kind: str  # "out", "max", "sum", "lse", or the gradient's name in the formulas
    tensor: Tensor  # the output
    view: RowView | None  # its memory by sequence, head and row; None for a sum over all sequences
    # The family of operators that determines its values in rows without keys: "training", "sparse", "shared" (attention
    # with compressed keys), "own" (as the kernels) or "log" (lse of this library's functions: -inf;
    # flash-attn's +inf is read as -inf).
    form: str = "own"
    second: bool = False  # True if its rows are compressed keys

    @property
    def by_keys(self) -> bool:
        """True if the output's rows are keys, not query rows."""
        return self.kind in _KEYS

    def of_unit(self, unit: Unit) -> bool:
        """True if the output has a row for each row of `unit`: for queries, keys or compressed keys, as unit has."""
        return self.view is not None and (self.by_keys, self.second) == (unit.by_keys, unit.second)

    def lengths(self, extents: Extents) -> list[int]:
        """Returns the output's number of rows in each sequence."""
        counted = extents.kv_len if self.by_keys else extents.q_len
        if self.second:
            assert extents.compressed is not None
            counted = extents.compressed.kv_len
        result: list[int] = counted.tolist()
        return result

    def rows(self, setting: Setting, b: int, heads: slice, rows: slice) -> Tensor:
        """Returns a range of heads and rows of the output in sequence b, [heads, rows, elements]."""
        assert self.view is not None
        count = setting.problem.heads_kv if self.by_keys else setting.problem.heads_q
        every = self.view.sequence(b, count, self.lengths(setting.extents)[b])
        if not self.second:
            return every[heads, rows]
        before = self.before(setting.extents, b)
        return every[heads, rows.start - before : rows.stop - before]

    def before(self, extents: Extents, b: int) -> int:
        """Returns the number of keys of sequence b that are numbered before the output's first row: 0, or for an output
        of compressed keys the number of other keys."""
        return int(extents.kv_len[b]) if self.second else 0

    def unit_of(self, setting: Setting, unit: Unit) -> Unit:
        """Returns a part of the call, `unit`, with the output's heads (key heads for key gradients), and rows counted
        from the output's first row."""
        before = self.before(setting.extents, unit.b)
        rows = slice(unit.rows.start - before, unit.rows.stop - before)
        return replace(unit, heads=of_heads(setting, unit), rows=rows)


@dataclass(frozen=True)
class Unit:
    """A part of a call that is computed at once: a range of query heads and of query rows (of keys if by_keys) of
    sequence b; second: True if the keys are compressed keys, which are numbered after the others."""

    b: int
    heads: slice
    rows: slice
    by_keys: bool = False
    second: bool = False


def setting_of(call: Any, captured: Mapping[str, Tensor]) -> tuple[Setting, list[Output]]:
    """Returns (the call's tensors and parameters, its outputs to judge) of a dense, decode or sparse attention call;
    captured: its results by name."""
    scratch = call.results()
    filled = call.fill(scratch)
    filled.begin()
    operands, *grads = filled.operands
    shown = call.fill({**scratch, **captured}).operands
    setting = Setting(call.op_kind, call.problem, call.extents, operands, grads[0] if grads else None)
    if isinstance(call, (DenseBackward, SparseBackward)):
        return setting, list(_gradients(call, shown[1], captured))
    return setting, list(_forward(call, shown[0], captured))


def _forward(call: Any, shown: Any, captured: Mapping[str, Tensor]) -> Iterator[Output]:
    for name, tensor in captured.items():
        if name in ("attention_out", "out", "output"):
            yield Output(name, "out", tensor, shown.out)
        elif name == LSE and isinstance(call, InferenceCall):
            flat = tensor.squeeze(-1)
            yield Output(name, "lse", tensor, _over(shown, flat.squeeze(0).mT if call.lse_by_batch else flat))
        elif name == SHARED_LSE and isinstance(call, FlashMla):
            yield Output(name, "lse", tensor, _over(shown, _by_token(call, tensor)), "shared")
        elif name == "lse" and isinstance(call, (DenseForward, InferenceCall)):
            yield Output(name, "lse", tensor, _over(shown, tensor.masked_fill(tensor == math.inf, -math.inf)), "log")
        elif name in ("softmax_max", "softmax_sum", "max", "sum"):
            kind = name.removeprefix("softmax_")
            if isinstance(call, DenseForward) and call.lanes:
                yield Output(name, kind, tensor, _over(shown, _of_lanes(tensor)), "training")
            elif isinstance(call, Sparse):
                yield Output(name, kind, tensor, _over(shown, _by_token(call, tensor)), "sparse")
            elif isinstance(call, (DenseForward, InferenceCall)):
                yield Output(name, kind, tensor, _over(shown, tensor))


def _over(shown: Any, flat: Tensor) -> RowView:
    view: RowView = shown.stats.max.over(flat.contiguous())
    return view


def _by_token(call: Sparse, tensor: Tensor) -> Tensor:
    """Returns softmax max, sum or lse, whose axes have the order of the call's layout, as [.., tokens, heads]."""
    return tensor.movedim(0 if call.layout == "TND" else 1, -2).flatten(-2)


def _of_lanes(tensor: Tensor) -> Tensor:
    """Returns a softmax statistic [...] from its eight stored copies [..., 8]: the first copy plus the absolute
    differences of the others, so that unequal copies count as an error."""
    first = tensor[..., :1]
    same = (tensor == first) | (tensor.isnan() & first.isnan())
    return first[..., 0] + (tensor - first).abs().masked_fill(same, 0).sum(-1)


def _gradients(call: Any, shown: Any, captured: Mapping[str, Tensor]) -> Iterator[Output]:
    for name, tensor in captured.items():
        kind = _GRADS.get(name, name)
        if kind in TOTALS:
            yield Output(name, kind, tensor, None)
        elif getattr(shown, kind, None) is not None and tensor.numel():
            second = kind.endswith(_SECOND)
            yield Output(name, kind.removesuffix(_SECOND), tensor, getattr(shown, kind), second=second)


def units(setting: Setting, outputs: list[Output]) -> Iterator[Unit]:
    """Yields ranges of heads and of query rows or keys, of about 2^19 (PAIRS) scores each, that cover these outputs."""
    p, e = setting.problem, setting.extents
    kinds = {(o.by_keys, o.second) for o in outputs}
    for b in range(len(e)):
        q_len, kv_len = int(e.q_len[b]), e.all_keys(b)
        heads = min(p.heads_q, max(p.group, PAIRS // max(q_len * kv_len, 1) // p.group * p.group))
        # Rows before keys: the gradients of keys are summed while rows are computed.
        for head, (by_keys, second) in itertools.product(range(0, p.heads_q, heads), sorted(kinds)):
            before = int(e.kv_len[b]) if second else 0
            end = kv_len if second or not by_keys else int(e.kv_len[b])
            length, other = (end - before, q_len) if by_keys else (q_len, kv_len)
            step = min(max(length, 1), max(1, PAIRS // max(heads * other, 1)))
            for first in range(0, length, step):
                rows = slice(before + first, before + min(first + step, length))
                yield Unit(b, slice(head, min(head + heads, p.heads_q)), rows, by_keys, second)


@dataclass(frozen=True, eq=False)
class Wanted:
    """Expected values of an output [heads, rows, elements], with the variance of a correct program's error."""

    value: Tensor  # the exact values, float64
    variance: Tensor  # variance of a correct program's error
    baseline: Tensor | None = None  # results of a float32 program, or None


def computed(
    setting: Setting, unit: Unit, outputs: list[Output], grade: Grade | None = KERNEL, *, with_baseline: bool = False,
    exact: bool = True,
) -> dict[str, Wanted]:  # fmt: skip
    """Returns the exact values of the outputs in a part of a call (`unit`: ranges of heads and rows), with expected
    errors, by name.

    Args:
        grade: the steps in which a correct program rounds; None: compute values alone.
        with_baseline: also return the results of a float32 program.
        exact: for gradients of keys, compute the saved output's error from all keys of the rows, not from its size.
    """
    result = _Expectation(setting, unit, grade, exact=exact).values(outputs)
    if not with_baseline:
        return result
    precision = formulas.baseline(setting.problem.torch_dtype)
    measure = _Expectation(setting, unit, None, precision).values(outputs)
    return {name: replace(wanted, baseline=measure[name].value) for name, wanted in result.items()}


@dataclass(frozen=True, eq=False)
class _Expectation:
    """Computes the exact values and expected errors of a part of a call (`unit`: ranges of heads and rows); grade: the
    steps in which a correct program rounds; precision: dtypes of the computation."""

    setting: Setting
    unit: Unit
    grade: Grade | None
    precision: Precision = formulas.GOLDEN
    exact: bool = True

    def values(self, outputs: list[Output]) -> dict[str, Wanted]:
        """Returns the exact values [heads, rows, elements] of outputs, with expected errors, by name."""
        setting, unit, grade, precision = self.setting, self.unit, self.grade, self.precision
        if setting.grads is not None:
            return self._gradients(outputs)
        block = setting.block(unit.b, unit.heads, unit.rows)
        narrow = formulas.narrowed(block, precision)
        softmax = formulas.softmax(narrow)
        raw = formulas.forward(block, precision, softmax)
        keyless = setting.extents.all_keys(unit.b) == 0
        values = before = {o.name: _as_returned(o, raw, block, precision, keyless=keyless) for o in outputs}
        for change in setting.returns:
            values = {o.name: change(o.kind, values[o.name], raw, block, precision) for o in outputs}
        if grade is None:
            return {name: Wanted(value, value) for name, value in values.items()}
        statistics, out = any(o.kind != "out" for o in outputs), raw.get("unscaled", raw["out"])
        variances = expected_error.forward(block, softmax, out, grade, statistics=statistics)
        for o in outputs:
            for errors in setting.errors:
                variances[o.kind] = errors(o.kind, variances[o.kind], before[o.name], values[o.name], block, grade)
        results = {}
        for o in outputs:
            stored = grade.stored(values[o.name], variances[o.kind], _dtype(o, setting.problem))
            results[o.name] = Wanted(values[o.name], stored)
        return results

    def _gradients(self, outputs: list[Output]) -> dict[str, Wanted]:
        """Returns the exact gradients of the part's queries, or of its keys, which are sums over all queries, with
        expected errors, by name."""
        setting, unit, grade, p = self.setting, self.unit, self.grade, self.precision
        problem, length = setting.problem, int(setting.extents.q_len[unit.b])
        wanted = [o for o in outputs if o.of_unit(unit)]
        if not unit.by_keys:
            fused = self.exact and not setting.edits and any(o.by_keys for o in outputs)
            kinds = _kinds(setting, outputs if fused else wanted)
            values, variances, keys = replace(self, exact=True)._of_block(kinds, unit.rows, None)
            if fused:
                self._sum_by_keys(keys, values, variances)
        else:
            values, variances = self._of_keys(_kinds(setting, wanted))
            if problem.shares_kv and values:
                values["dk"][..., : problem.dim_v] += values["dv"]
                if variances:
                    variances["dk"][..., : problem.dim_v] += variances["dv"]
            values, variances = (
                {name: value.unflatten(0, (-1, problem.group)).sum(1) for name, value in each.items()}
                for each in (values, variances)
            )
        pieces: dict[str, Wanted] = {}
        terms = length * problem.group if unit.by_keys else setting.extents.all_keys(unit.b)
        for o in (o for o in wanted if o.kind in values):
            value = before = variance = p.stored(values[o.kind])
            at = o.unit_of(setting, unit)
            for change in setting.returns:
                value = change(o.kind, value, {}, at, p)
            if grade is not None:
                variance = variances[o.kind] + expected_error.summed(before, terms, problem.torch_dtype, grade)
                for errors in setting.errors:
                    variance = errors(o.kind, variance, before, value, at, grade)
                variance = grade.stored(value, variance, _dtype(o, problem))
            pieces[o.name] = Wanted(value, variance)
        return pieces

    def _of_keys(self, kinds: Set[str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Returns (values, error variances) of the gradients `kinds` of the part's keys, [query heads, keys, elements]
        by kind, summed over all queries of the sequence."""
        unit, length = self.unit, int(self.setting.extents.q_len[self.unit.b])
        sums = self.setting.sums.get(self._of_sums)
        if sums is not None and sums.rows == length:
            values, variances = (
                {n: t[:, unit.rows].clone() for n, t in of.items()} for of in (sums.values, sums.variances)
            )
            return values, variances
        values, variances = {}, {}
        step = max(1, PAIRS // max((unit.rows.stop - unit.rows.start) * (unit.heads.stop - unit.heads.start), 1))
        for first in range(0, length, step):
            *results, _ = self._of_block(kinds, slice(first, min(first + step, length)), unit.rows)
            for total, result in zip((values, variances), results, strict=True):
                for name in _KEYS & result.keys():
                    total[name] = total[name] + result[name] if name in total else result[name]
        return values, variances

    @property
    def _of_sums(self) -> tuple[Any, ...]:
        """The key (sequence, heads, precision) under which this part's sums over queries are cached in Setting.sums."""
        return self.unit.b, self.unit.heads.start, self.unit.heads.stop, self.grade, self.precision

    def _sum_by_keys(self, keys: slice, values: dict[str, Tensor], variances: dict[str, Tensor]) -> None:
        """Adds contributions of the part's queries to gradients of `keys` (values and error variances, by kind) to
        cached sums over queries. Only the sums of the latest heads are stored."""
        setting, unit = self.setting, self.unit
        sums = setting.sums.get(self._of_sums)
        if unit.rows.start == 0 or sums is None or sums.rows != unit.rows.start:
            setting.sums.clear()
            if unit.rows.start:
                return
            sums = setting.sums[self._of_sums] = KeySums({}, {})
        for total, result in ((sums.values, values), (sums.variances, variances)):
            for name in _KEYS & result.keys():
                value = result[name]
                if name not in total:
                    total[name] = value.new_zeros(value.shape[0], setting.extents.all_keys(unit.b), value.shape[2])
                total[name][:, keys] += value
        sums.rows = unit.rows.stop

    def _of_block(
        self, kinds: Set[str], rows: slice, keys: slice | None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], slice]:
        """Returns the contributions of query rows to the gradients `kinds`: (values by kind, error variances by kind,
        the keys). They are of the part's heads, and of these keys; None: of all keys that the rows may see."""
        block = self.setting.block(self.unit.b, self.unit.heads, rows, keys)
        if self.grade is None:
            return formulas.gradients(block, self.precision, kinds=kinds), {}, block.keys
        scored = formulas.scored(block)
        values = formulas.gradients(block, self.precision, scored, kinds)
        of_delta = self.delta(rows, (block, scored) if keys is None else None)
        return values, expected_error.gradients(block, scored, of_delta, self.grade, kinds), block.keys

    def delta(self, rows: slice, complete: tuple[Block, formulas.Scored] | None = None) -> Tensor:
        """Returns the error variance of delta = dout . out of these query rows and the part's heads, [heads, rows, 1].
        It depends on all keys, and is cached in Setting.deltas.
        complete: (the rows with all keys, the gradients of their scores), if the caller has them."""
        setting, unit, grade = self.setting, self.unit, self.grade
        assert grade is not None
        at, heads = (unit.b, unit.heads.start, unit.heads.stop, grade.words), unit.heads.stop - unit.heads.start
        if at not in setting.deltas:
            empty = torch.full((heads, int(setting.extents.q_len[unit.b]), 1), math.nan)
            setting.deltas[at] = empty.double()
        delta = setting.deltas[at]
        if complete is not None:
            delta[:, rows] = expected_error.delta(*complete, grade)
        elif bool(delta[:, rows].isnan().any()):
            step = max(1, PAIRS // max(heads * setting.extents.all_keys(unit.b), 1))
            for first in range(rows.start, rows.stop, step):
                here = slice(first, min(first + step, rows.stop))
                block = setting.block(unit.b, unit.heads, here, None if self.exact else slice(0, 0))
                scored = formulas.scored(block) if self.exact else None
                delta[:, here] = expected_error.delta(block, scored, grade)
        return delta[:, rows]


@dataclass(eq=False)
class KeySums:
    """Gradients of all keys and their error variances, summed over the first `rows` queries: [query heads, keys,
    elements] by kind ("dk")."""

    values: dict[str, Tensor]
    variances: dict[str, Tensor]
    rows: int = 0


def _dtype(o: Output, problem: Any) -> torch.dtype:
    """Returns the dtype to which an output is rounded; a float64 output counts as one of the call's dtype."""
    if o.tensor.dtype != torch.float64 or problem.dtype == "float64":
        return o.tensor.dtype
    return torch.float32 if o.kind in ("max", "sum", "lse", "dsink") else problem.torch_dtype


def _as_returned(o: Output, raw: dict[str, Tensor], block: Any, p: Precision, *, keyless: bool) -> Tensor:
    """Returns the computed result raw[o.kind] as operators return it, with their values for rows without keys; keyless:
    True if the sequence has no keys; p: dtypes of the computation."""
    if o.kind == "out":
        return raw["out"]
    top, total = raw["max"], raw["sum"]
    result = top if o.kind == "max" else total
    if o.form == "log":
        result = top + total.log()
    elif o.form == "shared":  # 0 of a row without keys, with a sink too
        result = (top + total.log()).where(block.visible.any(-1, keepdim=True), 0)
    elif o.kind == "lse":
        lowest = torch.finfo(torch.float32).min
        result = (top + total.log()).masked_fill(top == -math.inf, lowest).masked_fill(total == 0, math.inf)
        if block.sink is not None:
            result = result.masked_fill(~block.visible.any(-1, keepdim=True), math.inf)
    elif o.form == "training":
        result = top.clamp_min(-FLT_MAX) if o.kind == "max" else total.masked_fill((top == -math.inf) & (total == 0),
                                                                                 FLT_MAX)  # fmt: skip
        result = torch.zeros_like(result) if keyless else result
    elif o.form == "sparse":
        result = result.masked_fill((top == -math.inf) | torch.tensor(keyless), 0)
    return result if p.low is None else result.float()


def _kinds(setting: Setting, outputs: list[Output]) -> Set[str]:
    """Returns the gradients ("dq", "dk", ...) that outputs need. If keys are also the values, dk needs dv."""
    kinds = {o.kind for o in outputs}
    return kinds | _KEYS if setting.problem.shares_kv and kinds & _KEYS else kinds


def totals(setting: Setting, o: Output, grade: Grade) -> Wanted:
    """Returns the expected gradient of sinks [heads] or of a bias (in its shape): output o, summed over sequences."""
    p, e, grads = setting.problem, setting.extents, setting.grads
    assert grads is not None
    shape = (p.heads_q,) if grads.dbias is None or o.kind == "dsink" else grads.dbias.keep.shape
    value, variance = (torch.zeros(shape, dtype=torch.float64) for _ in range(2))
    terms = 0
    for unit in units(setting, [o]):
        block = setting.block(unit.b, unit.heads, unit.rows)
        scored = formulas.scored(block)
        of_delta = _Expectation(setting, unit, grade).delta(unit.rows)
        if o.kind == "dsink":
            terms = max(terms, int(e.q_len.sum()))
            value[unit.heads] += formulas.gradients(block, formulas.GOLDEN, scored, (o.kind,))["dsink"]
            variance[unit.heads] += expected_error.gradients(block, scored, of_delta, grade, (o.kind,))["dsink"]
            continue
        by = p.scale if p.bias_scaled else 1.0
        results = by * scored.dscores, by * by * expected_error.scored(block, scored, of_delta, grade)
        assert grads.dbias is not None
        for total, addend in zip((value, variance), results, strict=True):
            _add_to_bias(setting, replace(grads.dbias, keep=total), unit, block.keys, addend)
        terms = max(terms, value.numel() and int(e.q_len @ e.kv_len) * p.heads_q // value.numel())
    variance = variance + expected_error.summed(value, terms, p.torch_dtype, grade)
    return Wanted(value, grade.stored(value, variance, _dtype(o, p)))


def _add_to_bias(setting: Setting, view: Any, unit: Unit, keys: slice, addend: Tensor) -> None:
    """Adds `addend` [heads, rows, keys], of a part's heads and rows and these keys, to the bias gradient `view`."""
    view = replace(view, address=view.address + unit.heads.start * view.stride_head)
    if setting.problem.bias == "table":
        lengths = int(setting.extents.q_len[unit.b]), int(setting.extents.kv_len[unit.b])
        bias.add_table_gradient(view, unit.b, lengths, addend, unit.rows, keys)
    else:
        bias.add_matrix_gradient(view, unit.b, addend, unit.rows, keys)


def of_heads(setting: Setting, unit: Unit) -> slice:
    """Returns the output's heads that belong to a part of the call: its query heads, or, for gradients of keys, the key
    heads of these."""
    group = setting.problem.group
    return slice(unit.heads.start // group, unit.heads.stop // group) if unit.by_keys else unit.heads

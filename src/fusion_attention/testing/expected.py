"""expected() and expected_of(): float64 results of attention calls, with the expected error of every element.

Values come from the reference back end, error sizes from judging.expected_error.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from fusion_attention.ir.problem import Extents, Grads, Operands, Problem
from fusion_attention.judging.chi_square_limits import Expected
from fusion_attention.judging.editable_call import Setting
from fusion_attention.judging.expected_error import KERNEL, Grade
from fusion_attention.judging.outputs import TOTALS, Output, computed, of_heads, setting_of, totals, units
from fusion_attention.ops.training.forward_backward import DenseForward
from fusion_attention.ops.training.lowered_call import DenseCall, fresh, grads_of, operands_of
from fusion_attention.ops.training.statistics import LANES, from_lanes
from fusion_attention.testing.cases import Case, Results, Tensor
from fusion_attention.testing.run_case import golden, lowered

_ROWS = ("dq", "dk", "dv", "dq_rope", "dk_rope")


def sizes(
    problem: Problem, extents: Extents, operands: Operands, grads: Grads | None = None, grade: Grade = KERNEL
) -> Results:
    """Returns {name: expected error sizes} of a back end's results, float64, in the memory order of their views.

    Args:
        problem, extents, operands, grads: parameters, lengths and tensor views that a back end takes. For a backward
            (with grads) the operands include the forward's results.
        grade: the steps after which the judged program rounds to the call's dtype.

    Returns:
        "out", "max", "sum" and "lse" of a forward; the existing ones of "dq", "dk", "dv", "dq_rope", "dk_rope", "dpse"
        and "dsink" of a backward. Rows outside of sequences are 0.
    """
    op_kind = "attention_forward" if grads is None else "attention_backward"
    setting = Setting(op_kind, problem, extents, operands, grads)
    outputs, result = _outputs(operands, grads), {}
    for o in outputs:
        assert o.view is not None
        result[o.name] = torch.zeros(o.view.keep[0].shape, dtype=torch.float64)
    views = {o.name: o.view.over(result[o.name]) for o in outputs if o.view is not None}
    for unit in units(setting, outputs):
        wanted = computed(setting, unit, outputs, grade)
        heads = of_heads(setting, unit)
        for o in outputs:
            if o.of_unit(unit) and o.name in wanted:
                place = replace(o, view=views[o.name])
                place.rows(setting, unit.b, heads, unit.rows)[:] = wanted[o.name].variance.sqrt()
    if grads is not None:
        for kind, tensor in (("dsink", grads.dsink), ("dpse", None if grads.dbias is None else grads.dbias.keep)):
            if tensor is not None:
                tensor = tensor.to(problem.torch_dtype) if kind == "dpse" else tensor  # stored in the bias's dtype
                result[kind] = totals(setting, Output(kind, kind, tensor, None), grade).variance.sqrt()
    return result


def _outputs(operands: Operands, grads: Grads | None) -> list[Output]:
    """Returns an Output (name, tensor, view of its memory) per result of a forward or, with `grads`, of a backward."""
    if grads is None:
        views = {"out": operands.out, "max": operands.stats.max, "sum": operands.stats.sum, "lse": operands.stats.max}
    else:
        views = {kind: view for kind in _ROWS if (view := getattr(grads, kind)) is not None and view.keep[0].numel()}
    return [Output(kind, kind, view.keep[0], view) for kind, view in views.items()]


def expected_of(call: Any, golden: Mapping[str, Tensor] | None = None, grade: Grade = KERNEL) -> dict[str, Expected]:
    """Returns {name: float64 result with expected error sizes} of an attention call.

    Args:
        call: a call, as back ends compute it, of dense, decoding or sparse attention, or of its gradients.
        golden: float64 results by name, which replace those computed here (except integers, which are computed here
            before rounding).
        grade: the steps after which the judged program rounds to the call's dtype.

    Returns:
        An Expected for every result of call.results(). Rows outside of sequences are exactly 0, with lse infinity.
    """
    call_results: dict[str, Tensor] = call.results()
    has_lanes = isinstance(call, DenseForward) and call.lanes
    lanes = {name for name in call_results if has_lanes and name.startswith("softmax_")}
    shapes = {name: (*t.shape[:-1], 1) if name in lanes else t.shape for name, t in call_results.items()}
    # Every element contains its index, so any view of a row yields the row's indices in memory.
    indices = {name: torch.arange(n).double().view(shape) for name, shape in shapes.items() if (n := math.prod(shape))}
    setting, outputs = setting_of(call, {name: t.expand(call_results[name].shape) for name, t in indices.items()})
    outputs = [replace(o, tensor=call_results[o.name]) for o in outputs]
    results = {o.name: torch.zeros(indices[o.name].numel(), dtype=torch.float64) for o in outputs}
    values = {o.name: torch.full_like(results[o.name], math.inf if o.kind == "lse" else 0) for o in outputs}
    for unit in units(setting, [o for o in outputs if o.view is not None]):
        with_unit = [o for o in outputs if o.of_unit(unit)]
        wanted = computed(setting, unit, with_unit, grade)
        for o in with_unit:
            if o.name not in wanted:  # keys without rows have no gradient
                continue
            at = o.rows(setting, unit.b, of_heads(setting, unit), unit.rows).long()
            values[o.name][at] = wanted[o.name].value
            results[o.name][at] = wanted[o.name].variance.sqrt()
    for o in outputs:
        if o.kind in TOTALS:
            total = totals(setting, o, grade)
            values[o.name], results[o.name] = total.value.reshape(-1), total.variance.sqrt().reshape(-1)
    if golden is not None:
        given = {o.name: golden[o.name].double() for o in outputs if o.tensor.is_floating_point()}
        values |= {name: (t[..., :1] if name in lanes else t).reshape(-1) for name, t in given.items()}
    value, size = (
        {n: t.view(shapes[n]).expand(call_results[n].shape) for n, t in kind.items()} for kind in (values, results)
    )
    judged = {o.name: Expected(value[o.name], size[o.name]) for o in outputs}
    empty = {name: Expected(t.double(), t.double()) for name, t in call_results.items() if not t.numel()}
    return {name: (judged | empty)[name] for name in call_results if name in judged or name in empty}


def dense(call: DenseCall, results: Mapping[str, Tensor], dy: Tensor | None = None) -> dict[str, Expected]:
    """Returns {name ("out", "dq", ...): result with expected error sizes} of a training call, from float64 results.

    Args:
        call: the call, as back ends compute it.
        results: the reference's results in float64, optionally with "lse".
        dy: the gradient of out; None: results of the forward only.
    """
    result = sizes(call.problem, call.extents, operands_of(call, *fresh(call)))
    result |= {name: result[name].unsqueeze(-1).expand(*result[name].shape, LANES) for name in ("max", "sum")}
    if dy is not None:
        q_rope, k_rope, bias, _, _, _, sink, *_ = call.extras
        given = (call.q, call.k, call.v, q_rope, k_rope, bias if "dpse" in results else None, sink)
        empty = call.q.new_empty(0)
        grads, _ = grads_of(call, dy, tuple(empty if t is None else t.new_zeros(t.shape) for t in given))
        saved = results["out"], *from_lanes(call, results["max"], results["sum"])
        result |= sizes(call.problem, call.extents, operands_of(call, *saved), grads)
    return {
        name: Expected(value, result[name].reshape(value.shape) if value.numel() else value)
        for name, value in results.items()
    }


def expected(case: Case, args: Mapping[str, Any], results: Results | None = None) -> dict[str, Expected]:
    """Returns {name: float64 result with the expected error sizes of a correct kernel} of a test call.

    Args:
        case, args: the test call and its arguments().
        results: the reference's results; None: they are computed. Results of a similar call (with some NaN, for
            instance) may be passed if its error sizes are the same.
    """
    return dense(lowered(case, args), golden(case, args) if results is None else results, args["dy"])

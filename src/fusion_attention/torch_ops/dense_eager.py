"""Eager execution of a dense call, and its derivative: fresh results, the plan, the run.

Everything that runs ends in run_forward() and run_backward(), which write into given tensors.

A second way beside eager.py: statistics stay as kernels write them from the forward to the backward, while each
interface has a form of its own for them (lanes, finite numbers, their logarithm), so that a record's results are not
what a derivative reads.
"""

from __future__ import annotations

from typing import Any

import torch

from fusion_attention.contract import Bound, intact, lazy
from fusion_attention.ir.problem import Operands
from fusion_attention.memory import empty
from fusion_attention.ops.training.call import (
    BIAS,
    EXTRAS,
    DenseCall,
    clear_gradients,
    fresh,
    grads_of,
    operands_of,
    pattern,
)
from fusion_attention.plan import Plan, plan
from fusion_attention.settings import chosen
from fusion_attention.torch_ops.autograd_guards import once
from fusion_attention.torch_ops.prepared import Prepared

Tensors = tuple[torch.Tensor, ...]
Results = tuple[torch.Tensor, Any, Any]
_DBIAS = 5  # the place of the bias among gradients
_SAVED = ("dout", "dlse", "out", "max", "sum", "q", "k", "v", *EXTRAS)


def _asked_one_by_one(*tensors: torch.Tensor | None) -> bool:
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


# torch 2.6 has no function that asks all of them at once.
_any_requires_grad = getattr(torch._C, "_any_requires_grad", _asked_one_by_one)


def attention(call: DenseCall, backend: str = "auto", *, stats: bool = True, smooth: bool = False) -> Results:
    """(out, max, sum) of a lowered call, differentiable in q, k, v, rope tensors, bias and sink.

    Without stats the last two may be None: memory for them takes longer than writing them. With smooth, so is
    max + log(sum), and no other function of them; otherwise they are constants.
    """
    backend = chosen(backend)
    if torch.is_grad_enabled():
        tensors = (call.q, call.k, call.v, *call.extras)
        if _any_requires_grad(*tensors):
            out, max_, sum_ = _Attention.apply(call, backend, smooth, *tensors)
            return out, max_, sum_
    return _forward(call, backend, stats=stats)


def attention_backward(
    call: DenseCall,
    dout: torch.Tensor,
    out: torch.Tensor,
    stats: tuple[torch.Tensor, torch.Tensor],
    *,
    dlse: torch.Tensor | None = None,
    dbias: bool,
    backend: str = "auto",
) -> Tensors:
    """(dq, dk, dv, dq_rope, dk_rope, dbias, dsink) of a lowered call; a gradient without a tensor is empty.

    Statistics, and dlse, the gradient of max + log(sum), may come with any strides, as saved tensors do
    meanwhile.
    """
    backend = chosen(backend)
    q_rope, k_rope, bias, _, _, _, sink, *_ = call.extras
    present = (call.q, call.k, call.v, q_rope, k_rope, bias if dbias else None, sink)
    gradients = tuple(call.q.new_empty(0) if t is None else empty(t, t.shape) for t in present)
    max_, sum_ = (t.contiguous() for t in stats)  # Their views count on the order in which they were written.
    run_backward(call, dout, (out, max_, sum_), gradients, backend, None if dlse is None else dlse.contiguous())
    return gradients


def run_forward(call: DenseCall, results: Tensors, backend: str) -> tuple[Plan, Operands] | None:
    """Computes into results = (out, max, sum): out in q's layout, statistics as stats_shape() and contiguous.

    Returns the plan and the views that it used; None for a batch without sequences.
    """
    if not call.covers("q"):
        for tensor in results:
            tensor.zero_()
    if not len(call.extents):
        return None
    planned, views = plan(call.problem, call.extents, call.q.device, backend), operands_of(call, *results)
    planned.run(views)
    return planned, views


def run_backward(
    call: DenseCall,
    dout: torch.Tensor,
    saved: Tensors,
    gradients: Tensors,
    backend: str,
    dlse: torch.Tensor | None = None,
) -> None:
    """Computes into gradients = (dq, dk, dv, dq_rope, dk_rope, dbias, dsink) from saved = (out, max, sum).

    A gradient without elements is not wanted; dbias is as the bias is stored, in its dtype.
    """
    grads, summed = grads_of(call, dout, gradients, dlse)
    clear_gradients(call, gradients, summed)
    if len(call.extents):
        result = plan(call.problem, call.extents, call.q.device, backend, "attention_backward")
        result.run(operands_of(call, *saved), grads)
    if summed is not None:
        gradients[_DBIAS].copy_(summed)


def again(bound: Bound, backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, stats: bool) -> Any:
    """attention() of a bound call as the last one of its call cache, which needs no lowering; None where it is not
    known yet, or has a derivative."""
    prepared: Prepared | None = bound.call_cache.prepared.get(chosen(backend))
    if prepared is None or (torch.is_grad_enabled() and _any_requires_grad(q, k, v)):
        return None
    return prepared.run(q, k, v, stats=stats)


def _forward(call: DenseCall, backend: str, *, stats: bool = True) -> Results:
    prepared: Prepared | None = None if call.call_cache is None else call.call_cache.prepared.get(backend)
    if prepared is not None:
        return prepared.run(call.q, call.k, call.v, stats=stats)
    results = fresh(call)
    ran = run_forward(call, results, backend)
    if ran is not None and call.call_cache is not None and call.covers("q"):
        planned, views = ran
        if (rows := pattern(call, views)) is not None:
            call.call_cache.prepared[backend] = Prepared(planned, views, rows, results)
    return results


class _Attention(torch.autograd.Function):
    """_forward() with attention_backward() as its derivative: of out, and with smooth of max + log(sum)."""

    @staticmethod
    def forward(ctx: Any, call: DenseCall, backend: str, smooth: bool, *tensors: Any) -> Tensors:
        results = _forward(call, backend)
        ctx.save_for_backward(*results, *tensors)
        # The tensors are torch's to keep, and to notice when they change; the rest of the call is plain values.
        ctx.lowered, ctx.drawn, ctx.backend = (call.problem, call.form, call.extents), (call.seed, call.offset), backend
        ctx.mark_non_differentiable(*results[2 if smooth else 1 :])
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any, _: Any) -> Any:
        wanted = ctx.needs_input_grad[3:]
        if dout is None and dlse is None:
            return (None,) * (3 + len(wanted))
        saved = ctx.saved_tensors
        dout = torch.zeros_like(saved[0]) if dout is None else dout.clone() if lazy(dout) else dout
        dlse = dlse.clone() if dlse is not None and lazy(dlse) else dlse
        intact("attention, backward", _SAVED, (dout, dlse, *saved))
        out, max_, sum_, q, k, v, *extras = saved
        (problem, form, extents), (seed, offset) = ctx.lowered, ctx.drawn
        call = DenseCall(problem, form, extents, q, k, v, tuple(extras), seed, offset)
        stats, dbias = (max_, sum_), wanted[3 + BIAS]
        grads = once(
            lambda: attention_backward(call, dout, out, stats, dlse=dlse, dbias=dbias, backend=ctx.backend),
            (dout, dlse, q, k, v, *extras),
        )
        dq, dk, dv, dq_rope, dk_rope, dbias, dsink = grads
        inputs = (dq, dk, dv, dq_rope, dk_rope, dbias, None, None, None, dsink, None, None)
        return None, None, None, *(g if need else None for g, need in zip(inputs, wanted, strict=True))

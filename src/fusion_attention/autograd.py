"""Eager execution of a lowered call, and its derivative: fresh results, the plan, the run.

Everything that runs ends in run_forward() and run_backward(), which write into given tensors. Refuses to know how a
call was made; what tracing and function transforms see is operators.py's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from fusion_attention.lower import Call, matrix_view, operands_of, row_shape, row_view, stats_shape, uncovered
from fusion_attention.plan import plan
from fusion_attention.problem import Grads

Tensors = tuple[torch.Tensor, ...]
BIAS = 2  # the place of the bias in a call's extras


def attention(call: Call, backend: str = "auto") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, max, sum) of a lowered call, differentiable in q, k, v, rope tensors, bias and sink."""
    if torch.is_grad_enabled():
        tensors = (call.q, call.k, call.v, *call.extras)
        if torch._C._any_requires_grad(*tensors):
            out, max_, sum_ = _Attention.apply(call, backend, *tensors)
            return out, max_, sum_
    return _forward(call, backend)


def attention_backward(
    call: Call,
    dout: torch.Tensor,
    out: torch.Tensor,
    stats: tuple[torch.Tensor, torch.Tensor],
    *,
    dbias: bool,
    backend: str = "auto",
) -> Tensors:
    """(dq, dk, dv, dq_rope, dk_rope, dbias, dsink) of a lowered call; a gradient without a tensor is empty."""
    q_rope, k_rope, bias, _, _, _, sink = call.extras
    present = (call.q, call.k, call.v, q_rope, k_rope, bias if dbias else None, sink)
    gradients = tuple(call.q.new_empty(0) if t is None else t.new_empty(t.shape) for t in present)
    run_backward(call, dout, (out, *stats), gradients, backend)
    return gradients


def run_forward(call: Call, results: Tensors, backend: str) -> None:
    """Computes into results = (out, max, sum): out in q's layout, statistics as stats_shape() and contiguous."""
    if uncovered(call, "q"):
        for tensor in results:
            tensor.zero_()
    if len(call.extents):
        plan(call.problem, call.extents, call.q.device, backend).run(operands_of(call, *results))


def run_backward(call: Call, dout: torch.Tensor, saved: Tensors, gradients: Tensors, backend: str) -> None:
    """Computes into gradients = (dq, dk, dv, dq_rope, dk_rope, dbias, dsink) from saved = (out, max, sum).

    A gradient without elements is not wanted; dbias is as the bias is stored, in its dtype.
    """
    p, form, e = call.problem, call.form, call.extents
    dq, dk, dv, dq_rope, dk_rope, dbias, dsink = gradients
    for side, tensors in (("q", (dq, dq_rope)), ("kv", (dk, dv, dk_rope))):
        if uncovered(call, side):
            for tensor in tensors:
                tensor.zero_()
    if p.has_sink:
        dsink.zero_()
    summed = None
    if call.extras[BIAS] is not None and dbias.numel():
        # Sequences and broadcast axes add up: in the bias's own dtype the sum would lose bits.
        wide = torch.float64 if call.q.dtype == torch.float64 else torch.float32
        summed = torch.zeros_like(dbias, dtype=wide, memory_format=torch.contiguous_format)
    if len(e):
        rope = p.dim_rope > 0
        grads = Grads(
            dout=row_view(dout, form.layout, p.heads_q, e, "q"),
            dq=row_view(dq, form.layout, p.heads_q, e, "q"),
            dk=row_view(dk, form.layout, p.heads_kv, e, "kv"),
            dv=row_view(dv, form.layout, p.heads_kv, e, "kv"),
            dq_rope=row_view(dq_rope, form.layout, p.heads_q, e, "q") if rope else None,
            dk_rope=row_view(dk_rope, form.layout, p.heads_kv, e, "kv") if rope else None,
            dbias=None if summed is None else matrix_view(summed, form.bias, p.heads_q, e),
            dsink=dsink if p.has_sink else None,
        )
        plan(p, e, call.q.device, backend, "attention_backward").run(operands_of(call, *saved), grads)
    if summed is not None:
        dbias.copy_(summed)


def _forward(call: Call, backend: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, p = call.q, call.problem
    out = q.new_empty(row_shape(q, call.form.layout, p.heads_q, p.dim_v))
    shape = stats_shape(q, call.form, p.heads_q)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    results = out, q.new_empty(shape, dtype=dtype), q.new_empty(shape, dtype=dtype)
    run_forward(call, results, backend)
    return results


class _Attention(torch.autograd.Function):
    """_forward() with attention_backward() as its derivative; statistics are returned, not differentiated."""

    @staticmethod
    def forward(ctx: Any, call: Call, backend: str, *tensors: Any) -> Tensors:
        results = _forward(call, backend)
        ctx.save_for_backward(*results, *tensors)
        # The tensors are torch's to keep, and to notice when they change; the rest of the call is plain values.
        ctx.lowered, ctx.drawn, ctx.backend = (call.problem, call.form, call.extents), (call.seed, call.offset), backend
        ctx.mark_non_differentiable(*results[1:])
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Any, *_: Any) -> Any:
        wanted = ctx.needs_input_grad[2:]
        if dout is None:
            return (None,) * (2 + len(wanted))
        out, max_, sum_, q, k, v, *extras = ctx.saved_tensors
        (problem, form, extents), (seed, offset) = ctx.lowered, ctx.drawn
        call = Call(problem, form, extents, q, k, v, tuple(extras), seed, offset)
        grads = attention_backward(call, dout, out, (max_, sum_), dbias=wanted[3 + BIAS], backend=ctx.backend)
        dq, dk, dv, dq_rope, dk_rope, dbias, dsink = grads
        inputs = (dq, dk, dv, dq_rope, dk_rope, dbias, None, None, None, dsink)
        return None, None, *(g if need else None for g, need in zip(inputs, wanted, strict=True))

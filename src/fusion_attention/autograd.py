"""The operators that torch sees: attn_fwd and attn_bwd, for eager mode, autograd and tracing alike.

They take the caller's tensors as they lie, lengths as one int64 tensor on the host, and Problem and Form as one line
of text each (parsed once). Faces call attention() and attention_backward() with a lowered Call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from fusion_attention.lower import LAYOUTS, Call, Form, matrix_view, operands_of, row_shape, row_view, stats_shape, uncovered
from fusion_attention.plan import plan
from fusion_attention.problem import Extents, Grads, Problem, from_text

Tensors = tuple[torch.Tensor, ...]
Extras = list[torch.Tensor | None]

_LIBRARY = torch.library.Library("fusion_attention", "DEF")
_LIBRARY.define(
    "attn_fwd(Tensor q, Tensor k, Tensor v, Tensor?[] extras, Tensor extents, SymInt seed, SymInt offset, "
    "str problem, str form, str backend) -> (Tensor out, Tensor max, Tensor sum)"
)
_LIBRARY.define(
    "attn_bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor?[] extras, Tensor out, Tensor max, Tensor sum, "
    "Tensor extents, SymInt seed, SymInt offset, str problem, str form, str backend, bool dbias) -> "
    "(Tensor dq, Tensor dk, Tensor dv, Tensor dq_rope, Tensor dk_rope, Tensor dbias, Tensor dsink)"
)


def attention(call: Call, backend: str = "auto") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, max, sum) of a lowered call, differentiable in q, k, v, rope tensors, bias and sink."""
    return torch.ops.fusion_attention.attn_fwd(
        call.q,
        call.k,
        call.v,
        list(call.extras),
        call.extents.to_tensor(),
        call.seed,
        call.offset,
        str(call.problem),
        str(call.form),
        backend,
    )


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
    return torch.ops.fusion_attention.attn_bwd(
        dout,
        call.q,
        call.k,
        call.v,
        list(call.extras),
        out,
        *stats,
        call.extents.to_tensor(),
        call.seed,
        call.offset,
        str(call.problem),
        str(call.form),
        backend,
        dbias,
    )


def _outputs(q: torch.Tensor, problem: Problem, form: Form) -> Tensors:
    """Uninitialised out, max and sum."""
    out = q.new_empty(row_shape(q, form.layout, problem.heads_q, problem.dim_v))
    shape = stats_shape(q, form, problem.heads_q)
    stats = torch.float64 if q.dtype == torch.float64 else torch.float32
    return out, q.new_empty(shape, dtype=stats), q.new_empty(shape, dtype=stats)


def _gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extras: Extras, dbias: bool) -> list[torch.Tensor]:
    """Uninitialised dq, dk, dv, dq_rope, dk_rope, dbias (as stored, in the bias's dtype), dsink; empty if absent."""
    q_rope, k_rope, bias, _, _, _, sink = extras
    present = (q, k, v, q_rope, k_rope, bias if dbias else None, sink)
    return [q.new_empty(0) if t is None else t.new_empty(t.shape) for t in present]


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    extras: Extras,
    extents: torch.Tensor,
    seed: int,
    offset: int,
    problem: str,
    form: str,
    backend: str,
) -> Tensors:
    parsed = from_text(Problem, problem)
    call = Call(parsed, Form.parse(form), Extents.from_tensor(extents), q, k, v, tuple(extras), seed, offset)
    out, max_, sum_ = _outputs(q, parsed, call.form)
    if uncovered(call, "q"):
        for tensor in (out, max_, sum_):
            tensor.zero_()
    if len(call.extents):
        chosen = plan(parsed, call.extents, q.device, backend)
        chosen.run(operands_of(call, out, max_, sum_))
    return out, max_, sum_


def _backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    extras: Extras,
    out: torch.Tensor,
    max_: torch.Tensor,
    sum_: torch.Tensor,
    extents: torch.Tensor,
    seed: int,
    offset: int,
    problem: str,
    form: str,
    backend: str,
    dbias: bool,
) -> Tensors:
    p, f = from_text(Problem, problem), Form.parse(form)
    call = Call(p, f, Extents.from_tensor(extents), q, k, v, tuple(extras), seed, offset)
    dq, dk, dv, dq_rope, dk_rope, bias_gradient, dsink = gradients = _gradients(q, k, v, extras, dbias)
    for side, tensors in (("q", (dq, dq_rope)), ("kv", (dk, dv, dk_rope))):
        if uncovered(call, side):
            for tensor in tensors:
                tensor.zero_()
    dsink.zero_()
    # Sequences and broadcast axes add up: in the bias's own dtype the sum would lose bits.
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    bias_sum = torch.zeros_like(bias_gradient, dtype=wide, memory_format=torch.contiguous_format)
    e = call.extents
    if len(e):
        rows = {"layout": f.layout, "heads": p.heads_q, "start": e.q_start}
        keys = {"layout": f.layout, "heads": p.heads_kv, "start": e.kv_start}
        grads = Grads(
            dout=row_view(dout, **rows),
            dq=row_view(dq, **rows),
            dk=row_view(dk, **keys),
            dv=row_view(dv, **keys),
            dq_rope=row_view(dq_rope, **rows) if p.dim_rope else None,
            dk_rope=row_view(dk_rope, **keys) if p.dim_rope else None,
            dbias=matrix_view(bias_sum, f.bias, p.heads_q, e) if dbias else None,
            dsink=dsink if p.has_sink else None,
        )
        plan(p, e, q.device, backend, backward=True).run(operands_of(call, out, max_, sum_), grads)
    bias_gradient.copy_(bias_sum)
    return tuple(gradients)


def _forward_meta(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extras: Extras, *rest: Any) -> Tensors:
    problem, form = rest[3], rest[4]
    return _outputs(q, from_text(Problem, problem), Form.parse(form))


def _backward_meta(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extras: Extras, *rest: Any
) -> Tensors:
    return tuple(_gradients(q, k, v, extras, rest[-1]))


class _Attention(torch.autograd.Function):
    """attn_fwd with attn_bwd as its derivative; statistics are returned, not differentiated."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, rest: tuple[Any, ...], *extras: Any) -> Tensors:  # type: ignore[override]
        with torch._C._AutoDispatchBelowAutograd():
            out, max_, sum_ = torch.ops.fusion_attention.attn_fwd(q, k, v, list(extras), *rest)
        ctx.save_for_backward(q, k, v, out, max_, sum_, *extras)
        ctx.rest = rest
        ctx.mark_non_differentiable(max_, sum_)
        ctx.set_materialize_grads(False)
        return out, max_, sum_

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Any, *_: Any) -> Any:
        extras = ctx.needs_input_grad[4:]
        if dout is None:
            return (None,) * (4 + len(extras))
        q, k, v, out, max_, sum_, *tensors = ctx.saved_tensors
        grads = torch.ops.fusion_attention.attn_bwd(
            dout, q, k, v, tensors, out, max_, sum_, *ctx.rest, ctx.needs_input_grad[4 + 2]
        )
        dq, dk, dv, dq_rope, dk_rope, dbias, dsink = grads
        wanted = (dq_rope, dk_rope, dbias, None, None, None, dsink)
        return dq, dk, dv, None, *(g if need else None for g, need in zip(wanted, extras, strict=True))


def _forward_autograd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extras: Extras, *rest: Any) -> Any:
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, k, v, *extras)):
        return _Attention.apply(q, k, v, rest, *extras)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.fusion_attention.attn_fwd(q, k, v, extras, *rest)


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("attn_fwd", _forward, _key)
    _LIBRARY.impl("attn_bwd", _backward, _key)
_LIBRARY.impl("attn_fwd", _forward_meta, "Meta")
_LIBRARY.impl("attn_bwd", _backward_meta, "Meta")
_LIBRARY.impl("attn_fwd", _forward_autograd, "Autograd")

"""Dense attention and its gradient as two operators that torch sees in a trace, under transforms and modes.

They take the text form of a call (text.py). Beside traced.py, as dense_eager.py beside eager.py, which says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd.function import _SingleLevelFunction

from fusion_attention.contract import Attr, Op, intact
from fusion_attention.memory import empty
from fusion_attention.ops.shared.layouts import LAYOUTS, row_shape
from fusion_attention.ops.training import fa_record as attention
from fusion_attention.ops.training import lower
from fusion_attention.ops.training.call import DenseCall
from fusion_attention.ops.training.statistics import LANES, finite, from_finite
from fusion_attention.torch_ops import dense_eager
from fusion_attention.torch_ops.autograd_guards import below, no_tangents
from fusion_attention.torch_ops.registration import register
from fusion_attention.torch_ops.serialize import CALL, SAVED, Given, Text, bound, check, names_of, pack, read, unpack

Tensors = tuple[torch.Tensor, ...]


def _lowered(text: Text, args: dict[str, Any], seed: torch.Tensor | None) -> DenseCall:
    """The checked and lowered call; a seed that was drawn for it comes as a tensor."""
    op = text.op
    if op is attention.RECORD:
        drawn = args.get("seed") if seed is None else int(seed)
        return attention.dense_call(bound(text, args), seed=int(drawn or 0))
    if seed is not None:
        args = {**args, "seed": int(seed)}
    return lower.dense_call(bound(text, args), **{name: int(args.get(name) or 0) for name in ("seed", "offset")})


# ----------------------------------------------------------------------------------------------------------- operators


def _forward(
    tensors: Given, arrays: Given, ints: Any, floats: Any, seed: torch.Tensor | None, call: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    text = read(call)
    lowered = _lowered(text, unpack(tensors, arrays, ints, floats, text), seed)
    with torch.no_grad():
        out, max_, sum_ = dense_eager.attention(lowered, text.backend)
        return (out, max_, sum_) if text.op is attention.RECORD else (out, *finite(lowered, max_, sum_))


def _backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    out: torch.Tensor,
    max_: torch.Tensor,
    sum_: torch.Tensor,
    tensors: Given,
    arrays: Given,
    ints: Any,
    floats: Any,
    seed: torch.Tensor | None,
    call: str,
    dbias: bool,
) -> list[torch.Tensor]:
    text = read(call)
    names = ("dout", "dlse", "out", "max", "sum", "seed")
    intact(f"{text.op.name}, backward", names, (dout, dlse, out, max_, sum_, seed))
    args = unpack(tensors, arrays, ints, floats, text)
    lanes = (t.unsqueeze(-1).expand(*t.shape, LANES) for t in (max_, sum_))
    if SAVED[0] in text.op.by_name:
        args |= dict(zip(SAVED, (dout, out, *lanes), strict=True))
    lowered = _lowered(text, args, seed)
    stats = (max_, sum_) if text.op is attention.RECORD else from_finite(lowered, max_, sum_)
    with torch.no_grad():
        *grads, dsink = dense_eager.attention_backward(
            lowered, dout, out, stats, dlse=dlse, dbias=dbias, backend=text.backend
        )
    sink = args.get("sink")
    return [*grads, dsink if sink is None else dsink.to(sink.dtype)]  # it may have come in fewer bits


def _heads(op: Op, args: Mapping[str, Any], q: torch.Tensor, layout: str) -> Any:
    head = LAYOUTS[layout][2]
    if head is not None:
        return q.shape[head]
    return next(args[p.name] for p in op.params if isinstance(p, Attr) and p.axis == "N1")


def _forward_fake(tensors: Given, arrays: Given, ints: Any, floats: Any, seed: Any, call: str) -> Tensors:
    text = read(call)
    args = unpack(tensors, arrays, ints, floats, text)
    check(text, args, arrays)
    q, k, v = (t for t in tensors[:3] if t is not None)
    layout = args.get(text.op.layout_attr, text.op.layouts[0])
    heads = _heads(text.op, args, q, layout)
    batch, token, head = LAYOUTS[layout]
    dim_v = v.shape[-1] if head is not None else v.shape[-1] // (k.shape[-1] // (q.shape[-1] // heads))
    out = empty(q, row_shape(q, layout, heads, dim_v))
    shape = (q.shape[0], heads) if batch is None else (q.shape[batch], heads, q.shape[token])
    stats = torch.float64 if q.dtype == torch.float64 else torch.float32
    return out, empty(q, shape, stats), empty(q, shape, stats)


def _backward_fake(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    out: torch.Tensor,
    max_: torch.Tensor,
    sum_: torch.Tensor,
    tensors: Given,
    *rest: Any,
) -> list[torch.Tensor]:
    *_, call, dbias = rest
    names = names_of(read(call).op.name).tensors
    own = attention.RECORD.name == read(call).op.name
    slots = ("q_rope", "k_rope", "bias") if own else ("query_rope", "key_rope", "pse")
    given = dict(zip(names, tensors, strict=True))
    present = [*tensors[:3], *(given.get(name) for name in slots[:2]), given.get(slots[2]) if dbias else None]
    present.append(given.get("sink"))
    return [dout.new_empty(0) if t is None else empty(t, t.shape) for t in present]


class _Differentiable(_SingleLevelFunction):
    """attn_fwd with attn_bwd as its derivative.

    Of one level: torch.func brings the level itself.
    """

    @staticmethod
    def forward(ctx: Any, rest: tuple[Any, ...], places: tuple[int, ...], *tensors: Any) -> Tensors:
        with below():
            results = torch.ops.fusion_attention.attn_fwd(list(tensors), *rest)
        arrays, ints, floats, seed, call = rest
        ctx.save_for_backward(*results, seed, *tensors, *arrays)
        ctx.rest, ctx.count, ctx.places = (ints, floats, call), len(tensors), places
        # Of our own function max + log(sum) has the gradient of max.
        ctx.mark_non_differentiable(*results[2 if read(call).op is attention.RECORD else 1 :])
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any, _: Any) -> Any:
        wanted = ctx.needs_input_grad[2:]
        gradients: list[Any] = [None] * len(wanted)
        if dout is not None or dlse is not None:
            out, max_, sum_, seed, *saved = ctx.saved_tensors
            dout = torch.zeros_like(out) if dout is None else dout
            tensors, arrays = saved[: ctx.count], saved[ctx.count :]
            ints, floats, call = ctx.rest
            *_, bias, _ = ctx.places
            grads = torch.ops.fusion_attention.attn_bwd(
                dout, dlse, out, max_, sum_, tensors, arrays, ints, floats, seed, call, bias >= 0 and wanted[bias]
            )
            for place, gradient in zip(ctx.places, grads, strict=True):
                if place >= 0 and wanted[place]:
                    gradients[place] = gradient
        return None, None, *gradients


def _places(op: Op, args: Mapping[str, Any]) -> tuple[int, ...]:
    """Where the tensors of the seven gradients stand among the record's; -1 where it has none."""
    names = names_of(op.name).tensors
    slots = ("q", "k", "v", "q_rope", "k_rope", "bias", "sink")
    if op is not attention.RECORD:
        pse = "pse" if args.get("pse_type", 1) in (0, 1) else ""  # slopes have no gradient
        slots = ("query", "key", "value", "query_rope", "key_rope", pse, "sink")
    return tuple(names.index(name) if name in names else -1 for name in slots)


def _forward_autograd(
    tensors: Given, arrays: Given, ints: Any, floats: Any, seed: torch.Tensor | None, call: str
) -> Any:
    no_tangents(tensors)
    rest = (arrays, ints, floats, seed, call)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        text = read(call)
        places = _places(text.op, unpack(tensors, arrays, ints, floats, text))
        with enable_single_level_autograd_function():
            return _Differentiable.apply(rest, places, *tensors)  # type: ignore[attr-defined]
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.fusion_attention.attn_fwd(tensors, *rest)


_CALL = CALL.format(seed="Tensor? seed, ")
register(f"attn_fwd({_CALL}) -> (Tensor out, Tensor max, Tensor sum)", _forward, _forward_fake, _forward_autograd)
register(
    f"attn_bwd(Tensor dout, Tensor? dlse, Tensor out, Tensor max, Tensor sum, {_CALL}, bool dbias) -> Tensor[]",
    _backward,
    _backward_fake,
)


# ----------------------------------------------------------------------------------------------------------- interfaces


def forward(
    op: Op, args: Mapping[str, Any], *, seed: torch.Tensor | None = None, backend: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, max, sum) of a forward record's call by canonical name; attention's statistics are the kernels', the
    others' finite, one lane."""
    out, max_, sum_ = torch.ops.fusion_attention.attn_fwd(*pack(op.name, args, seed, backend))
    return out, max_, sum_


def backward(op: Op, args: Mapping[str, Any], *, seed: torch.Tensor | None, dbias: bool) -> Tensors:
    """(dq, dk, dv, dq_rope, dk_rope, dbias, dsink) of a gradient record's call by canonical name."""
    dy, out, max_, sum_ = (args[name] for name in SAVED)
    packed = pack(op.name, args, seed)
    return tuple(torch.ops.fusion_attention.attn_bwd(dy, None, out, max_[..., 0], sum_[..., 0], *packed, dbias))

"""What the functions of training.py do with their arguments: bind, lower and run, at once or in a trace.

Captures put their own in the place of forward() and backward() while they record, so look both up in this module.
"""

from __future__ import annotations

from typing import Any

import torch

from fusion_attention.contract import Attr, Op, bind, intact
from fusion_attention.ir.dropout import draw_pair, draw_seed_tensor
from fusion_attention.npu.dropout import glance_at_mask
from fusion_attention.ops.training.call import BIAS
from fusion_attention.ops.training.lower import dense_call
from fusion_attention.ops.training.statistics import LANES, from_lanes, to_lanes
from fusion_attention.torch_ops import dense_eager, dense_traced, dispatch

Tensor = torch.Tensor
_CAST = ("query", "key", "value", "query_rope", "key_rope", "pse")


def forward(op: Op, args: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor, Any, Any, Any]:
    """(attention_out, softmax_max, softmax_sum, softmax_out, seed, offset, numels) of a forward call."""
    kind = args.get("pse_type", 1)
    dispatch.autocast(args, _CAST[:-1] if isinstance(kind, int) and kind in (2, 3) else _CAST)
    if dispatch.is_traced(args.values()):
        return _traced_forward(op, args)
    with torch._C.DisableTorchFunction():  # Modes have seen the call; what it takes inside is not theirs.
        bound = bind(op, args)
        seed, offset = bound["seed"], bound["offset"]
        drops = bound["keep_prob"] < 1
        drawn = drops and bound["drop_mask"] is None
        if drawn and not seed and not offset:
            seed, offset = draw_pair()
        call = dense_call(bound, seed=seed, offset=offset)
        if drops and not drawn and (seed or offset):
            glance_at_mask(op.name, call)
        out, max_, sum_ = dense_eager.attention(call)
        numels = call.problem.heads_q * call.extents.scores
        lanes = to_lanes(call, max_, sum_)
        return out, *lanes, out.new_empty(0), seed if drops else 0, offset if drops else 0, numels


def _traced_forward(op: Op, args: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor, Any, Any, Any]:
    """forward() in a trace: a drawn seed is a tensor without dimensions, drawn when the trace runs; numels is 0."""
    seed: Any = args.get("seed") or 0
    offset = args.get("offset") or 0
    drops = dispatch.drops(args["keep_prob"])
    drawn = drops and args.get("drop_mask") is None and not seed and not offset
    tensor = draw_seed_tensor() if drawn else None
    out, max_, sum_ = dense_traced.forward(op, args, seed=tensor)
    top, total = (t.unsqueeze(-1).expand(*t.shape, LANES).contiguous() for t in (max_, sum_))
    seed = seed if tensor is None else tensor
    empty = torch.empty(0, dtype=out.dtype, device=out.device)
    return out, top, total, empty, seed if drops else 0, offset if drops else 0, 0


def backward(op: Op, args: dict[str, Any]) -> tuple[Tensor, ...]:
    """(dq, dk, dv, dq_rope, dk_rope, dpse, dsink) of a gradient call."""
    for name in ("seed", "offset"):
        if not isinstance(op.by_name[name], Attr) and isinstance(args[name], Tensor) and args[name].dim() == 0:
            args[name] = args[name].reshape(1)  # a number; a tensor of no elements is absent
    if dispatch.is_traced(args.values()):
        return _traced_backward(op, args)
    with torch._C.DisableTorchFunction(), torch.no_grad():
        seed = args["seed"]
        if (
            isinstance(op.by_name["seed"], Attr)
            and isinstance(seed, Tensor)
            and seed.dtype == torch.int64
            and seed.dim() == 0
        ):
            intact(op.name, ("seed",), (seed,))
            args["seed"] = seed.item()  # as a traced forward returned it
        bound = bind(op, args)
        call = dense_call(bound, **{name: _number(bound[name]) for name in ("seed", "offset")})
        stats = from_lanes(call, bound["softmax_max"], bound["softmax_sum"])
        dbias = call.extras[BIAS] is not None
        grads = dense_eager.attention_backward(call, bound["dy"], bound["attention_in"], stats, dbias=dbias)
        return _with_slopes(grads, bound["pse"], dbias)


def _traced_backward(op: Op, args: dict[str, Any]) -> tuple[Tensor, ...]:
    """backward() in a trace."""
    drawn = None
    if isinstance(op.by_name["seed"], Attr) and isinstance(args["seed"], Tensor):
        drawn, args["seed"] = args["seed"], 0
    dbias = args["pse"] is not None and args.get("pse_type", 1) in (0, 1)
    return _with_slopes(dense_traced.backward(op, args, seed=drawn, dbias=dbias), args["pse"], dbias)


def _number(value: int | Tensor | None) -> int:
    """A seed or an offset, which npu_fusion_attention_v3 has as tensors; on the meta device they have no value."""
    return 0 if value is None or (isinstance(value, Tensor) and value.is_meta) else int(value)


def _with_slopes(grads: tuple[Tensor, ...], pse: Tensor | None, dbias: bool) -> tuple[Tensor, ...]:
    """Gradients with zeros for a pse that is slopes, which have none."""
    return grads if pse is None or dbias else (*grads[:5], torch.zeros_like(pse), grads[6])

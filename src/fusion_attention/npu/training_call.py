"""Runs calls of torch_npu's training attention, eagerly or in a trace.

capture() replaces forward() and backward() of this module while it saves calls, so callers must look them up here at
each call.
"""

from typing import Any

import torch

from fusion_attention.contract import Attr, Op, bind, intact
from fusion_attention.ir.dropout import draw_pair, draw_seed_tensor
from fusion_attention.npu.dropout import glance_at_mask
from fusion_attention.ops.training.lower import dense_call, results_call
from fusion_attention.ops.training.statistics import to_lanes
from fusion_attention.torch_ops import dispatch, eager, traced

Tensor = torch.Tensor
_CAST = ("query", "key", "value", "query_rope", "key_rope", "pse")


def forward(op: Op, args: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor, Any, Any, Any]:
    """Returns (attention_out, softmax_max, softmax_sum, softmax_out, seed, offset, numels) of a forward call of `op`;
    softmax_out is empty, numels the number of elements of the dropout mask. args: the arguments by name."""
    kind = args.get("pse_type", 1)
    dispatch.autocast(args, _CAST[:-1] if isinstance(kind, int) and kind in (2, 3) else _CAST)
    if dispatch.is_traced(args.values()):
        return _traced_forward(op, args)
    with torch._C.DisableTorchFunction():  # TorchFunctionModes handled this call; internal calls are hidden from them
        bound = bind(op, args)
        given = bound.args
        seed, offset, drops = given.get("seed") or 0, given.get("offset") or 0, dispatch.drops(given["keep_prob"])
        drawn = drops and given.get("drop_mask") is None
        if drawn and not seed and not offset:
            seed, offset = draw_pair()
        if drops and not drawn and (seed or offset):
            glance_at_mask(op.name, dense_call(bound))
        out, max_, sum_ = eager.results(bound, complete=True, seed=seed, offset=offset, lanes=False).values()
        shown = results_call(bound, out)
        lanes = to_lanes(shown, max_, sum_)
        numels = shown.problem.heads_q * shown.extents.scores
        return out, *lanes, out.new_empty(0), seed if drops else 0, offset if drops else 0, numels


def _traced_forward(op: Op, args: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor, Any, Any, Any]:
    """Returns (attention_out, softmax_max, softmax_sum, softmax_out, seed, offset, numels) of forward() in a trace: a
    seed that must be drawn is a tensor [], drawn when the graph runs; numels is 0. args: the arguments by name."""
    seed, offset = args.get("seed") or 0, args.get("offset") or 0
    drops = dispatch.drops(args["keep_prob"])
    drawn = None
    if drops and args.get("drop_mask") is None and not seed and not offset:
        drawn = seed = draw_seed_tensor()
    out, max_, sum_ = traced.results(op, args, seed=drawn).values()
    empty = torch.empty(0, dtype=out.dtype, device=out.device)
    return out, max_, sum_, empty, seed if drops else 0, offset if drops else 0, 0


def backward(op: Op, args: dict[str, Any]) -> tuple[Tensor, ...]:
    """Returns (dq, dk, dv, dq_rope, dk_rope, dpse, dsink), the results of a gradient operator `op`, empty for absent
    inputs; pse is a bias of scores. args: the arguments by name."""
    seed = args["seed"]
    returned = isinstance(op.by_name["seed"], Attr) and isinstance(seed, Tensor)  # by a traced forward
    if dispatch.is_traced(args.values()):
        drawn = seed if returned else None
        return tuple(traced.results(op, args | {"seed": 0} if returned else args, seed=drawn).values())
    with torch._C.DisableTorchFunction(), torch.no_grad():
        if returned and seed.dtype == torch.int64 and seed.dim() == 0:
            intact(op.name, ("seed",), (seed,))
            args["seed"] = seed.item()
        result = eager.results(bind(op, args))
        return tuple(result[name] if name in result else args["query"].new_empty(0) for name in op.results)

"""The entry of our own dense attention: eager, or as an operator in a trace."""

from __future__ import annotations

from typing import Any

import torch

from fusion_attention.contract import bind
from fusion_attention.ir.dropout import draw_seed, draw_seed_tensor
from fusion_attention.ops.training import fa_record as record
from fusion_attention.torch_ops import dispatch, eager, traced

Tensor = torch.Tensor
_CAST = ("q", "k", "v", "q_rope", "k_rope", "bias")


def forward(args: dict[str, Any], backend: str, *, stats: bool) -> tuple[Tensor, Any, Any]:
    """(out, max, sum) of a call by canonical name; perhaps without the last two if they are not asked for.

    Captures put their own in its place while they record.
    """
    dispatch.autocast(args, _CAST)
    drawn = dispatch.drops(args["keep_prob"]) and args["drop_bits"] is None and args["seed"] is None
    if dispatch.is_traced(args.values()):  # then a seed is drawn when the trace runs
        result = traced.results(record.RECORD, args, backend, draw_seed_tensor() if drawn else None)
    else:
        with torch._C.DisableTorchFunction():  # Modes have seen the call; what it takes inside is not theirs.
            bound = bind(record.RECORD, args)
            result = eager.results(bound, backend, complete=stats, **({"seed": draw_seed()} if drawn else {}))
    return result["out"], result.get("max"), result.get("sum")

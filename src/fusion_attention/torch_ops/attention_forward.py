"""Entry point of this library's attention(), in eager mode or as a registered operator in a trace."""

from typing import Any

import torch

from fusion_attention.contract import bind
from fusion_attention.ir.dropout import draw_seed, draw_seed_tensor
from fusion_attention.ops.training import api_definition as record
from fusion_attention.torch_ops import dispatch, eager, traced

Tensor = torch.Tensor
_CAST = ("q", "k", "v", "q_rope", "k_rope", "bias")


def forward(args: dict[str, Any], backend: str, *, stats: bool) -> tuple[Tensor, Any, Any]:
    """Runs attention() on a back end, with arguments by name; returns (out, max, sum). stats: max and sum are needed;
    if False they may be None. capture(), which records calls to a file, replaces this function meanwhile."""
    dispatch.autocast(args, _CAST)
    drawn = dispatch.drops(args["keep_prob"]) and args["drop_bits"] is None and args["seed"] is None
    if dispatch.is_traced(args.values()):  # The seed is then drawn at every run of the trace.
        result = traced.results(record.RECORD, args, backend, draw_seed_tensor() if drawn else None)
    else:
        with torch._C.DisableTorchFunction():  # Function modes have seen this call; its internal calls are hidden.
            bound = bind(record.RECORD, args)
            result = eager.results(bound, backend, complete=stats, **({"seed": draw_seed()} if drawn else {}))
    return result["out"], result.get("max"), result.get("sum")

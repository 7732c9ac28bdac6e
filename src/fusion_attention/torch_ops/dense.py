"""The entry of our own dense attention: eager, or as an operator in a trace."""

from __future__ import annotations

from typing import Any

import torch

from fusion_attention.contract import bind
from fusion_attention.ir.dropout import draw_seed, draw_seed_tensor
from fusion_attention.ops.training import fa_record as record
from fusion_attention.torch_ops import dense_eager, dense_traced, dispatch

Tensor = torch.Tensor
_CAST = ("q", "k", "v", "q_rope", "k_rope", "bias")


def forward(args: dict[str, Any], backend: str, *, stats: bool) -> tuple[Tensor, Any, Any]:
    """(out, max, sum) of a call by canonical name; perhaps without the last two if they are not asked for.

    Captures put their own in its place while they record.
    """
    dispatch.autocast(args, _CAST)
    if dispatch.is_traced(args.values()):
        return _traced_forward(args, backend)
    with torch._C.DisableTorchFunction():  # Modes have seen the call; what it takes inside is not theirs.
        bound = bind(record.RECORD, args)
        known: tuple[Tensor, Any, Any] | None = dense_eager.again(
            bound, backend, args["q"], args["k"], args["v"], stats=stats
        )
        if known is not None:
            return known
        seed = bound["seed"]
        drawn = bound["keep_prob"] < 1 and args["drop_bits"] is None
        call = record.dense_call(bound, seed=(draw_seed() if seed is None else seed) if drawn else 0)
        return dense_eager.attention(call, backend, stats=stats, smooth=stats)


def _traced_forward(args: dict[str, Any], backend: str) -> tuple[Tensor, Tensor, Tensor]:
    """forward() in a trace: a seed is drawn when the trace runs."""
    drawn = dispatch.drops(args["keep_prob"]) and args["drop_bits"] is None and args["seed"] is None
    return dense_traced.forward(record.RECORD, args, seed=draw_seed_tensor() if drawn else None, backend=backend)

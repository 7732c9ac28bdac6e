"""Calls of BlockSparseAttention as back ends compute them: dense attention whose only statistic is softmax_lse."""

from collections.abc import Collection, Mapping
from typing import Any

import torch

from fusion_attention.contract import Bound, dtype_text
from fusion_attention.ir.call import Filled, buffer
from fusion_attention.ir.mask import Band
from fusion_attention.ir.problem import Extents, Problem
from fusion_attention.memory import empty
from fusion_attention.ops.shared.layouts import Form
from fusion_attention.ops.training.forward_backward import DenseBackward, DenseForward
from fusion_attention.ops.training.lowered_call import EXTRAS, DenseCall, fresh, operands_of, statistics

Tensor = torch.Tensor
OUT, LSE = "attention_out", "softmax_lse"
MASK = "block_mask"
_NAMES = ("query", "key", "value", *(MASK if name == "blocked_tiles" else "" for name in EXTRAS))


class BlockForward(DenseForward):
    """A forward call of BlockSparseAttention for back ends; softmax_lse: log(sum(exp(s))), -inf without keys."""

    def results(self) -> dict[str, Tensor]:
        out, lse, _ = fresh(self.call)
        return {OUT: out, LSE: empty(lse, by_row(lse, self.call).shape, lse.dtype)}

    def fill(self, outputs: Mapping[str, Tensor]) -> Filled:
        call, lse = self.call, outputs.get(LSE)
        buffers = buffer(outputs[OUT]), *statistics(call)

        def convert() -> None:
            if lse is not None:
                _, max_, sum_ = buffers
                lse.copy_(by_row(max_ + sum_.log(), call))

        clears = () if call.covers("q") else buffers
        return Filled((operands_of(call, *buffers),), buffers, (outputs[OUT],), clears, convert=convert)

    def backward(
        self, results: Mapping[str, Tensor], upstream: Mapping[str, Tensor], wanted: Collection[str] | None = None
    ) -> DenseBackward:
        """Returns the object by which back ends compute gradients, from the forward's results and the results'
        gradients (`upstream`); `wanted` is ignored."""
        out, lse, dout, dlse = results[OUT], results[LSE], upstream.get(OUT), upstream.get(LSE)
        dlse = None if dlse is None else by_head(dlse, self.call)
        return BlockBackward(self.call, torch.zeros_like(out) if dout is None else dout, out, lse, dlse)


class BlockBackward(DenseBackward):
    """A gradient call of BlockSparseAttention for back ends, from the forward's output and softmax_lse."""

    def __init__(self, call: DenseCall, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None = None) -> None:
        super().__init__(call, (dout, out, lse, lse), None, dlse)

    def kernel_statistics(self, max_: Tensor, sum_: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (max, sum) that kernels read for probabilities exp(s - max) / sum: softmax_lse (passed as max_) and
        1, or -inf and 0 in a row without visible keys; [.., heads, rows]."""
        lse = by_head(max_, self.call)
        return lse, lse > -torch.inf


def by_row(statistic: Tensor, call: DenseCall) -> Tensor:
    """Returns a view of a statistic [.., heads, rows] in the order of out's axes, with a last axis of 1."""
    return (statistic.mT if call.form.layout == "BSND" else statistic).unsqueeze(-1)


def by_head(lse: Tensor, call: DenseCall) -> Tensor:
    """Returns a view of lse in the kernels' order [.., heads, rows]; its last axis of 1 may be missing."""
    lse = lse.squeeze(-1) if lse.dim() == call.q.dim() else lse
    return lse.mT if call.form.layout == "BSND" else lse


def lower(bound: Bound) -> BlockForward | BlockBackward:
    """Converts `bound`, the checked arguments of a forward or gradient call, to an object that back ends compute."""
    n = bound.names
    problem, form, extents = bound.once(_without_tensors)
    extras = tuple(n[MASK] if name == "blocked_tiles" else None for name in EXTRAS)
    call = DenseCall(problem, form, extents, n["query"], n["key"], n["value"], extras, names=_NAMES)
    if "dy" not in bound.op.by_name:
        return BlockForward(call, (OUT, LSE))
    return BlockBackward(call, n["dy"], n["attention_in"], n[LSE])


def _without_tensors(n: Mapping[str, Any]) -> tuple[Problem, Form, Extents]:
    masked, on_host = n[MASK] is not None, n["query"].device.type == "cpu"
    problem = Problem(
        heads_q=n["N1"],
        heads_kv=n["N2"],
        dim_qk=n["D"],
        dim_v=n["D"],
        dtype=dtype_text(n["query"]),
        scale=float(n["scale_value"]),
        # Kernels for GPUs read no tiles.
        has_blocked=masked and not on_host,
        has_blocked_tiles=masked and on_host,
    )
    q_len, kv_len = n["q_len"], n["kv_len"]
    extents = Extents(q_len, kv_len, *Band.full().resolve(q_len, kv_len), q_len * 0)
    return problem, Form(n["layout"], block=n["block"]), extents

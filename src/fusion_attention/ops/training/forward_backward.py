"""Forward and gradient calls of training attention in the form that back ends compute, made from a DenseCall."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from fusion_attention.ir.call import Filled, Lowered, buffer
from fusion_attention.ir.problem import Operands
from fusion_attention.memory import empty
from fusion_attention.ops.shared.layouts import LAYOUTS, row_shape, stats_shape
from fusion_attention.ops.shared.lowered_call import OfCall
from fusion_attention.ops.training.lowered_call import (
    BIAS,
    EXTRAS,
    DenseCall,
    clear_gradients,
    fresh,
    grads_of,
    operands_of,
    statistics,
)
from fusion_attention.ops.training.statistics import LANES, from_lanes, to_lanes

Tensor = torch.Tensor
RESULTS = ("out", "max", "sum")
FORWARD = ("attention_out", "softmax_max", "softmax_sum")
# Gradients in the order of grads_of(), and the index in DenseCall.names of the input that each belongs to.
GRADIENTS = ("dq", "dk", "dv", "dq_rope", "dk_rope", "dpse", "dsink")
_INPUTS = (0, 1, 2, *(3 + EXTRAS.index(name) for name in ("q_rope", "k_rope", "bias", "sink")))
DPSE = GRADIENTS.index("dpse")


def fresh_forward(
    names: tuple[str, ...], q: Tensor, k: Tensor, v: Tensor, layout: str, heads: int | None, *lanes: int
) -> dict[str, Tensor]:
    """Allocates {name: tensor} of the output, softmax max and sum, with these names; sizes of q, k, v may be symbolic.
    heads: query heads, for layouts without a head axis; lanes: the size of an additional last axis of max and sum,
    along which CANN repeats them."""
    head = LAYOUTS[layout][2]
    heads = q.shape[head] if head is not None else heads or 1
    dim_v = v.shape[-1] if head is not None else v.shape[-1] // (k.shape[-1] // (q.shape[-1] // heads))
    shape = (*stats_shape(q, layout, heads), *lanes)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = empty(q, row_shape(q, layout, heads, dim_v))
    return dict(zip(names, (out, empty(q, shape, dtype), empty(q, shape, dtype)), strict=True))


def fresh_results(n: Mapping[str, Any]) -> dict[str, Tensor]:
    """Allocates {name: tensor}: attention_out, softmax_max, softmax_sum; n: arguments and derived values by name."""
    return fresh_forward(FORWARD, n["query"], n["key"], n["value"], n["input_layout"], n["head_num"], LANES)


def fresh_gradients(n: Mapping[str, Any]) -> dict[str, Tensor]:
    """Allocates {name: gradient} of each differentiable input that is not None; n: arguments by name."""
    return _like(n[name] for name in ("query", "key", "value", "query_rope", "key_rope", "pse", "sink"))


def _like(tensors: Iterable[Tensor | None]) -> dict[str, Tensor]:
    """Allocates {name: gradient} of tensors (query, key, ..., sink) in the order of GRADIENTS; None has no gradient."""
    return {name: empty(t, t.shape) for name, t in zip(GRADIENTS, tensors, strict=True) if t is not None}


class DenseForward(OfCall):
    """A forward call of dense attention, as back ends compute it, with a derivative.

    Args:
        call: tensors and parameters.
        names: names of the results: output, softmax max and sum.
        lanes: True: max and sum are finite and stored 8 times, [.., 8], as by CANN; False: in the kernels' format.
    """

    op_kind = "attention_forward"
    further = None

    def __init__(self, call: DenseCall, names: tuple[str, ...] = RESULTS, *, lanes: bool = False) -> None:
        super().__init__(call)
        self.names, self.lanes = names, lanes

    def results(self) -> dict[str, Tensor]:
        return dict(zip(self.names, fresh(self.call, *((LANES,) if self.lanes else ())), strict=True))

    def fill(self, outputs: Mapping[str, Tensor]) -> Filled:
        call, (out, *lanes) = self.call, (outputs[name] for name in self.names)
        written = (buffer(out), *statistics(call)) if self.lanes else (out, *lanes)
        convert = partial(to_lanes, call, *written[1:], *lanes) if self.lanes else None
        clears = () if call.covers("q") else written
        return Filled((operands_of(call, *written),), written, (out,), clears, convert=convert)

    @property
    def repeats(self) -> bool:
        """True if the kernels compute the complete call: no dropout is drawn, and every row is in a sequence."""
        return self.call.problem.dropout != "philox" and self.call.covers("q")

    def memory(self) -> dict[str, Tensor]:
        return dict(zip(RESULTS, fresh(self.call), strict=True))

    def operands(self, memory: Mapping[str, Tensor]) -> Operands:
        """Returns memory views of the input tensors and of `memory`, the tensors for output, softmax max and sum."""
        return operands_of(self.call, *memory.values())

    @property
    def inputs(self) -> Mapping[str, Tensor | None]:
        """The input tensors by parameter name; those that the operator does not have share the name ""."""
        c = self.call
        return dict(zip(c.names, (c.q, c.k, c.v, *c.extras), strict=True))

    def on(self, inputs: Mapping[str, Tensor | None]) -> DenseForward:
        c = self.call
        q, k, v, *extras = map(inputs.get, c.names)
        call = DenseCall(c.problem, c.form, c.extents, q, k, v, tuple(extras), c.seed, c.offset, c.names)  # type: ignore[arg-type]  # a call without memory has None
        return type(self)(call, self.names, lanes=self.lanes)

    def complete(self) -> DenseForward:
        return self

    def backward(
        self, results: Mapping[str, Tensor], upstream: Mapping[str, Tensor], wanted: Collection[str] | None = None
    ) -> DenseBackward:
        """Returns the gradient call, from {name: result} and {name: gradient of the result} (upstream).
        That of max is the gradient of max + log(sum). wanted: inputs whose gradients are needed; None: all."""
        out, max_, sum_ = (results[name] for name in self.names)
        dout, dlse = (upstream.get(name) for name in self.names[:2])
        dout = torch.zeros_like(out) if dout is None else dout
        bias = self.call.extras[BIAS] if wanted is None or self.call.names[3 + BIAS] in wanted else None
        return DenseBackward(self.call, (dout, out, max_, sum_), bias, dlse, lanes=self.lanes)

    def gradients(
        self,
        results: Mapping[str, Tensor],
        upstream: Mapping[str, Tensor],
        run: Callable[[Lowered], dict[str, Tensor]],
        wanted: Collection[str] | None = None,
    ) -> dict[str, Tensor]:
        gradients = run(self.backward(results, upstream, wanted))
        return {
            self.call.names[at]: gradients[name]
            for name, at in zip(GRADIENTS, _INPUTS, strict=True)
            if name in gradients
        }


class DenseBackward(OfCall):
    """A gradient call of dense attention, as back ends compute it.

    Args:
        call: the forward call.
        saved: (gradient of the output, output, softmax max, softmax sum).
        pse: the bias or the slopes, if their gradient is wanted.
        dlse: the gradient of max + log(sum), one number per row and head.
        lanes: True: max and sum have CANN's format, each number eight times, [..., 8].
    """

    op_kind = "attention_backward"

    def __init__(
        self,
        call: DenseCall,
        saved: tuple[Tensor, Tensor, Tensor, Tensor],
        pse: Tensor | None,
        dlse: Tensor | None = None,
        *,
        lanes: bool = True,
    ) -> None:
        super().__init__(call)
        self.saved, self.pse, self.dlse, self.lanes = saved, pse, dlse, lanes

    def results(self) -> dict[str, Tensor]:
        q_rope, k_rope, _, _, _, _, sink, *_ = self.call.extras
        return _like((self.call.q, self.call.k, self.call.v, q_rope, k_rope, self.pse, sink))

    def kernel_statistics(self, max_: Tensor, sum_: Tensor) -> tuple[Tensor, Tensor]:
        """Returns softmax (max, sum) in the kernels' format, one number per row and head, from CANN's, [..., 8]."""
        return from_lanes(self.call, max_, sum_)

    def fill(self, outputs: Mapping[str, Tensor]) -> Filled:
        call, (dy, attention_in, *saved) = self.call, self.saved
        targets = [outputs.get(name) for name in GRADIENTS]
        none = call.q.new_empty(0)
        gradients = tuple(none if t is None else buffer(t) for t in targets)
        slopes = targets[DPSE] if call.extras[BIAS] is None else None
        if slopes is not None:
            gradients = (*gradients[:DPSE], none, *gradients[DPSE + 1 :])
        # Views of statistics assume contiguous memory.
        stats = statistics(call) if self.lanes else tuple(t.contiguous() for t in saved)
        dlse = None if self.dlse is None else self.dlse.contiguous()
        grads, summed = grads_of(call, dy, gradients, dlse)
        buffers = [g for g, t in zip(gradients, targets, strict=True) if g is not t and g.numel()]
        buffers += [*(stats if self.lanes else ()), *([] if summed is None else [summed])]

        def prepare() -> None:
            if self.lanes:
                for tensor, value in zip(stats, self.kernel_statistics(*saved), strict=True):
                    tensor.copy_(value)
            clear_gradients(call, gradients, summed)

        def convert() -> None:
            if summed is not None:
                gradients[DPSE].copy_(summed)
            for target, gradient in zip(targets, gradients, strict=True):
                if target is not None and gradient.numel() and gradient is not target:
                    target.copy_(gradient)  # The back end cannot write this target: its rows are not contiguous.
            if slopes is not None:
                slopes.zero_()  # Slopes have no gradient.

        operands = operands_of(call, attention_in, *stats), grads
        return Filled(operands, tuple(buffers), prepare=prepare, convert=convert)

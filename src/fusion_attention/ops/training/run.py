"""Training attention as interfaces run it: a DenseCall and its outputs, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fusion_attention.ir.call import Filled, buffer
from fusion_attention.memory import another, empty, template
from fusion_attention.ops.shared.call import OfCall, over
from fusion_attention.ops.shared.layouts import stats_shape
from fusion_attention.ops.training.call import (
    BIAS,
    DenseCall,
    clear_gradients,
    fresh,
    grads_of,
    operands_of,
    pattern,
)
from fusion_attention.ops.training.statistics import LANES, from_lanes, write_lanes

Tensor = torch.Tensor
# The outputs of a gradient in the order of grads_of().
GRADIENTS = ("dq", "dk", "dv", "dq_rope", "dk_rope", "dpse", "dsink")
DPSE = GRADIENTS.index("dpse")


class DenseForward(OfCall):
    """A forward call whose statistics are finite, in eight lanes."""

    op_kind = "attention_forward"

    def results(self) -> dict[str, Tensor]:
        """attention_out, softmax_max, softmax_sum."""
        out, max_, sum_ = fresh(self.call, LANES)
        return {"attention_out": out, "softmax_max": max_, "softmax_sum": sum_}

    def fill(self, outputs: Mapping[str, Tensor]) -> Filled:
        """Views of the call's tensors; kernels write statistics without lanes, which are copied after a run."""
        return _ForwardRun(self, outputs)


class PlainForward(OfCall):
    """A forward call whose results are the kernels' own."""

    op_kind = "attention_forward"

    def results(self) -> dict[str, Tensor]:
        """out, max, sum."""
        return dict(zip(("out", "max", "sum"), fresh(self.call), strict=True))

    def fill(self, outputs: Mapping[str, Tensor]) -> Filled:
        """Views of the call's tensors and of fresh results."""
        given = outputs["out"], outputs["max"], outputs["sum"]
        return Filled((operands_of(self.call, *given),), clears=() if self.call.covers("q") else given)


class DenseBackward(OfCall):
    """A gradient call, from saved statistics in eight lanes; dlse: the gradient of max + log(sum), without lanes."""

    op_kind = "attention_backward"

    def __init__(
        self,
        call: DenseCall,
        saved: tuple[Tensor, Tensor, Tensor, Tensor],
        pse: Tensor | None,
        dlse: Tensor | None = None,
    ) -> None:
        super().__init__(call)
        self.saved, self.pse, self.dlse = saved, pse, dlse

    def results(self) -> dict[str, Tensor]:
        """The gradients of all that the call has."""
        q_rope, k_rope, _, _, _, _, sink, *_ = self.call.extras
        given = (self.call.q, self.call.k, self.call.v, q_rope, k_rope, self.pse, sink)
        return {name: empty(t, t.shape) for name, t in zip(GRADIENTS, given, strict=True) if t is not None}

    def fill(self, outputs: Mapping[str, Tensor]) -> Filled:
        """Views of the call's tensors, its saved results and its gradients."""
        return _BackwardRun(self, outputs)


class _ForwardRun(Filled):
    __slots__ = ("call", "lanes")

    def __init__(self, forward: DenseForward, outputs: Mapping[str, Tensor]) -> None:
        call, call_cache = forward.call, forward.call.call_cache
        assert call_cache is not None
        if call_cache.run is None:
            stats = template(call.q, stats_shape(call.q, call.form, call.problem.heads_q), torch.float32)
            call_cache.run = stats, not call.covers("q"), None
        stats, clears, rows = call_cache.run
        target, out = outputs["attention_out"], buffer(outputs["attention_out"])
        self.call, self.lanes = call, (outputs["softmax_max"], outputs["softmax_sum"])
        buffers = out, another(stats), another(stats)
        if rows is None:
            operands = operands_of(call, *buffers)
            if out is target:
                call_cache.run = stats, clears, pattern(call, operands)
        else:
            operands = over(rows, call.q, (call.k,), (call.v,), None, buffers)
        super().__init__((operands,), buffers, (target,), buffers if clears else ())

    def finish(self) -> None:
        super().finish()
        _, max_, sum_ = self.buffers
        write_lanes(self.call, max_, sum_, *self.lanes)


class _BackwardRun(Filled):
    __slots__ = ("call", "gradients", "saved", "slopes", "stats", "summed", "targets")

    def __init__(self, backward: DenseBackward, outputs: Mapping[str, Tensor]) -> None:
        call = self.call = backward.call
        dy, attention_in, *self.saved = backward.saved
        self.targets = [outputs.get(name) for name in GRADIENTS]
        self.slopes = self.targets[DPSE] is not None and call.extras[BIAS] is None
        none = call.q.new_empty(0)
        self.gradients = tuple(none if t is None else buffer(t) for t in self.targets)
        if self.slopes:
            self.gradients = (*self.gradients[:DPSE], none, *self.gradients[DPSE + 1 :])
        self.stats = fresh(call)[1:]
        grads, self.summed = grads_of(call, dy, self.gradients, backward.dlse)
        buffers = [g for g, t in zip(self.gradients, self.targets, strict=True) if g is not t and g.numel()]
        buffers += [*self.stats, *([] if self.summed is None else [self.summed])]
        super().__init__((operands_of(call, attention_in, *self.stats), grads), tuple(buffers))

    def begin(self) -> None:
        for tensor, value in zip(self.stats, from_lanes(self.call, *self.saved), strict=True):
            tensor.copy_(value)
        clear_gradients(self.call, self.gradients, self.summed)

    def finish(self) -> None:
        if self.summed is not None:
            self.gradients[DPSE].copy_(self.summed)
        for target, gradient in zip(self.targets, self.gradients, strict=True):
            if target is not None and gradient.numel() and gradient is not target:
                target.copy_(gradient)  # As for a forward call's output.
        if self.slopes:
            target = self.targets[DPSE]
            assert target is not None
            target.zero_()  # Slopes have no gradient.

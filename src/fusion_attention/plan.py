"""Plan: a computation on given lengths, with its back end and its division of work (schedule), ready to run; cached.

Planning may be slow, and its results are cached; Plan.run() only computes. backends/ selects the back end.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fusion_attention.backends import Backend, choose, load
from fusion_attention.ir.call import Lowered, tensors_in
from fusion_attention.ir.mask import INFINITE
from fusion_attention.ir.problem import AnyProblem, Extents
from fusion_attention.settings import chosen

_PLANS: OrderedDict[Any, Plan] = OrderedDict()
_PLANS_KEPT = 128
_PLANS_LOCK = threading.Lock()  # without it, a thread could remove a plan that another has just found


@dataclass(eq=False, slots=True)
class Plan:
    """A computation (such as attention) on given lengths, with its division of work, ready to run any number of times.

    Attributes:
        problem: the parameters of the computation: heads, sizes, dtypes, ...
        extents: lengths and bands of the sequences that run() computes.
        backend: the name of the selected back end.
        op_kind: the operation, which is the name of a function of the back end.
        schedule: the back end's division of the work, None or any object that its schedule() makes.
        module: the back end.
        capacity: the largest lengths of an updatable plan; None: update() raises.
    """

    problem: AnyProblem
    extents: Extents
    backend: str
    op_kind: str
    schedule: Any
    module: Backend
    capacity: _Capacity | None = None

    @property
    def workspace_bytes(self) -> int:
        """The number of bytes that run() allocates besides operands and results, for the planned lengths."""
        planned = self.capacity.extents if self.capacity else self.extents
        return self.module.workspace_bytes(self.problem, planned, self.op_kind)

    def update(self, kv_len: Any) -> None:
        """Sets other key lengths of the same sequences without a new plan, such as before each step of decoding.

            lo' = lo + kv_len - capacity,  hi' = hi + ratio * (kv_len - capacity)        (finite edges only)

        Finite edges of the bands (row i sees keys i + lo <= j < i + hi) keep their distance from the last key. `ratio`
        is an IndexerProblem's, else 1. The origin of ALiBi distances (extents.shift) does not change. Results have the
        bits of a new plan's, except on a GPU for few rows without a page table: there, they may differ by rounding.

        Args:
            kv_len: keys of each sequence, int64 [sequences] or a list; each from 0 to the planned length.

        Raises:
            ValueError: the plan was not made with updatable=True, the number of lengths is wrong, a length exceeds the
                capacity, or (on the CPU) the plan is running, in another thread or in the code that a signal handler
                interrupted. Nothing is changed then.
        """
        if self.capacity is None:
            raise ValueError("fusion_attention: Plan.update: expected a plan made with updatable=True")
        extents = self.capacity.shortened(kv_len)
        self.schedule = self.module.reschedule(self.problem, extents, self.op_kind, self.schedule)
        self.extents = extents

    def keep(self, operands: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns operands in a form that the back end reads faster; they must not change between runs."""
        return tuple(self.module.keep(each) or each for each in operands)

    def run(self, *operands: Any) -> None:
        """Runs the planned operation, which writes its results to tensors among the operands.

        Args:
            operands: its tensors, results included: ir.call.Operands for "attention_forward", Operands and Grads for
                "attention_backward", and for other operations those that fill() of a call returns (ir.call.Filled).
        """
        compute = getattr(self.module, self.op_kind)
        if torch._C._is_any_autocast_enabled():
            # Autocast would round float32 products inside back ends.
            with torch.autocast(next(tensors_in(operands)).device.type, enabled=False):
                compute(self.problem, self.extents, self.schedule, *operands)
        else:
            compute(self.problem, self.extents, self.schedule, *operands)


class _Capacity:
    """The largest lengths of an updatable plan, and the edges of its bands of visible keys that move with the last key.

    Attributes:
        extents: the longest lengths.
        ratio: tokens that a key represents.
        moves_lo, moves_hi: int64, 1 for each edge that moves and 0 for each infinite one; None: none moves.
    """

    def __init__(self, problem: AnyProblem, extents: Extents) -> None:
        self.extents, self.ratio = extents, getattr(problem, "ratio", 1)
        self.moves_lo, self.moves_hi = (
            edge if (edge := (np.abs(a) < INFINITE // 2).astype(np.int64)).any() else None
            for a in (extents.lo, extents.hi)
        )

    def shortened(self, kv_len: Any) -> Extents:
        """Returns Extents with other key lengths and with moved edges of bands; raises ValueError for wrong lengths."""
        planned = self.extents
        lengths = np.array(kv_len, np.int64)
        if lengths.shape != planned.kv_len.shape:
            raise ValueError(
                f"fusion_attention: Plan.update: kv_len: expected {len(planned)} lengths, got {lengths.shape}"
            )
        wrong = (lengths < 0) | (lengths > planned.kv_len)
        if wrong.any():
            b = int(wrong.argmax())
            raise ValueError(
                f"fusion_attention: Plan.update: kv_len[{b}]: expected 0 to {planned.kv_len[b]}, got {lengths[b]} "
                "(plan with more capacity)"
            )
        lo, hi = planned.lo, planned.hi
        if self.moves_lo is not None:
            lo = lo + (lengths - planned.kv_len) * self.moves_lo
        if self.moves_hi is not None:
            hi = hi + (lengths - planned.kv_len) * self.ratio * self.moves_hi
        return Extents(planned.q_len, lengths, lo, hi, planned.prefix, planned.shift)


def plan(
    problem: AnyProblem,
    extents: Extents,
    device: torch.device,
    backend: str = "auto",
    op_kind: str = "attention_forward",
    *,
    updatable: bool = False,
) -> Plan:
    """Returns a Plan (back end, division of work) of a computation on given lengths; recently used ones are cached.

    Args:
        problem: the parameters of the computation: heads, sizes, dtypes, ...
        extents: lengths and bands of the sequences.
        device: device of the operands.
        backend: "auto", or a name in BACKENDS.
        op_kind: "attention_forward", "attention_backward", "indexer_topk", "indexer_backward", "indexer_lse",
            "indexer_loss", "pooling" or "pooling_backward".
        updatable: the plan is new and not cached, and Plan.update() changes its key lengths, up to those of `extents`.

    Raises:
        ValueError: an unknown back end.
        BackendError: no back end computes the problem.
    """
    if updatable:
        return _build(problem, extents, device, backend, op_kind, _Capacity(problem, extents))
    key = (problem, extents.key, device, backend, op_kind)
    with _PLANS_LOCK:
        if result := _PLANS.get(key):
            _PLANS.move_to_end(key)
            return result
    new_plan = _build(problem, extents, device, backend, op_kind, None)
    with _PLANS_LOCK:
        _PLANS[key] = new_plan
        while len(_PLANS) > _PLANS_KEPT:
            _PLANS.popitem(last=False)
    return new_plan


def compute(call: Lowered, outputs: Mapping[str, torch.Tensor], backend: str = "auto") -> None:
    """Computes a call on a back end, without autograd, into `outputs`, {name: tensor} for its results."""
    backend = chosen(backend)
    filled = call.fill(outputs)
    if filled.first is not None:
        compute(*filled.first, backend)
    result = None
    if len(call.extents):
        result = plan(call.problem, call.extents, call.device, backend, call.op_kind)
    with torch.no_grad():
        filled.begin()
        if result is not None:
            result.run(*filled.operands)
        filled.finish()


def _build(
    problem: AnyProblem, extents: Extents, device: torch.device, backend: str, op_kind: str, capacity: _Capacity | None
) -> Plan:
    name = choose(problem, device, backend, op_kind)
    module = load(name)
    schedule = module.schedule(problem, extents, op_kind)
    return Plan(problem, extents, name, op_kind, schedule, module, capacity)

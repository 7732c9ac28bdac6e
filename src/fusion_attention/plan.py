"""Plan and run: the work list of a back end for given lengths, and the cache of both (backends/ has the choice).

plan() may take its time and is cached; run() only computes.
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
from fusion_attention.ir.call import Lowered
from fusion_attention.ir.mask import INFINITE
from fusion_attention.ir.problem import AnyProblem, Extents
from fusion_attention.settings import chosen

_PLANS: OrderedDict[Any, Plan] = OrderedDict()
_PLANS_KEPT = 128
_PLANS_LOCK = threading.Lock()  # What one thread found another may be throwing away.


@dataclass(eq=False, slots=True)
class Plan:
    """One problem on given lengths, ready to run any number of times.

    Attributes:
        backend: the name of the back end that was chosen.
        op_kind: what is computed: the back end's function of that name.
        capacity: the extents it was planned for, where update() may be called; else None.
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
        """Memory that a run takes besides operands and results, on the lengths it was planned for."""
        planned = self.capacity.extents if self.capacity else self.extents
        return self.module.workspace_bytes(self.problem, planned, self.op_kind)

    def update(self, kv_len: Any) -> None:
        """Other key lengths for the same sequences: what a decode loop says before each step, instead of planning anew.

            lo' = lo + kv_len - capacity,  hi' = hi + ratio * (kv_len - capacity)        (finite edges only)

        A finite edge of the band keeps its distance from the last key (ratio: of an IndexerProblem, else 1); what
        slopes count distances from (extents.shift) stays where it was planned. Results are those of a fresh plan, bit
        by bit (on a GPU, few rows without a page table: within rounding).

        Args:
            kv_len: keys of each sequence, int64 [sequences] or a list; each from 0 to what was planned for.

        Raises:
            ValueError: not a plan made with updatable=True, a wrong number of lengths, one beyond the capacity, or (on
                the CPU) a plan that runs, in another thread or beneath a signal handler; then nothing is changed.
        """
        if self.capacity is None:
            raise ValueError("fusion_attention: Plan.update: expected a plan made with updatable=True")
        extents = self.capacity.shortened(kv_len)
        self.schedule = self.module.reschedule(self.problem, extents, self.op_kind, self.schedule)
        self.extents = extents

    def keep(self, operands: tuple[Any, ...]) -> tuple[Any, ...]:
        """Operands of many runs that stay as they are, so that the back end need read them only once."""
        return tuple(self.module.keep(each) or each for each in operands)

    def run(self, *operands: Any) -> None:
        """Computes into the operands (attention_forward: Operands; attention_backward: Operands and Grads)."""
        compute = getattr(self.module, self.op_kind)
        if torch._C._is_any_autocast_enabled():
            # Back ends say where they round; autocast would narrow their float32 products too.
            with torch.autocast(operands[0].q.keep[0].device.type, enabled=False):
                compute(self.problem, self.extents, self.schedule, *operands)
        else:
            compute(self.problem, self.extents, self.schedule, *operands)


class _Capacity:
    """The lengths that an updatable plan was made for, and which of their band edges move with the last key."""

    def __init__(self, problem: AnyProblem, extents: Extents) -> None:
        self.extents, self.ratio = extents, getattr(problem, "ratio", 1)
        self.moves_lo, self.moves_hi = (
            edge if (edge := (np.abs(a) < INFINITE // 2).astype(np.int64)).any() else None
            for a in (extents.lo, extents.hi)
        )

    def shortened(self, kv_len: Any) -> Extents:
        """The extents with other key lengths."""
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
    """A plan for a problem on given lengths; the last ones are kept and found again.

    Args:
        problem: what is computed.
        extents: lengths and bands of the sequences.
        device: where the operands lie.
        backend: "auto", or a name in BACKENDS.
        op_kind: "attention_forward", "attention_backward", "indexer_topk", "indexer_backward", "indexer_lse" or
            "indexer_loss".
        updatable: a plan of the caller's own, whose key lengths Plan.update changes; extents are then its capacity.

    Raises:
        ValueError, BackendError: as choose().
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
    """Plans and runs a lowered call into its outputs, given by the names of call.results(); records no gradient."""
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

"""Plan and run: the choice of a back end, its work list for given lengths, and the caches of both.

plan() may take its time and is cached; run() only computes. Refuses to know where a call came from.
"""

from __future__ import annotations

import importlib
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import numpy as np
import torch

from fusion_attention.contract import BackendError
from fusion_attention.settings import chosen, override
from fusion_attention.waist.lowered import Lowered, Staged
from fusion_attention.waist.mask import INFINITE
from fusion_attention.waist.problem import AnyProblem, Extents

# In the order in which "auto" tries them. golden is asked for by name, never chosen.
AUTO = ("triton", "cpu")
SHAPES = "meta"  # the device without memory, and what serves all calls there
BACKENDS = (*AUTO, "golden")
_GOLDEN = ' golden computes it, in float64: backend="golden", or a block with fusion_attention.use_backend("golden").'
Backend = Literal["auto", "cpu", "triton", "golden"]  # for type checkers
_PLANS: OrderedDict[Any, Plan] = OrderedDict()
_PLANS_KEPT = 128
_PLANS_LOCK = threading.Lock()  # What one thread found another may be throwing away.


@dataclass(eq=False, slots=True)
class Plan:
    """One problem on given lengths, ready to run any number of times.

    Attributes:
        backend: the name of the back end that was chosen.
        verb: what is computed: the back end's function of that name.
        capacity: the extents it was planned for, where update() may be called; else None.
    """

    problem: AnyProblem
    extents: Extents
    backend: str
    verb: str
    schedule: Any
    module: ModuleType
    capacity: _Capacity | None = None

    @property
    def workspace_bytes(self) -> int:
        """Memory that a run takes besides operands and results, on the lengths it was planned for."""
        planned = self.capacity.extents if self.capacity else self.extents
        found: int = self.module.workspace_bytes(self.problem, planned, self.verb)
        return found

    def update(self, kv_len: Any) -> None:
        """Other key lengths for the same sequences: what a decode loop says before each step, instead of planning anew.

            lo' = lo + kv_len - capacity,  hi' = hi + kv_len - capacity        (finite edges only)

        A finite edge of the band keeps its distance from the last key. Results are those of a fresh plan, bit by bit
        (on a GPU, few rows without a page table: within rounding).
        Not while the plan runs on another thread.

        Args:
            kv_len: keys of each sequence, int64 [sequences] or a list; each from 0 to what was planned for.

        Raises:
            ValueError: not a plan made with updatable=True, a wrong number of lengths, or one beyond the capacity;
                then nothing is changed.
        """
        if self.capacity is None:
            raise ValueError("fusion_attention: Plan.update: expected a plan made with updatable=True")
        self.extents = self.capacity.shortened(kv_len)
        if (reschedule := getattr(self.module, "reschedule", None)) is not None:
            self.schedule = reschedule(self.problem, self.extents, self.verb, self.schedule)

    def run(self, *operands: Any) -> None:
        """Computes into the operands (attention_forward: Operands; attention_backward: Operands and Grads)."""
        compute = getattr(self.module, self.verb)
        if torch._C._is_any_autocast_enabled():
            # Back ends say where they round; autocast would narrow their float32 products too.
            with torch.autocast(operands[0].q.keep[0].device.type, enabled=False):
                compute(self.problem, self.extents, self.schedule, *operands)
        else:
            compute(self.problem, self.extents, self.schedule, *operands)


class _Capacity:
    """The lengths that an updatable plan was made for, and which of their band edges move with the last key."""

    def __init__(self, extents: Extents) -> None:
        self.extents = extents
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
            hi = hi + (lengths - planned.kv_len) * self.moves_hi
        return Extents(planned.q_len, lengths, lo, hi, planned.prefix, planned.shift)


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Inside the block, or the function that it decorates, calls that name no back end are computed by this one.

    It counts in this thread (and asyncio task), for every face but the two-phase one, whose back end acl.init() says. A
    graph that torch.compile or torch.export traces inside keeps it; one traced outside takes it where it runs inside.

    Args:
        name: "auto" (by the device), "cpu", "triton" or "golden", the float64 model.

    Raises:
        ValueError: an unknown name.

    Example:
        >>> import fusion_attention as fa
        >>> q = torch.randn(1, 4, 1, 8, dtype=torch.float64)
        >>> with use_backend("golden"):
        ...     fa.attention(q, q, q).dtype
        torch.float64
    """
    _known(name)
    with override(backend=name):
        yield


def _known(backend: str) -> None:
    """Raises where there is no back end of this name."""
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(f"fusion_attention: backend: expected one of auto, {', '.join(BACKENDS)}, got {backend!r}")


def _load(name: str) -> ModuleType:
    # Only what is chosen is imported: a machine without one back end's needs loads everything else.
    return importlib.import_module(f"fusion_attention.backends.{name}")


def _reasons_against(name: str, problem: AnyProblem, device: torch.device) -> list[str]:
    try:
        module = _load(name)
    except ImportError as error:
        return [f"the {name} back end cannot be loaded ({error})."]
    reasons: list[str] = module.reasons_against(problem, device)
    return reasons


def choose(problem: AnyProblem, device: torch.device, backend: str) -> str:
    """The back end that computes: the named one, or the first of AUTO without a reason against.

    Raises:
        ValueError: an unknown name.
        BackendError: none fits; the message lists every reason of every back end asked.
    """
    _known(backend)
    if device.type == SHAPES:
        return SHAPES
    # Triton is slow to import and has nothing to say about memory that no GPU holds.
    automatic = AUTO if device.type == "cuda" else AUTO[1:]
    listed = []
    for name in automatic if backend == "auto" else (backend,):
        against = _reasons_against(name, problem, device)
        if not against:
            return name
        listed += [f"{name}: {reason}" for reason in against]
    advice = "" if backend == "golden" else _GOLDEN
    raise BackendError(f"fusion_attention: no back end computes this call. {'; '.join(listed)}{advice}")


def plan(
    problem: AnyProblem,
    extents: Extents,
    device: torch.device,
    backend: str = "auto",
    verb: str = "attention_forward",
    *,
    updatable: bool = False,
) -> Plan:
    """A plan for a problem on given lengths; the last ones are kept and found again.

    Args:
        problem: what is computed.
        extents: lengths and bands of the sequences.
        device: where the operands lie.
        backend: "auto", or a name in BACKENDS.
        verb: "attention_forward", "attention_backward", "indexer_topk", "indexer_backward", "indexer_lse" or
            "indexer_loss".
        updatable: a plan of the caller's own, whose key lengths Plan.update changes; extents are then its capacity.

    Raises:
        ValueError, BackendError: as choose().
    """
    if updatable:
        return _made(problem, extents, device, backend, verb, _Capacity(extents))
    key = (problem, extents.key, device, backend, verb)
    with _PLANS_LOCK:
        if found := _PLANS.get(key):
            _PLANS.move_to_end(key)
            return found
    made = _made(problem, extents, device, backend, verb, None)
    with _PLANS_LOCK:
        _PLANS[key] = made
        while len(_PLANS) > _PLANS_KEPT:
            _PLANS.popitem(last=False)
    return made


def compute(call: Lowered, outputs: Mapping[str, torch.Tensor], backend: str = "auto") -> None:
    """Plans and runs a lowered call into its outputs, given by the names of call.results(); records no gradient."""
    backend = chosen(backend)
    if isinstance(call, Staged):
        first = call.first()
        results = first.results()
        compute(first, results, backend)
        call = call.after(results)
    filled = call.fill(outputs)
    found = None
    if len(call.extents):
        found = plan(call.problem, call.extents, call.device, backend, call.verb)
    with torch.no_grad():
        filled.begin()
        if found is not None:
            found.run(*filled.operands)
        filled.finish()


def _made(
    problem: AnyProblem,
    extents: Extents,
    device: torch.device,
    backend: str,
    verb: str,
    capacity: _Capacity | None,
) -> Plan:
    name = choose(problem, device, backend)
    module = _load(name)
    schedule = module.schedule(problem, extents, verb)
    return Plan(problem, extents, name, verb, schedule, module, capacity)

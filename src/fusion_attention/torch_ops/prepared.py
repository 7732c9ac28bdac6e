"""A forward whose plan and views are known: all that a call adds is where its tensors begin.

Kept in the call cache of a signature and its lengths (contract.CallCache), by back end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from typing import Any

import torch

from fusion_attention.contract import Bound
from fusion_attention.ir.call import Differentiable, Repeatable
from fusion_attention.ir.places import moved, places
from fusion_attention.memory import another, template
from fusion_attention.plan import plan

Tensor = torch.Tensor
Source = Callable[[Mapping[str, Any]], Tensor]  # from the arguments of a call to an operand's tensor
_PACKED = ("slopes", "sink")  # which cores read as neighbouring float32


class Prepared:
    """What the calls of one call cache share: plan, views and the shapes of results. Holds no tensor of a caller.

    Attributes:
        bare: the lowered call without tensors, and the arguments that are its inputs as they are, for its derivative;
            None where an input is made of an argument.
    """

    __slots__ = ("_begins", "_call_names", "_core", "_exact", "_names", "_plan", "_templates", "_views", "bare")

    def __init__(
        self, call: Repeatable, backend: str, views: Any, sources: Mapping[str, tuple[str, Source, Source]]
    ) -> None:
        """views: the call's, over no memory; sources: of its operands, as _source() says."""
        self.bare: tuple[Differentiable, tuple[str, ...]] | None = None
        memory = call.memory()
        self._templates = [template(t, t.shape, t.dtype) for t in memory.values()]
        self._plan = p = plan(call.problem, call.extents, call.device, backend, call.op_kind)
        self._views, self._names, self._call_names = views, (*sources, *memory), (call.names, call.further)
        begins, self._exact = zip(*(source[1:] for source in sources.values()), strict=True)
        direct = [argument for argument, begin, _ in sources.values() if isinstance(begin, itemgetter)]
        # The usual sources look a name up: all of them are one look-up.
        self._begins = itemgetter(*direct) if 1 < len(direct) == len(begins) else lambda args: [s(args) for s in begins]
        self._core = p.module.prepare(p.problem, p.schedule, call.operands(memory), self._names)

    def results(self, args: Mapping[str, Any], complete: bool) -> dict[str, Tensor]:
        """The results of a call with these arguments, by name; complete: with statistics, wanted or not."""
        names, further = self._call_names
        if further is not None:
            return further.make(*self.run(args, stats=complete or further.stats))
        return dict(zip(names if complete else names[:1], self.run(args, stats=complete), strict=False))

    def run(self, args: Mapping[str, Any], *, stats: bool) -> list[Any]:
        """The memory of the results, written; of all but the first perhaps None if they are not asked for."""
        core = self._core  # another thread may forget it meanwhile
        first, *others = self._templates
        if core is not None:
            results = [another(first), *(map(another, others) if stats else [None] * len(others))]
            if core(*self._begins(args), *results):
                return results
        self._core = None  # The core left rows unfinished, and would again: run the plan.
        results = list(map(another, self._templates))
        tensors = (*[source(args) for source in self._exact], *results)
        self._plan.run(moved(self._views, dict(zip(self._names, tensors, strict=True))))
        return results


def prepare(bound: Bound, call: Repeatable, backend: str) -> Prepared | None:
    """A call, for all that differ from it in memory alone; None where it must be lowered every time.

    Which argument an operand lies in is found by lowering the call once more, with stand-ins that share no memory.
    """
    lower = bound.op.lower
    if lower is None or not call.repeats or not len(call.extents):
        return None
    widened: frozenset[str] = frozenset()
    for _ in range(2):
        given = {name: _stand_in(bound.args[name], name in widened) for name in bound.tensors}
        shown: Repeatable = lower(bound.over(given))
        if shown.problem != call.problem:  # it depends on which tensors share memory
            return None
        try:
            memory = shown.memory()
            views = shown.operands(memory)
            operands = places(views)
        except ValueError:
            return None
        storages = {_first(t).untyped_storage()._cdata: name for name, t in given.items()}
        read = {name: storages.get(t.untyped_storage()._cdata) for name, t in operands.items() if name not in memory}
        if None not in read.values():
            sources = {n: _source(n, operands[n], given, str(name), name in widened) for n, name in read.items()}
            return Prepared(call, backend, views, sources)
        if any(operands[name].dtype != torch.float32 for name, argument in read.items() if argument is None):
            return None
        widened = _narrow(given, set(given).difference(read.values()))
    return None


def _first(tensors: Any) -> Tensor:
    """A tensor, or the first of a list."""
    result: Tensor = tensors if isinstance(tensors, torch.Tensor) else tensors[0]
    return result


def _stand_in(tensors: Any, widened: bool) -> Any:
    """A tensor without memory that lies as an argument does; widened: as the argument does in float32."""
    if not isinstance(tensors, torch.Tensor):
        return type(tensors)(_stand_in(t, widened) for t in tensors)
    if widened:
        return torch.empty(tensors.shape, dtype=torch.float32, device="meta")
    return torch.empty_strided(tensors.shape, tensors.stride(), dtype=tensors.dtype, device="meta")


def _narrow(given: Mapping[str, Any], names: Iterable[str]) -> frozenset[str]:
    """The arguments of 16-bit floats: scales are read in float32."""
    return frozenset(name for name in names if _first(given[name]).dtype in (torch.float16, torch.bfloat16))


def _source(
    name: str, operand: Tensor, given: Mapping[str, Any], argument: str, widened: bool
) -> tuple[str, Source, Source]:
    """(argument, what finds a tensor that begins where the operand does, what finds the operand itself)."""
    shape, strides, dtype, offset = operand.shape, operand.stride(), operand.dtype, operand.storage_offset()
    base: Source = itemgetter(argument)
    if widened or not isinstance(given[argument], torch.Tensor):
        base = lambda args: _widened(_first(args[argument])) if widened else _first(args[argument])  # noqa: E731

    def viewed(args: Mapping[str, Any]) -> Tensor:
        tensor = base(args)
        tensor = tensor if tensor.dtype == dtype else tensor.view(dtype)
        return tensor.as_strided(shape, strides, tensor.storage_offset() + offset)

    like = _first(given[argument])
    same = (shape, strides, dtype, offset) == (like.shape, like.stride(), like.dtype, 0)
    exact: Source = base if same else viewed
    if name in _PACKED and not (dtype == torch.float32 and operand.is_contiguous()):
        return argument, lambda args: _widened(exact(args)), exact
    return argument, exact if offset else base, exact


def _widened(tensor: Tensor) -> Tensor:
    """A tensor in float32, its elements neighbours."""
    return tensor.float().contiguous()

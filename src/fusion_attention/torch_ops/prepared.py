"""Prepared forward calls: the division of work and the memory views are fixed, and only tensors' addresses change.

They are stored, by back end, in the cache of all calls with the same shapes and lengths (contract.CallCache).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

import torch

from fusion_attention.contract import Bound
from fusion_attention.ir.call import Differentiable, Repeatable
from fusion_attention.ir.replace_tensors import moved, operand_tensors
from fusion_attention.memory import another, template
from fusion_attention.plan import plan

Tensor = torch.Tensor
Source = Callable[[Mapping[str, Any]], Tensor]  # from the arguments of a call to an operand's tensor
_PACKED = ("slopes", "sink")  # operands that the core reads as contiguous float32


class Prepared:
    """A forward call that runs repeatedly on tensors with the same shapes, strides, dtypes and options, at any address;
    it keeps the plan, the strides of operands and the shapes of results, but no tensor of a caller.

    Attributes:
        bare: for autograd, a pair: the call in the form that back ends compute, without its tensors; and for each of
            its inputs the name of the argument that is this input. None if an input is a view or copy of an argument.
    """

    __slots__ = ("_begins", "_call_names", "_core", "_exact", "_names", "_plan", "_templates", "_views", "bare")

    def __init__(
        self, call: Repeatable, backend: str, views: Any, sources: Mapping[str, tuple[str, Source, Source]]
    ) -> None:
        """Plans the call on a back end; views: of its tensors, without memory; sources: {tensor's name: _source()}."""
        self.bare: tuple[Differentiable, tuple[str, ...]] | None = None
        memory = call.memory()
        self._templates = [template(t, t.shape, t.dtype) for t in memory.values()]
        self._plan = p = plan(call.problem, call.extents, call.device, backend, call.op_kind)
        self._views, self._names, self._call_names = views, (*sources, *memory), (call.names, call.further)
        begins, self._exact = zip(*(source[1:] for source in sources.values()), strict=True)
        direct = [argument for argument, begin, _ in sources.values() if isinstance(begin, itemgetter)]
        # If all sources are look-ups of a name, one itemgetter does them together.
        self._begins = itemgetter(*direct) if 1 < len(direct) == len(begins) else lambda args: [s(args) for s in begins]
        self._core = p.module.prepare(p.problem, p.schedule, call.operands(memory), self._names)

    def results(self, args: Mapping[str, Any], complete: bool) -> dict[str, Tensor]:
        """Runs the call on the tensors in `args`, returns {name: result}; complete: also unrequested statistics."""
        names, further = self._call_names
        if further is not None:
            return further.make(*self.run(args, stats=complete or further.stats))
        return dict(zip(names if complete else names[:1], self.run(args, stats=complete), strict=False))

    def run(self, args: Mapping[str, Any], *, stats: bool) -> list[Any]:
        """Runs the call and returns newly allocated results as a list; stats: False: all but the first may be None."""
        core = self._core  # another thread may reset it meanwhile
        first, *others = self._templates
        if core is not None:
            results = [another(first), *(map(another, others) if stats else [None] * len(others))]
            if core(*self._begins(args), *results):
                return results
        self._core = None  # The core left empty rows incomplete, and would again, so the plan runs from now on.
        results = list(map(another, self._templates))
        tensors = (*[source(args) for source in self._exact], *results)
        self._plan.run(moved(self._views, dict(zip(self._names, tensors, strict=True))))
        return results


def prepare(bound: Bound, call: Repeatable, backend: str) -> Prepared | None:
    """Returns a Prepared for all calls that differ from `call` only in memory; None if each has to be converted for
    back ends. To determine the argument that each operand comes from, the call is converted again with meta tensors,
    one storage per argument."""
    lower = bound.op.lower
    if lower is None or not call.repeats or not len(call.extents):
        return None
    widened: frozenset[str] = frozenset()
    for _ in range(2):
        given = {name: _stand_in(bound.args[name], name in widened) for name in bound.tensors}
        shown: Repeatable = lower(bound.over(given))
        if shown.problem != call.problem:  # lowering depends on tensors that share memory
            return None
        try:
            memory = shown.memory()
            views = shown.operands(memory)
            operands = operand_tensors(views)
        except ValueError:
            return None
        storages = {_first(t).untyped_storage()._cdata: name for name, t in given.items()}
        read = {name: storages.get(t.untyped_storage()._cdata) for name, t in operands.items() if name not in memory}
        if None not in read.values():
            sources = {n: _source(n, operands[n], given, str(name), name in widened) for n, name in read.items()}
            return Prepared(call, backend, views, sources)
        if any(operands[name].dtype != torch.float32 for name, argument in read.items() if argument is None):
            return None
        # These arguments of 16-bit floats may be copied to float32 operands.
        rest = set(given).difference(read.values())
        widened = frozenset(name for name in rest if _first(given[name]).dtype in (torch.float16, torch.bfloat16))
    return None


def _first(tensors: Any) -> Tensor:
    result: Tensor = tensors if isinstance(tensors, torch.Tensor) else tensors[0]
    return result


def _stand_in(tensors: Any, widened: bool) -> Any:
    """Returns a meta tensor with the shape, strides and dtype of an argument; widened: contiguous float32 instead."""
    if not isinstance(tensors, torch.Tensor):
        return type(tensors)(_stand_in(t, widened) for t in tensors)
    if widened:
        return torch.empty(tensors.shape, dtype=torch.float32, device="meta")
    return torch.empty_strided(tensors.shape, tensors.stride(), dtype=tensors.dtype, device="meta")


def _source(
    name: str, operand: Tensor, given: Mapping[str, Any], argument: str, widened: bool
) -> tuple[str, Source, Source]:
    """Returns (argument, start, view): the name of the argument that has the memory of `operand`, and functions from
    {name: argument} to a tensor at its address, and to the operand itself. widened: the operand is a float32 copy."""
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
    return tensor.float().contiguous()

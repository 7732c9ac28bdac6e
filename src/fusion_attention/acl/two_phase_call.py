"""State of CANN's operator calls between phase 1 (checks and plans) and phase 2 (computes), and checks of outputs."""

import functools
from dataclasses import dataclass
from typing import Any

import torch

from fusion_attention.acl.overlap import overlap, overlaps_itself
from fusion_attention.acl.state import Refusal
from fusion_attention.acl.tensors import TensorList
from fusion_attention.contract import INVALID, NULL_POINTER, TILING, Bound, Op, Tensor, evaluate, members, scope, show
from fusion_attention.ir.call import Filled, Lowered, tensors_in
from fusion_attention.plan import Plan, plan


def refusal(op: Op, param: str, expected: str, got: str, advice: str = "", code: int = INVALID) -> Refusal:
    """Returns the exception Refusal for an invalid argument `param` of a call of `op`; expected, got, advice: parts of
    the error text; code: CANN's error code."""
    return Refusal(code, str(op.failure(param, expected, got, advice, code)))


@dataclass(frozen=True)
class Options:
    """Options of a call in two phases (CANN's interface: phase 1 checks and plans, phase 2 computes)."""

    strict: bool  # calls beyond the chip's limits are errors
    check_content: bool  # phase 2 also checks the values in tensors
    device: torch.device  # of the tensors' memory
    backend: str  # name of the back end that computes, or "auto"


# ---------------------------------------------------------------------------------------------------- what calls share


@dataclass(frozen=True, eq=False)
class Layout:
    """Properties of all two-phase calls (phase 1 plans, phase 2 computes) with equal shapes, strides and attributes."""

    given: tuple[tuple[int, str], ...]  # (position, name) of the tensors that are not None
    written: tuple[str, ...]  # names of the outputs of the call
    plan: Plan | None  # the plan for the call's sizes and sequence lengths; None if there is no sequence
    workspace: int  # bytes for the plan and for converted tensors
    keeps: bool  # views made in phase 1 stay valid, because no input is copied
    reads: bool  # a rule reads values in tensors, which may change between the phases
    idle: bool  # all outputs are empty


@dataclass(eq=False, slots=True)
class Job:
    """The computation of a planned operator call, which may run any number of times, on the memory of its tensors."""

    layout: Layout
    call: Lowered
    args: dict[str, Any]  # the arguments as torch tensors, by the operator definition's parameter names
    filled: Filled | None  # views of these tensors for the back end, if they stay valid between runs (Layout.keeps)

    def run(self) -> None:
        """Computes the planned operator call, which writes its output tensors."""
        if self.layout.idle:
            return
        filled = self.filled or self.call.fill(self.outputs())
        filled.begin()
        if self.layout.plan is not None:
            self.layout.plan.run(*filled.operands)
        filled.finish()

    def outputs(self) -> dict[str, torch.Tensor]:
        """The output tensors of the call by name."""
        args = self.args
        return {name: args[name] for name in self.layout.written}


@functools.cache
def may_lack(op: Op) -> tuple[int, ...]:
    """Returns the positions, among the operator's parameters, of outputs that some calls lack: parameters reserved by
    CANN, and gradients of optional inputs."""
    required = {word for p in op.tensors() if not p.optional for name in op.layouts for word in p.words(name)}
    shown = {axis for word in required for axis in word.split("*")}
    results = []
    for i in op.positions[Tensor]:
        p = op.params[i]
        assert isinstance(p, Tensor)
        axes = {axis for name in op.layouts for word in p.words(name) for axis in word.split("*")}
        if p.output and (not axes or _source(op, p) or not axes <= shown | {"8"}):
            results.append(i)
    return tuple(results)


def _source(op: Op, p: Tensor) -> str:
    """Returns the name of the optional input whose gradient output p is ("bias" for an output "dbias"); else ""."""
    source = op.by_name.get(p.name[1:]) if p.name[:1] == "d" else None
    return source.name if source is not None and source.optional else ""


def job_of(layout: Layout, call: Lowered, args: dict[str, Any]) -> Job:
    """Returns the Job that computes a checked call on the memory of its tensors. layout: properties of all calls of its
    shapes; call: its form that back ends compute; args: its arguments by parameter name."""
    job = Job(layout, call, args, None)
    if layout.keeps:
        job.filled = call.fill(job.outputs())
        if layout.plan is not None:
            job.filled.operands = layout.plan.keep(job.filled.operands)
    return job


def layout_of(bound: Bound, call: Lowered, args: dict[str, Any], options: Options) -> Layout:
    """Checks the outputs of a validated operator call (bound) and plans its computation; returns the Layout of all
    calls of equal shapes, dtypes and lengths: written outputs, execution plan, bytes of workspace. call: the form of
    the call that back ends compute; args: its arguments by parameter name."""
    op = bound.op
    if call.device != options.device:
        first = op.tensors()[0].shown
        raise refusal(op, first, f"memory on {options.device}", str(call.device), "acl.init(device=...) chose it")
    given = tuple((i, name) for i, name in enumerate(op.by_name) if isinstance(args[name], (torch.Tensor, tuple)))
    written = _written(bound, args, options.strict)
    outputs = {name: args[name] for name in written}
    result = None
    if len(call.extents):
        result = plan(call.problem, call.extents, call.device, options.backend, call.op_kind)
    filled = call.fill(outputs)
    # Memory that phase 2 needs besides the caller's tensors: copies of inputs, and buffers.
    theirs = {_storage(t) for _, name in given for t in members(args[name]) or ()}
    copies = {_storage(t): t for t in tensors_in(filled.operands) if _storage(t) not in theirs}
    buffers = {_storage(t): t for t in filled.buffers if _storage(t) not in theirs}
    converted = sum(t.numel() * t.element_size() for t in (copies | buffers).values())
    idle = all(t.numel() == 0 for t in outputs.values())
    within = scope(bound.names, op.functions)
    reading = [r for r in op.applicable_rules if r.reads and (not r.only or bound[op.layout_attr] in r.only)]
    return Layout(
        given=given,
        written=written,
        plan=result,
        workspace=0 if idle else converted + (result.workspace_bytes if result else 0),
        keeps=not idle and copies.keys() <= buffers.keys(),
        reads=any(not r.when or evaluate(r.when, within) for r in reading),
        idle=idle,
    )


def _storage(tensor: torch.Tensor) -> Any:
    return tensor.untyped_storage()._cdata


def handles(value: Any) -> tuple[Any, ...]:
    """Returns the tensors in an acl.TensorList as a tuple; a value of another type in a tuple of one element."""
    return value.tensors or () if type(value) is TensorList else (value,)


def _written(bound: Bound, args: dict[str, Any], strict: bool) -> tuple[str, ...]:
    """Returns the names of the outputs that a validated call (bound) writes; raises Refusal if one is missing or (when
    strict) superfluous. args: its arguments by parameter name."""
    op, layout = bound.op, bound.names.get(bound.op.layout_attr, "")
    written = []
    for p in op.tensors(output=True):
        value = args[p.name]
        source = _source(op, p)
        axes = [axis for word in p.words(layout) for axis in word.split("*") if not axis.isdigit()]
        absent = bound.names.get(source) is None if source else not p.words(layout)
        absent = absent or any(bound.names.get(axis) is None for axis in axes)
        if not absent and value is None:
            raise refusal(op, p.shown, f"a tensor to write ({p.text})", "None", code=NULL_POINTER)
        if absent and value is not None and value.numel() and strict and not p.optional:
            why = f"{source} was not given" if source else "nothing is written to it"
            raise refusal(op, p.shown, "None or an empty tensor", show(value), why, TILING)
        if not absent:
            strides = tuple(value.stride())
            if overlaps_itself(tuple(value.shape), strides):
                raise refusal(op, p.shown, "a separate memory address for every element", f"strides {list(strides)}")
            written.append(p.name)
    return tuple(written)


def check_disjoint(op: Op, values: tuple[Any, ...], layout: Layout) -> None:
    """Raises Refusal if an output shares memory with another tensor of a call; values: its arguments, in order."""
    written = layout.written
    handles_of = [(i, name in written, t) for i, name in layout.given for t in handles(values[i])]
    spans = sorted([(t.start, t.stop, is_written, at) for at, (_, is_written, t) in enumerate(handles_of)])
    read = wrote = 0  # ends of the inputs, and of the outputs, that start at or before this span
    for start, stop, is_written, _ in spans:
        if start < wrote or (is_written and start < read):
            break
        if is_written:
            wrote = max(wrote, stop)
        else:
            read = max(read, stop)
    else:
        return
    # Strided views of one buffer may interleave without a common element.
    for start, stop, is_written, i in spans:
        for first, last, _, j in spans if is_written else ():
            if i != j and first < stop and start < last and overlap(handles_of[i][2], handles_of[j][2]):
                other = op.params[handles_of[j][0]].shown
                raise refusal(
                    op, op.params[handles_of[i][0]].shown, "memory of its own", f"some that {other} holds too"
                )

"""A two-phase call between its phases: what its signature decides, and the memory where its tensors lie.

Checks outputs and workspace, which only this face has, and runs. Refuses to know any single operator.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import Any

import torch

from fusion_attention.acl.overlap import overlaps_itself, share
from fusion_attention.acl.state import STATE, Refusal
from fusion_attention.autograd import BIAS, run_backward, run_forward
from fusion_attention.contract import INVALID, NULL_POINTER, TILING, Bound, Failure, Op, Tensor
from fusion_attention.expressions import evaluate, scope, show
from fusion_attention.kv import MatrixView, RowView
from fusion_attention.lower import Call, finite, from_lanes, operands_of, stats_shape, uncovered
from fusion_attention.plan import Plan, plan
from fusion_attention.problem import Operands, Stats

# The outputs of a gradient in the order of run_backward().
GRADIENTS = ("dq", "dk", "dv", "dq_rope", "dk_rope", "dpse", "dsink")
DPSE = GRADIENTS.index("dpse")
STATISTICS = ("softmax_max", "softmax_sum")


def refusal(op: Op, param: str, expected: str, got: str, advice: str = "", code: int = INVALID) -> Refusal:
    """A failure in the wording of every error of this library."""
    return Refusal(code, str(Failure(op.name, param, expected, got, advice, code)))


# ---------------------------------------------------------------------------------------------------- what calls share


@dataclass(frozen=True, eq=False)
class Layout:
    """What all calls of one signature share.

    Attributes:
        given: (position, name) of its tensors; written: names of the outputs that belong to it.
        blank: an empty tensor of statistics; stats_shape: the shape that kernels want of them.
        plan: of its problem and lengths; None where there is no sequence.
        workspace: bytes of the plan and of everything that is converted on the way.
        keeps: operands may outlive a run: a forward call in which nothing is copied or cleared.
        rows: such operands over no memory, where they are rows alone.
        reads: some rule reads tensor content, which may change between the phases.
        idle: all outputs are empty.
    """

    given: tuple[tuple[int, str], ...]
    written: tuple[str, ...]
    blank: torch.Tensor
    stats_shape: tuple[int, ...]
    plan: Plan | None
    workspace: int
    keeps: bool
    rows: Operands | None
    reads: bool
    idle: bool
    backward: bool


@dataclass(eq=False)
class Job:
    """A call on the memory where its tensors lie, ready to run again and again.

    Attributes:
        args: every argument by canonical name, tensors as memory.
        stats: room for statistics as kernels keep them.
        operands: of a forward call without copies.
    """

    layout: Layout
    call: Call
    args: dict[str, Any]
    stats: tuple[torch.Tensor, torch.Tensor]
    operands: Operands | None

    def run(self) -> None:
        """Computes into the outputs."""
        if self.layout.idle:
            return
        if self.layout.backward:
            self._run_backward()
        else:
            self._run_forward()

    def _run_forward(self) -> None:
        out = self.args["attention_out"]
        if self.operands is not None:
            assert self.layout.plan is not None
            self.layout.plan.run(self.operands)
        else:
            room = _room(out)
            run_forward(self.call, (room, *self.stats), STATE.backend)
            if room is not out:
                out.copy_(room)  # Kernels write rows of neighbouring elements; this output's lie otherwise.
        max_, sum_ = finite(self.call, *self.stats)
        self.args["softmax_max"].copy_(max_.unsqueeze(-1))  # the same value in every lane
        self.args["softmax_sum"].copy_(sum_.unsqueeze(-1))

    def _run_backward(self) -> None:
        args = self.args
        stats = from_lanes(self.call, *(args[name] for name in STATISTICS))
        targets = [args[name] if name in self.layout.written else None for name in GRADIENTS]
        rooms = [self.call.q.new_empty(0) if t is None else _room(t) for t in targets]
        slopes = targets[DPSE] is not None and self.call.extras[BIAS] is None
        if slopes:
            rooms[DPSE] = self.call.q.new_empty(0)
        run_backward(self.call, args["dy"], (args["attention_in"], *stats), tuple(rooms), STATE.backend)
        for target, room in zip(targets, rooms, strict=True):
            if target is not None and room.numel() and room is not target:
                target.copy_(room)  # As for a forward call's output.
        if slopes:
            args["dpse"].zero_()  # Slopes have no gradient.


def _room(output: torch.Tensor) -> torch.Tensor:
    """The output itself where kernels can write it, else memory of its shape."""
    if output.stride(-1) == 1 or output.shape[-1] <= 1:
        return output
    return torch.empty_like(output, memory_format=torch.contiguous_format)


@functools.cache
def may_lack(op: Op) -> tuple[int, ...]:
    """The positions of outputs that not every call has: reserved ones, and gradients of optional inputs."""
    required = {word for p in op.tensors() if not p.optional for name in op.layouts for word in p.words(name)}
    shown = {axis for word in required for axis in word.split("*")}
    found = []
    for i in op.positions[Tensor]:
        p = op.params[i]
        assert isinstance(p, Tensor)
        axes = {axis for name in op.layouts for word in p.words(name) for axis in word.split("*")}
        if p.output and (not axes or _source(op, p) or not axes <= shown | {"8"}):
            found.append(i)
    return tuple(found)


def _source(op: Op, p: Tensor) -> str:
    """The optional input whose gradient an output is, by its name: pse of dpse; "" if it is none's."""
    source = op.by_name.get(p.name[1:]) if p.name[:1] == "d" else None
    return source.name if source is not None and source.optional else ""


def job_of(layout: Layout, call: Call, args: dict[str, Any]) -> Job:
    """A checked call with room for its statistics."""
    stats = layout.blank.new_empty(layout.stats_shape), layout.blank.new_empty(layout.stats_shape)
    operands = None
    if layout.rows is not None:
        operands = _over(layout.rows, (call.q, call.k, call.v, args["attention_out"], *stats))
    elif layout.keeps:
        operands = operands_of(call, args["attention_out"], *stats)
    return Job(layout, call, args, stats, operands)


def _over(rows: Operands, tensors: tuple[torch.Tensor, ...]) -> Operands:
    """The same rows of other tensors: q, k, v, out, max and sum."""
    q, k, v, out, max_, sum_ = tensors
    stats = Stats(rows.stats.max.over(max_), rows.stats.sum.over(sum_))
    return Operands(rows.q.over(q), rows.k.over(k), rows.v.over(v), rows.out.over(out), stats)


def layout_of(bound: Bound, call: Call, args: dict[str, Any], strict: bool) -> Layout:
    """Checks the outputs of a new signature, plans it and adds up what it needs."""
    op = bound.op
    if call.q.device != STATE.device:
        raise refusal(op, "query", f"memory on {STATE.device}", str(call.q.device), "acl.init(device=...) chose it")
    given = tuple((i, name) for i, name in enumerate(op.by_name) if isinstance(args[name], torch.Tensor))
    written = _written(bound, args, strict)
    outputs = [args[name] for name in written]
    backward = "dy" in op.by_name
    found = None
    if len(call.extents):
        verb = "attention_backward" if backward else "attention_forward"
        found = plan(call.problem, call.extents, call.q.device, STATE.backend, verb)
    shape = stats_shape(call.q, call.form, call.problem.heads_q)
    blank = torch.empty(0, dtype=torch.float32, device=call.q.device)
    stats = [blank.new_empty(shape) for _ in STATISTICS]
    out = args["attention_in"] if backward else _room(args["attention_out"])
    operands = operands_of(call, out, *stats)
    converted = _copied(operands, [*(args[name] for _, name in given), out, *stats])
    converted += [t for t in (*outputs, *([args["dy"]] if backward else [])) if _room(t) is not t]
    if backward and call.extras[BIAS] is not None and "dpse" in written:
        converted.append(torch.empty_like(args["dpse"], dtype=torch.float32))  # where sequences add up
    idle = all(t.numel() == 0 for t in outputs)
    bytes_ = sum(t.numel() * t.element_size() for t in [*converted, *stats]) + (found.workspace_bytes if found else 0)
    within = scope(bound.names, op.functions)
    reading = [r for r in op.asked if r.reads and (not r.only or bound[op.layout_attr] in r.only)]
    keeps = found is not None and not (backward or converted or uncovered(call, "q"))
    return Layout(
        given=given,
        written=written,
        blank=blank,
        stats_shape=shape,
        plan=found,
        workspace=0 if idle else bytes_,
        keeps=keeps,
        rows=_over(operands, (blank,) * 6) if keeps and not any(t is not None for t in call.extras) else None,
        reads=any(not r.when or evaluate(r.when, within) for r in reading),
        idle=idle,
        backward=backward,
    )


def _written(bound: Bound, args: dict[str, Any], strict: bool) -> tuple[str, ...]:
    """The outputs that belong to a call: each must be there, and (strict) no other."""
    op, layout = bound.op, bound.names.get(bound.op.layout_attr, "")
    written = []
    for p in op.tensors(output=True):
        value = args[p.name]
        source = _source(op, p)
        axes = [axis for word in p.words(layout) for axis in word.split("*") if not axis.isdigit()]
        absent = bound.names.get(source) is None if source else not axes
        absent = absent or any(bound.names.get(axis) is None for axis in axes)
        if not absent and value is None:
            raise refusal(op, p.shown, f"a tensor to write ({p.text})", "None", code=NULL_POINTER)
        if absent and value is not None and value.numel() and strict:
            why = f"{source} was not given" if source else "nothing is written to it"
            raise refusal(op, p.shown, "None or an empty tensor", show(value), why, TILING)
        if not absent:
            strides = tuple(value.stride())
            if overlaps_itself(tuple(value.shape), strides):
                raise refusal(op, p.shown, "memory of its own for every element", f"strides {list(strides)}")
            written.append(p.name)
    return tuple(written)


def _copied(operands: Operands, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of operands that are copies of what was given, not views."""
    own = {t.untyped_storage()._cdata for t in given}
    kept: list[torch.Tensor] = []
    for holder in (operands, operands.stats):
        for f in fields(holder):
            value = getattr(holder, f.name)
            if isinstance(value, RowView):
                kept += value.keep
            elif isinstance(value, (MatrixView, torch.Tensor)):
                kept.append(value.keep if isinstance(value, MatrixView) else value)
    return [t for t in kept if t.untyped_storage()._cdata not in own]


def check_disjoint(op: Op, values: tuple[Any, ...], layout: Layout) -> None:
    """Refuses outputs that share memory with any other tensor."""
    written = layout.written
    spans = sorted([(values[i].start, values[i].stop, name in written, i) for i, name in layout.given])
    read = wrote = 0  # where the inputs, and the outputs, that start at or before this span end
    for start, stop, is_written, _ in spans:
        if start < wrote or (is_written and start < read):
            break
        if is_written:
            wrote = max(wrote, stop)
        else:
            read = max(read, stop)
    else:
        return
    # Windows of one buffer may interleave; what counts is a common element.
    for start, stop, is_written, i in spans:
        for first, last, _, j in spans if is_written else ():
            if i != j and first < stop and start < last and share(values[i], values[j]):
                other = op.params[j].shown
                raise refusal(op, op.params[i].shown, "memory of its own", f"some that {other} holds too")

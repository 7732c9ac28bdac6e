"""Judges calls that pool windows of rows to compressed keys, and their gradients.

The formulas of attention compute them: each channel of a window is a query row whose keys are the window's rows, whose
scores are the rows' gates, and whose values are the rows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from fusion_attention.ir.pooling import PoolingOperands, PoolingProblem
from fusion_attention.ir.problem import Extents, Problem
from fusion_attention.judging import expected_error, formulas
from fusion_attention.judging.chi_square_limits import Errors
from fusion_attention.judging.editable_call import Block
from fusion_attention.judging.error_location import Map
from fusion_attention.judging.expected_error import KERNEL, Grade
from fusion_attention.judging.formulas import Precision
from fusion_attention.judging.measure import Beside, Result, Subject, explanations
from fusion_attention.judging.outputs import Wanted
from fusion_attention.judging.standards import Tally
from fusion_attention.judging.verdict import Explanation

Tensor = torch.Tensor
OUT, BIAS = "out", "dposition_bias"
PAIRS = 1 << 21  # number of elements of a sequence that are computed in one step
# (name, description, advice, changed fields of Windows)
MISTAKES: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("compressor-halves", "The halves of overlapping windows are exchanged.",
     "The first channels pool the previous window's rows, the last channels the window's rows.",
     {"swapped": True}),
    ("compressor-first-window", "The first window pools rows before the sequence.",
     "They have no weight: their gates are -inf, not 0.",
     {"wrapped": True}),
    ("position-bias-missing", "The position bias is not added to the gates.", "Is position_bias passed?",
     {"unbiased": True}),
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Windows:
    """A call that pools windows of tokens to compressed keys, with fields that reproduce mistakes of kernels."""

    # problem, extents, operands: its parameters, the lengths of its sequences, and its tensors.
    problem: PoolingProblem
    extents: Extents
    operands: PoolingOperands
    # Returns the gradient of a sequence's results, [heads, windows, dim]; None: a forward.
    dout: Callable[[int], Tensor] | None
    # True if a window pools the last channels of the previous window's tokens, and the first of its own.
    swapped: bool = False
    wrapped: bool = False  # True if the first window pools tokens of zeros before it, with gates of 0
    unbiased: bool = False  # True if gates lack the bias

    def channel_ranges(self, b: int) -> Iterator[slice]:
        """Yields ranges of channels, each with about 2^21 (PAIRS) elements in all heads and rows of sequence b."""
        p = self.problem
        step = max(1, PAIRS // max(p.heads * int(self.extents.kv_len[b]), 1))
        return (slice(first, min(first + step, p.dim)) for first in range(0, p.dim, step))

    def block(self, b: int, channels: slice) -> Block:
        """Returns the pooling of sequence b as attention with heads * windows * channels heads.
        Each of these heads has one query, of no elements; its keys are the window's rows, their scores the gates of the
        channel, and their values the channel of kv."""
        p, o, first = self.problem, self.operands, int(self.extents.lo[b])
        end = (first + int(self.extents.q_len[b])) * p.ratio
        x, z = (view.sequence(b, p.heads, end).double() for view in (o.kv, o.gate))
        if o.bias is not None and not self.unbiased:
            z = z + o.bias.double()[torch.arange(end) % p.ratio]
        values, scores = (self._keys(t, first, channels) for t in (x, z))
        visible = torch.ones_like(scores, dtype=torch.bool)
        if p.overlap and first == 0 and not self.wrapped:
            visible.unflatten(0, (p.heads, -1, channels.stop - channels.start))[:, 0, :, :, : p.ratio] = False
        heads, keys = len(scores), scores.shape[-1]
        none = torch.zeros(heads, 1, 1, dtype=torch.float64)
        block = Block(
            Problem(heads, heads, 1, 1, dtype=p.dtype, bias="matrix"), b, slice(0, heads), slice(0, 1), slice(0, keys),
            keys, none, none.expand(-1, keys, -1), values.mT, None, None, 1.0, 0.0, scores, visible,
            torch.ones(1, dtype=torch.bool), q_len=1,
        )  # fmt: skip
        if self.dout is None:
            return block
        dout, right = self.dout(b)[..., channels].double().reshape(-1, 1, 1), formulas.forward(block)
        return replace(block, saved=(dout, right["out"], right["max"], right["sum"]))

    def _keys(self, rows: Tensor, first: int, channels: slice) -> Tensor:
        """Returns rows of kv or gate [heads, rows, elements] as keys of one-query attention heads, [heads * windows *
        channels, 1, keys]. first: the number of the first window that the call computes; rows begin at the sequence's
        start."""
        p = self.problem
        windows = rows.unflatten(1, (-1, p.ratio))
        if p.overlap:
            halves = windows.unflatten(-1, (2, p.dim))[..., channels].unbind(-2)
            before, current = halves[::-1] if self.swapped else halves
            before = torch.cat((torch.zeros_like(before[:, :1]), before[:, :-1]), 1)
            windows = torch.cat((before, current), 2)[:, first:]
        else:
            windows = windows[..., channels]
        return windows.transpose(2, 3).flatten(0, 2).unsqueeze(1)

    def _rows(self, keys: Tensor, b: int, channels: int) -> Tensor:
        """Returns key gradients [heads * windows * channels, 1, keys] as rows of sequence b, [heads, rows, 1 or 2,
        channels]: axis 2 has the two halves of a row if windows overlap. A row that no window pools is 0."""
        p, first, count = self.problem, int(self.extents.lo[b]), int(self.extents.q_len[b])
        windows = keys.reshape(p.heads, count, channels, -1).transpose(2, 3)
        memory = -(-int(self.extents.kv_len[b]) // p.ratio)
        result = keys.new_zeros(p.heads, memory + 1, p.ratio, 1 + p.overlap, channels)  # the first window is padding
        result[:, first + 1 : first + 1 + count, :, int(p.overlap and not self.swapped)] = windows[:, :, -p.ratio :]
        if p.overlap:
            result[:, first : first + count, :, int(self.swapped)] = windows[:, :, : p.ratio]
        return result[:, 1:].flatten(1, 2)[:, : int(self.extents.kv_len[b])]

    def sequence(self, b: int, grade: Grade | None) -> dict[str, tuple[Tensor, Tensor]]:
        """Returns (exact values, variances of their errors) of sequence b for each output, by name.
        Both are [heads, windows (of out) or rows (of gradients), elements]. grade: the steps in which a correct program
        rounds; None: a float32 program's values, which are also returned as variances."""
        p, e = self.problem, self.extents
        parts: dict[str, list[tuple[Tensor, Tensor]]] = {}
        for channels in self.channel_ranges(b) if int(e.q_len[b]) else ():
            width = channels.stop - channels.start
            for name, both in self.wanted(self.block(b, channels), grade).items():
                shown = [
                    t.reshape(p.heads, -1, 1, width) if name == OUT else self._rows(t.double(), b, width) for t in both
                ]
                parts.setdefault(name, []).append((shown[0], shown[1]))
        if not parts:
            names = {OUT: (0, p.dim)} if self.dout is None else dict.fromkeys(("dkv", "dgate"), (int(e.kv_len[b]), -1))
            none = {n: torch.zeros(p.heads, rows, p.dim if n == OUT else p.channels) for n, (rows, _) in names.items()}
            return {n: (t.double(), t.double()) for n, t in none.items()}
        return {
            name: (torch.cat([v for v, _ in each], -1).flatten(2), torch.cat([v for _, v in each], -1).flatten(2))
            for name, each in parts.items()
        }

    def wanted(self, block: Block, grade: Grade | None) -> dict[str, tuple[Tensor, Tensor]]:
        """Returns {output's name: (exact values, variances of their errors)} of one sequence's pooling as attention,
        [heads * windows * channels, 1, 1 or keys]; grade: the steps that round, or None."""
        precision = formulas.GOLDEN if grade is not None else Precision(torch.float32)
        if grade is KERNEL and self.problem.dtype != "float64":  # the kernels round no weight
            block = replace(block, problem=replace(block.problem, dtype="float32"))
        block = formulas.narrowed(block, precision)
        if self.dout is None:
            soft = formulas.softmax(block)
            value = formulas.forward(block, precision, soft)["out"]
            return {OUT: (value, value if grade is None else expected_error.forward(
                block, soft, value, grade, statistics=False)["out"])}  # fmt: skip
        scored = formulas.scored(block, precision)
        values = {"dkv": formulas.gradients(block, precision, scored)["dv"].mT, "dgate": scored.dscores}
        if grade is None:
            return {name: (value, value) for name, value in values.items()}
        delta = expected_error.delta(block, scored, grade)
        variances = {
            "dkv": expected_error.gradients(block, scored, delta, grade)["dv"].mT,
            "dgate": expected_error.scored(block, scored, delta, grade),
        }
        return {name: (value, variances[name]) for name, value in values.items()}


def serves(lowered: Any) -> bool:
    """True if a call pools windows of tokens to compressed keys, or computes the gradients of this pooling."""
    return str(lowered.op_kind).startswith("pooling")


def subject_of(operator: str, lowered: Any, captured: Mapping[str, Tensor]) -> Subject:
    """Returns the object that judges the outputs `captured` of a pooling call of `operator`."""
    of = getattr(lowered, "call", lowered)
    operands = lowered.fill(lowered.results()).operands[0]
    dout = None
    if of is not lowered:
        view = of.rows(lowered.dout.to(of.given("kv").dtype), of.problem.heads)
        dout = lambda b: view.sequence(b, of.problem.heads, int(of.extents.q_len[b]))  # noqa: E731
    return Pooled(Windows(of.problem, of.extents, operands, dout), of, captured)


@dataclass(frozen=True, eq=False)
class Pooled(Subject):
    """Judges a call that pools windows of tokens to compressed keys: x is the call, perhaps with a mistake, `of` its
    forward, captured the recorded outputs."""

    x: Windows
    of: Any
    captured: Mapping[str, Tensor]

    def measured(
        self, names: Sequence[str] | None, grade: Grade, beside: Beside = MappingProxyType({}), *,
        with_baseline: bool = False,
    ) -> Result:  # fmt: skip
        x, of, p, e = self.x, self.of, self.x.problem, self.x.extents
        captured = self.captured if names is None else {n: self.captured[n] for n in names}
        given: dict[str, Mapping[str, Tensor]] = {"": captured, **beside}
        shapes = {OUT: (p.heads, e.q_len.tolist(), p.dim), BIAS: (1, [p.ratio], p.channels)}
        tallies = {
            who: {n: _tally(t[n], *shapes.get(n, (p.heads, e.kv_len.tolist(), p.channels)), p) for n in captured}
            for who, t in given.items()
        }
        # The bias's gradient: values, variances, and values of a baseline program.
        sums = [torch.zeros(p.ratio, p.channels, dtype=torch.float64) for _ in range(3)]

        def add(name: str, b: int, wanted: Wanted) -> None:
            for who, t in given.items():
                if name == BIAS:
                    ours = t[name][None]
                else:
                    view = of.rows(t[name], p.heads) if name == OUT else of.memory_rows(t[name])
                    ours = view.sequence(b, p.heads, wanted.value.shape[1])
                tallies[who][name].add((b, slice(0, len(ours)), slice(0, ours.shape[1])), ours, wanted)

        for b in range(len(e)):
            expected, program = x.sequence(b, grade), x.sequence(b, None) if with_baseline else {}
            for name, (value, variance) in expected.items():
                if name in captured:
                    dtype = _dtype(captured[name], p)
                    baseline = program[name][0].to(dtype) if program else None
                    add(name, b, Wanted(value, grade.stored(value, variance, dtype), baseline))
            if BIAS in captured:
                for total, t in zip(
                    sums, (*expected["dgate"], program.get("dgate", expected["dgate"])[0]), strict=True
                ):
                    total.index_add_(0, torch.arange(t.shape[1]) % p.ratio, t.double().sum(0))
        if BIAS in captured:
            value, variance, baseline = (t[None] for t in sums)
            dtype, terms = _dtype(captured[BIAS], p, "float32"), int(e.q_len.sum()) * p.heads
            variance = variance + expected_error.summed(value, terms, getattr(torch, p.dtype), grade)
            add(BIAS, 0, Wanted(value, grade.stored(value, variance, dtype), baseline if with_baseline else None))
        errors = tallies.pop("")
        return Result(errors, {n: Map(tally, "rows") for n, tally in errors.items()}, tallies)

    def explained(self, base: Result) -> tuple[tuple[Explanation, ...], bool]:
        p, biased = self.x.problem, self.x.operands.bias is not None
        tries = (
            (name, "", means, fix, replace(self, x=replace(self.x, **fields)))
            for name, means, fix, fields in MISTAKES
            if (biased if "unbiased" in fields else p.overlap)
        )
        return explanations(tries, base, lambda tally: tally.rms), False


def _dtype(tensor: Tensor, p: PoolingProblem, name: str = "") -> torch.dtype:
    """Returns the dtype to which an output is rounded: its own; for float64 `name`, or if "" the call's dtype."""
    dtype: torch.dtype = tensor.dtype
    return dtype if dtype != torch.float64 else getattr(torch, name or p.dtype)


def _tally(tensor: Tensor, heads: int, lengths: list[int], columns: int, p: PoolingProblem) -> Tally:
    return Tally(tensor.dtype, Errors(lengths, heads, columns), p.ratio * (1 + p.overlap))

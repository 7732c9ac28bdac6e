"""The types Mistake (of a kernel), Try and Case (a judged call), and helpers for mistakes of all kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

from fusion_attention.ir.mask import INFINITE
from fusion_attention.ir.memory_views import RowView
from fusion_attention.ir.problem import Problem
from fusion_attention.judging.editable_call import Block, Setting
from fusion_attention.judging.expected_error import Grade
from fusion_attention.judging.formulas import Precision
from fusion_attention.judging.outputs import Output, Unit

Tensor = torch.Tensor
SIZES = (16, 32, 64, 128, 256)  # sizes of tiles
Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class Case:
    """A judged call, for the search of the mistake that explains its errors."""

    setting: Setting  # the call's tensors and parameters, without a mistake
    outputs: tuple[Output, ...]  # the recorded outputs
    names: dict[str, Any]  # arguments and derived sizes ("S1", "N2", ...) of the validated call, by name
    layout: str  # layout of the output's rows
    # The wrong rows of each output, bool [heads, rows] per sequence.
    wrong: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
    # For the exact rows of each output, a number that identifies the row (marked()), [heads, rows] per sequence.
    marks: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
    cached: dict[Any, Any] = field(default_factory=dict)  # cache of once(), for results that several mistakes use

    def once(self, what: Callable[[Case, Output], Result], o: Output) -> Result:
        """Returns what(case, o), cached per output o, because the searches for several mistakes use it."""
        if (what, o.name) not in self.cached:
            self.cached[what, o.name] = what(self, o)
        result: Result = self.cached[what, o.name]
        return result

    def wrong_rows_of(self, output: Output, count: int) -> list[tuple[int, int, int]]:
        """Returns up to `count` wrong (sequence, head, row) of an output, evenly spaced."""
        rows = [
            (b, head, row) for b, w in enumerate(self.wrong.get(output.name, ())) for head, row in w.nonzero().tolist()
        ]
        step = max((len(rows) - 1) / max(count - 1, 1), 1.0)
        return [rows[round(i * step)] for i in range(min(count, len(rows)))]


@dataclass(frozen=True, eq=False)
class Try:
    """One way to make a kernel mistake in a judged call: the call as the wrong kernel computes it."""

    detail: str  # the way, in a few words
    setting: Setting  # the call with the mistake
    outputs: tuple[Output, ...] | None = None  # the outputs if the mistake reads them in another way; None: unchanged


@dataclass(frozen=True)
class Mistake:
    """A well-known mistake of kernels: texts for reports, and a function `tries` that makes it in a judged call."""

    name: str  # name in reports
    means: str  # a sentence that describes the wrong kernel
    fix: str  # advice
    tries: Callable[[Case], Iterable[Try]]  # ways to make the mistake in a judged call; none if it is impossible there
    general: bool = False  # True for a mistake that reports list after others that explain the result equally well


def changing(name: str, means: str, fix: str, ways: Callable[[Setting, Problem], Mapping[str, Setting]]) -> Mistake:
    """Returns a Mistake that depends only on the call; name, means, fix: its texts in reports; ways(call, its
    parameters) returns {description: the call with the mistake}."""

    def tries(case: Case) -> Iterator[Try]:
        return (Try(detail, changed) for detail, changed in ways(case.setting, case.setting.problem).items())

    return Mistake(name, means, fix, tries)


def wrong_outputs(case: Case) -> list[Output]:
    """Returns the outputs of the judged call `case` of which some rows are wrong, without softmax statistics."""
    statistics = ("max", "sum", "lse")
    return [o for o in case.outputs if o.kind not in statistics and any(w.any() for w in case.wrong.get(o.name, ()))]


def out_of(case: Case) -> Output | None:
    """Returns the attention output of the judged call `case` if some of its rows are wrong, else None."""
    return next((o for o in wrong_outputs(case) if o.kind == "out"), None)


def wrong_area(case: Case, o: Output) -> list[Tensor]:
    """Returns the rows of output o of the judged call `case` that may be wrong: bool [heads, rows] per sequence. Some
    rows between wrong rows may be correct by chance. So all heads are included if most are wrong, and all rows between
    the first and last wrong row if half of them are."""
    areas = []
    for wrong in case.wrong[o.name]:
        heads, rows = wrong.any(1), wrong.any(0)
        heads |= torch.tensor(2 * int(heads.sum()) > len(heads))
        at = rows.nonzero().flatten()
        if len(at) and 2 * len(at) > int(at[-1] - at[0]) + 1:
            rows[at[0] : at[-1] + 1] = True
        areas.append(heads[:, None] & rows)
    return areas


def wrong_rows(case: Case, o: Output | None) -> Callable[[Block | Unit], Tensor]:
    """Returns a function from a range of heads and rows of a sequence to bool [heads, rows, 1], true for rows that may
    be wrong in output o."""
    areas = [] if o is None else wrong_area(case, o)
    return lambda x: areas[x.b][x.heads, x.rows, None]


def layouts(case: Case, view: RowView, heads: int, *, of_keys: bool = False) -> Iterator[tuple[str, RowView]]:
    """Yields (layout, view of the same memory in this layout) for layouts such as "BNSD" other than that of the judged
    call `case`. view: tensor of `heads` heads: keys if of_keys, else queries."""
    e, dim = case.setting.extents, view.dim
    lengths, starts = (e.kv_len, e.kv_start) if of_keys else (e.q_len, e.q_start)
    count = len(e)
    if heads == 1 or len(view.keep) != 1:
        return
    if case.layout in ("TND", "NTD"):
        total = int(lengths.sum())
        ways = {"NTD": (starts * dim, dim, total * dim), "TND": (starts * heads * dim, heads * dim, dim)}
    else:
        rows = int(case.names.get("S2" if of_keys else "S1") or lengths.max(initial=1))
        batch = np.arange(count) * rows * heads * dim
        ways = {"BNSD": (batch, dim, rows * dim), "BSND": (batch, heads * dim, dim)}
        ways["SBH"] = (np.arange(count) * heads * dim, count * heads * dim, dim)
    yield from reread(view, ways).items()


def reread(view: RowView, orders: Mapping[str, tuple[Any, int, Any]]) -> dict[str, RowView]:
    """Returns views of the memory of `view` in other orders, by name, except those equal to `view`. orders: name ->
    (address of each sequence, stride of tokens, stride of heads: one, or one per sequence)."""
    results = {}
    for name, (address, token, head) in orders.items():
        strides = np.full(len(view.address), head, np.int64)
        other = RowView(view.keep, np.asarray(address, np.int64), token, strides, view.dim)
        same = token == view.stride_token and (strides == view.stride_head).all()
        if not (same and (other.address == view.address).all()):
            results[name] = other
    return results


def factor_of(mine: Tensor, right: Tensor) -> float:
    """Returns the factor that brings `right` nearest to `mine`, rounded to two digits if that is nearly as near."""
    factor = float((mine * right).sum() / right.square().sum())
    short = float(f"{factor:.2g}")
    left, left_of_short = (float((mine - by * right).norm()) for by in (factor, short))
    return short if left_of_short <= 1.5 * left else factor


def returning(setting: Setting, change: Callable[..., Tensor], errors: Callable[..., Tensor] | None = None) -> Setting:
    """Returns a copy of a setting (a judged call with its mistakes), whose expected results pass through `change` after
    the changes that it already has. errors: a function that changes the variances of the expected rounding errors
    alike; None: they stay."""
    added = () if errors is None else (errors,)
    return setting.changed(returns=(*setting.returns, change), errors=(*setting.errors, *added))


def of_results(
    setting: Setting, changes: Mapping[str, Callable[..., Tensor]], errors: Callable[..., Tensor] | None = None
) -> Setting:
    """Returns a copy of a setting (a judged call with its mistakes), whose expected results of some kinds ("out",
    "max", "sum", "lse") are changed; errors: a function that changes the variances of their rounding errors, or None.
    changes: by kind, a function (result, all results by kind, block) -> changed result."""

    def change(kind: str, value: Tensor, raw: dict[str, Tensor], x: Block, p: Precision) -> Tensor:
        return changes[kind](value, raw, x) if kind in changes else value

    return returning(setting, change, errors)


def grown(kind: str, variance: Tensor, before: Tensor, after: Tensor, x: Block, grade: Grade) -> Tensor:
    """Returns the error variances of changed rows: multiplied by after^2 / before^2, the ratio of the rows' sums of
    squares, if that exceeds 1; unchanged for softmax statistics. before, after: the rows without and with the change,
    [heads, rows, elements]."""
    if kind in ("max", "sum", "lse"):
        return variance
    sizes = (t.double().square().sum(-1, keepdim=True) for t in (after, before))
    growth = torch.div(*sizes).nan_to_num(1.0, 1.0, 1.0).clamp_min(1.0)
    return variance * growth


def finite(edge: np.ndarray) -> np.ndarray:
    """Returns bool [sequences], true where the edge of a mask's band is finite."""
    return np.abs(edge) < INFINITE // 2


def moved(edge: np.ndarray, by: np.ndarray | int) -> np.ndarray:
    """Returns the edge of a mask's band, per sequence, shifted by a number of keys; an infinite edge stays infinite."""
    return np.where(finite(edge), edge + by, edge)


def opened(s: Setting) -> Setting:
    """Returns the call without its mask's band: queries see all keys that the mask tensor does not remove."""
    e = s.extents
    lo, hi = np.full_like(e.lo, -INFINITE), np.full_like(e.hi, INFINITE)
    return s.of_extents(lo=lo, hi=hi, prefix=np.zeros_like(e.prefix))


def without_matrix(s: Setting) -> Setting:
    """Returns the call without its mask tensor."""
    return s.of_problem(has_blocked=False, has_blocked_tiles=False)


def unmasked(s: Setting) -> Setting:
    """Returns the call with all keys visible to all queries."""
    return without_matrix(opened(s))


def same_band(one: Setting, other: Setting) -> bool:
    """True if the mask's bands of two variants of a call show every query the same keys."""
    for b in range(len(one.extents)):
        rows = np.arange(one.extents.q_len[b])
        (lo, hi), (low, high) = (s.extents.row_interval(b, rows) for s in (one, other))
        some, too = hi > lo, high > low
        if (some != too).any() or (some & ((lo != low) | (hi != high))).any():
            return False
    return True

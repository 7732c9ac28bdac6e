"""The outputs of a call, whatever its layout, as rows of a sequence and head; and what the formulas say they are.

Knows how each family returns statistics. Refuses to judge.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fusion_attention.judging import formulas
from fusion_attention.judging.formulas import Precision
from fusion_attention.judging.setting import Setting
from fusion_attention.ops.inference.call import LSE, InferenceCall
from fusion_attention.ops.sparse.call import Sparse, SparseBackward
from fusion_attention.ops.training.run import DenseBackward, DenseForward, PlainForward
from fusion_attention.waist.kv import RowView

Tensor = torch.Tensor
FLT_MAX = torch.finfo(torch.float32).max
# Scores of one block: about as many doubles as this are in memory a few times.
PAIRS = 1 << 21
_KEYS = ("dk", "dv", "dk_rope")
_GRADS = {"dquery": "dq", "dkey": "dk", "dvalue": "dv", "dquery_rope": "dq_rope", "dkey_rope": "dk_rope",
          "dsinks": "dsink"}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Output:
    """One output of a call as it was captured.

    Attributes:
        name: as its record has it. kind: "out", "max", "sum", "lse", or a gradient's name in the formulas.
        view: its rows; None: one number per head, which all sequences add up to.
        tensor: where it lies; form: how its family returns statistics ("training", "sparse", "own").
    """

    name: str
    kind: str
    tensor: Tensor
    view: RowView | None
    form: str = "own"

    @property
    def by_keys(self) -> bool:
        """Its rows are tokens of the key side."""
        return self.kind in _KEYS

    def rows(self, setting: Setting, b: int, heads: slice, rows: slice) -> Tensor:
        """[heads, rows, elements] of sequence b."""
        assert self.view is not None
        p, e = setting.problem, setting.extents
        count, length = (p.heads_kv, e.kv_len[b]) if self.by_keys else (p.heads_q, e.q_len[b])
        return self.view.sequence(b, count, int(length))[heads, rows]


@dataclass(frozen=True)
class Unit:
    """A piece that is computed at once: query heads and rows (or, of by_keys, keys) of a sequence."""

    b: int
    heads: slice
    rows: slice
    by_keys: bool = False


def setting_of(call: Any, captured: Mapping[str, Tensor]) -> tuple[Setting, list[Output]]:
    """A lowered dense, decode or sparse call, and its captured outputs."""
    scratch = call.results()
    filled = call.fill(scratch)
    filled.begin()
    operands, *grads = filled.operands
    shown = call.fill({**scratch, **captured}).operands
    setting = Setting(call.verb, call.problem, call.extents, operands, grads[0] if grads else None)
    if isinstance(call, (DenseBackward, SparseBackward)):
        return setting, list(_gradients(call, shown[1], captured))
    return setting, list(_forward(call, shown[0], captured))


def _forward(call: Any, shown: Any, captured: Mapping[str, Tensor]) -> Iterator[Output]:
    for name, tensor in captured.items():
        if name in ("attention_out", "out", "output"):
            yield Output(name, "out", tensor, shown.out)
        elif name == LSE and isinstance(call, InferenceCall):
            flat = tensor.squeeze(-1)
            yield Output(name, "lse", tensor, _over(shown, flat.squeeze(0).mT if call.lse_by_batch else flat))
        elif name in ("softmax_max", "softmax_sum", "max", "sum"):
            kind = name.removeprefix("softmax_")
            if isinstance(call, DenseForward):
                yield Output(name, kind, tensor, _over(shown, _of_lanes(tensor)), "training")
            elif isinstance(call, Sparse):
                flat = tensor.movedim(0 if call.layout == "TND" else 1, -2).flatten(-2)
                yield Output(name, kind, tensor, _over(shown, flat), "sparse")
            elif isinstance(call, (PlainForward, InferenceCall)):
                yield Output(name, kind, tensor, _over(shown, tensor))


def _over(shown: Any, flat: Tensor) -> RowView:
    view: RowView = shown.stats.max.over(flat.contiguous())
    return view


def _of_lanes(tensor: Tensor) -> Tensor:
    """The number that a row's lanes repeat; where they differ, off by all that they differ by."""
    first = tensor[..., :1]
    same = (tensor == first) | (tensor.isnan() & first.isnan())
    return first[..., 0] + (tensor - first).abs().masked_fill(same, 0).sum(-1)


def _gradients(call: Any, shown: Any, captured: Mapping[str, Tensor]) -> Iterator[Output]:
    for name, tensor in captured.items():
        kind = _GRADS.get(name, name)
        if kind == "dsink":
            yield Output(name, kind, tensor, None)
        elif getattr(shown, kind, None) is not None and kind != "dpse" and tensor.numel():
            yield Output(name, kind, tensor, getattr(shown, kind))


def units(setting: Setting, outputs: list[Output]) -> Iterator[Unit]:
    """Every piece of a call, each of about PAIRS scores."""
    p, e = setting.problem, setting.extents
    kinds = {o.by_keys for o in outputs}
    for b in range(len(e)):
        q_len, kv_len = int(e.q_len[b]), int(e.kv_len[b])
        for by_keys in sorted(kinds):
            length, other = (kv_len, q_len) if by_keys else (q_len, kv_len)
            heads = min(p.heads_q, max(p.group, PAIRS // max(length * other, 1) // p.group * p.group))
            step = min(max(length, 1), max(1, PAIRS // max(heads * other, 1)))
            for head in range(0, p.heads_q, heads):
                for first in range(0, length, step):
                    rows = slice(first, min(first + step, length))
                    yield Unit(b, slice(head, min(head + heads, p.heads_q)), rows, by_keys)


def computed(setting: Setting, unit: Unit, outputs: list[Output], *precisions: Precision) -> list[dict[str, Tensor]]:
    """Per precision: what the outputs of a unit should be, by name, [heads, rows, elements]."""
    b, e = unit.b, setting.extents
    if setting.grads is not None:
        return [_gradient(setting, unit, outputs, precision) for precision in precisions]
    block = setting.block(b, unit.heads, unit.rows)
    found = []
    for precision in precisions:
        raw = formulas.forward(block, precision)
        keyless = int(e.kv_len[b]) == 0
        found.append({o.name: _as_returned(o, raw, block, precision, keyless=keyless) for o in outputs})
        for change in setting.returns:
            found[-1] = {o.name: change(o.kind, found[-1][o.name], raw, block, precision) for o in outputs}
    return found


def _as_returned(o: Output, raw: dict[str, Tensor], block: Any, p: Precision, *, keyless: bool) -> Tensor:
    """A result as its family returns it."""
    if o.kind == "out":
        return raw["out"]
    top, total = raw["max"], raw["sum"]
    found = top if o.kind == "max" else total
    if o.kind == "lse":
        lowest = torch.finfo(torch.float32).min
        found = (top + total.log()).masked_fill(top == -math.inf, lowest).masked_fill(total == 0, math.inf)
        if block.sink is not None:
            found = found.masked_fill(~block.seen.any(-1, keepdim=True), math.inf)
    elif o.form == "training":
        found = top.clamp_min(-FLT_MAX) if o.kind == "max" else total.masked_fill((top == -math.inf) & (total == 0),
                                                                                 FLT_MAX)  # fmt: skip
        found = torch.zeros_like(found) if keyless else found
    elif o.form == "sparse":
        found = found.masked_fill((top == -math.inf) | torch.tensor(keyless), 0)
    return found if p.low is None else found.float()


def _gradient(setting: Setting, unit: Unit, outputs: list[Output], p: Precision) -> dict[str, Tensor]:
    e, problem = setting.extents, setting.problem
    wanted = [o for o in outputs if o.by_keys == unit.by_keys and o.view is not None]
    if not unit.by_keys:
        raw = formulas.gradients(setting.block(unit.b, unit.heads, unit.rows), p)
    else:
        raw = {}
        step = max(1, PAIRS // max((unit.rows.stop - unit.rows.start) * (unit.heads.stop - unit.heads.start), 1))
        for first in range(0, int(e.q_len[unit.b]), step):
            rows = slice(first, min(first + step, int(e.q_len[unit.b])))
            for name, value in formulas.gradients(setting.block(unit.b, unit.heads, rows, unit.rows), p).items():
                if name in _KEYS:
                    raw[name] = raw[name] + value if name in raw else value
        if problem.shares_kv and raw:
            raw["dk"][..., : problem.dim_v] += raw["dv"]
        raw = {name: _by_key_head(value, problem.group, setting.of_group) for name, value in raw.items()}
    return {o.name: p.stored(raw[o.kind]) for o in wanted if o.kind in raw}


def _by_key_head(value: Tensor, group: int, how: str) -> Tensor:
    grouped = value.unflatten(0, (-1, group))
    if how in ("first", "last"):
        return grouped[:, 0 if how == "first" else -1]
    return grouped.mean(1) if how == "mean" else grouped.sum(1)


def of_heads(setting: Setting, unit: Unit) -> slice:
    """The heads of a unit's outputs."""
    group = setting.problem.group
    return slice(unit.heads.start // group, unit.heads.stop // group) if unit.by_keys else unit.heads

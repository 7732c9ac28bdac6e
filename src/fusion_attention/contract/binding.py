"""Checking a call against its record: stage by stage, with every failure of the first stage that has one.

A signature that was found legal is remembered. Refuses to know what any operator computes.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch

from fusion_attention.contract.arguments import Span, array_of, intact, is_memory, losses, members, spans_of
from fusion_attention.contract.expressions import evaluate, lazy, parse, scope
from fusion_attention.contract.record import (
    Array,
    Attr,
    ContractError,
    ContractWarning,
    Failure,
    Op,
    Rule,
    Tensor,
    Tensors,
)
from fusion_attention.contract.stages import ask, first_stages
from fusion_attention.settings import current

# How many signatures of one operator are remembered.
SIGNATURES_KEPT = 1024
Made = TypeVar("Made")


@dataclass(eq=False, slots=True)
class Memo:
    """What all calls of one signature with the same arrays share: everything but tensors and their content.

    Attributes:
        lowered: what the record's lowering made of names (Bound.once).
        run: how a forward call was laid on its outputs; templates: of a decoding call's results.
        laid: by back end, a dense call's plan with its views.
        two_phase: how the tensors of a two-phase call were found to lie.
    """

    lowered: Any = None
    run: Any = None
    templates: Any = None
    laid: dict[str, Any] = field(default_factory=dict)
    two_phase: dict[Any, Any] = field(default_factory=dict)


@dataclass(eq=False)
class Bound:
    """A checked call: every canonical name with its value.

    Attributes:
        names: axes, attributes, arrays (int64 numpy), tensors (None where absent), and what the record derives.
        memo: shared by all calls of one signature with the same arrays.
    """

    op: Op
    names: dict[str, Any]
    memo: Memo

    def once(self, make: Callable[[dict[str, Any]], Made]) -> Made:
        """What a lowering makes of names that are no tensors: made by the first of the calls that share a memo."""
        made: Made | None = self.memo.lowered
        if made is None:
            made = self.memo.lowered = make(self.names)
        return made

    def __getitem__(self, name: str) -> Any:
        return self.names[name]


@dataclass(eq=False)
class _Signature:
    """What is known of all calls of one signature: shapes, strides, dtypes, attributes, and which arrays came.

    Attributes:
        names: those with one value for all of them; tensors: (name, position) of those given; spans: of their memory.
        rules: what may turn out otherwise when arrays change; reads: what may at every call; notes: found for all.
        settled: the last arrays with what they led to. Layers of a model share lengths, steps do not.
    """

    names: dict[str, Any]
    tensors: tuple[tuple[str, int], ...]
    spans: tuple[Span, ...]
    rules: list[Rule]
    reads: list[Rule]
    notes: list[Failure] = field(default_factory=list)
    settled: _Settled | None = None


@dataclass(frozen=True, eq=False)
class _Settled:
    arrays: tuple[bytes | None, ...]
    names: dict[str, Any]
    notes: list[str]
    memo: Memo = field(default_factory=Memo)


def bind(
    op: Op,
    args: Mapping[str, Any],
    *,
    strict: bool | None = None,
    check_content: bool | None = None,
    reads: bool = True,
    memory: bool = True,
) -> Bound:
    """Checks a call against its record, stage by stage, and gives every name its value.

    A signature (shapes, strides, dtypes, attributes) that was found legal is found again by one look-up; arrays are
    compared with the last ones, and what reads tensor content is asked at every call, as are storages, which may be
    resized under a tensor, whether they still hold it.

    Args:
        op: the record.
        args: values by canonical name; a missing name is as None.
        strict: limits and doubts are errors too; None: as settings say.
        check_content: rules that read tensor data on request are asked too; None: as settings say.
        reads: so are those that always do; False where the data may not be there yet.
        memory: False in a trace, whose tensors have none.

    Raises:
        ContractError: with every failure of the first stage that found one.
    """
    asked = current()
    strict = asked.strict if strict is None else strict
    check_content = asked.check_content if check_content is None else check_content
    given: list[Any] = list(map(args.get, op.by_name))
    arrays = []
    for at in op.positions[Tensors]:
        given[at] = members(given[at])
    for at in op.positions[Array]:
        if given[at] is not None:
            if memory and isinstance(given[at], torch.Tensor):
                intact(op.name, (op.params[at].shown,), (given[at],))
            given[at] = array = array_of(op, at, given[at])
            arrays.append(array.tobytes() if isinstance(array, np.ndarray) else None)
    content = tuple(arrays)
    key, known = _find(op, given, strict)
    known = known or _learn(op, given, strict)
    for at, i, size, need in known.spans if memory else ():
        t = given[at] if i < 0 else given[at][i]
        if t.untyped_storage().nbytes() < t.storage_offset() * size + need:
            raise ContractError(losses(op, given, known.spans))
    tensors = {name: given[at] for name, at in known.tensors}
    settled = known.settled
    if settled is None or settled.arrays != content:
        settled = _settle(op, known, given, tensors, content, reads)
        _keep(op, key, known)
        names = {**settled.names, **tensors}
    else:
        names = {**settled.names, **tensors}
        if reads:
            ask(op, known.reads, names)
    if check_content and reads and not any(t.is_meta for name in tensors for t in members(tensors[name])):
        ask(op, [r for r in op.asked if r.level == "content"], names)
    if settled.notes:
        level = outside()
        for note in settled.notes:
            warnings.warn(note, ContractWarning, stacklevel=level)
    return Bound(op, names, settled.memo)


def _find(op: Op, given: list[Any], strict: bool) -> tuple[Any, _Signature | None]:
    """(key, signature); the key is None where a value cannot be part of one, and is most likely wrong."""
    at = op.positions
    attributes = [given[i] for i in at[Attr]]
    key: list[Any] = [strict, *attributes, *map(type, attributes)]  # True == 1 == 1.0, but not all of them are legal.
    try:
        for i in at[Tensor]:
            t = given[i]
            key.append(t if t is None else (type(t), t.shape, t.dtype, t.stride(), t.device, lazy(t)))
        key += [type(given[i]) for i in at[Array]]
        if op.watched and torch.is_grad_enabled():
            for i in op.watched:
                t = given[i]
                if type(t) is tuple:
                    key += [one.requires_grad for one in t]
                elif t is not None:
                    key.append(t.requires_grad)
        for i in at[Tensors]:
            key.append(tuple((type(t), t.shape, t.dtype, t.stride(), t.device, lazy(t)) for t in given[i] or ()))
        found = tuple(key)
        return found, op.signatures.get(found)
    except Exception:  # No tensor, no strides (sparse, nested), no hash.
        return None, None


def _learn(op: Op, given: list[Any], strict: bool) -> _Signature:
    """The stages before lengths: a new signature, with every other rule still to be asked."""
    levels = ("meaning", "note", "limit", "doubt", "hint") if strict else ("meaning", "note", "doubt")
    asked = [r for r in op.asked if r.level in levels]
    if strict:
        asked = [replace(r, level="limit") if r.level == "doubt" else r for r in asked]
    names = first_stages(op, given, asked)
    layout = str(names.get(op.layout_attr, ""))
    tensors = tuple((p.name, i) for i, p in enumerate(op.params) if isinstance(p, Tensor) and names[p.name] is not None)
    rules = [r for r in asked if r.stage in ("lengths", "rules") and (not r.only or layout in r.only)]
    # Tensors belong to one call: keeping them would keep their memory.
    kept = {name: value for name, value in names.items() if not is_memory(value)}
    return _Signature(kept, tensors, spans_of(given, [at for _, at in tensors]), rules, [])


def _settle(
    op: Op, known: _Signature, given: list[Any], tensors: dict[str, Any], content: tuple[bytes | None, ...], reads: bool
) -> _Settled:
    """The stages from lengths on, for new arrays."""
    arrays = {op.params[i].name: given[i] for i in op.positions[Array] if given[i] is not None}
    names = {**known.names, **tensors, **arrays}
    ask(op, [r for r in known.rules if r.stage == "lengths"], names)
    derived = op.derive(names)
    names |= derived
    notes = known.notes + ask(op, [r for r in known.rules if r.stage == "rules" and (reads or not r.reads)], names)
    if known.settled is None:
        known.rules = _changing(op, known.rules, {*arrays, *derived} if arrays else set(), names)
        known.reads = [r for r in known.rules if r.reads]
        known.notes = [n for n in notes if n.rule not in known.rules]
    kept = {name: value for name, value in names.items() if not is_memory(value)}
    # Another thread may have settled the signature meanwhile, with other arrays: this call keeps its own.
    found = known.settled = _Settled(content, kept, list(map(str, notes)))
    return found


def _changing(op: Op, rules: list[Rule], changing: set[str], names: dict[str, Any]) -> list[Rule]:
    """The rules that may turn out otherwise when the values of some names change, or tensor content."""
    within = scope(names, op.functions)

    def touched(text: str) -> bool:
        return not changing.isdisjoint(parse(text).names + parse(text).axes)

    def applies(rule: Rule) -> bool:
        return all(touched(part) or evaluate(part, within) for part in parse(rule.when or "True").parts)

    return [r for r in rules if (r.reads or touched(r.check) or touched(r.when or "True")) and applies(r)]


def _keep(op: Op, key: Any, known: _Signature) -> None:
    if key is not None and key not in op.signatures:
        if len(op.signatures) >= SIGNATURES_KEPT:
            op.signatures.clear()
        op.signatures[key] = known


def outside() -> int:
    """The stack level of the first caller outside this package, where a warning points."""
    level, frame, house = 1, sys._getframe(1), __name__.split(".")[0]
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] == house:
        level, frame = level + 1, frame.f_back
    return level

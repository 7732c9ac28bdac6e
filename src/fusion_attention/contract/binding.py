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

from fusion_attention.contract.arguments import (
    TYPES,
    Fault,
    Span,
    array_of,
    intact,
    is_memory,
    is_type,
    losses,
    members,
    no_tensor,
    no_tensors,
    spans_of,
)
from fusion_attention.contract.expressions import dtype_text, evaluate, lazy, parse, scope, shape_text, show, size_of
from fusion_attention.contract.record import (
    NULL_POINTER,
    REQUIRED,
    WARNED,
    Array,
    Attr,
    ContractError,
    ContractWarning,
    Failure,
    Op,
    Param,
    Rule,
    Tensor,
    Tensors,
)
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
            _raise(losses(op, given, known.spans))
    tensors = {name: given[at] for name, at in known.tensors}
    settled = known.settled
    if settled is None or settled.arrays != content:
        settled = _settle(op, known, given, tensors, content, reads)
        _keep(op, key, known)
        names = {**settled.names, **tensors}
    else:
        names = {**settled.names, **tensors}
        if reads:
            _ask(op, known.reads, names)
    if check_content and reads and not any(t.is_meta for name in tensors for t in members(tensors[name])):
        _ask(op, [r for r in op.asked if r.level == "content"], names)
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
    values = {p.name: _value(op, p, value) for p, value in zip(op.params, given, strict=True)}
    _raise(_presence(op, values))
    levels = ("meaning", "note", "limit", "doubt", "hint") if strict else ("meaning", "note", "doubt")
    asked = [r for r in op.asked if r.level in levels]
    if strict:
        asked = [replace(r, level="limit") if r.level == "doubt" else r for r in asked]
    names: dict[str, Any] = {**op.neutral, **values}
    _ask(op, [r for r in asked if r.stage == "presence"], names)
    typed, _ = _asked(op, [r for r in asked if r.stage == "dtype"], names)
    _raise(_dtypes(op, names) + _devices(op, names) + _layout(op, names) + typed)
    layout = str(names.get(op.layout_attr, ""))
    _raise(_ranks(op, names))
    _raise(_axes(op, names))
    _raise(_domains(op, names))
    tensors = tuple(
        (p.name, i) for i, p in enumerate(op.params) if isinstance(p, Tensor) and values[p.name] is not None
    )
    rules = [r for r in asked if r.stage in ("lengths", "rules") and (not r.only or layout in r.only)]
    # Tensors belong to one call: keeping them would keep their memory.
    kept = {name: value for name, value in names.items() if not is_memory(value)}
    return _Signature(kept, tensors, spans_of(given, [at for _, at in tensors]), rules, [])


def _settle(
    op: Op,
    known: _Signature,
    given: list[Any],
    tensors: dict[str, Any],
    content: tuple[bytes | None, ...],
    reads: bool,
) -> _Settled:
    """The stages from lengths on, for new arrays."""
    arrays = {op.params[i].name: given[i] for i in op.positions[Array] if given[i] is not None}
    names = {**known.names, **tensors, **arrays}
    _ask(op, [r for r in known.rules if r.stage == "lengths"], names)
    derived = op.derive(names)
    names |= derived
    notes = known.notes + _ask(op, [r for r in known.rules if r.stage == "rules" and (reads or not r.reads)], names)
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


def _value(op: Op, p: Param, value: Any) -> Any:
    """An argument as rules see it: defaults filled in, numpy scalars plain, blank tensors None."""
    if isinstance(p, Attr):
        if value is None:
            return None if p.default is REQUIRED else p.default
        return value.item() if isinstance(value, np.generic) else value
    if isinstance(p, Tensor) and isinstance(value, torch.Tensor) and p.optional and op.blank_is_absent:
        # Rows that are as empty as the call itself are still rows.
        rows = p.shape and value.dim() > 1 and value.shape[-1] > 0
        return None if value.dim() == 0 or (value.numel() == 0 and not rows) else value
    return value


def _presence(op: Op, values: dict[str, Any]) -> list[Failure]:
    failures = []
    for p in op.params:
        value, output = values[p.name], isinstance(p, Tensor) and p.output
        fault: Fault | None = None
        if value is None:
            if not (p.optional or output or (isinstance(p, Attr) and p.default is not REQUIRED)):
                what = p.text.split(". ")[0].removesuffix(".")
                failures.append(Failure(op.name, p.shown, f"a value ({what}.)", "None", code=NULL_POINTER))
        elif isinstance(p, Tensors):
            fault = no_tensors(value)
        elif isinstance(p, Tensor):
            fault = no_tensor(value, output)
        elif isinstance(p, Array):
            fault = None if isinstance(value, np.ndarray) else ("integers (list, tuple or tensor)", show(value), "")
        elif isinstance(p, Attr) and not is_type(value, p):
            wanted = "an int below 2**64" if p.unsigned else TYPES.get(p.type, f"a {p.type.__name__}")
            fault = wanted, show(value), ""
        if fault:
            failures.append(Failure(op.name, p.shown, *fault))
    return failures


def _dtypes(op: Op, names: dict[str, Any]) -> list[Failure]:
    failures = []
    for p in op.tensors(False) + op.tensors(True):
        if names.get(p.name) is None or not p.dtypes:
            continue
        allowed, source = p.dtypes.split(), ""
        if p.dtypes.startswith("="):
            other = p.dtypes[1:]
            allowed, source = [dtype_text(members(names[other])[0])], f" as {op.by_name[other].shown}"
        wrong = [found for t in members(names[p.name]) if (found := dtype_text(t)) not in allowed]
        if wrong:
            got = wrong[0]
            failures.append(Failure(op.name, p.shown, " or ".join(allowed) + source, got, p.cast))
    return failures


def _devices(op: Op, names: dict[str, Any]) -> list[Failure]:
    failures = []
    first: Tensor | None = None
    for p in op.tensors(False) + op.tensors(True):
        value = names.get(p.name)
        if value is None or (p.on_host and value.device.type == "cpu"):
            continue
        first = first or p
        device = members(names[first.name])[0].device
        strange = [t.device for t in members(value) if t.device != device]
        if strange:
            expected = f"a tensor on {device} as {first.shown}"
            failures.append(Failure(op.name, p.shown, expected, f"one on {strange[0]}", f'move it: .to("{device}")'))
    return failures


def _layout(op: Op, names: dict[str, Any]) -> list[Failure]:
    if not op.layouts or names[op.layout_attr] in op.layouts:
        return []
    got, advice = names[op.layout_attr], "layout strings are upper case"
    if got.upper() not in op.layouts:
        advice = f"{op.name} has no other"
    shown = op.by_name[op.layout_attr].shown
    return [Failure(op.name, shown, "one of " + ", ".join(op.layouts), show(got), advice)]


def _ranks(op: Op, names: dict[str, Any]) -> list[Failure]:
    failures = []
    for p in op.tensors(False) + op.tensors(True):
        layout = op.layout_of(p, names)
        where = f" in layout {layout}" if op.layouts else ""
        value, words = names.get(p.name), p.words(layout)
        if value is not None and words and not isinstance(p, Tensors) and value.dim() != len(words):
            expected = f"{len(words)} dimensions {shape_text(' '.join(words))}{where}"
            failures.append(Failure(op.name, p.shown, expected, f"{value.dim()} dimensions {list(value.shape)}"))
    return failures


def _axes(op: Op, names: dict[str, Any]) -> list[Failure]:
    """Binds axis words, attributes before tensors; the first that shows an axis decides its size."""
    origin: dict[str, str] = {}
    for p in op.params:
        if isinstance(p, Attr) and p.axis and (names[p.name] != p.default or p.default):
            if names[p.name] <= 0:
                return [Failure(op.name, p.shown, f"{p.shown} > 0", show(names[p.name]))]
            names[p.axis], origin[p.axis] = names[p.name], p.shown
    failures = []
    for p in op.tensors(False) + op.tensors(True):
        value, words = names.get(p.name), p.words(op.layout_of(p, names))
        shape = () if value is None or isinstance(p, Tensors) else value.shape
        for position, (word, size) in enumerate(zip(words, shape)):  # noqa: B905
            expected = _bind_axis(word, size, names, origin, p.shown)
            if expected:
                failures.append(Failure(op.name, p.shown, f"axis {position} to be {expected}", str(size)))
    return failures


def _bind_axis(word: str, size: int, names: dict[str, Any], origin: dict[str, str], param: str) -> str:
    """Binds the one unknown factor of an axis word, or compares; what was expected if they disagree."""
    factors = word.split("*")
    unknown = [f for f in factors if not f.isdigit() and names.get(f) is None]
    if len(unknown) == 1:
        rest = "*".join(f for f in factors if f != unknown[0])
        known = size_of(rest, names) if rest else 1
        if rest and (not known or not size or size % known):
            return f"a positive multiple of {rest}={known}" + _origins(rest, origin, param)
        names[unknown[0]], origin[unknown[0]] = size // (known or 1), param
        return ""
    known = size_of(word, names)
    # Two unknown factors: the tensor that would have shown one of them has failed.
    return "" if known in (size, None) else f"{word}={known}" + _origins(word, origin, param)


def _origins(word: str, origin: dict[str, str], param: str) -> str:
    """Which other parameters an axis word's sizes come from."""
    sources = [origin[f] for f in word.split("*") if f in origin and origin[f] != param]
    return f" as in {', '.join(dict.fromkeys(sources))}" if sources else ""


def _domains(op: Op, names: dict[str, Any]) -> list[Failure]:
    within = scope(names, op.functions)
    return [
        Failure(op.name, p.shown, op.spell(p.domain), show(names[p.name]), code=p.code)
        for p in op.params
        if isinstance(p, Attr) and p.domain and not evaluate(p.domain, within)
    ]


def _asked(op: Op, rules: list[Rule], names: dict[str, Any]) -> tuple[list[Failure], list[Failure]]:
    """(failures, notes) of the rules that apply."""
    failures: list[Failure] = []
    notes: list[Failure] = []
    if not rules:
        return failures, notes
    layout, within = names.get(op.layout_attr), scope(names, op.functions)
    for rule in rules:
        if (rule.only and layout not in rule.only) or (rule.when and not evaluate(rule.when, within)):
            continue
        outcome = evaluate(rule.check, within)
        if isinstance(outcome, str) or not outcome:
            got = outcome if isinstance(outcome, str) else _got(rule, names)
            # Python shows a warning once for every text: one without numbers is shown once.
            got = "" if rule.level == "doubt" else got
            expected, got, advice = (op.spell(text) for text in (rule.expected, got, rule.advice))
            failure = Failure(op.name, op.by_name[rule.param].shown, expected, got, advice, rule.code, rule)
            (notes if rule.level in WARNED else failures).append(failure)
    return failures, notes


def _ask(op: Op, rules: list[Rule], names: dict[str, Any]) -> list[Failure]:
    """The notes of the rules; raises if there are failures."""
    failures, notes = _asked(op, rules, names)
    _raise(failures)
    return notes


def _got(rule: Rule, names: Mapping[str, Any]) -> str:
    """The values of what a rule reads: 'N1=4, N2=3', or a shape beside the axes that it should have had."""
    read = parse(rule.check)
    if read.axes:
        sizes = (f"{axis}={names[axis]}" for axis in read.axes)
        return f"{show(names[rule.param])} with {', '.join(sizes)}"
    used = [name for name in read.names if name in names]
    if used == [rule.param]:
        return show(names[rule.param])
    return ", ".join(f"{name}={show(names[name])}" for name in used) or show(names.get(rule.param))


def _raise(failures: list[Failure]) -> None:
    if failures:
        raise ContractError(failures)


def outside() -> int:
    """The stack level of the first caller outside this package, where a warning points."""
    level, frame, house = 1, sys._getframe(1), __name__.split(".")[0]
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] == house:
        level, frame = level + 1, frame.f_back
    return level

"""bind(): checks a call against its operator's definition, in stages (presence, dtypes, ranks, ..., lengths, rules).

An error lists all failures of the first stage that fails. Results are cached by shapes, strides, dtypes and attributes.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch

from fusion_attention.contract.argument_checks import array_of, intact, is_memory, is_number, losses, members
from fusion_attention.contract.call_cache_key import Reader, reader
from fusion_attention.contract.expressions import evaluate, parse, scope
from fusion_attention.contract.record import (
    WARNED,
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

# Maximum number of cached signatures per operator.
SIGNATURES_KEPT = 1024
Result = TypeVar("Result")


@dataclass(eq=False, slots=True)
class CallCache:
    """Cached results for an operator's calls with equal shapes, strides, dtypes, attributes, lengths; without tensors.

    Attributes:
        lowered: the call in the form that back ends compute, without tensors; result of Bound.once().
        templates: shapes and dtypes of a decoding call's results.
        prepared: by back end, an object that repeats the call on other tensors; None before the second call.
        preparable: False if these calls cannot be repeated so.
        two_phase: the memory layouts of the tensors in CANN's two-phase interface.
    """

    lowered: Any = None
    templates: Any = None
    prepared: dict[str, Any] = field(default_factory=dict)
    preparable: bool = True
    two_phase: dict[Any, Any] = field(default_factory=dict)


class Bound:
    """An operator call that was found valid.

    bound["N1"] is the value of a name: an axis size, attribute, array, tensor or derived value.

    Attributes:
        args: the arguments by the definition's parameter names.
        tensors: names of the arguments that are tensors or lists of tensors.
        settled, call_cache: validation and caches of all calls with equal shapes, strides, dtypes, attributes, arrays.
    """

    __slots__ = ("_names", "args", "call_cache", "op", "settled", "tensors")

    def __init__(self, op: Op, args: Mapping[str, Any], tensors: tuple[str, ...], settled: _Settled) -> None:
        self.op, self.args, self.call_cache = op, args, settled.call_cache
        self.tensors, self.settled = tensors, settled
        self._names: dict[str, Any] | None = None

    @property
    def names(self) -> dict[str, Any]:
        """Values of axes, attributes, arrays (int64 numpy), tensors (None if absent) and derived names, by name.

        Computed on first use, because repeated calls may not need it.
        """
        if self._names is None:
            self._names = {**self.settled.names, **_tensors_of(self.op, self.args, self.tensors)}
        return self._names

    def over(self, tensors: Mapping[str, Any]) -> Bound:
        """Returns the same call with other tensors, by parameter name; shapes, strides and dtypes must be the same."""
        return Bound(self.op, {**self.args, **tensors}, self.tensors, self.settled)

    def once(self, make: Callable[[dict[str, Any]], Result]) -> Result:
        """Returns make(names), computed once for all calls with equal shapes, strides, dtypes, attributes and arrays.

        make: a function of the values of all names, whose result does not depend on tensors.
        """
        result: Result | None = self.call_cache.lowered
        if result is None:
            result = self.call_cache.lowered = make(self.names)
        return result

    def __getitem__(self, name: str) -> Any:
        return self.names[name]


@dataclass(eq=False, slots=True)
class _Signature:
    """Cached validation of an operator's calls with equal shapes, strides, dtypes, attributes and set of given arrays.

    Attributes:
        names: axis sizes and other values that are the same in all of these calls, by name.
        tensors: names of the given tensors.
        rules: rules to check if the values of arrays (lengths) change.
        reads: rules to check at every call, because they depend on the values in tensors.
        notes: warnings of every call.
        settled: validation for the arrays of the last call, which are the same in all layers of a model.
    """

    names: dict[str, Any]
    tensors: tuple[str, ...]
    rules: list[Rule]
    reads: list[Rule]
    notes: list[Failure] = field(default_factory=list)
    settled: _Settled | None = None


@dataclass(eq=False, slots=True)
class _Settled:
    """The result of the checks of a signature (shapes, strides, dtypes, attributes) with given arrays of lengths.

    Attributes:
        arrays: the bytes of the arrays.
        names: attributes and sizes of the call, by name.
        notes: warnings.
        call_cache: results that later steps keep for calls with this signature and these lengths.
        within: names and functions in which rules about the content of tensors are evaluated; made at the second call.
    """

    arrays: tuple[bytes, ...]
    names: dict[str, Any]
    notes: list[str]
    call_cache: CallCache = field(default_factory=CallCache)
    within: dict[str, Any] | None = None


def bind(
    op: Op,
    args: Mapping[str, Any],
    *,
    strict: bool | None = None,
    check_content: bool | None = None,
    reads: bool = True,
    memory: bool = True,
) -> Bound:
    """Checks a call against its operator's definition, in stages, and returns it with the values of all names.

    Results are cached by signature (shapes, strides, dtypes, attributes) and by the values of arrays. Rules that read
    tensor content, and the sizes of storages, are checked at every call.

    Args:
        op: the operator definition.
        args: arguments by the definition's parameter names; a missing one is None. The mapping must not change later.
        strict: True: the chip's limits and doubtful calls are errors; None: as npu.strict() sets it.
        check_content: True: also check rules of level "content", which read tensor data; None: by the settings.
        reads: True: check the other rules that read tensor data; False if the data may not be written yet.
        memory: True: check that storages hold their tensors; False in a trace, whose tensors have no memory.

    Raises:
        ContractError: an invalid call; it has all failures of the first stage that fails.
    """
    checks = current()
    strict = checks.strict if strict is None else strict
    check_content = checks.check_content if check_content is None else check_content
    read = op.reader or _with_reader(op)
    key, content, is_memory_checked = read(args, strict, bool(op.watched) and torch.is_grad_enabled())
    signature: _Signature | None = op.signatures.get(key)
    settled = None if signature is None else signature.settled
    if signature is None or settled is None or settled.arrays != content:
        bound, settled = _anew(op, args, key, signature, strict, reads, memory)
    else:
        if memory and not is_memory_checked:
            raise ContractError(_losses(op, args, signature.tensors))
        bound = Bound(op, args, signature.tensors, settled)
        if reads and signature.reads:
            _ask_again(op, signature, bound)
    if check_content and reads and not any(t.is_meta for p in op.tensors() for t in members(bound[p.name]) or ()):
        ask(op, [r for r in op.applicable_rules if r.level == "content"], bound.names)
    if settled.notes:
        _tell(settled.notes)
    return bound


def _tell(notes: Iterable[Failure | str]) -> None:
    """Issues each note as a ContractWarning, at the line of the caller's code that called this package."""
    level = outside()
    for note in notes:
        warnings.warn(str(note), ContractWarning, stacklevel=level)


def _with_reader(op: Op) -> Reader:
    """Makes the function that computes signatures of calls of `op`, at the first one; stores it in `op`; returns it."""
    result = reader(op)
    object.__setattr__(op, "reader", result)
    return result


def _anew(
    op: Op, args: Mapping[str, Any], key: Any, signature: _Signature | None, strict: bool, reads: bool, memory: bool
) -> tuple[Bound, _Settled]:
    """Validates a call whose signature (shapes, strides, dtypes, attributes) is not cached, or whose arrays of lengths
    differ from those of the last call; returns (the valid call, the cached validation).

    signature: its cached validation, or None; strict: the chip's limits are errors; reads: check tensor data too.
    """
    given: list[Any] = list(map(args.get, op.names))
    for at in op.positions[Tensors]:
        given[at] = members(given[at])
    if numbers := {op.names[at]: given[at].item() for at in op.positions[Attr] if is_number(given[at])}:
        return _otherwise(op, {**args, **numbers}, strict, reads, memory)
    content = []
    for at in op.positions[Array]:
        if given[at] is None:
            continue
        if memory and isinstance(given[at], torch.Tensor):
            intact(op.name, (op.params[at].shown,), (given[at],))
        given[at] = array = array_of(op, at, given[at])
        if array is None:  # A tensor without elements counts as absent.
            return _otherwise(op, {**args, op.names[at]: None}, strict, reads, memory)
        if isinstance(array, np.ndarray):
            content.append(array.tobytes())
        else:
            key = signature = None  # not integers: the stage "presence" reports it
    signature = signature or _learn(op, given, strict)
    if memory and (failures := _losses(op, args, signature.tensors)):
        raise ContractError(failures)
    settled = signature.settled
    if settled is None or settled.arrays != tuple(content):
        tensors = _tensors_of(op, args, signature.tensors)
        settled = _settle(op, signature, given, tensors, tuple(content), reads)
        _keep(op, key, signature)
        return Bound(op, args, signature.tensors, settled), settled
    bound = Bound(op, args, signature.tensors, settled)
    if reads:
        ask(op, signature.reads, bound.names)
    return bound, settled


def _ask_again(op: Op, signature: _Signature, bound: Bound) -> None:
    """Checks the rules that depend on the values in tensors, in a call `bound` whose signature (shapes, dtypes,
    options) was validated before; raises ContractError if one is violated."""
    settled = bound.settled
    if settled.within is None:
        settled.within = scope(settled.names, op.functions)
    within = {**settled.within, **_tensors_of(op, bound.args, signature.tensors)}
    for rule in signature.reads:
        if not rule.when or evaluate(rule.when, within):
            outcome = evaluate(rule.check, within)
            if isinstance(outcome, str) or not outcome:
                ask(op, signature.reads, bound.names)


def _otherwise(op: Op, args: Mapping[str, Any], strict: bool, reads: bool, memory: bool) -> tuple[Bound, _Settled]:
    """Validates a call again, with 0-dim tensors replaced by numbers, or empty ones by None; options: as in bind()."""
    key, _, _ = (op.reader or _with_reader(op))(args, strict, bool(op.watched) and torch.is_grad_enabled())
    return _anew(op, args, key, op.signatures.get(key), strict, reads, memory)


def _tensors_of(op: Op, args: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: members(args[name]) if type(op.by_name[name]) is Tensors else args[name] for name in names}


def _losses(op: Op, args: Mapping[str, Any], names: tuple[str, ...]) -> list[Failure]:
    return losses(op, _tensors_of(op, args, names))


def _learn(op: Op, given: list[Any], strict: bool) -> _Signature:
    """Checks a call but its lengths; returns the validation to cache. given: arguments in the definition's order."""
    levels = ("meaning", "note", "limit", "doubt") if strict else ("meaning", "note", "doubt")
    rules_asked = [r for r in op.applicable_rules if r.level in levels]
    if strict:
        rules_asked = [replace(r, level="limit") if r.level == "doubt" else r for r in rules_asked]
    names = first_stages(op, given, rules_asked)
    layout = str(names.get(op.layout_attr, ""))
    tensors = tuple(p.name for p in op.params if isinstance(p, Tensor) and names[p.name] is not None)
    rules = [r for r in rules_asked if r.stage in ("lengths", "rules") and (not r.only or layout in r.only)]
    # Without tensors, because a cached reference would keep their memory alive.
    sizes = {name: value for name, value in names.items() if not is_memory(value)}
    return _Signature(sizes, tensors, rules, [])


def _settle(
    op: Op, signature: _Signature, given: list[Any], tensors: dict[str, Any], content: tuple[bytes, ...], reads: bool
) -> _Settled:
    """Checks the rules on lengths (values of arrays); stores and returns the signature's validation. given: arguments
    in order; content: the arrays' bytes; reads: check rules on tensor data too."""
    arrays = {op.params[i].name: given[i] for i in op.positions[Array] if given[i] is not None}
    names = {**signature.names, **tensors, **arrays}
    ask(op, [r for r in signature.rules if r.stage == "lengths"], names)
    derived = op.derive(names)
    names |= derived
    messages = ask(op, [r for r in signature.rules if r.stage == "rules" and (reads or not r.reads)], names)
    _tell(n for n in messages if n.rule is not None and n.rule.reads)  # once, because the next call may have other data
    notes = signature.notes + [n for n in messages if n.rule is None or not n.rule.reads]
    if signature.settled is None:
        lasting = [r for r in signature.rules if not (r.reads and r.level in WARNED)]
        signature.rules = _changing(op, lasting, {*arrays, *derived} if arrays else set(), names)
        signature.reads = [r for r in signature.rules if r.reads]
        signature.notes = [n for n in notes if n.rule not in signature.rules]
    sizes = {name: value for name, value in names.items() if not is_memory(value)}
    # Another thread may set signature.settled for other arrays meanwhile, so this call returns its own object.
    result = signature.settled = _Settled(content, sizes, list(map(str, notes)))
    return result


def _changing(op: Op, rules: list[Rule], changing: set[str], names: dict[str, Any]) -> list[Rule]:
    """Returns the rules whose outcome can change between calls with the same shapes, strides, dtypes and attributes:
    they depend on values in tensors, or on a name in `changing` (arrays, derived values); names: all values."""
    within = scope(names, op.functions)

    def touched(text: str) -> bool:
        return not changing.isdisjoint(parse(text).names + parse(text).axes)

    def applies(rule: Rule) -> bool:
        return all(touched(operand) or evaluate(operand, within) for operand in parse(rule.when or "True").parts)

    return [r for r in rules if (r.reads or touched(r.check) or touched(r.when or "True")) and applies(r)]


def _keep(op: Op, key: Any, signature: _Signature) -> None:
    if key is not None and key not in op.signatures:
        if len(op.signatures) >= SIGNATURES_KEPT:
            op.signatures.clear()
        op.signatures[key] = signature


def outside() -> int:
    """Returns the stack level of the first caller outside this package, for warnings."""
    level, frame, package = 1, sys._getframe(1), __name__.split(".")[0]
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] == package:
        level, frame = level + 1, frame.f_back
    return level

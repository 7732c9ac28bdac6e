"""The stages in which bind() checks a call: presence, dtypes, devices, layout, ranks, axes, domains and rules."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fusion_attention.contract import record
from fusion_attention.contract.argument_checks import TYPES, Fault, is_type, members, no_tensor, no_tensors
from fusion_attention.contract.expressions import dtype_text, evaluate, parse, scope, shape_text, show, size_of


def first_stages(op: record.Op, given: Sequence[Any], rules: list[record.Rule]) -> dict[str, Any]:
    """Checks presence, types, dtypes, ranks, axes and domains of a call; returns arguments and axis sizes by name.

    Args:
        op: the operator definition.
        given: the arguments in the definition's order.
        rules: the rules to check.

    Returns:
        The values; "missing" is a tuple of the names of attributes that were not passed.

    Raises:
        ContractError: an invalid call; it has all failures of the first check that fails.
    """
    values = {p.name: _value(op, p, value) for p, value in zip(op.params, given, strict=True)}
    _refuse([*_presence(op, values)])
    lacking = (
        p.name for p, value in zip(op.params, given, strict=True) if isinstance(p, record.Attr) and value is None
    )
    names: dict[str, Any] = {**op.neutral, **values, "missing": tuple(lacking)}
    ask(op, [r for r in rules if r.stage == "presence"], names)
    typed, _ = _broken(op, [r for r in rules if r.stage == "dtype"], names)
    _refuse([*_dtypes(op, names), *_devices(op, names), *_layout(op, names), *typed])
    _refuse([*_ranks(op, names)])
    _refuse(_axes(op, names))
    _refuse(_domains(op, names))
    return names


def ask(op: record.Op, rules: list[record.Rule], names: dict[str, Any]) -> list[record.Failure]:
    """Checks rules of an operator in a call with the values `names`; returns the violated rules that only warn, as
    Failures; raises ContractError if others are violated."""
    failures, notes = _broken(op, rules, names)
    _refuse(failures)
    return notes


def _value(op: record.Op, p: record.Param, value: Any) -> Any:
    """Returns an argument's value as rules read it: the default for None, None for an empty optional tensor, a float
    for an int where a float is declared."""
    if isinstance(p, record.Attr):
        if value is None:
            return None if p.default is record.REQUIRED else p.default
        value = value.item() if isinstance(value, np.generic) else value
        is_int = isinstance(value, int) and not isinstance(value, bool)
        # Other ints are no numbers of float64: is_type() refuses them.
        return float(value) if p.type is float and is_int and abs(value) <= sys.float_info.max else value
    if isinstance(p, record.Tensor) and isinstance(value, torch.Tensor) and p.optional and op.blank_is_absent:
        if value.dim() == 0:
            return value if p.on_host else None
        # A tensor without rows (rank > 1) is present: the call itself may have no rows.
        rows = p.shape and value.dim() > 1 and value.shape[-1] > 0
        return None if value.numel() == 0 and not rows else value
    if isinstance(p, record.Tensors) and p.optional and isinstance(value, tuple) and not value:
        return None  # an empty list
    return value


def _presence(op: record.Op, values: dict[str, Any]) -> Iterator[record.Failure]:
    for p in op.params:
        value, output = values[p.name], isinstance(p, record.Tensor) and p.output
        fault: Fault | None = None
        if value is None:
            if not (p.optional or output or (isinstance(p, record.Attr) and p.default is not record.REQUIRED)):
                what = p.text.split(". ")[0].removesuffix(".")
                yield op.failure(p.shown, f"a value ({what}.)", "None", code=record.NULL_POINTER)
        elif isinstance(p, record.Tensors):
            fault = no_tensors(value)
        elif isinstance(p, record.Tensor):
            fault = no_tensor(value, output)
        elif isinstance(p, record.Array):
            fault = None if isinstance(value, np.ndarray) else ("integers (list, tuple or tensor)", show(value), "")
        elif isinstance(p, record.Attr) and not is_type(value, p):
            wanted = "an int below 2**64" if p.unsigned else TYPES.get(p.type, f"a {p.type.__name__}")
            fault = wanted, show(value), ""
        if fault:
            yield op.failure(p.shown, *fault)


def _dtypes(op: record.Op, names: dict[str, Any]) -> Iterator[record.Failure]:
    for p in op.tensors(False) + op.tensors(True):
        if names.get(p.name) is None or not p.dtypes:
            continue
        allowed, source = p.dtypes.split(), ""
        if p.dtypes.startswith("="):
            other = p.dtypes[1:]
            allowed, source = [dtype_text(members(names[other])[0])], f" as {op.by_name[other].shown}"
        wrong = [result for t in members(names[p.name]) if (result := dtype_text(t)) not in allowed]
        if wrong:
            got = wrong[0]
            yield op.failure(p.shown, " or ".join(allowed) + source, got, p.cast)


def _devices(op: record.Op, names: dict[str, Any]) -> Iterator[record.Failure]:
    first: record.Tensor | None = None
    for p in op.tensors(False) + op.tensors(True):
        value = names.get(p.name)
        if value is None or (p.on_host and value.device.type == "cpu"):
            continue
        first = first or p
        device = members(names[first.name])[0].device
        strange = [t.device for t in members(value) if t.device != device]
        if strange:
            expected = f"a tensor on {device} as {first.shown}"
            yield op.failure(p.shown, expected, f"one on {strange[0]}", f'move it: .to("{device}")')


def _layout(op: record.Op, names: dict[str, Any]) -> list[record.Failure]:
    if not op.layouts or names[op.layout_attr] in op.layouts:
        return []
    got, advice = names[op.layout_attr], "layout strings are upper case"
    if got.upper() not in op.layouts:
        advice = f"{op.name} has no other"
    shown = op.by_name[op.layout_attr].shown
    return [op.failure(shown, "one of " + ", ".join(op.layouts), show(got), advice)]


def _ranks(op: record.Op, names: dict[str, Any]) -> Iterator[record.Failure]:
    for p in op.tensors(False) + op.tensors(True):
        layout = op.layout_of(p, names)
        where = f" in layout {layout}" if op.layouts else ""
        value, words = names.get(p.name), p.words(layout)
        if value is None or isinstance(p, record.Tensors) or (p.on_host and value.dim() == 0):
            continue
        if words and value.dim() != len(words):
            expected = f"{len(words)} dimensions {shape_text(' '.join(words))}{where}"
            yield op.failure(p.shown, expected, f"{value.dim()} dimensions {list(value.shape)}")


def _axes(op: record.Op, names: dict[str, Any]) -> list[record.Failure]:
    """Adds {axis word: size} to `names`, the values of a call, and returns a Failure for each tensor with another size.
    Attributes determine sizes first; then the first tensor that has an axis word."""
    origin: dict[str, str] = {}
    for p in op.params:
        if isinstance(p, record.Attr) and p.axis and (names[p.name] != p.default or p.default):
            if names[p.name] <= 0:
                return [op.failure(p.shown, f"{p.shown} > 0", show(names[p.name]))]
            names[p.axis], origin[p.axis] = names[p.name], p.shown
    failures = []
    for p in op.tensors(False) + op.tensors(True):
        value, words = names.get(p.name), p.words(op.layout_of(p, names))
        shape = () if value is None or isinstance(p, record.Tensors) else value.shape
        for position, (word, size) in enumerate(zip(words, shape)):  # noqa: B905
            expected = _bind_axis(word, size, names, origin, p.shown)
            if expected:
                failures.append(op.failure(p.shown, f"axis {position} to be {expected}", str(size)))
    return failures


def _bind_axis(word: str, size: int, names: dict[str, Any], origin: dict[str, str], param: str) -> str:
    """Compares `size` with the axis word, such as "N1*D", of parameter `param`. Adds the size of a factor that has none
    in `names` yet. Returns the expected size as text if `size` does not fit, else "". origin: {factor: parameter that
    determined it}."""
    factors = word.split("*")
    unknown = [f for f in factors if not f.isdigit() and names.get(f) is None]
    if len(unknown) == 1:
        rest = "*".join(f for f in factors if f != unknown[0])
        known_size = size_of(rest, names) if rest else 1
        if rest and (not known_size or not size or size % known_size):
            return f"a positive multiple of {rest}={known_size}" + _origins(rest, origin, param)
        names[unknown[0]], origin[unknown[0]] = size // (known_size or 1), param
        return ""
    known_size = size_of(word, names)
    # With two unbound factors, another tensor has failed already.
    shown = word if word.isdigit() else f"{word}={known_size}"
    return "" if known_size in (size, None) else shown + _origins(word, origin, param)


def _origins(word: str, origin: dict[str, str], param: str) -> str:
    """Returns " as in NAMES" with the parameters, except `param`, that determined the size of an axis word such as
    "B*S1", or ""; origin: {factor of an axis word: parameter that determined its size}."""
    sources = [origin[f] for f in word.split("*") if f in origin and origin[f] != param]
    return f" as in {', '.join(dict.fromkeys(sources))}" if sources else ""


def _domains(op: record.Op, names: dict[str, Any]) -> list[record.Failure]:
    within = scope(names, op.functions)
    return [
        op.failure(p.shown, op.spell(p.domain), show(names[p.name]), code=p.code)
        for p in op.params
        if isinstance(p, record.Attr) and p.domain and not evaluate(p.domain, within)
    ]


def _broken(
    op: record.Op, rules: list[record.Rule], names: dict[str, Any]
) -> tuple[list[record.Failure], list[record.Failure]]:
    """Returns those of `rules` that a call with the values `names` violates, as (failures, warnings)."""
    failures: list[record.Failure] = []
    notes: list[record.Failure] = []
    if not rules:
        return failures, notes
    layout, within = names.get(op.layout_attr), scope(names, op.functions)
    for rule in rules:
        if (rule.only and layout not in rule.only) or (rule.when and not evaluate(rule.when, within)):
            continue
        outcome = evaluate(rule.check, within)
        if isinstance(outcome, str) or not outcome:
            got = outcome if isinstance(outcome, str) else _got(rule, names)
            # Without actual values, so that Python shows a warning once, not once for each of them.
            got = "" if rule.level == "doubt" else got
            expected, got, advice = (op.spell(text) for text in (rule.expected, got, rule.advice))
            failure = op.failure(op.by_name[rule.param].shown, expected, got, advice, rule.code, rule)
            (notes if rule.level in record.WARNED else failures).append(failure)
    return failures, notes


def _got(rule: record.Rule, names: Mapping[str, Any]) -> str:
    """Returns the values that a rule reads as an error text, "N1=4, N2=3" or a shape; names: the call's values."""
    read = parse(rule.check)
    if read.axes:
        sizes = (f"{axis}={names[axis]}" for axis in read.axes)
        return f"{show(names[rule.param])} with {', '.join(sizes)}"
    used = [name for name in read.names if name in names and name != "missing"]
    if used == [rule.param]:
        return show(names[rule.param])
    return ", ".join(f"{name}={show(names[name])}" for name in used) or show(names.get(rule.param))


def _refuse(failures: list[record.Failure]) -> None:
    if failures:
        raise record.ContractError(failures)

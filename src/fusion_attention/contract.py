"""What a correct call is, as data: a record per operator checks calls, documents itself and makes test cases.

A record lists parameters and rules; bind() checks a call against it in stages and gives every failure of the first
stage that has one. Refuses to know what any operator computes.
"""

from __future__ import annotations

import ast
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any

import numpy as np
import torch

# Return codes of the two-phase interface; every failure carries the one that CANN gives for it.
NULL_POINTER, INVALID, RUNTIME, TILING = 161001, 161002, 361001, 561002
# meaning: no result is defined; limit: documented for the chip, an error when strict; content: reads tensor data, on
# request; note: a warning.
LEVELS = ("meaning", "limit", "content", "note")
STAGES = ("presence", "dtype", "rank", "axes", "domains", "lengths", "rules")
REQUIRED: Any = type("Required", (), {"__repr__": lambda self: "required"})()

Check = Callable[..., Any]
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Failure:
    """One broken rule, in the wording of every error of this library."""

    op: str
    param: str
    expected: str
    got: str
    advice: str = ""
    code: int = INVALID
    rule: Rule | None = None

    def __str__(self) -> str:
        return f"{self.op}: {self.param}: expected {self.expected}, got {self.got}" + (
            f" ({self.advice})" if self.advice else ""
        )


class ContractError(ValueError):
    """A wrong call. The message has one line per failure; op, param and code are the first one's.

    Attributes:
        failures: every failure of the first stage that found one.
    """

    def __init__(self, failures: list[Failure]) -> None:
        super().__init__("\n".join(map(str, failures)))
        self.failures = tuple(failures)
        self.op, self.param, self.code = failures[0].op, failures[0].param, failures[0].code


class BackendError(NotImplementedError):
    """A valid call that no back end can compute; the message lists every back end's reasons."""


class ContractWarning(UserWarning):
    """A legal call that probably does not mean what it says."""


@dataclass(frozen=True)
class Param:
    """What every parameter has: its canonical name, one sentence, and (if different) how this record spells it."""

    name: str
    text: str
    optional: bool = False
    spelled: str = ""

    @property
    def shown(self) -> str:
        """The name that users see."""
        return self.spelled or self.name


@dataclass(frozen=True)
class Tensor(Param):
    """A tensor.

    Args:
        dtypes: allowed dtypes, or "=other" for the dtype of another tensor, or "" for a rule's decision.
        shape: axis words ("B S1 N1*D"), one string or one per layout; "" where a rule decides.
        output: written by the operator; a caller may leave it to the face to allocate.
        make: sample content from a shape, where random numbers would not be legal.
    """

    dtypes: str = ""
    shape: str | Mapping[str, str] = ""
    output: bool = False
    make: Callable[[tuple[int, ...]], torch.Tensor] | None = field(default=None, compare=False)

    def words(self, layout: str) -> list[str]:
        """The axis words in a layout; empty where the record leaves the shape to a rule."""
        shape = self.shape if isinstance(self.shape, str) else self.shape.get(layout, "")
        return shape.split()


@dataclass(frozen=True)
class Array(Param):
    """Host integers, one per sequence: a list, a tuple, or an integer tensor."""


@dataclass(frozen=True)
class Attr(Param):
    """A number or a string.

    Args:
        type: int, float or str (an int is a float too), or any class that is hashable.
        default: REQUIRED without one.
        domain: an expression that must hold; bad: a value that breaks it.
        axis: the axis word that this number is.
    """

    type: type = int
    default: Any = REQUIRED
    domain: str = ""
    bad: Any = None
    axis: str = ""
    code: int = TILING


@dataclass(frozen=True)
class Rule:
    """An expression over axes, attributes, arrays and tensors that must hold; it is also the error's text.

    Functions of the record may be called; one that returns a string has failed, and the string says what came.

    Args:
        check: the expression.
        param: the canonical name of the parameter that is blamed.
        advice: why, or what to do.
        text: the error's wording where the expression reads badly.
        when: an expression; the rule is asked only where it holds.
        only: the layouts in which it is asked; empty for all.
        needs: parameters without which a record does not have the rule.
        level: one of LEVELS.
        stage: "presence", "dtype", "lengths" or "rules".
        reads: needs tensor data, so it is asked at every call.
        given: sample settings under which the rule is asked; spoil: further settings that break it alone.
    """

    check: str
    param: str
    advice: str = ""
    text: str = ""
    when: str = ""
    only: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    level: str = "meaning"
    code: int = TILING
    stage: str = "rules"
    reads: bool = False
    given: Settings = field(default_factory=dict, compare=False)
    spoil: Settings = field(default_factory=dict, compare=False)

    @property
    def id(self) -> str:
        """Names the rule in tests."""
        return f"{self.param}-{self.level}-{re.sub(r'[^a-zA-Z0-9]+', '_', self.text or self.check)[:48]}"

    @property
    def expected(self) -> str:
        """The wording after "expected"."""
        if self.text:
            return self.text
        found = re.fullmatch(r"fits\((\w+), '([^']*)'\)", self.check)
        return f"{found[1]} of shape {shape_text(found[2])}" if found else self.check


@dataclass(frozen=True, eq=False)
class Op:
    """The record of one operator.

    Args:
        name: as the interface names it.
        summary: one sentence; formula: what is computed.
        source: the page it follows; rulings: numbers of docs/rulings.md that decide where the page is silent.
        params: in the interface's order.
        rules: asked in stages; one about a parameter or a layout that the record lacks is left out.
        layouts: the layout strings, first one sampled; layout_attr: the attribute that chooses.
        neutral: canonical names that rules and lowering may mention, with the value they have where the record
            lacks the parameter.
        derive: from the names bound so far to further names (lengths per sequence), asked at every call with arrays.
        functions: what rules may call.
        sizes: axis sizes of a sample; samples: further sample settings per layout.
    """

    name: str
    summary: str
    source: str
    params: tuple[Param, ...]
    rules: tuple[Rule, ...] = ()
    formula: str = ""
    rulings: tuple[int, ...] = ()
    layouts: tuple[str, ...] = ()
    layout_attr: str = "input_layout"
    neutral: Settings = field(default_factory=dict)
    derive: Callable[[dict[str, Any]], dict[str, Any]] = lambda names: {}
    functions: Mapping[str, Check] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    samples: Mapping[str, Settings] = field(default_factory=dict)
    by_name: dict[str, Param] = field(init=False)
    asked: tuple[Rule, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_name", {p.name: p for p in self.params})
        object.__setattr__(self, "asked", tuple(filter(self._has, self.rules)))

    def _has(self, rule: Rule) -> bool:
        needed = {rule.param, *rule.needs}
        return needed <= self.by_name.keys() and (not rule.only or not set(self.layouts).isdisjoint(rule.only))

    def version(
        self,
        name: str,
        summary: str,
        *,
        after: Mapping[str, tuple[Param, ...]] | None = None,
        without: tuple[str, ...] = (),
        **changes: Any,
    ) -> Op:
        """This record with parameters inserted after others or left out, and further fields changed."""
        params: list[Param] = []
        for p in self.params:
            params += [] if p.name in without else [p]
            params += (after or {}).get(p.name, ())
        return replace(self, name=name, summary=summary, params=tuple(params), **changes)

    def tensors(self, output: bool = False) -> list[Tensor]:
        """The input (or output) tensors, in order."""
        return [p for p in self.params if isinstance(p, Tensor) and p.output is output]


@dataclass(eq=False)
class Bound:
    """A checked call: every canonical name with its value.

    Attributes:
        names: axes, attributes, arrays (int64 numpy), tensors (None where absent), and what the record derives.
        memo: a dictionary shared by all calls of the same signature, for what depends on the signature alone.
    """

    op: Op
    names: dict[str, Any]
    memo: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.names[name]


def shape_text(alternatives: str) -> str:
    """'B 1 S | S' as '[B, 1, S] or [S]'."""
    return " or ".join("[" + ", ".join(words.split()) + "]" for words in alternatives.split("|"))


def show(value: Any) -> str:
    """A value as an error shows it."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, np.ndarray):
        shown = ", ".join(map(str, value[:8].tolist()))
        return f"[{shown}{', ...' if len(value) > 8 else ''}]"
    return repr(value)


# ---------------------------------------------------------------------------------------------------------- binding

_BUILTINS = {f.__name__: f for f in (abs, all, any, bool, int, len, max, min, sum)}
_CODE: dict[str, tuple[CodeType, tuple[str, ...]]] = {}
_SIGNATURES: dict[Any, _Signature] = {}
_SIGNATURES_KEPT = 4096


def compiled(expression: str) -> tuple[CodeType, tuple[str, ...]]:
    """The code of a rule's expression and the names it reads, compiled once."""
    if expression not in _CODE:
        tree = ast.parse(expression, mode="eval")
        called = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
        local = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        read = dict.fromkeys(n.id for n in ast.walk(tree) if isinstance(n, ast.Name))
        names = tuple(n for n in read if n not in called | local)
        _CODE[expression] = compile(tree, expression, "eval"), names
    return _CODE[expression]


def evaluate(op: Op, expression: str, names: dict[str, Any]) -> Any:
    """An expression of the record over bound names; fits() compares a tensor's shape with axis words."""
    code, _ = compiled(expression)
    scope = {"__builtins__": _BUILTINS, **op.functions, **names, "fits": lambda t, words: fits(t, words, names)}
    return eval(code, scope)


def size_of(word: str, names: Mapping[str, Any]) -> int | None:
    """The size of an axis word ("N1*D", "8"); None while a factor is unknown."""
    size = 1
    for factor in word.split("*"):
        known = int(factor) if factor.isdigit() else names.get(factor)
        if known is None:
            return None
        size *= int(known)
    return size


def fits(tensor: torch.Tensor, alternatives: str, names: Mapping[str, Any]) -> bool:
    """Whether a tensor has one of the shapes 'B N1 S1 S2 | S1 S2'."""
    return any(
        tuple(tensor.shape) == tuple(size_of(word, names) for word in words.split()) for words in alternatives.split("|")
    )


def bind(op: Op, args: Mapping[str, Any], *, strict: bool = False, check_content: bool = False) -> Bound:
    """Checks a call against its record, stage by stage, and gives every name its value.

    A signature (shapes, strides, dtypes, attributes) that was found legal is found again by one look-up; lengths and
    what reads tensor content are checked at every call.

    Args:
        op: the record.
        args: values by canonical name; a missing name is as None.
        strict: limits are errors too.
        check_content: rules that read tensor data are asked too.

    Raises:
        ContractError: with every failure of the first stage that found one.
    """
    values = _values(op, args)
    signature = _signature(op, values, strict)
    known = _SIGNATURES.get(signature)
    if known is None:
        asked = [r for r in op.asked if r.level in ("meaning", "note") or (strict and r.level == "limit")]
        names = _check_statically(op, values, asked)
        _ask(op, [r for r in asked if r.stage == "lengths"], names)
        names |= op.derive(names)
        notes = _ask(op, [r for r in asked if r.stage == "rules"], names)
        known = _remember(op, signature, asked, names, notes)
    else:
        names = {**known.names, **values}
        if known.has_arrays:
            _ask(op, [r for r in known.dynamic if r.stage == "lengths"], names)
            names |= op.derive(names)
        notes = known.notes + _ask(op, [r for r in known.dynamic if r.stage == "rules"], names)
    if check_content:
        _ask(op, [r for r in op.asked if r.level == "content"], names)
    for note in dict.fromkeys(notes):
        warnings.warn(str(note), ContractWarning, stacklevel=_outside())
    return Bound(op, names, known.memo)


@dataclass(eq=False)
class _Signature:
    """What is known of all calls of one signature: names with one value, rules that must be asked again, notes."""

    names: dict[str, Any]
    dynamic: list[Rule]
    notes: list[Failure]
    has_arrays: bool
    memo: dict[str, Any] = field(default_factory=dict)


def _remember(op: Op, signature: Any, asked: list[Rule], names: dict[str, Any], notes: list[Failure]) -> _Signature:
    has_arrays = any(isinstance(p, Array) and names[p.name] is not None for p in op.params)
    again = [r for r in asked if r.stage in ("lengths", "rules")]
    dynamic = [r for r in again if r.reads or (has_arrays and not _static(op, r))]
    # Tensors belong to one call, and so do lengths where the call brings them: keeping them would keep their memory.
    dropped = (torch.Tensor, np.ndarray) if has_arrays else torch.Tensor
    kept = {name: value for name, value in names.items() if not isinstance(value, dropped)}
    static_notes = [n for n in notes if n.rule not in dynamic]
    known = _Signature(kept, dynamic, static_notes, has_arrays)
    if len(_SIGNATURES) >= _SIGNATURES_KEPT:
        _SIGNATURES.clear()
    _SIGNATURES[signature] = known
    return known


def _values(op: Op, args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by canonical name: defaults filled in, absent optional tensors None, arrays as int64 numpy."""
    values: dict[str, Any] = {}
    for p in op.params:
        value = args.get(p.name)
        if isinstance(p, Attr):
            values[p.name] = p.default if value is None and p.default is not REQUIRED else value
        elif value is None or (
            p.optional and isinstance(value, torch.Tensor) and (value.dim() == 0 or value.numel() == 0)
        ):
            values[p.name] = None  # An optional tensor without dimensions or elements was not given.
        else:
            values[p.name] = to_array(value) if isinstance(p, Array) else value
    return values


def to_array(value: Any) -> Any:
    """Host integers from a list, a tuple, an array or an integer tensor; anything else unchanged."""
    if isinstance(value, torch.Tensor):
        array = value.detach().cpu().numpy() if value.dtype in (torch.int32, torch.int64) else None
    elif isinstance(value, (list, tuple)):
        try:
            array = np.asarray(value if len(value) else np.zeros(0, np.int64))
        except (ValueError, OverflowError, TypeError):
            return value
    else:
        array = value
    legal = isinstance(array, np.ndarray) and array.ndim == 1 and array.dtype.kind == "i"
    return array.astype(np.int64, copy=False) if legal else value


def _signature(op: Op, values: Mapping[str, Any], strict: bool) -> tuple[Any, ...]:
    parts: list[Any] = [op.name, strict]
    for p in op.params:
        value = values[p.name]
        if isinstance(value, torch.Tensor):
            value = (value.shape, value.dtype, value.stride(), value.device)
        elif isinstance(value, (list, dict, set, np.ndarray)):
            value = type(value)
        # True == 1 == 1.0 would share an entry, and only some of them are legal.
        parts.append((type(value), value) if isinstance(p, Attr) else value)
    return tuple(parts)


def _static(op: Op, rule: Rule) -> bool:
    """Whether a rule's outcome is the same for every call of a signature that brings arrays."""
    axes = " ".join(re.findall(r"fits\(\w+, '([^']*)'\)", rule.check))
    used = {n for text in (rule.check, rule.when) if text for n in compiled(text)[1]} | set(re.findall(r"[A-Za-z]\w*", axes))
    fixed = {p.name for p in op.params if not isinstance(p, Array)}
    return rule.stage == "rules" and used <= fixed


def _check_statically(op: Op, values: Mapping[str, Any], asked: list[Rule]) -> dict[str, Any]:
    """The stages before lengths; names bound."""
    _raise(_presence(op, values))
    names: dict[str, Any] = {**op.neutral, **values}
    _ask(op, [r for r in asked if r.stage == "presence"], names)
    _raise(_dtypes(op, names) + _asked(op, [r for r in asked if r.stage == "dtype"], names)[0])
    if op.layouts and names[op.layout_attr] not in op.layouts:
        layout = op.by_name[op.layout_attr].shown
        got = show(names[op.layout_attr])
        _raise([Failure(op.name, layout, "one of " + ", ".join(op.layouts), got, "layout strings are upper case")])
    layout = str(names.get(op.layout_attr, ""))
    _raise(_ranks(op, names, layout))
    _raise(_axes(op, names, layout))
    failures = []
    for p in op.params:
        if isinstance(p, Attr) and p.domain and not evaluate(op, p.domain, names):
            failures.append(Failure(op.name, p.shown, _spell(op, p.domain), show(names[p.name]), code=p.code))
    _raise(failures)
    return names


def _presence(op: Op, values: Mapping[str, Any]) -> list[Failure]:
    failures = []
    for p in op.params:
        value = values[p.name]
        if value is None:
            required = not p.optional and not (isinstance(p, Tensor) and p.output)
            if required and not (isinstance(p, Attr) and p.default is not REQUIRED):
                failures.append(Failure(op.name, p.shown, f"a value ({p.text})", "None", code=NULL_POINTER))
        elif isinstance(p, Tensor):
            if not isinstance(value, torch.Tensor):
                failures.append(Failure(op.name, p.shown, "a tensor", show(value)[:60]))
        elif isinstance(p, Array):
            if not isinstance(value, np.ndarray):
                failures.append(Failure(op.name, p.shown, "integers (list, tuple or integer tensor)", show(value)[:60]))
        elif isinstance(p, Attr) and not _is_type(value, p.type):
            failures.append(Failure(op.name, p.shown, f"{_article(p.type.__name__)}", show(value)[:60]))
    return failures


def _article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def _is_type(value: Any, wanted: type) -> bool:
    if wanted is bool or isinstance(value, bool):
        return wanted is bool and isinstance(value, bool)
    if wanted is float:
        return isinstance(value, (int, float))
    if wanted is int:
        return isinstance(value, int) and -(1 << 63) <= value < 1 << 63
    return isinstance(value, wanted)


def _dtypes(op: Op, names: dict[str, Any]) -> list[Failure]:
    failures = []
    for p in op.params:
        value = names.get(p.name)
        if not isinstance(p, Tensor) or value is None or not p.dtypes:
            continue
        if p.dtypes.startswith("="):
            other = names.get(p.dtypes[1:])
            allowed = () if other is None else (str(other.dtype).removeprefix("torch."),)
        else:
            allowed = tuple(p.dtypes.split())
        if allowed and str(value.dtype).removeprefix("torch.") not in allowed:
            expected = " or ".join(allowed) + (f" as {op.by_name[p.dtypes[1:]].shown}" if p.dtypes[0] == "=" else "")
            failures.append(Failure(op.name, p.shown, expected, str(value.dtype).removeprefix("torch.")))
    return failures


def _ranks(op: Op, names: dict[str, Any], layout: str) -> list[Failure]:
    failures = []
    for p in op.params:
        value = names.get(p.name)
        if isinstance(p, Tensor) and value is not None and (words := p.words(layout)) and value.dim() != len(words):
            where = f" in layout {layout}" if op.layouts else ""
            got = f"{value.dim()} dimensions {list(value.shape)}"
            failures.append(Failure(op.name, p.shown, f"{len(words)} dimensions {shape_text(' '.join(words))}{where}", got))
    return failures


def _axes(op: Op, names: dict[str, Any], layout: str) -> list[Failure]:
    """Binds axis words in the order of the parameters; the first that shows an axis decides its size."""
    failures = []
    origin: dict[str, str] = {}
    for p in op.params:
        if isinstance(p, Attr) and p.axis and names[p.name] != p.default:
            if names[p.name] <= 0:
                failures.append(Failure(op.name, p.shown, f"{p.shown} > 0", show(names[p.name])))
                return failures
            names[p.axis], origin[p.axis] = names[p.name], p.shown
    for p in op.params:
        value = names.get(p.name)
        if not isinstance(p, Tensor) or value is None:
            continue
        words = p.words(layout)
        for position, (word, size) in enumerate(zip(words, value.shape if words else (), strict=True)):
            expected = _bind_axis(word, size, names, origin, p.shown)
            if expected:
                failures.append(Failure(op.name, p.shown, f"axis {position} to be {expected}", str(size)))
    return failures


def _bind_axis(word: str, size: int, names: dict[str, Any], origin: dict[str, str], param: str) -> str:
    """Binds the one unknown factor of an axis word, or compares; what was expected if they disagree."""
    unknown = [f for f in word.split("*") if not f.isdigit() and names.get(f) is None]
    if len(unknown) == 1:
        rest = "*".join(f for f in word.split("*") if f != unknown[0])
        known = size_of(rest, names) if rest else 1
        if not known or size % known:
            return f"a multiple of {rest}={known}"
        names[unknown[0]], origin[unknown[0]] = size // known, param
        return ""
    known = size_of(word, names)
    if known == size:
        return ""
    sources = [origin[f] for f in word.split("*") if f in origin and origin[f] != param]
    return f"{word}={known}" + (f" as in {', '.join(dict.fromkeys(sources))}" if sources else "")


def _asked(op: Op, rules: list[Rule], names: dict[str, Any]) -> tuple[list[Failure], list[Failure]]:
    """(failures, notes) of the rules that apply."""
    failures: list[Failure] = []
    notes: list[Failure] = []
    layout = names.get(op.layout_attr)
    for rule in rules:
        if (rule.only and layout not in rule.only) or (rule.when and not evaluate(op, rule.when, names)):
            continue
        outcome = evaluate(op, rule.check, names)
        if isinstance(outcome, str) or not outcome:
            got = outcome if isinstance(outcome, str) else _got(rule, names)
            shown = op.by_name[rule.param].shown
            words = (_spell(op, text) for text in (rule.expected, got, rule.advice))
            failure = Failure(op.name, shown, *words, rule.code, rule)
            (notes if rule.level == "note" else failures).append(failure)
    return failures, notes


def _ask(op: Op, rules: list[Rule], names: dict[str, Any]) -> list[Failure]:
    """The notes of the rules; raises if there are failures."""
    failures, notes = _asked(op, rules, names)
    _raise(failures)
    return notes


def _got(rule: Rule, names: Mapping[str, Any]) -> str:
    used = [n for n in compiled(rule.check)[1] if n in names]
    return ", ".join(f"{n}={show(names[n])}" for n in used) or show(names.get(rule.param))


def _spell(op: Op, text: str) -> str:
    """Canonical names as this record spells them."""
    for p in op.params:
        if p.spelled:
            text = re.sub(rf"\b{p.name}\b", p.spelled, text)
    return text


def _raise(failures: list[Failure]) -> None:
    if failures:
        raise ContractError(failures)


def _outside() -> int:
    """The stack level of the first caller outside this package, where a warning points."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("fusion_attention"):
        level, frame = level + 1, frame.f_back
    return level


# -------------------------------------------------------------------------------------------------------- rendering


def render(op: Op) -> str:
    """The page of a record: what it computes, its parameters, its rules by level, its sources."""
    lines = [f"# {op.name}", "", op.summary, ""]
    if op.formula:
        lines += ["```text", op.formula, "```", ""]
    lines += ["## Parameters", "", "| name | kind | dtype | shape or default | |", "|---|---|---|---|---|"]
    lines += [_row(op, p) for p in op.params]
    if op.layouts:
        lines += ["", f"Layouts (`{op.by_name[op.layout_attr].shown}`): {', '.join(f'`{name}`' for name in op.layouts)}."]
    titles = {
        "meaning": "Rules (always an error)",
        "limit": "Limits of the chip (an error when strict)",
        "content": "Rules on tensor content (on request)",
        "note": "Notes (a warning)",
    }
    for level in LEVELS:
        rules = [r for r in op.asked if r.level == level]
        if rules:
            lines += ["", f"## {titles[level]}", "", "| parameter | expected | when | code | why, or what to do |"]
            lines += ["|---|---|---|---|---|", *(_rule_row(op, r) for r in rules)]
    if op.rulings:
        numbers = ", ".join(map(str, sorted(set(op.rulings))))
        lines += ["", f"Where the source is silent: [rulings](../rulings.md) {numbers}."]
    return "\n".join([*lines, "", f"Source: {op.source}.", ""])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _row(op: Op, p: Param) -> str:
    kind, dtype, shape = "integers", "int64", ""
    if isinstance(p, Tensor):
        kind = "output" if p.output else "tensor"
        dtype = f"as `{op.by_name[p.dtypes[1:]].shown}`" if p.dtypes.startswith("=") else p.dtypes.replace(" ", ", ")
        shapes = {name: " ".join(p.words(name)) for name in op.layouts or ("",)}
        distinct = dict.fromkeys(words for words in shapes.values() if words)
        shape = "; ".join(
            shape_text(words) if len(distinct) == 1 else f"{name} {shape_text(words)}"
            for words in distinct
            for name in (", ".join(n for n, w in shapes.items() if w == words),)
        )
    elif isinstance(p, Attr):
        kind, dtype = "attribute", p.type.__name__
        shape = "required" if p.default is REQUIRED else f"`{p.default!r}`"
    if p.optional:
        kind += ", optional"
    domain = f" `{_spell(op, p.domain)}`" if isinstance(p, Attr) and p.domain else ""
    return f"| `{p.shown}` | {kind} | {dtype} | {_cell(shape)} | {_cell(p.text + domain)} |"


def _rule_row(op: Op, r: Rule) -> str:
    when = [f"`{_spell(op, r.when)}`"] if r.when else []
    only = [name for name in op.layouts if name in r.only]
    when += ["layout " + ", ".join(only)] if only and len(only) < len(op.layouts) else []
    cells = (f"`{op.by_name[r.param].shown}`", _spell(op, r.expected), "; ".join(when), str(r.code), _spell(op, r.advice))
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"

"""Sample calls made from operator definitions: legal ones, and for every rule one that violates only that rule."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from fusion_attention.contract import record, to_array
from fusion_attention.contract.expressions import dtype_text, evaluate, scope, size_of

# Values of attributes by type, of which the first one that violates a domain or a rule is used in an invalid call.
VALUES: dict[type, tuple[Any, ...]] = {
    int: (2, -1, -2, 0, 3, 4, 5, 6, 9, 129, 8193, 1 << 32, 1 << 62),
    float: (-1.0, 0.0, 0.5, 1.0, 1.5, float("inf")),
    str: ("no such word", "TND", "same_as_input"),
    bool: (True, False),
}


@dataclass(frozen=True)
class InvalidSample:
    """A generated operator call that violates one rule, and the failure that bind() must report for it.

    Attributes:
        id: the names of the operator and of the rule.
        args: the arguments by the definition's parameter names.
        param, code: parameter (in the interface's spelling) and code of the failure.
        level: the level of the rule, such as "meaning" or "limit".
        expected: the failure's text after "expected"; "" if no rule but the parameter's declaration is violated.
    """

    id: str
    args: dict[str, Any] = field(repr=False, compare=False)
    param: str
    code: int
    level: str = "meaning"
    expected: str = ""


def sample(op: record.Op, **settings: Any) -> dict[str, Any]:
    """Returns the arguments of a generated legal call by parameter name; equal settings give equal arguments.

    Args:
        op: the operator definition.
        settings: attributes, arrays and tensors by parameter name, and sizes by axis word. A tensor is given by the
            axis words of its shape ("B N1 S1 S2"), by (words, dtype or "zeros"), by True (the shape of its definition),
            or as a tensor; an optional tensor is None unless it is given. A dictionary of settings under a layout's
            name applies to this layout only, and has priority.

    Example:
        >>> from fusion_attention.ops import RECORDS
        >>> list(sample(RECORDS["attention"], layout="BNSD", B=3)["q"].shape)
        [3, 4, 4, 8]
    """
    layout = settings.get(op.layout_attr, op.layouts[0] if op.layouts else "")
    settings = {**op.samples.get(layout, {}), **settings, **settings.get(layout, {})}
    sizes = {**op.sizes, **{axis: size for axis, size in settings.items() if axis in op.sizes}}
    sizes |= _derived_sizes(op, layout, settings)
    args: dict[str, Any] = {}
    generator = torch.Generator().manual_seed(7)
    defaults = {p.name: p.default for p in op.params if isinstance(p, record.Attr)}
    choices = {**dict.fromkeys(op.by_name), **op.neutral, **defaults, **settings, op.layout_attr: layout}
    for p in op.params:
        wanted = settings.get(p.name)
        if p.name == op.layout_attr:
            args[p.name] = layout
        elif isinstance(p, record.Attr):
            default = sizes[p.axis] if p.axis and p.default is record.REQUIRED else p.default
            args[p.name] = settings.get(p.name, default)
        elif isinstance(p, record.Tensor) and isinstance(wanted, (str, tuple, bool)):
            args[p.name] = _tensor(p, wanted, op.layout_of(p, choices), sizes, args, generator)
        elif isinstance(p, record.Tensor) and p.name not in settings and not (p.optional or p.output):
            args[p.name] = _tensor(p, True, op.layout_of(p, choices), sizes, args, generator)
        else:
            args[p.name] = wanted
    return args


def _derived_sizes(op: record.Op, layout: str, settings: dict[str, Any]) -> dict[str, int]:
    """Returns sizes {axis word: size} that follow from arrays of lengths in `settings` or else in the sample call."""
    sample_sizes = op.samples.get(layout, {})
    arrays = {p.name: p for p in op.params if isinstance(p, record.Array)}
    values = {name: value if (value := settings.get(name)) is not None else sample_sizes.get(name) for name in arrays}
    if not any(name in arrays for name in sample_sizes):
        return {}
    names = {**op.neutral, op.layout_attr: layout, **{n: None if v is None else to_array(v) for n, v in values.items()}}
    return {name: value for name, value in op.derive(names).items() if isinstance(value, int)}


def _tensor(
    p: record.Tensor, wanted: Any, layout: str, sizes: dict[str, int], args: dict[str, Any], generator: torch.Generator
) -> torch.Tensor:
    words, dtype = wanted if isinstance(wanted, tuple) else (wanted, "")
    shape = tuple(int(size_of(word, sizes) or 0) for word in (p.words(layout) if words is True else words.split()))
    first = next((value for value in args.values() if isinstance(value, torch.Tensor)), None)
    dtype_name = p.dtypes.split()[0] if p.dtypes and p.dtypes[0] != "=" else ""
    dtype_name = dtype_name or ("float32" if first is None else dtype_text(first))
    if not dtype and p.make:
        return p.make(shape)
    if dtype == "zeros":
        return torch.zeros(shape, dtype=getattr(torch, dtype_name))
    return torch.randn(shape, generator=generator).to(getattr(torch, dtype or dtype_name))


def invalid_samples(op: record.Op) -> Iterator[InvalidSample]:
    """Yields generated calls that each violate an operator's definition in one way: each rule, and type, rank, axis
    sizes and domain of each parameter."""
    for rule in op.applicable_rules:
        layouts = [name for name in op.layouts if name in (rule.only or op.layouts)]
        shown = op.by_name[rule.param].shown
        chosen = {op.layout_attr: layouts[0]} if layouts else {}
        args = sample(op, **{**chosen, **violation(op, rule)})
        yield InvalidSample(f"{op.name}-{rule.id}", args, shown, rule.code, rule.level, op.spell(rule.expected))
    legal = sample(op)
    for p in op.params:
        for name, args, code in _stage_samples(op, p, legal):
            yield InvalidSample(f"{op.name}-{p.name}-{name}", args, p.shown, code)


def violation(op: record.Op, rule: record.Rule) -> dict[str, Any]:
    """Returns the settings (arguments by name) of a generated call that violates a rule of `op`: those of the rule, or
    a value that its condition excludes."""
    if rule.invalid:
        return {**rule.given, **rule.invalid}
    p = op.by_name[rule.param]
    if isinstance(p, record.Attr):
        return {**rule.given, p.name: _excluded(op, p, rule.check, p.domain or "True")}
    shaped = isinstance(p, record.Tensor) and p.words("")
    return {**rule.given, p.name: [0, 0] if isinstance(p, record.Array) else True if shaped else "1"}


def _excluded(op: record.Op, p: record.Attr, check: str, domain: str = "True") -> Any:
    """Returns the first of some test values that is in the domain of attribute p and violates the condition `check`."""
    names = {**op.neutral, **{other.name: other.default for other in op.params if isinstance(other, record.Attr)}}
    within = scope(names, op.functions)
    values = (value for value in VALUES[p.type] if evaluate(domain, {**within, p.name: value}))
    return next(value for value in values if not evaluate(check, {**within, p.name: value}))


def _stage_samples(op: record.Op, p: record.Param, legal: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Yields (name, arguments, error code) of generated calls that violate parameter p's declaration: type, rank, axis
    size, domain. legal: the arguments of a legal call, of which each differs in one argument."""
    present = legal[p.name] is not None
    if isinstance(p, record.Attr):
        if p.name == op.layout_attr and op.layouts:
            yield "layout", {**legal, p.name: "NHWC"}, record.INVALID
        if p.default is record.REQUIRED:
            yield "missing", {**legal, p.name: None}, record.NULL_POINTER
        yield "type", {**legal, p.name: object()}, record.INVALID
        if p.domain:
            yield "domain", {**legal, p.name: _excluded(op, p, p.domain)}, p.code
        return
    yield "type", {**legal, p.name: "a string"}, record.INVALID
    if not isinstance(p, record.Tensor) or p.output or not present:
        return
    if not p.optional:
        yield "missing", {**legal, p.name: None}, record.NULL_POINTER
    first = next(other for other in op.params if isinstance(other, record.Tensor))
    if p.dtypes and p is not first:  # The other tensors must have the dtype of the first.
        # Tensors that must have the same dtype change with it.
        along = [t.name for t in op.tensors() if t is p or (t.dtypes == f"={p.name}" and legal[t.name] is not None)]
        yield "dtype", {**legal, **{name: legal[name].to(torch.complex64) for name in along}}, record.INVALID
    words = [] if isinstance(p, record.Tensors) else p.words(op.layout_of(p, legal))
    if words:
        yield "rank", {**legal, p.name: legal[p.name][None, None]}, record.INVALID
    # An axis can only be wrong if an earlier tensor determines its size.
    earlier = op.tensors()[: op.tensors().index(p)]
    if words and any(words[0] in q.words(op.layout_of(q, legal)) for q in earlier if legal[q.name] is not None):
        longer = torch.cat((legal[p.name], legal[p.name][:1]))
        yield "axes", {**legal, p.name: longer}, record.INVALID

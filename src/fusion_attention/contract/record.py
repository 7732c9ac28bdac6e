"""Operator definitions: the parameters and rules of an operator as data, and the errors of calls that violate them.

Definitions are used to check calls (contract.bind), to write pages (doc_pages.py) and to make test cases (sampling.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fusion_attention.contract.expressions import shape_text

# Codes that the two-phase interface returns for a failure, those of CANN.
NULL_POINTER, INVALID, RUNTIME, TILING = 161001, 161002, 361001, 561002
# Levels of rules. meaning: a call that violates the rule has no defined result: an error. limit: a documented limit of
# the chip: an error in strict calls. content: a rule that reads tensor data: checked on request. doubt: a call that
# violates the rule is legal, but probably a mistake: a warning, an error in strict calls. note: a warning.
LEVELS = ("meaning", "limit", "content", "doubt", "note")
WARNED = ("note", "doubt")
# Stages in the order of checking. "dtype" also checks devices and the layout string. A rule's stage is "presence",
# "dtype", "lengths" or "rules".
STAGES = ("presence", "dtype", "rank", "axes", "domains", "lengths", "rules")
REQUIRED: Any = type("Required", (), {"__repr__": lambda self: "required"})()

# The documentation of operators, by the beginning of their names.
SOURCES = {
    "aclnn": "CANN",
    "cann_ops_transformer.": "CANN's cann_ops_transformer",
    **dict.fromkeys(("npu_", "_npu_"), "Ascend op-plugin"),
}

Check = Callable[..., Any]
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Failure:
    """A violated rule in an operator call; str() is the error text.

    Attributes:
        op, param: names of the operator and of the parameter; cann: CANN's name of the parameter, or "".
        expected, got, advice: texts: the expected value, the actual value, and the reason or the fix.
        code: the error code that CANN's two-phase (aclnn) interface returns.
        rule: the violated rule; None if a check without a rule fails, such as that of dtypes.
    """

    op: str
    param: str
    expected: str
    got: str
    advice: str = ""
    code: int = INVALID
    rule: Rule | None = None
    cann: str = ""

    def __str__(self) -> str:
        cann = f" ({self.cann})" if self.cann not in ("", self.param) else ""
        got = f", got {self.got}" if self.got else ""
        advice = f" ({self.advice})" if self.advice else ""
        return f"{self.op}: {self.param}{cann}: expected {self.expected}{got}{advice}"


class ContractError(ValueError, RuntimeError):
    """The error of an operator call that violates rules of the operator's definition.

    The message has a line for each failure (one line for all lengths with the same fault). The class derives from
    ValueError, as usual in Python, and from RuntimeError, which torch_npu raises.

    Attributes:
        failures: all failures of the first check that fails (presence, dtypes, ranks, axes, domains, lengths, rules).
        op, param, code: those of the first failure.
    """

    def __init__(self, failures: list[Failure]) -> None:
        alike: dict[tuple[str, ...], list[Failure]] = {}
        for f in failures:
            param = "" if f.rule is not None and f.rule.stage == "lengths" else f.param
            alike.setdefault((param, f.expected, f.got, f.advice), []).append(f)
        lines = (str(first) + "".join(f"; {f.param} likewise" for f in more) for first, *more in alike.values())
        super().__init__("\n".join(lines))
        self.failures = tuple(failures)
        self.op, self.param, self.code = failures[0].op, failures[0].param, failures[0].code

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (list(self.failures),)  # for pickling, by which errors leave worker processes


class BackendError(NotImplementedError):
    """The error of a valid call that no back end can compute; the message lists every back end's reasons."""


class ContractWarning(UserWarning):
    """The warning about a legal call that is probably a mistake."""


@dataclass(frozen=True)
class Param:
    """A parameter of an operator definition; base class of Tensor, Array and Attr.

    Args:
        name: the name by which rules and other code of this library refer to the parameter (canonical name).
        text: the description, one sentence.
        optional: True if the argument may be None.
        spelled: the parameter's name in the interface, if it is not the canonical name.
        default: the default value; REQUIRED: there is none (even if None may be passed).
    """

    name: str
    text: str
    optional: bool = False
    spelled: str = ""
    default: Any = None

    @property
    def shown(self) -> str:
        """The parameter's name in the operator's interface, which error texts use."""
        return self.spelled or self.name


@dataclass(frozen=True)
class Tensor(Param):
    """A tensor parameter.

    Args:
        dtypes: names of the allowed dtypes, "=other" for the dtype of another tensor, or "" if a rule checks the dtype.
        shape: axis words such as "B S1 N1*D", one string or one per layout string; "" if a rule checks the shape.
        output: True if the operator writes the tensor; interfaces may allocate it.
        on_host: True for a number, which may be in host memory when the other tensors are on a device, and may have no
            axes.
        cast: advice in the error about a wrong dtype.
        form: a function from a call's values by name to this tensor's layout string; None: the layout of the call.
        make: a function from a shape to the content in generated test calls; None: random numbers.
    """

    dtypes: str = ""
    shape: str | Mapping[str, str] = ""
    output: bool = False
    on_host: bool = False
    cast: str = "convert it with .to()"
    form: Callable[[Mapping[str, Any]], str] | None = field(default=None, compare=False)
    make: Callable[[tuple[int, ...]], torch.Tensor] | None = field(default=None, compare=False)

    def words(self, layout: str) -> list[str]:
        """Returns the axis words of the shape in a layout, ["B", "S1", "N1*D"]; [] if a rule checks the shape."""
        shape = self.shape if isinstance(self.shape, str) else self.shape.get(layout, "")
        return shape.split()


@dataclass(frozen=True)
class Tensors(Tensor):
    """A parameter that is a list of tensors, or one tensor; rules get a tuple. The declared shape is only for
    documentation and generated test calls."""


@dataclass(frozen=True)
class Array(Param):
    """A parameter of host integers, one per sequence: a list, a tuple, or an integer tensor."""


@dataclass(frozen=True)
class Attr(Param):
    """A parameter that is a number, a string or another hashable object.

    Args:
        type: int, float or str (for float an int is accepted too), or any hashable class.
        domain: an expression that must be true, for instance "scale > 0"; "": every value of the type.
        axis: the axis word whose size this attribute is; "": none.
        unsigned: True if an int must be below 2**64, False if below 2**63.
        code: the error code that CANN's two-phase (aclnn) interface returns for a value outside the domain.
    """

    type: type = int
    default: Any = REQUIRED
    domain: str = ""
    axis: str = ""
    unsigned: bool = False
    code: int = TILING


@dataclass(frozen=True)
class Rule:
    """A condition over axes, attributes, arrays and tensors that every call must satisfy.

    The condition may call functions of the definition. If such a function returns a string, the rule is violated, and
    the string describes the actual value.

    Args:
        check: the condition, a Python expression, which is also the error's text.
        param: the canonical name of the parameter that the error names.
        advice: the reason, or the fix.
        text: the expected value for the error, if the expression is not readable.
        when: an expression; the rule applies only if it is true. "" in a rule about an optional parameter: if the
            parameter is given, unless the check mentions None.
        only: the layouts in which the rule applies; empty: all.
        needs: parameters that a definition must have for the rule to apply; else it is ignored.
        level: "meaning" (always an error), "limit" (of the chip) and "doubt" (errors if strict), "note" (a warning), or
            "content" (depends on values in tensors).
        code: the error code that CANN's two-phase (aclnn) interface returns.
        stage: "presence", "dtype", "lengths" or "rules".
        reads: True if the rule reads tensor data. It is then checked at every call, or, if it only warns, at the first
            call of a signature.
        given: settings of sample calls in which the rule applies.
        invalid: additional settings that violate only this rule. Without them the sample call has a value of the
            parameter that the check excludes, or a tensor or list that must be None.
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
    invalid: Settings = field(default_factory=dict, compare=False)

    @property
    def id(self) -> str:
        """The rule's name in the identifiers of tests."""
        return f"{self.param}-{self.level}-{re.sub(r'[^a-zA-Z0-9]+', '_', self.text or self.check)[:48]}"

    @property
    def expected(self) -> str:
        """The error text's part about the expected value, after "expected"."""
        if self.text:
            return self.text
        result = re.fullmatch(r"fits\(\w+, '([^']*)'\)", self.check)
        return f"shape {shape_text(result[1])}" if result else self.check


@dataclass(frozen=True)
class Prototype:
    """The parameter names of an operator's C declaration in CANN.

    Args:
        names: CANN's names of the parameters, in the declaration's order.
        source: the document that has these names.
        header: the name of CANN's header file.
        tensors: names of parameters that are arrays of integers in the operator definition and tensors in C.
    """

    names: tuple[str, ...]
    source: str
    header: str = ""
    tensors: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Declared:
    """The spelling of parameters in CANN's C declarations of an operator's versions: "headNum" for head_num.

    Args:
        optional: suffix of the names of optional tensors and arrays. output: suffix of the names of outputs.
        names: exceptions by the definition's parameter name; after a name that ends with "!" no suffix is added.
        source: the document that has the names.
        on_device: regular expression for CANN's names of lengths that are tensors on the device.
    """

    optional: str = ""
    output: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    source: str = "its public repository, ops-transformer; pages may spell some otherwise"
    on_device: str = "PaddingSize"

    def but(self, **names: str) -> Declared:
        """Returns a copy with more exceptions to the spelling, given as parameter_name="CANN's name"."""
        return replace(self, names={**self.names, **names})

    def of_page(self, **names: str) -> Declared:
        """Returns a copy with more exceptions (parameter_name="CANN's name"), for an operator whose own page in CANN's
        documentation is the source of all names."""
        return replace(self.but(**names), source="this operator's page")

    def prototype(self, op: Op) -> Prototype:
        """Returns the parameter names and header of an operator's C declaration, as CANN spells them."""
        names = tuple(map(self._spelled, op.params))
        header = re.sub(r"([a-z\d])(?=[A-Z])|([A-Z])(?=[A-Z][a-z])", r"\1\2_", op.name).lower() + ".h"
        if op.name.startswith("aclnnFlashAttention"):  # the training operators share two headers
            header = f"aclnn_flash_attention_score{'_grad' if 'Grad' in op.name else ''}.h"
        on_device = frozenset(name for name in names if re.search(self.on_device, name))
        return Prototype(names, self.source, header, on_device)

    def _spelled(self, p: Param) -> str:
        first, *rest = p.shown.split("_")
        name = self.names.get(p.name, first + "".join(word[:1].upper() + word[1:] for word in rest))
        if name.endswith("!") or isinstance(p, Attr):
            return name.removesuffix("!")
        if isinstance(p, Tensor) and p.output:
            return name + self.output
        return name + self.optional * p.optional


@dataclass(frozen=True, eq=False, repr=False)
class Op:
    """The definition of an operator.

    Args:
        name: the interface's name; for CANN's package: cann_ops_transformer.FUNCTION.
        summary: the description, one sentence.
        formula, tex: the formula as text and in TeX.
        params: the parameters in the interface's order.
        follows: the documentation that the definition follows, if it is not that of SOURCES.
        rulings: numbers of decisions in docs/rulings.md about questions that the source leaves open.
        rules: conditions of legal calls; those about a parameter or layout that the definition lacks are ignored.
        layouts: the layout strings; sample calls have the first.
        layout_attr: the attribute that selects the layout.
        neutral: values by canonical name, for names that rules and `lower` use but the definition lacks.
        blank_is_absent: True if an optional tensor without dimensions or elements counts as absent.
        derive: a function from a call's values to further values (lengths per sequence), called when arrays change.
        functions: functions that rules may call.
        lower: a function from a checked call (and seed and offset, if it has dropout) to the call for back ends.
        results: names of all results that the call for back ends may have.
        fresh: a function from arguments by name, whose sizes may be symbolic, to memory for the results.
        trains: for each differentiable result, the inputs with a gradient; lower then returns a Differentiable call.
        repeats: True if calls that differ only in memory are prepared once; lower then returns a Repeatable call.
        sizes: axis sizes of sample calls. samples: further settings of sample calls per layout.
        c: spellings of CANN's C declaration, for operators of the two-phase interface; errors show them.
        keywords: name of the first keyword-only parameter of the operator's function; "": none.
        declared: types by canonical name, of parameters whose class does not determine them, and of outputs that a
            caller passes.
        returns: description of the results in the docstring; "": the outputs.
        example: the docstring's example.
    """

    name: str
    summary: str
    params: tuple[Param, ...]
    rules: tuple[Rule, ...] = ()
    formula: str = ""
    tex: str = ""
    follows: str = ""
    rulings: tuple[int, ...] = ()
    layouts: tuple[str, ...] = ()
    layout_attr: str = "input_layout"
    neutral: Settings = field(default_factory=dict)
    blank_is_absent: bool = False
    derive: Callable[[dict[str, Any]], dict[str, Any]] = lambda names: {}
    functions: Mapping[str, Check] = field(default_factory=dict)
    lower: Callable[..., Any] | None = None
    results: tuple[str, ...] = ()
    fresh: Callable[[Mapping[str, Any]], dict[str, torch.Tensor]] | None = None
    trains: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    repeats: bool = False
    sizes: Mapping[str, int] = field(default_factory=dict)
    samples: Mapping[str, Settings] = field(default_factory=dict)
    c: Declared = field(default_factory=Declared)
    keywords: str = ""
    declared: Mapping[str, Any] = field(default_factory=dict)
    returns: str = ""
    example: str = ""
    names: tuple[str, ...] = field(init=False)
    # CANN's declaration of an operator of the two-phase interface, and CANN's names by the interface's names.
    prototype: Prototype = field(init=False)
    cann: dict[str, str] = field(init=False)
    # Positions of the tensors in rules of the form trained(name), which test if a gradient is required.
    watched: tuple[int, ...] = field(init=False)
    by_name: dict[str, Param] = field(init=False)
    trained: frozenset[str] = field(init=False)  # inputs with a gradient
    applicable_rules: tuple[Rule, ...] = field(init=False)
    signatures: dict[Any, Any] = field(init=False)
    reader: Callable[..., Any] | None = field(init=False, default=None)  # of signatures; bind() makes it
    positions: dict[type, tuple[int, ...]] = field(init=False)

    def __post_init__(self) -> None:
        def positions(kind: type) -> tuple[int, ...]:
            return tuple(i for i, p in enumerate(self.params) if type(p) is kind)

        object.__setattr__(self, "names", tuple(p.name for p in self.params))
        shown = [p.shown for p in self.params]
        prototype = self.c.prototype(self) if self.name.startswith("aclnn") else Prototype((), "")
        object.__setattr__(self, "prototype", prototype)
        object.__setattr__(self, "cann", dict(zip(shown, prototype.names, strict=True)) if prototype.names else {})
        object.__setattr__(self, "by_name", {p.name: p for p in self.params})
        object.__setattr__(self, "trained", frozenset().union(*self.trains.values()))
        object.__setattr__(
            self, "applicable_rules", tuple(self._of_given(rule) for rule in self.rules if self._has(rule))
        )
        object.__setattr__(self, "signatures", {})
        asking = (rule.check for rule in self.applicable_rules if "trained(" in rule.check)
        watched = {name for check in asking for name in re.findall(r"trained\((\w+)\)", check)}
        object.__setattr__(self, "watched", tuple(i for i, p in enumerate(self.params) if p.name in watched))
        object.__setattr__(self, "positions", {kind: positions(kind) for kind in (Tensor, Tensors, Array, Attr)})

    def __repr__(self) -> str:
        return f"<record of {self.name}>"

    def _has(self, rule: Rule) -> bool:
        applies = rule.param in self.by_name and (not rule.needs or self.by_name.keys() >= set(rule.needs))
        return applies and (not rule.only or not set(self.layouts).isdisjoint(rule.only))

    def _of_given(self, rule: Rule) -> Rule:
        """Returns the rule, restricted to calls that pass its parameter if that is optional."""
        p = self.by_name[rule.param]
        optional = p.optional or (isinstance(p, Attr) and p.default is None)
        if rule.when or not optional or rule.stage == "presence" or re.search(r"None|trained\(", rule.check):
            return rule
        return replace(rule, when=f"{rule.param} is not None")

    def version(
        self,
        name: str,
        summary: str,
        *,
        after: Mapping[str, tuple[Param, ...]] | None = None,
        instead: Iterable[Param] = (),
        without: Iterable[str] = (),
        **changes: Any,
    ) -> Op:
        """Returns a copy of this definition for another version of the operator.

        Args:
            name, summary: those of the version.
            after: parameters to insert after the named ones.
            instead: parameters that replace those with the same name.
            without: names of parameters to omit.
            changes: other fields of the definition.
        """
        if "params" not in changes:
            others, inserted, dropped = {p.name: p for p in instead}, after or {}, set(without)
            params = (others.get(p.name, p) for p in self.params if p.name not in dropped)
            changes["params"] = tuple(result for p in params for result in (p, *inserted.get(p.name, ())))
        return replace(self, name=name, summary=summary, **changes)

    def failure(
        self, param: str, expected: str, got: str, advice: str = "", code: int = INVALID, rule: Rule | None = None
    ) -> Failure:
        """Returns a Failure (error record) about this operator's parameter `param`; expected, got, advice: parts of the
        error text; code: CANN's error code; rule: the violated rule."""
        return Failure(self.name, param, expected, got, advice, code, rule, self.cann.get(param, ""))

    def named(self, values: Iterable[Any]) -> dict[str, Any]:
        """Returns {parameter name: value}; values: in the order of the parameters."""
        return dict(zip(self.names, values, strict=True))

    @property
    def called(self) -> str:
        """The name of the operator's function, without a package prefix."""
        return self.name.rpartition(".")[2]

    @property
    def source(self) -> str:
        """The documentation that the definition follows; "" for this library's functions."""
        return self.follows or next((text for start, text in SOURCES.items() if self.name.startswith(start)), "")

    @property
    def page(self) -> str:
        """The documentation that the definition follows, with the operator's name, or "this library"."""
        return f"{self.source}, {self.name}" if self.source else "this library"

    def layout_of(self, p: Tensor, names: Mapping[str, Any]) -> str:
        """Returns the layout string of tensor p in a call with values `names`: p.form(names) or the call's layout."""
        return p.form(names) if p.form else str(names.get(self.layout_attr, ""))

    def tensors(self, output: bool = False) -> list[Tensor]:
        """Returns the parameters that are input tensors, or the output tensors, in order."""
        return [p for p in self.params if isinstance(p, Tensor) and p.output is output]

    @property
    def inputs(self) -> list[Param]:
        """The parameters of the operator's function: all but outputs, unless an output is in `declared`."""
        return [p for p in self.params if not (isinstance(p, Tensor) and p.output) or p.name in self.declared]

    def spell(self, text: str) -> str:
        """Replaces the definition's parameter names in a text by those of the operator's interface."""
        for p in self.params:
            if p.spelled:
                text = re.sub(rf"\b{p.name}\b", p.spelled, text)
        return text

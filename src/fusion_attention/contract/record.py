"""What a correct call is, as data: the parameters and rules of an operator, and how a broken one is worded.

From one record calls are checked (contract.bind), pages written (pages.py), test cases made (sampling.py). Refuses to
know what any operator computes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fusion_attention.contract.expressions import shape_text

# Return codes of the two-phase interface; every failure carries the one that CANN gives for it.
NULL_POINTER, INVALID, RUNTIME, TILING = 161001, 161002, 361001, 561002
# meaning: no result is defined; limit: documented for the chip, an error when strict; content: reads tensor data, on
# request; note: a warning; doubt: a legal call that probably means something else, a warning, and an error when strict.
LEVELS = ("meaning", "limit", "content", "doubt", "note")
WARNED = ("note", "doubt")
# In this order. "dtype" covers devices and the layout string too; the stage of a rule is one of the named four.
STAGES = ("presence", "dtype", "rank", "axes", "domains", "lengths", "rules")
REQUIRED: Any = type("Required", (), {"__repr__": lambda self: "required"})()

Check = Callable[..., Any]
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Failure:
    """One broken rule, in the wording of every error of this library; cann: CANN's name of the parameter, if known."""

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
    """A wrong call. The message has a line for each failure, one for lengths that are wrong alike; op, param and code
    are the first one's.

    A ValueError as Python has it, and a RuntimeError, which torch_npu's own refusals are.

    Attributes:
        failures: every failure of the first stage that found one.
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
        return type(self), (list(self.failures),)  # What worker processes send home.


class BackendError(NotImplementedError):
    """A valid call that no back end can compute; the message lists every back end's reasons."""


class ContractWarning(UserWarning):
    """A legal call that probably does not mean what it says."""


@dataclass(frozen=True)
class Param:
    """What every parameter has.

    Args:
        name: the canonical one; spelled: how this record spells it, if otherwise.
        text: one sentence.
        optional: may be None.
        default: REQUIRED without one, even where None may be given.
    """

    name: str
    text: str
    optional: bool = False
    spelled: str = ""
    default: Any = None

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
        output: written by the operator; a caller may leave it to the interface to allocate.
        on_host: may lie in host memory beside tensors of a device.
        cast: what to do about another dtype.
        form: from a call's values to the layout of this tensor, where it is not the record's.
        make: sample content from a shape, where random numbers would not be legal.
    """

    dtypes: str = ""
    shape: str | Mapping[str, str] = ""
    output: bool = False
    on_host: bool = False
    cast: str = "convert it with .to()"
    form: Callable[[Mapping[str, Any]], str] | None = field(default=None, compare=False)
    make: Callable[[tuple[int, ...]], torch.Tensor] | None = field(default=None, compare=False)

    def words(self, layout: str) -> list[str]:
        """The axis words in a layout; empty where the record leaves the shape to a rule."""
        shape = self.shape if isinstance(self.shape, str) else self.shape.get(layout, "")
        return shape.split()


@dataclass(frozen=True)
class Tensors(Tensor):
    """A list of tensors; one tensor is a list of one. Rules see a tuple.

    The shape is what pages show and samples have; rules decide.
    """


@dataclass(frozen=True)
class Array(Param):
    """Host integers, one per sequence: a list, a tuple, or an integer tensor."""


@dataclass(frozen=True)
class Attr(Param):
    """A number or a string.

    Args:
        type: int, float or str (an int is a float too), or any class that is hashable.
        domain: an expression that must hold; bad: a value that breaks it.
        axis: the axis word that this number is.
        unsigned: an int below 2**64, not 2**63.
    """

    type: type = int
    default: Any = REQUIRED
    domain: str = ""
    bad: Any = None
    axis: str = ""
    unsigned: bool = False
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
        reads: needs tensor data, so it is asked at every call; for a warning, at the first of its signature.
        given: sample settings under which the rule is asked; invalid: further settings that break it alone.
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
        """Names the rule in tests."""
        return f"{self.param}-{self.level}-{re.sub(r'[^a-zA-Z0-9]+', '_', self.text or self.check)[:48]}"

    @property
    def expected(self) -> str:
        """The wording after "expected"."""
        if self.text:
            return self.text
        result = re.fullmatch(r"fits\(\w+, '([^']*)'\)", self.check)
        return f"shape {shape_text(result[1])}" if result else self.check


@dataclass(frozen=True)
class Prototype:
    """CANN's C declaration of an operator, as far as its record does not give it.

    Args:
        names: what CANN calls its parameters, in its order.
        source: where they were read.
        header: CANN's file that declares it.
        tensors: parameters that are integers in the record, and for CANN a tensor, not an aclIntArray.
    """

    names: tuple[str, ...]
    source: str
    header: str = ""
    tensors: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False, repr=False)
class Op:
    """The record of one operator.

    Args:
        name: as the interface names it; of CANN's package: cann_ops_transformer.FUNCTION.
        summary: one sentence; formula: what is computed, as plain text; tex: the same in TeX.
        params: in the interface's order.
        source: who documents it; "" of this library's own. rulings: numbers of docs/rulings.md that decide where that
            page is silent.
        rules: asked in stages; one about a parameter or a layout that the record lacks is left out.
        layouts: the layout strings, first one sampled; layout_attr: the attribute that chooses.
        neutral: canonical names that rules and lowering may mention, with the value they have where the record
            lacks the parameter.
        blank_is_absent: an optional tensor without dimensions or elements was not given.
        derive: from the names bound so far to further names (lengths per sequence), asked whenever arrays change.
        functions: what rules may call.
        lower: from a bound call (and, of what drops, seed and offset) to its ir.call.Lowered.
        results: every result that its Lowered may have; fresh: from arguments by name, whose sizes may be symbols, to
            memory for those that the call has; trains: from a result to the inputs that it is differentiable in (then
            lower gives a Differentiable); repeats: whether calls that differ in memory alone are prepared once (then
            lower gives a Repeatable).
        sizes: axis sizes of a sample; samples: further sample settings per layout.
        prototypes: those of CANN's operators, by their names: this one's gives its errors CANN's names too.
        keywords: the first parameter, as users see it, that a function made of the record (npu/interface.py) takes by
            keyword alone; "": none. declared: by canonical name, types of its parameters that their kinds do not say,
            and those of outputs that a caller gives. returns: the names of its results, and what else is to be said
            of them; "": the outputs. example: of its docstring.
    """

    name: str
    summary: str
    params: tuple[Param, ...]
    rules: tuple[Rule, ...] = ()
    formula: str = ""
    tex: str = ""
    source: str = ""
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
    prototypes: Mapping[str, Prototype] = field(default_factory=dict)
    keywords: str = ""
    declared: Mapping[str, Any] = field(default_factory=dict)
    returns: str = ""
    example: str = ""
    names: tuple[str, ...] = field(init=False)
    # From the names that users see to CANN's; empty where the operator is not CANN's.
    cann: dict[str, str] = field(init=False)
    # The positions of tensors of which rules ask whether they want a gradient.
    watched: tuple[int, ...] = field(init=False)
    by_name: dict[str, Param] = field(init=False)
    trained: frozenset[str] = field(init=False)  # the inputs that some result is differentiable in
    asked: tuple[Rule, ...] = field(init=False)
    signatures: dict[Any, Any] = field(init=False)
    reader: Callable[..., Any] | None = field(init=False, default=None)  # of signatures; bind() makes it
    positions: dict[type, tuple[int, ...]] = field(init=False)

    def __post_init__(self) -> None:
        def positions(kind: type) -> tuple[int, ...]:
            return tuple(i for i, p in enumerate(self.params) if type(p) is kind)

        object.__setattr__(self, "names", tuple(p.name for p in self.params))
        shown = [p.shown for p in self.params]
        prototype = self.prototypes.get(self.name)
        object.__setattr__(self, "cann", dict(zip(shown, prototype.names, strict=True)) if prototype else {})
        object.__setattr__(self, "by_name", {p.name: p for p in self.params})
        object.__setattr__(self, "trained", frozenset().union(*self.trains.values()))
        object.__setattr__(self, "asked", tuple(filter(self._has, self.rules)))
        object.__setattr__(self, "signatures", {})
        asking = (rule.check for rule in self.asked if "trained(" in rule.check)
        watched = {name for check in asking for name in re.findall(r"trained\((\w+)\)", check)}
        object.__setattr__(self, "watched", tuple(i for i, p in enumerate(self.params) if p.name in watched))
        object.__setattr__(self, "positions", {kind: positions(kind) for kind in (Tensor, Tensors, Array, Attr)})

    def __repr__(self) -> str:
        return f"<record of {self.name}>"

    def _has(self, rule: Rule) -> bool:
        applies = rule.param in self.by_name and (not rule.needs or self.by_name.keys() >= set(rule.needs))
        return applies and (not rule.only or not set(self.layouts).isdisjoint(rule.only))

    def version(
        self, name: str, summary: str, *, after: Mapping[str, tuple[Param, ...]] | None = None, **changes: Any
    ) -> Op:
        """This record of another operator: with parameters inserted after others, and further fields changed."""
        if after is not None:
            changes["params"] = tuple(result for p in self.params for result in (p, *after.get(p.name, ())))
        return replace(self, name=name, summary=summary, **changes)

    def failure(
        self, param: str, expected: str, got: str, advice: str = "", code: int = INVALID, rule: Rule | None = None
    ) -> Failure:
        """One of this operator's; param: the name that users see."""
        return Failure(self.name, param, expected, got, advice, code, rule, self.cann.get(param, ""))

    def named(self, values: Iterable[Any]) -> dict[str, Any]:
        """Values in the order of the parameters, one for each, by canonical name."""
        return dict(zip(self.names, values, strict=True))

    @property
    def called(self) -> str:
        """The name of its function, without that of a package."""
        return self.name.rpartition(".")[2]

    @property
    def page(self) -> str:
        """The page that the record follows."""
        return f"{self.source}, {self.name}" if self.source else "this library"

    def layout_of(self, p: Tensor, names: Mapping[str, Any]) -> str:
        """The layout of a tensor in a call: the record's, or its own."""
        return p.form(names) if p.form else str(names.get(self.layout_attr, ""))

    def tensors(self, output: bool = False) -> list[Tensor]:
        """The input (or output) tensors, in order."""
        return [p for p in self.params if isinstance(p, Tensor) and p.output is output]

    @property
    def inputs(self) -> list[Param]:
        """What callers of its function give: all but what is written, unless that is declared too."""
        return [p for p in self.params if not (isinstance(p, Tensor) and p.output) or p.name in self.declared]

    def spell(self, text: str) -> str:
        """A text with canonical names as this record spells them."""
        for p in self.params:
            if p.spelled:
                text = re.sub(rf"\b{p.name}\b", p.spelled, text)
        return text

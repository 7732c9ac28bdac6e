"""What a page of CANN says, as a table: its prototype, and clauses, each with calls and what they must give.

A call is made as a C program makes it: phase 1 and phase 2 of fusion_attention.aclnn in strict mode, tensors as
acl.Tensor, integers as acl.IntArray, outputs full of NaN (integers: -1) beforehand. It starts from a legal base of its
page; a check says what it changes. Keywords of the base (sizes, dtype) change it as a whole, others replace one
parameter, spelled as the page spells it; a function of the old value gives a new one.
"""

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch

from clauses.dtype_abbreviations import U8
from clauses.error_bounds import Near
from clauses.values import GENERATOR, Formatted
from fusion_attention import acl, aclnn
from fusion_attention.contract import Array, Attr, ContractWarning, Tensor, Tensors

Args = dict[str, Any]
NULL, INVALID, TILING, RUNTIME = 161001, 161002, 561002, 361001
HEAD = 1 << 20  # Bytes of an output that a refused call is watched in: the largest ones are never touched elsewhere.

# What a C kind may be in a record: the integers of a tensor are read, so a record may call them an array.
KINDS: dict[str, tuple[type, ...]] = {
    "aclTensor": (Tensor, Array),
    "aclTensorList": (Tensors,),
    "aclIntArray": (Array,),
    **dict.fromkeys(("double", "int64_t", "bool", "char"), (Attr,)),
}
TYPES = {"double": float, "int64_t": int, "bool": bool, "char": str}


# ------------------------------------------------------------------------------------------------------------- tables


@dataclass(frozen=True, eq=False)
class Check:
    """One call: what it changes of the base, and what must come of it.

    Args:
        over: changes by keyword.
        codes: what phase 1 (or 2) must return; empty: both return 0 and outputs are as the formula says.
        names: the parameters of which the refusal must name one, as the page spells them.
        second: changes of phase 2's own arguments; "again": run the executor twice.
        repeats: outputs have the same bits when two threads compute them again.
    """

    over: Mapping[str, Any]
    codes: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    second: Mapping[str, Any] | None = None
    repeats: bool = False

    def __str__(self) -> str:
        changes = {**self.over, **(self.second or {})}
        return f"call({', '.join(f'{name}={_shown(value)}' for name, value in changes.items())})"


def computes(**over: Any) -> Check:
    """A legal call, whose outputs are the formula's."""
    return Check(over)


def repeats(**over: Any) -> Check:
    """A legal call that gives the same bits when two threads run it again."""
    return Check(over, repeats=True)


def refuses(codes: int, names: str, /, **over: Any) -> Check:
    """A call for which the page names the code."""
    return Check(over, (codes,), tuple(names.split()))


def forbids(names: str, /, **over: Any) -> Check:
    """A call that the page rules out without a code of its own."""
    return Check(over, (INVALID, TILING), tuple(names.split()))


def fails_to_run(code: int, names: str, /, **second: Any) -> Check:
    """A legal phase 1, whose phase 2 is called wrongly."""
    return Check({}, (code,), tuple(names.split()), second)


# The statements of a page, and calls that show each. "(ruling N)" ends a statement that docs/rulings.md decides
# otherwise than the page, or on which the page contradicts itself.
Clauses = Mapping[str, Sequence[Check]]

RUN_TIME: Clauses = {
    "What fails at run time: no workspace, too little of it, a stream or an executor that ended.": [
        fails_to_run(RUNTIME, "workspace", workspace=None),
        fails_to_run(RUNTIME, "workspace", workspace=torch.empty(1, dtype=U8)),
        fails_to_run(RUNTIME, "stream", stream="closed"),
        fails_to_run(RUNTIME, "executor", again=True),
    ],
}


def merged(*tables: Clauses) -> Clauses:
    """The clauses of several tables, in which no statement stands twice."""
    result = {text: checks for table in tables for text, checks in table.items()}
    assert len(result) == sum(map(len, tables))
    return result


class Parameter(NamedTuple):
    """A line of a prototype.

    Args:
        kind: in C; name: as the page spells it.
        shown: the record's name, where it is made of other words.
        default: the number that the page says it has by itself, where it says so.
    """

    kind: str
    name: str
    shown: str = ""
    default: str = ""


def prototype(lines: str) -> tuple[Parameter, ...]:
    """Lines "kind name name=record's name name:default ...", in the page's order."""
    results = []
    for line in lines.strip().splitlines():
        kind, *names = line.split()
        for text in names:
            spelled, _, default = text.partition(":")
            name, _, shown = spelled.partition("=")
            results.append(Parameter(kind, name, shown, default))
    return tuple(results)


def filled(lines: Iterable[Parameter], **given: Any) -> Args:
    """A call of what is given: the rest is null, or the default that the page names."""
    return {p.name: TYPES[p.kind](p.default) if p.default else None for p in lines} | given


def taken_over(lines: Iterable[Parameter], args: Args, **given: Any) -> Args:
    """A gradient's call: the forward's arguments of the same names, and what is given."""
    names = {p.name for p in lines}
    return filled(lines, **{name: value for name, value in args.items() if name in names} | given)


@dataclass(frozen=True, eq=False)
class Page:
    """A page's table.

    Args:
        operator: the operator's name.
        prototype: phase 1's parameters in the page's order, without workspaceSize and executor.
        base: a legal call by the page's names, from keywords that all have defaults.
        formula: the outputs of a legal call, from its inputs.
        clauses: the table.
        finish: completes the inputs of a legal call with what the forward operator would have saved.
    """

    operator: str
    prototype: tuple[Parameter, ...]
    base: Callable[..., Args]
    formula: Callable[[Args], dict[str, Near]]
    clauses: Clauses
    finish: Callable[[Args, frozenset[str]], None] | None = None

    def checks(self) -> Iterator[Check]:
        """The calls of all clauses."""
        return chain.from_iterable(self.clauses.values())


def _shown(value: Any) -> str:
    if callable(value):
        inner = getattr(value, "__closure__", None) or ()
        return f"{value.__qualname__.split('.')[0]}{tuple(cell.cell_contents for cell in inner)}"
    text = f"{str(value.dtype)[6:]}{list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    return text if len(text) < 60 else text[:56] + " ..."


# -------------------------------------------------------------------------------------------------------------- calls


def record_of(page: Page) -> Any:
    """The record of a page's operator."""
    return aclnn.OPERATORS[page.operator]


def outputs_of(page: Page) -> list[str]:
    """The outputs, as the page spells them."""
    pairs = zip(page.prototype, record_of(page).params, strict=True)
    return [ours.name for ours, p in pairs if isinstance(p, Tensor) and p.output]


def arguments(page: Page, check: Check) -> Args:
    """The arguments of a check's phase 1, outputs poisoned."""
    GENERATOR.manual_seed(1)
    whole_call = set(inspect.signature(page.base).parameters)
    args = page.base(**{name: value for name, value in check.over.items() if name in whole_call})
    changes = {name: value for name, value in check.over.items() if name not in whole_call}
    assert changes.keys() <= args.keys(), f"{page.operator} has no {changes.keys() - args.keys()}"
    args.update({name: value(args[name]) if callable(value) else value for name, value in changes.items()})
    if page.finish is not None and not check.codes:
        page.finish(args, frozenset(changes))
    for name in outputs_of(page):
        if isinstance(args[name], torch.Tensor):
            bytes_of(args[name])[: HEAD if check.codes else None].fill_(0xFF)
    return args


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """All of the memory behind a tensor."""
    return torch.empty(0, dtype=U8).set_(tensor.untyped_storage())


def handle(value: Any, kind: str) -> Any:
    """What a C program passes."""
    if isinstance(value, Formatted):
        return acl.Tensor.of(value.tensor, acl.ACL_FORMAT_FRACTAL_NZ)
    if isinstance(value, torch.Tensor):
        return acl.Tensor.of(value)
    if isinstance(value, list) and kind == "aclTensorList":
        return acl.create_tensor_list([handle(t, "aclTensor") for t in value])
    return acl.create_int_array(value) if isinstance(value, list) else value


def called(page: Page, args: Args, second: Mapping[str, Any] | None = None) -> tuple[tuple[int, ...], str]:
    """(what the phases returned, the text of the last failure)."""
    values = [handle(args[p.name], p.kind) for p in page.prototype]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ContractWarning)
        ret, size, executor = getattr(aclnn, page.operator + "GetWorkspaceSize")(*values)
        if ret:
            return (ret,), acl.get_recent_err_msg()
        changes = dict(second or {})
        run, twice = getattr(aclnn, page.operator), changes.pop("again", False)
        second_args = {"workspace": torch.empty(size, dtype=U8) if size else None, "stream": None} | changes
        if second_args["stream"] == "closed":
            second_args["stream"] = acl.rt.create_stream()[0]
            acl.rt.destroy_stream(second_args["stream"])
        rets = [run(second_args["workspace"], size, executor, second_args["stream"]) for _ in range(2 if twice else 1)]
    return (ret, *rets), acl.get_recent_err_msg()


def wrong(page: Page, check: Check) -> str:
    """What does not hold of a check; "" where all does."""
    args = arguments(page, check)
    rets, text = called(page, args, check.second)
    if check.codes:
        return _not_refused(page, check, args, rets, text)
    if any(rets):
        return f"expected 0, got {rets}: {text}"
    return not_computed(page, args) or (_not_repeated(page, check, args) if check.repeats else "")


def _not_refused(page: Page, check: Check, args: Args, rets: tuple[int, ...], text: str) -> str:
    expected = " or ".join(map(str, check.codes))
    if rets[-1] not in check.codes or any(rets[:-1]):
        return f"expected {expected}, got {rets} {text}"
    op = record_of(page)
    shown = {ours.name: p.shown for ours, p in zip(page.prototype, op.params, strict=True)}
    names = [name if shown.get(name, name) == name else f"{shown[name]} ({name})" for name in check.names]
    if not any(line.startswith(f"{op.name}: {name}: ") for line in text.splitlines() for name in names):
        return f"expected a text about {' or '.join(names)}, got {text!r}"
    written = [name for name in outputs_of(page) if isinstance(args[name], torch.Tensor)]
    touched = [name for name in written if not bool((bytes_of(args[name])[:HEAD] == 0xFF).all())]
    again = bool(check.second) and check.second.get("again")  # type: ignore[union-attr]
    return f"refused, but {touched} were written" if touched and not again else ""


def not_computed(page: Page, args: Args) -> str:
    """Where the outputs among the arguments are not the formula's; "" where all are."""
    expected = page.formula(args)
    for name in outputs_of(page):
        got = args[name]
        if name not in expected:
            if isinstance(got, torch.Tensor) and got.dim() and got.numel():
                return f"{name} was given, and the formula knows none"
            continue
        right = expected[name]
        if got.shape != right.value.shape:
            return f"{name}: shape {list(got.shape)}, by the formula {list(right.value.shape)}"
        # Not `>`: a NaN is wrong.
        bad = ~(((got.double() - right.value).abs() <= right.slack) | (got.double() == right.value))
        if bool(bad.any()):
            at = tuple(int(i) for i in bad.nonzero()[0])
            off, may = (got.double() - right.value).abs()[at], right.slack[at]
            return f"{name}{list(at)} ({int(bad.sum())} of {bad.numel()}): {got[at]}, off by {off:.3g}, bound {may:.3g}"
    return ""


def _not_repeated(page: Page, check: Check, args: Args) -> str:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    again = arguments(page, check)
    called(page, again)
    torch.set_num_threads(threads)
    for name in outputs_of(page):
        if isinstance(args[name], torch.Tensor) and not torch.equal(bytes_of(args[name]), bytes_of(again[name])):
            return f"{name} has other bits when two threads run it again"
    return ""

"""Table of a CANN page: its prototype, and statements, each with calls and their expected results.

A call is made as a C program makes it: phase 1 and phase 2 of fusion_attention.aclnn in strict mode, with acl.Tensor,
acl.IntArray, and outputs that are filled with NaN (integers: -1) before. It starts from a legal call, the base of the
page; a check lists its changes. Keywords of base() (sizes, dtype) change the whole call, other keywords replace one
parameter, named as on the page; a function as value maps the old value to the new one.
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

# Types of an operator definition for each C kind; an integer tensor that is read on the host may be declared Array.
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
    """A call: its changes of the base, and the expected outcome.

    Args:
        over: changes by keyword.
        codes: allowed codes of phase 1 (or 2); empty: each phase returns 0, and outputs match the formula.
        names: parameters; the error text must name one of them, as on the page.
        second: changes of phase 2's arguments; "again": run the executor twice.
        repeats: outputs have the same bits when two threads repeat the call.
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
    """Makes a check of a legal call with outputs that match the formula."""
    return Check(over)


def repeats(**over: Any) -> Check:
    """Makes a check of a legal call that gives the same bits when two threads repeat it."""
    return Check(over, repeats=True)


def refuses(codes: int, names: str, /, **over: Any) -> Check:
    """Makes a check of an invalid call for which the page names the code."""
    return Check(over, (codes,), tuple(names.split()))


def forbids(names: str, /, **over: Any) -> Check:
    """Makes a check of an invalid call for which the page names no code."""
    return Check(over, (INVALID, TILING), tuple(names.split()))


def fails_to_run(code: int, names: str, /, **second: Any) -> Check:
    """Makes a check of a legal phase 1 with an invalid call of phase 2."""
    return Check({}, (code,), tuple(names.split()), second)


# Statements of a page, with calls that test each. "(ruling N)" ends a statement in which the page contradicts itself,
# or differs from the decision N of docs/rulings.md.
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
    """Merges tables; a statement must be in only one of them."""
    result = {text: checks for table in tables for text, checks in table.items()}
    assert len(result) == sum(map(len, tables))
    return result


class Parameter(NamedTuple):
    """A parameter of a prototype.

    Args:
        kind: C type; name: name on the page.
        shown: canonical name, if it has other words.
        default: the default value that the page gives, if any.
    """

    kind: str
    name: str
    shown: str = ""
    default: str = ""


def prototype(lines: str) -> tuple[Parameter, ...]:
    """Parses lines "kind name name=canonical_name name:default ...", in the page's order."""
    results = []
    for line in lines.strip().splitlines():
        kind, *names = line.split()
        for text in names:
            spelled, _, default = text.partition(":")
            name, _, shown = spelled.partition("=")
            results.append(Parameter(kind, name, shown, default))
    return tuple(results)


def filled(lines: Iterable[Parameter], **given: Any) -> Args:
    """Returns the arguments of a call; those not given are null or the page's default."""
    return {p.name: TYPES[p.kind](p.default) if p.default else None for p in lines} | given


def taken_over(lines: Iterable[Parameter], args: Args, **given: Any) -> Args:
    """Returns the arguments of a gradient: those of the forward with the same names, and the given ones."""
    names = {p.name for p in lines}
    return filled(lines, **{name: value for name, value in args.items() if name in names} | given)


@dataclass(frozen=True, eq=False)
class Page:
    """Table of a page.

    Args:
        operator: the operator's name.
        prototype: phase 1's parameters in the page's order, without workspaceSize and executor.
        base: returns a legal call by the page's names; every keyword has a default.
        formula: returns the outputs of a legal call from its inputs.
        clauses: the statements with their checks.
        finish: sets the inputs of a legal call that the forward operator would have saved.
    """

    operator: str
    prototype: tuple[Parameter, ...]
    base: Callable[..., Args]
    formula: Callable[[Args], dict[str, Near]]
    clauses: Clauses
    finish: Callable[[Args, frozenset[str]], None] | None = None

    def checks(self) -> Iterator[Check]:
        """Yields the checks of all statements."""
        return chain.from_iterable(self.clauses.values())


def _shown(value: Any) -> str:
    if callable(value):
        inner = getattr(value, "__closure__", None) or ()
        return f"{value.__qualname__.split('.')[0]}{tuple(cell.cell_contents for cell in inner)}"
    text = f"{str(value.dtype)[6:]}{list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    return text if len(text) < 60 else text[:56] + " ..."


# -------------------------------------------------------------------------------------------------------------- calls


def record_of(page: Page) -> Any:
    return aclnn.OPERATORS[page.operator]


def outputs_of(page: Page) -> list[str]:
    """Returns the names of the outputs on the page."""
    pairs = zip(page.prototype, record_of(page).params, strict=True)
    return [ours.name for ours, p in pairs if isinstance(p, Tensor) and p.output]


def arguments(page: Page, check: Check) -> Args:
    """Returns phase 1's arguments of a check, with poisoned outputs."""
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
    """Returns all bytes of a tensor's storage."""
    return torch.empty(0, dtype=U8).set_(tensor.untyped_storage())


def handle(value: Any, kind: str) -> Any:
    """Converts a value to the handle or number that a C program passes."""
    if isinstance(value, Formatted):
        return acl.Tensor.of(value.tensor, acl.ACL_FORMAT_FRACTAL_NZ)
    if isinstance(value, torch.Tensor):
        return acl.Tensor.of(value)
    if isinstance(value, list) and kind == "aclTensorList":
        return acl.create_tensor_list([handle(t, "aclTensor") for t in value])
    return acl.create_int_array(value) if isinstance(value, list) else value


def called(page: Page, args: Args, second: Mapping[str, Any] | None = None) -> tuple[tuple[int, ...], str]:
    """Runs phase 1 and phase 2; returns (their codes, the text of the last failure)."""
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
    """Runs a check; returns a description of its failure, or ""."""
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
    """Compares the outputs with the formula; returns a description of the first difference, or ""."""
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
        # Comparison by <= makes a NaN an error.
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

"""Calls operators by their definitions; returns failures, warnings and the described functions."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest

import fusion_attention
from fusion_attention import ContractError, ContractWarning, npu
from fusion_attention.contract import Failure, Op, Tensor, bind
from fusion_attention.npu.surface import cann_ops
from fusion_attention.ops import RECORDS
from fusion_attention.ops.auxiliary_definitions.definitions import AUXILIARY, CONTRACTS

INTERFACES: dict[str, Callable[..., Any]] = {name: getattr(npu, name) for name in npu.__all__ if name in RECORDS}
INTERFACES |= {name: getattr(fusion_attention, name) for name in fusion_attention.__all__ if name in RECORDS}
INTERFACES |= {name: function for name, function in cann_ops.FROM_RECORDS.items() if name in RECORDS}
# Exclude functions that take one object (a cache or a state) in place of several parameters of the definition.
del INTERFACES["decode_attention"], INTERFACES["compress"]
AUXILIARY_INTERFACES: dict[str, Callable[..., Any]] = {
    name: cann_ops.FROM_RECORDS.get(name) or getattr(npu, name) for name in AUXILIARY
}
EVERY_INTERFACE = INTERFACES | AUXILIARY_INTERFACES
Args = dict[str, Any]
NEWEST = {re.sub(r"_?[vV]\d+(?=$|Grad$|_)", "", name): name for name in CONTRACTS}.values()
ATTENTION = RECORDS["attention"]
PACKED = {"input_layout": "TND"}


def layouts(op: Op) -> list[Args]:
    """Returns sample options for each layout of an operator; [{}] if the operator has no layouts."""
    return [{op.layout_attr: layout} for layout in op.layouts] or [{}]


def of_versions(name: str) -> tuple[pytest.MarkDecorator, ...]:
    """Returns the marks of a case: only the newest version of a function runs daily; older ones share most rules."""
    return () if name in NEWEST else (pytest.mark.slow,)


def starts(op: Op) -> list[Args]:
    """Returns sample options of small legal calls in which every optional tensor occurs: {}, and those of the rules."""
    results: list[Args] = [{}]
    for rule in op.applicable_rules:
        if rule.given and rule.given not in results and rule.given.get("S1", 0) < 100:
            results.append(dict(rule.given))
    return results


def outcome(op: Op, args: Args, **flags: bool) -> tuple[tuple[Failure, ...], list[str]]:
    """Returns the failures and the warnings of a call; other exceptions propagate."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            bind(op, args, **flags)
            failures: tuple[Failure, ...] = ()
        except ContractError as error:
            failures = error.failures
    return failures, [str(w.message) for w in caught if issubclass(w.category, ContractWarning)]


def one(op: Op, args: Args, **flags: bool) -> str:
    """Returns the text of the only failure of a call."""
    failures, _ = outcome(op, args, **flags)
    assert len(failures) == 1, failures
    return str(failures[0])


def call(op: Op, args: Args) -> Any:
    """Calls the function of an operator definition, with the parameter names of the function."""
    return EVERY_INTERFACE[op.name](
        **{p.shown: args[p.name] for p in op.params if not (isinstance(p, Tensor) and p.output)}
    )


def by_name(op: Op, args: Args) -> Args:
    """Returns arguments by the function's parameter names."""
    return {p.shown: args[p.name] for p in op.params if p.name in args}

"""Calls of records: what they are refused for and warned of, and the functions that records describe."""

import warnings
from collections.abc import Callable
from typing import Any

import fusion_attention
from fusion_attention import ContractError, ContractWarning, npu
from fusion_attention.contract import Failure, Op, Tensor, bind
from fusion_attention.npu.surface import cann_ops
from fusion_attention.ops import RECORDS
from fusion_attention.ops.auxiliary.definitions import AUXILIARY

INTERFACES: dict[str, Callable[..., Any]] = {name: getattr(npu, name) for name in npu.__all__ if name in RECORDS}
INTERFACES |= {name: getattr(fusion_attention, name) for name in fusion_attention.__all__ if name in RECORDS}
INTERFACES |= {name: function for name, function in cann_ops.FROM_RECORDS.items() if name in RECORDS}
# A cache, and a state, stand for several of the record's parameters.
del INTERFACES["decode_attention"], INTERFACES["compress"]
AUXILIARY_INTERFACES: dict[str, Callable[..., Any]] = {
    name: cann_ops.FROM_RECORDS.get(name) or getattr(npu, name) for name in AUXILIARY
}
EVERY_INTERFACE = INTERFACES | AUXILIARY_INTERFACES
Args = dict[str, Any]
ATTENTION = RECORDS["attention"]
PACKED = {"input_layout": "TND"}


def layouts(op: Op) -> list[Args]:
    """A setting of a sample for each layout of a record; one without any, where it has none."""
    return [{op.layout_attr: layout} for layout in op.layouts] or [{}]


def outcome(op: Op, args: Args, **flags: bool) -> tuple[tuple[Failure, ...], list[str]]:
    """The failures and the warnings of a call; anything else raised is this test's failure."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            bind(op, args, **flags)
            failures: tuple[Failure, ...] = ()
        except ContractError as error:
            failures = error.failures
    return failures, [str(w.message) for w in caught if issubclass(w.category, ContractWarning)]


def one(op: Op, args: Args, **flags: bool) -> str:
    """The text of the only failure of a call."""
    failures, _ = outcome(op, args, **flags)
    assert len(failures) == 1, failures
    return str(failures[0])


def call(op: Op, args: Args) -> Any:
    """The function that a record describes, called by its own names."""
    return EVERY_INTERFACE[op.name](
        **{p.shown: args[p.name] for p in op.params if not (isinstance(p, Tensor) and p.output)}
    )


def by_name(op: Op, args: Args) -> Args:
    """Arguments of a function by its own names."""
    return {p.shown: args[p.name] for p in op.params if p.name in args}

"""Clauses that follow from the names of an operator's parameters, or from another page."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from clauses.dtypes import F32, I16
from clauses.table import INVALID, NULL, RUN_TIME, Check, Clause, clause, computes, forbids, refuses
from clauses.table import repeats as again
from clauses.values import deeper, fractal, gapped, to


def of_page(
    clauses: Iterable[Clause], names: Mapping[str, str], holds: Callable[[Check], bool]
) -> tuple[Clause, ...]:  # fmt: skip
    """The clauses of another page, without checks that do not hold here; names: parameters as this page spells them."""

    def renamed(check: Check) -> Check:
        over = {names.get(name, name): value for name, value in check.over.items()}
        return replace(check, over=over, names=tuple(names.get(name, name) for name in check.names))

    results = (replace(c, checks=tuple(renamed(check) for check in c.checks if holds(check))) for c in clauses)
    return tuple(c for c in results if c.checks)


def of_parameters(
    needed: str, rows: str, singles: str = "", integers: str = "", bad: Mapping[str, Sequence[object]] | None = None,
    outputs: str = "", workspace: bool = True, repeats: bool = True,
) -> tuple[Clause, ...]:  # fmt: skip
    """The clauses of what any page says of its parameters.

    Args:
        needed: tensors without which a call is refused. rows: those of the call's dtype. singles: those of FLOAT32.
        integers: tensors of integers. outputs: those among needed tensors, which may have gaps.
        bad: attributes, and values that they do not take. workspace: a call needs one.
        repeats: two threads give the same bits, which torch's own products do not on every processor.
    """

    def clauses() -> Iterator[Clause]:
        yield clause("null", "Needed.", *(refuses(NULL, name, **{name: None}) for name in needed.split()))
        yield clause("formats", "ND.", *(refuses(INVALID, name, **{name: fractal}) for name in needed.split()))
        yield clause(
            "dtypes", "One dtype of rows.", *(refuses(INVALID, name, **{name: to(torch.int8)}) for name in rows.split())
        )
        if singles:
            yield clause(
                "float32",
                "FLOAT32.",
                *(refuses(INVALID, name, **{name: to(torch.float64)}) for name in singles.split()),
            )
        if integers:
            wrong = (refuses(INVALID, name, **{name: to(d)}) for name in integers.split() for d in (I16, F32))
            yield clause("integers", "INT32.", *wrong)
        yield clause("axes", "As many axes.", *(forbids(name, **{name: deeper}) for name in needed.split()))
        if bad:
            values = (forbids(name, **{name: value}) for name, values in bad.items() for value in values)
            yield clause("attributes", "Values of attributes.", *values)
        yield clause("strides", "Gaps.", *(computes(**{name: gapped}) for name in (outputs or rows).split()))
        if repeats:
            yield clause("repeats", "The same bits again.", again())
        yield RUN_TIME if workspace else replace(RUN_TIME, checks=RUN_TIME.checks[2:])

    return tuple(clauses())

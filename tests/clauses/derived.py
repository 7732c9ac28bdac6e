"""Statements that are generated from parameter names, or copied from another page."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from clauses.checks import INVALID, NULL, RUN_TIME, Check, Clauses, computes, forbids, refuses
from clauses.checks import repeats as again
from clauses.dtype_abbreviations import F32, I16
from clauses.values import deeper, fractal, gapped, to


def of_page(clauses: Clauses, names: Mapping[str, str], holds: Callable[[Check], bool]) -> Clauses:
    """Returns the statements of another page with the checks that hold here; names: names there -> names here."""

    def renamed(check: Check) -> Check:
        over = {names.get(name, name): value for name, value in check.over.items()}
        return replace(check, over=over, names=tuple(names.get(name, name) for name in check.names))

    results = {text: [renamed(check) for check in checks if holds(check)] for text, checks in clauses.items()}
    return {text: checks for text, checks in results.items() if checks}


def of_parameters(
    needed: str, rows: str, singles: str = "", integers: str = "", bad: Mapping[str, Sequence[object]] | None = None,
    outputs: str = "", workspace: bool = True, repeats: bool = True,
) -> Clauses:  # fmt: skip
    """Returns statements that every page makes about its parameters.

    Args:
        needed: required tensors. rows: tensors with the call's dtype. singles: tensors of FLOAT32.
        integers: integer tensors. outputs: the outputs among needed tensors, which may have gaps.
        bad: invalid values by attribute. workspace: a call needs a workspace.
        repeats: two threads give the same bits; torch's matrix products do not on every processor.
    """

    def each(names: str, *dtypes: torch.dtype) -> Iterator[Check]:
        return (refuses(INVALID, name, **{name: to(d)}) for name in names.split() for d in dtypes)

    (at_run_time,) = RUN_TIME.values()
    clauses: Clauses = {
        "Needed tensors are not null.": [refuses(NULL, name, **{name: None}) for name in needed.split()],
        "Tensors are ND.": [refuses(INVALID, name, **{name: fractal}) for name in needed.split()],
        "Rows have one dtype.": [*each(rows, torch.int8)],
        "Numbers beside the rows are FLOAT32.": [*each(singles, torch.float64)],
        "Integers are INT32.": [*each(integers, I16, F32)],
        "Tensors have as many axes as the page says.": [forbids(name, **{name: deeper}) for name in needed.split()],
        "Attributes have the values that the page names.": [
            forbids(name, **{name: value}) for name, values in (bad or {}).items() for value in values
        ],
        "Tensors may have gaps.": [
            computes(**dict.fromkeys(names, gapped)) for i in (0, 1) if (names := (outputs or rows).split()[i::2])
        ],
        "Results are the same bits again.": [again()] * repeats,
        "What fails at run time.": at_run_time[0 if workspace else 2 :],
    }
    return {text: checks for text, checks in clauses.items() if checks}

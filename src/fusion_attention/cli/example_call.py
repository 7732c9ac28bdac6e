"""The arguments of the example programs on operators' pages."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Call:
    """The arguments of an operator call in an example program of the documentation, as Python text, and its setup."""

    setup: tuple[str, ...]  # lines of the program that make the tensors
    # Python text of each argument, by the definition's parameter names; unknown names are ignored.
    values: Mapping[str, str]
    # Python text that allocates results, by parameter name, for operators that write to given memory. The output of
    # attention and gradients are not among them: they are like the query, and like their tensors.
    outputs: Mapping[str, str] = field(default_factory=dict)
    returns: str = "out"  # variable names of the function's results

    def plus(self, *setup: str, **values: str) -> Call:
        """Returns a copy of these example arguments with more setup lines and values."""
        return replace(self, setup=(*self.setup, *setup), values={**self.values, **values})


def named(*names: str) -> dict[str, str]:
    """Returns {name: name}, example arguments (Call.values) whose variables have the names of the parameters."""
    return {name: name for name in names}


def empty(**sizes: str) -> dict[str, str]:
    """Returns {parameter name: text of a torch.empty() call} for Call.outputs; sizes: text of each output's sizes."""
    return {name: f"torch.empty({size})" for name, size in sizes.items()}

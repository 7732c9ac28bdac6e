"""The arguments of the example programs on operators' pages."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Call:
    """The arguments of an example program.

    Args:
        setup: lines that make the tensors.
        values: an expression for each argument, by canonical name; operator definitions without a parameter ignore it.
        outputs: expressions for the memory of results, by canonical name, for two-phase operators.
        returns: names of the function's results.
    """

    setup: tuple[str, ...]
    values: Mapping[str, str]
    outputs: Mapping[str, str] = field(default_factory=dict)
    returns: str = "out"

    def plus(self, *setup: str, **values: str) -> Call:
        """Returns a call with more setup lines and values."""
        return replace(self, setup=(*self.setup, *setup), values={**self.values, **values})


def named(*names: str) -> dict[str, str]:
    """Returns arguments whose variables have the parameters' names."""
    return {name: name for name in names}

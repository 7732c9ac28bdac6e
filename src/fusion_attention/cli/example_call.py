"""What a program of an operator's page gives to the operator."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Call:
    """What a program gives to an operator.

    Args:
        setup: lines that make the tensors.
        values: an expression for each parameter that is given, by canonical name; records that lack one leave it out.
        outputs: what makes the results' memory, by canonical name; of two-phase operators.
        returns: names of what the function gives back.
    """

    setup: tuple[str, ...]
    values: Mapping[str, str]
    outputs: Mapping[str, str] = field(default_factory=dict)
    returns: str = "out"

    def plus(self, *setup: str, **values: str) -> Call:
        """The same with more lines and values."""
        return replace(self, setup=(*self.setup, *setup), values={**self.values, **values})


def named(*names: str) -> dict[str, str]:
    """Parameters whose tensors have the same names."""
    return {name: name for name in names}

"""Metadata functions, which on the chip divide the work of another operator among cores; here they return zeros."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fusion_attention.contract import Attr, Bound, Declared, Op, Param
from fusion_attention.ir.call import Filled
from fusion_attention.ir.problem import Extents, Problem
from fusion_attention.memory import empty
from fusion_attention.ops.shared.params import output
from fusion_attention.ops.shared.prototypes import ON_DEVICE, of_cann

OUT = "meta_data"
_NONE = np.zeros(0, np.int64)
# The extents of a call without work for a back end.
NO_SEQUENCE = Extents(_NONE, _NONE, _NONE, _NONE, _NONE, _NONE)
NO_ATTENTION = Problem(1, 1, 1, 1)


@dataclass(frozen=True, eq=False)
class Metadata:
    """A lowered call of a metadata function, which writes zeros.

    Args:
        elements: size of the result.
        problem, extents: a problem without sequences, so no back end runs.
    """

    elements: int
    device: torch.device
    problem: Problem = NO_ATTENTION
    extents: Extents = NO_SEQUENCE
    op_kind: str = "attention_forward"

    def results(self) -> dict[str, torch.Tensor]:
        """Allocates the call's result, by name."""
        return {OUT: empty(torch.empty(0, device=self.device), (self.elements,), torch.int32)}

    def fill(self, outputs: Mapping[str, torch.Tensor]) -> Filled:
        """The call (a Filled) with the memory `outputs` of its result, which it only clears."""
        return Filled((), (outputs[OUT],), (outputs[OUT],), (outputs[OUT],))


def metadata(
    of: str,
    lengths: tuple[Param, ...],
    numbers: str,
    elements: int = 1024,
    c: Declared = Declared(on_device=ON_DEVICE).of_page(),  # noqa: B008 - immutable
) -> Op:
    """The definition of an operator's metadata function.

    Args:
        of: name of the operator.
        lengths: length parameters, the same as the operator's.
        numbers: attributes of the metadata function, as "name" (required) or "name=default".
        elements: size of the result.
        c: spellings of the C declaration.
    """

    def lower(bound: Bound) -> Metadata:
        out = bound.names.get(OUT)
        return Metadata(elements, torch.device("cpu") if out is None else out.device)

    attributes = []
    for word in numbers.split():
        name, _, text = word.partition("=")
        value: Any = {"": 1, "True": True, "False": False}.get(text, text)
        value = int(value) if isinstance(value, str) and value.lstrip("-").isdigit() else value
        attributes.append(Attr(name, "Without effect.", type=type(value), default=value if text else 1))
    result = output(OUT, "Zeros.", str(elements), "int32")
    return of_cann(
        f"{of}Metadata",
        f"Metadata of {of.removeprefix('aclnn')}: zeros, because back ends here divide the work themselves.",
        (*lengths, *attributes, result),
        formula="meta_data = 0",
        tex=r"meta\_data = 0",
        rulings=(42,),
        layouts=("BSND", "TND"),
        layout_attr="layout_q",
        neutral=dict.fromkeys(("B", "S1", "S2", "N1"), 0),
        lower=lower,
        c=c,
        results=(OUT,),
        fresh=lambda n: {OUT: empty(torch.empty(0), (elements,), torch.int32)},
        samples={"BSND": {}, "TND": {}},
    )

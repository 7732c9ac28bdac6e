"""Metadata functions, which on the Ascend chip divide another operator's work among cores; here they return zeros."""

from typing import Any

import torch

from fusion_attention.contract import Attr, Bound, Declared, Op, Param
from fusion_attention.memory import empty
from fusion_attention.ops.shared.lowered_call import NO_SEQUENCE, TorchCall
from fusion_attention.ops.shared.params import output
from fusion_attention.ops.shared.prototypes import ON_DEVICE, of_cann

OUT = "meta_data"


def metadata(
    of: str,
    lengths: tuple[Param, ...],
    numbers: str,
    elements: int = 1024,
    c: Declared = Declared(on_device=ON_DEVICE).of_page(),  # noqa: B008 - immutable
) -> Op:
    """Returns the definition of the metadata function of the operator `of`. On Ascend chips this function divides the
    operator's work among cores, before it runs; here it returns zeros.

    Args:
        of: name of the operator.
        lengths: length parameters, the same as the operator's.
        numbers: attributes of the metadata function, as "name" (required) or "name=default".
        elements: size of the result.
        c: spellings of the C declaration.
    """

    def fresh(like: torch.Tensor) -> dict[str, torch.Tensor]:
        return {OUT: empty(like, (elements,), torch.int32)}

    def lower(bound: Bound) -> TorchCall:
        out = bound.names.get(OUT)
        like = torch.empty(0) if out is None else out
        return TorchCall(NO_SEQUENCE, "", {OUT: like}, lambda: fresh(like), lambda results: None, clears=(OUT,))

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
        fresh=lambda n: fresh(torch.empty(0)),
        samples={"BSND": {}, "TND": {}},
    )

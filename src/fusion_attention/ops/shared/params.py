"""Definitions of parameters of several operators, functions that make tensors of example calls, default scale."""

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from fusion_attention.contract import Attr, Tensor

FLOATS = "float16 bfloat16 float32"
OWN_FLOATS = f"{FLOATS} float64"  # in this library's functions
# Axes of rows in each layout: batch B, tokens S of a padded sequence or T of all packed ones, heads N and elements D of
# a head; N*D: heads and elements share an axis.
WORDS = {
    "BSH": "B S N*D",
    "SBH": "S B N*D",
    "BSND": "B S N D",
    "BNSD": "B N S D",
    "NBSD": "N B S D",
    "TND": "T N D",
    "NTD": "N T D",
    "SH": "T N*D",
    "NSD": "N S D",
}


def spelled(param: Any, name: str, **changes: Any) -> Any:
    """Returns a copy of a parameter's definition with another public name, and further changed fields."""
    return replace(param, spelled=name, **changes)


def output(name: str, text: str, shape: Any, dtypes: str = "=query", **changes: Any) -> Tensor:
    """Returns the definition of an output tensor; dtypes: "=query": the query's; changes: other fields of Tensor."""
    return Tensor(name, text, dtypes=dtypes, shape=shape, output=True, **changes)


def words_of(layout: str, side: str, dim: str) -> str:
    """Returns axis names, such as "B S1 N1 D", of query (side "1") or key (side "2") tensors; dim: the name for D."""
    return re.sub("[STND]", lambda axis: dim if axis[0] == "D" else axis[0] + side, WORDS[layout])


def rows(side: str, dim: str) -> dict[str, str]:
    """Returns {layout: axis names, as "B S1 N1 D"} of query (side "1") or key (side "2") tensors; dim: name for D."""
    return {layout: words_of(layout, side, dim) for layout in ("BSH", "SBH", "BSND", "BNSD", "TND")}


def one_of(name: str, text: str, values: tuple[Any, ...], **fields: Any) -> Attr:
    """Returns the definition of an attribute with one of several values, by default the first; fields: others."""
    return Attr(
        name, text, **{"type": type(values[0]), "default": values[0], "domain": f"{name} in {values}", **fields}
    )


def keeps_or_adds(bias: str) -> str:
    """Returns the hint in errors about a mask of a wrong dtype; bias: name of the parameter for additive masks."""
    return f"True removes a score: torch's keep mask is ~mask, an additive mask (0 and -inf) goes in {bias}"


def unmasked(shape: tuple[int, ...]) -> torch.Tensor:
    """Returns a bool mask, for example calls, that hides no key."""
    return torch.zeros(shape, dtype=torch.bool)


def masked(shape: tuple[int, ...], dtype: torch.dtype = torch.bool) -> torch.Tensor:
    """Returns a mask for example calls: CANN's compressed causal mask if it has 2048 columns, else zeros."""
    if shape[-2:] not in ((2048, 2048), (3072, 2048)):
        return torch.zeros(shape, dtype=dtype)
    return triangle()[: shape[-2]].expand(shape).to(dtype, copy=True)


@functools.cache
def triangle() -> torch.Tensor:
    """Returns CANN's compressed causal mask, bool [3072, 2048]: its first 2048 rows, or, in sparse mode 6, all."""
    # The cached tensor must be real, also if the first call is made under a default device or fake tensors.
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        mask = torch.ones(3072, 2048, dtype=torch.bool, device="cpu").triu_(1)
        mask[2048:, 1024:] = True
        return mask


def in_order(shape: tuple[int, ...]) -> torch.Tensor:
    """Returns a page table for example calls: ascending page numbers."""
    return torch.arange(math.prod(shape), dtype=torch.int32).reshape(shape)


def scale_of(given: float | None, dim: int, rope: int = 0) -> float:
    """Returns the scale of q . k: `given`, or if it is None 1 / sqrt(dim + rope), from the elements of a row."""
    return (dim + rope) ** -0.5 if given is None else float(given)


BLOCKED = Tensor(
    "blocked", "True removes a score.", True, dtypes="bool uint8", cast=keeps_or_adds("bias"), make=unmasked
)
BIAS = Tensor("bias", "Added to the scaled scores.", True, dtypes="=q")
SINK = Tensor("sink", "One more logit per query head in every denominator.", True, dtypes="float32", shape="N1")
OWN_SINK = replace(SINK, dtypes=OWN_FLOATS)
SOFTCAP = Attr(
    "softcap",
    "Scaled products x become softcap * tanh(x / softcap), before any bias; 0: they are unchanged.",
    type=float,
    default=0.0,
    domain="softcap == 0 or 1e-30 <= softcap <= 1e30",
)
PAGE_IDS = "int32 int64"

# For Op.declared: lengths that torch_npu declares as a tensor, and attributes that may be None there.
TENSOR_FIRST = torch.Tensor | Sequence[int] | np.ndarray | None


def or_none(*attributes: Attr) -> dict[str, Any]:
    """Returns {name: type or None}: the annotations of attributes that may be None."""
    return {p.name: p.type | None for p in attributes}

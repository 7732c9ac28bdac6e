"""Writes calls of records as Python text, which `fusion-attention explain` reads."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fusion_attention.contract import Array, Op, Tensor
from fusion_attention.ir.mask import Band


def text(op: Op, args: Mapping[str, Any], interface: bool = True) -> str:
    """Returns the text of a call with every argument by name; interface: without outputs, which functions of torch_npu
    and of this package do not have."""
    written = []
    for p in op.params:
        value = args.get(p.name)
        if value is None or (interface and isinstance(p, Tensor) and p.output):
            continue
        if isinstance(p, Array) and isinstance(value, torch.Tensor):
            value = value.tolist()
        written.append(f"{p.shown}={word(value)}")
    return f"{op.name}({', '.join(written)})"


def word(value: Any) -> str:
    """Returns the text of a value; a tensor is written with its dtype and shape."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape)) or '()'}]"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(word, value)) + "]"
    if isinstance(value, np.ndarray):
        return str(value.tolist())
    if isinstance(value, Band):
        return f"Band({value.lo}, {value.hi}, {value.align!r}, {value.prefix!r})"
    if isinstance(value, float) and value != value:
        return "float('nan')"
    return f"float('{value}')" if isinstance(value, float) and abs(value) == float("inf") else repr(value)

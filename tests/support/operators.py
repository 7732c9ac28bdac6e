"""Reads torch_npu's (2.14) operator schemas and makes sample calls of the operators of this package."""

import inspect
import re
from pathlib import Path
from typing import Any

import torch

from fusion_attention.contract import Tensors
from fusion_attention.contract.sampling import sample
from fusion_attention.npu.surface.modules import functions
from fusion_attention.ops.auxiliary_definitions.definitions import AUXILIARY, CONTRACTS

from .contract_failures import by_name

# One schema per line, without ATB's functions (`_npu_...`), whose declarations cannot be read.
_DECLARED = Path(__file__).with_name("resources") / "torch_npu-2.14.0.txt"


def declared() -> dict[str, str]:
    """Returns torch_npu's schemas by operator and overload."""
    return {line.partition("(")[0]: line for line in _DECLARED.read_text().splitlines()}


def normalised(schema: str) -> str:
    """Returns a schema without intended differences: symbolic sizes and annotations of written arguments."""
    text = str(torch._C.parse_schema(f"npu::{schema}"))
    for theirs, ours in (("SymInt", "int"), ("Scalar scale=1,", "float scale=1.,"), ("Scalar", "float")):
        text = text.replace(theirs, ours)
    return re.sub(r"\([a-z]!\)", "", text)


def sampled(name: str) -> dict[str, Any]:
    """Returns arguments of a valid call of an operator by name; tensors require gradients if the operator has them."""
    op = CONTRACTS[name]
    args = sample(op)
    dense = ("query", "key", "value") if "fusion_attention" in name and "grad" not in name else ()
    for trained in {*dense, *(name for names in op.trains.values() for name in names)}:
        if isinstance(args[trained], torch.Tensor):
            args[trained].requires_grad_()
    needed = {p.name for p in inspect.signature(functions()[name]).parameters.values() if p.default is p.empty}
    given = by_name(op, args)
    for p in op.params:
        value = given.get(p.shown)
        if isinstance(p, Tensors) and value is not None:  # attention's lists of keys are declared as tensors
            first = value if isinstance(value, torch.Tensor) else value[0]
            given[p.shown] = [first] if op.name in AUXILIARY else first
    outputs = {p.shown for p in op.tensors(output=True)} - needed
    return {name: value for name, value in given.items() if name in needed or not (value is None or name in outputs)}


CHECKED = [name for name in functions() if name in CONTRACTS]

"""read(): reads a file that capture() wrote, and validates every field before use."""

import json
import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fusion_attention.captures.gradients import SAVED, UPSTREAM
from fusion_attention.contract import Array, Attr, Op, Param, Tensors
from fusion_attention.ir.mask import Band
from fusion_attention.ops import RECORDS

FORMAT, VERSION = "fusion_attention.capture", 2
READS = ("1", "2")  # versions of the format
OUTPUT = "output."  # prefix of the names of results
_FIELDS = ("operator", "attributes", "arrays", "strides", "outputs", "seed", "library")


class CaptureError(ValueError):
    """The error about a file that capture() did not write, or whose fields contradict each other."""


@dataclass(frozen=True, eq=False)
class Recording:
    """The content of a file that capture() wrote: one call with inputs and outputs."""

    op: Op  # the operator's definition
    args: dict[str, Any]  # its arguments by the definition's parameter names
    outputs: dict[str, torch.Tensor]  # its results by name
    seed: int  # the seed of drawn dropout
    # saved, upstream: for a backward, the forward's results and their gradients by name; else empty.
    saved: dict[str, torch.Tensor] = field(default_factory=dict)
    upstream: dict[str, torch.Tensor] = field(default_factory=dict)


def read(path: Path, device: torch.device) -> Recording:
    """Returns the operator call in a file that capture() wrote, with its tensors on a device.

    Raises:
        CaptureError: capture() did not write the file, or its fields contradict each other.
        OSError: the path does not exist, or is not a file.
    """
    if not path.exists():
        raise FileNotFoundError(2, "No such file or directory", str(path))
    if not path.is_file():
        raise OSError(22, "Not a file: a capture is one .safetensors file", str(path))
    import safetensors

    try:
        with safetensors.safe_open(path, framework="pt", device="cpu") as file:
            text = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # safetensors raises many types for invalid bytes
        raise CaptureError(f"{path}: not a readable .safetensors file ({error})") from None
    if text.get("format") != FORMAT or not set(_FIELDS) <= text.keys():
        raise CaptureError(f"{path}: a .safetensors file, but not one that capture() wrote")
    if text.get("version") not in READS:
        written = reprlib.repr(text.get("version"))
        raise CaptureError(f"{path}: format version {written}, and this library reads {' and '.join(READS)}")
    op = RECORDS.get(text["operator"])
    if op is None:
        raise CaptureError(f"{path}: operator {reprlib.repr(text['operator'])} has no definition here")
    try:
        prefixed = {prefix: _taken(tensors, prefix, device) for prefix in (SAVED, UPSTREAM)}
        return Recording(op, *_parts(op, text, tensors, device), prefixed[SAVED], prefixed[UPSTREAM])
    except _Fault as fault:
        raise CaptureError(f"{path}: {fault} (of a call of {op.name})") from None


class _Fault(Exception):
    """The error of an invalid metadata field or tensor name in a captured file: field, expected and actual value."""

    def __init__(self, field: str, expected: str, got: Any) -> None:
        super().__init__(f"{field}: expected {expected}, got {reprlib.repr(got)}")


def packed_bits(mask: torch.Tensor) -> torch.Tensor:
    """Returns the elements of a bool tensor `mask` as bits in a uint8 tensor, least significant bit first."""
    return torch.from_numpy(np.packbits(mask.reshape(-1).numpy(), bitorder="little"))


def _unpacked(text: dict[str, str], tensors: dict[str, torch.Tensor]) -> None:
    """Replaces masks stored as bits in `tensors` (by name) by bool tensors; text: the file's metadata."""
    for name, shape in (_json(text, "bits", dict) if "bits" in text else {}).items():
        count = math.prod(shape) if _are_integers(shape, 0, 1 << 40) else -1
        bits = tensors.get(name)
        if bits is None or bits.dtype != torch.uint8 or bits.dim() != 1 or count < 0 or -(-count // 8) != len(bits):
            raise _Fault(f"bits: {name}", "the shape of a mask with the stored number of bits", shape)
        tensors[name] = torch.from_numpy(np.unpackbits(bits.numpy(), count=count, bitorder="little")).bool().view(shape)


def _taken(tensors: dict[str, torch.Tensor], prefix: str, device: torch.device) -> dict[str, torch.Tensor]:
    """Removes the tensors whose names begin with a prefix; returns them on a device, their names without the prefix."""
    names = [name for name in tensors if name.startswith(prefix)]
    return {name.removeprefix(prefix): tensors.pop(name).to(device) for name in names}


def _parts(
    op: Op, text: dict[str, str], tensors: dict[str, torch.Tensor], device: torch.device
) -> tuple[dict[str, Any], dict[str, torch.Tensor], int]:
    """Returns (arguments by name, outputs by name, dropout seed) of the call of `op` that a file contains; text: its
    metadata; tensors: its tensors by name."""
    recorded = {}
    _unpacked(text, tensors)
    for name in _json(text, "outputs", list):
        if not isinstance(name, str) or OUTPUT + name not in tensors:
            raise _Fault("outputs", f"names of tensors {OUTPUT}<name>, each once", name)
        recorded[name] = tensors.pop(OUTPUT + name)
    strides = _json(text, "strides", dict)
    if strides.keys() != tensors.keys():
        raise _Fault("strides", "the names of all input tensors and no others", sorted(strides.keys() ^ tensors.keys()))
    for name, stride in strides.items():
        if not (_are_integers(stride, 0, 1 << 63) and len(stride) == tensors[name].dim()):
            raise _Fault(f"strides: {name}", "an integer >= 0 for each axis of the tensor", stride)
    args: dict[str, Any] = {name: value.to(device) for name, value in tensors.items() if "[" not in name}
    for name in args:
        _parameter(op, "tensors", name, Param)
    for name, members in _lists({name: value.to(device) for name, value in tensors.items() if "[" in name}).items():
        _parameter(op, "tensors", name, Tensors, args)
        args[name] = members
    for name, value in _json(text, "arrays", dict).items():
        _parameter(op, "arrays", name, Array, args)
        if not _are_integers(value, -1 << 63, 1 << 63):
            raise _Fault(f"arrays: {name}", "a list of integers of 64 bits", value)
        args[name] = value
    for name, value in _json(text, "attributes", dict).items():
        args[name] = _attribute(name, _parameter(op, "attributes", name, Attr, args), value)
    seed = _json(text, "seed", int)
    if not _are_integers([seed], -1 << 63, 1 << 64):
        raise _Fault("seed", "an integer of 64 bits", seed)
    return args, recorded, seed


def _json(text: dict[str, str], field: str, wanted: type) -> Any:
    """Returns the value of a field of the metadata `text`, JSON of the type `wanted`."""
    try:
        value = json.loads(text[field])
    except (ValueError, RecursionError) as error:
        raise _Fault(field, "JSON", f"{error} in {text[field][:40]}") from None
    if type(value) is not wanted:
        raise _Fault(field, {dict: "an object", list: "a list", int: "an integer"}[wanted], value)
    return value


def _are_integers(values: Any, low: int, high: int) -> bool:
    return isinstance(values, list) and all(type(n) is int and low <= n < high for n in values)


_KINDS = {Param: "", Tensors: " that are lists of tensors", Array: " that are lists of integers",
          Attr: " that are values"}  # fmt: skip


def _parameter(op: Op, field: str, name: str, kind: type[Param], args: Mapping[str, Any] | None = None) -> Param:
    """Returns the operator's parameter `name`; raises _Fault if it does not exist, is not of class `kind`, or has a
    value in `args` already. field: the metadata's field, for the error."""
    result = op.by_name.get(name)
    if result is None or not isinstance(result, kind):
        raise _Fault(field, f"names of parameters{_KINDS[kind]}", name)
    if args and name in args:
        raise _Fault(field, "names that have no value yet", name)
    return result


def _lists(tensors: dict[str, torch.Tensor]) -> dict[str, list[torch.Tensor]]:
    """Returns {name: list} of the tensors named name[0], name[1], ...; raises _Fault if a number is missing."""
    lists: dict[str, list[torch.Tensor]] = {}
    for name in sorted(tensors, key=lambda name: (len(name), name)):
        result = lists.setdefault(name.split("[")[0], [])
        if name != f"{name.split('[')[0]}[{len(result)}]":
            raise _Fault("tensors", "names of a list's members with consecutive numbers from 0", name)
        result.append(tensors[name])
    return lists


def _attribute(name: str, p: Param, value: Any) -> Any:
    """Returns `value`, read from JSON, as the value of parameter p: a number or string, or a Band (interval of visible
    keys around a row) from its fields; raises _Fault for others. name: for the error."""
    assert isinstance(p, Attr)
    if p.type is not Band:
        if type(value) not in (bool, int, float, str):
            raise _Fault(f"attributes: {name}", "a number or a string", value)
        if type(value) is int and not -1 << 63 <= value < 1 << 64:
            raise _Fault(f"attributes: {name}", "an integer of 64 bits", value)
        return value
    try:
        lo, hi, align, prefix = value
        if _are_integers([lo, hi, *prefix], -1 << 63, 1 << 63):
            return Band(lo, hi, align, tuple(prefix))
    except (TypeError, ValueError):
        pass
    raise _Fault(f"attributes: {name}", "the fields of a Band: [lo, hi, align, prefix]", value)

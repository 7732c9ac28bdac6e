"""Operator calls of the C library libopapi: plan() checks a call (phase 1 of CANN's interface), run() computes it.

There is one argument per parameter: None, an int, a float, a bool or a str; a DLPack capsule for a tensor, or (capsule
or None, data type, format) for a tensor that DLPack cannot describe; a list of these; bytes for int64 values. The C
library validates handles, memory and the state of planned calls before it calls.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from fusion_attention import acl, aclnn
from fusion_attention.acl.state import Memory, Refusal
from fusion_attention.acl.tensors import ACL_DTYPES, TORCH_DTYPES
from fusion_attention.acl.two_phase_call import Options, handles
from fusion_attention.capi.device import DeviceMemory
from fusion_attention.contract import INVALID

__all__ = ["DeviceMemory", "plan", "run"]

# A placeholder: the C library checks at every call that a tensor's memory is allocated.
_MEMORY = Memory(torch.zeros(0, dtype=torch.uint8), host=False)


def plan(name: str, values: tuple[Any, ...], device: str, backend: str) -> tuple[int, int | str, acl.Executor | None]:
    """Checks and prepares an operator call (phase 1 of CANN's interface); returns (0, bytes of temporary memory, call
    for run()) or (error code, text, None). name: e.g. "aclnnFlashAttentionScore"; values: numbers, DLPack capsules."""
    op = aclnn.OPERATORS[name]
    try:
        executor = aclnn.planned(op, tuple([_READ.get(type(v), _tensor)(v) for v in values]), _options(device, backend))
    except Exception as error:
        return _refused(op, error)
    return 0, executor.workspace_size, executor


def run(executor: acl.Executor, moves: tuple[tuple[int, int, Any], ...]) -> tuple[int, str, None] | None:
    """Computes a call prepared by plan() (phase 2 of CANN's interface); returns None, or (error code, text, None) if
    nothing was written. moves: (argument's position, index in its list, DLPack capsule) of moved tensors."""
    try:
        for position, member, tensor in moves:
            moved = _READ.get(type(tensor), _tensor)(tensor)
            handles(executor.values[position])[member]._attach(moved.view, _MEMORY)
        aclnn.due(executor).run()
    except Exception as error:
        return _refused(executor.op, error)
    return None


def _refused(op: Any, error: Exception) -> tuple[int, str, None]:
    """Returns (error code, text, None) of an exception; text: without the function's name, which the C library adds."""
    code, text = aclnn.failure(op, error)
    return code, "\n".join(line.removeprefix(f"{op.name}: ") for line in text.splitlines()), None


@functools.lru_cache(maxsize=8)
def _options(device: str, backend: str) -> Options:
    place = torch.device("cuda:0" if device == "cuda" else device)
    return Options(strict=True, check_content=False, device=place, backend=backend)


# ---------------------------------------------------------------------------------------------------------- arguments


def _tensor(capsule: Any) -> acl.Tensor:
    view = from_dlpack(capsule)
    return acl.Tensor(view, ACL_DTYPES[view.dtype], acl.Format.ACL_FORMAT_ND, 0, _MEMORY)


def _unusual(value: tuple[Any, int, int]) -> acl.Tensor:
    """Returns an acl.Tensor of a dtype that DLPack lacks, or not row-major; value: (DLPack capsule, dtype, format)."""
    capsule, number, layout = value
    try:
        dtype, form = acl.DataType(number), acl.Format(layout)
    except ValueError as error:
        raise Refusal(INVALID, str(error)) from None
    if capsule is None:
        raise Refusal(INVALID, f"dtype: {dtype.name} cannot be computed with here")
    return acl.Tensor(from_dlpack(capsule).view(TORCH_DTYPES[dtype]), dtype, form, 0, _MEMORY)


def _list(tensors: list[Any]) -> acl.TensorList:
    return acl.TensorList(tuple([_READ.get(type(t), _tensor)(t) for t in tensors]))


def _integers(values: bytes) -> acl.IntArray:
    return acl.IntArray(np.frombuffer(values, np.int64))


def _itself(value: Any) -> Any:
    return value


_READ: dict[type, Callable[[Any], Any]] = {
    type(None): _itself,
    int: _itself,
    float: _itself,
    bool: _itself,
    str: _itself,
    bytes: _integers,
    list: _list,
    tuple: _unusual,
}

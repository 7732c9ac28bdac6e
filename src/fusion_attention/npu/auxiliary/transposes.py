"""torch_npu's transpositions, batched products and tensor formats, computed by torch's operators."""

from collections.abc import Sequence
from typing import Annotated

import torch

from fusion_attention.contract import Op
from fusion_attention.npu.auxiliary.call import as_given, checked, computed
from fusion_attention.npu.auxiliary.quantised import read_scale, rounded
from fusion_attention.npu.functions_from_definitions import Args, from_record
from fusion_attention.ops.auxiliary_definitions import transposes

__all__ = ["get_npu_format"]  # from_record() adds the functions that are made from definitions

Tensor = torch.Tensor
_ND, _BASE = 2, {4: 0, 5: 30}  # the default format by rank: NCHW, NCDHW, else ND
_BASES = (_ND, *_BASE.values())


@computed(transposes.CONFUSION_TRANSPOSE)
def npu_confusion_transpose(input: Tensor, perm: Sequence[int], shape: Sequence[int], transpose_first: bool) -> Tensor:
    order, sizes = _ints(perm), _ints(shape)
    result = input.permute(order).reshape(sizes) if transpose_first else input.reshape(sizes).permute(order)
    return result.clone(memory_format=torch.contiguous_format)


@computed(transposes.CONFUSION_TRANSPOSE_BACKWARD)
def npu_confusion_transpose_backward(
    grad: Tensor, perm: Sequence[int], shape: Sequence[int], transpose_first: bool
) -> Tensor:
    order, sizes = _ints(perm), _ints(shape)
    back = sorted(range(len(order)), key=order.__getitem__)
    if transpose_first:
        result = grad.permute(back).reshape(sizes)
    else:
        result = grad.reshape([sizes[axis] for axis in order]).permute(back)
    return result.clone(memory_format=torch.contiguous_format)


@from_record(transposes.FORMAT_CAST, host=None)
def npu_format_cast(args: Args) -> Tensor:
    input, wanted = args["input"], _wanted(transposes.FORMAT_CAST, args)
    if wanted == get_npu_format(input):
        return input
    result = input.clone()
    if wanted != _format_of(input):
        result._npu_format = wanted
    return result


@from_record(transposes.FORMAT_CAST_, host=None)
def npu_format_cast_(args: Args) -> Annotated[Tensor, "a!"]:
    args["input"]._npu_format = _wanted(transposes.FORMAT_CAST_, args)
    return args["input"]


def _format_of(input: Tensor) -> int:
    """Returns the number of the NPU memory format that a tensor has by its number of axes: NCHW, NCDHW, else ND."""
    return _BASE.get(input.dim(), _ND)


def _wanted(op: Op, given: Args) -> int:
    """Returns the number of the NPU memory format to which a call of `op` casts; given: its arguments, whose acl_format
    is a number, or a tensor that has the format."""
    if isinstance(given["acl_format"], Tensor):
        given["acl_format"] = get_npu_format(given["acl_format"])
    wanted: int = checked(op, given)["acl_format"]
    return _format_of(given["input"]) if wanted in _BASES else wanted


def get_npu_format(input: Tensor) -> int:
    """Returns the NPU format that npu_format_cast set, else 0 (NCHW) for 4 axes, 30 (NCDHW) for 5, 2 (ND) for others.

    Args:
        input: any tensor.

    Returns:
        The format's number.

    Source: Ascend torch_npu, get_npu_format.

    Example:
        >>> get_npu_format(torch.zeros(2, 3)), get_npu_format(torch.zeros(1, 2, 3, 4))
        (2, 0)
    """
    return int(getattr(input, "_npu_format", _format_of(input)))


@computed(transposes.TRANSPOSE_BATCHMATMUL)
def npu_transpose_batchmatmul(
    input: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    perm_x1: Sequence[int] | None,
    perm_x2: Sequence[int] | None,
    perm_y: Sequence[int] | None,
    batch_split_factor: int,
) -> Tensor:
    first, second = (t if perm is None else t.permute(_ints(perm)) for t, perm in ((input, perm_x1), (weight, perm_x2)))
    with as_given(input):
        if scale is not None:
            factors, offset = read_scale(scale)
            rows = torch.bmm(first.float(), second.float()).transpose(0, 1).flatten(1)
            return rounded(rows * factors if offset is None else rows * factors + offset, 127).unsqueeze(1)
        result = torch.bmm(first, second).permute((1, 0, 2) if perm_y is None else _ints(perm_y))
    if batch_split_factor > 1:
        rows = result.flatten(1).unflatten(1, (batch_split_factor, -1))
        result = rows.transpose(0, 1)
    return result.contiguous()


def _ints(values: Sequence[int] | Tensor) -> list[int]:
    return [int(n) for n in (values.tolist() if isinstance(values, Tensor) else values)]

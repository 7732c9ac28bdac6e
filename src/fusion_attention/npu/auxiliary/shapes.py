"""torch_npu's reshaping products, permutations and formats, in torch's own operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch

from fusion_attention.contract import Op
from fusion_attention.npu.auxiliary.call import as_given, checked
from fusion_attention.npu.auxiliary.quantised import read_scale, rounded
from fusion_attention.ops.auxiliary import shapes

__all__ = [
    "get_npu_format",
    "npu_confusion_transpose",
    "npu_confusion_transpose_backward",
    "npu_format_cast",
    "npu_format_cast_",
    "npu_transpose_batchmatmul",
]

Tensor = torch.Tensor
_ND, _BASE = 2, {4: 0, 5: 30}  # a tensor's own format by its axes: NCHW, NCDHW, else ND
_BASES = (_ND, *_BASE.values())


def npu_confusion_transpose(input: Tensor, perm: Sequence[int], shape: Sequence[int], transpose_first: bool) -> Tensor:
    """A permutation, then another shape; or another shape, then a permutation.

    transpose_first:  y = input.permute(perm).reshape(shape)
    otherwise:  y = input.reshape(shape).permute(perm)

    Args:
        input: any tensor.
        perm: the order of axes.
        shape: of as many elements.
        transpose_first: which comes first.

    Returns:
        y as input, in memory of its own.

    Raises:
        ContractError: a call that `fusion-attention ops npu_confusion_transpose` does not allow.

    Source: Ascend op-plugin, npu_confusion_transpose.

    Example:
        >>> x = torch.rand(2, 3, 4, 6)
        >>> list(npu_confusion_transpose(x, (0, 2, 1, 3), (2, 4, 18), True).shape)
        [2, 4, 18]
        >>> list(npu_confusion_transpose(x, (0, 2, 1), (2, 12, 6), False).shape)
        [2, 6, 12]
    """
    checked(
        shapes.CONFUSION_TRANSPOSE, {"input": input, "perm": perm, "shape": shape, "transpose_first": transpose_first}
    )
    order, sizes = _ints(perm), _ints(shape)
    result = input.permute(order).reshape(sizes) if transpose_first else input.reshape(sizes).permute(order)
    return result.clone(memory_format=torch.contiguous_format)


def npu_confusion_transpose_backward(
    grad: Tensor, perm: Sequence[int], shape: Sequence[int], transpose_first: bool
) -> Tensor:
    """The gradient of npu_confusion_transpose: what it did, backwards.

    Args:
        grad: gradient of y.
        perm: the forward's.
        shape: of the forward's input.
        transpose_first: the contrary of the forward's.

    Returns:
        dx of this shape, as grad.

    Raises:
        ContractError: a call that `fusion-attention ops npu_confusion_transpose_backward` does not allow.

    Source: Ascend op-plugin, npu_confusion_transpose_backward.

    Example:
        >>> x = torch.rand(2, 3, 4)
        >>> y = npu_confusion_transpose(x, (0, 2, 1), (2, 12), True)
        >>> torch.equal(npu_confusion_transpose_backward(y, (0, 2, 1), (2, 3, 4), False), x)
        True
    """
    args = {"grad": grad, "perm": perm, "shape": shape, "transpose_first": transpose_first}
    checked(shapes.CONFUSION_TRANSPOSE_BACKWARD, args)
    order, sizes = _ints(perm), _ints(shape)
    back = sorted(range(len(order)), key=order.__getitem__)
    if transpose_first:
        result = grad.permute(back).reshape(sizes)
    else:
        result = grad.reshape([sizes[axis] for axis in order]).permute(back)
    return result.clone(memory_format=torch.contiguous_format)


def npu_format_cast(
    input: Tensor, acl_format: int | Tensor, *, customize_dtype: int | None = None, input_dtype: int | None = None
) -> Tensor:
    """A copy that remembers a format of the chip. Formats change how the chip's memory lies, and nothing here.

    y = input

    Args:
        input: any tensor.
        acl_format: 0 NCHW, 2 ND, 29 FRACTAL_NZ, ...; or a tensor, whose format it is.
        customize_dtype, input_dtype: accepted without effect.

    Returns:
        y as input: a copy, or input where it has the format. get_npu_format() tells.

    Raises:
        ContractError: a call that `fusion-attention ops npu_format_cast` does not allow.

    Source: Ascend op-plugin, npu_format_cast.

    Example:
        >>> weight = npu_format_cast(torch.ones(4, 4), 29)
        >>> get_npu_format(weight), get_npu_format(npu_format_cast(weight, 2))
        (29, 2)
    """
    wanted = _wanted(shapes.FORMAT_CAST, {
        "input": input, "acl_format": acl_format, "customize_dtype": customize_dtype, "input_dtype": input_dtype,
    })  # fmt: skip
    if wanted == get_npu_format(input):
        return input
    result = input.clone()
    if wanted != _own(input):
        result._npu_format = wanted  # type: ignore[attr-defined]
    return result


def npu_format_cast_(
    input: Annotated[Tensor, "a!"],
    acl_format: int | Tensor,
    *,
    customize_dtype: int | None = None,
    input_dtype: int | None = None,
) -> Annotated[Tensor, "a!"]:
    """Lets a tensor remember a format of the chip.

    y = input

    Args:
        all: as in npu_format_cast.

    Returns:
        input, which now has the format.

    Raises:
        ContractError: a call that `fusion-attention ops npu_format_cast_` does not allow.

    Source: Ascend op-plugin, npu_format_cast_.

    Example:
        >>> weight = torch.ones(4, 4)
        >>> npu_format_cast_(weight, 29) is weight, get_npu_format(weight)
        (True, 29)
    """
    given = {
        "input": input, "acl_format": acl_format, "customize_dtype": customize_dtype, "input_dtype": input_dtype,
    }  # fmt: skip
    input._npu_format = _wanted(shapes.FORMAT_CAST_, given)  # type: ignore[attr-defined]
    return input


def _own(input: Tensor) -> int:
    """A tensor's own format, by its axes."""
    return _BASE.get(input.dim(), _ND)


def _wanted(op: Op, given: dict[str, Any]) -> int:
    """The format that a call asks for."""
    if isinstance(given["acl_format"], Tensor):
        given["acl_format"] = get_npu_format(given["acl_format"])
    wanted: int = checked(op, given)["acl_format"]
    return _own(given["input"]) if wanted in _BASES else wanted


def get_npu_format(input: Tensor) -> int:
    """The format that npu_format_cast gave a tensor; without one that of its axes: 0 for four, 30 for five, else 2.

    Args:
        input: any tensor.

    Returns:
        The format's number.

    Source: Ascend torch_npu, get_npu_format.

    Example:
        >>> get_npu_format(torch.zeros(2, 3)), get_npu_format(torch.zeros(1, 2, 3, 4))
        (2, 0)
    """
    return int(getattr(input, "_npu_format", _own(input)))


def npu_transpose_batchmatmul(
    input: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    perm_x1: Sequence[int] | None = None,
    perm_x2: Sequence[int] | None = None,
    perm_y: Sequence[int] | None = None,
    batch_split_factor: int | None = 1,
) -> Tensor:
    """A batched product whose operands and result are permuted.

    y = (input.permute(perm_x1) @ weight.permute(perm_x2)).permute(perm_y)
    y = round(y * scale + offset)        with scale

    Args:
        input: [B, M, K] after perm_x1; float16, bfloat16 or float32. weight: [B, K, N] after perm_x2.
        bias: not computed.
        scale: int64 [B*N] of an int8 result, scales and offsets as npu_trans_quant_param makes them.
        perm_x1, perm_x2: None: [0, 1, 2]. perm_y: of [B, M, N]; None: [1, 0, 2].
        batch_split_factor: parts of the result's rows [B*N], one after the other.

    Returns:
        [M, B, N], or as perm_y says; with a batch_split_factor f above 1 [f, M, B*N/f]; with scale int8 [M, 1, B*N].

    Raises:
        ContractError: a call that `fusion-attention ops npu_transpose_batchmatmul` does not allow.

    Source: Ascend op-plugin, npu_transpose_batchmatmul.

    Example:
        >>> x, weight = torch.randn(32, 16, 64), torch.randn(16, 64, 8)
        >>> y = npu_transpose_batchmatmul(x, weight, perm_x1=(1, 0, 2), batch_split_factor=2)
        >>> list(y.shape)
        [2, 32, 64]
    """
    args = {
        "input": input, "weight": weight, "bias": bias, "scale": scale, "perm_x1": perm_x1, "perm_x2": perm_x2,
        "perm_y": perm_y, "batch_split_factor": batch_split_factor,
    }  # fmt: skip
    parts = checked(shapes.TRANSPOSE_BATCHMATMUL, args)["batch_split_factor"]
    first, second = (t if perm is None else t.permute(_ints(perm)) for t, perm in ((input, perm_x1), (weight, perm_x2)))
    with as_given(input):
        if scale is not None:
            factors, offset = read_scale(scale)
            rows = torch.bmm(first.float(), second.float()).transpose(0, 1).flatten(1)
            return rounded(rows * factors if offset is None else rows * factors + offset, 127).unsqueeze(1)
        result = torch.bmm(first, second).permute((1, 0, 2) if perm_y is None else _ints(perm_y))
    if parts > 1:
        rows = result.reshape(result.shape[0], parts, result.shape[1] * result.shape[2] // parts)
        result = rows.transpose(0, 1)
    return result.contiguous()


def _ints(values: Sequence[int] | Tensor) -> list[int]:
    """Host integers as torch takes them."""
    return [int(n) for n in (values.tolist() if isinstance(values, Tensor) else values)]

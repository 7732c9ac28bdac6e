"""torch_npu's quantisation and products of integers, in torch's own operators. Products are exact."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusion_attention.npu.auxiliary.call import checked
from fusion_attention.ops.auxiliary import quantised

__all__ = [
    "npu_convert_weight_to_int4pack",
    "npu_dynamic_quant",
    "npu_quant_matmul",
    "npu_quantize",
    "npu_trans_quant_param",
]

Tensor = torch.Tensor
Dtype = int | torch.dtype | None


def row_scales(x: Tensor, largest: int, axes: tuple[int, ...]) -> Tensor:
    """What the largest element over some axes is divided by to become `largest`."""
    return x.abs().amax(axes) / largest


def rounded(x: Tensor, largest: int) -> Tensor:
    """Whole numbers as int8, halves to even, -largest - 1 to largest; NaN is 0."""
    return x.nan_to_num(0.0, largest, -largest - 1).round().clamp(-largest - 1, largest).to(torch.int8)


def npu_dynamic_quant(
    input: Tensor,
    *,
    smooth_scales: Tensor | None = None,
    group_index: Tensor | None = None,
    dst_type: Dtype = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Rows as integers, each with a scale of its own.

    scale = max(abs(x * smooth)) / 127        of each row
    y = round(x * smooth / scale)

    Args:
        input: [..., W]; float16, bfloat16 or float32.
        smooth_scales: factors of the elements, [W]; with group_index [groups, W]; perchannel: of the rows, [R].
        group_index: where each group of rows ends, int32 [groups].
        dst_type: torch.int8, or torch.quint4x2, for which 127 is 7; None: torch.int8.
        quant_mode: what has one scale: "pertoken", "perchannel" (a column), "pertensor".
        dst_type_max: reserved.

    Returns:
        (y, scale): y int8; of quint4x2 int32 [..., W / 8], the first element in the lowest bits. scale float32 [...];
        0 of a row of zeros.

    Raises:
        ContractError: a call that `fusion-attention ops npu_dynamic_quant` does not allow.

    Source: Ascend op-plugin, npu_dynamic_quant.

    Example:
        >>> y, scale = npu_dynamic_quant(torch.tensor([[1.0, -2.0], [0.0, 0.0]]))
        >>> y.tolist(), round(scale[0].item(), 5)
        ([[64, -127], [0, 0]], 0.01575)
    """
    number = quantised.number_of(dst_type)
    given = checked(
        quantised.DYNAMIC,
        {
            "input": input,
            "smooth_scales": smooth_scales,
            "group_index": group_index,
            "dst_type": number,
            "quant_mode": quant_mode,
            "dst_type_max": dst_type_max,
        },
    )
    x, bits = input.float(), 4 if number == quantised.NUMBERS[torch.quint4x2] else 8
    if smooth_scales is not None and group_index is not None:
        rows = torch.arange(input[..., 0].numel(), device=input.device)
        group = torch.searchsorted(group_index.long().contiguous(), rows, right=True).clamp(max=len(smooth_scales) - 1)
        x = x * smooth_scales.float()[group].reshape(input.shape)
    elif smooth_scales is not None:
        factors = smooth_scales.float()
        x = x * (factors.unsqueeze(-1) if given["quant_mode"] == "perchannel" else factors)
    largest = 2 ** (bits - 1) - 1
    axes = {"pertoken": (-1,), "perchannel": (-2,), "pertensor": tuple(range(x.dim()))}[given["quant_mode"]]
    scale = row_scales(x, largest, axes)
    wide = scale if given["quant_mode"] == "pertensor" else scale.unsqueeze(axes[0])
    y = rounded(x / torch.where(wide == 0, 1.0, wide), largest)
    return (y if bits == 8 else _packed(y)), scale.reshape(1) if given["quant_mode"] == "pertensor" else scale


def npu_quantize(
    input: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    dtype: torch.dtype | int,
    axis: int = 1,
    div_mode: bool = True,
) -> Tensor:
    """Elements as integers, by scales that are given.

    out = round(input / scales + zero_points)
    out = round(input * scales + zero_points)        without div_mode

    Args:
        input: float16, bfloat16 or float32.
        scales: [1], or one for every element of the axis; or with all axes of input, 1 but for that one.
        zero_points: added; as scales, floats or integers.
        dtype: torch.qint8; with div_mode torch.quint8 and torch.qint32 or int32, without it int8 and quint4x2 too.
        axis: of scales; without div_mode -2, and else the last one whatever it says.
        div_mode: divide by scales; otherwise multiply.

    Returns:
        int8, uint8 or int32 as input, clipped, halves to even; of quint4x2 int32 [..., W / 8], the first element in the
        lowest bits.

    Raises:
        ContractError: a call that `fusion-attention ops npu_quantize` does not allow.

    Source: Ascend op-plugin, npu_quantize.

    Example:
        >>> npu_quantize(torch.tensor([[1.0, -2.0, 90.0]]), torch.tensor([0.5]), None, torch.qint8).tolist()
        [[2, -4, 127]]
    """
    args = {"input": input, "scales": scales, "zero_points": zero_points, "axis": axis, "div_mode": div_mode}
    number = quantised.number_of(dtype)
    given = checked(quantised.QUANTIZE, {**args, "dtype": number})
    of = quantised.axis_of(given["axis"], given["div_mode"])
    shape = [-1 if i == of % input.dim() else 1 for i in range(input.dim())]
    factors = scales.float().reshape(shape)
    result = input.float() / factors if given["div_mode"] else input.float() * factors
    result = result if zero_points is None else result + zero_points.float().reshape(shape)
    low, high, kind = _RANGES.get(quantised.DTYPES[given["dtype"]], (-(2**31), 2**31 - 1, torch.int32))
    y = result.double().nan_to_num(0.0, high, low).round().clamp(low, high).to(kind)
    return _packed(y) if number == quantised.NUMBERS[torch.quint4x2] else y


# What is no int32.
_RANGES = {
    torch.qint8: (-128, 127, torch.int8),
    torch.int8: (-128, 127, torch.int8),
    torch.quint8: (0, 255, torch.uint8),
    torch.quint4x2: (-8, 7, torch.int8),
}


def _packed(y: Tensor) -> Tensor:
    """Eight elements of four bits in one int32, the first in the lowest."""
    nibbles = (y.to(torch.int64) & 15).unflatten(-1, (-1, 8))
    return _signed((nibbles << (4 * torch.arange(8, device=y.device))).sum(-1), 32).to(torch.int32)


def unpacked(words: Tensor) -> Tensor:
    """What _packed() packed, as int8."""
    shifts = 4 * torch.arange(8, device=words.device)
    return _signed(words.to(torch.int64).unsqueeze(-1) >> shifts & 15, 4).to(torch.int8).flatten(-2)


def npu_convert_weight_to_int4pack(weight: Tensor, inner_k_tiles: int = 0) -> Tensor:
    """Eight elements of four bits in one int32.

    out[i, j] = the four low bits of weight[i, 8j] to weight[i, 8j + 7], the first ones lowest

    Args:
        weight: int32 [K, N] or [N, K], elements from -8 to 7.
        inner_k_tiles: reserved.

    Returns:
        int32 [K, N / 8] or [N, K / 8].

    Raises:
        ContractError: a call that `fusion-attention ops npu_convert_weight_to_int4pack` does not allow.

    Source: Ascend op-plugin, npu_convert_weight_to_int4pack.

    Example:
        >>> weight = torch.tensor([[1, 2, 3, 0, 0, 0, 0, -1]], dtype=torch.int32)
        >>> hex(npu_convert_weight_to_int4pack(weight).item() & 0xFFFFFFFF)
        '0xf0000321'
    """
    checked(quantised.INT4PACK, {"weight": weight, "inner_k_tiles": inner_k_tiles})
    return _packed(weight)


def npu_trans_quant_param(scale: Tensor, offset: Tensor | None = None, round_mode: int | None = 0) -> Tensor:
    """Scales and offsets as one integer each, which products of integers take as their scale.

    out = (float32 bits of scale & 0xFFFFE000) | 1 << 46 | (clamp(round(offset), -256, 255) & 0x1FF) << 37

    Args:
        scale: float32 [1] or [N], or [1, N].
        offset: float32, of int8 results; broadcast with scale.
        round_mode: how scale becomes 19 bits. 0: cut; 1: rounded, halves to even.

    Returns:
        int64, in the shape that both broadcast to.

    Raises:
        ContractError: a call that `fusion-attention ops npu_trans_quant_param` does not allow.

    Source: Ascend op-plugin, npu_trans_quant_param.

    Example:
        >>> hex(npu_trans_quant_param(torch.tensor([1.0]), torch.tensor([-1.0])).item())
        '0x7fe03f800000'
    """
    mode = checked(quantised.PARAM, {"scale": scale, "offset": offset, "round_mode": round_mode})["round_mode"]
    bits = scale.contiguous().view(torch.int32).to(torch.int64)
    if mode == 1:
        bits = bits + 0xFFF + (bits >> 13 & 1)
    word = bits & 0xFFFFE000 | 1 << 46
    if offset is None:
        return word
    full = offset.nan_to_num(0.0).round().clamp(-256, 255).to(torch.int64)
    return word | (full & 0x1FF) << 37


def read_scale(scale: Tensor) -> tuple[Tensor, Tensor | None]:
    """(scale, offset) in float32 of what a product is scaled by; offset: None of floats, which hold none."""
    if scale.dtype.is_floating_point:
        return scale.float(), None
    word = scale.view(torch.int64)
    bits = _signed(word & 0xFFFFFFFF, 32).to(torch.int32)
    return bits.view(torch.float32), _signed(word >> 37 & 0x1FF, 9).float()


def _signed(bits: Tensor, count: int) -> Tensor:
    """The numbers that some low bits are in two's complement."""
    half = 1 << (count - 1)
    return (bits ^ half) - half


def npu_quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None = None,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: Dtype = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    pertoken_scale_dtype: int | None = None,
    scale_dtype: int | None = None,
    group_sizes: Sequence[int] | None = None,
    y_scale: Tensor | None = None,
) -> Tensor:
    """The product of two matrices of int8, or of four bits, scaled by row and column.

    out = (x1 x2 + bias) * scale * pertoken_scale + offset        (the product in whole numbers)
    out = x1 x2 + bias        to int32
    out = (sum over blocks((x1 - 8) x2 * scale) + offset) * pertoken_scale        of eight bits beside four

    Args:
        x1, x2: int8 [..., M, K] and [..., K, N]. Of four bits int32 as npu_convert_weight_to_int4pack makes it, of x2
            or of its transpose, both of them or x2 alone. Alone, scale is [blocks, N], pertoken_scale [M, 1], and
            offset [N] makes up for the 8 that the chip takes off every element of x1.
        scale: of x2, [1] or [N], float32 or bfloat16; int64 as npu_trans_quant_param makes it, with its own offset.
        offset: of int8 results, float32 [1] or [N]; of no effect beside an int64 scale.
        pertoken_scale: of x1, float32 [M].
        bias: int32, added before scaling, or floats, added after it; [N], [1, N] or [batch, 1, N].
        output_dtype: torch.int8, int32 (the sums, which no scale touches), float16 or bfloat16; None: int8.
        group_sizes: [0, 0, elements of a block], of x2 alone in four bits.
        x1_dtype, x2_dtype, pertoken_scale_dtype, scale_dtype, y_scale: not computed here.

    Returns:
        [..., M, N] in output_dtype.

    Raises:
        ContractError: a call that `fusion-attention ops npu_quant_matmul` does not allow.

    Source: Ascend op-plugin, npu_quant_matmul.

    Example:
        >>> x = torch.tensor([[1, 2]], dtype=torch.int8)
        >>> npu_quant_matmul(x, x.T.contiguous(), torch.tensor([0.5]), output_dtype=torch.bfloat16).item()
        2.5
    """
    number = quantised.number_of(output_dtype)
    checked(quantised.MATMUL, {
        "x1": x1, "x2": x2, "scale": scale, "offset": offset, "pertoken_scale": pertoken_scale, "bias": bias,
        "output_dtype": number, "x1_dtype": x1_dtype, "x2_dtype": x2_dtype,
        "pertoken_scale_dtype": pertoken_scale_dtype, "scale_dtype": scale_dtype, "group_sizes": group_sizes,
        "y_scale": y_scale,
    })  # fmt: skip
    dtype = quantised.DTYPES[1 if number is None else number]
    by_block = quantised.mixed(x1, x2)
    if quantised.rows_packed(x1, x2):
        x2 = unpacked(x2.mT).mT
    elif x2.dtype == torch.int32:
        x2 = unpacked(x2)
    x1 = unpacked(x1) if x1.dtype == torch.int32 else x1
    factors, own = read_scale(scale)
    if by_block and pertoken_scale is not None:
        result = block_sums(x1.double() - 8, x2, factors)
        return ((result if offset is None else result + offset) * pertoken_scale).to(dtype)
    full = bias is not None and not bias.dtype.is_floating_point
    product = exact(x1, x2) if bias is None or not full else exact(x1, x2) + bias
    if dtype == torch.int32:
        return product.to(dtype)
    if own is not None:
        offset = own if dtype == torch.int8 else None
    result = product.float() * factors
    if pertoken_scale is not None:
        result = result * pertoken_scale.unsqueeze(-1)
    if bias is not None and not full:
        result = result + bias
    if offset is not None:
        result = result + offset
    return rounded(result, 127) if dtype == torch.int8 else result.to(dtype)


def block_sums(x1: Tensor, x2: Tensor, factors: Tensor) -> Tensor:
    """The product of a matrix of whole numbers and one whose blocks of rows have factors of their own, [blocks, N]."""
    blocks = (1 if factors.dim() == 1 else len(factors), -1)
    sums = exact(x1.unflatten(1, blocks).transpose(0, 1), x2.unflatten(0, blocks))
    return (sums.float() * factors.unsqueeze(-2)).sum(0)


def exact(x1: Tensor, x2: Tensor) -> Tensor:
    """The product of whole numbers of eight bits: float64 holds every sum."""
    return x1.double() @ x2.double()

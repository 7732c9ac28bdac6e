"""torch_npu's quantization and matrix products of integers, computed exactly by torch's operators in float64."""

from functools import partial

import torch

from fusion_attention.npu.auxiliary.call import computed
from fusion_attention.npu.functions_from_definitions import Args
from fusion_attention.ops.auxiliary_definitions import quantised

Tensor = torch.Tensor


def row_scales(x: Tensor, largest: int, axes: tuple[int, ...]) -> Tensor:
    """Returns max |x| / largest, with the maximum over `axes`: the scales that quantize x to at most `largest`."""
    return x.abs().amax(axes) / largest


def rounded(x: Tensor, largest: int) -> Tensor:
    """Rounds x to int8, ties to even, limited to -largest - 1 to largest; NaN becomes 0."""
    return x.nan_to_num(0.0, largest, -largest - 1).round().clamp(-largest - 1, largest).to(torch.int8)


def _numbered(name: str, args: Args) -> Args:
    """Returns the arguments with torch's integer code in place of the torch.dtype in the argument `name`."""
    return {**args, name: quantised.number_of(args[name])}


@computed(quantised.DYNAMIC, before=partial(_numbered, "dst_type"))
def npu_dynamic_quant(
    input: Tensor, smooth_scales: Tensor | None, group_index: Tensor | None, dst_type: int | None, quant_mode: str
) -> tuple[Tensor, Tensor]:
    x, bits = input.float(), 4 if dst_type == quantised.NUMBERS[torch.quint4x2] else 8
    if smooth_scales is not None and group_index is not None:
        rows = torch.arange(quantised.rows_of(input), device=input.device)
        group = torch.searchsorted(group_index.long().contiguous(), rows, right=True).clamp(max=len(smooth_scales) - 1)
        x = x * smooth_scales.float()[group].reshape(input.shape)
    elif smooth_scales is not None:
        factors = smooth_scales.float()
        x = x * (factors.unsqueeze(-1) if quant_mode == "perchannel" else factors)
    largest = 2 ** (bits - 1) - 1
    axes = {"pertoken": (-1,), "perchannel": (-2,), "pertensor": tuple(range(x.dim()))}[quant_mode]
    scale = row_scales(x, largest, axes)
    divisor = scale if quant_mode == "pertensor" else scale.unsqueeze(axes[0])
    y = rounded(x / torch.where(divisor == 0, 1.0, divisor), largest)
    return (y if bits == 8 else _packed(y)), scale.reshape(1) if quant_mode == "pertensor" else scale


@computed(quantised.QUANTIZE, before=partial(_numbered, "dtype"))
def npu_quantize(
    input: Tensor, scales: Tensor, zero_points: Tensor | None, dtype: int, axis: int, div_mode: bool
) -> Tensor:
    of = quantised.axis_of(axis, div_mode)
    shape = [-1 if i == of % input.dim() else 1 for i in range(input.dim())]
    factors = scales.float().reshape(shape)
    result = input.float() / factors if div_mode else input.float() * factors
    result = result if zero_points is None else result + zero_points.float().reshape(shape)
    low, high, kind = _RANGES.get(quantised.DTYPES[dtype], (-(2**31), 2**31 - 1, torch.int32))
    y = result.double().nan_to_num(0.0, high, low).round().clamp(low, high).to(kind)
    return _packed(y) if dtype == quantised.NUMBERS[torch.quint4x2] else y


# (least, largest, torch dtype) of dtypes other than int32.
_RANGES = {
    torch.qint8: (-128, 127, torch.int8),
    torch.int8: (-128, 127, torch.int8),
    torch.quint8: (0, 255, torch.uint8),
    torch.quint4x2: (-8, 7, torch.int8),
}


def _packed(weight: Tensor) -> Tensor:
    """Packs eight int4 of weight [..., 8 n] into one int32 [..., n], the first in the lowest bits."""
    nibbles = (weight.to(torch.int64) & 15).unflatten(-1, (-1, 8))
    return _signed((nibbles << (4 * torch.arange(8, device=weight.device))).sum(-1), 32).to(torch.int32)


npu_convert_weight_to_int4pack = computed(quantised.INT4PACK)(_packed)


def unpacked(words: Tensor) -> Tensor:
    """Unpacks eight int4 from each int32 of `words` [..., n] to int8 [..., 8 n]; the inverse of _packed()."""
    shifts = 4 * torch.arange(8, device=words.device)
    return _signed(words.to(torch.int64).unsqueeze(-1) >> shifts & 15, 4).to(torch.int8).flatten(-2)


@computed(quantised.PARAM)
def npu_trans_quant_param(scale: Tensor, offset: Tensor | None, round_mode: int | None) -> Tensor:
    bits = scale.contiguous().view(torch.int32).to(torch.int64)
    if round_mode == 1:
        bits = bits + 0xFFF + (bits >> 13 & 1)
    word = bits & 0xFFFFE000 | 1 << 46
    if offset is None:
        return word
    full = offset.nan_to_num(0.0).round().clamp(-256, 255).to(torch.int64)
    return word | (full & 0x1FF) << 37


def read_scale(scale: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns float32 (scale, offset). A float tensor is the scale, without offset (None); an int64 has a float32 scale
    in bits 0 to 31 and a signed offset in bits 37 to 45."""
    if scale.dtype.is_floating_point:
        return scale.float(), None
    word = scale.view(torch.int64)
    bits = _signed(word & 0xFFFFFFFF, 32).to(torch.int32)
    return bits.view(torch.float32), _signed(word >> 37 & 0x1FF, 9).float()


def _signed(bits: Tensor, count: int) -> Tensor:
    """Returns the lowest `count` bits of integers as signed (two's complement) numbers."""
    half = 1 << (count - 1)
    return (bits ^ half) - half


@computed(quantised.MATMUL, before=partial(_numbered, "output_dtype"))
def npu_quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    offset: Tensor | None,
    pertoken_scale: Tensor | None,
    bias: Tensor | None,
    output_dtype: int | None,
) -> Tensor:
    dtype = quantised.DTYPES[1 if output_dtype is None else output_dtype]
    by_block = quantised.mixed(x1, x2)
    if quantised.rows_packed(x1, x2):
        x2 = unpacked(x2.mT).mT
    elif x2.dtype == torch.int32:
        x2 = unpacked(x2)
    x1 = unpacked(x1) if x1.dtype == torch.int32 else x1
    factors, scale_offset = read_scale(scale)
    if by_block and pertoken_scale is not None:
        result = block_sums(x1.double() - 8, x2, factors)
        return ((result if offset is None else result + offset) * pertoken_scale).to(dtype)
    full = bias is not None and not bias.dtype.is_floating_point
    product = exact(x1, x2) if bias is None or not full else exact(x1, x2) + bias
    if dtype == torch.int32:
        return product.to(dtype)
    if scale_offset is not None:
        offset = scale_offset if dtype == torch.int8 else None
    result = product.float() * factors
    if pertoken_scale is not None:
        result = result * pertoken_scale.unsqueeze(-1)
    if bias is not None and not full:
        result = result + bias
    if offset is not None:
        result = result + offset
    return rounded(result, 127) if dtype == torch.int8 else result.to(dtype)


def block_sums(x1: Tensor, x2: Tensor, factors: Tensor) -> Tensor:
    """Returns float32 [M, N]: integer matrices x1 [M, K] @ x2 [K, N], where the sum over each block of K is scaled by
    its row of factors [blocks, N]; factors [N]: one block."""
    blocks = (1 if factors.dim() == 1 else len(factors), -1)
    sums = exact(x1.unflatten(1, blocks).transpose(0, 1), x2.unflatten(0, blocks))
    return (sums.float() * factors.unsqueeze(-2)).sum(0)


def exact(x1: Tensor, x2: Tensor) -> Tensor:
    """Returns the product of int8 matrices x1 [..., M, K] and x2 [..., K, N] in float64, which is exact."""
    return x1.double() @ x2.double()

"""Operator definitions of quantization to eight and four bits, and of matrix products of integers."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fusion_attention.contract import INVALID, Array, Attr, Tensor
from fusion_attention.ops.auxiliary_definitions.common import FLOATS, auxiliary, floats, has_axis, result
from fusion_attention.ops.shared.params import one_of
from fusion_attention.ops.shared.rules import invalid, meaning, presence

SIZES = {"M": 4, "K": 8, "N": 3, "E": 2}
# Dtypes of scales: floats, or integers that contain a scale and an offset.
SCALES = "float32 bfloat16 int64 uint64"
# torch's numbers of dtypes, which torch_npu accepts in their place.
NUMBERS = {
    torch.int8: 1, torch.int32: 3, torch.float16: 5, torch.float32: 6, torch.bfloat16: 15, torch.quint4x2: 16,
    torch.qint8: 12, torch.quint8: 13, torch.qint32: 14,
}  # fmt: skip
DTYPES = {number: dtype for dtype, number in NUMBERS.items()}


DTYPE = int | torch.dtype | None  # for Op.declared


def number_of(dtype: int | torch.dtype | None) -> int | None:
    """Returns torch's integer code of a dtype, -1 if it is not in NUMBERS; an int or None is returned unchanged."""
    return NUMBERS.get(dtype, -1) if isinstance(dtype, torch.dtype) else dtype


def ends(group_index: torch.Tensor, rows: int) -> bool:
    """True if group_index, the cumulative ends of groups of rows, ascends to the number of rows."""
    return bool((group_index.diff() >= 0).all() and group_index[0] >= 0 and group_index[-1] == rows)


def rows_of(x: torch.Tensor) -> int:
    """Returns the number of rows of a tensor x: the product of all axes but the last."""
    return math.prod(x.shape[:-1])


def broadcast(*shapes: tuple[int, ...] | torch.Size) -> tuple[int, ...] | None:
    """Returns the shape to which shapes broadcast; None if they do not."""
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        return None


def inner(x1: torch.Tensor) -> int:
    """Returns the number of elements of a row of x1, over which a product sums; an int32 stores eight int4."""
    return x1.shape[-1] * (8 if x1.dtype == torch.int32 else 1)


def rows_packed(x1: torch.Tensor, x2: torch.Tensor) -> bool:
    """True if an int32 of x2, the right factor of x1, stores eight int4 of a column, not of a row."""
    return x2.dtype == torch.int32 and 8 * x2.shape[-2] == inner(x1)


def columns(x1: torch.Tensor, x2: torch.Tensor) -> int:
    """Returns the number of columns of the product x1 @ x2; an int32 of x2 may store eight int4 of a row."""
    return x2.shape[-1] * (8 if x2.dtype == torch.int32 and not rows_packed(x1, x2) else 1)


def multiplies(x1: torch.Tensor, x2: torch.Tensor) -> bool:
    """True if two batches of matrices, x1 and x2, can be multiplied."""
    meet = inner(x1) == x2.shape[-2] or rows_packed(x1, x2)
    return meet and broadcast(x1.shape[:-2], x2.shape[:-2]) is not None


def fits_result(bias: torch.Tensor, x1: torch.Tensor, x2: torch.Tensor) -> bool:
    """True if a bias broadcasts to every row of x1 @ x2, a product of two batches of matrices."""
    row = broadcast((*x1.shape[:-2], 1, 1), (*x2.shape[:-2], 1, columns(x1, x2))) or ()
    return broadcast(row, bias.shape) == row


def mixed(x1: torch.Tensor, x2: torch.Tensor) -> bool:
    """True if x1 is int8 and x2 int4 stored in int32, whose scales are per block."""
    return x1.dtype == torch.int8 and x2.dtype == torch.int32


def blocks(x1: torch.Tensor, sizes: np.ndarray | None) -> int:
    """Returns the number of blocks in a row of x1, 0 if illegal; sizes: [0 or 1, 0 or 1, elements of a block]."""
    rest = [] if sizes is None else sizes.tolist()
    fit = len(rest) == 3 and set(rest[:2]) <= {0, 1} and rest[2] > 0 and inner(x1) % rest[2] == 0
    return inner(x1) // rest[2] if fit else 0


def axis_of(axis: int, div_mode: bool) -> int:
    """Returns the axis of the input along which scales vary: `axis` in div_mode or if it is -2, else the last axis."""
    return axis if div_mode or axis == -2 else -1


def along(scales: torch.Tensor, x: torch.Tensor, axis: int) -> bool:
    """True if `scales` has one number, or one per element of x along the axis, or if x lacks the axis."""
    if not has_axis(x, axis):
        return True
    if scales.dim() == 1:
        return scales.shape[0] in (1, x.shape[axis])
    full = [1] * x.dim()
    full[axis] = x.shape[axis]
    return list(scales.shape) in (full, [1] * x.dim())


QUANTIZE = auxiliary(
    "npu_quantize",
    "Quantises elements with scales and zero points from the caller.",
    (
        floats("input", "The tensor that is quantised."),
        floats("scales", "[1], or one per element of the axis: 1-D, or with all axes of input and size 1 in the "
               "others."),
        Tensor("zero_points", "Added before rounding; in the shape of scales.", optional=True,
               dtypes=f"int8 uint8 int32 {FLOATS}"),
        Attr("dtype", "torch.qint8 (12); with div_mode also torch.quint8 (13), qint32 (14) or int32 (3); without it "
             "also torch.int8 (1) and quint4x2 (16).",
             domain="dtype in ((12, 13, 14, 3) if div_mode else (12, 1, 16))"),
        Attr("axis", "Axis of scales; without div_mode -2, or any other number for the last axis.", default=1),
        Attr("div_mode", "Divide by scales; False: multiply.", type=bool, default=True),
    ),
    (result("out", "int8, uint8 or int32 in the shape of input, saturated, halves to even; for quint4x2 int32, each of "
    "eight elements, the first in the lowest bits.", ""),),
    rules=(
        invalid("has_axis(input, axis_of(axis, div_mode))", "axis: an axis of input (scales are along it)",
                invalid={"axis": 2}),
        *(
            invalid(f"{name} is None or along({name}, input, axis_of(axis, div_mode))",
                    f"{name}: [1], or the size of the axis (one per element of it)", given={name: "K"},
                    invalid={name: "7"})
            for name in ("scales", "zero_points")
        ),
        invalid("dtype != 16 or input.dim() < 1 or input.shape[-1] % 8 == 0",
                "input: a multiple of 8 elements (eight share an int32)", given={"dtype": 16, "div_mode": False},
                invalid={"input": "4 6", "scales": "1"}),
    ),
    formula="out = round(input / scales + zero_points)\n"
    "out = round(input * scales + zero_points)        without div_mode",
    functions={"axis_of": axis_of, "along": along},
    sizes=SIZES,
    sample={"input": "M K", "scales": "K", "dtype": 12},
    declared={"dtype": torch.dtype | int},
    example="""\
>>> npu_quantize(torch.tensor([[1.0, -2.0, 90.0]]), torch.tensor([0.5]), None, torch.qint8).tolist()
[[2, -4, 127]]""",
)  # fmt: skip

DYNAMIC = auxiliary(
    "npu_dynamic_quant",
    "Quantises rows to integers, each with a scale from its largest element.",
    (
        floats("input", "The tensor that is quantised, of at least two axes."),
        floats("smooth_scales", "Factors on the elements of rows: [W], or [groups, W]; perchannel: on rows, [R].",
               optional=True),
        Tensor("group_index", "Cumulative end of each group of rows.", optional=True, dtypes="int32 int64", shape="E",
               make=lambda shape: torch.full(shape, 4)),
        Attr("dst_type", "torch.int8 (1); or torch.quint4x2 (16), with 7 in place of 127. None: torch.int8.",
             default=None, domain="dst_type in (None, 1, 16)"),
        one_of("quant_mode", "One scale per row (pertoken), column (perchannel) or tensor (pertensor).",
               ("pertoken", "perchannel", "pertensor")),
        Attr("dst_type_max", "Reserved: 0.", type=float, default=0.0, domain="dst_type_max == 0"),
    ),
    (
        result("y", "int8 in the shape of input; for quint4x2 int32, each of eight elements, the first in the lowest "
               "bits.", "int8 int32"),
        result("scale", "float32, one per row (column, tensor); 0 if all elements are 0.", "float32"),
    ),
    rules=(
        invalid("input.dim() >= 2 and input.numel() > 0", "input: at least two axes, and at least one element (rows "
                "of elements)",
                invalid={"input": "8", "smooth_scales": None}),
        *(
            invalid(f"smooth_scales is None or input.dim() < 2 or smooth_scales.shape[-1:] == input.shape[{axis}]",
                    f"smooth_scales: the size of {text} of input (one factor per element of it)",
                    when=f"(quant_mode == 'perchannel' and group_index is None) is {columns}", given=given,
                    invalid={"smooth_scales": "7"})
            for axis, text, columns, given in (
                ("-1:", "the last axis", False, {}),
                ("-2:-1", "the last axis but one", True, {"quant_mode": "perchannel", "smooth_scales": "M"}),
            )
        ),
        invalid("smooth_scales is None or smooth_scales.dim() == (1 if group_index is None else 2)",
                "smooth_scales: [W], or [groups, W] with group_index (one row per group)",
                invalid={"smooth_scales": "E K"}),
        presence("group_index is None or smooth_scales is not None", "smooth_scales (group_index selects a row of it "
                 "for each group)",
                 given={"group_index": True, "smooth_scales": "E K"}, invalid={"smooth_scales": None}),
        invalid("group_index is None or smooth_scales is None or smooth_scales.dim() != 2 or "
                "group_index.shape == smooth_scales.shape[:1]", "group_index: [groups] (the end of each group)",
                given={"group_index": True, "smooth_scales": "E K"}, invalid={"group_index": "3"}),
        meaning("ends(group_index, rows_of(input))", "group_index: ascending ends, the last the number of rows "
                "(groups are consecutive rows)",
                when="group_index is not None and group_index.numel() > 0 and input.dim() >= 2", code=INVALID,
                reads=True, given={"group_index": True, "smooth_scales": "E K"},
                invalid={"group_index": torch.tensor([1, 5])}),
        invalid("dst_type != 16 or input.dim() < 1 or input.shape[-1] % 8 == 0",
                "input: a multiple of 8 elements (eight share an int32)", given={"dst_type": 16},
                invalid={"input": "4 6", "smooth_scales": None}),
    ),
    formula="scale = max(abs(x * smooth)) / 127        per row\ny = round(x * smooth / scale)",
    functions={"ends": ends, "rows_of": rows_of},
    sizes=SIZES,
    sample={"input": "M K", "smooth_scales": "K"},
    keywords="smooth_scales",
    declared={"dst_type": DTYPE},
    example="""\
>>> y, scale = npu_dynamic_quant(torch.tensor([[1.0, -2.0], [0.0, 0.0]]))
>>> y.tolist(), round(scale[0].item(), 5)
([[64, -127], [0, 0]], 0.01575)""",
)  # fmt: skip

PARAM = auxiliary(
    "npu_trans_quant_param",
    "Packs a scale and an offset into one int64, a form that matrix products of integers accept as scale.",
    (
        Tensor("scale", "[1] or [N], or [1, N].", dtypes="float32"),
        Tensor("offset", "Offset of int8 results; it broadcasts with scale.", optional=True, dtypes="float32"),
        one_of("round_mode", "Conversion of scale to 19 bits: 0: truncated; 1: rounded.", (0, 1)),
    ),
    (result("out", "int64: scale in the low 32 bits, bit 46, and offset in bits 37 to 45.", "int64"),),
    rules=(
        invalid("scale.dim() in (1, 2)", "scale: [1] or [N], or [1, N] (one per column)",
                invalid={"scale": "1 1 3"}),
        invalid("offset is None or offset.dim() in (1, 2) and broadcast(scale.shape, offset.shape) is not None",
                "offset: one element, or as many as scale (one per scale)", when="scale.dim() in (1, 2)",
                given={"offset": "N"}, invalid={"offset": "7"}),
    ),
    formula="out = (float32 bits of scale & 0xFFFFE000) | 1 << 46 | (clamp(round(offset), -256, 255) & 0x1FF) << 37",
    functions={"broadcast": broadcast},
    sizes=SIZES,
    sample={"scale": "N"},
    declared={"round_mode": int | None},
    example="""\
>>> hex(npu_trans_quant_param(torch.tensor([1.0]), torch.tensor([-1.0])).item())
'0x7fe03f800000'""",
)  # fmt: skip

INT4PACK = auxiliary(
    "npu_convert_weight_to_int4pack",
    "Packs eight elements of four bits into one int32.",
    (
        Tensor("weight", "[K, N] or [N, K], elements from -8 to 7.", dtypes="int32",
               make=lambda shape: torch.arange(math.prod(shape), dtype=torch.int32).reshape(shape) % 16 - 8),
        Attr("inner_k_tiles", "Reserved.", default=0),
    ),
    (result("out", "[K, N / 8], the first of eight elements in the lowest bits.", "int32"),),
    rules=(
        invalid("weight.dim() == 2", "weight: two axes (a matrix)", invalid={"weight": "2 3 8"}),
        invalid("weight.dim() != 2 or weight.shape[1] % 8 == 0",
                "weight: a multiple of 8 columns (eight share an int32)", invalid={"weight": "4 6"}),
        meaning("within(weight, 8, low=-8)", "weight: elements from -8 to 7 (four bits hold no more)", level="content",
                code=INVALID, reads=True, invalid={"weight": torch.full((4, 8), 8, dtype=torch.int32)}),
    ),
    formula="out[i, j] = the four low bits of weight[i, 8j] to weight[i, 8j + 7], those of the first in the lowest "
    "bits",
    sizes=SIZES,
    sample={"weight": "M K"},
    example="""\
>>> weight = torch.tensor([[1, 2, 3, 0, 0, 0, 0, -1]], dtype=torch.int32)
>>> hex(npu_convert_weight_to_int4pack(weight).item() & 0xFFFFFFFF)
'0xf0000321'""",
)  # fmt: skip

# Settings of sample calls of an int8 matrix times int4.
BLOCKS: dict[str, Any] = {
    "x2": ("K 2", "int32"), "scale": "2 16", "pertoken_scale": "M 1", "output_dtype": 5, "group_sizes": [0, 0, 4],
}  # fmt: skip
MATRICES = "x1.dim() >= 2 and x2.dim() >= 2"
MATMUL = auxiliary(
    "npu_quant_matmul",
    "Multiplies two matrices of int8 or int4, and scales rows and columns of the product.",
    (
        Tensor("x1", "[..., M, K]; int32: eight int4 in each, [..., M, K/8].", dtypes="int8 int32"),
        Tensor("x2", "[..., K, N]; int32: eight int4 in each, [..., K, N/8] or [..., K/8, N].", dtypes="int8 int32"),
        Tensor("scale", "Scales of columns: [1] or [N]; integers from npu_trans_quant_param. With blocks: [blocks, N].",
               dtypes=SCALES),
        Tensor("offset", "Offset of int8 results: [1] or [N]; without effect beside an integer scale. With blocks: "
               "[N], added before pertoken_scale: the chip subtracts 8 from every element of x1, and offset "
               "compensates this.", optional=True, dtypes="float32"),
        Tensor("pertoken_scale", "Scales of rows of x1: [M]. With blocks: [M, 1].", optional=True, dtypes="float32"),
        Tensor("bias", "int32: added before scaling; floats: after it. [N], [1, N] or [batch, 1, N].", optional=True,
               dtypes=f"int32 {FLOATS}"),
        Attr("output_dtype", "int8 (1), int32 (3: not scaled), float16 (5), bfloat16 (15); None: int8.", default=None,
             domain="output_dtype in (None, 1, 3, 5, 15)"),
        *(Attr(name, "None: dtypes that torch does not have are not supported.", default=None, domain=f"{name} is None")
          for name in ("x1_dtype", "x2_dtype", "pertoken_scale_dtype", "scale_dtype")),
        Array("group_sizes", "For x1 of int8 and x2 of int4: [0, 0, elements of a block].", optional=True),
        Tensor("y_scale", "Not supported.", optional=True),
    ),
    (result("out", "[..., M, N].", ""),),
    rules=(
        invalid(MATRICES, "x1: at least two axes, as x2 (matrices)", invalid={"x1": ("K", "int8")}),
        invalid("x1.dtype == int8 or x2.dtype == int32", "x2: int32 as x1 (int4 is multiplied only by int4)",
                invalid={"x1": ("M 1", "int32")}),
        invalid("multiplies(x1, x2)",
                "x2: [..., K, N], with batch axes that broadcast with those of x1 (rows of x1 have K elements)",
                when=MATRICES,
                invalid={"x2": ("7 N", "int8")}),
        *(
            invalid(f"{name} is None or {name}.dim() == 1 and {name}.numel() in {sizes}", f"{name}: {text} ({of})",
                    when=f"{MATRICES} and not mixed(x1, x2)", given={} if name == "scale" else {name: good},
                    invalid={name: "7"})
            for name, sizes, of, text, good in (
                ("scale", "(1, columns(x1, x2))", "one per column of x2", "[1] or [N]", "N"),
                ("offset", "(1, columns(x1, x2))", "one per column of x2", "[1] or [N]", "N"),
                ("pertoken_scale", "x1.shape[-2:-1]", "one per row of x1", "[M]", "M"),
            )
        ),
        invalid("bias is None or fits_result(bias, x1, x2)", "bias: [N], [1, N] or [batch, 1, N] (added to every row)",
                when=f"{MATRICES} and multiplies(x1, x2)", given={"bias": "N"}, invalid={"bias": "7"}),
        invalid("bias is None or output_dtype != 3 or bias.dtype == int32", "bias: int32 (an int32 result is not "
                "scaled)",
                given={"bias": "N", "output_dtype": 3}, invalid={"bias": ("N", "float32")}),
        invalid("offset is None or output_dtype in (None, 1) or mixed(x1, x2)",
                "offset: None (only int8 results have an offset)", given={"offset": "N"}, invalid={"output_dtype": 5}),
        invalid("group_sizes is None or len(group_sizes) == 0 or mixed(x1, x2)",
                "group_sizes: None (blocks are for x1 of int8 and x2 of int4)",
                invalid={"group_sizes": [0, 0, 8]}),
        *(
            invalid(check, f"{param}: {text} (int8 is multiplied by int4 in blocks)",
                    when=f"{MATRICES} and mixed(x1, x2)",
                    given=BLOCKS, invalid=broken)
            for check, param, text, broken in (
                ("blocks(x1, group_sizes)", "group_sizes", "[0, 0, a divisor of K]", {"group_sizes": [0, 0, 3]}),
                ("not blocks(x1, group_sizes) or scale.shape == (blocks(x1, group_sizes), columns(x1, x2))", "scale",
                 "[blocks, N]", {"scale": "3 16"}),
                ("offset is None or offset.shape == (columns(x1, x2),)", "offset", "[N]", {"offset": "7"}),
                ("pertoken_scale is not None and pertoken_scale.shape == (x1.shape[-2], 1)", "pertoken_scale", "[M, 1]",
                 {"pertoken_scale": "M"}),
                ("x1.dim() == x2.dim() == 2 and bias is None", "bias", "None, and no batch", {"bias": "16"}),
                ("output_dtype in (5, 15)", "output_dtype", "float16 or bfloat16", {"output_dtype": 1}),
            )
        ),
        invalid("y_scale is None", "y_scale: None (not supported)"),
    ),
    formula="out = (x1 x2 + bias) * scale * pertoken_scale + offset        (x1 x2 in integers)\n"
    "out = x1 x2 + bias        int32 result\n"
    "out = (sum over blocks((x1 - 8) x2 * scale) + offset) * pertoken_scale        int8 times int4",
    functions={
        "int8": torch.int8, "int32": torch.int32,
        **{f.__name__: f for f in (multiplies, fits_result, columns, mixed, blocks)},
    },
    sizes=SIZES,
    sample={"x1": "M K", "x2": "K N", "scale": "N"},
    keywords="offset",
    declared={"output_dtype": DTYPE, "group_sizes": Sequence[int] | None},
    example="""\
>>> x = torch.tensor([[1, 2]], dtype=torch.int8)
>>> npu_quant_matmul(x, x.T.contiguous(), torch.tensor([0.5]), output_dtype=torch.bfloat16).item()
2.5""",
)  # fmt: skip

RECORDS = (DYNAMIC, QUANTIZE, PARAM, INT4PACK, MATMUL)

"""Operator definitions for transposing and reshaping tensors or changing their format, some with a matrix product."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fusion_attention.contract import Array, Attr, Tensor
from fusion_attention.ops.auxiliary_definitions.common import auxiliary, floats, no_derivative, result, writes
from fusion_attention.ops.shared.rules import invalid


def permutes(perm: np.ndarray, count: int) -> bool:
    """True if perm is a permutation of range(count)."""
    return sorted(perm.tolist()) == list(range(count))


def elements(shape: np.ndarray) -> int:
    """Returns the number of elements of a tensor with this shape; -1 if a size is negative."""
    return math.prod(shape.tolist()) if (shape >= 0).all() else -1


def permuted(tensor: torch.Tensor, perm: np.ndarray | None) -> torch.Tensor:
    """Returns a tensor of three axes with permuted axes; perm None: unchanged."""
    return tensor if perm is None else tensor.permute(*map(int, perm))


def multiply(x: torch.Tensor, w: torch.Tensor, perm_x: np.ndarray | None, perm_w: np.ndarray | None) -> bool:
    """True if permuted x [B, M, K] and w [B, K, N] can be multiplied, or if a permutation is wrong."""
    if any(perm is not None and not permutes(perm, 3) for perm in (perm_x, perm_w)):
        return True
    a, b = permuted(x, perm_x).shape, permuted(w, perm_w).shape
    return a[0] == b[0] and a[2] == b[1]


def result_columns(w: torch.Tensor, perm: np.ndarray | None) -> int:
    """Returns B * N of w, which is [B, K, N] after the permutation; -1 for a wrong permutation."""
    return -1 if perm is not None and not permutes(perm, 3) else math.prod(permuted(w, perm).shape[::2])


def splits(x: torch.Tensor, w: torch.Tensor, perm_x: Any, perm_w: Any, perm_y: Any, factor: int) -> bool:
    """True if the rows [B*N] of a product [M, B, N] can be divided into `factor` parts, or if a permutation is wrong,
    which another rule reports; perm_y: the permutation of the result."""
    if any(perm is not None and not permutes(perm, 3) for perm in (perm_x, perm_w, perm_y)):
        return True
    width = result_columns(w, perm_w)
    return (perm_y is None or perm_y.tolist() == [1, 0, 2]) and width % factor == 0


FUNCTIONS = {f.__name__: f for f in (permutes, elements, multiply, splits, result_columns)}
PERM = Array("perm", "The order of axes.")
SHAPE = Array("shape", "The shape of the reshaped tensor, before or after the permutation.")
CONFUSION_TRANSPOSE = auxiliary(
    "npu_confusion_transpose",
    "Permutes the axes of a tensor, then reshapes it; or reshapes it, then permutes its axes.",
    (
        Tensor("input", "A tensor of any dtype."),
        *(PERM, SHAPE),
        Attr("transpose_first", "Permute, then reshape; False: reshape, then permute.", type=bool),
    ),
    (result("y", "A new tensor of this shape; without transpose_first, of the permuted shape.", "=input"),),
    rules=(
        invalid(
            "elements(shape) == input.numel()",
            "shape: as many elements as input has (a reshaped tensor has the same elements)",
            invalid={"shape": [2, 4, 7]},
        ),
        invalid(
            "permutes(perm, input.dim() if transpose_first else len(shape))",
            "perm: every axis once (the axes of input with transpose_first, otherwise those of shape)",
            invalid={"perm": [0, 1, 1]},
        ),
    ),
    formula="""transpose_first:  y = input.permute(perm).reshape(shape)
otherwise:  y = input.reshape(shape).permute(perm)""",
    functions=FUNCTIONS,
    sample={"input": "B S1 W", "perm": [0, 2, 1], "shape": [2, 32], "transpose_first": True},
    declared={"perm": Sequence[int], "shape": Sequence[int]},
    example="""\
>>> x = torch.rand(2, 3, 4, 6)
>>> list(npu_confusion_transpose(x, (0, 2, 1, 3), (2, 4, 18), True).shape)
[2, 4, 18]
>>> list(npu_confusion_transpose(x, (0, 2, 1), (2, 12, 6), False).shape)
[2, 6, 12]""",
)
CONFUSION_TRANSPOSE_BACKWARD = auxiliary(
    "npu_confusion_transpose_backward",
    "The gradient of npu_confusion_transpose: the inverse permutation and reshaping.",
    (
        Tensor("grad", "Gradient of y."),
        PERM,
        Array("shape", "The shape of the forward's input."),
        Attr("transpose_first", "The opposite of the forward's value.", type=bool),
    ),
    (result("dx", "A tensor of this shape.", "=grad"),),
    rules=(
        invalid(
            "elements(shape) == grad.numel()",
            "shape: as many elements as grad has (the shape of the forward's input)",
            invalid={"shape": [2, 4, 7]},
        ),
        invalid(
            "permutes(perm, grad.dim() if transpose_first else len(shape))",
            "perm: every axis once (the forward's perm)",
            invalid={"perm": [0, 1, 1]},
        ),
    ),
    formula="""transpose_first:  dx = grad.permute(inverse of perm).reshape(shape)
otherwise:  dx = grad.reshape(permuted shape).permute(inverse of perm)""",
    functions=FUNCTIONS,
    sample={"grad": "B 32", "perm": [0, 2, 1], "shape": [2, 4, 8], "transpose_first": False},
    declared={"perm": Sequence[int], "shape": Sequence[int]},
    example="""\
>>> x = torch.rand(2, 3, 4)
>>> y = npu_confusion_transpose(x, (0, 2, 1), (2, 12), True)
>>> torch.equal(npu_confusion_transpose_backward(y, (0, 2, 1), (2, 3, 4), False), x)
True""",
)
FORMAT_CAST = auxiliary(
    "npu_format_cast",
    "A copy with a memory format of the chip as an attribute. Formats have no effect on memory or results here.",
    (
        Tensor("input", "A tensor of any dtype."),
        Attr(
            "acl_format",
            "0 NCHW, 2 ND, 3 NC1HWC0, 29 FRACTAL_NZ, ...; or a tensor with the format.",
            domain="0 <= acl_format < 64",
        ),
        Attr("customize_dtype", "Accepted without effect.", default=None),
        Attr("input_dtype", "Accepted without effect.", default=None),
    ),
    (result("y", "A tensor with the shape and the elements of input.", "=input"),),
    formula="y = input",
    sample={"input": "B W", "acl_format": 29},
    keywords="customize_dtype",
    declared={"acl_format": int | torch.Tensor},
    returns="A copy, or input if it has the format already. get_npu_format() returns the format.",
    example="""\
>>> weight = npu_format_cast(torch.ones(4, 4), 29)
>>> get_npu_format(weight), get_npu_format(npu_format_cast(weight, 2))
(29, 2)""",
)
FORMAT_CAST_ = FORMAT_CAST.version(
    "npu_format_cast_",
    "Sets the memory format of a tensor, an attribute without effect here.",
    keywords="customize_dtype",
    declared=writes("input") | {"acl_format": int | torch.Tensor},
    returns="input itself, which now has the format.",
    example="""\
>>> weight = torch.ones(4, 4)
>>> npu_format_cast_(weight, 29) is weight, get_npu_format(weight)
(True, 29)""",
)
TRANSPOSE_BATCHMATMUL = auxiliary(
    "npu_transpose_batchmatmul",
    "A batched matrix product with permutations of the operands and of the result.",
    (
        # Programs match the text of torch_npu's error.
        floats("input", "[B, M, K] after perm_x1.", cast="input's type supported for float16, float32 and bfloat16"),
        floats(
            "weight",
            "[B, K, N] after perm_x2.",
            like="input",
            cast="weight's type supported for float16, float32 and bfloat16",
        ),
        Tensor("bias", "Not supported: None.", True),
        Tensor("scale", "Scales of an int8 result, [B*N], from npu_trans_quant_param.", True, dtypes="int64 uint64"),
        Array("perm_x1", "Permutation of input to [B, M, K]; None: [0, 1, 2].", True),
        Array("perm_x2", "Permutation of weight to [B, K, N]; None: [0, 1, 2].", True),
        Array("perm_y", "Permutation of the product [B, M, N]; None: [1, 0, 2].", True),
        Attr("batch_split_factor", "Number of parts into which the rows [B*N] of the result are divided.", default=1),
    ),
    (result("y", "[M, B, N]; with batch_split_factor f [f, M, B*N/f]; with scale int8 [M, 1, B*N].", ""),),
    rules=(
        *(
            invalid(
                f"{name} is None or permutes({name}, 3)",
                f"{name}: every axis once ({name} should be an order of three axes)",
                invalid={name: [0, 1, 1]},
            )
            for name in ("perm_x1", "perm_x2", "perm_y")
        ),
        invalid(
            "input.dim() == 3 and weight.dim() == 3",
            "input: three axes, as weight (a batch of matrices each)",
            invalid={"input": "4 8", "weight": "8 5"},
        ),
        invalid(
            "multiply(input, weight, perm_x1, perm_x2)",
            "weight: [B, K, N] after perm_x2 (batch and inner axis are those of input)",
            when="input.dim() == 3 and weight.dim() == 3",
            invalid={"weight": "4 7 5"},
        ),
        invalid(
            "batch_split_factor > 0 and (batch_split_factor == 1 or splits(input, weight, perm_x1, perm_x2, perm_y,"
            " batch_split_factor))",
            "batch_split_factor: a divisor of B*N; with another perm_y 1 (rows [B*N] of a result [M, B, N] are "
            "divided)",
            when="input.dim() == 3 and weight.dim() == 3",
            invalid={"batch_split_factor": 3},
        ),
        invalid(
            "scale is None or perm_y is None or tuple(perm_y) == (1, 0, 2)",
            "perm_y: [1, 0, 2] or None (a scaled result is [M, 1, B*N])",
            given={"scale": "10"},
            invalid={"perm_y": [0, 1, 2]},
        ),
        invalid(
            "scale is None or batch_split_factor == 1",
            "batch_split_factor: 1 (a scaled result is [M, 1, B*N])",
            given={"scale": "10"},
            invalid={"batch_split_factor": 2},
        ),
        invalid(
            "scale is None or scale.shape == (result_columns(weight, perm_x2),)",
            "scale: [B*N] (one for every column of every matrix)",
            when="input.dim() == 3 and weight.dim() == 3 and result_columns(weight, perm_x2) >= 0",
            given={"scale": "10"},
            invalid={"scale": "5"},
        ),
        invalid("bias is None", "bias: None (add it to the result)"),
        *no_derivative(input=(2, 4, 8)),
    ),
    formula="y = (input.permute(perm_x1) @ weight.permute(perm_x2)).permute(perm_y)\n"
    "y = round(y * scale + offset)        with scale",
    tex=r"y = \operatorname{perm}_y\!\big(\operatorname{perm}_{x_1}(input)\, \operatorname{perm}_{x_2}(weight)\big)",
    functions=FUNCTIONS,
    sample={"input": "2 4 8", "weight": "2 8 5"},
    keywords="bias",
    declared={
        "perm_x1": Sequence[int] | None,
        "perm_x2": Sequence[int] | None,
        "perm_y": Sequence[int] | None,
        "batch_split_factor": int | None,
    },
    example="""\
>>> x, weight = torch.randn(32, 16, 64), torch.randn(16, 64, 8)
>>> y = npu_transpose_batchmatmul(x, weight, perm_x1=(1, 0, 2), batch_split_factor=2)
>>> list(y.shape)
[2, 32, 64]""",
)


RECORDS = (CONFUSION_TRANSPOSE, CONFUSION_TRANSPOSE_BACKWARD, FORMAT_CAST, FORMAT_CAST_, TRANSPOSE_BATCHMATMUL)

"""The operator definition of npu_grouped_matmul, one matrix product per group of rows (expert)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fusion_attention.contract import Array, Attr, Tensors
from fusion_attention.ops.auxiliary_definitions.common import FLOATS, auxiliary, result
from fusion_attention.ops.auxiliary_definitions.quantised import DTYPE, SCALES
from fusion_attention.ops.shared.params import TENSOR_FIRST, one_of
from fusion_attention.ops.shared.rules import invalid, of_lengths, presence

Given = Sequence[torch.Tensor]
OTHERS = ("x_dtype", "weight_dtype", "scale_dtype", "per_token_scale_dtype")
RESERVED = ("offset", "activation_input", "activation_quant_scale", "activation_quant_offset")
ONE_EACH = ("bias", "scale", "antiquant_scale", "antiquant_offset")
BLOCKS = "[E, N] or [E, blocks, N], or a list of [N] or [blocks, N]"
BESIDE_COLUMNS = {"bias": "[E, N], or a list of [N] (one per group and column)"} | dict.fromkeys(
    ONE_EACH[1:], f"{BLOCKS} (one per group and column, or per group, block of rows and column)"
)


def matrices(weight: Given) -> tuple[torch.Tensor, ...]:
    """Returns the matrices [K, N] of all groups, from `weight`, a list of them or one tensor [E, K, N]."""
    return weight[0].unbind(0) if len(weight) == 1 and weight[0].dim() == 3 else tuple(weight)


def vectors(given: Given, count: int) -> tuple[torch.Tensor, ...]:
    """Returns the tensors [N] or [blocks, N] of `count` groups, from `given`, a list of them or one tensor [E, ...]."""
    full = len(given) == 1 and given[0].dim() > 1 and given[0].shape[0] == count
    return given[0].unbind(0) if full else tuple(given)


def fit(x: Given, weight: Given, group_type: int, one: bool) -> bool | str:
    """True (else error text) if x and weight can be multiplied in every group; one: all groups have one result tensor.
    group_type: the axis by which groups divide x: -1 none, 0 rows, 2 columns."""
    results = matrices(weight)
    shapes_text = f"x {[list(t.shape) for t in x]}, weight {[list(t.shape) for t in weight]}"
    if not results or any(w.dim() != 2 for w in results) or any(not t.dim() for t in x):
        return shapes_text
    if group_type == 2:
        return (len(x) == len(weight) == 1 and weight[0].dim() == 2 and x[0].dim() == 2
                and x[0].shape[1] == weight[0].shape[0]) or shapes_text  # fmt: skip
    several = len(x) > 1 or group_type == -1
    if several and len(x) != len(results):
        return shapes_text
    rank = x[0].dim() >= 2 and (x[0].dim() == 2 or (group_type == -1 and not one))
    inner = all(t.dim() == x[0].dim() and t.shape[-1] == results[i if several else 0].shape[0] for i, t in enumerate(x))
    same = all(w.shape[0] == results[0].shape[0] for w in results) if not several else True
    width = all(w.shape[1] == results[0].shape[1] for w in results) if one else True
    return (rank and inner and same and width) or shapes_text


def each(given: Given, weight: Given, blocks: bool) -> bool:
    """True if each group has a tensor [N] in `given`, for its matrix [K, N] in `weight`; blocks: or [blocks, N]."""
    weights = matrices(weight)
    results = vectors(given, len(weights))

    def fits(v: torch.Tensor, w: torch.Tensor) -> bool:
        several = blocks and v.dim() == 2 and len(v) > 0 and w.shape[0] % len(v) == 0
        return v.shape[-1:] == w.shape[1:] and (v.dim() == 1 or several)

    return len(results) == len(weights) and all(map(fits, results, weights))


def sizes_of(group_list: np.ndarray, kind: int) -> np.ndarray:
    """Returns the number of rows of each group; kind: group_list has 0: cumulative ends, 1: sizes, 2: (group, size)."""
    return np.diff(group_list, prepend=0) if kind == 0 else group_list if kind == 1 else group_list[1::2]


def groups_of(group_list: np.ndarray, kind: int) -> list[int]:
    """Returns the group of each size in group_list: by its pairs (group, size) if kind is 2, else 0, 1, 2, ..."""
    results: list[int] = group_list[::2].tolist() if kind == 2 else list(range(len(group_list)))
    return results


def grouped(group_list: np.ndarray, kind: int, x: Given, weight: Given, group_type: int) -> bool:
    """True if a group list has legal groups and sizes, at most the rows of x in total; kind: group_list has 0:
    cumulative ends, 1: sizes, 2: pairs (group, size); group_type: the axis by which groups divide x: -1 none, 0 rows, 2
    columns."""
    count = len(group_list) if group_type == 2 else len(matrices(weight))
    sizes = sizes_of(group_list, kind)
    total = sum(t.shape[1] if group_type == 2 else t.shape[0] for t in x)
    each_own = len(x) == 1 or [t.shape[0] for t in x] == sizes.tolist()
    groups = groups_of(group_list, kind)
    there = len(group_list) % 2 == 0 and all(0 <= i < count for i in groups) if kind == 2 else len(groups) == count
    return there and bool((sizes >= 0).all()) and int(sizes.sum()) <= total and each_own


GROUPED = auxiliary(
    "npu_grouped_matmul",
    "Multiplies the rows of each group by the matrix of the group.",
    (
        Tensors("x", "Rows: one tensor, or one per group.", dtypes=f"{FLOATS} int8", shape="M K"),
        Tensors("weight", "[E, K, N], or one matrix per group, also views; int4 as int32 [E, K, N / 8] from "
                "npu_convert_weight_to_int4pack.", dtypes=f"{FLOATS} int8", shape="E K N"),
        Tensors("bias", "[E, N], or one per group. With int8 rows and int4 weights, the chip subtracts 8 from every "
                "element of x, and bias compensates this.", optional=True, dtypes=f"{FLOATS} int32", shape="E N"),
        Tensors("scale", "Scales of products of int8: [E, N]; integers from npu_trans_quant_param. None: the result of "
                "int8 rows is int32.", optional=True, dtypes=SCALES, shape="E N"),
        Tensors("offset", "Not supported.", optional=True),
        Tensors("antiquant_scale", "Scales of int8 weights for floating-point rows: [E, N] or [E, blocks, N].",
                optional=True, dtypes=FLOATS, shape="E N"),
        Tensors("antiquant_offset", "Added to int8 weights before scaling, in the shape of antiquant_scale.",
                optional=True, dtypes=FLOATS, shape="E N"),
        Tensors("per_token_scale", "Scales of int8 rows: [M].", optional=True, dtypes="float32", shape="M"),
        Array("group_list", "Per group its end, its number of rows, or a pair (group_list_type).", optional=True),
        *(Tensors(name, "Not supported.", optional=True) for name in RESERVED[1:]),
        one_of("split_item", "0, 1: one result per group; 2, 3: one result.", (0, 1, 2, 3)),
        Attr("group_type", "-1: x is a list, without groups; 0: groups are rows of x; 2: groups are columns of x and "
             "rows of weight, [K, M] and [M, N], with the result [E, K, N]. Optional if group_list is a list.",
             default=None),
        one_of("group_list_type", "0: cumulative ends; 1: sizes; 2: pairs (group, size).", (0, 1, 2)),
        one_of("act_type", "0: none; 1: relu; 2: gelu (tanh); 4: fast gelu; 5: silu.", (0, 1, 2, 4, 5)),
        Array("tuning_config", "Accepted without effect.", optional=True),
        Attr("output_dtype", "int8 (1), int32 (3), float16 (5), float32 (6), bfloat16 (15); None: that of x.",
             default=None, domain="output_dtype in (None, 1, 3, 5, 6, 15)"),
        *(Attr(name, "None: dtypes that torch does not have are not supported.", default=None, domain=f"{name} is None")
          for name in OTHERS),
    ),
    (result("out", "A list of [rows, N], or of [E, K, N] for group_type 2.", ""),),
    rules=(
        presence("group_type is not None", "group_type: a value (Requires manual passing group_type, current is None)",
                 invalid={"group_type": None}),
        invalid("group_type in (-1, 0, 2)", "group_type: -1, 0 or 2 (The group type must be -1, 0 or 2)"),
        invalid("alike(x) and alike(weight)", "weight: tensors of one dtype (one dtype in a list)",
                invalid={"weight": [torch.ones(8, 3).half(), torch.ones(8, 3)]}),
        invalid("not alike(x) or not alike(weight) or weight[0].dtype in (x[0].dtype, int8) and "
                "(x[0].dtype != int8 or (scale is None) == (output_dtype == 3)) and "
                "(x[0].dtype == weight[0].dtype or antiquant_scale is not None)",
                "weight: the dtype of x, or int8 with a scale (antiquant_scale for floating-point rows; scale for int8 "
                "rows, except to int32)", invalid={"weight": ("E K N", "int8")}),
        invalid("group_type not in (-1, 0, 2) or fit(x, weight, group_type, split_item > 1)",
                "weight: a matrix [K, N] per group (rows of x have K elements)",
                invalid={"weight": "E 7 N"}),
        *(
            invalid(f"{name} is None or group_type == 2 or fit(x, weight, group_type, split_item > 1) is not True or "
                    f"each({name}, weight, {name != 'bias'})", f"{name}: {shapes}", when="group_type in (-1, 0, 2)",
                    given={name: True}, invalid={name: "E 5"})
            for name, shapes in BESIDE_COLUMNS.items()
        ),
        invalid("per_token_scale is None or len(per_token_scale) == 1 and "
                "per_token_scale[0].shape == (sum(t.shape[0] for t in x if t.dim() > 0),)",
                "per_token_scale: [M] (one per row of x)", given={"per_token_scale": "M"},
                invalid={"per_token_scale": "5"}),
        presence("group_type != 2 and (group_type != 0 or len(x) > 1) or group_list is not None",
                 "group_list (it has the rows of each group)", invalid={"group_list": None}),
        invalid("group_list_type != 2 or group_type == 0 and len(x) == 1 and split_item > 1",
                "group_list_type: 0 or 1, except with one x and one result (pairs are for rows of one tensor)",
                given={"group_list_type": 1}, invalid={"group_list_type": 2, "split_item": 0}),
        of_lengths("grouped(group_list, group_list_type, x, weight, group_type)",
                   "group_list: groups that end within x (one number per group, in order)",
                   when="group_list is not None and group_type in (0, 2) and "
                   "fit(x, weight, group_type, split_item > 1) is True", invalid={"group_list": [3, 2]}),
        *(invalid(f"{name} is None", f"{name}: None (not supported)") for name in RESERVED),
    ),
    formula="y_i = act((x_i weight_i + bias_i) * scale_i * per_token_scale)        int8 rows\n"
    "y_i = act(((x_i - 8) weight_i * scale_i + bias_i) * per_token_scale)        int8 rows, int4 weights\n"
    "y_i = act(x_i ((weight_i + antiquant_offset_i) * antiquant_scale_i) + bias_i)        floating-point rows",
    functions={
        "fit": fit, "each": each, "grouped": grouped, "int8": torch.int8,
        "alike": lambda tensors: len({t.dtype for t in tensors}) == 1,
    },
    sizes={"M": 4, "K": 8, "N": 3, "E": 2},
    sample={"group_type": 0, "group_list": torch.tensor([1, 4]), "split_item": 2},
    keywords="bias",
    declared={
        "group_list": TENSOR_FIRST,
        "tuning_config": Sequence[int] | None,
        "output_dtype": DTYPE,
        **dict.fromkeys(("split_item", "group_list_type", "act_type"), int | None),
    },
    returns="A list of results; rows of no group are zeros. Differentiable for floating-point tensors. A trace, in "
    "which lengths are unknown, multiplies all rows by all matrices.",
    example="""\
>>> x, weight = torch.ones(3, 2), torch.stack((torch.eye(2), 2 * torch.eye(2)))
>>> ends = torch.tensor([1, 3])
>>> npu_grouped_matmul([x], [weight], group_list=ends, split_item=2, group_type=0)[0][:, 0].tolist()
[1.0, 2.0, 2.0]""",
)  # fmt: skip
RECORDS = (GROUPED,)

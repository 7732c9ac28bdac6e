"""The package mindspeed, whose operators are functions of torch_npu with other names.

MindSpeed compiles its operators against CANN at their first use. This module compiles nothing.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from fusion_attention.contract import Op, Param
from fusion_attention.npu import merging
from fusion_attention.npu.auxiliary import grouped_matmul, rotary, token_permute
from fusion_attention.npu.functions_from_definitions import Args, from_record
from fusion_attention.npu.training import npu_fusion_attention_grad_v2, npu_fusion_attention_v2
from fusion_attention.ops.shared.params import spelled
from fusion_attention.ops.training import definitions as training

Tensor = torch.Tensor
# MindSpeed's number of a rotary mode -> torch_npu's name.
_ROTARY = {0: "half", 1: "interleave"}


def _former(op: Op, name: str, *changed: Param, without: str) -> Op:
    """Returns torch_npu's operator definition `op` under MindSpeed's `name`: the parameters `changed` replace those of
    the same names, and the parameters listed in `without` are removed."""
    others = {p.name: p for p in changed}
    params = tuple(others.get(p.name, p) for p in op.params if p.name not in without.split())
    return op.version(name, op.summary, params=params, rules=(), follows="MindSpeed", example="")


_FORWARD = _former(
    training.TORCH_V2, "npu_fusion_attention", without="query_rope key_rope softmax_layout sink drop_mask seed offset"
)
_GRADIENT = _former(
    training.TORCH_GRAD_V2,
    "npu_fusion_attention_grad",
    spelled(training.DY, "grad_outputs"),
    training.SCALE,
    replace(training.SEED_AGAIN, default=1234),
    without="query_rope key_rope softmax_layout sink",
)


class _Builder:
    """Stands for MindSpeed's builder of a compiled operator; load() returns the functions without compiling."""

    def __init__(self, functions: dict[str, Callable[..., Any]]) -> None:
        vars(self).update(functions)

    def load(self, verbose: bool = True) -> "_Builder":
        """Returns this object, whose attributes are the functions; verbose has no effect."""
        return self


def npu_ring_attention_update(
    prev_attn_out: Tensor,
    prev_softmax_max: Tensor,
    prev_softmax_sum: Tensor,
    cur_attn_out: Tensor,
    cur_softmax_max: Tensor,
    cur_softmax_sum: Tensor,
    actual_seq_qlen: Tensor | None = None,
    layout: str = "SBH",
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (out, softmax maximum, softmax sum) of attention, merged from the results for two sets of keys, previous
    and current, by torch_npu's function of this name; actual_seq_qlen: cumulative query lengths of packed rows."""
    previous, current = (prev_attn_out, prev_softmax_max, prev_softmax_sum), (cur_attn_out, cur_softmax_max)
    how = {"actual_seq_qlen": actual_seq_qlen, "input_layout": layout}
    return merging.npu_ring_attention_update(*previous, *current, cur_softmax_sum, **how)


@from_record(_FORWARD, host=None)
def npu_fusion_attention(args: Args) -> Any:
    return npu_fusion_attention_v2(**args)


@from_record(_GRADIENT, host=None)
def npu_fusion_attention_grad(args: Args) -> Any:
    by_name = training.TORCH_GRAD_V2.by_name
    return npu_fusion_attention_grad_v2(**{by_name[name].shown: value for name, value in args.items()})


def npu_rotary_position_embedding(x: Tensor, cos: Tensor, sin: Tensor, mode: int = 0) -> Tensor:
    """Returns x rotated by the angles of cos and sin; mode: 0 pairs elements i and i + D / 2, 1 adjacent ones."""
    return rotary.npu_rotary_mul(x, cos, sin, _ROTARY.get(mode, mode))


def _multiplied(x: Tensor, weight: Tensor, bias: Any, group_list: Any, group_type: int, kind: int) -> Tensor:
    """Returns x @ weight by groups: [M, N], rows of x [M, K] times their group's matrix in weight [E, K, N], or, for
    group_type 2, [E, M, N], sums over each group's part of K; kind: group_list has 0: ends of groups, 1: sizes."""
    how = {"group_list": group_list, "split_item": 3, "group_type": group_type, "group_list_type": kind}
    (result,) = grouped_matmul.npu_grouped_matmul([x], [weight], bias=None if bias is None else [bias], **how)
    return result


def npu_gmm(x: Tensor, weight: Tensor, *, bias: Any = None, group_list: Any = None, group_type: int = 0) -> Tensor:
    """Returns x @ weight by groups: [M, N], rows of x [M, K] times their group's matrix in weight [E, K, N], or, for
    group_type 2 and weight [K, N], [E, M, N], sums over each group's part of K; group_list: the groups' ends."""
    return _multiplied(x, weight, bias, group_list, group_type, 0)


def npu_gmm_v2(x: Tensor, weight: Tensor, *, bias: Any = None, group_list: Any = None, group_type: int = 0) -> Tensor:
    """Returns x @ weight by groups: [M, N], rows of x [M, K] times their group's matrix in weight [E, K, N], or, for
    group_type 2 and weight [K, N], [E, M, N], sums over each group's part of K; group_list: the groups' sizes."""
    return _multiplied(x, weight, bias, group_list, group_type, 1)


def npu_matmul_add_fp32(total_input: Tensor, grad_output: Tensor, grad: Tensor) -> None:
    """Adds grad_output^T @ total_input, the gradient of a linear layer's weight, to `grad` in place, in float32.

    >>> grad = torch.ones(2, 3)
    >>> npu_matmul_add_fp32(torch.ones(4, 3), torch.ones(4, 2), grad)
    >>> grad.tolist()
    [[5.0, 5.0, 5.0], [5.0, 5.0, 5.0]]
    """
    grad.add_((grad_output.float().mT @ total_input.float()).view_as(grad))


def npu_groupmatmul_add_fp32(x: Tensor, dy: Tensor, grouplist: Tensor, grad: Tensor) -> None:
    """Adds x^T @ dy of the rows of each of E groups, the gradient of its weight, to grad [E, K, N] in place, in
    float32; x: [M, K]. dy: [M, N]. grouplist: cumulative ends of the groups."""
    ends = [int(end) for end in grouplist]
    into = grad.view(len(ends), x.shape[-1], dy.shape[-1])
    for group, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        into[group] += x[start:end].float().mT @ dy[start:end].float()


# Module of mindspeed.ops: (its functions, name of its builder, or "").
_MODULES: dict[str, tuple[tuple[Callable[..., Any], ...], str]] = {
    "npu_ring_attention_update": ((npu_ring_attention_update,), "op_builder"),
    "fusion_attention_v2": ((npu_fusion_attention, npu_fusion_attention_grad), ""),
    "npu_rotary_position_embedding": ((npu_rotary_position_embedding,), "rope_op_builder"),
    "gmm": ((npu_gmm, npu_gmm_v2), ""),
    "grouped_matmul": ((grouped_matmul.npu_grouped_matmul,), ""),
    "npu_moe_token_permute": ((token_permute.npu_moe_token_permute,), "moe_token_permute_op_builder"),
    "npu_moe_token_unpermute": ((token_permute.npu_moe_token_unpermute,), "moe_token_unpermute_op_builder"),
    "npu_matmul_add": ((npu_matmul_add_fp32,), "matmul_add_op_builder"),
    "npu_groupmatmul_add": ((npu_groupmatmul_add_fp32,), "groupmatmul_add_op_builder"),
}


def contents() -> dict[str, dict[str, Any]]:
    """Returns {module name: {name: object}} for the modules that stand for MindSpeed's, packages first."""
    results: dict[str, dict[str, Any]] = {"mindspeed": {}, "mindspeed.ops": {}}
    for name, (functions, builder) in _MODULES.items():
        names: dict[str, Any] = {one.__name__: one for one in functions}
        results[f"mindspeed.ops.{name}"] = names | ({builder: _Builder(names)} if builder else {})
    return results

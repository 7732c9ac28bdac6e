"""The package mindspeed, whose operators are functions of torch_npu with other names.

MindSpeed compiles its operators against CANN at their first use. This module compiles nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from fusion_attention.contract import Op, Param
from fusion_attention.npu.interface import Args, from_record
from fusion_attention.ops.shared.params import spelled
from fusion_attention.ops.training import definitions as training

Tensor = torch.Tensor
# MindSpeed's number of a rotary mode -> torch_npu's name.
_ROTARY = {0: "half", 1: "interleave"}


def _former(op: Op, name: str, *changed: Param, without: str) -> Op:
    """Returns MindSpeed's definition `name` of torch_npu's operator, with `changed` parameters and without others."""
    others = {p.name: p for p in changed}
    params = tuple(others.get(p.name, p) for p in op.params if p.name not in without.split())
    return op.version(name, op.summary, params=params, rules=(), source="MindSpeed", example="")


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
    """MindSpeed's builder of an operator; its load() returns the functions without compiling."""

    def __init__(self, functions: Mapping[str, Any]) -> None:
        vars(self).update(functions)

    def load(self, verbose: bool = True) -> "_Builder":
        """Returns an object with the functions as attributes."""
        return self


def contents(functions: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns {module name: {name: object}}, packages before their modules.

    Args:
        functions: torch_npu's functions by name; modules that need a missing one are omitted.
    """
    results: dict[str, dict[str, Any]] = {"mindspeed": {}, "mindspeed.ops": {}}
    for name, make in _MINDSPEED.items():
        try:
            functions_made = make(functions)
        except KeyError:
            continue
        results[f"mindspeed.ops.{name}"] = {one.__name__: one for one in functions_made} | _builder(
            name, functions_made
        )
    return results


_BUILDERS = {
    "npu_ring_attention_update": "op_builder",
    "npu_rotary_position_embedding": "rope_op_builder",
    "npu_moe_token_permute": "moe_token_permute_op_builder",
    "npu_moe_token_unpermute": "moe_token_unpermute_op_builder",
    "npu_matmul_add": "matmul_add_op_builder",
    "npu_groupmatmul_add": "groupmatmul_add_op_builder",
}


def _builder(name: str, functions: list[Callable[..., Any]]) -> dict[str, Any]:
    return {_BUILDERS[name]: _Builder({one.__name__: one for one in functions})} if name in _BUILDERS else {}


def _ring(functions: Mapping[str, Any]) -> list[Callable[..., Any]]:
    update = functions["npu_ring_attention_update"]

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
        previous, current = (prev_attn_out, prev_softmax_max, prev_softmax_sum), (cur_attn_out, cur_softmax_max)
        return update(*previous, *current, cur_softmax_sum, actual_seq_qlen=actual_seq_qlen, input_layout=layout)

    return [npu_ring_attention_update]


def _attention(functions: Mapping[str, Any]) -> list[Callable[..., Any]]:
    forward, gradient = functions["npu_fusion_attention_v2"], functions["npu_fusion_attention_grad_v2"]

    @from_record(_FORWARD, host=None)
    def npu_fusion_attention(args: Args) -> Any:
        return forward(**args)

    @from_record(_GRADIENT, host=None)
    def npu_fusion_attention_grad(args: Args) -> Any:
        return gradient(**{training.TORCH_GRAD_V2.by_name[name].shown: value for name, value in args.items()})

    return [npu_fusion_attention, npu_fusion_attention_grad]


def _rotary(functions: Mapping[str, Any]) -> list[Callable[..., Any]]:
    rotate = functions["npu_rotary_mul"]

    def npu_rotary_position_embedding(x: Tensor, cos: Tensor, sin: Tensor, mode: int = 0) -> Tensor:
        return rotate(x, cos, sin, _ROTARY.get(mode, mode))

    return [npu_rotary_position_embedding]


def _gmm(functions: Mapping[str, Any]) -> list[Callable[..., Any]]:
    multiply = functions["npu_grouped_matmul"]

    def grouped(x: Tensor, weight: Tensor, bias: Any, group_list: Any, group_type: int, kind: int) -> Tensor:
        (result,) = multiply(
            [x],
            [weight],
            bias=None if bias is None else [bias],
            group_list=group_list,
            split_item=3,
            group_type=group_type,
            group_list_type=kind,
        )
        return result

    def npu_gmm(x: Tensor, weight: Tensor, *, bias: Any = None, group_list: Any = None, group_type: int = 0) -> Tensor:
        return grouped(x, weight, bias, group_list, group_type, 0)

    def npu_gmm_v2(
        x: Tensor, weight: Tensor, *, bias: Any = None, group_list: Any = None, group_type: int = 0
    ) -> Tensor:
        return grouped(x, weight, bias, group_list, group_type, 1)

    return [npu_gmm, npu_gmm_v2]


def _permute(functions: Mapping[str, Any]) -> list[Callable[..., Any]]:
    return [functions["npu_moe_token_permute"]]


def _unpermute(functions: Mapping[str, Any]) -> list[Callable[..., Any]]:
    return [functions["npu_moe_token_unpermute"]]


def _grouped(functions: Mapping[str, Any]) -> list[Callable[..., Any]]:
    return [functions["npu_grouped_matmul"]]


def _added(functions: Mapping[str, Any]) -> list[Callable[..., Any]]:
    def npu_matmul_add_fp32(total_input: Tensor, grad_output: Tensor, grad: Tensor) -> None:
        grad.add_((grad_output.float().mT @ total_input.float()).view_as(grad))

    return [npu_matmul_add_fp32]


def _groups_added(functions: Mapping[str, Any]) -> list[Callable[..., Any]]:
    def npu_groupmatmul_add_fp32(x: Tensor, dy: Tensor, grouplist: Tensor, grad: Tensor) -> None:
        ends = [int(end) for end in grouplist]
        into = grad.view(len(ends), x.shape[-1], dy.shape[-1])
        for group, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            into[group] += x[start:end].float().mT @ dy[start:end].float()

    return [npu_groupmatmul_add_fp32]


_MINDSPEED: dict[str, Callable[[Mapping[str, Any]], list[Callable[..., Any]]]] = {
    "npu_ring_attention_update": _ring,
    "fusion_attention_v2": _attention,
    "npu_rotary_position_embedding": _rotary,
    "gmm": _gmm,
    "grouped_matmul": _grouped,
    "npu_moe_token_permute": _permute,
    "npu_moe_token_unpermute": _unpermute,
    "npu_matmul_add": _added,
    "npu_groupmatmul_add": _groups_added,
}

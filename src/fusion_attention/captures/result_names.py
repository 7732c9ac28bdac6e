"""The names of the results of functions whose calls capture() saves."""

from fusion_attention.contract import Op

FORWARD = ("attention_out", "softmax_max", "softmax_sum", "softmax_out", "seed", "offset", "numels")
BACKWARD = ("dq", "dk", "dv", "dq_rope", "dk_rope", "dpse", "dsink")
# Results of torch_npu's functions, by the function's name, or by the suffix after npu_fusion_attention.
_RETURNS: dict[str, tuple[str, ...]] = {
    "_grad": ("dq", "dk", "dv", "dpse", "dsink"),
    "_grad_v2": ("dq", "dk", "dv", "dpse", "dq_rope", "dk_rope", "dsink"),
    "_grad_v3": ("dq", "dk", "dv", "dpse", "dsink"),
    "npu_incre_flash_attention": ("attention_out",),
}


def returned(op: Op) -> tuple[str, ...]:
    """Returns the names of the results, in order, of the torch_npu function that an operator definition describes."""
    kind = op.name.removeprefix("npu_fusion_attention")
    return _RETURNS.get(kind, FORWARD) if kind != op.name else op.results

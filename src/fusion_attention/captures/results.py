"""Names of the results of functions whose calls capture() saves."""

from fusion_attention.contract import Op

FORWARD = ("attention_out", "softmax_max", "softmax_sum", "softmax_out", "seed", "offset", "numels")
BACKWARD = ("dq", "dk", "dv", "dq_rope", "dk_rope", "dpse", "dsink")
# The results of torch_npu's functions, by name or by suffix of npu_fusion_attention.
_RETURNS: dict[str, tuple[str, ...]] = {
    "_grad": ("dq", "dk", "dv", "dpse", "dsink"),
    "_grad_v2": ("dq", "dk", "dv", "dpse", "dq_rope", "dk_rope", "dsink"),
    "_grad_v3": ("dq", "dk", "dv", "dpse", "dsink"),
    "npu_incre_flash_attention": ("attention_out",),
}


def returned(op: Op) -> tuple[str, ...]:
    """Returns the names of a function's results, in order; they are names of its operator definition."""
    kind = op.name.removeprefix("npu_fusion_attention")
    return _RETURNS.get(kind, FORWARD) if kind != op.name else op.results

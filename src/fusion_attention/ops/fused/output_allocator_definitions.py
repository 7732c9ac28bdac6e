"""Operator definitions, without rules, of torch_npu's functions that allocate the results of its fused attention."""

from typing import Any

from fusion_attention.contract import Op
from fusion_attention.ops.fused.definitions import TORCH_V1, TORCH_V2


def _allocator(op: Op, *names: str, **more: Any) -> Op:
    """Returns the definition of a function that only allocates op's results; names: parameters they depend on."""
    name, params = f"_{op.name}_infer_output", tuple(op.by_name[name] for name in names)
    summary = f"Allocates the results of {op.name}, for its `.out` overload; computes nothing."
    returned = "(attention_out, softmax_lse), not initialised."
    return op.version(
        name,
        summary,
        params=params,
        keywords=params[2].shown,
        rules=(),
        lower=None,
        formula="",
        returns=returned,
        **more,
    )


ALLOCATOR_V1 = _allocator(
    TORCH_V1,
    *("query", "value", "input_layout", "quant_scale2", "block_table", "num_heads", "num_key_value_heads"),
    *("softmax_lse_flag", "query_rope"),
    example="""\
>>> out, lse = _npu_fused_infer_attention_score_infer_output(torch.zeros(2, 3, 256), torch.zeros(2, 9, 64),
...     num_heads=4, num_key_value_heads=1)
>>> list(out.shape), list(lse.shape)
([2, 3, 256], [0])""",
)
ALLOCATOR_V2 = _allocator(
    TORCH_V2,
    *("query", "value", "query_dtype", "value_dtype", "input_layout", "quant_scale2", "block_table", "num_heads"),
    *("num_key_value_heads", "softmax_lse_flag", "query_rope", "out_dtype"),
    example="""\
>>> rows = torch.zeros(5, 4, 64)
>>> out, lse = _npu_fused_infer_attention_score_v2_infer_output(rows, rows, input_layout="TND",
...     num_query_heads=4, return_softmax_lse=True)
>>> list(out.shape), list(lse.shape)
([5, 4, 64], [5, 4, 1])""",
)

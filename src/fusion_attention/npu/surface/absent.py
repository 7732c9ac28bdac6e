"""Names that torch_npu, or another package of the chip, has and this library does not: what to use instead.

Knows names alone. Refuses to know what is there (modules.py).
"""

from __future__ import annotations

import re

PAGE = "docs/ascend_code.md"
LIST = "`fusion-attention npu` lists what is there"

# The first pattern that fits the last part of a name, or the name behind its package, speaks.
_CHIP = "MX and float8 formats are the chip's alone; npu_dynamic_quant (int8) is here"
_INSTEAD = (
    (r"npu_.*mx_quant.*|npu_\w+_mx|npu_dtype_cast|.*(e4m3|e5m2|hifloat8|hif8).*", _CHIP),
    (r"npu_quant_flash_attn.*|npu_grouped_dynamic_.*quant.*", _CHIP),
    (r"npu_moe_distribute_.*|npu_.*all_?to_?all.*", "torch.distributed.all_to_all_single and npu_moe_token_permute"),
    (r"npu_(mm_reduce_scatter|all_gather)_base.*", "torch.matmul beside torch.distributed's collective"),
    (r"npu_mm_all_reduce.*", "torch.matmul beside torch.distributed.all_reduce"),
    (r".*(gated_delta|_gdn|recompute_w_u|causal_conv1d|kda).*", "the model's own torch path (linear attention)"),
    (r"npu_mla_prolog.*", "torch.matmul, npu_rms_norm, npu_interleave_rope, npu_kv_rmsnorm_rope_cache"),
    (r"npu_nsa_.*|npu_block_sparse_attention.*", "fusion_attention.attention, fusion_attention.sparse_attention"),
    (r"npu_(weight_quant_batchmatmul|dequant_.*|anti_quant|quantize|quant_.*)", "npu_dynamic_quant, npu_quant_matmul"),
    (r"sparse_flash_mla.*|flash_attn.*|compressor.*|.*_metadata", "fusion_attention.sparse_attention"),
    (r"Npu\w*(Adam|AdamW|SGD|Lamb|RMSprop\w*|Adadelta)|optim", "torch.optim's own"),
    (r"dynamo|torchair|npugraph_ex.*|inductor.*", "torch.compile without a back end of the chip"),
    (r"(contrib\.)?(function|module)", "torch.nn, and torch_npu's functions"),
    (r"dynamic_profile", "torch_npu.profiler.profile"),
    (
        r"MemPool|use_mem_pool|\w+_allocator|NPUPluggableAllocator|memory_snapshot\w*",
        "nothing: the host's allocator serves",
    ),
    (r"(stop|restart)_device|check_uce\w*|stress_detect|\w*(recover|silent)\w*", "nothing: no chip here could fail"),
)


def instead(name: str) -> str | None:
    """What serves in place of a name that is not there; None where nothing is known of it."""
    last = name.rpartition(".")[2]
    behind = name.partition(".")[2]
    for pattern, sentence in _INSTEAD:
        if re.fullmatch(pattern, last) or re.fullmatch(pattern, behind):
            return sentence
    return None

"""Advice on replacements for names of torch_npu, or of another package for Ascend NPUs, that this library lacks."""

import re

PAGE = "docs/ascend_code.md"
LIST = "`fusion-attention npu` lists what is there"

# (pattern, advice): the first pattern applies that matches the name without its package, or the last part of the name.
_CHIP = "MX and float8 formats are the chip's alone; npu_dynamic_quant (int8) is here"
_INTEGERS = "npu_dynamic_quant, npu_quant_matmul"
_INSTEAD = (
    (r"npu_.*mx_quant.*|npu_\w+_mx|npu_dtype_cast|.*(e4m3|e5m2|hifloat8|hif8).*", _CHIP),
    (r"npu_quant_flash_attn.*|npu_grouped_dynamic_.*quant.*", _CHIP),
    (r"npu_moe_distribute_.*|npu_.*all_?to_?all.*", "torch.distributed.all_to_all_single and npu_moe_token_permute"),
    (r"npu_(mm_reduce_scatter|all_gather)_base.*", "torch.matmul beside torch.distributed's collective"),
    (r"npu_mm_all_reduce.*", "torch.matmul beside torch.distributed.all_reduce"),
    (r".*(gated_delta|_gdn|recompute_w_u|causal_conv1d|kda).*", "the model's own torch path (linear attention)"),
    (r"npu_nsa_.*", "fusion_attention.attention, fusion_attention.sparse_attention"),
    (r"npu_(add_)?rms_norm_\w*(quant|cast)\w*", "npu_add_rms_norm, npu_rms_norm, then npu_dynamic_quant"),
    (r"npu_\w*swiglu_\w*quant\w*", "npu_swiglu, then npu_dynamic_quant"),
    (
        r"npu_\w*(rope|scatter)_\w*quant\w*|npu_quant_scatter\w*",
        "npu_interleave_rope, npu_scatter_pa_kv_cache of floats",
    ),
    (r"npu_(weight_quant_\w+|dequant_\w+|anti_quant|quant_\w+|group_quant|add_quant_matmul_?)", _INTEGERS),
    (r"npu_(ifmr|dynamic_quant_\w+|dynamic_block_quant)", _INTEGERS),
    (
        r"npu_(flash_attention\w*|multi_head_attention\w*|fused_attention_\w+|advance_step_\w+|attn_softmax\w*)",
        "npu_fusion_attention",
    ),
    (r"npu_moe_(compute_expert_tokens|re_routing|eplb_\w+)", "npu_moe_init_routing_v2, torch.bincount"),
    (r"npu_ffn|npu_batch_gather_matmul|npu_fused_matmul", "npu_grouped_matmul, torch.matmul"),
    (r"npu_(scatter|scatter_list|indexing)_?|scatter_update_?", "npu_scatter_nd_update"),
    (r"npu_change_data_ptr", "npu_format_cast"),
    (r"npu_(bert_)?apply_(adam\w*|sgd)|npu_(stride|our)_\w+|npu_hans_\w+", "torch.optim's own"),
    (r"npu_\w*float_status|npu_check_\w+", "torch.isfinite, torch_npu.npu.utils.npu_check_overflow"),
    (r"npu_(linear\w*|bmmV2|bmm_v2\w*)", "torch.nn.functional.linear, torch.matmul"),
    (
        r"npu_(silu|mish|hardswish|softmax_cross_entropy_with_logits|one_hot|pad|layer_norm\w*)\w*",
        "torch.nn.functional",
    ),
    (r"npu_(group_norm|deep_norm|dropout|normalize)\w*|_?npu_dropout\w*|dropout_\w+", "torch.nn.functional"),
    (r"npu_(quant_)?conv\w*|npu_deformable_\w+", "torch.nn.functional.conv2d"),
    (r"npu_(lstm|gru)\w*", "torch.nn.LSTM, torch.nn.GRU"),
    (r"npu_(transpose|reshape|broadcast|slice|max|min|sort_v2|masked_fill_range)\w*", "torch's own of that name"),
    (r"npu_top_k_top_p\w*", "torch.topk, torch.softmax"),
    (
        r"npu_(\w*iou|nms\w*|batch_nms|\w*roi\w*|\w*box\w*|anchor\w*|grid_assign\w*|sub_sample|yolo\w*)",
        "torchvision.ops",
    ),
    (r"npu_prefetch|npu_sim_\w+|npu_set_\w+|matmul_checksum", "nothing: it changes no result"),
    (r"(Float|Double|Half|BFloat16|Byte|Char|Short|Int|Long|Bool)Tensor", 'torch.tensor(..., dtype=..., device="npu")'),
    (r"empty_with_format|empty_with_swapped_memory|npu_empty_\w+", "torch.empty"),
    (r"compressor.*", "cann_ops_transformer.compressor"),
    (r"flash_attn.*|.*_metadata", "fusion_attention.sparse_attention"),
    (r"Npu\w*(Adam|AdamW|SGD|Lamb|RMSprop\w*|Adadelta)|optim", "torch.optim's own"),
    (r"dynamo|inductor.*", "torch.compile without a back end of the chip, or torchair's"),
    (r"(contrib\.)?(function|module)", "torch.nn, and torch_npu's functions"),
    (r"dynamic_profile", "torch_npu.profiler.profile"),
    (
        r"MemPool|use_mem_pool|\w+_allocator|NPUPluggableAllocator|memory_snapshot\w*",
        "nothing: the host's allocator serves",
    ),
    (r"(stop|restart)_device|check_uce\w*|stress_detect|\w*(recover|silent)\w*", "nothing: no chip here could fail"),
)


def instead(name: str) -> str | None:
    """Returns advice on a replacement for a name of torch_npu that this library lacks; None if there is none."""
    last = name.rpartition(".")[2]
    behind = name.partition(".")[2]
    for pattern, sentence in _INSTEAD:
        if re.fullmatch(pattern, last) or re.fullmatch(pattern, behind):
            return sentence
    return None

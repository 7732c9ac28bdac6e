"""Contains counts of calls of each torch_npu function in thirteen public repositories.

Python files outside tests and benchmarks, torch_npu.* and torch.ops.npu.* together. Functions with one call or two, and
those that belong to one family of formats, stand under the family's name.
"""

# Functions of each row, and their calls.
EVERYWHERE: tuple[tuple[str, int], ...] = (
    ("npu_rms_norm", 76),
    ("npu_rms_norm_backward", 4),
    ("npu_swiglu", 64),
    ("npu_swiglu_backward", 4),
    ("npu_grouped_matmul", 116),
    ("npu_rotary_mul", 83),
    ("npu_moe_token_unpermute", 30),
    ("npu_moe_token_permute", 25),
    ("npu_quant_matmul", 51),
    ("npu_dynamic_quant", 53),
    ("npu_dynamic_mx_quant", 78),
    ("npu_fused_infer_attention_score", 40),
    ("npu_fused_infer_attention_score_v2", 11),
    ("npu_moe_init_routing_v2", 19),
    ("npu_mm_reduce_scatter_base npu_all_gather_base_mm", 33),
    ("npu_moe_finalize_routing", 15),
    ("npu_moe_distribute_dispatch_v2 npu_moe_distribute_combine_v2", 18),
    ("npu_chunk_gated_delta_rule_fwd_h npu_recompute_w_u_fwd", 40),
    ("npu_format_cast", 41),
    ("npu_interleave_rope", 16),
    ("npu_kv_rmsnorm_rope_cache", 13),
    ("npu_add_rms_norm", 9),
    ("npu_mrope", 5),
    ("npu_moe_gating_top_k npu_moe_gating_top_k_softmax", 6),
    ("npu_apply_rotary_pos_emb", 8),
    ("npu_scatter_nd_update_", 6),
    ("npu_gelu npu_geglu npu_confusion_transpose npu_scaled_masked_softmax", 21),
    ("npu_scatter_pa_kv_cache npu_gather_pa_kv_cache", 11),
    ("npu_transpose_batchmatmul", 5),
    ("_npu_paged_attention _npu_flash_attention", 16),
    ("npu_attention_update npu_ring_attention_update", 8),
    ("npu_mla_prolog_v3 npu_kv_quant_sparse_flash_attention npu_quant_lightning_indexer", 10),
    ("npu_fusion_attention", 82),
    ("npu_fusion_attention_grad", 26),
    ("npu_lightning_indexer", 11),
    ("npu_sparse_flash_attention", 4),
    ("npu_sparse_lightning_indexer_grad_kl_loss", 2),
)
ALL_CALLS = 1197  # those of rarer functions too

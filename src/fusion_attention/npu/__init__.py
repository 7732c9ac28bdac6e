"""torch_npu's names: its functions, and install(), which makes them the module `torch_npu`."""

from fusion_attention.npu.auxiliary.atb import (
    _npu_flash_attention,
    _npu_flash_attention_qlens,
    _npu_flash_attention_unpad,
    _npu_flash_attention_unpad_v2,
    _npu_flash_attention_v3,
    _npu_paged_attention,
    _npu_paged_attention_get_workspace,
    _npu_paged_attention_mla,
    _npu_paged_attention_splitfuse,
    _npu_paged_attention_splitfuse_v2,
)
from fusion_attention.npu.auxiliary.atb_rows import (
    _npu_reshape_and_cache,
    _npu_reshape_and_cache_siso,
    _npu_rotary_embedding,
)
from fusion_attention.npu.auxiliary.caches import (
    npu_gather_pa_kv_cache,
    npu_kv_rmsnorm_rope_cache,
    npu_scatter_nd_update,
    npu_scatter_nd_update_,
    npu_scatter_pa_kv_cache,
)
from fusion_attention.npu.auxiliary.experts import (
    npu_moe_token_permute,
    npu_moe_token_permute_grad,
    npu_moe_token_permute_with_routing_map,
    npu_moe_token_unpermute,
    npu_moe_token_unpermute_grad,
    npu_moe_token_unpermute_with_routing_map,
)
from fusion_attention.npu.auxiliary.gates import (
    npu_fast_gelu,
    npu_fast_gelu_backward,
    npu_geglu,
    npu_geglu_grad,
    npu_gelu,
    npu_gelu_backward,
    npu_swiglu,
    npu_swiglu_backward,
)
from fusion_attention.npu.auxiliary.losses import npu_cross_entropy_loss, npu_cross_entropy_loss_backward
from fusion_attention.npu.auxiliary.norms import (
    npu_add_rms_norm,
    npu_gemma_rms_norm,
    npu_rms_norm,
    npu_rms_norm_backward,
)
from fusion_attention.npu.auxiliary.products import npu_grouped_matmul
from fusion_attention.npu.auxiliary.prolog import npu_mla_prolog, npu_mla_prolog_v2, npu_mla_prolog_v3
from fusion_attention.npu.auxiliary.quantised import (
    npu_convert_weight_to_int4pack,
    npu_dynamic_quant,
    npu_quant_matmul,
    npu_quantize,
    npu_trans_quant_param,
)
from fusion_attention.npu.auxiliary.quantised_sparse import (
    npu_kv_quant_sparse_flash_attention,
    npu_quant_lightning_indexer,
)
from fusion_attention.npu.auxiliary.rotary import (
    npu_apply_rotary_pos_emb,
    npu_interleave_rope,
    npu_mrope,
    npu_rotary_mul,
    npu_rotary_mul_backward,
)
from fusion_attention.npu.auxiliary.routing import (
    npu_moe_finalize_routing,
    npu_moe_gating_top_k,
    npu_moe_gating_top_k_softmax,
    npu_moe_init_routing_v2,
)
from fusion_attention.npu.auxiliary.shapes import (
    get_npu_format,
    npu_confusion_transpose,
    npu_confusion_transpose_backward,
    npu_format_cast,
    npu_format_cast_,
    npu_transpose_batchmatmul,
)
from fusion_attention.npu.auxiliary.softmax import npu_scaled_masked_softmax, npu_scaled_masked_softmax_backward
from fusion_attention.npu.dropout import _npu_dropout_gen_mask
from fusion_attention.npu.fused_inference import (
    _npu_fused_infer_attention_score_get_max_workspace,
    _npu_fused_infer_attention_score_infer_output,
    _npu_fused_infer_attention_score_v2_get_max_workspace,
    _npu_fused_infer_attention_score_v2_infer_output,
    npu_fused_infer_attention_score,
    npu_fused_infer_attention_score_v2,
    npu_prompt_flash_attention,
)
from fusion_attention.npu.indexer_loss import (
    npu_dense_lightning_indexer_grad_kl_loss,
    npu_dense_lightning_indexer_softmax_lse,
    npu_sparse_lightning_indexer_grad_kl_loss,
)
from fusion_attention.npu.inference import npu_incre_flash_attention
from fusion_attention.npu.install import install, uninstall
from fusion_attention.npu.merging import npu_attention_update, npu_ring_attention_update
from fusion_attention.npu.sparse import (
    npu_lightning_indexer,
    npu_lightning_indexer_grad,
    npu_sparse_flash_attention,
    npu_sparse_flash_attention_grad,
)
from fusion_attention.npu.training import (
    npu_fusion_attention,
    npu_fusion_attention_grad,
    npu_fusion_attention_grad_v2,
    npu_fusion_attention_grad_v3,
    npu_fusion_attention_v2,
    npu_fusion_attention_v3,
)
from fusion_attention.settings import strict

__all__ = [
    "_npu_dropout_gen_mask",
    "_npu_flash_attention",
    "_npu_flash_attention_qlens",
    "_npu_flash_attention_unpad",
    "_npu_flash_attention_unpad_v2",
    "_npu_flash_attention_v3",
    "_npu_fused_infer_attention_score_get_max_workspace",
    "_npu_fused_infer_attention_score_infer_output",
    "_npu_fused_infer_attention_score_v2_get_max_workspace",
    "_npu_fused_infer_attention_score_v2_infer_output",
    "_npu_paged_attention",
    "_npu_paged_attention_get_workspace",
    "_npu_paged_attention_mla",
    "_npu_paged_attention_splitfuse",
    "_npu_paged_attention_splitfuse_v2",
    "_npu_reshape_and_cache",
    "_npu_reshape_and_cache_siso",
    "_npu_rotary_embedding",
    "get_npu_format",
    "install",
    "npu_add_rms_norm",
    "npu_apply_rotary_pos_emb",
    "npu_attention_update",
    "npu_confusion_transpose",
    "npu_confusion_transpose_backward",
    "npu_convert_weight_to_int4pack",
    "npu_cross_entropy_loss",
    "npu_cross_entropy_loss_backward",
    "npu_dense_lightning_indexer_grad_kl_loss",
    "npu_dense_lightning_indexer_softmax_lse",
    "npu_dynamic_quant",
    "npu_fast_gelu",
    "npu_fast_gelu_backward",
    "npu_format_cast",
    "npu_format_cast_",
    "npu_fused_infer_attention_score",
    "npu_fused_infer_attention_score_v2",
    "npu_fusion_attention",
    "npu_fusion_attention_grad",
    "npu_fusion_attention_grad_v2",
    "npu_fusion_attention_grad_v3",
    "npu_fusion_attention_v2",
    "npu_fusion_attention_v3",
    "npu_gather_pa_kv_cache",
    "npu_geglu",
    "npu_geglu_grad",
    "npu_gelu",
    "npu_gelu_backward",
    "npu_gemma_rms_norm",
    "npu_grouped_matmul",
    "npu_incre_flash_attention",
    "npu_interleave_rope",
    "npu_kv_quant_sparse_flash_attention",
    "npu_kv_rmsnorm_rope_cache",
    "npu_lightning_indexer",
    "npu_lightning_indexer_grad",
    "npu_mla_prolog",
    "npu_mla_prolog_v2",
    "npu_mla_prolog_v3",
    "npu_moe_finalize_routing",
    "npu_moe_gating_top_k",
    "npu_moe_gating_top_k_softmax",
    "npu_moe_init_routing_v2",
    "npu_moe_token_permute",
    "npu_moe_token_permute_grad",
    "npu_moe_token_permute_with_routing_map",
    "npu_moe_token_unpermute",
    "npu_moe_token_unpermute_grad",
    "npu_moe_token_unpermute_with_routing_map",
    "npu_mrope",
    "npu_prompt_flash_attention",
    "npu_quant_lightning_indexer",
    "npu_quant_matmul",
    "npu_quantize",
    "npu_ring_attention_update",
    "npu_rms_norm",
    "npu_rms_norm_backward",
    "npu_rotary_mul",
    "npu_rotary_mul_backward",
    "npu_scaled_masked_softmax",
    "npu_scaled_masked_softmax_backward",
    "npu_scatter_nd_update",
    "npu_scatter_nd_update_",
    "npu_scatter_pa_kv_cache",
    "npu_sparse_flash_attention",
    "npu_sparse_flash_attention_grad",
    "npu_sparse_lightning_indexer_grad_kl_loss",
    "npu_swiglu",
    "npu_swiglu_backward",
    "npu_trans_quant_param",
    "npu_transpose_batchmatmul",
    "strict",
    "uninstall",
]

"""torch_npu's functions. Written by `python -m codegen`; help() and `fusion-attention ops NAME` explain them."""

from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from fusion_attention.npu.auxiliary.transposes import get_npu_format as get_npu_format
from fusion_attention.npu.dropout import _npu_dropout_gen_mask as _npu_dropout_gen_mask
from fusion_attention.npu.fused_out import WithOut
from fusion_attention.npu.install import install as install
from fusion_attention.npu.install import uninstall as uninstall
from fusion_attention.settings import strict as strict

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Some = Tensor | None
_Lengths = Sequence[int] | np.ndarray | Tensor | None

def _with_out(function: Callable[_P, _R]) -> WithOut[_P, _R]: ...

def _npu_flash_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, seq_len: Tensor, scale_value: float,
    num_heads: int, num_kv_heads: int, out: Tensor) -> None: ...
def _npu_flash_attention_qlens(query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor,
    mask: Tensor, seq_len: Tensor, context_lens: Tensor, num_kv_heads: int, num_heads: int, scale_value: float,
    out: Tensor) -> None: ...
def _npu_flash_attention_unpad(query: Tensor, key: Tensor, value: Tensor, seq_len: Tensor, scale_value: float,
    num_heads: int, num_kv_heads: int, out: Tensor) -> None: ...
def _npu_flash_attention_unpad_v2(query: Tensor, key: Tensor, value: Tensor, seq_len: Tensor, scale_value: float,
    num_heads: int, num_kv_heads: int, *, kernel_type: int | None = 0, out: Tensor) -> None: ...
def _npu_flash_attention_v3(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, seq_len: Tensor,
    scale_value: float, num_heads: int, num_kv_heads: int, *, mask_type: int | None = 3, out: Tensor) -> None: ...
def _npu_fused_infer_attention_score_get_max_workspace(query: Tensor, key: Tensor, value: Tensor, *,
    pse_shift: _Some = None, atten_mask: _Some = None, actual_seq_lengths: _Lengths = None,
    actual_seq_lengths_kv: _Lengths = None, dequant_scale1: _Some = None, quant_scale1: _Some = None,
    dequant_scale2: _Some = None, quant_scale2: _Some = None, quant_offset2: _Some = None,
    antiquant_scale: _Some = None, antiquant_offset: _Some = None, key_antiquant_scale: _Some = None,
    key_antiquant_offset: _Some = None, value_antiquant_scale: _Some = None, value_antiquant_offset: _Some = None,
    block_table: _Some = None, query_padding_size: _Lengths = None, kv_padding_size: _Lengths = None,
    key_shared_prefix: _Some = None, value_shared_prefix: _Some = None, actual_shared_prefix_len: _Lengths = None,
    query_rope: _Some = None, key_rope: _Some = None, key_rope_antiquant_scale: _Some = None, num_heads: int = 1,
    scale: float = 1.0, pre_tokens: int = 2147483647, next_tokens: int = 2147483647, input_layout: str = 'BSH',
    num_key_value_heads: int = 0, sparse_mode: int = 0, inner_precise: int = 0, block_size: int = 0,
    antiquant_mode: int = 0, key_antiquant_mode: int = 0, value_antiquant_mode: int = 0,
    softmax_lse_flag: bool = False) -> Tensor: ...
def _npu_fused_infer_attention_score_infer_output(query: Tensor, value: Tensor, *, input_layout: str = 'BSH',
    quant_scale2: _Some = None, block_table: _Some = None, num_heads: int = 1, num_key_value_heads: int = 0,
    softmax_lse_flag: bool = False, query_rope: _Some = None) -> tuple[Tensor, Tensor]: ...
def _npu_fused_infer_attention_score_v2_get_max_workspace(query: Tensor, key: Tensor, value: Tensor, *,
    query_rope: _Some = None, key_rope: _Some = None, pse_shift: _Some = None, atten_mask: _Some = None,
    actual_seq_qlen: _Lengths = None, actual_seq_kvlen: _Lengths = None, block_table: _Some = None,
    dequant_scale_query: _Some = None, dequant_scale_key: _Some = None, dequant_offset_key: _Some = None,
    dequant_scale_value: _Some = None, dequant_offset_value: _Some = None, dequant_scale_key_rope: _Some = None,
    quant_scale_out: _Some = None, quant_offset_out: _Some = None, quant_scale_p: _Some = None,
    learnable_sink: _Some = None, num_query_heads: int = 1, num_key_value_heads: int = 0, softmax_scale: float = 1.0,
    pre_tokens: int = 2147483647, next_tokens: int = 2147483647, input_layout: str = 'BSH', sparse_mode: int = 0,
    block_size: int = 0, query_quant_mode: int = 0, key_quant_mode: int = 0, value_quant_mode: int = 0,
    inner_precise: int = 0, return_softmax_lse: bool = False, query_dtype: int | None = None,
    key_dtype: int | None = None, value_dtype: int | None = None, query_rope_dtype: int | None = None,
    key_rope_dtype: int | None = None, key_shared_prefix_dtype: int | None = None,
    value_shared_prefix_dtype: int | None = None, dequant_scale_query_dtype: int | None = None,
    dequant_scale_key_dtype: int | None = None, dequant_scale_value_dtype: int | None = None,
    dequant_scale_key_rope_dtype: int | None = None, out_dtype: int | torch.dtype | None = None) -> Tensor: ...
def _npu_fused_infer_attention_score_v2_infer_output(query: Tensor, value: Tensor, *, query_dtype: int | None = None,
    value_dtype: int | None = None, input_layout: str = 'BSH', quant_scale_out: _Some = None,
    block_table: _Some = None, num_query_heads: int = 1, num_key_value_heads: int = 0,
    return_softmax_lse: bool = False, query_rope: _Some = None,
    out_dtype: int | torch.dtype | None = None) -> tuple[Tensor, Tensor]: ...
def _npu_paged_attention(query: Tensor, key_cache: Tensor, value_cache: Tensor, num_kv_heads: int, num_heads: int,
    scale_value: float, block_table: Tensor, context_lens: Tensor, out: Tensor, *,
    workspace: _Some = None) -> None: ...
def _npu_paged_attention_get_workspace(query: Tensor, key_cache: Tensor, value_cache: Tensor, num_kv_heads: int,
    num_heads: int, scale_value: float, block_table: Tensor, context_lens: Tensor, out: Tensor) -> Tensor: ...
def _npu_paged_attention_mla(query: Tensor, key_cache: Tensor, num_kv_heads: int, num_heads: int, scale_value: float,
    block_table: Tensor, context_lens: Tensor, mla_vheadsize: int, out: Tensor) -> None: ...
def _npu_paged_attention_splitfuse(query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor,
    context_lens: Tensor, mask: Tensor, seq_len: Tensor, num_kv_heads: int, num_heads: int, scale_value: float,
    out: Tensor) -> None: ...
def _npu_paged_attention_splitfuse_v2(query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor,
    context_lens: Tensor, mask: Tensor, seq_len: Tensor, num_kv_heads: int, num_heads: int, scale_value: float, *,
    mask_type: int | None = 5, out: Tensor) -> None: ...
def _npu_reshape_and_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor,
    slot_indices: Tensor) -> None: ...
def _npu_reshape_and_cache_siso(key: Tensor, key_cache: Tensor, slot_indices: Tensor) -> None: ...
def _npu_rotary_embedding(positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor,
    is_neox_style: bool) -> None: ...
def npu_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor,
    epsilon: float = 1e-06) -> tuple[Tensor, Tensor, Tensor]: ...
def npu_apply_rotary_pos_emb(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str = 'BSND',
    rotary_mode: str = 'half') -> tuple[Tensor, Tensor]: ...
def npu_attention_update(lse: Sequence[Tensor], local_out: Sequence[Tensor],
    update_type: int) -> tuple[Tensor, Tensor | None]: ...
def npu_block_sparse_attention(query: Tensor, key: Tensor, value: Tensor, block_sparse_mask: Tensor,
    block_shape: Sequence[int] | np.ndarray | Tensor, *, q_input_layout: str = 'TND', kv_input_layout: str = 'TND',
    num_key_value_heads: int = 1, scale_value: float = 0.0, inner_precise: int = 1,
    actual_seq_lengths: _Lengths = None, actual_seq_lengths_kv: _Lengths = None,
    softmax_lse_flag: int = 0) -> tuple[Tensor, Tensor]: ...
def npu_block_sparse_attention_backward(d_out: Tensor, query: Tensor, key: Tensor, value: Tensor,
    attention_out: Tensor, softmax_lse: Tensor, block_sparse_mask: Tensor, block_shape: _Lengths = None,
    actual_seq_lengths: _Lengths = None, actual_seq_lengths_kv: _Lengths = None, q_input_layout: str = 'TND',
    kv_input_layout: str = 'TND', num_key_value_heads: int = 1,
    scale_value: float = 0.0) -> tuple[Tensor, Tensor, Tensor]: ...
def npu_confusion_transpose(input: Tensor, perm: Sequence[int], shape: Sequence[int],
    transpose_first: bool) -> Tensor: ...
def npu_confusion_transpose_backward(grad: Tensor, perm: Sequence[int], shape: Sequence[int],
    transpose_first: bool) -> Tensor: ...
def npu_convert_weight_to_int4pack(weight: Tensor, inner_k_tiles: int = 0) -> Tensor: ...
def npu_cross_entropy_loss(input: Tensor, target: Tensor, weight: _Some = None, reduction: str = 'mean',
    ignore_index: int = -100, label_smoothing: float = 0.0, lse_square_scale_for_zloss: float = 0.0,
    return_zloss: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...
def npu_cross_entropy_loss_backward(grad_loss: Tensor, log_prob: Tensor, target: Tensor, weight: _Some = None,
    grad_zloss: _Some = None, lse_for_zloss: _Some = None, reduction: str = 'mean', ignore_index: int = -100,
    label_smoothing: float = 0.0, lse_square_scale_for_zloss: float = 0.0) -> Tensor: ...
def npu_dense_lightning_indexer_grad_kl_loss(query: Tensor, key: Tensor, query_index: Tensor, key_index: Tensor,
    weights: Tensor, softmax_max: Tensor, softmax_sum: Tensor, softmax_max_index: Tensor, softmax_sum_index: Tensor,
    scale_value: float, *, query_rope: _Some = None, key_rope: _Some = None, actual_seq_qlen: _Lengths = None,
    actual_seq_klen: _Lengths = None, layout: str | None = 'BSND', sparse_mode: int | None = 3,
    pre_tokens: int | None = 9223372036854775807,
    next_tokens: int | None = 9223372036854775807) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...
def npu_dense_lightning_indexer_softmax_lse(query_index: Tensor, key_index: Tensor, weights: Tensor, *,
    actual_seq_qlen: _Lengths = None, actual_seq_klen: _Lengths = None, layout: str | None = 'BSND',
    sparse_mode: int | None = 3, pre_tokens: int | None = 9223372036854775807,
    next_tokens: int | None = 9223372036854775807) -> tuple[Tensor, Tensor]: ...
def npu_dynamic_quant(input: Tensor, *, smooth_scales: _Some = None, group_index: _Some = None,
    dst_type: int | torch.dtype | None = None, quant_mode: str = 'pertoken',
    dst_type_max: float = 0.0) -> tuple[Tensor, Tensor]: ...
def npu_fast_gelu(input: Tensor) -> Tensor: ...
def npu_fast_gelu_backward(grad: Tensor, input: Tensor) -> Tensor: ...
def npu_format_cast(input: Tensor, acl_format: int | Tensor, *, customize_dtype: int | None = None,
    input_dtype: int | None = None) -> Tensor: ...
def npu_format_cast_(input: Tensor, acl_format: int | Tensor, *, customize_dtype: int | None = None,
    input_dtype: int | None = None) -> Tensor: ...
@_with_out
def npu_fused_infer_attention_score(query: Tensor, key: Tensor, value: Tensor, *, pse_shift: _Some = None,
    atten_mask: _Some = None, actual_seq_lengths: _Lengths = None, actual_seq_lengths_kv: _Lengths = None,
    dequant_scale1: _Some = None, quant_scale1: _Some = None, dequant_scale2: _Some = None,
    quant_scale2: _Some = None, quant_offset2: _Some = None, antiquant_scale: _Some = None,
    antiquant_offset: _Some = None, key_antiquant_scale: _Some = None, key_antiquant_offset: _Some = None,
    value_antiquant_scale: _Some = None, value_antiquant_offset: _Some = None, block_table: _Some = None,
    query_padding_size: _Lengths = None, kv_padding_size: _Lengths = None, key_shared_prefix: _Some = None,
    value_shared_prefix: _Some = None, actual_shared_prefix_len: _Lengths = None, query_rope: _Some = None,
    key_rope: _Some = None, key_rope_antiquant_scale: _Some = None, num_heads: int = 1, scale: float = 1.0,
    pre_tokens: int = 2147483647, next_tokens: int = 2147483647, input_layout: str = 'BSH',
    num_key_value_heads: int = 0, sparse_mode: int = 0, inner_precise: int = 0, block_size: int = 0,
    antiquant_mode: int = 0, key_antiquant_mode: int = 0, value_antiquant_mode: int = 0,
    softmax_lse_flag: bool = False) -> tuple[Tensor, Tensor]: ...
@_with_out
def npu_fused_infer_attention_score_v2(query: Tensor, key: Tensor, value: Tensor, *, query_rope: _Some = None,
    key_rope: _Some = None, pse_shift: _Some = None, atten_mask: _Some = None, actual_seq_qlen: _Lengths = None,
    actual_seq_kvlen: _Lengths = None, block_table: _Some = None, dequant_scale_query: _Some = None,
    dequant_scale_key: _Some = None, dequant_offset_key: _Some = None, dequant_scale_value: _Some = None,
    dequant_offset_value: _Some = None, dequant_scale_key_rope: _Some = None, quant_scale_out: _Some = None,
    quant_offset_out: _Some = None, quant_scale_p: _Some = None, learnable_sink: _Some = None,
    num_query_heads: int = 1, num_key_value_heads: int = 0, softmax_scale: float = 1.0, pre_tokens: int = 2147483647,
    next_tokens: int = 2147483647, input_layout: str = 'BSH', sparse_mode: int = 0, block_size: int = 0,
    query_quant_mode: int = 0, key_quant_mode: int = 0, value_quant_mode: int = 0, inner_precise: int = 0,
    return_softmax_lse: bool = False, query_dtype: int | None = None, key_dtype: int | None = None,
    value_dtype: int | None = None, query_rope_dtype: int | None = None, key_rope_dtype: int | None = None,
    key_shared_prefix_dtype: int | None = None, value_shared_prefix_dtype: int | None = None,
    dequant_scale_query_dtype: int | None = None, dequant_scale_key_dtype: int | None = None,
    dequant_scale_value_dtype: int | None = None, dequant_scale_key_rope_dtype: int | None = None,
    out_dtype: int | torch.dtype | None = None) -> tuple[Tensor, Tensor]: ...
def npu_fusion_attention(query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str,
    pse: _Some = None, padding_mask: _Some = None, atten_mask: _Some = None, scale: float = 1.0,
    keep_prob: float = 1.0, pre_tockens: int = 2147483647, next_tockens: int = 2147483647, inner_precise: int = 0,
    prefix: _Lengths = None, actual_seq_qlen: _Lengths = None, actual_seq_kvlen: _Lengths = None,
    sparse_mode: int = 0, gen_mask_parallel: bool = True, sync: bool = False, softmax_layout: str = '',
    sink: _Some = None, dropout_mask: _Some = None, seed: int = 0,
    offset: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]: ...
def npu_fusion_attention_grad(query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int, input_layout: str,
    *, pse: _Some = None, padding_mask: _Some = None, atten_mask: _Some = None, softmax_max: _Some = None,
    softmax_sum: _Some = None, softmax_in: _Some = None, attention_in: _Some = None, scale_value: float = 1.0,
    keep_prob: float = 1.0, pre_tockens: int = 2147483647, next_tockens: int = 2147483647, inner_precise: int = 0,
    seed: int = 0, offset: int = 0, numels: int = 0, prefix: _Lengths = None, actual_seq_qlen: _Lengths = None,
    actual_seq_kvlen: _Lengths = None, sparse_mode: int = 0, gen_mask_parallel: bool = True, sync: bool = False,
    softmax_layout: str = '', sink: _Some = None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]: ...
def npu_fusion_attention_grad_v2(query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int,
    input_layout: str, *, pse: _Some = None, padding_mask: _Some = None, atten_mask: _Some = None,
    softmax_max: _Some = None, softmax_sum: _Some = None, softmax_in: _Some = None, attention_in: _Some = None,
    query_rope: _Some = None, key_rope: _Some = None, scale_value: float = 1.0, keep_prob: float = 1.0,
    pre_tokens: int = 2147483647, next_tokens: int = 2147483647, inner_precise: int = 0, seed: int = 0,
    offset: int = 0, numels: int = 0, prefix: _Lengths = None, actual_seq_qlen: _Lengths = None,
    actual_seq_kvlen: _Lengths = None, sparse_mode: int = 0, gen_mask_parallel: bool = True, sync: bool = False,
    pse_type: int = 1, q_start_idx: _Lengths = None, kv_start_idx: _Lengths = None, softmax_layout: str = '',
    sink: _Some = None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]: ...
@_with_out
def npu_fusion_attention_grad_v3(query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int,
    input_layout: str, *, pse: _Some = None, padding_mask: _Some = None, atten_mask: _Some = None,
    softmax_max: _Some = None, softmax_sum: _Some = None, softmax_in: _Some = None, attention_in: _Some = None,
    scale_value: float = 1.0, keep_prob: float = 1.0, pre_tockens: int = 2147483647, next_tockens: int = 2147483647,
    inner_precise: int = 0, seed: _Some = None, offset: _Some = None, prefix: _Lengths = None,
    actual_seq_qlen: _Lengths = None, actual_seq_kvlen: _Lengths = None, sparse_mode: int = 0,
    gen_mask_parallel: bool = True, sync: bool = False, softmax_layout: str = '',
    sink: _Some = None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]: ...
def npu_fusion_attention_v2(query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, *,
    pse: _Some = None, padding_mask: _Some = None, atten_mask: _Some = None, query_rope: _Some = None,
    key_rope: _Some = None, scale: float = 1.0, keep_prob: float = 1.0, pre_tokens: int = 2147483647,
    next_tokens: int = 2147483647, inner_precise: int = 0, prefix: _Lengths = None, actual_seq_qlen: _Lengths = None,
    actual_seq_kvlen: _Lengths = None, sparse_mode: int = 0, gen_mask_parallel: bool = True, sync: bool = False,
    pse_type: int = 1, q_start_idx: _Lengths = None, kv_start_idx: _Lengths = None, softmax_layout: str = '',
    sink: _Some = None, dropout_mask: _Some = None, seed: int = 0,
    offset: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]: ...
@_with_out
def npu_fusion_attention_v3(query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str,
    pse: _Some = None, padding_mask: _Some = None, atten_mask: _Some = None, scale: float = 1.0,
    keep_prob: float = 1.0, pre_tockens: int = 2147483647, next_tockens: int = 2147483647, inner_precise: int = 0,
    prefix: _Lengths = None, actual_seq_qlen: _Lengths = None, actual_seq_kvlen: _Lengths = None,
    sparse_mode: int = 0, gen_mask_parallel: bool = True, sync: bool = False, softmax_layout: str = '',
    sink: _Some = None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]: ...
def npu_gather_pa_kv_cache(key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, seq_lens: Tensor,
    key: Tensor, value: Tensor, *, seq_offset: _Some = None, is_seq_lens_cumsum: bool = False) -> None: ...
def npu_geglu(input: Tensor, dim: int = -1, approximate: int = 1,
    activate_left: bool = False) -> tuple[Tensor, Tensor]: ...
def npu_geglu_grad(grad_output: Tensor, input: Tensor, gelu: Tensor, dim: int = -1, approximate: int = 1,
    activate_left: bool = False) -> Tensor: ...
def npu_gelu(input: Tensor, *, approximate: str = 'none') -> Tensor: ...
def npu_gelu_backward(grad_output: Tensor, input: Tensor, *, approximate: str = 'none') -> Tensor: ...
def npu_gemma_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-06) -> tuple[Tensor, Tensor]: ...
def npu_grouped_matmul(x: Sequence[Tensor], weight: Sequence[Tensor], *, bias: Sequence[Tensor] | None = None,
    scale: Sequence[Tensor] | None = None, offset: Sequence[Tensor] | None = None,
    antiquant_scale: Sequence[Tensor] | None = None, antiquant_offset: Sequence[Tensor] | None = None,
    per_token_scale: Sequence[Tensor] | None = None, group_list: _Lengths = None,
    activation_input: Sequence[Tensor] | None = None, activation_quant_scale: Sequence[Tensor] | None = None,
    activation_quant_offset: Sequence[Tensor] | None = None, split_item: int | None = 0,
    group_type: int | None = None, group_list_type: int | None = 0, act_type: int | None = 0,
    tuning_config: Sequence[int] | None = None, output_dtype: int | torch.dtype | None = None,
    x_dtype: int | None = None, weight_dtype: int | None = None, scale_dtype: int | None = None,
    per_token_scale_dtype: int | None = None) -> list[Tensor]: ...
def npu_incre_flash_attention(query: Tensor, key: Tensor, value: Tensor, *, padding_mask: _Some = None,
    atten_mask: _Some = None, pse_shift: _Some = None, actual_seq_lengths: _Lengths = None,
    antiquant_scale: _Some = None, antiquant_offset: _Some = None, block_table: _Some = None,
    dequant_scale1: _Some = None, quant_scale1: _Some = None, dequant_scale2: _Some = None,
    quant_scale2: _Some = None, quant_offset2: _Some = None, kv_padding_size: _Lengths = None, num_heads: int = 1,
    scale_value: float = 1.0, input_layout: str = 'BSH', num_key_value_heads: int = 0, block_size: int = 0,
    inner_precise: int = 1) -> Tensor: ...
def npu_interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor: ...
def npu_kv_quant_sparse_flash_attention(query: Tensor, key: Tensor, value: Tensor, sparse_indices: Tensor,
    scale_value: float, key_quant_mode: int, value_quant_mode: int, *, key_dequant_scale: _Some = None,
    value_dequant_scale: _Some = None, block_table: _Some = None, actual_seq_lengths_query: _Lengths = None,
    actual_seq_lengths_kv: _Lengths = None, sparse_block_size: int = 1, layout_query: str = 'BSND',
    layout_kv: str = 'BSND', sparse_mode: int = 3, pre_tokens: int = 9223372036854775807,
    next_tokens: int = 9223372036854775807, attention_mode: int = 0, quant_scale_repo_mode: int = 1,
    tile_size: int = 128, rope_head_dim: int = 64, key_dtype: int | None = None, value_dtype: int | None = None,
    sinks: _Some = None) -> Tensor: ...
def npu_kv_rmsnorm_rope_cache(kv: Tensor, gamma: Tensor, cos: Tensor, sin: Tensor, index: Tensor, k_cache: Tensor,
    ckv_cache: Tensor, *, k_rope_scale: _Some = None, c_kv_scale: _Some = None, k_rope_offset: _Some = None,
    c_kv_offset: _Some = None, v: _Some = None, epsilon: float = 1e-05, cache_mode: str = 'Norm',
    is_output_kv: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...
def npu_lightning_indexer(query: Tensor, key: Tensor, weights: Tensor, *, actual_seq_lengths_query: _Lengths = None,
    actual_seq_lengths_key: _Lengths = None, block_table: _Some = None, layout_query: str = 'BSND',
    layout_key: str = 'BSND', sparse_count: int = 2048, sparse_mode: int = 3, pre_tokens: int = 9223372036854775807,
    next_tokens: int = 9223372036854775807, return_value: bool = False) -> tuple[Tensor, Tensor]: ...
def npu_lightning_indexer_grad(query: Tensor, key: Tensor, dy: Tensor, sparse_indices: Tensor, weights: Tensor,
    actual_seq_lengths_query: _Lengths = None, actual_seq_lengths_key: _Lengths = None, layout: str | None = 'BSND',
    sparse_mode: int | None = 3, pre_tokens: int | None = 9223372036854775807,
    next_tokens: int | None = 9223372036854775807) -> tuple[Tensor, Tensor, Tensor]: ...
def npu_mla_prolog(token_x: Tensor, weight_dq: Tensor, weight_uq_qr: Tensor, weight_uk: Tensor, weight_dkv_kr: Tensor,
    rmsnorm_gamma_cq: Tensor, rmsnorm_gamma_ckv: Tensor, rope_sin: Tensor, rope_cos: Tensor, cache_index: Tensor,
    kv_cache: Tensor, kr_cache: Tensor, *, dequant_scale_x: _Some = None, dequant_scale_w_dq: _Some = None,
    dequant_scale_w_uq_qr: _Some = None, dequant_scale_w_dkv_kr: _Some = None, quant_scale_ckv: _Some = None,
    quant_scale_ckr: _Some = None, smooth_scales_cq: _Some = None, rmsnorm_epsilon_cq: float = 1e-05,
    rmsnorm_epsilon_ckv: float = 1e-05, cache_mode: str = 'PA_BSND') -> tuple[Tensor, Tensor, Tensor, Tensor]: ...
def npu_mla_prolog_v2(token_x: Tensor, weight_dq: Tensor, weight_uq_qr: Tensor, weight_uk: Tensor,
    weight_dkv_kr: Tensor, rmsnorm_gamma_cq: Tensor, rmsnorm_gamma_ckv: Tensor, rope_sin: Tensor, rope_cos: Tensor,
    cache_index: Tensor, kv_cache: Tensor, kr_cache: Tensor, *, dequant_scale_x: _Some = None,
    dequant_scale_w_dq: _Some = None, dequant_scale_w_uq_qr: _Some = None, dequant_scale_w_dkv_kr: _Some = None,
    quant_scale_ckv: _Some = None, quant_scale_ckr: _Some = None, smooth_scales_cq: _Some = None,
    rmsnorm_epsilon_cq: float = 1e-05, rmsnorm_epsilon_ckv: float = 1e-05,
    cache_mode: str = 'PA_BSND') -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]: ...
def npu_mla_prolog_v3(token_x: Tensor, weight_dq: Tensor, weight_uq_qr: Tensor, weight_uk: Tensor,
    weight_dkv_kr: Tensor, rmsnorm_gamma_cq: Tensor, rmsnorm_gamma_ckv: Tensor, rope_sin: Tensor, rope_cos: Tensor,
    kv_cache: Tensor, kr_cache: Tensor, *, cache_index: _Some = None, dequant_scale_x: _Some = None,
    dequant_scale_w_dq: _Some = None, dequant_scale_w_uq_qr: _Some = None, dequant_scale_w_dkv_kr: _Some = None,
    quant_scale_ckv: _Some = None, quant_scale_ckr: _Some = None, smooth_scales_cq: _Some = None,
    actual_seq_len: _Some = None, k_nope_clip_alpha: _Some = None, rmsnorm_epsilon_cq: float = 1e-05,
    rmsnorm_epsilon_ckv: float = 1e-05, cache_mode: str = 'PA_BSND', query_norm_flag: bool = False,
    weight_quant_mode: int = 0, kv_cache_quant_mode: int = 0, query_quant_mode: int = 0, ckvkr_repo_mode: int = 0,
    quant_scale_repo_mode: int = 0, tile_size: int = 128, qc_qr_scale: float = 1.0, kc_scale: float = 1.0,
    token_x_dtype: int | None = None, weight_dq_dtype: int | None = None, weight_uq_qr_dtype: int | None = None,
    weight_dkv_kr_dtype: int | None = None,
    kv_cache_dtype: int | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]: ...
def npu_moe_finalize_routing(expanded_permuted_rows: Tensor, skip1: _Some, skip2: _Some, bias: _Some, scales: _Some,
    expanded_src_to_dst_row: Tensor, export_for_source_row: _Some, drop_pad_mode: int | None = 0,
    k: int | None = 1) -> Tensor: ...
def npu_moe_gating_top_k(x: Tensor, k: int, *, bias: _Some = None, input_ids: _Some = None, tid2eid: _Some = None,
    k_group: int = 1, group_count: int = 1, group_select_mode: int = 0, renorm: int = 0, norm_type: int = 0,
    out_flag: bool = False, routed_scaling_factor: float = 1.0,
    eps: float = 1e-20) -> tuple[Tensor, Tensor, Tensor]: ...
def npu_moe_gating_top_k_softmax(x: Tensor, finished: _Some = None, k: int = 1) -> tuple[Tensor, Tensor, Tensor]: ...
def npu_moe_init_routing_v2(x: Tensor, expert_idx: Tensor, *, scale: _Some = None, offset: _Some = None,
    active_num: int = -1, expert_capacity: int = -1, expert_num: int = -1, drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0, expert_tokens_num_flag: bool = False, quant_mode: int = -1,
    active_expert_range: Sequence[int] = (), row_idx_type: int = 0,
    x_dtype: int | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...
def npu_moe_token_permute(tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None,
    padded_mode: bool = False) -> tuple[Tensor, Tensor]: ...
def npu_moe_token_permute_grad(tokens: Tensor, grad_permuted_tokens: Tensor, indices: Tensor, sorted_indices: Tensor,
    padded_mode: bool = False) -> Tensor: ...
def npu_moe_token_permute_with_routing_map(tokens: Tensor, routing_map: Tensor, *, probs: _Some = None,
    num_out_tokens: int | None = None, drop_and_pad: bool = False) -> tuple[Tensor, Tensor | None, Tensor]: ...
def npu_moe_token_unpermute(permuted_tokens: Tensor, sorted_indices: Tensor, probs: _Some = None,
    padded_mode: bool = False, restore_shape: Sequence[int] | None = None) -> Tensor: ...
def npu_moe_token_unpermute_grad(permuted_tokens: Tensor, grad_unpermuted_tokens: Tensor, sorted_indices: Tensor,
    probs: _Some = None, padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None) -> tuple[Tensor, Tensor | None]: ...
def npu_moe_token_unpermute_with_routing_map(permuted_tokens: Tensor, sorted_indices: Tensor,
    restore_shape: Sequence[int], *, probs: _Some = None, routing_map: _Some = None,
    drop_and_pad: bool = False) -> Tensor: ...
def npu_mrope(positions: Tensor, query: Tensor, key: Tensor, cos_sin_cache: Tensor, head_size: int, *,
    mrope_section: Sequence[int] | None = None, rotary_mode: str | None = 'half',
    cache_mode: str | None = 'default') -> tuple[Tensor, Tensor]: ...
def npu_prompt_flash_attention(query: Tensor, key: Tensor, value: Tensor, *, padding_mask: _Some = None,
    atten_mask: _Some = None, pse_shift: _Some = None, actual_seq_lengths: _Lengths = None, deq_scale1: _Some = None,
    quant_scale1: _Some = None, deq_scale2: _Some = None, quant_scale2: _Some = None, quant_offset2: _Some = None,
    num_heads: int = 1, scale_value: float = 1.0, pre_tokens: int = 2147483647, next_tokens: int = 0,
    input_layout: str = 'BSH', num_key_value_heads: int = 0, actual_seq_lengths_kv: _Lengths = None,
    sparse_mode: int = 0) -> Tensor: ...
def npu_quant_lightning_indexer(query: Tensor, key: Tensor, weights: Tensor, query_dequant_scale: Tensor,
    key_dequant_scale: Tensor, query_quant_mode: int, key_quant_mode: int, *,
    actual_seq_lengths_query: _Lengths = None, actual_seq_lengths_key: _Lengths = None, block_table: _Some = None,
    layout_query: str = 'BSND', layout_key: str = 'BSND', sparse_count: int = 2048, sparse_mode: int = 3,
    pre_tokens: int = 9223372036854775807, next_tokens: int = 9223372036854775807, query_dtype: int | None = None,
    key_dtype: int | None = None) -> Tensor: ...
def npu_quant_matmul(x1: Tensor, x2: Tensor, scale: Tensor, *, offset: _Some = None, pertoken_scale: _Some = None,
    bias: _Some = None, output_dtype: int | torch.dtype | None = None, x1_dtype: int | None = None,
    x2_dtype: int | None = None, pertoken_scale_dtype: int | None = None, scale_dtype: int | None = None,
    group_sizes: Sequence[int] | None = None, y_scale: _Some = None) -> Tensor: ...
def npu_quantize(input: Tensor, scales: Tensor, zero_points: _Some, dtype: torch.dtype | int, axis: int = 1,
    div_mode: bool = True) -> Tensor: ...
def npu_ring_attention_update(prev_attn_out: Tensor, prev_softmax_max: Tensor, prev_softmax_sum: Tensor,
    cur_attn_out: Tensor, cur_softmax_max: Tensor, cur_softmax_sum: Tensor, *, actual_seq_qlen: _Lengths = None,
    input_layout: str = 'SBH', input_softmax_layout: str = '') -> tuple[Tensor, Tensor, Tensor]: ...
def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-06) -> tuple[Tensor, Tensor]: ...
def npu_rms_norm_backward(dy: Tensor, input: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]: ...
def npu_rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = 'half',
    rotate: _Some = None) -> Tensor: ...
def npu_rotary_mul_backward(grad: Tensor, input: Tensor, r1: Tensor, r2: Tensor,
    rotary_mode: str = 'half') -> tuple[Tensor, Tensor, Tensor]: ...
def npu_scaled_masked_softmax(x: Tensor, mask: Tensor, scale: float = 1, fixed_triu_mask: bool = False) -> Tensor: ...
def npu_scaled_masked_softmax_backward(y_grad: Tensor, y: Tensor, mask: Tensor, scale: float,
    fixed_triu_mask: bool) -> Tensor: ...
def npu_scatter_nd_update(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor: ...
def npu_scatter_nd_update_(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor: ...
def npu_scatter_pa_kv_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor,
    *, compress_lens: _Some = None, compress_seq_offsets: _Some = None, seq_lens: _Some = None,
    cache_mode: str | None = 'PA_NZ') -> None: ...
def npu_sparse_flash_attention(query: Tensor, key: Tensor, value: _Some, sparse_indices: Tensor, scale_value: float,
    *, block_table: _Some = None, actual_seq_lengths_query: _Lengths = None, actual_seq_lengths_kv: _Lengths = None,
    query_rope: _Some = None, key_rope: _Some = None, sparse_block_size: int = 1, layout_query: str = 'BSND',
    layout_kv: str = 'BSND', sparse_mode: int = 3, pre_tokens: int = 9223372036854775807,
    next_tokens: int = 9223372036854775807, attention_mode: int = 0, return_softmax_lse: bool = False,
    sinks: _Some = None) -> tuple[Tensor, Tensor, Tensor]: ...
def npu_sparse_flash_attention_grad(query: Tensor, key: Tensor, value: _Some, sparse_indices: Tensor, d_out: Tensor,
    out: Tensor, softmax_max: Tensor, softmax_sum: Tensor, scale_value: float, sparse_block_size: int,
    query_rope: _Some = None, key_rope: _Some = None, actual_seq_qlen: _Lengths = None,
    actual_seq_kvlen: _Lengths = None, layout: str | None = 'BSND', sparse_mode: int | None = 3,
    pre_tokens: int | None = 9223372036854775807, next_tokens: int | None = 9223372036854775807,
    attention_mode: int | None = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]: ...
def npu_sparse_lightning_indexer_grad_kl_loss(query: Tensor, key: Tensor, query_index: Tensor, key_index: Tensor,
    weights: Tensor, sparse_indices: Tensor, softmax_max: Tensor, softmax_sum: Tensor, scale_value: float, *,
    query_rope: _Some = None, key_rope: _Some = None, actual_seq_qlen: _Lengths = None,
    actual_seq_klen: _Lengths = None, layout: str | None = 'BSND', sparse_mode: int | None = 3,
    pre_tokens: int | None = 9223372036854775807, next_tokens: int | None = 9223372036854775807,
    sinks: _Some = None) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...
def npu_swiglu(input: Tensor, dim: int = -1) -> Tensor: ...
def npu_swiglu_backward(grad_output: Tensor, input: Tensor, dim: int = -1) -> Tensor: ...
def npu_trans_quant_param(scale: Tensor, offset: _Some = None, round_mode: int | None = 0) -> Tensor: ...
def npu_transpose_batchmatmul(input: Tensor, weight: Tensor, *, bias: _Some = None, scale: _Some = None,
    perm_x1: Sequence[int] | None = None, perm_x2: Sequence[int] | None = None, perm_y: Sequence[int] | None = None,
    batch_split_factor: int | None = 1) -> Tensor: ...

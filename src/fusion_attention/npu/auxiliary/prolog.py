"""torch_npu's start of multi-head latent attention, in torch's own operators.

Products are rounded to the dtype of the rows, as on the chip; norms and turns are float32 inside.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch

from fusion_attention.contract import Op
from fusion_attention.npu.auxiliary.caches import store
from fusion_attention.npu.auxiliary.call import as_given, checked
from fusion_attention.npu.auxiliary.norms import normalised
from fusion_attention.npu.auxiliary.rotary import npu_interleave_rope
from fusion_attention.ops.auxiliary import prolog

__all__ = ["npu_mla_prolog", "npu_mla_prolog_v2", "npu_mla_prolog_v3"]

Tensor = torch.Tensor


def npu_mla_prolog(
    token_x: Tensor,
    weight_dq: Tensor,
    weight_uq_qr: Tensor,
    weight_uk: Tensor,
    weight_dkv_kr: Tensor,
    rmsnorm_gamma_cq: Tensor,
    rmsnorm_gamma_ckv: Tensor,
    rope_sin: Tensor,
    rope_cos: Tensor,
    cache_index: Tensor,
    kv_cache: Annotated[Tensor, "a!"],
    kr_cache: Annotated[Tensor, "b!"],
    *,
    dequant_scale_x: Tensor | None = None,
    dequant_scale_w_dq: Tensor | None = None,
    dequant_scale_w_uq_qr: Tensor | None = None,
    dequant_scale_w_dkv_kr: Tensor | None = None,
    quant_scale_ckv: Tensor | None = None,
    quant_scale_ckr: Tensor | None = None,
    smooth_scales_cq: Tensor | None = None,
    rmsnorm_epsilon_cq: float = 1e-05,
    rmsnorm_epsilon_ckv: float = 1e-05,
    cache_mode: str = "PA_BSND",
) -> tuple[Tensor, Tensor, Annotated[Tensor, "a!"], Annotated[Tensor, "b!"]]:
    """Rows to queries in the key's latent, and their own latent and rope part to the caches, in place.

    cq = x W_dq / rms(x W_dq) * gamma_cq,  u = cq W_uq_qr
    query = u[:D] W_uk,  query_rope = rope(u[D:]),  of every head
    kv = x W_dkv_kr;  kv_cache[index] = kv[:Ckv] / rms(kv[:Ckv]) * gamma_ckv,  kr_cache[index] = rope(kv[Ckv:])

    Args:
        token_x: [T, H] or [B, S, H]; bfloat16, float16 or float32, and all others in its dtype.
        weight_dq: [H, Cq]. weight_uq_qr: [Cq, N1 * (D + Dr)]. weight_uk: [N1, D, Ckv]. weight_dkv_kr: [H, Ckv + Dr].
        rmsnorm_gamma_cq, rmsnorm_gamma_ckv: [Cq], [Ckv].
        rope_sin, rope_cos: [T, Dr] or [B, S, Dr], of the elements as npu_interleave_rope leaves them.
        cache_index: [T] or [B, S]: page * slots + slot; below 0 nothing is stored.
        kv_cache, kr_cache: [pages, slots, 1, Ckv], [pages, slots, 1, Dr]; written.
        rmsnorm_epsilon_cq, rmsnorm_epsilon_ckv: added to the mean squares.
        cache_mode: "PA_BSND": pages of whole rows; "PA_NZ": in pieces of 16 elements.
        all others: of quantised forms, which are not computed.

    Returns:
        (query [.., N1, Ckv], query_rope [.., N1, Dr], kv_cache, kr_cache).

    Raises:
        ContractError: a call that `fusion-attention ops npu_mla_prolog` does not allow. Nothing is written.

    Source: Ascend op-plugin, npu_mla_prolog.

    Example:
        >>> x, down, up, key = torch.randn(3, 12), torch.randn(12, 8), torch.randn(8, 20), torch.randn(2, 6, 16)
        >>> latent, rope = torch.zeros(4, 16, 1, 16), torch.zeros(4, 16, 1, 4)
        >>> query, query_rope, *_ = npu_mla_prolog(
        ...     x, down, up, key, torch.randn(12, 20), torch.ones(8), torch.ones(16), torch.zeros(3, 4),
        ...     torch.ones(3, 4), torch.tensor([17, 18, -1]), latent, rope)
        >>> list(query.shape), list(query_rope.shape), int(latent.any(-1).sum())
        ([3, 2, 16], [3, 2, 4], 2)
    """
    result = _prolog(prolog.V1, {
        "token_x": token_x, "weight_dq": weight_dq, "weight_uq_qr": weight_uq_qr, "weight_uk": weight_uk,
        "weight_dkv_kr": weight_dkv_kr, "rmsnorm_gamma_cq": rmsnorm_gamma_cq,
        "rmsnorm_gamma_ckv": rmsnorm_gamma_ckv, "rope_sin": rope_sin, "rope_cos": rope_cos,
        "cache_index": cache_index, "kv_cache": kv_cache, "kr_cache": kr_cache, "dequant_scale_x": dequant_scale_x,
        "dequant_scale_w_dq": dequant_scale_w_dq, "dequant_scale_w_uq_qr": dequant_scale_w_uq_qr,
        "dequant_scale_w_dkv_kr": dequant_scale_w_dkv_kr, "quant_scale_ckv": quant_scale_ckv,
        "quant_scale_ckr": quant_scale_ckr, "smooth_scales_cq": smooth_scales_cq,
        "rmsnorm_epsilon_cq": rmsnorm_epsilon_cq, "rmsnorm_epsilon_ckv": rmsnorm_epsilon_ckv,
        "cache_mode": cache_mode,
    })  # fmt: skip
    return result[0], result[1], kv_cache, kr_cache


def npu_mla_prolog_v2(
    token_x: Tensor,
    weight_dq: Tensor,
    weight_uq_qr: Tensor,
    weight_uk: Tensor,
    weight_dkv_kr: Tensor,
    rmsnorm_gamma_cq: Tensor,
    rmsnorm_gamma_ckv: Tensor,
    rope_sin: Tensor,
    rope_cos: Tensor,
    cache_index: Tensor,
    kv_cache: Annotated[Tensor, "a!"],
    kr_cache: Annotated[Tensor, "b!"],
    *,
    dequant_scale_x: Tensor | None = None,
    dequant_scale_w_dq: Tensor | None = None,
    dequant_scale_w_uq_qr: Tensor | None = None,
    dequant_scale_w_dkv_kr: Tensor | None = None,
    quant_scale_ckv: Tensor | None = None,
    quant_scale_ckr: Tensor | None = None,
    smooth_scales_cq: Tensor | None = None,
    rmsnorm_epsilon_cq: float = 1e-05,
    rmsnorm_epsilon_ckv: float = 1e-05,
    cache_mode: str = "PA_BSND",
) -> tuple[Tensor, Tensor, Annotated[Tensor, "a!"], Annotated[Tensor, "b!"], Tensor]:
    """npu_mla_prolog, with one more result.

    cq = x W_dq / rms(x W_dq) * gamma_cq,  u = cq W_uq_qr
    query = u[:D] W_uk,  query_rope = rope(u[D:]),  of every head
    kv = x W_dkv_kr;  kv_cache[index] = kv[:Ckv] / rms(kv[:Ckv]) * gamma_ckv,  kr_cache[index] = rope(kv[Ckv:])

    Args:
        all: as in npu_mla_prolog.

    Returns:
        (query, query_rope, kv_cache, kr_cache, dequant_scale_q_nope), the last without elements.

    Raises:
        ContractError: a call that `fusion-attention ops npu_mla_prolog_v2` does not allow. Nothing is written.

    Source: Ascend op-plugin, npu_mla_prolog_v2.

    Example:
        >>> x, down, up, key = torch.randn(3, 12), torch.randn(12, 8), torch.randn(8, 20), torch.randn(2, 6, 16)
        >>> latent, rope = torch.zeros(4, 16, 1, 16), torch.zeros(4, 16, 1, 4)
        >>> query, *_, scale = npu_mla_prolog_v2(
        ...     x, down, up, key, torch.randn(12, 20), torch.ones(8), torch.ones(16), torch.zeros(3, 4),
        ...     torch.ones(3, 4), torch.tensor([17, 18, -1]), latent, rope)
        >>> list(query.shape), scale.numel()
        ([3, 2, 16], 0)
    """
    result = _prolog(prolog.V2, {
        "token_x": token_x, "weight_dq": weight_dq, "weight_uq_qr": weight_uq_qr, "weight_uk": weight_uk,
        "weight_dkv_kr": weight_dkv_kr, "rmsnorm_gamma_cq": rmsnorm_gamma_cq,
        "rmsnorm_gamma_ckv": rmsnorm_gamma_ckv, "rope_sin": rope_sin, "rope_cos": rope_cos,
        "cache_index": cache_index, "kv_cache": kv_cache, "kr_cache": kr_cache, "dequant_scale_x": dequant_scale_x,
        "dequant_scale_w_dq": dequant_scale_w_dq, "dequant_scale_w_uq_qr": dequant_scale_w_uq_qr,
        "dequant_scale_w_dkv_kr": dequant_scale_w_dkv_kr, "quant_scale_ckv": quant_scale_ckv,
        "quant_scale_ckr": quant_scale_ckr, "smooth_scales_cq": smooth_scales_cq,
        "rmsnorm_epsilon_cq": rmsnorm_epsilon_cq, "rmsnorm_epsilon_ckv": rmsnorm_epsilon_ckv,
        "cache_mode": cache_mode,
    })  # fmt: skip
    return result[0], result[1], kv_cache, kr_cache, _nothing(token_x)


def npu_mla_prolog_v3(
    token_x: Tensor,
    weight_dq: Tensor,
    weight_uq_qr: Tensor,
    weight_uk: Tensor,
    weight_dkv_kr: Tensor,
    rmsnorm_gamma_cq: Tensor,
    rmsnorm_gamma_ckv: Tensor,
    rope_sin: Tensor,
    rope_cos: Tensor,
    kv_cache: Annotated[Tensor, "a!"],
    kr_cache: Annotated[Tensor, "b!"],
    *,
    cache_index: Tensor | None = None,
    dequant_scale_x: Tensor | None = None,
    dequant_scale_w_dq: Tensor | None = None,
    dequant_scale_w_uq_qr: Tensor | None = None,
    dequant_scale_w_dkv_kr: Tensor | None = None,
    quant_scale_ckv: Tensor | None = None,
    quant_scale_ckr: Tensor | None = None,
    smooth_scales_cq: Tensor | None = None,
    actual_seq_len: Tensor | None = None,
    k_nope_clip_alpha: Tensor | None = None,
    rmsnorm_epsilon_cq: float = 1e-05,
    rmsnorm_epsilon_ckv: float = 1e-05,
    cache_mode: str = "PA_BSND",
    query_norm_flag: bool = False,
    weight_quant_mode: int = 0,
    kv_cache_quant_mode: int = 0,
    query_quant_mode: int = 0,
    ckvkr_repo_mode: int = 0,
    quant_scale_repo_mode: int = 0,
    tile_size: int = 128,
    qc_qr_scale: float = 1.0,
    kc_scale: float = 1.0,
    token_x_dtype: int | None = None,
    weight_dq_dtype: int | None = None,
    weight_uq_qr_dtype: int | None = None,
    weight_dkv_kr_dtype: int | None = None,
    kv_cache_dtype: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """npu_mla_prolog with factors on the latents, which returns the query's.

    cq = x W_dq / rms(x W_dq) * gamma_cq * qc_qr_scale,  u = cq W_uq_qr
    query = u[:D] W_uk,  query_rope = rope(u[D:]),  of every head
    kv = x W_dkv_kr;  kv_cache[index] = kv[:Ckv] / rms(..) * gamma_ckv * kc_scale,  kr_cache[index] = rope(kv[Ckv:])

    Args:
        cache_index: needed.
        query_norm_flag: whether cq is returned.
        qc_qr_scale, kc_scale: as the formula has them.
        tile_size: without effect.
        actual_seq_len, k_nope_clip_alpha, and all modes and dtypes: of forms that are not computed.
        all others: as in npu_mla_prolog.

    Returns:
        (query [.., N1, Ckv], query_rope [.., N1, Dr], dequant_scale_q_nope, query_norm [.., Cq], dequant_scale_q_norm):
        scales have no elements, nor has query_norm without query_norm_flag.

    Raises:
        ContractError: a call that `fusion-attention ops npu_mla_prolog_v3` does not allow. Nothing is written.

    Source: Ascend op-plugin, npu_mla_prolog_v3.

    Example:
        >>> x, down, up, key = torch.randn(3, 12), torch.randn(12, 8), torch.randn(8, 20), torch.randn(2, 6, 16)
        >>> latent, rope = torch.zeros(4, 16, 1, 16), torch.zeros(4, 16, 1, 4)
        >>> query, _, _, cq, _ = npu_mla_prolog_v3(
        ...     x, down, up, key, torch.randn(12, 20), torch.ones(8), torch.ones(16), torch.zeros(3, 4),
        ...     torch.ones(3, 4), latent, rope, cache_index=torch.tensor([17, 18, -1]), query_norm_flag=True)
        >>> list(query.shape), list(cq.shape)
        ([3, 2, 16], [3, 8])
    """
    query, query_rope, cq = _prolog(prolog.V3, {
        "token_x": token_x, "weight_dq": weight_dq, "weight_uq_qr": weight_uq_qr, "weight_uk": weight_uk,
        "weight_dkv_kr": weight_dkv_kr, "rmsnorm_gamma_cq": rmsnorm_gamma_cq,
        "rmsnorm_gamma_ckv": rmsnorm_gamma_ckv, "rope_sin": rope_sin, "rope_cos": rope_cos, "kv_cache": kv_cache,
        "kr_cache": kr_cache, "cache_index": cache_index, "dequant_scale_x": dequant_scale_x,
        "dequant_scale_w_dq": dequant_scale_w_dq, "dequant_scale_w_uq_qr": dequant_scale_w_uq_qr,
        "dequant_scale_w_dkv_kr": dequant_scale_w_dkv_kr, "quant_scale_ckv": quant_scale_ckv,
        "quant_scale_ckr": quant_scale_ckr, "smooth_scales_cq": smooth_scales_cq, "actual_seq_len": actual_seq_len,
        "k_nope_clip_alpha": k_nope_clip_alpha, "rmsnorm_epsilon_cq": rmsnorm_epsilon_cq,
        "rmsnorm_epsilon_ckv": rmsnorm_epsilon_ckv, "cache_mode": cache_mode, "query_norm_flag": query_norm_flag,
        "weight_quant_mode": weight_quant_mode, "kv_cache_quant_mode": kv_cache_quant_mode,
        "query_quant_mode": query_quant_mode, "ckvkr_repo_mode": ckvkr_repo_mode,
        "quant_scale_repo_mode": quant_scale_repo_mode, "tile_size": tile_size, "qc_qr_scale": qc_qr_scale,
        "kc_scale": kc_scale, "token_x_dtype": token_x_dtype, "weight_dq_dtype": weight_dq_dtype,
        "weight_uq_qr_dtype": weight_uq_qr_dtype, "weight_dkv_kr_dtype": weight_dkv_kr_dtype,
        "kv_cache_dtype": kv_cache_dtype,
    })  # fmt: skip
    norm = cq if query_norm_flag else token_x.new_empty(0)
    return query, query_rope, _nothing(token_x), norm, _nothing(token_x)


def _nothing(like: Tensor) -> Tensor:
    """A scale of what is not quantised."""
    return like.new_empty(0, dtype=torch.float32)


def _prolog(op: Op, given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """(query, query_rope, cq) of a call; the caches are written."""
    given = {**given, **checked(op, given)}
    with torch.no_grad(), as_given(given["token_x"]):
        return _computed(given)


def _computed(given: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    shape, uk, caches = given["token_x"].shape[:-1], given["weight_uk"], (given["kv_cache"], given["kr_cache"])
    heads, dim, latent = uk.shape
    x = given["token_x"].flatten(0, -2)
    angles = [given[name].flatten(0, -2)[None, None] for name in ("rope_cos", "rope_sin")]

    def norm(rows: Tensor, name: str, factor: str) -> Tensor:
        scale = given["rmsnorm_gamma_" + name].float() * given.get(factor, 1.0)
        return normalised(rows, scale, given["rmsnorm_epsilon_" + name])[0]

    def turned(rows: Tensor) -> Tensor:
        """Of rows [T, heads, Dr]."""
        return npu_interleave_rope(rows.transpose(0, 1)[None], *angles)[0].transpose(0, 1)

    cq = norm(x @ given["weight_dq"], "cq", "qc_qr_scale")
    u = (cq @ given["weight_uq_qr"]).view(len(x), heads, given["weight_uq_qr"].shape[1] // heads)
    query = torch.bmm(u[..., :dim].transpose(0, 1), uk).transpose(0, 1)
    kv = x @ given["weight_dkv_kr"]
    ckv, kr = norm(kv[:, :latent], "ckv", "kc_scale"), turned(kv[:, None, latent:])[:, 0]
    lines = [_lines(cache, given["cache_mode"]) for cache in caches]
    store(list(zip(lines, (ckv, kr), strict=True)), given["cache_index"].flatten())
    query, query_rope = (rows.unflatten(0, shape).contiguous() for rows in (query, turned(u[..., dim:])))
    return query, query_rope, cq.unflatten(0, shape)


def _lines(cache: Tensor, mode: str) -> Tensor:
    """A cache as [pages, slots, elements of a row...], a view."""
    if mode == "PA_BSND":
        return cache[:, :, 0]
    pages, slots, _, width = cache.shape
    return cache.view(pages, width // prolog.PIECE, slots, prolog.PIECE).transpose(1, 2)

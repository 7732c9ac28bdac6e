"""torch_npu's projections, norms and rotations before multi-head latent attention, computed by torch's operators.

Products are rounded to the dtype of the rows, as on the chip. Norms and rotations are computed in float32.
"""

from typing import Annotated

import torch

from fusion_attention.contract import Op
from fusion_attention.npu.auxiliary.caches import lines, store
from fusion_attention.npu.auxiliary.call import as_given, checked
from fusion_attention.npu.auxiliary.norms import normalised
from fusion_attention.npu.auxiliary.rotary import npu_interleave_rope
from fusion_attention.npu.functions_from_definitions import Args, from_record
from fusion_attention.ops.auxiliary_definitions import prolog

Tensor = torch.Tensor


@from_record(prolog.V1, host=None)
def npu_mla_prolog(args: Args) -> tuple[Tensor, Tensor, Annotated[Tensor, "a!"], Annotated[Tensor, "b!"]]:
    query, query_rope, _ = _prolog(prolog.V1, args)
    return query, query_rope, args["kv_cache"], args["kr_cache"]


@from_record(prolog.V2, host=None)
def npu_mla_prolog_v2(args: Args) -> tuple[Tensor, Tensor, Annotated[Tensor, "a!"], Annotated[Tensor, "b!"], Tensor]:
    query, query_rope, _ = _prolog(prolog.V2, args)
    return query, query_rope, args["kv_cache"], args["kr_cache"], _nothing(args["token_x"])


@from_record(prolog.V3, host=None)
def npu_mla_prolog_v3(args: Args) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x = args["token_x"]
    query, query_rope, cq = _prolog(prolog.V3, args)
    return query, query_rope, _nothing(x), cq if args["query_norm_flag"] else x.new_empty(0), _nothing(x)


def _nothing(like: Tensor) -> Tensor:
    """Returns an empty float32 tensor on the device of `like`: the place of a scale that a call does not compute."""
    return like.new_empty(0, dtype=torch.float32)


def _prolog(op: Op, given: Args) -> tuple[Tensor, Tensor, Tensor]:
    """Checks and computes a call of `op`, which projects, normalises and rotates tokens' hidden states for multi-head
    latent attention; returns (query, query_rope, cq: the normalised latent query), and writes keys to the caches."""
    given = {**given, **checked(op, given)}
    shape, uk, caches = given["token_x"].shape[:-1], given["weight_uk"], (given["kv_cache"], given["kr_cache"])
    heads, dim, latent = uk.shape
    x = given["token_x"].flatten(0, -2)
    angles = [given[name].flatten(0, -2)[None, None] for name in ("rope_cos", "rope_sin")]

    def norm(rows: Tensor, name: str, factor: str) -> Tensor:
        scale = given["rmsnorm_gamma_" + name].float() * given.get(factor, 1.0)
        return normalised(rows, scale, given["rmsnorm_epsilon_" + name])[0]

    def turned(rows: Tensor) -> Tensor:
        """Returns rows [T, heads, Dr] rotated by the angles of their tokens."""
        return npu_interleave_rope(rows.transpose(0, 1)[None], *angles)[0].transpose(0, 1)

    with torch.no_grad(), as_given(given["token_x"]):
        cq = norm(x @ given["weight_dq"], "cq", "qc_qr_scale")
        u = (cq @ given["weight_uq_qr"]).view(len(x), heads, dim + given["weight_dkv_kr"].shape[1] - latent)
        query = torch.bmm(u[..., :dim].transpose(0, 1), uk).transpose(0, 1)
        kv = x @ given["weight_dkv_kr"]
        ckv, kr = norm(kv[:, :latent], "ckv", "kc_scale"), turned(kv[:, None, latent:])[:, 0]
        slots = [lines(cache, given["cache_mode"]) for cache in caches]
        store(list(zip(slots, (ckv, kr), strict=True)), given["cache_index"].flatten())
        query, query_rope = (rows.unflatten(0, shape).contiguous() for rows in (query, turned(u[..., dim:])))
        return query, query_rope, cq.unflatten(0, shape)

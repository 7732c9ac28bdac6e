"""npu_mla_prolog and its versions are compared with loops over tokens and heads in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.bits import same_bits

from fusion_attention import npu
from fusion_attention.contract import ContractError, ContractWarning
from fusion_attention.testing.estimated_rounding_errors import compare_with

T, H, CQ, N, D, CKV, DR = 6, 24, 12, 3, 8, 16, 4
PAGES, SLOTS = 4, 5
GENERATOR = torch.Generator().manual_seed(13)
X, DQ, UQ, UK, DKV, GAMMA_CQ, GAMMA_CKV = (
    torch.randn(shape, generator=GENERATOR)
    for shape in ((T, H), (H, CQ), (CQ, N * (D + DR)), (N, D, CKV), (H, CKV + DR), (CQ,), (CKV,))
)
ANGLES = torch.rand(T, DR // 2, generator=GENERATOR).repeat(1, 2)
INDEX = torch.tensor([3, 19, -1, 0, 7, 12])
WEIGHTS = DQ, UQ, UK, DKV, GAMMA_CQ, GAMMA_CKV


def caches(dtype: torch.dtype = torch.float32, dr: int = DR) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((PAGES, SLOTS, 1, CKV), 7.0, dtype=dtype), torch.full((PAGES, SLOTS, 1, dr), 7.0, dtype=dtype)


def rms(row: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> torch.Tensor:
    return row / (row.square().mean(-1, keepdim=True) + epsilon).sqrt() * gamma


def turned(row: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate adjacent pairs of a row [Dr] as complex numbers; all real parts precede all imaginary parts."""
    half = row.shape[-1] // 2
    pair = torch.complex(row[..., ::2], row[..., 1::2]) * torch.complex(cos[:half], sin[:half])
    return torch.cat((pair.real, pair.imag), -1)


def program(factors: tuple[float, float] = (1.0, 1.0), epsilons: tuple[float, float] = (1e-5, 1e-5)) -> Any:
    """(query, query_rope, latents, rope parts, cq) of every token, in float64."""
    x, dq, uq, uk, dkv, gamma_cq, gamma_ckv = (t.double() for t in (X, *WEIGHTS))
    rows: list[list[torch.Tensor]] = [[], [], [], [], []]
    for i in range(T):
        cos, sin = ANGLES[i].double().cos(), ANGLES[i].double().sin()
        cq = rms(x[i : i + 1] @ dq, gamma_cq, epsilons[0]) * factors[0]
        heads = (cq @ uq)[0].view(N, D + DR)
        kv = (x[i : i + 1] @ dkv)[0]
        rows[0].append(torch.stack([(heads[n : n + 1, :D] @ uk[n])[0] for n in range(N)]))
        rows[1].append(torch.stack([turned(heads[n, D:], cos, sin) for n in range(N)]))
        rows[2].append(rms(kv[:CKV], gamma_ckv, epsilons[1]) * factors[1])
        rows[3].append(turned(kv[CKV:], cos, sin))
        rows[4].append(cq[0])
    return [torch.stack(result) for result in rows]


def stored(cache: torch.Tensor) -> torch.Tensor:
    """Cache rows of the tokens that have a slot; asserts that all other rows are unchanged."""
    lines = cache.view(PAGES * SLOTS, -1)
    there = INDEX >= 0
    rest = [slot for slot in range(PAGES * SLOTS) if slot not in INDEX.tolist()]
    assert (lines[rest] == 7).all()
    return lines[INDEX[there]]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", ["npu_mla_prolog", "npu_mla_prolog_v2"])
@pytest.mark.parametrize("batched", [False, True])
def test_mla_prolog_v1_and_v2_match_naive_loops(name: str, batched: bool) -> None:
    shape = (2, 3) if batched else (T,)
    latent, rope = caches()
    rows = [t.view(*shape, -1) for t in (X, ANGLES.sin(), ANGLES.cos())]
    query, query_rope, *rest = getattr(npu, name)(
        rows[0], *WEIGHTS, *rows[1:], INDEX.view(shape), latent, rope, rmsnorm_epsilon_cq=0.5, rmsnorm_epsilon_ckv=0.25
    )
    assert rest[:2] == [latent, rope] or (rest[0] is latent and rest[1] is rope)
    assert [t.numel() for t in rest[2:]] == ([0] if name.endswith("2") else [])
    assert query.shape == (*shape, N, CKV)
    assert query_rope.shape == (*shape, N, DR)
    results = [query.view(T, N, CKV), query_rope.view(T, N, DR), stored(latent), stored(rope)]

    def wanted() -> list[torch.Tensor]:
        query, query_rope, ckv, kr, _ = program(epsilons=(0.5, 0.25))
        return [query, query_rope, ckv[INDEX >= 0], kr[INDEX >= 0]]

    compare_with("[query, query_rope, kv_cache, kr_cache]", results, wanted)


def test_mla_prolog_v3_scale_factors_and_query_norm_match_naive_loops() -> None:
    latent, rope = caches()
    args = (X, *WEIGHTS, ANGLES.sin(), ANGLES.cos(), latent, rope)
    query, query_rope, no, cq, scale = npu.npu_mla_prolog_v3(
        *args, cache_index=INDEX, query_norm_flag=True, qc_qr_scale=1.5, kc_scale=-0.5
    )
    assert (no.numel(), scale.numel()) == (0, 0)

    def wanted() -> list[torch.Tensor]:
        query, query_rope, ckv, kr, cq = program((1.5, -0.5))
        return [query, query_rope, ckv[INDEX >= 0], kr[INDEX >= 0], cq]

    results = [query, query_rope, stored(latent), stored(rope), cq]
    compare_with("[query, query_rope, kv_cache, kr_cache, query_norm]", results, wanted)
    assert npu.npu_mla_prolog_v3(*args, cache_index=INDEX)[3].numel() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_mla_prolog_rounds_after_each_product_and_norm(dtype: torch.dtype) -> None:
    x, *weights, sin, cos = (t.to(dtype) for t in (X, *WEIGHTS, ANGLES.sin(), ANGLES.cos()))
    latent, rope = caches(dtype)
    query, query_rope, _, cq, _ = npu.npu_mla_prolog_v3(
        x, *weights, sin, cos, latent, rope, cache_index=INDEX, query_norm_flag=True
    )
    same_bits(cq, npu.npu_rms_norm(x @ weights[0], weights[4], 1e-5)[0])
    u, kv = (cq @ weights[1]).view(T, N, D + DR), x @ weights[3]
    same_bits(query, torch.stack([u[:, n, :D] @ weights[2][n] for n in range(N)], 1))
    heads = u[..., D:].transpose(0, 1)[None]
    same_bits(query_rope, npu.npu_interleave_rope(heads, cos[None, None], sin[None, None])[0].transpose(0, 1))
    there = INDEX >= 0
    same_bits(stored(latent), npu.npu_rms_norm(kv[:, :CKV].contiguous(), weights[5], 1e-5)[0][there])
    same_bits(
        stored(rope), npu.npu_interleave_rope(kv[None, None, :, CKV:], cos[None, None], sin[None, None])[0, 0][there]
    )


def test_nz_caches_hold_the_same_rows_as_bsnd_caches() -> None:
    rope_dim = 16
    uq, dkv = torch.randn(CQ, N * (D + rope_dim)), torch.randn(H, CKV + rope_dim)
    angles = torch.rand(T, rope_dim)
    args = (X, DQ, uq, UK, dkv, GAMMA_CQ, GAMMA_CKV, angles.sin(), angles.cos(), INDEX)
    pages_bsnd, pieces = caches(dr=rope_dim), caches(dr=rope_dim)
    for cache_pages, mode in ((pages_bsnd, "PA_BSND"), (pieces, "PA_NZ")):
        npu.npu_mla_prolog(*args, *cache_pages, cache_mode=mode)
    for one, other in zip(pages_bsnd, pieces, strict=True):
        lines = other.view(PAGES, -1, SLOTS, 16).transpose(1, 2)
        same_bits(lines.reshape(one.shape), one)


def args_of(**changes: Any) -> dict[str, Any]:
    latent, rope = caches()
    names = ("weight_dq", "weight_uq_qr", "weight_uk", "weight_dkv_kr", "rmsnorm_gamma_cq", "rmsnorm_gamma_ckv")
    cache_arguments = {"cache_index": INDEX, "kv_cache": latent, "kr_cache": rope}
    angles = {"rope_sin": ANGLES.sin(), "rope_cos": ANGLES.cos()}
    return {"token_x": X, **dict(zip(names, WEIGHTS, strict=True)), **angles, **cache_arguments, **changes}


def test_mla_prolog_without_heads_still_writes_the_caches() -> None:
    args, full = args_of(weight_uq_qr=UQ[:, :0], weight_uk=UK[:0]), args_of()
    query, query_rope, *_ = npu.npu_mla_prolog(**args)
    npu.npu_mla_prolog(**full)
    assert (query.shape, query_rope.shape) == ((T, 0, CKV), (T, 0, DR))
    for name in ("kv_cache", "kr_cache"):
        same_bits(args[name], full[name])


def test_weight_that_requires_a_gradient_warns() -> None:
    with pytest.warns(ContractWarning, match=r"weight_dq: .*no_grad"):
        query, *_ = npu.npu_mla_prolog_v3(**args_of(weight_dq=DQ.clone().requires_grad_()))
    assert not query.requires_grad


ONE = torch.ones(1)


@pytest.mark.parametrize("interface", [npu.npu_mla_prolog, npu.npu_mla_prolog_v2, npu.npu_mla_prolog_v3])
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"token_x": X.to(torch.int8)}, "token_x: expected float16 or bfloat16 or float32, got int8"),
        ({"dequant_scale_w_uq_qr": ONE}, "dequant_scale_w_uq_qr: expected None, .*quantised forms are not computed"),
        ({"quant_scale_ckv": ONE}, "quant_scale_ckv: expected None, .*quantised forms are not computed"),
        ({"weight_uq_qr": UQ[:, 1:]}, r"weight_uq_qr: expected \[Cq, N1 \* \(D \+ Dr\)\]"),
        ({"rope_cos": ANGLES[:5]}, r"rope_cos: expected \[T, Dr\]"),
        ({"kr_cache": caches()[1][:, :4]}, "kr_cache: expected as many slots as kv_cache has"),
        ({"cache_index": INDEX + 1}, "cache_index: expected slots of the caches, got 20"),
        ({"cache_mode": "PA_NZ"}, "kr_cache: expected .*multiple of 16"),
        ({"cache_mode": "BSND"}, "cache_mode"),
        ({"kv_cache": caches()[0].requires_grad_()}, "kv_cache: .*written in place"),
    ],
)
def test_invalid_mla_prolog_call_raises_and_leaves_caches_unwritten(
    interface: Callable[..., Any], changes: Any, text: str
) -> None:
    args = args_of(**changes)
    with pytest.raises(ContractError, match=f"{interface.__name__}: {text}"):
        interface(**args)
    assert all((args[name] == 7).all() for name in ("kv_cache", "kr_cache"))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"cache_index": None}, r"cache_index: expected int64 \[T\] or \[B, S\]"),
        ({"weight_quant_mode": 1}, "weight_quant_mode"),
        ({"kv_cache_quant_mode": 3}, "kv_cache_quant_mode"),
        ({"actual_seq_len": INDEX}, "actual_seq_len: expected None"),
        ({"kv_cache_dtype": 1}, "kv_cache_dtype"),
    ],
)
def test_unsupported_mla_prolog_v3_arguments_raise(changes: Any, text: str) -> None:
    with pytest.raises(ContractError, match=f"npu_mla_prolog_v3: {text}"):
        npu.npu_mla_prolog_v3(**args_of(**changes))

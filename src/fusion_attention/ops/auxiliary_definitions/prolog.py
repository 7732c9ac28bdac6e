"""Operator definitions that prepare multi-head latent attention: queries from rows, and a latent stored in a cache."""

from typing import Any

import torch

from fusion_attention.contract import Attr, Op, Rule, Tensor
from fusion_attention.ops.auxiliary_definitions.caches import FUNCTIONS, in_place, written
from fusion_attention.ops.auxiliary_definitions.common import auxiliary, floats, result, writes
from fusion_attention.ops.shared.params import one_of
from fusion_attention.ops.shared.rules import invalid, meaning, untrained

SIZES = {"T": 5, "H": 12, "Cq": 8, "N1": 2, "D": 6, "Ckv": 16, "Dr": 4, "W": 20, "N": 20, "P": 3, "Ps": 4}
INTEGERS = "quantised forms are not computed: pass floats"
GRADIENT = "a cache has no derivative: call it under torch.no_grad()"
FRAGMENT = 16  # elements of a cache's fragment in mode PA_NZ

WEIGHTS = (
    floats("weight_dq", "Projection of rows to the query's latent.", like="token_x", shape="H Cq"),
    floats(
        "weight_uq_qr",
        "Projection of this latent to heads of D elements and a rope part.",
        like="token_x",
        shape="Cq W",
    ),
    floats("weight_uk", "Projection of each head to the key's latent.", like="token_x", shape="N1 D Ckv"),
    floats("weight_dkv_kr", "Projection of rows to the key's latent and its rope part.", like="token_x", shape="H N"),
    floats("rmsnorm_gamma_cq", "Weights of the norm of the query's latent.", like="token_x", shape="Cq"),
    floats("rmsnorm_gamma_ckv", "Weights of the norm of the key's latent.", like="token_x", shape="Ckv"),
)
ROPE = tuple(
    floats(f"rope_{name}", f"{of} of the tokens, [.., Dr], in npu_interleave_rope's order of elements.", like="token_x")
    for name, of in (("sin", "Sines"), ("cos", "Cosines"))
)
TOKENS = floats("token_x", "[T, H] or [B, S, H].")
INDEX = Tensor(
    "cache_index",
    "Slot of each token, page * page size + slot; negative: the token is not stored.",
    dtypes="int64 int32",
)
CACHES = (
    written("kv_cache", "Pages of latents, [pages, page size, 1, Ckv]; written in place.", "token_x"),
    written("kr_cache", "Pages of rope parts, [pages, page size, 1, Dr]; written in place.", "token_x"),
)


def absent(*names: str) -> tuple[Tensor, ...]:
    """Returns operator parameters `names`, which only quantized variants use and which must be None."""
    return tuple(Tensor(name, f"None: {INTEGERS}.", True) for name in names)


SCALES = absent(
    *("dequant_scale_x", "dequant_scale_w_dq", "dequant_scale_w_uq_qr", "dequant_scale_w_dkv_kr"),
    *("quant_scale_ckv", "quant_scale_ckr", "smooth_scales_cq"),
)


def epsilon(name: str) -> Attr:
    return Attr(name, "Added to the mean square.", type=float, default=1e-5, domain=f"0 <= {name} < 3.4e38")


EPSILONS = epsilon("rmsnorm_epsilon_cq"), epsilon("rmsnorm_epsilon_ckv")
MODE = one_of(
    "cache_mode", "PA_BSND: pages of contiguous rows; PA_NZ: of fragments of 16 elements.", ("PA_BSND", "PA_NZ")
)
QUERIES = (
    result("query", "Query heads, projected to the key's latent: [.., N1, Ckv].", "=token_x"),
    result("query_rope", "The rotated rope parts of query heads: [.., N1, Dr].", "=token_x"),
)
NO_SCALE = result("dequant_scale_q_nope", "A tensor without elements.", "float32")


def fits_pages(cache: torch.Tensor, width: int, mode: str) -> bool:
    """True if a paged cache has rows of `width` elements, and a shape and strides that suit its mode, such as NZ."""
    if cache.dim() != 4 or tuple(cache.shape[2:]) != (1, width):
        return False
    return mode == "PA_BSND" or (width % FRAGMENT == 0 and cache.is_contiguous())


def none(params: tuple[Any, ...]) -> tuple[Rule, ...]:
    """Returns rules that check calls: the parameters `params`, of quantized variants, are None."""
    return tuple(invalid(f"{p.name} is None", f"{p.name}: None ({INTEGERS})", invalid={p.name: "1"}) for p in params)


ROWS = "token_x.dim() in (2, 3)"
RULES = (
    invalid(f"{ROWS} and token_x.shape[-1] == H", "token_x: [T, H] or [B, S, H] (weight_dq is [H, Cq])",
            invalid={"token_x": "T 7"}),
    invalid("N > Ckv and (N - Ckv) % 2 == 0",
            "weight_dkv_kr: [H, Ckv + Dr] with an even Dr (rmsnorm_gamma_ckv is [Ckv])",
            invalid={"N": 16}),
    invalid("W == N1 * (D + N - Ckv)",
            "weight_uq_qr: [Cq, N1 * (D + Dr)] (weight_uk is [N1, D, Ckv])",
            when="N > Ckv", invalid={"W": 24}),
    *(invalid(f"tuple({name}.shape) == (*token_x.shape[:-1], N - Ckv)",
              f"{name}: [T, Dr] or [B, S, Dr], one row per token (the sine comes before the cosine)",
              when=f"{ROWS} and N > Ckv",
              invalid={name: "T 3"})
      for name in ("rope_sin", "rope_cos")),
    *(invalid(f"fits_pages({name}, {width}, cache_mode)",
              f"{name}: [pages, page size, 1, {size}]; in PA_NZ contiguous, with rows of a multiple of 16 elements "
              "(fragments have 16 elements)", when="N > Ckv", invalid={name: "P Ps 1 5"})
      for name, width, size in (("kv_cache", "Ckv", "Ckv"), ("kr_cache", "N - Ckv", "Dr"))),
    invalid("kv_cache.dim() != 4 or kr_cache.dim() != 4 or kv_cache.shape[:2] == kr_cache.shape[:2]",
            "kr_cache: as many slots as kv_cache has (an index is for both)", invalid={"kr_cache": "P 5 1 Dr"}),
    *none(SCALES),
    *in_place(kv_cache=(3, 4, 1, 16), kr_cache=(3, 4, 1, 4)),
    *untrained(GRADIENT, token_x=(5, 12), weight_dq=(12, 8)),
)  # fmt: skip
SLOT_RULES = (
    invalid("cache_index.shape == token_x.shape[:-1]", "cache_index: [T] or [B, S] (one per token)",
            when="cache_index is not None and token_x.dim() in (2, 3)",
            invalid={"cache_index": torch.zeros(3, dtype=torch.int64)}),
    meaning("within(cache_index, kv_cache.shape[0] * kv_cache.shape[1], low=-9223372036854775808)",
            "cache_index: slots of the caches (page * page size + slot)",
            when="cache_index is not None and kv_cache.dim() == 4", reads=True,
            invalid={"cache_index": torch.tensor([0, 1, 2, 3, 12])}),
)  # fmt: skip
FORMULA = """cq = x W_dq / rms(x W_dq) * gamma_cq,  u = cq W_uq_qr        D + Dr elements per head
query = u[:D] W_uk,  query_rope = rope(u[D:]);  kv = x W_dkv_kr
kv_cache[index] = kv[:Ckv] / rms(kv[:Ckv]) * gamma_ckv,  kr_cache[index] = rope(kv[Ckv:])
rope(r) = npu_interleave_rope(r, cos, sin)"""


def prolog(name: str, summary: str, inputs: tuple[Any, ...], results: tuple[Tensor, ...], **more: Any) -> Op:
    """Returns the operator definition of a version of npu_mla_prolog, which makes the queries and latent keys of
    multi-head latent attention from hidden states; more: other fields of Op."""
    return auxiliary(
        name,
        summary,
        inputs,
        results,
        rules=(*RULES, *SLOT_RULES, *more.pop("rules", ())),
        formula=more.pop("formula", FORMULA),
        functions={**FUNCTIONS, "fits_pages": fits_pages},
        sizes=SIZES,
        sample={
            "token_x": "T H",
            "rope_sin": "T Dr",
            "rope_cos": "T Dr",
            "cache_index": torch.tensor([0, 11, 5, -1, 2]),
            "kv_cache": "P Ps 1 Ckv",
            "kr_cache": "P Ps 1 Dr",
        },
        declared=writes("kv_cache", "kr_cache"),
        **more,
    )


FIRST = (TOKENS, *WEIGHTS, *ROPE)
V1 = prolog(
    "npu_mla_prolog",
    "Projects rows to queries in the key's latent, and stores their latents and rope parts in caches, in place.",
    (*FIRST, INDEX, *CACHES, *SCALES, *EPSILONS, MODE),
    QUERIES,
    returns="(query, query_rope, kv_cache, kr_cache)",
    keywords="dequant_scale_x",
    example="""\
>>> x, down, up, key = torch.randn(3, 12), torch.randn(12, 8), torch.randn(8, 20), torch.randn(2, 6, 16)
>>> latent, rope = torch.zeros(4, 16, 1, 16), torch.zeros(4, 16, 1, 4)
>>> query, query_rope, *_ = npu_mla_prolog(
...     x, down, up, key, torch.randn(12, 20), torch.ones(8), torch.ones(16), torch.zeros(3, 4),
...     torch.ones(3, 4), torch.tensor([17, 18, -1]), latent, rope)
>>> list(query.shape), list(query_rope.shape), int(latent.any(-1).sum())
([3, 2, 16], [3, 2, 4], 2)""",
)
V2 = prolog(
    "npu_mla_prolog_v2",
    "npu_mla_prolog with the result dequant_scale_q_nope.",
    (*FIRST, INDEX, *CACHES, *SCALES, *EPSILONS, MODE),
    (*QUERIES, NO_SCALE),
    returns="(query, query_rope, kv_cache, kr_cache, dequant_scale_q_nope)",
    keywords="dequant_scale_x",
    example="""\
>>> x, down, up, key = torch.randn(3, 12), torch.randn(12, 8), torch.randn(8, 20), torch.randn(2, 6, 16)
>>> latent, rope = torch.zeros(4, 16, 1, 16), torch.zeros(4, 16, 1, 4)
>>> query, *_, scale = npu_mla_prolog_v2(
...     x, down, up, key, torch.randn(12, 20), torch.ones(8), torch.ones(16), torch.zeros(3, 4),
...     torch.ones(3, 4), torch.tensor([17, 18, -1]), latent, rope)
>>> list(query.shape), scale.numel()
([3, 2, 16], 0)""",
)
MORE = absent("actual_seq_len", "k_nope_clip_alpha")
NUMBERS = tuple(
    Attr(name, f"0: floats; {INTEGERS}.", default=0, domain=f"{name} == 0")
    for name in (
        *("weight_quant_mode", "kv_cache_quant_mode", "query_quant_mode"),
        *("ckvkr_repo_mode", "quant_scale_repo_mode"),
    )
)
FACTORS = tuple(
    Attr(name, text, type=float, default=1.0, domain=f"-3.4e38 < {name} < 3.4e38")
    for name, text in (("qc_qr_scale", "Factor on cq."), ("kc_scale", "Factor on the stored latent."))
)
DTYPES = tuple(
    Attr(name, f"None: {INTEGERS}.", default=None, domain=f"{name} is None")
    for name in ("token_x_dtype", "weight_dq_dtype", "weight_uq_qr_dtype", "weight_dkv_kr_dtype", "kv_cache_dtype")
)
V3 = prolog(
    "npu_mla_prolog_v3",
    "npu_mla_prolog with factors on the latents, which returns the query's latent too.",
    (
        *(*FIRST, *CACHES, Tensor("cache_index", INDEX.text, True, dtypes="int64 int32"), *SCALES, *MORE, *EPSILONS),
        *(MODE, Attr("query_norm_flag", "Return cq too.", type=bool, default=False), *NUMBERS),
        *(Attr("tile_size", "Without effect.", default=128), *FACTORS, *DTYPES),
    ),
    (
        *(*QUERIES, NO_SCALE, result("query_norm", "cq, [.., Cq]; empty without query_norm_flag.", "=token_x")),
        result("dequant_scale_q_norm", "A tensor without elements.", "float32"),
    ),
    rules=(
        invalid("cache_index is not None", "cache_index: int64 [T] or [B, S] (one slot per token)",
                invalid={"cache_index": None}),
        *none(MORE),
    ),
    formula=FORMULA.replace("gamma_cq,", "gamma_cq * qc_qr_scale,").replace("gamma_ckv,", "gamma_ckv * kc_scale,"),
    keywords="cache_index",
    example="""\
>>> x, down, up, key = torch.randn(3, 12), torch.randn(12, 8), torch.randn(8, 20), torch.randn(2, 6, 16)
>>> latent, rope = torch.zeros(4, 16, 1, 16), torch.zeros(4, 16, 1, 4)
>>> query, _, _, cq, _ = npu_mla_prolog_v3(
...     x, down, up, key, torch.randn(12, 20), torch.ones(8), torch.ones(16), torch.zeros(3, 4),
...     torch.ones(3, 4), latent, rope, cache_index=torch.tensor([17, 18, -1]), query_norm_flag=True)
>>> list(query.shape), list(cq.shape)
([3, 2, 16], [3, 8])""",
)  # fmt: skip
RECORDS = (V1, V2, V3)

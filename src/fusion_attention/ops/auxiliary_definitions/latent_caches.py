"""The operator definition of npu_kv_rmsnorm_rope_cache, which stores normalised latents and rotated keys in caches."""

import torch

from fusion_attention.contract import Attr, Rule, Tensor, functions_in
from fusion_attention.ops.auxiliary_definitions.caches import FUNCTIONS, STORED, WRITTEN, in_place
from fusion_attention.ops.auxiliary_definitions.common import auxiliary, floats, result, writes
from fusion_attention.ops.shared.rules import invalid, meaning, untrained

MODES = "cache_mode in ('Norm', 'PA', 'PA_BNSD', 'PA_NZ', 'PA_BLK_BNSD', 'PA_BLK_NZ')"


def index_fits(index: torch.Tensor, kv: torch.Tensor, cache: torch.Tensor, mode: str) -> bool:
    """True if `index`, the positions of rows in a cache, has an element for every token of kv [B, 1, S, ..], or in
    cache modes with BLK for every page of tokens."""
    batch, tokens = kv.shape[0], kv.shape[2]
    if mode == "Norm":
        return tuple(index.shape) == (batch, tokens)
    count = -(-tokens // cache.shape[1]) if "BLK" in mode and cache.shape[1] else tokens
    return tuple(index.shape) == (batch * count,)


def buffer(cache: torch.Tensor, mode: str) -> int:
    """Returns the number of slots of a cache, the end of valid indices: of one sequence in mode "Norm", else of all
    pages."""
    return int(cache.shape[2] if mode == "Norm" else cache.shape[0] * cache.shape[1])


def cache_fits(cache: torch.Tensor, kv: torch.Tensor, width: int, mode: str) -> bool:
    """True if a cache for rows of kv has `width` elements per row, and the shape and strides of its mode, `mode`."""
    if cache.dim() != 4 or cache.shape[3] != width:
        return False
    if mode == "Norm":
        return cache.shape[0] == kv.shape[0] and cache.shape[1] == 1
    width_of_fragment = 32 if cache.dtype == torch.int8 else 16
    return cache.shape[2] == 1 and ("NZ" not in mode or (width % width_of_fragment == 0 and cache.is_contiguous()))


APART = 128  # elements of a row in a separate tensor of values


def is_separate(v: torch.Tensor | None) -> bool:
    """True if the argument v has the values, which are then not part of the keys: 4 axes, the last of 128 elements."""
    return v is not None and v.dim() == 4 and v.shape[-1] == APART


def rope_width(kv: torch.Tensor, gamma: torch.Tensor, v: torch.Tensor | None) -> int:
    """Returns the number of elements of a row of kv that are rotated, not normalised by gamma; <= 0: wrong shapes."""
    if is_separate(v):
        return kv.shape[-1] - APART if gamma.numel() == kv.shape[-1] else 0
    return kv.shape[-1] - gamma.numel()


def key_width(kv: torch.Tensor, gamma: torch.Tensor, v: torch.Tensor | None) -> int:
    """Returns the number of elements in a row of k_cache, from the operator's arguments kv, gamma and v."""
    return kv.shape[-1] if is_separate(v) else rope_width(kv, gamma, v)


def value_width(gamma: torch.Tensor, v: torch.Tensor | None) -> int:
    """Returns the number of elements in a row of ckv_cache: as many as gamma has, or those of separate values v."""
    return APART if is_separate(v) else gamma.numel()


def quantised(name: str, text: str, width: str) -> tuple[Tensor, Rule]:
    """Returns (the parameter `name` for the scales or offsets, one per element, with which rows are stored as int8 in a
    cache; its rule); width: expression for the number of elements."""
    rule = invalid(
        f"{name} is None or tuple({name}.shape) == ({width},)",
        f"{name}: [{width}] (one per element of a row)",
        given={"k_cache": ("B 1 6 4", "int8"), "ckv_cache": ("B 1 6 8", "int8"), **SCALES},
        invalid={name: ("3", "float32")},
    )
    return Tensor(name, text, True, dtypes="float32"), rule


SCALES = {"k_rope_scale": ("4", "float32"), "c_kv_scale": ("8", "float32")}
KEY_WIDTH, VALUE_WIDTH = "key_width(kv, gamma, v)", "value_width(gamma, v)"
NUMBERS = [
    quantised("k_rope_scale", "Scales of int8 k_cache, one per element of a row.", KEY_WIDTH),
    quantised("c_kv_scale", "Scales of int8 ckv_cache, one per element of a row.", VALUE_WIDTH),
    quantised("k_rope_offset", "Added to scaled rows of k_cache.", KEY_WIDTH),
    quantised("c_kv_offset", "Added to scaled rows of ckv_cache.", VALUE_WIDTH),
]
IS_LATENT = "kv.dim() == 4 and gamma.dim() == 1 and rope_width(kv, gamma, v) > 0"
KV_RMSNORM_ROPE = auxiliary(
    "npu_kv_rmsnorm_rope_cache",
    "Normalises latents, rotates rope parts, and stores both in caches, in place.",
    (
        floats("kv", "[B, 1, S, latent + rope]."),
        floats("gamma", "Weights of the norm, [latent].", like="kv"),
        floats("cos", "Cosines [B, 1, S, rope].", like="kv"),
        floats("sin", "Sines [B, 1, S, rope].", like="kv"),
        Tensor(
            "index",
            "Slot of each row: Norm: [B, S], slots of each sequence; PA modes: [B*S], page * page size + slot; PA_BLK "
            "modes: [B * pages of a sequence], the first slot of each page. Negative: the row is not stored.",
            dtypes="int64",
        ),
        Tensor(
            "k_cache",
            "Rope rows, in the dtype of kv or int8: [B, 1, slots, D] (Norm) or [pages, page size, 1, D]; written in "
            "place.",
            dtypes=f"{WRITTEN}",
        ),
        Tensor("ckv_cache", "Latent rows, in the form of k_cache; written in place.", dtypes=f"{WRITTEN}"),
        *(p for p, _ in NUMBERS),
        Tensor(
            "v",
            "Separate values [B, 1, S, 128], stored unchanged; kv is then [B, 1, S, rope + 128], and all of it is "
            "normalised. A tensor of another shape is ignored.",
            True,
        ),
        Attr("epsilon", "Added to the mean square.", type=float, default=1e-5, domain="0 <= epsilon < 3.4e38"),
        Attr(
            "cache_mode",
            'Layout of the caches: "Norm": padded; "PA" or "PA_BNSD": pages of rows; "PA_NZ": pages of fragments; '
            '"PA_BLK_BNSD" and "PA_BLK_NZ": the same, and the rows of a sequence begin at a page.',
            type=str,
            default="Norm",
            domain=MODES,
        ),
        Attr("is_output_kv", "Return k_embed and y too.", type=bool, default=False),
    ),
    (
        result("k_embed", "Rope rows in the dtype of kv; empty without is_output_kv.", "=kv"),
        result("y", "Latent rows in the dtype of kv; empty without is_output_kv.", "=kv"),
    ),
    rules=(
        invalid(
            f"{IS_LATENT} and kv.shape[1] == 1 and rope_width(kv, gamma, v) % 2 == 0",
            "kv: [B, 1, S, latent + rope] with an even rope (gamma has the size of the latent; with v the size of kv's "
            "rows)",
            invalid={"kv": "B 2 4 12"},
        ),
        *(
            invalid(
                f"tuple({name}.shape) == (kv.shape[0], 1, kv.shape[2], rope_width(kv, gamma, v))",
                f"{name}: [B, 1, S, rope] (one row per token)",
                when=IS_LATENT,
                invalid={name: "B 1 4 7"},
            )
            for name in ("cos", "sin")
        ),
        *(
            invalid(
                f"cache_fits({name}, kv, {width}, cache_mode)",
                f"{name}: [B, 1, slots, D] in mode Norm, [pages, page size, 1, D] in the others (NZ: contiguous, with "
                "fragments of 16 elements, int8 of 32)",
                when=IS_LATENT,
                invalid={name: words},
            )
            for name, width, words in (("k_cache", KEY_WIDTH, "B 1 6 5"), ("ckv_cache", VALUE_WIDTH, "B 1 6 7"))
        ),
        invalid(
            "k_cache.dim() != 4 or ckv_cache.dim() != 4 or k_cache.shape[:3] == ckv_cache.shape[:3]",
            "ckv_cache: as many slots as k_cache has (an index is for both)",
            invalid={"ckv_cache": "B 1 7 8"},
        ),
        invalid(
            "(k_rope_scale is not None) == (k_cache.dtype == torch_int8)"
            " and (c_kv_scale is not None) == (k_cache.dtype == torch_int8)"
            " and k_cache.dtype in (kv.dtype, torch_int8) and ckv_cache.dtype == k_cache.dtype",
            "k_cache: the dtype of kv, or int8 with scales (int8 caches require both scales, others none)",
            invalid={"k_cache": ("B 1 6 4", "int8"), "ckv_cache": ("B 1 6 8", "int8")},
        ),
        *(rule for _, rule in NUMBERS),
        invalid(
            "index_fits(index, kv, k_cache, cache_mode)",
            "index: [B, S] in mode Norm, one axis in the others (one per token; in the PA_BLK modes one per page)",
            when="kv.dim() == 4 and k_cache.dim() == 4",
            invalid={"index": torch.zeros(3, dtype=torch.int64)},
        ),
        meaning(
            "within(index, buffer(k_cache, cache_mode), low=-9223372036854775808)",
            "index: slots of the caches (in pages, page * page size + slot)",
            when="k_cache.dim() == 4",
            reads=True,
            invalid={"index": torch.tensor([[0, 1, 2, 3], [0, 1, 2, 6]])},
        ),
        invalid(
            "not is_separate(v) or v.shape[:3] == kv.shape[:3] and v.dtype == kv.dtype",
            "v: [B, 1, S, 128] in the dtype of kv (one row per token)",
            given={
                "kv": "B 1 4 132",
                "gamma": "132",
                "v": "B 1 4 128",
                "k_cache": "B 1 6 132",
                "ckv_cache": "B 1 6 128",
            },
            invalid={"v": "B 1 3 128"},
        ),
        *in_place(k_cache=(2, 1, 6, 4), ckv_cache=(2, 1, 6, 8)),
        *untrained(STORED, kv=(2, 1, 4, 12)),
    ),
    formula="""latent, rope = kv;  y = latent / rms(latent) * gamma;  k_embed = npu_interleave_rope(rope, cos, sin)
with v:      rope, rest = kv / rms(kv) * gamma;  k_embed = (npu_interleave_rope(rope, cos, sin), rest),  y = v
ckv_cache[index] = y,  k_cache[index] = k_embed;  in int8: round(row * scale + offset)""",
    functions=FUNCTIONS | functions_in(globals()),
    neutral={"torch_int8": torch.int8},
    sample={
        "kv": "B 1 4 12",
        "gamma": "8",
        "cos": "B 1 4 4",
        "sin": "B 1 4 4",
        "index": torch.tensor([[0, 5, 2, -1], [3, 2, 1, 0]]),
        "k_cache": "B 1 6 4",
        "ckv_cache": "B 1 6 8",
    },
    keywords="k_rope_scale",
    declared=writes("k_cache", "ckv_cache"),
    returns="(k_cache, ckv_cache, k_embed, y): the caches themselves, and the rows before they are rounded to int8.",
    example="""\
>>> kv, gamma, angles = torch.randn(2, 1, 1, 12), torch.ones(8), torch.rand(2, 1, 1, 4)
>>> rope, latent = torch.zeros(3, 16, 1, 4), torch.zeros(3, 16, 1, 8)
>>> places = torch.tensor([16, 40])
>>> *_, y = npu_kv_rmsnorm_rope_cache(
...     kv, gamma, angles.cos(), angles.sin(), places, rope, latent, cache_mode="PA", is_output_kv=True
... )
>>> torch.equal(latent[1, 0], y[0, 0])
True""",
)

RECORDS = (KV_RMSNORM_ROPE,)

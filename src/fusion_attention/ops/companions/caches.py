"""What writes and reads caches, in pages or not: the records."""

from __future__ import annotations

import itertools

import torch

from fusion_attention.contract import Attr, Rule, Tensor
from fusion_attention.ops.companions.common import companion, floats, result
from fusion_attention.ops.shared.rules import invalid, untrained

IDS = "int32 int64"
WRITTEN = "float16 bfloat16 float32 int8 uint8 int16 int32"


def pieces_of(cache: torch.Tensor, rows: torch.Tensor) -> bool:
    """Whether a cache [pages, pieces, slots, width] holds rows [tokens, heads, D] in pieces (the chip's format NZ)."""
    return cache.dim() == 4 and cache.shape[1] * cache.shape[3] == rows.shape[1:].numel()


def lies_in_pieces(cache: torch.Tensor, rows: torch.Tensor, mode: str = "Norm") -> bool:
    """Whether a cache that holds rows has them in pieces. Shapes may allow both: the mode and the width decide."""
    if cache.shape[2:] == rows.shape[1:]:
        chips_width = cache.shape[3] * cache.element_size() == 32
        return mode == "PA_NZ" and chips_width and pieces_of(cache, rows)
    return True


def holds(cache: torch.Tensor, rows: torch.Tensor, pieces: bool = True) -> bool:
    """Whether a cache of pages has rows like these: as they are, or in pieces."""
    if cache.dim() != 4 or rows.dim() != 3:
        return False
    return cache.shape[2:] == rows.shape[1:] or (pieces and pieces_of(cache, rows))


def slots(cache: torch.Tensor, rows: torch.Tensor, mode: str = "Norm") -> int:
    """How many rows a cache of pages holds."""
    return int(cache.shape[0] * cache.shape[2 if lies_in_pieces(cache, rows, mode) else 1])


def written(name: str, text: str, like: str) -> Tensor:
    """A cache of rows, which is written in place."""
    return Tensor(name, text, dtypes=f"={like}")


def waits_for_none(*names: str, shape: tuple[int, ...]) -> tuple[Rule, ...]:
    """Tensors that are written in place, of which autograd must not wait for a gradient."""
    leaf = torch.zeros(shape, dtype=torch.float16, requires_grad=True)
    text, advice = "a tensor that waits for no gradient", "it is written in place: detach() it, or use torch.no_grad()"
    return tuple(invalid(f"not trained({name})", name, advice, text, spoil={name: leaf}) for name in names)


def own_memory(*names: str, shape: tuple[int, ...]) -> tuple[Rule, ...]:
    """Memory that is written has a place for every element."""
    wide = torch.zeros(shape[0], *(1,) * (len(shape) - 1), dtype=torch.float16).expand(shape)
    advice, text = "an expanded tensor cannot be written: clone() it", "memory of its own for every element"
    return tuple(invalid(f"apart({name})", name, advice, text, spoil={name: wide}) for name in names)


def apart(tensor: torch.Tensor) -> bool:
    """Whether no two elements of a tensor are one in memory, as in what expand() makes."""
    return all(stride or size < 2 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def lengths_fill(seq_lens: torch.Tensor, cumulative: bool, rows: int) -> bool:
    """Whether lengths are none below 0, and of so many rows; reads them."""
    if seq_lens.is_meta or seq_lens.dim() != 1:
        return True
    lengths = seq_lens.tolist()
    if cumulative:
        if not lengths or lengths[0] != 0:
            return False
        lengths = [end - start for start, end in itertools.pairwise(lengths)]
    return min(lengths, default=0) >= 0 and sum(lengths) == rows


FUNCTIONS = {"holds": holds, "slots": slots, "apart": apart, "lengths_fill": lengths_fill}
PAGES = (3, 4, 2, 8)
STORED = "what is stored in a cache has no derivative: call it under torch.no_grad()"


def _of_pages(names: tuple[tuple[str, str], ...]) -> tuple[Rule, ...]:
    text = "pages [pages, slots, heads, D] of such rows, or in mode PA_NZ [pages, pieces, slots, width]"
    return tuple(
        invalid(
            f"holds({cache}, {rows}, cache_mode != 'Norm')",
            cache,
            f"{rows} is [tokens, heads, D]",
            text,
            spoil={cache: "3 4 2 5"},
        )
        for rows, cache in names
    )


SCATTER_PA = companion(
    "npu_scatter_pa_kv_cache",
    "torch_npu's store of key and value rows in the pages of a cache, in place.",
    (
        Tensor("key", "[tokens, heads, D].", dtypes=WRITTEN),
        Tensor("value", "[tokens, heads, Dv].", dtypes="=key"),
        written("key_cache", "Pages of keys.", "key"),
        written("value_cache", "Pages of values.", "key"),
        Tensor("slot_mapping", "[tokens]: page * slots of a page + slot; below 0 stores nothing.", dtypes=IDS),
        *(
            Tensor(name, "Of compressed caches.", True)
            for name in ("compress_lens", "compress_seq_offsets", "seq_lens")
        ),
        Attr(
            "cache_mode",
            '"Norm": pages of whole rows; "PA_NZ": pieces where the shape of the caches holds some.',
            type=str,
            default="PA_NZ",
            domain="cache_mode in ('Norm', 'PA_NZ')",
            bad="PA",
        ),
    ),
    (),
    rules=(
        *_of_pages((("key", "key_cache"), ("value", "value_cache"))),
        invalid(
            "slot_mapping.dim() == 1 and slot_mapping.shape[0] == key.shape[0]",
            "slot_mapping",
            "a slot for every row",
            "as many slots as key has tokens",
            when="key.dim() > 0",
            spoil={"slot_mapping": ("5", "zeros")},
        ),
        invalid(
            "value.shape[0] == key.shape[0]",
            "value",
            "one for each key",
            "as many tokens as key has",
            when="key.dim() > 0 and value.dim() > 0",
            spoil={"value": "5 2 W"},
        ),
        invalid(
            "not holds(key_cache, key) or not holds(value_cache, value)"
            " or slots(key_cache, key, cache_mode) == slots(value_cache, value, cache_mode)",
            "value_cache",
            "a slot number means both",
            "as many slots as key_cache has",
            spoil={"value_cache": "2 4 2 W"},
        ),
        Rule(
            "within(slot_mapping, slots(key_cache, key, cache_mode), low=-9223372036854775808)",
            "slot_mapping",
            "each is page * slots of a page + slot",
            "slots that the cache has",
            when="holds(key_cache, key)",
            reads=True,
            spoil={"slot_mapping": torch.tensor([0, 1, 2, 12])},
        ),
        *waits_for_none("key_cache", "value_cache", shape=PAGES),
        *own_memory("key_cache", "value_cache", shape=PAGES),
        *untrained(STORED, key=(4, 2, 8), value=(4, 2, 8)),
        *(
            invalid(
                f"{name} is None",
                name,
                "pass whole caches",
                "None, not a compressed cache",
                spoil={name: "4"},
            )
            for name in ("compress_lens", "compress_seq_offsets", "seq_lens")
        ),
    ),
    formula="key_cache[slot // size, slot % size] = key[token],  slot = slot_mapping[token]; values alike",
    functions=FUNCTIONS,
    sample={
        "key": "4 2 W",
        "value": "4 2 W",
        "key_cache": "3 4 2 W",
        "value_cache": "3 4 2 W",
        "slot_mapping": torch.tensor([11, 0, -1, 5]),
    },
)
GATHER_PA = companion(
    "npu_gather_pa_kv_cache",
    "torch_npu's way of laying the rows of paged sequences end to end, in place.",
    (
        Tensor("key_cache", "Pages of keys.", dtypes=WRITTEN),
        Tensor("value_cache", "Pages of values.", dtypes="=key_cache"),
        Tensor("block_tables", "[sequences, pages]; a page that is not there reads as zeros.", dtypes=IDS),
        Tensor("seq_lens", "[sequences]: rows of each; or cumulative [sequences + 1].", dtypes=IDS),
        written("key", "[tokens, heads, D]; written.", "key_cache"),
        written("value", "[tokens, heads, Dv]; written.", "key_cache"),
        Tensor("seq_offset", "[sequences]: tokens before the first row, in whole pages.", True, dtypes=IDS),
        Attr("is_seq_lens_cumsum", "seq_lens is cumulative, with a 0 first.", type=bool, default=False),
    ),
    (),
    rules=(
        *(
            invalid(
                f"holds({cache}, {rows})",
                rows,
                "[tokens, heads, D]",
                f"rows as {cache} has them",
                spoil={rows: "6 2 5"},
            )
            for rows, cache in (("key", "key_cache"), ("value", "value_cache"))
        ),
        invalid(
            "key.dim() != 3 or value.dim() != 3 or key.shape[0] == value.shape[0]",
            "value",
            "one for each key",
            "as many rows as key has",
            spoil={"value": "5 2 W"},
        ),
        invalid(
            "not holds(key_cache, key) or not holds(value_cache, value)"
            " or slots(key_cache, key) == slots(value_cache, value)",
            "value_cache",
            "a table means both",
            "as many slots as key_cache has",
            spoil={"value_cache": "2 4 2 W"},
        ),
        invalid(
            "block_tables.dim() == 2 and seq_lens.dim() == 1"
            " and seq_lens.shape[0] == block_tables.shape[0] + is_seq_lens_cumsum",
            "seq_lens",
            "and one more, the 0, where they are cumulative",
            "a length for every row of block_tables",
            spoil={"seq_lens": torch.tensor([3, 1, 2])},
        ),
        invalid(
            "seq_offset is None or seq_offset.shape == block_tables.shape[:1]",
            "seq_offset",
            "tokens that are left out",
            "one for every row of block_tables",
            spoil={"seq_offset": torch.tensor([3, 1, 2])},
        ),
        Rule(
            "lengths_fill(seq_lens, is_seq_lens_cumsum, key.shape[0])",
            "seq_lens",
            "key and value are written from end to end",
            "lengths of as many rows as key has",
            when="key.dim() == 3",
            reads=True,
            spoil={"seq_lens": torch.tensor([3, 4])},
        ),
        *waits_for_none("key", "value", shape=(6, 2, 8)),
        *own_memory("key", "value", shape=(6, 2, 8)),
    ),
    formula="key[token] = key_cache[block_tables[sequence, (offset + i) // size], i % size] for row i; values alike",
    functions=FUNCTIONS,
    sample={
        "key_cache": "3 4 2 W",
        "value_cache": "3 4 2 W",
        "block_tables": torch.tensor([[2, 0], [1, 1]]),
        "seq_lens": torch.tensor([5, 1]),
        "key": "6 2 W",
        "value": "6 2 W",
    },
)


SELF, UPDATES = Tensor("input", "What is updated."), Tensor("updates", "What is written.", dtypes="=input")
INDICES = Tensor("indices", "[..., K]: places along the first K axes.", dtypes=IDS)
SCATTER_ND = companion(
    "npu_scatter_nd_update",
    "torch_npu's update of rows of a copy, by their places.",
    (SELF, INDICES, UPDATES),
    (result("y", "In the shape of input.", "=input"),),
    rules=(
        invalid(
            "0 < indices.dim() and 0 < indices.shape[-1] <= input.dim()",
            "indices",
            "the last axis of indices holds one place each",
            "[..., K] with K axes that input has",
            spoil={"indices": torch.zeros(3, 4, dtype=torch.int64), "updates": "3"},
        ),
        invalid(
            "updates.shape == indices.shape[:-1] + input.shape[indices.shape[-1]:]",
            "updates",
            "a row for every place",
            "the shape of indices without its last axis, then that of input without its first K",
            when="indices.dim() > 0",
            spoil={"updates": "3 7"},
        ),
        Rule(
            "within(indices, *input.shape[:indices.shape[-1]])",
            "indices",
            "none counts from the end",
            "places that input has",
            when="0 < indices.dim() and 0 < indices.shape[-1] <= input.dim()",
            reads=True,
            spoil={"indices": torch.tensor([[0], [2], [5]])},
        ),
    ),
    formula="y = input;  y[indices[i]] = updates[i]",
    sample={"input": ("5 W", "float32"), "indices": torch.tensor([[4], [0], [2]]), "updates": "3 W"},
)
SCATTER_ND_ = SCATTER_ND.version(
    "npu_scatter_nd_update_",
    "torch_npu's update of rows by their places, in place.",
    rules=(
        *SCATTER_ND.rules,
        invalid(
            "not (trained(input) and input.is_leaf)",
            "input",
            "it is written in place: detach() it, or use torch.no_grad()",
            "no leaf that waits for a gradient",
            spoil={"input": torch.zeros(5, 8, requires_grad=True)},
        ),
        invalid(
            "apart(input)",
            "input",
            "an expanded tensor cannot be written: clone() it",
            "memory of its own for every element",
            spoil={"input": torch.zeros(5, 1).expand(5, 8)},
        ),
    ),
    formula="input[indices[i]] = updates[i]",
    functions={**SCATTER_ND.functions, **FUNCTIONS},
)

MODES = "cache_mode in ('Norm', 'PA', 'PA_BNSD', 'PA_NZ', 'PA_BLK_BNSD', 'PA_BLK_NZ')"


def index_fits(index: torch.Tensor, kv: torch.Tensor, cache: torch.Tensor, mode: str) -> bool:
    """Whether an index has a place for every token, or for every page that tokens begin."""
    items, tokens = kv.shape[0], kv.shape[2]
    if mode == "Norm":
        return tuple(index.shape) == (items, tokens)
    count = -(-tokens // cache.shape[1]) if "BLK" in mode and cache.shape[1] else tokens
    return tuple(index.shape) == (items * count,)


def room(cache: torch.Tensor, mode: str) -> int:
    """One more than the largest place."""
    return int(cache.shape[2] if mode == "Norm" else cache.shape[0] * cache.shape[1])


def cache_fits(cache: torch.Tensor, kv: torch.Tensor, width: int, mode: str) -> bool:
    """Whether a cache holds rows of a width, in an order that its mode can write."""
    if cache.dim() != 4 or cache.shape[3] != width:
        return False
    if mode == "Norm":
        return cache.shape[0] == kv.shape[0] and cache.shape[1] == 1
    piece = 32 if cache.dtype == torch.int8 else 16
    return cache.shape[2] == 1 and ("NZ" not in mode or (width % piece == 0 and cache.is_contiguous()))


APART = 128  # elements of a row of values that stand apart from kv


def stands_apart(v: torch.Tensor | None) -> bool:
    """Whether values stand apart; a v of another shape says nothing."""
    return v is not None and v.dim() == 4 and v.shape[-1] == APART


def rope_width(kv: torch.Tensor, gamma: torch.Tensor, v: torch.Tensor | None) -> int:
    """How many elements of a row are turned; 0 or less: the tensors do not fit."""
    if stands_apart(v):
        return kv.shape[-1] - APART if gamma.shape[0] == kv.shape[-1] else 0
    return kv.shape[-1] - gamma.shape[0]


def key_width(kv: torch.Tensor, gamma: torch.Tensor, v: torch.Tensor | None) -> int:
    """How many elements a row of k_cache has."""
    return kv.shape[-1] if stands_apart(v) else rope_width(kv, gamma, v)


def value_width(gamma: torch.Tensor, v: torch.Tensor | None) -> int:
    """How many elements a row of ckv_cache has."""
    return APART if stands_apart(v) else gamma.shape[0]


def quantised(name: str, text: str, width: str, cache: str) -> tuple[Tensor, Rule]:
    """Numbers of int8 rows, one for each element, and what is wrong with them."""
    rule = invalid(
        f"{name} is None or tuple({name}.shape) == ({width},)",
        name,
        "one for every element of a row",
        f"[{width}]",
        given={"k_cache": ("B 1 6 4", "int8"), "ckv_cache": ("B 1 6 8", "int8"), **SCALES},
        spoil={name: ("3", "float32")},
    )
    return Tensor(name, text, True, dtypes="float32"), rule


SCALES = {"k_rope_scale": ("4", "float32"), "c_kv_scale": ("8", "float32")}
NUMBERS = [
    quantised("k_rope_scale", "Of int8 k_cache.", "key_width(kv, gamma, v)", "k_cache"),
    quantised("c_kv_scale", "Of int8 ckv_cache.", "value_width(gamma, v)", "ckv_cache"),
    quantised("k_rope_offset", "Added to scaled rows of k_cache.", "key_width(kv, gamma, v)", "k_cache"),
    quantised("c_kv_offset", "Added to scaled rows of ckv_cache.", "value_width(gamma, v)", "ckv_cache"),
]
WHOLE = "kv.dim() == 4 and gamma.dim() == 1 and rope_width(kv, gamma, v) > 0"
KV_RMSNORM_ROPE = companion(
    "npu_kv_rmsnorm_rope_cache",
    "torch_npu's norm of latents and positions of rope rows, stored in two caches: (k_cache, ckv_cache, k_embed, y).",
    (
        floats("kv", "[B, 1, S, latent + rope]."),
        floats("gamma", "Weights of the norm, [latent].", like="kv"),
        floats("cos", "[B, 1, S, rope].", like="kv"),
        floats("sin", "As cos.", like="kv"),
        Tensor("index", "Where rows go; below 0 nothing is stored.", dtypes="int64"),
        Tensor("k_cache", "Rope rows, in the dtype of kv or int8; written.", dtypes=f"{WRITTEN}"),
        Tensor("ckv_cache", "Latent rows, as k_cache; written.", dtypes=f"{WRITTEN}"),
        *(p for p, _ in NUMBERS),
        Tensor("v", "Values apart from kv, [B, 1, S, 128]; of another shape it says nothing.", True),
        Attr(
            "epsilon", "Added to the mean square.", type=float, default=1e-5, domain="0 <= epsilon < 3.4e38", bad=-1.0
        ),
        Attr("cache_mode", "How caches lie.", type=str, default="Norm", domain=MODES, bad="BNSD"),
        Attr("is_output_kv", "Return k_embed and y too.", type=bool, default=False),
    ),
    (
        result("k_embed", "Rope rows in the dtype of kv; without is_output_kv empty.", "=kv"),
        result("y", "Latent rows in the dtype of kv; without is_output_kv empty.", "=kv"),
    ),
    rules=(
        invalid(
            f"{WHOLE} and kv.shape[1] == 1 and rope_width(kv, gamma, v) % 2 == 0",
            "kv",
            "gamma says how long the latent is; beside v it is as long as kv",
            "[B, 1, S, latent + rope] with an even rope",
            spoil={"kv": "B 2 4 12"},
        ),
        *(
            invalid(
                f"tuple({name}.shape) == (kv.shape[0], 1, kv.shape[2], rope_width(kv, gamma, v))",
                name,
                "of every token",
                "[B, 1, S, rope]",
                when=WHOLE,
                spoil={name: "B 1 4 7"},
            )
            for name in ("cos", "sin")
        ),
        *(
            invalid(
                f"cache_fits({name}, kv, {width}, cache_mode)",
                name,
                "NZ is written in pieces of 16, int8 of 32, in contiguous memory",
                "[B, 1, slots, D] in mode Norm, [pages, slots, 1, D] in the others",
                when=WHOLE,
                spoil={name: words},
            )
            for name, width, words in (
                ("k_cache", "key_width(kv, gamma, v)", "B 1 6 5"),
                ("ckv_cache", "value_width(gamma, v)", "B 1 6 7"),
            )
        ),
        invalid(
            "k_cache.dim() != 4 or ckv_cache.dim() != 4 or k_cache.shape[:3] == ckv_cache.shape[:3]",
            "ckv_cache",
            "a place means both",
            "as many slots as k_cache has",
            spoil={"ckv_cache": "B 1 7 8"},
        ),
        invalid(
            "(k_rope_scale is not None) == (k_cache.dtype == torch_int8)"
            " and (c_kv_scale is not None) == (k_cache.dtype == torch_int8)"
            " and k_cache.dtype in (kv.dtype, torch_int8) and ckv_cache.dtype == k_cache.dtype",
            "k_cache",
            "int8 caches need both scales, others have none",
            "the dtype of kv, or int8 with scales",
            spoil={"k_cache": ("B 1 6 4", "int8"), "ckv_cache": ("B 1 6 8", "int8")},
        ),
        *(rule for _, rule in NUMBERS),
        invalid(
            "index_fits(index, kv, k_cache, cache_mode)",
            "index",
            "of every token; of every page in the modes PA_BLK",
            "[B, S] in mode Norm, one axis in the others",
            when="kv.dim() == 4 and k_cache.dim() == 4",
            spoil={"index": torch.zeros(3, dtype=torch.int64)},
        ),
        Rule(
            "within(index, room(k_cache, cache_mode), low=-9223372036854775808)",
            "index",
            "pages count as page * slots",
            "places that the caches have",
            when="k_cache.dim() == 4",
            reads=True,
            spoil={"index": torch.tensor([[0, 1, 2, 3], [0, 1, 2, 6]])},
        ),
        invalid(
            "not stands_apart(v) or v.shape[:3] == kv.shape[:3] and v.dtype == kv.dtype",
            "v",
            "a row of values of every token",
            "[B, 1, S, 128] in the dtype of kv",
            given={
                "kv": "B 1 4 132",
                "gamma": "132",
                "v": "B 1 4 128",
                "k_cache": "B 1 6 132",
                "ckv_cache": "B 1 6 128",
            },
            spoil={"v": "B 1 3 128"},
        ),
        *waits_for_none("k_cache", shape=(2, 1, 6, 4)),
        *waits_for_none("ckv_cache", shape=(2, 1, 6, 8)),
        *own_memory("k_cache", shape=(2, 1, 6, 4)),
        *own_memory("ckv_cache", shape=(2, 1, 6, 8)),
        *untrained(STORED, kv=(2, 1, 4, 12)),
    ),
    formula="""latent, rope = kv;  y = latent / rms(latent) * gamma;  k_embed = npu_interleave_rope(rope, cos, sin)
beside v:    rope, rest = kv / rms(kv) * gamma;  k_embed = (npu_interleave_rope(rope, cos, sin), rest),  y = v
ckv_cache[index] = y,  k_cache[index] = k_embed;  of int8: round(row * scale + offset)""",
    functions={
        **FUNCTIONS,
        "stands_apart": stands_apart,
        "rope_width": rope_width,
        "key_width": key_width,
        "value_width": value_width,
        "index_fits": index_fits,
        "room": room,
        "cache_fits": cache_fits,
    },
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
)

RECORDS = (SCATTER_PA, GATHER_PA, SCATTER_ND, SCATTER_ND_, KV_RMSNORM_ROPE)

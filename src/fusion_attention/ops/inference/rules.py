"""Legality rules of CANN's IncreFlashAttention.

A rule applies to every operator that has its parameter. docs/rulings.md 15 explains severities and error codes.
"""

from dataclasses import replace
from typing import Any

import torch

from fusion_attention.contract import Rule, Settings
from fusion_attention.ops.shared import rules

# Settings of sample calls with axis words, as in sampling.sample(). The sampled layout is BSH.
PAGES: dict[str, Any] = {
    "block_table": "B 2",
    "block_size": 16,
    "actual_seq_lengths": [20, 32],
    "key": "8 16 N2*D",
    "value": "8 16 N2*D",
}
INTEGERS: dict[str, Any] = {"key": ("B S2 N2*D", "int8"), "value": ("B S2 N2*D", "int8"), "antiquant_scale": "2 N2*D"}
NARROW: dict[str, Any] = {"quant_scale2": "1", "attention_out": ("B S1 N1*D", "int8")}
_LISTED = [torch.zeros(1, 6, 32, dtype=torch.float16)] * 257


def beside_its_scale(offset: str, scale: str, given: Settings, wrong: str) -> Rule:
    """Returns a rule: an offset has its scale's shape and dtype; given, wrong: example arguments, an illegal offset."""
    check, advice, text = f"beside({offset}, {scale})", "an offset goes with its scale", f"shape and dtype of {scale}"
    return rules.meaning(check, f"{offset}: {text} ({advice})", stage="dtype", given=given, invalid={offset: wrong})


# These rules also apply to fused inference attention.
SIZED_PAGES = rules.meaning(
    "block_size > 0", "block_size (tokens of a page)", when="block_table is not None", stage="presence", given=PAGES
)
EVEN_HEADS = rules.of_lengths(
    "heads_fit(num_key_value_heads, N1)",
    "num_key_value_heads: a divisor of num_heads, or 0 (all KV heads serve the same number of heads; 0: as "
    "many as num_heads)",
    invalid={"num_key_value_heads": 3},
)
INPUTS = (
    SIZED_PAGES,
    replace(rules.lengths_of_pages("actual_seq_lengths", PAGES), needs=("block_table",)),
    EVEN_HEADS,
    rules.of_lengths(
        "cache_fits(key, input_layout, B, num_key_value_heads or N1, D, block_table, block_size)",
        "key: one tensor of the batch, one tensor per sequence, or (with a block table) pages (num_key_value_heads "
        "counts its heads)",
        when="heads_fit(num_key_value_heads, N1)",
        invalid={"key": "B S2 7", "value": "B S2 7"},
    ),
    rules.of_lengths(
        "len(actual_seq_lengths) == 1 or len(actual_seq_lengths) >= B",
        "actual_seq_lengths: a length per sequence, or one (one length serves all sequences)",
        given={"B": 3},
        invalid={"actual_seq_lengths": [6, 6]},
    ),
    rules.of_lengths(
        "len(kv_padding_size) == 1",
        "kv_padding_size: one number (unused tokens of the cache behind the last token of every sequence)",
        given={"actual_seq_lengths": [4, 5]},
        invalid={"kv_padding_size": [1, 1]},
    ),
    rules.elements("D", "query"),
    rules.finite_scale("scale_value", 1e39, optional=False),
    rules.invalid(
        "same_shapes(value, key)", "value: the shapes of key (one value per key)", invalid={"value": "B 5 N2*D"}
    ),
    rules.cached("actual_seq_lengths"),
    *rules.paged("block_size", "block_size", PAGES, {"actual_seq_lengths": [20, 33]}, [[0, 1], [2, 8]]),
)

MATRICES = (
    rules.meaning(
        "columns_fit(atten_mask, B, N1, S1, columns, ('B', 'B1', 'B1s'))",
        "atten_mask: shape [B, S], [B, 1, S] or [B, 1, 1, S] (1 hides a token; columns are tokens of the cache)",
        given={"atten_mask": "B S2"},
        invalid={"atten_mask": "1 S2"},
    ),
    rules.meaning(
        "columns_fit(pse_shift, B, N1, S1, columns, ('bNs',))",
        "pse_shift: shape [B or 1, N1, 1, S] (added to the scaled scores; columns are tokens of the cache)",
        needs=("block_table",),
        given={"pse_shift": "B N1 1 S2"},
        invalid={"pse_shift": "B N1 1 3"},
    ),
    *(
        rules.limit(
            f"{name} is None or {name}.shape[-1] >= block_table.shape[1] * block_size",
            f"{name}: columns for every page of the table (the chip reads complete pages)",
            when="block_table is not None",
            needs=("block_table",),
            given={**PAGES, name: fitting},
            invalid={"block_table": "B 3", "key": "8 16 N2*D"},
        )
        for name, fitting in (("atten_mask", "B 32"), ("pse_shift", "B N1 1 32"))
    ),
)

INTEGER_CACHE = (
    rules.typed(
        "dtype_of(key) in ('int8', dtype_of(query))",
        "key: int8 or the dtype of query (convert it, or quantise it to int8)",
        invalid={"key": ("B S2 N2*D", "bfloat16"), "value": ("B S2 N2*D", "bfloat16")},
    ),
    rules.meaning(
        "(antiquant_scale is not None) == (dtype_of(key) == 'int8')",
        "antiquant_scale: scales exactly for an int8 cache (value = (int8 + offset) * scale, keys at index 0 and "
        "values at index 1)",
        stage="dtype",
        given=INTEGERS,
        invalid={"antiquant_scale": None},
    ),
    rules.meaning(
        "scale_fits(antiquant_scale, N2, D)",
        "antiquant_scale: shape [2], [2, N2, 1, D], [2, N2, D] or [2, N2*D] (keys at index 0, values at index 1)",
        given=INTEGERS,
        invalid={"antiquant_scale": "2 3"},
    ),
    beside_its_scale("antiquant_offset", "antiquant_scale", {**INTEGERS, "antiquant_offset": "2 N2*D"}, "2 3"),
    rules.refused(
        "antiquant_scale is None or dtype_of(antiquant_scale) == dtype_of(query)",
        "antiquant_scale: the dtype of query (the chip takes no other)",
        given=INTEGERS,
        invalid={"antiquant_scale": ("2 N2*D", "float32")},
    ),
)

SCALED_OUTPUT = (
    rules.meaning(
        "attention_out is None or (quant_scale2 is not None) == (dtype_of(attention_out) == 'int8')",
        "quant_scale2: a scale exactly for int8 output (out = round(x * quant_scale2 + quant_offset2))",
        stage="dtype",
        given=NARROW,
        invalid={"quant_scale2": None},
    ),
    beside_its_scale("quant_offset2", "quant_scale2", {"quant_scale2": "1", "quant_offset2": "1"}, "3"),
    rules.refused(
        "dtype_of(quant_scale2) in ('', 'float32') or dtype_of(quant_scale2) == dtype_of(query) == 'bfloat16'",
        "quant_scale2: float32, or bfloat16 as query (the chip takes bfloat16 beside a bfloat16 query only)",
        given={"quant_scale2": "1"},
        invalid={"quant_scale2": ("1", "bfloat16")},
    ),
)
INTEGER_OUTPUT = (
    *SCALED_OUTPUT,
    rules.meaning(
        "quant_scale2.numel() in (1, N1 * D)",
        "quant_scale2: 1 or N1 * D elements (one number, or one per query head and element)",
        given={"quant_scale2": "1"},
        invalid={"quant_scale2": "3"},
    ),
    rules.typed(
        "attention_out is None or dtype_of(attention_out) in ('int8', dtype_of(query))",
        "attention_out: int8 or the dtype of query (an output is int8 only with quant_scale2)",
        given={"attention_out": ("B S1 N1*D", "float16")},
        invalid={"attention_out": ("B S1 N1*D", "bfloat16")},
    ),
    *(
        rules.limit(f"{name} is None", f"{name} (it belongs to an int8 query, which this operator does not take)")
        for name in ("dequant_scale1", "quant_scale1", "dequant_scale2")
    ),
)

NO_FLOAT32 = rules.refused(
    "dtype_of(query) != 'float32'",
    "query: float16 or bfloat16 (the chip takes float16 and bfloat16)",
    invalid={name: (words, "float32") for name, words in (("query", "B S1 N1*D"), ("key", "B S2 N2*D"))}
    | {"value": ("B S2 N2*D", "float32")},
)
POOLS = (
    rules.limit(
        "N2 * D <= 65536 or key[0].dim() >= 4",
        "key: pages of at most 65536 elements per token (the chip reads no longer rows; pages [blocks, N2, "
        "block_size, D] may have more)",
        when="block_table is not None",
        needs=("block_table",),
        given=PAGES,
        invalid={"N1": 129, "num_heads": 129, "N2": 129, "num_key_value_heads": 129, "D": 512},
    ),
    rules.limit(
        "sum(-(-kv_len // block_size)) <= blocks",
        "key: as many pages as all sequences fill (the chip does not let sequences share pages)",
        when="block_table is not None",
        needs=("block_table",),
        given=PAGES,
        invalid={"block_table": ("B 2", "zeros"), "key": "2 16 N2*D", "value": "2 16 N2*D"},
    ),
)
MOST_HEADS = rules.limit(
    "N1 <= 256",
    "query (the chip takes no more heads)",
    invalid={"N1": 258, "num_heads": 258, "num_key_value_heads": 129, "N2": 129},
)
SHORT_LIST = rules.limit(
    "len(key) <= 256",
    "key: at most 256 tensors (the chip takes no longer list)",
    invalid={"B": 257, "key": _LISTED, "value": _LISTED},
)

LIMITS = (
    rules.limit("S1 == 1", "query (the chip decodes one token per sequence)", invalid={"S1": 2}),
    rules.limit("D <= 512 or D > 768", "query: D <= 512 (the chip takes no wider rows)", invalid={"D": 528}),
    rules.limit("B <= 65536", "query (the chip takes no more sequences)", invalid={"B": 65537, "S2": 1}),
    SHORT_LIST,
    MOST_HEADS,
    rules.limit(
        "N1 <= 64 * N2",
        "num_key_value_heads (the chip lets no more query heads share a key head)",
        invalid={"N1": 65, "num_heads": 65, "num_key_value_heads": 1, "N2": 1},
    ),
    NO_FLOAT32,
    rules.limit(
        "is_contiguous(query, key, value)",
        "query: contiguous query, key and value (the chip takes no strides here)",
        invalid={"query": torch.zeros(2, 1, 128, dtype=torch.float16)[..., ::2]},
    ),
    rules.own_page_ids(PAGES, torch.tensor([[0, 1], [2, 3]])),
    *(
        rules.limit(
            f"is_contiguous({name})",
            f"{name}: a contiguous {what} (the chip takes no strides here)",
            needs=needs,
            given=given,
            invalid={name: gaps},
        )
        for name, what, needs, given, gaps in (
            ("atten_mask", "mask", (), {}, torch.zeros(2, 12, dtype=torch.bool)[:, ::2]),
            ("pse_shift", "bias", ("block_table",), {}, torch.zeros(2, 4, 1, 12, dtype=torch.float16)[..., ::2]),
            ("block_table", "table", (), PAGES, torch.tensor([[0, 9, 1, 9], [2, 9, 3, 9]], dtype=torch.int32)[:, ::2]),
            ("attention_out", "output", (), {}, torch.zeros(2, 1, 128, dtype=torch.float16)[..., ::2]),
            ("antiquant_scale", "tensor", (), INTEGERS, torch.ones(2, 64, dtype=torch.float16)[:, ::2]),
            ("antiquant_offset", "tensor", (), INTEGERS, torch.ones(2, 64, dtype=torch.float16)[:, ::2]),
            ("quant_scale2", "scale", (), NARROW, torch.ones(128)[::2]),
            ("quant_offset2", "offset", (), {**NARROW, "quant_scale2": "N1*D"}, torch.ones(128)[::2]),
        )
    ),
    rules.limit("inner_precise in (0, 1)", "inner_precise (it has no effect)"),
    rules.reserved("padding_mask"),
    rules.limit(
        "block_size <= 512 and block_size % (32 if dtype_of(key) == 'int8' else 16) == 0",
        "block_size: at most 512, a multiple of 16 (int8: 32) (the chip takes no other pages)",
        when="block_table is not None",
        given=PAGES,
        invalid={"block_size": 24, "key": "8 24 N2*D", "value": "8 24 N2*D"},
    ),
    rules.limit(
        "input_layout == 'BNSD' or key[0].dim() == 3",
        "key: pages [blocks, block_size, N2*D] (the chip takes pages of heads beside a BNSD query only)",
        when="block_table is not None",
        needs=("block_table",),
        given=PAGES,
        invalid={"key": "8 N2 16 D", "value": "8 N2 16 D"},
    ),
    *POOLS,
    rules.note(
        "kv_padding_size is None or pads_left",
        "kv_padding_size: left padding beside lengths, in one tensor (it is ignored without lengths, and beside "
        "pages or a list of tensors)",
        invalid={"kv_padding_size": [1]},
    ),
)

# Limits of the first two versions.
EARLY = (
    rules.typed(
        "dtype_of(key) != 'int8'",
        "key: no int8 cache (this version takes no scales for it)",
        invalid={"key": ("B S2 N2*D", "int8"), "value": ("B S2 N2*D", "int8")},
    ),
    rules.limit("pse_shift is None", "pse_shift: no pse_shift (this version ignores it)"),
)

RULES = INPUTS + MATRICES + INTEGER_CACHE + INTEGER_OUTPUT + LIMITS

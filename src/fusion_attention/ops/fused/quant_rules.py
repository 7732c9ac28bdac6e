"""Legality rules on quantization in fused inference attention: integer KV caches, queries, outputs, and scales."""

from typing import Any

from fusion_attention.ops.fused.rules import LATENT, PAGES, ROPE
from fusion_attention.ops.inference.rules import NARROW, SCALED_OUTPUT, beside_its_scale
from fusion_attention.ops.shared import rules
from fusion_attention.ops.shared.params import FLOATS
from fusion_attention.ops.shared.rules import doubt, group, invalid, limit, meaning, refused, reserved, typed

ELSEWHERE = "fp8, hifloat8 and mx formats exist on Ascend 950 alone: this library computes int8 and int4"
ROWS: dict[str, Any] = {"S1": 1, "key": ("B S2 N2*D", "int8"), "value": ("B S2 N2*D", "int8")}
JOINT: dict[str, Any] = {**ROWS, "antiquant_scale": "2 N2*D"}
APART: dict[str, Any] = {**ROWS, "key_antiquant_scale": "N2*D", "value_antiquant_scale": "N2*D"}
SHIFTED: dict[str, Any] = {**APART, "key_antiquant_offset": "N2*D", "value_antiquant_offset": "N2*D"}
EITHER: dict[str, Any] = {**JOINT, **APART}
SCALED = ("antiquant_scale", "key_antiquant_scale", "value_antiquant_scale")
# Several query rows over integer keys.
SEVERAL: dict[str, Any] = {
    "query": ("B S1 N1*D", "bfloat16"),
    "key": ("B S2 N2*D", "int8"),
    "value": ("B S2 N2*D", "int8"),
    **dict(zip(SCALED, (("2 N2*D", "bfloat16"), ("N2*D", "bfloat16"), ("N2*D", "bfloat16")), strict=True)),
}
TOKENS: dict[str, Any] = {
    **ROWS,
    **{f"{side}_antiquant_mode": 1 for side in ("key", "value")},
    **{f"{side}_antiquant_scale": ("B S2", "float32") for side in ("key", "value")},
}
SCALES = ("dequant_scale1", "quant_scale1", "dequant_scale2")
QUERY: dict[str, Any] = {
    "query": ("B S1 N1*D", "int8"),
    "key": ("B S2 N2*D", "int8"),
    "value": ("B S2 N2*D", "int8"),
    **dict.fromkeys(SCALES, ("1", "float32")),
}
# An int8 query with rope over int8 latents, in pages whose rows are in fragments (NZ).
LATENTS: dict[str, Any] = {
    **LATENT,
    "block_table": "B 2",
    "block_size": 128,
    "actual_seq_lengths_kv": [200, 256],
    "query": ("B S1 N1*D", "int8"),
    **dict.fromkeys(("key", "value"), ("8 1 16 128 32", "int8")),
    "query_rope": ("B S1 N1*Dr", "bfloat16"),
    "key_rope": ("8 1 4 128 16", "bfloat16"),
    "query_quant_mode": 3,
    "dequant_scale_query": ("B S1 N1", "float32"),
    **dict.fromkeys(("key_antiquant_scale", "value_antiquant_scale"), ("1", "float32")),
}
APART_GIVEN = "key_antiquant_scale is not None"
FUSED_ONLY = ("block_table",)

QUERIES = (
    meaning(
        f"one_each(({', '.join(SCALES)}))",
        "dequant_scale1: dequant_scale1, quant_scale1 and dequant_scale2 of one element each beside an int8 query "
        "(scores = integers * dequant_scale1, weights = round(quant_scale1 * exp(..)), out = integers * "
        "dequant_scale2)",
        when="dtype_of(query) == 'int8' and query_rope is None",
        given=QUERY,
        invalid={"dequant_scale2": None},
    ),
    *(
        meaning(
            f"{name} is None",
            f"{name}: no {name} (it is for an int8 query without rope parts)",
            when="dtype_of(query) != 'int8' or query_rope is not None",
        )
        for name in SCALES
    ),
    *(
        doubt(
            f"{name} is None",
            f"{name}: no {name} beside scales of an int8 query (it is not read: dequant_scale1 and dequant_scale2 "
            "are the scales)",
            when="dtype_of(query) == 'int8' and dequant_scale1 is not None",
            needs=("dequant_scale1",),
            given=QUERY,
            invalid=invalid,
        )
        for name, invalid in (
            ("antiquant_scale", {"antiquant_scale": ("2 B S2", "float32"), "antiquant_mode": 1}),
            ("key_antiquant_scale", dict.fromkeys(SCALED[1:], ("1", "float32"))),
        )
    ),
    limit(
        "not one_token and S1 > 1 and T1 is None and query_rope is None",
        "query: several padded rows beside scales of an int8 query (the chip takes int8 queries in padded prompts "
        "only)",
        when="dtype_of(query) == 'int8' and query_rope is None",
        needs=("dequant_scale1",),
        given=QUERY,
        invalid={"S1": 1},
    ),
)
# The first version of PromptFlashAttention has no scales.
NO_INTEGERS = (
    typed(
        "dtype_of(query) != 'int8'",
        "query: no int8 query (this version takes no scales for it)",
        invalid={name: (words, "int8") for name, words in (("query", "B S1 N1*D"), ("key", "B S2 N2*D"))}
        | {"value": ("B S2 N2*D", "int8")},
    ),
)
# The third version has rope, but no scale per row for an int8 query with rope.
NO_INTEGER_LATENTS = (
    typed(
        "dtype_of(query) != 'int8' or query_rope is None",
        "query: no int8 query beside rope parts (it needs a scale per row, which FusedInferAttentionScoreV4 and "
        "npu_fused_infer_attention_score_v2 take)",
        given=ROPE,
        invalid={
            "query": ("B S1 N1*D", "int8"),
            **dict.fromkeys(("key", "value"), ("B S2 N2*D", "int8")),
            "query_rope": ("B S1 N1*Dr", "bfloat16"),
            "key_rope": ("B S2 N2*Dr", "bfloat16"),
        },
    ),
)
# torch_npu's second version has no scales for an int8 query without rope.
INTEGERS_WITH_ROPE = (
    typed(
        "dtype_of(query) != 'int8' or query_rope is not None",
        "query: no int8 query without rope parts (this version has no dequant_scale1, quant_scale1 and "
        "dequant_scale2: npu_fused_infer_attention_score has)",
        given=LATENTS,
        invalid=dict.fromkeys(("query_rope", "key_rope")),
    ),
)
CACHES = (
    typed(
        "dtype_of(key) == 'int8' if dtype_of(query) == 'int8' else dtype_of(key) in ('int8', 'int32', dtype_of(query))",
        f"key: the dtype of query, int8 or int32 (an int32 is eight integers of four bits; {ELSEWHERE})",
        needs=FUSED_ONLY,
        invalid={"key": ("B S2 N2*D", "bfloat16"), "value": ("B S2 N2*D", "bfloat16")},
    ),
    meaning(
        "(antiquant_scale is not None or key_antiquant_scale is not None) == (dtype_of(key) in ('int8', 'int32'))",
        "key: scales exactly for integer keys and values (value = (stored + offset) * scale, of keys and of values)",
        when="dtype_of(query) != 'int8'",
        needs=FUSED_ONLY,
        given=EITHER,
        invalid=dict.fromkeys(("antiquant_scale", "key_antiquant_scale", "value_antiquant_scale")),
    ),
    meaning(
        "joint_fits(antiquant_scale, antiquant_mode, N2, D, Dv, B, columns)",
        "antiquant_scale: shape [2], [2, N2, 1, D], [2, N2, D] or [2, N2*D], per token [2, B, keys] (keys at index "
        "0, values at index 1)",
        when="antiquant_scale is not None and key_antiquant_scale is None",
        given=JOINT | dict.fromkeys(("key_antiquant_scale", "value_antiquant_scale")),
        invalid={"antiquant_scale": "2 3"},
    ),
    beside_its_scale("antiquant_offset", "antiquant_scale", {**EITHER, "antiquant_offset": "2 N2*D"}, "2 3"),
    refused(
        "dtype_of(antiquant_scale) == ('float32' if antiquant_mode == 1 else dtype_of(query))",
        "antiquant_scale: the dtype of query, or float32 for scales per token (the chip takes no other)",
        when="antiquant_scale is not None and key_antiquant_scale is None",
        given=JOINT | dict.fromkeys(("key_antiquant_scale", "value_antiquant_scale")),
        invalid={"antiquant_scale": ("2 N2*D", "float32")},
    ),
)
SIDES = (
    *(
        typed(f"{name} {granularity}", f"{name}: a mode of integers ({ELSEWHERE})", invalid={name: 6})
        for name, granularity in (
            ("key_antiquant_mode", "not in (6, 7, 8)"),
            ("value_antiquant_mode", "not in (6, 7, 8)"),
            ("query_quant_mode", "!= 6"),
        )
    ),
    *(
        rules.both_or_neither(f"key_{name}", f"value_{name}", f"keys and values {advice}", given=given)
        for name, advice, given in (
            ("antiquant_scale", "are integers together", APART),
            ("antiquant_offset", "have offsets together", SHIFTED),
        )
    ),
    *(
        beside_its_scale(f"{side}_antiquant_offset", f"{side}_antiquant_scale", SHIFTED, "3")
        for side in ("key", "value")
    ),
    meaning(
        "key_antiquant_mode == value_antiquant_mode or (key_antiquant_mode == 0 and value_antiquant_mode == 1)",
        "value_antiquant_mode: the mode of keys, or 1 beside 0 (values may have scales per token if keys have scales "
        "per channel)",
        when=APART_GIVEN,
        given=TOKENS,
        invalid={"value_antiquant_mode": 3, "value_antiquant_scale": ("B N2 S2", "float32")},
    ),
    meaning(
        "key_antiquant_mode < 4 or block_table is not None",
        "key_antiquant_mode: pages beside modes 4 and 5 (scales are paged as keys are)",
        when=APART_GIVEN,
        given=TOKENS,
        invalid={
            **{f"{name}_antiquant_mode": 4 for name in ("key", "value")},
            **{f"{name}_antiquant_scale": ("8 16", "float32") for name in ("key", "value")},
        },
    ),
    *(
        meaning(
            f"scale_fits({side}_antiquant_scale, {side}_antiquant_mode, N2, {dim}, B, columns - common, blocks, page)",
            f"{side}_antiquant_scale: a shape that {side}_antiquant_mode takes (0: one number or one per head and "
            "element, 1: [B, keys], 2: [N2], 3: [B, N2, keys], 4: [blocks, slots], 5: [blocks, N2, slots])",
            when=f"{side}_antiquant_scale is not None and ({side}_antiquant_mode < 4 or block_table is not None)",
            given=APART,
            invalid={f"{side}_antiquant_scale": "3"},
        )
        for side, dim in (("key", "D"), ("value", "Dv"))
    ),
    *(
        refused(
            f"dtype_of({side}_antiquant_scale) in scale_dtypes({side}_antiquant_mode, query)",
            f"{side}_antiquant_scale: the dtype of query, or float32 for scales per token (the chip takes no other)",
            when=f"{side}_antiquant_scale is not None and dtype_of(query) != 'int8'",
            given=APART,
            invalid={f"{side}_antiquant_scale": ("N2*D", "float32")},
        )
        for side in ("key", "value")
    ),
    meaning(
        "key_antiquant_mode == value_antiquant_mode == 0 or key_antiquant_mode == value_antiquant_mode == 2",
        "key_shared_prefix: scales per channel or one number beside a prefix of integers (scales per token do not "
        "include the tokens of a prefix)",
        when=f"key_shared_prefix is not None and {APART_GIVEN}",
        given={
            **{k: v for k, v in APART.items() if "antiquant" not in k},
            **dict.fromkeys(("key_antiquant_scale", "value_antiquant_scale"), "N2*D"),
            **dict.fromkeys(("key_shared_prefix", "value_shared_prefix"), ("1 4 N2*D", "int8")),
        },
        invalid={k: v for k, v in TOKENS.items() if "antiquant" in k},
    ),
    limit(
        "key_antiquant_mode in (0, 1) and value_antiquant_mode in (0, 1)",
        "key_antiquant_mode: mode 0 or 1 over several query rows (the chip takes the other modes for one-token "
        "queries)",
        when=f"{APART_GIVEN} and not one_token and dtype_of(query) != 'int8'",
        given={**APART, "query": ("B S1 N1*D", "bfloat16"), "S1": 3}
        | dict.fromkeys(("key_antiquant_scale", "value_antiquant_scale"), ("N2*D", "bfloat16")),
        invalid={
            **{f"{side}_antiquant_mode": 2 for side in ("key", "value")},
            **dict.fromkeys(("key_antiquant_scale", "value_antiquant_scale"), ("N2", "bfloat16")),
        },
    ),
)
CACHE_LIMITS = (
    limit(
        "S1 <= 16 and dtype_of(key) == 'int8'",
        "key: int8, and at most 16 query rows (the chip takes integer keys for few query rows)",
        when="integers(key) and not one_token and dtype_of(query) != 'int8'",
        needs=FUSED_ONLY,
        given=SEVERAL,
        invalid={"S1": 17},
    ),
    limit(
        "dtype_of(query) == 'bfloat16'",
        "query: bfloat16 with integer keys (for several query rows the chip takes no other)",
        when="integers(key) and not one_token and dtype_of(query) != 'int8'",
        needs=("key_antiquant_scale",),
        given=SEVERAL,
        invalid={"query": ("B S1 N1*D", "float16"), **EITHER, "S1": 3},
    ),
    limit(
        "block_table is None",
        "key: int8 in pages (the chip takes no pages of int4)",
        when="dtype_of(key) == 'int32'",
        needs=FUSED_ONLY,
        given={
            "S1": 1,
            **PAGES,
            "actual_seq_lengths_kv": [20, 32],
            **dict.fromkeys(("key", "value"), ("8 32 N2*D", "int8")),
            "block_size": 32,
            **{k: v for k, v in EITHER.items() if "antiquant" in k},
        },
        invalid=dict.fromkeys(("key", "value"), ("8 32 16", "int32")),
    ),
)
_OF_ROPE = ("query_rope", "key_rope", "quant_scale2")
LATENT_QUERIES = group(
    typed(
        f"dtype_of(query_rope) in {tuple(FLOATS.split())}",
        "query_rope: floats beside an int8 query (only query, key and value are integers)",
        when="query_rope is not None and key_rope is not None and dtype_of(query) == 'int8'",
        needs=("query_quant_mode",),
        invalid=dict(zip(_OF_ROPE, (("B S1 N1*Dr", "int8"), ("8 1 2 128 32", "int8"), ("1", "float32")), strict=True)),
    ),
    meaning(
        "(query_quant_mode == 3) == (dtype_of(query) == 'int8' and query_rope is not None)",
        "query_quant_mode: 3 exactly for an int8 query with rope parts (an int8 query has a scale per row and head, "
        "and rope parts in floats)",
        invalid={"query_quant_mode": 0},
    ),
    meaning(
        "(dequant_scale_query is not None) == (query_quant_mode == 3)",
        "dequant_scale_query: a scale per row and head exactly in query_quant_mode 3 (it multiplies the products of "
        "integers and of rope parts, as does the key's scale)",
        when="(query_quant_mode == 3) == (dtype_of(query) == 'int8' and query_rope is not None)",
        invalid={"dequant_scale_query": None},
    ),
    meaning(
        "row_scale_fits(dequant_scale_query, query, input_layout, N1)",
        "dequant_scale_query: the shape of query without its elements; BSH: [B, S1, N1] (one per row and head)",
        invalid={"dequant_scale_query": ("B S1 3", "float32")},
    ),
    meaning(
        "one_each((key_antiquant_scale, value_antiquant_scale)) is True and key_antiquant_offset is None and "
        "key_antiquant_mode == value_antiquant_mode == 0",
        "key_antiquant_scale: one scale of keys and one of values beside an int8 query, without offsets (both "
        "multiply the rope product too: pass query_rope divided by them)",
        when="query_quant_mode == 3 and dtype_of(query) == 'int8'",
        needs=("query_quant_mode",),
        invalid=dict.fromkeys(("key_antiquant_scale", "value_antiquant_scale"), ("512", "float32")),
    ),
    given=LATENTS,
)
OUTPUTS = (
    *SCALED_OUTPUT,
    meaning(
        "quant_scale2.numel() in (1, N1 * Dv)",
        "quant_scale2: 1 or N1 * Dv elements (one number, or one per query head and element)",
        given={"quant_scale2": "1"},
        invalid={"quant_scale2": "3"},
    ),
    limit(
        "quant_scale2.numel() == 1 or (Dv % 32 == 0 and not softmax_lse_flag and query_padding_size is None and "
        "kv_padding_size is None)",
        "quant_scale2: one number if Dv is no multiple of 32, or beside softmax_lse or left padding (the chip takes "
        "no other there)",
        when="quant_scale2 is not None",
        given={**NARROW, "quant_scale2": "N1*Dv"},
        invalid={"D": 48, "Dv": 48},
    ),
    limit(
        "query_rope is None and dtype_of(key) != 'int32' and not (mode == 4 and (pre < 0 or next < 0))",
        "quant_scale2: no int8 output beside rope parts, int4 or a window that misses the diagonal (the chip writes "
        "no int8 there)",
        when="quant_scale2 is not None",
        given={**NARROW, "atten_mask": "2048 2048", "sparse_mode": 4, "pre_tokens": 3},
        invalid={"next_tokens": -1},
    ),
    limit(
        "not may_empty(mode, mask_kind, pre, next, q_used, common + kv_used)",
        "quant_offset2: no offset if some row may have no visible key (the chip refuses it)",
        when="quant_offset2 is not None and quant_scale2 is not None and not (mode == 4 and (pre < 0 or next < 0))",
        given={**NARROW, "quant_offset2": "1", "atten_mask": "2048 2048", "sparse_mode": 3},
        invalid={"actual_seq_lengths_kv": [2, 6]},
    ),
    typed(
        "attention_out is None or dtype_of(attention_out) in out_dtypes(query, query_rope, quant_scale2)",
        "attention_out: the dtype of the output (int8 with quant_scale2; otherwise the query's dtype; for an int8 "
        "query that of its rope part, or float16)",
        when="(quant_scale2 is not None) == (dtype_of(attention_out) == 'int8')",
        given={"attention_out": ("B S1 N1*Dv", "float16")},
        invalid={"attention_out": ("B S1 N1*Dv", "bfloat16")},
    ),
    invalid(
        "attention_out is None or tuple(attention_out.shape) == shape_out",
        "attention_out: the shape of the output (rows as long as value's)",
        needs=FUSED_ONLY,
        invalid={"attention_out": ("B S1 N1*32", "float16")},
    ),
)
LOGARITHMS = (
    typed(
        "softmax_lse is None or dtype_of(softmax_lse) == 'float32'",
        "softmax_lse: float32 (sums are computed in float32)",
        when="softmax_lse_flag",
        given={"softmax_lse_flag": True},
        invalid={"softmax_lse": ("B N1 S1 1", "float16")},
    ),
    invalid(
        "softmax_lse is None or softmax_lse.shape[-1] == 1",
        "softmax_lse: a last axis of 1 ([B, N1, S1, 1], packed [T1, N1, 1])",
        when="softmax_lse_flag",
        given={"softmax_lse_flag": True},
        invalid={"softmax_lse": ("B N1 S1 8", "float32")},
    ),
)
# The fifth version does not take the scales of keys and values in one tensor.
LAST = (
    typed(
        "antiquant_scale is None or key_antiquant_scale is not None",
        "antiquant_scale: no antiquant_scale (this version takes key_antiquant_scale and value_antiquant_scale)",
        given=APART,
        invalid={**dict.fromkeys(("key_antiquant_scale", "value_antiquant_scale")), "antiquant_scale": "2 N2*D"},
    ),
)
RESERVED_DTYPES = (
    *("query_dtype", "key_dtype", "value_dtype", "query_rope_dtype", "key_rope_dtype", "key_shared_prefix_dtype"),
    *("value_shared_prefix_dtype", "dequant_scale_query_dtype", "dequant_scale_key_dtype"),
    *("dequant_scale_value_dtype", "dequant_scale_key_rope_dtype"),
)
RESERVED = tuple(reserved(name) for name in ("quant_scale_p", *RESERVED_DTYPES))
OWN_DTYPE = (
    typed(
        "number_fits(out_dtype, query, query_rope, quant_scale2)",
        "out_dtype: torch's number of the output's dtype (1 is int8, 5 float16, 15 bfloat16; beside an int8 query "
        "the output has the dtype of its rope part)",
        invalid={"out_dtype": 6},
    ),
)

INTEGERS = QUERIES + CACHES + SIDES + CACHE_LIMITS + LATENT_QUERIES + LOGARITHMS

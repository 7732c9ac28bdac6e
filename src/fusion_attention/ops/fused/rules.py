"""Legality rules on inputs and lengths of CANN's fused inference attention, and the chip's limits of them.

Rules on the cache are in cache_rules.py, on masks and biases in mask_rules.py, on integers in quant_rules.py; rules
that also apply to IncreFlashAttention are in ops/inference/rules.py. docs/rulings.md 15 explains levels and codes.
"""

from functools import partial
from typing import Any

import torch

from fusion_attention.ops.fused.geometry import PACKED
from fusion_attention.ops.inference.rules import EVEN_HEADS, MOST_HEADS, NO_FLOAT32
from fusion_attention.ops.shared import rules

# Settings of sample calls with axis words, as in sampling.sample(). The sampled layout is BSH.
PAGES: dict[str, Any] = {
    "block_table": "B 2",
    "block_size": 16,
    "actual_seq_lengths_kv": [20, 32],
    "key": "8 16 N2*D",
    "value": "8 16 N2*D",
}
ROPE: dict[str, Any] = {"D": 128, "Dv": 128, "query_rope": True, "key_rope": "B S2 N2*Dr"}
LATENT: dict[str, Any] = {**ROPE, "D": 512, "Dv": 512, "N2": 1, "num_key_value_heads": 1}
ROPELESS: dict[str, Any] = {"query_rope": None, "key_rope": None, "D": 64, "Dv": 64}
PREFIX: dict[str, Any] = {"key_shared_prefix": "1 4 N2*D", "value_shared_prefix": "1 4 N2*Dv"}
PADDED: dict[str, Any] = {"actual_seq_lengths": [2, 3], "actual_seq_lengths_kv": [4, 5]}
HEADS = "num_key_value_heads or N1"
CACHE = f"input_layout, {HEADS}"
UNTRAINED = "inference has no derivative: call it under torch.no_grad(), or train with npu_fusion_attention"
GAPS = torch.zeros(2, 3, 512, dtype=torch.float16)[..., ::2]

# -------------------------------------------------------------------------------------------------------------- lengths

LENGTHS = (
    rules.meaning(
        "actual_seq_lengths is not None",
        "actual_seq_lengths: the ends of packed rows (the tensor does not show where a sequence ends)",
        only=PACKED,
        stage="presence",
        invalid={"actual_seq_lengths": None},
    ),
    rules.meaning(
        "actual_seq_lengths_kv is not None",
        "actual_seq_lengths_kv: the ends of packed keys, or the lengths of paged ones (the tensor does not show where "
        "a sequence ends)",
        only=PACKED,
        stage="presence",
        invalid={"actual_seq_lengths_kv": None},
    ),
    rules.of_lengths(
        "ends_fit(actual_seq_lengths, T1)",
        "actual_seq_lengths: ends that never fall, the last at most T1 (packed lengths are cumulative: [3, "
        "8] is 3 and 5 rows)",
        only=PACKED,
        invalid={"actual_seq_lengths": [3, 9]},
    ),
    rules.of_lengths(
        f"ends_fit(actual_seq_lengths_kv, tokens_of(key, {CACHE}))",
        "actual_seq_lengths_kv: ends that never fall, the last at most the tokens of key (packed lengths are "
        "cumulative: [3, 8] is 3 and 5 keys; paged ones are not)",
        when="block_table is None",
        only=PACKED,
        invalid={"actual_seq_lengths_kv": [5, 13]},
    ),
    rules.of_lengths(
        "len(actual_seq_lengths) == len(actual_seq_lengths_kv)",
        "actual_seq_lengths_kv: as many lengths of keys as of query rows (one per sequence in both lists)",
        only=PACKED,
        invalid={"actual_seq_lengths_kv": [12]},
    ),
    rules.of_lengths(
        "actual_seq_lengths is None or (sum(actual_seq_lengths) == T1 and min(actual_seq_lengths) >= 0)",
        "actual_seq_lengths: lengths that add up to the rows of query (layout SH packs rows; pass the length of every "
        "sequence)",
        only=("SH",),
        invalid={"actual_seq_lengths": [3, 4]},
    ),
    rules.of_lengths(
        "T1 == T2 and (actual_seq_lengths_kv is None or sum(actual_seq_lengths_kv) == T2)",
        "key: as many rows as query (in layout SH a sequence has as many keys as query rows)",
        only=("SH",),
        invalid={"T2": 9},
    ),
    *(
        rules.meaning(
            f"one_per_sequence({name}, B)",
            f"{name}: a length per sequence, or one (one length serves all sequences; input_layout says which axis is "
            f"the batch{besides})",
            when=f"{name} is not None and {unless}input_layout not in ('TND', 'NTD', 'NTD_TND', 'TND_NTD', 'SH')",
            given={"B": 3},
            invalid={name: [2, 2]},
        )
        for name, unless, besides in (
            ("actual_seq_lengths", "not one_token and ", ""),
            ("actual_seq_lengths_kv", "", " (beside pages: of query)"),
        )
    ),
    rules.meaning(
        "rows_within(q_len, S1)",
        "actual_seq_lengths: 0 <= length <= rows of query (query rows of every sequence)",
        invalid={"actual_seq_lengths": [2, 4]},
    ),
    rules.meaning(
        "lengths_within(kv_len, capacity)",
        "actual_seq_lengths_kv: 0 <= length <= tokens of key (keys of every sequence, those of this step included)",
        invalid={"actual_seq_lengths_kv": [3, 7]},
    ),
    *(
        rules.limit(
            check,
            f"{name}: packed lengths that cover all rows of {what} (drop the padding rows, or append a sequence)",
            when=when,
            only=PACKED,
            invalid={name: short},
        )
        for name, check, what, when, short in (
            ("actual_seq_lengths", "ended(q_len, T1, 'query')", "query", "", [3, 7]),
            ("actual_seq_lengths_kv", "ended(kv_len, S2, 'key')", "key", "block_table is None", [5, 11]),
        )
    ),
    rules.limit(
        "1 <= len(actual_seq_lengths) <= 4096",
        "actual_seq_lengths: 1 to 4096 sequences (the chip takes no other count)",
        only=PACKED,
        invalid={"actual_seq_lengths": [8] * 4097, "actual_seq_lengths_kv": [12] * 4097},
    ),
)

# ---------------------------------------------------------------------------------------------------------------- cache

TENSORS = (
    rules.elements("D", "query"),
    rules.invalid(
        "1 <= Dv <= 768", "value (elements per head)", given={"key": "B S2 N2*D"}, invalid={"value": "B S2 N2*769"}
    ),
    rules.finite_scale("scale_value", 1e39, optional=False),
    EVEN_HEADS,
)
PROMPT_CACHE = (
    rules.of_lengths(
        "N2 == (num_key_value_heads or N1)",
        "key: num_key_value_heads heads (0: as many as num_heads)",
        when="heads_fit(num_key_value_heads, N1)",
        invalid={"N2": 4},
    ),
)
# --------------------------------------------------------------------------------------------------------------- limits

LIMITS = (
    NO_FLOAT32,
    rules.limit("D <= 512", "query (the chip takes no wider rows)", invalid={"D": 528, "Dv": 528}),
    rules.limit(
        "D % (64 if dtype_of(key) == 'int32' else 32 if dtype_of(key) == 'int8' else 16) == 0",
        "query: elements that fill 32 bytes: a multiple of 16, with int8 of 32, with int4 of 64 (the chip reads 32 "
        "bytes at a time)",
        invalid={"D": 24, "Dv": 24},
    ),
    rules.refused("Dv <= D", "value (the chip takes no longer values)", invalid={"Dv": 80}),
    MOST_HEADS,
    rules.limit(
        "N1 <= 64 * N2 or D == 512",
        "num_key_value_heads: N1 <= 64 * N2 (the chip lets no more heads share a KV head)",
        invalid={"N1": 65, "num_heads": 65, "num_key_value_heads": 1, "N2": 1},
    ),
    rules.limit(
        "B <= 65536",
        "query (the chip takes no more sequences)",
        invalid={"B": 65537, "S1": 1, "S2": 1, "D": 16, "Dv": 16},
    ),
    rules.limit(
        "S1 <= 20971520 and (S1 > 1 or S2 <= 262144 or block_table is not None)",
        "key: at most 262144 keys of one-token queries, and 20971520 query rows (the chip takes no longer ones)",
        invalid={
            "B": 1,
            "S1": 1,
            "S2": 262145,
            "D": 16,
            "Dv": 16,
            **dict.fromkeys(("N1", "num_heads", "N2", "num_key_value_heads"), 1),
        },
    ),
    rules.refused(
        "(D, Dv) in ((64, 64), (128, 128), (192, 128), (192, 192)) or (query_rope is not None and D in (128, 512))",
        "query: D and Dv of 64, 128, 192 or 192 and 128; with rope parts 128 or 512 (the chip takes no other rows in "
        "packed layouts)",
        only=PACKED,
        invalid={"D": 256, "Dv": 256},
    ),
)
FUSED_LIMITS = (
    rules.limit(
        "input_layout not in ('TND_NTD', 'BSH_NBSD', 'BSND_NBSD', 'BNSD_NBSD') or (query_rope is not None "
        "and D == 512)",
        "input_layout: a layout without _NBSD or _NTD, except with rope parts and D 512 (the chip transposes the "
        "output in no other call)",
        invalid={"input_layout": "BSND_NBSD", **ROPELESS},
    ),
    rules.limit(
        "input_layout not in ('BSH_BNSD', 'BSND_BNSD') or (query_rope is not None and D == 128)",
        "input_layout: BSH_BNSD or BSND_BNSD only with rope parts and D 128 (the chip transposes the output in no "
        "other call)",
        invalid={"input_layout": "BSND_BNSD", **ROPELESS},
    ),
)

# --------------------------------------------------------------------------------------------------- rules of torch_npu

TRAINED = partial(rules.untrained, UNTRAINED, kind=rules.meaning)
TORCH = (
    rules.own_scale("scale_value"),
    rules.reserved("padding_mask"),
    *TRAINED(query=(2, 3, 256), key=(2, 6, 128), value=(2, 6, 128)),
    *TRAINED({"S1": 3}, pse_shift=(2, 4, 3, 6)),
)
TORCH_FUSED = (
    *TRAINED(PREFIX, key_shared_prefix=(1, 4, 128), value_shared_prefix=(1, 4, 128)),
    *TRAINED(ROPE, query_rope=(2, 3, 256), key_rope=(2, 6, 128)),
    *TRAINED({}, learnable_sink=(4,)),
)

INPUTS = TENSORS + LENGTHS + LIMITS

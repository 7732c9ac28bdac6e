"""Legality rules on mask, window, prefix and additive bias (pse) of CANN's training attention; rules.py has the others.

docs/rulings.md 15 explains severities and error codes.
"""

from fusion_attention.ops.shared.rules import PACKED, PADDED, ROPE, content, doubt, limit, meaning, note, typed

# --------------------------------------------------------------------------------------------- settings of sample calls

FULL_MASK = {"atten_mask": "S1 S2"}
SQUARE_MASK = {"atten_mask": "2048 2048"}
MASKED_ROPE = {**ROPE, **SQUARE_MASK, "sparse_mode": 3}
SLOPES = {"pse": ("B N1", "float32"), "S1": 6}
PREFIXED = {"atten_mask": "3072 2048", "sparse_mode": 6, "prefix": [2, 6]}
LONG = {"T1": 2060, "T2": 2060, "actual_seq_qlen": [1030, 2060], "actual_seq_kvlen": [1030, 2060]}
TABLE = {"S1": 1030, "S2": 1030, "TND": LONG, "pse": "B N1 1024 S2", **SQUARE_MASK, "sparse_mode": 3}

PSE_BESIDE_0 = meaning(
    "pse is not None",
    "pse_type: a pse tensor beside pse_type 0 (without pse, pass pse_type 1)",
    when="pse_type == 0 and query_rope is None and B * S1 * S2 > 0",
    invalid={"pse_type": 0},
)

MASKS = (
    note(
        "atten_mask is not None",
        "sparse_mode: atten_mask beside a sparse_mode other than 0 (a training operator without atten_mask ignores "
        "sparse_mode: every key is visible)",
        when="sparse_mode != 0",
        invalid={"sparse_mode": 3, "atten_mask": None},
    ),
    meaning(
        "fits(atten_mask, 'B N1 S1 S2 | B 1 S1 S2 | 1 1 S1 S2 | S1 S2')",
        "atten_mask (1 removes a score; key padding [B, 1, 1, S2] must be expanded: mask.expand(B, 1, S1, S2))",
        when="atten_mask is not None and sparse_mode in (0, 1, 5)",
        only=PADDED,
        given=FULL_MASK,
        invalid={"atten_mask": "B 1 1 S2"},
    ),
    meaning(
        "fits(atten_mask, 'S1 S2 | T1 T2 | 1 1 S1 S2 | B 1 S1 S2 | B N1 S1 S2')",
        "atten_mask (S1 and S2 are the longest q and kv lengths here)",
        when="atten_mask is not None and sparse_mode in (0, 1)",
        only=PACKED,
        given=FULL_MASK,
        invalid={"atten_mask": "6 7"},
    ),
    note(
        "fits(atten_mask, 'B N1 S1 S2 | B 1 S1 S2')",
        "atten_mask: a mask for every sequence (prefixes of different lengths need different masks: a key is visible "
        "only if the prefix band and the mask leave it)",
        when="atten_mask is not None and sparse_mode == 5 and prefixes_differ(prefix)",
        only=PADDED,
        given={"atten_mask": "B 1 S1 S2", "sparse_mode": 5, "prefix": [2, 6]},
        invalid={"atten_mask": "S1 S2"},
    ),
    meaning(
        "fits(atten_mask, '2048 2048 | 1 2048 2048 | 1 1 2048 2048')",
        "atten_mask (torch.ones(2048, 2048, dtype=torch.bool).triu(1), whatever the lengths)",
        when="atten_mask is not None and sparse_mode in (2, 3, 4, 7, 8)",
        given=SQUARE_MASK | {"sparse_mode": 2},
        invalid={"atten_mask": "S1 S2"},
    ),
    meaning(
        "fits(atten_mask, '3072 2048 | 1 3072 2048 | 1 1 3072 2048')",
        "atten_mask (the 2048 x 2048 triangle above 1024 rows of 1024 zeros and 1024 ones)",
        when="atten_mask is not None and sparse_mode == 6",
        given=PREFIXED,
        invalid={"atten_mask": "2048 2048"},
    ),
    limit(
        "atten_mask.dim() == 2",
        "atten_mask: a compressed mask of two dimensions (a compressed mask is passed without leading axes)",
        when="atten_mask is not None and sparse_mode in (2, 3, 4, 6, 7, 8)",
        given=SQUARE_MASK | {"sparse_mode": 2},
        invalid={"atten_mask": "1 1 2048 2048"},
    ),
    doubt(
        "is_compressed_mask(atten_mask, sparse_mode)",
        "atten_mask: the documented content of a compressed mask (here sparse_mode alone has an effect, but the chip "
        "may read the mask: torch.ones(2048, 2048, dtype=torch.bool).triu(1))",
        reads=True,
        when="atten_mask is not None and sparse_mode in (2, 3, 4, 6, 7, 8)",
        given=SQUARE_MASK | {"sparse_mode": 2},
        invalid={"atten_mask": ("2048 2048", "zeros")},
    ),
    content(
        "window_holds_mask(atten_mask, pre_tokens, next_tokens, q_len, kv_len)",
        "atten_mask: a mask that agrees with pre_tokens and next_tokens (a key is visible only if the mask leaves it "
        "and the window contains it)",
        when="atten_mask is not None and sparse_mode == 0",
        given=FULL_MASK,
        invalid={"pre_tokens": 1},
    ),
    meaning(
        "dense_window(sparse_mode, pre_tokens, next_tokens, S1, S2)",
        "pre_tokens: pre_tokens and next_tokens that leave a visible key (the window must overlap the score matrix; "
        "2147483647 is no limit)",
        when="atten_mask is not None and sparse_mode in (0, 4)",
        only=PADDED,
        given=SQUARE_MASK | {"sparse_mode": 4},
        invalid={"pre_tokens": -6, "next_tokens": 1},
    ),
    limit(
        "packed_window(sparse_mode, pre_tokens, next_tokens, q_len, kv_len)",
        "pre_tokens: lengths and a window that leave every row a key (the chip refuses packed rows without a key)",
        when="atten_mask is not None and sparse_mode in (0, 3, 4, 7, 8)",
        only=PACKED,
        given=SQUARE_MASK | {"sparse_mode": 3},
        invalid={"actual_seq_kvlen": [2, 12]},
    ),
    meaning(
        "prefix_fits(prefix, q_len, kv_len)",
        "prefix: per sequence a prefix between max(0, kv_len - q_len) and kv_len (a shorter prefix lies inside the "
        "causal part; give its lower limit)",
        when="atten_mask is not None and sparse_mode == 6",
        given=PREFIXED,
        invalid={"prefix": [1, 6]},
    ),
    note(
        "prefix_fits(prefix, q_len, kv_len)",
        "prefix: per sequence a prefix between max(0, kv_len - q_len) and kv_len (without a legal prefix mode 5 is as "
        "mode 1, in which the mask alone removes keys)",
        when="atten_mask is not None and sparse_mode == 5",
        only=PADDED,
        given={"atten_mask": "B 1 S1 S2", "sparse_mode": 5, "prefix": [2, 6]},
        invalid={"prefix": [1, 6]},
    ),
)

BIASES = (
    typed(
        "pse.dtype == query.dtype",
        "pse: the dtype of query (convert it with .to(query.dtype))",
        when="pse is not None and pse_type in (0, 1)",
        given={"pse": "B N1 S1 S2"},
        invalid={"pse": ("B N1 S1 S2", "float64")},
    ),
    typed(
        "pse is not None and float32(pse)",
        "pse: float32 slopes [B, N1] or [N1] (pse_type 2 and 3 take slopes in pse)",
        when="pse_type in (2, 3)",
        needs=("pse_type",),
        given={"pse_type": 2} | SLOPES,
        invalid={"pse": ("B N1", "float16")},
    ),
    meaning(
        "known_form(pse_form, pse, B, N1, S1, S2)",
        "pse: [B or 1, N1, S1 or 1, S2], or [B or 1, N1, 1024, S2] for S1 >= 1024 (compressed means the last 1024 "
        "rows of the full table)",
        when="pse is not None and pse_type in (0, 1)",
        only=PADDED,
        given={"pse": "B N1 S1 S2"},
        invalid={"pse": "B 1 S1 S2"},
    ),
    meaning(
        "known_form(pse_form, pse, B, N1, S1, S2)",
        "pse: [B or 1, N1, 1024, S2], or 1-D with N1 * sum(q_len * kv_len) or N1 * sum(kv_len) elements (S1 and S2 "
        "are the longest lengths; blocks lie end to end)",
        when="pse is not None and pse_type in (0, 1)",
        only=PACKED,
        given={"pse": "1 N1 1024 S2"},
        invalid={"pse": "1 N1 1023 S2"},
    ),
    meaning(
        "fits(pse, 'B N1 | 1 N1 | N1')",
        "pse (pse_type 2 and 3 take one slope per head)",
        when="pse is not None and pse_type in (2, 3)",
        needs=("pse_type",),
        given={"pse_type": 2} | SLOPES,
        invalid={"pse": ("B 3", "float32")},
    ),
    meaning(
        "S1 == S2",
        "pse (a compressed pse needs q and kv of one length)",
        when="pse_form == 'aligned' and pse_type in (0, 1)",
        only=PADDED,
        given=TABLE,
        invalid={"S2": 1040},
    ),
    meaning(
        "table_reaches(sparse_mode, atten_mask, pre_tokens, next_tokens, prefix, q_len, kv_len)",
        "pse: no visible key beyond the diagonal of a row that the compressed pse rebuilds (use a causal mode or "
        "mask, or pass the full table)",
        when="pse_form == 'aligned' and pse_type in (0, 1)",
        reads=True,
        given=TABLE,
        invalid={"atten_mask": "S1 S2", "sparse_mode": 1},
    ),
    content(
        "is_shifted(pse)",
        "pse: compressed rows that are shifted copies of each other (earlier rows are rebuilt from later ones)",
        when="pse_form == 'aligned' and pse_type in (0, 1) and S1 > 1024",
        given={**TABLE, "pse": ("B N1 1024 S2", "zeros")},
        invalid={"pse": "B N1 1024 S2"},
    ),
    limit(
        "S1 == S2",
        "pse (computed biases measure from the upper left corner)",
        when="pse_type in (2, 3)",
        needs=("pse_type",),
        only=PADDED,
        given={"pse_type": 2} | SLOPES,
        invalid={"S1": 4},
    ),
    meaning(
        "positions(q_start_idx) and positions(kv_start_idx)",
        "q_start_idx: positions below 2**40 (element 0 of each is the position of the first row, and of the first key)",
        when="q_start_idx is not None or kv_start_idx is not None",
        given={"kv_start_idx": [0]},
        invalid={"q_start_idx": [1 << 41]},
    ),
    limit(
        "all(q_len > 0) and all(kv_len > 0)",
        "pse: no empty sequence (the chip takes no pse beside an empty sequence)",
        only=PACKED,
        given={"pse": "1 N1 1024 S2"},
        invalid={"actual_seq_qlen": [0, 8], "pse": "1 N1 1024 S2"},
    ),
    limit(
        "pse is None",
        "pse (mode 7 is for a sequence that is split between devices, which pse does not support)",
        when="sparse_mode == 7 and atten_mask is not None",
        only=PACKED,
        given=SQUARE_MASK | {"sparse_mode": 7, "next_tokens": 0},
        invalid={"pse": "1 N1 1024 S2"},
    ),
)

"""The rules of CANN's training attention: what FlashAttentionScore, VarLenScore and their gradients demand of a call.

Each rule is asked of every record that has the parameter it blames. Levels and codes: docs/rulings.md 15.
"""

from __future__ import annotations

from fusion_attention.ops.flash_score_rules import BIASES, DENSE, MASKS, PACKED, ROPE
from fusion_attention.record import INVALID, NULL_POINTER, Rule

INPUTS = (
    Rule(
        "actual_seq_qlen is not None",
        "actual_seq_qlen",
        "give the cumulative end of every sequence",
        only=PACKED,
        stage="presence",
        code=NULL_POINTER,
        spoil={"actual_seq_qlen": None},
    ),
    Rule(
        "actual_seq_kvlen is not None",
        "actual_seq_kvlen",
        "give the cumulative end of every sequence's keys",
        only=PACKED,
        stage="presence",
        code=NULL_POINTER,
        spoil={"actual_seq_kvlen": None},
    ),
    Rule(
        "actual_seq_qlen is None and actual_seq_kvlen is None",
        "actual_seq_qlen",
        "only layout TND reads lengths; they are ignored here",
        text="no lengths in a padded layout",
        only=DENSE,
        level="note",
        spoil={"actual_seq_qlen": [4, 8]},
    ),
    Rule(
        "len(actual_seq_qlen) == len(actual_seq_kvlen) and len(actual_seq_qlen) > 0",
        "actual_seq_qlen",
        "one end per sequence in both; an empty tensor has the ends [0]",
        only=PACKED,
        stage="lengths",
        spoil={"actual_seq_qlen": [8]},
    ),
    Rule(
        "rising(actual_seq_qlen)",
        "actual_seq_qlen",
        "inclusive cumulative ends: [3, 8] is lengths 3 and 5; strip the leading 0 of cu_seqlens",
        text="ends that never fall, or only to a tail of zeros",
        only=PACKED,
        stage="lengths",
        spoil={"actual_seq_qlen": [8, 3]},
    ),
    Rule(
        "rising(actual_seq_kvlen)",
        "actual_seq_kvlen",
        "inclusive cumulative ends: [3, 8] is lengths 3 and 5; strip the leading 0 of cu_seqlens",
        text="ends that never fall, or only to a tail of zeros",
        only=PACKED,
        stage="lengths",
        spoil={"actual_seq_kvlen": [12, 5]},
    ),
    Rule(
        "last_end(actual_seq_qlen) <= T1",
        "actual_seq_qlen",
        "ends are cumulative: the last one counts all tokens",
        text="ends within the T1 tokens of query",
        only=PACKED,
        stage="lengths",
        spoil={"actual_seq_qlen": [3, 9]},
    ),
    Rule(
        "last_end(actual_seq_kvlen) <= T2",
        "actual_seq_kvlen",
        "ends are cumulative: the last one counts all tokens",
        text="ends within the T2 tokens of key",
        only=PACKED,
        stage="lengths",
        spoil={"actual_seq_kvlen": [5, 13]},
    ),
    Rule("N2 > 0 and N1 % N2 == 0", "key", "every key head serves the same number of query heads", spoil={"N2": 3}),
    Rule("1 <= D <= 768", "query", "elements per head", code=INVALID, spoil={"D": 769}),
    Rule("1 <= Dv <= 768", "value", "elements per head", code=INVALID, spoil={"Dv": 0}),
    Rule("Dv <= D", "value", "the chip takes no wider value rows", level="limit", code=INVALID, spoil={"Dv": 16}),
    Rule("N1 <= 256", "query", "the chip takes no more heads", level="limit", spoil={"N1": 258}),
    Rule("abs(scale) < 3.4e38", "scale", "of float32", text="a finite scale", spoil={"scale": float("inf")}),
    Rule(
        "inner_precise in (0, 1, 2)", "inner_precise", "only 2 has an effect", level="limit", spoil={"inner_precise": 3}
    ),
    Rule(
        "padding_mask is None", "padding_mask", "reserved: leave it out", level="limit", spoil={"padding_mask": "S1 S2"}
    ),
    Rule(
        "softmax_in is None", "softmax_in", "reserved: leave it out", level="limit", spoil={"softmax_in": "B N1 S1 8"}
    ),
    Rule(
        "softmax_layout == ''",
        "softmax_layout",
        "padded statistics have one order",
        only=DENSE,
        level="limit",
        code=INVALID,
        spoil={"softmax_layout": "TND"},
    ),
    Rule(
        "dpse is None or pse is None or (dpse.shape == pse.shape and dpse.dtype == pse.dtype)",
        "dpse",
        "the gradient lies as the bias does",
        text="shape and dtype of pse",
        code=INVALID,
        given={"pse": "B N1 S1 S2", "TND": {"pse": "1 N1 1024 S2"}},
        spoil={"dpse": "B N1 S1 3"},
    ),
    Rule("0 <= sparse_mode <= 6", "sparse_mode", "7 and 8 need layout TND", only=DENSE, spoil={"sparse_mode": 7}),
    Rule(
        "sparse_mode in (0, 1, 2, 3, 4, 6, 7, 8)",
        "sparse_mode",
        "packed sequences have prefix only as mode 6",
        only=PACKED,
        spoil={"sparse_mode": 5},
    ),
)

DROPOUT = (
    Rule(
        "drop_mask.numel() * 8 >= N1 * sum(q_len * kv_len)",
        "drop_mask",
        "one bit per score, row-major over [B, N1, S1, S2], least significant bit first",
        text="a bit for each of N1 * sum(q_len * kv_len) scores",
        when="drop_mask is not None",
        given={"drop_mask": "1024", "keep_prob": 0.5},
        spoil={"drop_mask": "4"},
    ),
)
GIVEN_DROPOUT = (
    Rule(
        "(drop_mask is None) == (keep_prob == 1)",
        "drop_mask",
        "a mask needs keep_prob < 1, and keep_prob < 1 needs a mask",
        text="a drop mask exactly when keep_prob is below 1",
        given={"drop_mask": "1024", "keep_prob": 0.5},
        spoil={"keep_prob": 1.0},
    ),
)
DRAWN_DROPOUT = (
    Rule(
        "drop_mask is None or keep_prob < 1",
        "drop_mask",
        "a mask needs keep_prob < 1",
        text="no mask with keep_prob 1",
        given={"drop_mask": "1024", "keep_prob": 0.5},
        spoil={"keep_prob": 1.0},
    ),
    Rule(
        "drop_mask is None or (seed == 0 and offset == 0)",
        "drop_mask",
        "the mask says what is kept; a seed would draw it",
        text="a mask or a seed, not both",
        given={"drop_mask": "1024", "keep_prob": 0.5},
        spoil={"seed": 7},
    ),
    Rule(
        "replays(seed, offset)",
        "seed",
        "pass the seed and offset that the forward returned; bits given to it are used by autograd only",
        text="the forward's seed and offset beside keep_prob < 1",
        when="keep_prob < 1",
        needs=("dy",),
        spoil={"keep_prob": 0.5},
    ),
)

ROPES = (
    Rule(
        "(query_rope is None) == (key_rope is None)",
        "query_rope",
        "rope parts come in pairs",
        text="query_rope and key_rope, or neither",
        stage="presence",
        code=NULL_POINTER,
        given=ROPE,
        spoil={"key_rope": None},
    ),
    Rule(
        "query_rope is None",
        "query_rope",
        "the chip takes rope only in layout TND",
        text="no rope in a padded layout",
        only=DENSE,
        level="limit",
        code=INVALID,
        spoil=ROPE,
    ),
    Rule(
        "atten_mask is not None",
        "atten_mask",
        "the chip takes rope only with a mask",
        text="a mask beside rope",
        when="query_rope is not None",
        only=PACKED,
        needs=("query_rope",),
        level="limit",
        stage="presence",
        code=NULL_POINTER,
        given=ROPE | {"sparse_mode": 0, "atten_mask": "S1 S2"},
        spoil={"atten_mask": None},
    ),
    Rule(
        "Dr <= D and Dr % 8 == 0 and D % 8 == 0",
        "query_rope",
        "the chip takes no other sizes beside rope",
        when="query_rope is not None",
        only=PACKED,
        level="limit",
        code=INVALID,
        given=ROPE,
        spoil={"Dr": 4},
    ),
    Rule(
        "pse is None and drop_mask is None and keep_prob == 1",
        "query_rope",
        "the chip takes neither pse nor dropout beside rope",
        when="query_rope is not None",
        only=PACKED,
        level="limit",
        code=INVALID,
        given=ROPE,
        spoil={"pse": "1 N1 1024 S2"},
    ),
)

RULES = INPUTS + MASKS + BIASES + DROPOUT + ROPES

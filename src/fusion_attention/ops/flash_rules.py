"""The rules of CANN's training attention: what FlashAttentionScore, VarLenScore and their gradients demand of a call.

Each rule is asked of every record that has the parameter it blames. Levels and codes: docs/rulings.md 15.
"""

from __future__ import annotations

import torch

from fusion_attention.ops.flash_score_rules import BIASES, DENSE, MASKS, ROPE
from fusion_attention.ops.rules import (
    PACKED,
    elements,
    finite_scale,
    group,
    limit,
    of_lengths,
    presence,
    reserved,
    rope_pair,
)
from fusion_attention.record import INVALID, Rule

INPUTS = (
    *(
        presence(
            f"{ends} is not None",
            ends,
            f"give the cumulative end of every {whose}",
            only=PACKED,
            spoil={ends: None},
        )
        for ends, whose in (("actual_seq_qlen", "sequence"), ("actual_seq_kvlen", "sequence's keys"))
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
    of_lengths(
        "len(actual_seq_qlen) == len(actual_seq_kvlen) and len(actual_seq_qlen) > 0",
        "actual_seq_qlen",
        "one end per sequence in both; an empty tensor has the ends [0]",
        only=PACKED,
        spoil={"actual_seq_qlen": [8]},
    ),
    *(
        of_lengths(
            f"rising({ends})",
            ends,
            "inclusive cumulative ends: [3, 8] is lengths 3 and 5; strip the leading 0 of cu_seqlens",
            text="ends that never fall, or only to a tail of zeros",
            only=PACKED,
            spoil={ends: falling},
        )
        for ends, falling in (("actual_seq_qlen", [8, 3]), ("actual_seq_kvlen", [12, 5]))
    ),
    *(
        of_lengths(
            f"last_end({ends}) <= {axis}",
            ends,
            "ends are cumulative: the last one counts all tokens",
            text=f"ends within the {axis} tokens of {side}",
            only=PACKED,
            spoil={ends: beyond},
        )
        for ends, axis, side, beyond in (
            ("actual_seq_qlen", "T1", "query", [3, 9]),
            ("actual_seq_kvlen", "T2", "key", [5, 13]),
        )
    ),
    Rule("N2 > 0 and N1 % N2 == 0", "key", "every key head serves the same number of query heads", spoil={"N2": 3}),
    elements("D", "query"),
    elements("Dv", "value", 0),
    limit("Dv <= D", "value", "the chip takes no wider value rows", code=INVALID, spoil={"Dv": 16}),
    limit("N1 <= 256", "query", "the chip takes no more heads", spoil={"N1": 258}),
    finite_scale("scale", optional=False),
    limit("inner_precise in (0, 1, 2)", "inner_precise", "only 2 has an effect", spoil={"inner_precise": 3}),
    reserved("padding_mask", "S1 S2"),
    reserved("softmax_in", "B N1 S1 8"),
    limit(
        "softmax_layout == ''",
        "softmax_layout",
        "padded statistics have one order",
        only=DENSE,
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

DROPPED = {"drop_mask": "1024", "keep_prob": 0.5}
DROPOUT = (
    Rule(
        "drop_mask.numel() * 8 >= N1 * sum(q_len * kv_len)",
        "drop_mask",
        "one bit per score, row-major over [B, N1, S1, S2], least significant bit first",
        text="a bit for each of N1 * sum(q_len * kv_len) scores",
        when="drop_mask is not None",
        given=DROPPED,
        spoil={"drop_mask": "4"},
    ),
)
GIVEN_DROPOUT = (
    Rule(
        "(drop_mask is None) == (keep_prob == 1)",
        "drop_mask",
        "a mask needs keep_prob < 1, and keep_prob < 1 needs a mask",
        text="a drop mask exactly when keep_prob is below 1",
        given=DROPPED,
        spoil={"keep_prob": 1.0},
    ),
)
DRAWN_DROPOUT = (
    Rule(
        "drop_mask is None or keep_prob < 1",
        "drop_mask",
        "a mask needs keep_prob < 1",
        text="no mask with keep_prob 1",
        given=DROPPED,
        spoil={"keep_prob": 1.0},
    ),
    Rule(
        "replays(seed, offset)",
        "seed",
        "pass the seed and offset that the forward returned; a mask that was given to it is known to autograd alone",
        text="the forward's seed and offset beside keep_prob < 1",
        when="keep_prob < 1",
        needs=("dy",),
        spoil={"keep_prob": 0.5},
    ),
)
GIVEN_OFFSET = (
    Rule(
        "countable(offset)",
        "offset",
        "offsets are counted in 32 bits",
        text="0 <= offset < 2**32",
        when="keep_prob < 1",
        reads=True,
        given={"keep_prob": 0.5, "seed": torch.tensor([3], device="cpu"), "offset": torch.tensor([0], device="cpu")},
        spoil={"offset": torch.tensor([1 << 32], device="cpu")},
    ),
)

ROPES = (
    rope_pair("query_rope", "key_rope", ROPE),
    limit(
        "query_rope is None",
        "query_rope",
        "the chip takes rope only in layout TND",
        text="no rope in a padded layout",
        only=DENSE,
        code=INVALID,
        spoil=ROPE,
    ),
    presence(
        "atten_mask is not None",
        "atten_mask",
        "the chip takes rope only with a mask",
        text="a mask beside rope",
        when="query_rope is not None",
        only=PACKED,
        needs=("query_rope",),
        level="limit",
        given=ROPE | {"sparse_mode": 0, "atten_mask": "S1 S2"},
        spoil={"atten_mask": None},
    ),
    *group(
        limit(
            "Dr <= D and Dr % 8 == 0 and D % 8 == 0",
            "query_rope",
            "the chip takes no other sizes beside rope",
            spoil={"Dr": 4},
        ),
        limit(
            "pse is None and drop_mask is None and keep_prob == 1",
            "query_rope",
            "the chip takes neither pse nor dropout beside rope",
            spoil={"pse": "1 N1 1024 S2"},
        ),
        when="query_rope is not None",
        only=PACKED,
        code=INVALID,
        given=ROPE,
    ),
)

RULES = INPUTS + MASKS + BIASES + DROPOUT + ROPES

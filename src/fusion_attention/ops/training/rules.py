"""Legality rules of CANN's training attention: FlashAttentionScore, VarLenScore and their gradients.

A rule applies to every operator that has its parameter. docs/rulings.md 15 explains severities and error codes.
"""

from dataclasses import replace

import torch

from fusion_attention.contract import INVALID, Settings
from fusion_attention.ops.shared import rules
from fusion_attention.ops.shared.params import FLOATS
from fusion_attention.ops.training.mask_rules import BIASES, MASKED_ROPE, MASKS, PREFIXED, PSE_BESIDE_0

INPUTS = (
    *(
        rules.needed(ends, f"give the cumulative end of every {whose}", only=rules.PACKED)
        for ends, whose in (("actual_seq_qlen", "sequence"), ("actual_seq_kvlen", "sequence's keys"))
    ),
    rules.note(
        "actual_seq_qlen is None and actual_seq_kvlen is None",
        "actual_seq_qlen: no lengths in a padded layout (only layout TND reads lengths; they are ignored here)",
        only=rules.PADDED,
        invalid={"actual_seq_qlen": [4, 8]},
    ),
    rules.of_lengths(
        "len(actual_seq_qlen) == len(actual_seq_kvlen) and len(actual_seq_qlen) > 0",
        "actual_seq_qlen (one end per sequence in both; an empty tensor has the ends [0])",
        only=rules.PACKED,
        invalid={"actual_seq_qlen": [8]},
    ),
    *(
        rules.of_lengths(
            f"rising({ends})",
            f"{ends}: ends that never fall, or only to a tail of zeros (inclusive cumulative ends: [3, 8] is lengths "
            "3 and 5; strip the leading 0 of cu_seqlens)",
            only=rules.PACKED,
            invalid={ends: falling},
        )
        for ends, falling in (("actual_seq_qlen", [8, 3]), ("actual_seq_kvlen", [12, 5]))
    ),
    *(
        rules.of_lengths(
            f"last_end({ends}) <= {axis}",
            f"{ends}: ends within the {axis} tokens of {side} (ends are cumulative: the last one counts all tokens)",
            only=rules.PACKED,
            invalid={ends: beyond},
        )
        for ends, axis, side, beyond in (
            ("actual_seq_qlen", "T1", "query", [3, 9]),
            ("actual_seq_kvlen", "T2", "key", [5, 13]),
        )
    ),
    *rules.covered(
        "actual_seq_qlen", "actual_seq_kvlen", rules.ENDS, {"actual_seq_qlen": [3, 7], "actual_seq_kvlen": [5, 11]}
    ),
    rules.meaning("N2 > 0 and N1 % N2 == 0", "key (all KV heads serve the same number of heads)", invalid={"N2": 3}),
    rules.elements("D", "query"),
    rules.elements("Dv", "value", 0),
    rules.refused("Dv <= D", "value (the chip takes no wider value rows)", invalid={"Dv": 16}),
    rules.limit("N1 <= 256", "query (the chip takes no more heads)", invalid={"N1": 258}),
    rules.finite_scale("scale", optional=False),
    rules.reserved("padding_mask", invalid={"padding_mask": ("S1 S2", "uint8")}),
    rules.reserved("softmax_in"),
    *(
        rules.limit(
            f"{name} is None or has_dtype({name}, '{dtypes}')",
            f"{name}: {dtypes.replace(' ', ' or ')} (reserved: leave it out)",
            stage="dtype",
            code=INVALID,
            invalid={name: (words, "int16")},
        )
        for name, words, dtypes in (("padding_mask", "S1 S2", "uint8 bool"), ("softmax_in", "B N1 S1 8", FLOATS))
    ),
    rules.refused("softmax_layout == ''", "softmax_layout (padded statistics have one order)", only=rules.PADDED),
    rules.invalid(
        "dpse is None or pse is None or (dpse.shape == pse.shape and dpse.dtype == pse.dtype)",
        "dpse: shape and dtype of pse (the gradient has the form of the bias)",
        given={"pse": "B N1 S1 S2", "TND": {"pse": "1 N1 1024 S2"}},
        invalid={"dpse": "B N1 S1 3"},
    ),
    rules.meaning("0 <= sparse_mode <= 6", "sparse_mode (7 and 8 need layout TND)", only=rules.PADDED),
    rules.meaning(
        "sparse_mode in (0, 1, 2, 3, 4, 6, 7, 8)",
        "sparse_mode (the prefix mode of packed sequences is 6)",
        only=rules.PACKED,
    ),
)

DROPPED = {"drop_mask": "1024", "keep_prob": 0.5}
DROPOUT = (
    rules.meaning(
        "drop_mask.numel() * 8 >= N1 * sum(q_len * kv_len)",
        "drop_mask: a bit for each of N1 * sum(q_len * kv_len) scores (one bit per score, row-major over [B, N1, S1, "
        "S2], least significant bit first)",
        given=DROPPED,
        invalid={"drop_mask": "4"},
    ),
)
GIVEN_DROPOUT = (
    rules.meaning(
        "(drop_mask is None) == (keep_prob == 1)",
        "drop_mask: a drop mask exactly when keep_prob is below 1 (a mask needs keep_prob < 1, and keep_prob < 1 "
        "needs a mask)",
        given=DROPPED,
        invalid={"keep_prob": 1.0},
    ),
)
DRAWN_DROPOUT = (
    rules.meaning(
        "drop_mask is None or keep_prob < 1",
        "drop_mask: no mask with keep_prob 1 (a mask needs keep_prob < 1)",
        given=DROPPED,
        invalid={"keep_prob": 1.0},
    ),
    rules.meaning(
        "replays(seed, offset)",
        "seed: the forward's seed and offset beside keep_prob < 1 (pass the seed and offset that the forward "
        "returned; after a forward with a drop mask, use autograd)",
        when="keep_prob < 1",
        needs=("dy",),
        invalid={"keep_prob": 0.5},
    ),
)
GIVEN_OFFSET = (
    rules.meaning(
        "countable(offset)",
        "offset: 0 <= offset < 2**32 (offsets are counted in 32 bits)",
        when="keep_prob < 1",
        reads=True,
        given={"keep_prob": 0.5, "seed": torch.tensor([3], device="cpu"), "offset": torch.tensor([0], device="cpu")},
        invalid={"offset": torch.tensor([1 << 32], device="cpu")},
    ),
)

ROPES = (
    rules.rope_pair("query_rope", "key_rope", MASKED_ROPE),
    rules.refused(
        "query_rope is None",
        "query_rope: no rope in a padded layout (the chip takes rope only in layout TND)",
        only=rules.PADDED,
        invalid=MASKED_ROPE,
    ),
)

# The chip's limits of sequences and tokens.
TINY = {"N1": 1, "N2": 1, "D": 8, "Dv": 8}
MANY = "the chip takes no more sequences"
PREFIXES = "prefix is not None and len(prefix) > 0"


def ends(count: int) -> Settings:
    """Returns arguments of example calls of `count` packed sequences of one token."""
    each = [*range(1, count + 1)]
    return {"actual_seq_qlen": each, "actual_seq_kvlen": each, "T1": count, "T2": count, **TINY}


SIZES = (
    rules.limit(
        "S1 <= 1048576 and S2 <= 1048576",
        "query: at most 1048576 tokens in a sequence (the chip takes no longer sequences)",
        only=rules.PADDED,
        invalid={"B": 1, "S1": 1, "S2": 1048577, **TINY, "D": 1, "Dv": 1},
    ),
    rules.limit(
        "T1 <= 1048576 and T2 <= 1048576",
        "query: at most 1048576 tokens in all sequences (the chip takes no more tokens)",
        only=rules.PACKED,
        invalid={"T2": 1048577, "actual_seq_kvlen": [5, 1048577], **TINY},
    ),
    rules.limit(
        "B <= 2097152",
        f"query ({MANY})",
        only=rules.PADDED,
        invalid={"B": 2097153, "S1": 1, "S2": 1, **TINY, "D": 1, "Dv": 1},
    ),
    rules.limit(
        "len(actual_seq_qlen) <= 2048",
        f"actual_seq_qlen: at most 2048 sequences ({MANY})",
        only=rules.PACKED,
        invalid=ends(2049),
    ),
    rules.limit(
        "len(actual_seq_qlen) <= 1024",
        f"prefix: at most 1024 packed sequences with prefixes ({MANY})",
        when=f"{PREFIXES} and len(actual_seq_qlen) <= 2048",
        only=rules.PACKED,
        given=PREFIXED,
        invalid={**ends(1025), "prefix": [0] * 1025},
    ),
    rules.limit(
        "B <= 2048",
        f"prefix: at most 2048 sequences with prefixes ({MANY})",
        when=PREFIXES,
        only=rules.PADDED,
        given=PREFIXED,
        invalid={"B": 2049, "S1": 1, "S2": 1, **TINY, "prefix": [0] * 2049},
    ),
)

# --------------------------------------------------------------------------------------- rules of some versions

PRECISION = (rules.limit("inner_precise in (0, 1, 2)", "inner_precise (only 2 has an effect)"),)
# Versions without sinks; those with sinks accept 768 elements.
NARROW = (
    rules.refused(
        "D <= 512 or D > 768", "query: D <= 512 (the chip takes no wider rows)", invalid={"D": 520, "Dv": 520}
    ),
)
# The first two versions; later ones accept shorter value rows.
ALIKE = (
    rules.refused(
        "Dv >= D", "value: value rows as long as those of key (this version takes no shorter ones)", invalid={"Dv": 4}
    ),
)
MASKED = rules.needed(
    "atten_mask",
    "the chip takes rope only with a mask",
    text="a mask beside rope",
    when="query_rope is not None",
    only=rules.PACKED,
    needs=("query_rope",),
    level="limit",
    given=MASKED_ROPE | {"sparse_mode": 0, "atten_mask": "S1 S2"},
)
BESIDE_ROPE = (
    MASKED,
    *rules.group(
        rules.limit(
            "Dr <= D and Dr % 8 == 0 and D % 8 == 0",
            "query_rope (the chip takes no other sizes beside rope)",
            invalid={"Dr": 4},
        ),
        rules.limit(
            "pse is None and drop_mask is None and keep_prob == 1",
            "query_rope (the chip takes neither pse nor dropout beside rope)",
            invalid={"pse": "1 N1 1024 S2"},
        ),
        when="query_rope is not None",
        only=rules.PACKED,
        code=INVALID,
        given=MASKED_ROPE,
    ),
)
# The third packed version, which is for rope, requires this of every call.
FOR_ROPE = (
    replace(MASKED, when="", text="a mask", advice="this version takes no call without one"),
    *rules.group(
        rules.limit("D % 8 == 0", "query (the chip takes no other sizes here)", when="D <= 768", invalid={"D": 12}),
        rules.limit(
            "Dr <= D and Dr % 8 == 0",
            "query_rope (the chip takes no other sizes beside rope)",
            given=MASKED_ROPE,
            invalid={"Dr": 4},
        ),
        rules.limit(
            "pse is None",
            "pse: no pse (this version takes none; pse_type 0 and 1 are the same without it)",
            invalid={"pse": "1 N1 1024 S2"},
        ),
        rules.limit("drop_mask is None and keep_prob == 1", "drop_mask (this version drops nothing)", invalid=DROPPED),
        code=INVALID,
    ),
)

# ---------------------------------------------------------------------------------------------- packed statistics


# Settings of sample calls: each score of a row is the row's index in [T1, N1], token-major.
_PLACE, _FIRST = torch.arange(32.0).reshape(8, 4, 1), torch.eye(8)[0]
_CLIMBING = {
    "query": (_PLACE * _FIRST).half(),
    "key": _FIRST.expand(12, 2, 8).half().contiguous(),
    "softmax_max": _PLACE.expand(8, 4, 8).contiguous(),
    "softmax_sum": torch.tensor([5.0] * 3 + [7.0] * 5).reshape(8, 1, 1).expand(8, 4, 8).contiguous(),
}


STATISTICS = (
    rules.content(
        "statistics_in_order((softmax_max, softmax_sum), softmax_layout, (query, query_rope), (key, key_rope), scale, "
        "atten_mask, (sparse_mode, pre_tokens, next_tokens, prefix), q_len, kv_len)",
        "softmax_max: statistics in the order of softmax_layout (pass the forward's statistics and its softmax_layout; "
        "their shape does not show the order)",
        when="pse is None and N1 > 1",
        only=rules.PACKED,
        needs=("dy",),
        invalid=_CLIMBING,
    ),
)

ALL = STATISTICS + INPUTS + MASKS + BIASES + DROPOUT + ROPES + SIZES
RULES = (*ALL, PSE_BESIDE_0, *BESIDE_ROPE)
# Limits of pse do not apply to versions without pse.
ROPE_RULES = (*(r for r in ALL if r.param != "pse" or r.level != "limit"), *FOR_ROPE)

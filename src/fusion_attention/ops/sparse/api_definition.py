"""Definition (parameters, rules) of this library's sparse_attention(), with parameters that indexer functions have too.

Unlike CANN's operators it takes lengths instead of cumulative ends, a flag `causal` instead of a sparse mode, and dim_v
if values are the first elements of keys.
"""

from typing import Any

from fusion_attention.contract import Array, Attr
from fusion_attention.ops.shared.params import OWN_FLOATS, spelled
from fusion_attention.ops.shared.rules import NOT_CUMULATIVE, PACKED, covered, meaning, needed, of_lengths
from fusion_attention.ops.sparse import definitions
from fusion_attention.ops.sparse.checks import lengths
from fusion_attention.ops.sparse.lowered_call import DIFFERENTIABLE
from fusion_attention.ops.sparse.rules import LENGTHS, SELECTION, SHAPES, TABLES

Q_LENGTHS = Array("actual_seq_qlen", "Query rows of every sequence; required in layout TND.", True, "q_len")
KV_LENGTHS = Array(
    "actual_seq_kvlen", "Keys of every sequence; required if paged; None in layout TND: q_len.", True, "kv_len"
)
CAUSAL = Attr(
    "causal", "A row sees the keys up to its position; the last row sees the last key.", type=bool, default=True
)
PAGED_KEYS = needed(
    "actual_seq_kvlen",
    "pages do not show where a sequence ends",
    text="the lengths of paged keys",
    when="block_table is not None",
    given={"block_table": "2 M", "actual_seq_kvlen": [6, 6]},
)
PACKED_KEYS = of_lengths(
    "actual_seq_kvlen is not None or T2 is None or sum(actual_seq_qlen) <= T2",
    "actual_seq_kvlen: the lengths of keys, or at least sum(actual_seq_qlen) keys (without it, keys have the lengths "
    "of queries)",
    when="actual_seq_qlen is not None",
    only=PACKED,
    given={"T2": 8, "actual_seq_kvlen": None},
    invalid={"T2": 6},
)
COVERED = covered(
    "actual_seq_qlen", "actual_seq_kvlen", NOT_CUMULATIVE, {"actual_seq_qlen": [3, 4], "actual_seq_kvlen": [5, 6]}
)
OPTIONAL_SCALE = spelled(definitions.SCALE, "scale", text="Factor on q . k; None: 1 / sqrt(D + Dr).", default=None)
SAMPLE = {"actual_seq_qlen": [3, 5], "actual_seq_kvlen": [5, 7]}


def derive(names: dict[str, Any]) -> dict[str, Any]:
    """Returns {name: value} derived from the arguments `names`: lengths, sizes of axes, and CANN's sparse_mode."""
    return lengths(names) | {"sparse_mode": 3 if names["causal"] else 0}


def _derive(names: dict[str, Any]) -> dict[str, Any]:
    """Returns derive(names), with Dv (elements per head of values) equal to dim_v (or D) without a value tensor."""
    return derive(names) | ({"Dv": names["dim_v"] or names["D"]} if names["value"] is None else {})


RECORD = definitions.V1.version(
    "sparse_attention",
    "Softmax attention over the blocks of keys that every row selects.",
    params=(
        spelled(definitions.QUERY, "q", dtypes=OWN_FLOATS),
        *(spelled(definitions.KEY, "k"), spelled(definitions.VALUE, "v"), spelled(definitions.INDICES, "indices")),
        *(definitions.LAYOUT, Q_LENGTHS, KV_LENGTHS),
        *(spelled(definitions.QUERY_ROPE, "q_rope"), spelled(definitions.KEY_ROPE, "k_rope")),
        OPTIONAL_SCALE,
        spelled(definitions.BLOCK, "block", default=1),
        CAUSAL,
        Attr("dim_v", "If v is None, values are the first dim_v elements of keys; 0: all.", default=0),
        *(spelled(definitions.SINKS, "sink", dtypes=OWN_FLOATS), spelled(definitions.TABLE, "page_table")),
    ),
    rules=(
        *(*LENGTHS, PAGED_KEYS, PACKED_KEYS, *COVERED, *TABLES, *SHAPES, *SELECTION),
        meaning(
            "0 <= dim_v <= D and (dim_v == 0 or value is None)",
            "dim_v: at most D, and 0 if v is a tensor (its last axis is the number of elements)",
            invalid={"dim_v": 4},
        ),
    ),
    rulings=(1, 2, 6, 10, 11, 12, 17, 18, 23, 25),
    neutral={**definitions.NEUTRAL, "cumulative": False, "sparse_mode": 3},
    # The gradient of softmax_max stands for that of max + log(sum).
    trains={"attention_out": DIFFERENTIABLE, "softmax_max": DIFFERENTIABLE},
    blank_is_absent=False,
    derive=_derive,
    samples={"BSND": {"value": True}, "TND": {"value": True, **SAMPLE}},
)
RECORDS = (RECORD,)

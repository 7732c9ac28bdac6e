"""Definition (parameters, legality rules) of this library's lightning_indexer(), which selects keys by top-k scores."""

from dataclasses import replace
from typing import Any

from fusion_attention.ops.indexer.definitions import (
    COUNT,
    HEADS,
    KEY,
    NEUTRAL,
    RATIO,
    RESIDUAL,
    RESIDUALS,
    SCORES,
    V1,
    WEIGHTS,
)
from fusion_attention.ops.shared.params import OWN_FLOATS, spelled
from fusion_attention.ops.shared.rules import doubt
from fusion_attention.ops.sparse import api_definition as sparse
from fusion_attention.ops.sparse.definitions import LAYOUT, QUERY, TABLE
from fusion_attention.ops.sparse.rules import LENGTHS, TABLES


def derive(names: dict[str, Any]) -> dict[str, Any]:
    """Returns {name: value} derived from the arguments `names`: lengths, axis sizes, sparse mode; K: keys per row."""
    return sparse.derive(names) | {"K": names["sparse_count"]}


RECORD = V1.version(
    "lightning_indexer",
    "Selects the top_k keys with the highest scores for each row; a score is a weighted sum of ReLU(q . k) over heads.",
    params=(
        *(spelled(QUERY, "q", dtypes=OWN_FLOATS), spelled(KEY, "k")),
        replace(WEIGHTS, dtypes=OWN_FLOATS),
        spelled(COUNT, "top_k", default=2048),
        *(LAYOUT, sparse.Q_LENGTHS, sparse.KV_LENGTHS, sparse.CAUSAL, RATIO),
        replace(RESIDUAL, text=f"{RESIDUAL.text} None: query rows are all tokens of their sequences."),
        spelled(TABLE, "page_table"),
    ),
    rules=(
        *(*LENGTHS, sparse.PAGED_KEYS, sparse.PACKED_KEYS, *sparse.COVERED, *TABLES, HEADS, *SCORES),
        *RESIDUALS,
        doubt(
            "sparse_count <= max(S2, 8192)",
            "sparse_count: at most max(S2, 8192) (lists have this length, with -1 behind the row's visible keys)",
            invalid={"sparse_count": 8193},
        ),
    ),
    rulings=(6, 13, 17, 18, 23),
    neutral={**NEUTRAL, "cumulative": False, "return_values": True},
    blank_is_absent=False,
    derive=derive,
    samples={"BSND": {"sparse_count": 8}, "TND": {"sparse_count": 8, **sparse.SAMPLE}},
)
RECORDS = (RECORD,)

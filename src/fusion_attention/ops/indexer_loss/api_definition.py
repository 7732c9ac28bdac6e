"""Definition (parameters, legality rules) of `fusion_attention.indexer_loss`, over selected or all visible keys."""

from dataclasses import replace

from fusion_attention.contract import Tensor
from fusion_attention.ops.indexer_loss import definitions
from fusion_attention.ops.indexer_loss.lowered_call import DIFFERENTIABLE
from fusion_attention.ops.shared.params import OWN_FLOATS, spelled
from fusion_attention.ops.sparse import api_definition as sparse
from fusion_attention.ops.sparse.definitions import KEY, KEY_ROPE, LAYOUT, QUERY, QUERY_ROPE, SINKS
from fusion_attention.ops.sparse.rules import LENGTHS, SELECTION, SHAPES, SOME_ENTRIES

LISTS = spelled(
    definitions.INDICES,
    "indices",
    text="The keys that every row selects, shared by all heads, then -1; None: all visible keys.",
    optional=True,
)
RECORD = definitions.V1.version(
    "indexer_loss",
    "Kullback-Leibler divergence of the indexer's distribution over keys from the attention's, to train an indexer.",
    params=(
        *(spelled(QUERY, "q", dtypes=OWN_FLOATS), spelled(KEY, "k", form=None)),
        Tensor(
            "lse",
            "The attention's log-sum-exp of every row and head, sinks included; -inf in rows without visible keys.",
            dtypes="float32 float64",
            shape={"BSND": "B N1 S1", "TND": "T1 N1"},
        ),
        *(spelled(definitions.QUERY_INDEX, "index_q"), spelled(definitions.KEY_INDEX, "index_k")),
        replace(definitions.WEIGHTS, dtypes=OWN_FLOATS),
        LISTS,
        *(LAYOUT, sparse.Q_LENGTHS, sparse.KV_LENGTHS, spelled(QUERY_ROPE, "q_rope"), spelled(KEY_ROPE, "k_rope")),
        *(sparse.OPTIONAL_SCALE, sparse.CAUSAL, spelled(SINKS, "sink", dtypes=OWN_FLOATS)),
    ),
    rules=(
        *(*LENGTHS, sparse.PACKED_KEYS, *sparse.COVERED, *SHAPES, definitions.HEADS, *definitions.SCORES),
        *(
            replace(rule, when="sparse_indices is not None", given={**rule.given, "sparse_indices": True})
            for rule in (SOME_ENTRIES, *SELECTION)
        ),
    ),
    rulings=(2, 6, 12, 14, 17, 18, 23, 24),
    neutral={**definitions.NEUTRAL, "cumulative": False, "sparse_mode": 3},
    blank_is_absent=False,
    derive=sparse.derive,
    trains={"loss": DIFFERENTIABLE},
    samples={"TND": sparse.SAMPLE},
)
RECORDS = (RECORD,)

"""Definition (parameters, rules, formula) of `fusion_attention.indexer_target_loss`: the caller passes the target."""

from dataclasses import replace

from fusion_attention.contract import Tensor
from fusion_attention.ops.indexer.definitions import RATIO, RESIDUAL, RESIDUALS
from fusion_attention.ops.indexer_loss import api_definition
from fusion_attention.ops.indexer_loss.definitions import LSE_SCORES, NEUTRAL, V1, of_index
from fusion_attention.ops.indexer_loss.given_target_definitions import FUNCTIONS, LISTS
from fusion_attention.ops.indexer_loss.lower import lower_target
from fusion_attention.ops.indexer_loss.lowered_call import DIFFERENTIABLE, RESULTS, fresh
from fusion_attention.ops.shared.params import OWN_FLOATS, output, spelled
from fusion_attention.ops.shared.rules import invalid
from fusion_attention.ops.sparse import api_definition as sparse
from fusion_attention.ops.sparse.definitions import LAYOUT
from fusion_attention.ops.sparse.rules import LENGTHS, SIZES, SOME_ENTRIES

QUERY_INDEX, KEY_INDEX, WEIGHTS = of_index("N1", "D", OWN_FLOATS, "query_index")
FORMULA = """I_j = sum_h w_h * max(0, S_hj),   S_hj = q_h . k_j,   y = softmax(I)      over the keys j of a row
loss = sum_j p_j * (ln max(p_j, 1e-8) - ln max(y_j, 1e-8)),   dI = y * sum_j p_j - p
dweights_h = sum_j dI_j * max(0, S_hj),   dS = dI * w * [S > 0],   dq = dS k,   dk = sum_h dS^T q"""
TEX = r"""\begin{aligned}
I_j &= \sum_h w_h \max(0, S_{hj}), \qquad S_{hj} = q_h \cdot k_j, \qquad y = \operatorname{softmax}(I) \\
loss &= \sum_j p_j\,\big(\ln \max(p_j, 10^{-8}) - \ln \max(y_j, 10^{-8})\big), \qquad dI = y \sum_j p_j - p \\
dw_h &= \sum_j dI_j \max(0, S_{hj}), \quad dS_{hj} = dI_j\, w_h\, [S_{hj} > 0],
  \quad dq_h = \sum_j dS_{hj}\, k_j, \quad dk_j = \sum_h dS_{hj}\, q_h
\end{aligned}"""
# A target has an element for every entry of a list, or for every key.
WIDTH = invalid(
    "Pk == (S2 if sparse_indices is None else K) or layout == 'TND' and sparse_indices is None and Pk >= S2",
    "target: K elements per row with lists of K entries, otherwise S2 (one per entry, or one per key; in TND at least "
    "those of the longest sequence)",
    when="sparse_indices is None or K >= 1",
    invalid={"Pk": 5},
)
TARGET = Tensor(
    "target",
    "The attention's probability of every key, a mean over heads; it may sum to less than 1 and has no gradient.",
    dtypes="float32 float64",
    shape={"BSND": "B S1 1 Pk", "TND": "T1 1 Pk"},
)

RECORD = V1.version(
    "indexer_target_loss",
    "Kullback-Leibler divergence of the indexer's distribution over keys from a target, to train an indexer.",
    params=(
        *(spelled(QUERY_INDEX, "index_q"), spelled(KEY_INDEX, "index_k"), replace(WEIGHTS, dtypes=OWN_FLOATS), TARGET),
        api_definition.LISTS,
        *(LAYOUT, sparse.Q_LENGTHS, sparse.KV_LENGTHS, sparse.CAUSAL, RATIO),
        replace(RESIDUAL, text=f"{RESIDUAL.text} None: query rows are all tokens of their sequences."),
        output("dquery_index", "Gradient of index_q.", QUERY_INDEX.shape, "=query_index"),
        output("dkey_index", "Gradient of index_k.", KEY_INDEX.shape, "=query_index"),
        output("dweights", "Gradient of weights.", WEIGHTS.shape, "=weights"),
        output("loss", "The loss, summed over all rows.", "1", "float32"),
    ),
    rules=(
        *(*LENGTHS, sparse.PACKED_KEYS, *sparse.COVERED, *LSE_SCORES, WIDTH, *RESIDUALS),
        *(
            replace(
                rule, when="sparse_indices is not None", given={**rule.given, "sparse_indices": True, "Pk": SIZES["K"]}
            )
            for rule in (SOME_ENTRIES, *LISTS)
        ),
    ),
    formula=FORMULA,
    tex=TEX,
    rulings=(2, 6, 12, 17, 18, 23),
    neutral={**NEUTRAL, "cumulative": False, "sparse_mode": 3, **dict.fromkeys(("softmax_lse", "Pk", "q_start"))},
    blank_is_absent=False,
    derive=sparse.derive,
    functions=FUNCTIONS,
    lower=lower_target,
    results=RESULTS,
    fresh=fresh,
    trains={"loss": DIFFERENTIABLE},
    sizes={**api_definition.RECORD.sizes, "N1": 8, "D": 128, "Pk": 6},
    samples={"TND": {**sparse.SAMPLE, "Pk": 7}},
)
RECORDS = (RECORD,)

"""Definitions (parameters, legality rules, formulas) of CANN's KL losses of the lightning indexer, with their
gradients, and of the softmax statistics of the indexer's scores.

Most rules are in ops/sparse/rules.py; the conversion for back ends is in lower.py.
"""

from dataclasses import replace
from typing import Any

import torch

from fusion_attention.contract import REQUIRED, Declared, Op, Tensor
from fusion_attention.ops.indexer_loss.lower import lower
from fusion_attention.ops.indexer_loss.lowered_call import RESULTS, STATISTICS, fresh, fresh_statistics
from fusion_attention.ops.shared.params import FLOATS, or_none, output, spelled
from fusion_attention.ops.shared.prototypes import of_cann
from fusion_attention.ops.shared.rules import ROPE, limit, no_float32, only_dim, refused
from fusion_attention.ops.sparse import rules
from fusion_attention.ops.sparse.checks import FUNCTIONS, lengths
from fusion_attention.ops.sparse.definitions import (
    DETERMINISTIC,
    INDEX_ENDS,
    KEY,
    KEY_ROPE,
    KV_LENGTHS,
    LAYOUT,
    LAYOUTS,
    MAX_IN,
    MODE,
    NEXT,
    PACKED_SAMPLE,
    PRE,
    Q_LENGTHS,
    QUERY,
    QUERY_ROPE,
    SAVED,
    SCALE,
    SINKS,
    SUM_IN,
    rows,
)

# ------------------------------------------------------------------------------------------------------- parameters


def of_index(heads: str, dim: str, dtypes: str, like: str) -> tuple[Tensor, Tensor, Tensor]:
    """Returns definitions of the indexer's tensor parameters query_index, key_index and weights.
    heads, dim: names of axes; dtypes: of query_index; like: the tensor whose dtype key_index has."""
    return (
        Tensor("query_index", "Query rows of the indexer.", dtypes=dtypes, shape=rows("1", heads, dim)),
        Tensor(
            "key_index",
            "Key rows of the indexer, one head for all of its query heads.",
            dtypes=f"={like}",
            shape=rows("2", "1", dim),
        ),
        Tensor(
            "weights",
            "Weight of every head of the indexer, in its query's dtype or float32; a scale of the scores is multiplied "
            "into it.",
            dtypes=FLOATS,
            shape={"BSND": f"B S1 {heads}", "TND": f"T1 {heads}"},
        ),
    )


QUERY_INDEX, KEY_INDEX, WEIGHTS = of_index("Ni", "Di", "=query", "query")
INDICES = Tensor(
    "sparse_indices",
    "The keys that every row selects, shared by all heads; -1 ends a list.",
    dtypes="int32 int64",
    shape=rows("1", "1", "K"),
    make=rules.first_block,
)
INDEX_STATISTICS = {"BSND": "B 1 S1", "TND": "1 T1"}
MAX_INDEX = Tensor(
    "softmax_max_index",
    "Row maxima of the indexer's scores, from npu_dense_lightning_indexer_softmax_lse.",
    dtypes="float32",
    shape=INDEX_STATISTICS,
    make=lambda shape: torch.full(shape, 64.0),  # above the scores of a sample
)
SUM_INDEX = Tensor(
    "softmax_sum_index",
    "Row sums of exp(score - max) of the indexer's scores.",
    dtypes="float32",
    shape=INDEX_STATISTICS,
    make=torch.ones,
)
KLEN = spelled(KV_LENGTHS, "actual_seq_klen")
RESULT = (
    output("dquery_index", "Gradient of query_index.", QUERY_INDEX.shape, "=query_index"),
    output("dkey_index", "Gradient of key_index.", KEY_INDEX.shape, "=query_index"),
    output("dweights", "Gradient of weights.", WEIGHTS.shape, "=weights"),
    output("loss", "The loss, summed over all rows.", "1", "float32"),
)
WINDOW = (MODE, PRE, NEXT)

# -------------------------------------------------------------------------------------------------------------- rules


NO_OTHERS = "the chip takes no other head counts"
MODE_3 = limit("sparse_mode == 3", "sparse_mode (the chip supports no other mode)")
NO_FLOAT32 = no_float32("query", weights="B S1 Ni")
ROWS_AND_KEYS = (
    rules.MOST_SEQUENCES,
    limit(
        "all(q_len <= kv_len)",
        "query: no more rows than keys in a sequence (the chip takes no row without keys)",
        only=("BSND",),
        invalid={"S1": 7, "sparse_indices": torch.full((2, 7, 1, 2048), -1, dtype=torch.int32)},
    ),
    limit(
        "all(actual_seq_qlen <= actual_seq_kvlen)",
        "actual_seq_qlen: no end above that of the keys (the chip takes no row without keys)",
        only=("TND",),
        invalid={"actual_seq_kvlen": [2, 12], "sparse_indices": torch.full((8, 1, 2048), -1, dtype=torch.int32)},
    ),
)
INDEX_LIMITS = (
    limit("Ni in (8, 16, 32, 64)", f"query_index ({NO_OTHERS})", when="Ni >= 1", invalid={"Ni": 4}),
    only_dim("Di", 128, "query_index"),
    only_dim("Dr", 64, "query_rope", 32, beside="query_rope is not None and ", given=ROPE),
)
LIMITS = (
    *(NO_FLOAT32, MODE_3, *ROWS_AND_KEYS, *INDEX_LIMITS),
    limit("N2 == 1", "key (the chip takes one key head)", when="N2 > 0 and N1 % N2 == 0", invalid={"N2": 2, "G": 4}),
    limit("N1 in (8, 16, 32, 64, 128)", f"query ({NO_OTHERS})", invalid={"N1": 4, "G": 4}),
    only_dim("D", 512, "query"),
    *(rules.LISTS_OF_2048, rules.most_tokens(key=(1, 512), key_index=(1, 128))),
    refused(
        "not float32(weights)",
        "weights: float16 or bfloat16 (the chip computes no float32 here)",
        when="not float32(query)",
        invalid={"weights": ("B S1 Ni", "float32")},
    ),
)
DENSE_LIMITS = (
    *(NO_FLOAT32, MODE_3, *ROWS_AND_KEYS, *INDEX_LIMITS),
    limit(
        "N2 == N1",
        "key (the chip takes a key head for every query head)",
        when="N2 > 0 and N1 % N2 == 0",
        invalid={"N2": 16, "G": 2},
    ),
    limit("N1 in (32, 64, 128)", f"query ({NO_OTHERS})", invalid={"N1": 16, "N2": 16}),
    only_dim("D", 128, "query"),
    rules.most_tokens(key=(32, 128), key_index=(1, 128)),
)
LSE_LIMITS = (
    no_float32("query_index", weights="B S1 N1"),
    MODE_3,
    *(
        replace(rule, param="query_index") if rule.param == "query" else rule
        for rule in (*ROWS_AND_KEYS, rules.most_tokens(key_index=(1, 128)))
    ),
    limit("N1 in (8, 16, 32, 64)", f"query_index ({NO_OTHERS})", when="N1 >= 1", invalid={"N1": 4}),
    only_dim("D", 128, "query_index"),
)
HEADS, SCORES = (
    rules.some_heads("query_index", "Ni"),
    rules.scores("query_index", "Ni", "Di", like="query", like_shape="B S1 N1 D"),
)
LSE_SCORES = rules.some_heads("query_index", "N1"), *rules.scores("query_index", "N1", "D")
MEANING = (*rules.LENGTHS, *rules.NEEDS_KEY_LENGTHS, *rules.SHAPES, HEADS, *SCORES, SAVED)

# ------------------------------------------------------------------------------------------------- operator definitions

FORMULA = """p_j = (1 / N) sum_h exp(s_hj - max_h) / sum_h,   s_hj = scale * (q_h . k_j + q_rope_h . k_rope_j)
I_j = sum_h w_h * max(0, S_hj),   S_hj = query_index_h . key_index_j,   y = softmax(I)      for the keys of a row
loss = sum_j p_j * (ln max(p_j, 1e-8) - ln max(y_j, 1e-8)),   dI = y - p
dweights_h = sum_j dI_j * max(0, S_hj),   dS = dI * w * [S > 0],   dquery_index = dS k,   dkey_index = sum_h dS^T q"""
TEX = r"""\begin{aligned}
p_j &= \frac{1}{N} \sum_h \frac{e^{s_{hj} - m_h}}{\ell_h},
  \qquad s_{hj} = scale\,(q_h \cdot k_j + q^{rope}_h \cdot k^{rope}_j) \\
I_j &= \sum_h w_h \max(0, S_{hj}), \qquad S_{hj} = q^{index}_h \cdot k^{index}_j,
  \qquad y = \operatorname{softmax}(I) \\
loss &= \sum_j p_j\,\big(\ln \max(p_j, 10^{-8}) - \ln \max(y_j, 10^{-8})\big), \qquad dI = y - p \\
dw_h &= \sum_j dI_j \max(0, S_{hj}), \quad dS_{hj} = dI_j\, w_h\, [S_{hj} > 0],
  \quad dq^{index}_h = \sum_j dS_{hj}\, k^{index}_j, \quad dk^{index}_j = \sum_h dS_{hj}\, q^{index}_h
\end{aligned}"""
SPARSE_SIZES = {**rules.SIZES, "N1": 8, "G": 8, "Ni": 8, "Di": 128}
DENSE_SIZES = {**SPARSE_SIZES, "N1": 32, "N2": 32, "G": 1, "D": 128}
NEUTRAL: dict[str, Any] = {
    "cumulative": True,
    "sparse_block_size": 1,
    "ratio": 1,
    **dict.fromkeys(("layout_kv", "block_table", "query_rope", "key_rope", "sinks", "sparse_indices", "lse")),
    **dict.fromkeys(("softmax_max", "softmax_sum", "softmax_max_index", "softmax_sum_index")),
    **dict.fromkeys(("actual_seq_qlen", "actual_seq_kvlen", "causal", "residual")),
    **dict.fromkeys(("B", "S1", "S2", "T1", "T2", "Ps", "N1", "N2", "D", "Dr", "G", "K", "Ni", "Di")),
}
OF_ATTENTION = (QUERY, replace(KEY, form=None))
OF_INDEX = (QUERY_INDEX, KEY_INDEX, WEIGHTS)

OF_GRADIENTS = {"dquery_index": "dQueryIndex", "dkey_index": "dKeyIndex", "dweights": "dWeights"}
V1 = of_cann(
    "aclnnSparseLightningIndexerGradKLLoss",
    "Kullback-Leibler divergence of the indexer's distribution over the selected keys from the attention's, and its "
    "gradients.",
    (
        *(*OF_ATTENTION, *OF_INDEX, INDICES, MAX_IN, SUM_IN, QUERY_ROPE, KEY_ROPE, *INDEX_ENDS),
        *(SCALE, replace(LAYOUT, default=REQUIRED), *WINDOW, DETERMINISTIC, *RESULT),
    ),
    (*MEANING, rules.SOME_ENTRIES, *rules.SELECTION, *LIMITS),
    formula=FORMULA,
    tex=TEX,
    rulings=(6, 12, 14, 17, 18, 20, 23, 24, 27, 28),
    layouts=LAYOUTS,
    layout_attr="layout",
    neutral=NEUTRAL,
    derive=lengths,
    functions=FUNCTIONS,
    lower=lower,
    c=Declared(names={**OF_GRADIENTS, "pre_tokens": "pre_tokens", "next_tokens": "next_tokens"}).of_page(),
    results=RESULTS,
    fresh=fresh,
    sizes=SPARSE_SIZES,
    samples={"BSND": {"scale_value": 0.05}, "TND": {"scale_value": 0.05, **PACKED_SAMPLE}},
)
DENSE_V1 = V1.version(
    "aclnnDenseLightningIndexerGradKLLoss",
    "Kullback-Leibler divergence of the indexer's distribution over all keys from the attention's, and its gradients.",
    params=(
        *(*OF_ATTENTION, *OF_INDEX, MAX_IN, SUM_IN, MAX_INDEX, SUM_INDEX, QUERY_ROPE, KEY_ROPE, *INDEX_ENDS),
        *(SCALE, LAYOUT, *WINDOW, *RESULT),
    ),
    rules=(*MEANING, *DENSE_LIMITS),
    rulings=(6, 14, 17, 20, 23, 24),
    c=Declared(
        "Optional", "Out", {**OF_GRADIENTS, "weights": "weight", "dweights": "dWeight", "layout": "layoutOptional"}
    ),
    sizes=DENSE_SIZES,
)
LSE_QUERY, LSE_KEY, LSE_WEIGHTS = of_index("N1", "D", FLOATS, "query_index")
LSE_MAX = output(
    "softmax_max", "Row maxima of the scores; 0 in rows without visible keys.", INDEX_STATISTICS, "float32"
)
LSE_SUM = output(
    "softmax_sum", "Row sums of exp(score - max); 0 in rows without visible keys.", INDEX_STATISTICS, "float32"
)
LSE_V1 = V1.version(
    "aclnnDenseLightningIndexerSoftmaxLse",
    "The softmax statistics of an indexer's scores over all keys of a row.",
    params=(*(LSE_QUERY, LSE_KEY, spelled(LSE_WEIGHTS, "weight"), *INDEX_ENDS, LAYOUT, *WINDOW, LSE_MAX, LSE_SUM),),
    rules=(*rules.LENGTHS, *rules.NEEDS_KEY_LENGTHS, *LSE_SCORES, *LSE_LIMITS),
    formula="""I_j = sum_h w_h * max(0, query_index_h . key_index_j)        for the visible keys j of the row
max = max_j I_j,  sum = sum_j exp(I_j - max)""",
    tex=r"""\begin{aligned}
I_j &= \sum_h w_h \max(0,\; q^{index}_h \cdot k^{index}_j) \qquad \text{for the visible keys } j \text{ of the row} \\
\max &= \max_j I_j, \qquad sum = \sum_j e^{I_j - \max}
\end{aligned}""",
    rulings=(6, 17, 20, 23),
    c=Declared("Optional", "Out", {"layout": "layoutOptional"}),
    results=STATISTICS,
    fresh=fresh_statistics,
    sizes={**rules.SIZES, "N1": 8, "D": 128},
    samples={"TND": PACKED_SAMPLE},
)
NULLABLE = or_none(LAYOUT, *WINDOW)
TORCH = V1.version(
    "npu_sparse_lightning_indexer_grad_kl_loss",
    "The indexer's loss over the selected keys, and its gradients.",
    keywords="query_rope",
    declared=NULLABLE,
    example="""\
>>> q, k, index_q, index_k = (torch.randn(1, 6, heads, 16) for heads in (4, 1, 2, 1))
>>> lists, statistics = torch.arange(6).expand(1, 6, 1, 6), torch.full((2, 1, 1, 6, 4), 3.0)
>>> *gradients, loss = npu_sparse_lightning_indexer_grad_kl_loss(
...     q, k, index_q, index_k, torch.rand(1, 6, 2), lists, *statistics, 0.25
... )
>>> [list(gradient.shape) for gradient in gradients], list(loss.shape)
([[1, 6, 2, 16], [1, 6, 1, 16], [1, 6, 2]], [1])""",
    params=(
        *(*OF_ATTENTION, *OF_INDEX, INDICES, MAX_IN, SUM_IN, SCALE, QUERY_ROPE, KEY_ROPE, Q_LENGTHS, KLEN),
        *(LAYOUT, *WINDOW, SINKS, *RESULT),
    ),
)
TORCH_DENSE = DENSE_V1.version(
    "npu_dense_lightning_indexer_grad_kl_loss",
    "The indexer's loss over all visible keys of a row, and its gradients.",
    keywords="query_rope",
    declared=NULLABLE,
    example="""\
>>> q, k, index_q, index_k = (torch.randn(1, 6, heads, 16) for heads in (4, 4, 2, 1))
>>> statistics, weights = torch.full((2, 1, 4, 6, 1), 3.0), torch.rand(1, 6, 2)
>>> of_indexer = npu_dense_lightning_indexer_softmax_lse(index_q, index_k, weights)
>>> *gradients, loss = npu_dense_lightning_indexer_grad_kl_loss(
...     q, k, index_q, index_k, weights, *statistics, *of_indexer, 0.25
... )
>>> list(loss.shape)
[1]""",
    params=(
        *(*OF_ATTENTION, *OF_INDEX, MAX_IN, SUM_IN, MAX_INDEX, SUM_INDEX, SCALE, QUERY_ROPE, KEY_ROPE),
        *(Q_LENGTHS, KLEN, LAYOUT, *WINDOW, *RESULT),
    ),
)
TORCH_LSE = LSE_V1.version(
    "npu_dense_lightning_indexer_softmax_lse",
    LSE_V1.summary,
    keywords="actual_seq_qlen",
    declared=NULLABLE,
    example="""\
>>> index_q, index_k = torch.randn(1, 6, 2, 16), torch.randn(1, 6, 1, 16)
>>> top, total = npu_dense_lightning_indexer_softmax_lse(index_q, index_k, torch.rand(1, 6, 2))
>>> list(top.shape), float(total[0, 0, 0])
([1, 1, 6], 1.0)""",
    params=(LSE_QUERY, LSE_KEY, LSE_WEIGHTS, Q_LENGTHS, KLEN, LAYOUT, *WINDOW, LSE_MAX, LSE_SUM),
)

ACLNN = (V1, DENSE_V1, LSE_V1)
RECORDS: tuple[Op, ...] = (*ACLNN, TORCH, TORCH_DENSE, TORCH_LSE)

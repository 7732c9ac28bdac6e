"""Definitions (parameters, legality rules, formulas) of CANN's lightning indexer and its gradient, also in torch_npu.

Most rules are in ops/sparse/rules.py; the conversion for back ends is in lower.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from fusion_attention.contract import INVALID, Array, Attr, Declared, Op, Tensor
from fusion_attention.ops.indexer.lower import lower
from fusion_attention.ops.indexer.lowered_call import DIFFERENTIABLE, RESULTS, fresh, fresh_gradients
from fusion_attention.ops.indexer.lowered_call import GRADIENTS as GRADIENT_NAMES
from fusion_attention.ops.shared.params import FLOATS, or_none, output, spelled
from fusion_attention.ops.shared.prototypes import ON_DEVICE, of_cann
from fusion_attention.ops.shared.rules import invalid, limit, meaning, no_float32, of_lengths, only_dim
from fusion_attention.ops.sparse.checks import FUNCTIONS, lengths
from fusion_attention.ops.sparse.definitions import (
    DETERMINISTIC,
    INDEX_ENDS,
    LAYOUT,
    LAYOUT_KV,
    LAYOUTS,
    MODE,
    NEXT,
    PACKED_SAMPLE,
    PRE,
    QUERY,
    TABLE,
    TENSORS,
    key_layout,
    rows,
)
from fusion_attention.ops.sparse.rules import (
    IN_PAGES,
    LENGTHS,
    LISTS_OF_2048,
    NEEDS_KEY_LENGTHS,
    PAGES,
    SELECTION,
    SIZES,
    SOME_ENTRIES,
    TABLE_LIMITS,
    TABLES,
    first_block,
    scores,
    some_heads,
)

# ------------------------------------------------------------------------------------------------------- parameters

KEY = Tensor(
    "key", "Key rows, one head for all query heads.", dtypes="=query", shape=rows("2", "1", "D"), form=key_layout
)
WEIGHTS = Tensor(
    "weights",
    "Weight of every query head, in the query's dtype or float32; a scale of the scores is multiplied into it.",
    dtypes=FLOATS,
    shape={"BSND": "B S1 N1", "TND": "T1 N1"},
)
COUNT = Attr("sparse_count", "Number of keys that a row selects.", domain="1 <= sparse_count <= 1048576")
LISTS = {**rows("1", "1", "K"), "BSND without heads": "B S1 K", "TND without heads": "T1 K"}


def _list_layout(name: str) -> Callable[[Mapping[str, Any]], str]:
    """Returns a function from {name: argument} to the layout of the tensor `name`: " without heads" is added to the
    query's layout if the tensor lacks the axis of one head."""

    def layout(names: Mapping[str, Any]) -> str:
        tensor, of_query = names.get(name), str(names.get("layout", ""))
        headless = isinstance(tensor, torch.Tensor) and tensor.dim() == (3 if of_query == "BSND" else 2)
        return f"{of_query} without heads" if headless else of_query

    return layout


DVALUES = Tensor("dy", "Gradient of the values.", dtypes="=query", shape=LISTS, form=_list_layout("dy"))
INDICES = Tensor(
    "sparse_indices",
    "The forward's indices.",
    dtypes="int32 int64",
    shape=LISTS,
    form=_list_layout("sparse_indices"),
    make=first_block,
)
CHOSEN = output("sparse_indices_out", "The selected keys by descending score, then -1.", rows("1", "1", "K"), "int32")
VALUES = output("sparse_values_out", "The scores of the selected keys, then -inf.", rows("1", "1", "Kv"))
RETURN_VALUES = Attr("return_values", "Return the scores of the selected keys.", type=bool, default=False)
RATIO = Attr(
    "ratio",
    "Tokens that a key stands for: visible to a row are the keys whose last token is not behind the row's token.",
    default=1,
    domain="1 <= ratio <= 1048576",
)
RESIDUAL = Array("residual", "Tokens of every sequence behind those of its last key: its tokens % ratio.", True)
HEAD_NUM = Attr("head_num", "Query heads.", axis="N1", code=INVALID)
GRADIENTS = (
    output("dquery", "Gradient of query.", rows("1", "N1", "D")),
    output("dkey", "Gradient of key.", rows("2", "1", "D"), form=key_layout),
    output("dweights", "Gradient of weights.", WEIGHTS.shape, "=weights"),
)

# -------------------------------------------------------------------------------------------------------------- rules

HEADS, SCORES = some_heads("query", "N1"), scores("query", "N1", "D")
LIMITS = (
    no_float32("query", weights="B S1 N1"),
    limit("N1 <= 64", "query (the chip takes no more heads)", invalid={"N1": 65}),
    only_dim("D", 128, "query"),
    limit(
        "sparse_count <= 2048 or sparse_count <= 8192 and sparse_count % 1024 == 0",
        "sparse_count: 1 to 2048, 3072, 4096, ... 8192 (the chip takes no other counts)",
    ),
    limit(
        "not (return_values and block_table is not None)",
        "return_values: no values of paged keys (values serve training, and pages inference)",
        given=IN_PAGES,
        invalid={"return_values": True},
    ),
    LISTS_OF_2048,
)
RESIDUALS = (
    meaning(
        "residual is None or len(residual) == len(q_len)",
        "residual: one number per sequence (the tokens of each sequence % ratio)",
        given={"ratio": 3, "residual": [0, 0]},
        invalid={"residual": [0, 0, 0]},
    ),
    meaning(
        "ratio == 1 or sparse_mode != 3 or residual is not None or all(kv_len == q_len // ratio)",
        "residual: a residual, or q_len // ratio keys (if query rows are not all tokens of a sequence, pass its tokens "
        "% ratio)",
        given={"ratio": 3, "residual": [0, 0]},
        invalid={"residual": None},
    ),
    of_lengths(
        "residual is None or all(0 <= n < ratio for n in residual)",
        "residual: numbers from 0 to ratio - 1 (ratio tokens or more are further keys)",
        given={"ratio": 3, "residual": [0, 2]},
        invalid={"residual": [0, 3]},
    ),
)
FORWARD = (
    invalid(
        "sparse_values_out is None or sparse_values_out.shape[-1] == sparse_count",
        "sparse_values_out: sparse_count values per row (one value for every index)",
        when="return_values",
        given={"return_values": True},
        invalid={"sparse_values_out": "B S1 1 7"},
    ),
    invalid(
        "sparse_indices_out is None or sparse_indices_out.shape[-1] == sparse_count",
        "sparse_indices_out: sparse_count indices per row (those of the selected keys)",
        invalid={"sparse_indices_out": "B S1 1 7"},
    ),
)

# ------------------------------------------------------------------------------------------------- operator definitions

FORMULA = """I_j = sum_h w_h * max(0, q_h . k_j)            for the visible keys j of the row
indices, values = the sparse_count largest I in descending order; of equal ones the lower index first"""
TEX = r"""\begin{aligned}
I_j &= \sum_h w_h \max(0,\; q_h \cdot k_j) \qquad \text{for the visible keys } j \text{ of the row} \\
indices &= \text{the largest } I_j \text{ in descending order; of equal ones the lower index first}
\end{aligned}"""
BACKWARD_FORMULA = """S_hk = q_h . k_idx(k),  dS_hk = dy_k * w_h * [S_hk > 0]
dweights_h = sum_k dy_k * max(0, S_hk),  dq_h = sum_k dS_hk k_idx(k),  dk_idx(k) += sum_h dS_hk q_h"""
BACKWARD_TEX = r"""\begin{aligned}
S_{hk} &= q_h \cdot k_{idx(k)}, \qquad dS_{hk} = dy_k\, w_h\, [S_{hk} > 0] \\
dw_h &= \sum_k dy_k \max(0, S_{hk}), \qquad dq_h = \sum_k dS_{hk}\, k_{idx(k)},
  \qquad dk_{idx(k)} \mathrel{+}= \sum_h dS_{hk}\, q_h
\end{aligned}"""
TRAINS = {"sparse_values_out": DIFFERENTIABLE}
INDEXER_SIZES = {**SIZES, "D": 128}
NEUTRAL: dict[str, Any] = {
    "ratio": 1,
    "wide_values": False,
    "cumulative": True,
    "sparse_block_size": 1,
    "N2": 1,
    "return_values": False,
    **dict.fromkeys(("layout_kv", "block_table", "actual_seq_qlen", "actual_seq_kvlen")),
    **dict.fromkeys(("residual", "index_offset")),
    **dict.fromkeys(("B", "S1", "S2", "T1", "T2", "P", "Ps", "R", "M", "K", "Kv", "sparse_count", "causal")),
}


def derive(names: dict[str, Any]) -> dict[str, Any]:
    """Returns {name: value} derived from the arguments `names`: lengths, axis sizes, K, the number of keys selected per
    row, and Kv, which is K, or None if their scores are not returned."""
    count = names["sparse_count"]
    return lengths(names) | {"K": count, "Kv": count if names["return_values"] else None}


C = Declared("Optional", names={"layout": "layoutQueryOptional", "layout_kv": "layoutKeyOptional"}, on_device=ON_DEVICE)
V1 = of_cann(
    "aclnnLightningIndexer",
    "Selects the keys with the highest scores for each row; a score is a weighted sum of ReLU(q . k) over heads.",
    (
        *(QUERY, KEY, WEIGHTS, *INDEX_ENDS),
        *(TABLE, spelled(LAYOUT, "layout_query"), spelled(LAYOUT_KV, "layout_key"), COUNT, MODE, PRE, NEXT),
        *(RETURN_VALUES, CHOSEN, VALUES),
    ),
    (*LENGTHS, *NEEDS_KEY_LENGTHS, *PAGES, *TABLES, *TABLE_LIMITS, HEADS, *SCORES, *FORWARD, *LIMITS),
    formula=FORMULA,
    tex=TEX,
    rulings=(6, 13, 17, 18, 20, 23),
    layouts=LAYOUTS,
    layout_attr="layout",
    neutral=NEUTRAL,
    derive=derive,
    functions=FUNCTIONS,
    lower=lower,
    results=RESULTS,
    fresh=fresh,
    trains=TRAINS,
    c=C,
    repeats=True,
    sizes=INDEXER_SIZES,
    samples={"BSND": {"sparse_count": 8}, "TND": {"sparse_count": 8, "layout_kv": "TND", **PACKED_SAMPLE}},
)
GRAD_V1 = V1.version(
    "aclnnLightningIndexerGrad",
    "Gradients of the values that LightningIndexer returned, for padded or packed keys.",
    params=(
        *(QUERY, KEY, DVALUES, INDICES, WEIGHTS, *INDEX_ENDS),
        *(HEAD_NUM, LAYOUT, MODE, PRE, NEXT, DETERMINISTIC, *GRADIENTS),
    ),
    rules=LENGTHS + NEEDS_KEY_LENGTHS + SCORES + (SOME_ENTRIES, *SELECTION) + LIMITS,
    formula=BACKWARD_FORMULA,
    tex=BACKWARD_TEX,
    rulings=(6, 12, 17, 18, 20, 23, 24),
    derive=lengths,
    results=GRADIENT_NAMES,
    fresh=fresh_gradients,
    trains={},
    repeats=False,
    samples={"TND": PACKED_SAMPLE},
    c=replace(C, output="Out").but(
        actual_seq_qlen="actualSeqQLen", actual_seq_kvlen="actualSeqKvLen", layout="inputLayout", dquery="dq", dkey="dk"
    ),
)
TORCH = V1.version(
    "npu_lightning_indexer",
    V1.summary,
    keywords="actual_seq_lengths_query",
    declared=TENSORS,
    returns="(sparse_indices, sparse_values): positions within the sequence, by descending score; values are empty "
    "unless return_value is true.",
    example="""\
>>> q, k, w = torch.randn(1, 6, 4, 16), torch.randn(1, 9, 1, 16), torch.randn(1, 6, 4)
>>> indices, values = npu_lightning_indexer(q, k, w, sparse_count=4, return_value=True)
>>> list(indices.shape), list(values.shape)
([1, 6, 1, 4], [1, 6, 1, 4])""",
    params=(
        *(QUERY, KEY, WEIGHTS, *INDEX_ENDS),
        *(TABLE, spelled(LAYOUT, "layout_query"), spelled(LAYOUT_KV, "layout_key"), replace(COUNT, default=2048)),
        *(MODE, PRE, NEXT, spelled(RETURN_VALUES, "return_value"), CHOSEN, VALUES),
    ),
)
TORCH_GRAD = GRAD_V1.version(
    "npu_lightning_indexer_grad",
    "Gradients of npu_lightning_indexer's values.",
    declared=TENSORS | or_none(LAYOUT, MODE, PRE, NEXT),
    example="""\
>>> q, k, w = torch.randn(1, 6, 4, 16), torch.randn(1, 9, 1, 16), torch.randn(1, 6, 4)
>>> indices, values = npu_lightning_indexer(q, k, w, sparse_count=4, return_value=True)
>>> dq, dk, dw = npu_lightning_indexer_grad(q, k, torch.ones_like(values), indices, w)
>>> list(dw.shape)
[1, 6, 4]""",
    rules=(HEADS, *GRAD_V1.rules),
    params=(*(QUERY, KEY, DVALUES, INDICES, WEIGHTS, *INDEX_ENDS), *(LAYOUT, MODE, PRE, NEXT, *GRADIENTS)),
)

ACLNN = (V1, GRAD_V1)
RECORDS: tuple[Op, ...] = (*ACLNN, TORCH, TORCH_GRAD)

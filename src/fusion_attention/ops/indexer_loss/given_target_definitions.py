"""Definitions of CANN's KL losses of the indexer with target probabilities as argument, and of its log-sum-exp."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fusion_attention.contract import Attr, Declared, Tensor
from fusion_attention.ops.indexer import second
from fusion_attention.ops.indexer_loss.definitions import INDEX_STATISTICS, INDICES, LSE_SCORES, NEUTRAL, of_index
from fusion_attention.ops.indexer_loss.lower import lower_lse, lower_target
from fusion_attention.ops.indexer_loss.lowered_call import TARGET_RESULTS, fresh_lse, fresh_target
from fusion_attention.ops.shared import cu_seqlens
from fusion_attention.ops.shared.checks import Outcome
from fusion_attention.ops.shared.metadata import metadata
from fusion_attention.ops.shared.params import FLOATS, TENSOR_FIRST, output, spelled
from fusion_attention.ops.shared.prototypes import ON_DEVICE, of_cann
from fusion_attention.ops.shared.rules import content, invalid, keys_lie, limit, no_float32, only_dim
from fusion_attention.ops.sparse.checks import FUNCTIONS as OF_LISTS
from fusion_attention.ops.sparse.checks import unread, visible_keys
from fusion_attention.ops.sparse.definitions import LAYOUT, LAYOUTS, MODE
from fusion_attention.ops.sparse.rules import SELECTION, SIZES, SOME_ENTRIES, lists

# ------------------------------------------------------------------------------------------------------- parameters

QUERY, KEY, WEIGHTS = of_index("N1", "D", FLOATS, "query_index")
WEIGHTS = replace(WEIGHTS, text="Weight of every head; a scale of the scores is multiplied into it.", dtypes="float32")
ROWS = (spelled(QUERY, "q"), spelled(KEY, "k"), spelled(WEIGHTS, "w"))
ELEMENTS = {"BSND": "B S1 1 Pk", "TND": "T1 1 Pk"}
TARGET = Tensor(
    "target",
    "The attention's probability of every key, a mean over heads, from sparse_flash_mla_grad or"
    " sparse_flash_mla_softmax_l1_norm.",
    dtypes="float32",
    shape=ELEMENTS,
    spelled="attn_softmax_l1_norm",
)
SOFTMAX_LSE = Tensor(
    "softmax_lse",
    "log(sum(exp(I))) of the indexer's scores, from dense_lightning_indexer_softmax_lse.",
    dtypes="float32",
    shape=INDEX_STATISTICS,
    make=lambda shape: torch.full(shape, 64.0),  # above the scores of a sample
)
LENGTHS_OF = (*second.ENDS, *second.USED, second.RESIDUAL, second.METADATA)
LAYOUTS_OF = (
    replace(LAYOUT, spelled="layout_q", default="TND"),
    Attr("layout_kv", "Axis order of keys; it must be layout_q.", type=str, default="TND", spelled="layout_k"),
)
TAIL = (*LENGTHS_OF, *LAYOUTS_OF, replace(MODE, spelled="mask_mode"), second.RATIO)
RESULTS = (
    output("dquery_index", "Gradient of q.", QUERY.shape, "=query_index", spelled="dq"),
    output("dkey_index", "Gradient of k.", KEY.shape, "=query_index", spelled="dk"),
    output("dweights", "Gradient of w.", WEIGHTS.shape, "=weights", spelled="dw"),
    output(
        "softmax_out", "y for every element of the target; 0 for those that a row does not read.", ELEMENTS, "float32"
    ),
)


def derive(n: Mapping[str, Any]) -> dict[str, Any]:
    """Returns {name: value} derived from the arguments `n`: lengths, rows and keys in memory per sequence, their first
    indices, and, if tokens are packed, the sizes of the axes S1 and S2."""
    result = second.sequences_of(n)
    if n["layout"] == "TND":
        result |= {axis: int(result[f"{side}_capacity"].max(initial=0)) for side, axis in (("q", "S1"), ("k", "S2"))}
    return result


# -------------------------------------------------------------------------------------------------------------- rules


def keys_read(
    indices: torch.Tensor, layout: str, q_len: np.ndarray, q_start: np.ndarray | None, kv_len: np.ndarray,
    mode: int, ratio: int, residual: np.ndarray | None,
) -> Outcome:  # fmt: skip
    """True (else text) if every list of selected keys has at most as many entries as its row has visible keys, all of
    them visible. q_len, kv_len: lengths per sequence; q_start: index of their first rows; mode: sparse_mode, 3 if
    causal. A key stands for `ratio` tokens; `residual` tokens follow the last key's."""

    def reads(b: int, listed: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        behind = len(listed) % ratio if residual is None else int(residual[b])
        visible = visible_keys(mode, len(listed), int(kv_len[b]), listed.device, ratio, behind)
        return (slot < visible) & (listed < visible)

    return unread(indices, layout, q_len, reads, "which its row does not read", q_start)


FUNCTIONS = {**OF_LISTS, "keys_read": keys_read}
RULES = (
    *(rule for rule in second.LENGTHS if second.PAGES not in rule.when),
    keys_lie(),
    *second.RESIDUALS,
    *(rule for rule in LSE_SCORES if rule.stage != "dtype"),  # weights have one dtype
)
LISTS = (
    replace(SELECTION[0], check="entries_fit(sparse_indices, layout, q_len, kv_len, 1, q_start)"),
    SELECTION[1],
    content(
        "keys_read(sparse_indices, layout, q_len, q_start, kv_len, sparse_mode, ratio, residual)",
        "sparse_indices: visible keys, at most as many as the row has (a row reads no further entries, and skips keys "
        "that are not visible)",
        given={"sparse_mode": 3},
        invalid={"sparse_indices": lists(0, 5)},
    ),
)
WIDTH = invalid(
    "Pk == K", "target: K elements per row (one for every entry of a list)", when="K >= 1", invalid={"Pk": 5}
)
DENSE_WIDTH = invalid(
    "Pk == S2 or layout == 'TND' and Pk >= S2",
    "target: S2 elements per row (one for every key; in TND at least those of the longest sequence)",
    invalid={"Pk": 5},
)
LIMITS = (
    no_float32("query_index"),
    limit("N1 <= 128", "query_index: up to 128 heads (the chip takes no more)", invalid={"N1": 129}),
    only_dim("D", 128, "query_index"),
    limit("ratio <= 128", "ratio (the chip takes no more)", given=second.COMPRESSED),
)  # fmt: skip
LIST_LIMITS = (
    limit(
        "K in (512, 1024, 2048, 4096, 8192)",
        "sparse_indices (the chip takes lists of no other length)",
        when="K >= 1",
        invalid={"K": 64, "Pk": 64},
    ),
)

# ------------------------------------------------------------------------------------------------- operator definitions

FORMULA = """I_j = sum_h w_h * max(0, S_hj),   S_hj = q_h . k_j,   y = softmax(I)      for the keys j of a row
dI = {}
dw_h = sum_j dI_j * max(0, S_hj),   dS = dI * w * [S > 0],   dq = dS k,   dk = sum_h dS^T q"""
TEX = r"""\begin{aligned}
I_j &= \sum_h w_h \max(0, S_{hj}), \qquad S_{hj} = q_h \cdot k_j, \qquad y = SOFTMAX, \qquad dI = DIFFERENCE \\
dw_h &= \sum_j dI_j \max(0, S_{hj}), \quad dS_{hj} = dI_j\, w_h\, [S_{hj} > 0],
  \quad dq_h = \sum_j dS_{hj}\, k_j, \quad dk_j = \sum_h dS_{hj}\, q_h
\end{aligned}"""
LENGTHS_AS_TENSORS = dict.fromkeys([p.name for p in (*second.ENDS, *second.USED, second.RESIDUAL)], TENSOR_FIRST)
HERE = {**NEUTRAL, **dict.fromkeys(("target", "softmax_lse", "Pk"))}
PADDED_SAMPLE = {"layout_kv": "BSND"}

C = Declared(
    "Optional",
    names={
        f"{kind}_{side}": f"{name}{side.upper()}"
        for kind, name in (("cu_seqlens", "cuSeqLens"), ("seqused", "seqUsed"), ("max_seqlen", "maxSeqLen"))
        for side in "qk"
    },
    on_device=ON_DEVICE,
).of_page(meta_data="metadata")
V1 = of_cann(
    "aclnnSparseLightningIndexerKLLossGrad",
    "Gradients of the Kullback-Leibler divergence of the indexer's distribution over selected keys from a target.",
    (*ROWS, INDICES, TARGET, *TAIL, *RESULTS),
    (*RULES, SOME_ENTRIES, *LISTS, WIDTH, *LIMITS, *LIST_LIMITS),
    formula=FORMULA.format("y * sum_j p_j - p"),
    tex=TEX.replace("SOFTMAX", r"\operatorname{softmax}(I)").replace("DIFFERENCE", r"y \sum_j p_j - p"),
    rulings=(6, 12, 17, 18, 23, 45),
    layouts=LAYOUTS,
    layout_attr="layout",
    neutral=HERE,
    derive=derive,
    functions={**FUNCTIONS, **cu_seqlens.FUNCTIONS, "tokens_fit": second.tokens_fit},
    lower=lower_target,
    c=C,
    results=TARGET_RESULTS,
    fresh=fresh_target,
    sizes={**SIZES, "N1": 8, "D": 128, "Pk": SIZES["K"]},
    samples={"BSND": PADDED_SAMPLE, "TND": second.PACKED_SAMPLE},
)
DENSE_V1 = V1.version(
    "aclnnDenseLightningIndexerKLLossGrad",
    "Gradients of the Kullback-Leibler divergence of the indexer's distribution over all keys from a target.",
    params=(*ROWS, TARGET, SOFTMAX_LSE, *TAIL, *RESULTS),
    rules=(*RULES, DENSE_WIDTH, *LIMITS),
    formula=FORMULA.format("y - p").replace("softmax(I)", "exp(I - softmax_lse)"),
    tex=TEX.replace("SOFTMAX", r"e^{I - lse}").replace("DIFFERENCE", "y - p"),
    rulings=(6, 17, 23, 45),
    sizes={**V1.sizes, "Pk": SIZES["S2"]},
    samples={"BSND": PADDED_SAMPLE, "TND": {**second.PACKED_SAMPLE, "Pk": 7}},
)
LSE_QUERY, LSE_KEY, LSE_WEIGHTS = (replace(p, spelled=name) for p, name in zip(ROWS, ("", "", "weight"), strict=True))
LSE_TAIL = tuple(
    replace(p, default={"layout": "BSND", "layout_kv": "BSND", "sparse_mode": 0}.get(p.name, p.default)) for p in TAIL
)
LSE_V2 = V1.version(
    "aclnnDenseLightningIndexerSoftmaxLseV2",
    "The log-sum-exp of an indexer's scores over all keys of a row.",
    params=(
        *(LSE_QUERY, LSE_KEY, LSE_WEIGHTS, *LSE_TAIL),
        output("softmax_lse", "log(sum(exp(I))); -inf in rows without visible keys.", INDEX_STATISTICS, "float32"),
    ),
    rules=(*RULES, *LIMITS),
    formula="""I_j = sum_h w_h * max(0, query_index_h . key_index_j)        for the visible keys j of the row
softmax_lse = log(sum_j exp(I_j))""",
    tex=r"I_j = \sum_h w_h \max(0,\; q^{index}_h \cdot k^{index}_j), \qquad lse = \log \sum_j e^{I_j}",
    rulings=(6, 17, 23, 45),
    lower=lower_lse,
    results=("softmax_lse",),
    fresh=fresh_lse,
    samples={"TND": second.PACKED_SAMPLE},
)
TORCH = V1.version(
    "cann_ops_transformer.sparse_lightning_indexer_kl_loss_grad",
    V1.summary,
    keywords="cu_seqlens_q",
    declared=LENGTHS_AS_TENSORS,
    returns="(dq, dk, dw, softmax_out).",
    example="""\
>>> q, k, w = torch.randn(6, 2, 16), torch.randn(6, 1, 16), torch.rand(6, 2)
>>> lists, target, ends = torch.arange(6).expand(6, 1, 6), torch.full((6, 1, 6), 0.1), torch.tensor([0, 6])
>>> dq, dk, dw, y = sparse_lightning_indexer_kl_loss_grad(
...     q, k, w, lists, target, cu_seqlens_q=ends, cu_seqlens_k=ends
... )
>>> list(dq.shape), float(y[0, 0, 0])
([6, 2, 16], 1.0)""",
)
TORCH_DENSE = DENSE_V1.version(
    "cann_ops_transformer.dense_lightning_indexer_kl_loss_grad",
    DENSE_V1.summary,
    keywords="cu_seqlens_q",
    declared=LENGTHS_AS_TENSORS,
    returns="(dq, dk, dw, softmax_out).",
    example="""\
>>> q, k, w, ends = torch.randn(6, 2, 16), torch.randn(6, 1, 16), torch.rand(6, 2), torch.tensor([0, 6])
>>> lengths = {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
>>> lse = dense_lightning_indexer_softmax_lse(q, k, w, **lengths, layout_q="TND", layout_k="TND", mask_mode=3)
>>> dq, dk, dw, y = dense_lightning_indexer_kl_loss_grad(q, k, w, torch.full((6, 1, 6), 0.1), lse, **lengths)
>>> list(y.shape)
[6, 1, 6]""",
)
TORCH_LSE = LSE_V2.version(
    "cann_ops_transformer.dense_lightning_indexer_softmax_lse",
    LSE_V2.summary,
    keywords="cu_seqlens_q",
    declared=LENGTHS_AS_TENSORS,
    returns="softmax_lse.",
    example="""\
>>> q, k, w = torch.randn(1, 6, 2, 16), torch.randn(1, 6, 1, 16), torch.rand(1, 6, 2)
>>> list(dense_lightning_indexer_softmax_lse(q, k, w).shape)
[1, 1, 6]""",
)

OPAQUE = tuple(
    metadata(
        op.name,
        (*second.ENDS, *second.USED, second.RESIDUAL),
        f"batch_size=0 max_seqlen_q=0 max_seqlen_k=0 num_heads_q num_heads_k head_dim {topk}"
        "layout_q=BSND layout_k=BSND mask_mode=0 cmp_ratio=1",
        64,
        C,
    )
    for op, topk in ((V1, "topk=0 "), (DENSE_V1, ""), (LSE_V2, ""))
)
ACLNN = (V1, DENSE_V1, LSE_V2, *OPAQUE)
RECORDS = (*ACLNN, TORCH, TORCH_DENSE, TORCH_LSE)

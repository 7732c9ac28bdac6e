"""Operator definitions of CANN's SparseFlashMla and its gradient, in CANN's C interface and cann_ops_transformer.

Rules are in rules.py, lowering in lower.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fusion_attention.contract import Array, Attr, Bound, Declared, Tensor
from fusion_attention.ir.mask import UNLIMITED, Band
from fusion_attention.memory import empty
from fusion_attention.ops.compressed.api_definition import COMPRESSED_TABLE, KEY_COMPRESSED, LISTS, layout_of
from fusion_attention.ops.compressed.checks import FUNCTIONS
from fusion_attention.ops.compressed.lower import call_of, chosen_keys
from fusion_attention.ops.compressed.lowered_call import (
    LSE,
    NORM,
    NORM_OF_KEYS,
    OUT,
    FlashMla,
    FlashMlaBackward,
    replace_statistics,
)
from fusion_attention.ops.compressed.rules import (
    CHOSEN,
    COMPRESSED,
    FORMS,
    LAYOUT,
    LAYOUT_OF_GRADIENT,
    LIMITS,
    OF_TABLES,
    PACKED,
    PAGES,
    RETURNED,
    SAVED,
    SIDES,
    Side,
    lengths_of,
)
from fusion_attention.ops.shared import cu_seqlens
from fusion_attention.ops.shared.metadata import metadata
from fusion_attention.ops.shared.params import TENSOR_FIRST, one_of, output, spelled
from fusion_attention.ops.shared.prototypes import ON_DEVICE, of_cann
from fusion_attention.ops.shared.rules import own_scale
from fusion_attention.ops.sparse import definitions as sparse
from fusion_attention.ops.sparse.checks import keys_in
from fusion_attention.ops.sparse.lowered_call import fresh, fresh_gradients

INPUTS = ("query", "key", "key_compressed", "sinks")


def _key_layout(names: Mapping[str, Any]) -> str:
    return keys_in(names.get("layout", ""), None, names.get("block_table"))


def used_rows(side: str, of: str, required: str = "") -> Array:
    """Returns the operator parameter `seqused_{side}`, the number of used rows of each sequence; side: "q", "k",
    "ori_kv" or "cmp_kv"; of: the rows' name in its description; required: a sentence on when it is required, or ""."""
    return Array(f"seqused_{side}", f"Number of used rows of {of} in each sequence; None: all.{required}", True)


CUMULATIVE = tuple(cu_seqlens.ends_param(*side[:2]) for side in SIDES)
USED = tuple(used_rows(*side[:2], " Required if paged.") for side in SIDES)
RESIDUAL = Array("cmp_residual_kv", "Tokens of every sequence behind those of its last compressed key.", True)
SINKS = sparse.SINKS
METADATA = Tensor("metadata", "Without effect: back ends here divide the work themselves.", True)
LISTS_OF_KEYS = {"BSND": "B S1 N2 Ko", "TND": "T1 N2 Ko"}
ORI_LISTS = replace(
    LISTS,
    name="ori_sparse_indices",
    spelled="",
    text="The keys that every row reads; -1 ends a list. Only without cmp_kv (a 950 form).",
    shape=LISTS_OF_KEYS,
)
TOPK = (
    Tensor(
        "ori_topk_length",
        "Number of entries of every list in ori_sparse_indices; None: a list ends at its first -1.",
        True,
        dtypes="int32",
        shape={"BSND": "B S1 N2", "TND": "T1 N2"},
    ),
    Tensor("cmp_topk_length", "Number of entries of every list (950 only): not computed here.", True, dtypes="int32"),
)
SCALE = Attr("scale_value", "Factor on q . key; the default is 1.0.", type=float, default=1.0, spelled="softmax_scale")
RATIO = Attr("ratio", "Tokens that a compressed key stands for.", default=1, domain="ratio >= 1",
             spelled="cmp_ratio")  # fmt: skip
MODES = (
    one_of("ori_mask_mode", "0: all keys; 3: causal; 4: a window.", (0, 3, 4)),
    Attr("cmp_mask_mode", "3: a row sees the first (position + 1) // cmp_ratio compressed keys.", default=0),
    Attr("ori_win_left", "Visible keys before the diagonal, in ori_mask_mode 4; -1: all.", default=-1),
    Attr("ori_win_right", "Visible keys behind the diagonal, in ori_mask_mode 4; -1: all.", default=-1),
)
LAYOUTS_OF = (
    spelled(sparse.LAYOUT, "layout_q"),
    Attr("layout_kv", f"Axis order of keys: the layout of queries, or {PAGES}.", type=str, default="BSND"),
)
VALUE_MODE = Attr("topk_value_mode", "1: lists hold positions.", default=1, domain="topk_value_mode == 1")
RETURN_LSE = Attr("return_softmax_lse", "Return softmax_lse.", type=bool, default=False)
TENSORS = (
    spelled(sparse.QUERY, "q"),
    replace(
        sparse.KEY, spelled="ori_kv", text="Keys, which are also the values; required.", form=_key_layout, optional=True
    ),
    replace(KEY_COMPRESSED, spelled="cmp_kv", optional=True, form=layout_of),
    ORI_LISTS,
    spelled(LISTS, "cmp_sparse_indices"),
)
TABLES = (spelled(sparse.TABLE, "ori_block_table"), spelled(COMPRESSED_TABLE, "cmp_block_table"))
LSE_OUT = output(
    LSE,
    "log(sum(exp(s))) over both sources and the sink; 0 in rows without visible keys.",
    sparse.STATISTICS,
    "float32",
)


# -------------------------------------------------------------------------------------------------------------- lengths


def side_lengths(n: Mapping[str, Any], sides: tuple[Side, ...]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns (used lengths [B], first rows in packed tensors [B]) for each of `sides`, such as queries and keys, of a
    call with arguments `n`."""
    ends = n["cu_seqlens_q"]
    count = max(len(ends) - 1, 0) if n["layout"] == "TND" and ends is not None else n["B"] or 0
    results = []
    for side, _, rows, *_ in sides:
        capacity, used = cu_seqlens.stored(n[f"cu_seqlens_{side}"], count, n[rows]), n[f"seqused_{side}"]
        length = capacity if used is None else used
        results.append((length, np.cumsum(capacity) - capacity))
    return results


def derive(n: dict[str, Any]) -> dict[str, Any]:
    """Returns {name: value} derived from a call's arguments `n`: lengths, axes, and the band of visible keys."""
    (q_len, q_start), (kv_len, kv_start), (c_len, c_start) = side_lengths(n, SIDES)
    left, right = (UNLIMITED if n[f"ori_win_{side}"] < 0 else n[f"ori_win_{side}"] for side in ("left", "right"))
    band = {0: Band.full(), 3: None, 4: Band.window(left, right)}.get(n["ori_mask_mode"])
    if all(n[axis] is None for axis in ("S3", "T3", "Pc")):  # lengths of an absent tensor count nothing
        c_len = c_start = np.zeros_like(q_len)
    result = {"q_len": q_len, "kv_len": kv_len, "c_len": c_len, "band": band, "Dv": n["D"]}
    result |= {"q_start": q_start, "kv_start": kv_start, "c_start": c_start}
    if n["ratio"] is None:
        result["ratio"] = 1
    given = n["cmp_residual_kv"]
    residual = np.zeros_like(c_len) if given is None else np.asarray(given, np.int64)
    result["residual"] = residual
    result["tokens"] = c_len * (n["ratio"] or 1) + residual if len(residual) == len(c_len) else c_len
    packed = n["layout"] == "TND"
    if packed:
        result |= {"B": len(q_len), "S1": int(q_len.max(initial=0))}
    for axis, lengths, table in (("S2", kv_len, "block_table"), ("S3", c_len, "compressed_table")):
        if packed or n[table] is not None:
            result[axis] = int(lengths.max(initial=0))
    return result


def derive_forward(n: dict[str, Any]) -> dict[str, Any]:
    """Returns derive(n) with the axis G of softmax_lse (query heads per key head), None if that is not returned."""
    return derive(n) | {"G": n["N1"] // n["N2"] if n["return_softmax_lse"] and n["N2"] else None}


def lower(bound: Bound) -> FlashMla | FlashMlaBackward:
    """Converts `bound`, the checked arguments of a forward or gradient call, to an object that back ends compute."""
    n = bound.names
    chosen = n["ori_sparse_indices"] is not None
    call = chosen_keys(bound) if chosen else call_of(bound, FlashMla)
    if "dout" not in bound.op.by_name:
        return call
    entries = n["Ko"] if chosen else n["K"]
    return call.complete().gradient(bound["attention_in"], bound[LSE], bound["dout"], entries)


def _fresh(n: Any) -> dict[str, torch.Tensor]:
    result = replace_statistics(fresh({**n, "value": None, "dim_v": 0}))
    return result if n["return_softmax_lse"] else {OUT: result[OUT]}


def _fresh_gradients(n: Any) -> dict[str, torch.Tensor]:
    lists = {NORM_OF_KEYS: n["ori_sparse_indices"], NORM: n["sparse_indices"]}
    norms = {name: empty(t, t.shape, torch.float32) for name, t in lists.items() if t is not None}
    return fresh_gradients(n) | norms


# -------------------------------------------------------------------------------------------------------------- records

LENGTHS = lengths_of(SIDES, "cmp_residual_kv", paged=True)
FORMULA = """s_j = softmax_scale * q . x_j     for the visible rows x of ori_kv and of cmp_kv,
                                  or for the rows of ori_kv in ori_sparse_indices
out = sum_j exp(s_j - lse) x_j,  lse = log(sum_j exp(s_j) + exp(sink))"""
TEX = r"""\begin{aligned}
s_j &= scale\; q \cdot x_j \qquad j \text{ over the rows of } ori\_kv \text{ in the band and of } cmp\_kv
  \text{ with } j < \left\lfloor \frac{i + L - S_1 + 1}{ratio} \right\rfloor, \quad L = ratio \cdot S_3 + residual \\
out &= \sum_j e^{s_j - lse}\, x_j, \qquad lse = \ln\Bigl(\sum_j e^{s_j} + e^{sink}\Bigr)
\end{aligned}"""
GRAD_FORMULA = """P_j = exp(s_j - lse),  dS_j = P_j * (dout . x_j - dout . out)
dq = scale * sum_j dS_j x_j,  dx_j += scale * dS_j q + P_j dout,  dsink = -sum exp(sink - lse) * dout . out
cmp_softmax_l1_norm, ori_softmax_l1_norm = sum_h P_(h, listed) / N1"""
GRAD_TEX = r"""\begin{aligned}
P_j &= e^{s_j - lse}, \qquad dS_j = P_j\,(dout \cdot x_j - dout \cdot out) \\
dq &= scale \sum_j dS_j\, x_j, \qquad dx_j \mathrel{+}= scale\; dS_j\, q + P_j\, dout, \qquad
dsink = -\sum e^{sink - lse}\, dout \cdot out \\
l1\_norm_j &= \frac{1}{N_1} \sum_h P_{h,j}
\end{aligned}"""
SAMPLE: dict[str, Any] = {
    **dict.fromkeys(("sinks", "key", "key_compressed"), True),
    "ratio": 3,
    "cmp_mask_mode": 3,
    "cmp_residual_kv": [0, 0],
    "ori_mask_mode": 4,
    "ori_win_left": 2,
    "ori_win_right": 0,
}
NEUTRAL: dict[str, Any] = {
    **sparse.NEUTRAL,
    **dict.fromkeys(("S3", "T3", "Pc", "Pcs", "Mc", "Ko", "value", "value_compressed", "compressed_table")),
    "cumulative": True,
    "sparse_mode": 3,
    "ori_mask_mode": 0,
    "ori_win_left": -1,
    "ori_win_right": -1,
    "ratio": 1,
}
FLAGS = dict.fromkeys((OUT, LSE), INPUTS)
C = Declared(on_device=ON_DEVICE).of_page()
V1 = of_cann(
    "aclnnSparseFlashMla",
    "One softmax attention over a window of keys and over compressed keys; keys are also the values.",
    (
        *(*TENSORS, *TABLES, *CUMULATIVE, *USED, RESIDUAL, *TOPK, SINKS, METADATA),
        *(SCALE, RATIO, *MODES, *LAYOUTS_OF, VALUE_MODE, RETURN_LSE),
        output(OUT, "The output rows.", {"BSND": "B S1 N1 D", "TND": "T1 N1 D"}, spelled="attn_out"),
        LSE_OUT,
    ),
    (*FORMS, *LAYOUT, *LENGTHS, *OF_TABLES, *CHOSEN, *COMPRESSED, *LIMITS, RETURNED),
    formula=FORMULA,
    tex=TEX,
    rulings=(12, 42),
    layouts=sparse.LAYOUTS,
    layout_attr="layout",
    neutral=NEUTRAL,
    derive=derive_forward,
    functions=FUNCTIONS,
    lower=lower,
    c=C.but(softmax_lse="softmaxLseOut"),
    results=(OUT, LSE),
    fresh=_fresh,
    trains=FLAGS,
    sizes={**sparse.V1.sizes, "S3": 2, "T3": 3, "Pc": 3, "Pcs": 16, "Mc": 1, "Ko": 4},
    samples={"BSND": SAMPLE, "TND": {**SAMPLE, **PACKED}},
)
ROWS = {"BSND": "B S1 N1 D", "TND": "T1 N1 D"}
DOUT = Tensor("dout", "Gradient of the output.", dtypes="=query", shape=ROWS)
OUT_IN = Tensor("attention_in", "The forward's output.", dtypes="=query", shape=ROWS, spelled="attn_out")
LSE_IN = Tensor(LSE, "As the forward returned it.", dtypes="float32", shape=sparse.STATISTICS, make=torch.zeros)
GRADIENTS = (
    output("dquery", "Gradient of the query rows.", ROWS, spelled="dq"),
    output("dkey", "Gradient of ori_kv, as keys and as values.", sparse.KEY.shape, form=_key_layout, spelled="dori_kv"),
    output("dkey_compressed", "Gradient of cmp_kv.", KEY_COMPRESSED.shape, form=layout_of, spelled="dcmp_kv"),
    output("dsinks", "Gradient of sinks.", "N1", "float32"),
    *(
        output(
            name,
            f"Probability of each entry of {side}_sparse_indices, a mean over heads; 0 if it is not read.",
            shape,
            "float32",
        )
        for name, side, shape in ((NORM_OF_KEYS, "ori", LISTS_OF_KEYS), (NORM, "cmp", LISTS.shape))
    ),
)
GRAD = V1.version(
    "aclnnSparseFlashMlaGrad",
    "Gradients of SparseFlashMla, from its output and its softmax_lse.",
    params=(
        *(sparse.QUERY, DOUT, spelled(OUT_IN, "out"), spelled(LSE_IN, "lse"), *TENSORS[1:]),
        *(*CUMULATIVE, *USED, RESIDUAL, *TOPK, SINKS, METADATA, spelled(SCALE, ""), RATIO, *MODES, *LAYOUTS_OF),
        *(spelled(GRADIENTS[0], ""), *GRADIENTS[1:]),
    ),
    rules=(*FORMS, LAYOUT_OF_GRADIENT, *LENGTHS, *CHOSEN, *COMPRESSED, *LIMITS, SAVED),
    formula=GRAD_FORMULA,
    tex=GRAD_TEX,
    c=C.but(dout="dOut", dquery="dQuery", dkey="dOriKv", dkey_compressed="dCmpKv", dsinks="dSinks"),
    neutral={**NEUTRAL, "return_softmax_lse": True},
    derive=derive,
    results=tuple(p.name for p in GRADIENTS),
    fresh=_fresh_gradients,
    trains={},
)
LENGTHS_AS_TENSORS = dict.fromkeys([p.name for p in (*CUMULATIVE, *USED, RESIDUAL)], TENSOR_FIRST)
TORCH = V1.version(
    "cann_ops_transformer.sparse_flash_mla",
    V1.summary,
    declared=LENGTHS_AS_TENSORS,
    rules=(*V1.rules, own_scale("scale_value")),
    returns="(attn_out, softmax_lse); softmax_lse is a scalar 0 without return_softmax_lse.",
    example="""\
>>> q, kv, compressed = torch.randn(1, 6, 4, 16), torch.randn(1, 6, 1, 16), torch.randn(1, 3, 1, 16)
>>> out, lse = sparse_flash_mla(q, kv, compressed, sinks=torch.zeros(4), softmax_scale=0.25, cmp_ratio=2,
...     ori_mask_mode=4, cmp_mask_mode=3, ori_win_left=3, ori_win_right=0, return_softmax_lse=True)
>>> list(out.shape), list(lse.shape)
([1, 6, 4, 16], [1, 1, 6, 4])""",
)
_RESPELLED = {
    **{p.name: p for p in (TENSORS[0], OUT_IN, LSE_IN, GRADIENTS[0])},
    "scale_value": replace(SCALE, default=None, text="Factor on q . key; None: 1 / sqrt(D)."),
    "ratio": replace(RATIO, default=None, domain="ratio is None or ratio >= 1"),
}
TORCH_GRAD = GRAD.version(
    "cann_ops_transformer.sparse_flash_mla_grad",
    GRAD.summary,
    declared=LENGTHS_AS_TENSORS,
    params=tuple(_RESPELLED.get(p.name, p) for p in GRAD.params),
    returns="(dq, dori_kv, dcmp_kv, dsinks, ori_softmax_l1_norm, cmp_softmax_l1_norm); those of absent inputs are "
    "empty.",
    example="""\
>>> q, kv = torch.randn(1, 6, 4, 16), torch.randn(1, 6, 1, 16)
>>> sinks, words = torch.zeros(4), {"ori_mask_mode": 3, "softmax_scale": 0.25}
>>> out, lse = sparse_flash_mla(q, kv, sinks=sinks, return_softmax_lse=True, **words)
>>> dq, dkv, *_ = sparse_flash_mla_grad(q, torch.ones_like(q), out, lse, kv, sinks=sinks, **words)
>>> list(dkv.shape)
[1, 6, 1, 16]""",
)
OPAQUE = tuple(
    metadata(
        op.name,
        (*CUMULATIVE, *USED, RESIDUAL, *TOPK),
        "num_heads_q num_heads_kv head_dim batch_size=0 max_seqlen_q=0 max_seqlen_ori_kv=0 max_seqlen_cmp_kv=0 "
        "ori_topk=0 cmp_topk=0 cmp_ratio=1 ori_mask_mode=0 cmp_mask_mode=0 ori_win_left=-1 ori_win_right=-1 "
        "layout_q=BSND layout_kv=BSND has_ori_kv=True has_cmp_kv=True",
    )
    for op in (V1, GRAD)
)
RECORDS = (V1, GRAD, TORCH, TORCH_GRAD, *OPAQUE)

"""Definitions (parameters, rules, formulas) of CANN's sparse attention, forward and gradient, in C and in torch_npu.

Rules are in rules.py, the conversion for back ends is in lower.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from fusion_attention.contract import INVALID, Array, Attr, Declared, Op, Tensor
from fusion_attention.ops.shared.params import FLOATS, PAGE_IDS, SINK, TENSOR_FIRST, one_of, or_none, output, spelled
from fusion_attention.ops.shared.prototypes import ON_DEVICE, of_cann
from fusion_attention.ops.shared.rules import ROPE, invalid, limit, no_float32, only_dim
from fusion_attention.ops.sparse import rules
from fusion_attention.ops.sparse.checks import FUNCTIONS, PAGED, keys_in, lengths
from fusion_attention.ops.sparse.lower import lower
from fusion_attention.ops.sparse.lowered_call import DIFFERENTIABLE, RESULTS, fresh, fresh_gradients

LARGEST_INT64 = (1 << 63) - 1


def rows(side: str, heads: str, dim: str) -> dict[str, str]:
    """Returns {layout: axis names} of query (side "1") or key (side "2") tensors; heads, dim: the last two names."""
    shapes = {"BSND": f"B S{side} {heads} {dim}", "TND": f"T{side} {heads} {dim}"}
    return shapes | ({PAGED: f"P Ps {heads} {dim}"} if side == "2" else {})


def key_layout(names: Mapping[str, Any]) -> str:
    """Returns the layout of the key tensor, such as "TND" or paged ("PA_BSND"); names: arguments by name."""
    return keys_in(names.get("layout", ""), names.get("layout_kv"), names.get("block_table"))


# ------------------------------------------------------------------------------------------------------- parameters

QUERY = Tensor("query", "Query rows.", dtypes=FLOATS, shape=rows("1", "N1", "D"))
KEY = Tensor("key", "Key rows.", dtypes="=query", shape=rows("2", "N2", "D"), form=key_layout)
VALUE = Tensor(
    "value",
    "Value rows; None: values are the first Dv elements of key rows, and dkey is the sum of both gradients.",
    True,
    dtypes="=query",
    shape=rows("2", "N2", "Dv"),
    form=key_layout,
)
INDICES = Tensor(
    "sparse_indices",
    "Per row and key head a list of selected blocks, numbered from 0 in each sequence; -1 ends a list.",
    dtypes="int32 int64",
    shape=rows("1", "N2", "K"),
    make=rules.first_block,
)
DY = Tensor("dy", "Gradient of the output.", dtypes="=query", shape=rows("1", "N1", "Dv"), spelled="d_out")
ATTENTION_IN = Tensor(
    "attention_in", "The forward's output.", dtypes="=query", shape=rows("1", "N1", "Dv"), spelled="out"
)
STATISTICS = {"BSND": "B N2 S1 G", "TND": "N2 T1 G"}
MAX_IN = Tensor(
    "softmax_max", "Row maxima that the forward returned.", dtypes="float32", shape=STATISTICS, make=torch.zeros
)
SUM_IN = Tensor(
    "softmax_sum", "Row sums that the forward returned.", dtypes="float32", shape=STATISTICS, make=torch.ones
)
TABLE = Tensor(
    "block_table",
    f"The pages of every sequence, for keys in layout {PAGED}.",
    True,
    dtypes=PAGE_IDS,
    shape="R M",
    make=lambda shape: torch.zeros(shape, dtype=torch.int32),
)
Q_LENGTHS = Array("actual_seq_qlen", "Query rows of every sequence; TND: cumulative ends, required.", True)
KV_LENGTHS = Array("actual_seq_kvlen", "Keys of every sequence; TND: cumulative ends, required.", True)
Q_ENDS = spelled(Q_LENGTHS, "actual_seq_lengths_query")
ENDS = Q_ENDS, spelled(KV_LENGTHS, "actual_seq_lengths_kv")
INDEX_ENDS = Q_ENDS, spelled(KV_LENGTHS, "actual_seq_lengths_key")
QUERY_ROPE = Tensor("query_rope", "Rope part of the query rows.", True, dtypes="=query", shape=rows("1", "N1", "Dr"))
KEY_ROPE = Tensor(
    "key_rope", "Rope part of the key rows.", True, dtypes="=query", shape=rows("2", "N2", "Dr"), form=key_layout
)
SINKS = replace(SINK, name="sinks")
SCALE = Attr("scale_value", "Factor on query . key.", type=float)
BLOCK = Attr("sparse_block_size", "Tokens of a selected block.", domain="1 <= sparse_block_size <= 128")
LAYOUT = Attr("layout", "Axis order of query rows.", type=str, default="BSND", code=INVALID)
LAYOUT_KV = Attr("layout_kv", f"Axis order of keys: the layout of queries, or {PAGED}.", type=str, default="BSND")
MODE = one_of("sparse_mode", "0: all keys are visible; 3: causal, the last row sees the last key.", (0, 3), default=3)
PRE = Attr("pre_tokens", "Without effect.", default=LARGEST_INT64)
NEXT = Attr("next_tokens", "Without effect.", default=LARGEST_INT64)
ATTENTION_MODE = one_of(
    "attention_mode",
    "Without effect; the chip supports 2 alone, with values that are the first elements of keys.",
    (0, 1, 2),
)
RETURN_STATS = Attr("return_softmax_lse", "Return row maxima and sums.", type=bool, default=False)
DETERMINISTIC = Attr("deterministic", "Accepted; results are always reproducible on the CPU.", type=bool, default=False)
OUT = output("attention_out", "The output rows.", rows("1", "N1", "Dv"))
MAX_OUT = output(
    "softmax_max", "Row maxima of the scaled scores; 0 in rows without visible keys.", STATISTICS, "float32"
)
SUM_OUT = output("softmax_sum", "Row sums of exp(score - max); 0 in rows without visible keys.", STATISTICS, "float32")
GRADIENTS = (
    output("dquery", "Gradient of query.", rows("1", "N1", "D")),
    output("dkey", "Gradient of key.", rows("2", "N2", "D"), form=key_layout),
    output("dvalue", "Gradient of value.", rows("2", "N2", "Dv"), form=key_layout),
    output("dquery_rope", "Gradient of query_rope.", rows("1", "N1", "Dr")),
    output("dkey_rope", "Gradient of key_rope.", rows("2", "N2", "Dr"), form=key_layout),
)

# -------------------------------------------------------------------------------------------------------------- rules

LIMITS = (
    no_float32("query"),
    rules.WITH_VALUE,
    limit("N2 == 1", "key (the chip takes one key head)", when="N2 > 0 and N1 % N2 == 0", invalid={"N2": 2, "G": 2}),
    limit(
        "N1 <= 128 and power_of_two(N1)",
        "query: 1, 2, 4, ... 128 heads (the chip takes no other head counts)",
        invalid={"N1": 3, "G": 3},
    ),
    only_dim("D", 512, "query"),
    only_dim("Dv", 512, "value", beside="value is not None and "),
    only_dim("Dr", 64, "query_rope", 32, beside="query_rope is not None and ", given=ROPE),
)
FORWARD_LIMITS = (
    limit(
        "power_of_two(sparse_block_size)",
        "sparse_block_size: a power of two (the chip takes no other blocks)",
        invalid={"sparse_block_size": 3},
    ),
    limit(
        "Ps % sparse_block_size == 0",
        "sparse_block_size: a divisor of the page size (the chip takes no block that is in two pages)",
        when="block_table is not None and power_of_two(sparse_block_size)",
        given=rules.IN_PAGES,
        invalid={"sparse_block_size": 32},
    ),
    limit("attention_mode == 2", "attention_mode (the chip supports no other mode)"),
)
FORWARD = (
    invalid(
        "value is not None or Dv in (None, D)",
        "attention_out: rows as long as the key's (without a value its rows are the key's)",
        given={"value": None},
        invalid={"attention_out": "B S1 N1 G"},
    ),
    invalid(
        "softmax_max is None or softmax_max.shape[-1] * N2 == N1",
        "softmax_max: a last axis of N1 / N2 (the last axis is the query heads of a key head)",
        when="return_softmax_lse",
        given={"return_softmax_lse": True},
        invalid={"softmax_max": "B N2 S1 3"},
    ),
)
SAVED = invalid(
    "N2 * G == N1",
    "softmax_max: a last axis of N1 / N2 (the last axis is the query heads of a key head)",
    when="N2 > 0 and N1 % N2 == 0",
    invalid={"G": 3},
)
BACKWARD = (
    SAVED,
    invalid(
        "value is not None or Dv == D",
        "dy: rows as long as the key's (without a value its rows are the key's)",
        given={"value": None},
        invalid={"Dv": 256},
    ),
    limit("sparse_block_size in (1, 8, 16, 32, 64)", "sparse_block_size (the chip takes no other blocks)"),
    rules.LISTS_OF_2048,
    *(rules.MOST_SEQUENCES, rules.most_tokens(key=(1, 512), value=(1, 512))),
    *(
        limit(
            f"{name} in (2147483647, 9223372036854775807)",
            f"{name}: no limit: 2147483647, or the largest int64 (it has no effect, and the chip takes no other value)",
            invalid={name: 65536},
        )
        for name in ("pre_tokens", "next_tokens")
    ),
)

# ------------------------------------------------------------------------------------------------- operator definitions

FORMULA = """s_j = scale * (q . k_j + q_rope . k_rope_j)        for the visible keys j of the selected blocks
max = max_j s_j,  sum = sum_j exp(s_j - max) + exp(sink - max),  out = sum_j exp(s_j - max) v_j / sum"""
TEX = r"""\begin{aligned}
s_j &= scale\,(q \cdot k_j + q^{rope} \cdot k^{rope}_j)
  \qquad \text{for the visible keys } j \text{ of the selected blocks} \\
out &= \frac{\sum_j e^{s_j - m}\, v_j}{\ell}, \qquad m = \max_j s_j, \quad \ell = \sum_j e^{s_j - m} + e^{sink - m}
\end{aligned}"""
BACKWARD_FORMULA = """P_j = exp(s_j - max) / sum,  dS_j = P_j * (dY . v_j - dY . out)    from the saved max, sum and out
dq = scale * sum_j dS_j k_j,  dk_j += scale * dS_j q,  dv_j += P_j dY               rope parts as q and k"""
BACKWARD_TEX = r"""\begin{aligned}
P_j &= \frac{e^{s_j - m}}{\ell}, \qquad dS_j = P_j\,(dY \cdot v_j - dY \cdot out)
  \quad \text{from the saved } m, \ell \text{ and } out \\
dq &= scale \sum_j dS_j\, k_j, \qquad dk_j \mathrel{+}= scale\; dS_j\, q, \qquad dv_j \mathrel{+}= P_j\, dY
\end{aligned}"""
NEUTRAL: dict[str, Any] = {
    "cumulative": True,
    "sparse_block_size": 1,
    "return_softmax_lse": False,
    **dict.fromkeys(("layout_kv", "block_table", "query_rope", "key_rope", "sinks", "value")),
    **dict.fromkeys(("actual_seq_qlen", "actual_seq_kvlen")),
    **dict.fromkeys(
        ("B", "S1", "S2", "T1", "T2", "N1", "N2", "D", "Dv", "Dr", "G", "P", "Ps", "R", "M", "K", "causal", "dim_v")
    ),
}
LAYOUTS = ("BSND", "TND")
PACKED_SAMPLE = {"actual_seq_qlen": [3, 8], "actual_seq_kvlen": [5, 12]}
SAMPLE: dict[str, Any] = {"value": True, "scale_value": 0.1, "sparse_block_size": 1}
FORWARD_SAMPLES = {
    "BSND": {**SAMPLE, "attention_mode": 2},
    "TND": {**SAMPLE, "attention_mode": 2, "layout_kv": "TND", **PACKED_SAMPLE},
}
BACKWARD_SAMPLES = {"BSND": SAMPLE, "TND": {**SAMPLE, **PACKED_SAMPLE}}
TRAINS = {"attention_out": DIFFERENTIABLE}
RULES = (
    rules.LENGTHS
    + rules.NEEDS_KEY_LENGTHS
    + rules.PAGES
    + rules.TABLES
    + rules.TABLE_LIMITS
    + rules.SHAPES
    + rules.SELECTION
)


def derive(names: dict[str, Any]) -> dict[str, Any]:
    """Returns {name: value} derived from the arguments `names`: lengths, axis sizes; Dv, which is D without values."""
    result = lengths(names)
    if names["value"] is None and names["Dv"] is None:
        result["Dv"] = names["D"]
    return result


def derive_forward(names: dict[str, Any]) -> dict[str, Any]:
    """Returns derive(names) and the size of axis G, query heads per key head; None if statistics are not returned."""
    group = names["N1"] // names["N2"] if names["return_softmax_lse"] and names["N2"] else None
    return derive(names) | {"G": group}


C = Declared(
    "Optional",
    names={
        "layout": "layoutQueryOptional",
        "layout_kv": "layoutKvOptional",
        "sparse_block_size": "sparseBlockSizeOptional",
        "value": "value!",
    },
    on_device=ON_DEVICE,
)
V1 = of_cann(
    "aclnnSparseFlashAttention",
    "Softmax attention over the blocks of keys that every row selects.",
    (
        *(QUERY, KEY, VALUE, INDICES, TABLE, *ENDS),
        *(QUERY_ROPE, KEY_ROPE, SCALE, BLOCK, spelled(LAYOUT, "layout_query"), LAYOUT_KV, MODE, PRE, NEXT),
        *(ATTENTION_MODE, RETURN_STATS, OUT, MAX_OUT, SUM_OUT),
    ),
    RULES + FORWARD + LIMITS + FORWARD_LIMITS,
    formula=FORMULA,
    tex=TEX,
    rulings=(1, 2, 6, 10, 11, 12, 17, 18, 20, 23, 25),
    layouts=LAYOUTS,
    layout_attr="layout",
    neutral=NEUTRAL,
    derive=derive_forward,
    functions=FUNCTIONS,
    lower=lower,
    c=C,
    results=RESULTS,
    fresh=fresh,
    trains=TRAINS,
    repeats=True,
    sizes=rules.SIZES,
    samples=FORWARD_SAMPLES,
)
GRAD_V1 = V1.version(
    "aclnnSparseFlashAttentionGrad",
    "Gradients of SparseFlashAttention, padded or packed.",
    params=(
        *(QUERY, KEY, VALUE, INDICES, DY, ATTENTION_IN, MAX_IN, SUM_IN, *ENDS),
        *(QUERY_ROPE, KEY_ROPE, SCALE, BLOCK, LAYOUT, MODE, PRE, NEXT, DETERMINISTIC, *GRADIENTS),
    ),
    rules=RULES + LIMITS + BACKWARD,
    formula=BACKWARD_FORMULA,
    tex=BACKWARD_TEX,
    rulings=(1, 2, 6, 10, 11, 12, 17, 18, 20, 23, 24, 25, 27, 28),
    derive=derive,
    results=tuple(p.name for p in GRADIENTS),
    fresh=fresh_gradients,
    trains={},
    repeats=False,
    samples=BACKWARD_SAMPLES,
    c=replace(C, output="Out").of_page(
        layout="layoutOptional",
        sparse_block_size="sparseBlockSize",
        actual_seq_kvlen="actualSeqLengthskv",
        dquery="dQuery",
        dkey="dKey",
        dvalue="dValue",
        dquery_rope="dQueryRopeOutOptional!",
        dkey_rope="dKeyRopeOutOptional!",
    ),
)
TENSORS = dict.fromkeys(("actual_seq_qlen", "actual_seq_kvlen"), TENSOR_FIRST)
TORCH = V1.version(
    "npu_sparse_flash_attention",
    V1.summary,
    keywords="block_table",
    declared=TENSORS | {"value": torch.Tensor | None},
    returns="(attention_out, softmax_max, softmax_sum); statistics are empty unless return_softmax_lse is true.",
    example="""\
>>> q, kv = torch.randn(1, 6, 4, 16), torch.randn(1, 9, 1, 16)
>>> indices = torch.arange(4).expand(1, 6, 1, 4)
>>> out, *_ = npu_sparse_flash_attention(q, kv, kv, indices, 0.25, attention_mode=2)
>>> list(out.shape)
[1, 6, 4, 16]""",
    params=(
        *(QUERY, KEY, VALUE, INDICES, SCALE, TABLE, *ENDS),
        *(QUERY_ROPE, KEY_ROPE, replace(BLOCK, default=1), spelled(LAYOUT, "layout_query"), LAYOUT_KV, MODE, PRE, NEXT),
        *(ATTENTION_MODE, RETURN_STATS, SINKS, OUT, MAX_OUT, SUM_OUT),
    ),
)
TORCH_GRAD = GRAD_V1.version(
    "npu_sparse_flash_attention_grad",
    "Gradients of npu_sparse_flash_attention, from its statistics and its output.",
    declared={**TORCH.declared, **or_none(LAYOUT, MODE, PRE, NEXT, ATTENTION_MODE)},
    returns="(dquery, dkey, dvalue, dquery_rope, dkey_rope); gradients of absent inputs are empty.",
    example="""\
>>> q, kv = torch.randn(1, 6, 4, 16), torch.randn(1, 9, 1, 16)
>>> indices = torch.arange(4).expand(1, 6, 1, 4)
>>> saved = npu_sparse_flash_attention(q, kv, kv, indices, 0.25, return_softmax_lse=True)
>>> dq, dk, dv, *_ = npu_sparse_flash_attention_grad(q, kv, kv, indices, torch.ones_like(q), *saved, 0.25, 1)
>>> list(dk.shape)
[1, 9, 1, 16]""",
    params=(
        *(QUERY, KEY, VALUE, INDICES, DY, ATTENTION_IN, MAX_IN, SUM_IN, SCALE, BLOCK, QUERY_ROPE, KEY_ROPE),
        *(Q_LENGTHS, KV_LENGTHS, LAYOUT, MODE, PRE, NEXT, ATTENTION_MODE, *GRADIENTS),
    ),
)

ACLNN = (V1, GRAD_V1)
RECORDS: tuple[Op, ...] = (*ACLNN, TORCH, TORCH_GRAD)

"""Operator definitions of CANN's BlockSparseAttention and its gradient, in CANN's C interface (two-phase), torch_npu
and cann_ops_transformer.

Rules are in rules.py, lowering in lowered_call.py.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fusion_attention.contract import INVALID, Array, Attr, Declared, Tensor
from fusion_attention.ir.mask import TILE, UNLIMITED
from fusion_attention.memory import empty
from fusion_attention.ops.block_sparse import rules
from fusion_attention.ops.block_sparse.lowered_call import LSE, MASK, OUT, lower
from fusion_attention.ops.shared.params import FLOATS, one_of, output, rows, spelled
from fusion_attention.ops.shared.prototypes import of_cann
from fusion_attention.ops.training.definitions import DK, DQ, KEY, QUERY
from fusion_attention.ops.training.forward_backward import GRADIENTS

INPUTS = ("query", "key", "value")
LAYOUTS = ("TND", "BNSD", "BSND")
OLDER = LAYOUTS[:2]
_LSE = {"TND": "T1 N1", "BNSD": "B N1 S1", "BSND": "B S1 N1"}

VALUE = Tensor("value", "Value rows.", dtypes="=query", shape=rows("2", "D"))
BLOCK_MASK = Tensor(
    MASK,
    "[B, N1, ceil(S1 / X), ceil(S2 / Y)]; nonzero: the keys of a block of keys are visible to the rows of a block of "
    "rows. S1 and S2 are the largest lengths; blocks count from each sequence's first token. None: all are visible.",
    True,
    "block_sparse_mask",
    dtypes="int8 bool uint8",
    make=lambda shape: torch.ones(shape, dtype=torch.int8),
)
ATTEN_MASK = Tensor("atten_mask", "Reserved.", True)
BLOCK_SHAPE = Array("block_shape", f"[X, Y], rows and keys of a block; None: [{TILE}, {TILE}].", True)
LENGTHS_OF = (
    Array("actual_seq_lengths", "Query rows of every sequence; required in layout TND.", True),
    Array("actual_seq_lengths_kv", "Keys of every sequence; required in layout TND.", True),
)
BLOCK_TABLE = Tensor("block_table", "Reserved.", True)
SCALES = tuple(
    Tensor(f"{of}_dequant_scale", f"Scales of {name} in fp8 (950 only): not computed here.", True)
    for of, name in (("q", "query"), ("k", "key"), ("v", "value"))
)
P_SCALE = Tensor("p_quant_scale", "Reserved.", True)
LAYOUT = Attr("layout", "Axis order of query rows.", type=str, default="TND", code=INVALID, spelled="q_input_layout")
LAYOUT_KV = Attr("layout_kv", "Axis order of keys; it must be that of queries.", type=str, default="TND",
                 spelled="kv_input_layout")  # fmt: skip
KEY_HEADS = Attr("num_key_value_heads", "Key heads.", default=1, axis="N2", code=INVALID)
MASK_TYPE = Attr("mask_type", "0: no mask except the block mask.", default=0)
SCALE = Attr("scale_value", "Factor on query . key; the default is 1.0, not 1 / sqrt(D).", type=float, default=1.0)
PRECISE = Attr("inner_precise", "Without effect: the softmax is in float32.", default=1)
PAGE_SIZE = Attr("block_size", "Without effect.", default=0)
WINDOW = (
    Attr("pre_tokens", "Without effect.", default=UNLIMITED),
    Attr("next_tokens", "Without effect.", default=UNLIMITED),
)
FLAG = one_of("softmax_lse_flag", "1: return softmax_lse.", (0, 1))
QUANT = (
    Attr("quant_mode", "0: floats. 1 to 3, fp8 and fp4 (950 only), are not computed here.", default=0),
    Attr("dst_type_max", "Without effect: it is for fp4.", type=float, default=0.0),
)
OUT_OF = output(OUT, "The output rows.", rows("1", "D"))
LSE_OF = output(
    LSE, "log(sum(exp(s))) of every row and head; -inf in a row without visible keys.",
    {layout: f"{words} L" for layout, words in _LSE.items()}, "float32",
)  # fmt: skip
DY = Tensor("dy", "Gradient of the output.", dtypes=FLOATS, shape=rows("1", "D"), spelled="dout")
OUT_IN = Tensor("attention_in", "The forward's output.", dtypes="=query", shape=rows("1", "D"), spelled=OUT)
LSE_IN = Tensor(LSE, "As the forward returned it; its last axis, of 1, may be missing.", dtypes="float32")
GRADS = (*(DQ, DK), output("dv", "Gradient of value.", rows("2", "D")))


def derive(n: dict[str, Any]) -> dict[str, Any]:
    """Returns {name: value} derived from a call's arguments `n`: lengths per sequence, axes of packed rows, (rows,
    keys) of a block, and counts of blocks."""
    q_len, kv_len, shape = n["actual_seq_lengths"], n["actual_seq_lengths_kv"], n["block_shape"]
    result: dict[str, Any] = {}
    if n["layout"] == "TND" and q_len is not None and kv_len is not None:
        result |= {"B": len(q_len), "S1": int(q_len.max(initial=0)), "S2": int(kv_len.max(initial=0))}
    elif n["B"] is not None:
        q_len = np.full(n["B"], n["S1"], np.int64) if q_len is None else q_len
        kv_len = np.full(n["B"], n["S2"], np.int64) if kv_len is None else kv_len
    block = (int(shape[0]), int(shape[1])) if shape is not None and rules.is_block(shape) else (TILE, TILE)
    result |= {"q_len": q_len, "kv_len": kv_len, "block": block, "L": 1 if n["softmax_lse_flag"] else None}
    sizes = (("Xs", "S1", block[0]), ("Ys", "S2", block[1]))
    axes = {**n, **result}
    return result | {name: -(-axes[axis] // size) for name, axis, size in sizes if axes[axis] is not None}


def _fresh(n: Any) -> dict[str, torch.Tensor]:
    q = n["query"]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return {OUT: empty(q, q.shape), LSE: empty(q, (*q.shape[:-1], 1), dtype)}


def _fresh_gradients(n: Any) -> dict[str, torch.Tensor]:
    return {name: empty(n[of], n[of].shape) for name, of in zip(GRADIENTS[:3], INPUTS, strict=True)}


FORMULA = """s_j = scale_value * query . key_j     for the keys j of the blocks that are visible to the row's block
softmax_lse = log(sum_j exp(s_j)),  attention_out = sum_j exp(s_j - softmax_lse) value_j"""
TEX = r"""\begin{aligned}
s_j &= scale\; q \cdot k_j \qquad j \text{ with } mask_{\lfloor i / X \rfloor, \lfloor j / Y \rfloor} \ne 0 \\
lse &= \ln \sum_j e^{s_j}, \qquad out = \sum_j e^{s_j - lse}\, v_j
\end{aligned}"""
GRAD_FORMULA = """P_j = exp(s_j - softmax_lse),  dS_j = P_j * (dout . value_j - dout . attention_out)
dq = scale_value * sum_j dS_j key_j,  dk_j += scale_value * dS_j query,  dv_j += P_j dout"""
GRAD_TEX = r"""\begin{aligned}
P_j &= e^{s_j - lse}, \qquad dS_j = P_j\,(dout \cdot v_j - dout \cdot out) \\
dq &= scale \sum_j dS_j\, k_j, \qquad dk_j \mathrel{+}= scale\; dS_j\, q, \qquad dv_j \mathrel{+}= P_j\, dout
\end{aligned}"""
NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(("B", "S1", "S2", "T1", "T2", "N1", "N2", "D", "Xs", "Ys", "L")),
    **dict.fromkeys(("actual_seq_lengths", "actual_seq_lengths_kv", "block_shape", MASK)),
    "softmax_lse_flag": 1,
}
SAMPLE: dict[str, Any] = {
    "num_key_value_heads": 2, "block_shape": list(rules.BLOCK), MASK: "B N1 Xs Ys", "inner_precise": 0,
    "scale_value": 0.125,
}  # fmt: skip
PACKED_SAMPLE = {"actual_seq_lengths": [3, 5], "actual_seq_lengths_kv": [130, 7]}

C = Declared("Optional")
V1 = of_cann(
    "aclnnBlockSparseAttention",
    "Softmax attention of each block of query rows to the blocks of keys that a block mask makes visible.",
    (
        *(QUERY, KEY, VALUE, BLOCK_MASK, ATTEN_MASK, BLOCK_SHAPE, *LENGTHS_OF, BLOCK_TABLE, LAYOUT, LAYOUT_KV),
        *(KEY_HEADS, MASK_TYPE, SCALE, PRECISE, PAGE_SIZE, *WINDOW, FLAG, OUT_OF, LSE_OF),
    ),
    (*rules.LENGTHS, *rules.BLOCKS, *rules.FORMS, *rules.LIMITS, *rules.FORWARD),
    formula=FORMULA,
    tex=TEX,
    rulings=(46,),
    layouts=OLDER,
    layout_attr="layout",
    neutral=NEUTRAL,
    derive=derive,
    functions=rules.FUNCTIONS,
    lower=lower,
    c=C.of_page(softmax_lse="softmaxLseOptional"),
    results=(OUT, LSE),
    fresh=_fresh,
    trains=dict.fromkeys((OUT, LSE), INPUTS),
    sizes={"B": 2, "S1": 4, "S2": 130, "T1": 8, "T2": 137, "N1": 4, "N2": 2, "D": 64, "Xs": 2, "Ys": 2},
    samples={layout: {**SAMPLE, "layout_kv": layout, **(PACKED_SAMPLE if layout == "TND" else {})}
             for layout in LAYOUTS},
)  # fmt: skip
V2 = V1.version(
    "aclnnBlockSparseAttentionV2",
    "BlockSparseAttention with scales of fp8 tensors, and layout BSND.",
    after={"block_table": SCALES},
    layouts=LAYOUTS,
    c=V1.c.but(
        **{name: f"{name[0]}DequantScale!" for name in ("q_dequant_scale", "k_dequant_scale", "v_dequant_scale")}
    ),
)
V3 = V2.version(
    "aclnnBlockSparseAttentionV3",
    "BlockSparseAttentionV2 with quant_mode, dst_type_max and p_quant_scale.",
    after={"v_dequant_scale": (P_SCALE,), "softmax_lse_flag": QUANT},
    c=C.but(softmax_lse="softmaxLseOptional"),
)
GRAD = V1.version(
    "aclnnBlockSparseAttentionGrad",
    "Gradients of BlockSparseAttention, from its output and its softmax_lse.",
    params=(
        *(DY, replace(QUERY, dtypes="=dy"), KEY, VALUE, OUT_IN, LSE_IN, BLOCK_MASK, ATTEN_MASK, BLOCK_SHAPE),
        *(*LENGTHS_OF, LAYOUT, LAYOUT_KV),
        *(KEY_HEADS, MASK_TYPE, SCALE, *WINDOW, *GRADS),
    ),
    rules=(*rules.LENGTHS, *rules.BLOCKS, *rules.FORMS, *rules.LIMITS, *rules.BACKWARD),
    formula=GRAD_FORMULA,
    tex=GRAD_TEX,
    results=GRADIENTS[:3],
    fresh=_fresh_gradients,
    trains={},
    c=C.of_page(),
    samples={layout: {**sample, LSE: f"{_LSE[layout]} 1"} for layout, sample in V1.samples.items()},
)
TORCH_SCALE = replace(SCALE, default=0.0, text="Factor on query . key; 0, the default, gives all keys equal weights.")
EXAMPLE = """\
>>> q, kv = torch.randn(1, 4, 256, 64), torch.randn(1, 2, 384, 64)
>>> mask = torch.ones(1, 4, 2, 3, dtype=torch.int8).tril()
>>> words = dict(q_input_layout="BNSD", kv_input_layout="BNSD", num_key_value_heads=2, scale_value=0.125)
>>> out, lse = npu_block_sparse_attention(q, kv, kv, mask, [128, 128], **words)
"""
TORCH = V1.version(
    "npu_block_sparse_attention",
    V1.summary,
    rules=tuple(rule for rule in V1.rules if rule is not rules.UNMASKED),
    layouts=LAYOUTS,
    keywords="q_input_layout",
    params=(
        *(QUERY, KEY, VALUE, replace(BLOCK_MASK, optional=False), replace(BLOCK_SHAPE, optional=False)),
        *(LAYOUT, LAYOUT_KV, KEY_HEADS, TORCH_SCALE, PRECISE, *LENGTHS_OF),
        *(replace(FLAG, text="Without effect: softmax_lse is always returned."), OUT_OF, LSE_OF),
    ),
    returns="(attention_out, softmax_lse), both differentiable; softmax_lse is returned for any softmax_lse_flag.",
    example=EXAMPLE
    + """\
>>> list(out.shape), list(lse.shape)
([1, 4, 256, 64], [1, 4, 256, 1])""",
)
TORCH_GRAD = GRAD.version(
    "npu_block_sparse_attention_backward",
    "Gradients of npu_block_sparse_attention, from its output and its softmax_lse.",
    rules=tuple(rule for rule in GRAD.rules if rule is not rules.UNMASKED),
    layouts=LAYOUTS,
    params=(
        *(spelled(DY, "d_out"), *GRAD.params[1:6], replace(BLOCK_MASK, optional=False)),
        *(BLOCK_SHAPE, *LENGTHS_OF, LAYOUT, LAYOUT_KV, KEY_HEADS, TORCH_SCALE, *GRADS),
    ),
    returns="(dq, dk, dv).",
    example=EXAMPLE
    + """\
>>> dq, dk, dv = npu_block_sparse_attention_backward(out, q, kv, kv, out, lse, mask, [128, 128], **words)
>>> list(dk.shape)
[1, 2, 384, 64]""",
)
_OF = {p.name: p for p in V3.params}
OUT_DTYPE = Attr(
    "attention_out_dtype", "None, or query's dtype; others are for fp8 and fp4.", type=torch.dtype, default=None
)
CANN = V3.version(
    "cann_ops_transformer.block_sparse_attention",
    V1.summary,
    keywords="q_input_layout",
    params=(
        *(*TORCH.params[:7], KEY_HEADS, SCALE, PRECISE, *LENGTHS_OF),
        replace(FLAG, spelled="return_softmax_lse", text="Return softmax_lse.", type=bool, default=False, domain=""),
        *(_OF[name] for name in ["mask_type", "quant_mode", "block_size", "pre_tokens", "next_tokens", "dst_type_max"]),
        *(_OF[name] for name in ["atten_mask", "block_table", "q_dequant_scale", "k_dequant_scale", "v_dequant_scale"]),
        *(P_SCALE, OUT_DTYPE, OUT_OF, LSE_OF),
    ),
    rules=(*TORCH.rules, rules.SAME_DTYPE),
    returns="(attention_out, softmax_lse), both differentiable; softmax_lse is empty without return_softmax_lse.",
    example=TORCH.example.replace("npu_block_sparse_attention(", "block_sparse_attention(").replace(
        ", scale_value", ", return_softmax_lse=True, scale_value"
    ),
)
CANN_GRAD = GRAD.version(
    "cann_ops_transformer.block_sparse_attention_grad",
    GRAD.summary,
    keywords="q_input_layout",
    layouts=OLDER,
    params=(
        *(*TORCH_GRAD.params[:8], replace(LAYOUT, default="BNSD"), replace(LAYOUT_KV, default="BNSD"), KEY_HEADS),
        SCALE,
        *(*LENGTHS_OF, ATTEN_MASK, MASK_TYPE, *GRADS),
    ),
    rules=TORCH_GRAD.rules,
    returns=TORCH_GRAD.returns,
    example=TORCH_GRAD.example.replace("npu_block_sparse_attention(", "block_sparse_attention(")
    .replace("npu_block_sparse_attention_backward(", "block_sparse_attention_grad(")
    .replace("[128, 128], **words)\n>>> dq", "[128, 128], return_softmax_lse=True, **words)\n>>> dq"),
)
RECORDS = (V1, V2, V3, GRAD, TORCH, TORCH_GRAD, CANN, CANN_GRAD)

"""Definitions of CANN's decoding attention: IncreFlashAttention V1 to V4 and torch_npu's npu_incre_flash_attention.

A version lists its differences from the previous one. Rules are in rules.py, the conversion for back ends in lower.py.
"""

from dataclasses import replace
from typing import Any

import torch

from fusion_attention.contract import INVALID, Array, Attr, Declared, Tensor, Tensors
from fusion_attention.ops.inference.checks import FUNCTIONS
from fusion_attention.ops.inference.lower import RESULTS, fresh, geometry, lower
from fusion_attention.ops.inference.rules import EARLY, RULES
from fusion_attention.ops.shared import params
from fusion_attention.ops.shared.prototypes import of_cann
from fusion_attention.ops.shared.rules import own_scale, untrained

LAYOUTS = ("BSH", "BNSD", "BSND")


QUERY = Tensor(
    "query",
    "Query rows, one per sequence; several are causal, as the last rows of a prompt.",
    dtypes=params.FLOATS,
    shape=params.rows("1", "D"),
)
KEY = Tensors(
    "key",
    "Key rows: one tensor, one per sequence, or pages [blocks, block_size, N2*D] or [blocks, N2, block_size, D].",
    shape=params.rows("2", "D"),
)
VALUE = Tensors("value", "Value rows, in the form of key.", dtypes="=key", shape=params.rows("2", "D"))
PSE_SHIFT = Tensor("pse_shift", "Added to the scaled scores: [B or 1, N1, S1, S2].", True, dtypes="=query")
ATTEN_MASK = Tensor(
    "atten_mask",
    "1 hides a token of the cache: [B, S2], [B, 1, S2] or [B, 1, 1, S2].",
    True,
    dtypes="bool int8 uint8",
    cast=params.keeps_or_adds("pse_shift"),
    make=params.unmasked,
)
PADDING_MASK = Tensor("padding_mask", "Reserved.", True)
LENGTHS = Array(
    "actual_seq_lengths", "Tokens of every sequence in the cache; one number serves all; None: the whole cache.", True
)
DEQUANT_1 = Tensor("dequant_scale1", "Reserved (for an int8 query).", True, dtypes="uint64 float32")
QUANT_1 = Tensor("quant_scale1", "Reserved (for an int8 query).", True, dtypes="float32 bfloat16")
DEQUANT_2 = Tensor("dequant_scale2", "Reserved (for an int8 query).", True, dtypes="uint64 float32")
QUANT_2 = Tensor(
    "quant_scale2",
    "Scale of int8 output, 1 or N1*D elements; halves round to even (one scale) or away from zero.",
    True,
    dtypes="float32 bfloat16 uint64",
)
OFFSET_2 = Tensor(
    "quant_offset2", "Offset of int8 output, in the shape of quant_scale2.", True, dtypes="float32 bfloat16"
)
ANTI_SCALE = Tensor(
    "antiquant_scale",
    "Scales of an int8 cache, keys then values: [2], [2, N2, 1, D], [2, N2, D] or [2, N2*D].",
    True,
    dtypes=params.FLOATS,
)
ANTI_OFFSET = Tensor(
    "antiquant_offset", "Added to the integers before scaling; shape of antiquant_scale.", True, dtypes=params.FLOATS
)
BLOCK_TABLE = Tensor(
    "block_table",
    "The pages of every sequence, in order.",
    True,
    dtypes=params.PAGE_IDS,
    shape="B pages",
    make=params.in_order,
)
PADDING_SIZE = Array(
    "kv_padding_size", "One number: unused tokens of the cache behind the last token of every sequence.", True
)
NUM_HEADS = Attr("num_heads", "Query heads.", axis="N1", code=INVALID)
SCALE = Attr("scale_value", "Factor on query . key; the default is 1.0, not 1 / sqrt(D).", type=float, default=1.0)
LAYOUT = Attr("input_layout", "Axis order of query, output, and a cache without pages.", type=str, code=INVALID)
KV_HEADS = Attr("num_key_value_heads", "Key heads; 0: as many as query heads.", default=0)
BLOCK_SIZE = Attr("block_size", "Tokens of a page; ignored without a block table.", default=0)
INNER_PRECISE = Attr("inner_precise", "0 or 1; both compute in float32.", default=1)
OUT = params.output(
    "attention_out",
    "The output rows: zeros if a sequence is empty, the mean of V if the mask hides all. int8 beside quant_scale2.",
    params.rows("1", "D"),
    f"{params.FLOATS} int8",
    make=torch.zeros,
)

FORMULA = """K, V = (stored + antiquant_offset) * antiquant_scale         if the cache is int8
S    = scale_value * Q K^T + pse_shift
out  = softmax(S over a sequence's tokens that the mask leaves) V
out  = round(out * quant_scale2 + quant_offset2), saturated    if the output is int8"""
TEX = r"""\begin{aligned}
K, V &= (stored + offset_{anti})\, scale_{anti} \quad \text{where the cache is int8} \\
S &= scale\; QK^\top + pse \\
out &= \operatorname{softmax}(S)\, V \quad \text{over the tokens of a sequence that the mask leaves} \\
out_{int8} &= \operatorname{sat}\!\big(\operatorname{round}(out \cdot scale_2 + offset_2)\big)
\end{aligned}"""
UNTRAINED = "decoding has no derivative: call it under torch.no_grad(), or train with npu_fusion_attention"
NEUTRAL: dict[str, Any] = {
    "pse_reserved": False,
    "inner_precise": 1,
    "block_size": 0,
    **dict.fromkeys(("pse_shift", "atten_mask", "actual_seq_lengths", "quant_scale2", "quant_offset2")),
    **dict.fromkeys(("antiquant_scale", "antiquant_offset", "block_table", "kv_padding_size", "attention_out")),
}
SIZES = {"B": 2, "S1": 1, "S2": 6, "N1": 4, "N2": 2, "D": 16}
SAMPLES = {key: {"num_heads": 4, "num_key_value_heads": 2} for key in LAYOUTS}

V1 = of_cann(
    "aclnnIncreFlashAttention",
    "Softmax attention of one new token per sequence to the keys in its cache.",
    (QUERY, KEY, VALUE, PSE_SHIFT, ATTEN_MASK, LENGTHS, NUM_HEADS, SCALE, LAYOUT, KV_HEADS, OUT),
    RULES + EARLY,
    formula=FORMULA,
    tex=TEX,
    rulings=(1, 2, 6, 10, 15, 20, 23, 28),
    layouts=LAYOUTS,
    neutral={**NEUTRAL, "pse_reserved": True},
    derive=geometry,
    functions=FUNCTIONS,
    lower=lower,
    c=Declared(names={"block_table": "blocktable"}),
    repeats=True,
    results=RESULTS,
    fresh=fresh,
    sizes=SIZES,
    samples=SAMPLES,
)
V2 = V1.version(
    "aclnnIncreFlashAttentionV2",
    "IncreFlashAttention with int8 output.",
    after={"actual_seq_lengths": (DEQUANT_1, QUANT_1, DEQUANT_2, QUANT_2, OFFSET_2)},
    rulings=(*V1.rulings, 16),
)
V3 = V2.version(
    "aclnnIncreFlashAttentionV3",
    "IncreFlashAttentionV2 with pse_shift, an int8 cache and pages.",
    after={"quant_offset2": (ANTI_SCALE, ANTI_OFFSET, BLOCK_TABLE), "num_key_value_heads": (BLOCK_SIZE, INNER_PRECISE)},
    rules=RULES,
    rulings=(*V2.rulings, 18),
    neutral=NEUTRAL,
)
V4 = V3.version(
    "aclnnIncreFlashAttentionV4",
    "IncreFlashAttentionV3 with left padding.",
    after={"block_table": (PADDING_SIZE,)},
    c=V3.c.of_page(),
)
TORCH = V4.version(
    "npu_incre_flash_attention",
    "Softmax attention of one new token per sequence to the keys in its padded or paged cache of floats or int8.",
    keywords="padding_mask",
    declared={"key": torch.Tensor, "value": torch.Tensor, "kv_padding_size": params.TENSOR_FIRST},
    example="""\
>>> q, cache = torch.randn(2, 1, 4 * 64), torch.randn(2, 100, 64)
>>> heads = {"num_heads": 4, "num_key_value_heads": 1, "scale_value": 0.125}
>>> out = npu_incre_flash_attention(q, cache, cache, actual_seq_lengths=[7, 100], **heads)
>>> list(out.shape)
[2, 1, 256]""",
    params=(
        *(QUERY, KEY, VALUE, PADDING_MASK, ATTEN_MASK, PSE_SHIFT, LENGTHS, ANTI_SCALE, ANTI_OFFSET, BLOCK_TABLE),
        *(DEQUANT_1, QUANT_1, DEQUANT_2, QUANT_2, OFFSET_2, PADDING_SIZE, replace(NUM_HEADS, default=1), SCALE),
        *(replace(LAYOUT, default="BSH"), KV_HEADS, BLOCK_SIZE, INNER_PRECISE, OUT),
    ),
    rules=(*RULES, own_scale("scale_value"), *untrained(UNTRAINED, query=(2, 1, 64), key=(2, 6, 32), value=(2, 6, 32))),
)
ACLNN = (V1, V2, V3, V4)
RECORDS = (*ACLNN, TORCH)

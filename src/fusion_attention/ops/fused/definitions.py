"""Definitions (parameters, legality rules, formulas) of CANN's fused inference attention operators,
PromptFlashAttention and FusedInferAttentionScore, and of torch_npu's three functions for them.

A version lists its differences from an earlier one; parameters that IncreFlashAttention also has are imported from
ops/inference/definitions.py. Rules are in rules.py, the conversion for back ends is in lower.py.
"""

from dataclasses import replace
from typing import Any

import torch

from fusion_attention.contract import INVALID, Array, Attr, Declared, Tensor, Tensors
from fusion_attention.ir.mask import UNLIMITED
from fusion_attention.ops.fused import geometry
from fusion_attention.ops.fused.cache_rules import CACHE_LIMITS, CACHES, PADDING, PREFIXES
from fusion_attention.ops.fused.cache_rules import ROPES as ROPE_RULES
from fusion_attention.ops.fused.checks import FUNCTIONS
from fusion_attention.ops.fused.lower import PROMPT_RESULTS, RESULTS, fresh, lower
from fusion_attention.ops.fused.mask_rules import (
    BIASES,
    MASKS,
    NO_TREES,
    PRECISION,
    PROMPT_PRECISION,
    PROMPT_WINDOW,
    SINKS,
    TREES,
    UNREAD_BIAS,
)
from fusion_attention.ops.fused.quant_rules import (
    ELSEWHERE,
    INTEGERS,
    INTEGERS_WITH_ROPE,
    LAST,
    NO_INTEGER_LATENTS,
    NO_INTEGERS,
    OUTPUTS,
    OWN_DTYPE,
    RESERVED,
    RESERVED_DTYPES,
)
from fusion_attention.ops.fused.rules import FUSED_LIMITS, INPUTS, PROMPT_CACHE, TORCH, TORCH_FUSED
from fusion_attention.ops.inference.definitions import (
    ANTI_OFFSET,
    ANTI_SCALE,
    BLOCK_SIZE,
    BLOCK_TABLE,
    DEQUANT_1,
    DEQUANT_2,
    KV_HEADS,
    NUM_HEADS,
    OFFSET_2,
    PADDING_MASK,
    QUANT_1,
    QUANT_2,
    SCALE,
)
from fusion_attention.ops.inference.definitions import ATTEN_MASK as PLAIN_MASK
from fusion_attention.ops.shared.params import FLOATS, TENSOR_FIRST, masked, one_of, output, spelled
from fusion_attention.ops.shared.prototypes import of_cann

# ----------------------------------------------------------------------------------------------------------- parameters

QUERY = Tensor("query", "Query rows.", dtypes=f"{FLOATS} int8", shape=geometry.words("1", "D"), cast=ELSEWHERE)
PROMPT_KEY = Tensor("key", "Key rows.", dtypes="=query", shape=geometry.words("2", "D"))
PROMPT_VALUE = Tensor("value", "Value rows.", dtypes="=query", shape=geometry.words("2", "Dv"))
KEY = Tensors(
    "key",
    "Key rows: one tensor, one per sequence, or pages [blocks, block_size, N2*D], [blocks, N2, block_size, D] or "
    "[blocks, N2, D/d0, block_size, d0] with d0 of 32 bytes. Dtype of query, int8, or int32, each of which is eight "
    "integers of four bits, the first in the lowest bits.",
    shape=geometry.words("2", "D"),
)
VALUE = Tensors("value", "Value rows, in the form of key.", dtypes="=key", shape=geometry.words("2", "Dv"))
PSE_SHIFT = Tensor("pse_shift", "Added to the scaled scores: [B or 1, N1, S1 or 1, S2], in the query's dtype.", True)
ATTEN_MASK = replace(
    PLAIN_MASK,
    text="1 hides a key from a row: [S1, S2], [B or 1, S1, S2] or [B or 1, 1, S1, S2]; sparse_mode 2, 3 and 4 take a "
    "2048 x 2048 triangle, torch.ones(2048, 2048, dtype=torch.bool).triu(1); mode 9 a tree mask, [B, S1, S1].",
    make=masked,
)
Q_LENGTHS = Array(
    "actual_seq_lengths",
    "Query rows of every sequence (one number serves all); packed rows: cumulative ends. None: all.",
    True,
)
KV_LENGTHS = Array(
    "actual_seq_lengths_kv",
    "Keys of every sequence (one number serves all); packed keys: cumulative ends; pages: lengths. None: all.",
    True,
)
PROMPT_QUANT = (
    replace(DEQUANT_1, text="With an int8 query: factor on the integer scores."),
    replace(
        QUANT_1, text="With an int8 query: factor on the weights before they are rounded to int8.", dtypes="float32"
    ),
    replace(DEQUANT_2, text="With an int8 query: factor on the integer output; it includes 1 / quant_scale1."),
    replace(QUANT_2, text="Scale of int8 output, 1 or N1*Dv elements."),
    OFFSET_2,
)
QUERY_PADDING = Array(
    "query_padding_size", "One number: unused rows of query behind the last row of every sequence.", True
)
KV_PADDING = Array("kv_padding_size", "One number: unused tokens of key behind the last key of every sequence.", True)
FUSED_SCALE = replace(
    ANTI_SCALE, text="Scales of integers, keys then values: [2], [2, N2*D] or (antiquant_mode 1) [2, B, S2]."
)
BY_MODE = (
    "by mode: 0: one number or [N2*D], 1: [B, S2], 2: [N2], 3: [B, N2, S2], 4: [blocks, block_size], 5: "
    "[blocks, N2, block_size]."
)
SEPARATE = (
    Tensor("key_antiquant_scale", f"Scales of integer keys, {BY_MODE}", True),
    Tensor("key_antiquant_offset", "Added to integer keys before scaling.", True),
    Tensor("value_antiquant_scale", f"Scales of integer values, {BY_MODE}", True),
    Tensor("value_antiquant_offset", "Added to integer values before scaling.", True),
)
SHARED_PREFIX = (
    Tensor("key_shared_prefix", "Keys of a prefix that all sequences share.", True),
    Tensor("value_shared_prefix", "Values of a prefix that all sequences share.", True),
    Array("actual_shared_prefix_len", "One number: used keys of the shared prefix; None: all.", True),
)
ROPES = (
    Tensor("query_rope", "Rope part of the query rows.", True, shape=geometry.words("1", "Dr")),
    Tensor("key_rope", "Rope part of the key rows, in the form of key.", True),
    Tensor("key_rope_antiquant_scale", "Reserved.", True),
)
DEQUANT_QUERY = Tensor(
    "dequant_scale_query",
    "Scale of an int8 query, per row and head. Pass query_rope divided by it and by the key's scale.",
    True,
    dtypes="float32",
)
SINK = Tensor(
    "learnable_sink", "One more logit per query head in the denominator.", True, dtypes="bfloat16 float16 float32",
    shape="N1",
)  # fmt: skip
STARTS = (
    Array("q_start_idx", "Without effect: for pse_type 2 and 3, which are not supported.", True),
    Array("kv_start_idx", "Without effect: for pse_type 2 and 3, which are not supported.", True),
)
PRE = Attr("pre_tokens", "Visible tokens before the diagonal (mode 0 with a mask, and 4).", default=UNLIMITED)
NEXT = Attr("next_tokens", "Visible tokens behind the diagonal (mode 0 with a mask, and 4).", default=UNLIMITED)
LAYOUT = Attr(
    "input_layout",
    "Axis order of query, key and value; that of the output follows a _ if it differs.",
    type=str,
    default="BSH",
    code=INVALID,
)
SPARSE_MODE = Attr(
    "sparse_mode",
    "0 mask and window, 1 mask alone, 2 causal from the upper left, 3 to the lower right, 4 window to the lower right, "
    "9 tree. One-token queries in padded layouts see every key that the mask leaves.",
    default=0,
    domain="0 <= sparse_mode <= 4 or sparse_mode == 9",
)
PROMPT_MODE = replace(
    SPARSE_MODE, text=SPARSE_MODE.text.replace(", 9 tree", "").partition(" One")[0], domain="0 <= sparse_mode <= 4"
)
PRECISE = Attr(
    "inner_precise",
    "Bit 1: rows whose keys the mask hides return zeros, not the mean of V. Bit 0 has no effect.",
    default=1,
    domain="0 <= inner_precise <= 3",
)
ANTI_MODE = one_of("antiquant_mode", "Kind of antiquant_scale: 0 per channel or one number, 1 per token.", (0, 1))
SIDE_MODE = "0 per channel or one number, 1 per token, 2 per head, 3 per token and head, 4 and 5 as 1 and 3 but paged."
KEY_MODE, VALUE_MODE = (
    Attr(
        f"{side}_antiquant_mode",
        f"Kind of {side}_antiquant_scale: {SIDE_MODE}",
        default=0,
        domain=f"0 <= {side}_antiquant_mode <= 8",
    )
    for side in ("key", "value")
)
QUERY_MODE = one_of(
    "query_quant_mode", "3: an int8 query with rope parts, and a scale per row and head; otherwise 0.", (0, 3, 6)
)
PSE_TYPE = Attr("pse_type", "0: pse_shift is added to the scaled scores.", default=0, domain="pse_type == 0")
LSE_FLAG = Attr("softmax_lse_flag", "Compute softmax_lse.", type=bool, default=False)
OUT = output(
    "attention_out",
    "The output rows: int8 with quant_scale2, otherwise the dtype of query; for an int8 query that of query_rope, or "
    "float16. Rows without visible keys are zeros; if the mask alone hides all keys, the mean of V.",
    geometry.words("1", "Dv", output=True),
    f"{FLOATS} int8",
    make=torch.zeros,
)
LSE = output(
    "softmax_lse",
    "max + ln(sum) of every row's scores, +inf in rows without visible keys; written if softmax_lse_flag is set.",
    geometry.lse_words(),
    "",
    optional=True,
    # If it is not requested, a given tensor may have any shape, since it is not written.
    form=lambda names: names["input_layout"] if names["softmax_lse_flag"] else "",
)

# ------------------------------------------------------------------------------------------------- operator definitions

PROMPT_FORMULA = """S   = scale_value * Q K^T + pse_shift
out = softmax(S over the keys that mask, mode and window leave) V
int8 query:  S = scale_value * dequant_scale1 * (Q K^T) + pse_shift,  W = round(quant_scale1 * exp(S - max))
             out = (W V) * dequant_scale2 / sum(exp(S - max))
int8 output: out = round(out * quant_scale2 + quant_offset2), saturated"""
PROMPT_TEX = r"""\begin{aligned}
S &= scale\; QK^\top + pse \\
out &= \operatorname{softmax}(S)\, V \quad \text{over the keys that mask, mode and window leave} \\
\text{int8 query:}\quad S &= scale \cdot deq_1\, QK^\top + pse,
  \quad W = \operatorname{round}\!\big(q_1\, e^{S - \max S}\big),
  \quad out = \frac{deq_2\, WV}{\sum e^{S - \max S}} \\
\text{int8 output:}\quad out &\leftarrow \operatorname{sat}\!\big(\operatorname{round}(out \cdot q_2 + offset_2)\big)
\end{aligned}"""
FORMULA = """K, V = (stored + offset) * scale           if the cache has integers
S    = scale_value * (Q K^T + Q_rope K_rope^T) + pse_shift
out  = softmax(S over the keys that lengths, mask, mode and window leave, with the sink) V
lse  = max + ln(sum exp(S - max))
int8 output: out = round(out * quant_scale2 + quant_offset2), saturated
int8 query, query_quant_mode 0: as PromptFlashAttention's; 3: scores times dequant_scale_query times the key's scale"""
TEX = r"""\begin{aligned}
K, V &= (stored + offset)\, scale_{anti} \quad \text{where the cache holds integers} \\
S &= scale\,(QK^\top + Q_{rope} K_{rope}^\top) + pse \\
out &= \operatorname{softmax}(S)\, V
  \quad \text{over the keys that lengths, mask, mode and window leave, with the sink} \\
lse &= \max S + \ln \sum e^{S - \max S} \\
\text{int8 output:}\quad out &\leftarrow \operatorname{sat}\!\big(\operatorname{round}(out \cdot q_2 + offset_2)\big)
\end{aligned}"""
NEUTRAL: dict[str, Any] = {
    "skips_modes": True,
    "pse_reserved": False,
    "has_lse": True,
    "softmax_lse_flag": False,
    "inner_precise": 1,
    "sparse_mode": 0,
    "pre_tokens": UNLIMITED,
    "next_tokens": UNLIMITED,
    "num_key_value_heads": 0,
    **dict.fromkeys(("block_size", "antiquant_mode", "key_antiquant_mode", "value_antiquant_mode"), 0),
    **dict.fromkeys(("query_quant_mode", "pse_type"), 0),
    **dict.fromkeys(("pse_shift", "atten_mask", "actual_seq_lengths", "actual_seq_lengths_kv")),
    **dict.fromkeys(("dequant_scale1", "quant_scale1", "dequant_scale2", "quant_scale2", "quant_offset2")),
    **dict.fromkeys(("antiquant_scale", "antiquant_offset", "block_table", "query_padding_size", "kv_padding_size")),
    **dict.fromkeys(p.name for p in (*SEPARATE, *SHARED_PREFIX, *ROPES, *STARTS)),
    **dict.fromkeys(("dequant_scale_query", "learnable_sink", "attention_out", "softmax_lse", "out_dtype")),
    **dict.fromkeys(("B", "S1", "S2", "T1", "T2", "N2", "Dv", "Dr", "L", "pages")),
}
SIZES = {"B": 2, "S1": 3, "S2": 6, "T1": 8, "T2": 12, "N1": 4, "N2": 2, "D": 64, "Dv": 64, "Dr": 64}
HEADS = {"num_heads": 4, "num_key_value_heads": 2, "scale_value": 0.125}
ENDS = {"actual_seq_lengths": [3, 8], "actual_seq_lengths_kv": [5, 12]}
LATENT = {**HEADS, "D": 512, "Dv": 512, "N2": 1, "num_key_value_heads": 1, "query_rope": True}
LATENT_PAGES = {
    "block_table": "2 2",
    "block_size": 16,
    "actual_seq_lengths": [3, 8],
    "actual_seq_lengths_kv": [20, 32],
    "key": "8 16 N2*D",
    "value": "8 16 N2*D",
    "key_rope": "8 16 N2*Dr",
}
SAMPLES: dict[str, Any] = {
    **{layout: {**HEADS, **(ENDS if layout in geometry.PACKED else {})} for layout in geometry.LAYOUTS},
    "SH": {**HEADS, "actual_seq_lengths": [3, 5], "T2": 8},
}
# Some layouts require rope.
ROPE_SAMPLES: dict[str, Any] = {
    **SAMPLES,
    **{
        layout: {**LATENT, "key_rope": geometry.words("2", "Dr")[layout]}
        for layout in ("BSH_NBSD", "BSND_NBSD", "BNSD_NBSD")
    },
    **{
        layout: {**HEADS, "D": 128, "Dv": 128, "query_rope": True, "key_rope": geometry.words("2", "Dr")[layout]}
        for layout in ("BSH_BNSD", "BSND_BNSD")
    },
    "TND_NTD": {**LATENT, **LATENT_PAGES},
}
PROMPTS = INPUTS + PROMPT_CACHE + MASKS
WITH_ROPE = ROPE_RULES + FUSED_LIMITS
FUSED = INPUTS + CACHES + CACHE_LIMITS + PADDING + PREFIXES + MASKS + BIASES + PRECISION + INTEGERS + OUTPUTS
RULINGS = (2, 5, 6, 10, 15, 16, 20, 23, 29, 30, 32, 35, 36, 37, 38)

C = Declared(names={"dequant_scale1": "deqScale1", "dequant_scale2": "deqScale2"})
PROMPT_V1 = of_cann(
    "aclnnPromptFlashAttention",
    "Softmax attention of prompts.",
    (
        *(QUERY, PROMPT_KEY, PROMPT_VALUE, PSE_SHIFT, ATTEN_MASK, Q_LENGTHS),
        *(NUM_HEADS, SCALE, PRE, replace(NEXT, default=0), replace(LAYOUT, default=NUM_HEADS.default), KV_HEADS, OUT),
    ),
    PROMPTS + NO_INTEGERS + OUTPUTS + UNREAD_BIAS,
    formula=PROMPT_FORMULA,
    tex=PROMPT_TEX,
    rulings=RULINGS,
    layouts=geometry.PROMPT,
    neutral={**NEUTRAL, "skips_modes": False, "pse_reserved": True, "has_lse": False},
    derive=geometry.geometry,
    functions=FUNCTIONS,
    lower=lower,
    c=C,
    repeats=True,
    results=PROMPT_RESULTS,
    fresh=fresh,
    sizes=SIZES,
    samples=SAMPLES,
)
PROMPT_V2 = PROMPT_V1.version(
    "aclnnPromptFlashAttentionV2",
    "PromptFlashAttention with key lengths, sparse modes, int8 queries and int8 output.",
    after={"actual_seq_lengths": (KV_LENGTHS, *PROMPT_QUANT), "num_key_value_heads": (PROMPT_MODE,)},
    rules=PROMPTS + INTEGERS + OUTPUTS + UNREAD_BIAS,
)
PROMPT_V3 = PROMPT_V2.version(
    "aclnnPromptFlashAttentionV3",
    "PromptFlashAttentionV2 with pse_shift, inner_precise and packed rows.",
    after={"sparse_mode": (replace(PRECISE, domain=""),)},
    rules=PROMPTS + BIASES + PROMPT_PRECISION + INTEGERS + OUTPUTS,
    layouts=geometry.PROMPT_PACKED,
    neutral={**PROMPT_V1.neutral, "pse_reserved": False},
)
FUSED_V1 = PROMPT_V1.version(
    "aclnnFusedInferAttentionScore",
    "Softmax attention of prompts and of new tokens to the keys of a cache: padded, packed, a list of tensors, or "
    "pages; floats or integers.",
    params=(
        *(QUERY, KEY, VALUE, PSE_SHIFT, ATTEN_MASK, Q_LENGTHS, KV_LENGTHS, *PROMPT_QUANT, FUSED_SCALE, ANTI_OFFSET),
        *(BLOCK_TABLE, QUERY_PADDING, KV_PADDING, NUM_HEADS, SCALE, PRE, NEXT, LAYOUT, KV_HEADS, SPARSE_MODE, PRECISE),
        *(BLOCK_SIZE, ANTI_MODE, LSE_FLAG, OUT, LSE),
    ),
    rules=FUSED + NO_TREES,
    formula=FORMULA,
    tex=TEX,
    rulings=(*RULINGS, 18, 31, 33, 34),
    layouts=geometry.ROPELESS,
    neutral=NEUTRAL,
    results=RESULTS,
)
FUSED_V2 = FUSED_V1.version(
    "aclnnFusedInferAttentionScoreV2",
    "FusedInferAttentionScore with separate scales of keys and of values, and a shared prefix.",
    after={"kv_padding_size": (*SEPARATE, *SHARED_PREFIX), "softmax_lse_flag": (KEY_MODE, VALUE_MODE)},
    c=replace(C, optional="Optional"),
)
FUSED_V3 = FUSED_V2.version(
    "aclnnFusedInferAttentionScoreV3",
    "FusedInferAttentionScoreV2 with rope parts as separate tensors.",
    after={"actual_shared_prefix_len": ROPES},
    rules=FUSED + WITH_ROPE + NO_INTEGER_LATENTS + NO_TREES,
    rulings=(*FUSED_V1.rulings, 39),
    layouts=geometry.LAYOUTS,
    samples=ROPE_SAMPLES,
)
FUSED_V4 = FUSED_V3.version(
    "aclnnFusedInferAttentionScoreV4",
    "FusedInferAttentionScoreV3 with a scale per query row, and sinks.",
    after={"key_rope_antiquant_scale": (DEQUANT_QUERY, SINK), "value_antiquant_mode": (QUERY_MODE,)},
    rules=FUSED + WITH_ROPE + SINKS + TREES,
)
FUSED_V5 = FUSED_V4.version(
    "aclnnFusedInferAttentionScoreV5",
    "FusedInferAttentionScoreV4 on Ascend 950; forms that only Ascend 950 has are not computed.",
    after={"learnable_sink": STARTS, "query_quant_mode": (PSE_TYPE,)},
    rules=(*(rule for rule in FUSED_V4.rules if rule.param not in ("antiquant_scale", "antiquant_offset")), *LAST),
)
TORCH_HEADS, TORCH_PRECISE = replace(NUM_HEADS, default=1), replace(PRECISE, default=0)
CAUSAL = NEXT.text + " 0, the default, makes a call with a mask in mode 0 causal too."
TORCH_PFA = PROMPT_V3.version(
    "npu_prompt_flash_attention",
    "Softmax attention of padded or packed prompts.",
    keywords="padding_mask",
    example="""\
>>> q, k = torch.randn(2, 5, 4 * 64), torch.randn(2, 7, 64)
>>> out = npu_prompt_flash_attention(q, k, k, num_heads=4, num_key_value_heads=1, scale_value=0.125)
>>> list(out.shape)
[2, 5, 256]""",
    params=(
        *(QUERY, PROMPT_KEY, PROMPT_VALUE, PADDING_MASK, ATTEN_MASK, PSE_SHIFT, Q_LENGTHS),
        *(spelled(p, p.name.replace("dequant", "deq")) if "dequant" in p.name else p for p in PROMPT_QUANT),
        *(TORCH_HEADS, SCALE, PRE, replace(NEXT, default=0, text=CAUSAL), LAYOUT, KV_HEADS, KV_LENGTHS),
        replace(
            PROMPT_MODE,
            text=PROMPT_MODE.text.removesuffix(".") + "; 10 to 14 are 0 to 4 in high precision.",
            domain="0 <= sparse_mode <= 4 or 10 <= sparse_mode <= 14",
        ),
        OUT,
    ),
    rules=PROMPT_V3.rules + PROMPT_WINDOW + TORCH,
)
KEYS = dict.fromkeys(("key", "value"), torch.Tensor)  # torch_npu declares no lists
TORCH_V1 = FUSED_V3.version(
    "npu_fused_infer_attention_score",
    FUSED_V1.summary,
    keywords="pse_shift",
    declared=KEYS | dict.fromkeys(("query_padding_size", "kv_padding_size"), TENSOR_FIRST),
    returns="(attention_out, softmax_lse); without softmax_lse_flag the second has no elements. `.out(..., "
    "workspace=None, out=[attention_out, softmax_lse])` writes to the tensors in out.",
    example="""\
>>> q, pages = torch.randn(5, 4, 64), torch.randn(8, 16, 64)
>>> table = torch.tensor([[0, 3], [5, 1]], dtype=torch.int32)
>>> mask = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
>>> out, _ = npu_fused_infer_attention_score(q, pages, pages, atten_mask=mask, sparse_mode=3,
...     input_layout="TND", actual_seq_lengths=[4, 5], actual_seq_lengths_kv=[20, 31],
...     block_table=table, block_size=16, num_heads=4, num_key_value_heads=1, scale=0.125)
>>> list(out.shape)
[5, 4, 64]""",
    params=(
        *(QUERY, KEY, VALUE, PSE_SHIFT, ATTEN_MASK, Q_LENGTHS, KV_LENGTHS, *PROMPT_QUANT, FUSED_SCALE, ANTI_OFFSET),
        *(*SEPARATE, BLOCK_TABLE, QUERY_PADDING, KV_PADDING, *SHARED_PREFIX, *ROPES),
        *(TORCH_HEADS, spelled(SCALE, "scale"), PRE, NEXT, LAYOUT, KV_HEADS, SPARSE_MODE, TORCH_PRECISE),
        *(BLOCK_SIZE, ANTI_MODE, KEY_MODE, VALUE_MODE, LSE_FLAG, OUT, LSE),
    ),
    rules=FUSED_V3.rules + TORCH + TORCH_FUSED,
)
TORCH_V2 = FUSED_V4.version(
    "npu_fused_infer_attention_score_v2",
    "npu_fused_infer_attention_score with sinks and a scale per query row; some parameters have other names.",
    keywords="query_rope",
    declared=KEYS | {"out_dtype": int | torch.dtype | None},
    returns=TORCH_V1.returns.replace("softmax_lse_flag", "return_softmax_lse"),
    example="""\
>>> q, k = torch.randn(2, 1, 4, 64), torch.randn(2, 9, 1, 64)
>>> heads = {"num_query_heads": 4, "num_key_value_heads": 1, "learnable_sink": torch.zeros(4)}
>>> out, lse = npu_fused_infer_attention_score_v2(q, k, k, input_layout="BSND", actual_seq_kvlen=[9, 4], **heads,
...     softmax_scale=0.125, return_softmax_lse=True)
>>> list(out.shape), list(lse.shape)
([2, 1, 4, 64], [2, 4, 1, 1])""",
    params=(
        *(QUERY, KEY, VALUE, *ROPES[:2], PSE_SHIFT, ATTEN_MASK),
        *(spelled(Q_LENGTHS, "actual_seq_qlen"), spelled(KV_LENGTHS, "actual_seq_kvlen"), BLOCK_TABLE, DEQUANT_QUERY),
        *(spelled(p, f"dequant_{p.name.rpartition('_')[2]}_{p.name.partition('_')[0]}") for p in SEPARATE),
        spelled(ROPES[2], "dequant_scale_key_rope"),
        *(spelled(PROMPT_QUANT[3], "quant_scale_out"), spelled(OFFSET_2, "quant_offset_out")),
        *(Tensor("quant_scale_p", "Reserved.", True), SINK),
        *(spelled(TORCH_HEADS, "num_query_heads"), KV_HEADS, spelled(SCALE, "softmax_scale"), PRE, NEXT, LAYOUT),
        *(SPARSE_MODE, BLOCK_SIZE, QUERY_MODE, spelled(KEY_MODE, "key_quant_mode")),
        *(spelled(VALUE_MODE, "value_quant_mode"), TORCH_PRECISE, spelled(LSE_FLAG, "return_softmax_lse")),
        *(Attr(name, "Reserved.", default=None) for name in RESERVED_DTYPES),
        Attr(
            "out_dtype",
            "Dtype of the output for an int8 query or with quant_scale_out: torch.int8, float16 or bfloat16, or "
            "torch's number of it.",
            default=None,
        ),
        *(OUT, LSE),
    ),
    rules=FUSED_V4.rules + INTEGERS_WITH_ROPE + RESERVED + OWN_DTYPE + TORCH + TORCH_FUSED,
)

ACLNN = (PROMPT_V1, PROMPT_V2, PROMPT_V3, FUSED_V1, FUSED_V2, FUSED_V3, FUSED_V4, FUSED_V5)
RECORDS = (*ACLNN, TORCH_PFA, TORCH_V1, TORCH_V2)

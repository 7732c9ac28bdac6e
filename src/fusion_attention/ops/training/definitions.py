"""Definitions (parameters, legality rules, formulas) of CANN's training attention (FlashAttentionScore, VarLenScore and
their gradients) and of torch_npu's functions for it.

Parameters are in the order of CANN's documentation; a version lists those that it adds to an earlier one. Rules are in
rules.py and mask_rules.py, the conversion for back ends is in lower.py.
"""

import functools
from dataclasses import replace

import torch

from fusion_attention.contract import INVALID, Array, Attr, Declared, Tensor
from fusion_attention.ir.mask import UNLIMITED
from fusion_attention.ops.shared.params import (
    FLOATS,
    SINK,
    TENSOR_FIRST,
    keeps_or_adds,
    masked,
    one_of,
    output,
    rows,
    spelled,
)
from fusion_attention.ops.shared.prototypes import of_cann
from fusion_attention.ops.shared.rules import PACKED, PADDED, doubt, own_scale
from fusion_attention.ops.training import rules
from fusion_attention.ops.training.checks import FUNCTIONS, lengths
from fusion_attention.ops.training.formulas import BACKWARD_FORMULA, BACKWARD_TEX, FORWARD_FORMULA, FORWARD_TEX
from fusion_attention.ops.training.forward_backward import FORWARD, GRADIENTS, fresh_gradients, fresh_results
from fusion_attention.ops.training.lower import lower
from fusion_attention.ops.training.mask_rules import SLOPES

STATISTICS = dict.fromkeys(PADDED, "B N1 S1 8") | {"TND": "T1 N1 8"}


# ------------------------------------------------------------------------------------------------------- parameters

QUERY = Tensor("query", "Query rows.", dtypes=FLOATS, shape=rows("1", "D"))
KEY = Tensor("key", "Key rows; N1 is a multiple of N2.", dtypes="=query", shape=rows("2", "D"))
VALUE = Tensor("value", "Value rows.", dtypes="=query", shape=rows("2", "Dv"))
DY = Tensor("dy", "Gradient of the output.", dtypes="=query", shape=rows("1", "Dv"))
QUERY_ROPE = Tensor("query_rope", "Rope part of the query rows.", True, dtypes="=query", shape=rows("1", "Dr"))
KEY_ROPE = Tensor("key_rope", "Rope part of the key rows.", True, dtypes="=query", shape=rows("2", "Dr"))
PSE = Tensor(
    "pse",
    "Bias added to the scores: [B or 1, N1, S1 or 1, S2], or only its last 1024 rows; TND: its last 1024 rows, or the "
    "blocks of all sequences, concatenated. pse_type 2 and 3: slopes, float32 [B, N1] or [N1].",
    True,
)
DROP_MASK = Tensor(
    "drop_mask",
    "One bit per score, 1 = kept, least significant bit first.",
    True,
    dtypes="uint8",
    make=lambda s: torch.full(s, 255, dtype=torch.uint8),
)
PADDING_MASK = Tensor("padding_mask", "Reserved.", True)
ATTEN_MASK = Tensor(
    "atten_mask",
    "1 removes a score; sparse_mode determines its shape.",
    True,
    dtypes="bool uint8",
    cast=keeps_or_adds("pse"),
    make=functools.partial(masked, dtype=torch.uint8),
)
MAX_IN = Tensor(
    "softmax_max", "Row maxima that the forward returned.", dtypes="float32", shape=STATISTICS, make=torch.zeros
)
SUM_IN = Tensor(
    "softmax_sum", "Row sums that the forward returned.", dtypes="float32", shape=STATISTICS, make=torch.ones
)
# The order of packed statistics, which their shape does not determine.
HEAD_MAJOR = " TND: the [N1, q_len, 8] of all sequences, concatenated; [T1, N1, 8] only if softmax_layout is not empty."


def packed(p: Tensor) -> Tensor:
    """Returns a copy of the parameter softmax_max or softmax_sum whose text adds the axis order of packed tokens."""
    return replace(p, text=p.text + HEAD_MAJOR)


PACKED_MAX_IN, PACKED_SUM_IN = packed(MAX_IN), packed(SUM_IN)
SOFTMAX_IN = Tensor("softmax_in", "Reserved.", True)
ATTENTION_IN = Tensor("attention_in", "The forward's output.", dtypes="=query", shape=rows("1", "Dv"))
PREFIX = Array("prefix", "Number of leading keys of each sequence that all rows see (modes 5 and 6).", True)
Q_ENDS = Array("actual_seq_qlen", "TND: cumulative end of every sequence's query rows.", True)
KV_ENDS = Array("actual_seq_kvlen", "TND: cumulative end of every sequence's keys.", True)
Q_START = Array("q_start_idx", "Position of the first query row in its sequence (element 0 is read); None: 0.", True)
KV_START = Array("kv_start_idx", "Position of the first key in its sequence (element 0 is read); None: 0.", True)
SCALE = Attr("scale", "Factor on query . key; the default is 1.0, not 1 / sqrt(D).", type=float, default=1.0)
KEEP_PROB = Attr(
    "keep_prob", "Probability that dropout keeps a weight.", type=float, default=1.0, domain="0 < keep_prob <= 1"
)
PRE = Attr("pre_tokens", "Visible tokens before the diagonal (modes 0 and 4).", default=UNLIMITED)
NEXT = Attr("next_tokens", "Visible tokens behind the diagonal (modes 0, 4, 7, 8).", default=UNLIMITED)
HEAD_NUM = Attr("head_num", "Query heads.", axis="N1", code=INVALID)
LAYOUT = Attr("input_layout", "Axis order of query, key, value and the output.", type=str, code=INVALID)
INNER_PRECISE = Attr("inner_precise", "2: rows without visible keys return zeros.", default=0)
SPARSE_MODE = Attr(
    "sparse_mode", "Selects how mask, window and prefix determine the visible keys (docs/sparse_modes.md).", default=0
)
PSE_TYPE = Attr(
    "pse_type",
    "1: scale * (qk + pse); 0: scale * qk + pse; 2 and 3: pse holds slopes, and slope * distance, or slope * "
    "sqrt(distance), is subtracted, with distance = |key + kv_start_idx - row - q_start_idx|.",
    default=1,
    domain="0 <= pse_type <= 3",
)
STATS_LAYOUT = one_of(
    "softmax_layout",
    'Order of packed statistics: "": [N1, q_len, 8] of each sequence, concatenated; otherwise [T1, N1, 8].',
    ("", "same_as_input"),
    code=INVALID,
)
TORCH_STATS_LAYOUT = replace(STATS_LAYOUT, domain="softmax_layout in ('', 'TND')")
SEED = Attr(
    "seed",
    "Seed of drawn dropout; if seed and offset are 0, torch's default generator draws one. With a drop mask the seed "
    "is returned unchanged.",
    default=0,
    unsigned=True,
)
OFFSET = Attr("offset", "Offset of drawn dropout.", default=0, domain="0 <= offset < 2**32")
NUMELS = Attr("numels", "Number of scores, as the forward returned it; not read.", default=0)
GEN_MASK_PARALLEL = Attr("gen_mask_parallel", "Accepted without effect.", type=bool, default=True)
SYNC = Attr("sync", "Accepted without effect.", type=bool, default=False)


MAX_OUT = output("softmax_max", "Row maxima of the scores, eight equal lanes.", STATISTICS, "float32")
SUM_OUT = output("softmax_sum", "Row sums of exp(score - max), eight equal lanes.", STATISTICS, "float32")
SOFTMAX_OUT = output("softmax_out", "Reserved: empty.", "")
PACKED_MAX_OUT, PACKED_SUM_OUT = packed(MAX_OUT), packed(SUM_OUT)
OUT = output("attention_out", "The output rows.", rows("1", "Dv"))
DQ, DK = output("dq", "Gradient of query.", rows("1", "D")), output("dk", "Gradient of key.", rows("2", "D"))
DV, DPSE = output("dv", "Gradient of value.", rows("2", "Dv")), output("dpse", "Gradient of pse, in its shape.", "", "")
DQ_ROPE, DK_ROPE = (
    output("dq_rope", "Gradient of query_rope.", rows("1", "Dr")),
    output("dk_rope", "Gradient of key_rope.", rows("2", "Dr")),
)
DSINK = output("dsink", "Gradient of sink.", "N1", "float32")

# ------------------------------------------------------------------------------------------------- operator definitions

NEUTRAL = {
    "pse_type": 1,
    "softmax_layout": "",
    "inner_precise": 0,
    **dict.fromkeys(("query_rope", "key_rope", "sink", "prefix", "pse", "drop_mask", "atten_mask", "padding_mask")),
    **dict.fromkeys(("actual_seq_qlen", "actual_seq_kvlen", "q_start_idx", "kv_start_idx", "softmax_in")),
    "seed": 0,
    "offset": 0,
    "Dr": None,
}
SIZES = {"B": 2, "S1": 4, "S2": 6, "N1": 4, "N2": 2, "D": 8, "Dv": 8, "Dr": 8, "T1": 8, "T2": 12}
SAMPLES = {"TND": {"actual_seq_qlen": [3, 8], "actual_seq_kvlen": [5, 12]}}
MASKED_SAMPLES = {"TND": {**SAMPLES["TND"], "atten_mask": "S1 S2"}}
# Rules by version: the last ones accept more than 512 elements per row; gradients with rope ignore inner_precise.
UNREAD = rules.RULES + rules.GIVEN_DROPOUT
ANY_SHAPE = UNREAD + rules.PRECISION
UNREAD_ROPE = rules.ROPE_RULES + rules.GIVEN_DROPOUT + rules.NARROW
RULINGS = (1, 2, 3, 4, 5, 8, 9, 10, 11, 20, 23, 27, 28)
RULINGS_PACKED = (*RULINGS, 6, 7)
OF_SLOPES = (21, 22)


# Parameters that later versions insert, by the name of the parameter before them.
STARTS = (Q_START, KV_START)
ROPES = {"query": (QUERY_ROPE,), "key": (KEY_ROPE,)}
ROPE_GRADIENTS = {"dq": (DQ_ROPE,), "dk": (DK_ROPE,)}

# CANN's spellings.
C = Declared(
    "Optional",
    "Out",
    {
        "pse": "realShift",
        "scale": "scaleValue",
        "actual_seq_qlen": "actualSeqQLen",
        "actual_seq_kvlen": "actualSeqKvLen",
        "softmax_layout": "softmaxOutLayout",
        "query_rope": "queryRope!",
        "key_rope": "keyRope!",
    },
)
C_GRAD = C.but(
    key="keyIn",
    pse="pseShift",
    sink="sinkIn",
    key_rope="keyInRope!",
    softmax_layout="softmaxInLayout",
    softmax_max="softmaxMaxOptional",
    softmax_sum="softmaxSumOptional",
    attention_in="attentionInOptional",
)

SCORE_V1 = of_cann(
    "aclnnFlashAttentionScore",
    "Attention for training, forward, padded layouts.",
    (
        *(QUERY, KEY, VALUE, PSE, DROP_MASK, PADDING_MASK, ATTEN_MASK, PREFIX),
        *(SCALE, KEEP_PROB, PRE, NEXT, HEAD_NUM, LAYOUT, INNER_PRECISE, SPARSE_MODE),
        *(MAX_OUT, SUM_OUT, SOFTMAX_OUT, OUT),
    ),
    ANY_SHAPE + rules.NARROW + rules.ALIKE,
    formula=FORWARD_FORMULA,
    tex=FORWARD_TEX,
    rulings=RULINGS,
    layouts=PADDED,
    neutral=NEUTRAL,
    derive=lengths,
    functions=FUNCTIONS,
    lower=lower,
    c=C,
    sizes=SIZES,
    samples=SAMPLES,
)
SCORE_V2 = SCORE_V1.version(
    "aclnnFlashAttentionScoreV2",
    "FlashAttentionScore with pse_type and start indices.",
    after={"prefix": STARTS, "sparse_mode": (PSE_TYPE,)},
    rulings=(*RULINGS, *OF_SLOPES),
    c=C.of_page(
        scale="scaleValueOptional",
        keep_prob="keepProbOptional",
        pre_tokens="preTokensOptional",
        next_tokens="nextTokensOptional",
        inner_precise="innerPreciseOptional",
        sparse_mode="sparseModeOptional",
        pse_type="pseTypeOptional",
    ),
)
SCORE_V3 = SCORE_V2.version(
    "aclnnFlashAttentionScoreV3",
    "FlashAttentionScoreV2 with sinks.",
    after={"atten_mask": (SINK,)},
    rules=ANY_SHAPE,
    c=C,
)
VARLEN_V1 = SCORE_V1.version(
    "aclnnFlashAttentionVarLenScore",
    "Attention for training, forward, packed sequences.",
    after={"prefix": (Q_ENDS, KV_ENDS)},
    instead=(PACKED_MAX_OUT, PACKED_SUM_OUT),
    rulings=RULINGS_PACKED,
    layouts=PACKED,
)
VARLEN_V2 = VARLEN_V1.version(
    "aclnnFlashAttentionVarLenScoreV2",
    "VarLenScore with pse_type and start indices.",
    after={"actual_seq_kvlen": STARTS, "sparse_mode": (PSE_TYPE,)},
    rulings=(*RULINGS_PACKED, *OF_SLOPES),
)
VARLEN_V3 = VARLEN_V2.version(
    "aclnnFlashAttentionVarLenScoreV3",
    "VarLenScoreV2 with rope parts of query and key.",
    after=ROPES,
    rules=UNREAD_ROPE + rules.PRECISION,
    samples=MASKED_SAMPLES,
)
VARLEN_V4 = VARLEN_V1.version(
    "aclnnFlashAttentionVarLenScoreV4",
    "VarLenScore with softmax_layout, the order of statistics.",
    after={"sparse_mode": (STATS_LAYOUT,)},
    rules=ANY_SHAPE + rules.NARROW,
)
VARLEN_V5 = VARLEN_V2.version(
    "aclnnFlashAttentionVarLenScoreV5",
    "VarLenScoreV3 with sinks and softmax_layout.",
    after={**ROPES, "atten_mask": (SINK,), "pse_type": (STATS_LAYOUT,)},
    rules=ANY_SHAPE,
)
GRAD_V1 = SCORE_V1.version(
    "aclnnFlashAttentionScoreGrad",
    "Gradients of FlashAttentionScore.",
    params=(
        *(QUERY, KEY, VALUE, DY, PSE, DROP_MASK, PADDING_MASK, ATTEN_MASK),
        *(MAX_IN, SUM_IN, SOFTMAX_IN, ATTENTION_IN, PREFIX),
        *(SCALE, KEEP_PROB, PRE, NEXT, HEAD_NUM, LAYOUT, INNER_PRECISE, SPARSE_MODE),
        *(DQ, DK, DV, DPSE),
    ),
    formula=BACKWARD_FORMULA,
    tex=BACKWARD_TEX,
    c=C_GRAD,
)
GRAD_V2 = GRAD_V1.version(
    "aclnnFlashAttentionScoreGradV2",
    "FlashAttentionScoreGrad with pse_type and start indices.",
    after={"prefix": STARTS, "sparse_mode": (PSE_TYPE,)},
    rulings=(*RULINGS, *OF_SLOPES),
)
GRAD_V3 = GRAD_V2.version(
    "aclnnFlashAttentionScoreGradV3",
    "FlashAttentionScoreGradV2 with sinks.",
    after={"attention_in": (SINK,), "dpse": (DSINK,)},
    rules=ANY_SHAPE,
)
UNPADDING_V1 = GRAD_V1.version(
    "aclnnFlashAttentionUnpaddingScoreGrad",
    "Gradients of FlashAttentionVarLenScore.",
    after={"prefix": (Q_ENDS, KV_ENDS)},
    instead=(PACKED_MAX_IN, PACKED_SUM_IN),
    rulings=RULINGS_PACKED,
    layouts=PACKED,
)
UNPADDING_V2 = UNPADDING_V1.version(
    "aclnnFlashAttentionUnpaddingScoreGradV2",
    "UnpaddingScoreGrad with pse_type and start indices.",
    after={"actual_seq_kvlen": STARTS, "sparse_mode": (PSE_TYPE,)},
    rulings=(*RULINGS_PACKED, *OF_SLOPES),
)
UNPADDING_V3 = UNPADDING_V2.version(
    "aclnnFlashAttentionUnpaddingScoreGradV3",
    "UnpaddingScoreGradV2 with rope parts of query and key.",
    after={**ROPES, **ROPE_GRADIENTS},
    rules=UNREAD_ROPE,
    samples=MASKED_SAMPLES,
    c=C_GRAD.of_page(),
)
UNPADDING_V4 = UNPADDING_V1.version(
    "aclnnFlashAttentionUnpaddingScoreGradV4",
    "UnpaddingScoreGrad with softmax_layout, the order of statistics.",
    after={"dpse": (STATS_LAYOUT,)},
    rules=ANY_SHAPE + rules.NARROW,
)
UNPADDING_V5 = UNPADDING_V2.version(
    "aclnnFlashAttentionUnpaddingScoreGradV5",
    "UnpaddingScoreGradV3 with sinks and softmax_layout.",
    after=ROPES | ROPE_GRADIENTS | {"attention_in": (SINK,), "pse_type": (STATS_LAYOUT,), "dpse": (DSINK,)},
    rules=UNREAD,
)

# torch_npu's functions take padded and packed layouts, draw dropout masks, and spell some names differently.
PRE_TOCKENS, NEXT_TOCKENS = spelled(PRE, "pre_tockens"), spelled(NEXT, "next_tockens")
DROPOUT_MASK, SCALE_VALUE = spelled(DROP_MASK, "dropout_mask"), spelled(SCALE, "scale_value")
RETURNED = "As the forward returned it."
DRAWN_AGAIN = " With keep_prob below 1 the same mask is drawn again; after a forward with a drop mask, use autograd."
SEED_AGAIN, OFFSET_AGAIN = replace(SEED, text=RETURNED + DRAWN_AGAIN), replace(OFFSET, text=RETURNED)
SEED_TENSOR, OFFSET_TENSOR = (
    Tensor(name, RETURNED, True, dtypes="int64", shape="1", on_host=True) for name in ("seed", "offset")
)
TRAINED = ("query", "key", "value", "pse", "sink")
# torch_npu's declarations: lengths of the third version are tensors, and the saved results of a gradient are optional.
LENGTHS = dict.fromkeys(("actual_seq_qlen", "actual_seq_kvlen"), TENSOR_FIRST)
SAVED = dict.fromkeys(("softmax_max", "softmax_sum", "attention_in"), torch.Tensor | None)
TORCH_V1 = SCORE_V1.version(
    "npu_fusion_attention",
    "Softmax attention for training, padded or packed, with CANN's masks, biases, dropout and statistics.",
    returns="(attention_out, softmax_max, softmax_sum, softmax_out, seed, offset, numels); the gradient draws the same "
    "dropout mask from the last three.",
    example="""\
>>> q = torch.randn(1, 16, 2, 64)
>>> out, smax, ssum, *_ = npu_fusion_attention(q, q, q, 2, "BSND", scale=0.125)
>>> list(out.shape), list(smax.shape)
([1, 16, 2, 64], [1, 2, 16, 8])""",
    params=(
        *(QUERY, KEY, VALUE, HEAD_NUM, LAYOUT, PSE, PADDING_MASK, ATTEN_MASK),
        *(SCALE, KEEP_PROB, PRE_TOCKENS, NEXT_TOCKENS, INNER_PRECISE, PREFIX, Q_ENDS, KV_ENDS),
        *(SPARSE_MODE, GEN_MASK_PARALLEL, SYNC, TORCH_STATS_LAYOUT, SINK, DROPOUT_MASK, SEED, OFFSET),
        *(OUT, PACKED_MAX_OUT, PACKED_SUM_OUT, SOFTMAX_OUT),
    ),
    rules=(*rules.RULES, *rules.DRAWN_DROPOUT, *rules.PRECISION, own_scale("scale")),
    rulings=RULINGS_PACKED,
    layouts=(*PADDED, *PACKED),
    results=FORWARD,
    fresh=fresh_results,
    trains={FORWARD[0]: TRAINED},
    repeats=True,
)
TORCH_V2 = TORCH_V1.version(
    "npu_fusion_attention_v2",
    "npu_fusion_attention with rope parts, four kinds of pse and start positions.",
    keywords="pse",
    example="""\
>>> q = torch.randn(1, 16, 2, 64)
>>> slopes = torch.tensor([0.5, 0.25])
>>> out, *_ = npu_fusion_attention_v2(q, q, q, 2, "BSND", pse=slopes, pse_type=2, scale=0.125)
>>> list(out.shape)
[1, 16, 2, 64]""",
    after={"atten_mask": (QUERY_ROPE, KEY_ROPE), "sync": (PSE_TYPE, *STARTS)},
    instead=(PRE, NEXT),
    rules=(
        *TORCH_V1.rules,
        doubt(
            "not trained(pse)",
            "pse: slopes that do not require a gradient (slopes have none: pass the biases themselves, with "
            "pse_type 0)",
            when="pse_type in (2, 3)",
            given={"pse_type": 2} | SLOPES,
            invalid={"pse": torch.ones(4, requires_grad=True)},
        ),
    ),
    rulings=(*RULINGS_PACKED, *OF_SLOPES),
    trains={FORWARD[0]: (*TRAINED, "query_rope", "key_rope")},
)
TORCH_V3 = TORCH_V1.version(
    "npu_fusion_attention_v3",
    "npu_fusion_attention with lengths, seed and offset as host tensors.",
    declared=LENGTHS,
    returns="(attention_out, softmax_max, softmax_sum, softmax_out, seed, offset), the last two int64 [1].",
    example="""\
>>> q, ends = torch.randn(16, 2, 64), torch.tensor([5, 16])
>>> lengths = {"actual_seq_qlen": ends, "actual_seq_kvlen": ends}
>>> out, *_ = npu_fusion_attention_v3(q, q, q, 2, "TND", scale=0.125, **lengths)
>>> list(out.shape)
[16, 2, 64]""",
    without=("drop_mask", "seed", "offset"),
)
TORCH_GRAD_V1 = TORCH_V1.version(
    "npu_fusion_attention_grad",
    "Gradients of npu_fusion_attention, from its statistics and its output.",
    keywords="pse",
    declared=SAVED,
    returns="(dq, dk, dv, dpse, dsink); gradients of absent inputs are empty, and dpse of slopes is zeros.",
    example="""\
>>> q = torch.randn(1, 16, 2, 64)
>>> out, smax, ssum, *_ = npu_fusion_attention(q, q, q, 2, "BSND", scale=0.125)
>>> saved = {"softmax_max": smax, "softmax_sum": ssum, "attention_in": out}
>>> dq, *_ = npu_fusion_attention_grad(q, q, q, out, 2, "BSND", **saved, scale_value=0.125)
>>> list(dq.shape)
[1, 16, 2, 64]""",
    params=(
        *(QUERY, KEY, VALUE, DY, HEAD_NUM, LAYOUT, PSE, PADDING_MASK, ATTEN_MASK),
        *(PACKED_MAX_IN, PACKED_SUM_IN, SOFTMAX_IN, ATTENTION_IN),
        *(SCALE_VALUE, KEEP_PROB, PRE_TOCKENS, NEXT_TOCKENS, INNER_PRECISE, SEED_AGAIN, OFFSET_AGAIN, NUMELS),
        *(PREFIX, Q_ENDS, KV_ENDS, SPARSE_MODE, GEN_MASK_PARALLEL, SYNC, TORCH_STATS_LAYOUT, SINK),
        *(DQ, DK, DV, DPSE, DSINK),
    ),
    rules=rules.RULES + rules.DRAWN_DROPOUT,
    formula=BACKWARD_FORMULA,
    tex=BACKWARD_TEX,
    results=GRADIENTS,
    fresh=fresh_gradients,
    trains={},
    repeats=False,
)
TORCH_GRAD_V2 = TORCH_GRAD_V1.version(
    "npu_fusion_attention_grad_v2",
    "Gradients of npu_fusion_attention_v2, from its statistics and its output.",
    returns="(dq, dk, dv, dpse, dq_rope, dk_rope, dsink); gradients of absent inputs are empty, and dpse of slopes is "
    "zeros.",
    example=TORCH_GRAD_V1.example.replace("attention(", "attention_v2(").replace("_grad(", "_grad_v2("),
    after={"attention_in": (QUERY_ROPE, KEY_ROPE), "sync": (PSE_TYPE, *STARTS), "dpse": (DQ_ROPE, DK_ROPE)},
    instead=(PRE, NEXT),
    rulings=TORCH_V2.rulings,
)
TORCH_GRAD_V3 = TORCH_GRAD_V1.version(
    "npu_fusion_attention_grad_v3",
    "Gradients of npu_fusion_attention_v3, from its statistics and its output.",
    declared=LENGTHS | SAVED,
    example="""\
>>> q = torch.randn(1, 16, 2, 64)
>>> out, smax, ssum, _, seed, offset = npu_fusion_attention_v3(q, q, q, 2, "BSND", scale=0.125)
>>> saved = {"softmax_max": smax, "softmax_sum": ssum, "attention_in": out, "seed": seed, "offset": offset}
>>> dq, *_ = npu_fusion_attention_grad_v3(q, q, q, out, 2, "BSND", **saved, scale_value=0.125)
>>> list(dq.shape)
[1, 16, 2, 64]""",
    instead=(SEED_TENSOR, OFFSET_TENSOR),
    without=("numels",),
    rules=rules.RULES + rules.DRAWN_DROPOUT + rules.GIVEN_OFFSET,
)

ACLNN_FORWARD = (SCORE_V1, SCORE_V2, SCORE_V3, VARLEN_V1, VARLEN_V2, VARLEN_V3, VARLEN_V4, VARLEN_V5)
ACLNN_BACKWARD = (GRAD_V1, GRAD_V2, GRAD_V3, UNPADDING_V1, UNPADDING_V2, UNPADDING_V3, UNPADDING_V4, UNPADDING_V5)
TORCH = (TORCH_V1, TORCH_V2, TORCH_V3, TORCH_GRAD_V1, TORCH_GRAD_V2, TORCH_GRAD_V3)
RECORDS = (*ACLNN_FORWARD, *ACLNN_BACKWARD, *TORCH)

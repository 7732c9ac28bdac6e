"""Definitions of CANN's FlashAttentionScoreV4 and its gradient: VarLenScoreV5, padded too and with drawn dropout."""

from dataclasses import replace

from fusion_attention.contract import Attr, Op, Param, Tensor
from fusion_attention.ops.shared.rules import PACKED, PADDED, absent, limit, refused
from fusion_attention.ops.training.definitions import OFFSET, SEED, UNPADDING_V5, VARLEN_V5, C
from fusion_attention.ops.training.mask_rules import PSE_BESIDE_0
from fusion_attention.ops.training.rules import ALL, DRAWN_DROPOUT, PRECISION, ROPES

SCALES = tuple(
    Tensor(f"d_scale_{of}", f"Scales of {of} in fp8 (950 only): not computed here.", True)
    for of in ("q", "k", "v", "dy", "o")
)
OUT_DTYPE = Attr("out_dtype", "Without effect: the dtype of the output of fp8 tensors.", default=0)
NEW = {
    "out_dtype": OUT_DTYPE,
    "seed": replace(SEED, text="Seed of dropout if keep_prob is below 1 and there is no drop mask; 0 is a seed too."),
    "offset": OFFSET,
    **{p.name: p for p in SCALES},
}


def _params(of: Op, names: str) -> tuple[Param, ...]:
    """Returns definitions of parameters with these names, separated by spaces, from NEW or from the operator `of`."""
    return tuple(NEW[name] if name in NEW else of.by_name[name] for name in names.split())


RULES = (
    *(rule for rule in (*ALL, PSE_BESIDE_0) if rule is not ROPES[1]),
    DRAWN_DROPOUT[0],
    *(absent(p.name) for p in SCALES),
    refused(
        "(D, Dr) == (128, 64)",
        "query_rope: D 128 and 64 elements of rope (the chip takes no other dims beside rope)",
        when="query_rope is not None and D <= 768",
        given={"query_rope": True, "key_rope": True, "D": 128, "Dv": 128, "Dr": 64},
        invalid={"Dr": 32},
    ),
    limit(
        "not float32(query)",
        "sink: none with float32 (the chip takes no float32 beside it)",
        given={"sink": True},
        invalid={
            **dict.fromkeys(("query", "dy", "attention_in"), ("B S1 N1 D", "float32")),
            **dict.fromkeys(("key", "value"), ("B S2 N2 D", "float32")),
        },
    ),
)
SCORE_V4 = VARLEN_V5.version(
    "aclnnFlashAttentionScoreV4",
    "FlashAttentionScoreV3 and VarLenScoreV5 in one, with drawn dropout.",
    params=_params(
        VARLEN_V5,
        "query key value pse drop_mask padding_mask atten_mask query_rope key_rope d_scale_q d_scale_k d_scale_v sink "
        "prefix actual_seq_qlen actual_seq_kvlen q_start_idx kv_start_idx scale keep_prob pre_tokens next_tokens "
        "head_num input_layout inner_precise sparse_mode out_dtype pse_type softmax_layout seed offset softmax_max "
        "softmax_sum softmax_out attention_out",
    ),
    rules=(*RULES, *PRECISION),
    rulings=(*VARLEN_V5.rulings, 47),
    layouts=(*PADDED, *PACKED),
    c=replace(C, optional="", output=""),
)
GRAD_V4 = UNPADDING_V5.version(
    "aclnnFlashAttentionScoreGradV4",
    "Gradients of FlashAttentionScoreV4.",
    params=_params(
        UNPADDING_V5,
        "query key value dy pse drop_mask padding_mask atten_mask softmax_max softmax_sum softmax_in attention_in sink "
        "query_rope key_rope d_scale_q d_scale_k d_scale_v d_scale_dy d_scale_o prefix actual_seq_qlen "
        "actual_seq_kvlen q_start_idx kv_start_idx scale keep_prob pre_tokens next_tokens head_num input_layout "
        "softmax_layout inner_precise sparse_mode pse_type seed offset out_dtype dq dk dv dq_rope dk_rope dpse dsink",
    ),
    rules=RULES,
    rulings=(*UNPADDING_V5.rulings, 47),
    layouts=(*PADDED, *PACKED),
    c=replace(C, optional="", output="").but(pse="pseShift", sink="sinkIn", softmax_layout="softmaxInLayout"),
)
RECORDS = (SCORE_V4, GRAD_V4)

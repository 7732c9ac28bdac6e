"""Exact error texts of training attention: masks, biases, lengths, heads, windows, layouts."""

import pytest
from support.contract_failures import PACKED, Args

from fusion_attention.contract import ContractError, bind
from fusion_attention.contract.sampling import sample
from fusion_attention.ops import RECORDS

TEXTS = [
    (
        "npu_fusion_attention",
        {"atten_mask": "B 1 1 S2"},
        (
            "atten_mask: expected shape [B, N1, S1, S2] or [B, 1, S1, S2] or [1, 1, S1, S2] or [S1, S2], got "
            "uint8 [2, 1, 1, 6] with B=2, N1=4, S1=4, S2=6 (1 removes a score; key padding [B, 1, 1, S2] must "
            "be expanded: mask.expand(B, 1, S1, S2))"
        ),
    ),
    (
        "npu_fusion_attention",
        PACKED | {"actual_seq_qlen": [0, 5, 3]},
        (
            "actual_seq_qlen: expected len(actual_seq_qlen) == len(actual_seq_kvlen) and len(actual_seq_qlen) "
            "> 0, got actual_seq_qlen=[0, 5, 3], actual_seq_kvlen=[5, 12] (one end per sequence in both; an "
            "empty tensor has the ends [0])\nnpu_fusion_attention: actual_seq_qlen: expected ends that never "
            "fall, or only to a tail of zeros, got item 2: 3 after 5 (inclusive cumulative ends: [3, 8] is "
            "lengths 3 and 5; strip the leading 0 of cu_seqlens)"
        ),
    ),
    ("npu_fusion_attention", {"head_num": 3}, "query: expected axis 2 to be N1=3 as in head_num, got 4"),
    (
        "npu_fusion_attention",
        {"input_layout": "BSH", "D": 0},
        "query: expected axis 2 to be a positive multiple of N1=4 as in head_num, got 0",
    ),
    (
        "npu_fusion_attention_grad",
        {"scale": float("nan")},
        "scale_value: expected a finite scale_value, got nan (of float32)",
    ),
    (
        "npu_fusion_attention_grad",
        {"attention_in": None},
        "attention_in: expected a value (The forward's output.), got None",
    ),
    (
        "npu_fusion_attention_v3",
        {"atten_mask": "2048 2048", "sparse_mode": 4, "pre_tokens": -6, "next_tokens": 1},
        (
            "pre_tockens: expected pre_tockens and next_tockens that leave a visible key, got pre_tockens=-6, "
            "next_tockens=1 (from the upper left corner: -8 and 3), the left edge beyond the right one or "
            "beyond the 6 keys (the window must overlap the score matrix; 2147483647 is no limit)"
        ),
    ),
    (
        "npu_fusion_attention",  # of several matrices, which are not read as one
        {"atten_mask": "4 4 6", "sparse_mode": 3},
        (
            "atten_mask: expected shape [2048, 2048] or [1, 2048, 2048] or [1, 1, 2048, 2048], got uint8 [4, 4, 6] "
            "(torch.ones(2048, 2048, dtype=torch.bool).triu(1), whatever the lengths)"
        ),
    ),
    (
        "npu_fusion_attention_v2",
        {"input_layout": "BSND", "pse": ("B N1", "float16"), "pse_type": 2},
        ("pse: expected float32 slopes [B, N1] or [N1], got float16 [2, 4] (pse_type 2 and 3 take slopes in pse)"),
    ),
    (
        "aclnnFlashAttentionVarLenScoreV5",
        {"input_layout": "bsnd"},
        "input_layout (inputLayout): expected one of TND, got 'bsnd' (aclnnFlashAttentionVarLenScoreV5 has no other)",
    ),
    (
        "aclnnFlashAttentionScoreV2",
        {"pse": "B 1 S1 S2"},
        (
            "pse (realShiftOptional): expected [B or 1, N1, S1 or 1, S2], or [B or 1, N1, 1024, S2] for S1 >= 1024, "
            "got [2, 1, 4, 6] with B=2, N1=4, S1=4, S2=6 (compressed means the last 1024 rows of the full table)"
        ),
    ),
    (
        "attention",
        {"blocked": "S1 3"},
        (
            "blocked: expected [B or 1, N1 or 1, S1 or 1, S2 or 1], leading axes may be left out, got [4, 3] "
            "for [2, 4, 4, 6] (true removes a score)"
        ),
    ),
    (
        "attention",
        {"layout": "TND", "q_len": [3, 6]},
        (
            "q_len: expected lengths of the sequences that the query tensor holds, got 9 tokens in all, 8 in "
            "the tensor (tokens of every sequence, not cumulative ends)"
        ),
    ),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "settings", "text"), TEXTS)
def test_training_attention_error_text_is_exact(name: str, settings: Args, text: str) -> None:
    op = RECORDS[name]
    layout = settings.get(op.layout_attr, op.layouts[0])
    sample_layout = layout if layout in op.layouts else op.layouts[0]
    args = sample(op, **{**settings, op.layout_attr: sample_layout}) | {op.layout_attr: layout}
    with pytest.raises(ContractError) as caught:
        bind(op, args)
    assert str(caught.value) == f"{name}: {text}"

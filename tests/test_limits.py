"""What CANN's pages let through and refuse at their edges, by the two-phase face: blanks, sizes, reserved values."""

from typing import Any

import pytest
import torch
from test_aclnn import call, done, outputs_of, runtime, same

from fusion_attention import ContractError, acl, npu
from fusion_attention.ops import RECORDS
from fusion_attention.sampling import sample
from fusion_attention.testing.compare import compare

__all__ = ["runtime"]

Args = dict[str, Any]
BLANKS = {"empty": torch.zeros(0, dtype=torch.int64), "without dimensions": torch.tensor(3)}


def refused(name: str, args: Args, **options: Any) -> tuple[int, str]:
    """The code of phase 1, and its text."""
    op = RECORDS[name]
    ret, second = call(op, args, outputs_of(op, args), **options)
    assert not second
    return ret, acl.get_recent_err_msg()


# --------------------------------------------------------------------------------------------------- blanks are absent

ABSENT = {
    "left padding": ("aclnnIncreFlashAttentionV4", {"actual_seq_lengths": [4, 5]}, ("kv_padding_size",)),
    "left padding without lengths": ("aclnnIncreFlashAttentionV4", {}, ("kv_padding_size",)),
    "cache lengths": ("aclnnIncreFlashAttentionV4", {}, ("actual_seq_lengths",)),
    "padded lengths": ("aclnnSparseFlashAttentionGrad", {}, ("actual_seq_qlen", "actual_seq_kvlen")),
    "a prefix": ("aclnnFlashAttentionScoreV2", {}, ("prefix", "q_start_idx", "kv_start_idx")),
}


@pytest.mark.parametrize("blank", BLANKS)
@pytest.mark.parametrize("case", ABSENT)
def test_a_tensor_without_elements_is_no_array(case: str, blank: str) -> None:
    name, settings, arrays = ABSENT[case]
    op = RECORDS[name]
    args = sample(op, **settings)
    want = done(op, args)
    got = done(op, args | dict.fromkeys(arrays, BLANKS[blank]))
    assert all(same(got[key], want[key]) for key in want)


def test_a_needed_array_without_elements_is_missing() -> None:
    args = sample(RECORDS["aclnnSparseFlashAttentionGrad"], layout="TND")
    ret, text = refused("aclnnSparseFlashAttentionGrad", args | {"actual_seq_qlen": BLANKS["empty"]})
    assert ret == 161001
    assert "actual_seq_lengths_query: expected the lengths of packed sequences, got None" in text


def test_the_npu_face_takes_an_empty_tensor_too() -> None:
    args = sample(RECORDS["npu_incre_flash_attention"], actual_seq_lengths=[4, 5])
    given = {p.shown: args[p.name] for p in RECORDS["npu_incre_flash_attention"].tensors()}
    more = {"num_heads": 4, "num_key_value_heads": 2, "actual_seq_lengths": [4, 5]}
    want = npu.npu_incre_flash_attention(**given, **more)
    assert same(npu.npu_incre_flash_attention(**given, **more, kv_padding_size=BLANKS["empty"]), want)
    with pytest.raises(ContractError, match="kv_padding_size: expected integers"):
        npu.npu_incre_flash_attention(**given, **more, kv_padding_size=BLANKS["without dimensions"])


# --------------------------------------------------------------------------------------------- one start index given


@pytest.mark.parametrize("layout", ["BSND", "TND"])
@pytest.mark.parametrize("given", ["q_start_idx", "kv_start_idx"])
@pytest.mark.parametrize("pse_type", [2, 3])
def test_the_other_start_index_is_zero(pse_type: int, given: str, layout: str) -> None:
    """Forward by formula; the gradient's bits as with the zero said."""
    name = "aclnnFlashAttentionScoreV2" if layout == "BSND" else "aclnnFlashAttentionVarLenScoreV2"
    lengths = {"S1": 6, "S2": 6, "actual_seq_qlen": [6, 12], "actual_seq_kvlen": [6, 12], "T1": 12, "T2": 12}
    lengths |= {"input_layout": layout, "scale": 0.5, "pse_type": pse_type, "pse": ("N1", "float32"), given: [9]}
    lengths |= {name: (True, "float32") for name in ("query", "key", "value")}
    args = sample(RECORDS[name], **lengths)
    other = ({"q_start_idx", "kv_start_idx"} - {given}).pop()
    out = done(RECORDS[name], args)
    start = {given: 9, other: 0}
    rows, keys = torch.arange(6)[:, None] + start["q_start_idx"], torch.arange(6) + start["kv_start_idx"]

    def formula(dtype: torch.dtype) -> torch.Tensor:
        q, k, v = (args[n].reshape(2, 6, -1, 8).to(dtype) for n in ("query", "key", "value"))
        k, v = (t.repeat_interleave(2, 2) for t in (k, v))
        distance = (keys - rows).abs().to(dtype)
        bias = -args["pse"].to(dtype)[:, None, None] * (distance if pse_type == 2 else distance.sqrt())
        p = (0.5 * torch.einsum("bqhd,bkhd->bhqk", q, k) + bias).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", p, v).reshape(out["attention_out"].shape)

    compare(name, out["attention_out"], formula(torch.float64), formula(torch.float32), 6)
    back = RECORDS[name.replace("VarLenScore", "UnpaddingScoreGrad").replace("AttentionScore", "AttentionScoreGrad")]
    saved = {"softmax_max": out["softmax_max"], "softmax_sum": out["softmax_sum"], "attention_in": out["attention_out"]}
    gradients = done(back, sample(back, **{**lengths, "dy": (True, "float32")}) | saved)
    said = done(back, sample(back, **{**lengths, "dy": (True, "float32"), other: [0]}) | saved)
    assert all(same(gradients[key], said[key]) for key in said)

"""Empty arrays and masks as arguments of the two-phase interface."""

import pytest
import torch
from support.bits import same
from support.two_phase import call, done, outputs_of

from fusion_attention import ContractError, acl, npu
from fusion_attention.contract.sampling import sample
from fusion_attention.ops import RECORDS

pytestmark = pytest.mark.usefixtures("runtime")
BLANKS = {"empty": torch.zeros(0, dtype=torch.int64), "without dimensions": torch.tensor(3)}


ABSENT = {
    "left padding": ("aclnnIncreFlashAttentionV4", {"actual_seq_lengths": [4, 5]}, ("kv_padding_size",)),
    "left padding without lengths": ("aclnnIncreFlashAttentionV4", {}, ("kv_padding_size",)),
    "cache lengths": ("aclnnIncreFlashAttentionV4", {}, ("actual_seq_lengths",)),
    "padded lengths": ("aclnnSparseFlashAttentionGrad", {}, ("actual_seq_qlen", "actual_seq_kvlen")),
    "a prefix": ("aclnnFlashAttentionScoreV2", {}, ("prefix", "q_start_idx", "kv_start_idx")),
}


@pytest.mark.parametrize("blank", BLANKS)
@pytest.mark.parametrize("case", ABSENT)
def test_empty_array_argument_equals_omitted_argument(case: str, blank: str) -> None:
    name, settings, arrays = ABSENT[case]
    op = RECORDS[name]
    args = sample(op, **settings)
    want = done(op, args)
    got = done(op, args | dict.fromkeys(arrays, BLANKS[blank]))
    assert all(same(got[key], want[key]) for key in want)


def test_empty_required_lengths_are_refused_as_missing() -> None:
    op = RECORDS["aclnnSparseFlashAttentionGrad"]
    args = sample(op, layout="TND") | {"actual_seq_qlen": BLANKS["empty"]}
    assert call(op, args, outputs_of(op, args)) == (161001, 0)
    assert (
        "actual_seq_lengths_query (actualSeqLengthsQueryOptional): expected the lengths of packed sequences, got None"
        in acl.get_recent_err_msg()
    )


def test_npu_function_accepts_empty_kv_padding_size_and_refuses_scalar() -> None:
    args = sample(RECORDS["npu_incre_flash_attention"], actual_seq_lengths=[4, 5])
    given = {p.shown: args[p.name] for p in RECORDS["npu_incre_flash_attention"].tensors()}
    more = {"num_heads": 4, "num_key_value_heads": 2, "actual_seq_lengths": [4, 5]}
    want = npu.npu_incre_flash_attention(**given, **more)
    assert same(npu.npu_incre_flash_attention(**given, **more, kv_padding_size=BLANKS["empty"]), want)
    with pytest.raises(ContractError, match="kv_padding_size: expected integers"):
        npu.npu_incre_flash_attention(**given, **more, kv_padding_size=BLANKS["without dimensions"])

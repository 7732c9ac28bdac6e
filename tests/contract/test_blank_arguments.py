"""Empty arrays and masks as arguments of the two-phase interface."""

import warnings
from typing import Any

import pytest
import torch
from support.bits import same
from support.two_phase import V2, Args, done, handles_of, outputs_of

from fusion_attention import ContractError, acl, aclnn, npu
from fusion_attention.contract.sampling import sample
from fusion_attention.ops import RECORDS

pytestmark = pytest.mark.usefixtures("runtime")
BLANKS = {"empty": torch.zeros(0, dtype=torch.int64), "without dimensions": torch.tensor(3)}


def refused(name: str, args: Args, **options: Any) -> tuple[int, str]:
    """Calls phase 1 alone; returns its code and the error text."""
    op = RECORDS[name]
    handles = handles_of(op, args, outputs_of(op, args)).values()
    return getattr(aclnn, name + "GetWorkspaceSize")(*handles, **options)[0], acl.get_recent_err_msg()


# ------------------------------------------------------------------------------------- empty arguments count as absent

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
    args = sample(RECORDS["aclnnSparseFlashAttentionGrad"], layout="TND")
    ret, text = refused("aclnnSparseFlashAttentionGrad", args | {"actual_seq_qlen": BLANKS["empty"]})
    assert ret == 161001
    assert (
        "actual_seq_lengths_query (actualSeqLengthsQueryOptional): expected the lengths of packed sequences, got None"
        in text
    )


def test_npu_function_accepts_empty_kv_padding_size_and_refuses_scalar() -> None:
    args = sample(RECORDS["npu_incre_flash_attention"], actual_seq_lengths=[4, 5])
    given = {p.shown: args[p.name] for p in RECORDS["npu_incre_flash_attention"].tensors()}
    more = {"num_heads": 4, "num_key_value_heads": 2, "actual_seq_lengths": [4, 5]}
    want = npu.npu_incre_flash_attention(**given, **more)
    assert same(npu.npu_incre_flash_attention(**given, **more, kv_padding_size=BLANKS["empty"]), want)
    with pytest.raises(ContractError, match="kv_padding_size: expected integers"):
        npu.npu_incre_flash_attention(**given, **more, kv_padding_size=BLANKS["without dimensions"])


# ------------------------------------------------------------------------------------------------ training attention


def test_null_layout_is_refused_unless_the_operator_has_a_default() -> None:
    # CANN names the parameter layoutOptional in the first operator and layout in the second.
    for name, code in (("aclnnSparseFlashAttentionGrad", 0), ("aclnnSparseLightningIndexerGradKLLoss", 161001)):
        op, args = RECORDS[name], sample(RECORDS[name])
        handles = handles_of(op, args | {"layout": None}, outputs_of(op, args)).values()
        assert getattr(aclnn, name + "GetWorkspaceSize")(*handles)[0] == code


@pytest.mark.parametrize("mask", ["S1 S2", "1 1 S1 S2", "B 1 S1 S2", "B N1 S1 S2"])
def test_sparse_mode_5_accepts_every_documented_mask_shape(mask: str) -> None:
    """The mask and the prefix each remove keys; one mask for sequences with different prefixes causes a warning."""
    args = sample(V2, atten_mask=(mask, "zeros"), sparse_mode=5, prefix=[4, 6])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert refused(V2.name, args)[0] == 0, acl.get_recent_err_msg()
        assert refused(V2.name, args | {"prefix": [5, 5]})[0] == 0
    shared = mask[0] != "B"
    assert ["expected a mask for every sequence" in str(w.message) for w in caught] == [True] * shared

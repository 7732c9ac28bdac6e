"""Sparse attention and the indexer through the two-phase C interface."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.bits import same_bits
from support.two_phase import Args, call, handles_of

import fusion_attention as fa
from fusion_attention import acl, aclnn
from fusion_attention.contract import NULL_POINTER, TILING, ContractError, Op, bind
from fusion_attention.contract.sampling import sample
from fusion_attention.ops.shared.checks import pages_exist
from fusion_attention.ops.sparse import definitions as sparse
from fusion_attention.ops.sparse.checks import entries_fit
from fusion_attention.ops.sparse.lowered_call import narrow
from fusion_attention.torch_ops.eager import run


def outputs_of(op: Op, args: Args) -> dict[str, torch.Tensor]:
    """Returns poisoned memory for a call's results; no memory if the call is invalid."""
    try:
        call = op.lower(bind(op, args, reads=False))  # type: ignore[misc]
    except ContractError:
        return {}
    return {name: torch.full_like(tensor, 77) for name, tensor in call.results().items() if name in op.by_name}


@pytest.mark.usefixtures("runtime")
def test_aclnn_sparse_attention_requires_unrequested_statistics_null_or_empty() -> None:
    op = sparse.V1
    args = sample(op)
    for blank in (None, torch.empty(0), torch.empty(())):
        outputs: dict[str, Any] = {**outputs_of(op, args), "softmax_max": blank, "softmax_sum": blank}
        assert call(op, args, outputs, tensors=True) == (0, 0), acl.get_recent_err_msg()
    given = torch.zeros(2, 1, 4, 4)
    assert call(op, args, {**outputs_of(op, args), "softmax_max": given}, tensors=True)[0] == TILING
    assert "softmax_max (softmaxMax): expected None or an empty tensor" in acl.get_recent_err_msg()
    lacking = {"attention_out": outputs_of(op, args)["attention_out"]}
    assert call(op, {**args, "return_softmax_lse": True}, lacking, tensors=True)[0] == NULL_POINTER


@pytest.mark.usefixtures("runtime")
def test_aclnn_phase_2_reads_lists_and_lengths_changed_after_phase_1() -> None:
    op = sparse.V1
    args = sample(op, layout="TND", K=4, D=16, Dv=16)
    lists = torch.full_like(args["sparse_indices"], 1 << 20)
    ends = torch.tensor([1, 8]), torch.tensor([5, 12])
    given = {**args, "sparse_indices": lists}
    outputs = outputs_of(op, args)
    given |= dict(zip(("actual_seq_qlen", "actual_seq_kvlen"), ends, strict=True))
    handles = handles_of(op, given, outputs).values()
    ret, size, executor = aclnn.aclnnSparseFlashAttentionGetWorkspaceSize(*handles, strict=False)
    assert ret == 0, acl.get_recent_err_msg()
    lists.copy_(args["sparse_indices"])
    ends[0].copy_(torch.tensor([3, 8]))
    workspace = acl.rt.malloc(2 * size + 1024)[0]
    assert aclnn.aclnnSparseFlashAttention(workspace, 2 * size + 1024, executor, None) == 0, acl.get_recent_err_msg()
    want = run(op.lower(bind(op, args)))  # type: ignore[misc]
    same_bits(outputs["attention_out"], want["attention_out"], "attention_out")


def test_checks_read_device_tensors_only_on_request() -> None:
    """Reading memory of a device waits for the device."""
    elsewhere: Any = SimpleNamespace(is_meta=False, is_cpu=False)  # and nothing else of a tensor
    lengths = np.array([3])
    checks = (
        lambda: entries_fit(elsewhere, "TND", lengths, lengths, 1),
        lambda: pages_exist(elsewhere, lengths, 16, 2),
    )
    for check in checks:
        assert check() is True
        with fa.strict(False, check_content=True), pytest.raises(AttributeError):
            check()


def test_list_entries_beyond_32_bits_are_clamped_out_of_range() -> None:
    lists = torch.tensor([[5, (1 << 32) + 3, 1 << 31, -(1 << 32), -1]])
    assert narrow(lists).tolist() == [[5, (1 << 31) - 1, (1 << 31) - 1, -1, -1]]
    assert narrow(lists).dtype == torch.int32

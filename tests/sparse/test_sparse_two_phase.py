"""The records of sparse attention and the indexer: the two-phase interface."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.bits import same_bits
from support.two_phase import handles_of, outputs_of

import fusion_attention as fa
from fusion_attention import acl, aclnn, npu
from fusion_attention.contract import bind
from fusion_attention.contract.sampling import sample
from fusion_attention.ops.indexer import definitions as indexer
from fusion_attention.ops.shared.checks import pages_exist
from fusion_attention.ops.sparse import definitions as sparse
from fusion_attention.ops.sparse.checks import entries_fit
from fusion_attention.ops.sparse.lowered_call import narrow
from fusion_attention.torch_ops.eager import run


@pytest.mark.usefixtures("runtime")
def test_content_may_come_between_the_phases() -> None:
    """Lists and lengths that phase 2 finds are those that count."""
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


def test_an_empty_query() -> None:
    for op in (sparse.TORCH_GRAD, indexer.TORCH_GRAD):
        args = sample(op, S1=0, D=16, Dv=16, K=4)
        got = getattr(npu, op.name)(
            **{p.shown: args[p.name] for p in op.params if p.name in args and not getattr(p, "output", False)}
        )
        assert got[0].numel() == 0
        assert not got[1].any()
        assert all(not t.any() for t in got)


def test_what_lies_on_a_device_is_read_on_request_alone() -> None:
    """Reading it waits for the device."""
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


def test_an_entry_that_32_bits_do_not_hold_stays_outside() -> None:
    lists = torch.tensor([[5, (1 << 32) + 3, 1 << 31, -(1 << 32), -1]])
    assert narrow(lists).tolist() == [[5, (1 << 31) - 1, (1 << 31) - 1, -1, -1]]
    assert narrow(lists).dtype == torch.int32

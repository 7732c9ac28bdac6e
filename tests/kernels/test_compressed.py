"""Attention to a band of keys and to compressed keys under Triton's interpreter, against golden."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.bits import same_bits
from support.compressed import CASES, CompressedCase, arguments, lowered, wanted

import fusion_attention as fa
from fusion_attention.testing import check
from fusion_attention.testing.sparse import compute

pytestmark = pytest.mark.filterwarnings("ignore::fusion_attention.contract.ContractWarning")

# Every second case of few rows and keys. The other cases take minutes under the interpreter; GPU tests run them.
FEW = [case for case in CASES if sum(case.q_len) * max(case.kv_len) < 120][::2]
ALL = [case if case in FEW else pytest.param(case, marks=pytest.mark.slow) for case in CASES]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("case", ALL, ids=lambda case: case.id if isinstance(case, CompressedCase) else None)
def test_triton_compressed_attention_matches_reference(case: CompressedCase) -> None:
    args = arguments(case)
    check(case.id, compute(case, lowered(args), args["dy"], "triton"), wanted(case, args))


def test_triton_gradients_do_not_depend_on_unused_rows_between_sequences() -> None:
    case = CompressedCase(layout="TND", q_len=(3, 4), kv_len=(9, 12), ratio=4, sink=True)
    args = arguments(case)
    call = lowered(args)

    def apart(rows: torch.Tensor) -> torch.Tensor:
        return torch.cat((rows[:3], rows.new_full((5, *rows.shape[1:]), torch.nan), rows[3:]))

    starts = np.array([0, 8]), call.extents.kv_start
    tensors = {**call.tensors, "query": apart(call.given("query"))}
    moved = replace(call, extents=replace(call.extents, starts=starts), tensors=tensors)
    got, want = compute(case, moved, apart(args["dy"]), "triton"), compute(case, call, args["dy"], "triton")
    for name in ("out", "dquery"):
        same_bits(torch.cat((got[name][:3], got[name][8:])), want[name], name)
    for name in ("dkey", "dkey_compressed", "dsinks"):
        same_bits(got[name], want[name], name)


def test_triton_compressed_attention_without_rows_or_keys_has_empty_gradients() -> None:
    q, k, compressed = (torch.empty(1, 0, heads, 64).half().requires_grad_() for heads in (8, 1, 1))
    with fa.use_backend("triton"):
        fa.compressed_attention(q, k, compressed, ratio=4).sum().backward()
    assert [t.grad.shape for t in (q, k, compressed) if t.grad is not None] == [q.shape, k.shape, compressed.shape]

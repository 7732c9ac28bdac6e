"""Attention to a band of keys and to compressed keys under Triton's interpreter, against golden."""

import pytest
import torch
from support.compressed import CASES, CompressedCase, arguments, compute, lowered, wanted

import fusion_attention as fa
from fusion_attention.testing import check

pytestmark = pytest.mark.filterwarnings("ignore::fusion_attention.contract.ContractWarning")

# Every second case of few rows and keys. The other cases take minutes under the interpreter; GPU tests run them.
FEW = [case for case in CASES if sum(case.q_len) * max(case.kv_len) < 120][::2]
ALL = [case if case in FEW else pytest.param(case, marks=pytest.mark.slow) for case in CASES]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("case", ALL, ids=lambda case: case.id if isinstance(case, CompressedCase) else None)
def test_triton_compressed_attention_matches_reference(case: CompressedCase) -> None:
    args = arguments(case)
    check(case.id, compute(case, lowered(args), args["dy"], "triton"), wanted(case, args))


def test_triton_compressed_attention_without_rows_or_keys_has_empty_gradients() -> None:
    q, k, compressed = (torch.empty(1, 0, heads, 64).half().requires_grad_() for heads in (8, 1, 1))
    with fa.use_backend("triton"):
        fa.compressed_attention(q, k, compressed, ratio=4).sum().backward()
    assert [t.grad.shape for t in (q, k, compressed) if t.grad is not None] == [q.shape, k.shape, compressed.shape]

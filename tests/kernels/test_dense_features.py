"""Triton's kernels under its interpreter against golden: a case of every feature, forward and backward."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.aligned import aligned
from support.cases import CASES, PACKED

from fusion_attention.backends import triton as backend
from fusion_attention.ir.mask import INFINITE
from fusion_attention.ir.problem import Extents, Problem
from fusion_attention.testing import Case, arguments, check, expected, lowered, run

pytestmark = pytest.mark.filterwarnings("ignore::fusion_attention.contract.ContractWarning")


def short(case: Case) -> bool:
    return max((*case.q_len, *case.kv_len), default=0) < 100


def slow(cases: Iterable[Case]) -> list[Any]:
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases]


TWO = {"heads_q": 2, "heads_kv": 1}  # the interpreter takes as long for a head as for another
FEATURES = [
    Case(),
    Case("BSH", mask="head", pre=3, next=2, **TWO),
    Case("BNSD", q_len=(8, 8), kv_len=(6, 6), sparse_mode=2, mask="compressed", **TWO),
    Case("SBH", sparse_mode=4, mask="compressed", pre=4, next=2, **TWO),
    Case(sparse_mode=6, mask="compressed", prefix=(2, 7), **TWO),
    replace(PACKED, sparse_mode=3, mask="compressed", dim_v=5, **TWO),
    replace(PACKED, q_len=(0, 3, 0, 4, 0), kv_len=(2, 3, 0, 6, 4), sink=True, softmax_layout="TND", **TWO),
    Case(q_len=(2, 5, 0), kv_len=(7, 3, 4), q_rest=1, **TWO),
    # Empty rows: zeros, means, zeros and means in one call.
    Case(mask="head", blank=True, inner_precise=2, **TWO),
    Case("BSH", mask="matrix", blank=True, dropout="philox", keep_prob=0.7, **TWO),
    replace(PACKED, mask="matrix", blank=True, sparse_mode=0, pre=3, next=-1, **TWO),
    # Biases: matrices, broadcast matrices, tables, slopes, square roots of slopes.
    Case(pse="full", pse_type=0, **TWO),
    Case("SBH", pse="shared_row", **TWO),
    replace(PACKED, pse="blocks", **TWO),
    replace(PACKED, pse="shared_table", sparse_mode=3, mask="compressed", **TWO),
    replace(PACKED, pse="slopes", pse_type=2, starts=(2, 7), **TWO),
    Case(q_len=(6, 6), kv_len=(6, 6), pse="slopes_flat", pse_type=3, **TWO),
    Case("BNSD", dropout="bits", keep_prob=0.7, **TWO),
    replace(PACKED, dropout="philox", keep_prob=0.7, **TWO),
    Case("BNSD", heads_q=2, heads_kv=2, dim_rope=4, dim_v=6, sink=True),
    # A softcap: alone, and with a bias, which is added after it.
    replace(PACKED, softcap=0.8, sparse_mode=3, mask="compressed", softmax_layout="TND", **TWO),
    Case("BNSD", softcap=1.5, pse="full", pse_type=0, mask="head", dropout="philox", keep_prob=0.7, **TWO),
]
LOW = [FEATURES[n] for n in (3, 5, 9, 14, 17, 21)]
EVERYDAY = [replace(case, dtype=dtype) for case in FEATURES for dtype in ("float32", "float16")]
EVERYDAY += [replace(case, dtype="bfloat16") for case in LOW]
REST = slow(case for case in CASES if short(case))
# Several tiles each way and partial tiles at the edges: head dims of 96, 192 and 80 elements, dims that differ.
LONGER = [
    Case(q_len=(40,), kv_len=(70,), heads_q=2, heads_kv=1, dim_qk=96, dim_v=80, sparse_mode=3, mask="compressed"),
    Case("TND", q_len=(33, 0, 20), kv_len=(40, 5, 35), sparse_mode=2, mask="compressed", dtype="float16", sink=True),
    # Few rows and many keys: computed by the decode kernels, without a cache.
    Case(q_len=(3, 2), kv_len=(520, 7), heads_q=2, heads_kv=1, pse="full", pse_type=0, mask="matrix", inner_precise=2),
    Case(q_len=(40,), kv_len=(70,), heads_q=2, heads_kv=1, sparse_mode=3, mask="compressed", softcap=2.0),
]
LONGEST = [
    Case(q_len=(70,), kv_len=(40,), heads_q=2, heads_kv=2, dim_qk=24, dim_v=16, dim_rope=16, mask="matrix", blank=True),
    Case(q_len=(50,), kv_len=(50,), sparse_mode=4, mask="compressed", pre=9, next=5, dropout="philox", keep_prob=0.6),
    Case(q_len=(20,), kv_len=(36,), heads_q=2, heads_kv=1, dim_qk=192, dim_v=128, dtype="float16", scale=0.07),
    Case(q_len=(20,), kv_len=(20,), heads_q=1, heads_kv=1, dim_qk=576, dim_v=512, scale=0.04),
]


def judge(case: Case) -> None:
    args = arguments(case)
    if case.dtype == "float16":  # by descriptors; the others by pointers
        args = aligned(args)
    check(case.id, run(lowered(case, args), args["dy"], "triton"), expected(case, args))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("case", [*EVERYDAY, *REST], ids=lambda case: case.id)
def test_triton_attention_with_each_feature_matches_reference(case: Case) -> None:
    judge(case)


@pytest.mark.parametrize("case", [*LONGER, *slow(LONGEST)], ids=lambda case: case.id)
def test_triton_attention_over_several_tiles_matches_reference(case: Case) -> None:
    judge(case)


def test_an_empty_batch_runs() -> None:
    judge(Case(q_len=(), kv_len=(), sink=True))


def test_triton_backward_workspace_grows_linearly_with_length() -> None:
    def workspace(length: int) -> int:
        n = np.array([length])
        e = Extents(n, n, n * 0 - INFINITE, n * 0 + 1, n * 0, n * 0)
        return backend.workspace_bytes(Problem(2, 1, 16, 16, has_sink=True), e, "attention_backward")

    assert workspace(1 << 20) - workspace(1 << 19) == 2 * (workspace(1 << 19) - workspace(1 << 18)) > 0

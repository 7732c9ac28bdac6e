"""Triton's kernels under its interpreter against golden: a case of every feature, forward and backward."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from cases import BIASES, BLANK, CASES, DROPOUT, EMPTY, LENGTHS, MODES, PREFIXES, SHAPES, SINKS_AND_ROPE, WINDOWS

from fusion_attention.backends import triton as backend
from fusion_attention.contract import BackendError
from fusion_attention.mask import INFINITE
from fusion_attention.problem import Extents, Problem
from fusion_attention.testing import Case, arguments, check, golden, lowered, plain, run

pytestmark = pytest.mark.filterwarnings("ignore::fusion_attention.contract.ContractWarning")


def short(case: Case) -> bool:
    return max((*case.q_len, *case.kv_len), default=0) < 100


# A part of every family, in turns of layout and dtype; the rest is for test-all.
SOME = [*MODES[::11], *SHAPES[::4], *LENGTHS[::4], *EMPTY[::7], *BIASES[::4], *DROPOUT[::3], *SINKS_AND_ROPE[::3]]
SOME += [*WINDOWS[::5], *PREFIXES[::4], *BLANK[::4]]
EVERYDAY = [case for case in dict.fromkeys(SOME) if short(case)]
REST = [case for case in CASES if short(case) and case not in EVERYDAY]
# Several tiles each way, with what a tile's edges cut: parts of 96, 192 and 80 elements, dims that differ.
LONGER = [
    Case(q_len=(40,), kv_len=(70,), heads_q=2, heads_kv=1, dim_qk=96, dim_v=80, sparse_mode=3, mask="compressed"),
    Case(q_len=(70,), kv_len=(40,), heads_q=2, heads_kv=2, dim_qk=24, dim_v=16, dim_rope=16, mask="matrix", blank=True),
    Case(q_len=(50,), kv_len=(50,), sparse_mode=4, mask="compressed", pre=9, next=5, dropout="philox", keep_prob=0.6),
    Case("TND", q_len=(33, 0, 20), kv_len=(40, 5, 35), sparse_mode=2, mask="compressed", dtype="float16", sink=True),
    Case(q_len=(20,), kv_len=(36,), heads_q=2, heads_kv=1, dim_qk=192, dim_v=128, dtype="float16", scale=0.07),
    Case(q_len=(20,), kv_len=(20,), heads_q=1, heads_kv=1, dim_qk=576, dim_v=512, scale=0.04),
    # Few rows and many keys: the decode kernels, without a cache.
    Case(q_len=(3, 2), kv_len=(520, 7), heads_q=2, heads_kv=1, pse="full", pse_type=0, mask="matrix", inner_precise=2),
]


def judge(case: Case) -> None:
    args = arguments(case)
    check(case, run(lowered(case, args), args["dy"], "triton"), golden(case, args), plain(case, args))


@pytest.mark.parametrize("case", EVERYDAY, ids=lambda case: case.id)
def test_cases(case: Case) -> None:
    judge(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", REST, ids=lambda case: case.id)
def test_the_other_cases(case: Case) -> None:
    judge(case)


@pytest.mark.parametrize("case", LONGER, ids=lambda case: case.id)
def test_several_tiles(case: Case) -> None:
    judge(case)


def test_a_second_run_gives_the_same_bits() -> None:
    case = DROPOUT[1]
    args = arguments(case)
    one, other = (run(lowered(case, args), args["dy"], "triton") for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_an_empty_batch_runs() -> None:
    judge(Case(q_len=(), kv_len=(), sink=True))


def test_reasons_name_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the real tables
    p = Problem(4, 2, 64, 64, dtype="float32")
    assert backend.reasons_against(p, "cpu") == []
    wide = dataclasses.replace(p, dim_qk=600, dim_rope=300, dtype="int8", select_count=3)
    reasons = backend.reasons_against(wide, "cpu")
    assert len(reasons) == 3
    assert [word in " ".join(reasons) for word in ("dim_rope", "int8", "select_count")] == [True] * 3
    assert "no tile" in backend.reasons_against(dataclasses.replace(p, dim_qk=600), "cpu")[0]
    cache = dataclasses.replace(p, page_size=16, dropout="philox", keep_prob=0.5, empty_rows="mean")
    assert len(backend.reasons_against(cache, "cpu")) == 2


def test_tensors_on_two_devices_are_refused() -> None:
    case = Case()
    args = arguments(case)
    call = lowered(case, args)
    call = dataclasses.replace(call, k=call.k.to("meta"))
    with pytest.raises(BackendError, match=r"expected all tensors on cpu, where q is, got k on meta"):
        run(call, args["dy"], "triton")


def test_workspace_grows_with_length_not_with_its_square() -> None:
    def workspace(length: int) -> int:
        n = np.array([length])
        e = Extents(n, n, n * 0 - INFINITE, n * 0 + 1, n * 0, n * 0)
        return backend.workspace_bytes(Problem(2, 1, 16, 16, has_sink=True), e, "attention_backward")

    assert math.isclose(workspace(1 << 20) / workspace(1 << 10), 1 << 10, rel_tol=0.02)

"""The cases of other test folders, and larger ones, on a real GPU against golden on the CPU."""

import dataclasses
import gc
from collections.abc import Callable

import pytest
import torch
from support.aligned import aligned
from support.bits import same_bits
from support.cases import BITS, CASES, CAUSAL, DRAWN, Args
from support.paged_decode_calls import CACHES, Cache, judge, operands_on
from support.run_case_on_gpu import on_gpu

from fusion_attention.backends import choose
from fusion_attention.backends import triton as backend
from fusion_attention.contract import BackendError
from fusion_attention.ir.problem import Problem
from fusion_attention.testing import Case, arguments, check, expected

pytestmark = pytest.mark.filterwarnings("ignore::fusion_attention.contract.ContractWarning")

MASKED = {"mask": "matrix", "blank": True}
DTYPES = ("float16", "bfloat16", "float32")
LARGE = [
    *(Case(q_len=(700,), kv_len=(900,), dtype=d, dim_qk=128, dim_v=128, scale=0.088, **CAUSAL) for d in DTYPES),
    *(
        Case(q_len=(300,), kv_len=(500,), dtype="bfloat16", dim_qk=d, dim_v=d, scale=d**-0.5)
        for d in (64, 96, 192, 256)
    ),
    Case(q_len=(200,), kv_len=(260,), dtype="bfloat16", dim_qk=512, dim_v=512, dim_rope=64, scale=0.04, **CAUSAL),
    Case(q_len=(200,), kv_len=(260,), dtype="float16", dim_qk=768, dim_v=768, scale=0.036, **MASKED),
    Case("TND", "bfloat16", (300, 0, 517), (300, 40, 517), dim_qk=128, dim_v=128, scale=0.088, **CAUSAL, **DRAWN),
    Case(q_len=(400,), kv_len=(400,), dtype="float16", dim_qk=128, dim_v=128, scale=0.088, **MASKED, **BITS),
    Case(q_len=(400,), kv_len=(400,), dtype="bfloat16", dim_qk=64, dim_v=64, scale=0.125, pse="full", sink=True),
]


@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=lambda case: case.id)
@pytest.mark.parametrize("prepare", [lambda args: args, aligned], ids=["anywhere", "aligned"])
def test_training_attention_matches_float64_reference(case: Case, prepare: Callable[[Args], Args]) -> None:
    args = prepare(arguments(case))
    check(case.id, on_gpu(case, args), expected(case, args))


def test_gradients_are_bitwise_equal_in_every_run() -> None:
    case = LARGE[1]
    args = arguments(case)
    first, second = on_gpu(case, args), on_gpu(case, args)
    same_bits(second, first)


@pytest.mark.parametrize("cache", CACHES, ids=lambda cache: cache.id)
def test_decode_from_caches_matches_float64_reference(cache: Cache) -> None:
    p, e, operands = cache.problem, cache.extents(), operands_on(cache, "cuda")
    backend.attention_forward(p, e, backend.schedule(p, e, "attention_forward"), operands)
    judge(cache, operands, e)


def test_captured_cuda_graph_uses_updated_lengths() -> None:
    cache = Cache(kv_len=(900, 37, 300), dtype="bfloat16", dim_qk=128, dim_v=128, page_size=64)
    p, e, operands = cache.problem, cache.extents(), operands_on(cache, "cuda", capacity=1000)
    schedule = backend.schedule(p, e, "attention_forward")
    backend.attention_forward(p, e, schedule, operands)  # compiles, and copies the tables
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.attention_forward(p, e, schedule, operands)
    for kv_len in ((900, 37, 300), (1000, 1, 0), (64, 999, 65)):
        changed = dataclasses.replace(cache, kv_len=kv_len)
        backend.reschedule(p, changed.extents(), "attention_forward", schedule)
        graph.replay()
        torch.cuda.synchronize()
        judge(changed, operands, changed.extents())


def test_graph_capture_without_a_previous_run_raises() -> None:
    cache = Cache(dtype="float16")
    p, e, operands = cache.problem, cache.extents(), operands_on(cache, "cuda")
    schedule = backend.schedule(p, e, "attention_forward")
    with pytest.raises(BackendError, match="expected a run"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        backend.attention_forward(p, e, schedule, operands)
    backend.attention_forward(p, e, schedule, operands)
    judge(cache, operands, e)


def test_captured_cuda_graph_works_after_the_plan_is_deleted() -> None:
    cache = Cache(kv_len=(900, 37, 300), dtype="bfloat16", page_size=64)
    p, e, operands = cache.problem, cache.extents(), operands_on(cache, "cuda")
    schedule = backend.schedule(p, e, "attention_forward")
    backend.attention_forward(p, e, schedule, operands)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.attention_forward(p, e, schedule, operands)
    del schedule
    gc.collect()
    others = [torch.full((1 << n,), -1, dtype=torch.int64, device="cuda") for n in range(12) for _ in range(50)]
    graph.replay()
    torch.cuda.synchronize()
    judge(cache, operands, e)
    assert all((other == -1).all() for other in others)


def test_second_stream_waits_for_the_copy_of_schedule_tables() -> None:
    cache = Cache(kv_len=(900, 37, 300), dtype="float16", page_size=64)
    p, e, operands = cache.problem, cache.extents(), operands_on(cache, "cuda")
    backend.attention_forward(p, e, backend.schedule(p, e, "attention_forward"), operands)  # compiles
    schedule, first, second = backend.schedule(p, e, "attention_forward"), torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        torch.cuda._sleep(50_000_000)  # the tables arrive late
        backend.attention_forward(p, e, schedule, operands)
    with torch.cuda.stream(second):
        backend.attention_forward(p, e, schedule, operands)
    second.synchronize()
    judge(cache, operands, e)


def test_attention_does_not_synchronize_with_the_gpu() -> None:
    cache = Cache(dtype="float16")
    p, e, operands = cache.problem, cache.extents(), operands_on(cache, "cuda")
    schedule = backend.schedule(p, e, "attention_forward")
    backend.attention_forward(p, e, schedule, operands)
    torch.cuda.set_sync_debug_mode("error")
    try:
        backend.attention_forward(p, e, schedule, operands)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_unsupported_call_error_lists_the_reason_of_each_back_end() -> None:
    problem = Problem(4, 2, 2000, 64, dtype="bfloat16", common_keys=3)
    with pytest.raises(BackendError, match=r"triton: .*common_keys.*triton: .*no tile.*cpu: "):
        choose(problem, torch.device("cuda"), "auto")

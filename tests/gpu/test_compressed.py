"""Attention to a band of keys and to compressed keys on a real GPU, against golden on the CPU."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.bits import same_bits
from support.compressed import CASES, CompressedCase, Results, arguments, lowered, wanted
from support.run_case_on_gpu import copied

from fusion_attention.ops.sparse.lowered_call import SparseBackward
from fusion_attention.testing import check
from fusion_attention.torch_ops.eager import run

V4: dict[str, Any] = {"heads_q": 64, "dim_qk": 512, "window": 128, "scale": 0.04, "sink": True}
LARGE = [
    *(CompressedCase(**V4, dtype=dtype, ratio=4, q_len=(150,), kv_len=(700,), lists="all", count=96)
      for dtype in ("float16", "bfloat16")),
    CompressedCase("TND", **V4, dtype="bfloat16", ratio=128, q_len=(60, 90), kv_len=(60, 1500)),
    CompressedCase(**V4, dtype="bfloat16", ratio=4, q_len=(2, 1), kv_len=(700, 90), lists="all", count=96, page=64),
]  # fmt: skip


def compute(case: CompressedCase, args: dict[str, Any]) -> Results:
    """Returns out, max, sum and (without pages) the gradients, computed on the GPU."""
    call = lowered(args)
    call = replace(call, tensors={name: copied(t) for name, t in call.tensors.items()})
    saved = run(call, "triton")
    results = dict(zip(("out", "max", "sum"), saved.values(), strict=True))
    if not case.page:
        results |= run(SparseBackward(call, copied(args["dy"]), *saved.values()), "triton")
    return {name: t.cpu() for name, t in results.items()}


@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=lambda case: case.id)
def test_compressed_attention_matches_float64_reference(case: CompressedCase) -> None:
    args = arguments(case)
    check(case.id, compute(case, args), wanted(case, args))


def test_repeated_runs_are_bitwise_equal() -> None:
    args = arguments(LARGE[1])
    same_bits(compute(LARGE[1], args), compute(LARGE[1], args))


def test_captured_cuda_graph_equals_eager_bitwise() -> None:
    args = arguments(LARGE[2])
    call = lowered(args)
    call = replace(call, tensors={name: copied(t) for name, t in call.tensors.items()})
    dy = copied(args["dy"])

    def both() -> Results:
        saved = run(call, "triton")
        return {**saved, **run(SparseBackward(call, dy, *saved.values()), "triton")}

    want = {name: t.cpu() for name, t in both().items()}  # compiles, and copies the tables
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = both()
    graph.replay()
    torch.cuda.synchronize()
    same_bits({name: t.cpu() for name, t in result.items()}, want)

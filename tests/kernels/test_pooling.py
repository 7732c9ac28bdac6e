"""Pooling of windows under the interpreter: roundings away from golden, of values that are not finite too."""

from typing import Any

import pytest
import torch
from support.bits import same_bits, same_where_not_finite

from fusion_attention.backends.triton.windows import launch
from fusion_attention.contract import bind
from fusion_attention.ops.compressed.pooling import OUT, RECORD, Pooling, PoolingBackward
from fusion_attention.testing.drawn import compare_with
from fusion_attention.torch_ops.eager import run

Tensor = torch.Tensor
Case = dict[str, Any]
CASES: tuple[Case, ...] = (
    {},
    {"overlap": True},
    {"overlap": True, "kv_len": [11, 3]},
    {"overlap": True, "kv_len": [11, 3], "packed": True, "dtype": torch.bfloat16},
    {"ratio": 20, "size": 45, "dtype": torch.float16},
    {"overlap": True, "before": True, "biased": False},
    {"ratio": 1, "overlap": True, "size": 3},
    {"ratio": 7, "size": 5},
)


def lowered(
    ratio: int = 4, overlap: bool = False, size: int = 13, kv_len: list[int] | None = None, packed: bool = False,
    before: bool = False, biased: bool = True, dtype: torch.dtype = torch.float32,
) -> Pooling:  # fmt: skip
    """A call on rows that lie in strided memory between NaN."""
    generator, channels = torch.Generator().manual_seed(3), 20 * (1 + overlap)
    rows, lengths = (sum(kv_len or ()),) if packed else (2, size), kv_len or [size, size]
    memory = [torch.full((*rows, 3, channels + 3), torch.nan, dtype=dtype) for _ in range(2)]
    kv, gate = (t[..., 1:, 2:-1] for t in memory)
    for t in (kv, gate):
        for b, n in enumerate(lengths):
            sequence = t[sum(lengths[:b]) :][:n] if packed else t[b, :n]
            sequence.copy_(torch.randn(sequence.shape, generator=generator))
    bias = torch.randn(ratio, channels, generator=generator) if biased else None
    args = {
        "kv": kv, "gate": gate, "position_bias": bias, "ratio": ratio, "overlap": overlap, "before": before,
        "layout": "TND" if packed else "BSND", "kv_len": kv_len,
        "windows": sum(n // ratio for n in lengths) if packed else 0,
    }  # fmt: skip
    call: Pooling = RECORD.lower(bind(RECORD, args))
    return call


def results(call: Pooling, dout: Tensor, backend: str) -> dict[str, Tensor]:
    return run(call, backend) | run(PoolingBackward(call, dout), backend)


def in_float64(call: Pooling) -> Pooling:
    tensors = {name: None if t is None else t.double() for name, t in call.tensors.items()}
    args = {"ratio": call.problem.ratio, "overlap": call.problem.overlap, "before": bool(call.extents.lo.any())}
    lengths = call.extents.kv_len.tolist() if call.layout == "TND" else None
    args |= {"layout": call.layout, "kv_len": lengths, "windows": call.windows if lengths else 0}
    exact: Pooling = RECORD.lower(bind(RECORD, {**tensors, **args}))
    return exact


def upstream(call: Pooling) -> Tensor:
    like = call.results()[OUT]
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(5)).to(like.dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_and_gradients(case: Case) -> None:
    call = lowered(**case)
    dout = upstream(call)
    got = results(call, dout, "triton")
    exact = in_float64(call)
    if case.get("kv_len") and not case.get("packed"):
        exact = RECORD.lower(bind(RECORD, {**exact.tensors, "ratio": 4, "overlap": True, "layout": "BSND",
                                          "kv_len": case["kv_len"], "before": False}))  # fmt: skip
    compare_with(str(case), got, lambda: results(exact, dout.double(), "golden"))


def test_ranges_of_results_do_not_depend_on_what_else_is_computed() -> None:
    call = lowered(overlap=True)
    dout = upstream(call)
    first, again = results(call, dout, "triton"), results(call, dout, "triton")
    same_bits(again, first)
    without = run(PoolingBackward(call, dout, of_bias=False), "triton")
    same_bits(without, {name: first[name] for name in without})


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("name", ["kv", "gate", "dout"])
def test_what_is_not_finite_reaches_what_it_reaches_in_float64(name: str, value: float) -> None:
    call = lowered(overlap=True)
    dout = upstream(call)
    {**call.tensors, "dout": dout}[name][0, 1, 0, 3:9] = value  # type: ignore[index]
    if name == "kv":
        call.given("gate")[0, 1, 0, 3:6] = -200  # a weight that no float32 holds
    want = results(in_float64(call), dout.double(), "golden")
    got = results(call, dout, "triton")
    same_where_not_finite({"all": [*got.values()]}, {"all": [*want.values()]}, name)


def test_bytes_of_scratch() -> None:
    call = lowered(overlap=True)
    p, e = call.problem, call.extents
    from fusion_attention.backends import triton

    needed = triton.workspace_bytes(p, e, "pooling_backward")
    assert needed == 4 * (3 * 6 * 2 * 20 + launch.RANGES * 4 * 40)
    assert triton.workspace_bytes(p, e, "pooling") == 0

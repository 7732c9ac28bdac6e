"""The judge names faults of simulated kernels, with parameters, and none in right, noisy or otherwise wrong results.

The kernels are plain torch (tests/support/planted_*.py). `make test` runs some of them, the slow tests all.
"""

from dataclasses import replace

import pytest
import torch
from support import (
    faulty_list_kernels,
    planted_compressed,
    planted_decodes,
    planted_dense,
    planted_gradients,
    planted_tiles,
)
from support.planted_dense import CAUSAL, UNNAMED, made_unnamed, planted_call

from fusion_attention.judging.judge import diagnose
from fusion_attention.testing.cases import Case

RIGHTS = {planted_dense: len(planted_dense.CASES), planted_tiles: 20, planted_decodes: 20, faulty_list_kernels: 20,
          planted_compressed: 3}  # fmt: skip
SEEDS = {planted_dense: 3, planted_compressed: 1}  # others draw any number of calls
MODULES = {module.__name__: module for module in (*RIGHTS, planted_gradients)}  # by name: make test takes some of each
FAULTS = [
    pytest.param(name, fault, seed, id=f"{fault}-{seed}")
    for name, module in MODULES.items()
    for fault in module.FAULTS
    for seed in range(SEEDS.get(module, 5))
]
RIGHT = [(module.__name__, seed) for module, count in RIGHTS.items() for seed in range(count)]
NOISY = [pytest.param(case, low, id=f"{case.id},{low}") for case, low in planted_dense.noisy()]


@pytest.mark.sampled(120)
@pytest.mark.parametrize(("module", "fault", "seed"), FAULTS)
def test_planted_fault_is_diagnosed_by_name(module: str, fault: str, seed: int) -> None:
    call, names, words = MODULES[module].planted(fault, seed)
    result = call.diagnosed()
    assert result.verdict == "wrong"
    confirmed = [m for m in result.mistakes if m.confirmed]
    assert result.mistakes[0].confirmed or MODULES[module] is not planted_dense, result
    assert {m.name for m in confirmed[:1]} & {*names}, result
    assert any(m.name in names and all(word in m.detail for word in words) for m in confirmed), result


@pytest.mark.sampled(20)
@pytest.mark.parametrize(("module", "seed"), RIGHT)
def test_correct_results_have_no_diagnosed_mistakes(module: str, seed: int) -> None:
    result = MODULES[module].right(seed).diagnosed()
    assert result.verdict == "right", result
    assert not result.mistakes


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("case", "low"), NOISY)
def test_low_precision_results_are_called_noisy_without_mistakes(case: Case, low: torch.dtype) -> None:
    result = planted_call(case, "", low=low).diagnosed()
    exact = result.grade in ("as exact as a program in bfloat16", "as exact as a program in float16")  # of few sums
    assert result.verdict == ("right" if exact else "noisy"), result
    assert not result.mistakes


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("change", UNNAMED)
def test_unknown_mistakes_are_wrong_without_a_diagnosis(change: str, dtype: str) -> None:
    result = made_unnamed(replace(CAUSAL, dtype=dtype), change).diagnosed()
    assert result.verdict == "wrong", result
    assert not result.mistakes, result


def test_different_faults_of_dq_and_dv_are_diagnosed_separately() -> None:
    call, *_ = planted_gradients.planted("dv of another head", 0)
    grads = {**call.outputs, "dq": 2 * call.outputs["dq"]}
    result = replace(call, outputs=grads).diagnosed()
    assert {(m.name, m.outputs) for m in result.mistakes} == {("output-factor", ("dq",)), ("rows-moved", ("dv",))}
    assert "dq: output-factor" in str(result)
    assert "dv: rows-moved" in str(result)


def test_float16_overflow_of_score_products_is_diagnosed() -> None:
    q, k, v = (torch.randn(1, 2, 50, 64) for _ in range(3))
    q, k, v = (120 * q).half(), (80 * k).half(), v.half()
    scores = (q.float() @ k.float().mT).half().float() * 1e-3  # the fault: products of up to 3e5 in float16
    out = (scores.softmax(-1) @ v.float()).half()
    assert out.isnan().any()
    result = diagnose("attention", {"q": q, "k": k, "v": v, "layout": "BNSD", "scale": 1e-3}, {"out": out})
    assert [(m.name, m.detail) for m in result.mistakes] == [("overflow", "products, before the scale")], result


@pytest.mark.parametrize("what", ["q, k and v", "the output"])
def test_flushed_denormals_are_diagnosed(what: str) -> None:
    q, k, v = (torch.randn(1, 2, 40, 32) for _ in range(3))
    q, k, v = q.half(), k.half(), (v * (3e-5 if "v" in what else 2e-4)).half()
    least = 2**-14
    read = v.where(v.abs() >= least, 0) if "v" in what else v
    out = ((q.float() @ k.float().mT * 0.3).softmax(-1) @ read.float()).half()
    out = out if "v" in what else out.where(out.abs() >= least, 0)
    result = diagnose("attention", {"q": q, "k": k, "v": v, "layout": "BNSD", "scale": 0.3}, {"out": out})
    assert [(m.name, m.detail) for m in result.mistakes] == [("denormals-flushed", f"of {what}")], result


def test_reading_keys_past_the_sequence_end_is_diagnosed() -> None:
    """Tiles of 32 keys would end at the same key."""
    q, k, v = (torch.randn(2, 45, 2, 32) for _ in range(3))
    more = -45 % 64
    k2, v2 = (torch.cat((t.flatten(0, 1), torch.zeros(more, 2, 32))) for t in (k, v))
    out = torch.zeros_like(q)
    for b in range(2):  # the fault: keys of the next sequence, and zeros behind the tensor
        read = slice(45 * b, 45 * b + 45 + more)
        rows = (t.transpose(0, 1) for t in (q[b], k2[read], v2[read]))
        out[b] = torch.nn.functional.scaled_dot_product_attention(*rows).transpose(0, 1)
    result = diagnose("attention", {"q": q, "k": k, "v": v}, {"out": out})
    detail = "keys after the last, in tiles of 32 or 64"
    assert (result.mistakes[0].name, result.mistakes[0].detail) == ("padding-seen", detail), result

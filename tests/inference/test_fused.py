"""Fused inference attention: golden against dense formulas, back ends against golden."""

from typing import Any

import pytest
import torch
from support.bits import same, same_bits
from support.fused import FusedCase, answer, arguments
from support.fused_cases import CASES, PROMPTS
from support.run_inference_calls import in_float64, run

from fusion_attention.contract import bind
from fusion_attention.ops.fused import definitions as fused
from fusion_attention.ops.inference.lowered_call import LSE, InferenceCall
from fusion_attention.testing import check, expected_of
from fusion_attention.torch_ops import dispatch

Args = dict[str, Any]


def record_of(case: FusedCase) -> Any:
    """Returns the operator definition of the torch_npu function that has the parameters of a case."""
    newest = case.sink or case.latent or case.mode == 9
    return fused.TORCH_V2 if newest else fused.TORCH_V1


def lowered(case: FusedCase, **changes: Any) -> InferenceCall:
    record = record_of(case)
    return record.lower(bind(record, arguments(case) | changes))  # type: ignore[no-any-return]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_golden_and_cpu_back_end_match_dense_formulas(case: FusedCase) -> None:
    call = lowered(case)
    exact, got = run(in_float64(call), "golden"), run(call, "cpu")
    for result, want in zip(exact.values(), answer(case), strict=True):
        torch.testing.assert_close(result.double(), want, rtol=1e-12, atol=1e-12)
    dtype = torch.int8 if case.out else torch.float16 if case.full else getattr(torch, case.dtype)
    assert got["attention_out"].dtype == dtype
    check(case.id, got, expected_of(call, exact))
    if case.full:  # only integers have kernels whose threads no other test counts
        torch.set_num_threads(3)
        same_bits(run(call, "cpu"), got)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_repeated_fused_calls_are_bitwise_equal_to_first_call(case: FusedCase) -> None:
    """Later calls with one signature take a shorter path, which must give the same bits."""
    args, record = arguments(case), record_of(case)
    for flag in (True, False):
        first, *rest = (dispatch.results(record, {**args, "softmax_lse_flag": flag}) for _ in range(4))
        assert [*first] == [*fused.RESULTS]
        assert flag or (first[LSE].shape, first[LSE].dtype) == ((0,), torch.float32)
        for again in rest:
            same_bits(again, first)


def of_prompts(case: FusedCase) -> Args:
    """Returns the case's arguments of npu_prompt_flash_attention; {} if it lacks one."""
    args, parameters = arguments(case), fused.TORCH_PFA.by_name
    unknown = [args[name] for name in args if name not in parameters and name != "softmax_lse_flag"]
    lacks = any(isinstance(value, torch.Tensor) or value for value in unknown)
    usable = case.layout in fused.TORCH_PFA.layouts and case.store != "list" and case.row_slots > 1 and not lacks
    return {name: args[name] for name in args if name in parameters} if usable else {}


@pytest.mark.parametrize("case", filter(of_prompts, CASES), ids=lambda case: case.id)
def test_npu_prompt_flash_attention_is_bitwise_equal_to_fused_attention(case: FusedCase) -> None:
    got = dispatch.results(fused.TORCH_PFA, of_prompts(case))["attention_out"]
    assert same(got, dispatch.results(fused.TORCH_V1, arguments(case))["attention_out"])


@pytest.mark.parametrize("case", PROMPTS, ids=lambda case: case.id)
def test_npu_prompt_flash_attention_in_layout_sh_matches_formula(case: FusedCase) -> None:
    args = of_prompts(case)
    call = fused.TORCH_PFA.lower(bind(fused.TORCH_PFA, args))  # type: ignore[misc]
    want, _ = answer(case)
    torch.testing.assert_close(run(in_float64(call), "golden")["attention_out"], want, rtol=1e-12, atol=1e-12)
    check(case.id, run(call, "cpu"), expected_of(call, {"attention_out": want}))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_fused_call_reads_tensor_contents_at_run_time(case: FusedCase) -> None:
    """Two-phase calls are lowered before their tensors hold the input values."""
    args, record = arguments(case), record_of(case)
    content = [value for name, value in args.items() if name != "block_table" and "padding_size" not in name]
    flat = [t for value in content for t in (value if isinstance(value, list) else [value])]
    originals = {t: t.clone() for t in flat if isinstance(t, torch.Tensor)}
    want = run(record.lower(bind(record, args)), "golden")
    for t in originals:
        t.zero_()
    early = record.lower(bind(record, args))
    for t, values in originals.items():
        t.copy_(values)
    same_bits(run(early, "golden"), want)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_fused_result_shapes_and_dtypes_are_known_without_running(case: FusedCase) -> None:
    args, record = arguments(case), record_of(case)
    for flag in (True, False):
        result = record.fresh({**record.neutral, **args, "softmax_lse_flag": flag})
        results = lowered(case, softmax_lse_flag=flag).results()
        assert {k: (t.shape, t.dtype) for k, t in result.items()} == {k: (t.shape, t.dtype) for k, t in results.items()}

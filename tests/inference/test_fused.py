"""Fused inference attention: golden against dense formulas, back ends against golden."""

from typing import Any

import pytest
import torch
from support.bits import same, same_bits
from support.fused import FusedCase, answer, arguments
from support.fused_cases import CASES, PROMPTS
from support.run_inference_calls import in_float64, run

from fusion_attention.backends import cpu
from fusion_attention.contract import bind
from fusion_attention.ops.fused import definitions as fused
from fusion_attention.ops.inference import definitions as inference
from fusion_attention.ops.inference.lowered_call import LSE, InferenceCall
from fusion_attention.testing import check, expected_of
from fusion_attention.torch_ops import dispatch

HOST = torch.device("cpu")
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
def test_golden_agrees_with_dense_formulas(case: FusedCase) -> None:
    for got, want in zip(run(in_float64(lowered(case)), "golden").values(), answer(case), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-12, atol=1e-12)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_cpu_back_end_agrees_with_golden(case: FusedCase) -> None:
    call = lowered(case)
    assert cpu.reasons_against(call.problem, HOST) == []
    got, want = run(call, "cpu"), run(in_float64(call), "golden")
    dtype = torch.int8 if case.out else torch.float16 if case.full else getattr(torch, case.dtype)
    assert got["attention_out"].dtype == dtype
    check(case.id, got, expected_of(call, want))


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


def words(case: FusedCase, record: Any) -> Args | None:
    """Returns the case's arguments under another operator's names; None if that operator lacks one."""
    args = arguments(case)
    del args["softmax_lse_flag"]
    if record is inference.TORCH:
        args = {name: args[name] for name in args if name not in ("actual_seq_lengths", "pre_tokens", "next_tokens")}
        args["actual_seq_lengths"] = args.pop("actual_seq_lengths_kv")
    elif case.store == "list":
        return None
    unknown = [name for name in args if name not in record.by_name]
    if case.layout not in record.layouts or any(not _says_nothing(args[name]) for name in unknown):
        return None
    return {name: value for name, value in args.items() if name not in unknown}


def _says_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, int) and value == 0)


def agreeing(record: Any, one_token: bool) -> list[FusedCase]:
    """Returns the cases that fused attention and `record` can compute."""
    return [case for case in CASES if (case.row_slots == 1) == one_token and words(case, record) is not None]


@pytest.mark.parametrize("case", agreeing(fused.TORCH_PFA, False), ids=lambda case: case.id)
def test_npu_prompt_flash_attention_is_bitwise_equal_to_fused_attention(case: FusedCase) -> None:
    args = words(case, fused.TORCH_PFA)
    assert args is not None
    got = dispatch.results(fused.TORCH_PFA, args)["attention_out"]
    assert same(got, dispatch.results(fused.TORCH_V1, arguments(case))["attention_out"])


@pytest.mark.parametrize("case", agreeing(inference.TORCH, True), ids=lambda case: case.id)
def test_npu_incre_flash_attention_is_bitwise_equal_to_fused_attention(case: FusedCase) -> None:
    args = words(case, inference.TORCH)
    assert args is not None
    got = dispatch.results(inference.TORCH, args)["attention_out"]
    assert same(got, dispatch.results(fused.TORCH_V1, arguments(case))["attention_out"])


@pytest.mark.parametrize("case", PROMPTS, ids=lambda case: case.id)
def test_npu_prompt_flash_attention_in_layout_sh_matches_formula(case: FusedCase) -> None:
    args = words(case, fused.TORCH_PFA)
    assert args is not None
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


@pytest.mark.parametrize("case", [case for case in CASES if case.full], ids=lambda case: case.id)
def test_fused_int8_attention_is_bitwise_equal_for_any_thread_count(case: FusedCase) -> None:
    threads, want = torch.get_num_threads(), run(lowered(case), "cpu")
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            same_bits(run(lowered(case), "cpu"), want)
    finally:
        torch.set_num_threads(threads)

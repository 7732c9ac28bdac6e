"""The judge's formulas equal the golden back end for every family, forward and backward."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support import cases as dense
from support import compressed, decode_cases, fused_cases
from support.fused import arguments as fused_arguments

from fusion_attention.contract import bind
from fusion_attention.judging.chi_square_limits import Expected
from fusion_attention.judging.expected_error import KERNEL, quantum, rounding
from fusion_attention.judging.outputs import computed, of_heads, setting_of, totals, units
from fusion_attention.judging.standards import FLT_MAX
from fusion_attention.ops import RECORDS
from fusion_attention.ops.fused import definitions as fused_records
from fusion_attention.ops.sparse.lowered_call import SparseBackward
from fusion_attention.ops.training.forward_backward import FORWARD, DenseBackward, DenseForward
from fusion_attention.plan import compute
from fusion_attention.testing import compare, lowered
from fusion_attention.testing import decode as decoding
from fusion_attention.testing import sparse as selections


def stored(value: torch.Tensor, dtype: torch.dtype) -> Expected:
    """Expected value with the error of one rounding to dtype, and of float64 sums in another order."""
    size = value.abs().masked_fill(value.abs() >= FLT_MAX, 0).nan_to_num(0.0, 0.0, 0.0)
    return Expected(value, (rounding(dtype) * size**2 + quantum(dtype)).sqrt() + 1e-13 * size.amax() + 1e-300)


def agree(call: Any) -> dict[str, torch.Tensor]:
    """Assert that golden's results equal the formulas up to one rounding, and return them."""
    results: dict[str, torch.Tensor] = call.results()
    compute(call, results, "golden")
    setting, outputs = setting_of(call, results)
    judged = set()
    for unit in units(setting, outputs):
        result = computed(setting, unit, outputs)
        for o in outputs:
            if o.of_unit(unit) and o.name in result and result[o.name].value.numel():
                ours = o.rows(setting, unit.b, of_heads(setting, unit), unit.rows)
                judged.add(o.name)
                wanted = result[o.name]
                lse = Expected(wanted.value, wanted.variance.sqrt())  # made of statistics that were rounded before
                compare(o.name, ours, lse if o.kind == "lse" else stored(wanted.value, ours.dtype))
    for o in outputs:
        if o.view is None and o.tensor.numel():
            compare(o.name, o.tensor, stored(totals(setting, o, KERNEL).value, o.tensor.dtype))
    assert judged or not any(t.numel() for t in results.values()) or not call.extents.visible_pairs
    return results


def agree_in_training(case: Any, args: dict[str, Any]) -> None:
    """Assert agreement of the forward and of the backward call."""
    call = lowered(case, args)
    out = agree(DenseForward(call, FORWARD, lanes=True))
    saved = args["dy"], out["attention_out"], out["softmax_max"], out["softmax_sum"]
    agree(DenseBackward(call, saved, call.extras[2]))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", dense.CASES[::3], ids=lambda case: case.id)
def test_training_formulas_match_float64_reference(case: Any) -> None:
    agree_in_training(case, dense.operands(case))


DROPPED = replace(dense.PACKED, dim_rope=2, dtype="float16", sparse_mode=4, mask="compressed", pre=1, next=1,
                  dropout="philox", keep_prob=0.4)  # fmt: skip


@pytest.mark.sampled(6)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["query", "key", "value", "query_rope", "key_rope", "dy"])
def test_formulas_with_nan_and_infinite_inputs_match_float64_reference(name: str, value: float) -> None:
    """Rows that do not see such an element stay finite, as do rows that drop it, although 0 times NaN is NaN."""
    args = {n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in dense.operands(DROPPED).items()}
    args[name][::3, 0] = value
    agree_in_training(DROPPED, args)


@pytest.mark.parametrize("case", decode_cases.CASES[::2], ids=lambda case: case.id)
def test_decode_formulas_match_float64_reference(case: Any) -> None:
    op = RECORDS["npu_incre_flash_attention"]
    assert op.lower is not None
    agree(op.lower(bind(op, decoding.arguments(case))))


@pytest.mark.parametrize("case", fused_cases.CASES[::3], ids=lambda case: case.id)
def test_fused_inference_formulas_match_float64_reference(case: Any) -> None:
    newest = case.sink or case.latent or case.mode == 9
    op = fused_records.TORCH_V2 if newest else fused_records.TORCH_V1
    assert op.lower is not None
    agree(op.lower(bind(op, fused_arguments(case))))


@pytest.mark.parametrize("changes", [{}, {"sink": True}, {"block": 2}, {"layout": "TND"}, {"dim_rope": 4}], ids=str)
def test_sparse_attention_formulas_match_float64_reference(changes: dict[str, Any]) -> None:
    case = selections.SparseCase(**changes)
    args = selections.arguments(case)
    call = selections.lowered(args)
    result = agree(call)
    agree(SparseBackward(call, args["dy"], *result.values()))


@pytest.mark.parametrize(
    "changes", [{}, {"sink": True}, {"lists": "all"}, {"layout": "TND"}, {"shares_kv": False}], ids=str
)
def test_compressed_attention_formulas_match_float64_reference(changes: dict[str, Any]) -> None:
    args = compressed.arguments(compressed.CompressedCase(**changes))
    call = compressed.lowered(args)
    result = agree(call)
    agree(SparseBackward(call, args["dy"], *result.values()))

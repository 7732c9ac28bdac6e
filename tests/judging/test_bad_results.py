"""Invalid and wrong results of every operator family: other shapes or dtypes, NaN, zeros, rows of another place.

Each is an error or called wrong, in one sentence with the fault and its place, and never called right.
"""

import math
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from support import fused
from support.faulty_list_kernels import divergence
from support.long_calls import computed_call

import fusion_attention as fa
from fusion_attention.judging.standards import STANDARDS
from fusion_attention.testing import decode, indexer_loss, sparse
from fusion_attention.testing.cases import Case, arguments

Tensor = torch.Tensor
Call = tuple[str, dict[str, Any], dict[str, Tensor]]
CASE = Case(q_len=(21,), kv_len=(37,), heads_q=4, heads_kv=2, dim_qk=16, dim_v=16, sparse_mode=3, mask="compressed")
SPARSE = sparse.SparseCase("BSND", 0, "bfloat16", (9,), (40,), count=12, dim_qk=16, dim_v=16, scale=0.25, mode=3)
PAGES = fused.FusedCase(q_len=(1, 1, 1), kv_len=(53, 90, 17), store="rows", page_size=16, layout="BNSD")
INTEGERS = decode.DecodeCase(dtype="bfloat16", integers="channel", offsets=True)
INDEXER = sparse.IndexerCase(q_len=(12, 12), kv_len=(40, 40), heads=4, dim=8, top_k=6, exact=True)
LOSS = indexer_loss.LossCase("BSND", 0, "float16", (9,), (40,), count=12, dim_qk=16, dim_v=16, scale=0.25, mode=3)


def computed(operator: str, inputs: dict[str, Any]) -> Call:
    call = computed_call(operator, inputs)
    return operator, call.args, call.outputs


def gradient_of(args: dict[str, Any]) -> Call:
    """Computes the backward of a call from the saved results of the same back end."""
    saved = computed("npu_fusion_attention_v2", args)[2]
    given = {"attention_in": "attention_out", "softmax_max": "softmax_max", "softmax_sum": "softmax_sum"}
    args |= {"scale_value": args.get("scale"), **{n: saved[o] for n, o in given.items()}}
    return computed("npu_fusion_attention_grad_v2", args)


def sparse_gradient(case: sparse.SparseCase) -> Call:
    args = sparse.arguments(case)
    result = computed("npu_sparse_flash_attention", args)[2]
    return computed("npu_sparse_flash_attention_grad", args | {"attention_in": result.pop("attention_out")} | result)


def statistics(case: indexer_loss.LossCase) -> Call:
    args = {n: t for n, t in indexer_loss.arguments(case).items() if not n.startswith("softmax_")}
    return computed("npu_dense_lightning_indexer_softmax_lse", args)


def own_loss() -> Call:
    """Returns a loss that plain torch computes."""
    capture = divergence(4)
    return capture.operator, capture.inputs, capture.outputs


def attention_call(dtype: torch.dtype) -> Call:
    make = torch.Generator().manual_seed(1)
    q, k = (torch.randn(1, n, h, 16, generator=make).to(dtype) for n, h in ((21, 4), (37, 2)))
    return computed("attention", {"q": q, "k": k, "v": k.flip(1)})


FAMILIES: dict[str, Callable[[], Call]] = {
    "own float32": lambda: attention_call(torch.float32),
    "own float16": lambda: attention_call(torch.float16),
    "dense": lambda: computed("npu_fusion_attention_v2", arguments(replace(CASE, dtype="bfloat16"))),
    "gradient": lambda: gradient_of(arguments(replace(CASE, dtype="bfloat16", pse="full", sink=True))),
    "pages": lambda: computed("npu_fused_infer_attention_score", fused.arguments(PAGES)),
    "int8 cache": lambda: computed("npu_incre_flash_attention", decode.arguments(INTEGERS)),
    "int8 output": lambda: computed("npu_incre_flash_attention", decode.arguments(decode.DecodeCase(out="channel"))),
    "sparse": lambda: computed("npu_sparse_flash_attention", sparse.arguments(SPARSE)),
    "sparse gradient": lambda: sparse_gradient(SPARSE),
    "indexer": lambda: computed("npu_lightning_indexer", sparse.indexer_arguments(INDEXER)),
    "own loss": own_loss,
    "loss of lists": lambda: computed(
        "npu_sparse_lightning_indexer_grad_kl_loss", indexer_loss.arguments(replace(LOSS, weights="float16"))
    ),
    "statistics": lambda: statistics(replace(LOSS, count=0, weights="float16")),
}


@cache
def _recorded(name: str) -> Call:
    return FAMILIES[name]()


def small(name: str) -> Call:
    """Returns the call of a family, with copied results."""
    operator, inputs, outputs = _recorded(name)
    return operator, inputs, {n: t.clone() for n, t in outputs.items()}


DTYPES = [torch.bfloat16, torch.float16, torch.float32]
everywhere = pytest.mark.parametrize("family", FAMILIES)


def judged(operator: str, inputs: dict[str, Any], outputs: dict[str, Any]) -> tuple[str, str]:
    """(verdict with failing outputs, place of the fault)."""
    result = fa.judge(operator, inputs, outputs, backends=False)
    lines = str(result).splitlines()
    assert len(lines) == 5
    return lines[1].removeprefix("verdict").strip(), lines[3].removeprefix("where").strip()


def refused(operator: str, inputs: Any, outputs: Any, *what: str) -> None:
    with pytest.raises(fa.JudgeError) as caught:
        fa.judge(operator, inputs, outputs, backends=False)
    message = str(caught.value)
    assert "\n" not in message
    for word in (operator, *what):
        assert word in message, message


# --------------------------------------------------------------------------------------------------- invalid results


def longest(t: Tensor) -> int:
    return max(range(t.dim()), key=lambda axis: t.shape[axis])


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "one row fewer": (lambda t: t.narrow(longest(t), 0, t.shape[longest(t)] - 1) if t.numel() > 1 else t[None], "got"),
    "one axis more": (lambda t: t[None], "got"),
    "transposed": (lambda t: t.mT if t.dim() > 1 and t.shape[-1] != t.shape[-2] else t[None], "got"),
    "a number": (lambda t: t.reshape(-1)[0], "got"),
    "no number": (lambda t: t.reshape(-1)[:0], "got nothing"),
    "none": (lambda t: None, "got nothing"),
    "bool": (lambda t: t != 0, "bool"),
    "complex": (lambda t: t.to(torch.complex64), "complex64"),
    "another kind": (lambda t: t.int() if t.is_floating_point() else t.float(), "expected"),
    "on no device": (lambda t: t.to("meta"), "on device meta"),
    "sparse": (lambda t: t.to_sparse(), "torch.sparse_coo"),
    "a list": (lambda t: t.tolist(), "expected a tensor, got list"),
    "of numpy": (lambda t: np.asarray(t.double()), "expected a tensor, got ndarray"),
}


@everywhere
def test_judge_refuses_outputs_of_wrong_type_shape_or_device(family: str) -> None:
    operator, inputs, outputs = small(family)
    for change, what in REFUSED.values():
        for name, t in outputs.items():
            sentence = "no output to judge" if len(outputs) == 1 and "nothing" in what else what
            refused(operator, inputs, outputs | {name: change(t)}, sentence)
    refused(operator, inputs, outputs | {"colour": torch.ones(1)}, "has no output colour (it has", *outputs)
    refused(operator, inputs, {}, "no output to judge")
    refused(operator, inputs, [*outputs.values()], "outputs: expected tensors by name, got list")
    refused(operator, [*inputs.values()], outputs, "inputs: expected tensors by name, got list")


def test_judge_refuses_an_unknown_standard_and_operator() -> None:
    with pytest.raises(fa.JudgeError, match="operator: expected a name, got int"):
        fa.judge(5, {}, {})  # type: ignore[arg-type]
    with pytest.raises(fa.JudgeError, match=f"'cann' is not known: one of {', '.join(STANDARDS)}"):
        fa.judge(*small("own float32"), standard="cann")


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (torch.ones(1, 21, 4, 16, device="meta"), "q: expected a dense tensor that holds its numbers, got one on dev"),
        (torch.ones(1, 21, 4, 16).to_sparse(), "q: expected a dense tensor that holds its numbers, got one of torch.s"),
        (torch.ones(1, 21, 4, 16).numpy(), "q: expected a tensor, got numpy"),
        ([[1.0]], "q: expected a tensor, got"),
        (torch.ones(1, 21, 4, 16, dtype=torch.complex64), "q: expected float16 or bfloat16"),
        (torch.ones(2, 4), "not a call of attention"),
        ("x", "not a call of attention"),
        (None, "the call lacks q"),
    ],
)
def test_judge_refuses_invalid_input_tensors(value: Any, what: str) -> None:
    operator, inputs, outputs = small("own float32")
    refused(operator, inputs | {"q": value}, outputs, what)


def test_unexpected_outputs_are_reported_as_not_judged() -> None:
    operator, inputs, outputs = small("dense")
    result = fa.judge(operator, inputs, outputs | {"softmax_out": torch.ones(3)}, backends=False)
    assert result.verdict == "right"
    assert "not judged: softmax_out" in str(result)
    assert fa.judge(operator, inputs, outputs | {"softmax_out": torch.ones(0)}, backends=False).unjudged == {}


# --------------------------------------------------------------------------------------- equal values in other memory


SAME: dict[str, Callable[[Tensor], Tensor]] = {
    "in a wider dtype": lambda t: t.double() if t.is_floating_point() else t.long(),
    "in float32": lambda t: t.float() if t.is_floating_point() else t,
    "of autograd": lambda t: t.clone().requires_grad_() if t.is_floating_point() else t,
    "in another order": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "every second number": lambda t: torch.stack((t, t), -1)[..., 0],
    "of other zeros": lambda t: torch.where(t == 0, -0.0, t) if t.is_floating_point() else t,
}


@everywhere
def test_equal_values_in_other_dtypes_or_strides_are_right(family: str) -> None:
    operator, inputs, outputs = small(family)
    for what, change in SAME.items():
        verdict, where = judged(operator, inputs, {n: change(t) for n, t in outputs.items()})
        assert verdict == "right: as exact as a kernel that sums in float32", what
        assert where == "nowhere"


# ----------------------------------------------------------------------------------------------- entirely wrong results


def one(t: Tensor, value: float) -> Tensor:
    t.view(-1)[t.numel() // 2] = value
    return t


WRONG: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "NaN": (lambda t: torch.full_like(t, math.nan), "hold NaN"),
    "infinite": (lambda t: torch.full_like(t, math.inf), "hold infinities"),
    "one NaN": (lambda t: one(t, math.nan), "holds NaN"),
    "one infinity": (lambda t: one(t, -math.inf), "holds "),
    "zeros": (torch.zeros_like, "are zero"),
    "the largest": (lambda t: torch.full_like(t, torch.finfo(t.dtype).max), ""),
    "another sign": (lambda t: -t, ""),
    "other rows": (lambda t: t.roll(1, longest(t)) if t.numel() > 1 else 2 * t, ""),
}


@everywhere
@pytest.mark.parametrize("what", WRONG)
def test_wrong_outputs_are_reported_with_a_location(what: str, family: str) -> None:
    operator, inputs, outputs = small(family)
    change, sentence = WRONG[what]
    names = [n for n, t in outputs.items() if t.is_floating_point()]
    if not names:
        return
    name = names[zlib.crc32(f"{what}{family}".encode()) % len(names)]  # another one for every family
    verdict, where = judged(operator, inputs, outputs | {name: change(outputs[name])})
    assert verdict == f"wrong ({name})"
    single = sentence.replace("hold ", "holds ").replace("are ", "is ")
    assert sentence in where or single in where
    assert where != "throughout" or not sentence


def test_wrong_int8_outputs_are_called_wrong() -> None:
    operator, inputs, outputs = small("int8 output")
    (name,) = outputs
    for change in (torch.zeros_like, lambda t: -t, lambda t: t.roll(1, -1), lambda t: t.to(torch.uint8)):
        assert judged(operator, inputs, {name: change(outputs[name])})[0] == f"wrong ({name})"
    assert "are zero" in judged(operator, inputs, {name: torch.zeros_like(outputs[name])})[1]
    assert judged(operator, inputs, {name: outputs[name] + 2})[0] == f"wrong ({name})"


def test_copied_row_is_reported_unless_reference_rows_are_equal() -> None:
    q, k = torch.randn(2, 1, 40, 2, 8)
    q[:, 7] = q[:, 3]
    out = fa.attention(q, k, k)
    out[:, 20] = out[:, 30]
    assert "row 20 of head 0, sequence 0, is a copy of row 30 of head 0" in str(
        fa.judge("attention", {"q": q, "k": k, "v": k}, {"out": out}, backends=False)
    )
    out = fa.attention(q, k, k)
    out[:, 3] *= 2
    out[:, 7] = out[:, 3]
    assert "copy" not in str(fa.judge("attention", {"q": q, "k": k, "v": k}, {"out": out}, backends=False))


# --------------------------------------------------------------------------------------- NaN, overflow, exact rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_is_right_only_where_the_reference_has_nan(dtype: torch.dtype) -> None:
    make = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 30, 2, 8, generator=make).to(dtype) for _ in range(3))
    v[0, 7, 0, 3] = math.nan
    inputs = {"q": q, "k": k, "v": v}
    out = fa.attention(**inputs)
    assert judged("attention", inputs, {"out": out})[0].startswith("right")
    for bad in (out.nan_to_num(0.0), out.roll(1, -1), torch.full_like(out, math.nan)):
        assert judged("attention", inputs, {"out": bad})[0] == "wrong (out)"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_overflowing_results_may_be_infinite_or_the_largest_number(dtype: torch.dtype) -> None:
    """Values out of range may be infinity or the largest number; values within rounding of it may be infinity."""
    make, most = torch.Generator().manual_seed(2), torch.finfo(dtype).max
    q, k = (torch.randn(1, n, 2, 8, generator=make).to(dtype) for n in (40, 100))
    inputs = {"q": q, "k": k, "v": torch.full_like(k, most)}
    for right in (fa.attention(**inputs), torch.full_like(q, most), torch.full_like(q, math.inf)):
        assert judged("attention", inputs, {"out": right})[0].startswith("right")
    for value in (-math.inf, math.nan, 0.97 * most, 0.0):
        assert judged("attention", inputs, {"out": torch.full_like(q, value)})[0] == "wrong (out)"
    inputs["v"] = torch.full_like(k, 0.8 * most)
    assert judged("attention", inputs, {"out": torch.full_like(q, math.inf)})[0] == "wrong (out)"
    bits = torch.ones(2 * 40 * 100 // 8, dtype=torch.uint8) * 255
    inputs |= {"keep_prob": 0.5, "drop_bits": bits}  # golden: 1.6 times the largest
    for value in (most, math.inf):
        assert judged("attention", inputs, {"out": torch.full_like(q, value)})[0].startswith("right")
    for value in (-most, -math.inf, math.nan, 0.9 * most):
        assert judged("attention", inputs, {"out": torch.full_like(q, value)})[0] == "wrong (out)"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_with_one_key_or_no_key_must_be_exact(dtype: torch.dtype) -> None:
    """A row with one key must return its value and an empty row zeros; the report locates larger errors."""
    make = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 40, 2, 16, generator=make).to(dtype) for _ in range(3))
    inputs = {"q": q, "k": k, "v": v, "band": fa.Band.window(0, 0)}
    units = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    assert judged("attention", inputs, {"out": v})[0] == "right: as exact as a kernel that sums in float32"
    assert judged("attention", inputs, {"out": (v.view(units) + 3).view(dtype)})[0] == "wrong (out)"
    out = v.clone()
    out[0, 9, 1] = (v.view(units) + 8).view(dtype)[0, 9, 1]
    assert "head 1 of 2; row 9 of 40" in judged("attention", inputs, {"out": out})[1]
    empty = {"q": q, "k": k, "v": v, "blocked": torch.eye(40) == 0}
    empty["blocked"][5] = True
    out = v.clone()
    out[:, 5] = 0.0
    for right in (out, torch.where(out == 0, -0.0, out)):
        assert judged("attention", empty, {"out": right})[0].startswith("right")
    for value in (1e-4, math.nan, -math.inf):
        out[:, 5] = value
        assert "all 2 heads; row 5 of 40" in judged("attention", empty, {"out": out})[1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_judge_accepts_zeros_without_keys_and_refuses_empty_outputs(dtype: torch.dtype) -> None:
    make = torch.Generator().manual_seed(4)
    q, k = (torch.randn(2, 6, 2, 8, generator=make).to(dtype) for _ in range(2))
    for rows, keys in ((q[:, :0], k), (q[:0], k[:0])):
        refused("attention", {"q": rows, "k": keys, "v": keys}, {"out": rows}, "no output to judge")
    none = {"q": q, "k": k[:, :0], "v": k[:, :0]}
    assert judged("attention", none, {"out": torch.zeros_like(q)})[0].startswith("right")
    assert judged("attention", none, {"out": one(torch.zeros_like(q), 1e-3)})[0] == "wrong (out)"
    # One of two packed sequences has no keys, the other no rows.
    packed = {"q": q[0], "k": k[0], "v": k[0], "layout": "TND", "q_len": [6, 0], "kv_len": [0, 6]}
    assert judged("attention", packed, {"out": torch.zeros_like(q[0])})[0].startswith("right")
    assert judged("attention", packed, {"out": q[0]})[0] == "wrong (out)"


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 1, 1, 3), (1, 3, 700, 2), (70, 1, 2, 8)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_wrong_element_is_detected_in_tiny_and_many_head_outputs(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """The limit of a single element is five expected errors."""
    make = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(shape, generator=make).to(dtype) for _ in range(3))
    inputs = {"q": q, "k": k, "v": v}
    out = fa.attention(**inputs)
    assert judged("attention", inputs, {"out": out})[0].startswith("right")
    out.view(-1)[-1] *= 1.1
    assert judged("attention", inputs, {"out": out})[0] == "wrong (out)"


@pytest.mark.parametrize("by", [1e-25, 1e-19, 1e19, 1e25])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_outputs_with_squares_outside_float32_range_are_judged(dtype: torch.dtype, by: float) -> None:
    """Variances in calls of this length are computed in float32 unless, as here, the squares do not fit."""
    make = torch.Generator().manual_seed(6)
    q, k, v = (torch.randn(1, 600, 1, 8, generator=make).to(dtype) for _ in range(3))
    inputs = {"q": q, "k": k, "v": (v * by).to(dtype)}
    out = fa.attention(**inputs)
    assert judged("attention", inputs, {"out": out})[0] == "right: as exact as a kernel that sums in float32"
    out[:, 64:128] *= 1.3
    verdict, where = judged("attention", inputs, {"out": out})
    assert verdict == "wrong (out)"
    assert "row" in where


@pytest.mark.sampled(4)
@pytest.mark.parametrize("by", [1e-25, 1e-12, 1e12, 1e25])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradients_with_squares_outside_float32_range_are_judged(dtype: torch.dtype, by: float) -> None:
    case = Case(q_len=(600,), kv_len=(600,), heads_q=1, heads_kv=1, dim_qk=8, dim_v=8, scale=0.35)
    args = arguments(replace(case, dtype=str(dtype).removeprefix("torch.")))
    operator, inputs, outputs = gradient_of(args | {"dy": (args["dy"] * by).to(dtype)})
    assert judged(operator, inputs, outputs)[0] == "right: as exact as a kernel that sums in float32"
    for name in ("dq", "dk", "dv"):
        bad = outputs[name].clone()
        bad[:, 64:128] *= 1.3
        assert judged(operator, inputs, outputs | {name: bad})[0] == f"wrong ({name})"


@pytest.mark.parametrize("by", [1e-25, 1e-12, 1e12, 1e19])
def test_indexer_scores_with_squares_outside_float32_range_are_judged(by: float) -> None:
    make = torch.Generator().manual_seed(7)
    q, k = torch.randn(1, 300, 4, 8, generator=make), torch.randn(1, 300, 1, 8, generator=make) * by
    inputs = {"q": q, "k": k, "weights": torch.rand(1, 300, 4, generator=make), "top_k": 16}
    indices, values = fa.lightning_indexer(**inputs)
    outputs = {"sparse_indices_out": indices, "sparse_values_out": values}
    assert judged("lightning_indexer", inputs, outputs)[0] == "right: as exact as a kernel that sums in float32"
    bad = values.clone()
    bad[:, 64:128] *= 1.3
    assert judged("lightning_indexer", inputs, outputs | {"sparse_values_out": bad})[0] == "wrong (sparse_values_out)"

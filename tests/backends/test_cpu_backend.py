"""Properties of the CPU back end alone: memory, equal bits, errors. Tests elsewhere check its values."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from support.bits import same_bits
from support.native_dense import converted, gradients, native
from support.oracle import Call, Results, alone, make
from support.scripts import python
from torch.nn.functional import scaled_dot_product_attention

import fusion_attention as fa
from fusion_attention.backends import cpu
from fusion_attention.backends.cpu import mean_rows
from fusion_attention.contract import bind
from fusion_attention.ir.mask import Band
from fusion_attention.ir.memory_views import RowView
from fusion_attention.ir.problem import Extents, Grads, Operands, Problem, Stats
from fusion_attention.judging.chi_square_limits import Expected
from fusion_attention.ops.training import api_definition
from fusion_attention.ops.training.forward_backward import DenseForward
from fusion_attention.testing import compare, expected_of
from fusion_attention.testing.estimated_rounding_errors import compare_with

LENGTHS = [(37, 37), (280, 300), (0, 4), (1, 600), (5, 0), (270, 3)]
PROBLEM = Problem(heads_q=4, heads_kv=2, dim_qk=24, dim_v=16, scale=0.2)
RICH = dataclasses.replace(
    PROBLEM, dim_rope=8, dtype="bfloat16", bias="slopes", has_sink=True, dropout="philox", keep_prob=0.8
)
MEANS = dataclasses.replace(PROBLEM, empty_rows="mean", dropout="philox", keep_prob=0.5)


def call_of(problem: Problem) -> Call:
    """Returns a causal call with a window of 200 keys; rows far behind the last key see no key."""
    q_len, kv_len = zip(*LENGTHS, strict=True)
    return converted(make(problem, q_len, kv_len, Band.window(200, 0, "start")), problem.torch_dtype)


def run(call: Call, packed: bool = True) -> Results:
    """Returns every output of forward and backward."""
    saved = native(call, packed=packed)
    return saved | gradients(call, saved, packed=packed)


def test_packed_padded_and_repeated_means_of_empty_rows_are_bitwise_equal() -> None:
    call = call_of(MEANS)
    packed = run(call)
    assert not any(value.isnan().any() for values in packed.values() for value in values)
    same_bits(packed, run(call, packed=False))
    same_bits(packed, run(call))


def test_sequence_result_does_not_depend_on_other_sequences_of_the_batch() -> None:
    # Dropout is off, because its random streams depend on the index of a sequence in the batch.
    call = call_of(dataclasses.replace(RICH, dropout="none", keep_prob=1.0))
    together = run(call)
    del together["dsink"]  # one for all
    for b in range(len(LENGTHS)):
        result = run(alone(call, b), packed=False)
        same_bits({n: result[n] for n in together}, {n: values[b : b + 1] for n, values in together.items()})


@pytest.mark.parametrize("heads", [1, 6, 7])
def test_many_short_sequences_are_bitwise_equal_on_1_2_and_3_threads(heads: int) -> None:
    # With 70 sequences a thread takes several heads of one at a time, or single heads if their number is prime.
    lengths = [40 + n % 5 for n in range(70)]
    q, k, v = (torch.randn(sum(lengths), heads, 16) for _ in range(3))
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(fa.attention(q, k, v, layout="TND", q_len=lengths))
    same_bits(results[1:], [results[0]] * 2)

    each = zip(*(t.double().transpose(0, 1).split(lengths, 1) for t in (q, k, v)), strict=True)
    by_torch = torch.cat([scaled_dot_product_attention(*three) for three in each], 1).transpose(0, 1)
    call = api_definition.dense_call(
        bind(api_definition.RECORD, {"q": q, "k": k, "v": v, "layout": "TND", "q_len": lengths})
    )
    compare("out", results[0], Expected(by_torch, expected_of(DenseForward(call))["out"].size))


def test_an_empty_batch_runs() -> None:
    e = Extents(*[np.zeros(0, np.int64)] * 6)
    none = RowView((torch.empty(0),), e.q_len, 1, e.q_len, 1)
    operands = Operands(none, none, none, none, Stats(none, none), sink=torch.zeros(4))
    dsink = torch.full((4,), math.nan)
    cpu.attention_forward(PROBLEM, e, cpu.schedule(PROBLEM, e, "attention_forward"), operands)
    grads = Grads(none, none, none, none, dsink=dsink)
    cpu.attention_backward(PROBLEM, e, cpu.schedule(PROBLEM, e, "attention_backward"), operands, grads)
    assert torch.equal(dsink, torch.zeros(4))
    assert cpu.workspace_bytes(PROBLEM, e, "attention_backward") == 0


@pytest.mark.parametrize("empty_rows", ["zero", "mean"])
def test_attention_with_and_without_lse_returns_same_output(empty_rows: str) -> None:
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 3, size, 40) for size in (150, 110, 110))
    options = dict(layout="BNSD", band=fa.Band.causal("end"), empty_rows=empty_rows, backend="cpu")  # 40 rows are empty
    first, lse = fa.attention(q, k, v, return_lse=True, **options)
    assert lse[..., :40].eq(-math.inf).all() or empty_rows == "mean"
    for _ in range(2):
        same_bits(fa.attention(q, k, v, **options), first)
        out, again = fa.attention(q, k, v, return_lse=True, **options)
        same_bits((out, again), (first, lse))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_or_infinite_value_reaches_only_rows_that_see_the_key(value: float) -> None:
    call = converted(make(Problem(1, 1, 4, 4, has_blocked=True), (6,), (6,)), torch.float32)
    call.q[0].zero_()
    call.v[0].fill_(1.0)[0, 2] = value
    call.blocked[0].zero_()[0, :4, 2] = True
    out = native(call)["out"][0][0]
    assert torch.equal(out[:4], torch.ones(4, 4))
    assert torch.equal(out[4:].nan_to_num(nan=5.0), torch.full((2, 4), value).nan_to_num(nan=5.0))


MEMORY = """
import resource, sys
import numpy as np, torch
from fusion_attention.backends import cpu
from fusion_attention.ir.memory_views import RowView
from fusion_attention.ir.mask import INFINITE
from fusion_attention.ir.problem import Extents, Operands, Problem, Stats

def rows(dim, length):
    zero = np.zeros(1, np.int64)
    return RowView((torch.randn(length, dim),), zero, dim, zero, dim)

def forward(length):
    n = np.array([length])
    e = Extents(n, n, n * 0 - INFINITE, n * 0 + 1, n * 0, n * 0)
    operands = Operands(*(rows(16, length) for _ in range(4)), Stats(rows(1, length), rows(1, length)))
    cpu.attention_forward(problem, e, cpu.schedule(problem, e, "attention_forward"), operands)
    return cpu.workspace_bytes(problem, e, "attention_forward")

torch.set_num_threads(1)
problem = Problem(1, 1, 16, 16, scale=0.25)
forward(600)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
claimed = forward(8192)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024, claimed)
"""


def test_attention_does_not_allocate_the_full_score_matrix() -> None:
    grown, claimed = map(int, python("-c", MEMORY).stdout.split())
    operands = 4 * 8192 * (4 * 16 + 2)
    # All pairs of rows and keys would take 256 MiB. The process's other memory changes by a few MiB.
    assert grown < operands + claimed + (16 << 20)
    assert claimed < 4 << 20


@pytest.mark.parametrize(
    ("dtype", "device", "count"), [("float16", "cpu", 0), ("float64", "cpu", 1), ("int8", "cuda", 2)]
)
def test_reasons_against_name_unsupported_dtype_and_device(dtype: str, device: str, count: int) -> None:
    reasons = cpu.reasons_against(dataclasses.replace(PROBLEM, dtype=dtype), torch.device(device))
    assert len(reasons) == count
    assert all(reason.endswith(".") and (dtype in reason or device in reason) for reason in reasons)


@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30])
def test_mean_of_values_of_empty_row_does_not_depend_on_key_order(size: float) -> None:
    """Threads add in different orders: results must not depend on their number."""
    torch.manual_seed(3)
    keep, values = torch.rand(2, 60, 256) < 0.8, torch.randn(2, 256, 24) * size
    values[0, 7], values[1, 9, 3] = 0.0, torch.inf
    order = torch.randperm(256)
    result, turned = mean_rows._kept_sum(keep, values), mean_rows._kept_sum(keep[:, :, order], values[:, order])
    assert torch.equal(result, turned)
    added = torch.where(keep[..., None], values[:, None], 0.0).double()
    compare_with("sums", result, lambda: added.sum(2))

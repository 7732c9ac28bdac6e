"""What is special to the CPU back end: its memory, its bits, its refusals. What it computes is checked elsewhere."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from support.bits import same_bits
from torch.nn.functional import scaled_dot_product_attention

import fusion_attention as fa
from fusion_attention.backends import cpu
from fusion_attention.testing import compare
from fusion_attention.waist.kv import MatrixView, RowView
from fusion_attention.waist.mask import INFINITE
from fusion_attention.waist.problem import Extents, Grads, Operands, Problem, Stats

LENGTHS = [(37, 37), (280, 300), (0, 4), (1, 600), (5, 0), (270, 3)]
PLAIN = Problem(heads_q=4, heads_kv=2, dim_qk=24, dim_v=16, scale=0.2)
RICH = dataclasses.replace(
    PLAIN, dim_rope=8, dtype="bfloat16", bias="slopes", has_sink=True, dropout="philox", keep_prob=0.8
)
CASES = {
    "plain": PLAIN,
    "rich": RICH,
    "means": dataclasses.replace(PLAIN, empty_rows="mean", dropout="philox", keep_prob=0.5),
}


def extents(lengths: list[tuple[int, int]]) -> Extents:
    """Causal from the first key, with a window that leaves rows far behind the last key nothing to see."""
    q_len, kv_len = np.array(lengths, np.int64).reshape(-1, 2).T
    zero = np.zeros_like(q_len)
    return Extents(q_len, kv_len, zero - 200, zero + 1, zero, zero)


def rows_of(values: list[torch.Tensor], layout: str, dtype: torch.dtype) -> RowView:
    """One [length, heads, dim] tensor per sequence as packed tokens or as padded heads, surrounded by NaN."""
    heads, dim = values[0].shape[1:]
    count, longest = len(values), max(len(value) for value in values)
    if layout == "packed":
        memory = torch.cat([torch.cat(values), torch.full((1, heads, dim), math.nan)]).to(dtype)
        starts = np.cumsum([0] + [len(value) for value in values[:-1]]) * heads * dim
        return RowView((memory,), starts.astype(np.int64), heads * dim, np.full(count, dim, np.int64), dim)
    # An odd offset and a gap behind each row: the memory's alignment must not matter either.
    stride, offset = dim + 3, 5
    size = heads * (longest + 2) * stride
    flat = torch.full((count * size + offset,), math.nan, dtype=dtype)
    address = np.arange(count, dtype=np.int64) * size + offset
    view = RowView((flat,), address, stride, np.full(count, (longest + 2) * stride, np.int64), dim)
    for b, value in enumerate(values):
        view.sequence(b, heads, len(value)).copy_(value.transpose(0, 1))
    return view


def run(problem: Problem, lengths: list[tuple[int, int]], layout: str, first: int = 0) -> list[torch.Tensor]:
    """Every output of forward and backward, sequence by sequence; sequence b's values depend on first + b alone."""
    e = extents(lengths)
    p, dtype = problem, problem.torch_dtype

    def made(salt: int, heads: int, dim: int, axis: int, of: torch.dtype, poison: bool = False) -> RowView:
        values = []
        for b, pair in enumerate(lengths):
            generator = torch.Generator().manual_seed(1000 * salt + first + b)
            value = torch.randn(pair[axis], heads, dim, generator=generator)
            values.append(torch.full_like(value, math.nan) if poison else value)
        return rows_of(values, layout, of)

    def stat() -> RowView:
        return made(0, p.heads_q, 1, 0, torch.float32, True)

    rope = p.dim_rope > 0
    operands = Operands(
        q=made(1, p.heads_q, p.dim_qk, 0, dtype),
        k=made(2, p.heads_kv, p.dim_qk, 1, dtype),
        v=made(3, p.heads_kv, p.dim_v, 1, dtype),
        out=made(0, p.heads_q, p.dim_v, 0, dtype, True),
        stats=Stats(stat(), stat()),
        q_rope=made(4, p.heads_q, p.dim_rope, 0, dtype) if rope else None,
        k_rope=made(5, p.heads_kv, p.dim_rope, 1, dtype) if rope else None,
        slopes=torch.linspace(0.1, 0.4, p.heads_q).repeat(len(e), 1),
        seed=7,
        offset=3,
        sink=torch.linspace(-1, 1, p.heads_q) if p.has_sink else None,
    )
    grads = Grads(
        dout=made(6, p.heads_q, p.dim_v, 0, dtype),
        dq=made(0, p.heads_q, p.dim_qk, 0, dtype, True),
        dk=made(0, p.heads_kv, p.dim_qk, 1, dtype, True),
        dv=made(0, p.heads_kv, p.dim_v, 1, dtype, True),
        dq_rope=made(0, p.heads_q, p.dim_rope, 0, dtype, True) if rope else None,
        dk_rope=made(0, p.heads_kv, p.dim_rope, 1, dtype, True) if rope else None,
    )
    cpu.attention_forward(p, e, cpu.schedule(p, e, "attention_forward"), operands)
    cpu.attention_backward(p, e, cpu.schedule(p, e, "attention_backward"), operands, grads)
    by_row = [operands.out, operands.stats.max, operands.stats.sum, grads.dq, grads.dq_rope]
    views = [(v, p.heads_q, 0) for v in by_row] + [(v, p.heads_kv, 1) for v in (grads.dk, grads.dk_rope, grads.dv)]
    return [
        view.sequence(b, heads, pair[axis]).float()
        for b, pair in enumerate(lengths)
        for view, heads, axis in views
        if view is not None
    ]


@pytest.mark.parametrize("name", CASES)
def test_packed_equals_padded_and_a_second_run_bit_for_bit(name: str) -> None:
    packed = run(CASES[name], LENGTHS, "packed")
    assert not any(value.isnan().any() for value in packed)
    same_bits(packed, run(CASES[name], LENGTHS, "padded"))
    same_bits(packed, run(CASES[name], LENGTHS, "packed"))


def test_neighbours_do_not_matter() -> None:
    # Without drawn dropout, whose streams count sequences by definition.
    problem = dataclasses.replace(RICH, dropout="none", keep_prob=1.0)
    together = run(problem, LENGTHS, "packed")
    alone = [value for b, pair in enumerate(LENGTHS) for value in run(problem, [pair], "padded", first=b)]
    same_bits(together, alone)


@pytest.mark.parametrize("heads", [1, 6, 7])
def test_threads_share_short_sequences(heads: int) -> None:
    # So many that a thread takes several heads of a sequence at a time, or every single one of a prime number.
    lengths = [40 + n % 5 for n in range(70)]
    q, k, v = (torch.randn(sum(lengths), heads, 16) for _ in range(3))
    usual, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(fa.attention(q, k, v, layout="TND", q_len=lengths))
    finally:
        torch.set_num_threads(usual)
    same_bits(found[1:], [found[0]] * 2)

    def by_torch(dtype: torch.dtype) -> torch.Tensor:
        each = zip(*(t.to(dtype).transpose(0, 1).split(lengths, 1) for t in (q, k, v)), strict=True)
        return torch.cat([scaled_dot_product_attention(*three) for three in each], 1).transpose(0, 1)

    compare("out", found[0], by_torch(torch.float64), by_torch(torch.float32), max(lengths))


def test_threads_do_not_matter() -> None:
    usual = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = run(RICH, LENGTHS, "packed")
        torch.set_num_threads(2)
        same_bits(one, run(RICH, LENGTHS, "packed"))
    finally:
        torch.set_num_threads(usual)


def test_an_empty_batch_runs() -> None:
    e = extents([])
    none = RowView((torch.empty(0),), e.q_len, 1, e.q_len, 1)
    operands = Operands(none, none, none, none, Stats(none, none), sink=torch.zeros(4))
    dsink = torch.full((4,), math.nan)
    cpu.attention_forward(PLAIN, e, cpu.schedule(PLAIN, e, "attention_forward"), operands)
    grads = Grads(none, none, none, none, dsink=dsink)
    cpu.attention_backward(PLAIN, e, cpu.schedule(PLAIN, e, "attention_backward"), operands, grads)
    assert torch.equal(dsink, torch.zeros(4))
    assert cpu.workspace_bytes(PLAIN, e, "attention_backward") == 0


@pytest.mark.parametrize("empty_rows", ["zero", "mean"])
def test_a_call_that_asks_for_no_statistics_gives_the_same_rows(empty_rows: str) -> None:
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
def test_blocked_keys_reach_no_row_and_seen_ones_do(value: float) -> None:
    problem, e = Problem(1, 1, 4, 4, has_blocked=True), extents([(6, 6)])
    e = dataclasses.replace(e, lo=e.lo - INFINITE, hi=e.hi + INFINITE)
    blocked = torch.zeros(6, 6, dtype=torch.bool)
    blocked[:4, 2] = True
    axis = np.zeros(1, np.int64)
    v, zeros = torch.ones(6, 1, 4), torch.zeros(6, 1, 4)
    v[2] = value
    q, k, values, out_rows = (rows_of([t], "packed", torch.float32) for t in (zeros, zeros, v, v))
    stats = Stats(*(rows_of([zeros[..., :1]], "packed", torch.float32) for _ in range(2)))
    operands = Operands(q, k, values, out_rows, stats, blocked=MatrixView(blocked, axis, axis, axis + 6, 1))
    cpu.attention_forward(problem, e, cpu.schedule(problem, e, "attention_forward"), operands)
    out = out_rows.sequence(0, 1, 6)[0]
    assert torch.equal(out[:4], torch.ones(4, 4))
    assert torch.equal(out[4:].nan_to_num(nan=5.0), torch.full((2, 4), value).nan_to_num(nan=5.0))


MEMORY = """
import resource, sys
import numpy as np, torch
from fusion_attention.backends import cpu
from fusion_attention.waist.kv import RowView
from fusion_attention.waist.mask import INFINITE
from fusion_attention.waist.problem import Extents, Operands, Problem, Stats

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


def test_no_matrix_of_all_pairs_is_built() -> None:
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    grown, claimed = map(int, done.stdout.split())
    operands = 4 * 8192 * (4 * 16 + 2)
    # All pairs would take 256 MiB. Memory that the process holds for other reasons moves by a few MiB.
    assert grown < operands + claimed + (16 << 20)
    assert claimed < 4 << 20


@pytest.mark.parametrize(
    ("dtype", "device", "count"), [("float16", "cpu", 0), ("float64", "cpu", 1), ("int8", "cuda", 2)]
)
def test_reasons_against_name_what_does_not_fit(dtype: str, device: str, count: int) -> None:
    reasons = cpu.reasons_against(dataclasses.replace(PLAIN, dtype=dtype), torch.device(device))
    assert len(reasons) == count
    assert all(reason.endswith(".") and (dtype in reason or device in reason) for reason in reasons)

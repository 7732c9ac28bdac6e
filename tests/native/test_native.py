"""The native core's forward: every instruction-set variant that runs here, forced, against the float64 specification.

Calls are drawn at random over every feature, dtype, band and length; the error allowed is measured on the same call
computed plainly in float32, never set by hand.
"""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.bits import same_bits
from support.witness import Call, Results, load, make, read, room, rows

from fusion_attention import _native, attention
from fusion_attention.backends import cpu, golden
from fusion_attention.testing import compare
from fusion_attention.waist import bias, dropout
from fusion_attention.waist.kv import MatrixView, RowView
from fusion_attention.waist.mask import INFINITE, Band, interval_matrix
from fusion_attention.waist.problem import Extents, Operands, Problem, Stats

VARIANTS = _native.cpu_features()["runnable"]
AXES = ["hij", "ij", "hj", "hi", "i", "j", "h", ""]
INPUTS = ("q", "k", "v", "q_rope", "k_rope", "bias")


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


# ------------------------------------------------------------------------------------------------------- random calls


def draw_problem(rng: random.Random) -> Problem:
    heads_kv = rng.choice([1, 2, 3])
    dim = rng.choice([1, 2, 3, 5, 8, 16, 24, 31, 33, 40, 64, 72, 80, 96, 128, 192])
    usual = 1 / math.sqrt(dim)
    drops = rng.choice(["none", "none", "bits", "philox"])
    bias = rng.choice(["none", "none", "matrix", "table", "slopes", "slopes_sqrt"])
    return Problem(
        heads_q=heads_kv * rng.choice([1, 1, 2, 3]),
        heads_kv=heads_kv,
        dim_qk=dim,
        dim_v=rng.choice([dim, dim, 1, 7, 32, 48, 100]),
        dim_rope=rng.choice([0, 0, 0, 1, 3, 16, 64]),
        dtype=rng.choice(["float32", "float16", "bfloat16"]),
        scale=rng.choice([usual, usual, usual, 0.05, -0.3 * usual, 0.0]),
        bias=bias,
        bias_scaled=bias != "none" and rng.random() < 0.4,
        has_blocked=rng.random() < 0.3,
        has_sink=rng.random() < 0.25,
        dropout=drops,
        keep_prob=1.0 if drops == "none" else rng.choice([0.5, 0.8, 0.9]),
        empty_rows=rng.choice(["zero", "zero", "mean", "mean_in_band"]),
    )


def draw_call(seed: int) -> Call:
    """A call of low-precision values."""
    rng = random.Random(seed)
    problem = draw_problem(rng)
    longest = rng.choice([10, 60, 130, 300])
    count = rng.choice([1, 2, 3])

    def length() -> int:
        return rng.choice([0, 1, *(rng.randint(1, longest) for _ in range(4))])

    q_len = tuple(length() for _ in range(count))
    kv_len = tuple(rng.choice([length(), length(), n]) for n in q_len)
    window = Band.window(rng.randint(-20, longest), rng.randint(-20, longest), rng.choice(["start", "end"]))
    causal = Band.causal(rng.choice(["start", "end"]))
    band = rng.choice([None, causal, window, window, Band.prefix_causal([rng.randint(0, n + 3) for n in kv_len])])
    axes = rng.choice(AXES), rng.choice(AXES)
    call = make(problem, q_len, kv_len, band, axes[0], False, axes[1], rng.choice([0, 0, -7, 11]), seed)
    return converted(call, problem.torch_dtype)


def converted(call: Call, dtype: torch.dtype) -> Call:
    tensors = {name: [t.to(dtype) for t in getattr(call, name)] for name in INPUTS}
    slopes, sink = (None if t is None else t.float() for t in (call.slopes, call.sink))
    return replace(call, **tensors, slopes=slopes, sink=sink)


def spoil(call: Call, seed: int) -> None:
    """Some elements of some inputs become inf or NaN."""
    rng = random.Random(seed)
    value = rng.choice([math.nan, math.inf, -math.inf])
    for _ in range(rng.randint(1, 3)):
        tensors = [t for t in getattr(call, rng.choice(["q", "k", "v", "v", "v", "k_rope", "bias"])) if t.numel()]
        if tensors:
            tensor = rng.choice(tensors)
            tensor[tuple(rng.randrange(n) for n in tensor.shape)] = value


def results(call: Call, operands: Operands) -> Results:
    views = {"out": operands.out, "max": operands.stats.max, "sum": operands.stats.sum}
    return {name: [t.clone() for t in read(view, call.q)] for name, view in views.items()}


def native(call: Call, variant: str | None = None, packed: bool = True, threads: int = 2) -> Results:
    dtype = call.problem.torch_dtype
    operands = replace(load(call, dtype), stats=Stats(*(room(call.q, 1, torch.float32) for _ in range(2))))
    if not packed:
        operands = replace(operands, q=rows(call.q, False), k=rows(call.k), v=rows(call.v, False))
    torch.set_num_threads(threads)
    cpu.attention_forward(
        call.problem, call.extents, cpu.schedule(call.problem, call.extents, "attention_forward", variant), operands
    )
    return results(call, operands)


def specified(call: Call) -> Results:
    wide = [t.double() for t in call.q]
    operands = replace(load(call, torch.float64), stats=Stats(room(wide, 1), room(wide, 1)))
    golden.attention_forward(call.problem, call.extents, None, operands)
    return results(call, operands)


def plain_bias(call: Call, b: int, row: slice, key: slice) -> torch.Tensor | float:
    if call.slopes is not None:
        root = call.problem.bias == "slopes_sqrt"
        return bias.from_slopes(call.slopes[b], int(call.extents.shift[b]), row, key, root)
    if not call.bias:
        return 0.0
    stored = call.bias[b].float()
    if call.problem.bias == "matrix":
        return stored
    at, column = bias.table_position(row.stop, row, key)
    return stored.expand(-1, 1024, key.stop)[:, at, column.clamp(max=key.stop - 1)]


def plain_keep(call: Call, b: int, row_count: int, key_count: int) -> torch.Tensor | float:
    p, spans = call.problem, (slice(0, row_count), slice(0, key_count))
    if p.dropout == "philox":
        return dropout.keep_from_philox(call.seed, call.offset, p.keep_prob, b * p.heads_q, p.heads_q, *spans)
    return call.keep[b] if call.keep else 1.0


def plain_scores(call: Call, b: int) -> torch.Tensor:
    """By whole float32 matrices, -inf where nothing is seen."""
    p = call.problem
    own = torch.arange(p.heads_q) // p.group
    scores = call.q[b].float() @ call.k[b].float()[own].mT
    if p.dim_rope:
        scores += call.q_rope[b].float() @ call.k_rope[b].float()[own].mT
    added = plain_bias(call, b, slice(0, scores.shape[1]), slice(0, scores.shape[2]))
    scores = scores * p.scale + (added * p.scale if p.bias_scaled else added)
    edges = (int(getattr(call.extents, name)[b]) for name in ("lo", "hi", "prefix"))
    seen = interval_matrix(scores.shape[1], scores.shape[2], *edges)
    return scores.masked_fill(~seen if not call.blocked else ~seen | call.blocked[b], -math.inf)


def plain(call: Call, b: int, want: Results) -> dict[str, torch.Tensor]:
    """The same by whole float32 matrices, P and out rounded where the core may; empty rows as specified."""
    p = call.problem
    q, k, v = call.q[b], call.k[b], call.v[b].float()[torch.arange(p.heads_q) // p.group]
    scores = plain_scores(call, b)
    if call.sink is not None:
        scores = torch.cat((scores, call.sink[:, None, None].expand(-1, scores.shape[1], 1)), -1)
    peak = scores.amax(-1, keepdim=True)
    weights = (scores - peak).exp()
    total = weights.sum(-1, keepdim=True)
    weights = weights[..., : k.shape[1]] * plain_keep(call, b, q.shape[1], k.shape[1])
    weights = weights.bfloat16().float() if p.dtype == "bfloat16" else weights
    found = {"out": weights @ v / (total * p.keep_prob), "max": peak, "sum": total}
    empty = want["max"][b] == -math.inf
    found = {name: torch.where(empty, want[name][b].float(), value) for name, value in found.items()}
    return found | {"out": found["out"].to(p.torch_dtype)}


def product_size(call: Call) -> float:
    """The largest sum of absolute products behind a score: what cancels in it may be larger than what remains."""
    own = torch.arange(call.problem.heads_q) // call.problem.group
    q, k = call.q, call.k
    if call.problem.dim_rope:
        q, k = (
            [torch.cat(pair, -1) for pair in zip(*both, strict=True)] for both in ((q, call.q_rope), (k, call.k_rope))
        )
    sizes = [x.double().abs() @ y.double().abs()[own].mT for x, y in zip(q, k, strict=True) if x.numel() and y.numel()]
    return abs(call.problem.scale) * max(float(size.max()) for size in sizes)


def judge(call: Call, got: Results, want: Results, at: Any) -> None:
    """Empty rows exactly; all other rows of all sequences together, since one number's error is luck."""
    pieces: dict[str, list[tuple[torch.Tensor, ...]]] = {name: [] for name in got}
    for b in range(len(call.extents)):
        if call.extents.q_len[b] == 0 or call.extents.kv_len[b] == 0:
            for name in got:
                assert torch.equal(got[name][b].double(), want[name][b]), (at, name, b)
            continue
        plainly, empty = plain(call, b, want), want["max"][b] == -math.inf
        assert torch.equal(got["max"][b] == -math.inf, empty), (at, b)
        for name, values in got.items():
            triple = values[b], plainly[name], want[name][b]
            pieces[name].append(tuple(t[~empty.expand_as(t)].view(-1, t.shape[-1]) for t in triple))
            if name != "max" and empty.any():
                nothing, by_plain, right = (t[empty.expand_as(t)] for t in triple)
                compare(f"{at} {name} of empty rows", nothing, right, by_plain, int(call.extents.kv_len[b]))
    for name, triples in pieces.items():
        if triples:
            ours, by_plain, right = (torch.cat(t) for t in zip(*triples, strict=True))
            terms = product_size(call) if name == "max" else 0.0
            compare(f"{at} {name}", ours, right, by_plain, int(call.extents.kv_len.max()), terms)


@pytest.mark.parametrize("seed", range(60))
def test_random_calls_against_the_specification(seed: int) -> None:
    call = draw_call(seed)
    want = specified(call)
    for variant in VARIANTS:
        judge(call, native(call, variant, packed=seed % 2 == 0), want, (variant, call.problem))


@pytest.mark.parametrize("seed", range(1000, 1030))
def test_what_is_not_finite_reaches_exactly_the_rows_that_see_it(seed: int) -> None:
    call = draw_call(seed)
    spoil(call, seed)
    want = specified(call)
    for variant in VARIANTS:
        got = native(call, variant)
        for name in got:
            for b, (value, wanted) in enumerate(zip(got[name], want[name], strict=True)):
                at = variant, name, b, call.problem
                assert torch.equal(value.isnan(), wanted.isnan()), at
                assert torch.equal(value.isinf(), wanted.isinf()), at
                assert torch.equal(value[value.isinf()].double(), wanted[wanted.isinf()]), at


# ----------------------------------------------------------------------------------------------------------- same bits

PLAIN = Problem(4, 2, 40, 24, scale=0.2)
LONG = ((200, 0, 3, 97), (311, 4, 0, 97))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_threads_and_layouts_do_not_change_a_bit(variant: str, dtype: str) -> None:
    problem = Problem(4, 2, 40, 24, 8, dtype, 0.2, "slopes", has_sink=True, dropout="philox", keep_prob=0.7)
    call = converted(make(problem, *LONG, Band.window(150, 3)), problem.torch_dtype)
    want = native(call, variant, packed=True, threads=1)
    for packed, threads in ((False, 1), (True, 2), (False, 2), (True, 5)):
        same_bits(native(call, variant, packed, threads), want)


def unit_views(problem: Problem, q_len: int, kv_len: int) -> tuple[Extents, Operands]:
    """One sequence of zeros in q and k, whose v is the identity: out is the matrix of probabilities."""

    def view(values: torch.Tensor) -> RowView:  # [heads, length, dim]
        zero = np.zeros(1, np.int64)
        return RowView((values,), zero, values.shape[2], zero + values.shape[1] * values.shape[2], values.shape[2])

    p, one = problem, np.ones(1, np.int64)
    extents = Extents(one * q_len, one * kv_len, one * -INFINITE, one * INFINITE, one * 0, one * 0)
    q, k = torch.zeros(p.heads_q, q_len, p.dim_qk), torch.zeros(p.heads_kv, kv_len, p.dim_qk)
    v = torch.eye(kv_len).expand(p.heads_kv, -1, -1).contiguous()
    stats = Stats(*(view(torch.empty(p.heads_q, q_len, 1)) for _ in range(2)))
    out = view(torch.empty(p.heads_q, q_len, p.dim_v))
    return extents, Operands(view(q), view(k), view(v), out, stats)


@pytest.mark.parametrize("keep_prob", [0.5, 0.999, 1e-6, 0.999999])
@pytest.mark.parametrize("variant", VARIANTS)
def test_drawn_bits_are_the_specified_ones(variant: str, keep_prob: float) -> None:
    problem = Problem(3, 1, 4, 300, dropout="philox", keep_prob=keep_prob)
    extents, operands = unit_views(problem, 30, 300)
    operands = replace(operands, seed=-5, offset=2**32 + 77)
    cpu.attention_forward(problem, extents, cpu.schedule(problem, extents, "attention_forward", variant), operands)
    got = operands.out.sequence(0, 3, 30) > 0
    want = dropout.keep_from_philox(-5, 2**32 + 77, keep_prob, 0, 3, slice(0, 30), slice(0, 300))
    assert torch.equal(got, want)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_table_rebuilds_earlier_rows(variant: str) -> None:
    call = make(Problem(2, 1, 8, 8, bias="table"), (1500, 1024, 70), (1500, 1024, 70), Band.causal())
    call = converted(call, torch.float32)
    judge(call, native(call, variant), specified(call), variant)


@pytest.mark.parametrize(("dim", "dim_v"), [(768, 768), (513, 17), (1, 768), (192, 128)])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_head_dims_up_to_the_limit(dim: int, dim_v: int, dtype: str) -> None:
    problem = Problem(2, 1, dim, dim_v, dtype=dtype, scale=dim**-0.5)
    call = converted(make(problem, (13,), (70,), Band.causal()), problem.torch_dtype)
    want = specified(call)
    for variant in VARIANTS:
        judge(call, native(call, variant), want, variant)


# ------------------------------------------------------------------------------------------------- memory and threads


def test_calls_from_two_threads_do_not_disturb_each_other() -> None:
    calls = [converted(make(PLAIN, *LONG, seed=seed), torch.float32) for seed in range(2)]
    want = [native(call)["out"] for call in calls]
    with ThreadPoolExecutor(2) as pool:
        for i, got in enumerate(pool.map(lambda i: native(calls[i % 2])["out"], range(40))):
            same_bits(got, want[i % 2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_near_the_largest_float_are_finite(dtype: torch.dtype) -> None:
    q = torch.zeros(1, 1, 1, 8, dtype=dtype)
    q[..., :3] = 2.0**63  # with itself: 3 * 2^126 = 2.6e38
    v = torch.tensor([1.0, 2.0, 6.0], dtype=dtype)[None, :, None, None].expand(1, 3, 1, 8)
    for signs, want in (((1, 0, -1), 1.0), ((1, -1, 1), 3.5), ((-1, -1, -1), 3.0)):
        k = torch.cat([q * sign for sign in signs], dim=1)
        out, lse = attention(q, k, v, scale=1.0, backend="cpu", return_lse=True)
        assert torch.equal(out, torch.full_like(out, want))
        assert lse.item() == (q.float() ** 2).sum().item() * max(signs)


def test_denormals_count_as_zero_inside_only() -> None:
    problem = Problem(1, 1, 16, 16)
    call = converted(make(problem, (40,), (40,)), torch.float32)
    call.v[0].fill_(1e-39)
    native(call)
    assert (torch.full((64,), 1e-39) * 0.5 > 0).all()


def test_workspace_grows_with_length_not_with_its_square() -> None:
    def workspace(length: int) -> int:
        n = np.array([length])
        extents = Extents(n, n, n * 0 - INFINITE, n * 0 + 1, n * 0, n * 0)
        return cpu.workspace_bytes(Problem(1, 1, 64, 64, dtype="bfloat16"), extents, "attention_forward")

    assert workspace(65536) < 60_000_000
    assert workspace(65536) < 2.1 * workspace(32768)


def test_memory_that_is_not_there_is_an_error() -> None:
    n = np.array([1 << 48])
    problem, none = Problem(1, 1, 64, 64), np.zeros(1, np.int64)
    extents = Extents(none + 1, n, none - INFINITE, none + INFINITE, none, none)
    view, one = RowView((torch.zeros(64),), none, 64, none, 64), RowView((torch.zeros(1),), none, 1, none, 1)
    operands = Operands(view, view, view, view, Stats(one, one))
    with pytest.raises(MemoryError):
        cpu.attention_forward(problem, extents, cpu.schedule(problem, extents, "attention_forward"), operands)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_one_openmp_runtime_serves_torch_and_the_core() -> None:
    program = (
        "import torch; from fusion_attention import _native; torch.ones(9).sum();"
        "lines = open('/proc/self/maps').read().split('\\n');"
        "print(len({l.split()[-1] for l in lines if 'gomp' in l or 'iomp' in l or 'libomp' in l}))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "1\n"


# ----------------------------------------------------------------------------------------------------------- bad calls


def bad_calls() -> dict[str, tuple[dict[str, Any], str]]:
    two, strided = np.zeros(2, np.int64), np.zeros(1, np.int32)
    rows_of_two = RowView((torch.zeros(64),), two, 4, two, 4)
    bytes_ = MatrixView(torch.zeros(9, dtype=torch.uint8), *[np.zeros(1, np.int64)] * 3, 1)
    return {
        "too many addresses": ({"q": rows_of_two}, "q has 2 elements, expected 1"),
        "int32 addresses": ({"k": RowView((torch.zeros(64),), strided, 4, strided, 4)}, "k is no one-dimensional"),
        "another dim": ({"k": replace_dim(3)}, "k has rows of another length"),
        "no sink": ({"sink": None}, "sink is missing"),
        "no blocked": ({"blocked": None}, "blocked is missing"),
        "keys apart": ({"blocked": replace(bytes_, stride_key=2)}, "blocked has keys that are not neighbours"),
    }


def replace_dim(dim: int) -> RowView:
    zero = np.zeros(1, np.int64)
    return RowView((torch.zeros(64),), zero, 4, zero, dim)


@pytest.mark.parametrize("name", bad_calls())
def test_sizes_that_disagree_are_an_error(name: str) -> None:
    problem = Problem(1, 1, 4, 300, has_sink=True, has_blocked=True)
    extents, operands = unit_views(problem, 5, 300)
    blocked = MatrixView(torch.zeros(300, dtype=torch.uint8), *[np.zeros(1, np.int64)] * 3, 1)
    operands = replace(operands, sink=torch.zeros(1), blocked=blocked)
    schedule = cpu.schedule(problem, extents, "attention_forward")
    cpu.attention_forward(problem, extents, schedule, operands)
    out = operands.out.sequence(0, 1, 5).clone()
    changes, message = bad_calls()[name]
    with pytest.raises(ValueError, match=message):
        cpu.attention_forward(problem, extents, schedule, replace(operands, **changes))
    assert torch.equal(operands.out.sequence(0, 1, 5), out)


def test_memory_of_another_dtype_is_an_error() -> None:
    problem = Problem(1, 1, 4, 300)
    extents, operands = unit_views(problem, 5, 300)
    zero = np.zeros(1, np.int64)
    wrong = RowView((torch.zeros(64, dtype=torch.float64),), zero, 4, zero, 4)
    plan = cpu.schedule(problem, extents, "attention_forward")
    with pytest.raises(TypeError, match="float64"):
        cpu.attention_forward(problem, extents, plan, replace(operands, q=wrong))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads_q": 3, "heads_kv": 2}, "no multiple"),
        ({"dim_qk": 0}, "head dim"),
    ],
)
def test_problems_that_do_not_fit_are_an_error(change: dict[str, Any], message: str) -> None:
    problem = Problem(2, 2, 4, 4)
    n = np.array([5])
    extents = Extents(n, n, n - INFINITE, n + INFINITE, n * 0, n * 0)
    with pytest.raises(ValueError, match=message):
        cpu.schedule(replace(problem, **change), extents, "attention_forward")


def test_tiles_outside_their_sequence_are_an_error() -> None:
    one, none = np.array([1]), np.array([0])
    problem = (1, 1, 4, 4, 0, 0, 1.0, 0, False, False, False, 0, 1.0, 65536)
    extents = (one * 9, one * 9, none, one, none, none)
    _native.ForwardPlan(problem, extents, (none, none, one * 9, none, one * 9))
    for tiles in (
        (one, none, one * 9, none, one),
        (none, none, one * 10, none, one),
        (none, none, one, none, one * 10),
    ):
        with pytest.raises(ValueError, match="tile"):
            _native.ForwardPlan(problem, extents, tiles)
    with pytest.raises(ValueError, match="does not run here"):
        _native.ForwardPlan(problem, extents, (none, none, one, none, one), "v9")

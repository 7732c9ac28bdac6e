"""The native core's decode: every variant that runs here, forced, over rows, tensor lists and pages, stored as floats
or as integers, against the float64 specification of the same numbers laid out plainly.

Whatever no row may see is poison: unused pages and slots hold NaN, table entries behind a length name no page.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from support.bits import same_bits
from support.witness import Call, Results, load, make, room, rows
from test_native import converted, judge, results, spoil

from fusion_attention import _native
from fusion_attention import plan as planning
from fusion_attention.backends import cpu, golden
from fusion_attention.backends.cpu import decode
from fusion_attention.waist.kv import Dequant, PagedView, RowView
from fusion_attention.waist.mask import Band
from fusion_attention.waist.problem import EXTENT_ROWS, Extents, Operands, Problem, Stats

VARIANTS = _native.cpu_features()["runnable"]
LIMITS = {"int8": (-128, 128), "int4": (-8, 8)}


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


# --------------------------------------------------------------------------------------------------------------- memory


@dataclass
class Stored:
    """Keys or values as they lie in a cache: numbers per sequence, and what they mean."""

    numbers: list[torch.Tensor]  # [heads, tokens, dim]
    scale: list[torch.Tensor] = field(default_factory=list)  # [heads, 1, dim] or [heads, tokens, 1]
    offset: list[torch.Tensor] = field(default_factory=list)

    def meaning(self) -> list[torch.Tensor]:
        if not self.scale:
            return [t.double() for t in self.numbers]
        plus = self.offset or [torch.zeros(()) for _ in self.numbers]
        return [(n.double() + o) * s for n, o, s in zip(self.numbers, plus, self.scale, strict=True)]


def nibbles(t: torch.Tensor) -> torch.Tensor:
    """Two numbers in a byte, the even element in the low half."""
    even = torch.nn.functional.pad(t, (0, t.shape[-1] % 2)).int()
    return (even[..., 0::2] & 15 | (even[..., 1::2] & 15) << 4).to(torch.uint8)


def poison(dtype: torch.dtype, size: int) -> torch.Tensor:
    return torch.full((size,), torch.nan if dtype.is_floating_point else 85, dtype=dtype)


def in_rows(tensors: list[torch.Tensor], dim: int, together: bool) -> RowView:
    """Rows with gaps, in one buffer or in one tensor per sequence."""
    heads, width = tensors[0].shape[0], tensors[0].shape[2]
    step = heads * (width + 4)
    sizes = [t.shape[1] * step + 7 for t in tensors]
    starts = [sum(sizes[:b]) + 8 * b + 5 for b in range(len(tensors))] if together else [5] * len(tensors)
    count = [sum(sizes) + 8 * len(sizes) + 5] if together else [n + 5 for n in sizes]
    keep = tuple(poison(tensors[0].dtype, n) for n in count)
    for b, t in enumerate(tensors):
        shape, strides = (t.shape[1], heads, width), (step, width + 4, 1)
        keep[0 if together else b].as_strided(shape, strides, starts[b]).copy_(t.transpose(0, 1))
    return RowView(keep, np.array(starts), step, np.full(len(tensors), width + 4), dim)


def in_pages(tensors: list[torch.Tensor], dim: int, size: int, rng: random.Random, heads_first: bool) -> PagedView:
    """Pages in random order, among unused ones; the table ends in entries that name no page."""
    heads, width = tensors[0].shape[0], tensors[0].shape[2]
    counts = [-(-t.shape[1] // size) for t in tensors]
    order = list(range(sum(counts) + 3))
    rng.shuffle(order)
    page = heads * size * width
    pool = poison(tensors[0].dtype, len(order) * page).view(len(order), -1)
    table = torch.full((len(tensors), max(counts) + 2), 2**31 - 1, dtype=torch.int32)
    strides = (size * width, width) if heads_first else (width, heads * width)
    for b, t in enumerate(tensors):
        for i in range(counts[b]):
            table[b, i] = order.pop()
            part = t[:, i * size : (i + 1) * size]
            pool[table[b, i]].as_strided((heads, part.shape[1], width), (*strides, 1), int(table[b, i]) * page).copy_(
                part
            )
    return PagedView(pool, table, size, page, strides[1], strides[0], dim)


def lay(tensors: list[torch.Tensor], dim: int, form: str, size: int, seed: int) -> RowView | PagedView:
    if form == "pages":
        return in_pages(tensors, dim, size, random.Random(seed), seed % 2 == 0)
    return in_rows(tensors, dim, form == "rows")


def lay_meaning(stored: Stored, form: str, size: int, seed: int) -> Dequant | None:
    if not stored.scale:
        return None

    def view(tensors: list[torch.Tensor]) -> RowView | PagedView:
        if tensors[0].shape[2] == 1:
            return lay([t.float() for t in tensors], 1, form, size, seed)
        joined = torch.stack([t.float() for t in tensors])
        address, strides = np.arange(len(tensors)) * joined.stride(0), np.full(len(tensors), joined.stride(1))
        return RowView((joined,), address, 0, strides, joined.shape[3])

    return Dequant(view(stored.scale), view(stored.offset) if stored.offset else None)


@dataclass
class Case:
    call: Call  # its problem and numbers as the specification takes them: plain, of the dtype's precision
    problem: Problem
    k: Stored
    v: Stored
    form: str
    seed: int

    def operands(self) -> Operands:
        call, p = self.call, self.problem
        operands = replace(load(call, p.torch_dtype), stats=Stats(*(room(call.q, 1, torch.float32) for _ in range(2))))
        pack = nibbles if p.kv_dtype == "int4" else (lambda t: t)
        sources = (self.k, p.dim_qk, "k"), (self.v, p.dim_v, "v")
        size = p.page_size
        views: dict[str, Any] = {
            name: lay([pack(t) for t in s.numbers], dim, self.form, size, self.seed) for s, dim, name in sources
        }
        if p.shares_kv:
            views["v"] = replace(views["k"], dim=p.dim_v)
        if call.k_rope:
            views["k_rope"] = lay(call.k_rope, p.dim_rope, self.form, size, self.seed + 1)
        views["dequant_k"] = lay_meaning(self.k, self.form, size, self.seed + 2)
        views["dequant_v"] = lay_meaning(self.v, self.form, size, self.seed + 3)
        return replace(operands, **views)


def store(tensors: list[torch.Tensor], kind: str, dequant: str, rng: random.Random) -> Stored:
    """Integers near the tensors, with scales and perhaps offsets; without a kind the tensors themselves."""
    if not kind:
        return Stored(tensors)
    low, high = LIMITS[kind]
    numbers = [(t.double() * high / 3).round().clamp(low, high - 1).to(torch.int8) for t in tensors]
    if dequant == "none":
        return Stored(numbers)
    shapes = [(t.shape[0], 1, t.shape[2]) if dequant == "channel" else (t.shape[0], t.shape[1], 1) for t in tensors]
    scale = [((torch.rand(s) + 0.5) * 3 / high).float() for s in shapes]
    if dequant == "channel":
        scale = scale[:1] * len(scale)
    if rng.random() < 0.5:
        return Stored(numbers, scale)
    offset = [(torch.randn(s) * high / 8).float() for s in shapes]
    return Stored(numbers, scale, offset[:1] * len(offset) if dequant == "channel" else offset)


def draw_problem(rng: random.Random) -> Problem:
    heads_kv = rng.choice([1, 2, 3])
    dim = rng.choice([1, 3, 8, 24, 33, 40, 64, 70, 96, 128, 128, 256])
    kind = rng.choice(["", "", "int8", "int4"])
    usual = 1 / math.sqrt(dim)
    scales = ["channel", "token"] + (["none"] if kind == "int4" else [])
    bias = rng.choice(["none", "none", "matrix", "slopes"])
    shares = rng.random() < 0.15
    return Problem(
        heads_q=heads_kv * rng.choice([1, 2, 3, 4, 7, 8, 16, 20]),
        heads_kv=heads_kv,
        dim_qk=dim,
        dim_v=rng.randint(1, dim) if shares else rng.choice([dim, dim, dim, 7, 48]),
        dim_rope=0 if rng.random() < 0.7 else rng.choice([1, 16, 64]),
        dtype=rng.choice(["float32", "float16", "bfloat16", "bfloat16"]),
        scale=rng.choice([usual, usual, -0.3 * usual, 0.0]) * (0.1 if kind == "int4" else 1),
        bias=bias,
        bias_scaled=bias != "none" and rng.random() < 0.3,
        has_blocked=rng.random() < 0.3,
        has_sink=rng.random() < 0.25,
        empty_rows=rng.choice(["zero", "zero", "mean", "mean_in_band"]),
        shares_kv=shares,
        page_size=rng.choice([0, 16, 128]) if not shares else 16,
        kv_dtype=kind,
        dequant_k=rng.choice(scales) if kind else "none",
        dequant_v=rng.choice(scales) if kind else "none",
    )


def draw_case(seed: int) -> Case:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    p = draw_problem(rng)
    if p.shares_kv:
        p = replace(p, dequant_v=p.dequant_k)
    count = rng.choice([1, 2, 3])
    needs = decode.needed(p)
    p = p if needs else replace(p, dim_rope=0)
    most = 9 if needs else 16 // p.group
    q_len = tuple(rng.choice([0, 1, 1, 1, rng.randint(0, most)]) if most else 0 for _ in range(count))
    kv_len = tuple(rng.choice([0, 1, 16, rng.randint(1, 140), rng.randint(1, 700), 513]) for _ in range(count))
    band = rng.choice([None, None, Band.causal(), Band.window(rng.randint(0, 300), rng.randint(-3, 3))])
    simple = replace(p, page_size=0, kv_dtype="", dequant_k="none", dequant_v="none", shares_kv=False)
    call = make(simple, q_len, kv_len, band, rng.choice(["hij", "hj", "j"]), False, rng.choice(["hij", "j"]), seed=seed)
    call = converted(call, p.torch_dtype)
    k = store(call.k, p.kv_dtype, p.dequant_k, rng)
    v = store(call.v, p.kv_dtype, p.dequant_v, rng)
    if p.shares_kv:
        narrow = [t[..., : p.dim_v] for t in k.scale], [t[..., : p.dim_v] for t in k.offset]
        v = Stored([t[..., : p.dim_v] for t in k.numbers], *narrow)  # the same memory
    form = "pages" if p.page_size else rng.choice(["rows", "list"])
    return Case(replace(call, k=k.meaning(), v=v.meaning()), p, k, v, form, seed)


def native(case: Case, variant: str | None = None, threads: int = 2) -> Results:
    operands, extents = case.operands(), case.call.extents
    schedule = cpu.schedule(case.problem, extents, "attention_forward", variant)
    assert not len(extents) or not extents.q_len.any() or isinstance(schedule, decode.Schedule)
    torch.set_num_threads(threads)
    cpu.attention_forward(case.problem, extents, schedule, operands)
    return results(case.call, operands)


def specified(call: Call) -> Results:
    wide = [t.double() for t in call.q]
    operands = replace(load(call, torch.float64), stats=Stats(room(wide, 1), room(wide, 1)))
    operands = replace(operands, k=rows(call.k, packed=False), v=rows(call.v))
    golden.attention_forward(call.problem, call.extents, None, operands)
    return results(call, operands)


def narrowed(case: Case) -> Call:
    """What a plain program may make of the call, where keys are integers: query rows times their scales in 16 bits.

    The chip too takes two 8-bit digits of each. Everything else stays in float32.
    """
    call, p = case.call, case.problem
    if not p.kv_dtype or p.dtype == "float32":
        return call
    scale = [t.double() if p.dequant_k == "channel" else torch.ones(()) for t in case.k.scale or case.k.numbers]
    q = []
    for t, s in zip(call.q, scale, strict=True):
        own = s.repeat_interleave(p.group, 0) if s.dim() else s
        x = t.double() * own
        step = (x.abs().amax(-1, keepdim=True) / 32639).clamp(min=1e-300) if x.numel() else x
        q.append((x / step).round() * step / own)
    return replace(call, q=q)


@pytest.mark.parametrize("seed", range(80))
def test_random_calls_against_the_specification(seed: int) -> None:
    case = draw_case(seed)
    want = specified(case.call)
    for variant in VARIANTS:
        judge(narrowed(case), native(case, variant), want, (variant, case.problem, case.form))


@pytest.mark.parametrize("seed", range(1000, 1040))
def test_what_is_not_finite_reaches_exactly_the_rows_that_see_it(seed: int) -> None:
    case = draw_case(seed)
    shares = case.problem.shares_kv
    if case.problem.kv_dtype:
        scale = case.v.scale if seed % 2 else case.k.scale
        if scale and scale[0].numel():
            scale[0].view(-1)[seed % scale[0].numel()] = (math.nan, math.inf)[seed // 2 % 2]
    else:
        spoil(replace(case.call, k=case.k.numbers, v=case.v.numbers), seed)
    k, v = case.k.meaning(), case.v.meaning()
    case = replace(case, call=replace(case.call, k=k, v=[t[..., : v[0].shape[2]] for t in k] if shares else v))
    want = specified(case.call)
    for variant in VARIANTS:
        got = native(case, variant)
        for name in got:
            for b, (value, wanted) in enumerate(zip(got[name], want[name], strict=True)):
                at = variant, name, b, case.problem
                assert torch.equal(value.isnan(), wanted.isnan()), at
                assert torch.equal(value.isinf(), wanted.isinf()), at
                assert torch.equal(value[value.isinf()].double(), wanted[wanted.isinf()]), at


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_integers_meet_rows_of_far_sizes(kind: str) -> None:
    form = {"kv_dtype": kind, "dequant_k": "channel", "dequant_v": "channel"}
    problem = Problem(8, 2, 64, 64, dtype="bfloat16", scale=0.02, **form)
    case = plain_case(problem, (1, 1), (200, 129), seed=1)
    for q in case.call.q:
        q[0] *= 1e-30  # a row of tiny numbers
        q[1, :, 5] = 300.0  # one far above the others
        q[2] = 0
    spread = torch.logspace(-6, 1, 64).float()
    for stored in (case.k, case.v):
        stored.scale[:] = [t / t.mean() * spread for t in stored.scale]
        stored.offset[:] = [torch.full_like(t, 1000.0) for t in stored.scale]
    case = replace(case, call=replace(case.call, k=case.k.meaning(), v=case.v.meaning()))
    want = specified(case.call)
    for variant in VARIANTS:
        judge(narrowed(case), native(case, variant), want, variant)


# ------------------------------------------------------------------------------------------------------------ same bits


def plain_case(problem: Problem, q_len: tuple[int, ...], kv_len: tuple[int, ...], seed: int = 0) -> Case:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    simple = replace(problem, page_size=0, kv_dtype="", dequant_k="none", dequant_v="none", out_quant="none")
    call = converted(make(simple, q_len, kv_len, seed=seed), problem.torch_dtype)
    k = store(call.k, problem.kv_dtype, problem.dequant_k, rng)
    v = store(call.v, problem.kv_dtype, problem.dequant_v, rng)
    form = "pages" if problem.page_size else "list"
    return Case(replace(call, k=k.meaning(), v=v.meaning()), problem, k, v, form, seed)


def bits(found: Results) -> list[torch.Tensor]:
    return [t for name in ("out", "max", "sum") for t in found[name]]


BASES = [
    Problem(8, 2, 128, 128, dtype="bfloat16", scale=0.09),
    Problem(8, 2, 96, 64, dtype="float16", scale=0.1, has_sink=True),
    Problem(6, 2, 40, 24, dtype="float32", scale=0.2, has_blocked=True),
    Problem(8, 2, 128, 128, dtype="bfloat16", scale=0.09, kv_dtype="int8", dequant_k="channel", dequant_v="token"),
    Problem(4, 2, 64, 64, dtype="float16", scale=0.02, kv_dtype="int4", dequant_k="token", dequant_v="channel"),
]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("problem", BASES, ids=str)
def test_threads_batch_and_pages_do_not_change_a_bit(variant: str, problem: Problem) -> None:
    q_len, kv_len = (1, 1, 0, 2), (1300, 77, 5, 520)
    case = plain_case(problem, q_len, kv_len)
    want = bits(native(case, variant, threads=1))
    same_bits(bits(native(case, variant, threads=2)), want)
    for size in (16, 128, 512):
        paged = replace(case, problem=replace(problem, page_size=size), form="pages")
        got = bits(native(paged, variant, threads=3))
        same_bits(got, want, f"pages of {size}")
    for b in (0, 3):
        single = {name: [t] for name in ("q", "k", "v", "blocked") if (ts := getattr(case.call, name)) for t in [ts[b]]}
        extents = Extents(*(getattr(case.call.extents, name)[b : b + 1] for name in EXTENT_ROWS))
        stored = (Stored([s.numbers[b]], s.scale[b : b + 1], s.offset[b : b + 1]) for s in (case.k, case.v))
        own = Case(replace(case.call, extents=extents, **single), problem, *stored, "rows", 1)
        same_bits(bits(native(own, variant)), want[b :: len(q_len)])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", ["", "int8"])
def test_heads_that_are_met_together_do_not_touch_each_other(variant: str, kind: str) -> None:
    dequant = "channel" if kind else "none"
    form = {"page_size": 64, "kv_dtype": kind, "dequant_k": dequant, "dequant_v": dequant}
    case = plain_case(Problem(20, 10, 32, 32, dtype="bfloat16", scale=0.2, **form), (1, 2), (4200, 77))
    want = native(case, variant, threads=1)
    judge(narrowed(case), want, specified(case.call), variant)
    (case.v.scale or case.v.numbers)[0][3, 0] = math.inf
    for threads in (1, 2):
        got = native(case, variant, threads=threads)
        for name in got:
            for value, clean in zip(got[name], want[name], strict=True):
                others = [head for head in range(20) if head not in (6, 7)]
                assert torch.equal(value[others], clean[others]), (name, threads)
        assert not got["out"][0][6:8].isfinite().any()


def test_sequences_with_many_rows_go_to_the_dense_kernel_and_the_others_do_not() -> None:
    problem = Problem(4, 2, 64, 64, dtype="bfloat16", scale=0.1, empty_rows="mean")
    call = converted(make(problem, (1, 200, 0, 2), (300, 200, 4, 0), Band.causal()), torch.bfloat16)
    operands = replace(load(call, torch.bfloat16), stats=Stats(*(room(call.q, 1, torch.float32) for _ in range(2))))
    schedule = cpu.schedule(problem, call.extents, "attention_forward")
    assert isinstance(schedule, decode.Schedule)
    assert schedule.own.tolist() == [True, False, True, True]
    cpu.attention_forward(problem, call.extents, schedule, operands)
    judge(call, results(call, operands), specified(call), "mixed")


# ---------------------------------------------------------------------------------------------------------- int8 result


@pytest.mark.parametrize("rounding", ["tensor", "channel"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_an_int8_result_is_rounded_and_saturated(variant: str, rounding: str) -> None:
    problem = Problem(4, 2, 32, 20, dtype="float32", scale=0.2, page_size=16, out_quant=rounding, empty_rows="mean")
    case = plain_case(problem, (1, 1, 2), (40, 0, 700))
    scale = (torch.rand(4, 20) + 0.5) * 200 if rounding == "channel" else torch.full((1, 1), 150.0)
    offset = torch.randn(scale.shape) * 5
    out = RowView((torch.full((400,), 99, dtype=torch.int8),), np.array([0, 80, 160]), 80, np.array([20] * 3), 20)
    operands = replace(case.operands(), out=out, out_scale=scale.expand(4, 20), out_offset=offset.expand(4, 20))
    schedule = cpu.schedule(problem, case.call.extents, "attention_forward", variant)
    cpu.attention_forward(problem, case.call.extents, schedule, operands)
    for b, want in enumerate(specified(case.call)["out"]):
        exact = (want * scale.double()[:, None] + offset.double()[:, None]).clamp(-128, 127)
        got = out.sequence(b, *want.shape[:2]).double()
        # Half a step, and the roundings of a sum over 700 keys, each at most as large as the largest value.
        most = max(float(v.abs().max()) for v in case.call.v if v.numel()) * float(scale.max())
        assert (got - exact).abs().max() <= 0.5 + 700 * 2.0**-24 * most
    assert int(out.keep[0][320:].sum()) == 80 * 99  # nothing behind the rows


@pytest.mark.parametrize(("rounding", "want"), [("tensor", [0, 2, 2, -2, 0, 127]), ("channel", [1, 2, 3, -3, -1, 127])])
def test_halves_round_as_the_problem_says(rounding: str, want: list[int]) -> None:
    problem = Problem(1, 1, 6, 6, dtype="float32", out_quant=rounding)
    value = torch.tensor([0.5, 1.5, 2.5, -2.5, -0.5, 400.0]).view(1, 1, 6)
    call = replace(make(problem, (1,), (1,)), k=[torch.zeros(1, 1, 6)], v=[value])
    call = converted(call, torch.float32)
    out = RowView((torch.zeros(6, dtype=torch.int8),), np.array([0]), 6, np.array([6]), 6)
    stats = Stats(*(room(call.q, 1, torch.float32) for _ in range(2)))
    operands = replace(load(call, torch.float32), out=out, stats=stats, out_scale=torch.ones(1, 6))
    cpu.attention_forward(problem, call.extents, cpu.schedule(problem, call.extents, "attention_forward"), operands)
    assert out.keep[0].tolist() == want


# --------------------------------------------------------------------------------------------------------------- update


@pytest.mark.parametrize("backend", ["cpu", "golden"])
@pytest.mark.parametrize("band", [None, Band.causal(), Band.window(100, 0)], ids=str)
def test_an_updated_plan_computes_what_a_fresh_one_does(band: Band | None, backend: str) -> None:
    problem = Problem(4, 2, 64, 64, dtype="bfloat16", scale=0.1)
    call = converted(make(problem, (1, 2), (900, 640), band), torch.bfloat16)
    device = torch.device("cpu")
    capacity = replace(call.extents, kv_len=call.extents.kv_len)
    plan = planning.plan(problem, capacity, device, backend, updatable=True)
    for lengths in ([900, 640], [513, 3], [0, 640], [1, 600]):
        plan.update(lengths)
        edges = (band or Band.full()).resolve(call.extents.q_len, np.array(lengths))
        fresh = Extents(call.extents.q_len, np.array(lengths), *edges, call.extents.shift)
        assert all(np.array_equal(getattr(plan.extents, n), getattr(fresh, n)) for n in ("kv_len", "lo", "hi"))
        found = []
        for each in (plan, planning.plan(problem, fresh, device, backend)):
            stats = Stats(*(room(call.q, 1, torch.float32) for _ in range(2)))
            operands = replace(load(call, torch.bfloat16), stats=stats)
            each.run(operands)
            found.append(bits(results(call, operands)))
        same_bits(*found, f"{lengths}")


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([901, 1], r"kv_len\[0\]: expected 0 to 900, got 901 \(plan with more capacity\)"),
        ([1, -1], r"kv_len\[1\]: expected 0 to 640, got -1"),
        ([1], r"kv_len: expected 2 lengths"),
    ],
)
def test_an_update_beyond_the_capacity_changes_nothing(lengths: list[int], message: str) -> None:
    problem = Problem(4, 2, 64, 64)
    extents = make(problem, (1, 1), (900, 640)).extents
    plan = planning.plan(problem, extents, torch.device("cpu"), updatable=True)
    with pytest.raises(ValueError, match=message):
        plan.update(lengths)
    assert plan.extents is extents
    with pytest.raises(ValueError, match="updatable=True"):
        planning.plan(problem, extents, torch.device("cpu")).update([1, 1])


# ------------------------------------------------------------------------------------------------------------ bad input


def test_what_the_decode_cannot_compute_is_a_reason() -> None:
    problem = Problem(2, 2, 8, 8, page_size=16, dropout="philox", keep_prob=0.5)
    assert any("dropout" in reason for reason in cpu.reasons_against(problem, torch.device("cpu")))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(k=None), "expected rows at addresses"),
        (dict(dequant_k=None), "scale of k is missing"),
        (dict(out=None), "expected rows at addresses"),
    ],
)
def test_operands_that_do_not_fit_are_refused_before_anything_is_written(change: dict[str, Any], message: str) -> None:
    problem = Problem(2, 1, 8, 8, dtype="bfloat16", page_size=16, kv_dtype="int8")
    problem = replace(problem, dequant_k="channel", dequant_v="channel")
    case = plain_case(problem, (1,), (20,))
    operands = case.operands()
    schedule = cpu.schedule(problem, case.call.extents, "attention_forward")
    with pytest.raises((TypeError, ValueError), match=message):
        cpu.attention_forward(problem, case.call.extents, schedule, replace(operands, **change))
    assert operands.out.sequence(0, 2, 1).isnan().all()

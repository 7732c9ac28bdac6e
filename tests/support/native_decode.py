"""Makes and runs decodes on the native core: keys and values are floats or integers in rows, tensor lists or pages.

Unused memory is poison: unused pages and slots contain NaN, and unused table entries name no page.
"""

import math
import random
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from support.native_dense import converted
from support.oracle import Call, Results, load, make, poison, results, rows

from fusion_attention.backends import cpu
from fusion_attention.backends.cpu import decode
from fusion_attention.ir.mask import Band
from fusion_attention.ir.memory_views import Dequant, PagedView, RowView
from fusion_attention.ir.problem import Operands, Problem

LIMITS = {"int8": (-128, 128), "int4": (-8, 8)}


@dataclass
class Stored:
    """Keys or values in a cache: numbers by sequence, with their scales and offsets."""

    numbers: list[torch.Tensor]  # [heads, tokens, dim]
    scale: list[torch.Tensor] = field(default_factory=list)  # [heads, 1, dim] or [heads, tokens, 1]
    offset: list[torch.Tensor] = field(default_factory=list)

    def meaning(self) -> list[torch.Tensor]:
        if not self.scale:
            return [t.double() for t in self.numbers]
        plus = self.offset or [torch.zeros(()) for _ in self.numbers]
        return [(n.double() + o) * s for n, o, s in zip(self.numbers, plus, self.scale, strict=True)]


def nibbles(t: torch.Tensor) -> torch.Tensor:
    """Packs two numbers into a byte; the even element has the low half."""
    even = torch.nn.functional.pad(t, (0, t.shape[-1] % 2)).int()
    return (even[..., 0::2] & 15 | (even[..., 1::2] & 15) << 4).to(torch.uint8)


def in_pages(tensors: list[torch.Tensor], dim: int, size: int, rng: random.Random, heads_first: bool) -> PagedView:
    """Returns pages in random order among unused ones; the table ends with entries that name no page."""
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
            page_rows = t[:, i * size : (i + 1) * size]
            pool[table[b, i]].as_strided(
                (heads, page_rows.shape[1], width), (*strides, 1), int(table[b, i]) * page
            ).copy_(page_rows)
    return PagedView(pool, table, size, page, strides[1], strides[0], dim)


def prepare(tensors: list[torch.Tensor], dim: int, form: str, size: int, seed: int) -> RowView | PagedView:
    if form == "pages":
        return in_pages(tensors, dim, size, random.Random(seed), seed % 2 == 0)
    return replace(rows(tensors, packed=form == "rows"), dim=dim)


def dequant_of(stored: Stored, form: str, size: int, seed: int) -> Dequant | None:
    if not stored.scale:
        return None

    def view(tensors: list[torch.Tensor]) -> RowView | PagedView:
        if tensors[0].shape[2] == 1:
            return prepare([t.float() for t in tensors], 1, form, size, seed)
        joined = torch.stack([t.float() for t in tensors])
        address, strides = np.arange(len(tensors)) * joined.stride(0), np.full(len(tensors), joined.stride(1))
        return RowView((joined,), address, 0, strides, joined.shape[3])

    return Dequant(view(stored.scale), view(stored.offset) if stored.offset else None)


def pieces_of(view: PagedView, heads: int, fragment: int) -> PagedView:
    """Returns the same rows in pages [heads, pieces, tokens, piece] within poisoned memory."""
    size, width = view.page_size, view.dim
    count = view.pool.numel() // view.stride_page
    numbers = view.pool.view(-1).as_strided(
        (count, heads, size, width), (view.stride_page, view.stride_head, view.stride_token, 1)
    )
    parts = -(-width // fragment)
    pool = poison(view.pool.dtype, count * heads * parts * size * fragment).view(count, heads, parts, size, fragment)
    for d in range(width):
        pool[:, :, d // fragment, :, d % fragment] = numbers[..., d]
    stride_head = parts * size * fragment
    return PagedView(
        pool, view.table, size, heads * stride_head, fragment, stride_head, width, fragment, size * fragment
    )


def alike(call: Call, common: int) -> Call:
    """Returns the call with the same first keys in all sequences."""
    call = replace(call, k=[t.clone() for t in call.k], v=[t.clone() for t in call.v])
    for tensors in (call.k, call.v):
        for t in tensors[1:]:
            t[:, :common] = tensors[0][:, :common]
    return call


@dataclass
class Case:
    call: Call  # the problem without a cache, with dequantised numbers of the dtype's precision
    problem: Problem
    k: Stored
    v: Stored
    form: str
    seed: int

    def operands(self) -> Operands:
        call, p = self.call, self.problem
        operands = load(call, p.torch_dtype, torch.float32)
        pack = nibbles if p.kv_dtype == "int4" else (lambda t: t)
        sources = (self.k, p.dim_qk, "k"), (self.v, p.dim_v, "v")
        size = p.page_size
        views: dict[str, Any] = {
            name: prepare([pack(t) for t in s.numbers], dim, self.form, size, self.seed) for s, dim, name in sources
        }
        if p.shares_kv:
            views["v"] = replace(views["k"], dim=p.dim_v)
        if call.k_rope:
            views["k_rope"] = prepare(call.k_rope, p.dim_rope, self.form, size, self.seed + 1)
        views["dequant_k"] = dequant_of(self.k, self.form, size, self.seed + 2)
        views["dequant_v"] = dequant_of(self.v, self.form, size, self.seed + 3)
        return replace(operands, **views)

    @cached_property
    def remade(self) -> Call:
        """Returns the call with a problem that allows the errors of integer keys.

        A program may round dequantised rows to the dtype, or products of query rows and scales to 16 bits.
        """
        kind = "int8" if self.problem.kv_dtype else ""  # int4 rows are not packed here
        return replace(self.call, problem=replace(self.call.problem, kv_dtype=kind))


def store(tensors: list[torch.Tensor], kind: str, dequant: str, rng: random.Random) -> Stored:
    """Returns the tensors quantised, with scales and perhaps offsets; without a kind, returns them unchanged."""
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
    return stored_case(call, p, ["rows", "list"], rng, seed)


def stored_case(call: Call, p: Problem, forms: list[str], rng: random.Random, seed: int) -> Case:
    """Returns the call with its keys and values in a cache: in pages or, without pages, in one of the forms."""
    call = converted(call, p.torch_dtype)
    k = store(call.k, p.kv_dtype, p.dequant_k, rng)
    v = store(call.v, p.kv_dtype, p.dequant_v, rng)
    if p.shares_kv:
        narrow = [t[..., : p.dim_v] for t in k.scale], [t[..., : p.dim_v] for t in k.offset]
        v = Stored([t[..., : p.dim_v] for t in k.numbers], *narrow)  # the same memory
    form = "pages" if p.page_size else rng.choice(forms)
    return Case(replace(call, k=k.meaning(), v=v.meaning()), p, k, v, form, seed)


def native(case: Case, variant: str | None = None, threads: int = 2) -> Results:
    operands, extents = case.operands(), case.call.extents
    schedule = cpu.schedule(case.problem, extents, "attention_forward", variant)
    some = extents.kv_len[extents.q_len > 0] > 32  # with fewer keys, the dense forward may compute the rows
    assert not some.any() or isinstance(schedule, decode.Schedule)
    torch.set_num_threads(threads)
    cpu.attention_forward(case.problem, extents, schedule, operands)
    return results(case.call, operands)


def plain_case(problem: Problem, q_len: tuple[int, ...], kv_len: tuple[int, ...], seed: int = 0) -> Case:
    torch.manual_seed(seed)
    simple = replace(problem, page_size=0, kv_dtype="", dequant_k="none", dequant_v="none", out_quant="none")
    return stored_case(make(simple, q_len, kv_len, seed=seed), problem, ["list"], random.Random(seed), seed)

"""Makes decode calls over paged and quantised caches and their golden results, for Triton's interpreter and GPUs.

Unused memory contains NaN, and unused table entries point far outside the pool.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fusion_attention.backends import golden
from fusion_attention.ir.mask import INFINITE
from fusion_attention.ir.memory_views import Dequant, PagedView, RowView
from fusion_attention.ir.problem import Extents, Operands, Problem, Stats
from fusion_attention.judging.chi_square_limits import Expected
from fusion_attention.testing import check
from fusion_attention.testing.expected import sizes

UNUSED = 1 << 30
NAMES = ("out", "max", "sum")
DENSE: dict[str, Any] = {"page_size": 0, "dequant_k": "none", "dequant_v": "none"}  # for gathered() operands


@dataclass(frozen=True)
class Cache:
    """The sizes of a call whose q_len rows are the last tokens of kv_len; more: further fields of Problem."""

    kv_len: tuple[int, ...] = (37, 70, 0)
    q_len: int = 1
    heads_q: int = 4
    heads_kv: int = 2
    dim_qk: int = 16
    dim_v: int = 16
    page_size: int = 16
    dtype: str = "float32"
    dequant: str = "none"
    more: dict[str, object] = field(default_factory=dict, hash=False)

    @property
    def id(self) -> str:
        return (
            f"{self.dtype},{self.dequant},D{self.dim_qk}/{self.dim_v},q{self.q_len},page{self.page_size},"
            + ",".join(self.more)
        )

    @property
    def problem(self) -> Problem:
        quantised = {"kv_dtype": "int8", "dequant_k": self.dequant, "dequant_v": self.dequant}
        given = (quantised if self.dequant != "none" else {}) | self.more
        sizes = (self.heads_q, self.heads_kv, self.dim_qk, self.dim_v)
        return Problem(*sizes, dtype=self.dtype, scale=0.2, page_size=self.page_size, **given)  # type: ignore[arg-type]

    def extents(self, kv_len: tuple[int, ...] | None = None) -> Extents:
        """Returns causal visibility in which the last row attends to all keys."""
        keys = np.array(self.kv_len if kv_len is None else kv_len, np.int64)
        zero = np.zeros_like(keys)
        return Extents(zero + self.q_len, keys, zero - INFINITE, keys - self.q_len + 1, zero, keys - self.q_len)


CACHES = [
    Cache(),
    Cache(q_len=3, heads_q=8, more={"dim_rope": 16, "has_sink": True}),
    Cache(q_len=5, heads_q=16, dim_qk=24, dim_v=40, more={"bias": "slopes"}),
    Cache(dtype="float16", dim_qk=96, dim_v=80, page_size=64),
    Cache(dtype="bfloat16"),
    Cache(dequant="channel"),
    Cache(dequant="token", dtype="float16", q_len=2),
    Cache(q_len=3, heads_q=8, more={"softcap": 1.5, "bias": "slopes", "has_sink": True}),
    Cache(dequant="token", dtype="float16", q_len=2, more={"softcap": 4.0}),
    # Pages of two tiles of keys, and tiles of two pages.
    Cache(page_size=32),
    Cache(page_size=8, dequant="token", dtype="bfloat16"),
    # Integers loaded in pairs, with scales of channels and of tokens; the number of columns is no power of two.
    Cache(dequant="channel", dtype="bfloat16", dim_v=40),
    Cache(dequant="token", dtype="float16", dim_v=32, q_len=2),
    # One sequence is longer than all others together: only its tiles are split.
    Cache(kv_len=(3, 400, 0, 20), dtype="bfloat16", dim_v=80),
]


def rows(tensor: torch.Tensor) -> RowView:
    """Returns a view of [sequences, tokens, heads, dim]."""
    count, _, _, dim = tensor.shape
    strides = np.full(count, tensor.stride(2), np.int64)
    return RowView((tensor,), np.arange(count, dtype=np.int64) * tensor.stride(0), tensor.stride(1), strides, dim)


def operands_on(cache: Cache, device: str, capacity: int = 0) -> Operands:
    """Returns operands with random values; capacity: minimum number of tokens for which every sequence has pages."""
    p, count = cache.problem, len(cache.kv_len)
    dtype, size = p.torch_dtype, cache.page_size
    generator = torch.Generator().manual_seed(7)
    capacities = [max(n, capacity) for n in cache.kv_len]
    width = max(-(-n // size) for n in capacities)
    pages = count * width + 3
    table = torch.randperm(pages, generator=generator)[: count * width].view(count, width).int()
    for b, n in enumerate(capacities):
        table[b, -(-n // size) :] = UNUSED
    named = table.to(device)

    def view(pool: torch.Tensor) -> PagedView:
        pool = pool.to(device)
        return PagedView(pool, named, size, *(pool.stride(n) for n in (0, 1, 2)), pool.shape[-1])

    def pool(dim: int, of: torch.dtype) -> PagedView:
        shape = (pages, size, cache.heads_kv, dim)
        if of == torch.int8:
            return view(torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8))
        values = torch.full(shape, math.nan, dtype=of)
        for b, n in enumerate(capacities):
            for j in range(n):
                values[table[b, j // size], j % size] = torch.randn(cache.heads_kv, dim, generator=generator).to(of)
        return view(values)

    def dequant(dim: int) -> Dequant | None:
        if cache.dequant == "none":
            return None
        if cache.dequant == "token":
            return Dequant(pool(1, torch.float32))
        scale, offset = (torch.rand(cache.heads_kv, dim, generator=generator).to(device) * 0.02 for _ in range(2))
        zero, step = np.zeros(count, np.int64), np.full(count, dim, np.int64)
        return Dequant(RowView((scale,), zero, 0, step, dim), RowView((offset,), zero, 0, step, dim))

    def query(dim: int, of: torch.dtype, poison: bool = False) -> RowView:
        values = torch.randn(count, cache.q_len, cache.heads_q, dim, generator=generator).to(of)
        return rows(torch.full_like(values, math.nan).to(device) if poison else values.to(device))

    stored = torch.int8 if cache.dequant != "none" else dtype
    return Operands(
        q=query(cache.dim_qk, dtype),
        k=pool(cache.dim_qk, stored),
        v=pool(cache.dim_v, stored),
        out=query(cache.dim_v, dtype, poison=True),
        stats=Stats(query(1, torch.float32, poison=True), query(1, torch.float32, poison=True)),
        q_rope=query(p.dim_rope, dtype) if p.dim_rope else None,
        k_rope=pool(p.dim_rope, dtype) if p.dim_rope else None,
        slopes=torch.rand(count, cache.heads_q, generator=generator).to(device),
        sink=torch.randn(cache.heads_q, generator=generator).to(device),
        dequant_k=dequant(cache.dim_qk),
        dequant_v=dequant(cache.dim_v),
    )


def gathered(cache: Cache, o: Operands, e: Extents) -> Operands:
    """Returns the operands on the CPU with contiguous keys and values, dequantised in float64."""
    count = len(cache.kv_len)
    longest = max(1, int(e.kv_len.max()))

    def dense(view: RowView | PagedView | None, dequant: Dequant | None) -> RowView | None:
        if view is None:
            return None
        values = torch.zeros(count, longest, cache.heads_kv, view.dim, dtype=torch.float64)
        for b, n in enumerate(e.kv_len.tolist()):
            if n:
                numbers64 = view.sequence(b, cache.heads_kv, n).double().cpu()
                if dequant is not None:
                    scale, offset = (
                        0.0 if v is None else v.sequence(b, cache.heads_kv, n).double().cpu()
                        for v in (dequant.scale, dequant.offset)
                    )
                    numbers64 = (numbers64 + offset) * scale
                values[b, :n] = numbers64.transpose(0, 1)
        return rows(values)

    def query(view: RowView | None) -> RowView | None:
        return None if view is None else rows(view.keep[0].double().cpu())

    shape = (count, cache.q_len, cache.heads_q)
    out, top, total = (rows(torch.zeros(*shape, dim, dtype=torch.float64)) for dim in (cache.dim_v, 1, 1))
    return Operands(
        query(o.q), dense(o.k, o.dequant_k), dense(o.v, o.dequant_v), out, Stats(top, total), query(o.q_rope),
        dense(o.k_rope, None), slopes=o.slopes.double().cpu(), sink=o.sink.double().cpu(),
    )  # type: ignore[arg-type, union-attr]  # fmt: skip


def answer(cache: Cache, o: Operands, e: Extents) -> list[torch.Tensor]:
    """Returns (out, max, sum) of the golden model."""
    operands = gathered(cache, o, e)
    golden.attention_forward(
        dataclasses.replace(cache.problem, **DENSE, kv_dtype="", dtype="float64"), e, None, operands
    )
    return results(operands)


def expected(cache: Cache, o: Operands, e: Extents) -> dict[str, Expected]:
    """Returns out, max and sum of the golden model with the error bounds of a correct kernel."""
    size = sizes(dataclasses.replace(cache.problem, **DENSE), e, gathered(cache, o, e))
    return {n: Expected(value, size[n]) for n, value in zip(NAMES, answer(cache, o, e), strict=True)}


def results(o: Operands) -> list[torch.Tensor]:
    """Returns the computed (out, max, sum) on the CPU."""
    return [view.keep[0].cpu() for view in (o.out, o.stats.max, o.stats.sum)]


def judge(cache: Cache, o: Operands, e: Extents) -> None:
    """Asserts that out, max and sum equal the golden results except for rounding."""
    check(cache.id, dict(zip(NAMES, results(o), strict=True)), expected(cache, o, e))

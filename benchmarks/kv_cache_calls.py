"""Defines calls of attention over a cache: the sizes, the storage of the cache, and a plan with random tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from fusion_attention import plan as planning
from fusion_attention.ir.mask import Band
from fusion_attention.ir.memory_views import Dequant, PagedView, RowView
from fusion_attention.ir.problem import Extents, Operands, Problem, Stats
from fusion_attention.memory import zeros

BYTES = {"float32": 4, "int8": 1, "int4": 0.5}  # of an element of a cache; 2 for others


@dataclass(frozen=True)
class Case:
    """A call: query rows and keys of each sequence; the rows are its last tokens."""

    q_len: tuple[int, ...]
    kv_len: tuple[int, ...]
    heads_kv: int = 8
    # heads, heads_kv, dim, dim_v: numbers of query and key heads, elements of a key and of a value (0: as of a key).
    heads: int = 32
    page: int = 128  # tokens of a page [heads, page, dim], in random order; 0: rows [sequence, head, token]
    # Type of the cache: "bfloat16", "float16", "float32", or "int8" or "int4" with a scale for each channel.
    kind: str = "bfloat16"
    dim: int = 128
    dim_v: int = 0
    common: int = 0  # number of keys in the prefix that all sequences share
    merged: bool = True  # store the prefix once in separate memory; otherwise in pages that all tables contain
    rope: int = 0  # number of rotary elements
    shares: bool = False  # the values are the first elements of keys
    # The cache is in memory of torch.empty; otherwise in huge pages of memory, like PagedKVCache.
    small_pages: bool = False
    # All table entries are the same page, which stays in the CPU's cache, so that only arithmetic takes time.
    cached: bool = False

    @property
    def stored(self) -> bool:
        """True if the cache contains integers."""
        return self.kind.startswith("int")

    @property
    def bytes(self) -> float:
        """Returns the bytes of the cache that a call must read."""
        columns = self.dim + (0 if self.shares else self.dim_v or self.dim)
        return sum(self.kv_len) * self.heads_kv * columns * BYTES.get(self.kind, 2)

    @property
    def problem(self) -> Problem:
        """Returns the call's description for the planner."""
        kind, dequant = (self.kind, "channel") if self.stored else ("", "none")
        return Problem(
            self.heads, self.heads_kv, self.dim, self.dim_v or self.dim, self.rope,
            dtype="bfloat16" if self.stored else self.kind, scale=self.dim**-0.5, shares_kv=self.shares,
            page_size=self.page, common_keys=self.common if self.merged else 0, kv_dtype=kind, dequant_k=dequant,
            dequant_v=dequant,
        )  # fmt: skip

    @cached_property
    def extents(self) -> Extents:
        """Returns causal visibility in which the last row attends to all keys."""
        lengths = np.array(self.q_len, np.int64), np.array(self.kv_len, np.int64)
        band = Band.causal("end") if max(self.q_len) > 1 else Band.full()
        return Extents(*lengths, *band.resolve(*lengths), np.zeros_like(lengths[0]))

    def plan(self, backend: str = "auto", op_kind: str = "attention_forward") -> planning.Plan:
        """Returns the call's plan on the CPU."""
        return planning.plan(self.problem, self.extents, torch.device("cpu"), backend, op_kind)

    @property
    def flops(self) -> int:
        """Returns the floating-point operations over visible pairs."""
        return self.problem.flops(self.extents)


def rows(tensor: torch.Tensor, dim: int) -> RowView:
    """Returns [batch, heads, tokens, dim] in contiguous memory."""
    count = tensor.shape[0]
    strides = np.full(count, tensor.stride(1))
    return RowView((tensor,), np.arange(count) * tensor.stride(0), tensor.stride(2), strides, dim)


def numbers(c: Case, *shape: int) -> torch.Tensor:
    """Returns random elements of a cache; the last axis counts pairs of int4 numbers."""
    dtype = torch.int8 if c.stored else getattr(torch, c.kind)
    memory = torch.empty(shape, dtype=dtype) if c.small_pages else zeros(shape, dtype)
    memory.copy_(torch.randint(-128, 128, shape, dtype=torch.int8) if c.stored else torch.randn(shape))
    return memory.view(torch.uint8) if c.kind == "int4" else memory


def stored(c: Case, dim: int, table: torch.Tensor) -> RowView | PagedView:
    """Returns a cache of rows of `dim` elements: in pages that the table lists, or without pages."""
    width, suffix_len = dim // 2 if c.kind == "int4" else dim, max(c.kv_len) - (c.common if c.merged else 0)
    if not c.page:
        return rows(numbers(c, len(c.kv_len), c.heads_kv, suffix_len, width), dim)
    pool = numbers(c, int(table.max()) + 1, c.heads_kv, c.page, width)
    return PagedView(pool, table, c.page, pool.stride(0), pool.stride(2), pool.stride(1), dim)


def table_of(c: Case) -> torch.Tensor:
    """Returns the pages of each sequence; pages of the shared prefix come first."""
    count, shared = len(c.kv_len), 0 if c.merged else c.common // max(c.page, 1)
    suffix_pages = -(-(max(c.kv_len) - c.common) // max(c.page, 1))
    order = torch.randperm(shared + count * suffix_pages).int()
    table = torch.cat([order[:shared].expand(count, -1), order[shared:].view(count, suffix_pages)], 1)
    return table.contiguous()


def operands_of(c: Case) -> Operands:
    """Makes the operands of a call, with random tensors."""
    torch.manual_seed(0)
    p, count, tokens, table = c.problem, len(c.q_len), max(c.q_len), table_of(c)
    queries = [rows(torch.randn(count, c.heads, tokens, d).to(p.torch_dtype), d) for d in (c.dim, c.rope) if d]
    k = stored(c, c.dim, table)
    v = replace(k, dim=p.dim_v) if c.shares else stored(c, p.dim_v, table)
    if c.cached:
        table.zero_()
    out = torch.empty(count, c.heads, tokens, p.dim_v, dtype=p.torch_dtype)
    stats = Stats(*(rows(torch.empty(count, c.heads, tokens, 1), 1) for _ in range(2)))
    operands = Operands(queries[0], k, v, rows(out, p.dim_v), stats)
    if c.rope:
        operands.q_rope, operands.k_rope = queries[1], stored(c, c.rope, table)
    if c.stored:
        operands.dequant_k, operands.dequant_v = (scales(c, dim) for dim in (c.dim, p.dim_v))
    if p.common_keys:
        prefix = (rows(numbers(c, 1, c.heads_kv, c.common, c.dim), c.dim) for _ in range(2))
        operands.k_common, operands.v_common = prefix
    return operands


def scales(c: Case, dim: int) -> Dequant:
    """Returns a scale for each channel of a cache of integers."""
    count = len(c.kv_len)
    scale = torch.full((c.heads_kv * dim,), 0.02)
    return Dequant(RowView((scale,), np.zeros(count, np.int64), 0, np.full(count, dim), dim))


def call(c: Case) -> Callable[[], None]:
    """Returns a function that computes a call."""
    plan, operands = c.plan(), operands_of(c)
    return lambda: plan.run(operands)

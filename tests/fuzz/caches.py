"""Random caches of decode: one tensor, a list, shuffled pages or a PagedKVCache; floats, int8 or int4 with scales."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import fusion_attention as fa

from .core import Value
from .formulas import Rows, U
from .storage import Rng, Tensor, garbage, maybe, normal, pick, place

STEPS = 32639.0  # a query row beside stored integers has this many steps to its largest element
WEIGHTS = 32767.0  # and a row's weights


@dataclass
class Side:
    """Keys or values: per sequence the stored numbers [slots, N2, d], and scale and offset of the same shape."""

    stored: list[Tensor]
    scale: list[Tensor] = field(default_factory=list)
    offset: list[Tensor] = field(default_factory=list)
    kind: str = ""
    arguments: dict[str, Tensor] = field(default_factory=dict)
    by_token: bool = False

    def real(self, b: int, first: int, stop: int, group: int) -> Tensor:
        """Returns dequantised slots [N, K, d]."""
        full = self.stored[b]
        if self.kind:
            full = (full + self.offset[b]) * self.scale[b]
        return full[first:stop].transpose(0, 1).repeat_interleave(group, 0)

    def rows_of(self, name: str, b: int, first: int, stop: int, group: int) -> Tensor:
        return getattr(self, name)[b][first:stop].transpose(0, 1).repeat_interleave(group, 0)


@dataclass
class Cache:
    """A random cache: number of slots per sequence, keys, and values (None: the first dim_v elements of the keys)."""

    rng: Rng
    form: str
    layout: str
    stored: str
    dtype: torch.dtype
    slots: list[int]
    heads: int
    dim: int
    dim_v: int
    keys: Side
    values: Side | None
    page: int = 0
    table: Tensor | None = None
    pages: int = 0

    def place_dense(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Any:
        """Stores sequences [slots, N2, ..] in the form of the cache."""
        swap = (lambda t: t.transpose(1, 2)) if self.layout == "BNSD" else (lambda t: t)
        if self.form == "list":
            return [place(self.rng, swap(rows[None].to(dtype))) for rows in parts]
        if self.form == "stacked":
            return place(self.rng, swap(torch.stack(list(parts)).to(dtype)))
        tail = tuple(parts[0].shape[1:])
        pool = torch.full((self.pages, self.page, *tail), garbage(self.rng, dtype), dtype=dtype)
        assert self.table is not None
        for b, rows in enumerate(parts):
            for token in range(len(rows)):
                pool[self.table[b, token // self.page], token % self.page] = rows[token].to(dtype)
        return place(self.rng, swap(pool))

    def pack(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Packs two 4-bit numbers into a byte; the even element has the low half."""
        packed = []
        for rows in parts:
            nibbles = torch.nn.functional.pad(rows, (0, rows.shape[-1] % 2)).to(torch.int64) & 15
            packed.append(nibbles[..., ::2] | nibbles[..., 1::2] << 4)
        return packed

    def tensor(self, side: Side) -> Any:
        if self.stored == "int4":
            return self.place_dense(self.pack(side.stored), torch.uint8)
        return self.place_dense(side.stored, torch.int8 if self.stored else self.dtype)


def draw_side(rng: Rng, slots: Sequence[int], heads: int, dim: int, stored: str, dtype: torch.dtype) -> Side:
    if not stored:
        return Side([normal(rng, n, heads, dim).to(dtype).double() for n in slots])
    low, high = (-128, 128) if stored == "int8" else (-8, 8)
    parts = [torch.from_numpy(rng.integers(low, high, (n, heads, dim)).astype(np.float64)) for n in slots]
    return Side(parts, kind=stored)


def draw_pages(cache: Cache, least: int = 0) -> None:
    """Draws a shuffled page table with garbage after the last page of a sequence; least: minimum number of columns."""
    rng = cache.rng
    needed = [-(-n // cache.page) for n in cache.slots]
    cache.pages = sum(needed) + int(rng.integers(0, 4)) + 1
    numbers = rng.permutation(cache.pages)
    width = max(max(needed) + int(rng.integers(0, 3)), least)
    table = np.full((len(needed), width), int(rng.choice([-1, 2**31 - 1, -(2**31), cache.pages])), np.int32)
    first = 0
    for b, count in enumerate(needed):
        table[b, :count] = numbers[first : first + count]
        first += count
    cache.table = torch.from_numpy(table)


def integer_blur(cache: Cache, q: Tensor, scale: float, b: int, span: slice, group: int) -> Tensor | float:
    """Returns the error in scores [N, R, K] of rounding query rows to 16 bits and of adding offsets separately."""
    side = cache.keys
    if not side.kind:
        return 0.0
    full, factor, offset = (side.rows_of(n, b, span.start, span.stop, group) for n in ("stored", "scale", "offset"))
    once = (q[:, :, None] * (factor[:, None, :1] if not side.by_token and factor.shape[1] else 1.0)).abs()
    top = once.amax((-1, -2)) if once.shape[2] and once.shape[3] else q.abs().amax(-1)
    each = (factor.abs()[..., :1] if side.by_token else torch.ones_like(factor[..., :1])) * full.abs()
    step = (top / STEPS)[..., None] * each.sum(-1)[:, None]
    size = (full.abs() + offset.abs()) * factor.abs()
    return abs(scale) * (step + (q.shape[-1] + 8) * U * (q.abs() @ size.mT))


def integer_spill(cache: Cache, rows: Rows, b: int, span: slice, group: int) -> Tensor | float:
    """Returns the error in out [N, R, Dv] of rounding weights to 16 bits and of adding offsets separately."""
    side = cache.keys if cache.values is None else cache.values
    if not side.kind or span.stop <= span.start:
        return 0.0
    parts = [
        side.rows_of(n, b, span.start, span.stop, group)[..., : cache.dim_v] for n in ("stored", "scale", "offset")
    ]
    full, factor, offset = (torch.nan_to_num(p, 0, 0, 0) for p in parts)
    weights = torch.where(rows.visible | rows.mean[..., None], rows.weights, 0.0)
    if side.by_token:
        top = (weights * factor.abs()[:, None, :, 0]).amax(-1, keepdim=True)
        coarse = top / WEIGHTS * full.abs().sum(1, keepdim=True)
    else:
        top = weights.amax(-1, keepdim=True)
        coarse = top / WEIGHTS * (full.abs() * factor.abs()).sum(1, keepdim=True)
    size = (full.abs() + offset.abs()) * factor.abs()
    return coarse + (weights.shape[-1] + 8) * U * (weights @ size)


def own_cache(
    cache: Cache, kv_len: Sequence[int]
) -> tuple[fa.PagedKVCache, list[int], dict[str, tuple[Tensor, Value]]]:
    """Fills a PagedKVCache; returns it, its sequences, and per side (stored numbers, expected numbers)."""
    rng, shares = cache.rng, cache.values is None
    size = int(rng.choice([1, 3, 8, 16]))
    needed = sum(-(-n // size) for n in kv_len) + len(kv_len) + int(rng.integers(0, 9))
    kind: dict[str, Any] = {"dim_v": cache.dim_v, "dtype": cache.dtype, "stored": cache.stored, "shares_kv": shares}
    paged = fa.PagedKVCache(cache.heads, cache.dim, needed + 2, page_size=size, **kind)
    spare = paged.allocate() if maybe(rng, 0.3) else None
    sequences = [paged.allocate() for _ in kv_len]
    sides = [cache.keys] if shares else [cache.keys, cache.values]
    rest = {s: n for s, n in zip(sequences, kv_len, strict=True) if n}
    while rest:
        some = [s for s in rest if maybe(rng, 0.7)] or list(rest)[:1]
        count = int(rng.integers(1, min(rest[s] for s in some) + 1))
        given = []
        for side in sides:
            assert side is not None
            rows = []
            for s in some:
                b = sequences.index(s)
                first = kv_len[b] - rest[s]
                rows.append(side.stored[b][first : first + count])
            given.append(torch.stack(rows).to(cache.dtype))
        paged.append(some, *given)
        rest = {s: n - count * (s in some) for s, n in rest.items() if n > count * (s in some)}
    if spare is not None:
        paged.free(spare)
    order = list(rng.permutation(len(sequences)))
    return paged, [sequences[i] for i in order], _read_back(cache, paged, sequences, kv_len)


def _read_back(
    cache: Cache, paged: fa.PagedKVCache, sequences: list[int], kv_len: Sequence[int]
) -> dict[str, tuple[Tensor, Value]]:
    """Reads the stored numbers of the cache back into the drawn sides; returns (stored, expected) per side."""
    named, result = paged.arguments(sequences), {}
    for name, side, dim in (("k", cache.keys, cache.dim), ("v", cache.values, cache.dim_v)):
        if side is None:
            continue
        pool, scale, given = named[name], named.get(name + "_scale"), []
        for b, n in enumerate(kv_len):
            slot = torch.arange(n)
            page = named["block_table"][b].long()[slot // paged.page_size]
            rows = pool[page, :, slot % paged.page_size]
            if cache.stored == "int4":
                rows = torch.stack((rows & 15, rows >> 4), -1).flatten(-2)[..., :dim].to(torch.int8)
                rows = (rows ^ 8) - 8
            given.append(side.stored[b][:n])
            side.stored[b] = rows.double()
            if cache.stored:
                each = scale[page, :, slot % paged.page_size].double()[..., None].expand(rows.shape)
                side.scale = [*side.scale[:b], each]
                side.offset = [*side.offset[:b], torch.zeros_like(each)]
        side.kind, side.by_token = cache.stored, bool(cache.stored)
        want = torch.cat(given).reshape(-1)
        real = torch.cat([side.real(b, 0, n, 1).transpose(0, 1) for b, n in enumerate(kv_len)]).reshape(-1)
        error = torch.zeros_like(want)
        if cache.stored:
            error = torch.cat([s.reshape(-1) for s in side.scale]) * (0.5 + 300 * U) + 1e-37
        result[name] = (real, Value(want, error))
    return result


def draw_cache(rng: Rng, dtype: torch.dtype, slots: list[int], heads: int, dim: int, form: str) -> Cache:
    stored = str(pick(rng, "", "", "int8", "int4"))
    cache_form = "pages" if form == "own" else form
    layout = str(pick(rng, "BSND", "BNSD"))
    shares = maybe(rng, 0.2)
    dim_v = int(rng.integers(1, dim + 1)) if shares else dim if maybe(rng, 0.4) else int(rng.integers(1, 40))
    if stored == "int4" and not shares and dim_v != dim:
        dim_v = 2 * dim_v
        dim_v = dim if dim_v // 2 == (dim + 1) // 2 else dim_v  # the same bytes mean the same elements
    kind = "" if form == "own" else stored
    keys = draw_side(rng, slots, heads, dim, kind, dtype)
    values = None if shares else draw_side(rng, slots, heads, dim_v, kind, dtype)
    cache = Cache(rng, cache_form, layout, stored, dtype, slots, heads, dim, dim_v, keys, values)
    if cache_form == "pages":
        cache.page = int(rng.choice([1, 2, 5, 8, 16, 32]))
        draw_pages(cache)
    return cache


def draw_scales(cache: Cache, side: Side, dim: int) -> None:
    """Draws a scale, and perhaps an offset, of one of five shapes."""
    rng = cache.rng
    shapes = [(), (1,), (cache.heads,), (cache.heads, dim)]
    kind = int(rng.integers(5 if cache.form != "list" else 4))
    numbers = []
    for _ in range(2):
        shape: Any = shapes[kind] if kind < 4 else None
        parts = [torch.from_numpy(rng.uniform(0.002, 0.03, shape or (n, cache.heads))) for n in cache.slots]
        parts = [parts[0]] * len(parts) if kind < 4 and shape != () else parts
        if shape == ():
            parts = [torch.from_numpy(np.array(rng.uniform(0.002, 0.03)))] * len(cache.slots)
        numbers.append([numbers_of_item.float().double() for numbers_of_item in parts])
    scales, offsets = numbers
    offsets = [(offset * 300 - 4).float().double() for offset in offsets]
    gives = maybe(rng, 0.4)
    side.by_token = kind == 4

    def expanded_to(factors: Tensor, n: int) -> Tensor:
        factors = factors[..., None] if kind in (2, 4) else factors
        return factors.expand(n, cache.heads, dim)

    side.scale = [expanded_to(factors, n) for factors, n in zip(scales, cache.slots, strict=True)]
    side.offset = [expanded_to(o if gives else 0 * o, n) for o, n in zip(offsets, cache.slots, strict=True)]
    for name, parts in (("scale", scales), ("offset", offsets)):
        if name == "scale" or gives:
            packed_rows = cache.place_dense(parts, torch.float32) if kind == 4 else place(rng, parts[0].float())
            side.arguments[name] = packed_rows

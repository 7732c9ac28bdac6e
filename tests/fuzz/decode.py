"""Calls of decode_attention with caches of every kind."""

from dataclasses import dataclass, field
from typing import Any

import torch

import fusion_attention as fa

from .attention import draw_scale
from .caches import Cache, draw_cache, draw_scales, integer_blur, integer_spill, own_cache
from .core import Drawn, Results, Value
from .dense import Matrix, broadcast_shape, draw_bias, draw_blocked, invisible_keys, poison_matrix
from .formulas import Rows, U, rounding
from .storage import (
    DTYPES,
    Rng,
    Tensor,
    dim,
    garbage,
    lengths,
    maybe,
    normal,
    pick,
    place,
    place_dense,
    place_rows,
    size,
)


@dataclass
class Step:
    """Random parameters of a decode call."""

    rng: Rng
    dtype: torch.dtype
    q_len: list[int]
    kv_len: list[int]
    rows: int
    heads: int
    cache: Cache
    scale: float
    q: list[Tensor] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    counts: list[Tensor] = field(default_factory=list)
    bands: list[Tensor] = field(default_factory=list)
    biases: list[Tensor] | None = None
    sink: Tensor | None = None
    out_scale: Tensor | None = None
    out_offset: Tensor | None = None
    means: bool = False
    checks: dict[str, tuple[Tensor, Value]] = field(default_factory=dict)

    @property
    def group(self) -> int:
        return self.heads // self.cache.heads


def draw_bands(s: Step, call: dict[str, Any]) -> None:
    """Draws a band; the default is causal from the lower right corner."""
    rng, kind = s.rng, s.rng.random()
    left, right = (int(rng.integers(0, max([*s.kv_len, 1]) + 2)) for _ in range(2))
    if kind < 0.25:
        call["band"] = fa.Band.window(left, 0 if maybe(rng, 0.7) else right)
        right = call["band"].hi - 1
    elif kind < 0.35:
        call["band"] = fa.Band.full()
    s.bands = []
    for m, n in zip(s.q_len, s.kv_len, strict=True):
        apart = torch.arange(n) - torch.arange(m)[:, None] - (n - m)
        causal = apart <= 0
        window = (apart >= -left) & (apart <= right)
        s.bands.append(window if kind < 0.25 else torch.ones_like(causal) if kind < 0.35 else causal)
    s.counts = [band.expand(s.heads, -1, -1).int() for band in s.bands]


def draw_rows(s: Step, dims: int) -> None:
    s.q = [normal(s.rng, s.heads, m, dims).to(s.dtype).double() for m in s.q_len]


def place_q(s: Step, layout: str, parts: list[Tensor], fill: float) -> Tensor:
    """Stores sequences [N, R, d] in the layout."""
    return place_dense([rows.transpose(0, 1) for rows in parts], layout, s.rows, fill)


def hide(s: Step, may_mean: bool) -> None:
    """Writes NaN to slots that no row sees: after the length and before a window (floats and scales of tokens)."""
    cache, rng = s.cache, s.rng
    for side, keys in ((cache.keys, True), (cache.values, False)):
        if side is None:
            continue
        for b, count in enumerate(s.counts):
            unseen = torch.ones(cache.slots[b], cache.heads, dtype=torch.bool)
            counted = count > 0
            if may_mean and (not keys or cache.values is None):
                counted = torch.ones_like(counted)
            elif s.biases is not None and not keys and maybe(rng, 0.3):
                counted = counted & (s.biases[b] != -torch.inf)
            unseen[span_of(s, b)] = invisible_keys(counted, cache.heads)
            if not side.kind:
                side.stored[b][unseen] = float(garbage(rng, s.dtype))


def span_of(s: Step, b: int) -> slice:
    """Returns the slots that hold the keys of a sequence."""
    return slice(s.first[b], s.first[b] + s.kv_len[b])


def of_item(s: Step, matrix: Matrix, b: int, columns: int) -> Tensor:
    """Returns the part [N, R, K] of a matrix for a sequence and its keys."""
    return matrix.of(b, s.q_len[b], columns, s.heads)[..., span_of(s, b)]


def add_bias(s: Step, matrix: Matrix, shape: tuple[int, int, int, int]) -> None:
    """Adds a random bias to the call, with NaN in elements that no visible score reads."""
    padded = []
    for b, count in enumerate(s.counts):
        full_counts = torch.zeros(s.heads, s.q_len[b], shape[3], dtype=torch.int32)
        full_counts[..., span_of(s, b)] = count
        padded.append(full_counts)
    poison_matrix(s.rng, matrix, padded, shape)
    s.biases = [of_item(s, matrix, b, shape[3]) for b in range(len(s.counts))]


def draw_matrices(s: Step, call: dict[str, Any], columns: int) -> None:
    rng = s.rng
    full = (len(s.q_len), s.heads, s.rows, columns)
    if maybe(rng, 0.3):
        blocked = draw_blocked(rng, full, broadcast_shape(rng, full), (torch.bool, torch.uint8))
        call["blocked"] = blocked.tensor
        s.counts = [torch.where(of_item(s, blocked, b, columns), 0, count) for b, count in enumerate(s.counts)]
    if maybe(rng, 0.3):
        bias = draw_bias(rng, full, broadcast_shape(rng, full), s.dtype)
        add_bias(s, bias, full)
        call["bias"] = bias.tensor


def draw_post(s: Step, call: dict[str, Any], names: tuple[str, str]) -> None:
    """Draws scale and offset of an int8 output in a fifth of the calls."""
    rng = s.rng
    if not maybe(rng, 0.2):
        return
    count = 1 if maybe(rng, 0.5) else s.heads * s.cache.dim_v
    s.out_scale = torch.from_numpy(rng.uniform(5.0, 80.0, count)).float()
    call[names[0]] = place(rng, s.out_scale)
    if maybe(rng, 0.5):
        s.out_offset = torch.from_numpy(rng.uniform(-20.0, 20.0, count)).float()
        call[names[1]] = place(rng, s.out_offset)


def draw(rng: Rng) -> Drawn:
    dtype = DTYPES[int(rng.choice(3, p=[0.5, 0.3, 0.2]))]
    count, rows = int(rng.integers(1, 5)), 1 if maybe(rng, 0.6) else int(rng.integers(1, 21))
    heads_kv, group = int(rng.integers(1, 4)), int(rng.choice([1, 2, 3, 4, 8]))
    form = str(pick(rng, "stacked", "list", "pages", "own"))
    slots = [size(rng) for _ in range(count)] if form != "stacked" else [size(rng)] * count
    cache = draw_cache(rng, dtype, slots, heads_kv, dim(rng), form)
    kv_len = list(slots) if form in ("own",) or maybe(rng, 0.3) else [int(rng.integers(0, n + 1)) for n in slots]
    q_len = [rows] * count if maybe(rng, 0.7) else [int(rng.integers(0, rows + 1)) for _ in range(count)]
    s = Step(rng, dtype, q_len, kv_len, rows, heads_kv * group, cache, cache.dim**-0.5, first=[0] * count)
    call: dict[str, Any] = {"layout": str(pick(rng, "BSND", "BNSD"))}
    if q_len != [rows] * count or maybe(rng, 0.2):
        call["q_len"] = lengths(rng, q_len)
    if maybe(rng, 0.5):
        s.scale = call["scale"] = draw_scale(rng, cache.dim)
    draw_rows(s, cache.dim)
    _draw_stored(s, call, form)
    draw_bands(s, call)
    draw_matrices(s, call, _columns(s, call, form))
    if form != "own":
        hide(s, False)
        call["cache"] = (cache.tensor(cache.keys), None if cache.values is None else cache.tensor(cache.values))
        if cache.values is None:
            call["cache"] = call["cache"][0]
    if maybe(rng, 0.2):
        s.sink = normal(rng, s.heads).float()
        call["sink"] = place(rng, s.sink)
    draw_post(s, call, ("out_scale", "out_offset"))
    call |= {"q": place(rng, place_q(s, call["layout"], s.q, float(garbage(rng, dtype))).to(dtype)), "return_lse": True}
    return Drawn(call, lambda: _run(s, call), lambda _: _expect(s, call["layout"]))


def _draw_stored(s: Step, call: dict[str, Any], form: str) -> None:
    """Passes the cache as tensors, or as a filled PagedKVCache, which reorders the sequences."""
    cache, rng = s.cache, s.rng
    if form == "own":
        paged, sequences, s.checks = own_cache(cache, s.kv_len)
        call["cache"], call["sequences"] = paged, sequences
        living = paged.sequences
        order = [living.index(n) for n in sequences]
        s.kv_len = [s.kv_len[i] for i in order]
        cache.slots = [cache.slots[i] for i in order]
        for side in (cache.keys, cache.values):
            if side is not None:
                side.stored = [side.stored[i] for i in order]
                side.scale, side.offset = (
                    [factors[i] for i in order] if factors else [] for factors in (side.scale, side.offset)
                )
        return
    if cache.stored:
        for name, side, elements in (("k", cache.keys, cache.dim), ("v", cache.values, cache.dim_v)):
            if side is not None:
                draw_scales(cache, side, elements)
                call |= {f"{name}_{what}": tensor for what, tensor in side.arguments.items()}
    if cache.values is None:
        call["dim_v"] = cache.dim_v
    call["cache_layout"] = cache.layout
    if form == "pages" or s.kv_len != cache.slots or maybe(rng, 0.5):
        call["kv_len"] = lengths(rng, s.kv_len)
    if form == "pages":
        assert cache.table is not None
        call["block_table"] = place(rng, cache.table)


def _columns(s: Step, call: dict[str, Any], form: str) -> int:
    if form == "own":
        paged, sequences = call["cache"], call["sequences"]
        return int(paged.block_table(sequences).shape[1]) * paged.page_size
    if form == "pages":
        assert s.cache.table is not None
        return int(s.cache.table.shape[1]) * s.cache.page
    return max(s.cache.slots)


def _run(s: Step, call: dict[str, Any]) -> Results:
    out, lse = fa.decode_attention(**call)
    return {"out": out, "lse": lse} | {"stored " + name: result for name, (result, _) in s.checks.items()}


def attended(s: Step, b: int) -> Rows:
    cache, group = s.cache, s.group
    span = span_of(s, b)
    keys = cache.keys.real(b, span.start, span.stop, group)
    side = cache.keys if cache.values is None else cache.values
    values = side.real(b, span.start, span.stop, group)[..., : cache.dim_v]
    bias = None if s.biases is None else s.biases[b]
    sink = None if s.sink is None else s.sink.double()
    blur = integer_blur(cache, s.q[b], s.scale, b, span, group)
    terms = (s.q[b], keys, values, s.scale, s.counts[b], s.dtype, bias, None, sink)
    rows = Rows(*terms, blur=blur)
    if s.means and bool(rows.empty.any()) and s.kv_len[b]:
        mean = rows.empty & s.bands[b].any(-1)
        rows = Rows(*terms, mean, blur=blur)
    rows.spill = integer_spill(cache, rows, b, span, group)
    return rows


def stored_out(s: Step, layout: str, rows: list[Rows]) -> Value:
    """Returns out in layout and dtype; int8: rounded half to even, or per channel half away from zero, saturated."""
    value = place_q(s, layout, [r.out for r in rows], 0.0)
    error = place_q(s, layout, [r.out_error for r in rows], 0.0)
    if s.out_scale is None:
        return Value(value, torch.where(error > 0, rounding(value, error, s.dtype), 0.0), s.dtype)
    dims = value.shape[-1] if layout != "BSH" else value.shape[-1] // s.heads

    def each(tensor: Tensor | None) -> Tensor:
        if tensor is None:
            return torch.zeros(())
        if tensor.numel() == 1:
            return tensor.double()
        per_channel = tensor.double().view(s.heads, dims)
        return per_channel.reshape(-1) if layout == "BSH" else per_channel[:, None] if layout == "BNSD" else per_channel

    scale, offset = each(s.out_scale), each(s.out_offset)
    value, error = value * scale + offset, error * scale
    error = error + 3 * U * (value.abs() + offset.abs())

    def rounded(x: Tensor) -> Tensor:
        assert s.out_scale is not None
        half = x.round() if s.out_scale.numel() == 1 else torch.copysign((x.abs() + 0.5).floor(), x)
        return half.clamp(-128, 127)

    off = torch.maximum(
        (rounded(value + error) - rounded(value)).abs(), (rounded(value - error) - rounded(value)).abs()
    )
    used = place_q(
        s, layout, [torch.ones_like(r.out) for r in rows], 0.0
    )  # rows behind a length are zeros, not offsets
    return Value(rounded(value) * used, off * used, torch.int8)


def _expect(s: Step, layout: str) -> dict[str, Value]:
    rows = [attended(s, b) for b in range(len(s.q_len))]
    expected = {"out": stored_out(s, layout, rows)}
    lse = place_rows([r.lse for r in rows], False, s.rows, -torch.inf)
    error = place_rows([torch.where(r.lse.isfinite(), r.lse_error, 0.0) for r in rows], False, s.rows)
    expected["lse"] = Value(lse, error + U * lse.abs().nan_to_num(0, 0, 0), torch.float32)
    return expected | {"stored " + name: want for name, (_, want) in s.checks.items()}

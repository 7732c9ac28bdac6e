"""Calls of npu_incre_flash_attention: tensors, lists, pages, left padding, masks, pse_shift, int8 caches and output."""

from typing import Any

import torch

from fusion_attention import npu

from .attention import draw_scale
from .caches import Cache, draw_pages, draw_side
from .core import Drawn
from .decode import Step, add_bias, attended, draw_post, draw_rows, hide, place_q, span_of, stored_out
from .dense import draw_bias, draw_blocked, expanded
from .storage import DTYPES, Rng, dim, garbage, lengths, maybe, pick, place, size

FORMS = {"BSH": "BSND", "BSND": "BSND", "BNSD": "BNSD"}


def _place_cache(s: Step, layout: str, side: Any, dtype: torch.dtype) -> Any:
    """Returns keys or values in the layout; BSH and pages of three axes flatten heads and elements."""
    cache = s.cache
    flat = layout == "BSH" if cache.form != "pages" else cache.layout == "BSND"
    packed_rows = cache.place_dense(side.stored, dtype)
    if not flat:
        return packed_rows
    return (
        [place(s.rng, t.flatten(2)) for t in packed_rows]
        if isinstance(packed_rows, list)
        else place(s.rng, packed_rows.flatten(2))
    )


def _draw_scales(s: Step, call: dict[str, Any]) -> None:
    """Draws antiquant_scale and antiquant_offset: keys at index 0, values at index 1."""
    rng, cache = s.rng, s.cache
    heads, dims = cache.heads, cache.dim
    shape = [(2,), (2, heads, 1, dims), (2, heads, dims), (2, heads * dims)][int(rng.integers(4))]
    dtype = s.dtype if maybe(rng, 0.7) else torch.float32
    scale = torch.from_numpy(rng.uniform(0.002, 0.03, shape)).to(dtype)
    offset = torch.from_numpy(rng.uniform(-5.0, 5.0, shape)).to(dtype)
    gives = maybe(rng, 0.5)
    call["antiquant_scale"] = place(rng, scale)
    if gives:
        call["antiquant_offset"] = place(rng, offset)
    for i, side in enumerate((cache.keys, cache.values)):
        assert side is not None
        for name, tensor in (("scale", scale), ("offset", offset if gives else 0 * offset)):
            one = tensor[i].double()
            per_channel = one.expand(heads, dims) if one.dim() == 0 else one.reshape(heads, dims)
            setattr(side, name, [per_channel.expand(n, heads, dims) for n in cache.slots])


def _draw_lengths(s: Step, call: dict[str, Any], count: int) -> None:
    """Draws lengths (one for all sequences, or one per sequence and unused ones) and left padding."""
    rng, cache = s.rng, s.cache
    most = min(cache.slots)
    if cache.form == "pages" or maybe(rng, 0.7):
        if maybe(rng, 0.2):
            s.kv_len = [int(rng.integers(0, most + 1))] * count
            call["actual_seq_lengths"] = s.kv_len[:1]
        else:
            s.kv_len = [int(rng.integers(0, n + 1)) for n in cache.slots]
            more = [3] * int(rng.integers(0, 3)) if maybe(rng, 0.2) else []
            call["actual_seq_lengths"] = lengths(rng, s.kv_len + more)
    if maybe(rng, 0.2):
        padding = int(rng.integers(-3, most + 4))
        call["kv_padding_size"] = torch.tensor([padding]) if maybe(rng, 0.5) else [padding]
        one = cache.form == "stacked" or (cache.form == "list" and count == 1)  # a list of one is that tensor
        if one and "actual_seq_lengths" in call:
            s.first = [n - max(padding, 0) - k for n, k in zip(cache.slots, s.kv_len, strict=True)]
            s.kv_len = [0 if first < 0 else k for first, k in zip(s.first, s.kv_len, strict=True)]
            s.first = [max(first, 0) for first in s.first]


def _draw_matrices(s: Step, call: dict[str, Any]) -> None:
    rng, count = s.rng, len(s.kv_len)
    least = max(f + n for f, n in zip(s.first, s.kv_len, strict=True))
    columns = max(least, 1) + int(rng.integers(0, 20))
    if maybe(rng, 0.35):
        matrix = draw_blocked(rng, (count, columns), (count, columns), (torch.bool, torch.uint8, torch.int8))
        shape = [(count, columns), (count, 1, columns), (count, 1, 1, columns)][int(rng.integers(3))]
        call["atten_mask"] = matrix.tensor.reshape(shape)
        s.counts = [torch.where(matrix.values[0, 0, b, span_of(s, b)], 0, count) for b, count in enumerate(s.counts)]
    if maybe(rng, 0.35):
        shape = (count if maybe(rng, 0.6) else 1, s.heads, s.rows if maybe(rng, 0.5) else 1, columns)
        bias = draw_bias(rng, shape, shape, s.dtype)
        add_bias(s, bias, (count, s.heads, s.rows, columns))
        call["pse_shift"] = expanded(rng, bias.tensor, bias.tensor.shape)


def draw(rng: Rng) -> Drawn:
    dtype = DTYPES[int(rng.choice(3, p=[0.3, 0.4, 0.3]))]
    count, rows = int(rng.integers(1, 5)), 1 if maybe(rng, 0.8) else int(rng.integers(2, 9))
    heads_kv, group = int(rng.integers(1, 4)), int(rng.choice([1, 2, 3, 4, 8]))
    layout, form = str(pick(rng, *FORMS)), str(pick(rng, "stacked", "list", "pages"))
    slots = [max(size(rng), 1) for _ in range(count)] if form != "stacked" else [max(size(rng), 1)] * count
    dims, stored = dim(rng), "int8" if maybe(rng, 0.4) else ""
    sides = [draw_side(rng, slots, heads_kv, dims, stored, dtype) for _ in range(2)]
    inner = FORMS[layout] if form != "pages" else str(pick(rng, "BSND", "BNSD"))
    cache = Cache(rng, form, inner, stored, dtype, slots, heads_kv, dims, dims, *sides)
    s = Step(rng, dtype, [rows] * count, list(slots), rows, heads_kv * group, cache, 1.0, first=[0] * count, means=True)
    call: dict[str, Any] = {"input_layout": layout, "num_heads": s.heads, "inner_precise": int(rng.integers(2))}
    call["num_key_value_heads"] = 0 if group == 1 and maybe(rng, 0.5) else heads_kv
    s.scale = 1.0 if maybe(rng, 0.2) else draw_scale(rng, dims)
    call["scale_value"] = s.scale
    if form == "pages":
        cache.page = int(rng.choice([1, 2, 5, 8, 16, 32]))
        draw_pages(cache, 1)
        call |= {"block_table": place(rng, cache.table), "block_size": cache.page}
    elif maybe(rng, 0.2):
        call["block_size"] = int(rng.integers(0, 99))
    draw_rows(s, dims)
    _draw_lengths(s, call, count)
    s.bands = []
    for n in s.kv_len:
        apart = torch.arange(n) - torch.arange(rows)[:, None] - (n - rows)
        s.bands.append(apart <= 0 if rows > 1 else torch.ones(1, n, dtype=torch.bool))
    s.counts = [band.expand(s.heads, -1, -1).int() for band in s.bands]
    if stored:
        _draw_scales(s, call)
    _draw_matrices(s, call)
    hide(s, True)
    names = zip(("key", "value"), (cache.keys, cache.values), strict=True)
    call |= {name: _place_cache(s, layout, side, torch.int8 if stored else dtype) for name, side in names}
    draw_post(s, call, ("quant_scale2", "quant_offset2"))
    call["query"] = place(rng, place_q(s, layout, s.q, float(garbage(rng, dtype))).to(dtype))
    return Drawn(
        call,
        lambda: {"out": npu.npu_incre_flash_attention(**call)},
        lambda _: {"out": stored_out(s, layout, [attended(s, b) for b in range(count)])},
    )

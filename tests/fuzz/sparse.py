"""Calls of sparse_attention and torch_npu's sparse functions: any lists, blocks, pages, shared values, gradients."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import fusion_attention as fa
from fusion_attention import npu

from .attention import draw_scale
from .caches import Cache, Side, draw_pages
from .core import Drawn, Results, Value
from .dense import Batch, dsink, fill_batch, gradients, hide_unseen
from .formulas import Rows, Slopes, U
from .storage import DTYPES, Rng, Tensor, dim, leaf, lengths, maybe, normal, pick, place, place_dense, size


def draw_sequences(rng: Rng, most: int = 300) -> Batch:
    """Draws padded or packed sequences of different lengths."""
    layout, dtype = str(pick(rng, "BSND", "TND")), DTYPES[int(rng.choice(3, p=[0.5, 0.3, 0.2]))]
    count = int(rng.integers(1, 4))
    q_len, kv_len = ([size(rng, most) for _ in range(count)] for _ in range(2))
    heads_kv = int(rng.choice([1, 1, 1, 2, 3]))
    group = int(rng.integers(1, 6)) if maybe(rng, 0.9) else 16
    while heads_kv * group * sum(m * n for m, n in zip(q_len, kv_len, strict=True)) > 600_000 and group > 1:
        group -= 1
    tokens = (sum(q_len) + int(rng.integers(0, 4)), sum(kv_len) + int(rng.integers(0, 4)))
    if layout == "BSND":
        tokens = (max(q_len) + int(rng.integers(0, 3)), max(kv_len) + int(rng.integers(0, 3)))
        if maybe(rng, 0.3):
            q_len, kv_len = [tokens[0]] * count, [tokens[1]] * count
    return Batch(rng, dtype, layout, q_len, kv_len, heads_kv * group, heads_kv, dim(rng), dim(rng), tokens=tokens)


def given_lengths(batch: Batch, ends: bool, names: tuple[str, str], pages: bool = False) -> dict[str, object]:
    """Returns the arguments of lengths; ends: packed lengths are cumulative."""
    rng, result = batch.rng, {}
    sides = zip(names, (batch.q_len, batch.kv_len), batch.tokens, (False, pages), strict=True)
    for name, seq_lens, tokens, paged in sides:
        packed = batch.packed and not paged
        if packed or paged or seq_lens != [tokens] * len(seq_lens) or maybe(rng, 0.5):
            values = [int(n) for n in np.cumsum(seq_lens)] if packed and ends else seq_lens
            result[name] = lengths(rng, values)
    return result


def visible(m: int, n: int, causal: bool) -> Tensor:
    """Returns [R]: the number of keys that each row sees."""
    return (torch.arange(m) + n - m + 1).clamp(0, n) if causal else torch.full((m,), n)


def draw_list(rng: Rng, count: int, blocks: int, visible_keys: Tensor) -> Tensor:
    """Draws lists [R, K]: distinct entries, duplicates, -1 between entries, invisible keys, or no entries."""
    rows = len(visible_keys)
    result = np.full((rows, count), -1, np.int64)
    if not blocks:
        return torch.from_numpy(result)
    style = rng.random()
    for row in range(rows):
        highest = int(visible_keys[row]) if style < 0.4 else blocks
        order = rng.permutation(max(highest, 0))[:count] if style < 0.6 else rng.integers(0, blocks, count)
        result[row, : len(order)] = order
    if style > 0.7:
        result[rng.random(result.shape) < 0.15] = -1
    if maybe(rng, 0.3):
        result[rng.random(rows) < 0.3] = -1
    return torch.from_numpy(result)


def read_entries(entries: Tensor, visible_keys: Tensor, block: int) -> Tensor:
    """Returns bool [R, K]: entries that are read: at most ceil(visible keys / block), none after the first -1."""
    slot = torch.arange(entries.shape[1])
    return (slot < -(-visible_keys // block)[:, None]) & (entries >= 0).int().cumprod(-1).bool()


def count_keys(entries: Tensor, visible_keys: Tensor, keys: int, block: int) -> Tensor:
    """Returns [R, keys]: how often a row counts each key; blocks end at the last visible key."""
    read = read_entries(entries, visible_keys, block)
    blocks = torch.zeros(len(visible_keys), -(-keys // block) + 1, dtype=torch.int32)
    blocks.scatter_add_(1, torch.where(read, entries, blocks.shape[1] - 1), read.int())
    each = blocks[:, :-1].repeat_interleave(block, 1)[:, :keys]
    return torch.where(torch.arange(keys) < visible_keys[:, None], each, 0)


@dataclass
class Lists:
    """Lists of every sequence, [heads_kv, R, K], and how often they count each key, [heads_kv, R, keys]."""

    entries: list[Tensor] = field(default_factory=list)
    counts: list[Tensor] = field(default_factory=list)


def draw_lists(batch: Batch, heads: int, block: int, causal: bool) -> Lists:
    rng, result = batch.rng, Lists()
    count = int(rng.integers(1, 12)) if maybe(rng, 0.6) else int(rng.integers(1, 300))
    for m, n in zip(batch.q_len, batch.kv_len, strict=True):
        visible_keys = visible(m, n, causal)
        lists = [draw_list(rng, count, -(-n // block), -(-visible_keys // block)) for _ in range(heads)]
        result.entries.append(torch.stack(lists))
        result.counts.append(torch.stack([count_keys(entries, visible_keys, n, block) for entries in lists]))
    return result


def place_lists(batch: Batch, entries: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Returns lists [B, S1, heads, K] or [T1, heads, K] with garbage in unused rows."""
    wild = int(batch.rng.choice([-7, 0, 10**6]))
    packed_rows = place_dense([rows.transpose(0, 1) for rows in entries], batch.layout, batch.tokens[0], wild)
    return place(batch.rng, packed_rows.to(dtype))


def place_pages(batch: Batch, names: Sequence[str], is_python: bool) -> tuple[dict[str, Tensor], Tensor]:
    """Stores tensors of keys in pages of one table; CANN's functions ignore a table without columns."""
    rng = batch.rng
    parts = [batch.parts[name] for name in names]
    none = Side([])
    cache = Cache(rng, "pages", "BSND", "", batch.dtype, batch.kv_len, batch.heads_kv, 1, 1, none, none)
    cache.page = int(rng.choice([1, 3, 8, 16, 32]))
    draw_pages(cache, 0 if is_python else 1)
    assert cache.table is not None
    return {n: cache.place_dense(rows, batch.dtype) for n, rows in zip(names, parts, strict=True)}, place(
        rng, cache.table
    )


@dataclass
class Plan:
    """Random parameters of a call, besides its tensors."""

    batch: Batch
    call: dict[str, Any]
    interface: str
    lists: Lists
    block: int
    scale: float
    sink: Tensor | None
    shares: bool
    trained: list[str] = field(default_factory=list)


NPU = {"q": "query", "k": "key", "v": "value", "q_rope": "query_rope", "k_rope": "key_rope", "sink": "sinks"}


def draw(rng: Rng) -> Drawn:
    batch = draw_sequences(rng, 130)
    interface = str(pick(rng, "own", "npu", "npu gradient"))
    causal, block = maybe(rng, 0.7), 1 if maybe(rng, 0.5) else int(rng.integers(1, 129 if maybe(rng, 0.3) else 17))
    shares, pages = maybe(rng, 0.3), maybe(rng, 0.2) and interface != "npu gradient"
    if shares:
        batch.dim_v = int(rng.integers(1, batch.dim + 1)) if interface == "own" and maybe(rng, 0.6) else batch.dim
    if maybe(rng, 0.4):
        batch.dim_rope = dim(rng, 64)
    b = batch
    fill_batch(b, not shares)
    lists = draw_lists(b, b.heads_kv, block, causal)
    hide_unseen(b, [counts.repeat_interleave(b.group, 0) for counts in lists.counts], False)
    if shares:
        b.parts["v"] = [rows[..., : b.dim_v] for rows in b.parts["k"]]
    sink = normal(rng, b.heads).float() if maybe(rng, 0.25) and interface != "npu gradient" else None
    scale = draw_scale(rng, b.dim + b.dim_rope)
    p = Plan(b, {}, interface, lists, block, scale, sink, shares)
    _arguments(p, causal, pages)
    given = [name for name in ("q", "k", "v", "q_rope", "k_rope", "sink") if p.call.get(_name(p, name)) is not None]
    if interface == "npu gradient":
        p.trained = given
    elif not pages and maybe(rng, 0.6):
        p.trained = [name for name in given if maybe(rng, 0.7)]
        p.call |= {_name(p, name): leaf(p.call[_name(p, name)]) for name in p.trained}
    b.draw("dy", "q", b.heads, b.dim_v)
    dy = b.tensor("dy", "q") if p.trained else None
    return Drawn({"interface": interface, **p.call, "dy": dy}, lambda: _run(p, dy), lambda got: _expect(p, got))


def _name(p: Plan, short: str) -> str:
    return short if p.interface == "own" else NPU.get(short, short)


def _arguments(p: Plan, causal: bool, pages: bool) -> None:
    b, rng, is_python = p.batch, p.batch.rng, p.interface == "own"
    names = ("q_len", "kv_len") if is_python else ("actual_seq_lengths_query", "actual_seq_lengths_kv")
    p.call |= given_lengths(b, not is_python, names, pages)
    p.call["indices" if is_python else "sparse_indices"] = place_lists(
        b, p.lists.entries, torch.int64 if maybe(rng, 0.4) else torch.int32
    )
    keys = [name for name in ("k", "v", "k_rope") if name in b.parts and not (name == "v" and p.shares)]
    packed_rows, table = (
        place_pages(b, keys, is_python) if pages else ({name: b.tensor(name, "kv") for name in keys}, None)
    )
    packed_rows |= {name: b.tensor(name, "q") for name in ("q", "q_rope") if name in b.parts}
    packed_rows |= {"sink": place(rng, p.sink)} if p.sink is not None else {}
    p.call |= {_name(p, name): tensor for name, tensor in packed_rows.items()}
    if p.shares:
        p.call[_name(p, "v")] = None
    if is_python:
        p.call |= {"layout": b.layout, "causal": causal, "block": p.block, "page_table": table, "return_lse": True}
        p.call |= {"dim_v": b.dim_v} if p.shares and (b.dim_v != b.dim or maybe(rng, 0.5)) else {}
        if p.scale == (b.dim + b.dim_rope) ** -0.5 and maybe(rng, 0.5):
            return
        p.call["scale"] = p.scale
        return
    p.call |= {"scale_value": p.scale, "sparse_block_size": p.block, "sparse_mode": 3 if causal else 0}
    p.call |= {"layout_query": b.layout, "layout_kv": "PA_BSND" if pages else b.layout, "attention_mode": 2}
    p.call |= {"block_table": table, "return_softmax_lse": True}


def _run(p: Plan, dy: Tensor | None) -> Results:
    if p.interface == "own":
        out, lse = fa.sparse_attention(**p.call)
        results = {"out": out, "lse": lse}
    else:
        out, top, total = npu.npu_sparse_flash_attention(**p.call)
        results = {"out": out, "max": top, "sum": total}
    if p.interface == "npu gradient":
        gone = ("actual_seq_lengths", "layout", "block_table", "sinks", "return_softmax_lse")
        given = {name: v for name, v in p.call.items() if not name.startswith(gone)}
        for name, long in (("actual_seq_qlen", "query"), ("actual_seq_kvlen", "kv")):
            given[name] = p.call.get(f"actual_seq_lengths_{long}")
        given |= {"layout": p.batch.layout, "d_out": dy, "out": place(p.batch.rng, out)}
        given |= {"softmax_max": place(p.batch.rng, top), "softmax_sum": place(p.batch.rng, total)}
        grads = npu.npu_sparse_flash_attention_grad(**given)
        results |= {"d" + n: g for n, g in zip(("q", "k", "v", "q_rope", "k_rope"), grads, strict=True)}
    elif p.trained:
        leaves = [p.call[_name(p, name)] for name in p.trained]
        results |= {"d" + n: g for n, g in zip(p.trained, torch.autograd.grad(out, leaves, dy), strict=True)}
    return results


def _rows(p: Plan, s: int) -> Rows:
    b = p.batch
    count = p.lists.counts[s].repeat_interleave(b.group, 0)
    sink = None if p.sink is None or not b.kv_len[s] else p.sink.double()
    return Rows(b.q(s), b.k(s), b.v(s), p.scale, count, b.dtype, sink=sink)


def place_stats(batch: Batch, parts: Sequence[Tensor]) -> Tensor:
    """Returns statistics [B, N2, S1, G] or [N2, T1, G] from [N, R] per sequence."""
    grouped = [rows.unflatten(0, (batch.heads_kv, -1)).permute(2, 0, 1) for rows in parts]
    return place_dense(grouped, batch.layout, batch.tokens[0]).transpose(-3, -2)


def _stats(p: Plan, every: Sequence[Rows]) -> dict[str, Value]:
    expected = {}
    for name in ("max", "sum"):
        gone = [r.empty & torch.tensor(r.sink is None) for r in every]
        value = [torch.where(g, 0.0, getattr(r, name)) for g, r in zip(gone, every, strict=True)]
        error = [torch.where(g, 0.0, getattr(r, name + "_error")) for g, r in zip(gone, every, strict=True)]
        packed_rows = place_stats(p.batch, value)
        expected[name] = Value(packed_rows, place_stats(p.batch, error) + U * packed_rows.abs(), torch.float32)
    return expected


def _saved_rows(p: Plan, stats: Tensor) -> list[Tensor]:
    """Splits statistics into [N, R] of every sequence."""
    return [rows.permute(1, 2, 0).flatten(0, 1) for rows in p.batch.split(stats.double().transpose(-3, -2))]


def _expect(p: Plan, got: Results) -> dict[str, Value]:
    b = p.batch
    every = [_rows(p, s) for s in range(len(b.q_len))]
    expected = {"out": b.place_dense([(r.out, r.stored_error) for r in every], "q")}
    if p.interface == "own":
        expected["lse"] = b.by_row([(r.lse, r.lse_error) for r in every], -torch.inf)
    else:
        expected |= _stats(p, every)
    if not p.trained:
        return expected
    dys = [b.rows(s, "dy") for s in range(len(b.q_len))]
    if p.interface == "npu gradient":
        outs = [rows.transpose(0, 1) for rows in b.split(got["out"].double())]
        saved = zip(outs, _saved_rows(p, got["max"]), _saved_rows(p, got["sum"]), strict=True)
        slopes = [r.saved(*results, dy) for r, results, dy in zip(every, saved, dys, strict=True)]
    else:
        slopes = [r.slopes(dy) for r, dy in zip(every, dys, strict=True)]
    expected |= gradients(b, slopes, dict.fromkeys(n for n in p.trained if n != "sink"))
    if p.shares and "k" in p.trained:
        expected["dk"] = _both(b, slopes)
    if "sink" in p.trained:
        expected["dsink"] = dsink(b, [s for s in slopes if s.p_sink is not None])
    return expected


def _both(b: Batch, slopes: Sequence[Slopes]) -> Value:
    """Returns the expected gradient of keys that are also the values."""
    parts = []
    for slope in slopes:
        (dk, dk_error), (dv, dv_error) = slope.dk(b.heads_kv), slope.dv(b.heads_kv)
        value, error = dk[..., : b.dim].clone(), dk_error[..., : b.dim].clone()
        value[..., : b.dim_v] += dv
        error[..., : b.dim_v] += dv_error + U * dv.abs()
        parts.append((value, error))
    return b.place_dense(parts, "kv")

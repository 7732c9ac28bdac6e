"""Calls of fa.attention and its derivatives with all combinations of features that its operator definition allows."""

from typing import Any

import numpy as np
import torch

import fusion_attention as fa

from .core import Drawn, Results, Value
from .dense import (
    Batch,
    Dropout,
    Matrix,
    broadcast_shape,
    draw_batch,
    draw_bias,
    draw_bits,
    draw_blocked,
    draw_seed,
    dsink,
    expanded,
    fill_batch,
    gradients,
    hide_by_inf,
    hide_unseen,
    poison_matrix,
)
from .formulas import Rows
from .storage import DENSE_LAYOUTS, Rng, Tensor, leaf, lengths, maybe, normal, pick, place

UNLIMITED = 2**31 - 1


def _lengths(batch: Batch, call: dict[str, Any]) -> None:
    rng = batch.rng
    if batch.packed:
        call["q_len"] = lengths(rng, batch.q_len)
        if batch.q_len != batch.kv_len or maybe(rng, 0.5):
            call["kv_len"] = lengths(rng, batch.kv_len)
        return
    for name, seq_lens, full in (("q_len", batch.q_len, batch.tokens[0]), ("kv_len", batch.kv_len, batch.tokens[1])):
        if maybe(rng, 0.4):
            seq_lens[:] = [int(rng.integers(0, full + 1)) for _ in seq_lens]
            call[name] = lengths(rng, seq_lens)


def _edge(rng: Rng, most: int) -> int:
    """Draws a number of tokens: mostly small, sometimes negative, sometimes unlimited."""
    return UNLIMITED if maybe(rng, 0.2) else int(rng.integers(-3 if maybe(rng, 0.3) else 0, most + 3))


def _draw_band(batch: Batch, call: dict[str, Any]) -> list[Tensor]:
    """Draws a band; returns bool [R, K] of every sequence: the keys in the band."""
    rng, kind = batch.rng, batch.rng.random()
    most = max([*batch.q_len, *batch.kv_len, 1])
    align = str(pick(rng, "start", "end"))
    left, right = _edge(rng, most), _edge(rng, most)
    prefixes = [int(rng.integers(0, n + 2)) for n in batch.kv_len]
    if kind < 0.2:
        call["band"] = fa.Band.causal(align)
        left, right = UNLIMITED, 0
    elif kind < 0.4:
        call["band"] = fa.Band.window(left, right, align)
    elif kind < 0.5:
        call["band"] = fa.Band.prefix_causal(prefixes)
    elif kind < 0.75:
        return _draw_mode(batch, call, left, right)
    results = []
    for m, n, prefix in zip(batch.q_len, batch.kv_len, prefixes, strict=True):
        shift = n - m if align == "end" or 0.4 <= kind < 0.5 else 0
        apart = torch.arange(n) - torch.arange(m)[:, None] - shift
        if kind < 0.4:
            results.append((apart >= -left) & (apart <= right))
        elif kind < 0.5:
            results.append((apart <= 0) | (torch.arange(n) < prefix))
        else:
            results.append(torch.ones(m, n, dtype=torch.bool))
    return results


def mode_visible(mode: int, pre: int, next_: int, q_len: list[int], kv_len: list[int]) -> list[Tensor]:
    """Returns bool [R, K] of every sequence: the keys visible in a sparse mode."""
    result, filled = [], [b for b, m in enumerate(q_len) if m]
    for b, (m, n) in enumerate(zip(q_len, kv_len, strict=True)):
        i, j, right = torch.arange(m)[:, None], torch.arange(n), n - m
        if mode == 0:
            visible = (j >= i - pre) & (j <= i + next_)
        elif mode == 1:
            visible = torch.ones(m, n, dtype=torch.bool)
        elif mode == 4:
            visible = (j >= i + right - pre) & (j <= i + right + next_)
        elif mode in (7, 8) and filled and b == filled[-1 if mode == 7 else 0]:
            visible = j <= i + right + next_
        else:
            visible = j <= i + (0 if mode in (2, 8) else right)
        result.append(visible)
    return result


def _draw_mode(batch: Batch, call: dict[str, Any], left: int, right: int) -> list[Tensor]:
    mode = int(pick(batch.rng, 0, 1, 2, 3, 4, 7, 8))  # type: ignore[call-overload]
    call["sparse_mode"] = mode
    pre, next_ = (left, right) if maybe(batch.rng, 0.8) else (UNLIMITED, UNLIMITED)
    call |= {"pre_tokens": pre, "next_tokens": next_}
    return mode_visible(mode, pre, next_, batch.q_len, batch.kv_len)


def draw_tiles(batch: Batch, call: dict[str, Any]) -> Matrix:
    """Draws numbers of tiles (some entirely blocked or free) and bits; byte [r, k] removes keys 8 k ... of row r."""
    rng, (count, heads, *tokens) = batch.rng, batch.shape
    axes = (count if maybe(rng, 0.5) else 1, heads if maybe(rng, 0.5) else 1, *(-(-n // 128) for n in tokens))
    numbers = rng.integers(-2, 3, axes).astype(np.int32)
    bits = rng.integers(0, 256, (max(int(numbers.max(initial=-1)) + 1, 0), 128, 16)).astype(np.uint8)
    removed = np.zeros((*axes[:2], axes[2] * 128, axes[3] * 128), bool)
    for b, h, i, j in np.ndindex(*axes):
        place_ = (b, h, slice(i * 128, i * 128 + 128), slice(j * 128, j * 128 + 128))
        number = numbers[b, h, i, j]
        removed[place_] = number == -1 if number < 0 else np.unpackbits(bits[number], axis=-1, bitorder="little")
    call["blocked_tiles"] = place(rng, torch.from_numpy(numbers))
    if len(bits) or maybe(rng, 0.5):
        call["blocked_bits"] = place(rng, torch.from_numpy(bits))
    return Matrix(call["blocked_tiles"], torch.from_numpy(removed[:, :, : tokens[0], : tokens[1]]))


def _draw_slopes(batch: Batch, call: dict[str, Any]) -> list[Tensor]:
    """Draws ALiBi slopes; returns the bias [N, R, K] of every sequence."""
    rng, count = batch.rng, len(batch.q_len)
    shape = [(batch.heads,), (1, batch.heads), (count, batch.heads)][int(rng.integers(3))]
    slopes = normal(rng, *shape).float()
    call["alibi_slopes"] = place(rng, slopes)
    start = None
    if maybe(rng, 0.5):
        start = [int(rng.integers(-50, 50)), int(rng.integers(0, 5000))]
        call["alibi_start"] = start
    results = []
    for b, (m, n) in enumerate(zip(batch.q_len, batch.kv_len, strict=True)):
        first, key = (0, m - n) if start is None else start
        distance = (torch.arange(n) + key - torch.arange(m)[:, None] - first).abs().double()
        per_item = slopes.double().reshape(-1, batch.heads)
        results.append(-per_item[b if len(per_item) > 1 else 0][:, None, None] * distance)
    return results


def _draw_dropout(batch: Batch, call: dict[str, Any]) -> Dropout:
    rng = batch.rng
    if maybe(rng, 0.7):
        return Dropout()
    drop = Dropout(float(rng.choice([0.9, 0.5, 0.1, 0.8])))
    call["keep_prob"] = drop.keep_prob
    if maybe(rng, 0.5):
        drop.bits = draw_bits(batch)
        call["drop_bits"] = place(rng, drop.bits)
    else:
        drop.seed, drop.offset = draw_seed(rng)
        call |= {"seed": drop.seed, "offset": drop.offset}
    return drop


def draw_scale(rng: Rng, dims: int) -> float:
    """Draws a scale: mostly a usual one, sometimes zero, negative or large."""
    return float(rng.choice([dims**-0.5, 1.0, 0.0, -0.3, 4.0], p=[0.6, 0.2, 0.05, 0.1, 0.05]))


def draw(rng: Rng) -> Drawn:
    batch = draw_batch(rng, (*DENSE_LAYOUTS, "TND"))
    call: dict[str, Any] = {"layout": batch.layout}
    if batch.layout in ("BSH", "SBH") or maybe(rng, 0.2):
        call["heads"] = batch.heads
    _lengths(batch, call)
    fill_batch(batch)
    bands = _draw_band(batch, call)
    counts = [band.expand(batch.heads, -1, -1).int() for band in bands]
    if maybe(rng, 0.35):
        blocked = draw_blocked(rng, batch.shape, broadcast_shape(rng, batch.shape), (torch.bool, torch.uint8))
        call["blocked"] = blocked.tensor
        counts = [torch.where(blocked.of(b, *count.shape[1:], batch.heads), 0, count) for b, count in enumerate(counts)]
    if maybe(rng, 0.25):
        tiles = draw_tiles(batch, call)
        counts = [torch.where(tiles.of(b, *count.shape[1:], batch.heads), 0, count) for b, count in enumerate(counts)]
    call["empty_rows"] = str(pick(rng, "zero", "zero", "mean"))
    mean = call["empty_rows"] == "mean"
    matrix: Matrix | None = None
    biases: list[Tensor] | None = None
    if maybe(rng, 0.35):
        matrix = draw_bias(rng, batch.shape, broadcast_shape(rng, batch.shape), batch.dtype)
        poison_matrix(rng, matrix, counts, batch.shape)
        biases = [matrix.of(b, *count.shape[1:], batch.heads) for b, count in enumerate(counts)]
        hide_by_inf(batch, counts, biases, mean)
        call["bias"] = matrix.tensor
    elif maybe(rng, 0.2):
        biases = _draw_slopes(batch, call)
    hide_unseen(batch, counts, mean)
    scale = None
    if maybe(rng, 0.6):
        scale = call["scale"] = draw_scale(rng, batch.dim + batch.dim_rope)
    sink = normal(rng, batch.heads).float() if maybe(rng, 0.25) else None
    drop = _draw_dropout(batch, call)
    call |= {"sink": None if sink is None else place(rng, sink), "return_lse": True}
    call |= {name: batch.tensor(name, "q" if name[0] == "q" else "kv") for name in batch.parts}
    requested = [name for name in ("q", "k", "v", "q_rope", "k_rope", "bias", "sink") if call.get(name) is not None]
    requested = [name for name in requested if maybe(rng, 0.7)] if maybe(rng, 0.7) else []
    call |= {name: leaf(call[name]) for name in requested}
    if matrix is not None and maybe(rng, 0.3):
        call["bias"] = expanded(rng, call["bias"], batch.shape)
        matrix.widened = True
    batch.draw("dy", "q", batch.heads, batch.dim_v)
    call["dy"] = batch.tensor("dy", "q") if requested else None
    leaves = {name: (matrix.tensor if name == "bias" and matrix else call[name]) for name in requested}
    if "bias" in leaves:
        leaves["bias"] = call["bias"] if call["bias"].is_leaf else call["bias"]._base
    extra = {"scale": scale, "sink": sink, "drop": drop, "biases": biases, "counts": counts, "mean": mean}
    return Drawn(call, lambda: _run(call, leaves), lambda _: _expect(batch, extra, leaves, matrix))


def _run(call: dict[str, Any], leaves: dict[str, Tensor]) -> Results:
    out, lse = fa.attention(**{name: value for name, value in call.items() if name != "dy"})
    results = {"out": out, "lse": lse}
    if leaves:
        grads = torch.autograd.grad(out, list(leaves.values()), call["dy"])
        results |= {"d" + name: grad for name, grad in zip(leaves, grads, strict=True)}
    return results


def _expect(batch: Batch, e: dict[str, Any], leaves: dict[str, Tensor], matrix: Matrix | None) -> dict[str, Value]:
    scale = (batch.dim + batch.dim_rope) ** -0.5 if e["scale"] is None else e["scale"]
    every = [rows_of(batch, b, e, scale) for b in range(len(batch.q_len))]
    expected = {"out": batch.place_dense([(r.out, r.stored_error) for r in every], "q")}
    expected["lse"] = batch.by_row([(r.lse, r.lse_error) for r in every], -torch.inf)
    if leaves:
        slopes = [r.slopes(batch.rows(b, "dy")) for b, r in enumerate(every)]
        expected |= gradients(batch, slopes, leaves)
        if "bias" in leaves:
            assert matrix is not None
            expected["dbias"] = matrix.summed(batch, [(s.ds, s.ds_error) for s in slopes])
        if "sink" in leaves:
            expected["dsink"] = dsink(batch, slopes)
    return expected


def rows_of(batch: Batch, b: int, e: dict[str, Any], scale: float) -> Rows:
    count = e["counts"][b]
    sink = None if e["sink"] is None else e["sink"].double()
    bias = None if e["biases"] is None else e["biases"][b]
    rows = Rows(batch.q(b), batch.k(b), batch.v(b), scale, count, batch.dtype, bias, e["drop"].keep(batch, b), sink)
    if e["mean"] and sink is None and batch.kv_len[b]:
        return Rows(rows.q, batch.k(b), batch.v(b), scale, count, batch.dtype, bias, rows.keep, None, rows.empty)
    return rows

"""What the intermediate representation says of caches, by golden against loops that share nothing with it: pieces,
common keys, matrices without the first keys, scales of rows and of tokens, rounded weights.

All memory that no row may see holds NaN, or integers that would be noticed.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from fusion_attention.backends import golden
from fusion_attention.ir.kv import Dequant, MatrixView, PagedView, RowView
from fusion_attention.ir.mask import Band
from fusion_attention.ir.problem import Extents, Operands, Problem, Stats

Tensor = torch.Tensor
Q_LEN, KV_LEN = (3, 1, 2), (7, 5, 0)
TOKENS = max(KV_LEN)
INF = math.inf


@dataclass
class Call:
    """Float32 numbers, [sequences, heads, tokens, elements], as kernels are to understand them."""

    problem: Problem
    q: Tensor
    k: Tensor
    v: Tensor
    band: Band = field(default_factory=Band.full)
    kv_len: tuple[int, ...] = KV_LEN
    views: dict[str, Any] = field(default_factory=dict)
    bias: Tensor | None = None  # [sequences, heads, rows, keys]
    hidden: Tensor | None = None  # [sequences, rows, keys]
    row_scale: Tensor | None = None  # [sequences, heads, rows]
    weight_scale: float = 0.0

    @property
    def extents(self) -> Extents:
        lengths = np.array(Q_LEN, np.int64), np.array(self.kv_len, np.int64)
        return Extents(*lengths, *self.band.resolve(*lengths), np.zeros_like(lengths[0]))


def naive(call: Call) -> Iterator[tuple[list[int], list[float], float, float]]:
    """(place, out, max, sum) of every row, by loops over numbers."""
    p, e = call.problem, call.extents
    for b in range(len(Q_LEN)):
        for h in range(p.heads_q):
            for i in range(Q_LEN[b]):
                keys, kv_head = [], h * p.heads_kv // p.heads_q
                in_band = range(max(0, i + int(e.lo[b])), min(call.kv_len[b], i + int(e.hi[b])))
                for j in in_band:
                    if call.hidden is not None and call.hidden[b, i, j]:
                        continue
                    score = sum(
                        float(x) * float(y) for x, y in zip(call.q[b, h, i], call.k[b, kv_head, j], strict=True)
                    )
                    score *= p.scale * (1.0 if call.row_scale is None else float(call.row_scale[b, h, i]))
                    score = p.softcap * math.tanh(score / p.softcap) if p.softcap else score
                    keys.append((j, score + (0.0 if call.bias is None else float(call.bias[b, h, i, j]))))
                peak = max((score for _, score in keys), default=-INF)
                weights = [(j, math.exp(score - peak)) for j, score in keys]
                total = sum(weight for _, weight in weights)
                if not keys and p.empty_rows == "mean_in_band" and len(in_band):
                    weights = [(j, 1.0) for j in range(call.kv_len[b])]
                    total = float(call.kv_len[b])
                out = [0.0] * p.dim_v
                for j, weight in weights:
                    if p.has_weight_scale:
                        weight = max(-128, min(127, round(call.weight_scale * weight)))  # Python rounds halves to even.
                    for d in range(p.dim_v):
                        out[d] += weight * float(call.v[b, kv_head, j, d]) / total
                yield [b, h, i], out, peak, total


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def integers(*shape: int, seed: int = 1, low: int = -100, high: int = 100) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)


def rows(values: Tensor, lengths: tuple[int, ...]) -> RowView:
    """Rows [sequences, heads, tokens, elements] in memory whose other tokens are poison."""
    count, heads, tokens, dim = values.shape
    memory = torch.full((count, tokens + 2, heads, dim + 1), math.nan if values.is_floating_point() else 111)
    memory = memory.to(values.dtype)
    for b, length in enumerate(lengths):
        memory[b, 1 : 1 + length, :, :dim] = values[b, :, :length].transpose(0, 1)
    address = np.arange(count) * memory.stride(0) + memory.stride(1)
    return RowView((memory,), address, memory.stride(1), np.full(count, memory.stride(2)), dim)


def pages(values: Tensor, lengths: tuple[int, ...], size: int, fragment: int = 0) -> PagedView:
    """The same rows in shuffled pages [blocks, heads, pieces, slots, elements of a piece]."""
    count, heads, tokens, dim = values.shape
    columns = -(-tokens // size)
    order = torch.randperm(count * columns + 2, generator=torch.Generator().manual_seed(4))
    table = order[: count * columns].view(count, columns).to(torch.int32)
    step = fragment or dim
    pool = torch.full((len(order), heads, dim // step, size, step), math.nan if values.is_floating_point() else 111)
    pool = pool.to(values.dtype)
    for b, length in enumerate(lengths):
        for t in range(length):
            pool[int(table[b, t // size]), :, :, t % size] = values[b, :, t].unflatten(-1, (-1, step))
        table[b, -(-length // size) :] = 1 << 30
    block, head, stride, token, _ = pool.stride()
    pieces = (fragment, stride) if fragment else (0, 0)
    return PagedView(pool, table, size, block, token, head, dim, *pieces)


def run(call: Call) -> list[Tensor]:
    """out, max and sum, [sequences, heads, rows, elements]; rows that are not there are 0."""
    p = call.problem
    count, most = len(Q_LEN), max(Q_LEN)

    def buffer(dim: int) -> RowView:
        return rows(torch.full((count, p.heads_q, most, dim), math.nan).double(), Q_LEN)

    def given(values: Tensor, lengths: tuple[int, ...]) -> RowView:
        return rows(values.double(), lengths)

    operands = Operands(
        **{"q": given(call.q, Q_LEN), "k": given(call.k, call.kv_len), "v": given(call.v, call.kv_len)}
        | {"out": buffer(p.dim_v), "stats": Stats(buffer(1), buffer(1))}
        | call.views
    )
    golden.attention_forward(p, call.extents, None, operands)

    def read(view: RowView) -> Tensor:
        lanes = [view.sequence(b, p.heads_q, n) for b, n in enumerate(Q_LEN)]
        return torch.stack([torch.nn.functional.pad(lane, (0, 0, 0, most - lane.shape[1])) for lane in lanes])

    return [read(view) for view in (operands.out, operands.stats.max, operands.stats.sum)]


def check(call: Call) -> None:
    """Golden against the loops."""
    results = list(naive(call))
    assert any(total > 0 for *_, total in results)
    want = [torch.zeros(len(Q_LEN), call.problem.heads_q, max(Q_LEN), n).double() for n in (call.problem.dim_v, 1, 1)]
    for place, *row in results:
        for t, numbers_ in zip(want, row, strict=True):
            t[tuple(place)] = torch.tensor(numbers_, dtype=torch.float64).reshape(-1)
    call64 = replace(call, problem=replace(call.problem, dtype="float64"))
    for got, expected in zip(run(call64), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def call_of(dim: int = 12, **more: Any) -> Call:
    """Two query heads to a key head."""
    problem = Problem(heads_q=4, heads_kv=2, dim_qk=dim, dim_v=8, scale=0.3, **more)
    lengths = len(Q_LEN), 4, max(Q_LEN), dim
    return Call(
        problem,
        numbers(*lengths),
        numbers(len(Q_LEN), 2, TOKENS, dim, seed=2),
        numbers(len(Q_LEN), 2, TOKENS, 8, seed=3),
        Band.causal(),
    )


@pytest.mark.parametrize("fragment", [0, 4])
@pytest.mark.parametrize("size", [1, 2, 16])
def test_rows_in_pieces(fragment: int, size: int) -> None:
    call = call_of(page_size=size)
    call.views = {"k": pages(call.k, KV_LEN, size, fragment), "v": pages(call.v, KV_LEN, size, fragment)}
    check(call)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("common", [1, 4])
def test_common_keys(paged: bool, common: int) -> None:
    call = call_of(common_keys=common, has_blocked=True, bias="matrix", page_size=2 if paged else 0)
    call.kv_len = (common + 3, common, common + 1)
    keys = max(call.kv_len)
    call.k, call.v = (torch.cat((t, t), dim=2)[:, :, :keys] for t in (call.k, call.v))
    for t in (call.k, call.v):
        t[:, :, :common] = t[:1, :, :common]
    suffix_len = tuple(n - common for n in call.kv_len)
    for name in ("k", "v"):
        stored = getattr(call, name)
        rest = stored[:, :, common:]
        call.views[name] = pages(rest, suffix_len, 2) if paged else rows(rest, suffix_len)
        call.views[f"{name}_common"] = rows(stored[:1, :, :common], (common,))
    call.hidden = numbers(3, 3, keys, seed=6) > 0.8
    call.hidden[..., 0] = False
    call.bias = numbers(3, 4, 3, keys, seed=7)
    count = np.arange(3)
    blocked = call.hidden.to(torch.uint8)
    call.views["blocked"] = MatrixView(blocked, count * 3 * keys, count * 0, count * 0 + keys, 1)
    call.views["bias"] = MatrixView(call.bias, count * 12 * keys, count * 0 + 3 * keys, count * 0 + keys, 1)
    check(call)


def test_common_keys_of_integers() -> None:
    call = call_of(common_keys=2, kv_dtype="int8", dequant_k="channel", dequant_v="channel")
    call.kv_len = (5, 2, 3)
    suffix_len = (3, 0, 1)
    for name, dim in (("k", 12), ("v", 8)):
        stored = integers(3, 2, 5, dim)
        stored[:, :, :2] = stored[:1, :, :2]
        call.views[name] = rows(stored[:, :, 2:], suffix_len)
        call.views[f"{name}_common"] = rows(stored[:1, :, :2], (2,))
        scale, offset = numbers(2, dim, seed=5).abs() / 50, numbers(2, dim, seed=6)
        channels = [RowView((t,), np.zeros(3, np.int64), 0, np.full(3, dim), dim) for t in (scale, offset)]
        call.views[f"dequant_{name}"] = Dequant(*channels)
        setattr(call, name, (stored + offset.double()[:, None]) * scale.double()[:, None])
    check(call)


def test_a_matrix_without_the_first_keys() -> None:
    """As a tree mask: squares at the end of the keys, the address of the first before all memory."""
    call = call_of(has_blocked=True)
    call.band, call.kv_len = Band.full(), (7, 5, 2)
    squares = [torch.tensor(square, dtype=torch.uint8) for square in ([[0, 1, 1], [1, 0, 1], [1, 0, 0]], [[0]])]
    squares.append(torch.tensor([[0, 1], [1, 1]], dtype=torch.uint8))
    call.hidden = torch.zeros(3, 3, 7, dtype=torch.bool)
    for b, square in enumerate(squares):
        rows_, last = len(square), call.kv_len[b]
        call.hidden[b, :rows_, last - rows_ : last] = square.bool()
    first = np.array(call.kv_len) - np.array(Q_LEN)
    start = np.array([0, 9, 10])
    flat = torch.cat([square.flatten() for square in squares])
    call.views["blocked"] = MatrixView(flat, start - first, start * 0, np.array(Q_LEN), 1, first)
    call.problem = replace(call.problem, empty_rows="mean_in_band")
    check(call)


@pytest.mark.parametrize("softcap", [0.0, 0.6])
def test_scales_of_rows(softcap: float) -> None:
    call = call_of(has_row_scale=True, bias="matrix", softcap=softcap)
    call.row_scale = numbers(3, 4, 3, seed=8).abs()
    call.bias = numbers(3, 4, 3, TOKENS, seed=7)
    count = np.arange(3)
    call.views["bias"] = MatrixView(call.bias, count * 12 * TOKENS, count * 0 + 3 * TOKENS, count * 0 + TOKENS, 1)
    call.views["row_scale"] = rows(call.row_scale.unsqueeze(-1), Q_LEN)
    check(call)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_scales_of_other_kinds(paged: bool, shared: bool) -> None:
    """Keys in pages with one scale per token by its place in the sequence, values with scales in pages of their own."""
    call = call_of(page_size=2, kv_dtype="int8", dequant_k="token", dequant_v="token" if paged else "channel")
    heads = 1 if shared else 2
    for name, dim in (("k", 12), ("v", 8)):
        stored = integers(3, 2, TOKENS, dim)
        call.views[name] = pages(stored, KV_LEN, 2)
        scale = numbers(3, heads, TOKENS, 1, seed=5).abs() / 50
        if name == "k":
            view: Any = rows(scale, KV_LEN)
        elif paged:
            view = pages(scale, KV_LEN, 2)
            view = replace(view, table=call.views["v"].table)
        else:
            scale = numbers(heads, 1, dim, seed=9).abs() / 50
            view = RowView((scale,), np.zeros(3, np.int64), 0, np.full(3, dim), dim)
        if shared:
            zero: Any = 0 if isinstance(view, PagedView) else np.zeros(3, np.int64)
            view = replace(view, stride_head=zero)
        call.views[f"dequant_{name}"] = Dequant(view)
        setattr(call, name, stored * scale.double())
    check(call)


@pytest.mark.parametrize(("weight_scale", "softcap"), [(127.0, 0.0), (3.0, 0.0), (200.0, 0.0), (127.0, 0.7)])
def test_rounded_weights(weight_scale: float, softcap: float) -> None:
    call = call_of(kv_dtype="int8", dequant_k="channel", dequant_v="channel", dtype="float16", softcap=softcap)
    call.problem = replace(call.problem, has_blocked=True, empty_rows="mean_in_band", has_weight_scale=True)
    call.weight_scale, call.views["weight_scale"] = weight_scale, torch.tensor([weight_scale])
    call.q = integers(3, 4, 3, 12, seed=4).float()
    for name, dim in (("k", 12), ("v", 8)):
        stored, scale = integers(3, 2, TOKENS, dim), torch.full((2, dim), 0.0004 if name == "k" else 0.01)
        call.views[name] = rows(stored, KV_LEN)
        call.views[f"dequant_{name}"] = Dequant(RowView((scale,), np.zeros(3, np.int64), 0, np.full(3, dim), dim))
        setattr(call, name, stored.double() * scale.double()[:, None])
    call.hidden = torch.zeros(3, 3, TOKENS, dtype=torch.bool)
    call.hidden[0, 1] = True  # a row in mean form
    count = np.arange(3)
    blocked = call.hidden.to(torch.uint8)
    call.views["blocked"] = MatrixView(blocked, count * 3 * TOKENS, count * 0, count * 0 + TOKENS, 1)
    check(call)

"""Defines the measured calls: our kernels and torch's functions on the same tensors."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

from benchmarks.backward_only import Call, gradient
from benchmarks.gpu.compressed import compressed
from benchmarks.gpu.lists import indexer, loss, selected
from benchmarks.gpu.timing import Row
from fusion_attention import Band, attention
from fusion_attention.backends import triton as backend
from fusion_attention.ir.mask import INFINITE
from fusion_attention.ir.memory_views import Dequant, PagedView, RowView
from fusion_attention.ir.problem import Extents, Operands, Problem, Stats

TOKENS, WIDTH = 16384, 2048  # tokens of all sequences together; heads x head dim
SDPA = {
    "SDPA flash": SDPBackend.FLASH_ATTENTION,
    "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION,
    "SDPA efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def _tensors(length: int, dim: int, grad: bool = False) -> tuple[torch.Tensor, ...]:
    """Returns q, k and v [B, N, S, D] in bfloat16."""
    shape = (TOKENS // length, WIDTH // dim, length, dim)
    return tuple(torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=grad) for _ in range(3))


def _ours(band: Band | None = None, slopes: torch.Tensor | None = None) -> Callable[..., torch.Tensor]:
    return lambda q, k, v: attention(q, k, v, layout="BNSD", band=band, alibi_slopes=slopes, backend="triton")


def _sdpa(which: SDPBackend, **options: object) -> Callable[..., torch.Tensor]:
    def compute(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(which):
            return sdpa(q, k, v, **options)  # type: ignore[arg-type]

    return compute


def _pairs(length: int, band: Band) -> int:
    n = np.array([length])
    return Extents(n, n, *band.resolve(n, n), n * 0).visible_pairs


def _flex(length: int, visible: Callable[..., torch.Tensor], score: Callable[..., torch.Tensor] | None = None) -> Call:
    mask = create_block_mask(visible, None, None, length, length, device="cuda")
    torch._dynamo.reset()  # it stops compiling a function after a few variants
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask, score_mod=score)  # type: ignore[misc]


def dense(quick: bool) -> Iterator[Row]:
    """Times forward and backward, full and causal."""
    lengths = (2048,) if quick else (2048, 16384)
    for dim in (128, 64):
        for length in lengths:
            for causal in (False, True):
                band = Band.causal() if causal else Band.full()
                pairs = _pairs(length, band) * (TOKENS // length) * (WIDTH // dim)
                name = f"D{dim} S{length} {'causal' if causal else 'full'}"
                peers = {peer: _sdpa(which, is_causal=causal) for peer, which in SDPA.items()}
                peers["FlexAttention"] = _flex(
                    length, (lambda b, h, i, j: i >= j) if causal else lambda b, h, i, j: j >= 0
                )
                tensors = _tensors(length, dim)
                yield Row("forward", name, _bound(_ours(band), tensors),
                          {p: _bound(f, tensors) for p, f in peers.items()}, 4 * dim * pairs)  # fmt: skip
                graded = _tensors(length, dim, grad=True)
                ours, *theirs = (gradient(_bound(f, graded), graded) for f in (_ours(band), *peers.values()))
                yield Row("backward", name, ours, dict(zip(peers, theirs, strict=True)), 10 * dim * pairs)


def _bound(function: Callable[..., Any], tensors: tuple[torch.Tensor, ...]) -> Callable[[], Any]:
    return lambda: function(*tensors)


def masks(quick: bool) -> Iterator[Row]:
    """Times bands, prefixes, ALiBi and packed sequences, forward."""
    length, dim = (2048 if quick else 16384), 128
    heads, tensors = WIDTH // dim, _tensors(length, dim)
    slopes = torch.linspace(0.05, 0.5, heads, device="cuda")
    batch = TOKENS // length
    window, prefix = Band.window(1023, 0), Band.prefix_causal([length // 4] * batch)
    rows: list[tuple[str, Band, torch.Tensor | None, Call]] = [
        ("window 1024", window, None, _flex(length, lambda b, h, i, j: (i >= j) & (i - j < 1024))),
        ("prefix S/4", prefix, None, _flex(length, lambda b, h, i, j: (i >= j) | (j < length // 4))),
        ("causal ALiBi", Band.causal(), slopes,
         _flex(length, lambda b, h, i, j: i >= j, lambda s, b, h, i, j: s - slopes[h] * (i - j))),
    ]  # fmt: skip
    for name, band, slope, peer in rows:
        n = np.full(batch, length)
        pairs = Extents(n, n, *band.resolve(n, n), n * 0).visible_pairs * heads
        ours = _bound(_ours(band, slope), tensors)
        yield Row("masks", name, ours, {"FlexAttention": _bound(peer, tensors)}, 4 * dim * pairs)
    yield _packed(heads, dim)


def _packed(heads: int, dim: int) -> Row:
    lengths = np.random.default_rng(0).integers(64, 1024, 200)
    lengths = lengths[np.cumsum(lengths) <= TOKENS]
    total, longest = int(lengths.sum()), int(lengths.max())
    q, k, v = (torch.randn(total, heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    padded = tuple(
        torch.zeros(len(lengths), heads, longest, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3)
    )
    is_token = torch.arange(longest, device="cuda") < torch.tensor(lengths, device="cuda")[:, None]
    mask = is_token[:, None, None, :] & torch.ones(longest, longest, device="cuda", dtype=torch.bool).tril()
    pairs = int((lengths * (lengths + 1) // 2).sum()) * heads
    given = lengths.tolist()
    ours = lambda: attention(q, k, v, layout="TND", q_len=given, band=Band.causal(), backend="triton")  # noqa: E731
    peer = _bound(_sdpa(SDPBackend.EFFICIENT_ATTENTION, attn_mask=mask), padded)
    return Row("masks", f"packed, {len(given)} sequences", ours, {"padded SDPA + mask": peer}, 4 * dim * pairs)


# ------------------------------------------------------------------------------------------------------------- decode


def decode(quick: bool) -> Iterator[Row]:
    """Times one token over a paged cache, in bfloat16 and int8."""
    batch, heads_q, heads_kv, dim, length, size = (16 if quick else 64), 32, 8, 128, 8192, 64
    base = Problem(heads_q, heads_kv, dim, dim, dtype="bfloat16", scale=dim**-0.5, page_size=size)
    quantised = dataclasses.replace(base, kv_dtype="int8", dequant_k="channel", dequant_v="channel")
    for name, problem in (("bf16", base), ("int8", quantised)):
        operands, extents = _cache(problem, batch, length)
        schedule = backend.schedule(problem, extents, "attention_forward")
        ours = _bound(backend.attention_forward, (problem, extents, schedule, operands))  # type: ignore[arg-type]
        width = 1 if problem.kv_dtype else 2
        read = 2 * batch * heads_kv * length * dim * width
        yield Row("decode", f"{name} B{batch} 32/8 S{length}", ours, {}, 4 * batch * heads_q * length * dim, read)


def _cache(p: Problem, batch: int, length: int) -> tuple[Operands, Extents]:
    pages = length // p.page_size
    table = torch.randperm(batch * pages, device="cuda", dtype=torch.int32).view(batch, pages)
    shape = (batch * pages, p.page_size, p.heads_kv, p.dim_qk)

    def pool() -> PagedView:
        values = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        values = (values * 30).to(torch.int8) if p.kv_dtype else values
        return PagedView(values, table, p.page_size, *values.stride()[:3], p.dim_qk)

    axis = np.zeros(batch, np.int64)

    def rows(dim: int, dtype: torch.dtype) -> RowView:
        values = torch.randn(batch, 1, p.heads_q, dim, device="cuda", dtype=dtype)
        step = values.stride()
        return RowView((values,), np.arange(batch, dtype=np.int64) * step[0], step[1], axis + step[2], dim)

    scale = torch.full((p.heads_kv, p.dim_qk), 0.03, device="cuda")
    dequant = Dequant(RowView((scale,), axis, 0, axis + p.dim_qk, p.dim_qk)) if p.kv_dtype else None
    stats = Stats(rows(1, torch.float32), rows(1, torch.float32))
    q, out = rows(p.dim_qk, torch.bfloat16), rows(p.dim_v, torch.bfloat16)
    keys = axis + length
    extents = Extents(axis + 1, keys, axis - INFINITE, keys, axis, axis)
    return Operands(q, pool(), pool(), out, stats, dequant_k=dequant, dequant_v=dequant), extents


GROUPS = {"dense": dense, "masks": masks, "decode": decode}
GROUPS |= {"lists": selected, "compressed": compressed, "indexer": indexer, "loss": loss}

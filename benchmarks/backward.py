"""The gradients of training attention beyond full and causal: what a feature costs beside our own plain backward, what
a user would pick instead, and what a second thread brings."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import fusion_attention as fa
from benchmarks.dense import DTYPES, Peaks, arithmetic, packed_lengths, padded, rows, triangle
from benchmarks.pair import Pair

Call = Callable[[], object]
MATMULS = 5
RATE = "ours full, by rate"  # the peer computes other work: its rate is compared, not its time


def gradients(out: torch.Tensor, *inputs: torch.Tensor) -> Call:
    """The backward of a result alone, as often as one likes."""
    dout = torch.randn_like(out)
    return functools.partial(torch.autograd.grad, out, inputs, dout, retain_graph=True)


def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *more: torch.Tensor, **options: Any) -> Call:
    """Our backward of a padded call; more: further inputs that want a gradient."""
    return gradients(fa.attention(q, k, v, layout="BNSD", **options), q, k, v, *more)


def theirs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Call:
    """SDPA's backward."""
    return gradients(sdpa(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **options), q, k, v)


def grouped(size: int, peaks: Peaks) -> Iterator[Pair]:
    """Four query heads to a key head."""
    for label, dtype in DTYPES.items():
        wide = rows(dtype, (32, 8), size // 2, 128, grad=True)
        flops, peak = arithmetic(wide[0], (size // 2) ** 2, MATMULS), peaks.get(dtype, 0.0)
        mine, name = ours(*wide), f"{label} 32/8 heads S{size // 2}"
        yield Pair("gradients", name, "SDPA", mine, theirs(*wide), flops, peak)
        own = ours(*rows(dtype, (32, 32), size // 2, 128, grad=True))
        yield Pair("gradients", name, "ours 32/32", mine, own, flops, peak)


def features(size: int, peaks: Peaks) -> Iterator[Pair]:
    """Bands by their visible pairs; biases and dropout beside the same call without."""
    row, key = torch.arange(size)[:, None], torch.arange(size)
    window, prefix = min(256, size // 4), size // 4
    for label in ("bf16", "fp32"):
        dtype = DTYPES[label]
        q, k, v = rows(dtype, (8, 8), size, 128, grad=True)
        peak, every = peaks.get(dtype, 0.0), arithmetic(q, size**2, MATMULS)
        full, causal = ours(q, k, v), ours(q, k, v, band=fa.Band.causal())
        seen = (key <= row) & (row - key < window)
        flops, mine = arithmetic(q, int(seen.sum()), MATMULS), ours(q, k, v, band=fa.Band.window(window - 1, 0))
        name = f"{label} window {window}, S{size}"
        yield Pair("gradients", name, RATE, mine, full, flops, peak, every)
        yield Pair("gradients", name, "SDPA + mask", mine, theirs(q, k, v, attn_mask=seen), flops, peak)
        seen = (key <= row) | (key < prefix)
        flops, mine = arithmetic(q, int(seen.sum()), MATMULS), ours(q, k, v, band=fa.Band.prefix_causal([prefix]))
        yield Pair("gradients", f"{label} prefix {prefix}, S{size}", RATE, mine, full, flops, peak, every)
        flops = arithmetic(q, triangle(size), MATMULS)
        yield Pair("gradients", f"{label} causal, S{size}", RATE, causal, full, flops, peak, every)
        mine = ours(q, k, v, band=fa.Band.causal(), alibi_slopes=torch.tensor([2.0 ** -(h + 1) for h in range(8)]))
        yield Pair("gradients", f"{label} causal ALiBi, S{size}", "ours without", mine, causal, flops, peak)
        mine = ours(q, k, v, keep_prob=0.9, seed=1)
        yield Pair("gradients", f"{label} dropout, S{size}", "ours without", mine, full, every, peak)
        bias = torch.randn(1, 8, size, size, dtype=dtype, requires_grad=True)
        mine = ours(q, k, v, bias, bias=bias)
        yield Pair("gradients", f"{label} dbias, S{size}", "ours without", mine, full, every, peak)


def packed(count: int, peaks: Peaks) -> Iterator[Pair]:
    """A long-tailed mix of lengths: the backward by its visible pairs, and a whole step beside padded SDPA."""
    lengths, heads, dim, size = packed_lengths(count), 12, 64, 2048
    for label in ("fp32", "bf16"):
        dtype, peak = DTYPES[label], peaks.get(DTYPES[label], 0.0)
        q, k, v = (torch.randn(sum(lengths), heads, dim, dtype=dtype, requires_grad=True) for _ in range(3))
        call = functools.partial(fa.attention, q, k, v, layout="TND", q_len=lengths)
        dense = rows(dtype, (heads, heads), size, dim, grad=True)
        pairs, name = sum(n * n for n in lengths), f"{label}, {count} sequences"
        flops = 2 * heads * pairs * dim
        mine, full = gradients(call(), q, k, v), ours(*dense)
        every = arithmetic(dense[0], size**2, MATMULS)
        yield Pair("steps", f"{name}, packed backward", RATE, mine, full, flops * MATMULS, peak, every)
        *wide, mask = padded(q.detach(), k.detach(), v.detach(), lengths)
        for tensor in wide:
            tensor.requires_grad_()
        douts = torch.randn_like(q), torch.randn_like(wide[0])
        other = functools.partial(sdpa, *wide, attn_mask=mask)
        step = functools.partial(forward_and_backward, call, (q, k, v), douts[0])
        peer = functools.partial(forward_and_backward, other, tuple(wide), douts[1])
        flops *= MATMULS + 2
        yield Pair("steps", f"{name}, packed step", "padded SDPA + mask", step, peer, flops, peak)


def forward_and_backward(
    call: Callable[[], torch.Tensor], inputs: tuple[torch.Tensor, ...], dout: torch.Tensor
) -> None:
    """One step of training."""
    torch.autograd.grad(call(), inputs, dout)


def on_one_thread(call: Call) -> Call:
    """The call, computed by one thread."""

    def run() -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            call()
        finally:
            torch.set_num_threads(threads)

    return run


def scaling(size: int, peaks: Peaks) -> Iterator[Pair]:
    """All threads beside one: many heads, and one head alone."""
    for label in ("bf16", "fp32"):
        dtype = DTYPES[label]
        for heads in (8, 1):
            length = size if heads > 1 else 2 * size
            q, k, v = rows(dtype, (heads, heads), length, 128, grad=True)
            name = f"{label} {heads} head{'s' * (heads > 1)} S{length}"
            peak = peaks.get(dtype, 0.0)
            call = torch.no_grad()(functools.partial(fa.attention, q, k, v, layout="BNSD"))
            for verb, work, matmuls in (("forward", call, 2), ("backward", ours(q, k, v), MATMULS)):
                flops = arithmetic(q, length**2, matmuls)
                yield Pair("threads", f"{name}, {verb}", "one thread", work, on_one_thread(work), flops, peak)


def training(size: int, peaks: Peaks) -> Iterator[Pair]:
    """Everything that a padded call may add."""
    yield from grouped(size, peaks)
    yield from features(size, peaks)


GROUPS = {"gradients": training, "steps": packed, "threads": scaling}

"""Times gradients of training attention with bands, biases and dropout, for packed sequences and on several threads."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import fusion_attention as fa
from benchmarks.backward_only import Call, gradient
from benchmarks.dense import DTYPES, PEAKS, arithmetic, attention, packed_lengths, padded, rows, triangle
from benchmarks.threads import with_threads
from fusion_attention.bench.pair import Pair

MATMULS = 5
RATE = "ours full, by rate"  # the peer computes other work: its rate is compared, not its time
# Goals: speed relative to the call without the feature.
GROUPED, VISIBLE, SLOPES, DROPOUT, DBIAS = 0.9, 1 / 1.3, 1 / 1.1, 1 / 1.2, 1 / 1.25


def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *more: torch.Tensor, **options: Any) -> Call:
    """Returns a function that runs our backward of a padded call; more: further inputs with gradients."""
    return gradient(attention(q, k, v, **options), (q, k, v, *more))


def theirs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Call:
    """Returns a function that runs SDPA's backward."""
    return gradient(functools.partial(sdpa, q, k, v, enable_gqa=q.shape[1] != k.shape[1], **options), (q, k, v))


def grouped(quick: bool) -> Iterator[Pair]:
    """Times calls with four query heads for each key head."""
    size = 256 if quick else 1024
    for label, dtype in DTYPES.items():
        full_heads = rows(dtype, (32, 8), size, 128, grad=True)
        flops, peak = arithmetic(full_heads[0], size**2, MATMULS), PEAKS[label]
        mine, name = ours(*full_heads), f"{label} 32/8 heads S{size}"
        yield Pair("gradients", name, "SDPA", mine, theirs(*full_heads), flops, peak)
        expanded_heads = ours(*rows(dtype, (32, 32), size, 128, grad=True))
        yield Pair("gradients", name, "ours 32/32", mine, expanded_heads, flops, peak, goal=GROUPED)


def features(quick: bool) -> Iterator[Pair]:
    """Times bands relative to their visible pairs, and biases and dropout beside the same call without them."""
    size = 512 if quick else 2048
    row, key = torch.arange(size)[:, None], torch.arange(size)
    window, prefix = size // 8, size // 4
    for label in ("bf16", "fp32"):
        dtype, peak = DTYPES[label], PEAKS[label]
        q, k, v = rows(dtype, (8, 8), size, 128, grad=True)
        every, half = arithmetic(q, size**2, MATMULS), arithmetic(q, triangle(size), MATMULS)
        full, causal = ours(q, k, v), ours(q, k, v, band=fa.Band.causal())

        def pair(name: str, *rest: Any, goal: float = 0.0, label: str = label, peak: str = peak, **more: Any) -> Pair:
            return Pair("gradients", f"{label} {name}, S{size}", *rest, peak, goal=goal, **more)

        visible = (key <= row) & (row - key < window)
        flops, mine = arithmetic(q, int(visible.sum()), MATMULS), ours(q, k, v, band=fa.Band.window(window - 1, 0))
        yield pair(f"window {window}", RATE, mine, full, flops, peer_flops=every, goal=VISIBLE)
        yield pair(f"window {window}", "SDPA + mask", mine, theirs(q, k, v, attn_mask=visible), flops)
        visible = (key <= row) | (key < prefix)
        flops, mine = arithmetic(q, int(visible.sum()), MATMULS), ours(q, k, v, band=fa.Band.prefix_causal([prefix]))
        yield pair(f"prefix {prefix}", RATE, mine, full, flops, peer_flops=every, goal=VISIBLE)
        yield pair("causal", RATE, causal, full, half, peer_flops=every, goal=VISIBLE)
        mine = ours(q, k, v, band=fa.Band.causal(), alibi_slopes=torch.tensor([2.0 ** -(h + 1) for h in range(8)]))
        yield pair("causal ALiBi", "ours without", mine, causal, half, goal=SLOPES)
        mine = ours(q, k, v, keep_prob=0.9, seed=1)
        yield pair("dropout", "ours without", mine, full, every, goal=DROPOUT)
        bias = torch.randn(1, 8, size, size, dtype=dtype, requires_grad=True)
        mine = ours(q, k, v, bias, bias=bias)
        yield pair("dbias", "ours without", mine, full, every, goal=DBIAS)


def packed(quick: bool) -> Iterator[Pair]:
    """Times very different lengths: the backward relative to its visible pairs, and a step beside padded SDPA."""
    lengths, heads, dim, size = packed_lengths(32 if quick else 100), 12, 64, 512 if quick else 2048
    for label in ("fp32", "bf16"):
        dtype, peak = DTYPES[label], PEAKS[label]
        q, k, v = (torch.randn(sum(lengths), heads, dim, dtype=dtype, requires_grad=True) for _ in range(3))
        call = functools.partial(fa.attention, q, k, v, layout="TND", q_len=lengths)
        dense = rows(dtype, (heads, heads), size, dim, grad=True)
        pairs, name = sum(n * n for n in lengths), f"{label}, {len(lengths)} sequences"
        flops = 2 * heads * pairs * dim
        mine, full = gradient(call, (q, k, v)), ours(*dense)
        every, work = arithmetic(dense[0], size**2, MATMULS), flops * MATMULS
        yield Pair("steps", f"{name}, packed backward", RATE, mine, full, work, peak, peer_flops=every, goal=VISIBLE)
        *padded_rows, mask = padded(q.detach(), k.detach(), v.detach(), lengths)
        for tensor in padded_rows:
            tensor.requires_grad_()
        douts = torch.randn_like(q), torch.randn_like(padded_rows[0])
        other = functools.partial(sdpa, *padded_rows, attn_mask=mask)
        step = functools.partial(forward_and_backward, call, (q, k, v), douts[0])
        peer = functools.partial(forward_and_backward, other, tuple(padded_rows), douts[1])
        work = flops * (MATMULS + 2)
        yield Pair("steps", f"{name}, packed step", "padded SDPA + mask", step, peer, work, peak)


def forward_and_backward(
    call: Callable[[], torch.Tensor], inputs: tuple[torch.Tensor, ...], dout: torch.Tensor
) -> None:
    """Runs forward and backward of a call."""
    torch.autograd.grad(call(), inputs, dout)


def threads(quick: bool) -> Iterator[Pair]:
    """Times all threads beside one thread, for many heads and for a single head."""
    for label in ("bf16", "fp32"):
        for heads, goal in ((8, 1.9), (1, 1.75)):
            length = (512 if quick else 2048) * (1 if heads > 1 else 2)
            q, k, v = rows(DTYPES[label], (heads, heads), length, 128, grad=True)
            name = f"{label} {heads} head{'s' * (heads > 1)} S{length}, backward"
            work, flops = ours(q, k, v), arithmetic(q, length**2, MATMULS)
            yield Pair("threads", name, "one thread", work, with_threads(1, work), flops, PEAKS[label], goal=goal)


def training(quick: bool) -> Iterator[Pair]:
    """Times every optional feature of a padded call."""
    yield from grouped(quick)
    yield from features(quick)

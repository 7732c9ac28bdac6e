"""Times training attention beside torch's SDPA, with a mask where it needs one, and beside FlexAttention."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

import fusion_attention as fa
from benchmarks.backward_only import gradient
from fusion_attention.bench.pair import Pair

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
PEAKS = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float32"}  # float16 is computed in float32
Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# Goals at full size (S 2048, 8 heads), full and causal: speed relative to SDPA, and fraction of the peak.
FORWARD = {
    ("bf16", 128): (2.3, 2.75),
    ("fp32", 128): (1.18, 1.40),
    ("fp16", 128): (1.75, 2.05),
    ("bf16", 64): (2.4, 2.8),
    ("fp32", 64): (1.28, 1.5),
    ("fp16", 64): (2.0, 2.35),
}
SHARES = {"bf16": (0.87, 0.83), "fp32": (0.90, 0.86), "fp16": (0.90, 0.86)}
BACKWARD = {
    ("bf16", 128): (1.75, 2.1),
    ("fp32", 128): (1.25, 1.55),
    ("fp16", 128): (13.0, 16.0),
    ("bf16", 64): (1.95, 2.35),
    ("fp32", 64): (1.4, 1.7),
    ("fp16", 64): (14.0, 15.5),
}
BACKWARD_SHARES = {"bf16": (0.88, 0.85), "fp32": (0.88, 0.86), "fp16": (0.88, 0.86)}


def rows(dtype: torch.dtype, heads: tuple[int, int], size: int, dim: int, *, grad: bool = False) -> Rows:
    """Returns q, k and v of one sequence, [1, heads, size, dim]."""
    torch.manual_seed(0)
    shapes = (heads[0], heads[1], heads[1])
    q, k, v = (torch.randn(1, n, size, dim, dtype=dtype, requires_grad=grad) for n in shapes)
    return q, k, v


def arithmetic(q: torch.Tensor, pairs: int, matmuls: int) -> int:
    """Returns the floating-point operations of `matmuls` products over `pairs` visible pairs in every head of q."""
    return 2 * q.shape[1] * pairs * q.shape[-1] * matmuls


def triangle(size: int) -> int:
    """Returns the number of visible pairs of a causal square."""
    return size * (size + 1) // 2


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Callable[[], torch.Tensor]:
    """Returns a function that runs our forward, with a graph if a tensor requires gradients."""
    return functools.partial(fa.attention, q, k, v, layout="BNSD", **options)


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Callable[[], torch.Tensor]:
    """Returns a function that runs our forward without a graph."""
    return torch.no_grad()(attention(q, k, v, **options))


def peer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Callable[[], torch.Tensor]:
    """Returns a function that runs SDPA's forward."""
    return torch.no_grad()(lambda: sdpa(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **options))


@functools.cache
def compiled_flex() -> Callable[..., torch.Tensor]:
    """Returns FlexAttention compiled as its documentation recommends."""
    return torch.compile(flex_attention)


def flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> Callable[[], torch.Tensor]:
    """Returns a function that runs FlexAttention's forward with a causal window."""
    size = q.shape[2]
    mask = create_block_mask(lambda b, h, i, j: (i >= j) & (i - j < window), None, None, size, size, device="cpu")
    return torch.no_grad()(lambda: compiled_flex()(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1]))


def training(quick: bool) -> Iterator[Pair]:
    """Times forward and backward, full and causal, in every dtype."""
    size = 512 if quick else 2048
    for dim in (128, 64):
        for label, dtype in DTYPES.items():
            for causal in (False, True):
                name = f"{label} D{dim} S{size} {'causal' if causal else 'full'}"
                band = fa.Band.causal() if causal else fa.Band.full()
                pairs = triangle(size) if causal else size * size
                q, k, v = rows(dtype, (8, 8), size, dim)
                ours, theirs = forward(q, k, v, band=band), peer(q, k, v, is_causal=causal)
                flops, peak = arithmetic(q, pairs, 2), PEAKS[label]
                share_goal = SHARES[label][causal] if dim == 128 else 0.0
                goal = FORWARD[label, dim][causal]
                yield Pair("forward", name, "SDPA", ours, theirs, flops, peak, goal=goal, share_goal=share_goal)
                q, k, v = rows(dtype, (8, 8), size, dim, grad=True)
                ways = attention(q, k, v, band=band), functools.partial(sdpa, q, k, v, is_causal=causal)
                calls = [gradient(way, (q, k, v)) for way in ways]
                share_goal = BACKWARD_SHARES[label][causal] if dim == 128 else 0.0
                goal = BACKWARD[label, dim][causal]
                flops = arithmetic(q, pairs, 5)
                yield Pair("backward", name, "SDPA", *calls, flops, peak, goal=goal, share_goal=share_goal)


def masks(quick: bool) -> Iterator[Pair]:
    """Times the cases for which alternatives need a mask tensor, a bias tensor or a compiled block mask."""
    size, peak = 512 if quick else 2048, "bfloat16"
    q, k, v = rows(torch.bfloat16, (8, 8), size, 128)
    row, key = torch.arange(size)[:, None], torch.arange(size)
    window = min(256, size // 4)
    inside = (key <= row) & (row - key < window)
    flops = arithmetic(q, int(inside.sum()), 2)
    ours = forward(q, k, v, band=fa.Band.window(window - 1, 0))
    yield Pair("masks", f"window {window}, S{size}", "SDPA + mask", ours, peer(q, k, v, attn_mask=inside), flops, peak)
    yield Pair("masks", f"window {window}, S{size}", "FlexAttention", ours, flex(q, k, v, window), flops, peak)
    causal = forward(q, k, v, band=fa.Band.causal())
    flops = arithmetic(q, triangle(size), 2)
    yield Pair("masks", f"causal, S{size}", "FlexAttention", causal, flex(q, k, v, size), flops, peak)
    slopes = torch.tensor([2.0 ** -(h + 1) for h in range(8)])
    alibi = (-slopes[:, None, None] * (row - key).abs()).masked_fill(key > row, -torch.inf).to(torch.bfloat16)[None]
    ours = forward(q, k, v, band=fa.Band.causal(), alibi_slopes=slopes)
    yield Pair("masks", f"causal ALiBi, S{size}", "SDPA + bias", ours, peer(q, k, v, attn_mask=alibi), flops, peak)
    flops, goal = arithmetic(q, size * size, 2), 0.95 * FORWARD["bf16", 128][0]
    bias = torch.randn(1, 8, size, size, dtype=torch.bfloat16)
    ours, theirs = forward(q, k, v, bias=bias), peer(q, k, v, attn_mask=bias)
    yield Pair("masks", f"bias, S{size}", "SDPA + bias", ours, theirs, flops, peak, goal=goal)
    blocked = torch.rand(size, size) < 0.3
    ours, theirs = forward(q, k, v, blocked=blocked), peer(q, k, v, attn_mask=~blocked)
    yield Pair("masks", f"mask, S{size}", "SDPA + mask", ours, theirs, flops, peak, goal=goal)


def shapes(quick: bool) -> Iterator[Pair]:
    """Times grouped heads, short sequences and odd head dims."""
    size = 512 if quick else 2048
    for label, dtype in DTYPES.items():
        q, k, v = rows(dtype, (32, 8), size // 2, 128)
        flops, name = arithmetic(q, (size // 2) ** 2, 2), f"{label} 32/8 heads S{size // 2}"
        yield Pair("shapes", name, "SDPA", forward(q, k, v), peer(q, k, v), flops, PEAKS[label])
    for short in (128, 512):
        q, k, v = rows(torch.bfloat16, (8, 8), short, 128)
        ours, theirs, flops = forward(q, k, v), peer(q, k, v), arithmetic(q, short**2, 2)
        yield Pair("shapes", f"bf16 S{short}", "SDPA", ours, theirs, flops, "bfloat16", goal=2.5)
    for dim in (72, 80, 96, 256):
        q, k, v = rows(torch.bfloat16, (8, 8), size, dim)
        ours, theirs = forward(q, k, v), peer(q, k, v)
        yield Pair("shapes", f"bf16 D{dim}", "SDPA", ours, theirs, arithmetic(q, size**2, 2), "bfloat16")


def packed_lengths(count: int) -> list[int]:
    """Returns random lengths with a long tail."""
    generator = torch.Generator().manual_seed(0)
    return (torch.exp(torch.randn(count, generator=generator) + 4).int() + 4).clamp(max=512).tolist()


def padded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int]) -> tuple[torch.Tensor, ...]:
    """Returns packed rows [T, heads, dim] padded to [B, heads, longest, dim], and the mask of real keys."""
    longest = max(lengths)
    padded_rows = torch.zeros(3, len(lengths), q.shape[1], longest, q.shape[2], dtype=q.dtype)
    for b, sequence_rows in enumerate(torch.stack((q, k, v)).split(lengths, dim=1)):
        padded_rows[:, b, :, : lengths[b]] = sequence_rows.transpose(1, 2)
    return *padded_rows, (torch.arange(longest) < torch.tensor(lengths)[:, None])[:, None, None]


def packed(quick: bool) -> Iterator[Pair]:
    """Times sequences of very different lengths: packed for us, padded with a key mask for SDPA."""
    lengths, heads, dim = packed_lengths(32 if quick else 100), 12, 64
    count, total, longest = len(lengths), sum(lengths), max(lengths)
    padding = count * longest**2 / sum(n * n for n in lengths)  # pairs that the peer computes for each of our pairs
    for label in ("fp32", "bf16"):
        dtype = DTYPES[label]
        q, k, v = (torch.randn(total, heads, dim, dtype=dtype) for _ in range(3))
        *padded_rows, mask = padded(q, k, v, lengths)
        ours = torch.no_grad()(functools.partial(fa.attention, q, k, v, layout="TND", q_len=lengths))
        theirs = torch.no_grad()(functools.partial(sdpa, *padded_rows, attn_mask=mask))
        flops = sum(4 * heads * n * n * dim for n in lengths)
        name = f"{label}, {count} sequences, {total} of {count * longest} tokens"
        goal = 0.9 * padding * FORWARD[label, dim][0]
        yield Pair("packed", name, "padded SDPA + mask", ours, theirs, flops, PEAKS[label], goal=goal)
    yield from short(quick)


def short(quick: bool) -> Iterator[Pair]:
    """Times short sequences of equal length: packed for us, a batch without a mask for SDPA."""
    tokens, heads, dim = 2048 if quick else 8192, 12, 64
    for label, size in (("bf16", 8), ("bf16", 16), ("bf16", 32), ("fp32", 16), ("fp16", 16)):
        count = tokens // size
        q, k, v = (torch.randn(tokens, heads, dim, dtype=DTYPES[label]) for _ in range(3))
        batch = [t.view(count, size, heads, dim).transpose(1, 2).contiguous() for t in (q, k, v)]
        ours = torch.no_grad()(functools.partial(fa.attention, q, k, v, layout="TND", q_len=[size] * count))
        theirs = torch.no_grad()(functools.partial(sdpa, *batch))
        flops, goal = 4 * heads * tokens * size * dim, 3.0 if (label, size) == ("bf16", 16) else 0.0
        yield Pair("packed", f"{label}, {count} of {size} tokens", "SDPA", ours, theirs, flops, PEAKS[label], goal=goal)

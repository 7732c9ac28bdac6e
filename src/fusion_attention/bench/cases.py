"""The benchmarks of `fusion-attention bench`: common attention calls, and the same calls by other libraries (peers).

They take a minute; the repository's folder `benchmarks` has more.
"""

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import fusion_attention as fa
from fusion_attention.bench.pair import Pair

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
PEAKS = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float32"}  # the CPU computes float16 as float32
HEADS, DIM = 8, 64
Call = Callable[[], object]


def peers(device: torch.device) -> dict[str, str]:
    """Returns {library to compare with: its version, or the reason why it is not timed on this device}."""
    results = {"torch SDPA": str(torch.__version__)}
    results["FlashAttention (flash_attn)"] = _flash_attn(device) or (
        "not installed" if device.type == "cuda" else "computes only on GPUs"
    )
    if device.type == "cpu":
        why = "" if hasattr(torch, "compile") else "torch without torch.compile"
        results["FlexAttention"] = why or f"{torch.__version__}, compiled: in the repository's benchmarks"
    return results


def _flash_attn(device: torch.device) -> str:
    """Returns the release of the package flash_attn; "" if it cannot run on the device."""
    if device.type != "cuda" or importlib.util.find_spec("flash_attn") is None:
        return ""
    try:
        return importlib.metadata.version("flash_attn")
    except importlib.metadata.PackageNotFoundError:
        return ""


def forward(device: torch.device, quick: bool) -> Iterator[Pair]:
    """Yields benchmarks of dense attention (all keys; causal), forward, against other libraries; quick: small sizes."""
    size = 256 if quick else 1024
    for label, dtype in DTYPES.items():
        q, k, v = _rows(dtype, device, (HEADS, HEADS), size)
        for causal in (False, True):
            band = fa.Band.causal() if causal else None
            pairs = size * (size + 1) // 2 if causal else size * size
            name = f"{label}, {'causal' if causal else 'all keys'}, S{size}"
            ours = _without_grad(fa.attention, q, k, v, layout="BNSD", band=band)
            for peer, call in _dense_peers(device, q, k, v, causal).items():
                yield _pair("forward", name, peer, ours, call, 4 * HEADS * pairs * DIM, device, label)


def training(device: torch.device, quick: bool) -> Iterator[Pair]:
    """Yields benchmarks of causal attention, forward and backward, against torch's SDPA; quick: small sizes."""
    size = 256 if quick else 1024
    for label, dtype in DTYPES.items():
        q, k, v = (t.requires_grad_() for t in _rows(dtype, device, (HEADS, HEADS), size))
        dout = torch.randn_like(q)
        ours = partial(_step, partial(fa.attention, layout="BNSD", band=fa.Band.causal()), (q, k, v), dout)
        peer_call = partial(_step, partial(sdpa, is_causal=True), (q, k, v), dout)
        flops = 14 * HEADS * size * (size + 1) // 2 * DIM
        yield _pair("training", f"{label}, causal step, S{size}", "torch SDPA", ours, peer_call, flops, device, label)


def windows(device: torch.device, quick: bool) -> Iterator[Pair]:
    """Yields a benchmark of a forward with a sliding window against torch's SDPA with a mask; quick: small sizes."""
    size, left = (512, 63) if quick else (2048, 255)
    q, k, v = _rows(torch.bfloat16, device, (HEADS, HEADS), size)
    row, key = torch.arange(size, device=device)[:, None], torch.arange(size, device=device)
    inside = (key <= row) & (row - key <= left)
    ours = _without_grad(fa.attention, q, k, v, layout="BNSD", band=fa.Band.window(left, 0))
    peer_call = _without_grad(sdpa, q, k, v, attn_mask=inside)
    flops = 4 * HEADS * int(inside.sum()) * DIM
    yield _pair(
        "windows", f"bf16, window {left + 1}, S{size}", "torch SDPA + mask", ours, peer_call, flops, device, "bf16"
    )


def packed(device: torch.device, quick: bool) -> Iterator[Pair]:
    """Yields benchmarks of a forward over packed sequences against SDPA over padded ones; quick: fewer sequences."""
    lengths = [16, 40, 7, 120, 64, 33, 200, 12] * (1 if quick else 4)
    total, longest, count = sum(lengths), max(lengths), len(lengths)
    flops = sum(4 * HEADS * n * n * DIM for n in lengths)
    for label in ("bf16", "fp32"):
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(3, total, HEADS, DIM, generator=generator).to(device, DTYPES[label])
        padded_rows = rows.new_zeros(3, count, HEADS, longest, DIM)
        for b, sequence_rows in enumerate(rows.split(lengths, dim=1)):
            padded_rows[:, b, :, : lengths[b]] = sequence_rows.transpose(1, 2)
        ends = torch.tensor(lengths, device=device)[:, None]
        mask = (torch.arange(longest, device=device) < ends)[:, None, None]
        ours = _without_grad(fa.attention, *rows, layout="TND", q_len=lengths)
        peer_call = _without_grad(sdpa, *padded_rows, attn_mask=mask)
        name = f"{label}, {count} sequences, {total} of {count * longest} tokens"
        yield _pair("packed", name, "padded torch SDPA", ours, peer_call, flops, device, label)


def decoding(device: torch.device, quick: bool) -> Iterator[Pair]:
    """Yields benchmarks of decoding one token per sequence, 8 query heads per key head, against SDPA; quick: small."""
    items, tokens, heads = (4, 512, 2) if quick else (16, 2048, 4)
    for label in ("bf16", "fp32"):
        generator = torch.Generator().manual_seed(0)
        q = torch.randn(items, 1, 8 * heads, DIM, generator=generator).to(device, DTYPES[label])
        k, v = torch.randn(2, items, tokens, heads, DIM, generator=generator).to(device, DTYPES[label])
        ours = _without_grad(fa.decode_attention, q, (k, v), kv_len=[tokens] * items)
        by_head = [t.transpose(1, 2) for t in (q, k, v)]
        peer_call = _without_grad(sdpa, *by_head, enable_gqa=True)
        flops = 4 * items * 8 * heads * tokens * DIM
        name = f"{label}, {items} sequences of {tokens} tokens"
        yield _pair("decoding", name, "torch SDPA", ours, peer_call, flops, device, "")


GROUPS: dict[str, tuple[Callable[[torch.device, bool], Iterator[Pair]], int]] = {
    "forward": (forward, 6),
    "training": (training, 3),
    "windows": (windows, 1),
    "packed": (packed, 2),
    "decoding": (decoding, 2),
}


def _rows(dtype: torch.dtype, device: torch.device, heads: tuple[int, int], size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (heads[0], heads[1], heads[1])
    return [torch.randn(1, n, size, DIM, generator=generator).to(device, dtype) for n in shapes]


def _without_grad(function: Callable[..., Any], *args: Any, **how: Any) -> Call:
    return torch.no_grad()(partial(function, *args, **how))


def _step(attend: Callable[..., Any], inputs: tuple[torch.Tensor, ...], dout: torch.Tensor) -> object:
    return torch.autograd.grad(attend(*inputs), inputs, dout)


def _dense_peers(
    device: torch.device, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> dict[str, Call]:
    results = {"torch SDPA": _without_grad(sdpa, q, k, v, is_causal=causal)}
    if _flash_attn(device) and q.dtype != torch.float32:
        flash_attn_func = importlib.import_module("flash_attn").flash_attn_func
        by_token = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
        results["flash_attn"] = _without_grad(flash_attn_func, *by_token, causal=causal)
    return results


def _pair(
    group: str, name: str, peer: str, ours: Call, peer_call: Call, flops: int, device: torch.device, label: str
) -> Pair:
    """Returns the benchmark of `ours` against `peer_call`, functions without arguments; on a GPU both wait for the
    result, and no peak rate is compared. group, name, peer: its titles; flops: operations of `ours`; label: dtype."""
    if device.type == "cuda":
        ours, peer_call = _finished(ours), _finished(peer_call)
        return Pair(group, name, peer, ours, peer_call, flops)
    return Pair(group, name, peer, ours, peer_call, flops, PEAKS.get(label, ""))


def _finished(call: Call) -> Call:
    def timed() -> object:
        result = call()
        torch.cuda.synchronize()
        return result

    return timed

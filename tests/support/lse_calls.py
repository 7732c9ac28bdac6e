"""Computes losses that use the lse of attention, and their expected gradients in float64."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import fusion_attention as fa
from fusion_attention.testing.estimated_rounding_errors import compare_with

Tensor = torch.Tensor
Given = dict[str, Tensor]
Call = Callable[..., Any]
BATCH, ROWS, KEYS, HEADS, HEADS_KV, DIM = 2, 37, 50, 4, 2, 24
VISIBLE = torch.ones(ROWS, KEYS, dtype=torch.bool).tril(KEYS - ROWS - 20)  # the first rows see no keys


def drawn(seed: int, dtype: torch.dtype, **shapes: tuple[int, ...]) -> Given:
    torch.manual_seed(seed)
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}


def results(call: Call, given: Given, dtype: torch.dtype | None, parts: str) -> Any:
    """Returns [lse, gradients] of a loss that uses lse and, if parts is "both", out; dlse is float32."""
    leaves = {n: (t if dtype is None else t.to(dtype)).detach().requires_grad_() for n, t in given.items()}
    out, lse = call(**leaves)
    torch.manual_seed(5)
    dout, dlse = torch.randn(out.shape).to(next(iter(given.values())).dtype), torch.randn(lse.shape) * 3
    # Rows without keys have lse -inf for any logits.
    wanted = [(lse, dlse.to(lse.dtype))] + ([(out, dout.to(out.dtype))] if parts == "both" else [])
    result, above = zip(*wanted, strict=True)
    grads = torch.autograd.grad(result, [*leaves.values()], above, allow_unused=True)
    pairs = zip(leaves.items(), grads, strict=True)
    named = {f"d{n}": torch.zeros_like(leaf) if g is None else g for (n, leaf), g in pairs}  # lse has no gradient for v
    return {"lse": lse.masked_fill(lse == -torch.inf, 0), **named}


def judge(
    name: str, given: Given, call: Call, program: Call, parts: str,
    backends: tuple[str, ...] = ("cpu", "golden"),
) -> None:  # fmt: skip
    """Compares a call on several back ends with the program in float64."""
    got = {b: results(partial(call, b), given, None, parts) for b in backends}

    def both() -> Any:
        result = results(program, given, torch.float64, parts)
        return dict.fromkeys(got, result)

    compare_with(name, got, both)


def formula(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, sink: Tensor | None = None, cap: float = 0.0, bias: Any = None
) -> tuple[Tensor, Tensor]:
    """Computes (out, lse) of [.., heads, rows, dim]; rows without keys are 0, and their lse is -inf or the sink."""
    group = q.shape[-3] // k.shape[-3]
    scores = q @ k.repeat_interleave(group, -3).mT / math.sqrt(q.shape[-1])
    scores = cap * torch.tanh(scores / cap) if cap else scores
    scores = scores if bias is None else scores + bias
    scores = scores.masked_fill(~visible, -torch.inf)
    if sink is not None:
        scores = torch.cat((scores, sink.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)), -1)
    none = ~visible.any(-1) if sink is None else torch.tensor(False)
    lse = scores.masked_fill(none[..., None], 0).logsumexp(-1).masked_fill(none, -torch.inf)
    weights = (scores - lse.masked_fill(none, 0)[..., None]).exp()[..., : k.shape[-2]].masked_fill(none[..., None], 0)
    return weights @ v.repeat_interleave(group, -3), lse


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sink": {"sink": (HEADS,)},
    "cap and bias": {"cap": 3.0, "bias": (1, HEADS, ROWS, KEYS)},
}


def on(device: str, call: Call) -> Call:
    """Returns a call that copies its tensors to a device and its results back."""

    def run(backend: str, **leaves: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = call(**{n: t.to(device) for n, t in leaves.items()}, backend=backend, return_lse=True)
        return out.cpu(), lse.cpu()

    return run


def dense(name: str, dtype: torch.dtype, device: str = "cpu") -> tuple[Given, Call, Call]:
    """Returns the tensors of a case, its call of a back end, and the formula."""
    case = dict(CASES[name])
    cap = case.pop("cap", 0.0)
    shapes = {"q": (BATCH, HEADS, ROWS, DIM), "k": (BATCH, HEADS_KV, KEYS, DIM), "v": (BATCH, HEADS_KV, KEYS, DIM)}
    given = drawn(3, dtype, **shapes, **case)
    given |= {"sink": given["sink"].float()} if "sink" in given else {}
    ours = partial(fa.attention, layout="BNSD", softcap=cap, blocked=~VISIBLE.to(device))
    return given, on(device, ours), partial(formula, visible=VISIBLE, cap=cap)


def lists(dtype: torch.dtype, device: str = "cpu") -> tuple[Given, Call, Call]:
    """Returns the same as dense(), for attention to lists."""
    given = drawn(7, dtype, q=(BATCH, ROWS, HEADS, DIM), k=(BATCH, KEYS, 1, DIM), v=(BATCH, KEYS, 1, DIM))
    given["sink"] = torch.randn(HEADS)
    listed = torch.stack([torch.randperm(KEYS)[:9] for _ in range(BATCH * ROWS)]).view(BATCH, ROWS, 1, 9).int()
    visible = torch.zeros(BATCH, 1, ROWS, KEYS).scatter_(-1, listed.transpose(1, 2).long(), 1) > 0
    ours = partial(fa.sparse_attention, indices=listed.to(device), causal=False)

    def wanted(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Any:
        out, lse = formula(*(t.transpose(1, 2) for t in (q, k, v)), visible=visible, sink=sink)
        return out.transpose(1, 2), lse

    return given, on(device, ours), wanted

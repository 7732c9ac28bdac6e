"""Computes attention as flash-attn's documentation defines it, sequence by sequence, and lists a call's options."""

import math
from typing import Any

import torch

from fusion_attention.testing.estimated_rounding_errors import attend

Tensor = torch.Tensor


def formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Returns (out [S1, N1, Dv], lse [N1, S1]) of one sequence [S, N, D], in its dtype."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    row, key = torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0], torch.arange(k.shape[0])
    left, right = (int(n) for n in window_size)
    visible = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool)
    visible &= (key <= row) if causal else (key <= row + right) if right >= 0 else visible
    visible &= (key >= row - left) if left >= 0 else visible

    def scores_of() -> Tensor:
        scores = torch.einsum("qnd,knd->nqk", q * (softmax_scale or q.shape[-1] ** -0.5), k)
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        if alibi_slopes is not None:
            scores = scores - alibi_slopes.to(q.dtype)[:, None, None] * (row - key).abs()
        return scores.masked_fill(~visible, -math.inf)

    scores = scores_of()
    return attend(scores, v.transpose(0, 1), scores_of).transpose(0, 1), scores.logsumexp(-1)


WORDS: dict[str, dict[str, Any]] = {
    "nothing else": {},
    "softmax_scale": {"softmax_scale": 0.3},
    "causal": {"causal": True},
    "window_size": {"window_size": (3, 2)},
    "window_size, one side": {"window_size": (2, -1)},
    "window_size as a tensor": {"window_size": torch.tensor([1, 0])},
    "window_size with causal": {"causal": True, "window_size": (2, 5)},
    "softcap": {"softcap": 1.5},
    "softcap, causal, window": {"softcap": 1.5, "causal": True, "window_size": (4, 0)},
    "alibi_slopes [N]": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.05])},
    "alibi_slopes [B, N], causal": {"alibi_slopes": torch.rand(3, 4), "causal": True},
    "alibi_slopes, softcap": {"alibi_slopes": torch.rand(3, 4), "softcap": 1.5},
    "deterministic": {"deterministic": True},
}


def of_sequence(how: dict[str, Any], b: int) -> dict[str, Any]:
    slopes = how.get("alibi_slopes")
    return how | ({"alibi_slopes": slopes[b]} if slopes is not None and slopes.dim() == 2 else {})


def packed_call(how: dict[str, Any], lengths: tuple[list[int], list[int]]) -> Any:
    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        parts = [t.split(n) for t, n in zip((q, k, v), (lengths[0], lengths[1], lengths[1]), strict=True)]
        results = [formula(*three, **of_sequence(how, b)) for b, three in enumerate(zip(*parts, strict=True))]
        return torch.cat([o for o, _ in results]), torch.cat([x for _, x in results], 1)

    return call


def ends(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)

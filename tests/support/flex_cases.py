"""Defines masks and score_mods of typical FlexAttention programs, and computes attention by its formula in any dtype.

The formula calls these functions like torch's eager attention, and shares no code with the integration.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask, noop_mask

from fusion_attention.testing.estimated_rounding_errors import attend

Mod = Callable[..., Any]

ITEMS, HEADS, KV_HEADS, TOKENS, DIM = 2, 4, 2, 140, 16  # more tokens than a tile of 128 has
_DOCUMENT = torch.repeat_interleave(torch.arange(5), torch.tensor([30, 1, 60, 40, 9]))
_OWN_DOCUMENT = torch.stack([_DOCUMENT, _DOCUMENT.flip(0).neg()])
_LENGTH, _PAD, _PREFIX = torch.tensor([140, 93]), torch.tensor([0, 77]), torch.tensor([40, 100])
_GLOBAL = torch.arange(TOKENS) % 41 == 3
_TABLE = torch.randn(HEADS, 2 * TOKENS, generator=torch.Generator().manual_seed(1))
_BUCKETS = torch.randn(32, HEADS, generator=torch.Generator().manual_seed(2))
_KEY = torch.randn(ITEMS, TOKENS, generator=torch.Generator().manual_seed(3))
_PAIR = torch.randn(TOKENS, TOKENS, generator=torch.Generator().manual_seed(4))
_ROPE = torch.randn(2, ITEMS, HEADS, TOKENS, 8, generator=torch.Generator().manual_seed(5))
_SLOPES = torch.exp2(-8.0 * torch.arange(1, HEADS + 1) / HEADS)


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def same_document(b: Any, h: Any, q: Any, k: Any) -> Any:
    return _DOCUMENT[q] == _DOCUMENT[k]


def neighbours(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Shows the 5 x 5 pixels around a pixel of a canvas of 20 columns and 7 rows, shifted inwards at its edges."""
    row, column = (q // 20).clamp(2, 4), (q % 20).clamp(2, 17)
    return ((row - k // 20).abs() <= 2) & ((column - k % 20).abs() <= 2)


# Mask: (function, the form in which it is passed to attention()).
MASKS: dict[str, tuple[Mod, str]] = {
    "full": (noop_mask, "band"),
    "causal": (causal, "band"),
    "sliding window": (lambda b, h, q, k: (q >= k) & (q - k <= 40), "band"),
    "symmetric window": (lambda b, h, q, k: (q - k).abs() <= 25, "band"),
    "keys ahead": (lambda b, h, q, k: k > q + 7, "band"),
    "prefix LM": (lambda b, h, q, k: (k < 70) | (q >= k), "band"),
    "prefix LM, a prefix per item": (lambda b, h, q, k: (k < _PREFIX[b]) | (q >= k), "band"),
    "right padding, causal": (lambda b, h, q, k: (q >= k) & (k < _LENGTH[b]), "band"),
    "right padding of rows too": (lambda b, h, q, k: (q < _LENGTH[b]) & (k < _LENGTH[b]), "band"),
    "left padding, causal": (lambda b, h, q, k: (q >= k) & (k >= _PAD[b]), "packed"),
    "documents": (same_document, "packed"),
    "causal documents": (lambda b, h, q, k: causal(b, h, q, k) & same_document(b, h, q, k), "packed"),
    "windows in documents": (lambda b, h, q, k: same_document(b, h, q, k) & (q >= k) & (q - k < 16), "packed"),
    "documents of each item": (lambda b, h, q, k: (_OWN_DOCUMENT[b, q] == _OWN_DOCUMENT[b, k]) & (q >= k), "packed"),
    "dilated window": (lambda b, h, q, k: ((q - k).abs() <= 60) & ((q - k) % 3 == 0), "tiles"),
    "window and global tokens": (lambda b, h, q, k: ((q - k).abs() <= 9) | _GLOBAL[q] | _GLOBAL[k], "tiles"),
    "window and first tokens": (lambda b, h, q, k: (q >= k) & ((q - k < 30) | (k < 4)), "tiles"),
    "blocks, causal": (lambda b, h, q, k: q // 32 >= k // 32, "tiles"),
    "neighbourhood of a canvas": (neighbours, "tiles"),
    "a window per head": (lambda b, h, q, k: (q >= k) & (q - k < 20 * (h + 1)), "tiles"),
    "some rows see nothing": (lambda b, h, q, k: (q % 5 > 0) & (q >= k), "tiles"),
    "nothing": (lambda b, h, q, k: q < 0, "band"),
}


def bucket(distance: Any) -> Any:
    """Returns T5's bucket of a distance: exact below 8, then logarithmic."""
    far = 8 + (torch.log(distance.clamp(min=1).float() / 8) / 2.7725887 * 8).long()
    ahead = torch.where(distance < 0, 16, 0)
    distance = distance.abs()
    return ahead + torch.where(distance < 8, distance, far.clamp(min=8, max=15))


def _hidden_ahead(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return torch.where(q >= k, 15 * torch.tanh(score / 15) - _SLOPES[h] * (q - k), -float("inf"))


SCORES: dict[str, tuple[Mod, str]] = {
    "the score itself": (lambda s, b, h, q, k: s, "every row sees every key"),
    "a factor": (lambda s, b, h, q, k: 1.0 - s * 0.5, "scale * -0.5, bias"),
    "softcap": (lambda s, b, h, q, k: 20 * torch.tanh(s / 20), "softcap=20"),
    "softcap of a sharper score": (lambda s, b, h, q, k: -2.0 * torch.tanh(s * 3), "scale * -6, softcap=2"),
    "ALiBi": (lambda s, b, h, q, k: s - _SLOPES[h] * (q - k).abs(), "alibi_slopes"),
    "ALiBi as a difference": (lambda s, b, h, q, k: s + (k - q) * torch.exp2(-(h + 1.0)), "bias"),
    "causal by -inf": (lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf")), "band=Band.causal()"),
    "capped, sloped, causal by -inf": (_hidden_ahead, "band=Band.causal(), softcap=15, alibi_slopes"),
    "a factor per row": (lambda s, b, h, q, k: s * torch.log(q + 2.0) + _KEY[b, k], "a factor per row, bias"),
    "a factor per head under a cap": (lambda s, b, h, q, k: 5 * torch.tanh(s / (h + 1)), "scale * 5, a factor per row"),
    "relative table": (lambda s, b, h, q, k: s + _TABLE[h, q - k + TOKENS], "bias"),
    "T5's buckets": (lambda s, b, h, q, k: s + _BUCKETS[bucket(q - k), h], "bias"),
    "a bias per key": (lambda s, b, h, q, k: _KEY[b, k] + s, "bias"),
    "a bias per pair": (lambda s, b, h, q, k: s + _PAIR[q, k], "bias"),
    "softcap and relative table": (
        lambda s, b, h, q, k: 9 * torch.tanh(s / 9) + _TABLE[h, q - k + TOKENS],
        "softcap=9, bias",
    ),
    "rotary part of a latent": (
        lambda s, b, h, q, k: s + 0.1 * torch.dot(_ROPE[0, b, h, q], _ROPE[1, b, h, k]),
        "bias",
    ),
}

REFUSED: dict[str, tuple[Mod, str]] = {
    "another activation": (lambda s, b, h, q, k: torch.log(torch.nn.functional.gelu(s) + 1), "gelu() of a score"),
    "a clamp": (lambda s, b, h, q, k: s.clamp(max=3), ".clamp of a score"),
    "a square": (lambda s, b, h, q, k: s * s, "a product of two scores"),
    "a number for a score": (lambda s, b, h, q, k: torch.where(q >= k, s, -1e9), "where() with a number"),
    "a factor per key": (lambda s, b, h, q, k: s * _KEY[b, k], "a score times a factor that depends on the key"),
    "a factor after the cap": (lambda s, b, h, q, k: torch.tanh(s) * (q + 1), "a capped score times a factor"),
    "a bias under the cap": (lambda s, b, h, q, k: 9 * torch.tanh((s + q - k) / 9), "tanh() of a sum"),
    "a condition on the score": (lambda s, b, h, q, k: torch.where(s > 0, s, 0.1 * s), "a comparison"),
}


def formula(q: Tensor, k: Tensor, v: Tensor, score_mod: Mod | None, mask: Mod | None) -> tuple[Tensor, Tensor]:
    """Returns differentiable (out, lse) in q's dtype; tensors that functions capture keep their dtype."""
    shared = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(shared, 1) for t in (k, v))
    hidden = None if mask is None else ~create_mask(mask, *q.shape[:3], k.shape[2], device="cpu")
    if score_mod is not None:
        for axis in (3, 2, 1, 0):
            score_mod = torch.vmap(score_mod, in_dims=(0, *(0 if i == axis else None for i in range(4))))

    def scores_of() -> Tensor:
        scores = q @ k.transpose(2, 3) * q.shape[3] ** -0.5
        if score_mod is not None:
            from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

            with TransformGetItemToIndex():
                scores = score_mod(scores, *map(torch.arange, scores.shape))
        return scores if hidden is None else scores.masked_fill(hidden, -torch.inf)

    scores = scores_of()
    return attend(scores, v, scores_of), scores.logsumexp(-1)


def inputs(seed: int, tokens: int = TOKENS, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Returns random q, k, v and a gradient of the output."""
    random = torch.Generator().manual_seed(seed)
    return [
        torch.randn(ITEMS, heads, tokens, DIM, generator=random).to(dtype)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]

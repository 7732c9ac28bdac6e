"""Well-known mistakes of attention kernels, each with its description and a function that makes it in a call."""

from fusion_attention.judging.mistakes import (
    addresses,
    caches,
    compressed,
    gradients,
    lists,
    masks,
    online_softmax,
    results,
    scores,
    single_tiles,
    splits,
    stored,
)
from fusion_attention.judging.mistakes.kinds import Case, Mistake, Try

# In this order mistakes are tried, and listed in reports if they explain a result equally well.
MISTAKES: tuple[Mistake, ...] = (
    *masks.MISTAKES, *compressed.MISTAKES, *scores.MISTAKES, *addresses.MISTAKES, *caches.MISTAKES, *results.MISTAKES,
    *online_softmax.MISTAKES, *single_tiles.MISTAKES, *splits.MISTAKES, *gradients.MISTAKES, *stored.MISTAKES,
    *lists.MISTAKES,
)  # fmt: skip

__all__ = ["MISTAKES", "Case", "Mistake", "Try"]

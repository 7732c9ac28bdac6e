"""Well-known mistakes of attention kernels, each with its description and the settings that reproduce it."""

from fusion_attention.judging.mistakes import (
    caches,
    compressed,
    gradients,
    lists,
    loads,
    masks,
    memory,
    results,
    scores,
    splits,
    stored,
    tiles,
)
from fusion_attention.judging.mistakes.kinds import Case, Mistake, Try

MISTAKES: tuple[Mistake, ...] = (
    *masks.MISTAKES,
    *compressed.MISTAKES,
    *scores.MISTAKES,
    *memory.MISTAKES,
    *caches.MISTAKES,
    *results.MISTAKES,
    *tiles.MISTAKES,
    *loads.MISTAKES,
    *splits.MISTAKES,
    *gradients.MISTAKES,
    *stored.MISTAKES,
    *lists.MISTAKES,
)

__all__ = ["MISTAKES", "Case", "Mistake", "Try"]

"""Well-known mistakes of attention kernels, each with its description and the settings that reproduce it."""

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
_MODULES = (
    masks,
    compressed,
    scores,
    addresses,
    caches,
    results,
    online_softmax,
    single_tiles,
    splits,
    gradients,
    stored,
    lists,
)
MISTAKES: tuple[Mistake, ...] = tuple(
    mistake for module in _MODULES for mistake in vars(module).values() if isinstance(mistake, Mistake)
)

__all__ = ["MISTAKES", "Case", "Mistake", "Try"]

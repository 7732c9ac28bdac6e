"""Cases whose rows start on 16 bytes, as kernels with wide loads and descriptors want; testing's own never do."""

import math
from typing import Any

ROWS = ("query", "key", "value", "dy", "query_rope", "key_rope")
GAP = 16  # elements


def aligned(args: dict[str, Any]) -> dict[str, Any]:
    """The same arguments; the rows have NaN between them, and lie apart by whole 16 bytes where their dims allow it."""
    moved = {}
    for name in ROWS:
        values = args[name]
        if values is not None:
            buffer = values.new_full((*values.shape[:-1], values.shape[-1] + GAP), math.nan)
            moved[name] = buffer[..., : values.shape[-1]].copy_(values)
    return args | moved

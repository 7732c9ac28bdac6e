"""Aligns the rows of test cases to 16 bytes, which kernels need for wide loads and descriptors."""

import math
from typing import Any

ROWS = ("query", "key", "value", "dy", "query_rope", "key_rope")
GAP = 16  # elements


def aligned(args: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments with aligned rows (if their dim is a multiple of 16 bytes) and NaN between the rows."""
    moved = {}
    for name in ROWS:
        values = args[name]
        if values is not None:
            buffer = values.new_full((*values.shape[:-1], values.shape[-1] + GAP), math.nan)
            moved[name] = buffer[..., : values.shape[-1]].copy_(values)
    return args | moved

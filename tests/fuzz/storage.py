"""Memory of tensors: random strides and offsets, with NaN or garbage around the elements."""

from collections.abc import Sequence

import numpy as np
import torch

Tensor = torch.Tensor
Rng = np.random.Generator
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DENSE_LAYOUTS = ("BSND", "BNSD", "BSH", "SBH")


def maybe(rng: Rng, probability: float) -> bool:
    return bool(rng.random() < probability)


def pick(rng: Rng, *values: object) -> object:
    return values[int(rng.integers(len(values)))]


def size(rng: Rng, most: int = 300) -> int:
    """Draws a length: mostly small, sometimes larger than a tile of any kernel, sometimes 0."""
    kind = rng.random()
    top = 12 if kind < 0.6 else 40 if kind < 0.88 else 130 if kind < 0.97 else 300
    return 0 if maybe(rng, 0.04) else int(rng.integers(1, min(top, most) + 1))


def dim(rng: Rng, most: int = 300) -> int:
    """Draws the elements of a row: odd numbers, powers of two, and some large numbers."""
    kind = rng.random()
    if kind < 0.35:
        return min(int(2 ** rng.integers(0, 8)), most)
    return int(rng.integers(1, min(24 if kind < 0.8 else 100 if kind < 0.95 else 300, most) + 1))


def normal(rng: Rng, *shape: int) -> Tensor:
    """Draws float64 numbers of a random magnitude, which is sometimes 0."""
    size = float(rng.choice([1.0, 1.0, 1.0, 0.1, 3.0, 0.0], p=[0.3, 0.3, 0.2, 0.1, 0.08, 0.02]))
    return torch.from_numpy(rng.standard_normal(shape) * size)


def garbage(rng: Rng, dtype: torch.dtype) -> float | int | bool:
    """Draws a number for memory between elements."""
    if dtype.is_floating_point:
        return float(rng.choice([np.nan, np.nan, np.inf, -np.inf]))
    if dtype == torch.bool:
        return bool(rng.integers(2))
    return int(rng.integers(0, 256)) if dtype == torch.uint8 else int(rng.integers(-128, 128))


def place(rng: Rng, values: Tensor, contiguous: float = 0.25) -> Tensor:
    """Copies values to random strides: axes in any order, steps and gaps between elements, an offset, garbage."""
    dims = values.dim()
    if maybe(rng, contiguous):
        return values.clone(memory_format=torch.contiguous_format)
    order = list(rng.permutation(dims)) if maybe(rng, 0.5) else list(range(dims))
    if maybe(rng, 0.6) and dims:  # neighbouring elements in rows, as models have them
        order = [axis for axis in order if axis != dims - 1] + [dims - 1]
    small = values.numel() <= 20000
    steps = [int(rng.choice([1, 1, 1, 2, 3])) if small else 1 for _ in range(dims)]
    if dims and maybe(rng, 0.7):
        steps[-1] = 1
    before = [int(rng.integers(0, 3)) if small else int(rng.integers(0, 2)) for _ in range(dims)]
    behind = [int(rng.integers(0, 3)) if small else 0 for _ in range(dims)]
    buffer = [b + n * s + e for n, s, b, e in zip(values.shape, steps, before, behind, strict=True)]
    offset = int(rng.integers(0, 9))
    memory = torch.full((offset + int(np.prod([1, *buffer])),), garbage(rng, values.dtype), dtype=values.dtype)
    full = memory[offset:].view([buffer[axis] for axis in order]).permute([order.index(axis) for axis in range(dims)])
    for axis in range(dims):
        full = full.narrow(axis, before[axis], values.shape[axis] * steps[axis])
        full = full[(slice(None),) * axis + (slice(None, None, steps[axis]),)]
    return full.copy_(values)


def place_dense(parts: Sequence[Tensor], layout: str, tokens: int, fill: float = 0.0) -> Tensor:
    """Stores sequences [length, heads, dim] in a layout; tokens: S, or T if packed; fill: value after lengths."""
    heads, elements = parts[0].shape[1:]
    if layout == "TND":
        rest = tokens - sum(len(rows) for rows in parts)
        return torch.cat([*parts, parts[0].new_full((rest, heads, elements), fill)])
    full = parts[0].new_full((len(parts), tokens, heads, elements), fill)
    for b, rows in enumerate(parts):
        full[b, : len(rows)] = rows
    full = full.transpose(1, 2) if layout == "BNSD" else full.flatten(2) if layout in ("BSH", "SBH") else full
    return full.transpose(0, 1) if layout == "SBH" else full


def place_rows(
    parts: Sequence[Tensor], packed: bool, tokens: int, fill: float = 0.0, head_major: bool = False
) -> Tensor:
    """Stores [heads, length] as [B, heads, S], or packed [T, heads] (head_major: sequence by sequence [heads, L])."""
    if packed and head_major:
        rest = parts[0].new_full((tokens * len(parts[0]) - sum(rows.numel() for rows in parts),), fill)
        return torch.cat([*(rows.reshape(-1) for rows in parts), rest]).view(tokens, len(parts[0]))
    return place_dense([rows.T[..., None] for rows in parts], "TND" if packed else "BNSD", tokens, fill).squeeze(-1)


def lengths(rng: Rng, values: Sequence[int]) -> object:
    kind = int(rng.integers(4))
    if kind < 2:
        return tuple(values) if kind else list(values)
    return torch.tensor(list(values), dtype=torch.int64 if kind == 2 else torch.int32)


def leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()

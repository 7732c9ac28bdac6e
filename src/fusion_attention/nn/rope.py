"""Rotary position embedding: tables of cosines and sines, and their application to rows."""

import torch
from torch import Tensor


def rope_table(positions: Tensor, dim: int, base: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Returns the cosines and sines by which rotary embedding rotates `dim` elements of a row.

        angle_i = position * base ** (-2 i / dim)

    Args:
        positions: positions of tokens, of any shape; in packed rows each sequence starts at 0.
        dim: number of elements of a row that are rotated; even.
        base: the base of the powers above.

    Returns:
        (cos, sin): float32 [*positions.shape, dim / 2].

    Source: this library.

    Example:
        >>> cos, sin = rope_table(torch.arange(6), 8)
        >>> cos.shape
        torch.Size([6, 4])
    """
    rate = base ** (-torch.arange(0, dim, 2, dtype=torch.float32, device=positions.device) / dim)
    angle = positions[..., None] * rate
    return angle.cos(), angle.sin()


def apply_rope(rows: Tensor, rope: tuple[Tensor, Tensor], interleaved: bool = False) -> Tensor:
    """Rotates the first R elements of rows by the angles of a table of R / 2 columns; the others do not change.

        (a, b) -> (a cos - b sin, b cos + a sin)

    Args:
        rows: [..., heads, D].
        rope: (cos, sin), each [..., R / 2] with R <= D, as returned by rope_table().
        interleaved: pairs are elements (2 i, 2 i + 1), and results are stored at (i, i + R / 2); False: pairs are
            elements (i, i + R / 2).

    Returns:
        The rotated rows, of the same shape and dtype.

    Raises:
        ValueError: R is larger than D.

    Source: this library. DeepSeek-V3.2 uses interleaved pairs in its attention and the others in its indexer.

    Example:
        >>> rows = torch.randn(2, 6, 4, 16)
        >>> rotated = apply_rope(rows, rope_table(torch.arange(6), 8))
        >>> torch.equal(rotated[:, 0], rows[:, 0]) and torch.equal(rotated[..., 8:], rows[..., 8:])
        True
    """
    cos, sin = (t.unsqueeze(-2) for t in rope)
    width = 2 * cos.shape[-1]
    if width > rows.shape[-1]:
        raise ValueError(
            f"apply_rope: rope: expected at most {rows.shape[-1] // 2} columns, got {cos.shape[-1]} "
            f"(rows have {rows.shape[-1]} elements; make a narrower rope_table)"
        )
    rotated = rows[..., :width]
    a, b = (rotated[..., 0::2], rotated[..., 1::2]) if interleaved else rotated.chunk(2, -1)
    parts = (a * cos - b * sin).to(rows.dtype), (b * cos + a * sin).to(rows.dtype), rows[..., width:]
    return torch.cat(parts, -1)


def rotate_end(rows: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Returns rows with the last R elements rotated by the angles of a table of R / 2 columns, in neighbouring pairs.

    Args:
        rows: [B, S, heads, D].
        rope: (cos, sin), each [S, R / 2] with R <= D; (cos, -sin) rotates back.
    """
    cos, sin = (t.unsqueeze(-2) for t in rope)
    first, last = rows.split((rows.shape[-1] - 2 * cos.shape[-1], 2 * cos.shape[-1]), -1)
    a, b = last[..., 0::2], last[..., 1::2]
    turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    return torch.cat((first, turned.to(rows.dtype)), -1)

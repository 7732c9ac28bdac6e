"""flash_attn.layers.rotary: differentiable rotary embedding of padded and packed tensors, optionally in place.

torch computes it, in float32 for every dtype.
"""

from collections.abc import Sequence

import torch

from fusion_attention.integrations.flash_attn.argument_conversion import lengths_of, numbers

Tensor = torch.Tensor


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """flash_attn.layers.rotary.apply_rotary_emb: rotates the first R elements of every head by its token's position.

    Args:
        x: [B, S, N, D], or packed [T, N, D] with cu_seqlens.
        cos, sin: [positions, R / 2], of the angle of each position and pair of elements.
        interleaved: elements 0 and 1 rotate together; else 0 and R / 2.
        inplace: write the result to x and return x.
        seqlen_offsets: position of each sequence's first token, a number or [B].
        cu_seqlens: [B + 1], cumulative lengths with a leading 0.
        max_seqlen: no effect.

    Returns:
        x rotated, in its dtype.

    Raises:
        RuntimeError: cos and sin have no row for a position.

    Example:
        >>> apply_rotary_emb(torch.randn(2, 5, 4, 16), torch.ones(5, 8), torch.zeros(5, 8)).shape
        torch.Size([2, 5, 4, 16])
    """
    if cu_seqlens is None:
        starts = [seqlen_offsets] * x.shape[0] if isinstance(seqlen_offsets, int) else numbers(seqlen_offsets)
        out = rotated(x, cos, sin, starts, interleaved)
    else:
        lengths = list(lengths_of(cu_seqlens, "cu_seqlens"))
        starts = [seqlen_offsets] * len(lengths) if isinstance(seqlen_offsets, int) else numbers(seqlen_offsets)
        rows = [torch.arange(start, start + n) for start, n in zip(starts, lengths, strict=True)]
        rows.append(torch.zeros(x.shape[0] - sum(lengths), dtype=torch.int64))  # rows after the last sequence
        out = _rotated_at(x, cos, sin, torch.cat(rows), interleaved)
        out = torch.cat((out[: sum(lengths)], x[sum(lengths) :]))
    return x.copy_(out) if inplace else out


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """flash_attn.ops.triton.rotary.apply_rotary: rotates x as apply_rotary_emb() does; with `conjugate`, by the
    negative angles, which reverts the rotation."""
    sin = -sin if conjugate else sin
    return apply_rotary_emb(x, cos, sin, interleaved, inplace, seqlen_offsets, cu_seqlens, max_seqlen)


def rotated(
    x: Tensor, cos: Tensor, sin: Tensor, starts: Sequence[int], interleaved: bool, *, advance: bool = True
) -> Tensor:
    """Returns x [B, S, N, D] with its first R elements rotated: token s of sequence b by position starts[b] + s, or by
    starts[b] if not `advance`.

    cos, sin: [positions, R / 2]. interleaved: True: elements (0, 1), ... rotate together; else (0, R / 2), ...
    """
    steps = torch.arange(x.shape[1]) if advance else torch.zeros(x.shape[1], dtype=torch.int64)
    return _rotated_at(x, cos, sin, torch.tensor(list(starts))[:, None] + steps, interleaved)


def _rotated_at(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Returns x [..., N, D] with its first R elements rotated by int64 positions [...]; cos, sin: [table length, R /
    2]; interleaved: True for pairs (0, 1), ..., else (0, R / 2), ..."""
    if positions.numel() and not 0 <= int(positions.min()) <= int(positions.max()) < cos.shape[0]:
        raise RuntimeError(
            f"flash_attn: cos, sin: expected rows for positions {int(positions.min())} to {int(positions.max())}, got "
            f"{cos.shape[0]} (make the tables as long as the longest sequence)"
        )
    size = 2 * cos.shape[-1]
    if size > x.shape[-1]:
        raise ValueError(f"flash_attn: cos, sin: expected at most {x.shape[-1] // 2} columns, got {cos.shape[-1]}")
    at = positions.to(cos.device)
    c, s = (table.float()[at].unsqueeze(-2) for table in (cos, sin))
    turned, rest = x[..., :size].float(), x[..., size:]
    if interleaved:
        one, other = turned[..., ::2], turned[..., 1::2]
        turned = torch.stack((one * c - other * s, one * s + other * c), -1).flatten(-2)
    else:
        one, other = turned.chunk(2, -1)
        turned = torch.cat((one * c - other * s, one * s + other * c), -1)
    return torch.cat((turned.to(x.dtype), rest), -1)

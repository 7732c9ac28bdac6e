"""torch_npu's rotary positions, in torch's own operators; float32 inside."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusion_attention.npu.auxiliary.call import as_given, checked
from fusion_attention.ops.auxiliary import rotary

__all__ = [
    "npu_apply_rotary_pos_emb",
    "npu_interleave_rope",
    "npu_mrope",
    "npu_rotary_mul",
    "npu_rotary_mul_backward",
]

Tensor = torch.Tensor


def npu_rotary_mul(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    """Turns pairs of elements by the angles of their positions.

    y = x * cos + turned(x) * sin

    Args:
        input: rows of an even size; float16, bfloat16 or float32.
        r1, r2: cosines and sines in any of these dtypes; axes of size 1 are repeated.
        rotary_mode: "half": element i is turned with element i + D/2; "interleave": 2i with 2i + 1.
        rotate: [D, D], a matrix that says the turn in place of rotary_mode: turned(x) = x @ rotate. Its
            dtype is its own.

    Returns:
        y as input.

    Raises:
        ContractError: a call that `fusion-attention ops npu_rotary_mul` does not allow.

    Source: Ascend op-plugin, npu_rotary_mul.

    Example:
        >>> quarter = torch.zeros(4), torch.ones(4)  # cosine and sine of 90 degrees
        >>> npu_rotary_mul(torch.tensor([1.0, 2.0, 3.0, 4.0]), *quarter).tolist()
        [-3.0, -4.0, 1.0, 2.0]
        >>> npu_rotary_mul(torch.tensor([1.0, 2.0, 3.0, 4.0]), *quarter, "interleave").tolist()
        [-2.0, 1.0, -4.0, 3.0]
    """
    args = {"input": input, "r1": r1, "r2": r2, "rotary_mode": rotary_mode, "rotate": rotate}
    mode = checked(rotary.ROTARY_MUL, args)["rotary_mode"]
    if rotate is None:
        return _rotated(input, r1, r2, mode)
    wide = input.float()
    with as_given(input):
        return (wide * r1 + (wide @ rotate.float()) * r2).to(input.dtype)


def npu_rotary_mul_backward(
    grad: Tensor, input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half"
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of npu_rotary_mul.

    dx = dy * cos - turned(dy * sin),  dcos = dy * x,  dsin = dy * turned(x)

    Args:
        grad: gradient of y; as input.
        input, r1, r2, rotary_mode: of the forward.

    Returns:
        (dx, dr1, dr2), each as what it is the gradient of.

    Raises:
        ContractError: a call that `fusion-attention ops npu_rotary_mul_backward` does not allow.

    Source: Ascend op-plugin, npu_rotary_mul_backward.

    Example:
        >>> x, cos, sin = torch.randn(3, 2, 4).requires_grad_().unbind()
        >>> want = torch.autograd.grad(npu_rotary_mul(x, cos, sin).sum(), (x, cos, sin))
        >>> found = npu_rotary_mul_backward(torch.ones(2, 4), x.detach(), cos.detach(), sin.detach())
        >>> all(map(torch.allclose, found, want))
        True
    """
    args = {"grad": grad, "input": input, "r1": r1, "r2": r2, "rotary_mode": rotary_mode}
    mode = checked(rotary.ROTARY_MUL_BACKWARD, args)["rotary_mode"]
    x, dy = input.float(), grad.float()
    dx = dy * r1 - _turned(dy * r2, mode)
    dcos, dsin = (dy * x).sum_to_size(r1.shape), (dy * _turned(x, mode)).sum_to_size(r2.shape)
    return dx.to(input.dtype), dcos.to(r1.dtype), dsin.to(r2.dtype)


def npu_apply_rotary_pos_emb(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str = "BSND", rotary_mode: str = "half"
) -> tuple[Tensor, Tensor]:
    """npu_rotary_mul of queries and keys.

    y = x * cos + turned(x) * sin

    Args:
        query, key: rows of heads; float16, bfloat16 or float32.
        cos, sin: for both; axes of size 1, as that of heads, are repeated.
        layout: names the axes: "BSND" and "BSH", "SBND", "BNSD" or "TND".
        rotary_mode: as in npu_rotary_mul.

    Returns:
        (query, key), turned; those that came stay as they are.

    Raises:
        ContractError: a call that `fusion-attention ops npu_apply_rotary_pos_emb` does not allow.

    Source: Ascend op-plugin, npu_apply_rotary_pos_emb.

    Example:
        >>> q, k = torch.randn(2, 5, 8, 16), torch.randn(2, 5, 2, 16)
        >>> angles = torch.rand(1, 5, 1, 16)
        >>> turned, _ = npu_apply_rotary_pos_emb(q, k, angles.cos(), angles.sin())
        >>> turned.shape == q.shape
        True
    """
    args = {"query": query, "key": key, "cos": cos, "sin": sin, "layout": layout, "rotary_mode": rotary_mode}
    mode = checked(rotary.APPLY, args)["rotary_mode"]
    return _rotated(query, cos, sin, mode), _rotated(key, cos, sin, mode)


def npu_interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns neighbouring elements, and leaves the first ones of all pairs before the second ones.

    h = (x[0::2], x[1::2])
    y = h * cos + (-h[D/2:], h[:D/2]) * sin

    Args:
        x: [B, N, S, D]; float16, bfloat16 or float32.
        cos, sin: [B, 1, S or 1, D], of the elements as they leave.

    Returns:
        y as x.

    Raises:
        ContractError: a call that `fusion-attention ops npu_interleave_rope` does not allow.

    Source: Ascend op-plugin, npu_interleave_rope.

    Example:
        >>> npu_interleave_rope(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.ones(4), torch.zeros(4)).tolist()
        [1.0, 3.0, 2.0, 4.0]
    """
    checked(rotary.INTERLEAVE_ROPE, {"x": x, "cos": cos, "sin": sin})
    with as_given(x):
        return _rotated(halves_of_pairs(x), cos, sin, "half")


def npu_mrope(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    *,
    mrope_section: Sequence[int] | None = None,
    rotary_mode: str | None = "half",
    cache_mode: str | None = "default",
) -> tuple[Tensor, Tensor]:
    """Turns queries and keys by angles of a table; of images and films, by three or four kinds of positions.

    cos, sin = the halves of cos_sin_cache[positions]
    y = x * cos + turned(x) * sin

    Args:
        positions: [T], or [3, T] of time, height and width, or [4, T]; int64 or int32.
        query, key: [T, heads * head_size]; float16, bfloat16 or float32.
        cos_sin_cache: [positions, rotary size]. The elements of a head behind the rotary size stay.
        head_size: elements of a head.
        mrope_section: of several kinds of positions, how many angles each turns.
        rotary_mode: as in npu_rotary_mul.
        cache_mode: "default": sections one after the other; "interleave": height at 1, 4, ... and width at 2, 5, ...
            (three kinds alone).

    Returns:
        (query, key), turned; those that came stay as they are.

    Raises:
        ContractError: a call that `fusion-attention ops npu_mrope` does not allow.

    Source: Ascend op-plugin, npu_mrope.

    Example:
        >>> q, k, table = torch.randn(5, 8 * 16), torch.randn(5, 2 * 16), torch.rand(10, 16)
        >>> turned, _ = npu_mrope(torch.arange(5), q, k, table, 16, mrope_section=[0, 0, 0])
        >>> turned.shape == q.shape
        True
    """
    args = {
        "positions": positions, "query": query, "key": key, "cos_sin_cache": cos_sin_cache, "head_size": head_size,
        "mrope_section": mrope_section, "rotary_mode": rotary_mode, "cache_mode": cache_mode,
    }  # fmt: skip
    given = checked(rotary.MROPE, args)
    cos, sin = cos_sin_cache[positions.long()].float().chunk(2, -1)
    if positions.dim() == 2:
        # A trace checks nothing, and has no array.
        sections = [int(n) for n in (() if mrope_section is None else mrope_section)]
        kinds = _kind_of_angle(sections, cos.shape[-1], given["cache_mode"])
        kind = torch.tensor(kinds, device=cos.device).expand(1, *cos.shape[1:])
        cos, sin = cos.gather(0, kind)[0], sin.gather(0, kind)[0]
    mode, width = given["rotary_mode"], cos_sin_cache.shape[1]
    cos, sin = (torch.cat((t, t), -1) if mode == "half" else t.repeat_interleave(2, -1) for t in (cos, sin))

    def turned(rows: Tensor) -> Tensor:
        heads = rows.reshape(len(rows), rows.shape[1:].numel() // head_size, head_size)
        result = _rotated(heads[..., :width], cos[:, None], sin[:, None], mode)
        return torch.cat((result, heads[..., width:]), -1).reshape(rows.shape)

    with as_given(query):
        return turned(query), turned(key)


def halves_of_pairs(x: Tensor) -> Tensor:
    """The first elements of all pairs of neighbours, then the second ones."""
    return torch.cat((x[..., ::2], x[..., 1::2]), -1)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Tensor:
    wide = x.float()
    return (wide * cos + _turned(wide, mode) * sin).to(x.dtype)


def _turned(x: Tensor, mode: str) -> Tensor:
    """Pairs turned by 90 degrees."""
    if mode == "half":
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def _kind_of_angle(sections: list[int], angles: int, cache_mode: str) -> list[int]:
    """Which kind of position (time, height, width) each angle is of."""
    if cache_mode == "default":
        return [kind for kind, count in enumerate(sections) for _ in range(count)]
    turns = [range(kind, min(3 * sections[1], angles), 3) for kind in (1, 2)]
    return [next((kind for kind in (1, 2) if i in turns[kind - 1]), 0) for i in range(angles)]

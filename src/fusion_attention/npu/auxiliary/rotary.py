"""torch_npu's rotary position embedding, computed by torch's operators in float32."""

from collections.abc import Sequence

import torch

from fusion_attention.npu.auxiliary.call import as_given, computed
from fusion_attention.ops.auxiliary_definitions import rotary

Tensor = torch.Tensor


@computed(rotary.ROTARY_MUL)
def npu_rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str, rotate: Tensor | None) -> Tensor:
    if rotate is None:
        return _rotated(input, r1, r2, rotary_mode)
    input32 = input.float()
    with as_given(input):
        return (input32 * r1 + (input32 @ rotate.float()) * r2).to(input.dtype)


@computed(rotary.ROTARY_MUL_BACKWARD)
def npu_rotary_mul_backward(
    grad: Tensor, input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str
) -> tuple[Tensor, Tensor, Tensor]:
    x, dy = input.float(), grad.float()
    dx = dy * r1 - _turned(dy * r2, rotary_mode)
    dcos, dsin = (dy * x).sum_to_size(r1.shape), (dy * _turned(x, rotary_mode)).sum_to_size(r2.shape)
    return dx.to(input.dtype), dcos.to(r1.dtype), dsin.to(r2.dtype)


@computed(rotary.APPLY)
def npu_apply_rotary_pos_emb(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, rotary_mode: str
) -> tuple[Tensor, Tensor]:
    return _rotated(query, cos, sin, rotary_mode), _rotated(key, cos, sin, rotary_mode)


@computed(rotary.INTERLEAVE_ROPE)
def npu_interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    with as_given(x):
        halves = torch.cat((x[..., ::2], x[..., 1::2]), -1)  # of pairs (x0, x1), (x2, x3), ...
        return _rotated(halves, cos, sin, "half")


@computed(rotary.MROPE)
def npu_mrope(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    mrope_section: Sequence[int] | None,
    rotary_mode: str,
    cache_mode: str,
) -> tuple[Tensor, Tensor]:
    cos, sin = cos_sin_cache[positions.long()].float().chunk(2, -1)
    if positions.dim() == 2:
        # In a trace the argument is not converted to an array.
        sections = [int(n) for n in (() if mrope_section is None else mrope_section)]
        # The kind of position that each angle uses: 0 time, 1 height, 2 width; one after the other, or interleaved.
        kinds = [kind for kind, count in enumerate(sections) for _ in range(count)]
        if cache_mode != "default":
            turns = [range(kind, min(3 * sections[1], cos.shape[-1]), 3) for kind in (1, 2)]
            kinds = [next((kind for kind in (1, 2) if i in turns[kind - 1]), 0) for i in range(cos.shape[-1])]
        kind = torch.tensor(kinds, device=cos.device).expand(1, *cos.shape[1:])
        cos, sin = cos.gather(0, kind)[0], sin.gather(0, kind)[0]
    width = cos_sin_cache.shape[1]
    cos, sin = (torch.cat((t, t), -1) if rotary_mode == "half" else t.repeat_interleave(2, -1) for t in (cos, sin))

    def turned(rows: Tensor) -> Tensor:
        heads = rows.reshape(len(rows), rows.shape[1:].numel() // head_size, head_size)
        result = _rotated(heads[..., :width], cos[:, None], sin[:, None], rotary_mode)
        return torch.cat((result, heads[..., width:]), -1).reshape(rows.shape)

    with as_given(query):
        return turned(query), turned(key)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Tensor:
    """Returns x rotated: x * cos + turned(x) * sin in float32, where turned() maps pairs of elements (a, b) to (-b, a);
    mode: "half" pairs element i with i + D / 2, others with the adjacent one."""
    x32 = x.float()
    return (x32 * cos + _turned(x32, mode) * sin).to(x.dtype)


def _turned(x: Tensor, mode: str) -> Tensor:
    """Returns x with each pair of elements rotated by 90 degrees: (a, b) becomes (-b, a).

    mode: "half" pairs element i with i + D / 2, others with the adjacent one.
    """
    if mode == "half":
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)

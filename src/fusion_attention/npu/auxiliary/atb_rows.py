"""torch_npu's stores of rows and rotary positions by the names of the chip's transformer library (ATB), in place."""

from __future__ import annotations

from typing import Annotated

import torch

from fusion_attention.npu.auxiliary.caches import store
from fusion_attention.npu.auxiliary.call import as_given, checked
from fusion_attention.npu.auxiliary.rotary import npu_rotary_mul
from fusion_attention.ops.auxiliary import atb

__all__ = ["_npu_reshape_and_cache", "_npu_reshape_and_cache_siso", "_npu_rotary_embedding"]

Tensor = torch.Tensor


def _npu_reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Annotated[Tensor, "a!"],
    value_cache: Annotated[Tensor, "b!"],
    slot_indices: Tensor,
) -> None:
    """Stores key and value rows in the pages of a cache, in place.

    key_cache[slot // size, slot % size] = key[token],  slot = slot_indices[token]

    Args:
        key, value: [tokens, ...]; each with a dtype of its own, which its cache has too.
        key_cache, value_cache: pages [pages, slots, ...] of such rows, or in pieces [pages, pieces, slots, width] (the
            chip's NZ).
        slot_indices: [tokens]; a slot below 0 stores nothing. Of equal slots the last row stays.

    Raises:
        ContractError: a call that `fusion-attention ops _npu_reshape_and_cache` does not allow. Nothing is written.

    Source: Ascend op-plugin, _npu_reshape_and_cache.

    Example:
        >>> pages, rows = torch.zeros(4, 16, 2, 8), torch.randn(3, 2, 8)
        >>> _npu_reshape_and_cache(rows, rows, pages, pages.clone(), torch.tensor([17, 18, -1]))
        >>> torch.equal(pages[1, 1:3], rows[:2])
        True
    """
    checked(atb.RESHAPE, {
        "key": key, "value": value, "key_cache": key_cache, "value_cache": value_cache, "slot_indices": slot_indices,
    })  # fmt: skip
    with torch.no_grad():
        store([(_slots(key_cache, key), key), (_slots(value_cache, value), value)], slot_indices)


def _npu_reshape_and_cache_siso(key: Tensor, key_cache: Annotated[Tensor, "a!"], slot_indices: Tensor) -> None:
    """Stores key rows in the pages of a cache, in place.

    key_cache[slot // size, slot % size] = key[token],  slot = slot_indices[token]

    Args:
        all: as in _npu_reshape_and_cache.

    Raises:
        ContractError: a call that `fusion-attention ops _npu_reshape_and_cache_siso` does not allow. Nothing is
            written.

    Source: Ascend op-plugin, _npu_reshape_and_cache_siso.

    Example:
        >>> pages, rows = torch.zeros(4, 16, 2, 8), torch.randn(3, 2, 8)
        >>> _npu_reshape_and_cache_siso(rows, pages, torch.tensor([17, 18, -1]))
        >>> torch.equal(pages[1, 1:3], rows[:2])
        True
    """
    checked(atb.RESHAPE_ONE, {"key": key, "key_cache": key_cache, "slot_indices": slot_indices})
    with torch.no_grad():
        store([(_slots(key_cache, key), key)], slot_indices)


def _npu_rotary_embedding(
    positions: Tensor,
    query: Annotated[Tensor, "a!"],
    key: Annotated[Tensor, "b!"],
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox_style: bool,
) -> None:
    """Turns pairs of elements of queries and keys by the angles of their positions, in place.

    x = x * cos + turned(x) * sin,  for queries and keys

    Args:
        positions: [T]: the line of cos_sin_cache of every token.
        query, key: [T, ...]: heads of head_size elements; written.
        cos_sin_cache: [positions, head_size]: head_size / 2 cosines, then the sines.
        is_neox_style: element i turns with i + head_size / 2; otherwise 2i with 2i + 1.

    Raises:
        ContractError: a call that `fusion-attention ops _npu_rotary_embedding` does not allow. Nothing is written.

    Source: Ascend op-plugin, _npu_rotary_embedding.

    Example:
        >>> quarter = torch.tensor([[0.0, 0.0, 1.0, 1.0]])  # cosine and sine of 90 degrees
        >>> x, key = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.zeros(1, 4)
        >>> _npu_rotary_embedding(torch.tensor([0]), x, key, 4, quarter, True)
        >>> x.tolist()
        [[-3.0, -4.0, 1.0, 2.0]]
    """
    checked(atb.ROTARY, {
        "positions": positions, "query": query, "key": key, "head_size": head_size, "cos_sin_cache": cos_sin_cache,
        "is_neox_style": is_neox_style,
    })  # fmt: skip
    mode = "half" if is_neox_style else "interleave"
    with torch.no_grad(), as_given(query):
        angles = (part.unsqueeze(1) for part in cos_sin_cache[positions.long()].chunk(2, -1))
        cos, sin = (torch.cat((a, a), -1) if is_neox_style else a.repeat_interleave(2, -1) for a in angles)
        for rows in (query, key):
            heads = rows.reshape(len(rows), -1, head_size)
            rows.copy_(npu_rotary_mul(heads, cos, sin, mode).reshape(rows.shape))


def _slots(cache: Tensor, rows: Tensor) -> Tensor:
    """A cache of pages as [pages, slots, elements of a row...], a view; pieces stay apart."""
    return cache if atb.whole_rows(cache, rows) else cache.transpose(1, 2)

"""torch_npu's functions of Ascend Transformer Boost (ATB) that store rows in a cache or rotate rows in place."""

import torch

from fusion_attention.npu.auxiliary.caches import store
from fusion_attention.npu.auxiliary.call import as_given, computed
from fusion_attention.npu.auxiliary.rotary import npu_rotary_mul
from fusion_attention.ops.auxiliary_definitions import atb_cache_and_rotary

Tensor = torch.Tensor


@computed(atb_cache_and_rotary.RESHAPE)
def _npu_reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_indices: Tensor
) -> None:
    with torch.no_grad():
        store([(_slots(key_cache, key), key), (_slots(value_cache, value), value)], slot_indices)


@computed(atb_cache_and_rotary.RESHAPE_ONE)
def _npu_reshape_and_cache_siso(key: Tensor, key_cache: Tensor, slot_indices: Tensor) -> None:
    with torch.no_grad():
        store([(_slots(key_cache, key), key)], slot_indices)


@computed(atb_cache_and_rotary.ROTARY)
def _npu_rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox_style: bool
) -> None:
    mode = "half" if is_neox_style else "interleave"
    with torch.no_grad(), as_given(query):
        angles = (half.unsqueeze(1) for half in cos_sin_cache[positions.long()].chunk(2, -1))
        cos, sin = (torch.cat((a, a), -1) if is_neox_style else a.repeat_interleave(2, -1) for a in angles)
        for rows in (query, key):
            heads = rows.reshape(len(rows), -1, head_size)
            rows.copy_(npu_rotary_mul(heads, cos, sin, mode).reshape(rows.shape))


def _slots(cache: Tensor, rows: Tensor) -> Tensor:
    """Returns a view of a paged cache as [pages, slots, ...], to store `rows` in; a cache in the tiled format NZ is
    [pages, fragments of a row, slots, elements]."""
    return cache if atb_cache_and_rotary.whole_rows(cache, rows) else cache.transpose(1, 2)

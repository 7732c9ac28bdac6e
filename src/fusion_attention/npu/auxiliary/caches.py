"""torch_npu's functions that write and read caches, in torch's operators."""

from typing import Annotated

import torch

from fusion_attention.npu.auxiliary.call import computed
from fusion_attention.npu.auxiliary.norms import normalised
from fusion_attention.npu.auxiliary.quantised import rounded
from fusion_attention.npu.auxiliary.rotary import npu_interleave_rope
from fusion_attention.ops.auxiliary_definitions import caches, latent_caches

Tensor = torch.Tensor


@computed(caches.SCATTER_PA)
def npu_scatter_pa_kv_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, cache_mode: str
) -> None:
    with torch.no_grad():
        store(
            [(_slots(c, r, cache_mode), r.flatten(1)) for c, r in ((key_cache, key), (value_cache, value))],
            slot_mapping,
        )


@computed(caches.GATHER_PA)
def npu_gather_pa_kv_cache(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    key: Tensor,
    value: Tensor,
    seq_offset: Tensor | None,
    is_seq_lens_cumsum: bool,
) -> None:
    with torch.no_grad():
        slots = _slots(key_cache, key)
        pages = slots.shape[0] if slots.shape[1] else 0
        size, tokens = max(slots.shape[1], 1), key.shape[0]
        lengths = (seq_lens.diff() if is_seq_lens_cumsum else seq_lens).long()
        starts = lengths.cumsum(0) - lengths
        sequence = torch.arange(len(lengths), device=key.device).repeat_interleave(lengths, output_size=tokens)
        row = torch.arange(tokens, device=key.device) - starts[sequence]
        column = row // size + (0 if seq_offset is None else seq_offset[sequence].long() // size)
        table = torch.nn.functional.pad(block_tables.long(), (0, 1), value=-1)  # -1: no page
        page = table[sequence, column.clamp(0, table.shape[1] - 1)].where(column >= 0, -1)
        there = (page >= 0) & (page < pages)
        results = []
        for cache, rows in ((key_cache, key), (value_cache, value)):
            source = _slots(cache, rows)
            stored = source[page.where(there, 0), row % size].view(rows.shape) if pages else rows
            results.append(stored.where(there[:, None, None], 0))
        key.copy_(results[0])
        value.copy_(results[1])


@computed(caches.SCATTER_ND)
def npu_scatter_nd_update(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    return input.index_put(*_updated(input, indices, updates))


@computed(caches.SCATTER_ND_)
def npu_scatter_nd_update_(input: Tensor, indices: Tensor, updates: Tensor) -> Annotated[Tensor, "a!"]:
    return input.index_put_(*_updated(input, indices, updates))


@computed(latent_caches.KV_RMSNORM_ROPE)
def npu_kv_rmsnorm_rope_cache(
    kv: Tensor,
    gamma: Tensor,
    cos: Tensor,
    sin: Tensor,
    index: Tensor,
    k_cache: Tensor,
    ckv_cache: Tensor,
    k_rope_scale: Tensor | None,
    c_kv_scale: Tensor | None,
    k_rope_offset: Tensor | None,
    c_kv_offset: Tensor | None,
    v: Tensor | None,
    epsilon: float,
    cache_mode: str,
    is_output_kv: bool,
) -> tuple[Annotated[Tensor, "a!"], Annotated[Tensor, "b!"], Tensor, Tensor]:
    with torch.no_grad():
        if v is not None and latent_caches.is_separate(v):
            y, rows = v.float(), normalised(kv.float(), gamma, epsilon)[0]
            rope, rest = rows.split([cos.shape[-1], kv.shape[-1] - cos.shape[-1]], -1)
            k_embed = torch.cat((npu_interleave_rope(rope, cos.float(), sin.float()), rest), -1)
        else:
            latent, rope = kv.float().split([len(gamma), kv.shape[-1] - len(gamma)], -1)
            y = normalised(latent, gamma, epsilon)[0]
            k_embed = npu_interleave_rope(rope, cos.float(), sin.float())
        slot_indices = _of_tokens(index, kv.shape[2], k_cache, cache_mode)
        numbers = (k_rope_scale, k_rope_offset), (c_kv_scale, c_kv_offset)
        stored = [
            (lines(cache, cache_mode), _rounded(rows, cache.dtype, *of_cache).flatten(0, 2))
            for cache, rows, of_cache in zip((k_cache, ckv_cache), (k_embed, y), numbers, strict=True)
        ]
        store(stored, slot_indices)
        k_embed, y = (rows.to(kv.dtype) if is_output_kv else kv.new_empty(0) for rows in (k_embed, y))
        return k_cache, ckv_cache, k_embed, y


# -------------------------------------------------------------------------------------------------------------- places


def _last(slot_indices: Tensor) -> Tensor:
    """Returns int64 [rows]: for each row, the index of the last row with the same number in slot_indices [rows].

    If all rows of a slot write this row, the order of the writes does not matter.
    """
    order = slot_indices.argsort(stable=True)
    ordered = slot_indices[order]
    last = order[torch.searchsorted(ordered, ordered, right=True) - 1]
    return torch.zeros_like(order).scatter(0, order, last)


def _updated(target: Tensor, indices: Tensor, updates: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """Returns the arguments (index tensor of each axis, rows) with which index_put() writes updates [..., *rest] to
    target at `indices` [..., n], positions along its first n axes.
    Of rows with equal indices, the last one is written each time, and only it has a gradient."""
    axes = indices.shape[-1]
    positions, rows = (
        indices.reshape(-1, axes).long(),
        updates.reshape(indices.shape[:-1].numel(), *target.shape[axes:]),
    )
    line = positions.new_zeros(positions.shape[0])
    for size, place in zip(target.shape[:axes], positions.unbind(-1), strict=True):
        line = line * size + place
    last = _last(line)
    stays = (last == torch.arange(last.shape[0], device=last.device)).view(-1, *(1,) * (rows.dim() - 1))
    return positions.unbind(-1), torch.where(stays, rows, rows.detach()[last])


def _slots(cache: Tensor, rows: Tensor, mode: str = "Norm") -> Tensor:
    """Returns a view of a paged cache as [pages, slots, ...], to store `rows` in; mode: "Norm", or a tiled NZ format,
    whose cache is [pages, fragments of a row, slots, elements]."""
    return cache.transpose(1, 2) if caches.is_fragmented(cache, rows, mode) else cache


def lines(cache: Tensor, mode: str) -> Tensor:
    """Returns a view [pages or sequences, slots, elements, ...] of a cache in layout `mode`: "Norm", "PA_NZ", ..."""
    if mode == "Norm":
        return cache[:, 0]
    if "NZ" not in mode:
        return cache[:, :, 0]
    width = 32 if cache.dtype == torch.int8 else 16
    return cache.view(cache.shape[0], cache.shape[3] // width, cache.shape[1], width).transpose(1, 2)


def store(caches_and_rows: list[tuple[Tensor, Tensor]], slot_indices: Tensor) -> None:
    """Stores rows in caches at the given slots; all rows are read before any is written.
    A row with a negative slot is not stored; of rows with equal slots, the last one is stored. caches_and_rows: pairs
    of a cache [pages, slots, ...] and rows [rows, ...]. slot_indices: int [rows], numbers of slots of all pages."""
    if not slot_indices.numel() or not all(slots.shape[0] * slots.shape[1] for slots, _ in caches_and_rows):
        return
    # Rows without a slot repeat the row of the largest slot; if no row has a slot, the existing content is rewritten.
    top = slot_indices.argmax(0, keepdim=True)
    there, last = slot_indices >= 0, _last(slot_indices)
    place = slot_indices.where(there, slot_indices[top]).clamp(min=0).long()
    ready = []
    for slots, rows in caches_and_rows:
        result = rows.reshape(rows.shape[0], *slots.shape[2:])[last.where(there, last[top])]
        ready.append((slots, result.where(slot_indices[top] >= 0, slots[0, 0])))
    for slots, rows in ready:
        slots[place // slots.shape[1], place % slots.shape[1]] = rows


def _of_tokens(index: Tensor, tokens: int, cache: Tensor, mode: str) -> Tensor:
    """Returns the slot of every token of all sequences, concatenated: int [tokens], -1 for none.

    index: positions in the cache, by its mode: "Norm": each token's position in its sequence; with "BLK" in the mode:
    a slot of the page for each run of tokens that fill one; other modes: each token's slot.
    """
    if mode == "Norm":
        items = torch.arange(len(index), device=index.device)[:, None] * cache.shape[2]
        return (index + items).where(index >= 0, -1).flatten()
    if "BLK" not in mode:
        return index
    size = cache.shape[1]
    token = torch.arange(tokens, device=index.device)
    first = index.view(-1, -(-tokens // size) if size else 0)[:, token // max(size, 1)]
    # Only the page of the index is used, not the slot inside it.
    return (first // max(size, 1) * size + token % max(size, 1)).where(first >= 0, -1).flatten()


def _rounded(rows: Tensor, dtype: torch.dtype, scale: Tensor | None, offset: Tensor | None) -> Tensor:
    """Returns rows in a cache's dtype; with a scale int8: rows * scale + offset, rounded to nearest, ties to even."""
    if scale is None:
        return rows.to(dtype)
    return rounded(rows * scale if offset is None else rows * scale + offset, 127)

"""torch_npu's writing and reading of caches, in torch's own operators."""

from __future__ import annotations

from typing import Annotated

import torch

from fusion_attention.npu.auxiliary.call import checked
from fusion_attention.npu.auxiliary.norms import normalised
from fusion_attention.npu.auxiliary.quantised import rounded
from fusion_attention.npu.auxiliary.rotary import npu_interleave_rope
from fusion_attention.ops.auxiliary import caches, latent_caches

__all__ = [
    "npu_gather_pa_kv_cache",
    "npu_kv_rmsnorm_rope_cache",
    "npu_scatter_nd_update",
    "npu_scatter_nd_update_",
    "npu_scatter_pa_kv_cache",
]

Tensor = torch.Tensor


def npu_scatter_pa_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Annotated[Tensor, "a!"],
    value_cache: Annotated[Tensor, "b!"],
    slot_mapping: Tensor,
    *,
    compress_lens: Tensor | None = None,
    compress_seq_offsets: Tensor | None = None,
    seq_lens: Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> None:
    """Stores key and value rows in the pages of a cache, in place.

    key_cache[slot // size, slot % size] = key[token],  slot = slot_mapping[token]

    Args:
        key, value: [tokens, heads, D]; their D may differ.
        key_cache, value_cache: pages [pages, slots, heads, D], or in pieces [pages, pieces, slots, width] (the chip's
            NZ).
        slot_mapping: [tokens]; a slot below 0 stores nothing. Of equal slots the last row stays.
        compress_lens, compress_seq_offsets, seq_lens: of compressed caches, which are not computed.
        cache_mode: "Norm": pages of whole rows. "PA_NZ": pieces where the caches' shape holds some; what may be either
            is pieces where these are as wide as the chip's, 32 bytes.

    Raises:
        ContractError: a call that `fusion-attention ops npu_scatter_pa_kv_cache` does not allow. Nothing is written.

    Source: Ascend op-plugin, npu_scatter_pa_kv_cache.

    Example:
        >>> pages, rows = torch.zeros(4, 16, 2, 8), torch.randn(3, 2, 8)
        >>> npu_scatter_pa_kv_cache(rows, rows, pages, pages.clone(), torch.tensor([17, 18, -1]))
        >>> torch.equal(pages[1, 1:3], rows[:2])
        True
    """
    args = {
        "key": key, "value": value, "key_cache": key_cache, "value_cache": value_cache, "slot_mapping": slot_mapping,
        "compress_lens": compress_lens, "compress_seq_offsets": compress_seq_offsets, "seq_lens": seq_lens,
        "cache_mode": cache_mode,
    }  # fmt: skip
    mode = checked(caches.SCATTER_PA, args)["cache_mode"]
    with torch.no_grad():
        store([(_slots(c, r, mode), r.flatten(1)) for c, r in ((key_cache, key), (value_cache, value))], slot_mapping)


def npu_gather_pa_kv_cache(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    key: Annotated[Tensor, "a!"],
    value: Annotated[Tensor, "b!"],
    *,
    seq_offset: Tensor | None = None,
    is_seq_lens_cumsum: bool = False,
) -> None:
    """Lays the rows of sequences that lie in pages end to end, in place.

    key[token] = key_cache[block_tables[sequence, (offset + i) // size], i % size]  for row i of a sequence

    Args:
        key_cache, value_cache: as in npu_scatter_pa_kv_cache.
        block_tables: [sequences, pages]. Rows of a page that is not there, and behind the last column, are zeros.
        seq_lens: [sequences], or cumulative with a 0 first.
        key, value: [tokens, heads, D]; written.
        seq_offset: [sequences]: whole pages of so many tokens are left out before the first row.
        is_seq_lens_cumsum: whether seq_lens is cumulative.

    Raises:
        ContractError: a call that `fusion-attention ops npu_gather_pa_kv_cache` does not allow. Nothing is written.

    Source: Ascend op-plugin, npu_gather_pa_kv_cache.

    Example:
        >>> pages, rows = torch.randn(4, 16, 2, 8), torch.zeros(20, 2, 8)
        >>> npu_gather_pa_kv_cache(pages, pages, torch.tensor([[3, 1]]), torch.tensor([20]), rows, rows.clone())
        >>> torch.equal(rows, torch.cat((pages[3], pages[1, :4])))
        True
    """
    args = {
        "key_cache": key_cache, "value_cache": value_cache, "block_tables": block_tables, "seq_lens": seq_lens,
        "key": key, "value": value, "seq_offset": seq_offset, "is_seq_lens_cumsum": is_seq_lens_cumsum,
    }  # fmt: skip
    cumulative = checked(caches.GATHER_PA, args)["is_seq_lens_cumsum"]
    with torch.no_grad():
        slots = _slots(key_cache, key)
        pages = slots.shape[0] if slots.shape[1] else 0
        size, tokens = max(slots.shape[1], 1), key.shape[0]
        lengths = (seq_lens.diff() if cumulative else seq_lens).long()
        starts = lengths.cumsum(0) - lengths
        sequence = torch.arange(len(lengths), device=key.device).repeat_interleave(lengths, output_size=tokens)
        row = torch.arange(tokens, device=key.device) - starts[sequence]
        column = row // size + (0 if seq_offset is None else seq_offset[sequence].long() // size)
        table = torch.nn.functional.pad(block_tables.long(), (0, 1), value=-1)  # behind the last column
        page = table[sequence, column.clamp(0, table.shape[1] - 1)].where(column >= 0, -1)
        there = (page >= 0) & (page < pages)
        results = []
        for cache, rows in ((key_cache, key), (value_cache, value)):
            source = _slots(cache, rows)
            lines = source[page.where(there, 0), row % size].view(rows.shape) if pages else rows
            results.append(lines.where(there[:, None, None], 0))
        key.copy_(results[0])
        value.copy_(results[1])


def npu_scatter_nd_update(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """A copy with some rows replaced, by their places.

    y = input;  y[indices[i]] = updates[i]

    Args:
        input: any tensor.
        indices: [..., K]: places along the first K axes of input; int64 or int32.
        updates: a row for every place, in the dtype of input. Of equal places the last row stays.

    Returns:
        y as input.

    Raises:
        ContractError: a call that `fusion-attention ops npu_scatter_nd_update` does not allow.

    Source: Ascend op-plugin, npu_scatter_nd_update.

    Example:
        >>> npu_scatter_nd_update(torch.zeros(4), torch.tensor([[2]]), torch.ones(1)).tolist()
        [0.0, 0.0, 1.0, 0.0]
    """
    checked(caches.SCATTER_ND, {"input": input, "indices": indices, "updates": updates})
    return input.index_put(*_updated(input, indices, updates))


def npu_scatter_nd_update_(input: Annotated[Tensor, "a!"], indices: Tensor, updates: Tensor) -> Annotated[Tensor, "a!"]:
    """Replaces some rows by their places, in place.

    input[indices[i]] = updates[i]

    Args:
        input, indices, updates: as in npu_scatter_nd_update; input is written.

    Returns:
        input.

    Raises:
        ContractError: a call that `fusion-attention ops npu_scatter_nd_update_` does not allow. Nothing is written.

    Source: Ascend op-plugin, npu_scatter_nd_update_.

    Example:
        >>> cache = torch.zeros(4)
        >>> npu_scatter_nd_update_(cache, torch.tensor([[2]]), torch.ones(1)) is cache
        True
    """
    checked(caches.SCATTER_ND_, {"input": input, "indices": indices, "updates": updates})
    return input.index_put_(*_updated(input, indices, updates))


def npu_kv_rmsnorm_rope_cache(
    kv: Tensor,
    gamma: Tensor,
    cos: Tensor,
    sin: Tensor,
    index: Tensor,
    k_cache: Annotated[Tensor, "a!"],
    ckv_cache: Annotated[Tensor, "b!"],
    *,
    k_rope_scale: Tensor | None = None,
    c_kv_scale: Tensor | None = None,
    k_rope_offset: Tensor | None = None,
    c_kv_offset: Tensor | None = None,
    v: Tensor | None = None,
    epsilon: float = 1e-5,
    cache_mode: str = "Norm",
    is_output_kv: bool = False,
) -> tuple[Annotated[Tensor, "a!"], Annotated[Tensor, "b!"], Tensor, Tensor]:
    """Norms latents, turns rope rows, and stores both in caches, in place.

    latent, rope = kv;  y = latent / rms(latent) * gamma;  k_embed = npu_interleave_rope(rope, cos, sin)
    beside v:    rope, rest = kv / rms(kv) * gamma;  k_embed = (npu_interleave_rope(rope, cos, sin), rest),  y = v

    Args:
        kv: [B, 1, S, latent + rope]; float16, bfloat16 or float32. gamma: [latent]. cos, sin: [B, 1, S, rope].
        index: [B, S] slots of each item (mode Norm); [B*S] places page * slots + slot; of the modes PA_BLK
            [B * pages of an item]: the place where each page begins. Below 0 nothing is stored.
        k_cache, ckv_cache: [B, 1, slots, D] (mode Norm) or pages [pages, slots, 1, D], in the dtype of kv or int8;
            written.
        k_rope_scale, c_kv_scale, k_rope_offset, c_kv_offset: of int8 caches: float32, one for every element of a row.
        v: values apart, [B, 1, S, 128], stored as they are; kv is then [B, 1, S, rope + 128], all of it normed, and
            gamma as long. A v of another last axis says nothing, as the chip has it.
        epsilon: added to the mean square.
        cache_mode: "Norm"; "PA" or "PA_BNSD": pages of rows; "PA_NZ": pages of pieces; "PA_BLK_BNSD" and "PA_BLK_NZ":
            rows of an item fill whole pages.
        is_output_kv: return k_embed and y too.

    Returns:
        (k_cache, ckv_cache, k_embed, y): the caches themselves; rows as they were before they were rounded to int8,
        empty without is_output_kv.

    Raises:
        ContractError: a call that `fusion-attention ops npu_kv_rmsnorm_rope_cache` does not allow. Nothing is written.

    Source: Ascend op-plugin, npu_kv_rmsnorm_rope_cache.

    Example:
        >>> kv, gamma, angles = torch.randn(2, 1, 1, 12), torch.ones(8), torch.rand(2, 1, 1, 4)
        >>> rope, latent = torch.zeros(3, 16, 1, 4), torch.zeros(3, 16, 1, 8)
        >>> places = torch.tensor([16, 40])
        >>> *_, y = npu_kv_rmsnorm_rope_cache(
        ...     kv, gamma, angles.cos(), angles.sin(), places, rope, latent, cache_mode="PA", is_output_kv=True
        ... )
        >>> torch.equal(latent[1, 0], y[0, 0])
        True
    """
    args = {
        "kv": kv, "gamma": gamma, "cos": cos, "sin": sin, "index": index, "k_cache": k_cache, "ckv_cache": ckv_cache,
        "k_rope_scale": k_rope_scale, "c_kv_scale": c_kv_scale, "k_rope_offset": k_rope_offset,
        "c_kv_offset": c_kv_offset, "v": v, "epsilon": epsilon, "cache_mode": cache_mode, "is_output_kv": is_output_kv,
    }  # fmt: skip
    given = checked(latent_caches.KV_RMSNORM_ROPE, args)
    mode = given["cache_mode"]
    with torch.no_grad():
        if v is not None and latent_caches.stands_apart(v):
            y, rows = v.float(), normalised(kv.float(), gamma, given["epsilon"])[0]
            rope, rest = rows.split([cos.shape[-1], kv.shape[-1] - cos.shape[-1]], -1)
            k_embed = torch.cat((npu_interleave_rope(rope, cos.float(), sin.float()), rest), -1)
        else:
            latent, rope = kv.float().split([len(gamma), kv.shape[-1] - len(gamma)], -1)
            y = normalised(latent, gamma, given["epsilon"])[0]
            k_embed = npu_interleave_rope(rope, cos.float(), sin.float())
        places = _of_tokens(index, kv.shape[2], k_cache, mode)
        numbers = (k_rope_scale, k_rope_offset), (c_kv_scale, c_kv_offset)
        stored = [
            (_lines(cache, mode), _rounded(rows, cache.dtype, *of_cache).flatten(0, 2))
            for cache, rows, of_cache in zip((k_cache, ckv_cache), (k_embed, y), numbers, strict=True)
        ]
        store(stored, places)
        wanted = given["is_output_kv"]
        k_embed, y = (rows.to(kv.dtype) if wanted else kv.new_empty(0) for rows in (k_embed, y))
        return k_cache, ckv_cache, k_embed, y


# -------------------------------------------------------------------------------------------------------------- places


def _last(places: Tensor) -> Tensor:
    """For every row the last one that has its place: writing that one instead, rows of one place are no race."""
    order = places.argsort(stable=True)
    ordered = places[order]
    last = order[torch.searchsorted(ordered, ordered, right=True) - 1]
    return torch.zeros_like(order).scatter(0, order, last)


def _updated(whole: Tensor, indices: Tensor, updates: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """(places along each axis, rows) as index_put() takes them; the last row of a place alone has a gradient."""
    axes = indices.shape[-1]
    places, rows = indices.reshape(-1, axes).long(), updates.reshape(indices.shape[:-1].numel(), *whole.shape[axes:])
    line = places.new_zeros(places.shape[0])
    for size, place in zip(whole.shape[:axes], places.unbind(-1), strict=True):
        line = line * size + place
    last = _last(line)
    stays = (last == torch.arange(last.shape[0], device=last.device)).view(-1, *(1,) * (rows.dim() - 1))
    return places.unbind(-1), torch.where(stays, rows, rows.detach()[last])


def _slots(cache: Tensor, rows: Tensor, mode: str = "Norm") -> Tensor:
    """A cache of pages as [pages, slots, elements of a row...], a view; pieces stay apart."""
    return cache.transpose(1, 2) if caches.lies_in_pieces(cache, rows, mode) else cache


def _lines(cache: Tensor, mode: str) -> Tensor:
    """The same of a cache whose mode says how it lies."""
    if mode == "Norm":
        return cache[:, 0]
    if "NZ" not in mode:
        return cache[:, :, 0]
    width = 32 if cache.dtype == torch.int8 else 16
    return cache.view(cache.shape[0], cache.shape[3] // width, cache.shape[1], width).transpose(1, 2)


def store(caches_and_rows: list[tuple[Tensor, Tensor]], places: Tensor) -> None:
    """Rows at places below 0 are stored nowhere; of equal places the last row stays. All are read, then all written."""
    if not places.numel() or not all(slots.shape[0] * slots.shape[1] for slots, _ in caches_and_rows):
        return
    # Rows without a place are written as the one of the largest place is; if none has one, as what is there.
    top = places.argmax(0, keepdim=True)
    there, last = places >= 0, _last(places)
    place = places.where(there, places[top]).clamp(min=0).long()
    ready = []
    for slots, rows in caches_and_rows:
        result = rows.reshape(rows.shape[0], *slots.shape[2:])[last.where(there, last[top])]
        ready.append((slots, result.where(places[top] >= 0, slots[0, 0])))
    for slots, rows in ready:
        slots[place // slots.shape[1], place % slots.shape[1]] = rows


def _of_tokens(index: Tensor, tokens: int, cache: Tensor, mode: str) -> Tensor:
    """The place of every token, of all items end to end."""
    if mode == "Norm":
        items = torch.arange(len(index), device=index.device)[:, None] * cache.shape[2]
        return (index + items).where(index >= 0, -1).flatten()
    if "BLK" not in mode:
        return index
    size = cache.shape[1]
    token = torch.arange(tokens, device=index.device)
    first = index.view(-1, -(-tokens // size) if size else 0)[:, token // max(size, 1)]
    # A page counts, not where in it the place lies.
    return (first // max(size, 1) * size + token % max(size, 1)).where(first >= 0, -1).flatten()


def _rounded(rows: Tensor, dtype: torch.dtype, scale: Tensor | None, offset: Tensor | None) -> Tensor:
    """Rows as a cache has them; halves to even."""
    if scale is None:
        return rows.to(dtype)
    return rounded(rows * scale if offset is None else rows * scale + offset, 127)

"""flash_attn's functions over a cache, in pages or rows: appending, rotation and attention.

decode_attention() computes the attention, or attention() if there are ALiBi slopes.
"""

from collections.abc import Sequence
from typing import Any

import torch

from fusion_attention.api.attention import attention
from fusion_attention.api.decode import decode_attention
from fusion_attention.integrations.flash_attn.argument_conversion import NO_WINDOW, Window, band_of, capped, numbers
from fusion_attention.integrations.flash_attn.rotary import rotated

Tensor = torch.Tensor


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """flash_attn.flash_attn_with_kvcache: appends keys and values of new tokens to a cache, then attends to the cache.

    It is not differentiable.

    Args:
        q: [B, S1, N1, D].
        k_cache, v_cache: [Bc, S2, N2, D], or with block_table pages [pages, size, N2, D] of any size. k and v are
            written into them.
        k, v: [B, new, N2, D]: stored after the cache_seqlens tokens, so they need cache_seqlens.
        rotary_cos, rotary_sin: [positions, R / 2], R <= D: rotate the first R elements of k by the tokens' positions,
            and of q by its tokens' positions if causal or windowed, else by the position cache_seqlens. They need k.
        cache_seqlens: tokens of each sequence in the cache before this call, a number or [B]; None: the cache's size.
        cache_batch_idx: [B]: index on the cache's first axis for each sequence.
        cache_leftpad: [B]: first position of each sequence in the cache; earlier positions are not visible.
        block_table: [B, pages per sequence], int32: page numbers of each sequence.
        softmax_scale, causal, window_size, softcap, alibi_slopes: as in flash_attn_func(). With alibi_slopes, pages and
            sequences selected by cache_batch_idx are copied.
        rotary_interleaved: elements 0 and 1 rotate together; else 0 and R / 2.
        num_splits: no effect.
        return_softmax_lse: also return lse, float32 [B, N1, S1].

    Returns:
        out [B, S1, N1, D], or (out, lse).

    Raises:
        RuntimeError: a block_table, cache or rotary table is too small; nothing was written.
        ValueError: arguments contradict each other.

    Source: flash_attn 2.8, flash_attn_interface.py.

    Example:
        >>> cache = torch.zeros(2, 2, 16, 2, 64)
        >>> q, k = torch.randn(2, 1, 4, 64), torch.randn(2, 1, 2, 64)
        >>> flash_attn_with_kvcache(q, cache[0], cache[1], k, k, cache_seqlens=3).shape
        torch.Size([2, 1, 4, 64])
        >>> torch.equal(cache[0][:, 3:4], k)
        True
    """
    with torch.no_grad():
        band = band_of(causal, window_size)
        before = _before(q, k_cache, k, v, cache_seqlens, cache_leftpad, block_table)
        new = 0 if k is None else k.shape[1]
        ends = [length + new for length in before]
        _check_space(ends, k_cache, block_table)
        rows = None if cache_batch_idx is None else numbers(cache_batch_idx)
        _check_rows(rows, q, k_cache, block_table)
        if rotary_cos is not None:
            if k is None or rotary_sin is None:
                raise ValueError("flash_attn_with_kvcache: rotary_cos: expected rotary_sin, k and v too")
            advance = causal or any(int(n) >= 0 for n in window_size)
            k = rotated(k, rotary_cos, rotary_sin, before, rotary_interleaved)
            q = rotated(q, rotary_cos, rotary_sin, before, rotary_interleaved, advance=advance)
        if k is not None and v is not None and new:
            for cache, fresh in ((k_cache, k), (v_cache, v)):
                _append(cache, fresh, before, rows, block_table)
        how = {"scale": softmax_scale, "band": band, "softcap": capped(softcap)}
        out, lse = _attend(q, k_cache, v_cache, ends, rows, block_table, cache_leftpad, alibi_slopes, **how)
    return (out, lse) if return_softmax_lse else out


def attend_pages(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, q_len: Any, kv_len: Any, *, alibi_slopes: Tensor | None, **how: Any
) -> tuple[Tensor, Tensor]:
    """Returns (out [T1, N1, D], lse [T1, N1]) of packed queries [T1, N1, D] over pages k, v [pages, page size, N2, D],
    without a derivative. table: int32 [B, pages per sequence]. how: further arguments of attention()."""
    ends = list(kv_len)
    _check_space(ends, k, table)
    with torch.no_grad():
        # Decoding needs padded rows; the result is packed again.
        padded = q.new_zeros(len(q_len), max(q_len, default=0), *q.shape[1:])
        slots = [(b, slice(0, n)) for b, n in enumerate(q_len)]
        for place, sequence_rows in zip(slots, q.split([*q_len, q.shape[0] - sum(q_len)]), strict=False):
            padded[place] = sequence_rows
        out, lse = _attend(padded, k, v, ends, None, table, None, alibi_slopes, q_len=q_len, **how)
        behind = q.new_zeros(q.shape[0] - sum(q_len), *out.shape[2:])
        lse = lse.transpose(1, 2)
        none = lse.new_full((behind.shape[0], lse.shape[2]), float("-inf"))
        return torch.cat([*(out[p] for p in slots), behind]), torch.cat([*(lse[p] for p in slots), none])


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends: Sequence[int],
    rows: Sequence[int] | None,
    table: Tensor | None,
    pads: Tensor | None,
    alibi_slopes: Tensor | None,
    **how: Any,
) -> tuple[Tensor, Tensor]:
    """Returns (out [B, S1, N1, D], lse [B, N1, S1]) of padded queries over the first `ends` tokens of each sequence in
    the cache, [rows, tokens, N2, D], or in pages with `table`. rows: each sequence's row of the cache; None: sequence b
    is in row b. pads: invisible tokens at each sequence's start. how: further arguments of attention()."""
    batch = q.shape[0]
    caches: Any = (k, v)
    if pads is not None:
        slots = torch.arange(k.shape[1], device=pads.device)
        how["blocked"] = (slots < pads[:, None])[:, None, None]
    if alibi_slopes is not None:  # decoding does not support them: the cache becomes padded keys
        if table is not None:
            caches = [cache[table.long()].flatten(1, 2) for cache in caches]
        elif rows is not None:
            caches = [cache[list(rows)] for cache in caches]
        k, v = (cache[:batch] for cache in caches)
        return attention(q, k, v, kv_len=ends, alibi_slopes=alibi_slopes, return_lse=True, **how)
    if rows is not None:
        caches = tuple([cache[row : row + 1] for row in rows] for cache in caches)
    elif table is None:
        caches = tuple(cache[:batch] for cache in caches)
    return decode_attention(q, caches, kv_len=ends, block_table=table, return_lse=True, **how)


def _before(
    q: Tensor,
    k_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    lengths: int | Tensor | None,
    pads: Tensor | None,
    table: Tensor | None,
) -> list[int]:
    """Returns the number of tokens of each sequence in the cache, before new ones are stored: `lengths`, or all if
    None; raises ValueError for inconsistent arguments of flash_attn_with_kvcache()."""
    name = "flash_attn_with_kvcache"
    if (k is None) != (v is None):
        raise ValueError(f"{name}: v: expected k and v, or neither, got one of them")
    if k is not None and lengths is None:
        raise ValueError(f"{name}: cache_seqlens: expected the position at which k is stored, got None")
    if k is not None and v is not None and (k.shape[:3] != v.shape[:3] or k.shape[0] != q.shape[0]):
        raise ValueError(f"{name}: k, v: expected [{q.shape[0]}, new, N2, D], got {tuple(k.shape)}, {tuple(v.shape)}")
    if pads is not None and table is not None:
        raise ValueError(f"{name}: cache_leftpad: expected it without block_table, as flash_attn does, got both")
    batch = q.shape[0]
    if lengths is None:
        return [k_cache.shape[1] * (1 if table is None else table.shape[1])] * batch
    result = [lengths] * batch if isinstance(lengths, int) else numbers(lengths)
    if len(result) != batch or min(result, default=0) < 0:
        raise ValueError(f"{name}: cache_seqlens: expected {batch} lengths of at least 0, got {result}")
    return result


def _check_space(ends: Sequence[int], k_cache: Tensor, table: Tensor | None) -> None:
    """Raises RuntimeError if a sequence of ends[b] tokens does not fit into its row of the cache, or if its row in
    `table` lists too few pages or one that does not exist; called before anything is written or copied."""
    longest, size = max(ends, default=0), k_cache.shape[1]
    if table is None:
        if longest > size:
            raise RuntimeError(
                f"flash_attn: k_cache: expected space for {longest} tokens, got {size} (allocate a longer cache)"
            )
        return
    if longest > table.shape[-1] * size:
        raise RuntimeError(
            f"flash_attn: block_table: expected pages for {longest} tokens, got {table.shape[-1]} of {size} tokens "
            "(list enough pages for the tokens of every sequence)"
        )
    used = torch.arange(table.shape[1], device=table.device) * size < table.new_tensor(ends)[:, None]
    named = table[used]
    if named.numel() and not 0 <= int(named.min()) <= int(named.max()) < k_cache.shape[0]:
        raise RuntimeError(
            f"flash_attn: block_table: expected pages from 0 to {k_cache.shape[0] - 1}, got {int(named.min())} to "
            f"{int(named.max())} (list an existing page for every token)"
        )


def _check_rows(rows: Sequence[int] | None, q: Tensor, k_cache: Tensor, table: Tensor | None) -> None:
    """Raises ValueError unless `rows` (cache_batch_idx) names an existing row of the cache for every sequence of q."""
    if rows is None:
        return
    if table is not None:
        raise ValueError("flash_attn_with_kvcache: cache_batch_idx: expected it without block_table, got both")
    count = k_cache.shape[0]
    if len(rows) != q.shape[0] or not all(0 <= row < count for row in rows):
        raise ValueError(
            f"flash_attn_with_kvcache: cache_batch_idx: expected {q.shape[0]} rows from 0 to {count - 1}, got {rows}"
        )


def _append(
    cache: Tensor, fresh: Tensor, before: Sequence[int], rows: Sequence[int] | None, table: Tensor | None
) -> None:
    """Stores new tokens `fresh` [B, new, N2, D] after the `before` tokens of each sequence in a cache. rows: each
    sequence's index on the cache's first axis; None: sequence b is at b. table: page table of a cache in pages."""
    batch, new = fresh.shape[:2]
    at = torch.tensor(list(before), device=cache.device)[:, None] + torch.arange(new, device=cache.device)
    if table is None:
        owner = torch.arange(batch) if rows is None else torch.tensor(rows)
        place = owner.to(cache.device)[:, None].expand(batch, new)
    else:
        size = cache.shape[1]
        place, at = table.long().gather(1, at // size), at % size
    cache.index_put_((place, at), fresh.to(cache.dtype))

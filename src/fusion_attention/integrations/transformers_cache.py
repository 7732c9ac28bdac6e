"""PagedCache: a cache for transformers' generate() whose keys and values are in pages.

    model.generate(**inputs, past_key_values=PagedCache(model.config))

Padding is not stored, but only the attention function gets the mask that marks it. So a layer's update() keeps new keys
and values pending and returns StoredRows, tensors that represent all keys or values of the layer. attend() of
`transformers.py` calls PagedLayer.attend() with the query; any other operation on StoredRows copies from the pages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map
from transformers.cache_utils import CacheLayerMixin, DynamicCache, get_layer_types_and_kwargs

from fusion_attention.api.cache import CacheFullError, PagedKVCache
from fusion_attention.api.decode import decode_attention
from fusion_attention.ir.mask import Band

__all__ = ["PagedCache", "PagedLayer", "StoredRows"]

Tensor = torch.Tensor
# Arguments with which decode_attention() reads the pages; with others, attention() computes on copied rows.
_DECODED = frozenset(("scale", "sink", "softcap"))


class PagedCache(DynamicCache):
    """A cache for transformers' models: keys and values are in pages, without padding; beams share pages.

    With attn_implementation="fusion_attention" attention reads the pages. Other implementations, and calls that
    decode_attention() does not support (a bias, a four-dimensional mask), read copies. Layers with a sliding window
    store only the window's keys. Layers with neither full nor sliding attention use transformers' cache. The pages of
    a layer double in number when they are full.

    Args:
        config: the model's configuration.
        stored: "" for the model's dtype, or "int8" or "int4" for quantised elements with a scale per token and head.
        page_size: tokens per page.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from fusion_attention.integrations.transformers import register
        >>> register()
        >>> sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 1}
        >>> config = LlamaConfig(**sizes, vocab_size=64, eos_token_id=None)
        >>> model = LlamaForCausalLM._from_config(config, attn_implementation="fusion_attention")
        >>> ids = torch.arange(5)[None]
        >>> model.generate(ids, past_key_values=PagedCache(config), max_new_tokens=3, do_sample=False).shape
        torch.Size([1, 8])
    """

    def __init__(self, config: Any, *, stored: str = "", page_size: int = 128) -> None:
        super().__init__(config=config)
        self._present = Present()
        types, words = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
        for i, (kind, word) in enumerate(zip(types, words, strict=True)):
            if kind in ("full_attention", "sliding_attention"):
                self.layers[i] = PagedLayer(self._present, word.get("sliding_window", 0), stored, page_size)

    @property
    def nbytes(self) -> int:
        """Number of bytes of all layers' pages."""
        return sum(layer.pool.nbytes for layer in self.layers if isinstance(layer, PagedLayer) and layer.pool)

    def reset(self) -> None:
        """Removes all sequences; the memory of the pages is not freed."""
        super().reset()
        self._present.change(lambda real: None)

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last -tokens_to_remove tokens of every sequence (negative or 0, as in transformers)."""
        left = self.get_seq_length() + tokens_to_remove
        super().crop(tokens_to_remove)
        self._present.change(lambda real: real[:, :left])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replaces sequence i by sequence beam_idx[i]; they share pages until one of them writes."""
        super().reorder_cache(beam_idx)
        self._present.change(lambda real: real[beam_idx.to(real.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each sequence `repeats` times in place; the copies share pages."""
        super().batch_repeat_interleave(repeats)
        self._present.change(lambda real: real.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Replaces the batch by the sequences at `indices`, of int64 or bool."""
        super().batch_select_indices(indices)
        self._present.change(lambda real: real[indices])


class Present:
    """Flags of a batch's tokens, true for a token and false for padding, which layers do not store. All layers of a
    cache share one object, because their masks are equal; the first layer of a forward reads the mask."""

    def __init__(self) -> None:
        self._real: Tensor | None = None  # bool [B, tokens] up to the last padding; None: no padding
        self.gaps = False  # True if padding follows a token
        self._read: tuple[Tensor | None, int, bool, Tensor | None] = None, 0, False, None

    def read(self, mask: Tensor | None, before: int) -> tuple[bool, Tensor | None]:
        """Compares a forward's mask, bool [B, tokens] or None, with the stored flags of the first `before` tokens.
        Returns (True if they are equal, flags of the new tokens [B, new], or None if none of them is padding)."""
        if mask is None:
            return self._real is None, None
        if mask.dtype != torch.bool or mask.dim() != 2:
            return False, None
        if self._read[0] is not mask or self._read[1] != before:
            old, new = mask[:, :before], mask[:, before:]
            agrees = torch.equal(old, self.upto(before, len(mask), mask.device))
            self._read = mask, before, agrees, None if bool(new.all()) else new
        return self._read[2:]

    def upto(self, tokens: int, batch: int, device: torch.device) -> Tensor:
        """Returns the flags of the first `tokens` positions, bool [B, tokens]: false for padding, true for tokens."""
        there = torch.ones(batch, tokens, dtype=torch.bool, device=device)
        if self._real is not None:
            real = self._real[:, :tokens]
            there[:, : real.shape[1]] = real
        return there

    def add(self, before: int, new: Tensor) -> None:
        """Stores the flags `new`, bool [B, new tokens] (false for padding), from position `before` on."""
        self._real = real = torch.cat((self.upto(before, len(new), new.device), new), 1)
        self.gaps = bool((real[:, :-1] & ~real[:, 1:]).any())

    def change(self, how: Callable[[Tensor], Tensor | None]) -> None:
        """Replaces the flags of tokens and padding by how(flags), when sequences are reordered or tokens removed."""
        self._real = None if self._real is None else how(self._real)
        self._read = None, 0, False, None


class PagedLayer(CacheLayerMixin):
    """The keys and values of one layer in pages, with the interface of transformers' cache layers.

    Args:
        present: the flags of the cache's tokens (false for padding), which all layers share.
        window: number of keys that a query sees, the diagonal included; 0: all.
        stored: "" for the model's dtype, or "int8" or "int4". page_size: tokens per page.
    """

    is_croppable = True

    def __init__(self, present: Present, window: int, stored: str, page_size: int) -> None:
        self.present, self.stored, self.page_size = present, stored, page_size
        self.is_sliding, self.sliding_window = window > 0, window
        self.record_past = self.is_initialized = False
        self.pool: PagedKVCache | None = None
        self.sequences: list[int] = []
        self._totals: list[int] = []  # tokens of each sequence, those before a window included
        self._tokens = 0  # tokens of every sequence, padding included, pending rows excluded
        self._new: tuple[Tensor, Tensor] | None = None  # rows [B, heads, new, dim], pending until a mask comes

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates empty sequences, and pages that hold the first tokens and one more page per sequence."""
        batch, heads, tokens, dim = key_states.shape
        if self.pool is None:
            retained = min(tokens, self.sliding_window) if self.is_sliding else tokens
            self.pool = PagedKVCache(
                heads, dim, max(batch, 1) * (retained // self.page_size + 2), dim_v=value_states.shape[-1],
                page_size=self.page_size, dtype=key_states.dtype, stored=self.stored, device=key_states.device,
            )  # fmt: skip
        self.sequences = [self.pool.allocate() for _ in range(batch)]
        self._totals = [0] * batch
        self.is_initialized = True

    @property
    def _pages(self) -> PagedKVCache:
        assert self.pool is not None
        return self.pool

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Receives a forward's keys and values [B, heads, new, dim], pending until attend() gets the mask. Returns two
        StoredRows, which represent all keys and all values of the layer.

        Raises:
            ValueError: the batch size differs from the stored one, or a gradient is needed, which pages do not support.
        """
        self.settle()
        if torch.is_autocast_enabled(key_states.device.type):  # as in attention
            dtype = torch.get_autocast_dtype(key_states.device.type)
            key_states, value_states = key_states.to(dtype), value_states.to(dtype)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        batch = len(self.sequences)
        if len(key_states) != batch:
            advice = "reset() the cache, or make a new one"
            raise ValueError(f"PagedCache: key_states: expected a batch of {batch}, got {len(key_states)} ({advice})")
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            advice = "torch.no_grad(), or use_cache=False to train"
            raise ValueError(f"PagedCache: key_states: expected no gradient, got one ({advice})")
        self._new = key_states, value_states
        return StoredRows(self, 0, key_states), StoredRows(self, 1, value_states)

    def attend(
        self, q: Tensor, mask: Tensor | None, band: Band | None, words: dict[str, Any]
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Returns the attention output [B, S, N, Dv] of the newest queries q [B, S, N, D] over all stored tokens.

        It returns (keys, values) [B, heads, tokens, dim] instead, for which the caller computes attention, in the first
        call of a sequence (its own tensors, not a copy from the pages) and if the pages do not support the call (a copy
        of all tokens). mask: the forward's attention mask: None, bool [B, tokens] (false for padding), or another form.
        words: further arguments of attention().
        """
        if self._new is None:
            return self.rows()
        before, (k, v) = self._tokens, self._new
        agrees, there = self.present.read(mask, before)
        if before == 0:
            self.settle(there)
            return k, v
        self.settle(there, slide=False)
        answered: Tensor | tuple[Tensor, Tensor]
        apart = self.is_sliding and self.present.gaps  # a window includes padding, which is not stored
        if agrees and there is None and not apart and words.keys() <= _DECODED and q.shape[1] == k.shape[2]:
            visible_band = Band.full() if band is None else band
            answered = decode_attention(
                q.to(k.dtype), self._pages, sequences=self.sequences, band=visible_band, **words
            )
        else:
            answered = self.rows()
        self._slide()
        return answered

    def settle(self, there: Tensor | None = None, slide: bool = True) -> None:
        """Stores the tokens that update() left pending; there: bool [B, new], false for padding, which is not stored
        (None: no padding). slide: also frees tokens before the sliding window."""
        if self._new is not None:
            (k, v), self._new = (t.transpose(1, 2) for t in self._new), None
            if there is not None:
                self.present.add(self._tokens, there)
            self._tokens += k.shape[1]
            if there is None:
                self._store(self.sequences, k, v, slide)
            else:
                for b, sequence in enumerate(self.sequences):
                    rows = there[b].nonzero()[:, 0]
                    self._store([sequence], k[b : b + 1, rows], v[b : b + 1, rows], slide)
            counts = [k.shape[1]] * len(k) if there is None else there.sum(1).tolist()
            self._totals = [total + count for total, count in zip(self._totals, counts, strict=True)]
        if slide:
            self._slide()

    def _store(self, sequences: Sequence[int], k: Tensor, v: Tensor, slide: bool) -> None:
        """Appends tokens k, v [sequences, tokens, heads, dim] to the pages; adds pages if all are in use.
        slide: before that, frees tokens, and skips new ones, that no later query's sliding window has."""
        pages, retained = self._pages, self.sliding_window - 1
        if slide and self._slides and k.shape[1] > retained:
            k, v = (t[:, t.shape[1] - retained :] for t in (k, v))
            for sequence in sequences:
                pages.crop(sequence, *pages.lengths([sequence]))
        with contextlib.suppress(CacheFullError):
            return pages.append(sequences, k, v)
        pages.add_pages(pages.pages)
        return self._store(sequences, k, v, slide)

    @property
    def _slides(self) -> bool:
        return self.is_sliding and not self.record_past

    def _slide(self) -> None:
        if self._slides:
            for sequence in self.sequences:
                self._pages.slide(sequence, self.sliding_window - 1)

    def rows(self) -> tuple[Tensor, Tensor]:
        """Returns copies (k, v), [B, heads, tokens, dim]; padding and freed tokens before a window are zero."""
        self.settle(slide=False)  # the newest rows see more tokens than the next ones
        pages, batch = self._pages, len(self.sequences)
        parts = [pages.rows(sequence) for sequence in self.sequences]
        like = parts[0][0] if parts else torch.empty(0, dtype=pages.dtype)
        there = self.present.upto(self._tokens, batch, like.device)
        results = [like.new_zeros(batch, pages.heads, self._tokens, dim) for dim in (pages.dim, pages.dim_v)]
        for b, tensors in enumerate(parts):
            where = there[b].nonzero()[:, 0]
            for full, mine in zip(results, tensors, strict=True):
                full[b, :, where[len(where) - len(mine) :]] = mine.transpose(0, 1)
        return results[0], results[1]

    @property
    def keys(self) -> Tensor | None:
        """All keys, [B, heads, tokens, dim]; None before the first update."""
        return self.rows()[0] if self.is_initialized else None

    @property
    def values(self) -> Tensor | None:
        """All values, [B, heads, tokens, dim]; None before the first update."""
        return self.rows()[1] if self.is_initialized else None

    def get_seq_length(self) -> int:
        """Returns the number of tokens stored per sequence, padding included."""
        return self._tokens + (0 if self._new is None else self._new[0].shape[2])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns (number of keys that the mask of the next forward describes, 0 as the first key's position).
        query_length: number of queries of that forward, which are counted; so are keys that a window has freed."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """Returns -1: there is no maximum."""
        return -1

    def reset(self) -> None:
        """Removes all sequences; the memory of the pages is not freed."""
        for sequence in self.sequences:
            self._pages.free(sequence)
        self.sequences, self._totals, self._tokens, self._new = [], [], 0, None
        self.is_initialized = False

    def activate_past_recording(self) -> None:
        """Stops the freeing of tokens before a sliding window until the next crop(), which may need them."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last -tokens_to_remove tokens of every sequence, then frees tokens before the window.

        Raises:
            ValueError: the number is positive.
            RuntimeError: tokens that a window has freed would be visible again.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"PagedCache: crop: expected 0 or minus the tokens to remove, got {tokens_to_remove}")
        self.settle()
        if not self.is_initialized:
            return
        removed = min(-tokens_to_remove, self._tokens)
        there = self.present.upto(self._tokens, len(self.sequences), torch.device("cpu"))
        counts = there[:, self._tokens - removed :].sum(1).tolist()
        lengths = self._pages.lengths(self.sequences)
        for cached, total, count in zip(lengths, self._totals, counts, strict=True):
            if cached - count < min(self.sliding_window - 1, total - count):
                raise RuntimeError(
                    "PagedCache: crop: the sliding window has freed tokens that would be visible again (call "
                    "activate_past_recording() before the tokens that crop() may remove)"
                )
        for sequence, count in zip(self.sequences, counts, strict=True):
            self._pages.crop(sequence, count)
        self._totals = [total - count for total, count in zip(self._totals, counts, strict=True)]
        self._tokens -= removed
        record, self.record_past = self.record_past, False
        self._slide()
        self.record_past = record

    def _choose(self, order: Sequence[int]) -> None:
        """Replaces the batch by copies of existing sequences, whose numbers `order` lists; copies share pages."""
        self.settle()
        if not self.is_initialized or list(order) == list(range(len(self.sequences))):
            return
        chosen = [self._pages.fork(self.sequences[i]) for i in order]
        for sequence in self.sequences:
            self._pages.free(sequence)
        self.sequences, self._totals = chosen, [self._totals[i] for i in order]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replaces sequence i by sequence beam_idx[i]; copies of a sequence share its pages."""
        self._choose(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each sequence `repeats` times; the copies share its pages."""
        self._choose([i for i in range(len(self.sequences)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Replaces the batch by the sequences at `indices`, of int64 or bool, and frees the pages of the others."""
        self._choose(torch.arange(len(self.sequences))[indices].tolist())


class StoredRows(Tensor):
    """A tensor [B, heads, tokens, dim] without memory that represents all keys or values of a cached layer; an
    operation of torch on it first copies them from the pages."""

    layer: PagedLayer
    _side: int
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, layer: PagedLayer, side: int, like: Tensor) -> StoredRows:
        """Makes the tensor for the keys (side 0) or the values (side 1) of a layer; like: the layer's new tokens."""
        shape = (*like.shape[:2], layer.get_seq_length(), like.shape[3])
        wrapper: StoredRows = Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        wrapper.layer, wrapper._side = layer, side
        return wrapper

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Runs an operation of torch with each StoredRows argument replaced by a copy of its tokens from the pages."""

        def materialised(given: Any) -> Any:
            return given.layer.rows()[given._side] if isinstance(given, StoredRows) else given

        return func(*tree_map(materialised, args), **tree_map(materialised, kwargs or {}))

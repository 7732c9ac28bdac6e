"""PagedCache: what generate() of transformers remembers, in pages of this library.

    model.generate(**inputs, past_key_values=PagedCache(model.config))

A layer's update() only takes new rows in: which of them are padding the attention function learns from its mask, and
padding is not stored. What update() returns stands for all rows of the layer: our attention function hands it the
query (PagedLayer.attend), and whatever else touches it gets the rows themselves.
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
# Words of a call that decode_attention() knows too; other calls are computed from the rows.
_DECODED = frozenset(("scale", "sink", "softcap"))


class PagedCache(DynamicCache):
    """A cache for models of transformers whose keys and values lie in pages; without padding, shared by beams.

    With attn_implementation="fusion_attention" new tokens are attended over the pages where they lie; other
    implementations, and calls that decode_attention() does not know (a bias, a mask of its own), get copies of them.
    Layers with a sliding window keep the pages that it touches. Layers that are neither full nor sliding attention are
    transformers' own. Pools grow by doubling.

    Args:
        config: of the model.
        stored: "" (as the model computes), or "int8" or "int4": quantised with a scale per token and head.
        page_size: tokens of a page.

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
        """Bytes of all pools."""
        return sum(layer.pool.nbytes for layer in self.layers if isinstance(layer, PagedLayer) and layer.pool)

    def reset(self) -> None:
        """Forgets all sequences; pools stay."""
        super().reset()
        self._present.change(lambda real: None)

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last -tokens_to_remove tokens, as transformers' caches do."""
        left = self.get_seq_length() + tokens_to_remove
        super().crop(tokens_to_remove)
        self._present.change(lambda real: real[:, :left])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence i becomes what sequence beam_idx[i] was; they share pages until one of them writes."""
        super().reorder_cache(beam_idx)
        self._present.change(lambda real: real[beam_idx.to(real.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence so many times, one behind the other; they share pages."""
        super().batch_repeat_interleave(repeats)
        self._present.change(lambda real: real.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Leaves the sequences that are named."""
        super().batch_select_indices(indices)
        self._present.change(lambda real: real[indices])


class Present:
    """Which tokens of a batch are there: what a mask hid when it came is padding, which no layer stores.

    All layers of a cache share it: they see the same masks, and one of them reads.
    """

    def __init__(self) -> None:
        self._real: Tensor | None = None  # bool [B, tokens] up to the last padding; None: there is none
        self.gaps = False  # padding behind a token
        self._read: tuple[Tensor | None, int, bool, Tensor | None] = None, 0, False, None

    def read(self, mask: Tensor | None, before: int) -> tuple[bool, Tensor | None]:
        """Of a forward's mask, when `before` tokens are stored: whether it hides of these what is not stored and no
        more; and which of the new tokens are there, [B, new], None where all are."""
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
        """bool [B, tokens]."""
        there = torch.ones(batch, tokens, dtype=torch.bool, device=device)
        if self._real is not None:
            real = self._real[:, :tokens]
            there[:, : real.shape[1]] = real
        return there

    def add(self, before: int, new: Tensor) -> None:
        """Tokens of which some are padding; every layer says it."""
        self._real = real = torch.cat((self.upto(before, len(new), new.device), new), 1)
        self.gaps = bool((real[:, :-1] & ~real[:, 1:]).any())

    def change(self, how: Callable[[Tensor], Tensor | None]) -> None:
        """Other sequences, or fewer tokens."""
        self._real = None if self._real is None else how(self._real)
        self._read = None, 0, False, None


class PagedLayer(CacheLayerMixin):
    """One layer's keys and values in pages: what transformers asks of a layer of a cache.

    Args:
        present: of the cache.
        window: tokens that a row sees, itself included; 0: all.
        stored, page_size: as PagedKVCache.
    """

    is_croppable = True

    def __init__(self, present: Present, window: int, stored: str, page_size: int) -> None:
        self.present, self.stored, self.page_size = present, stored, page_size
        self.is_sliding, self.sliding_window = window > 0, window
        self.record_past = self.is_initialized = False
        self.pool: PagedKVCache | None = None
        self.sequences: list[int] = []
        self._totals: list[int] = []  # tokens of each sequence, those that a window has left behind included
        self._tokens = 0  # of every sequence, padding included, without those that wait
        self._new: tuple[Tensor, Tensor] | None = None  # rows [B, heads, new, dim] that wait for a mask

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """A pool for the tokens of the first rows and a page more for each sequence; the sequences, empty."""
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
        """Takes new rows in; what it returns stands for all of them.

        Raises:
            ValueError: rows of another batch than those before, or with a gradient, which pages do not keep.
        """
        self.settle()
        if torch.is_autocast_enabled(key_states.device.type):  # as attention would
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
        """Attention of the rows that came last, q [B, S, N, D], over all that is stored; or k and v [B, heads, tokens,
        dim], for a call that pages do not answer."""
        if self._new is None:
            return self.rows()
        before, (k, v) = self._tokens, self._new
        agrees, there = self.present.read(mask, before)
        if before == 0:
            self.settle(there)
            return k, v
        self.settle(there, slide=False)
        answered: Tensor | tuple[Tensor, Tensor]
        apart = self.is_sliding and self.present.gaps  # a window counts padding, which is not stored
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
        """Stores the rows that wait; there: [B, new], which are tokens; slide: and lets go of what no window sees."""
        if self._new is not None:
            (k, v), self._new = (t.transpose(1, 2) for t in self._new), None
            self._take(k, v, there, slide)
        if slide:
            self._slide()

    def _take(self, k: Tensor, v: Tensor, there: Tensor | None, slide: bool) -> None:
        """settle(), of rows [B, new, heads, dim]."""
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

    def _store(self, sequences: Sequence[int], k: Tensor, v: Tensor, slide: bool) -> None:
        """New tokens [sequences, tokens, heads, dim], in a pool that grows."""
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
        """(k, v), [B, heads, tokens, dim]: zeros for padding, and for what a window has left behind."""
        self.settle(slide=False)  # the rows that came last see more than the next ones will
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
        """rows()[0], as transformers' layers have them."""
        return self.rows()[0] if self.is_initialized else None

    @property
    def values(self) -> Tensor | None:
        """rows()[1]."""
        return self.rows()[1] if self.is_initialized else None

    def get_seq_length(self) -> int:
        """Tokens of every sequence, padding included."""
        return self._tokens + (0 if self._new is None else self._new[0].shape[2])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys of the next forward's mask, position of the first): those that a window has left behind count."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def reset(self) -> None:
        """Forgets all sequences; the pool stays."""
        for sequence in self.sequences:
            self._pages.free(sequence)
        self.sequences, self._totals, self._tokens, self._new = [], [], 0, None
        self.is_initialized = False

    def activate_past_recording(self) -> None:
        """A window lets go of nothing before the next crop()."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last -tokens_to_remove tokens of every sequence; what a window held back it lets go of.

        Raises:
            ValueError: a positive number.
            RuntimeError: a window has left tokens behind that would be seen again.
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
                    "PagedCache: crop: a window has left behind tokens that would be seen again "
                    "(activate_past_recording() before the tokens that may be taken back)"
                )
        for sequence, count in zip(self.sequences, counts, strict=True):
            self._pages.crop(sequence, count)
        self._totals = [total - count for total, count in zip(self._totals, counts, strict=True)]
        self._tokens -= removed
        record, self.record_past = self.record_past, False
        self._slide()
        self.record_past = record

    def _choose(self, order: Sequence[int]) -> None:
        """Other sequences out of those that there are."""
        self.settle()
        if not self.is_initialized or list(order) == list(range(len(self.sequences))):
            return
        chosen = [self._pages.fork(self.sequences[i]) for i in order]
        for sequence in self.sequences:
            self._pages.free(sequence)
        self.sequences, self._totals = chosen, [self._totals[i] for i in order]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """As the cache's."""
        self._choose(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """As the cache's."""
        self._choose([i for i in range(len(self.sequences)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """As the cache's."""
        self._choose(torch.arange(len(self.sequences))[indices].tolist())


class StoredRows(Tensor):
    """All keys or values of a layer, [B, heads, tokens, dim], not copied yet: any operation copies."""

    layer: PagedLayer
    _side: int
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, layer: PagedLayer, side: int, like: Tensor) -> StoredRows:
        """side: 0 for keys, 1 for values; like: new rows."""
        shape = (*like.shape[:2], layer.get_seq_length(), like.shape[3])
        wrapper: StoredRows = Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        wrapper.layer, wrapper._side = layer, side
        return wrapper

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """The operation, of the rows."""

        def materialised(given: Any) -> Any:
            return given.layer.rows()[given._side] if isinstance(given, StoredRows) else given

        return func(*tree_map(materialised, args), **tree_map(materialised, kwargs or {}))

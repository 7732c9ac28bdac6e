"""CompressedCache: the KV cache of CompressedAttention, for generation."""

import copy
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from fusion_attention.api.compress import CompressionState, compress
from fusion_attention.contract import show


class CompressedCache:
    """The KV cache of one CompressedAttention, for generation; every layer needs its own cache.

    It stores the last `window - 1` keys, one compressed key for every `ratio` tokens, and the rows of the window that
    is not complete yet. All sequences have the same length.

    Attributes:
        tokens: number of tokens of each sequence so far.

    Source: this library.

    Example:
        >>> from fusion_attention.nn import CompressedAttention, rope_table
        >>> layer = CompressedAttention(64, 4, head_dim=16, q_rank=32, window=8, ratio=16).eval()
        >>> cache, rope = CompressedCache(), rope_table(torch.arange(64), 8)
        >>> with torch.no_grad():
        ...     for x in (torch.randn(2, 32, 64), torch.randn(2, 1, 64)):  # the prompt, then one token
        ...         out, _ = layer(x, rope=rope, cache=cache)
        >>> out.shape, cache.tokens
        (torch.Size([2, 1, 64]), 33)
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._keys: Tensor | None = None
        self._entries: dict[str, Tensor] = {}
        self._states: dict[str, CompressionState] = {}
        self._layer: weakref.ref[nn.Module] | None = None

    def __repr__(self) -> str:
        """Returns a text with the number of tokens and the stored tensors."""
        stored = {} if self._keys is None else {"keys": self._keys}
        text = ", ".join(f"{name} {show(rows)}" for name, rows in (stored | self._entries).items())
        return f"<CompressedCache: {self.tokens} tokens; {text or 'nothing stored'}>"


class CompressedStep:
    """One forward of a layer with or without a cache; the cache changes only in commit().

    Args:
        cache: the layer's cache; None: the call has complete sequences from position 0 on.
        layer: the layer that is called. x: hidden states of the call's tokens, [B, S, dim].

    Attributes:
        first: position of the call's first token. tokens: number of tokens, with those of the call.

    Raises:
        ValueError: cache is not a CompressedCache or belongs to another layer, or gradients are enabled.
    """

    def __init__(self, cache: CompressedCache | None, layer: nn.Module, x: Tensor) -> None:
        self.cache, self.layer, self.name = cache, layer, type(layer).__name__
        self.states: dict[str, CompressionState] = {}
        self.entries: dict[str, Tensor] = {}
        self.last: Tensor | None = None
        if cache is not None and not isinstance(cache, CompressedCache):
            raise ValueError(f"{self.name}: cache: expected a fusion_attention.nn.CompressedCache, got {show(cache)}")
        if cache is not None and torch.is_grad_enabled():
            raise ValueError(
                f"{self.name}: cache: expected torch.no_grad() around the call, got gradients that are enabled "
                "(stored rows have no gradient: train without a cache)"
            )
        if cache is not None and cache._layer is not None and cache._layer() is not self.layer:
            raise ValueError(
                f"{self.name}: cache: expected a cache of this layer, got that of another layer (make a "
                "CompressedCache for each layer)"
            )
        self.first = 0 if cache is None else cache.tokens
        self.tokens = self.first + x.shape[1]

    def keys(self, new: Tensor, window: int) -> Tensor:
        """Returns the last `window - 1` cached keys, then this forward's keys `new` [B, S, 1, D]: [B, tokens, 1, D]."""
        if self.cache is None:
            return new
        rows = self._joined(self.cache._keys, new)
        self.last = rows[:, max(0, rows.shape[1] - window + 1) :].clone()
        return rows

    def pooled(self, name: str, kv: Tensor, gate: Tensor, **windows: Any) -> tuple[Tensor, int]:
        """Returns (averages of kv in windows that the call completes, [B, windows, 1, D]; number of earlier windows).

        Args:
            name: the compressor's class, under which the cache stores its state.
            kv, gate: values and softmax logits of the call's tokens, [B, S, 1, ...].
            windows: ratio, position_bias and overlap, as in compress().
        """
        if self.cache is None:
            return compress(kv, gate, **windows), 0
        state = copy.copy(self.cache._states.get(name) or CompressionState())
        before, self.states[name] = state.tokens // windows["ratio"], state
        return compress(kv, gate, **windows, state=state), before

    def all_entries(self, name: str, new: Tensor) -> Tensor:
        """Returns the compressed keys of earlier calls, followed by `new`, those of the call: [B, windows, 1, D].

        name: class name of the module that computes them, Compressor or CompressedIndexer.
        """
        if self.cache is None:
            return new
        if self.cache.tokens and name not in self.cache._entries:
            raise ValueError(
                f"{self.name}: cache: expected compressed keys of a {name} in it, got none (it was filled in another "
                "stage: fill a new cache)"
            )
        self.entries[name] = self._joined(self.cache._entries.get(name), new)
        return self.entries[name]

    def _joined(self, old: Tensor | None, new: Tensor) -> Tensor:
        """Returns cached rows `old` (or None) and `new`, concatenated to [B, tokens, ...]; ValueError: they differ in
        batch, dtype or device."""
        if old is None:
            return new
        if (len(new), new.dtype, new.device) != (len(old), old.dtype, old.device):
            raise ValueError(
                f"{self.name}: x: expected rows of {len(old)} sequences in {old.dtype} on {old.device}, as its cache "
                f"has, got {len(new)} in {new.dtype} on {new.device}"
            )
        return torch.cat((old, new), 1)

    def commit(self) -> None:
        """Stores this forward's keys, compressed keys and incomplete windows in the cache, if there is one."""
        cache = self.cache
        if cache is not None:
            cache.tokens, cache._keys, cache._layer = self.tokens, self.last, weakref.ref(self.layer)
            cache._entries, cache._states = self.entries, self.states

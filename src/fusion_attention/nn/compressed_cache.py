"""The cache of attention layers with compressed keys, for generation."""

import copy
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from fusion_attention.api.compress import CompressionState, compress
from fusion_attention.contract import show


class CompressedCache:
    """The keys of the last window and all compressed keys of earlier tokens; every layer needs its own cache.

    It keeps `window - 1` keys, one compressed key for every `ratio` tokens, and the rows of the unfinished window, of
    sequences of one length.

    Attributes:
        tokens: number of tokens so far.

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
        """Text with the number of tokens and the stored tensors."""
        stored = {} if self._keys is None else {"keys": self._keys}
        text = ", ".join(f"{name} {show(rows)}" for name, rows in (stored | self._entries).items())
        return f"<CompressedCache: {self.tokens} tokens; {text or 'nothing stored'}>"


class CompressedStep:
    """One call of a layer with a cache; the cache changes when the call commits.

    Args:
        cache: None: whole sequences from position 0.
        layer: the layer that is called. x: its hidden states.

    Attributes:
        first: position of the call's first token. tokens: number of tokens with those of the call.

    Raises:
        ValueError: what is not a CompressedCache, or the cache of another layer, batch, dtype or device, or gradients.
    """

    def __init__(self, cache: CompressedCache | None, layer: nn.Module, x: Tensor) -> None:
        self.cache, self.layer, self.name = cache, layer, type(layer).__name__
        self.states: dict[str, CompressionState] = {}
        self.entries: dict[str, Tensor] = {}
        self.last: Tensor | None = None
        if cache is not None:
            self._check(cache, x)
        self.first = 0 if cache is None else cache.tokens
        self.tokens = self.first + x.shape[1]

    def _check(self, cache: Any, x: Tensor) -> None:
        if not isinstance(cache, CompressedCache):
            raise ValueError(f"{self.name}: cache: expected a fusion_attention.nn.CompressedCache, got {show(cache)}")
        if torch.is_grad_enabled():
            raise ValueError(
                f"{self.name}: cache: expected torch.no_grad() around the call, got gradients that are enabled (a "
                "cache keeps none; train over whole sequences)"
            )
        if cache._layer is not None and cache._layer() is not self.layer:
            raise ValueError(
                f"{self.name}: cache: expected one that it filled, got that of another layer (make a CompressedCache "
                "for each layer)"
            )

    def keys(self, new: Tensor, window: int) -> Tensor:
        """The keys of the last window before the call, then those of the call [B, S, 1, D]."""
        every = new
        if self.cache is not None:
            old = self.cache._keys
            if old is not None:
                self._check_rows("x", new, old)
                every = torch.cat((old, new), 1)
            self.last = every[:, max(0, every.shape[1] - window + 1) :].clone()
        return every

    def pooled(self, name: str, kv: Tensor, gate: Tensor, **how: Any) -> tuple[Tensor, int]:
        """Pools the windows that the call completes: (their rows, the number of windows before them)."""
        if self.cache is None:
            return compress(kv, gate, **how), 0
        state = copy.copy(self.cache._states.get(name) or CompressionState())
        before, self.states[name] = state.tokens // how["ratio"], state
        return compress(kv, gate, **how, state=state), before

    def all_entries(self, name: str, new: Tensor) -> Tensor:
        """The compressed keys of earlier calls, then those that the call completes."""
        if self.cache is None:
            return new
        if self.cache.tokens and name not in self.cache._entries:
            raise ValueError(
                f"{self.name}: cache: expected one with compressed keys of a {name}, got one without (it was "
                "filled in another stage: fill a new one)"
            )
        old = self.cache._entries.get(name)
        if old is not None:
            self._check_rows("x", new, old)
        self.entries[name] = new if old is None else torch.cat((old, new), 1)
        return self.entries[name]

    def _check_rows(self, param: str, new: Tensor, old: Tensor) -> None:
        if (len(new), new.dtype, new.device) != (len(old), old.dtype, old.device):
            raise ValueError(
                f"{self.name}: {param}: expected rows of {len(old)} sequences in {old.dtype} on {old.device}, as its "
                f"cache has, got {len(new)} in {new.dtype} on {new.device}"
            )

    def commit(self) -> None:
        """Stores the call's rows in the cache."""
        cache = self.cache
        if cache is not None:
            cache.tokens, cache._keys, cache._layer = self.tokens, self.last, weakref.ref(self.layer)
            cache._entries, cache._states = self.entries, self.states

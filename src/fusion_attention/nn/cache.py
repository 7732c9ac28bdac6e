"""The KV cache of the attention layers, for generation."""

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from fusion_attention.contract import show
from fusion_attention.memory import zeros
from fusion_attention.nn.ranks import Lengths, Ranks
from fusion_attention.torch_ops import dispatch

P = ParamSpec("P")
T = TypeVar("T")


class Step(NamedTuple):
    """The attention operands of one layer call with a KV cache: queries, all stored tensors by name, and lengths."""

    q: Tensor  # queries of the call's tokens
    rows: dict[str, Tensor]  # stored vectors of all tokens, those of the call included, by name ("k", "v", "index_k")
    lengths: dict[str, list[int] | None]  # q_len and kv_len of the call


class Cache:
    """The KV cache of one attention layer of this package, for generation; every layer needs its own cache.

    It stores keys and values of all earlier tokens (or low-rank latents with rope elements), and in the sparse stage
    the indexer's keys. The first call with the cache allocates the memory, in the dtype and on the device of its keys.

    Args:
        batch: number of sequences; each has its own length.
        max_length: largest number of tokens of a sequence.

    Raises:
        ValueError: a number below 1.

    Source: this library.

    Example:
        >>> from fusion_attention.nn import SparseSelfAttention, rope_table
        >>> layer = SparseSelfAttention(64, heads=4, index_heads=2, index_dim=16, top_k=8).eval()
        >>> cache = Cache(2, max_length=64)
        >>> with torch.no_grad():
        ...     for x in (torch.randn(2, 32, 64), torch.randn(2, 1, 64)):  # the prompt, then one token
        ...         out, _ = layer(x, rope=rope_table(cache.positions(x), 16), cache=cache)
        >>> out.shape, cache.lengths
        (torch.Size([2, 1, 64]), [33, 33])
    """

    def __init__(self, batch: int, max_length: int) -> None:
        if min(batch, max_length) < 1:
            raise ValueError(f"Cache: batch, max_length: expected positive numbers, got {batch} and {max_length}")
        self.batch, self.max_length = batch, max_length
        self._lengths = torch.zeros(batch, dtype=torch.int64, device="cpu")  # also if torch's default device is another
        self._rows: dict[str, Tensor] = {}
        self._layer: weakref.ref[nn.Module] | None = None

    def __repr__(self) -> str:
        """Returns a text with the number of tokens of each sequence, and the stored tensors' shapes."""
        stored = ", ".join(f"{name} {show(rows)}" for name, rows in self._rows.items())
        return f"<Cache: {self.lengths} of {self.max_length} tokens; {stored or 'nothing stored'}>"

    @property
    def lengths(self) -> list[int]:
        """The number of stored tokens of every sequence."""
        return self._lengths.tolist()

    def positions(self, x: Tensor) -> Tensor:
        """Returns the positions of the next tokens, for rope_table(): int64 [B, S].

        Args:
            x: hidden states of these tokens, [B, S, dim].
        """
        return (self._lengths[:, None] + torch.arange(x.shape[1], device="cpu")).to(x.device)

    def _check_rows(self, name: str, layer: nn.Module, x: Tensor, new: dict[str, Tensor]) -> None:
        """Raises ValueError if tensors to store (`new` by name, [B, S, ...]) do not match x [B, S, dim], or differ from
        the stored ones in names, shape, dtype, device or layer; name: the layer's class, for the error."""
        if x.shape[0] != self.batch:
            raise ValueError(f"{name}: x: expected {self.batch} sequences, as its cache has, got {show(x)}")
        for operand, t in new.items():
            if t.shape[:2] != x.shape[:2]:
                raise ValueError(
                    f"{name}: {operand}: expected rows of {list(x.shape[:2])} tokens, as x has, got {show(t)}"
                )
        if not self._rows:
            return
        if self._layer is None or self._layer() is not layer:
            raise ValueError(
                f"{name}: cache: expected a cache of this layer, got that of another (make a Cache for each layer)"
            )
        if new.keys() != self._rows.keys():
            raise ValueError(
                f"{name}: cache: expected one with {', '.join(new)}, got {', '.join(self._rows)} "
                "(it was filled in another stage: fill a new one)"
            )
        for operand, t in new.items():
            old = self._rows[operand]
            if (t.shape[2:], t.dtype, t.device) != (old.shape[2:], old.dtype, old.device):
                raise ValueError(
                    f"{name}: {operand}: expected rows of {list(old.shape[2:])} in {old.dtype} on {old.device}, as its "
                    f"cache has, got {list(t.shape[2:])} in {t.dtype} on {t.device}"
                )


@contextmanager
def step(
    cache: Cache, layer: nn.Module, ranks: Ranks | None, x: Tensor, q: Tensor, lengths: Lengths, **rows: Tensor | None
) -> Iterator[Step]:
    """A context for a layer's call with a KV cache: appends the call's keys and values, and undoes this if the with
    block raises.

    Args:
        layer, ranks: the layer that is called, and its ranks (an error if not None).
        x: hidden states of the call's tokens, [B, S, dim].
        q: queries. rows: tensors to append by name, [B, S, ...]; None: not stored.
        lengths: number of tokens of every sequence; None: S.

    Yields:
        The call's operands (queries, all stored tensors, lengths), as a Step.

    Raises:
        ValueError: a cache that is full or of another layer, batch, dtype or device, or a call that cannot use one.
    """
    name = type(layer).__name__
    given: dict[str, Any] = {"q": q, **{operand: t for operand, t in rows.items() if t is not None}}
    dispatch.autocast(given, tuple(given))
    if not isinstance(cache, Cache):
        raise ValueError(f"{name}: cache: expected a fusion_attention.nn.Cache, got {show(cache)}")
    if ranks is not None:
        raise ValueError(f"{name}: cache: expected None with a group, got a Cache (generate without a group)")
    if x.dim() != 3:
        raise ValueError(
            f"{name}: x: expected padded [B, S, dim] with a cache, got {show(x)} (pad on the right, with lengths=)"
        )
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, *given.values())):
        raise ValueError(
            f"{name}: cache: expected torch.no_grad() around the call, got rows that require gradients (stored rows "
            "have no gradient: train without a cache)"
        )
    new = {operand: t for operand, t in given.items() if operand != "q"}
    cache._check_rows(name, layer, x, new)
    added = _added(name, x, lengths)
    total = cache._lengths + added
    if (total > cache.max_length).any():
        i = int((total - cache.max_length).argmax())
        raise ValueError(
            f"{name}: cache: expected at most {cache.max_length - cache.lengths[i]} more tokens of sequence {i} "
            f"(max_length {cache.max_length}), got {int(added[i])} (make a Cache of a larger max_length)"
        )
    with torch.inference_mode(False):  # tensors made in inference mode cannot be written outside it
        stored = cache._rows or {
            operand: zeros((cache.batch, cache.max_length, *t.shape[2:]), t.dtype, t.device)
            for operand, t in new.items()
        }
    sequence, token = (torch.arange(x.shape[1], device="cpu") < added[:, None]).nonzero().to(x.device).unbind(1)
    position = cache._lengths.to(x.device)[sequence] + token
    for operand, t in new.items():
        stored[operand][sequence, position] = t[sequence, token]
    longest = max(1, int(total.max()))
    call_lengths = {"q_len": None if lengths is None else added.tolist(), "kv_len": total.tolist()}
    yield Step(given["q"], {operand: t[:, :longest] for operand, t in stored.items()}, call_lengths)
    cache._rows, cache._lengths, cache._layer = stored, total, weakref.ref(layer)


def _added(name: str, x: Tensor, lengths: Lengths) -> Tensor:
    """Returns int64 [B]: the number of tokens of x [B, S, dim] that every sequence appends, `lengths` or S. Raises
    ValueError for invalid lengths; name: the layer's, for this error."""
    batch, tokens = x.shape[:2]
    if lengths is None:
        return torch.full((batch,), tokens, device="cpu")
    added = torch.as_tensor(lengths, device="cpu")
    is_integer = not (added.is_floating_point() or added.is_complex() or added.dtype == torch.bool)
    if not is_integer or added.shape != (batch,) or not ((added >= 0) & (added <= tokens)).all():
        raise ValueError(f"{name}: lengths: expected {batch} integers from 0 to {tokens}, got {show(lengths)}")
    return added.long()


def untraced(function: Callable[P, T]) -> Callable[P, T]:
    """Decorates a function that uses a KV cache: torch.compile breaks the graph at its call, and it runs uncompiled.
    The reason is that the lengths of a cache are numbers in Python, which would be constants of the graph."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            from fusion_attention.torch_ops import trace_constants

            return trace_constants.outside(functools.partial(function, **kwargs), *args)
        return function(*args, **kwargs)

    return call

"""The sequences of a batch that a sparse layer of transformers computes: their lengths and their order in memory."""

from typing import Any, NamedTuple

import torch

from fusion_attention.integrations.transformers_masks import cached, hidden, packed_lengths, read_padding

Tensor = torch.Tensor


class Sequences(NamedTuple):
    """The lengths of the sequences of queries [B, S, ...] and keys [B, T, ...], and their order in the operators'
    calls. The last query of a sequence has the last key's position."""

    layout: str  # "BSND" [B, S, N, D], or "TND" [T, N, D] for packed sequences
    q_len: Any  # queries of every sequence; None: S
    kv_len: Any  # keys of every sequence; None: T
    q_order: Tensor | None  # int64 [B, S], indices that sort tokens before padding; None: tokens are first
    k_order: Tensor | None  # the same for keys, int64 [B, T]
    longest: int  # the largest number of keys of a sequence, or an upper bound
    described: int  # the number of keys that the mask describes; later keys are unused memory of a static cache

    def rows(self, t: Tensor) -> Tensor:
        """Returns queries [B, S, ...] with tokens before padding, or packed as [B * S, ...]."""
        return t.flatten(0, 1) if self.layout == "TND" else _ordered(t, self.q_order)

    def keys(self, t: Tensor) -> Tensor:
        """Returns keys t [B, T, ...] in the order that attention() needs: tokens before padding, or [B * T, ...] for
        packed sequences; unused keys of a static cache are removed."""
        t = t[:, : self.described]
        return t.flatten(0, 1) if self.layout == "TND" else _ordered(t, self.k_order)

    def back(self, t: Tensor, batch: int) -> Tensor:
        """Returns results t, ordered as by rows(), in the model's order [batch, S, ...]; the inverse of rows()."""
        if self.layout == "TND":
            return t.unflatten(0, (batch, -1))
        return t if self.q_order is None else _ordered(t, self.q_order.argsort(1))

    def tokens(self, rows: Tensor) -> Any:
        """Returns the number of query tokens in rows [B, S, ...] that are not padding."""
        if self.q_len is None:
            return rows.shape[0] * rows.shape[1]
        return self.q_len.sum() if isinstance(self.q_len, Tensor) else sum(self.q_len)

    def lengths(self, first: int = 0, end: int | None = None, upto: int | None = None) -> dict[str, Any]:
        """Returns attention()'s arguments layout, q_len and kv_len for queries first to end - 1 (None: all later ones)
        and keys 0 to upto - 1 (None: all keys) of each sequence."""
        q_len, kv_len = _between(self.q_len, first, end), _between(self.kv_len, 0, upto)
        return {"layout": self.layout, "q_len": q_len, "kv_len": kv_len}


def _ordered(t: Tensor, order: Tensor | None) -> Tensor:
    """Returns t [B, L, ...] with the tokens of each batch item in the given order, int64 [B, L]; None: unchanged."""
    if order is None:
        return t
    first = torch.arange(len(t), device=t.device)[:, None] * t.shape[1]
    return t.flatten(0, 1).index_select(0, (order + first).flatten()).unflatten(0, order.shape)


def _between(lengths: Any, first: int, end: int | None) -> Any:
    """Returns how many of the positions first to end - 1 (None: all later ones) exist in sequences of these lengths."""
    if lengths is None or (first == 0 and end is None):
        return lengths
    if isinstance(lengths, Tensor):
        return (lengths if end is None else lengths.clamp(max=end)).sub(first).clamp(min=0)
    return [max(0, (n if end is None else min(n, end)) - first) for n in lengths]


def expressible(mask: Tensor | None, rows: int) -> bool:
    """True if sequences_of() accepts a mask: padding [B, T], sequence numbers [B, S], or one query's [B, 1, 1, T]."""
    if mask is None or mask.dim() == 2:
        return True
    return mask.dtype == torch.bool and mask.dim() == 4 and mask.shape[1] == 1 and mask.shape[2] == rows == 1


def sequences_of(
    mask: Tensor | None, q: Tensor, k: Tensor, position_ids: Tensor | None = None, **others: Any
) -> Sequences:
    """Returns the lengths and order of the sequences that a mask describes for queries [B, S, ...] and keys [B, T,
    ...].

    Args:
        mask: None, bool [B, T'] (true for a token; the last query has the position of key T' - 1), int64 [B, S]
            (sequence numbers), or bool [B, 1, 1, T] (visible keys of one query).
        position_ids: [B or 1, S]; positions of packed sequences restart at 0.
        others: cu_seq_lens_q and cu_seq_lens_k, if the model passes them.
    """
    batch, rows = q.shape[:2]
    if mask is not None and mask.dtype == torch.bool:

        def read(t: Tensor) -> Sequences:
            return _read(t, batch, rows)

        result: Sequences = read(mask) if hidden(mask) else cached(mask, f"sequences {batch} {rows}", read)
        return result
    ends = others.get("cu_seq_lens_q"), others.get("cu_seq_lens_k")
    q_len, kv_len = packed_lengths(mask, *ends, position_ids, q, k)
    if q_len is None or len(q_len) == batch == 1:
        return Sequences("BSND", None, None, None, None, k.shape[1], k.shape[1])
    longest = batch * k.shape[1] if isinstance(kv_len, Tensor) else max(kv_len)
    return Sequences("TND", q_len, kv_len, None, None, longest, k.shape[1])


def _read(mask: Tensor, batch: int, rows: int) -> Sequences:
    """Returns the lengths and order of the sequences that a bool mask [B, T'] or [B, 1, 1, T] (true for a token)
    describes, for `batch` items of `rows` queries."""
    keys = (mask[:, 0, 0] if mask.dim() == 4 else mask).expand(batch, -1)
    length = keys.shape[1]
    tokens = torch.ones_like(keys[:, :1]) if mask.dim() == 4 else keys[:, length - rows :]
    if not hidden(mask):
        kind, _, end = read_padding(keys)
        if kind == "none":
            return Sequences("BSND", None, None, None, None, length, length)
        if kind == "left":
            return Sequences("BSND", tokens.sum(1).tolist(), end, None, None, max(end), length)
    # A stable sort moves tokens before padding and preserves their order.
    q_order = (~tokens).to(torch.uint8).argsort(dim=1, stable=True)
    k_order = (~keys).to(torch.uint8).argsort(dim=1, stable=True)
    q_len, kv_len = tokens.sum(1), keys.sum(1)
    if hidden(mask):
        return Sequences("BSND", q_len, kv_len, q_order, k_order, length, length)
    counts = kv_len.tolist()
    return Sequences("BSND", q_len.tolist(), counts, q_order, k_order, max(counts), length)


def matrix(
    mask: Tensor | None,
    q: Tensor,
    keys: int,
    position_ids: Tensor | None = None,
    window: int | None = None,
    **others: Any,
) -> Tensor:
    """Returns the visible keys, bool [B, 1, S, T], for transformers' code; a mask of four axes unchanged. mask: None,
    bool [B, T'] (false for padding) or int64 [B, S] (sequence numbers). keys: T. position_ids: restart at 0 in packed
    sequences. window: keys that a query sees, its own included; None: all. others: cu_seq_lens_q."""
    if mask is not None and mask.dim() == 4:
        return mask
    batch, rows = q.shape[:2]
    if mask is not None and mask.dtype == torch.bool and mask.shape[1] > keys:
        mask = mask[:, mask.shape[1] - keys :]  # the mask was made for another layer's longer cache
    count = keys if mask is None or mask.dtype != torch.bool else mask.shape[1]
    row, key = torch.arange(count - rows, count, device=q.device)[:, None], torch.arange(keys, device=q.device)
    visible = key <= row if window is None else (key <= row) & (key > row - window)
    visible = visible[None, None].expand(batch, 1, -1, -1)
    if mask is not None and mask.dtype == torch.bool:
        tokens = torch.nn.functional.pad(mask, (0, keys - count))
        return visible & tokens[:, None, None]
    like = q.new_empty(0).expand(batch, keys, 0)
    lengths, _ = packed_lengths(mask, others.get("cu_seq_lens_q"), None, position_ids, q, like)
    if lengths is None:
        return visible
    number = torch.arange(len(lengths), device=q.device).repeat_interleave(torch.as_tensor(lengths, device=q.device))
    ids = number.view(batch, rows)
    return visible & (ids[:, None, :, None] == ids[:, None, None, :])

"""Decoding over a cache whose pages are sharded over ranks: each rank attends to its pages, then results are merged."""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fusion_attention.contract import ContractError, Failure, bind, show
from fusion_attention.distributed.groups import Call
from fusion_attention.ir.mask import Band
from fusion_attention.ir.merge import Partial, join_sink, merge
from fusion_attention.ops.inference import api_definition as record
from fusion_attention.torch_ops import dispatch

Tensor = torch.Tensor
_OP = "distributed.decode_attention"
_OPTIONS = ("layout", "scale", "softcap", "band", "q_len")


def decode_attention(
    q: Tensor,
    cache: Any,
    *,
    sequences: Sequence[int] | None = None,
    own_heads: bool = False,
    layout: str = "BSND",
    q_len: Any = None,
    scale: float | None = None,
    band: Band | None = None,
    blocked: Tensor | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    softcap: float = 0.0,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes attention of the newest tokens of each sequence over a PagedKVCache(group=...).

    Every rank attends to the tokens of its pages. The partial results are merged in float32 by their statistics, in the
    order of ranks, so results have the same bits on every rank and in every run.

    Args:
        q: [B, S1, N1, D], the same on every rank; with own_heads this rank's heads, [B, S1, N1 / ranks, D].
        cache: a PagedKVCache with a group.
        sequences: the cache's sequence of each batch item of q; None: all sequences.
        own_heads: True if the heads are divided among the ranks in order, as in tensor parallelism. Queries are then
            gathered, and each rank gets the results of its heads. sink, bias and blocked are those of all heads.
        layout, q_len, scale, band, blocked, bias, sink, softcap, return_lse, backend: as in fa.decode_attention().

    Returns:
        out in the shape of q, and lse, as in fa.decode_attention().

    Raises:
        GroupError: ranks make different calls, a sequence has different lengths on the ranks, or a rank died.
        ContractError: the call is not allowed by `fusion-attention ops decode_attention`.

    Source: this library; what vLLM calls decode context parallel.

    Example:
        >>> import fusion_attention as fa
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> cache = fa.PagedKVCache(heads=2, dim=64, pages=8, page_size=16, group=dist.group.WORLD)
        >>> cache.append([cache.allocate()], torch.randn(1, 20, 2, 64), torch.randn(1, 20, 2, 64))
        >>> decode_attention(torch.randn(1, 1, 8, 64), cache).shape
        torch.Size([1, 1, 8, 64])
        >>> dist.destroy_process_group()
    """
    args = {
        "q": q, "layout": layout, "q_len": q_len, "scale": scale, "band": band, "blocked": blocked, "bias": bias,
        "sink": sink, "softcap": softcap,
    }  # fmt: skip
    if getattr(cache, "group", None) is None:
        raise ContractError([Failure(_OP, "cache", "a PagedKVCache with a group", show(cache), "group=...")])
    return attend(cache, sequences, args, return_lse, backend, own_heads)


def attend(
    cache: Any,
    sequences: Sequence[int] | None,
    args: Mapping[str, Any],
    return_lse: bool,
    backend: str,
    own_heads: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes attention of new tokens over a cache with pages on several ranks; args: decode_attention()'s by name."""
    q, layout, ranks = args["q"], args["layout"], cache.group.world
    if ranks == 1:
        result = dispatch.results(
            record.RECORD, {**args, **cache.arguments(sequences)}, backend, complete=return_lse, reads=False
        )
        return (result["out"], result["max"] + result["sum"].log()) if return_lse else result["out"]
    of_cache, lengths = cache.arguments(sequences), cache.lengths(sequences)
    _check(args, cache, sequences, ranks if own_heads else 1)
    settings = {"q": (tuple(q.shape), q.dtype), "cache": repr(cache).split(", ")[0], "own_heads": own_heads}
    settings |= {name: args[name] for name in _OPTIONS}
    call = cache.group.call("decode_attention", settings, q.device)
    at_head = -2 if layout == "BSND" else -3
    mark = _mark(sequences, lengths, q.device)
    if own_heads:
        queries = call.all_gather("gathering queries", torch.cat((_bytes(q), mark)), [q.nbytes + len(mark)] * ranks)
        _same(call, queries, mark)
        q = torch.cat([shard[: q.nbytes].view(q.dtype).view(q.shape) for shard in queries], at_head)
    pages = cache.own_pages(sequences)
    local = _local({**args, **of_cache, "q": q}, pages, lengths, cache.page_size)
    result = dispatch.results(record.RECORD, local, backend, complete=True, reads=False)
    local_results = [result["max"].transpose(1, 2), result["sum"].transpose(1, 2), _heads_last(result["out"], layout)]
    if own_heads:
        shares = zip(*(t.chunk(ranks, 2) for t in local_results), strict=True)
        local_results, sends = (
            [t.chunk(ranks, 2)[0] for t in local_results],
            [torch.cat((*map(_bytes, t), mark)) for t in shares],
        )
        parts = call.to_each("exchanging heads", sends, [send.shape for send in sends])
    else:
        send = torch.cat((*map(_bytes, local_results), mark))
        parts = call.all_gather("gathering results", send, [len(send)] * ranks)
    _same(call, parts, mark)
    sizes = [*(t.nbytes for t in local_results), len(mark)]
    merged: Partial | None = None
    for shard in parts:
        max_, sum_, out = (
            b.view(t.dtype).view(t.shape) for b, t in zip(shard.split(sizes), local_results, strict=False)
        )
        more = Partial(out.float(), max_.float(), sum_.float())
        if merged is None:
            merged = more
        else:
            merge(merged, more)
    assert merged is not None
    if (sink := args["sink"]) is not None:
        join_sink(merged, sink.chunk(ranks)[call.rank] if own_heads else sink)
    out = _heads_last(merged.out.to(q.dtype), layout).contiguous()
    return (out, (merged.max + merged.sum.log()).transpose(1, 2).contiguous()) if return_lse else out


def _check(args: Mapping[str, Any], cache: Any, sequences: Sequence[int] | None, heads: int) -> None:
    """Raises ContractError, with the error of a call on one process, if the decode call that all ranks make together is
    invalid. args: this rank's arguments by name. heads: query heads of all ranks / this rank's."""
    lengths, q = cache.lengths(sequences), args["q"]
    failures = []
    for name in ("out_scale", "out_offset"):
        if args.get(name) is not None:
            advice = "only unquantised results can be merged: quantise the merged result"
            failures.append(Failure(_OP, name, "None over a cache with a group", show(args[name]), advice))
    if isinstance(q, Tensor) and q.dim() == 4 and q.shape[0] != len(lengths):
        got = f"{len(lengths)} of {cache!r}" if sequences is None else show(sequences)
        advice = f"q has {q.shape[0]} rows: sequences=[...] names their sequences"
        failures.append(Failure(_OP, "sequences", f"{q.shape[0]} sequences of the cache", got, advice))
    if failures:
        raise ContractError(failures)
    pages = max((-(-n // cache.page_size) for n in lengths), default=0)
    full = {**args, **cache.arguments(sequences), "kv_len": lengths}
    full["block_table"] = full["block_table"].new_zeros(len(lengths), pages)
    if isinstance(q, Tensor) and q.dim() == 4:
        full["q"] = torch.cat([q.to("meta")] * heads, -2 if args["layout"] == "BSND" else -3)
    tensors = {name: t.to("meta") for name, t in full.items() if isinstance(t, Tensor) and name not in ("q", "q_len")}
    bind(record.RECORD, full | tensors, reads=False)


# ------------------------------------------------------------------------------------------------------ a rank's tokens


def _local(args: dict[str, Any], pages: list[list[int]], lengths: Sequence[int], size: int) -> dict[str, Any]:
    """Returns the arguments for attention to the tokens of this rank's pages: page table, lengths, mask of keys. args:
    the call's and the cache's arguments by name. pages: for each sequence, the numbers of this rank's pages of `size`
    tokens. lengths: tokens of each sequence."""
    q, layout = args["q"], args["layout"]
    rows = q.shape[1] if layout == "BSND" else q.shape[2]
    count = np.asarray(lengths, np.int64)
    q_len = np.full(len(count), rows) if args["q_len"] is None else np.asarray(args["q_len"], np.int64)
    band = Band.causal() if args["band"] is None else args["band"]
    lo, hi, prefix = (edge[:, None] for edge in band.resolve(q_len, count))
    row = np.arange(rows)
    first = np.maximum(row + lo, 0)
    end = np.clip(np.maximum(row + hi, prefix), first, count[:, None])
    first, end = _here(np.minimum(first, end), pages, size), _here(end, pages, size)
    first = np.minimum(first, end)
    there = row < q_len[:, None]
    # Pages before the first visible key are omitted, so a window reads only the pages that it overlaps.
    visible = there & (end > first)
    gone = np.where(visible, first, np.iinfo(np.int64).max).min(1, initial=np.iinfo(np.int64).max) // size * size
    kv_len = np.where(visible, end, 0).max(1, initial=0)
    gone = np.minimum(gone, kv_len // size * size)
    first, end, kv_len = first - gone[:, None], end - gone[:, None], kv_len - gone
    retained = [local[n // size :] for local, n in zip(pages, gone.tolist(), strict=True)]
    local_args = {**args, "sink": None, "band": Band.full(), "kv_len": kv_len.tolist()}
    local_args["block_table"] = table = _table(args["block_table"], gone // size)
    slots = table.shape[1] * size
    partial = there & ((first > 0) | (end < kv_len[:, None]))
    for name in ("blocked", "bias"):
        if (tensor := args[name]) is not None:
            page = np.zeros((len(retained), slots // size), np.int64)  # numbers of the pages in their sequences
            for numbers, local in zip(page, retained, strict=True):
                numbers[: len(local)] = local
            token = (page[..., None] * size + np.arange(size)).reshape(len(retained), slots)
            local_args[name] = _columns(tensor, torch.from_numpy(token).to(q.device))
    if partial.any():
        key = torch.arange(slots, device=q.device)
        low, high = (torch.from_numpy(edge).to(q.device)[..., None] for edge in (first, end))
        hidden = ((key < low) | (key >= high))[:, None]
        local_args["blocked"] = hidden if local_args["blocked"] is None else hidden | local_args["blocked"].bool()
    return local_args


def _here(token: np.ndarray, pages: list[list[int]], size: int) -> np.ndarray:
    """Returns int [sequences, rows]: the number of tokens before token[b, row] of sequence b on this rank. pages: for
    each sequence, the numbers of its pages on this rank; page n has the tokens n * size and on."""
    result = np.zeros_like(token)
    for b, local in enumerate(pages):
        page = token[b] // size
        before = np.searchsorted(local, page)
        inside = np.isin(page, local)
        result[b] = before * size + np.where(inside, token[b] % size, 0)
    return result


def _table(table: Tensor, gone: np.ndarray) -> Tensor:
    """Returns a page table without the first `gone` pages of each row; at least one column remains."""
    if not gone.any():
        return table if table.shape[1] else table.new_zeros(len(table), 1)
    rows = [row[int(n) :] for row, n in zip(table, gone, strict=True)]
    width = max(1, *(table.shape[1] - int(n) for n in gone))
    return torch.stack([torch.nn.functional.pad(row, (0, width - len(row))) for row in rows])


def _columns(tensor: Tensor, place: Tensor) -> Tensor:
    """Returns the columns `place` of a mask or bias [..., keys], which belong to this rank's keys: [B, N, S, slots];
    place: int64 [B, slots]. A last axis of size 1 broadcasts, and is returned unchanged."""
    if tensor.shape[-1] == 1:
        return tensor
    full = tensor.reshape((1,) * (4 - tensor.dim()) + tuple(tensor.shape))
    full = full.expand(len(place), *full.shape[1:])
    # Columns after a sequence's tokens are never read.
    at = place.clamp(max=tensor.shape[-1] - 1)[:, None, None].expand(*full.shape[:-1], -1)
    return full.gather(-1, at)


# ------------------------------------------------------------------------------------------------------- what is passed


def _mark(sequences: Sequence[int] | None, lengths: Sequence[int], device: torch.device) -> Tensor:
    """Returns a CRC32 of the decoded sequences and their lengths, uint8 [4], which a rank appends to each result; the
    receiver compares it with its own in every call, because lengths change with every token."""
    text = repr((None if sequences is None else list(map(int, sequences)), lengths)).encode()
    return torch.tensor([zlib.crc32(text) & 0x7FFFFFFF], dtype=torch.int32, device=device).view(torch.uint8)


def _same(call: Call, parts: Sequence[Tensor], mark: Tensor) -> None:
    """Raises GroupError if the bytes received from a rank do not end with `mark`, the checksum of this rank's sequences
    and lengths: the rank decodes other ones."""
    for rank, shard in enumerate(parts):
        if not torch.equal(shard[-len(mark) :], mark):
            what = f"rank {rank} decodes other sequences, or sequences of other lengths"
            raise call.error("comparing caches", what, "every rank calls the cache's methods with the same arguments")


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _heads_last(rows: Tensor, layout: str) -> Tensor:
    """Converts [B, S, N, D] to layout BNSD or back by exchanging axes 1 and 2; for layout BSND returns it unchanged."""
    return rows if layout == "BSND" else rows.transpose(1, 2)

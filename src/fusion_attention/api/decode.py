"""The public function decode_attention(): attention of each sequence's newest tokens over its KV cache."""

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch

from fusion_attention.api.cache import PagedKVCache
from fusion_attention.backends import BackendName
from fusion_attention.contract import ContractError, Failure, show
from fusion_attention.ir.mask import Band
from fusion_attention.ops.inference import api_definition as record
from fusion_attention.torch_ops import dispatch
from fusion_attention.torch_ops.device_aliases import aliased

Tensor = torch.Tensor
Lengths = Sequence[int] | Tensor | None
Layout = Literal["BSND", "BNSD"]
Cache = PagedKVCache | Tensor | Sequence[Tensor] | tuple[Any, Any]
_OP = record.RECORD.name
# Arguments that a PagedKVCache provides, so that the caller must not pass them.
_OF_CACHE = ("kv_len", "block_table", "k_scale", "k_offset", "v_scale", "v_offset")


# fmt: off
@overload
def decode_attention(
    q: Tensor, cache: Cache, *, sequences: Sequence[int] | None = None, layout: Layout = "BSND",
    cache_layout: Layout = "BSND", q_len: Lengths = None, kv_len: Lengths = None, block_table: Tensor | None = None,
    k_scale: Tensor | None = None, k_offset: Tensor | None = None, v_scale: Tensor | None = None,
    v_offset: Tensor | None = None, dim_v: int = 0, scale: float | None = None, band: Band | None = None,
    blocked: Tensor | None = None, bias: Tensor | None = None, sink: Tensor | None = None,
    out_scale: Tensor | None = None, out_offset: Tensor | None = None, softcap: float = 0.0,
    return_lse: Literal[False] = False, backend: BackendName = "auto",
) -> Tensor: ...
@overload
def decode_attention(
    q: Tensor, cache: Cache, *, sequences: Sequence[int] | None = None, layout: Layout = "BSND",
    cache_layout: Layout = "BSND", q_len: Lengths = None, kv_len: Lengths = None, block_table: Tensor | None = None,
    k_scale: Tensor | None = None, k_offset: Tensor | None = None, v_scale: Tensor | None = None,
    v_offset: Tensor | None = None, dim_v: int = 0, scale: float | None = None, band: Band | None = None,
    blocked: Tensor | None = None, bias: Tensor | None = None, sink: Tensor | None = None,
    out_scale: Tensor | None = None, out_offset: Tensor | None = None, softcap: float = 0.0,
    return_lse: Literal[True], backend: BackendName = "auto",
) -> tuple[Tensor, Tensor]: ...
@overload
def decode_attention(
    q: Tensor, cache: Cache, *, sequences: Sequence[int] | None = None, layout: Layout = "BSND",
    cache_layout: Layout = "BSND", q_len: Lengths = None, kv_len: Lengths = None, block_table: Tensor | None = None,
    k_scale: Tensor | None = None, k_offset: Tensor | None = None, v_scale: Tensor | None = None,
    v_offset: Tensor | None = None, dim_v: int = 0, scale: float | None = None, band: Band | None = None,
    blocked: Tensor | None = None, bias: Tensor | None = None, sink: Tensor | None = None,
    out_scale: Tensor | None = None, out_offset: Tensor | None = None, softcap: float = 0.0,
    return_lse: bool, backend: BackendName = "auto",
) -> Tensor | tuple[Tensor, Tensor]: ...
# fmt: on


def decode_attention(
    q: Tensor,
    cache: Cache,
    *,
    sequences: Sequence[int] | None = None,
    layout: Layout = "BSND",
    cache_layout: Layout = "BSND",
    q_len: Lengths = None,
    kv_len: Lengths = None,
    block_table: Tensor | None = None,
    k_scale: Tensor | None = None,
    k_offset: Tensor | None = None,
    v_scale: Tensor | None = None,
    v_offset: Tensor | None = None,
    dim_v: int = 0,
    scale: float | None = None,
    band: Band | None = None,
    blocked: Tensor | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    out_scale: Tensor | None = None,
    out_offset: Tensor | None = None,
    softcap: float = 0.0,
    return_lse: bool = False,
    backend: BackendName = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention of the newest tokens of each sequence over all keys in its cache, including their own.

        s   = cap(scale * (q . k)) + bias              k, v = (stored + offset) * scale if the cache has integers
        out = sum_j exp(s_j) * v_j / (sum_j exp(s_j) + exp(sink))

    Not differentiable.

    Args:
        q: query rows of the last S1 tokens of each sequence (usually one), [B, S1, N1, D]; float16, bfloat16 or
            float32.
        cache: a PagedKVCache (with a group, every rank passes the same q and gets the complete result); or (k, v), each
            a tensor [B, S2, N2, D] (v: [.., Dv]), a list of one [1, S2, N2, D] per sequence, or pages
            [pages, page size, N2, D]; or only k, with dim_v (MLA: keys of 576 elements, whose first 512 are values).
            Elements have q's dtype, int8, or two int4 in a uint8, the even element in the low half.
        sequences: the sequences of a PagedKVCache, one per batch element of q; None: all. The cache provides lengths,
            table and scales.
        layout: layout of q and out: "BSND" or "BNSD". cache_layout: layout of k and v; in a paged cache the axis B is
            that of pages.
        q_len: query rows of every sequence; rows after them return zeros.
        kv_len: tokens of every sequence in its cache; None: all of the tensors.
        block_table: the pages of every sequence, int32 or int64 [B, pages]; requires kv_len.
        k_scale, k_offset, v_scale, v_offset: float32, scale and offset of stored integers: [1], [N2], [N2, D], or per
            token and head (k's shape without its last axis).
        dim_v: elements of a value row if keys contain the values.
        scale: factor on the dot products; None: 1 / sqrt(D).
        band: the interval of keys that each row sees; None: Band.causal(). A window of 512 tokens is
            Band.window(511, 0).
        blocked: bool or uint8, true removes a score; broadcasts to [B, N1, S1, S2] (S2: positions of the cache).
        bias: added to the scaled scores, in q's dtype; broadcasts like blocked. -inf removes a key, even one whose v is
            NaN.
        sink: [N1], of any floating dtype; an additional logit per row and head in the denominator.
        out_scale, out_offset: float32, 1 or N1 * Dv elements: out is int8, round(x * out_scale + out_offset).
        softcap: cap(x) = softcap * tanh(x / softcap), as in attention(); 0: no cap.
        return_lse: also return log(sum(exp(s))): float32 [B, N1, S1].
        backend: "auto" (set by use_backend(), else by the device), "cpu", "triton" or "golden".

    Returns:
        out in q's layout with Dv elements per head, or (out, lse). Rows without visible keys are zero (lse -inf).

    Raises:
        ContractError: a call that `fusion-attention ops decode_attention` does not allow; for a wrong length or page
            number the message names its position.
        BackendError: no back end computes the call; the message lists the reasons.

    Source: this library; the computation of CANN's IncreFlashAttention.

    Example:
        >>> q, k, v = torch.randn(2, 1, 8, 64), torch.randn(2, 100, 2, 64), torch.randn(2, 100, 2, 64)
        >>> decode_attention(q, (k, v), kv_len=[100, 31]).shape
        torch.Size([2, 1, 8, 64])
    """
    args: dict[str, Any] = {  # without k and v, which are added from the cache
        "q": q, "layout": layout, "cache_layout": cache_layout, "q_len": q_len, "kv_len": kv_len,
        "block_table": block_table, "k_scale": k_scale, "k_offset": k_offset, "v_scale": v_scale,
        "v_offset": v_offset, "dim_v": dim_v, "scale": scale, "band": band, "blocked": blocked, "bias": bias,
        "sink": sink, "out_scale": out_scale, "out_offset": out_offset, "softcap": softcap,
    }  # fmt: skip
    if isinstance(cache, PagedKVCache):
        doubled = [name for name in _OF_CACHE if args[name] is not None] + ["dim_v"] * (dim_v != 0)
        advice = "the cache provides it; sequences= selects some of its sequences"
        failures = [Failure(_OP, name, "nothing with a PagedKVCache", show(args[name]), advice) for name in doubled]
        if failures:
            raise ContractError(failures)
        if torch.compiler.is_compiling():  # Page lists are Python objects, which a trace cannot contain.
            from fusion_attention.torch_ops import trace_constants

            return trace_constants.outside(_of_cache, cache, sequences, args, return_lse, backend)
        return _of_cache(cache, sequences, args, return_lse, backend)
    if sequences is not None:
        advice = "tensors have one sequence per batch element of q: index them"
        raise ContractError([Failure(_OP, "sequences", "a PagedKVCache to choose from", show(sequences), advice)])
    if isinstance(cache, tuple) and len(cache) == 2:
        args["k"], args["v"] = cache
    else:
        args["k"], args["v"] = cache, None
    return _attend(args, return_lse, backend)


@aliased
def _attend(args: dict[str, Any], return_lse: bool, backend: str, reads: bool = True) -> Tensor | tuple[Tensor, Tensor]:
    """Computes decode_attention() on a back end; args: its arguments by the operator definition's parameter names.
    Returns out, or (out, lse) if return_lse.

    reads: True checks page numbers (not needed for those of a PagedKVCache).
    """
    result = dispatch.results(record.RECORD, args, backend, complete=return_lse, reads=reads)
    return (result["out"], result["max"] + result["sum"].log()) if return_lse else result["out"]


def _of_cache(
    cache: PagedKVCache, sequences: Sequence[int] | None, args: dict[str, Any], return_lse: bool, backend: str
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes decode_attention() over `sequences` of a PagedKVCache; args: the arguments that the cache does not
    provide, by name. Returns out, or (out, lse) if return_lse."""
    if cache.group is not None and cache.group.world > 1:
        from fusion_attention.distributed import decode

        return decode.attend(cache, sequences, args, return_lse, backend)
    of_cache, q = cache.arguments(sequences), args["q"]
    count = len(of_cache["kv_len"])
    if isinstance(q, Tensor) and q.dim() == 4 and q.shape[0] != count:
        got = f"{count} of {cache!r}" if sequences is None else show(sequences)
        advice = f"q has {q.shape[0]} batch elements: sequences=[...] assigns them to sequences of the cache"
        raise ContractError([Failure(_OP, "sequences", f"{q.shape[0]} sequences of the cache", got, advice)])
    return _attend(args | of_cache, return_lse, backend, reads=False)

"""The pythonic face of decoding: decode_attention(), and PagedKVCache, which keeps keys and values in pages.

Knows pages, their sharing and their scales. Refuses to know how attention is computed.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import mmap
from collections.abc import Sequence
from typing import Any, Literal, overload

import numpy as np
import torch

from fusion_attention.contract import ContractError, Failure
from fusion_attention.contract.arguments import intact
from fusion_attention.contract.expressions import show
from fusion_attention.ops.inference import own as record
from fusion_attention.plan import Backend
from fusion_attention.torch_ops import traced
from fusion_attention.waist.mask import Band

Tensor = torch.Tensor
Lengths = Sequence[int] | Tensor | None
Layout = Literal["BSND", "BNSD"]
_Slots = tuple[int, int, int]  # page, first slot, how many
_LARGEST = {"int8": 127.0, "int4": 7.0}


class CacheFullError(RuntimeError):
    """A cache has too few free pages; nothing was stored."""


class PagedKVCache:
    """Keys and values of many sequences in pages of one pool; sequences may share pages.

    Args:
        heads: key heads. dim: elements of a key row. dim_v: of a value row; None: as keys.
        pages: how many there are. page_size: tokens of a page.
        dtype: of the rows that come in, and of the pool where it is not quantised.
        stored: "" (as dtype), or "int8" or "int4": quantised on append with a scale per token and head.
        shares_kv: there are no values of their own: they are the first dim_v elements of the keys.
        device: where the pool lies.

    Example:
        >>> cache = PagedKVCache(heads=2, dim=64, pages=8, page_size=16)
        >>> a = cache.allocate()
        >>> cache.append([a], torch.randn(1, 20, 2, 64), torch.randn(1, 20, 2, 64))
        >>> b = cache.fork(a)
        >>> cache.lengths([a, b]), cache.free_pages
        ([20, 20], 6)
        >>> decode_attention(torch.randn(2, 1, 8, 64), cache, sequences=[a, b]).shape
        torch.Size([2, 1, 8, 64])
    """

    def __init__(
        self,
        heads: int,
        dim: int,
        pages: int,
        *,
        dim_v: int | None = None,
        page_size: int = 128,
        dtype: torch.dtype = torch.float32,
        stored: str = "",
        shares_kv: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        dim_v = dim if dim_v is None else dim_v
        if min(heads, dim, dim_v, pages, page_size) < 1:
            raise ValueError("PagedKVCache: heads, dim, dim_v, pages and page_size: expected positive numbers")
        if shares_kv and dim_v > dim:
            raise ValueError(f"PagedKVCache: dim_v: expected at most dim={dim} where keys are values, got {dim_v}")
        if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"PagedKVCache: dtype: expected a floating point dtype, got {dtype!r}")
        if stored not in ("", *_LARGEST):
            raise ValueError(f'PagedKVCache: stored: expected "", "int8" or "int4", got {stored!r}')
        said = dim_v == dim or (dim_v % 2 == 0 and dim_v // 2 != (dim + 1) // 2)
        if stored == "int4" and not shares_kv and not said:
            expected = f"dim={dim}, or an even number that takes more or fewer bytes"
            raise ValueError(
                f"PagedKVCache: dim_v: expected {expected}, got {dim_v} (two elements share a byte: pad v)"
            )
        self.heads, self.dim, self.dim_v, self.page_size = heads, dim, dim_v, page_size
        self.dtype, self.stored, self.shares_kv = dtype, stored, shares_kv
        sides = (dim,) if shares_kv else (dim, dim_v)
        kind = {"": dtype, "int8": torch.int8, "int4": torch.uint8}[stored]
        rows = (pages, heads, page_size)
        with torch.inference_mode(False):  # memory made in inference mode could not be written outside it
            self._pools = [zeros((*rows, (d + 1) // 2 if stored == "int4" else d), kind, device) for d in sides]
            self._scales = [torch.zeros(rows, dtype=torch.float32, device=device) for _ in sides if stored]
        self._free = list(range(pages))[::-1]
        self._shared = [0] * pages  # how many sequences hold a page
        self._sequences: dict[int, tuple[list[int], int]] = {}  # pages and tokens
        self._tables: dict[tuple[int, ...], Tensor] = {}  # of the sequences asked for last
        self._next = 0

    def __repr__(self) -> str:
        """Heads and elements, how they are stored, and what is in use."""
        dims = f"{self.heads} x {self.dim}" + ("" if self.dim_v == self.dim else f" (values {self.dim_v})")
        stored = self.stored or str(self.dtype).removeprefix("torch.")
        pages, count = len(self._shared), len(self._sequences)
        used = f"{pages - len(self._free)} of {pages} pages of {self.page_size} used"
        return f"<PagedKVCache: {dims}, {stored}, {used}, {count} sequence{'s' * (count != 1)}>"

    @property
    def free_pages(self) -> int:
        """Pages that no sequence holds."""
        return len(self._free)

    @property
    def nbytes(self) -> int:
        """Bytes of the pool, scales included."""
        return sum(t.nbytes for t in (*self._pools, *self._scales))

    @property
    def sequences(self) -> list[int]:
        """The sequences that live, in the order in which they came."""
        return list(self._sequences)

    def allocate(self) -> int:
        """A new, empty sequence."""
        self._next += 1
        self._sequences[self._next - 1] = ([], 0)
        return self._next - 1

    def fork(self, sequence: int) -> int:
        """A new sequence of the same tokens, which shares all pages until one of the two appends."""
        pages, tokens = self._of(sequence)
        for page in pages:
            self._shared[page] += 1
        new = self.allocate()
        self._sequences[new] = (list(pages), tokens)
        return new

    def free(self, sequence: int) -> None:
        """Ends a sequence; pages that nobody else holds are free again."""
        pages, _ = self._of(sequence)
        del self._sequences[sequence]
        self._tables.clear()
        for page in reversed(pages):
            self._release(page)

    def lengths(self, sequences: Sequence[int] | None = None) -> list[int]:
        """Tokens of sequences, by default of all."""
        return [self._of(s)[1] for s in (self._sequences if sequences is None else self._named(sequences))]

    def block_table(self, sequences: Sequence[int] | None = None) -> Tensor:
        """int32 [sequences, pages]: the pages of sequences, behind the last one 0."""
        return self._table(sequences).clone()

    def _table(self, sequences: Sequence[int] | None) -> Tensor:
        """block_table(), made once as long as no sequence of the cache takes or leaves a page."""
        asked = tuple(self._sequences) if sequences is None else self._named(sequences)
        if asked not in self._tables:
            rows = [self._of(s)[0] for s in asked]
            width = max(map(len, rows), default=0)
            table = [row + [0] * (width - len(row)) for row in rows]
            made = torch.tensor(table, dtype=torch.int32, device=self._pools[0].device)
            self._tables = {asked: made.reshape(len(rows), width)}
        return self._tables[asked]

    def append(self, sequences: Sequence[int], k: Tensor, v: Tensor | None = None) -> None:
        """Stores new tokens behind those of some sequences.

        Args:
            sequences: each once.
            k: [sequences, tokens, heads, dim] in the cache's dtype. v: [.., dim_v]; None where keys serve as values.

        Raises:
            ValueError: shapes, dtypes or sequences that do not fit.
            CacheFullError: too few free pages; nothing was stored.
        """
        sequences = self._named(sequences)
        for sequence in sequences:
            self._of(sequence)
        given = (k,) if self.shares_kv else (k, v)
        if (v is None) is not self.shares_kv:
            raise ValueError(f"PagedKVCache: v: expected {'None' if self.shares_kv else 'values'} beside k")
        for name, tensor, d in zip("kv", given, (self.dim, self.dim_v), strict=False):
            if not isinstance(tensor, Tensor):
                raise ValueError(f"PagedKVCache: {name}: expected a tensor, got {show(tensor)}")
            shape = (len(sequences), k.shape[1] if k.dim() > 1 else 0, self.heads, d)
            device = self._pools[0].device
            if tuple(tensor.shape) != shape or tensor.dtype != self.dtype or tensor.device != device:
                got = f"{list(tensor.shape)} of {tensor.dtype} on {tensor.device}"
                raise ValueError(f"PagedKVCache: {name}: expected {list(shape)} of {self.dtype} on {device}, got {got}")
        held = (f"{name} {part}" for part in ("pool", "scales") for name in "kv"[: len(self._pools)])
        intact("PagedKVCache", ("k", "v", *held), (k, v, *self._pools, *self._scales))
        if len(set(sequences)) != len(sequences):
            raise ValueError(f"PagedKVCache: sequences: expected each once, got {list(sequences)}")
        runs = self._extend(sequences, k.shape[1])
        for pool, scales, tensor in zip(self._pools, self._scales or (None, None), given, strict=False):
            assert tensor is not None
            rows = tensor.detach().flatten(0, 1)
            if scales is not None:
                rows, scale = _quantise(rows, self.stored)
                _store(scales, scale, runs)
            _store(pool, rows, runs)

    def _of(self, sequence: int) -> tuple[list[int], int]:
        whole = type(sequence) is int or isinstance(sequence, np.integer)
        found = self._sequences.get(sequence) if whole else None
        if found is None:
            raise ValueError(f"PagedKVCache: sequence: expected a living one, got {show(sequence)}")
        return found

    def _named(self, sequences: Sequence[int]) -> tuple[int, ...]:
        """The sequences that a caller names."""
        try:
            return tuple(sequences)
        except TypeError:
            raise ValueError(f"PagedKVCache: sequences: expected a list of them, got {show(sequences)}") from None

    def _release(self, page: int) -> None:
        self._shared[page] -= 1
        if self._shared[page] == 0:
            self._free.append(page)

    def _extend(self, sequences: Sequence[int], count: int) -> list[_Slots]:
        """Where the new tokens go; takes new pages, and copies a shared one that is written."""
        size, held, needed, copies = self.page_size, dict[int, int](), 0, []
        for sequence in sequences:
            pages, tokens = self._of(sequence)
            needed += -(-(tokens + count) // size) - len(pages)
            if count and tokens % size and (holders := held.get(pages[-1], self._shared[pages[-1]])) > 1:
                held[pages[-1]] = holders - 1  # The last one to write keeps it.
                copies.append(sequence)
        if needed + len(copies) > len(self._free):
            raise CacheFullError(
                f"PagedKVCache: {needed + len(copies)} more pages needed, {len(self._free)} free "
                "(free() sequences, or make the cache with more pages)"
            )
        runs = []
        for sequence in sequences:
            pages, tokens = self._sequences[sequence]
            if sequence in copies:
                old, pages[-1] = pages[-1], self._take()
                for pool in (*self._pools, *self._scales):
                    pool[pages[-1]] = pool[old]
                self._release(old)
            end = tokens + count
            while len(pages) * size < end:
                pages.append(self._take())
            for page in range(tokens // size, -(-end // size) if count else 0):
                first = max(tokens, page * size)
                runs.append((pages[page], first % size, min(end, (page + 1) * size) - first))
            self._sequences[sequence] = (pages, end)
        return runs

    def _take(self) -> int:
        page = self._free.pop()
        self._tables.clear()
        self._shared[page] = 1
        return page

    def arguments(self, sequences: Sequence[int] | None = None) -> dict[str, Any]:
        """This cache as arguments of the record decode_attention."""
        named: dict[str, Any] = {
            "k": self._pools[0],
            "v": None if self.shares_kv else self._pools[1],
            "cache_layout": "BNSD",
            "kv_len": self.lengths(sequences),
            "block_table": self._table(sequences),
            "dim_v": self.dim_v if self.shares_kv else 0,
        }
        for side, scale in zip("kv", self._scales, strict=False):
            named[f"{side}_scale"] = scale
        return named


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """torch.zeros, on a CPU in huge pages of memory where the system offers them: reading it all then waits less often
    for the tables of addresses."""
    size, huge = math.prod(shape) * dtype.itemsize, getattr(mmap, "MADV_HUGEPAGE", None)
    if torch.device(device).type != "cpu" or huge is None or size < 1 << 22:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(huge)
    return torch.frombuffer(memory, dtype=dtype).view(shape).zero_()


def _store(pool: Tensor, rows: Tensor, runs: list[_Slots]) -> None:
    """Rows [tokens, heads, ..] into a pool [pages, heads, size, ..]."""
    if len(runs) <= 4:  # Copies of neighbouring slots, which a few sequences are stored faster by.
        first = 0
        for page, slot, count in runs:
            pool[page, :, slot : slot + count] = rows[first : first + count].transpose(0, 1)
            first += count
        return
    where = [(page, slot + i) for page, slot, count in runs for i in range(count)]
    pages, slots = torch.tensor(where, dtype=torch.int64, device=pool.device).unbind(1)
    pool[pages, :, slots] = rows


def _quantise(rows: Tensor, stored: str) -> tuple[Tensor, Tensor]:
    """(integers, scale): rows [tokens, heads, dim] with a scale per token and head, the largest element exact."""
    largest = _LARGEST[stored]
    wide = rows.float()
    scale = wide.abs().amax(-1) / largest
    whole = (wide / scale.clamp_min(torch.finfo(torch.float32).tiny)[..., None]).round().clamp(-largest, largest)
    numbers = whole.to(torch.int8)
    if stored == "int8":
        return numbers, scale
    if numbers.shape[-1] % 2:
        numbers = torch.nn.functional.pad(numbers, (0, 1))
    even, odd = numbers[..., ::2] & 15, numbers[..., 1::2] & 15
    return (even | (odd << 4)).view(torch.uint8), scale


Cache = PagedKVCache | Tensor | Sequence[Tensor] | tuple[Any, Any]


# fmt: off
@overload
def decode_attention(
    q: Tensor, cache: Cache, *, sequences: Sequence[int] | None = None, layout: Layout = "BSND",
    cache_layout: Layout = "BSND", q_len: Lengths = None, kv_len: Lengths = None, block_table: Tensor | None = None,
    k_scale: Tensor | None = None, k_offset: Tensor | None = None, v_scale: Tensor | None = None,
    v_offset: Tensor | None = None, dim_v: int = 0, scale: float | None = None, band: Band | None = None,
    blocked: Tensor | None = None, bias: Tensor | None = None, sink: Tensor | None = None,
    out_scale: Tensor | None = None, out_offset: Tensor | None = None,
    return_lse: Literal[False] = False, backend: Backend = "auto",
) -> Tensor: ...
@overload
def decode_attention(
    q: Tensor, cache: Cache, *, sequences: Sequence[int] | None = None, layout: Layout = "BSND",
    cache_layout: Layout = "BSND", q_len: Lengths = None, kv_len: Lengths = None, block_table: Tensor | None = None,
    k_scale: Tensor | None = None, k_offset: Tensor | None = None, v_scale: Tensor | None = None,
    v_offset: Tensor | None = None, dim_v: int = 0, scale: float | None = None, band: Band | None = None,
    blocked: Tensor | None = None, bias: Tensor | None = None, sink: Tensor | None = None,
    out_scale: Tensor | None = None, out_offset: Tensor | None = None,
    return_lse: Literal[True], backend: Backend = "auto",
) -> tuple[Tensor, Tensor]: ...
@overload
def decode_attention(
    q: Tensor, cache: Cache, *, sequences: Sequence[int] | None = None, layout: Layout = "BSND",
    cache_layout: Layout = "BSND", q_len: Lengths = None, kv_len: Lengths = None, block_table: Tensor | None = None,
    k_scale: Tensor | None = None, k_offset: Tensor | None = None, v_scale: Tensor | None = None,
    v_offset: Tensor | None = None, dim_v: int = 0, scale: float | None = None, band: Band | None = None,
    blocked: Tensor | None = None, bias: Tensor | None = None, sink: Tensor | None = None,
    out_scale: Tensor | None = None, out_offset: Tensor | None = None,
    return_lse: bool, backend: Backend = "auto",
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
    return_lse: bool = False,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the newest tokens of each sequence over its cache, those tokens included.

        s   = scale * (q . k) + bias                   k, v = (stored + offset) * scale where they are integers
        out = sum_j exp(s_j) * v_j / (sum_j exp(s_j) + exp(sink))

    Not differentiable.

    Args:
        q: [B, S1, N1, D]: the last S1 tokens of each sequence (one; several when speculating); float16, bfloat16 or
            float32.
        cache: a PagedKVCache; or (k, v), each [B, S2, N2, D] (v: [.., Dv]), a list of one [1, S2, N2, D] per sequence,
            or pages [pages, size, N2, D]; or k alone, with dim_v (MLA: keys of 576 elements, values their first 512).
            Elements are q's dtype, int8, or two integers of four bits in a uint8, the even element in the low half.
        sequences: of a PagedKVCache, one per row of q; None: all. It brings lengths, table and scales itself.
        layout: of q and out: "BSND" or "BNSD". cache_layout: of k and v; pages count where the batch does.
        q_len: query rows of every sequence; rows behind them return zeros.
        kv_len: tokens of every sequence in its cache; None: all that the tensors hold.
        block_table: int32 or int64 [B, pages]; needs kv_len.
        k_scale, k_offset, v_scale, v_offset: float32, of stored integers: [1], [N2], [N2, D], or per token and head
            (k's shape without its last axis).
        dim_v: elements of a value row where keys serve as values.
        scale: factor on the dot products; None: 1 / sqrt(D).
        band: the keys that each row sees; None: Band.causal(). A window of 512 tokens is Band.window(511, 0).
        blocked: bool or uint8, true removes a score; broadcasts to [B, N1, S1, S2] (S2: slots of the cache).
        bias: added to the scaled scores, in q's dtype; broadcasts as blocked. -inf hides a key, whatever its v.
        sink: [N1], of any floating dtype; one more logit per row in the denominator.
        out_scale, out_offset: float32, 1 or N1 * Dv elements: out is int8, round(x * out_scale + out_offset).
        return_lse: also return log(sum(exp(s))): float32 [B, N1, S1].
        backend: "auto", "cpu" or "golden".

    Returns:
        out in q's layout with Dv elements per head, or (out, lse). A row that sees nothing is zero (lse -inf).

    Raises:
        ContractError: a call that docs/ops/decode_attention.md does not allow; a length or page that does not exist is
            named with its position.
        BackendError: no back end computes it, and why.

    Source: this library; the same Problem as CANN's IncreFlashAttention.

    Example:
        >>> q, k, v = torch.randn(2, 1, 8, 64), torch.randn(2, 100, 2, 64), torch.randn(2, 100, 2, 64)
        >>> decode_attention(q, (k, v), kv_len=[100, 31]).shape
        torch.Size([2, 1, 8, 64])
    """
    # The record's parameters in the signature's order; the cache stands for k and v.
    args = dict(zip(_NAMES, locals().values(), strict=False))
    del args["cache"], args["sequences"]
    _agree(cache, sequences, args)
    if isinstance(cache, PagedKVCache):
        if torch.compiler.is_compiling():  # its pages are Python's: a trace ends here and goes on behind
            from fusion_attention.torch_ops import trace_constants

            return trace_constants.outside(_of_cache, cache, sequences, args, return_lse, backend)
        return _of_cache(cache, sequences, args, return_lse, backend)
    if isinstance(cache, tuple) and len(cache) == 2:
        args["k"], args["v"] = cache
    else:
        args["k"], args["v"] = cache, None
    return _attended(args, return_lse, backend)


def _agree(cache: Any, sequences: Sequence[int] | None, args: dict[str, Any]) -> None:
    """Raises where the caller says what the cache knows, or asks for sequences of bare tensors."""
    failures = []
    if isinstance(cache, PagedKVCache):
        said = [name for name in _BROUGHT if args[name] is not None] + ["dim_v"] * (args["dim_v"] != 0)
        advice = "it brings its own: sequences= chooses among its sequences"
        failures = [Failure(_OP, name, "nothing beside a PagedKVCache", show(args[name]), advice) for name in said]
    elif sequences is not None:
        advice = "tensors hold one sequence per row of q: index them"
        failures = [Failure(_OP, "sequences", "a PagedKVCache to choose from", show(sequences), advice)]
    if failures:
        raise ContractError(failures)


_OP = record.RECORD.name
_BROUGHT = ("kv_len", "block_table", "k_scale", "k_offset", "v_scale", "v_offset")
_NAMES = tuple(inspect.signature(decode_attention).parameters)[:-2]


def _attended(
    args: dict[str, Any], return_lse: bool, backend: str, own: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """own: a cache of this module made the page table, whose pages there are."""
    out, max_, sum_ = traced.results(record.RECORD, args, backend, reads=not own).values()
    return (out, max_ + sum_.log()) if return_lse else out


def _of_cache(
    cache: PagedKVCache, sequences: Sequence[int] | None, args: dict[str, Any], return_lse: bool, backend: str
) -> Tensor | tuple[Tensor, Tensor]:
    brought, q = cache.arguments(sequences), args["q"]
    count = len(brought["kv_len"])
    if isinstance(q, Tensor) and q.dim() == 4 and q.shape[0] != count:
        got = f"{count} of {cache!r}" if sequences is None else show(sequences)
        advice = f"q has {q.shape[0]} rows: sequences=[...] says whose they are"
        raise ContractError([Failure(_OP, "sequences", f"{q.shape[0]} sequences of the cache", got, advice)])
    return _attended(args | brought, return_lse, backend, own=True)

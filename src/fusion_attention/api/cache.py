"""PagedKVCache: a KV cache of many sequences in pages of one pool."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fusion_attention.contract import intact, show
from fusion_attention.memory import zeros

Tensor = torch.Tensor
_Slots = tuple[int, int, int]  # page, first slot, number of slots; a slot is the place of one token in a page
# Up to this number of runs of contiguous slots are stored by one copy each, which is faster than indexing.
_FEW = 4
_LARGEST = {"int8": 127.0, "int4": 7.0}


class CacheFullError(RuntimeError):
    """Error of PagedKVCache: it has too few free pages for the appended tokens; nothing was stored."""


class PagedKVCache:
    """The keys and values of many sequences, in pages of one pool; sequences may share pages.

    With a group of ranks, the pages of a sequence are assigned to the ranks in turn: each rank stores the tokens of its
    pages, and knows the page lists of all ranks. Every rank must call every method with the same arguments.

    Args:
        heads: key heads. dim: elements of a key row. dim_v: elements of a value row; None: dim.
        pages: number of pages; with a group, on every rank. page_size: tokens of a page.
        dtype: dtype of appended rows, and of the pool if it is not quantized.
        stored: "": in dtype; "int8" or "int4": quantized on append with a scale per token and head.
        shares_kv: values are the first dim_v elements of the keys.
        device: device of the pool.
        group: a process group, or a DeviceMesh of one dimension; None: one process.

    Raises:
        ValueError: sizes, dtype or group that are not possible.

    Source: this library.

    Example:
        >>> cache = PagedKVCache(heads=2, dim=64, pages=8, page_size=16)
        >>> a = cache.allocate()
        >>> cache.append([a], torch.randn(1, 20, 2, 64), torch.randn(1, 20, 2, 64))
        >>> b = cache.fork(a)
        >>> cache.lengths([a, b]), cache.free_pages
        ([20, 20], 6)
        >>> from fusion_attention import decode_attention
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
        group: Any = None,
    ) -> None:
        dim_v = dim if dim_v is None else dim_v
        if min(heads, dim, dim_v, pages, page_size) < 1:
            raise ValueError("PagedKVCache: heads, dim, dim_v, pages and page_size: expected positive numbers")
        if shares_kv and dim_v > dim:
            raise ValueError(f"PagedKVCache: dim_v: expected at most dim={dim} with shares_kv, got {dim_v}")
        if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"PagedKVCache: dtype: expected a floating point dtype, got {dtype!r}")
        if stored not in ("", *_LARGEST):
            raise ValueError(f'PagedKVCache: stored: expected "", "int8" or "int4", got {stored!r}')
        # decode_attention() derives dim_v from the bytes of an int4 row, which must be unambiguous.
        readable = dim_v == dim or (dim_v % 2 == 0 and dim_v // 2 != (dim + 1) // 2)
        if stored == "int4" and not shares_kv and not readable:
            expected = f"dim={dim}, or an even number that takes more or fewer bytes"
            raise ValueError(
                f"PagedKVCache: dim_v: expected {expected}, got {dim_v} (two elements share a byte: pad v)"
            )
        self.heads, self.dim, self.dim_v, self.page_size = heads, dim, dim_v, page_size
        self.dtype, self.stored, self.shares_kv = dtype, stored, shares_kv
        self.group, self._rank, self._ranks = None, 0, 1
        if group is not None:
            from fusion_attention.distributed.groups import group_of

            self.group = group_of(group)
            if self.group.axes:
                raise ValueError(
                    "PagedKVCache: group: expected a group of one dimension, got a mesh of two (pass one dimension, "
                    'mesh["name"])'
                )
            self._rank, self._ranks = self.group.rank, self.group.world
        sides = (dim,) if shares_kv else (dim, dim_v)
        kind = {"": dtype, "int8": torch.int8, "int4": torch.uint8}[stored]
        rows = (pages, heads, page_size)
        with torch.inference_mode(False):  # tensors made in inference mode cannot be written outside it
            self._pools = [zeros((*rows, (d + 1) // 2 if stored == "int4" else d), kind, device) for d in sides]
            self._scales = [torch.zeros(rows, dtype=torch.float32, device=device) for _ in sides if stored]
        # Pages are numbered over all ranks: page p is page p // ranks in the pool of rank p % ranks.
        self._free = [list(range(rank, pages * self._ranks, self._ranks))[::-1] for rank in range(self._ranks)]
        self._shared = [0] * (pages * self._ranks)  # number of sequences that use each page
        self._sequences: dict[int, tuple[list[int], int]] = {}  # pages and tokens
        self._tables: dict[tuple[int, ...], Tensor] = {}  # page table of the last selection of sequences
        self._next = 0

    def __repr__(self) -> str:
        dims = f"{self.heads} x {self.dim}" + ("" if self.dim_v == self.dim else f" (values {self.dim_v})")
        stored = self.stored or str(self.dtype).removeprefix("torch.")
        pages, count = len(self._shared), len(self._sequences)
        used = f"{pages - self.free_pages} of {pages} pages of {self.page_size} used"
        used += f" on {self._ranks} ranks" * (self.group is not None)
        return f"<PagedKVCache: {dims}, {stored}, {used}, {count} sequence{'s' * (count != 1)}>"

    @property
    def free_pages(self) -> int:
        """Number of pages that no sequence uses, over all ranks."""
        return sum(map(len, self._free))

    @property
    def pages(self) -> int:
        """Number of pages; with a group, on all ranks together."""
        return len(self._shared)

    @property
    def nbytes(self) -> int:
        """Bytes of this process's pool, scales included."""
        return sum(t.nbytes for t in (*self._pools, *self._scales))

    @property
    def sequences(self) -> list[int]:
        """The sequences of the cache, in the order of allocation."""
        return list(self._sequences)

    def allocate(self) -> int:
        """Adds an empty sequence, and returns its number."""
        self._next += 1
        self._sequences[self._next - 1] = ([], 0)
        return self._next - 1

    def fork(self, sequence: int) -> int:
        """Adds a copy of a sequence and returns its number; pages are shared until one of the two appends."""
        pages, tokens = self._of(sequence)
        for page in pages:
            self._shared[page] += 1
        new = self.allocate()
        self._sequences[new] = (list(pages), tokens)
        return new

    def free(self, sequence: int) -> None:
        """Removes a sequence; pages that no other sequence shares become free."""
        pages, _ = self._of(sequence)
        del self._sequences[sequence]
        self._tables.clear()
        for page in reversed(pages):
            self._release(page)

    def crop(self, sequence: int, tokens: int) -> None:
        """Removes the last `tokens` tokens of a sequence (at most all), and releases pages that become empty."""
        _, tokens_cached = self._of(sequence)
        retained = tokens_cached - min(self._count(tokens), tokens_cached)
        self._keep(sequence, slice(-(-retained // self.page_size)), retained)

    def slide(self, sequence: int, tokens: int) -> None:
        """Releases the pages that contain none of the last `tokens` tokens of a sequence.

        lengths() decreases by the number of released tokens, and the position of the first remaining token becomes 0.
        Bands aligned to the last key, such as causal() and window(), select the same keys as before.
        """
        pages, tokens_cached = self._of(sequence)
        released = max(tokens_cached - self._count(tokens), 0) // self.page_size
        self._keep(sequence, slice(released, len(pages)), tokens_cached - released * self.page_size)

    def add_pages(self, count: int) -> None:
        """Enlarges the pool by `count` free pages, on every rank; stored tokens are copied."""
        count, ranks = self._count(count), self._ranks
        pages = len(self._shared) // ranks
        with torch.inference_mode(False):
            larger = [zeros((pages + count, *t.shape[1:]), t.dtype, t.device) for t in (*self._pools, *self._scales)]
            for new, old in zip(larger, (*self._pools, *self._scales), strict=True):
                new[:pages] = old
        self._pools, self._scales = larger[: len(self._pools)], larger[len(self._pools) :]
        for rank, free in enumerate(self._free):
            free[:0] = range(pages * ranks + rank, (pages + count) * ranks, ranks)[::-1]
        self._shared += [0] * (count * ranks)

    def rows(self, sequence: int) -> tuple[Tensor, Tensor]:
        """Returns (k, v) of a sequence, [tokens, heads, dim] and [tokens, heads, dim_v], in the cache's dtype; with a
        group, only the tokens in this rank's pages."""
        (pages,), (count,) = self._local_pages((sequence,)), self._lengths((sequence,))
        where = torch.tensor(pages, dtype=torch.int64, device=self._pools[0].device)
        results = []
        for pool, scales, dim in zip(self._pools, self._scales or (None, None), (self.dim, self.dim_v), strict=False):
            gathered = pool[where].transpose(0, 1).flatten(1, 2)[:, :count].transpose(0, 1)
            if scales is not None:
                scale = scales[where].transpose(0, 1).flatten(1, 2)[:, :count].transpose(0, 1)
                if self.stored == "int4":  # a byte stores two elements, the even one in the low half
                    both = gathered.view(torch.int8)
                    gathered = torch.stack(((both << 4) >> 4, both >> 4), -1).flatten(-2)[..., :dim]
                gathered = gathered.float() * scale[..., None]
            results.append(gathered.to(self.dtype))
        return results[0], results[0][..., : self.dim_v] if self.shares_kv else results[1]

    def lengths(self, sequences: Sequence[int] | None = None) -> list[int]:
        """Returns the number of tokens of each sequence; None: of all sequences."""
        return [self._of(s)[1] for s in (self._sequences if sequences is None else self._named(sequences))]

    def block_table(self, sequences: Sequence[int] | None = None) -> Tensor:
        """Returns the page table of this process's pool: int32 [sequences, pages], padded with 0."""
        return self._table(sequences).clone()

    def _table(self, sequences: Sequence[int] | None) -> Tensor:
        selected = tuple(self._sequences) if sequences is None else self._named(sequences)
        if selected not in self._tables:
            rows = self._local_pages(selected)
            width = max(map(len, rows), default=0)
            table = [row + [0] * (width - len(row)) for row in rows]
            table_tensor = torch.tensor(table, dtype=torch.int32, device=self._pools[0].device)
            self._tables = {selected: table_tensor.reshape(len(rows), width)}
        return self._tables[selected]

    def own_pages(self, sequences: Sequence[int] | None = None) -> list[list[int]]:
        """Returns for each sequence the indices (0: the first page) of its pages that are in this process's pool."""
        selected = self._sequences if sequences is None else self._named(sequences)
        return [[i for i, page in enumerate(self._of(s)[0]) if page % self._ranks == self._rank] for s in selected]

    def _local_pages(self, sequences: Sequence[int]) -> list[list[int]]:
        """Returns for each sequence the page indices, in this process's pool, of its pages that are stored there."""
        if self._ranks == 1:
            return [self._of(s)[0] for s in sequences]
        return [[p // self._ranks for p in self._of(s)[0] if p % self._ranks == self._rank] for s in sequences]

    def _lengths(self, sequences: Sequence[int] | None) -> list[int]:
        """Returns the number of tokens of each sequence in this process's pool; None: of all sequences."""
        lengths = self.lengths(sequences)
        if self._ranks == 1:
            return lengths
        size, owned = self.page_size, self.own_pages(sequences)
        # Only a sequence's last page may have unused slots.
        return [
            len(local) * size - max((local[-1] + 1) * size - tokens, 0) if local else 0
            for local, tokens in zip(owned, lengths, strict=True)
        ]

    def append(self, sequences: Sequence[int], k: Tensor, v: Tensor | None = None) -> None:
        """Appends new tokens to sequences.

        Args:
            sequences: the sequences, each once.
            k: [sequences, tokens, heads, dim] in the cache's dtype; with a group, every rank passes all tokens, and
                stores those of its pages.
            v: [sequences, tokens, heads, dim_v]; None if the keys contain the values (shares_kv).

        Raises:
            ValueError: wrong shapes, dtypes or sequences.
            CacheFullError: too few free pages; nothing was stored.
        """
        sequences = self._named(sequences)
        for sequence in sequences:
            self._of(sequence)
        given = (k,) if self.shares_kv else (k, v)
        if (v is None) is not self.shares_kv:
            expected = "None, because keys contain the values" if self.shares_kv else "a tensor"
            raise ValueError(f"PagedKVCache: v: expected {expected}, got {show(v)}")
        for name, tensor, d in zip("kv", given, (self.dim, self.dim_v), strict=False):
            if not isinstance(tensor, Tensor):
                raise ValueError(f"PagedKVCache: {name}: expected a tensor, got {show(tensor)}")
            shape = (len(sequences), k.shape[1] if k.dim() > 1 else 0, self.heads, d)
            device = self._pools[0].device
            if tuple(tensor.shape) != shape or tensor.dtype != self.dtype or tensor.device != device:
                got = f"{list(tensor.shape)} of {tensor.dtype} on {tensor.device}"
                raise ValueError(f"PagedKVCache: {name}: expected {list(shape)} of {self.dtype} on {device}, got {got}")
        names = (f"{name} {kind}" for kind in ("pool", "scales") for name in "kv"[: len(self._pools)])
        intact("PagedKVCache", ("k", "v", *names), (k, v, *self._pools, *self._scales))
        if len(set(sequences)) != len(sequences):
            raise ValueError(f"PagedKVCache: sequences: expected each once, got {list(sequences)}")
        runs, local_rows = self._extend(sequences, k.shape[1]), None
        if self._ranks > 1:
            ends = np.cumsum([count for _, _, count in runs], dtype=np.int64).tolist()
            local = [(run, end) for run, end in zip(runs, ends, strict=True) if run[0] % self._ranks == self._rank]
            rows_of_runs = [np.arange(end - count, end) for (_, _, count), end in local]
            local_rows = torch.from_numpy(np.concatenate([*rows_of_runs, np.zeros(0, np.int64)]))
            local_rows = local_rows.to(self._pools[0].device)
            runs = [(page // self._ranks, first, count) for (page, first, count), _ in local]
        slots = None
        if len(runs) > _FEW:
            pages, first, count = np.array(runs, np.int64).T
            slot_of_token = np.arange(count.sum()) + np.repeat(first - (count.cumsum() - count), count)
            slots = torch.from_numpy(np.stack((np.repeat(pages, count), slot_of_token))).to(self._pools[0].device)
        for pool, scales, tensor in zip(self._pools, self._scales or (None, None), given, strict=False):
            assert tensor is not None
            rows = tensor.detach().flatten(0, 1)
            rows = rows if local_rows is None else rows[local_rows]
            if scales is not None:
                rows, scale = _quantise(rows, self.stored)
                _store(scales, scale, runs, slots)
            _store(pool, rows, runs, slots)

    def _of(self, sequence: int) -> tuple[list[int], int]:
        """Returns (page numbers, number of tokens) of a sequence; raises ValueError if it does not exist."""
        is_number = type(sequence) is int or isinstance(sequence, np.integer)
        result = self._sequences.get(sequence) if is_number else None
        if result is None:
            expected = "a sequence of this cache that was not freed"
            raise ValueError(f"PagedKVCache: sequence: expected {expected}, got {show(sequence)}")
        return result

    def _named(self, sequences: Sequence[int]) -> tuple[int, ...]:
        try:
            return tuple(sequences)
        except TypeError:
            got = show(sequences)
            raise ValueError(f"PagedKVCache: sequences: expected a list of sequence numbers, got {got}") from None

    def _count(self, count: int) -> int:
        is_integer = type(count) is int or isinstance(count, np.integer)
        if not is_integer or count < 0:
            raise ValueError(f"PagedKVCache: count: expected an integer >= 0, got {show(count)}")
        return int(count)

    def _keep(self, sequence: int, retained: slice, tokens: int) -> None:
        """Keeps only `retained`, a slice of a sequence's pages with `tokens` tokens; releases the other pages."""
        pages, _ = self._sequences[sequence]
        remaining = pages[retained]
        if len(remaining) < len(pages):
            self._tables.clear()
            for page in (*pages[: retained.start or 0], *pages[retained.stop :]):
                self._release(page)
        self._sequences[sequence] = (remaining, tokens)

    def _release(self, page: int) -> None:
        """Decrements the number of sequences that use a page; a page without users becomes free."""
        self._shared[page] -= 1
        if self._shared[page] == 0:
            self._free[page % self._ranks].append(page)

    def _next_rank(self, sequence: int, pages: list[int]) -> int:
        """Returns the rank that stores a sequence's next page; pages: numbers of the sequence's pages so far. Pages go
        to the ranks in turn, and sequences start on different ranks."""
        return (pages[-1] + 1 if pages else sequence) % self._ranks

    def _extend(self, sequences: Sequence[int], count: int) -> list[_Slots]:
        """Extends each sequence by `count` tokens: takes new pages, and copies shared pages before they are written.

        Returns (page, first slot, number of slots) of each run of adjacent slots for the new tokens, one slot per
        token.
        """
        size, needed, copies = self.page_size, [0] * self._ranks, []
        left: dict[int, int] = {}  # page -> sequences that use it, without those that take a copy
        for sequence in sequences:
            pages, tokens = self._of(sequence)
            more, rank = -(-(tokens + count) // size) - len(pages), self._next_rank(sequence, pages)
            for i in range(min(more, self._ranks)):  # every self._ranks-th page from the i-th on has the same rank
                needed[(rank + i) % self._ranks] += -(-(more - i) // self._ranks)
            if count and tokens % size and (holders := left.get(pages[-1], self._shared[pages[-1]])) > 1:
                left[pages[-1]] = holders - 1  # The last of the sequences that append needs no copy.
                copies.append(sequence)
                needed[pages[-1] % self._ranks] += 1
        for rank, free in enumerate(self._free):
            if needed[rank] > len(free):
                where = f" on rank {rank} of {self._ranks}" * (self.group is not None)
                raise CacheFullError(
                    f"PagedKVCache: {needed[rank]} more pages needed{where}, {len(free)} free "
                    "(free() sequences, or make the cache with more pages)"
                )
        runs = []
        for sequence in sequences:
            pages, tokens = self._sequences[sequence]
            if sequence in copies:
                old, pages[-1] = pages[-1], self._take(pages[-1] % self._ranks)
                for pool in (*self._pools, *self._scales) if old % self._ranks == self._rank else ():
                    pool[pages[-1] // self._ranks] = pool[old // self._ranks]
                self._release(old)
            end = tokens + count
            while len(pages) * size < end:
                pages.append(self._take(self._next_rank(sequence, pages)))
            for page in range(tokens // size, -(-end // size) if count else 0):
                first = max(tokens, page * size)
                runs.append((pages[page], first % size, min(end, (page + 1) * size) - first))
            self._sequences[sequence] = (pages, end)
        return runs

    def _take(self, rank: int) -> int:
        page = self._free[rank].pop()
        self._tables.clear()
        self._shared[page] = 1
        return page

    def arguments(self, sequences: Sequence[int] | None = None) -> dict[str, Any]:
        """Returns k, v, lengths, page table and scales of `sequences` as arguments of decode_attention(), by name; with
        a group, those of this rank's pool."""
        named: dict[str, Any] = {
            "k": self._pools[0],
            "v": None if self.shares_kv else self._pools[1],
            "cache_layout": "BNSD",
            "kv_len": self._lengths(sequences),
            "block_table": self._table(sequences),
            "dim_v": self.dim_v if self.shares_kv else 0,
        }
        for side, scale in zip("kv", self._scales, strict=False):
            named[f"{side}_scale"] = scale
        return named


def _store(pool: Tensor, rows: Tensor, runs: list[_Slots], slots: Tensor | None) -> None:
    """Stores rows [tokens, heads, dim] in a pool [pages, heads, page size, dim]; scales have no axis dim.

    runs: (page, first slot, count) of adjacent slots, in the order of rows. slots: int64 [2, tokens], each token's page
    and slot, for one indexed copy; None: one copy per run.
    """
    if slots is not None:
        pool[slots[0], :, slots[1]] = rows
        return
    first = 0
    for page, slot, count in runs:
        pool[page, :, slot : slot + count] = rows[first : first + count].transpose(0, 1)
        first += count


def _quantise(rows: Tensor, stored: str) -> tuple[Tensor, Tensor]:
    """Quantizes rows [tokens, heads, dim] to `stored`, "int8" or "int4"; returns (integers, scales [tokens, heads])."""
    largest = _LARGEST[stored]
    rows32 = rows.float()
    scale = rows32.abs().amax(-1) / largest
    rounded = (rows32 / scale.clamp_min(torch.finfo(torch.float32).tiny)[..., None]).round().clamp(-largest, largest)
    numbers = rounded.to(torch.int8)
    if stored == "int8":
        return numbers, scale
    if numbers.shape[-1] % 2:
        numbers = torch.nn.functional.pad(numbers, (0, 1))
    even, odd = numbers[..., ::2] & 15, numbers[..., 1::2] & 15
    return (even | (odd << 4)).view(torch.uint8), scale

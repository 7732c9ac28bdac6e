"""Tables on the device that kernels read: addresses and strides of views, lengths, and tiles.

In the layout table a view has four rows and a sequence one column: first element, stride of a head, stride of a token
or row, stride of a key, all int64. A kernel has one argument for all strides, and a table that is copied to the device
serves all later calls with the same memory layout.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fusion_attention.contract import BackendError
from fusion_attention.ir.memory_views import MatrixView, PagedView, RowView
from fusion_attention.ir.problem import EXTENT_ROWS, Extents
from fusion_attention.ir.tiles import divided

View = RowView | MatrixView | PagedView
Maker = Callable[[Extents], np.ndarray]
# The order of views in the table; layout_index.py has their indices.
VIEWS = (
    *("q", "k", "v", "out", "max", "sum", "q_rope", "k_rope", "bias", "blocked", "drop_bits"),
    *("dout", "dq", "dk", "dv", "dq_rope", "dk_rope", "dbias", "flat", "dlse"),
    *("scale_k", "offset_k", "scale_v", "offset_v"),
    "ids",
    # Lists, the indexer and its loss; index_q and index_k are used if attention's q and k are present too.
    *("indices", "weights", "values", "dvalues", "dweights", "target"),
    *("index_q", "index_k", "index_max", "index_sum"),
    # A second source of keys.
    *("k_compressed", "v_compressed", "dk_compressed", "dv_compressed", "ids_compressed"),
)
# Views of rows; if all of them are aligned, kernels load 16 bytes at a time.
ROWS = (
    *("q", "k", "v", "out", "q_rope", "k_rope", "dout", "dq", "dk", "dv", "dq_rope", "dk_rope"),
    *("index_q", "index_k", "k_compressed", "v_compressed", "dk_compressed", "dv_compressed"),
)
ARGUMENTS = {"max": "max_", "sum": "sum_", "drop_bits": "bits"}  # kernel arguments that have other names
FIELDS = 4
TILE_FIELDS = 8
_LOAD_BYTES = 16  # bytes of the widest load


def tensor_of(view: View) -> torch.Tensor:
    """Returns the tensor (or page pool) whose memory a view addresses."""
    if isinstance(view, PagedView):
        return view.pool
    return view.keep if isinstance(view, MatrixView) else view.keep[0]


def tensors(views: Mapping[str, View | None]) -> dict[str, Any]:
    """Returns {kernel argument name: tensor} of the views that are not None; views: by name ("q", "k", ...)."""
    return {ARGUMENTS.get(name, name): tensor_of(view) for name, view in views.items() if view is not None}


def _columns(view: View) -> tuple[np.ndarray | int, ...]:
    """Returns (offset of the first element, stride of a head, stride of a token or row, stride of a key or page) of a
    view, which kernels read from the table of strides; each is a number or an int array [sequences]."""
    if isinstance(view, PagedView):
        return 0, view.stride_head, view.stride_token, view.stride_page
    if isinstance(view, MatrixView):
        if view.first is not None:
            raise BackendError("fusion_attention: triton: expected a matrix of all keys, got one without the first")
        return view.address, view.stride_head, view.stride_row, view.stride_key
    address = view.address
    if len(view.keep) > 1:
        first = view.keep[0]
        start, size = first.data_ptr(), first.element_size()
        address = address + np.array([(t.data_ptr() - start) // size for t in view.keep], np.int64)
    return address, view.stride_head, view.stride_token, 0


def strides(views: Mapping[str, View | None], count: int, drawn: tuple[np.ndarray, ...] | None = None) -> np.ndarray:
    """Returns int64 [4 * number of views, sequences], the table from which kernels read the offset of the first element
    and three strides of each view, in the order of VIEWS; 0 for absent views.

    drawn: for dropout drawn from a seed, (random stream of head 0, first row, first key) of each sequence. They replace
    offset, stride of a row and stride of a key of the view "drop_bits"; its stride of a head is 1.
    """
    table = np.zeros((len(VIEWS) * FIELDS, count), np.int64)
    for at, name in enumerate(VIEWS):
        view = views.get(name)
        if view is not None:
            for n, values in enumerate(_columns(view)):
                table[at * FIELDS + n] = values
    if drawn is not None:
        stream, row, key = drawn
        at = VIEWS.index("drop_bits") * FIELDS
        table[at : at + FIELDS] = stream, np.ones_like(stream), row, key
    return table


def alignment(views: Mapping[str, View | None], table: np.ndarray) -> int:
    """Returns the largest power of two, in elements of q and at most 16 bytes, that divides the addresses and strides
    of all rows; table: strides() of the views."""
    q = views["q"]
    smallest = _LOAD_BYTES if q is None else tensor_of(q).element_size()
    result = _LOAD_BYTES
    for name, view in views.items():
        if name in ROWS and view is not None:
            tensor, at = tensor_of(view), VIEWS.index(name) * FIELDS
            # Kernels count alignment in q's elements, also for views of other element sizes.
            result |= int(np.bitwise_or.reduce(table[at : at + FIELDS], axis=None)) * min(
                tensor.element_size(), smallest
            )
            result |= tensor.data_ptr()
    return max(1, (result & -result) // smallest)


def layout(views: Mapping[str, View | None], tensors: Mapping[str, torch.Tensor | None]) -> tuple[Any, ...]:
    """Returns a hashable key of a call's memory layout: devices, dtypes, strides and alignments of views and tensors.

    Two calls with equal keys, problems and lengths differ only in addresses, so they share tables, tiles and constants.
    """
    results: list[Any] = [None if t is None else (t.get_device(), t.dtype) for t in tensors.values()]
    for view in views.values():
        if view is None:
            results.append(None)
        elif isinstance(view, RowView):
            start = view.keep[0].data_ptr()
            apart = tuple(t.data_ptr() - start for t in view.keep) if len(view.keep) > 1 else None
            strides = view.stride_token, view.stride_head.tobytes()
            results.append((start % _LOAD_BYTES, apart, view.address.tobytes(), *strides, view.dim))
        elif isinstance(view, PagedView):
            results.append(_layout_of_pages(view, views["k"]))
        else:
            address, head, row = view.address.tobytes(), view.stride_head.tobytes(), view.stride_row.tobytes()
            results.append((address, head, row, view.stride_key, view.first is None))
    return tuple(results)


def _layout_of_pages(view: PagedView, k: View | None) -> tuple[Any, ...]:
    """Returns the part of layout()'s key for a paged KV cache; k: the view of keys, whose page table may be shared."""
    pool, table = view.pool, view.table
    shares = isinstance(k, PagedView) and (table is k.table or table.data_ptr() == k.table.data_ptr())
    memory = pool.untyped_storage().nbytes(), pool.storage_offset(), pool.data_ptr() % _LOAD_BYTES
    strides = view.stride_page, view.stride_token, view.stride_head, table.stride()
    return *memory, *strides, table.shape, view.page_size, view.dim, view.fragment, shares


@contextlib.contextmanager
def on(device: torch.device) -> Iterator[None]:
    """Returns a context that makes a device current, for launches and for the test whether a CUDA graph is captured."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        # In a thread without CUDA context torch sets the device lazily, and Triton would initialize device 0.
        torch.cuda.set_device(device)
        yield


def apart(views: Mapping[str, View | None]) -> bool:
    """Returns True if the rows of each view do not overlap in memory, as tensor descriptors require."""
    result = (views.get(name) for name in ROWS)
    return all(view.stride_token >= view.dim for view in result if isinstance(view, RowView))


def heads_apart(views: Mapping[str, View | None]) -> bool:
    """Returns True if the heads of q, q_rope and dout do not overlap, as descriptors of several heads require."""
    result = (views.get(name) for name in ("q", "q_rope", "dout"))
    return all(bool((view.stride_head >= view.dim).all()) for view in result if isinstance(view, RowView))


# Tables that captured CUDA graphs read, by address. They have a few kilobytes each and are never freed, because a graph
# may outlive its plan and its deletion cannot be detected.
_CAPTURED: dict[int, torch.Tensor] = {}


@dataclass(eq=False)
class Copied:
    """A table copied to a tensor on a device, with a CUDA event of its last write, for which other streams wait."""

    tensor: torch.Tensor
    stream: torch.cuda.Stream | None = None
    written: torch.cuda.Event | None = None

    @classmethod
    def of(cls, values: np.ndarray, device: torch.device) -> Copied:
        """Copies the array `values` to a new tensor on a device, and returns it as a Copied."""
        result = cls(torch.empty(values.shape, dtype=torch.from_numpy(values).dtype, device=device))
        result.write(values)
        return result

    def write(self, values: np.ndarray) -> None:
        """Copies `values`, of the table's shape, into the table, in the order of the current CUDA stream.

        Raises:
            BackendError: a CUDA graph is being captured, in which the copy would only be recorded.
        """
        host, device = torch.from_numpy(values), self.tensor.device
        if device.type != "cuda":
            self.tensor.copy_(host)
            return
        if torch.cuda.is_current_stream_capturing():
            raise BackendError(
                "fusion_attention: triton: expected a run on the same layout of memory before a graph is captured, "
                "got none (the first run copies tables)"
            )
        self.tensor.copy_(host.pin_memory(), non_blocking=True)
        self.stream = torch.cuda.current_stream(device)
        self.written = self.stream.record_event()

    def read(self) -> None:
        """Makes the current stream wait for the last write, before kernels that read the table."""
        if self.written is None:
            return
        if torch.cuda.is_current_stream_capturing():
            _CAPTURED[self.tensor.data_ptr()] = self.tensor
        elif (stream := torch.cuda.current_stream(self.tensor.device)) != self.stream:
            stream.wait_event(self.written)
            self.tensor.record_stream(stream)


@dataclass(eq=False)
class DeviceTables:
    """An operation's tables (lengths, lists of tiles), each copied once to each device that uses it; update() rewrites
    them for other lengths."""

    extents: Extents
    capacity: Extents = field(init=False)  # the planned lengths, which determine the sizes of lists
    _lists: dict[tuple[torch.device, str], tuple[Maker, Copied]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.capacity = self.extents

    def on(self, device: torch.device, name: str, make: Maker) -> Copied:
        """Returns the table `name`, make(extents) copied to a device; it is made at its first use there."""
        key = device, name
        if key not in self._lists:
            results = self._lists[key] = make, Copied.of(make(self.capacity), device)
            if self.extents is not self.capacity:
                self._rewrite(*results)
        return self._lists[key][1]

    def update(self, extents: Extents) -> None:
        """Rewrites all tables for `extents`, with other key lengths of the same rows, in place, so that captured CUDA
        graphs read the new content."""
        self.extents = extents
        for make, table in self._lists.values():
            with on(table.tensor.device):
                self._rewrite(make, table)

    def _rewrite(self, make: Maker, table: Copied) -> None:
        """Overwrites `table` with make(self.extents), padded with zeros to its size; zeros are tiles without rows."""
        values = make(self.extents)
        buffer = np.zeros(table.tensor.shape, values.dtype)
        buffer[: len(values)] = values
        table.write(buffer)


class CallMemory:
    """The tensors of one call as strided views, and their tables of strides and lengths on the device.

    views, given: strided views by name ("q", "k", ...), tensors and numbers by kernel argument name. more: further
    views, of which kernels read only the strides. positions: for drawn dropout, random stream, first row and first key
    of each sequence. align: the alignment of all rows, in elements of q. table: strides() on the host. fixed: the
    tables of strides and lengths on the device, and the number of sequences, by kernel argument name.

    Raises:
        BackendError: tensors are on several devices.
    """

    def __init__(
        self, views: dict[str, View | None], given: dict[str, Any], device_tables: DeviceTables,
        more: Mapping[str, View] | None = None, positions: tuple[np.ndarray, ...] | None = None,
    ) -> None:  # fmt: skip
        self.views, self.given, self._tables, count = views, given, device_tables, len(device_tables.extents)
        self.device, self.capacity = given["q"].device, device_tables.capacity
        devices = {name: tensor.device for name, tensor in given.items() if tensor is not None}
        if strangers := [f"{name} on {where}" for name, where in devices.items() if where != self.device]:
            raise BackendError(
                f"fusion_attention: triton: expected all tensors on {self.device}, where q is, got "
                f"{', '.join(strangers)}"
            )
        self.table = strides({**views, **(more or {})}, count, positions)
        self.align = alignment(views, self.table)
        self.strides, self.lengths = Copied.of(self.table, self.device), self.on("lengths", lengths)
        self.fixed = {"strides": self.strides.tensor, "lengths": self.lengths.tensor, "count": count}

    def on(self, name: str, make: Maker) -> Copied:
        """Returns the table `name`, make(extents) copied to the call's device; it is made at its first use there."""
        return self._tables.on(self.device, name, make)


def tiles_of(lengths: np.ndarray, size: int) -> np.ndarray:
    """Returns int32 [tiles, 8], tiles of at most `size` rows of each sequence: sequence, first row, end, five zeros."""
    ranges = np.stack(divided(lengths, size), 1).astype(np.int32)
    return np.pad(ranges, ((0, 0), (0, TILE_FIELDS - 3)))


def padded(table: np.ndarray, rows: int) -> np.ndarray:
    """Returns a table padded with zero rows to `rows` rows."""
    return np.concatenate((table, np.zeros((rows - len(table), *table.shape[1:]), table.dtype)))


def lengths(extents: Extents) -> np.ndarray:
    """Returns the table of lengths and bands that kernels read, int64 [6, sequences]: q_len, kv_len, lo, hi, prefix
    (row i sees keys i + lo to before max(i + hi, prefix)), and ALiBi's shift. With compressed keys it is [8,
    sequences], with their kv_len and hi last."""
    rows = [getattr(extents, name) for name in EXTENT_ROWS]
    if extents.compressed is not None:
        rows += [extents.compressed.kv_len, extents.compressed.hi]
    return np.stack(rows).astype(np.int64)

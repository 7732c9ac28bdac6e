"""Where everything lies, as the kernels read it: a table of addresses and strides, one of lengths, one of tiles.

A view takes four rows of the table, a sequence one column: first element, stride of a head, stride of a token or row,
stride of a key. So a kernel has one argument for all strides, addresses are int64 from the first to the last, and a
table that was copied to the device once serves every later call on the same memory layout.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fusion_attention.contract import BackendError
from fusion_attention.ir.kv import MatrixView, PagedView, RowView
from fusion_attention.ir.problem import EXTENT_ROWS, Extents

View = RowView | MatrixView | PagedView
Maker = Callable[[Extents], np.ndarray]
# The order in which views stand in the table; kernels count on it (views.py).
VIEWS = (
    *("q", "k", "v", "out", "max", "sum", "q_rope", "k_rope", "bias", "blocked", "drop_bits"),
    *("dout", "dq", "dk", "dv", "dq_rope", "dk_rope", "dbias", "flat", "dlse"),
    *("scale_k", "offset_k", "scale_v", "offset_v"),
    "ids",
    # Lists, the indexer and its loss: index_q and index_k stand beside attention's own q and k alone.
    *("indices", "weights", "values", "dvalues", "dweights"),
    *("index_q", "index_k", "index_max", "index_sum"),
    # A second source of keys.
    *("k_compressed", "v_compressed", "dk_compressed", "dv_compressed", "ids_compressed"),
)
# Views of whole rows: where all of them are aligned, kernels load 16 bytes at a time.
ROWS = (
    *("q", "k", "v", "out", "q_rope", "k_rope", "dout", "dq", "dk", "dv", "dq_rope", "dk_rope"),
    *("index_q", "index_k", "k_compressed", "v_compressed", "dk_compressed", "dv_compressed"),
)
FIELDS = 4
TILE_FIELDS = 8
_LOAD_BYTES = 16  # bytes of the widest load


def tensor_of(view: View) -> torch.Tensor:
    """The tensor from whose first element a view's addresses count."""
    if isinstance(view, PagedView):
        return view.pool
    return view.keep if isinstance(view, MatrixView) else view.keep[0]


def _columns(view: View, count: int) -> tuple[np.ndarray | int, ...]:
    """A view's four rows."""
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
    """The table of `count` sequences; rows of views that are not there are zero.

    drawn: of dropout without bits, in the place of their view: (stream of head 0, first row, first key) per sequence,
    in the order of (address, stride of a row, stride of a key), and 1 for the stride of a head.
    """
    table = np.zeros((len(VIEWS) * FIELDS, count), np.int64)
    for at, name in enumerate(VIEWS):
        view = views.get(name)
        if view is not None:
            for n, values in enumerate(_columns(view, count)):
                table[at * FIELDS + n] = values
    if drawn is not None:
        stream, row, key = drawn
        at = VIEWS.index("drop_bits") * FIELDS
        table[at : at + FIELDS] = stream, np.ones_like(stream), row, key
    return table


def alignment(views: Mapping[str, View | None], table: np.ndarray) -> int:
    """The most elements of q, at most those of 16 bytes, that divide the start of every row of every view."""
    q = views["q"]
    smallest = _LOAD_BYTES if q is None else tensor_of(q).element_size()
    result = _LOAD_BYTES
    for name, view in views.items():
        if name in ROWS and view is not None:
            tensor, at = tensor_of(view), VIEWS.index(name) * FIELDS
            # Kernels count alignment in q's elements, of wider and narrower ones beside them too.
            result |= int(np.bitwise_or.reduce(table[at : at + FIELDS], axis=None)) * min(
                tensor.element_size(), smallest
            )
            result |= tensor.data_ptr()
    return max(1, (result & -result) // smallest)


def layout(views: Mapping[str, View | None], tensors: Mapping[str, torch.Tensor | None]) -> tuple[Any, ...]:
    """All that tables, tiles and constants follow from, besides the problem and the lengths: two runs of one layout
    differ in nothing but addresses."""
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
    """Of keys, values and what belongs to them, which are to share one page table."""
    pool, table = view.pool, view.table
    shares = isinstance(k, PagedView) and (table is k.table or table.data_ptr() == k.table.data_ptr())
    memory = pool.untyped_storage().nbytes(), pool.storage_offset(), pool.data_ptr() % _LOAD_BYTES
    strides = view.stride_page, view.stride_token, view.stride_head, table.stride()
    return *memory, *strides, table.shape, view.page_size, view.dim, view.fragment, shares


@contextlib.contextmanager
def on(device: torch.device) -> Iterator[None]:
    """Makes a tensor's device the current one: kernels start there, and there a capture is asked about."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        # A thread that has used no device yet only remembers which it is to use, and Triton would start device 0.
        torch.cuda.set_device(device)
        yield


def apart(views: Mapping[str, View | None]) -> bool:
    """Whether no row reaches into the next one, as rows of an expanded tensor do: a descriptor cannot say that."""
    result = (views.get(name) for name in ROWS)
    return all(view.stride_token >= view.dim for view in result if isinstance(view, RowView))


def heads_apart(views: Mapping[str, View | None]) -> bool:
    """apart() of the heads of what one descriptor reads for a group of them."""
    result = (views.get(name) for name in ("q", "q_rope", "dout"))
    return all(bool((view.stride_head >= view.dim).all()) for view in result if isinstance(view, RowView))


def one_device(tensors: Mapping[str, torch.Tensor | None]) -> torch.device:
    """The device of all tensors of a call.

    Raises:
        BackendError: they lie on several.
    """
    results = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    device = results["q"]
    strangers = [f"{name} on {where}" for name, where in results.items() if where != device]
    if strangers:
        raise BackendError(
            f"fusion_attention: triton: expected all tensors on {device}, where q is, got {', '.join(strangers)}"
        )
    return device


# What captured graphs read, by address: a graph may outlive the plan that it was captured from, and there is no notice
# when it goes. So these few kilobytes stay.
_CAPTURED: dict[int, torch.Tensor] = {}


@dataclass(eq=False)
class Copied:
    """A table on a device, and when the stream that wrote it last has done so; the host never waits."""

    tensor: torch.Tensor
    stream: torch.cuda.Stream | None = None
    written: torch.cuda.Event | None = None

    @classmethod
    def of(cls, values: np.ndarray, device: torch.device) -> Copied:
        """A copy of the array."""
        result = cls(torch.empty(values.shape, dtype=torch.from_numpy(values).dtype, device=device))
        result.write(values)
        return result

    def write(self, values: np.ndarray) -> None:
        """Overwrites the table, in the order of the current stream.

        Raises:
            BackendError: a graph is being captured, which would only note the copy.
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
        """Says that what the current stream does next reads the table."""
        if self.written is None:
            return
        if torch.cuda.is_current_stream_capturing():
            _CAPTURED[self.tensor.data_ptr()] = self.tensor
        elif (stream := torch.cuda.current_stream(self.tensor.device)) != self.stream:
            stream.wait_event(self.written)
            self.tensor.record_stream(stream)


@dataclass(eq=False)
class DeviceTables:
    """The lengths of a schedule on devices, and the lists of tiles made of them, each copied once."""

    extents: Extents
    capacity: Extents = field(init=False)  # what was planned for: lists have room for it
    _lists: dict[tuple[torch.device, str], tuple[Maker, Copied]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.capacity = self.extents

    def on(self, device: torch.device, name: str, make: Maker) -> Copied:
        """What `make` makes of the lengths, on a device."""
        key = device, name
        if key not in self._lists:
            results = self._lists[key] = make, Copied.of(make(self.capacity), device)
            if self.extents is not self.capacity:
                self._rewrite(*results)
        return self._lists[key][1]

    def update(self, extents: Extents) -> None:
        """Writes what other lengths (of the same rows) make of every list, where captured kernels read it."""
        self.extents = extents
        for make, table in self._lists.values():
            with on(table.tensor.device):
                self._rewrite(make, table)

    def _rewrite(self, make: Maker, table: Copied) -> None:
        """Tiles that shorter lengths leave over are zeros: they hold no row and no key."""
        values = make(self.extents)
        buffer = np.zeros(table.tensor.shape, values.dtype)
        buffer[: len(values)] = values
        table.write(buffer)


def padded(table: np.ndarray, rows: int) -> np.ndarray:
    """A table with rows of zeros behind, `rows` in all."""
    return np.concatenate((table, np.zeros((rows - len(table), *table.shape[1:]), table.dtype)))


def lengths(extents: Extents) -> np.ndarray:
    """[6, sequences] int64: the rows of EXTENT_ROWS; with a second source of keys [8, sequences]: its kv_len and hi."""
    rows = [getattr(extents, name) for name in EXTENT_ROWS]
    if extents.compressed is not None:
        rows += [extents.compressed.kv_len, extents.compressed.hi]
    return np.stack(rows).astype(np.int64)

"""Functions in rules of decoding attention: each returns True for a legal call, else False, or text with the value."""

from typing import Any

import numpy as np
import torch

from fusion_attention.contract import dtype_text, functions_in, show, trained
from fusion_attention.ops.shared.checks import int32, pages_exist
from fusion_attention.ops.shared.layouts import form_of

Tensor = torch.Tensor


def sizes(tensor: Tensor, layout: str, heads: int) -> tuple[int, int, int] | None:
    """Returns (batch or pages, tokens, elements of a row) of a tensor of a KV cache; None if its shape does not fit the
    layout ("BSH": [B, S, heads * D], "BNSD", "BSND") and the number of key heads."""
    form = form_of(tensor, layout, heads)
    return None if form is None or form[1] != heads else (form[0], *form[2:])


def page_layout(tensor: Tensor) -> str:
    """Returns the layout of pages of a KV cache: "BSH" for [pages, page size, heads * dim], "BNSD" for four axes."""
    return "BSH" if tensor.dim() == 3 else "BNSD"


def heads_fit(num_key_value_heads: int, heads: int) -> bool:
    """True if query heads (heads) are a multiple of key heads (num_key_value_heads, or `heads` if that is 0)."""
    return num_key_value_heads >= 0 and heads % max(num_key_value_heads or heads, 1) == 0


def cache_fits(
    key: tuple[Tensor, ...], layout: str, batch: int, heads: int, dim: int, table: Tensor | None, block_size: int
) -> bool | str:
    """True (else text) if the keys of a KV cache have a legal form, with this number of key heads and elements (dim).
    The forms are one tensor for the batch, one tensor per sequence, or (with a page table) one tensor of pages of
    block_size tokens."""
    if heads < 1:
        return True
    paged = table is not None
    results = [sizes(t, page_layout(t) if paged else layout, heads) for t in key]
    wrong = next((i for i, size in enumerate(results) if size is None or size[2] != dim), -1)
    if wrong >= 0:
        return f"tensor {wrong} with shape {list(key[wrong].shape)}" if len(key) > 1 else show(key)
    full = [size for size in results if size is not None]
    if paged:
        return (len(key) == 1 and full[0][1] == block_size) or show(key)
    if len(key) == 1:
        return full[0][0] == batch or show(key)
    one = all(size[0] == 1 for size in full)
    return (len(key) == batch and one) or f"{len(key)} tensors for {batch} sequences, batch {full[0][0]} in the first"


def same_shapes(value: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> bool | str:
    """True (else text) if there are as many value tensors as key tensors, each with the shape of its key tensor."""
    if len(value) != len(key):
        return f"{len(value)} tensors beside {len(key)}"
    wrong = next((i for i, (v, k) in enumerate(zip(value, key, strict=True)) if v.shape != k.shape), -1)
    return wrong < 0 or f"{show(value[wrong])} beside {show(key[wrong])}"


def lengths_within(kv_len: np.ndarray, capacity: np.ndarray) -> bool | str:
    """True (else text) if lengths kv_len [B] are between 0 and capacity [B], the tokens that the cache can store."""
    bad = np.flatnonzero((kv_len < 0) | (kv_len > capacity))
    if len(bad) == 0:
        return True
    length, cached = kv_len[bad[0]], capacity[bad[0]]
    return f"{length} for sequence {bad[0]}" + (f", whose cache holds {cached}" if length >= 0 else "")


def rows_within(q_len: np.ndarray, rows: int) -> bool | str:
    """True (else text) if every length in q_len [B] is at most `rows`, the query rows of a sequence in the tensor."""
    bad = np.flatnonzero((q_len < 0) | (q_len > rows))
    return len(bad) == 0 or f"{q_len[bad[0]]} for sequence {bad[0]} of {rows} rows"


def table_holds(table: Tensor, kv_len: np.ndarray, block_size: int) -> bool | str:
    """True (else error text) if the page table [B, pages] has enough pages of block_size tokens for kv_len [B] keys."""
    bad = np.flatnonzero(kv_len > table.shape[1] * block_size)
    if len(bad) == 0:
        return True
    b = int(bad[0])
    return f"{table.shape[1]} pages of {block_size} for the {kv_len[b]} tokens of sequence {b}"


def columns_fit(tensor: Tensor, batch: int, heads: int, rows: int, columns: int, shapes: tuple[str, ...]) -> bool | str:
    """True (else the fault as text) if a mask or bias has one of the shapes, and at least `columns` columns.
    A shape is a string with a letter for each axis but the last: b: 1 or the batch; B: the batch; N: the heads; s: 1 or
    the rows; 1: 1."""
    allowed = {"b": (1, batch), "B": (batch,), "N": (heads,), "s": (1, rows), "1": (1,)}
    leading = tuple(tensor.shape[:-1])
    for shape in shapes:
        if len(shape) == len(leading) and all(size in allowed[axis] for axis, size in zip(shape, leading, strict=True)):
            return tensor.shape[-1] >= columns or f"{list(tensor.shape)}, of which {columns} columns are read"
    return f"{list(tensor.shape)} with B={batch}, N1={heads}"


def scale_fits(scale: Tensor, heads: int, dim: int) -> bool | str:
    """True (else the fault as text) if a tensor of dequantisation scales, of keys (index 0 of the first axis) and
    values (index 1), has one number for each, or one per key head and element (dim)."""
    channels = ((2, heads, 1, dim), (2, heads, dim), (2, heads * dim), (2,))
    return tuple(scale.shape) in channels or f"{list(scale.shape)} with N={heads}, D={dim}"


def beside(offset: Tensor | None, scale: Tensor | None) -> bool | str:
    """True (else the fault as text) if an offset is None or has the shape and dtype of its scale."""
    if offset is None:
        return True
    if scale is None:
        return "an offset without a scale"
    return (offset.shape == scale.shape and offset.dtype == scale.dtype) or f"{show(offset)} beside {show(scale)}"


def is_contiguous(*tensors: Any) -> bool:
    """True if all tensors, also those in tuples, are contiguous."""
    flat = [t for value in tensors for t in (value if isinstance(value, tuple) else (value,)) if t is not None]
    return all(t.is_contiguous() for t in flat)


def dtype_of(value: Any) -> str:
    """Returns the dtype of a tensor or tuple of tensors, such as "int8"; several joined by " and "; "" for None."""
    flat = value if isinstance(value, tuple) else () if value is None else (value,)
    return " and ".join(sorted({dtype_text(t) for t in flat}))


FUNCTIONS = functions_in(globals()) | {f.__name__: f for f in (pages_exist, int32, trained)}

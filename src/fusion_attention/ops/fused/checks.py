"""Check functions for rules of fused inference attention: each returns True for a legal call, otherwise False, or a
text with the illegal value. Some read the content of masks."""

from collections.abc import Sequence

import numpy as np
import torch

from fusion_attention.contract import dtype_text, functions_in, members, show
from fusion_attention.ir.mask import UNLIMITED
from fusion_attention.ops.fused import geometry
from fusion_attention.ops.fused.geometry import is_triangle
from fusion_attention.ops.inference import checks
from fusion_attention.ops.shared.layouts import form_of
from fusion_attention.ops.shared.params import triangle

Tensor = torch.Tensor
Outcome = bool | str
Several = Tensor | tuple[Tensor, ...]

# ---------------------------------------------------------------------------------------------------------------- cache


def _layout(tensor: Tensor, layout: str, table: Tensor | None) -> str:
    return geometry.of_inputs(layout) if table is None else geometry.page_layout(tensor)


def rows_fit(
    rows: Several, layout: str, heads: int, dim: int | None, table: Tensor | None, block_size: int = 0
) -> Outcome:
    """True (else the fault as text) if key or value tensors (rows) have the axes of an input_layout (with a page table,
    of pages of block_size tokens), and the given key heads and elements; dim None: any number of elements."""
    for t in members(rows):
        layout_of_rows = _layout(t, layout, table)
        if not layout_of_rows:
            return f"{t.dim()} dimensions {list(t.shape)} in pages"
        form = form_of(t, layout_of_rows, heads)
        if form is None or form[1] != heads or (dim is not None and form[3] != dim):
            if t.dim() == 4 and table is not None and tuple(t.shape[1:3]) == (block_size, heads):
                return f"{show(t)}, pages with slots before heads: view it as [{t.shape[0]}, {block_size}, N*D]"
            wanted = " ".join(geometry.WORDS.get(layout_of_rows, "blocks N D/d0 slots d0").split()).replace(" ", ", ")
            return f"{show(t)} for [{wanted}] with {heads} heads of {dim or 'as many'} elements"
    return True


def counted(key: Several, layout: str, batch: int | None, heads: int, table: Tensor | None) -> Outcome:
    """True (else the fault as text) if keys are one tensor for the batch, one per sequence, or (with a page table) one
    pool of pages. batch: the number of sequences that padded keys must have; layout, heads: of the keys."""
    forms = [form_of(t, _layout(t, layout, table), heads) or (0, 0, 0, 0) for t in members(key)]
    if table is not None or geometry.of_inputs(layout) not in ("BSH", "BSND", "BNSD"):
        return len(forms) == 1 or f"{len(forms)} tensors"
    if len(forms) == 1:
        return forms[0][0] == batch or f"batch {forms[0][0]} for {batch} sequences"
    one = all(form[0] == 1 for form in forms)
    return (
        len(forms) == batch and one
    ) or f"{len(forms)} tensors for {batch} sequences, batch {forms[0][0]} in the first"


def fragments_fit(key: Several) -> Outcome:
    """True (else the fault as text) if fragments in the format NZ [.., fragments, tokens, width] have 32 bytes."""
    for t in members(key):
        if t.dim() == 5 and t.shape[4] * t.element_size() != 32:
            return f"{show(t)}, fragments of {t.shape[4] * t.element_size()} bytes"
    return True


def lies_as(rows: Several, key: Several, layout: str, heads: int, dim: int | None, table: Tensor | None) -> Outcome:
    """True (else the fault as text) if tensors match those of keys in batch or pages, heads and tokens, and have `dim`
    elements (None: as many as the first tensor)."""
    if len(members(rows)) != len(members(key)):
        return f"{len(members(rows))} tensors beside {len(members(key))}"
    for one, other in zip(members(rows), members(key), strict=True):
        if table is not None and one.dim() != other.dim():
            return f"{show(one)} beside {show(other)}"
        form, beside = (form_of(t, _layout(t, layout, table), heads) for t in (one, other))
        dim = form[3] if dim is None and form is not None else dim
        if form is None or form[3] != dim or (beside is not None and form[:3] != beside[:3]):
            return f"{show(one)} beside {show(other)}"
    return True


def prefix_fits(prefix: Tensor, key: Several, layout: str, heads: int, dim: int | None) -> Outcome:
    """True (else the fault as text) if a shared prefix is one sequence with the keys' heads, dtype and elements."""
    form = form_of(prefix, geometry.of_inputs(layout), heads)
    fits = form is not None and form[:2] == (1, heads) and (dim is None or form[3] == dim)
    if fits and prefix.dtype == members(key)[0].dtype:
        return True
    return f"{show(prefix)} beside {show(key)}"


def of_elements(rows: Tensor, layout: str, heads: int) -> int:
    """Returns the number of elements of a row of a tensor in a layout with `heads` heads; 0 if its shape is wrong."""
    form = form_of(rows, geometry.of_inputs(layout), heads)
    return form[3] if form else 0


def contiguous_rows(rows: Several) -> bool:
    """True if the rows of one or several tensors are contiguous."""
    return all(t.stride(-1) == 1 or t.shape[-1] < 2 for t in members(rows))


# -------------------------------------------------------------------------------------------------------------- lengths


def ends_fit(ends: np.ndarray, tokens: int) -> Outcome:
    """True (else the fault as text) if cumulative ends begin at 0 or above, never fall, and are at most `tokens`."""
    falls = np.flatnonzero(ends < np.append(0, ends)[: len(ends)])
    if len(falls):
        b = int(falls[0])
        return f"{ends[b]} after {ends[b - 1] if b else 0} at sequence {b}"
    return len(ends) == 0 or int(ends[-1]) <= tokens or f"{ends[-1]} at the end of {tokens} rows"


def tokens_of(key: Several, layout: str, heads: int) -> int:
    """Returns the number of tokens of a packed key tensor in a layout, which has `heads` heads."""
    form = form_of(members(key)[0], geometry.of_inputs(layout), heads)
    return form[2] if form else 0


def one_per_sequence(lengths: np.ndarray, batch: int) -> Outcome:
    """True (else the fault as text) if there is a length per sequence, or one for all."""
    return len(lengths) == 1 or len(lengths) >= batch or f"{len(lengths)} lengths for {batch} sequences"


def ended(q_len: np.ndarray, rows: int, what: str) -> Outcome:
    """True (else error text) if the lengths q_len add up to `rows`, the rows of a tensor that errors call `what`."""
    covered = int(q_len.sum())
    return covered == rows or f"{rows} {what} rows, lengths end at {covered}"


def no_more_rows(q_len: np.ndarray, visible: np.ndarray) -> Outcome:
    """True (else error text) if no sequence has more query rows (q_len) than visible keys (visible), both [B]."""
    bad = np.flatnonzero(q_len > visible)
    return len(bad) == 0 or f"{q_len[bad[0]]} rows over {visible[bad[0]]} keys in sequence {bad[0]}"


# ----------------------------------------------------------------------------------------------------- masks and biases


def mask_fits(
    mask: Tensor, kind: str, batch: int, rows: int, columns: int, packed: bool, one_token: bool, q_len: np.ndarray
) -> Outcome:
    """True (else the fault as text) if a mask's shape fits its kind: "full", "triangle" (compressed), or "tree".
    rows, columns: the least sizes of its last axes; packed: sequences are packed; q_len: their query rows.
    one_token: True for a query of one token whose mode and window CANN ignores."""
    shape = list(mask.shape)
    if kind == "triangle":
        return is_triangle(mask) or f"{shape}"
    if kind == "tree":
        if packed:
            cells = int((q_len * q_len).sum())
            return shape == [cells] or f"{shape} for {cells} elements"
        return (mask.dim() == 3 and shape == [batch, rows, rows]) or f"{shape} for [{batch}, {rows}, {rows}]"
    if one_token and mask.dim() == 2:
        fits = shape[0] in (1, batch) and shape[1] >= columns
        return fits or f"{shape} for {batch} sequences and {columns} keys"
    leading = shape[:-2]
    if mask.dim() not in (2, 3, 4) or (leading and leading[0] not in (1, batch)):
        return f"{shape} for {batch} sequences, {rows} rows and {columns} keys"
    if mask.dim() == 4 and shape[1] != 1:
        return f"{shape}, with heads: all heads share a mask, axis 1 must be 1"
    if shape[-2] == 1 < rows:
        return f"{shape}: repeat it over the query rows, {rows} of them, or use actual_seq_lengths_kv"
    if shape[-2] < rows or shape[-1] < columns:
        return f"{shape} for {rows} rows and {columns} keys"
    return True


def bias_fits(bias: Tensor, batch: int, heads: int, rows: int, columns: int) -> Outcome:
    """True (else the fault as text) if a bias is [B or 1, N1, rows or 1, columns], or has more rows and columns."""
    shape = list(bias.shape)
    if bias.dim() != 4:
        return f"{len(shape)} axes {shape}"
    if shape[1] != heads:
        return f"{shape}: axis 1 must be N ({heads}), got {shape[1]}" + (": repeat it per head" * (shape[1] == 1))
    if shape[0] not in (1, batch) or (shape[2] != 1 and shape[2] < rows) or shape[3] < columns:
        return f"{shape} for {batch} sequences, {rows} rows and {columns} keys"
    return True


def meets(mode: int, pre: int, next_: int, rows: np.ndarray, keys: np.ndarray) -> Outcome:
    """True (else the fault as text) if the window of pre and next_ tokens meets the score matrix of each sequence with
    rows. mode: sparse_mode, which aligns the window; rows, keys: lengths per sequence."""
    for b in np.flatnonzero(rows):
        beyond = -next_ >= (rows[b] if mode == 0 else keys[b]) if next_ < 0 else False
        before = -pre >= (keys[b] if mode == 0 else rows[b]) if pre < 0 else False
        if beyond or before:
            return f"pre {pre} and next {next_} for {rows[b]} rows and {keys[b]} keys of sequence {b}"
    return True


def may_empty(mode: int, kind: str, pre: int, next_: int, rows: np.ndarray, keys: np.ndarray) -> bool:
    """True if, by the sparse mode and its window of pre and next_ tokens, some row may have no visible key.
    kind: the kind of mask, "none", "full", "triangle" or "tree"; rows, keys: lengths per sequence."""
    beyond = keys - rows
    match mode:
        case 0:
            result = ((rows - keys - pre > 0) | (next_ < 0)) & (kind == "full")
        case 3:
            result = beyond < 0
        case 4:
            result = (pre < 0) | (next_ + beyond < 0)
        case _:
            result = np.zeros(1, bool)
    return bool(np.any(result))


def hides_nothing(mask: Tensor, pre: int, next_: int) -> Outcome:
    """True (else the fault as text) if every key that a full mask leaves visible is in the window of `pre` tokens
    before and `next_` tokens after the diagonal from the upper left corner."""
    if min(pre, next_) >= UNLIMITED:
        return True
    row = torch.arange(mask.shape[-2], device=mask.device)[:, None]
    key = torch.arange(mask.shape[-1], device=mask.device)
    outside = (mask == 0) & ((key < row - pre) | (key > row + next_))
    return not bool(outside.any()) or f"a visible element outside the window, at {outside.nonzero()[0].tolist()}"


def is_causal(mask: Tensor) -> Outcome:
    """True (else the fault as text) if a compressed mask has ones above its diagonal, and zeros elsewhere."""
    square = mask.reshape(geometry.TRIANGLE, geometry.TRIANGLE) != 0
    if torch.equal(square, triangle()[: geometry.TRIANGLE].to(mask.device)):
        return True
    upside = any(torch.equal(square, torch.ones_like(square).tril_(edge)) for edge in (0, -1))
    return "one that hides the past and shows the future" if upside else f"{show(mask)} with other content"


# ------------------------------------------------------------------------------------------------------------- integers


def integers(rows: Several) -> bool:
    """True if tensors store int8, or eight int4 in each int32."""
    return members(rows)[0].dtype in (torch.int8, torch.int32)


def joint_fits(scale: Tensor, mode: int, heads: int, dim: int, dim_v: int, batch: int, columns: int) -> Outcome:
    """True (else the fault as text) if antiquant_scale, which has the scales of keys (index 0 of axis 0) and of values
    (index 1), has a shape that the mode, 1 per token, else per channel, accepts; heads, dim, dim_v: key heads and
    elements; columns: keys per sequence."""
    shape = list(scale.shape)
    if mode == 1:
        fits = len(shape) == 3 and shape[:2] == [2, batch] and shape[2] >= columns
        return fits or f"{shape} for [2, {batch}, at least {columns}]"
    channels = dim == dim_v and scale.numel() == 2 * heads * dim and 2 <= len(shape) <= 4
    return (shape[:1] == [2] and (channels or len(shape) == 1)) or f"{shape} with N={heads}, D={dim}"


def scale_fits(
    scale: Tensor, mode: int, heads: int, dim: int, batch: int, columns: int, blocks: int, slots: int
) -> Outcome:
    """True (else the fault as text) if dequantisation scales of keys or values have a shape that their mode accepts: 0
    per channel or one, 1 per token, 2 per head, 3 per head and token; in pages 4 per token, 5 per head and token.
    heads, dim: key heads and elements; columns: keys per sequence; blocks, slots: pages, and tokens of a page."""
    shape, size = list(scale.shape), scale.numel()
    wanted = {
        0: size in (1, heads * dim) and 1 <= len(shape) <= 4,
        1: shape[:-1] in ([batch], [1, batch]) and shape[-1] >= columns,
        2: shape == [heads],
        3: shape[:-1] == [batch, heads] and shape[-1] >= columns,
        4: shape == [blocks, slots],
        5: shape == [blocks, heads, slots],
    }
    axes = f"N={heads}, D={dim}, {batch} sequences of at most {columns} keys"
    return wanted.get(mode, False) or f"{shape} in mode {mode} with {axes}"


def scale_dtypes(mode: int, query: Tensor) -> tuple[str, ...]:
    """Returns the names of legal dtypes of dequantization scales: float32 in modes 1, 3, 4, 5, else query's dtype."""
    return ("float32",) if mode in (1, 3, 4, 5) else (dtype_text(query),)


def one_each(scales: Sequence[Tensor | None]) -> Outcome:
    """True (else the fault as text) if no scale is None, and each has one element."""
    if any(t is None for t in scales):
        return f"{sum(t is not None for t in scales)} of {len(scales)}"
    wrong = next((t for t in scales if t is not None and t.numel() != 1), None)
    return wrong is None or show(wrong)


def row_scale_fits(scale: Tensor, query: Tensor, layout: str, heads: int) -> Outcome:
    """True (else the fault as text) if scales, one per query row and head, have query's shape without its last axis."""
    shape = tuple(query.shape[:-1]) + ((heads,) if geometry.of_inputs(layout) == "BSH" else ())
    return tuple(scale.shape) == shape or f"{list(scale.shape)} for {list(shape)}"


def out_dtypes(query: Tensor, rope: Tensor | None, scale: Tensor | None) -> tuple[str, ...]:
    """Returns the names of attention_out's legal dtypes: int8 with quant_scale2 (scale); for an int8 query the dtype of
    query_rope (rope), or without it both 16-bit dtypes; else the query's."""
    if scale is not None:
        return ("int8",)
    if query.dtype != torch.int8:
        return (dtype_text(query),)
    return ("float16", "bfloat16") if rope is None else (dtype_text(rope),)


def number_fits(number: int | None, query: Tensor, rope: Tensor | None, scale: Tensor | None) -> Outcome:
    """True (else the fault as text) if `number`, torch's integer code of a dtype, is legal for attention_out; rope,
    scale: query_rope and quant_scale2. Any is legal if the query is floating-point and scale is None, because the call
    ignores it then."""
    dtype = geometry.OUT_DTYPES.get(number) if number is not None else None
    if number is None or (dtype and scale is None and query.dtype != torch.int8):
        return True
    wanted = out_dtypes(query, rope, scale)
    result = str(dtype or "no such dtype").removeprefix("torch.")
    return result in wanted or f"{number} ({result}), beside {' or '.join(wanted)}"


FUNCTIONS = (
    checks.FUNCTIONS | functions_in(globals()) | {"is_triangle": geometry.is_triangle, "of_inputs": geometry.of_inputs}
)

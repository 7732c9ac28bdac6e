"""Functions in rules of training attention: each returns True for a legal call, else False, or text with the value."""

from typing import Any

import numpy as np
import torch

from fusion_attention.contract import dtype_text, functions_in, trained
from fusion_attention.ir.bias import TABLE_ROWS
from fusion_attention.ir.mask import INFINITE, NONE_BLOCKED, TILE, tokens
from fusion_attention.ops.shared.checks import float32, stays_unread
from fusion_attention.ops.shared.cumulative_ends import last_end, lengths_of, rising
from fusion_attention.ops.shared.params import triangle
from fusion_attention.ops.shared.sparse_modes import mode_band
from fusion_attention.ops.training.statistics_order_check import own_matrix, statistics_in_order


def lengths(names: dict[str, Any]) -> dict[str, Any]:
    """Returns {name: value} derived from the arguments `names`: lengths per sequence, axis sizes, and kind of bias."""
    results: dict[str, Any] = {}
    if names["input_layout"] == "TND":
        q_len, kv_len = lengths_of(names["actual_seq_qlen"]), lengths_of(names["actual_seq_kvlen"])
        results = {"B": len(q_len), "S1": int(q_len.max()), "S2": int(kv_len.max())}
    else:
        q_len = np.full(names["B"], names["S1"], np.int64)
        kv_len = np.full(names["B"], names["S2"], np.int64)
    results |= {"q_len": q_len, "kv_len": kv_len}
    return results | {"pse_form": _pse_form({**names, **results})}


def _pse_form(names: dict[str, Any]) -> str:
    """Returns the kind of shape of an additive bias `pse`: "broadcast", "aligned", "blocks" ...; "" if illegal."""
    pse, batches = names["pse"], (1, names["B"])
    if pse is None or names["pse_type"] in (2, 3):
        return "none"
    heads, s1, s2 = names["N1"], names["S1"], names["S2"]
    is_matrix = pse.dim() == 4 and pse.shape[0] in batches and pse.shape[1] == heads and pse.shape[3] == s2
    if names["input_layout"] != "TND":
        if is_matrix and pse.shape[2] in (1, s1):
            return "broadcast"
        return "aligned" if is_matrix and pse.shape[2] == TABLE_ROWS <= s1 else ""
    if is_matrix and pse.shape[2] == TABLE_ROWS:
        return "aligned"
    # Flat, or 4-D if all sequences have the same length.
    if pse.dim() != 1 and not (is_matrix and pse.shape[0] == names["B"] and pse.shape[2] in (1, s1)):
        return ""
    if pse.numel() == heads * int((names["q_len"] * names["kv_len"]).sum()):
        return "blocks"
    return "row_blocks" if pse.numel() == heads * int(names["kv_len"].sum()) else ""


def dense_window(mode: int, pre: int, next_: int, rows: int, keys: int) -> bool | str:
    """True (else the fault as text) if a window around the diagonal, from the upper left (mode 0) or lower right (4)
    corner, leaves at least one of the rows x keys scores; pre, next_: its tokens before and behind the diagonal."""
    if not rows or not keys:
        return True
    shift = keys - rows if mode == 4 else 0
    left, right = tokens(pre) - shift, tokens(next_) + shift
    measured = f"pre_tokens={pre}, next_tokens={next_} (from the upper left corner: {left} and {right})"
    if left < 0 and right < 0:
        return measured + ", both negative"
    if left < 0 and (right < -left or -left >= keys):
        return measured + f", the left edge beyond the right one or beyond the {keys} keys"
    if right < 0 and (left < -right or -right >= rows):
        return measured + f", the right edge beyond the left one or above the {rows} rows"
    return True


def packed_window(mode: int, pre: int, next_: int, q_len: np.ndarray, kv_len: np.ndarray) -> bool | str:
    """True (else the fault as text) if a window leaves a visible key for every row of every packed sequence, as the
    chip requires; mode: sparse_mode; pre, next_: pre_tokens and next_tokens; q_len, kv_len: lengths per sequence."""
    given = f"pre_tokens={pre}, next_tokens={next_}"
    pre, next_ = tokens(pre), tokens(next_)
    items = np.flatnonzero(q_len)
    aligned_item = items[-1 if mode == 7 else 0] if len(items) else -1
    broken: list[tuple[Any, str]] = []
    if mode == 0:
        broken = [(next_ < 0 or (pre < 0 and next_ < -pre), "next_tokens >= max(0, -pre_tokens)")]
        broken += [((q_len > 0) & (kv_len + pre < q_len), "kv_len + pre_tokens >= q_len")]
    elif mode in (3, 7):
        broken = [(q_len > kv_len, "q_len <= kv_len")]
    elif mode == 4:
        broken = [(pre < 0 or (next_ < 0 and pre + next_ < 0), "pre_tokens >= max(0, -next_tokens)")]
        broken += [((q_len > 0) & (q_len - next_ > kv_len), "q_len - next_tokens <= kv_len")]
    if mode in (7, 8) and aligned_item >= 0:
        broken += [(pre < kv_len[aligned_item], f"pre_tokens >= kv_len of item {aligned_item}")]
        broken += [
            (
                q_len[aligned_item] - next_ > kv_len[aligned_item],
                f"q_len - next_tokens <= kv_len for item {aligned_item}",
            )
        ]
        broken += [(mode == 7 and next_ > 0, "next_tokens <= 0")]
    for result, rule in broken:
        if np.any(result):
            item = f"item {int(np.argmax(result))}: " if np.ndim(result) else ""
            return f"{item}{given} break {rule}"
    return True


def prefix_fits(prefix: np.ndarray | None, q_len: np.ndarray, kv_len: np.ndarray) -> bool | str:
    """True (else text) if there is a prefix (visible keys) per sequence, from max(0, kv_len - q_len) to kv_len."""
    if prefix is None or len(prefix) != len(q_len):
        return f"{'None' if prefix is None else f'{len(prefix)} values'} for {len(q_len)} sequences"
    low = np.where(q_len > 0, np.maximum(kv_len - q_len, 0), 0)
    bad = np.flatnonzero((prefix < low) | (prefix > kv_len))
    return len(bad) == 0 or f"prefix[{bad[0]}]={prefix[bad[0]]}, outside [{low[bad[0]]}, {kv_len[bad[0]]}]"


def prefixes_differ(prefix: np.ndarray | None) -> bool:
    """True if the numbers of leading keys that all rows of a sequence see (prefix, one per sequence) differ."""
    return prefix is not None and len(prefix) > 0 and bool(prefix.min() != prefix.max())


def table_reaches(
    mode: int, mask: torch.Tensor | None, pre: int, next_: int, prefix: Any, q_len: np.ndarray, kv_len: np.ndarray
) -> bool | str:
    """True (else the fault as text) if rows before the last 1024 see no key behind the diagonal: a compressed bias has
    no elements for these. Visible keys follow from sparse mode, mask, window (pre, next_), prefix and lengths."""
    _, hi, prefixes = mode_band(mode, mask is not None, pre, next_, prefix, q_len, kv_len)
    for b in np.flatnonzero(q_len > TABLE_ROWS):
        rows, diagonal = int(q_len[b]) - TABLE_ROWS, int(kv_len[b] - q_len[b])
        if hi[b] <= diagonal + 1 and prefixes[b] <= diagonal + 1:
            continue
        matrix = own_matrix(mask, int(b), q_len, kv_len) if mask is not None and mode in (0, 1, 5) else None
        if matrix is not None and matrix.is_meta:
            continue
        device = None if matrix is None else matrix.device
        row, key = torch.arange(rows, device=device)[:, None], torch.arange(int(kv_len[b]), device=device)
        visible = (key > row + diagonal) & (key < torch.clamp(row + int(hi[b]), min=int(prefixes[b])))
        if bool((visible if matrix is None else visible & (matrix[..., :rows, :] == 0)).any()):
            return f"sequence {b}: keys beyond the diagonal are visible to rows before the last {TABLE_ROWS}"
    return True


def known_form(form: str, pse: torch.Tensor, *axes: int) -> bool | str:
    """True if the additive bias `pse` has a legal shape, else its shape as text; form: from _pse_form, "" if illegal;
    axes: sizes B, N1, S1, S2."""
    sizes = ", ".join(f"{name}={size}" for name, size in zip(("B", "N1", "S1", "S2"), axes, strict=True))
    return form != "" or f"{list(pse.shape)} with {sizes}"


def positions(start: np.ndarray | None) -> bool:
    """True if the positions of the first row or key are None, or small enough that distances do not overflow."""
    return start is None or bool((np.abs(start) < INFINITE).all())


def tiles_fit(tiles: torch.Tensor, *sizes: int) -> bool | str:
    """True (else text) if `tiles` has a number per 128 x 128 tile of scores; sizes: B, N1, S1, S2; B, N1 may be 1."""
    batch, heads, *lengths = sizes
    shape, counts = tuple(tiles.shape), tuple(-(-n // TILE) for n in lengths)
    fits = len(shape) == 4 and shape[0] in (1, batch) and shape[1] in (1, heads) and shape[2:] == counts
    return fits or f"{list(shape)} for {[batch, heads, *counts]}"


def tiles_exist(tiles: torch.Tensor, count: int) -> bool | str:
    """True (else text) if each number in `tiles` is an index below count, or marks a fully hidden or visible tile."""
    if tiles.is_meta or not tiles.numel():
        return True
    numbers = tiles.numpy() if tiles.is_cpu else tiles.cpu().numpy()
    least, most = int(numbers.min()), int(numbers.max())
    if least >= NONE_BLOCKED and most < count:
        return True
    place = np.unravel_index(numbers.argmin() if least < NONE_BLOCKED else numbers.argmax(), numbers.shape)
    return f"{numbers[place]} at {[int(n) for n in place]}, of {count} tiles with bits"


def replays(seed: Any, offset: Any) -> bool:
    """True if seed and offset of a gradient call may be a forward's: seed is not None, and not both are 0."""
    return seed is not None and (isinstance(seed, torch.Tensor) or seed != 0 or offset != 0)


def countable(offset: torch.Tensor | None) -> bool | str:
    """True if a dropout offset is None, in [0, 2**32), or on the meta device; else the offset as text."""
    if offset is None or offset.is_meta or 0 <= int(offset) < 1 << 32:
        return True
    return str(int(offset))


def is_compressed_mask(mask: torch.Tensor, mode: int) -> bool:
    """False if a mask's content is not the triangle that CANN documents for sparse modes 2 to 4, or for mode 6.
    True without a comparison if the mask must not be read, as on some GPUs, or is not one mask for all heads."""
    if stays_unread(mask) or mask.shape[:-2].numel() != 1:
        return True
    documented = triangle()[: 3072 if mode == 6 else 2048]
    return torch.equal(mask.reshape(mask.shape[-2:]) != 0, documented.to(mask.device))


def window_holds_mask(mask: torch.Tensor, pre: int, next_: int, q_len: np.ndarray, kv_len: np.ndarray) -> bool | str:
    """True (else text) if every key j that a mask leaves visible to row i is in a window, i - pre <= j <= i + next_."""
    pre, next_ = tokens(pre), tokens(next_)
    longest = q_len.max(initial=0), kv_len.max(initial=0)
    alike = mask.shape[-2:] == longest and (mask.dim() == 2 or mask.shape[0] == 1)
    # Sequences of the same length read the same elements of a shared mask.
    _, several = np.unique(np.stack((q_len, kv_len)), axis=1, return_index=True)
    for b in np.sort(several) if alike else range(len(q_len)):
        matrix = own_matrix(mask, int(b), q_len, kv_len)
        row = torch.arange(matrix.shape[-2], device=mask.device)[:, None]
        key = torch.arange(matrix.shape[-1], device=mask.device)
        outside = ((matrix == 0) & ((key < row - pre) | (key > row + next_))).nonzero()
        if len(outside):
            return f"a visible element outside the window of sequence {b}, at {outside[0].tolist()} of its mask"
    return True


def is_shifted(table: torch.Tensor) -> bool:
    """True if a compressed bias is equal along its diagonals: each row is the previous one, shifted by a column."""
    return torch.equal(table[..., 1:, 1:].tril(), table[..., :-1, :-1].tril())


def has_dtype(tensor: torch.Tensor, words: str) -> bool:
    """True if the dtype of a tensor is among the names in `words`, such as "float16 bfloat16"."""
    return dtype_text(tensor) in words.split()


FUNCTIONS = functions_in(globals()) | {f.__name__: f for f in (rising, last_end, trained, statistics_in_order, float32)}

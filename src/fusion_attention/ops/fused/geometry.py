"""Derived values of a fused inference attention call: axes, lengths, visible keys, and the shapes of results.

A slot is the place of one token in a padded or paged tensor.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fusion_attention.contract import members
from fusion_attention.ir.mask import INFINITE, UNLIMITED
from fusion_attention.ops.shared.layouts import form_of
from fusion_attention.ops.shared.params import WORDS as WORDS
from fusion_attention.ops.shared.params import words_of

UNTRANSPOSED = ("BSH", "BSND", "BNSD")
MIXED = ("BNSD_BSND", "BSH_BNSD", "BSND_BNSD", "BSH_NBSD", "BSND_NBSD", "BNSD_NBSD")
PACKED = ("TND", "NTD", "NTD_TND", "TND_NTD")
LAYOUTS = (*UNTRANSPOSED, *MIXED, *PACKED, "NSD")
# Layouts of the versions without rope.
ROPELESS = (*UNTRANSPOSED, "BNSD_BSND", "TND", "NTD", "NTD_TND", "NSD")
# Layouts of PromptFlashAttention: of V1 and V2, and of V3, which has packed rows.
PROMPT = (*UNTRANSPOSED, "BNSD_BSND", "NSD", "SH")
PROMPT_PACKED = (*PROMPT, "TND")
TRIANGLE = 2048
# torch's numbers of dtypes, as npu_fused_infer_attention_score_v2 takes them.
OUT_DTYPES = {1: torch.int8, 5: torch.float16, 15: torch.bfloat16}


def of_inputs(layout: str) -> str:
    """Returns the layout of query, key and value in an input_layout: "BNSD" for "BNSD_BSND", "BSH" for "BSH"."""
    return layout.partition("_")[0]


def of_output(layout: str) -> str:
    """Returns the layout of attention_out in an input_layout: "BSND" for "BNSD_BSND", "BSH" for "BSH"."""
    return layout.rpartition("_")[2]


def words(side: str, dim: str, output: bool = False) -> dict[str, str]:
    """Returns {input_layout: names of axes, such as "B S1 N1 D"} of query (side "1") or key (side "2") tensors, or of
    the output; dim: name of the axis of a head's elements, such as "D"."""
    of = of_output if output else of_inputs
    return {layout: words_of(of(layout), side, dim) for layout in (*LAYOUTS, "SH")}


def lse_words() -> dict[str, str]:
    """Returns {input_layout: names of axes} of softmax_lse; the last, L, has 1 element (None: lse not requested)."""
    return {name: "T1 N1 L" if name in PACKED else "B N1 S1 L" for name in LAYOUTS}


def packed(layout: str) -> bool:
    """True if the sequences of a layout are concatenated along one axis."""
    return layout in PACKED or layout == "SH"


# --------------------------------------------------------------------------------------------------------------- cache


def page_layout(cache: torch.Tensor) -> str:
    """Returns the layout of a paged cache by its number of axes: 3 "BSH", 4 "BNSD", 5 "NZ" (fragments), else ""."""
    return {3: "BSH", 4: "BNSD", 5: "NZ"}.get(cache.dim(), "")


def key_layout(n: Mapping[str, Any], tensor: torch.Tensor) -> str:
    """Returns the layout, such as "BSH", of a key or value tensor, padded, packed or paged; `n`: arguments by name."""
    return of_inputs(n["input_layout"]) if n["block_table"] is None else page_layout(tensor)


# ------------------------------------------------------------------------------------------------------------- lengths


def _ends(given: np.ndarray) -> np.ndarray:
    """Returns the lengths of sequences from their cumulative ends `given`."""
    return np.diff(given, prepend=0)


def _spread(given: np.ndarray | None, most: np.ndarray) -> np.ndarray:
    """Returns a length per sequence, from the lengths `given`: a single one counts for all; sequences without a length
    (given is None, empty or too short) get the maximum in `most`."""
    result = most.copy()
    if given is not None and len(given):
        result[: len(given) if len(given) > 1 else None] = given[: len(most)]
    return result


def _sizes(n: dict[str, Any]) -> dict[str, Any]:
    """Returns {axis: size} of B, S1 and S2, from lengths among the arguments `n`, to generate example tensors."""
    layout = n["input_layout"]
    results: dict[str, Any] = {}
    for side, name in (("1", "actual_seq_lengths"), ("2", "actual_seq_lengths_kv")):
        given = n.get(name)
        if packed(layout) and given is not None and len(given):
            lengths = given if layout == "SH" else _ends(given)
            results |= {"B": len(given), f"S{side}": int(lengths.max())}
    return results


def _unused(padding: np.ndarray) -> int:
    """Returns the number of unused slots behind every sequence: `padding`'s element, at least 0; 0 if it is empty."""
    return max([0, *map(int, padding[:1])])


def _rows(n: dict[str, Any], batch: int, one_token: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns (number of query rows, slot of the first one) per sequence, from the arguments `n`; a slot is a row of
    the padded tensor. The slot is negative if left padding leaves too few slots. one_token: True for queries of one
    token whose lengths CANN ignores."""
    layout, given = n["input_layout"], n["actual_seq_lengths"]
    if layout == "SH":
        q_len = np.array([n["T1"]] if given is None else given, np.int64)
    elif packed(layout):
        q_len = _ends(given)
    else:
        most = np.full(batch, n["S1"], np.int64)
        q_len = most if one_token else _spread(given, most)
        padding = n["query_padding_size"]
        if padding is not None and not one_token:
            return q_len, most - _unused(padding) - q_len
    return q_len, np.zeros(batch, np.int64)


def _keys(n: dict[str, Any], batch: int, q_len: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, ...]:
    """Returns (number of keys, slot of the first key, number of slots) per sequence, from the arguments `n`; a slot
    stores one key. q_len: query rows per sequence; tokens: slots per sequence in each key tensor."""
    layout, given = n["input_layout"], n["actual_seq_lengths_kv"]
    first = np.zeros(batch, np.int64)
    if n["block_table"] is not None:
        capacity = np.full(batch, INFINITE, np.int64)
        return _spread(given, capacity), first, capacity
    if packed(layout):
        kv_len = _ends(given) if layout != "SH" else q_len if given is None else np.array(given, np.int64)
        return kv_len, first, kv_len
    capacity = np.array(np.broadcast_to(tokens, batch), np.int64)
    kv_len, padding = _spread(given, capacity), n["kv_padding_size"]
    if padding is not None and len(tokens) == 1:
        first = capacity - _unused(padding) - kv_len
    return kv_len, first, capacity


def prefix_length(n: Mapping[str, Any], heads: int) -> tuple[int, int]:
    """Returns (used keys, keys in the tensor) of the prefix shared by all sequences; n: arguments; heads: key heads."""
    prefix, given = n["key_shared_prefix"], n["actual_shared_prefix_len"]
    form = None if prefix is None else form_of(prefix, of_inputs(n["input_layout"]), heads)
    prefix_keys = form[2] if form else 0
    return (
        prefix_keys if given is None or len(given) == 0 else int(given[0])
    ) if prefix is not None else 0, prefix_keys


# ------------------------------------------------------------------------------------------------------- masks and band


def is_triangle(mask: torch.Tensor) -> bool:
    """True if a mask has the shape of a compressed mask, a 2048 x 2048 triangle with any leading axes of 1."""
    return mask.dim() in (2, 3, 4) and mask.shape[-2:] == (TRIANGLE, TRIANGLE) and mask.numel() == TRIANGLE**2


def _mask_kind(mask: torch.Tensor | None, mode: int, one_token: bool) -> str:
    """Returns the kind of a mask in CANN's sparse_mode: "none", "full" (an element per score), "triangle" (compressed,
    causal) or "tree". one_token: a query of one token, for which CANN reads no compressed mask."""
    if mask is None or (one_token and mode in (2, 3, 4) and is_triangle(mask)):
        return "none"
    if one_token:
        return "full"
    return "triangle" if mode in (2, 3, 4) else "tree" if mode == 9 else "full"


def visibility(n: Mapping[str, Any], one_token: bool) -> dict[str, Any]:
    """Returns {"mode", "pre", "next", "mask_kind"}, CANN's sparse mode, the window's tokens before and behind the
    diagonal, and the kind of mask, as they apply; n: arguments; one_token: True if CANN ignores mode and window."""
    mode, mask = n["sparse_mode"] % 10 if n["sparse_mode"] >= 10 else n["sparse_mode"], n["atten_mask"]
    windowed = not one_token and (mode == 4 or (mode == 0 and mask is not None))
    pre, next_ = (n["pre_tokens"], n["next_tokens"]) if windowed else (UNLIMITED, UNLIMITED)
    return {
        "mode": 0 if one_token else mode,
        "pre": int(np.clip(pre, -UNLIMITED, UNLIMITED)),
        "next": int(np.clip(next_, -UNLIMITED, UNLIMITED)),
        "mask_kind": _mask_kind(mask, mode, one_token),
    }


def geometry(n: dict[str, Any]) -> dict[str, Any]:
    """Returns {name: value} derived from shapes, lengths and modes in `n`, the arguments of fused inference attention.

    * B, S1, S2, N2, Dv, L: axes. S1: the largest number of rows of a sequence; S2: slots of a key tensor, or of a row
      of the page table.
    * q_len, kv_len: lengths per sequence in the arguments; capacity: slots per sequence; q_first, kv_first: slots of
      the first row and key; q_used, kv_used: lengths, but 0 if left padding leaves too few slots for the sequence.
    * common, prefix_keys: used keys of the shared prefix, and keys in its tensor.
    * one_token: True if the query has one token, and CANN ignores mode, window, and the query's lengths and padding.
    * mode, pre, next, mask_kind: sparse mode (10 to 14 are 0 to 4), window and kind of mask, with the rule for
      one-token queries applied. Without a mask, mode 4 has its window and mode 0 has none.
    * columns, rows: the smallest legal sizes of masks and biases.
    * cache_layout: layout of keys; blocks: pages of the cache; page: slots of a page.
    * padded: 1 if left padding leaves enough slots for every sequence; shape_out: shape of attention_out.
    """
    if "query" not in n:
        return _sizes(n)
    key, value = members(n["key"]), members(n["value"])
    layout, paged = n["input_layout"], n["block_table"] is not None
    heads = int(n["num_key_value_heads"] or n["N1"])
    results = [form_of(t, key_layout(n, t), heads) or (0, 0, 0, 0) for t in key]
    of_value = form_of(value[0], key_layout(n, value[0]), heads)
    tokens = np.array([form[2] for form in results], np.int64)
    dim_v = of_value[3] if of_value else n["D"]
    given = n["actual_seq_lengths"]
    batch = n["B"] if not packed(layout) else 1 if given is None else len(given)
    batch = 1 if layout == "NSD" else batch
    one_token = (
        layout in UNTRANSPOSED and n["S1"] == 1 and dim_v == n["D"] and n["query_rope"] is None and n["skips_modes"]
    )
    q_len, q_first = _rows(n, batch, one_token)
    kv_len, kv_first, capacity = _keys(n, batch, q_len, tokens)
    fits = (q_first >= 0) & (kv_first >= 0)
    kv_used, q_used = np.where(fits, kv_len, 0), np.where(fits, q_len, 0)
    common, prefix_keys = prefix_length(n, heads)
    rows = n["S1"] if not packed(layout) else int(q_len.max(initial=0))
    return {
        "B": batch,
        "S1": rows,
        "S2": n["block_table"].shape[1] * n["block_size"] if paged else int(tokens.max(initial=0)),
        "N2": heads,
        "Dv": dim_v,
        "L": 1 if n["softmax_lse_flag"] else None,
        "q_len": q_len,
        "kv_len": kv_len,
        "capacity": capacity,
        "q_first": np.maximum(q_first, 0),
        "kv_first": np.maximum(kv_first, 0),
        "q_used": q_used,
        "kv_used": kv_used,
        "common": common,
        "prefix_keys": prefix_keys,
        "one_token": one_token,
        **visibility(n, one_token),
        "rows": rows,
        "columns": common + int((np.maximum(kv_first, 0) + kv_used).max(initial=0)),
        "cache_layout": key_layout(n, key[0]),
        "blocks": results[0][0] if paged else 0,
        "page": results[0][2] if paged else 0,
        "padded": int(fits.all()),
        "shape_out": out_shape({**n, "num_key_value_heads": heads, "num_heads": n["N1"]}),
    }


# -------------------------------------------------------------------------------------------------------------- results


def _dim_v(n: Mapping[str, Any]) -> Any:
    """Returns the number of elements per head of values, an int, or a torch.SymInt in a trace; n: arguments by name."""
    value, heads = members(n["value"])[0], n["num_key_value_heads"] or n["num_heads"]
    each = 8 if value.dtype == torch.int32 else 1
    if n["block_table"] is not None and value.dim() == 5:
        return value.shape[2] * value.shape[4] * each
    joint = value.dim() == 3 if n["block_table"] is not None else "H" in of_inputs(n["input_layout"])
    return (value.shape[-1] // heads if joint else value.shape[-1]) * each


def out_shape(n: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns the shape of attention_out of a call with arguments `n`, whose sizes may be symbolic."""
    layout, query, heads = n["input_layout"], n["query"], n["num_heads"]
    size = dict(zip(WORDS[of_inputs(layout)].split(), query.shape, strict=True))
    dim = _dim_v(n)
    size |= {"N": heads, "D": dim, "N*D": heads * dim}
    return tuple(size[axis] for axis in WORDS[of_output(layout)].split())


def lse_shape(n: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns the shape of softmax_lse, which has no elements if not requested; n: the call's arguments."""
    if not n["softmax_lse_flag"]:
        return (0,)
    size = dict(zip(WORDS[of_inputs(n["input_layout"])].split(), n["query"].shape, strict=True))
    if n["input_layout"] in PACKED:
        return size["T"], n["num_heads"], 1
    return size.get("B", 1), n["num_heads"], size["S"], 1


def out_dtype(n: Mapping[str, Any]) -> torch.dtype:
    """Returns the dtype of attention_out that an operator with arguments `n` allocates."""
    query: torch.dtype = n["query"].dtype
    requested: torch.dtype | None = OUT_DTYPES.get(n["out_dtype"])
    if n["quant_scale2"] is not None:
        return requested or torch.int8
    if query != torch.int8:
        return query
    rope = n["query_rope"]
    return requested or (torch.float16 if rope is None else rope.dtype)

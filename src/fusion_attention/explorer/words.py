"""The names, rules and uses of CANN's mask modes (sparse_mode) as text.

python_to_javascript.py translates this module to JavaScript, so it uses only the syntax that that module supports.
"""

from collections.abc import Mapping
from typing import Any

from fusion_attention.explorer.visible import FULL_MODES, PREFIX_MODES, WINDOWED_MODES
from fusion_attention.ir.mask import INFINITE

# Keys are modes; -1 is a Band.
NAMES = {
    "0": "default",
    "1": "all",
    "2": "causal, upper left",
    "3": "causal, lower right",
    "4": "band, lower right",
    "5": "prefix, full mask",
    "6": "prefix, compressed",
    "7": "causal lower right, last cut",
    "8": "causal upper left, first cut",
    "9": "tree",
    "-1": "Band",
}
RULES = {
    "0": "A window around the diagonal that starts in the upper left corner: pre_tokens keys before it, "
    "next_tokens keys after it. Your mask removes keys of the window where it is 1.",
    "1": "A row sees each key where your mask is 0. pre_tokens and next_tokens are not read.",
    "2": "Row i sees the keys 0 to i. The diagonal starts in the upper left corner, so with more keys than rows no "
    "row sees the last keys.",
    "3": "The last row sees every key, and each row above it one key less: the diagonal ends in the lower right "
    "corner. With more rows than keys the first rows see no key.",
    "4": "A window around the diagonal that ends in the lower right corner: pre_tokens keys before it, next_tokens "
    "keys after it. pre_tokens = W - 1 and next_tokens = 0 are a sliding window of W keys.",
    "5": "Every row sees the first prefix keys, and the keys up to the diagonal that ends in the lower right "
    "corner. Your full mask removes further keys. Padded layouts only.",
    "6": "Every row sees the first prefix keys, and the keys up to the diagonal that ends in the lower right "
    "corner. The mask is the compressed mask of 3072 rows, whose content has no effect.",
    "7": "As mode 3, for a packed batch whose last sequence was cut between two devices: its diagonal moves by "
    "next_tokens keys (to the left if negative). Packed layout only.",
    "8": "As mode 2, for a packed batch whose first sequence was cut between two devices: its diagonal ends in the "
    "lower right corner, moved by next_tokens keys. Packed layout only.",
    "9": "The last keys, as many as there are rows, are a tree of drafted tokens: a row sees those where the mask is "
    "0, and all keys before them. Inference only.",
    "-1": "An interval of keys per row, in this library's own functions: two edges relative to a diagonal that starts "
    "at the first key or ends at the last key, and a prefix that every row sees in addition.",
}
USES = {
    "0": "sliding windows over prompts, or any mask of your own",
    "1": "masks of any form",
    "2": "training on complete sequences",
    "3": "training, decoding and prompts in chunks",
    "4": "sliding windows: Mistral, Gemma, gpt-oss",
    "5": "prefix language models with a mask tensor",
    "6": "prefix language models",
    "7": "ring attention and sequence parallelism, the front device",
    "8": "ring attention and sequence parallelism, the rear device",
    "9": "speculative decoding",
    "-1": "fa.attention and fa.decode_attention, without a mask tensor",
}


def reads(mode: int) -> dict[str, bool]:
    """Returns {argument: True if a sparse mode uses it} for pre, next, prefix and mask (its elements)."""
    return {
        "pre": mode in WINDOWED_MODES or mode == -1,
        "next": mode in WINDOWED_MODES or mode == -1,
        "prefix": mode in PREFIX_MODES or mode == -1,
        "mask": mode in FULL_MODES,
    }


def offset(name: str, by: int) -> str:
    """Returns the sum name + by as text: 'i + 3', 'i - 2' or 'i'."""
    if by == 0:
        return name
    return f"{name} + {by}" if by > 0 else f"{name} - {-by}"


def formula(p: Mapping[str, Any], b: int) -> str:
    """Returns the interval of keys j that query i of sequence b sees as text; p: lists lo, hi, ... from picture()."""
    lo, hi, prefix, keys = p["lo"][b], p["hi"][b], p["prefix"][b], p["kv_len"][b]
    left = "0" if lo <= -INFINITE or lo <= -p["q_len"][b] else f"max(0, {offset('i', lo)})"
    last = offset("i", hi - 1)
    if prefix > 0:
        last = f"max({prefix - 1}, {last})"
    right = str(keys - 1) if hi >= INFINITE else f"min({keys - 1}, {last})"
    text = f"{left} ≤ j ≤ {right}"
    if p["mask"] == "full":
        return text + ", where the mask is 0"
    return text + f", where the mask of the last {p['q_len'][b]} keys is 0" if p["mask"] == "tree" else text

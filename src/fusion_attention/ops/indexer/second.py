"""Definitions of CANN's second lightning indexer, whose keys may each stand for several tokens (compressed keys), in C
and in the Python package cann_ops_transformer."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from fusion_attention.contract import Array, Attr, Declared, Op, Tensor
from fusion_attention.ops.indexer.definitions import (
    CHOSEN,
    COUNT,
    FORMULA,
    FORWARD,
    HEADS,
    INDEXER_SIZES,
    KEY,
    NEUTRAL,
    SCORES,
    TEX,
    VALUES,
    WEIGHTS,
)
from fusion_attention.ops.indexer.lower import lower
from fusion_attention.ops.indexer.lowered_call import RESULTS, fresh
from fusion_attention.ops.shared import cu_seqlens, rules
from fusion_attention.ops.shared.params import one_of, spelled
from fusion_attention.ops.shared.prototypes import ON_DEVICE, of_cann
from fusion_attention.ops.sparse.checks import FUNCTIONS, PAGED
from fusion_attention.ops.sparse.definitions import LAYOUT, LAYOUTS, MODE, QUERY, TABLE
from fusion_attention.ops.sparse.rules import TABLE_LIMITS, TABLES

PAGES = "PA_BBND"  # these operators' name for the layout sparse.checks.PAGED


def _key_layout(names: Mapping[str, Any]) -> str:
    layout = str(names.get("layout_kv", ""))
    return PAGED if layout == PAGES else layout


def _offset_layout(names: Mapping[str, Any]) -> str:
    offset = names.get("index_offset")
    return "of sequences" if getattr(offset, "ndim", 0) == 1 else str(names.get("layout", ""))


# ---------------------------------------------------------------------------------------------------------- parameters

SIDES = (("q", "rows"), ("k", "keys"))
ENDS = tuple(cu_seqlens.ends_param(side, of) for side, of in SIDES)
USED = tuple(cu_seqlens.used_param(side, of) for side, of in SIDES)
RESIDUAL = Array(
    "residual",
    "Tokens of every sequence behind those of its last key: its tokens % cmp_ratio. Required if cmp_ratio is above 1 "
    "and mask_mode 3, otherwise None.",
    True,
    spelled="cmp_residual_k",
)
OFFSET = Tensor(
    "index_offset",
    "Added to the indices of a row except -1: a number for every row, or for every sequence.",
    True,
    spelled="output_idx_offset",
    dtypes="int32",
    shape={"BSND": "B S1 1", "TND": "T1 1", "of sequences": "R"},
    form=_offset_layout,
)
PAGE_TABLE = replace(TABLE, text=f"The pages of every sequence, for keys in layout {PAGES}.")
METADATA = Tensor("metadata", "Without effect: back ends here divide the work themselves.", True)
LONGEST = Attr("max_seqlen_q", "Without effect.", default=-1)
RATIO = Attr("ratio", "Tokens that a key stands for.", default=1, domain="1 <= ratio <= 1048576",
             spelled="cmp_ratio")  # fmt: skip
RETURN_VALUES = one_of("return_values", "1: return the scores of the selected keys.",
                       (0, 1), spelled="return_value")  # fmt: skip
PARAMS = (
    spelled(QUERY, "q"),
    spelled(KEY, "k", form=_key_layout),
    spelled(
        WEIGHTS, "w", text="Weight of every query head; a scale of the scores is multiplied into it.", dtypes="float32"
    ),
)
LAYOUTS_OF = (
    spelled(LAYOUT, "layout_q"),
    Attr("layout_kv", f"Axis order of keys: layout_q, or {PAGES}.", type=str, default="BSND",
         spelled="layout_k"),
)  # fmt: skip
OUTPUTS = (
    spelled(
        CHOSEN, "sparse_indices", text="The selected keys by descending score, then -1; -1 in rows of no sequence."
    ),
    spelled(
        VALUES, "sparse_values", text="The scores of the selected keys; -inf where an index is -1.", dtypes="float32"
    ),
)

# --------------------------------------------------------------------------------------------------------------- rules

PACKED_SAMPLE: dict[str, Any] = {"layout_kv": "TND", "cu_seqlens_q": [0, 3, 8], "cu_seqlens_k": [0, 5, 12]}
IN_PAGES = {"block_table": "2 M", "layout_kv": PAGES, "seqused_k": [6, 6]}
COMPRESSED = {"sparse_mode": 3, "ratio": 3, "residual": [0, 2]}
LENGTHS = (
    *cu_seqlens.rules_of("q", "T1", "layout", PACKED_SAMPLE),
    *cu_seqlens.rules_of("k", "T2", "layout_kv", PACKED_SAMPLE),
    rules.of_lengths(
        "cu_seqlens_q is None or cu_seqlens_k is None or len(cu_seqlens_q) == len(cu_seqlens_k)",
        "cu_seqlens_k: as many ends as cu_seqlens_q (both have a 0, then one end per sequence)",
        only=rules.PACKED,
        given=PACKED_SAMPLE,
        invalid={"cu_seqlens_k": [0, 12]},
    ),
    rules.needed(
        "seqused_k",
        "pages do not show where a sequence ends",
        text="the lengths of keys in pages",
        when=f"layout_kv == '{PAGES}'",
        given=IN_PAGES,
    ),
)
FORMS = (
    rules.keys_lie(PAGES),
    rules.tabled("block_table", PAGES, given=IN_PAGES, invalid={"block_table": None}),
    rules.meaning(
        "index_offset.dim() > 1 or len(index_offset) == len(q_len)",
        "index_offset: one number for every sequence (or one for every row: [B, S1, 1], packed [T1, 1])",
        given={"index_offset": "2"},
        invalid={"index_offset": "3"},
    ),
)
RESIDUALS = (
    rules.presence(
        "residual is not None or ratio <= 1 or sparse_mode != 3",
        "residual: one number per sequence if cmp_ratio is above 1 and mask_mode 3 (the tokens of each sequence % "
        "cmp_ratio)",
        given=COMPRESSED,
        invalid={"residual": None},
    ),
    rules.presence(
        "residual is None or ratio > 1 and sparse_mode == 3",
        "residual: None if cmp_ratio is 1 or mask_mode 0 (visible keys do not depend on it)",
        invalid={"residual": [0, 0]},
    ),
    rules.of_lengths(
        "one_each(residual, B, cu_seqlens_q)",
        "residual: one number per sequence (the tokens of each sequence % cmp_ratio)",
        given=COMPRESSED,
        invalid={"residual": [0, 0, 0]},
    ),
    rules.of_lengths(
        "residual is None or all(0 <= n < ratio for n in residual)",
        "residual: numbers from 0 to cmp_ratio - 1 (cmp_ratio tokens or more are further keys)",
        given=COMPRESSED,
        invalid={"residual": [0, 3]},
    ),
    rules.note(
        "residual is None or tokens_fit(q_len, kv_len, ratio, residual)",
        "residual: as many tokens as rows (it is the tokens of a sequence % cmp_ratio, not its keys % "
        "cmp_ratio: keys of later tokens would be visible)",
        given=COMPRESSED,
        invalid={"S1": 19},
    ),
)
LIMITS = (
    rules.no_float32("query"),
    rules.limit("N1 <= 64", "query (the chip takes no more heads)", invalid={"N1": 65}),
    rules.only_dim("D", 128, "query"),
    rules.limit("sparse_count <= 8192", "sparse_count (the chip takes no more)"),
    rules.limit("ratio <= 128", "ratio (the chip takes no more)", given=COMPRESSED),
)


def tokens_fit(q_len: np.ndarray, kv_len: np.ndarray, ratio: int, residual: np.ndarray) -> bool | str:
    """True unless a sequence of q_len rows and kv_len keys has 1 to ratio - 1 more tokens than rows; then error text. A
    sequence has kv_len * ratio + residual tokens. Such a difference indicates a residual that was computed from the
    number of keys instead of tokens."""
    tokens = kv_len * ratio + residual
    few = np.flatnonzero((q_len >= ratio) & (tokens > q_len) & (tokens < q_len + ratio))
    return not len(few) or f"{tokens[few[0]]} tokens and {q_len[few[0]]} rows of sequence {few[0]}"


def sequences_of(n: Mapping[str, Any]) -> dict[str, Any]:
    """Returns {name: numbers per sequence} derived from the arguments `n`: q_len and kv_len, the used rows and keys;
    q_capacity and k_capacity, those in memory, used or not; q_start and k_start, index of the first."""
    count = n["B"] if n["cu_seqlens_q"] is None else len(n["cu_seqlens_q"]) - 1
    result = {f"{side}_capacity": cu_seqlens.stored(n[f"cu_seqlens_{side}"], count, n[axis])
              for side, axis in (("q", "S1"), ("k", "S2"))}  # fmt: skip
    result |= {f"{side}_start": np.cumsum(result[f"{side}_capacity"]) - result[f"{side}_capacity"] for side in "qk"}
    if n["block_table"] is not None:
        result["k_capacity"] = np.full(count, n["block_table"].shape[1] * n["Ps"], np.int64)
    for side, length in (("q", "q_len"), ("k", "kv_len")):
        used = n[f"seqused_{side}"]
        result[length] = result[f"{side}_capacity"] if used is None else used
    return result | ({"B": count} if n["layout"] == "TND" else {})


def derive(n: dict[str, Any]) -> dict[str, Any]:
    """Returns {name: value} derived from the arguments `n`: lengths (sequences_of), and sizes of axes: K, the number of
    selected keys; Kv, the same, or None if their scores are not returned; S1 and S2, the largest lengths."""
    result, count = sequences_of(n), n["sparse_count"]
    result |= {"K": count, "Kv": count if n["return_values"] else None}
    if n["layout"] == "TND":
        result["S1"] = int(result["q_len"].max(initial=0))
    if n["layout_kv"] != "BSND":
        result["S2"] = int(result["kv_len"].max(initial=0))
    return result


# ------------------------------------------------------------------------------------------------- operator definitions

OF_TOKENS = FORMULA.replace(
    "for the visible keys j of the row", "for the keys j < (position + 1) // cmp_ratio (mask_mode 3), or all (0)"
)
V2 = of_cann(
    "aclnnLightningIndexerV2",
    "Selects the keys with the highest scores for each row; a key may stand for several tokens.",
    (
        *(*PARAMS, *ENDS, *USED, RESIDUAL, PAGE_TABLE, OFFSET, METADATA),
        *(spelled(COUNT, "topk"), LONGEST, *LAYOUTS_OF, replace(MODE, default=0, spelled="mask_mode"), RATIO),
        *(RETURN_VALUES, *OUTPUTS),
    ),
    (
        *(
            *LENGTHS,
            *FORMS,
            *RESIDUALS,
            *rules.group(*TABLES, given=IN_PAGES),
            *rules.group(*TABLE_LIMITS, given=IN_PAGES),
            HEADS,
        ),
        *(*SCORES[1:], replace(FORWARD[0], given={"return_values": 1}), FORWARD[1], *LIMITS),  # weights have one dtype
    ),
    formula=OF_TOKENS,
    tex=TEX,
    rulings=(6, 13, 17, 18, 20, 23, 43),
    layouts=LAYOUTS,
    layout_attr="layout",
    neutral={**NEUTRAL, "wide_values": True},
    derive=derive,
    functions={**FUNCTIONS, **cu_seqlens.FUNCTIONS, "tokens_fit": tokens_fit},
    lower=lower,
    results=RESULTS,
    fresh=partial(fresh, promoted=True),
    c=Declared(on_device=ON_DEVICE),
    repeats=True,
    sizes=INDEXER_SIZES,
    samples={"BSND": {"sparse_count": 8}, "TND": {"sparse_count": 8, **PACKED_SAMPLE}},
)
TORCH = V2.version(
    "cann_ops_transformer.lightning_indexer",
    V2.summary,
    keywords="cu_seqlens_q",
    returns="(sparse_indices, sparse_values): positions within the sequence, by descending score, and float32 scores, "
    "empty unless return_value is 1. Without gradients.",
    example="""\
>>> q, k, w = torch.randn(1, 9, 4, 16), torch.randn(1, 2, 1, 16), torch.rand(1, 9, 4)
>>> indices, _ = lightning_indexer(q, k, w, 2, cmp_residual_k=torch.tensor([1]), mask_mode=3, cmp_ratio=4)
>>> indices[0, 2:4, 0].tolist()
[[-1, -1], [0, -1]]""",
    params=(
        *(*PARAMS, spelled(COUNT, "topk"), *ENDS, *USED, RESIDUAL, PAGE_TABLE, OFFSET, METADATA, LONGEST, *LAYOUTS_OF),
        *(replace(MODE, default=0, spelled="mask_mode"), RATIO, RETURN_VALUES, *OUTPUTS),
    ),
)
ACLNN = (V2,)
RECORDS: tuple[Op, ...] = (V2, TORCH)

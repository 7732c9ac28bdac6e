"""CANN's SparseFlashMla and its gradient, as its package cann_ops_transformer calls them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fusion_attention.contract import Array, Attr, Bound, Rule, Tensor
from fusion_attention.ir.mask import UNLIMITED, Band
from fusion_attention.ops.compressed.call import LSE, OUT, FlashMla, replace_statistics
from fusion_attention.ops.compressed.fa_record import COMPRESSED_TABLE, KEY_COMPRESSED, LISTS, layout_of
from fusion_attention.ops.compressed.lower import call_of
from fusion_attention.ops.shared.params import TENSOR_FIRST, output, spelled
from fusion_attention.ops.shared.rules import invalid, limit, needed, of_lengths, presence, typed
from fusion_attention.ops.sparse.call import SparseBackward, fresh, fresh_gradients
from fusion_attention.ops.sparse.checks import FUNCTIONS, keys_in
from fusion_attention.ops.sparse.records import KEY, LAYOUT, NEUTRAL, QUERY, SINKS, STATISTICS, TABLE, V1

PAGES = "PA_BBND"
SIDES = (("q", "query"), ("ori_kv", "key"), ("cmp_kv", "key_compressed"))
INPUTS = ("query", "key", "key_compressed", "sinks")


def _key_layout(names: Mapping[str, Any]) -> str:
    return keys_in(names.get("layout", ""), None, names.get("block_table"))


def _ends(side: str, of: str) -> Array:
    text = f"Cumulative lengths of {of} rows, a 0 before them: TND alone, where they are needed."
    return Array(f"cu_seqlens_{side}", text, True)


def _used(side: str, of: str) -> Array:
    return Array(f"seqused_{side}", f"Lengths of {of} rows; pages: needed.", True)


def _mode(side: str, modes: str, bad: int) -> Attr:
    return Attr(f"{side}_mask_mode", modes, default=0, bad=bad)


CUMULATIVE = tuple(_ends(*side) for side in SIDES)
USED = tuple(_used(*side) for side in SIDES)
RESIDUAL = Array("cmp_residual_kv", "Tokens behind those of the last compressed key, of every sequence.", True)
METADATA = Tensor("metadata", "Without effect: nothing is shared out before a call.", True)
ORI_LISTS = replace(LISTS, name="ori_sparse_indices", spelled="", text="Lists of keys: not computed here.")
TOPK = tuple(
    Tensor(f"{side}_topk_length", "Entries of every row's list: not computed here.", True, dtypes="int32")
    for side in ("ori", "cmp")
)
SCALE = Attr("scale_value", "Factor on q . key; 1 unless it is said.", type=float, default=1.0, spelled="softmax_scale")
RATIO = Attr("ratio", "Tokens that a compressed key stands for.", default=1, domain="ratio >= 1", bad=0,
             spelled="cmp_ratio")  # fmt: skip
MODES = (
    Attr(
        "ori_mask_mode", "0: all keys; 3: causal; 4: a window.", default=0, domain="ori_mask_mode in (0, 3, 4)", bad=1
    ),
    Attr("cmp_mask_mode", "3: the compressed keys of closed groups, (position + 1) // cmp_ratio.", default=0),
    Attr("ori_win_left", "Keys before the row's own, in mode 4; -1: all.", default=-1),
    Attr("ori_win_right", "Keys behind the row's own, in mode 4; -1: all.", default=-1),
)
LAYOUTS_OF = (
    spelled(LAYOUT, "layout_q"),
    Attr("layout_kv", f"Axis order of key rows: as the queries', or {PAGES}.", type=str, default="BSND"),
)
VALUE_MODE = Attr("topk_value_mode", "1: lists hold positions.", default=1, domain="topk_value_mode == 1", bad=0)
RETURN_LSE = Attr("return_softmax_lse", "Return softmax_lse.", type=bool, default=False)
TENSORS = (
    spelled(QUERY, "q"),
    replace(KEY, spelled="ori_kv", text="Key rows, which are values too; needed.", form=_key_layout, optional=True),
    replace(KEY_COMPRESSED, spelled="cmp_kv", optional=True, form=layout_of),
    ORI_LISTS,
    spelled(LISTS, "cmp_sparse_indices"),
)
TABLES = (spelled(TABLE, "ori_block_table"), spelled(COMPRESSED_TABLE, "cmp_block_table"))
LSE_OUT = output(LSE, "log(sum(exp(s))) over both sources and the sink; 0 without keys.", STATISTICS, "float32")


# -------------------------------------------------------------------------------------------------------------- lengths


def ends_fit(ends: np.ndarray | None, tokens: int | None) -> bool | str:
    """Whether cumulative lengths begin with 0, never fall, and end with the tokens of their tensor."""
    if ends is None:
        return True
    if not len(ends) or ends[0] != 0:
        return "no 0 before them"
    if bool((np.diff(ends) < 0).any()):
        return "a length below 0"
    return int(ends[-1]) == (tokens or 0) or f"{ends[-1]} tokens in all, {tokens} in the tensor"


def used_fit(used: np.ndarray | None, batch: int | None, ends: np.ndarray | None, longest: int | None) -> bool | str:
    """Whether there is a length for every sequence, from 0 to the longest; None: packed rows do not show it."""
    if used is None:
        return True
    count = batch if ends is None else len(ends) - 1
    if len(used) != count:
        return f"{len(used)} lengths for {count} sequences"
    outside = np.flatnonzero((used < 0) | (used > (UNLIMITED if longest is None else longest)))
    return not len(outside) or f"{used[outside[0]]} of sequence {outside[0]}, outside [0, {longest}]"


def _length(n: dict[str, Any], side: str, padded: int | None, count: int) -> np.ndarray:
    ends, used = n[f"cu_seqlens_{side}"], n[f"seqused_{side}"]
    if used is not None:
        return np.asarray(used, np.int64)
    return np.full(count, padded or 0, np.int64) if ends is None else np.diff(ends)


def derive(n: dict[str, Any]) -> dict[str, Any]:
    """Lengths, axes, and the band that the modes stand for."""
    q_ends, packed = n["cu_seqlens_q"], n["layout"] == "TND"
    count = len(q_ends) - 1 if packed and q_ends is not None else n["B"] or 0
    q_len, kv_len, c_len = (
        _length(n, side, axis, count)
        for side, axis in zip(("q", "ori_kv", "cmp_kv"), (n["S1"], n["S2"], n["S3"]), strict=True)
    )
    left, right = (UNLIMITED if n[f"ori_win_{side}"] < 0 else n[f"ori_win_{side}"] for side in ("left", "right"))
    band = {0: Band.full(), 3: None, 4: Band.window(left, right)}.get(n["ori_mask_mode"])
    residual = n["cmp_residual_kv"]
    result = {"q_len": q_len, "kv_len": kv_len, "c_len": c_len, "band": band, "Dv": n["D"]}
    if n["ratio"] is None:
        result["ratio"] = 1
    result["residual"] = np.zeros_like(c_len) if residual is None else np.asarray(residual, np.int64)
    if packed:
        result |= {"B": len(q_len), "S1": int(q_len.max(initial=0))}
    for axis, lengths, table in (("S2", kv_len, "block_table"), ("S3", c_len, "compressed_table")):
        if packed or n[table] is not None:
            result[axis] = int(lengths.max(initial=0))
    return result


def call_of_gradient(bound: Bound) -> FlashMla:
    """The forward call that a bound gradient belongs to, with softmax_lse."""
    return call_of(bound, FlashMla).complete()


def lower(bound: Bound) -> FlashMla | SparseBackward:
    """A bound record, forward or gradient."""
    if "dout" not in bound.op.by_name:
        return call_of(bound, FlashMla)
    results = {OUT: bound["attention_in"], LSE: bound["softmax_lse"]}
    return call_of_gradient(bound).backward(results, {OUT: bound["dout"]})


def _fresh(n: Any) -> dict[str, torch.Tensor]:
    result = replace_statistics(fresh({**n, "value": None, "dim_v": 0}))
    return result if n["return_softmax_lse"] else {OUT: result[OUT]}


# ---------------------------------------------------------------------------------------------------------------- rules

IN_PAGES = {"layout_kv": PAGES, "block_table": "2 M", "compressed_table": "2 Mc", "seqused_ori_kv": [6, 6],
            "seqused_cmp_kv": [2, 2]}  # fmt: skip

RULES = (
    needed("key", "attention to compressed keys alone is sparse_attention", text="rows of keys"),
    *(
        of_lengths(
            f"ends_fit(cu_seqlens_{side}, {axis})",
            f"cu_seqlens_{side}",
            "a 0, then the end of every sequence",
            text="cumulative lengths of all rows of the tensor",
            only=("TND",),
            invalid={f"cu_seqlens_{side}": [0, 3, 999]},
        )
        for side, axis in (("q", "T1"), ("ori_kv", "T2"), ("cmp_kv", "T3"))
    ),
    *(
        of_lengths(
            f"seqused_{side} is None or layout != 'TND' or layout_kv == '{PAGES}' and '{side}' != 'q'",
            f"seqused_{side}",
            "cut the packed rows instead",
            text="None beside cumulative lengths",
            invalid={f"seqused_{side}": [1, 2]},
            only=("TND",),
        )
        for side, _ in SIDES
    ),
    *(
        of_lengths(
            f"cu_seqlens_{side} is None or cu_seqlens_q is None or len(cu_seqlens_{side}) == len(cu_seqlens_q)",
            f"cu_seqlens_{side}",
            "one end per sequence in all",
            text="as many ends as cu_seqlens_q has",
            only=("TND",),
            invalid={f"cu_seqlens_{side}": [0, tokens]},
        )
        for side, tokens in (("ori_kv", 12), ("cmp_kv", 4))
    ),
    *(
        of_lengths(
            f"used_fit({name}, B, None, {longest})",
            name,
            "one for each sequence",
            text="a length for every sequence, within its tensor",
            only=("BSND",),
            invalid={name: [1, 1, 99]},
        )
        for name, longest in (
            ("seqused_q", "S1"),
            ("seqused_ori_kv", "S2 if block_table is None else block_table.shape[1] * (Ps or 0)"),
            ("seqused_cmp_kv", "S3 if compressed_table is None else compressed_table.shape[1] * (Pcs or 0)"),
            ("cmp_residual_kv", "None"),
        )
    ),
    *(
        of_lengths(
            f"cu_seqlens_q is None or used_fit({name}, None, cu_seqlens_q, {longest})",
            name,
            "one for each sequence",
            text="a number for every sequence",
            only=("TND",),
            needs=() if name == "cmp_residual_kv" else ("block_table",),
            given={}
            if name == "cmp_residual_kv"
            else IN_PAGES | {"cu_seqlens_ori_kv": None, "cu_seqlens_cmp_kv": None},
            invalid={name: [1, 1, 1]},
        )
        for name, longest in (
            ("seqused_ori_kv", "None if block_table is None else block_table.shape[1] * (Ps or 0)"),
            ("seqused_cmp_kv", "None if compressed_table is None else compressed_table.shape[1] * (Pcs or 0)"),
            ("cmp_residual_kv", "None"),
        )
    ),
    Rule(
        "len(block_table) == len(q_len)",
        "block_table",
        "a row of pages for each",
        text="one row per sequence",
        when="block_table is not None",
        given=IN_PAGES,
        invalid={"block_table": "3 M", "compressed_table": "3 Mc"},
    ),
    *(
        Rule(
            f"pages_exist({table}, {lengths}, {size}, {pages})",
            table,
            "entries behind a sequence's last page are not read",
            text="numbers of pages",
            when=f"{table} is not None and len({table}) == len(q_len)",
            reads=True,
            given=IN_PAGES,
            invalid={pages: 0},
        )
        for table, lengths, size, pages in (
            ("block_table", "kv_len", "Ps", "P"),
            ("compressed_table", "c_len", "Pcs", "Pc"),
        )
    ),
    *(
        needed(
            f"seqused_{side}",
            "pages do not show where a sequence ends",
            text="the lengths of keys in pages",
            when=f"layout_kv == '{PAGES}' and {tensor} is not None",
            given=IN_PAGES,
        )
        for side, tensor in SIDES[1:]
    ),
    needed(
        "cu_seqlens_q",
        "packed rows do not show where a sequence ends",
        text="the ends of packed sequences",
        only=("TND",),
    ),
    typed(
        f"layout_kv in (layout, '{PAGES}')",
        "layout_kv",
        "keys lie as queries do, or in pages",
        text=f"what the queries have, or {PAGES}",
        when="layout in ('BSND', 'TND')",
        invalid={"layout_kv": "BNSD"},
    ),
    presence(
        f"(block_table is not None) == (layout_kv == '{PAGES}')",
        "block_table",
        "it says which pages a sequence has",
        text=f"a table where keys are {PAGES}, and nowhere else",
        invalid={"block_table": "2 M"},
    ),
    presence(
        f"key_compressed is None or (compressed_table is not None) == (layout_kv == '{PAGES}')",
        "compressed_table",
        "it says which pages a sequence has",
        text=f"a table where keys are {PAGES}, and nowhere else",
        invalid={"compressed_table": "2 Mc"},
    ),
    *(
        presence(
            f"{name} is None",
            name,
            "lists of keys, and lengths of lists, are not computed here",
            text="None",
            invalid={name: sample},
        )
        for name, sample in (
            ("ori_sparse_indices", "B S1 1 K"),
            ("ori_topk_length", "B S1 1"),
            ("cmp_topk_length", "B S1 1"),
        )
    ),
    presence(
        "sparse_indices is None or key_compressed is not None",
        "sparse_indices",
        "a list names compressed keys",
        text="lists beside cmp_kv alone",
        invalid={"key_compressed": None, "sparse_indices": "B S1 1 K"},
    ),
    Rule(
        "cmp_mask_mode == (0 if key_compressed is None else 3)",
        "cmp_mask_mode",
        "other rows of compressed keys are not computed here",
        text="3 with cmp_kv, 0 without",
        invalid={"cmp_mask_mode": 0},
    ),
    Rule(
        "ori_mask_mode == 4 or (ori_win_left, ori_win_right) == (-1, -1)",
        "ori_win_left",
        "4 is a window",
        text="-1, and ori_win_right likewise, but in ori_mask_mode 4",
        invalid={"ori_mask_mode": 3, "ori_win_left": 4},
    ),
    Rule("N2 == 1", "key", "one key head serves all query heads", invalid={"N2": 2}),
    Rule(
        "all(0 <= n < ratio for n in residual)",
        "cmp_residual_kv",
        "more tokens would close another compressed key: tokens % cmp_ratio",
        text="numbers from 0 to cmp_ratio - 1",
        when="key_compressed is not None",
        invalid={"cmp_residual_kv": [9, 9]},
    ),
    Rule(
        "sparse_indices is None or entries_fit(sparse_indices, layout, q_len, c_len, 1)",
        "sparse_indices",
        "positions count from the sequence's own first compressed key; -1 ends a list",
        text="-1 or the number of a compressed key of the row's own sequence",
        reads=True,
        invalid={"sparse_indices": torch.full((2, 4, 1, 2048), 90, dtype=torch.int32)},
    ),
    limit("D == 512", "query", "the chip takes no other dim", invalid={"D": 64}),
    limit("sinks is not None", "sinks", "the chip takes no call without them", text="sinks", invalid={"sinks": None}),
)
FORMULA = """s_j = softmax_scale * q . x_j     over the rows x of ori_kv in the band, and of cmp_kv that the row sees
out = sum_j exp(s_j - lse) x_j,  lse = log(sum_j exp(s_j) + exp(sink))"""
SAMPLE: dict[str, Any] = {
    **dict.fromkeys(("sinks", "key", "key_compressed"), True),
    "ratio": 3,
    "cmp_mask_mode": 3,
    "cmp_residual_kv": [0, 0],
    "ori_mask_mode": 4,
    "ori_win_left": 2,
    "ori_win_right": 0,
}
PACKED = {
    "layout_kv": "TND",
    "cu_seqlens_q": [0, 3, 8],
    "cu_seqlens_ori_kv": [0, 5, 12],
    "cu_seqlens_cmp_kv": [0, 1, 4],
}
TORCH = V1.version(
    "cann_ops_transformer.sparse_flash_mla",
    "Attention to a window of keys and to compressed keys in one softmax; keys are values.",
    source="CANN's cann_ops_transformer",
    params=(
        *TENSORS,
        *TABLES,
        *CUMULATIVE,
        *USED,
        RESIDUAL,
        *TOPK,
        SINKS,
        METADATA,
        SCALE,
        RATIO,
        *MODES,
        *LAYOUTS_OF,
        VALUE_MODE,
        RETURN_LSE,
        output(OUT, "The output rows.", {"BSND": "B S1 N1 D", "TND": "T1 N1 D"}),
        LSE_OUT,
    ),
    rules=RULES,
    formula=FORMULA,
    tex="",
    rulings=(12,),
    neutral={
        **NEUTRAL,
        **dict.fromkeys(("S3", "T3", "Pc", "Pcs", "Mc", "value", "value_compressed", "compressed_table")),
        "cumulative": True,
        "sparse_mode": 3,
        "ori_mask_mode": 0,
        "ori_win_left": -1,
        "ori_win_right": -1,
        "ratio": 1,
    },
    derive=derive,
    functions={**FUNCTIONS, "ends_fit": ends_fit, "used_fit": used_fit},
    lower=lower,
    results=(OUT, LSE),
    fresh=_fresh,
    trains={OUT: INPUTS, LSE: INPUTS},
    sizes={**V1.sizes, "N2": 1, "S3": 2, "T3": 4, "Pc": 3, "Pcs": 16, "Mc": 1},
    samples={"BSND": SAMPLE, "TND": {**SAMPLE, **PACKED}},
    keywords="",
    declared=dict.fromkeys([p.name for p in (*CUMULATIVE, *USED, RESIDUAL)], TENSOR_FIRST),
    returns="(attn_out, softmax_lse); softmax_lse is a 0 unless it is asked for.",
    example="",
)
ROWS = {"BSND": "B S1 N1 D", "TND": "T1 N1 D"}
DOUT = Tensor("dout", "Gradient of the output.", dtypes="=query", shape=ROWS)
OUT_IN = Tensor("attention_in", "The forward's output.", dtypes="=query", shape=ROWS, spelled="attn_out")
LSE_IN = Tensor(LSE, "As the forward returned it.", dtypes="float32", shape=STATISTICS, make=torch.zeros)
GRADIENTS = (
    output("dquery", "Gradient of q.", ROWS),
    output("dkey", "Gradient of ori_kv, as keys and as values.", KEY.shape, form=_key_layout),
    output("dkey_compressed", "Gradient of cmp_kv.", KEY_COMPRESSED.shape, form=layout_of),
    output("dsinks", "Gradient of sinks.", "N1", "float32"),
)
TORCH_GRAD = TORCH.version(
    "cann_ops_transformer.sparse_flash_mla_grad",
    "Gradients of sparse_flash_mla, from its output and its softmax_lse.",
    params=(
        TENSORS[0],
        DOUT,
        OUT_IN,
        LSE_IN,
        *TENSORS[1:],
        *CUMULATIVE,
        *USED,
        RESIDUAL,
        *TOPK,
        SINKS,
        METADATA,
        replace(SCALE, default=None, text="Factor on q . key; None: 1 / sqrt(D)."),
        replace(RATIO, default=None, domain="ratio is None or ratio >= 1"),
        *MODES,
        *LAYOUTS_OF,
        *GRADIENTS,
    ),
    rules=(
        *RULES,
        invalid(
            "N2 * G == N1",
            "softmax_lse",
            "it has a number for every query head",
            text="a last axis of N1",
            when="N2 == 1",
            invalid={"G": 3},
        ),
    ),
    neutral={**TORCH.neutral, "return_softmax_lse": True},
    results=tuple(p.name for p in GRADIENTS),
    fresh=fresh_gradients,
    trains={},
    returns="(dq, dori_kv, dcmp_kv, dsinks); absent ones are empty.",
)
RECORDS = (TORCH, TORCH_GRAD)

"""Legality rules on mask, sparse mode, window, additive bias (pse_shift) and sink of fused inference attention."""

from typing import Any

import torch

from fusion_attention.ir.mask import UNLIMITED
from fusion_attention.ops.fused.geometry import PACKED
from fusion_attention.ops.fused.rules import PAGES, ROPE
from fusion_attention.ops.shared.rules import content, limit, meaning, note, typed

FULL: dict[str, Any] = {"atten_mask": "S1 S2", "next_tokens": UNLIMITED}
SQUARE: dict[str, Any] = {"atten_mask": "2048 2048", "sparse_mode": 3}
TREE: dict[str, Any] = {**ROPE, "atten_mask": "B S1 S1", "sparse_mode": 9}
PSE: dict[str, Any] = {"pse_shift": "B N1 S1 S2"}
VISIBLE_KEYS = "common + kv_used"
CAUSAL = "torch.ones(2048, 2048, dtype=torch.bool).triu(1), whatever the lengths"

MODES = (
    meaning(
        "atten_mask is not None",
        f"atten_mask: a mask, which every sparse_mode but 0 needs (for modes 2, 3 and 4 it is {CAUSAL})",
        when="mode != 0",
        needs=("sparse_mode",),
        given=SQUARE,
        invalid={"atten_mask": None},
    ),
    meaning(
        "mask_fits(atten_mask, mask_kind, B, S1, columns, False, False, q_used)",
        f"atten_mask: the 2048 x 2048 mask that sparse_mode 2, 3 and 4 take ({CAUSAL})",
        when="mask_kind == 'triangle'",
        needs=("sparse_mode",),
        given=SQUARE,
        invalid={"atten_mask": "S1 S2"},
    ),
    meaning(
        "mask_fits(atten_mask, mask_kind, B, S1, columns, T1 is not None, one_token, q_used)",
        "atten_mask: shape [rows, keys], [B or 1, rows, keys] or [B or 1, 1, rows, keys]; for one-token queries [B, "
        "keys], [B, 1, keys] or [B, 1, 1, keys] (1 hides a key; columns are the keys of a shared prefix, then the "
        "tokens of the cache)",
        when="mask_kind == 'full'",
        given=FULL,
        invalid={"atten_mask": "B 1 1 S2"},
    ),
    meaning(
        "mask_fits(atten_mask, mask_kind, B, S1, columns, T1 is not None, one_token, q_used)",
        "atten_mask: shape [B, rows, rows], packed [the sum of rows * rows] (columns are the last keys of every "
        "sequence, as many as query rows; 1 hides a key)",
        when="mask_kind == 'tree'",
        needs=("block_table",),
        given=TREE,
        invalid={"atten_mask": "S1 S1"},
    ),
    meaning(
        f"no_more_rows(q_used, {VISIBLE_KEYS})",
        "actual_seq_lengths_kv: at least as many keys as query rows under a tree mask (a tree's rows are the newest "
        "keys)",
        when="mode == 9",
        needs=("block_table",),
        given=TREE,
        invalid={"actual_seq_lengths_kv": [2, 6]},
    ),
    meaning(
        "pre + next >= 0",
        "pre_tokens: a window that is not empty: pre_tokens + next_tokens >= 0 (else no row has a visible key; "
        "2147483647 is no limit)",
        when="mask_kind != 'none'",
        given=FULL,
        invalid={"pre_tokens": 1, "next_tokens": -2},
    ),
    limit(
        f"meets(mode, pre, next, q_used, {VISIBLE_KEYS})",
        "pre_tokens: a window that overlaps the score matrix of every sequence (the chip takes no other window)",
        when="mode in (0, 4) and mask_kind != 'none' and pre + next >= 0",
        given={**FULL, "atten_mask": torch.ones(3, 6, dtype=torch.bool)},
        invalid={"pre_tokens": 9, "next_tokens": -3},
    ),
    limit(
        f"no_more_rows(q_used, {VISIBLE_KEYS})",
        "sparse_mode: no more query rows than keys in mode 3 of packed rows (the chip refuses rows without a key)",
        when="mode == 3",
        only=PACKED,
        given=SQUARE,
        invalid={"actual_seq_lengths_kv": [2, 12]},
    ),
    limit(
        "not (one_token and sparse_mode in (2, 3, 4) and mask_kind == 'none')",
        "atten_mask: no 2048 x 2048 mask for one-token queries (a one-token query sees every key in any mode, and the "
        "chip would read this mask's first row)",
        when="atten_mask is not None and sparse_mode != 2 and sparse_mode != 4",
        needs=("block_table",),
        given={**SQUARE, "S1": 3},
        invalid={"S1": 1},
    ),
    note(
        "not one_token or sparse_mode not in (2, 4)",
        "sparse_mode: mode 0, 1 or 3 for one-token queries (one-token queries see every key except in layout TND; use "
        "TND or a mask for a window)",
        needs=("block_table",),
        invalid={"S1": 1, "sparse_mode": 4},
    ),
)
MASK_SHAPES = (
    limit(
        "not one_token or atten_mask.shape[0] == B",
        "atten_mask: [B, keys], [B, 1, keys] or [B, 1, 1, keys] (the chip requires a row per sequence)",
        when="mask_kind == 'full'",
        needs=("block_table",),
        given={"S1": 1, "atten_mask": "B S2"},
        invalid={"atten_mask": "1 S2"},
    ),
    limit(
        "atten_mask.shape[-1] >= block_table.shape[1] * block_size",
        "atten_mask: columns for every page of the table (the chip reads complete pages)",
        when="block_table is not None and mask_kind == 'full'",
        needs=("block_table",),
        given={**PAGES, "atten_mask": "B S1 32"},
        invalid={"block_table": "B 3"},
    ),
    limit(
        "mask_kind != 'full' or one_token or atten_mask.dim() != 2 or (D == Dv and query_rope is None)",
        "atten_mask: a mask with a batch axis beside rope parts, or if D is not Dv (the chip takes a mask of two axes "
        "in no such call)",
        when="atten_mask is not None",
        given=FULL,
        invalid={"Dv": 32},
    ),
    limit(
        "mask_kind != 'full'",
        "atten_mask: no full mask beside packed rows (the chip takes masks of packed rows in modes 3 and 4 only)",
        only=PACKED,
        given={**FULL, "atten_mask": None},
        invalid={"atten_mask": "B 5 7"},
    ),
    limit(
        "mask_kind != 'triangle' or atten_mask.dim() == 2",
        "atten_mask: a compressed mask of two axes (a compressed mask is passed without leading axes here)",
        only=PACKED,
        given=SQUARE,
        invalid={"atten_mask": "1 2048 2048"},
    ),
    content(
        "is_causal(atten_mask)",
        "atten_mask: ones above the diagonal of a compressed mask, zeros elsewhere (sparse_mode alone has an effect, "
        "so other content has none)",
        when="mask_kind == 'triangle'",
        needs=("sparse_mode",),
        given=SQUARE,
        invalid={"atten_mask": ("2048 2048", "bool")},
    ),
    content(
        "hides_nothing(atten_mask, pre, next)",
        "atten_mask: a mask that agrees with pre_tokens and next_tokens (a key is visible only if the mask leaves it "
        "and the window contains it)",
        when="mask_kind == 'full' and mode == 0",
        given=FULL,
        invalid={"pre_tokens": 1},
    ),
    note(
        "not is_triangle(atten_mask) or S1 == columns == 2048",
        "atten_mask: no compressed mask in modes 0 and 1 (they read it as a mask of rows by keys; pass sparse_mode 3 "
        "(or 2), or such a mask)",
        when="mask_kind == 'full' and not one_token",
        invalid={"atten_mask": "2048 2048", "next_tokens": UNLIMITED},
    ),
    note(
        "pre_tokens >= S2 - 1",
        "pre_tokens: no window without a mask, nor for a single row (it has no effect there: every key is visible; "
        "pass an atten_mask that hides the keys outside the window)",
        when="mask_kind == 'none' and mode == 0",
        invalid={"pre_tokens": 1},
    ),
)
NO_TREES = (
    limit(
        "sparse_mode != 9",
        "sparse_mode: no mode 9 (the fourth version is the first with tree masks)",
        invalid={"atten_mask": "B S1 S1", "sparse_mode": 9},
    ),
)
TREES = (
    limit(
        "query_rope is not None and query_padding_size is None and kv_padding_size is None and pse_shift is None and "
        "key_shared_prefix is None and quant_scale2 is None",
        "sparse_mode: rope parts beside mode 9, and no padding, pse_shift, prefix or int8 output (the chip takes "
        "tree masks over latents and rope parts only)",
        when="mode == 9",
        given=TREE,
        invalid={"query_rope": None, "key_rope": None},
    ),
)
# The first two versions of PromptFlashAttention have no pse_shift.
UNREAD_BIAS = (note("pse_shift is None", "pse_shift: no pse_shift (this version ignores it)"),)
BIASES = (
    typed(
        "dtype_of(pse_shift) == ('float16' if dtype_of(query) == 'int8' else dtype_of(query))",
        "pse_shift: the dtype of query, or float16 beside int8 (convert it with .to())",
        given=PSE,
        invalid={"pse_shift": ("B N1 S1 S2", "bfloat16")},
    ),
    meaning(
        "bias_fits(pse_shift, B, N1, S1, columns)",
        "pse_shift: shape [B or 1, N1, rows or 1, keys] (added to the scaled scores; columns are the keys of a shared "
        "prefix, then the tokens of the cache)",
        given=PSE,
        invalid={"pse_shift": "B 1 1 S2"},
    ),
    limit(
        "pse_shift.shape[2] >= S1",
        "pse_shift: a row per query row (the chip repeats no row)",
        given=PSE,
        invalid={"pse_shift": "B N1 1 S2"},
    ),
    limit(
        "D == Dv and T1 is None and query_rope is None and learnable_sink is None and cache_layout != 'NZ'",
        "pse_shift: no packed rows, rope parts, sink or fragmented pages beside pse_shift, and D == Dv (the chip adds "
        "a bias in no other call)",
        when="pse_shift is not None",
        given=PSE,
        invalid={"Dv": 32},
    ),
    limit(
        "pse_shift.shape[-1] >= block_table.shape[1] * block_size",
        "pse_shift: columns for every page of the table (the chip reads complete pages)",
        when="pse_shift is not None and block_table is not None",
        needs=("block_table",),
        given={**PAGES, "pse_shift": "B N1 S1 32"},
        invalid={"block_table": "B 3"},
    ),
)
PRECISION = (
    limit(
        "inner_precise in (0, 1)",
        "inner_precise: 0 or 1 for one-token and packed queries (the chip takes no other there; it affects only rows "
        "whose keys the mask hides)",
        when="one_token or T1 is not None",
        given={"S1": 1},
    ),
)
PROMPT_PRECISION = (
    note(
        "0 <= inner_precise <= 3",
        "inner_precise (bit 1 selects the result of rows whose keys the mask hides; bit 0 has no effect)",
    ),
)
SINKS = (
    limit(
        "dtype_of(learnable_sink) in ('bfloat16', dtype_of(query))",
        "learnable_sink: bfloat16, or the dtype of query (the chip takes no other)",
        given={"learnable_sink": "N1", "inner_precise": 0},
        invalid={"learnable_sink": ("N1", "float32")},
    ),
    limit(
        "inner_precise == 0 and Dv in (64, 128) and D != 512 and quant_scale2 is None and key_shared_prefix is None "
        "and dtype_of(key) == dtype_of(query) != 'int8'",
        "learnable_sink: inner_precise 0, value rows of 64 or 128 floats, no prefix and no int8 output (the chip "
        "takes sinks in no other call)",
        when="learnable_sink is not None",
        given={"learnable_sink": "N1", "inner_precise": 0},
        invalid={"inner_precise": 1},
    ),
)
PROMPT_WINDOW = (
    note(
        "next_tokens != 0",
        "next_tokens: next_tokens beside a full mask in mode 0 (its default 0 makes this call causal from the upper "
        "left corner too; 2147483647 is no limit)",
        when="mode == 0 and mask_kind == 'full'",
        given=FULL,
    ),
)

MASKS = MODES + MASK_SHAPES

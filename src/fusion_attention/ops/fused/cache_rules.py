"""Checks of the KV cache of fused inference attention: pages, lists of tensors, left padding, shared prefix and rope.

rules.py has the rules on inputs and lengths.
"""

from dataclasses import replace

import torch

from fusion_attention.contract import INVALID
from fusion_attention.ops.fused.rules import CACHE, GAPS, HEADS, LATENT, PADDED, PAGES, PREFIX, ROPE
from fusion_attention.ops.inference.rules import POOLS, SHORT_LIST, SIZED_PAGES
from fusion_attention.ops.shared import rules

CACHES = (
    replace(SIZED_PAGES, given=PAGES),
    rules.lengths_of_pages(
        "actual_seq_lengths_kv",
        PAGES,
        when="block_table is not None and input_layout not in ('TND', 'NTD', 'NTD_TND', 'TND_NTD')",
    ),
    replace(
        rules.of_lengths(
            f"rows_fit(key, {CACHE}, D, block_table, block_size)",
            "key: rows of num_key_value_heads heads with the elements of query's (in the axis order of query; pages "
            "are [blocks, block_size, N2*D], [blocks, N2, block_size, D] or, in fragments of 32 bytes, [blocks, N2, "
            "D/d0, block_size, d0])",
            when="heads_fit(num_key_value_heads, N1)",
            invalid={"key": "B S2 7", "value": "B S2 7"},
        ),
        code=INVALID,
    ),
    rules.of_lengths(
        f"lies_as(value, key, {CACHE}, None, block_table)",
        "value: the shape of key except for the last axis (one value per key; value rows may have fewer elements)",
        when=f"heads_fit(num_key_value_heads, N1) and rows_fit(key, {CACHE}, D, block_table) is True",
        invalid={"value": "B 5 N2*Dv"},
    ),
    rules.of_lengths(
        f"counted(key, input_layout, B, {HEADS}, block_table)",
        "key: one tensor of the batch, one per sequence with a batch of 1, or (with a block table) pages (packed and "
        "paged keys are one tensor)",
        when=f"heads_fit(num_key_value_heads, N1) and rows_fit(key, {CACHE}, D, block_table) is True",
        invalid={"key": "3 S2 N2*D", "value": "3 S2 N2*Dv"},
    ),
    rules.meaning(
        "block_size == page",
        "block_size: the size of a page of key (an axis of the cache has this size)",
        when="block_table is not None",
        given=PAGES,
        invalid={"block_size": 32},
    ),
    rules.meaning(
        "fragments_fit(key) is True and fragments_fit(value) is True",
        "key: fragments of 32 bytes in pages of five axes ([blocks, N2, D/d0, block_size, d0]: d0 is 16 for 16 bits, "
        "32 for int8)",
        when="block_table is not None",
        given={**PAGES, "key": "8 N2 4 16 16", "value": "8 N2 4 16 16"},
        invalid={"key": "8 N2 2 16 32", "value": "8 N2 2 16 32"},
    ),
    rules.meaning(
        "block_table.shape[0] == B",
        "block_table: a row of pages per sequence (packed rows have as many sequences as ends)",
        given={**PAGES, "input_layout": "TND"},
        invalid={"block_table": "3 2"},
    ),
    *(
        replace(rule, when="block_table is not None and block_table.shape[0] == B")
        for rule in rules.paged(
            "block_size", "block_size", PAGES, {"actual_seq_lengths_kv": [20, 33]}, [[0, 1], [2, 8]]
        )
    ),
)
CACHE_LIMITS = (
    rules.own_page_ids(PAGES, torch.tensor([[0, 1], [2, 3]])),
    rules.limit(
        "block_size % (32 if dtype_of(key) == 'int8' else 16) == 0 and block_size <= (512 if one_token else 1024)",
        "block_size: a multiple of 16 (int8: 32), at most 1024, for one-token queries 512 (the chip takes no other "
        "pages)",
        when="block_table is not None",
        given=PAGES,
        invalid={"block_size": 24, "key": "8 24 N2*D", "value": "8 24 N2*D"},
    ),
    rules.limit(
        "of_inputs(input_layout) in ('BNSD', 'TND') or cache_layout != 'BNSD'",
        "key: pages [blocks, block_size, N2*D] (the chip takes pages of heads beside BNSD and TND only)",
        when="block_table is not None",
        given=PAGES,
        invalid={"key": "8 N2 16 D", "value": "8 N2 16 D"},
    ),
    *(replace(rule, given=PAGES) for rule in POOLS),
    rules.limit(
        "key_shared_prefix is None and (dtype_of(query) != 'int8' or query_rope is not None)",
        "block_table: no pages beside a shared prefix or scales of an int8 query (the chip takes no pages there)",
        when="block_table is not None",
        needs=("key_shared_prefix",),
        given=PAGES,
        invalid={"key_shared_prefix": "1 4 N2*D", "value_shared_prefix": "1 4 N2*D"},
    ),
    replace(SHORT_LIST, invalid={**SHORT_LIST.invalid, "D": 16, "Dv": 16}),
    rules.limit(
        "len({0 in t.shape for t in key}) == 1",
        "key: tensors of which all or none are empty (the chip takes no list with some empty tensors)",
        given={"B": 1},
        invalid={
            "B": 2,
            **{name: [torch.zeros(1, n, 128, dtype=torch.float16) for n in (6, 0)] for name in ("key", "value")},
        },
    ),
    *(
        rules.limit(
            f"contiguous_rows({name})",
            f"{name}: {what} of contiguous elements (the chip reads contiguous rows)",
            given=given,
            invalid={name: gaps},
        )
        for name, what, given, gaps in (
            ("query", "rows", {}, GAPS),
            *((side, "rows", {}, torch.zeros(2, 6, 256, dtype=torch.float16)[..., ::2]) for side in ("key", "value")),
            ("block_table", "rows", PAGES, torch.tensor([[0, 9, 1, 9], [2, 9, 3, 9]], dtype=torch.int32)[:, ::2]),
        )
    ),
)

# ------------------------------------------------------------------------------------------ padding, prefix, rope parts

PADDING = (
    *(
        rules.meaning(
            f"len({name}) == 1 and ({lengths} is not None or one_token)",
            f"{name}: one number, beside {lengths} (unused tokens of the tensor behind the last of every sequence)",
            when=f"{name} is not None",
            given={**PADDED, name: [1]},
            invalid={name: [1, 1]},
        )
        for name, lengths in (
            ("query_padding_size", "actual_seq_lengths"),
            ("kv_padding_size", "actual_seq_lengths_kv"),
        )
    ),
    *(
        rules.limit(
            "input_layout in ('BSH', 'BSND', 'BNSD', 'BNSD_BSND') and block_table is None and len(key) == 1 and "
            "query_rope is None and key_shared_prefix is None and learnable_sink is None",
            f"{name}: left padding in one padded tensor, without pages, rope parts, prefix or sink (the chip pads no "
            "other call)",
            when=f"{name} is not None",
            given={**PADDED, name: [1]},
            invalid={"input_layout": "NSD", "actual_seq_lengths": [2], "actual_seq_lengths_kv": [4]},
        )
        for name in ("query_padding_size", "kv_padding_size")
    ),
    rules.note(
        "padded",
        "kv_padding_size: padding that leaves enough tokens for every sequence (a sequence that does not fit returns "
        "zeros, as without keys)",
        given=PADDED,
        invalid={"kv_padding_size": [2]},
    ),
)
PREFIXES = rules.group(
    rules.both_or_neither("key_shared_prefix", "value_shared_prefix", "a prefix has keys and values"),
    rules.of_lengths(
        f"prefix_fits(key_shared_prefix, key, {CACHE}, D)",
        "key_shared_prefix: a tensor of key's layout, heads, elements and dtype, with a batch of 1 (all sequences "
        "share it)",
        invalid={"key_shared_prefix": "2 4 N2*D", "value_shared_prefix": "1 4 N2*Dv"},
    ),
    rules.of_lengths(
        f"lies_as(value_shared_prefix, key_shared_prefix, {CACHE}, None, None) is True and "
        "dtype_of(value_shared_prefix) == dtype_of(value)",
        "value_shared_prefix: the shape of key_shared_prefix except for the last axis (one value per key)",
        when=f"key_shared_prefix is not None and prefix_fits(key_shared_prefix, key, {CACHE}, D) is True",
        invalid={"value_shared_prefix": "1 3 N2*Dv"},
    ),
    rules.meaning(
        "of_elements(value_shared_prefix, input_layout, N2) == Dv",
        "value_shared_prefix: rows as long as value's (they are rows of one attention)",
        invalid={"value_shared_prefix": "1 4 N2*32"},
    ),
    rules.of_lengths(
        "len(actual_shared_prefix_len) == 1",
        "actual_shared_prefix_len: one number (all sequences share one prefix)",
        invalid={"actual_shared_prefix_len": [2, 2]},
    ),
    rules.meaning(
        "0 <= common <= prefix_keys",
        "actual_shared_prefix_len: 0 <= length <= keys of key_shared_prefix (a prefix is no longer than its tensor)",
        when="key_shared_prefix is not None",
        invalid={"actual_shared_prefix_len": [5]},
    ),
    rules.meaning(
        "query_rope is None",
        "key_shared_prefix: no rope parts beside a shared prefix (its keys have no rope part)",
        when="key_shared_prefix is not None",
        needs=("query_rope",),
        invalid=ROPE,
    ),
    rules.limit(
        "input_layout not in ('TND', 'NTD', 'NTD_TND', 'TND_NTD') and dtype_of(query) != 'int8' and len(key) == 1",
        "key_shared_prefix: a prefix of padded keys in one tensor, under a query of floats (the chip shares no "
        "prefix there)",
        invalid={
            "input_layout": "TND",
            "actual_seq_lengths": [3, 8],
            "actual_seq_lengths_kv": [5, 12],
            "key_shared_prefix": "4 N2 D",
            "value_shared_prefix": "4 N2 Dv",
        },
    ),
    given=PREFIX,
)
ROPES = (
    rules.rope_pair("query_rope", "key_rope", ROPE),
    rules.typed(
        "dtype_of(query_rope) == dtype_of(query)",
        "query_rope: the dtype of query (one dtype for all rows)",
        when="query_rope is not None and key_rope is not None and dtype_of(query) != 'int8'",
        given=ROPE,
        invalid={"query_rope": ("B S1 N1*Dr", "bfloat16"), "key_rope": ("B S2 N2*Dr", "bfloat16")},
    ),
    rules.typed(
        "dtype_of(key_rope) == dtype_of(query_rope)",
        "key_rope: the dtype of query_rope (rope parts multiply each other)",
        when="query_rope is not None and key_rope is not None",
        given=ROPE,
        invalid={"key_rope": ("B S2 N2*Dr", "bfloat16")},
    ),
    replace(
        rules.of_lengths(
            f"lies_as(key_rope, key, {CACHE}, Dr, block_table)",
            "key_rope: the shape of key with the elements of query_rope (as many heads (expand one that all share) "
            "and tokens, or pages with the same page table)",
            when=f"key_rope is not None and query_rope is not None and rows_fit(key, {CACHE}, D, block_table) is True",
            given=ROPE,
            invalid={"key_rope": "B 5 N2*Dr"},
        ),
        code=INVALID,
    ),
    rules.limit("Dr == 64", "query_rope (the chip takes no other)", given=ROPE, invalid={"Dr": 32}),
    rules.limit(
        "D == Dv and D in (128, 512)",
        "query_rope: rows of 128 or 512 elements beside rope parts (the chip takes rope parts beside rows of 128 or "
        "512)",
        given=ROPE,
        invalid={"D": 64, "Dv": 64},
    ),
    rules.limit(
        "N2 == 1 and N1 in (1, 2, 4, 8, 16, 32, 64, 128)",
        "query_rope: a power of two of query heads, at most 128, over one key head (the chip takes no other heads "
        "over latents)",
        when="query_rope is not None and D == 512",
        given=LATENT,
        invalid={"N1": 3, "num_heads": 3},
    ),
    rules.limit(
        "mask_kind != 'full' and (dtype_of(key) == dtype_of(query))",
        "query_rope: no full mask and no integer keys under a query of floats beside rope parts (the chip takes rope "
        "parts beside rows of one dtype, causal or not)",
        given=ROPE,
        invalid={"atten_mask": "B S1 S2"},
    ),
    rules.reserved("key_rope_antiquant_scale"),
)

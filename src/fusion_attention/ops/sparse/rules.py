"""Legality rules of sparse attention and of the indexer, for CANN's operators and this library's functions.

A rule applies to every operator that has its parameters. docs/rulings.md 15 explains severities and error codes.
"""

import torch

from fusion_attention.contract import Rule
from fusion_attention.ops.shared import rules
from fusion_attention.ops.sparse.checks import PAGED

KEYS = "keys_in(layout, layout_kv, block_table)"
LISTS = "sparse_indices, layout, q_len, kv_len, sparse_block_size"
IN_PAGES = {"block_table": "2 M", "layout_kv": PAGED, "actual_seq_kvlen": [6, 6]}
SIZES = {"B": 2, "S1": 4, "S2": 6, "T1": 8, "T2": 12, "N1": 4, "N2": 1, "G": 4, "D": 512, "Dv": 512, "Dr": 64}
SIZES |= {"K": 2048, "P": 3, "Ps": 16, "R": 2, "M": 1}


def lists(*entries: int) -> torch.Tensor:
    """Returns indices of selected keys for example calls, [B, S1, 1, K]: every row has these entries, then -1."""
    result = torch.full((SIZES["B"], SIZES["S1"], 1, SIZES["K"]), -1, dtype=torch.int32)
    result[..., : len(entries)] = torch.tensor(entries)
    return result


def first_block(shape: tuple[int, ...]) -> torch.Tensor:
    """Returns indices of selected blocks for example calls, in this shape: block 0, then -1, along the last axis."""
    result = torch.full(shape, -1, dtype=torch.int32)
    result[..., :1] = 0
    return result


# Sample lists with one entry, the second of their last row, behind a -1.
BROKEN = lists()
BROKEN[:, -1, :, 1] = 0


def packed_lists(param: str) -> Rule:
    """Returns a rule that warns if a list of selected keys in the tensor `param` has an entry >= 0 behind a -1."""
    return rules.doubt(
        f"unbroken({param})",
        f"{param}: no entry behind a -1 (a list ends at its first -1; fusion_attention.pack_lists moves the others to "
        "its end)",
        reads=True,
        invalid={param: BROKEN},
    )


LENGTHS = (
    rules.needed(
        "actual_seq_qlen",
        "packed rows do not show where a sequence ends",
        text="the lengths of packed sequences",
        only=rules.PACKED,
    ),
    rules.of_lengths(
        "sequences_fit(actual_seq_qlen, layout, cumulative, B, S1, T1)",
        "actual_seq_qlen: the lengths of the sequences in the query tensor (one per sequence; CANN's packed lengths "
        "are cumulative ends: [3, 8] is 3 and 5 tokens)",
        invalid={"actual_seq_qlen": [3, 9]},
    ),
    rules.of_lengths(
        f"sequences_fit(actual_seq_kvlen, {KEYS}, cumulative, B, S2, T2, block_table, Ps)",
        "actual_seq_kvlen: the lengths of the sequences in the key tensor (one per sequence; CANN's packed lengths "
        "are cumulative ends: [3, 8] is 3 and 5 tokens)",
        invalid={"actual_seq_kvlen": [5, 13]},
    ),
    rules.one_length_each("actual_seq_qlen", "actual_seq_kvlen"),
)
COVERED = rules.covered(
    "actual_seq_qlen", "actual_seq_kvlen", rules.ENDS, {"actual_seq_qlen": [3, 7], "actual_seq_kvlen": [5, 11]}
)
NEEDS_KEY_LENGTHS = (
    *COVERED,
    rules.needed(
        "actual_seq_kvlen",
        "packed and paged keys do not show where a sequence ends",
        text="the lengths of packed or paged keys",
        when=f"{KEYS} in ('TND', '{PAGED}')",
        given={"layout": "TND"},
    ),
)
PAGES = (rules.keys_lie(PAGED), rules.tabled("block_table", PAGED, given=IN_PAGES, invalid={"block_table": None}))
TABLES = rules.group(
    rules.meaning(
        "len(block_table) == len(q_len) == len(kv_len)",
        "block_table: one row, and one length of queries and keys, per sequence (a row of pages for each)",
        invalid={"block_table": "3 M"},
    ),
    rules.page_numbers(
        *("block_table", "kv_len", "Ps", "P"),
        when="block_table is not None and len(block_table) == len(q_len) == len(kv_len)",
    ),
    given=IN_PAGES,
)
TABLE_LIMITS = rules.group(
    rules.own_page_ids(IN_PAGES, torch.zeros(2, 1, dtype=torch.int64)),
    rules.limit("Ps % 16 == 0 and Ps <= 1024", "block_table (the chip takes no other pages)", invalid={"Ps": 8}),
    given=IN_PAGES,
)
SHAPES = (
    rules.groups_of_heads("key"),
    rules.elements("D", "query"),
    rules.elements("Dv", "value", optional=True),
    rules.elements("Dr", "query_rope", optional=True, given=rules.ROPE),
    rules.rope_pair("query_rope", "key_rope", rules.ROPE),
    rules.finite_scale("scale_value"),
)
SOME_ENTRIES = rules.invalid(
    "K >= 1",
    "sparse_indices: lists of at least one entry (a row selects at least one block, or lists -1)",
    invalid={"K": 0},
)
SELECTION = (
    rules.meaning(
        f"entries_fit({LISTS})",
        "sparse_indices: -1, or the number of a block of the row's sequence (numbered from 0 in each sequence; -1 ends "
        "a list)",
        reads=True,
        invalid={"sparse_indices": lists(0, 90)},
    ),
    packed_lists("sparse_indices"),
    rules.content(
        f"few_enough({LISTS}, sparse_mode)",
        "sparse_indices: at most as many entries as blocks with visible keys (a row reads no further entries)",
        given={"sparse_mode": 0, "causal": False},
        invalid={"sparse_indices": lists(0, 1, 2, 3, 4, 5, 0)},
    ),
    rules.content(
        f"in_the_past({LISTS}, sparse_mode)",
        "sparse_indices: blocks with keys that are visible to the row (keys of later tokens are skipped)",
        given={"sparse_mode": 3},
        invalid={"sparse_indices": lists(0, 5)},
    ),
)


def most_tokens(**keys: tuple[int, int]) -> Rule:
    """Returns a rule on Ascend's limits (checked in strict mode): sequences have at most 131072 tokens; keys: (heads,
    elements) of key tensors in an illegal example call."""
    beyond = 131073
    rows = {
        name: torch.zeros(1, 1, *shape, dtype=torch.float16).expand(1, beyond, *shape) for name, shape in keys.items()
    }
    return rules.limit(
        "S1 <= 131072 and S2 <= 131072",
        "query: at most 131072 tokens in a sequence (the chip takes no longer ones)",
        invalid={"B": 1, "S1": 1, "S2": beyond, **rows},
    )


MOST_SEQUENCES = rules.limit(
    "B <= 256", "query: up to 256 sequences (the chip takes no more)", invalid={"B": 257, "S1": 1}
)
WITH_VALUE = rules.needed("value", "the chip takes no call without one", text="value rows", level="limit")
LISTS_OF_2048 = rules.limit(
    "K == 2048",
    "sparse_indices: lists of 2048 entries (the chip takes lists of no other length)",
    when="K >= 1",
    invalid={"K": 64},
)


def some_heads(query: str, heads: str) -> Rule:
    """Returns a rule: an indexer has at least one head; query, heads: names of its query and of its head axis."""
    return rules.meaning(
        f"{heads} >= 1", f"{query}: at least one head (a score is a sum over heads)", invalid={heads: 0}
    )


def scores(query: str, heads: str, dim: str, like: str = "", like_shape: str = "") -> tuple[Rule, ...]:
    """Returns rules on an indexer's weights (dtype, shape) and query; query, heads, dim: names of query and axes.

    like, like_shape: name and example shape of the tensor whose dtype the weights have, if it is not the query.
    """
    like, like_shape = like or query, like_shape or f"B S1 {heads} {dim}"
    return (
        rules.typed(
            f"same_dtype(weights, {like}) or float32(weights)",
            f"weights: the dtype of {like}, or float32 (convert them with .to({like}.dtype))",
            when="floating(weights)",
            invalid={"weights": (f"B S1 {heads}", "bfloat16"), like: (like_shape, "float16")},
        ),
        rules.typed(
            f"weights.shape[-1] == {query}.shape[-2]",
            f"weights: one weight for every head of {query} (a score is a sum over heads)",
            when=f"weights.dim() == {query}.dim() - 1 and weights.dim() >= 2",
            invalid={"weights": "B S1 7"},
        ),
        rules.elements(dim, query),
    )

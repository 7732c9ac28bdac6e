"""Rules, the checks of calls, of SparseFlashMla and its gradient."""

from typing import Any

import torch

from fusion_attention.contract import Rule
from fusion_attention.ops.shared import rules
from fusion_attention.ops.sparse.rules import packed_lists


def own_entries(param: str, check: str, keys: str = "compressed keys", count: int = 2048) -> tuple[Rule, Rule]:
    """Returns rules that check lists of keys [.., count]: entries are -1 or one of `keys`, and none is behind a -1.

    param: the lists' parameter; check: the expression for the first rule.
    """
    return (
        rules.meaning(
            check,
            f"{param}: -1, or the number of one of the {keys} of the row's sequence (numbered from 0 in each sequence; "
            "-1 ends a list)",
            reads=True,
            invalid={param: torch.full((2, 4, 1, count), 90, dtype=torch.int32)},
        ),
        packed_lists(param),
    )


PAGES = "PA_BBND"
# Names of a tensor's lengths, of the tensor, its axes of padded and of packed rows, its page table and axis of a page.
Side = tuple[str, str, str, str, str, str]
SIDES: tuple[Side, ...] = (
    ("q", "query", "S1", "T1", "", ""),
    ("ori_kv", "key", "S2", "T2", "block_table", "Ps"),
    ("cmp_kv", "key_compressed", "S3", "T3", "compressed_table", "Pcs"),
)
KEYS = SIDES[1:]
IN_PAGES: dict[str, Any] = {
    "layout_kv": PAGES,
    "block_table": "2 M",
    "compressed_table": "2 Mc",
    "seqused_ori_kv": [6, 6],
    "seqused_cmp_kv": [2, 2],
    "cmp_residual_kv": [0, 0],
}
PACKED: dict[str, Any] = {
    "layout_kv": "TND",
    "cu_seqlens_q": [0, 3, 8],
    "cu_seqlens_ori_kv": [0, 5, 12],
    "cu_seqlens_cmp_kv": [0, 1, 3],
    "cmp_residual_kv": [2, 1],
}
SAMPLE_TOKENS = {"T2": 12, "T3": 3}
# Invalid lists of padded samples.
PAST = torch.ones(2, 4, 1, 1, dtype=torch.int32)


def _capacity(rows: str, table: str, page: str) -> str:
    """Returns an expression for the most tokens of a sequence: pages in `table` * tokens of a `page`, else `rows`."""
    return f"{rows} if {table} is None else {table}.shape[1] * ({page} or 0)" if table else rows


def lengths_of(sides: tuple[Side, ...], residual: str, paged: bool = False) -> tuple[Rule, ...]:
    """Returns rules that check cumulative (cu_seqlens) and used (seqused) lengths of queries and sources of keys
    (`sides`). residual: parameter with the tokens behind the last compressed key; paged: keys may be paged."""
    return (*_ends_of(sides), *_used_of(sides, residual), *_given_of(sides, paged))


def _ends_of(sides: tuple[Side, ...]) -> tuple[Rule, ...]:
    """Returns rules that check cumulative lengths, `cu_seqlens_{side}`, of queries and sources of keys (`sides`)."""
    ends = f"cu_seqlens_{sides[0][0]}"
    return (
        *(
            rules.of_lengths(
                f"ends_fit(cu_seqlens_{side}, {packed})",
                f"cu_seqlens_{side}: cumulative ends that cover all rows of the tensor (a 0, then the end of every "
                "sequence)",
                only=("TND",),
                invalid={f"cu_seqlens_{side}": [0, 3, 999]},
            )
            for side, _, _, packed, _, _ in sides
        ),
        *(
            rules.of_lengths(
                f"cu_seqlens_{side} is None or {ends} is None or len(cu_seqlens_{side}) == len({ends})",
                f"cu_seqlens_{side}: as many ends as {ends} (both have a 0, then one end per sequence)",
                only=("TND",),
                invalid={f"cu_seqlens_{side}": [0, SAMPLE_TOKENS[packed]]},
            )
            for side, _, _, packed, _, _ in sides[1:]
        ),
        *(
            rules.presence(
                f"cu_seqlens_{side} is None",
                f"cu_seqlens_{side}: None, as rows are not packed (padded rows have seqused_{side})",
                only=("BSND",),
                invalid={f"cu_seqlens_{side}": [0, 3, 8]},
            )
            for side, *_ in sides
        ),
    )


def _used_of(sides: tuple[Side, ...], residual: str) -> tuple[Rule, ...]:
    """Returns rules that check `seqused_{side}`, the used lengths of queries and of each source of keys (at most a
    sequence's rows in memory), and the parameter `residual`."""
    ends = f"cu_seqlens_{sides[0][0]}"
    # (layout, beginning of a rule, sequences)
    counts = (("BSND", "", "B"), ("TND", f"{ends} is None or ", f"len({ends}) - 1"))
    results = []
    for layout, begins, count in counts:
        padded = layout == "BSND"
        for side, _, rows, _, *pages in sides:
            capacity = (
                f"None, {_capacity(rows, *pages)}" if padded else f"cu_seqlens_{side}, {_capacity('None', *pages)}"
            )
            results.append(
                rules.of_lengths(
                    f"{begins}used_fit(seqused_{side}, {count}, {capacity})",
                    f"seqused_{side}: one length per sequence, within its {'tensor' if padded else 'rows'} (further "
                    "rows are padding)",
                    only=(layout,),
                    invalid={f"seqused_{side}": [1, 1, 99]},
                )
            )
        results.append(
            rules.of_lengths(
                f"{begins}used_fit({residual}, {count}, None, None)",
                f"{residual}: one number per {'' if padded else 'packed '}sequence (the tokens of each % cmp_ratio)",
                only=(layout,),
                invalid={residual: [1, 1, 1]},
            )
        )
    return tuple(results)


def _given_of(sides: tuple[Side, ...], paged: bool) -> tuple[Rule, ...]:
    """Returns rules that require cumulative lengths of packed tensors and, if `paged`, used lengths of paged keys."""
    layout_kv = "layout_kv" if paged else "layout_k"
    return (
        *(
            rules.needed(
                f"cu_seqlens_{side}",
                "the tensor does not show where a sequence ends",
                text="the ends of packed sequences",
                when="" if (side, tensor) == sides[0][:2] else f"{layout_kv} == 'TND' and {tensor} is not None",
                only=("TND",),
            )
            for side, tensor, *_ in sides
        ),
        *(
            rules.needed(
                f"seqused_{side}",
                "pages do not show where a sequence ends",
                text="the lengths of keys in pages",
                when=f"{layout_kv} == '{PAGES}' and {tensor} is not None",
                needs=("block_table",),
                given=IN_PAGES,
            )
            for side, tensor, *_ in (sides[1:] if paged else ())
        ),
    )


OF_TABLES = rules.group(
    rules.meaning(
        "len(block_table) == len(q_len)",
        "block_table: one row per sequence (a row of pages for each)",
        invalid={"block_table": "3 M", "compressed_table": "3 Mc"},
    ),
    *(
        rules.page_numbers(*(table, lengths, page, pages), when=f"{table} is not None and len({table}) == len(q_len)")
        for (*_, table, page), lengths, pages in zip(KEYS, ("kv_len", "c_len"), ("P", "Pc"), strict=True)
    ),
    *(
        rules.limit(
            f"1 <= {page} <= 1024",
            f"{table}: pages of at most 1024 tokens (the chip takes no larger pages)",
            when=f"{table} is not None and {page} is not None",
            invalid={page: 1025},
        )
        for *_, table, page in KEYS
    ),
    given=IN_PAGES,
)
LAYOUT = (
    rules.keys_lie(PAGES),
    rules.tabled("block_table", PAGES, invalid={"block_table": "2 M"}),
    rules.tabled("compressed_table", PAGES, "key_compressed is None or ", invalid={"compressed_table": "2 Mc"}),
)
LAYOUT_OF_GRADIENT = rules.keys_lie(advice="paged keys have no gradient", bad=PAGES)
ROWS = (
    rules.meaning("N1 > 0 and N2 == 1", "key (one KV head serves all heads)", invalid={"N2": 2}),
    rules.elements("D", "query"),
    rules.finite_scale("scale_value"),
)
FORMS = (
    rules.needed("key", "for attention to compressed keys alone call sparse_attention", text="rows of keys"),
    rules.absent("cmp_topk_length"),
    rules.presence(
        "sparse_indices is None or key_compressed is not None",
        "sparse_indices: lists only with cmp_kv (they select compressed keys)",
        invalid={"key_compressed": None, "sparse_indices": "B S1 1 K", "cmp_mask_mode": 0, "ratio": 1},
    ),
    rules.meaning(
        "key_compressed is None or cmp_mask_mode == 3",
        f"cmp_mask_mode: 3 with cmp_kv (0: {rules.OF_950})",
        invalid={"cmp_mask_mode": 0},
    ),
    rules.meaning(
        "key_compressed is not None or cmp_mask_mode == 0",
        "cmp_mask_mode: 0 without cmp_kv (there are no compressed keys to mask)",
        given={"key_compressed": None, "cmp_residual_kv": None, "ratio": 1, "cmp_mask_mode": 0},
        invalid={"cmp_mask_mode": 3},
    ),
    rules.meaning(
        "ori_mask_mode == 4 or (ori_win_left, ori_win_right) == (-1, -1)",
        "ori_win_left: -1, and ori_win_right -1, except in ori_mask_mode 4 (only mode 4 is a window)",
        invalid={"ori_mask_mode": 3, "ori_win_left": 4},
    ),
    *ROWS,
)
# Lists of keys, without compressed keys.
CHOSEN = rules.group(
    rules.presence(
        "key_compressed is None",
        "ori_sparse_indices: None beside cmp_kv (lists for both sources, a 950 form, are not computed here)",
        when="ori_sparse_indices is not None",
        invalid={"key_compressed": True, "ratio": 3, "cmp_mask_mode": 3},
    ),
    rules.presence(
        "ori_topk_length is None or ori_sparse_indices is not None",
        "ori_topk_length: None without ori_sparse_indices (it has the lengths of its lists)",
        invalid={"ori_sparse_indices": None, "ori_topk_length": "B S1 1"},
    ),
    rules.meaning(
        "ori_mask_mode == 0",
        "ori_mask_mode: 0 beside ori_sparse_indices (a row reads the keys that it lists, whatever their positions)",
        when="ori_sparse_indices is not None",
        invalid={"ori_mask_mode": 3},
    ),
    *own_entries("ori_sparse_indices", "entries_fit(ori_sparse_indices, layout, q_len, kv_len, 1, q_start)", "keys", 4),
    rules.limit(
        "ori_sparse_indices is None or ori_topk_length is not None",
        "ori_topk_length: the entries of every list (without it a list ends at its first -1)",
        invalid={"ori_topk_length": None},
    ),
    given={
        **dict.fromkeys(("ori_sparse_indices", "ori_topk_length"), True),
        **dict.fromkeys(("key_compressed", "cmp_residual_kv")),
        **dict.fromkeys(("cmp_mask_mode", "ori_mask_mode"), 0),
        **dict.fromkeys(("ori_win_left", "ori_win_right"), -1),
        "ratio": 1,
    },
)
COMPRESSED = (
    rules.meaning(
        "all(0 <= n < ratio for n in residual)",
        "cmp_residual_kv: numbers from 0 to cmp_ratio - 1 (cmp_ratio tokens or more are further compressed keys)",
        when="key_compressed is not None",
        invalid={"cmp_residual_kv": [9, 9]},
    ),
    rules.doubt(
        "tokens_agree(kv_len, c_len, ratio, residual)",
        "cmp_residual_kv: as many tokens in compressed keys and residual as in ori_kv (visible compressed keys follow "
        "from the former: pass tokens % cmp_ratio)",
        when="key_compressed is not None and all(0 <= n < ratio for n in residual)",
        invalid={"cmp_residual_kv": [1, 0]},
    ),
    rules.note(
        "ori_mask_mode != 0 or max(q_len, default=0) <= 1",
        "ori_mask_mode: 3 or 4 beside causal compressed keys (with the default, 0, rows see keys of later tokens; "
        "models pass 4 and their window)",
        when="key_compressed is not None and cmp_mask_mode == 3",
        invalid={"ori_mask_mode": 0, "ori_win_left": -1, "ori_win_right": -1},
    ),
    *own_entries(
        "sparse_indices", "sparse_indices is None or entries_fit(sparse_indices, layout, q_len, c_len, 1, q_start)"
    ),
    rules.content(
        "sees_entries(sparse_indices, layout, q_len, q_start, c_len, tokens, ratio)",
        "sparse_indices: entries that are visible to their rows (row i sees the first (i + tokens - rows + 1) // "
        "cmp_ratio compressed keys, and reads at most as many entries)",
        given={"sparse_indices": "B S1 1 K"},
        invalid={"sparse_indices": PAST},
        reads=True,
    ),
)
LIMITS_OF_ROWS = (
    rules.no_float32("query"),
    rules.only_dim("D", 512, "query"),
    rules.limit("N1 <= 128", "query (the chip takes no more heads)", invalid={"N1": 129, "G": 129}),
)
LIMITS = (
    rules.limit(
        "key_compressed is None or cmp_residual_kv is not None",
        "cmp_residual_kv: one number per sequence (here None is 0, for lengths that are multiples of cmp_ratio)",
        invalid={"cmp_residual_kv": None},
    ),
    rules.limit(
        "key_compressed is not None or ratio == 1",
        "ratio: 1 without cmp_kv (there are no compressed keys)",
        given={"key_compressed": None, "cmp_residual_kv": None, "cmp_mask_mode": 0, "ratio": 1},
        invalid={"ratio": 2},
    ),
    *LIMITS_OF_ROWS,
    rules.limit("sinks is not None", "sinks: sinks (the chip takes no call without them)", invalid={"sinks": None}),
)
RETURNED = rules.invalid(
    "softmax_lse is None or softmax_lse.shape[-1] == N1",
    "softmax_lse: a last axis of N1 (one number per head)",
    when="return_softmax_lse and N2 == 1",
    given={"return_softmax_lse": True},
    invalid={"softmax_lse": "B N2 S1 3"},
)
SAVED = rules.invalid(
    "N2 * G == N1", "softmax_lse: a last axis of N1 (one number per head)", when="N2 == 1", invalid={"G": 3}
)

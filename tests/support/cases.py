"""Defines the test cases of training attention: every mode x layout x dtype, and a family for each feature; also the
functions that their tests share.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import torch

from fusion_attention.testing import Case, arguments, lowered, run

Args = dict[str, Any]

DENSE, LAYOUTS = ("BSND", "BSH", "SBH", "BNSD"), ("BSND", "BSH", "SBH", "BNSD", "TND")
DTYPES = ("float32", "float16", "bfloat16")
MASKS = ("matrix", "batch", "head", "ones")
PACKED = Case(layout="TND", q_len=(3, 6, 4), kv_len=(5, 6, 7))


def of_mode(mode: int, layout: str, dtype: str) -> Case:
    """Returns a valid call of a sparse mode; shapes and windows depend on layout and dtype."""
    turn = LAYOUTS.index(layout) + DTYPES.index(dtype)
    base = replace(PACKED, dtype=dtype) if layout == "TND" else Case(layout=layout, dtype=dtype)
    if turn % 2 and layout != "TND":
        base = replace(base, q_len=(8, 8), kv_len=(6, 6))
    base = replace(base, sparse_mode=mode, mask="compressed" if mode not in (0, 1, 5) else MASKS[turn % 4])
    if mode == 5:
        base = replace(base, mask=("batch", "head")[turn % 2])
    if mode in (5, 6):
        d = base.kv_len[0] - base.q_len[0]
        prefix = [min(n, max(0, n - m) + i) for i, (m, n) in enumerate(zip(base.q_len, base.kv_len, strict=True))]
        base = replace(base, prefix=(max(d, 0) + 1, *prefix[1:]))
    if mode == 0:
        return replace(base, pre=(3, 5)[turn % 2], next=(2, 1)[turn % 2])
    if mode == 4:
        return replace(base, pre=4, next=2 if layout != "TND" else 1)
    if mode == 7:
        return replace(base, pre=9, next=-2)
    return replace(base, pre=9, next=1) if mode == 8 else base


MODES = [of_mode(m, layout, d) for m in range(7) for layout in DENSE for d in DTYPES]
MODES += [of_mode(m, "TND", d) for m in (0, 1, 2, 3, 4, 6, 7, 8) for d in DTYPES]

CAUSAL = {"sparse_mode": 3, "mask": "compressed"}
ONE_HEAD = {"heads_q": 1, "heads_kv": 1, "dim_qk": 4}
BITS = {"dropout": "bits", "keep_prob": 0.7}
DRAWN = {"dropout": "philox", "keep_prob": 0.7}

SHAPES = [
    *(Case(layout=layout, dim_qk=d, dim_v=d) for layout, d in zip(LAYOUTS[:3], (1, 7, 80), strict=True)),
    replace(PACKED, dim_qk=7, dim_v=7, dtype="bfloat16"),
    replace(PACKED, dim_qk=80, dim_v=1, dtype="float16"),
    *(Case(layout=layout, dim_qk=6, dim_v=4) for layout in DENSE),
    replace(PACKED, dim_v=5),
    replace(PACKED, dim_v=11),
    *(Case(layout=layout, heads_q=6, heads_kv=n) for layout, n in zip(LAYOUTS[:4], (1, 2, 3, 6), strict=True)),
    replace(PACKED, heads_q=3, heads_kv=1, **CAUSAL),
    Case(layout="BNSD", q_len=(1,), kv_len=(1,), heads_q=1, heads_kv=1),
    Case(q_len=(300,), kv_len=(520,), heads_q=2, heads_kv=1, dtype="bfloat16", **CAUSAL),
    Case(layout="BSH", q_len=(270,), kv_len=(260,), heads_q=2, heads_kv=2, mask="matrix", **BITS),
    Case(layout="TND", q_len=(300, 5), kv_len=(300, 290), heads_q=2, heads_kv=1, dtype="float16", **CAUSAL),
]

LENGTHS = [
    replace(PACKED, q_len=(0, 3, 0, 4, 0), kv_len=(2, 3, 0, 6, 4)),
    replace(PACKED, q_len=(0, 3, 0, 4, 0), kv_len=(2, 3, 0, 6, 4), **CAUSAL, softmax_layout="TND"),
    replace(PACKED, q_len=(4, 3, 2), kv_len=(0, 5, 0), sink=True),
    replace(PACKED, q_len=(4, 3, 2), kv_len=(0, 5, 0), dtype="bfloat16", inner_precise=2, **BITS),
    replace(PACKED, disabled=2, q_rest=3, kv_rest=4),
    replace(PACKED, disabled=1, q_rest=2, softmax_layout="TND", sink=True, **DRAWN),
    replace(PACKED, q_rest=5, kv_rest=2, dtype="float16", pse="blocks", dim_rope=4),
    replace(PACKED, q_len=(5,), kv_len=(7,), q_rest=1),
    # Padded sequences of different lengths, which only the Python API supports.
    *(Case(layout=layout, q_len=(2, 5, 0), kv_len=(7, 3, 4), q_rest=1) for layout in DENSE),
    Case(q_len=(2, 5, 3), kv_len=(7, 0, 4), kv_rest=2, dtype="bfloat16", sink=True, dim_rope=2, **CAUSAL, **BITS),
    Case(layout="BNSD", q_len=(2, 5, 3), kv_len=(7, 1, 4), pse="full", pse_type=0, mask="head", **DRAWN),
]

EMPTY = [
    *(Case(layout=layout, q_len=(), kv_len=()) for layout in DENSE),
    *(Case(layout=layout, q_len=(0, 0), kv_len=(4, 4)) for layout in DENSE),
    *(Case(layout=layout, q_len=(4, 4), kv_len=(0, 0)) for layout in DENSE),
    Case(q_len=(4, 4), kv_len=(0, 0), sink=True, dim_rope=2, **DRAWN),
    *(replace(PACKED, q_len=q, kv_len=kv) for q, kv in (((0,), (0,)), ((0, 0), (3, 2)), ((3, 2), (0, 0)))),
    replace(PACKED, q_len=(3, 2), kv_len=(0, 0), kv_rest=2, q_rest=1, sink=True, softmax_layout="TND"),
]

BIASES = [
    *(Case(layout=layout, pse="full", pse_type=t) for layout in DENSE for t in (0, 1)),
    *(Case(dtype=d, pse=kind) for d in DTYPES for kind in ("shared_full", "row", "shared_row")),
    Case(pse="full", scale=1.0, **CAUSAL),
    Case(layout="SBH", pse="row", pse_type=0, mask="head", **BITS),
    *(replace(PACKED, pse=kind, pse_type=t) for kind in ("blocks", "row_blocks") for t in (0, 1)),
    *(replace(PACKED, pse=kind, dtype="bfloat16", **CAUSAL) for kind in ("table", "shared_table", "blocks")),
    replace(PACKED, q_len=(3, 1030), kv_len=(5, 1040), pse="shared_table", pse_type=0, **ONE_HEAD, **CAUSAL),
    replace(PACKED, pse="row_blocks", q_len=(0, 3, 2), kv_len=(4, 0, 5)),
    Case(pse="table", q_len=(1026,), kv_len=(1026,), heads_q=2, heads_kv=1, dim_qk=4, dim_v=4, **CAUSAL),
    Case(pse="shared_table", q_len=(1024,) * 2, kv_len=(1024,) * 2, heads_q=1, heads_kv=1, dtype="float16"),
    *(Case(q_len=(6, 6), kv_len=(6, 6), pse=kind, pse_type=t) for kind in ("slopes", "slopes_flat") for t in (2, 3)),
    Case(layout="BSH", pse="shared_slopes", pse_type=2, starts=(3, 1), dtype="float16"),
    Case(layout="SBH", pse="slopes", pse_type=3, starts=(0, 9), dtype="bfloat16", **CAUSAL),
    replace(PACKED, pse="slopes", pse_type=2, starts=(2, 7)),
    replace(PACKED, pse="slopes_flat", pse_type=3, starts=(2, 7), **CAUSAL),
    replace(of_mode(8, "TND", "float32"), pse="slopes", pse_type=2, starts=(5, 2), q_len=(0, 3, 6), kv_len=(2, 5, 6)),
    replace(of_mode(7, "TND", "float32"), pse="slopes_flat", pse_type=2, starts=(5, 2)),
]

DROPOUT = [
    *(Case(layout=layout, **drop) for layout in DENSE for drop in (BITS, DRAWN)),
    *(replace(PACKED, dtype=d, **drop) for d in DTYPES for drop in (BITS, DRAWN)),
    replace(PACKED, mask="matrix", blank=True, **BITS),
    Case(mask="head", blank=True, dtype="float16", **DRAWN),
]

SINKS_AND_ROPE = [
    *(Case(layout=layout, sink=True, dim_rope=4) for layout in LAYOUTS[:4]),
    *(replace(PACKED, sink=True, dim_rope=3, dtype=d, **CAUSAL) for d in DTYPES),
    Case(sink=True, mask="head", blank=True, **BITS),
    replace(PACKED, sink=True, mask="tokens", blank=True, softmax_layout="TND"),
    Case(sink=True, q_len=(7, 7), kv_len=(4, 4), dtype="bfloat16", **CAUSAL),
    replace(PACKED, sink=True, dim_rope=8, pse="blocks", softmax_layout="TND", mask="tokens", q_rest=2, **DRAWN),
]

CAPPED = [
    *(replace(PACKED, softcap=0.8, dtype=d, softmax_layout="TND", **CAUSAL) for d in DTYPES),
    Case("BSH", softcap=1.5, pse="full", pse_type=0, mask="head", blank=True, **DRAWN),
    Case("BNSD", softcap=0.6, sink=True, dim_rope=4, dtype="bfloat16", **BITS),
    Case("SBH", q_len=(6, 6), kv_len=(6, 6), softcap=3.0, pse="slopes", pse_type=2, dtype="float16"),
]

WINDOWS = [
    Case(sparse_mode=4, mask="compressed", pre=-1, next=3),
    Case(sparse_mode=4, mask="compressed", pre=5, next=-2, q_len=(7, 7)),
    Case(sparse_mode=0, mask="matrix", pre=-2, next=4, q_len=(7, 7)),
    Case(sparse_mode=0, mask="batch", pre=4, next=-1, q_len=(7, 7)),
    Case(layout="BNSD", sparse_mode=4, mask="compressed", pre=0, next=0, dtype="bfloat16"),
    Case(sparse_mode=4, mask="compressed", next=0),
    replace(PACKED, sparse_mode=4, mask="compressed", pre=-1, next=2),
    replace(PACKED, sparse_mode=4, mask="compressed", pre=2, next=-1),
    replace(PACKED, sparse_mode=0, mask="tokens", pre=2, next=-1, inner_precise=2),
    replace(PACKED, sparse_mode=7, mask="compressed", next=0, q_len=(3, 6, 4, 0)[:4], kv_len=(5, 6, 7, 3)),
    replace(PACKED, sparse_mode=7, mask="compressed", next=-1, q_len=(3, 4), kv_len=(3, 6), dtype="bfloat16"),
    replace(PACKED, sparse_mode=8, mask="compressed", next=-2, q_len=(0, 3, 6), kv_len=(2, 6, 6)),
    replace(PACKED, sparse_mode=8, mask="compressed", next=2, q_len=(5, 3), kv_len=(7, 3)),
    replace(PACKED, sparse_mode=0, mask="tokens", mask_dtype="uint8", pre=2, next=3),
    Case(mask="head", mask_dtype="uint8", dtype="float16", layout="BSH"),
]

PREFIXES = [
    Case(sparse_mode=6, mask="compressed", prefix=(2, 7)),
    Case(sparse_mode=6, mask="compressed", prefix=(0, 4), q_len=(7, 7), kv_len=(5, 5)),  # prefix 0: rows without keys
    Case(sparse_mode=5, mask="batch", prefix=(2, 7)),
    Case(sparse_mode=5, mask="batch"),  # no prefix: as mode 1
    Case(sparse_mode=5, mask="head", prefix=(1, 7)),  # prefix below kv_len - q_len: as mode 1
    Case(sparse_mode=5, mask="batch", prefix=(3,)),
    Case(sparse_mode=5, mask="matrix", prefix=(3,), q_len=(5,), kv_len=(6,)),
    replace(PACKED, sparse_mode=6, mask="compressed", prefix=(5, 0, 4)),
    replace(PACKED, sparse_mode=6, mask="compressed", prefix=(0, 2), q_len=(6, 2), kv_len=(3, 2), disabled=2),
]

# Rows that see no key because of the mask, the band or both, with every setting for such rows.
BLANK = [
    *(Case(layout=layout, mask="matrix", blank=True) for layout in DENSE),
    *(Case(mask="head", blank=True, inner_precise=2, dtype=d) for d in DTYPES),
    *(Case(q_len=(7, 7), kv_len=(4, 4), dtype=d, **CAUSAL) for d in DTYPES),
    # The band hides all keys of one row, so all rows without keys are zero.
    Case(sparse_mode=0, mask="batch", blank=True, pre=2, next=-1, q_len=(7, 7)),
    *(replace(PACKED, mask="matrix", blank=True, dtype=d) for d in DTYPES),
    replace(PACKED, mask="tokens", blank=True, softmax_layout="TND"),
    replace(PACKED, mask="tokens", blank=True, inner_precise=2),
    replace(PACKED, mask="matrix", blank=True, sparse_mode=0, pre=3, next=-1),  # both kinds of rows in one call
    replace(PACKED, q_len=(6, 3, 2), kv_len=(4, 3, 0), **CAUSAL),
]

FAMILIES = (MODES, SHAPES, LENGTHS, EMPTY, BIASES, DROPOUT, SINKS_AND_ROPE, CAPPED, WINDOWS, PREFIXES, BLANK)
CASES = list(dict.fromkeys(case for family in FAMILIES for case in family))


# -------------------------------------------------------------------------------------------------------------- running

FLOATS = ("query", "key", "value", "query_rope", "key_rope", "pse", "sink", "dy")


@cache
def operands(case: Case) -> Args:
    return arguments(case)


def compute(case: Case, args: Args) -> dict[str, torch.Tensor]:
    return run(lowered(case, args), args["dy"], "cpu")

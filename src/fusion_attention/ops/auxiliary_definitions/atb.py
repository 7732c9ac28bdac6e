"""Operator definitions of attention functions of CANN's transformer library (ATB), over packed rows and pages.

Every function writes to a tensor of the caller. npu_fused_infer_attention_score computes the attention.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fusion_attention.contract import INVALID, REQUIRED, Array, Attr, Op, Rule, Tensor
from fusion_attention.ops.auxiliary_definitions.caches import IDS, apart, in_place
from fusion_attention.ops.auxiliary_definitions.common import auxiliary, floats, writes
from fusion_attention.ops.shared.checks import pages_exist
from fusion_attention.ops.shared.params import one_of
from fusion_attention.ops.shared.rules import elements, finite_scale, groups_of_heads, invalid, meaning, untrained

SIZES = {"T": 6, "R": 3, "M": 2, "P": 4, "Ps": 16, "N1": 4, "N2": 2, "D": 16, "Dv": 8, "K": 40, "L": 32}
HIDDEN = -1000.0  # A score with this addend has a weight that underflows to 0 in float32.


def hides(mask: torch.Tensor) -> torch.Tensor:
    """Returns a bool mask, true where `mask` hides a key: elements above 0, or of -1000 and below."""
    if mask.dtype == torch.bool:
        return mask
    return (mask > 0) | (mask <= HIDDEN)


def in_rows(mask: torch.Tensor) -> torch.Tensor:
    """Converts a mask in format FRACTAL_NZ [B, columns / 16, rows, 16] to [rows, columns] or [B, rows, columns].
    Other shapes are returned unchanged; with 16 columns both formats are equal."""
    if not isinstance(mask, torch.Tensor) or mask.dim() != 4 or mask.shape[3] != 16 or mask.shape[1] == 1:
        return mask
    rows = mask.transpose(1, 2).flatten(2)
    return rows[0] if mask.shape[0] == 1 else rows


def decided(mask: torch.Tensor) -> bool | str:
    """True if each element of a mask is 0 or hides a key (above 0, or -1000 and below); else another one as text."""
    if mask.is_meta or mask.dtype == torch.bool:
        return True
    other = mask[~hides(mask) & (mask != 0)]
    return f"{other[0].item()}" if other.numel() else True


def triangle(mask: torch.Tensor) -> bool:
    """True if a mask hides exactly the elements above its diagonal; reads the mask."""
    return mask.is_meta or bool((hides(mask) == torch.ones_like(mask, dtype=torch.bool).triu(1)).all())


def covers(mask: torch.Tensor, lengths: np.ndarray) -> bool:
    """True if a mask [S, S], [B or 1, S, S] or [B or 1, 1, S, S] has a row and a column per token of lengths [B]."""
    lead, longest = mask.shape[:-2], max(lengths.tolist(), default=0)
    heads = lead[1] if len(lead) == 2 else 1
    batch = lead[0] if lead else 1
    return 2 <= mask.dim() <= 4 and heads == 1 and batch in (1, len(lengths)) and min(mask.shape[-2:]) >= longest


FUNCTIONS = {
    "covers": covers,
    "decided": decided,
    "triangle": triangle,
    "apart": apart,
    "pages_exist": pages_exist,
    "least": lambda lengths: min(lengths.tolist(), default=0),
    "total": lambda lengths: sum(lengths.tolist()),
    "most": lambda lengths: max(lengths.tolist(), default=0),
    "reach": lambda rows, keys: bool((rows <= keys).all()),
}

# ---------------------------------------------------------------------------------------------------------- attention

QUERY = floats("query", "Rows of all sequences, concatenated.", shape="T N1 D")
NEW = floats("query", "One row per sequence.", shape="R N1 D")
KEY, VALUE = (
    floats(name, "Rows of all sequences, concatenated.", like="query", shape=f"T N2 {dim}")
    for name, dim in (("key", "D"), ("value", "Dv"))
)
KEY_CACHE, VALUE_CACHE = (
    floats(name, "Pages of all sequences.", like="query", shape=f"P Ps N2 {dim}")
    for name, dim in (("key_cache", "D"), ("value_cache", "Dv"))
)
TABLE = Tensor("block_table", "The pages of every sequence.", dtypes=IDS, shape="R M",
               make=lambda shape: torch.arange(math.prod(shape), dtype=torch.int32).reshape(shape) % 4)  # fmt: skip
CONTEXT = Array(
    "context_lens", "Keys of every sequence, those of its query rows included; without keys rows are zeros."
)
LENGTHS = Array("seq_len", "Query rows of every sequence.")
HEADS = (
    Attr("num_kv_heads", "Key heads.", axis="N2", code=INVALID),
    Attr("num_heads", "Query heads.", axis="N1", code=INVALID),
)
SCALE = Attr("scale_value", "Factor on the scores.", type=float)
MASKS = "bool int8 float16 bfloat16 float32"
HIDES = "1, or -1000 and below, hides a key; 0 does not."
MASK = Tensor(
    "mask",
    f"{HIDES} [S, S] for all sequences, or [R, S, S]; or in format FRACTAL_NZ [R or 1, S / 16, S, 16].",
    dtypes=MASKS,
)
OF_ROWS = Tensor("mask", f"{HIDES} One row per row of query.", dtypes=MASKS, shape="T K")
TRIANGLE = Tensor("mask", "torch.ones(S, S).triu(1) for any S: causal.", dtypes=MASKS, shape="L L",
                  make=lambda shape: torch.ones(shape).triu(1))  # fmt: skip
WORKSPACE = Tensor("workspace", "Without effect: this library allocates its memory.", True)


def out(rows: str, dim: str = "Dv") -> Tensor:
    """Returns the operator parameter `out`, [rows, N1, dim], written in place; rows, dim: the names of these axes."""
    return Tensor(
        "out",
        "The output rows, written in place; rows behind the last sequence are unchanged.",
        dtypes="=query",
        shape=f"{rows} N1 {dim}",
    )


def lengths(name: str, text: str, advice: str, check: str, broken: Any, **more: Any) -> Rule:
    """Returns the rule (a check of a call's arguments) with the expression `check` on the list of lengths `name`.
    text, advice: the expected value and a hint, for the error; broken: an invalid value for a sample call; more: other
    fields of the rule."""
    return invalid(check, f"{name}: {text} ({advice})", invalid={name: broken}, **more)


def none_below_zero(name: str, bad: list[int]) -> Rule:
    """Returns a rule that checks calls: lengths in `name` are not negative; bad: an invalid sample value."""
    return lengths(name, "lengths >= 0", "a sequence may be empty", f"least({name}) >= 0", bad)


ENDS = (
    none_below_zero("seq_len", [-1, 2, 3]),
    lengths("seq_len", "lengths that add up to at most the rows of query", "lengths, not cumulative ends",
            "total(seq_len) <= T", [3, 3, 3]),
)  # fmt: skip
IN_PAGES = (
    lengths("context_lens", "one length per row of block_table", "one per sequence",
            "len(context_lens) == R", [20, 31]),
    none_below_zero("context_lens", [-1, 31, 16]),
    lengths("context_lens", "at most the tokens of the pages in a row of block_table", "keys are in these pages",
            "most(context_lens) <= M * Ps", [20, 33, 17]),
    meaning("pages_exist(block_table, context_lens, Ps, P)",
            "block_table: numbers of pages that exist (entries behind a sequence's last token are not read)",
            when="len(context_lens) == R", code=INVALID, reads=True,
            invalid={"block_table": torch.tensor([[0, 1], [-1, 3], [0, 1]], dtype=torch.int32)}),
)  # fmt: skip
CHUNKS = (
    *ENDS,
    lengths("seq_len", "one length per row of block_table", "one per sequence", "len(seq_len) == R", [1, 2]),
    *IN_PAGES,
    lengths("context_lens", "at least as many keys as query rows", "the keys of the query rows are included",
            "reach(seq_len, context_lens)", [20, 1, 17],
            when="len(seq_len) == len(context_lens) and least(context_lens) >= 0"),
)  # fmt: skip
COVERS_LENGTHS = invalid("covers(mask, seq_len)",
                         "mask: [S, S] or [sequences, S, S] (S is at least the longest sequence)",
                         invalid={"mask": "2 2"})  # fmt: skip
DECIDED = meaning("decided(mask)", "mask: elements of 1, of -1000 and below, or 0 (biases are not supported)",
                  code=INVALID,
                  reads=True, invalid={"mask": torch.full((6, 40), -1.0)})  # fmt: skip
ROWS_DECIDED = replace(DECIDED, invalid={"mask": torch.full((4, 4), -1.0)})
CAUSAL = meaning("triangle(mask)", "mask: torch.ones(S, S).triu(1) (the function is causal, for any mask)",
                 code=INVALID, reads=True, invalid={"mask": torch.zeros(32, 32)})  # fmt: skip
NO_GRADIENT = "attention with a gradient is npu_fusion_attention; or call it under torch.no_grad()"
FORMULA = "out = softmax(scale_value * Q K^T over {keys}) V"
PACKED = {"seq_len": torch.tensor([1, 2, 3]), "scale_value": 0.25}
PAGED = {"context_lens": torch.tensor([20, 31, 17]), "scale_value": 0.25}
MIXED = {**PACKED, **PAGED}


def attends(
    name: str,
    summary: str,
    inputs: tuple[Any, ...],
    rules: tuple[Rule, ...],
    visible: str,
    sample: Mapping[str, Any],
    **more: Any,
) -> Op:
    """Returns the operator definition of an attention function that writes to its parameter `out`.

    visible: words for the visible keys; sample: shapes of the default sample call; more: other fields of Op.
    """
    may_be_none = {p.name: p.type | None for p in inputs if isinstance(p, Attr) and p.default is not REQUIRED}
    shapes = {p.name: tuple(SIZES[word] for word in p.words("")) for p in inputs if isinstance(p, Tensor)}
    floating = {n: shapes[n] for n in ("query", "key", "value", "key_cache", "value_cache") if n in shapes}
    return auxiliary(
        name,
        summary,
        inputs,
        (),
        rules=(
            elements("D", "query"),
            *(elements("Dv", p.name) for p in inputs if p.name in ("value", "value_cache")),
            *rules,
            groups_of_heads("num_heads"),
            finite_scale("scale_value", optional=False),
            *in_place(out=shapes["out"]),
            *untrained(NO_GRADIENT, None, invalid, **floating),
        ),
        formula=FORMULA.format(keys=visible),
        functions=FUNCTIONS,
        sizes=SIZES,
        sample=sample,
        declared=writes("out") | may_be_none | {p.name: torch.Tensor for p in inputs if isinstance(p, Array)},
        **more,
    )


MASKED_KEYS, ALL_KEYS = "the keys of the row's sequence that the mask leaves", "the keys of the row's sequence"
CAUSAL_KEYS = "the keys of the row's sequence up to the row, whose last row is at its last key"
FLASH = attends(
    "_npu_flash_attention",
    "Softmax attention of packed rows with a mask.",
    (QUERY, KEY, VALUE, MASK, LENGTHS, SCALE, *HEADS[::-1], out("T")),
    (*ENDS, COVERS_LENGTHS, ROWS_DECIDED),
    MASKED_KEYS,
    {**PACKED, "mask": "3 3"},
    example="""\
>>> q, k, out = torch.randn(5, 4, 16), torch.randn(5, 2, 16), torch.zeros(5, 4, 16)
>>> _npu_flash_attention(q, k, k, torch.ones(3, 3).triu(1), torch.tensor([2, 3]), 0.25, 4, 2, out)
>>> torch.allclose(out[0, 0], k[0, 0])
True""",
)
FLASH_V3 = attends(
    "_npu_flash_attention_v3",
    "Causal softmax attention of packed rows.",
    (
        *(QUERY, KEY, VALUE, TRIANGLE, LENGTHS, SCALE, *HEADS[::-1]),
        Attr("mask_type", "3: a compressed mask.", default=3, domain="mask_type == 3"),
        out("T"),
    ),
    (*ENDS, CAUSAL),
    CAUSAL_KEYS,
    PACKED,
    keywords="mask_type",
    example="""\
>>> q, k, out = torch.randn(5, 4, 16), torch.randn(5, 2, 16), torch.zeros(5, 4, 16)
>>> _npu_flash_attention_v3(q, k, k, torch.ones(128, 128).triu(1), torch.tensor([2, 3]), 0.25, 4, 2, out=out)
>>> torch.allclose(out[2, 0], k[2, 0])
True""",
)
FLASH_UNPAD = attends(
    "_npu_flash_attention_unpad",
    "Softmax attention of packed rows to all keys of their sequences.",
    (QUERY, KEY, VALUE, LENGTHS, SCALE, *HEADS[::-1], out("T")),
    ENDS,
    ALL_KEYS,
    PACKED,
    example="""\
>>> q, k, out = torch.randn(5, 4, 16), torch.randn(5, 2, 16), torch.zeros(5, 4, 16)
>>> _npu_flash_attention_unpad(q, k, k, torch.tensor([1, 4]), 0.25, 4, 2, out)
>>> torch.allclose(out[0, 0], k[0, 0])
True""",
)
FLASH_UNPAD_V2 = attends(
    "_npu_flash_attention_unpad_v2",
    "_npu_flash_attention_unpad with kernel_type, which has no effect here.",
    (
        *(QUERY, KEY, VALUE, LENGTHS, SCALE, *HEADS[::-1]),
        one_of("kernel_type", "Without effect: selects a kernel of the chip.", (0, 2)),
        out("T"),
    ),
    ENDS,
    ALL_KEYS,
    PACKED,
    keywords="kernel_type",
    example="""\
>>> q, k, out = torch.randn(5, 4, 16), torch.randn(5, 2, 16), torch.zeros(5, 4, 16)
>>> _npu_flash_attention_unpad_v2(q, k, k, torch.tensor([1, 4]), 0.25, 4, 2, kernel_type=2, out=out)
>>> torch.allclose(out[0, 0], k[0, 0])
True""",
)  # fmt: skip
QLENS = attends(
    "_npu_flash_attention_qlens",
    "Causal softmax attention of the last rows of sequences with paged keys.",
    (QUERY, KEY_CACHE, VALUE_CACHE, TABLE, TRIANGLE, LENGTHS, CONTEXT, *HEADS, SCALE, out("T")),
    (*CHUNKS, CAUSAL),
    CAUSAL_KEYS,
    MIXED,
    example="""\
>>> pages, q, out = torch.randn(4, 16, 2, 16), torch.randn(3, 4, 16), torch.zeros(3, 4, 16)
>>> table, rows, keys = torch.tensor([[2, 0], [1, 3]]), torch.tensor([1, 2]), torch.tensor([1, 20])
>>> _npu_flash_attention_qlens(
...     q, pages, pages, table, torch.ones(128, 128).triu(1), rows, keys, 2, 4, 0.25, out)
>>> torch.allclose(out[0, 0], pages[2, 0, 0])
True""",
)
PAGED_ATTENTION = attends(
    "_npu_paged_attention",
    "Softmax attention of one row per sequence to paged keys.",
    (NEW, KEY_CACHE, VALUE_CACHE, *HEADS, SCALE, TABLE, CONTEXT, out("R"), WORKSPACE),
    IN_PAGES,
    ALL_KEYS,
    PAGED,
    keywords="workspace",
    example="""\
>>> pages, q, out = torch.randn(4, 16, 2, 16), torch.randn(2, 4, 16), torch.zeros(2, 4, 16)
>>> table, keys = torch.tensor([[2, 0], [1, 3]]), torch.tensor([1, 20])
>>> _npu_paged_attention(q, pages, pages, 2, 4, 0.25, table, keys, out)
>>> torch.allclose(out[0, 0], pages[2, 0, 0])
True""",
)
PAGED_WORKSPACE = PAGED_ATTENTION.version(
    "_npu_paged_attention_get_workspace",
    "The workspace of _npu_paged_attention: a tensor without elements.",
    params=(*PAGED_ATTENTION.params[:-1], Tensor("workspace", "Without elements.", dtypes="=query", output=True)),
    results=("workspace",),
    keywords="",
    formula="This library allocates its memory; the call is checked, and nothing is computed.",
    declared={"context_lens": torch.Tensor},
    example="""\
>>> pages, q = torch.randn(4, 16, 2, 16), torch.randn(2, 4, 16)
>>> table, keys = torch.tensor([[2, 0], [1, 3]]), torch.tensor([1, 20])
>>> _npu_paged_attention_get_workspace(q, pages, pages, 2, 4, 0.25, table, keys, torch.zeros(2, 4, 16)).numel()
0""",
)
PAGED_MLA = attends(
    "_npu_paged_attention_mla",
    "Softmax attention of one row per sequence to paged latents, whose first elements are the values.",
    (
        *(NEW, KEY_CACHE, *HEADS, SCALE, TABLE, CONTEXT),
        Attr("mla_vheadsize", "Number of first elements of a key that are its value.", axis="Dv", code=INVALID),
        out("R"),
    ),
    (
        *IN_PAGES,
        invalid("1 <= Dv <= D", "mla_vheadsize: at most the elements of a key (values are the first elements of keys)",
                invalid={"Dv": 17}),
    ),
    ALL_KEYS,
    PAGED,
    example="""\
>>> pages, q, out = torch.randn(4, 16, 1, 16), torch.randn(2, 4, 16), torch.zeros(2, 4, 12)
>>> table, keys = torch.tensor([[2, 0], [1, 3]]), torch.tensor([1, 20])
>>> _npu_paged_attention_mla(q, pages, 1, 4, 0.25, table, keys, 12, out)
>>> torch.allclose(out[0, 0], pages[2, 0, 0, :12])
True""",
)  # fmt: skip
SPLITFUSE = attends(
    "_npu_paged_attention_splitfuse",
    "Softmax attention of the last rows of sequences with paged keys, with a mask.",
    (QUERY, KEY_CACHE, VALUE_CACHE, TABLE, CONTEXT, OF_ROWS, LENGTHS, *HEADS, SCALE, out("T")),
    (
        *CHUNKS,
        DECIDED,
        lengths("context_lens", "at most as many keys as mask has columns", "a column per key",
                "most(context_lens) <= K", [20, 32, 17], given={"K": 31}),
    ),
    MASKED_KEYS,
    MIXED,
    example="""\
>>> pages, q, out = torch.randn(4, 16, 2, 16), torch.randn(3, 4, 16), torch.zeros(3, 4, 16)
>>> table, rows, keys = torch.tensor([[2, 0], [1, 3]]), torch.tensor([1, 2]), torch.tensor([1, 20])
>>> mask = torch.zeros(3, 20)
>>> mask[1, 19] = -10000  # hides the last key from the first of two rows
>>> _npu_paged_attention_splitfuse(q, pages, pages, table, keys, mask, rows, 2, 4, 0.25, out)
>>> torch.allclose(out[0, 0], pages[2, 0, 0])
True""",
)  # fmt: skip
SPLITFUSE_V2 = attends(
    "_npu_paged_attention_splitfuse_v2",
    "Causal softmax attention of the last rows of sequences with paged keys, with a compressed mask.",
    (
        *(QUERY, KEY_CACHE, VALUE_CACHE, TABLE, CONTEXT, TRIANGLE, LENGTHS, *HEADS, SCALE),
        Attr("mask_type", "5: a compressed mask.", default=5, domain="mask_type == 5"),
        out("T"),
    ),
    (*CHUNKS, CAUSAL),
    CAUSAL_KEYS,
    MIXED,
    keywords="mask_type",
    example="""\
>>> pages, q, out = torch.randn(4, 16, 2, 16), torch.randn(3, 4, 16), torch.zeros(3, 4, 16)
>>> table, rows, keys = torch.tensor([[2, 0], [1, 3]]), torch.tensor([1, 2]), torch.tensor([1, 20])
>>> mask = torch.ones(128, 128).triu(1)
>>> _npu_paged_attention_splitfuse_v2(q, pages, pages, table, keys, mask, rows, 2, 4, 0.25, out=out)
>>> torch.allclose(out[0, 0], pages[2, 0, 0])
True""",
)

RECORDS = (
    *(FLASH, FLASH_V3, FLASH_UNPAD, FLASH_UNPAD_V2, QLENS),
    *(PAGED_ATTENTION, PAGED_WORKSPACE, PAGED_MLA, SPLITFUSE, SPLITFUSE_V2),
)

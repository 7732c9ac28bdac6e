"""Attention over rows and pages, and its cache, by the names of the chip's transformer library (ATB): the records.

Every function writes a tensor that it is given. Attention itself is npu_fused_infer_attention_score's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fusion_attention.contract import INVALID, Array, Attr, Op, Rule, Tensor
from fusion_attention.ops.auxiliary.caches import IDS, WRITTEN, apart, own_memory, pieces_of, waits_for_none, written
from fusion_attention.ops.auxiliary.common import auxiliary, floats
from fusion_attention.ops.shared.rules import finite_scale, groups_of_heads, invalid, untrained

SIZES = {"T": 6, "R": 3, "M": 2, "P": 4, "Ps": 16, "N1": 4, "N2": 2, "D": 16, "Dv": 8, "K": 40, "L": 32}
UNSEEN = -1000.0  # below it no weight is left of a score, in float32


def hides(mask: torch.Tensor) -> torch.Tensor:
    """What a mask hides: the chip adds -inf or -10000 in float16, and takes 1 in other dtypes."""
    if mask.dtype == torch.bool:
        return mask
    return (mask > 0) | (mask <= UNSEEN)


def in_rows(mask: torch.Tensor) -> torch.Tensor:
    """A mask [rows, columns] or [B, rows, columns], of one in FRACTAL_NZ: [B, columns / 16, rows, 16].

    Any other shape stays; one of 16 columns is the same in both.
    """
    if not isinstance(mask, torch.Tensor) or mask.dim() != 4 or mask.shape[3] != 16 or mask.shape[1] == 1:
        return mask
    rows = mask.transpose(1, 2).flatten(2)
    return rows[0] if mask.shape[0] == 1 else rows


def decided(mask: torch.Tensor) -> bool | str:
    """Whether every element of a mask hides a key or leaves it as it is; reads them."""
    if mask.is_meta or mask.dtype == torch.bool:
        return True
    other = mask[~hides(mask) & (mask != 0)]
    return f"{other[0].item()}" if other.numel() else True


def triangle(mask: torch.Tensor) -> bool:
    """Whether a mask hides what lies above its diagonal, and no more; reads it."""
    return mask.is_meta or bool((hides(mask) == torch.ones_like(mask, dtype=torch.bool).triu(1)).all())


def covers(mask: torch.Tensor, lengths: np.ndarray) -> bool:
    """Whether a mask [S, S], [B or 1, S, S] or [B or 1, 1, S, S] has an element for every score."""
    lead, longest = mask.shape[:-2], max(lengths.tolist(), default=0)
    heads = lead[1] if len(lead) == 2 else 1
    items = lead[0] if lead else 1
    return 2 <= mask.dim() <= 4 and heads == 1 and items in (1, len(lengths)) and min(mask.shape[-2:]) >= longest


def whole_rows(cache: torch.Tensor, rows: torch.Tensor) -> bool:
    """Whether a cache [pages, slots, ...] has rows of so many elements."""
    return cache.dim() > 2 and rows.dim() > 1 and cache.shape[2:].numel() == rows.shape[1:].numel()


def holds_rows(cache: torch.Tensor, rows: torch.Tensor) -> bool:
    """Whether it has them, as they are or in pieces."""
    return whole_rows(cache, rows) or (rows.dim() > 1 and pieces_of(cache, rows))


def capacity(cache: torch.Tensor, rows: torch.Tensor) -> int:
    """How many rows a cache has."""
    return int(cache.shape[0] * cache.shape[1 if whole_rows(cache, rows) else 2])


FUNCTIONS = {
    "covers": covers,
    "decided": decided,
    "triangle": triangle,
    "holds_rows": holds_rows,
    "capacity": capacity,
    "apart": apart,
    "least": lambda lengths: min(lengths.tolist(), default=0),
    "total": lambda lengths: sum(lengths.tolist()),
    "most": lambda lengths: max(lengths.tolist(), default=0),
    "reach": lambda rows, keys: bool((rows <= keys).all()),
}

# ---------------------------------------------------------------------------------------------------------- attention

QUERY = floats("query", "Rows of all sequences, end to end.", shape="T N1 D")
NEW = floats("query", "A row of every sequence.", shape="R N1 D")
KEY, VALUE = (
    floats(name, "Rows of all sequences, end to end.", like="query", shape=f"T N2 {dim}")
    for name, dim in (("key", "D"), ("value", "Dv"))
)
KEY_CACHE, VALUE_CACHE = (
    floats(name, "Pages of all sequences.", like="query", shape=f"P Ps N2 {dim}")
    for name, dim in (("key_cache", "D"), ("value_cache", "Dv"))
)
TABLE = Tensor("block_table", "The pages of every sequence.", dtypes=IDS, shape="R M",
               make=lambda shape: torch.arange(math.prod(shape), dtype=torch.int32).reshape(shape) % 4)  # fmt: skip
CONTEXT = Array("context_lens", "Keys of every sequence.")
LENGTHS = Array("seq_len", "Query rows of every sequence.")
HEADS = (
    Attr("num_kv_heads", "Key heads.", axis="N2", code=INVALID),
    Attr("num_heads", "Query heads.", axis="N1", code=INVALID),
)
SCALE = Attr("scale_value", "Factor on the scores.", type=float)
MASKS = "bool int8 float16 bfloat16 float32"
SEES = "1, or -1000 and below, hides a key; 0 leaves it."
MASK = Tensor("mask", f"{SEES} [S, S] for all sequences, or [R, S, S].", dtypes=MASKS)
OF_ROWS = Tensor("mask", f"{SEES} A line for every row of query.", dtypes=MASKS, shape="T K")
TRIANGLE = Tensor("mask", "torch.ones(S, S).triu(1) of any S: rows see no later keys.", dtypes=MASKS, shape="L L",
                  make=lambda shape: torch.ones(shape).triu(1))  # fmt: skip
WORKSPACE = Tensor("workspace", "Not used: this library plans its own memory.", True)


def out(rows: str, dim: str = "Dv") -> Tensor:
    """What is written."""
    return Tensor("out", "Written.", dtypes="=query", shape=f"{rows} N1 {dim}")


def lengths(name: str, text: str, advice: str, check: str, broken: Any, **more: Any) -> Rule:
    """A rule about lengths."""
    return invalid(check, name, advice, text, invalid={name: broken}, **more)


def none_below_zero(name: str, bad: list[int]) -> Rule:
    """Lengths are numbers of rows."""
    return lengths(name, "lengths >= 0", "a sequence may be empty", f"least({name}) >= 0", bad)


ENDS = (
    none_below_zero("seq_len", [-1, 2, 3]),
    lengths("seq_len", "as many rows as query has, or fewer", "lengths, not ends; rows behind stay as they are",
            "total(seq_len) <= T", [3, 3, 3]),
)  # fmt: skip
IN_PAGES = (
    lengths("context_lens", "one of every row of block_table", "a length for every sequence",
            "len(context_lens) == R", [20, 31]),
    none_below_zero("context_lens", [-1, 31, 16]),
    lengths("context_lens", "at most as many keys as the pages of a row of block_table", "that many slots there are",
            "most(context_lens) <= M * Ps", [20, 33, 17]),
)  # fmt: skip
CHUNKS = (
    *ENDS,
    lengths("seq_len", "one of every row of block_table", "a length for every sequence", "len(seq_len) == R", [1, 2]),
    *IN_PAGES,
    lengths("context_lens", "no fewer keys than query rows", "the keys of its own rows count too",
            "reach(seq_len, context_lens)", [20, 1, 17],
            when="len(seq_len) == len(context_lens) and least(context_lens) >= 0"),
)  # fmt: skip
WIDE = invalid("covers(mask, seq_len)", "mask", "of every row and key of the longest sequence",
               "[S, S] or [sequences, S, S]", invalid={"mask": "2 2"})  # fmt: skip
DECIDED = Rule("decided(mask)", "mask", "a bias is not computed here", "1 or -1000 and below, or 0", code=INVALID,
               reads=True, invalid={"mask": torch.full((6, 40), -1.0)})  # fmt: skip
ROWS_DECIDED = Rule("decided(mask)", "mask", "a bias is not computed here", "1 or -1000 and below, or 0", code=INVALID,
                    reads=True, invalid={"mask": torch.full((4, 4), -1.0)})  # fmt: skip
CAUSAL = Rule("triangle(mask)", "mask", "of a compressed mask the content is known", "torch.ones(S, S).triu(1)",
              code=INVALID, reads=True, invalid={"mask": torch.zeros(32, 32)})  # fmt: skip
NO_GRADIENT = "attention with a gradient is npu_fusion_attention; or call it under torch.no_grad()"
FORMULA = "out = softmax(scale_value * Q K^T over the keys that {seen}) V"
PACKED = {"seq_len": torch.tensor([1, 2, 3]), "scale_value": 0.25}
PAGED = {"context_lens": torch.tensor([20, 31, 17]), "scale_value": 0.25}
MIXED = {**PACKED, **PAGED}


def attends(
    name: str, summary: str, inputs: tuple[Any, ...], rules: tuple[Rule, ...], seen: str, sample: Mapping[str, Any]
) -> Op:
    """A record of attention that writes its result."""
    shapes = {p.name: tuple(SIZES[word] for word in p.words("")) for p in inputs if isinstance(p, Tensor)}
    floating = {n: shapes[n] for n in ("query", "key", "value", "key_cache", "value_cache") if n in shapes}
    return auxiliary(
        name,
        summary,
        inputs,
        (),
        rules=(
            *rules,
            groups_of_heads("num_heads"),
            finite_scale("scale_value", optional=False),
            *waits_for_none("out", shape=shapes["out"]),
            *own_memory("out", shape=shapes["out"]),
            *untrained(NO_GRADIENT, None, invalid, **floating),
        ),
        formula=FORMULA.format(seen=seen),
        functions=FUNCTIONS,
        sizes=SIZES,
        sample=sample,
    )


SEEN_OF_MASK, SEEN_OF_SEQUENCE = "a mask leaves of its own sequence", "its own sequence has"
SEEN_BEFORE = "its own sequence has up to the row itself, the last row at the last key"
FLASH = attends(
    "_npu_flash_attention",
    "torch_npu's attention of packed rows under a mask, by ATB's name.",
    (QUERY, KEY, VALUE, MASK, LENGTHS, SCALE, *HEADS[::-1], out("T")),
    (*ENDS, WIDE, ROWS_DECIDED),
    SEEN_OF_MASK,
    {**PACKED, "mask": "3 3"},
)
FLASH_V3 = attends(
    "_npu_flash_attention_v3",
    "torch_npu's causal attention of packed rows, by ATB's name.",
    (
        *(QUERY, KEY, VALUE, TRIANGLE, LENGTHS, SCALE, *HEADS[::-1]),
        Attr("mask_type", "3: a compressed mask.", default=3, domain="mask_type == 3", bad=1),
        out("T"),
    ),
    (*ENDS, CAUSAL),
    SEEN_BEFORE,
    PACKED,
)
FLASH_UNPAD = attends(
    "_npu_flash_attention_unpad",
    "torch_npu's attention of packed rows without a mask, by ATB's name.",
    (QUERY, KEY, VALUE, LENGTHS, SCALE, *HEADS[::-1], out("T")),
    ENDS,
    SEEN_OF_SEQUENCE,
    PACKED,
)
FLASH_UNPAD_V2 = attends(
    "_npu_flash_attention_unpad_v2",
    "torch_npu's attention of packed rows without a mask and with a choice of the kernel, by ATB's name.",
    (
        *(QUERY, KEY, VALUE, LENGTHS, SCALE, *HEADS[::-1]),
        Attr("kernel_type", "The chip's kernel: 0, or 2. Both mean the same here.", default=0,
             domain="kernel_type in (0, 2)", bad=1),
        out("T"),
    ),
    ENDS,
    SEEN_OF_SEQUENCE,
    PACKED,
)  # fmt: skip
QLENS = attends(
    "_npu_flash_attention_qlens",
    "torch_npu's causal attention of the last rows of sequences that lie in pages, by ATB's name.",
    (QUERY, KEY_CACHE, VALUE_CACHE, TABLE, TRIANGLE, LENGTHS, CONTEXT, *HEADS, SCALE, out("T")),
    (*CHUNKS, CAUSAL),
    SEEN_BEFORE,
    MIXED,
)
PAGED_ATTENTION = attends(
    "_npu_paged_attention",
    "torch_npu's attention of one row of every sequence over its pages, by ATB's name.",
    (NEW, KEY_CACHE, VALUE_CACHE, *HEADS, SCALE, TABLE, CONTEXT, out("R"), WORKSPACE),
    IN_PAGES,
    SEEN_OF_SEQUENCE,
    PAGED,
)
PAGED_WORKSPACE = PAGED_ATTENTION.version(
    "_npu_paged_attention_get_workspace",
    "The workspace of _npu_paged_attention: a tensor without elements.",
    params=(*PAGED_ATTENTION.params[:-1], Tensor("workspace", "Without elements.", dtypes="=query", output=True)),
    results=("workspace",),
    formula="This library plans its own memory; what is wrong with the call is said here already.",
)
PAGED_MLA = attends(
    "_npu_paged_attention_mla",
    "torch_npu's attention of one row of every sequence over pages of latents, by ATB's name.",
    (
        *(NEW, KEY_CACHE, *HEADS, SCALE, TABLE, CONTEXT),
        Attr("mla_vheadsize", "Elements of a key that are its value, from the first.", axis="Dv", code=INVALID),
        out("R"),
    ),
    (
        *IN_PAGES,
        invalid("1 <= Dv <= D", "mla_vheadsize", "the value is the key's first part", "elements that a key has",
                invalid={"Dv": 17}),
    ),
    SEEN_OF_SEQUENCE,
    PAGED,
)  # fmt: skip
SPLITFUSE = attends(
    "_npu_paged_attention_splitfuse",
    "torch_npu's attention of the last rows of sequences that lie in pages, under a mask, by ATB's name.",
    (QUERY, KEY_CACHE, VALUE_CACHE, TABLE, CONTEXT, OF_ROWS, LENGTHS, *HEADS, SCALE, out("T")),
    (
        *CHUNKS,
        DECIDED,
        lengths("context_lens", "at most as many keys as mask has columns", "a line of it is of a row's keys",
                "most(context_lens) <= K", [20, 32, 17], given={"K": 31}),
    ),
    SEEN_OF_MASK,
    MIXED,
)  # fmt: skip
SPLITFUSE_V2 = attends(
    "_npu_paged_attention_splitfuse_v2",
    "torch_npu's causal attention of the last rows of sequences that lie in pages, with mask_type, by ATB's name.",
    (
        *(QUERY, KEY_CACHE, VALUE_CACHE, TABLE, CONTEXT, TRIANGLE, LENGTHS, *HEADS, SCALE),
        Attr("mask_type", "5: a compressed mask.", default=5, domain="mask_type == 5", bad=1),
        out("T"),
    ),
    (*CHUNKS, CAUSAL),
    SEEN_BEFORE,
    MIXED,
)

# -------------------------------------------------------------------------------------------------- cache and positions

STORED = "what is stored in a cache has no derivative: call it under torch.no_grad()"


def stores(name: str, summary: str, names: tuple[str, ...]) -> Op:
    """A record of what stores rows in caches."""
    caches, sizes = tuple(f"{n}_cache" for n in names), {"key": (6, 2, 16), "value": (6, 2, 8)}
    paged = {"key_cache": "P Ps N2 D", "value_cache": "P Ps N2 Dv"}
    pages = {c: tuple(SIZES[word] for word in paged[c].split()) for c in caches}
    return auxiliary(
        name,
        summary,
        (
            *(Tensor(n, "[tokens, ...].", dtypes=WRITTEN) for n in names),
            *(written(c, "Pages [pages, slots, ...] of such rows, or in pieces [pages, pieces, slots, width].", n)
              for c, n in zip(caches, names, strict=True)),
            Tensor("slot_indices", "Page * slots of a page + slot; below 0 stores nothing.", dtypes=IDS, shape="T",
                   make=lambda shape: torch.arange(shape[0], dtype=torch.int32)),
        ),
        (),
        rules=(
            *(
                invalid(f"holds_rows({c}, {n})", c, f"{n} is [tokens, ...]", "pages [pages, slots, ...] of such rows",
                        invalid={c: "P Ps N2 5"})
                for c, n in zip(caches, names, strict=True)
            ),
            *(
                invalid(f"{n}.shape[:1] == (T,)", n, "a row for every slot", "as many rows as slot_indices has",
                        invalid={n: f"5 N2 {'D' if n == 'key' else 'Dv'}"})
                for n in names
            ),
            *(
                Rule(f"within(slot_indices, capacity({c}, {n}), low=-9223372036854775808)", "slot_indices",
                     "each is page * slots of a page + slot", f"slots that {c} has", code=INVALID, reads=True,
                     when=f"{c}.dim() > 2",
                     invalid={"slot_indices": torch.full((6,), 40), c: f"2 Ps N2 {'D' if n == 'key' else 'Dv'}"})
                for c, n in zip(caches, names, strict=True)
            ),
            *(rule for c in caches for rule in (*waits_for_none(c, shape=pages[c]), *own_memory(c, shape=pages[c]))),
            *untrained(STORED, None, invalid, **{n: sizes[n] for n in names}),
        ),
        formula="key_cache[slot // size, slot % size] = key[token],  slot = slot_indices[token]",
        functions=FUNCTIONS,
        sizes=SIZES,
        sample={n: f"T N2 {'D' if n == 'key' else 'Dv'}" for n in names} | {c: paged[c] for c in caches},
    )  # fmt: skip


RESHAPE = stores(
    "_npu_reshape_and_cache", "torch_npu's store of key and value rows in pages, in place, by ATB's name.",
    ("key", "value"),
)  # fmt: skip
RESHAPE_ONE = stores(
    "_npu_reshape_and_cache_siso", "torch_npu's store of key rows in pages, in place, by ATB's name.", ("key",)
)
ROTARY = auxiliary(
    "_npu_rotary_embedding",
    "torch_npu's rotary positions of queries and keys, in place, by ATB's name.",
    (
        Tensor("positions", "The line of cos_sin_cache of every token.", dtypes=IDS, shape="T",
               make=lambda shape: torch.arange(shape[0])),
        floats("query", "[tokens, ...]: heads of head_size elements. Written."),
        floats("key", "As query. Written."),
        Attr("head_size", "Elements of a head.", domain="head_size > 0 and head_size % 2 == 0", bad=15),
        floats("cos_sin_cache", "Of every position its head_size / 2 cosines, then its sines.", shape="L D"),
        Attr("is_neox_style", "Element i turns with i + D/2; otherwise 2i with 2i + 1.", type=bool),
    ),
    (),
    rules=(
        *(
            invalid(f"{n}.dim() > 1 and {n}.shape[0] == T", n, "a line for every position", "[tokens, ...]",
                    invalid={n: "5 32"})
            for n in ("query", "key")
        ),
        *(
            invalid(f"{n}.shape[1:].numel() % head_size == 0", n, "heads of head_size elements",
                    "a multiple of head_size elements", when=f"{n}.dim() > 1", invalid={n: "T 24"})
            for n in ("query", "key")
        ),
        invalid("D == head_size", "cos_sin_cache", "turn the part of a head that turns as a head of its own",
                "[positions, head_size]", invalid={"D": 8}),
        Rule("within(positions, L)", "positions", "each has its line", "lines that cos_sin_cache has", code=INVALID,
             reads=True, invalid={"positions": torch.full((6,), 32)}),
        *(rule for n in ("query", "key")
          for rule in (*waits_for_none(n, shape=(6, 32)), *own_memory(n, shape=(6, 32)))),
    ),
    formula="x = x * cos + turned(x) * sin,  for queries and keys",
    functions=FUNCTIONS,
    sizes=SIZES,
    sample={"query": "T 32", "key": "T 32", "head_size": 16, "is_neox_style": True},
)  # fmt: skip
RECORDS = (
    *(FLASH, FLASH_V3, FLASH_UNPAD, FLASH_UNPAD_V2, QLENS),
    *(PAGED_ATTENTION, PAGED_WORKSPACE, PAGED_MLA, SPLITFUSE, SPLITFUSE_V2),
    *(RESHAPE, RESHAPE_ONE, ROTARY),
)

"""Operator definitions of CANN's transformer library (ATB) that store rows in caches and apply rotary embedding."""

from typing import Any

import torch

from fusion_attention.contract import INVALID, Attr, Op, Tensor
from fusion_attention.ops.auxiliary_definitions.atb import SIZES
from fusion_attention.ops.auxiliary_definitions.caches import IDS, WRITTEN, apart, in_place, stores_fragments, written
from fusion_attention.ops.auxiliary_definitions.common import auxiliary, floats, writes
from fusion_attention.ops.shared.rules import invalid, meaning, untrained


def whole_rows(cache: torch.Tensor, rows: torch.Tensor) -> bool:
    """True if a cache [pages, page size, ...] has as many elements per slot as rows [tokens, ...] per token."""
    return cache.dim() > 2 and rows.dim() > 1 and cache.shape[2:].numel() == rows.shape[1:].numel()


def holds_rows(cache: torch.Tensor, rows: torch.Tensor) -> bool:
    """True if a cache can store rows [tokens, ...], contiguous or in fragments [pages, fragments, slots, width]."""
    return whole_rows(cache, rows) or (rows.dim() > 1 and stores_fragments(cache, rows))


def capacity(cache: torch.Tensor, rows: torch.Tensor) -> int:
    """Returns the number of rows [tokens, ...] that a paged cache can store, contiguous or in fragments."""
    return int(cache.shape[0] * cache.shape[1 if whole_rows(cache, rows) else 2])


FUNCTIONS = {"holds_rows": holds_rows, "capacity": capacity, "apart": apart}
STORED = "what is stored in a cache has no derivative: call it under torch.no_grad()"


def stores(name: str, summary: str, names: tuple[str, ...], **more: Any) -> Op:
    """Returns an operator definition: rows, the parameters `names`, are stored in caches; more: other fields of Op."""
    caches, sizes = tuple(f"{n}_cache" for n in names), {"key": (6, 2, 16), "value": (6, 2, 8)}
    paged = {"key_cache": "P Ps N2 D", "value_cache": "P Ps N2 Dv"}
    pages = {c: tuple(SIZES[word] for word in paged[c].split()) for c in caches}
    return auxiliary(
        name,
        summary,
        (
            *(Tensor(n, "[tokens, ...].", dtypes=WRITTEN) for n in names),
            *(written(c, "Pages [pages, page size, ...] of such rows, or in fragments [pages, fragments, page size, "
                      "width].", n)
              for c, n in zip(caches, names, strict=True)),
            Tensor("slot_indices", "Page * page size + slot; negative: the row is not stored. Of equal slots, the last "
                   "row is stored.", dtypes=IDS, shape="T",
                   make=lambda shape: torch.arange(shape[0], dtype=torch.int32)),
        ),
        (),
        rules=(
            *(
                invalid(f"holds_rows({c}, {n})",
                        f"{c}: pages [pages, page size, ...] of such rows ({n} is [tokens, ...])",
                        invalid={c: "P Ps N2 5"})
                for c, n in zip(caches, names, strict=True)
            ),
            *(
                invalid(f"{n}.shape[:1] == (T,)", f"{n}: as many rows as slot_indices has (one slot per row)",
                        invalid={n: f"5 N2 {'D' if n == 'key' else 'Dv'}"})
                for n in names
            ),
            *(
                meaning(f"within(slot_indices, capacity({c}, {n}), low=-9223372036854775808)",
                        f"slot_indices: numbers of slots of {c} (each is page * page size + slot)", code=INVALID,
                        reads=True, when=f"{c}.dim() > 2",
                        invalid={"slot_indices": torch.full((6,), 40), c: f"2 Ps N2 {'D' if n == 'key' else 'Dv'}"})
                for c, n in zip(caches, names, strict=True)
            ),
            *(rule for c in caches for rule in in_place(**{c: pages[c]})),
            *untrained(STORED, None, invalid, **{n: sizes[n] for n in names}),
        ),
        formula="key_cache[slot // size, slot % size] = key[token],  slot = slot_indices[token]",
        functions=FUNCTIONS,
        sizes=SIZES,
        sample={n: f"T N2 {'D' if n == 'key' else 'Dv'}" for n in names} | {c: paged[c] for c in caches},
        declared=writes(*caches),
        **more,
    )  # fmt: skip


RESHAPE = stores(
    "_npu_reshape_and_cache", "Stores key and value rows in the pages of a cache, in place.",
    ("key", "value"),
    example="""\
>>> pages, rows = torch.zeros(4, 16, 2, 8), torch.randn(3, 2, 8)
>>> _npu_reshape_and_cache(rows, rows, pages, pages.clone(), torch.tensor([17, 18, -1]))
>>> torch.equal(pages[1, 1:3], rows[:2])
True""",
)  # fmt: skip
RESHAPE_ONE = stores(
    "_npu_reshape_and_cache_siso",
    "Stores key rows in the pages of a cache, in place.",
    ("key",),
    example="""\
>>> pages, rows = torch.zeros(4, 16, 2, 8), torch.randn(3, 2, 8)
>>> _npu_reshape_and_cache_siso(rows, pages, torch.tensor([17, 18, -1]))
>>> torch.equal(pages[1, 1:3], rows[:2])
True""",
)
ROTARY = auxiliary(
    "_npu_rotary_embedding",
    "Rotates pairs of elements of queries and keys by the angles of their positions, in place.",
    (
        Tensor("positions", "The row of cos_sin_cache of every token.", dtypes=IDS, shape="T",
               make=lambda shape: torch.arange(shape[0])),
        floats("query", "[tokens, ...]: heads of head_size elements; written in place."),
        floats("key", "[tokens, ...]: heads of head_size elements; written in place."),
        Attr("head_size", "Elements of a head.", domain="head_size > 0 and head_size % 2 == 0"),
        floats("cos_sin_cache", "Per position head_size / 2 cosines, then the sines.", shape="L D"),
        Attr("is_neox_style", "Pairs of elements are i and i + D/2; False: 2i and 2i + 1.", type=bool),
    ),
    (),
    rules=(
        *(
            invalid(f"{n}.dim() > 1 and {n}.shape[0] == T", f"{n}: [tokens, ...] (one row per position)",
                    invalid={n: "5 32"})
            for n in ("query", "key")
        ),
        *(
            invalid(f"{n}.shape[1:].numel() % head_size == 0",
                    f"{n}: a multiple of head_size elements (heads of head_size elements)", when=f"{n}.dim() > 1",
                    invalid={n: "T 24"})
            for n in ("query", "key")
        ),
        invalid("D == head_size",
                "cos_sin_cache: [positions, head_size] (to rotate some elements of heads, pass these alone)",
                invalid={"D": 8}),
        meaning("within(positions, L)", "positions: numbers of rows of cos_sin_cache (one row per position)",
                code=INVALID,
                reads=True, invalid={"positions": torch.full((6,), 32)}),
        *(rule for n in ("query", "key") for rule in in_place(**{n: (6, 32)})),
    ),
    formula="x = x * cos + rotated(x) * sin,  for queries and keys",
    functions=FUNCTIONS,
    sizes=SIZES,
    sample={"query": "T 32", "key": "T 32", "head_size": 16, "is_neox_style": True},
    declared=writes("query", "key"),
    example="""\
>>> quarter = torch.tensor([[0.0, 0.0, 1.0, 1.0]])  # cosine and sine of 90 degrees
>>> x, key = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.zeros(1, 4)
>>> _npu_rotary_embedding(torch.tensor([0]), x, key, 4, quarter, True)
>>> x.tolist()
[[-3.0, -4.0, 1.0, 2.0]]""",
)  # fmt: skip
RECORDS = (RESHAPE, RESHAPE_ONE, ROTARY)

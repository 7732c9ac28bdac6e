"""Operator definitions of functions that write and read caches, paged or not."""

import itertools

import torch

from fusion_attention.contract import Attr, Rule, Tensor
from fusion_attention.ops.auxiliary_definitions.common import auxiliary, result, writes
from fusion_attention.ops.shared.params import one_of
from fusion_attention.ops.shared.rules import invalid, meaning, untrained

IDS = "int32 int64"
WRITTEN = "float16 bfloat16 float32 int8 uint8 int16 int32"


def stores_fragments(cache: torch.Tensor, rows: torch.Tensor) -> bool:
    """True if a cache [pages, fragments, page size, width] can store rows [tokens, heads, D] in fragments (NZ)."""
    return cache.dim() == 4 and cache.shape[1] * cache.shape[3] == rows.shape[1:].numel()


def is_fragmented(cache: torch.Tensor, rows: torch.Tensor, mode: str = "Norm") -> bool:
    """True if a paged cache stores rows in fragments (NZ), [pages, fragments, page size, width]. A shape that also fits
    contiguous rows has fragments only if the mode is "PA_NZ" and each has 32 bytes."""
    if cache.shape[2:] == rows.shape[1:]:
        chips_width = cache.shape[3] * cache.element_size() == 32
        return mode == "PA_NZ" and chips_width and stores_fragments(cache, rows)
    return True


def holds(cache: torch.Tensor, rows: torch.Tensor, fragments: bool = True) -> bool:
    """True if a paged cache can store rows [tokens, heads, D], contiguous or (if `fragments`) in fragments (NZ)."""
    if cache.dim() != 4 or rows.dim() != 3:
        return False
    return cache.shape[2:] == rows.shape[1:] or (fragments and stores_fragments(cache, rows))


def slots(cache: torch.Tensor, rows: torch.Tensor, mode: str = "Norm") -> int:
    """Returns the number of rows (tokens) that a paged KV cache can store; rows, mode: rows to store and cache mode,
    which show if the cache is in fragments."""
    return int(cache.shape[0] * cache.shape[2 if is_fragmented(cache, rows, mode) else 1])


def written(name: str, text: str, like: str) -> Tensor:
    """Returns the operator parameter `name`, a KV cache written in place, with the dtype of parameter `like`."""
    return Tensor(name, text, dtypes=f"={like}")


def in_place(dtype: torch.dtype = torch.float16, /, **shapes: tuple[int, ...]) -> tuple[Rule, ...]:
    """Returns rules that check calls: tensors written in place require no gradients, and no two of their elements share
    memory. shapes: names of the tensors, with sample shapes; dtype: dtype of the samples."""
    leaves = {name: torch.zeros(shape, dtype=dtype, requires_grad=True) for name, shape in shapes.items()}
    expanded = {n: torch.zeros(s[0], *(1,) * (len(s) - 1), dtype=dtype).expand(s) for n, s in shapes.items()}
    waits = "a tensor that does not require a gradient (it is written in place: detach() it, or use torch.no_grad())"
    shares = "a separate memory address for every element (an expanded tensor cannot be written: clone() it)"
    return (
        *(invalid(f"not trained({n})", f"{n}: {waits}", invalid={n: leaf}) for n, leaf in leaves.items()),
        *(invalid(f"apart({n})", f"{n}: {shares}", invalid={n: view}) for n, view in expanded.items()),
    )


def apart(tensor: torch.Tensor) -> bool:
    """True if no two elements of a tensor share memory; in a result of expand() they do."""
    return all(stride or size < 2 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def of_leaf(tensor: torch.Tensor) -> bool:
    """True if a tensor is a leaf of autograd's graph, or a view of one, which autograd refuses to write in place."""
    return tensor.is_leaf or (tensor._base is not None and tensor._base.is_leaf)


def lengths_fill(seq_lens: torch.Tensor, cumulative: bool, rows: int) -> bool:
    """True if the lengths in seq_lens (or cumulative ends from 0) are not negative and sum to `rows`; reads them."""
    if seq_lens.is_meta or seq_lens.dim() != 1:
        return True
    lengths = seq_lens.tolist()
    if cumulative:
        if not lengths or lengths[0] != 0:
            return False
        lengths = [end - start for start, end in itertools.pairwise(lengths)]
    return min(lengths, default=0) >= 0 and sum(lengths) == rows


FUNCTIONS = {"holds": holds, "slots": slots, "apart": apart, "of_leaf": of_leaf, "lengths_fill": lengths_fill}
PAGES = (3, 4, 2, 8)
STORED = "what is stored in a cache has no derivative: call it under torch.no_grad()"


def _of_pages(names: tuple[tuple[str, str], ...]) -> tuple[Rule, ...]:
    text = "pages [pages, page size, heads, D] of such rows, or in mode PA_NZ [pages, fragments, page size, width]"
    return tuple(
        invalid(
            f"holds({cache}, {rows}, cache_mode != 'Norm')",
            f"{cache}: {text} ({rows} is [tokens, heads, D])",
            invalid={cache: "3 4 2 5"},
        )
        for rows, cache in names
    )


SCATTER_PA = auxiliary(
    "npu_scatter_pa_kv_cache",
    "Stores key and value rows in the pages of a cache, in place.",
    (
        Tensor("key", "[tokens, heads, D].", dtypes=WRITTEN),
        Tensor("value", "[tokens, heads, Dv].", dtypes="=key"),
        written(
            "key_cache",
            "Pages of keys [pages, page size, heads, D], or in fragments (NZ) [pages, fragments, page size, width].",
            "key",
        ),
        written("value_cache", "Pages of values, in the form of key_cache.", "key"),
        Tensor(
            "slot_mapping",
            "[tokens]: page * page size + slot; negative: the row is not stored. Of equal slots, the last row is "
            "stored.",
            dtypes=IDS,
        ),
        *(
            Tensor(name, "Not supported: for compressed caches.", True)
            for name in ("compress_lens", "compress_seq_offsets", "seq_lens")
        ),
        one_of(
            "cache_mode",
            '"Norm": pages of contiguous rows; "PA_NZ": fragments, if the shape of a cache allows them; if it allows '
            "both, fragments of 32 bytes.",
            ("Norm", "PA_NZ"),
            default="PA_NZ",
        ),
    ),
    (),
    rules=(
        *_of_pages((("key", "key_cache"), ("value", "value_cache"))),
        invalid(
            "slot_mapping.dim() == 1 and slot_mapping.shape[0] == key.shape[0]",
            "slot_mapping: as many slots as key has tokens (one per row)",
            when="key.dim() > 0",
            invalid={"slot_mapping": ("5", "zeros")},
        ),
        invalid(
            "value.shape[0] == key.shape[0]",
            "value: as many tokens as key has (one value per key)",
            when="key.dim() > 0 and value.dim() > 0",
            invalid={"value": "5 2 W"},
        ),
        invalid(
            "not holds(key_cache, key) or not holds(value_cache, value)"
            " or slots(key_cache, key, cache_mode) == slots(value_cache, value, cache_mode)",
            "value_cache: as many slots as key_cache has (slot_mapping is for both)",
            invalid={"value_cache": "2 4 2 W"},
        ),
        meaning(
            "within(slot_mapping, slots(key_cache, key, cache_mode), low=-9223372036854775808)",
            "slot_mapping: numbers of slots of the cache (each is page * page size + slot)",
            when="holds(key_cache, key)",
            reads=True,
            invalid={"slot_mapping": torch.tensor([0, 1, 2, 12])},
        ),
        *in_place(key_cache=PAGES, value_cache=PAGES),
        *untrained(STORED, key=(4, 2, 8), value=(4, 2, 8)),
        *(
            invalid(f"{name} is None", f"{name}: None (compressed caches are not supported)")
            for name in ("compress_lens", "compress_seq_offsets", "seq_lens")
        ),
    ),
    formula="key_cache[slot // size, slot % size] = key[token],  slot = slot_mapping[token]; values likewise",
    functions=FUNCTIONS,
    sample={
        "key": "4 2 W",
        "value": "4 2 W",
        "key_cache": "3 4 2 W",
        "value_cache": "3 4 2 W",
        "slot_mapping": torch.tensor([11, 0, -1, 5]),
    },
    keywords="compress_lens",
    declared=writes("key_cache", "value_cache") | {"cache_mode": str | None},
    example="""\
>>> pages, rows = torch.zeros(4, 16, 2, 8), torch.randn(3, 2, 8)
>>> npu_scatter_pa_kv_cache(rows, rows, pages, pages.clone(), torch.tensor([17, 18, -1]))
>>> torch.equal(pages[1, 1:3], rows[:2])
True""",
)
GATHER_PA = auxiliary(
    "npu_gather_pa_kv_cache",
    "Copies the rows of sequences from the pages of a cache to packed tensors, in place.",
    (
        Tensor("key_cache", "Pages of keys.", dtypes=WRITTEN),
        Tensor("value_cache", "Pages of values.", dtypes="=key_cache"),
        Tensor("block_tables", "[sequences, pages]; pages that do not exist are read as zeros.", dtypes=IDS),
        Tensor("seq_lens", "Rows of every sequence [sequences], or cumulative ends [sequences + 1].", dtypes=IDS),
        written("key", "[tokens, heads, D]; written in place.", "key_cache"),
        written("value", "[tokens, heads, Dv]; written in place.", "key_cache"),
        Tensor(
            "seq_offset", "[sequences]: tokens before the first row, a multiple of the page size.", True, dtypes=IDS
        ),
        Attr("is_seq_lens_cumsum", "seq_lens has a 0, then cumulative ends.", type=bool, default=False),
    ),
    (),
    rules=(
        *(
            invalid(
                f"holds({cache}, {rows})",
                f"{rows}: rows as {cache} has them ([tokens, heads, D])",
                invalid={rows: "6 2 5"},
            )
            for rows, cache in (("key", "key_cache"), ("value", "value_cache"))
        ),
        invalid(
            "key.dim() != 3 or value.dim() != 3 or key.shape[0] == value.shape[0]",
            "value: as many rows as key has (one value per key)",
            invalid={"value": "5 2 W"},
        ),
        invalid(
            "not holds(key_cache, key) or not holds(value_cache, value)"
            " or slots(key_cache, key) == slots(value_cache, value)",
            "value_cache: as many slots as key_cache has (block_tables is for both)",
            invalid={"value_cache": "2 4 2 W"},
        ),
        invalid(
            "block_tables.dim() == 2 and seq_lens.dim() == 1"
            " and seq_lens.shape[0] == block_tables.shape[0] + is_seq_lens_cumsum",
            "seq_lens: a length for every row of block_tables (and a leading 0 if they are cumulative)",
            invalid={"seq_lens": torch.tensor([3, 1, 2])},
        ),
        invalid(
            "seq_offset is None or seq_offset.shape == block_tables.shape[:1]",
            "seq_offset: one for every row of block_tables (tokens that are not copied)",
            invalid={"seq_offset": torch.tensor([3, 1, 2])},
        ),
        meaning(
            "lengths_fill(seq_lens, is_seq_lens_cumsum, key.shape[0])",
            "seq_lens: lengths that add up to the rows of key (all rows of key and value are written)",
            when="key.dim() == 3",
            reads=True,
            invalid={"seq_lens": torch.tensor([3, 4])},
        ),
        *in_place(key=(6, 2, 8), value=(6, 2, 8)),
    ),
    formula="key[token] = key_cache[block_tables[sequence, (offset + i) // size], i % size] for row i; values likewise",
    functions=FUNCTIONS,
    sample={
        "key_cache": "3 4 2 W",
        "value_cache": "3 4 2 W",
        "block_tables": torch.tensor([[2, 0], [1, 1]]),
        "seq_lens": torch.tensor([5, 1]),
        "key": "6 2 W",
        "value": "6 2 W",
    },
    keywords="seq_offset",
    declared=writes("key", "value"),
    example="""\
>>> pages, rows = torch.randn(4, 16, 2, 8), torch.zeros(20, 2, 8)
>>> npu_gather_pa_kv_cache(pages, pages, torch.tensor([[3, 1]]), torch.tensor([20]), rows, rows.clone())
>>> torch.equal(rows, torch.cat((pages[3], pages[1, :4])))
True""",
)


SELF, UPDATES = (
    Tensor("input", "The tensor that is updated."),
    Tensor("updates", "A row for every index; of equal indices the last row is stored.", dtypes="=input"),
)
INDICES = Tensor("indices", "[..., K]: indices of the first K axes of input.", dtypes=IDS)
SCATTER_ND = auxiliary(
    "npu_scatter_nd_update",
    "A copy of a tensor in which rows with these indices are replaced.",
    (SELF, INDICES, UPDATES),
    (result("y", "In the shape of input.", "=input"),),
    rules=(
        invalid(
            "0 < indices.dim() and 0 < indices.shape[-1] <= input.dim()",
            "indices: [..., K] with K at most the axes of input (the last axis is one index)",
            invalid={"indices": torch.zeros(3, 4, dtype=torch.int64), "updates": "3"},
        ),
        invalid(
            "updates.shape == indices.shape[:-1] + input.shape[indices.shape[-1]:]",
            "updates: the shape of indices without its last axis, then that of input without its first K (a row for "
            "every index)",
            when="indices.dim() > 0",
            invalid={"updates": "3 7"},
        ),
        meaning(
            "within(indices, *input.shape[:indices.shape[-1]])",
            "indices: indices of input (negative ones are not allowed)",
            when="0 < indices.dim() and 0 < indices.shape[-1] <= input.dim()",
            reads=True,
            invalid={"indices": torch.tensor([[0], [2], [5]])},
        ),
    ),
    formula="y = input;  y[indices[i]] = updates[i]",
    sample={"input": ("5 W", "float32"), "indices": torch.tensor([[4], [0], [2]]), "updates": "3 W"},
    example="""\
>>> npu_scatter_nd_update(torch.zeros(4), torch.tensor([[2]]), torch.ones(1)).tolist()
[0.0, 0.0, 1.0, 0.0]""",
)
SCATTER_ND_ = SCATTER_ND.version(
    "npu_scatter_nd_update_",
    "Replaces the rows of a tensor with these indices, in place.",
    rules=(
        *SCATTER_ND.rules,
        invalid(  # read at every call: calls of one signature differ in it
            "not (trained(input) and of_leaf(input))",
            "input: no leaf that requires a gradient, nor a view of one (it is written in place: detach() it, or use "
            "torch.no_grad())",
            reads=True,
            invalid={"input": torch.zeros(5, 8, requires_grad=True)},
        ),
        invalid(
            "apart(input)",
            "input: a separate memory address for every element (an expanded tensor cannot be written: clone() it)",
            invalid={"input": torch.zeros(5, 1).expand(5, 8)},
        ),
    ),
    formula="input[indices[i]] = updates[i]",
    functions={**SCATTER_ND.functions, **FUNCTIONS},
    declared=writes("input"),
    returns="input itself.",
    example="""\
>>> cache = torch.zeros(4)
>>> npu_scatter_nd_update_(cache, torch.tensor([[2]]), torch.ones(1)) is cache
True""",
)

RECORDS = (SCATTER_PA, GATHER_PA, SCATTER_ND, SCATTER_ND_)

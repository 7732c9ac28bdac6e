"""Sparse attention and its indexer over int8: the records.

What lengths, pages and selections must be is said by the functions over floats, which compute it.
"""

from __future__ import annotations

import torch

from fusion_attention.contract import Array, Attr, Tensor
from fusion_attention.ops.companions.common import companion, floats, result
from fusion_attention.ops.indexer.records import COUNT
from fusion_attention.ops.shared.rules import invalid, untrained
from fusion_attention.ops.sparse.records import BLOCK, MODE, NEXT, PRE, SCALE
from fusion_attention.ops.sparse.rules import first_block

INT8 = "float8 forms are the chip's alone: npu_dynamic_quant makes int8"
SCALES = "float16 float32"
SIZES = {"B": 2, "S1": 4, "S2": 6, "N1": 4, "D": 16, "K": 3}
LAYOUT = Attr("layout_query", 'Axes of query: "BSND" or "TND".', type=str, default="BSND",
              domain="layout_query in ('BSND', 'TND')", bad="BNSD")  # fmt: skip


def layout_of_keys(name: str) -> Attr:
    """How keys lie."""
    return Attr(name, 'Axes of key: as query\'s, or "PA_BSND".', type=str, default="BSND",
                domain=f"{name} in ('BSND', 'TND', 'PA_BSND')", bad="BNSD")  # fmt: skip


def dtype_of(name: str) -> Attr:
    """A dtype that torch cannot say."""
    return Attr(name, f"None, or 1: int8; {INT8}.", default=None, domain=f"{name} in (None, 1)", bad=290)


def mode_of(name: str, only: int, text: str) -> Attr:
    """The one way of quantising that there is."""
    return Attr(name, text, domain=f"{name} == {only}", bad=only + 1)


def lengths(side: str) -> Array:
    """Of every sequence."""
    return Array(f"actual_seq_lengths_{side}", "Tokens of every sequence; packed: cumulative ends.", True)


TABLE = Tensor("block_table", "The pages of every sequence, for PA_BSND.", True, dtypes="int32 int64")
AXES = invalid(
    "query.dim() == (4 if layout_query == 'BSND' else 3)", "query", "as layout_query says",
    "[B, S1, N1, D], or [T1, N1, D]", spoil={"layout_query": "TND"},
)  # fmt: skip


def key_axes(layout: str) -> object:
    """How many axes keys have."""
    return invalid(f"key.dim() == (3 if {layout} == 'TND' else 4)", "key", f"as {layout} says",
                   "[B, S2, 1, D], [T2, 1, D] or pages [pages, slots, 1, D]", spoil={layout: "TND"})  # fmt: skip


def like_rows(name: str, rows: str, bad: str) -> object:
    """A number for every row and head."""
    return invalid(f"{name}.shape == {rows}.shape[:-1]", name, "a number for every row and head",
                   f"the shape of {rows} without its last axis", spoil={name: bad})  # fmt: skip


INDEXER = companion(
    "npu_quant_lightning_indexer",
    "torch_npu's choice of keys by ReLU-weighted heads, of int8 rows.",
    (
        Tensor("query", "Rows of integers.", dtypes="int8", cast=INT8),
        Tensor("key", "Keys of integers, one head for all.", dtypes="int8", cast=INT8),
        floats("weights", "Of every row and head."),
        Tensor("query_dequant_scale", "What an integer of a row and head means.", dtypes=SCALES),
        Tensor("key_dequant_scale", "What an integer of a key means.", dtypes=SCALES),
        *(mode_of(f"{side}_quant_mode", 0, "0: a scale for every row and head.") for side in ("query", "key")),
        *(lengths("query"), lengths("key"), TABLE, LAYOUT, layout_of_keys("layout_key")),
        *(COUNT, MODE, PRE, NEXT, dtype_of("query_dtype"), dtype_of("key_dtype")),
    ),
    (result("sparse_indices", "int32 [.., 1, sparse_count]; -1 behind the last.", "int32"),),
    rules=(
        AXES,
        key_axes("layout_key"),
        invalid("query.shape[-1:] == key.shape[-1:]", "key", "the elements of a row", "as many elements as query has",
                spoil={"key": ("B S2 1 8", "int8"), "key_dequant_scale": "B S2 1"}),
        like_rows("weights", "query", "B S1 3"),
        like_rows("query_dequant_scale", "query", "B S1 3"),
        like_rows("key_dequant_scale", "key", "B S2"),
    ),
    formula="""I_j = sum_h w_h * max(0, query_scale_h * key_scale_j * (q_h . k_j))    over the keys j that the row sees
indices = the sparse_count largest I, best first; of equal ones the lower index first""",
    tex=r"I_j = \sum_h w_h \max(0,\; s_h\, s_j\; q_h \cdot k_j) \qquad indices = \text{the largest } I_j",
    sizes=SIZES,
    sample={
        "query": "B S1 N1 D", "key": "B S2 1 D", "weights": "B S1 N1", "query_dequant_scale": ("B S1 N1", "float16"),
        "key_dequant_scale": ("B S2 1", "float16"), "query_quant_mode": 0, "key_quant_mode": 0, "sparse_count": 3,
    },
)  # fmt: skip


def packed_width(query: torch.Tensor, rope: int, tile: int) -> int:
    """Bytes of a key: integers, the rope part in query's dtype, a float32 for every tile; 0 where no tiles fill it."""
    latent = query.shape[-1] - rope
    return latent + 2 * rope + 4 * (latent // tile) if latent > 0 and tile > 0 and latent % tile == 0 else 0


RESERVED = tuple(Tensor(f"{side}_dequant_scale", "Reserved: scales lie in key.", True) for side in ("key", "value"))
ATTENTION = companion(
    "npu_kv_quant_sparse_flash_attention",
    "torch_npu's attention over selected blocks of keys whose latents are int8 with a scale for every tile.",
    (
        Tensor("query", "Latent and rope parts of rows, side by side.", dtypes="float16 bfloat16"),
        Tensor("key", "Bytes: the latent as int8, the rope part in query's dtype, float32 scales of the tiles.",
               dtypes="int8", cast=INT8),
        Tensor("value", "As key, whose latents are the values: not read.", dtypes="int8", cast=INT8),
        Tensor("sparse_indices", "Numbers of blocks of a row's own sequence; -1 ends a list.", dtypes="int32 int64",
               make=first_block),
        SCALE,
        *(mode_of(f"{side}_quant_mode", 2, "2: a scale for every tile of a row.") for side in ("key", "value")),
        *RESERVED,
        *(TABLE, lengths("query"), lengths("kv"), Attr("sparse_block_size", BLOCK.text, default=1,
          domain=BLOCK.domain, bad=BLOCK.bad)),
        *(LAYOUT, layout_of_keys("layout_kv"), MODE, PRE, NEXT),
        Attr("attention_mode", "2 on the chip: the value is the key's latent; so it is here always.", default=0,
             domain="attention_mode in (0, 2)", bad=1),
        Attr("quant_scale_repo_mode", "1: scales lie behind the row.", default=1, domain="quant_scale_repo_mode == 1",
             bad=0),
        Attr("tile_size", "Elements of a latent that share a scale.", default=128, domain="tile_size > 0", bad=0),
        Attr("rope_head_dim", "Elements of the rope part.", default=64, domain="rope_head_dim > 0", bad=0),
        *(dtype_of("key_dtype"), dtype_of("value_dtype")),
    ),
    (result("attention_out", "As query, with the elements of the latent.", "=query"),),
    rules=(
        AXES,
        key_axes("layout_kv"),
        invalid(
            "key.shape[-1] == packed_width(query, rope_head_dim, tile_size) > 0", "key",
            "D - rope bytes, 2 * rope bytes, four bytes of every tile", "rows of packed bytes of query's D elements",
            spoil={"key": "B S2 1 30"},
        ),
        *(invalid(f"{p.name} is None", p.name, p.text, "None", spoil={p.name: "4"}) for p in RESERVED),
        *untrained("npu_sparse_flash_attention has a derivative; or call it under torch.no_grad()", kind=invalid,
                   query=(2, 4, 4, 16)),
    ),
    formula="""latent = integers * scale of their tile;  s_j = scale_value * (q . latent_j + q_rope . k_rope_j)
out = sum_j exp(s_j - max) latent_j / sum,  over the selected keys j""",
    functions={"packed_width": packed_width},
    sizes=SIZES,
    sample={
        "query": "B S1 N1 D", "key": "B S2 1 32", "value": "B S2 1 32", "sparse_indices": "B S1 1 K",
        "scale_value": 0.25, "key_quant_mode": 2, "value_quant_mode": 2, "tile_size": 4, "rope_head_dim": 4,
        "sparse_block_size": 1,
    },
)  # fmt: skip
RECORDS = (INDEXER, ATTENTION)

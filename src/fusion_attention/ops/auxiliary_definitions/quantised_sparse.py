"""Operator definitions of sparse attention and its indexer with int8 keys, derived from the floating-point ones."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from fusion_attention.contract import Attr, Op, Rule, Tensor, trained
from fusion_attention.ops.auxiliary_definitions.common import FLOATS, result
from fusion_attention.ops.indexer import definitions as indexer
from fusion_attention.ops.shared.params import spelled
from fusion_attention.ops.shared.rules import invalid, limit, untrained
from fusion_attention.ops.sparse import definitions as sparse
from fusion_attention.ops.sparse.definitions import LAYOUT, LAYOUT_KV, MODE, NEXT, PRE, TABLE, key_layout, rows

INT8 = "float8 forms are the chip's alone: npu_dynamic_quant makes int8"
SCALES = "float16 float32"


def dtype_of(name: str) -> Attr:
    """Returns the operator attribute `name`, a code of a dtype that torch lacks; only None and 1, int8, are legal."""
    return Attr(name, f"None, or 1: int8; {INT8}.", default=None, domain=f"{name} in (None, 1)")


def mode_of(name: str, only: int, text: str) -> Attr:
    """Returns the operator attribute `name`, a quantization mode of which only the value `only` is supported."""
    return Attr(name, text, domain=f"{name} == {only}")


def without_last(shape: dict[str, str]) -> dict[str, str]:
    """Returns {layout: names of axes, such as "B S N"} without the last axis."""
    return {layout: words.rpartition(" ")[0] for layout, words in shape.items()}


def retained_rules(op: Op, params: Iterable[Any], *others: str) -> tuple[Rule, ...]:
    """Returns the rules of the floating-point operator `op` about parameters in `params`, without those whose
    expression contains one of the words `others`."""
    names = {p.name for p in params}
    return tuple(rule for rule in op.rules if rule.param in names and not any(word in rule.check for word in others))


def of_integers(op: Op, name: str, summary: str, params: tuple[Any, ...], **changes: Any) -> Op:
    """Returns the int8 variant of an operator definition with the parameters `params`, which torch computes after
    dequantization; changes: other fields of Op, and of sample calls."""
    changes_of_all: dict[str, Any] = {"lower": None, "fresh": None, "trains": {}}
    more = changes.pop("sample")
    samples = {layout: {**answer, **more} for layout, answer in op.samples.items()}
    results = tuple(p.name for p in params if isinstance(p, Tensor) and p.output)
    return op.version(
        name, summary, params=params, results=results, **changes_of_all, **{"samples": samples, **changes}
    )


KEY = Tensor("key", "int8 keys, one head for all query heads.", dtypes="int8", cast=INT8, shape=rows("2", "1", "D"),
             form=key_layout)  # fmt: skip
INDEXER_PARAMS = (
    Tensor("query", "int8 query rows.", dtypes="int8", cast=INT8, shape=rows("1", "N1", "D")),
    KEY,
    replace(indexer.WEIGHTS, dtypes=FLOATS),
    Tensor("query_dequant_scale", "Scale of the integers of every row and head.", dtypes=SCALES,
           shape=without_last(rows("1", "N1", "D"))),
    Tensor("key_dequant_scale", "Scale of the integers of every key.", dtypes=SCALES, form=key_layout,
           shape=without_last(rows("2", "1", "D"))),
    *(mode_of(f"{side}_quant_mode", 0, "0: a scale for every row and head.") for side in ("query", "key")),
    *(*sparse.INDEX_ENDS, TABLE, spelled(LAYOUT, "layout_query"), spelled(LAYOUT_KV, "layout_key")),
    *(replace(indexer.COUNT, default=2048), MODE, PRE, NEXT, dtype_of("query_dtype"), dtype_of("key_dtype")),
    indexer.CHOSEN,
)  # fmt: skip
INDEXER = of_integers(
    indexer.TORCH,
    "npu_quant_lightning_indexer",
    "Selects the keys with the highest scores for each row, from int8 queries and keys.",
    INDEXER_PARAMS,
    rules=retained_rules(indexer.TORCH, INDEXER_PARAMS, "same_dtype(", "float32(query)"),
    formula="""I_j = sum_h w_h * max(0, query_scale_h * key_scale_j * (q_h . k_j))    for the visible keys j of the row
indices = the sparse_count largest I in descending order; of equal ones the lower index first""",
    tex=r"I_j = \sum_h w_h \max(0,\; s_h\, s_j\; q_h \cdot k_j) \qquad indices = \text{the largest } I_j",
    sample={"query_quant_mode": 0, "key_quant_mode": 0},
    keywords="actual_seq_lengths_query",
    returns="Indices as npu_lightning_indexer returns them. The chip rounds scores to float16, so more of them are "
    "equal there.",
    example="""\
>>> q, key = (torch.randint(-9, 9, shape).to(torch.int8) for shape in ((1, 6, 4, 16), (1, 9, 1, 16)))
>>> weights, scale, key_scale = torch.rand(1, 6, 4), torch.ones(1, 6, 4), torch.ones(1, 9, 1)
>>> list(npu_quant_lightning_indexer(q, key, weights, scale, key_scale, 0, 0, sparse_count=4).shape)
[1, 6, 1, 4]""",
)


def packed_width(dim: int, rope: int, tile: int) -> int:
    """Returns the bytes of a key: dim - rope int8 elements, rope elements of 16 bits, and a float32 per tile of `tile`
    int8 elements; 0 if tiles do not divide the int8 elements."""
    latent = dim - rope
    return latent + 2 * rope + 4 * (latent // tile) if latent > 0 and latent % tile == 0 else 0


BYTES = rows("2", "N2", "W")
RESERVED = tuple(
    Tensor(f"{side}_dequant_scale", "Reserved: key contains its scales.", True) for side in ("key", "value")
)
ATTENTION_PARAMS = (
    Tensor("query", "Query rows of latent and rope parts; the last rope_head_dim elements are the rope part.",
           dtypes="float16 bfloat16", shape=rows("1", "N1", "D")),
    Tensor("key", "Rows of W bytes: the latent as int8, the rope part in query's dtype, and the float32 scales of "
           "tiles; W is 656 if D is 576.",
           dtypes="int8", cast=INT8, shape=BYTES, form=key_layout,
           make=lambda shape: torch.ones(shape, dtype=torch.int8)),
    Tensor("value", "Not read: the values are the latents of key.", dtypes="int8", cast=INT8),
    *(sparse.INDICES, sparse.SCALE),
    *(mode_of(f"{side}_quant_mode", 2, "2: a scale per tile of a row.") for side in ("key", "value")),
    *(*RESERVED, TABLE, *sparse.ENDS, replace(sparse.BLOCK, default=1)),
    *(spelled(LAYOUT, "layout_query"), LAYOUT_KV, MODE, PRE, NEXT, sparse.ATTENTION_MODE),
    Attr("quant_scale_repo_mode", "1: scales are the last bytes of a row.", default=1,
         domain="quant_scale_repo_mode == 1"),
    Attr("tile_size", "Elements of a latent that share a scale.", default=128, domain="tile_size > 0"),
    Attr("rope_head_dim", "Elements of the rope part.", default=64, domain="rope_head_dim > 0"),
    *(dtype_of("key_dtype"), dtype_of("value_dtype"), sparse.SINKS),
    result("attention_out", "The output rows, with the elements of the latent; computed in float32, rounded once.",
           "=query"),
)  # fmt: skip
SMALL = {"D": 24, "W": 40, "tile_size": 8, "rope_head_dim": 8}
ATTENTION = of_integers(
    sparse.TORCH,
    "npu_kv_quant_sparse_flash_attention",
    "Softmax attention over the blocks of keys that every row selects; latents are int8 with a scale per tile.",
    ATTENTION_PARAMS,
    rules=(
        *retained_rules(sparse.TORCH, ATTENTION_PARAMS, "float32(query)", "Dv", "value is not None", "D == 512"),
        invalid("W == packed_width(D, rope_head_dim, tile_size) > 0",
                "key: D - rope_head_dim + 2 * rope_head_dim + 4 * tiles bytes (integers, rope part and scales of the "
                "tiles)", when="1 <= D <= 768", invalid={"W": 640}),
        limit("D == 576", "query (the chip takes no other dim)", when="1 <= D <= 768", invalid=SMALL),
        *(invalid(f"{p.name} is None", f"{p.name}: None (key contains its scales)",
                  invalid={p.name: "4"}) for p in RESERVED),
        *untrained("npu_sparse_flash_attention has a derivative; or call it under torch.no_grad()", kind=invalid,
                   query=(2, 4, 4, 576)),
    ),
    formula="""latent = integers * scale of their tile;  s_j = scale_value * (q . latent_j + q_rope . k_rope_j)
out = sum_j exp(s_j - max) latent_j / sum  for the selected keys j;  sum = sum_j exp(s_j - max) + exp(sinks - max)""",
    tex=r"out = \frac{\sum_j e^{s_j - m}\, c_j}{\sum_j e^{s_j - m}} \qquad s_j = scale\,"
    r"(q \cdot c_j + q^{rope} \cdot k^{rope}_j), \quad c_j = \text{integers} \cdot \text{scale of their tile}",
    functions={**sparse.TORCH.functions, "packed_width": packed_width, "trained": trained},
    neutral={**sparse.TORCH.neutral, "W": None},
    sizes={**sparse.TORCH.sizes, "D": 576, "W": 656},
    sample={"key_quant_mode": 2, "value_quant_mode": 2, "value": "4"},
    keywords="key_dequant_scale",
    declared=sparse.TENSORS,
    returns="",
    example="""\
>>> q, rope = torch.randn(1, 6, 4, 24).half(), torch.randn(1, 9, 1, 8).half()
>>> parts = torch.ones(1, 9, 1, 16).to(torch.int8), rope, torch.full((1, 9, 1, 2), 0.5)
>>> key = torch.cat([part.view(torch.int8) for part in parts], -1)
>>> indices = torch.arange(4, dtype=torch.int32).expand(1, 6, 1, 4)
>>> out = npu_kv_quant_sparse_flash_attention(
...     q, key, key, indices, 0.25, 2, 2, sparse_mode=0, tile_size=8, rope_head_dim=8)
>>> list(out.shape), out.unique().item()
([1, 6, 4, 16], 0.5)""",
)  # fmt: skip
RECORDS = (INDEXER, ATTENTION)

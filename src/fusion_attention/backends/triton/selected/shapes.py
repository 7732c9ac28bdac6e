"""Tile shapes of the Triton kernels for attention to selected keys and for the indexer, and the sizes that have none.

The entries of the tables were found by compilation, not by timing. `chip` is a compute capability, 90, 80 or 86;
`align` is the alignment of rows, in elements; 0: 16 bytes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from fusion_attention.backends.triton.common.shapes import (
    FLOAT32_CHIPS,
    MOST_PARTS,
    NARROWEST,
    WIDEST_PART,
    WIDEST_ROPE,
    Tile,
    parts,
    spans,
    widest,
)
from fusion_attention.backends.triton.indexer import shapes_loss
from fusion_attention.ir.problem import AnyProblem, IndexerLossProblem, IndexerProblem, Problem

# ------------------------------------------------------------------------------------------- attention to lists


# Chip -> (most elements of a query row, rope included, most of a value row, tiles for up to 64, 32 and 16 heads).
# The first size of a tile is heads of one token, the second slots of its list. LATENT: values are the first elements of
# the keys (MLA) and are read once. Fewer than 16 heads are padded to 16.
Heads = tuple[tuple[int, int, tuple[Tile, Tile, Tile]], ...]
FORWARD: dict[int, Heads] = {
    90: (
        (128, 128, (Tile(64, 64, 4, 3), Tile(32, 64, 4, 3), Tile(16, 64, 4, 3))),  # 255 registers with pages
        (256, 256, (Tile(64, 32, 8, 3), Tile(32, 32, 8, 2), Tile(16, 32, 4, 3))),
        (576, 512, (Tile(64, 32, 8, 2), Tile(32, 32, 8, 2), Tile(16, 32, 8, 2))),  # 208 KB
        (768, 768, (Tile(32, 16, 8, 2), Tile(32, 16, 8, 2), Tile(16, 16, 8, 2))),
    ),
    80: (
        (128, 128, (Tile(64, 64, 8, 3), Tile(32, 64, 4, 3), Tile(16, 64, 4, 3))),  # 4 warps of 64 heads spill
        (256, 256, (Tile(64, 32, 8, 2), Tile(32, 32, 8, 2), Tile(16, 32, 4, 2))),
        (576, 512, (Tile(64, 32, 8, 2), Tile(32, 32, 8, 2), Tile(16, 32, 8, 2))),  # 144 KB
        (768, 768, (Tile(32, 16, 8, 2), Tile(32, 16, 8, 2), Tile(16, 16, 8, 2))),
    ),
    86: (
        (128, 128, (Tile(64, 64, 8, 2), Tile(32, 64, 4, 3), Tile(16, 64, 4, 3))),
        (256, 256, (Tile(64, 32, 8, 2), Tile(32, 32, 8, 2), Tile(16, 32, 4, 2))),
        (576, 512, (Tile(32, 16, 8, 2), Tile(32, 16, 8, 2), Tile(16, 16, 8, 2))),
        (768, 768, (Tile(32, 16, 8, 2), Tile(32, 16, 8, 2), Tile(16, 16, 8, 2))),  # 97 KB
    ),
}
LATENT: dict[int, Heads] = {
    90: (
        # 64 x 64 is 1.1 times as fast on an H100, but spills 232 bytes, and 584 with pages.
        (512, 512, (Tile(64, 32, 8, 2), Tile(32, 32, 8, 2), Tile(16, 32, 4, 3))),
        (576, 512, (Tile(64, 32, 8, 3), Tile(32, 32, 8, 2), Tile(16, 32, 4, 3))),  # 64 x 64 spills 96 bytes
    ),
    80: ((576, 512, (Tile(64, 32, 8, 2), Tile(32, 32, 8, 2), Tile(16, 32, 8, 2))),),  # 112 KB; 4 warps spill
    86: ((576, 512, (Tile(32, 32, 8, 2), Tile(32, 32, 8, 2), Tile(16, 32, 8, 2))),),  # 64 heads take 112 KB
}
# The tile for float32, whose products are multiply-adds, and for rows that are not aligned to 16 bytes, which are not
# loaded ahead; larger tiles spill.
LEAST = Tile(16, 16, 8, 1)


def shared(problem: Problem) -> bool:
    """Returns True if values are stored in the keys' first columns and divided into the same column blocks, so that a
    tile of keys is loaded once for both."""
    if not problem.shares_kv:
        return False
    d, v = parts(problem.dim_qk), parts(problem.dim_v)
    return all(of_v in (of_d, 0) for of_d, of_v in zip(d, v, strict=True))


def forward_tile(problem: Problem, chip: int, align: int = 0) -> Tile | None:
    """Returns the tile shape of the forward over selected keys, BM heads of a token and BN keys; None if the table has
    no entry for the problem's dims. chip: compute capability, such as 90; align: alignment of rows in elements."""
    p = problem
    if max(p.dim_qk, p.dim_v) > MOST_PARTS * WIDEST_PART or p.dim_rope > WIDEST_ROPE:
        return None
    qk, v = spans(p)
    rows = (*(LATENT[chip] if shared(p) else ()), *FORWARD[chip])
    result = next((tiles for most, most_v, tiles in rows if qk <= most and v <= most_v), None)
    if result is None:
        return None
    if p.dtype == "float32" or 0 < align < widest(p):
        return LEAST
    return result[0 if p.group > 32 else 1 if p.group > 16 else 2]


# ---------------------------------------------------------------------------------------------------- the indexer

SCORED = 16  # rows per program of scores, at most the columns of a product
ONE_LAUNCH = 64  # most heads of a gradient in one launch on every chip
FEWEST = 8  # least heads of a token in a product; fewer are padded, which limits the tokens of a product
WIDEST = 256  # most keys of a tile of scores
CANDIDATES = 6144  # capacity of a row's candidates in addition to top_k
MOST_CHOSEN = 1 << 20  # limit of top_k, so that the counts of index_choice fit into one number
MOST_SORTED = 2048  # most entries that one program sorts; torch sorts more
CHOICE = Tile(0, 2048, 8, 1)  # BN scores per iteration
WRITE = Tile(0, 1024, 4, 1)

# Chip and bytes of an element -> (most elements of a row, tile). BM columns of (token, head) are multiplied by BN keys,
# which stay in registers; with three stages, columns of two later iterations are loaded ahead.
SCORES: dict[tuple[int, int], tuple[tuple[int, Tile], ...]] = {
    (90, 2): (
        (128, Tile(64, 256, 8, 3)),  # 123 registers, 113 KB: two programs share a processor
        (256, Tile(64, 128, 8, 3)),  # 161 KB
        (768, Tile(64, 32, 8, 1)),
    ),
    (80, 2): (
        (128, Tile(64, 128, 8, 3)),  # 128 registers, 65 KB: two programs
        (256, Tile(64, 128, 8, 3)),  # 129 KB
        (768, Tile(64, 32, 8, 1)),
    ),
    (86, 2): ((128, Tile(64, 128, 8, 3)), (256, Tile(64, 64, 8, 1)), (768, Tile(32, 16, 8, 1))),
    **dict.fromkeys(FLOAT32_CHIPS, ((128, Tile(16, 16, 8, 1)),)),  # 32 x 16 spills
}
# Chip and bytes of an element -> (most elements of a row, most heads, tile, tile for dS in float16 or rows that are not
# aligned to 16 bytes): the first entry that fits, or the last that fits the elements. BM heads, BN slots of a list.
GRADIENT: dict[tuple[int, int], tuple[tuple[int, int, Tile, Tile], ...]] = {
    (90, 2): (
        (128, 64, Tile(64, 64, 4, 3), Tile(64, 32, 4, 3)),  # 72 KB: two programs; of 4 stages it spills
        (128, 128, Tile(128, 32, 8, 3), Tile(128, 32, 8, 2)),  # 64 slots spill
        (256, 64, Tile(64, 32, 8, 1), Tile(64, 32, 8, 1)),
    ),
    (80, 2): (
        (128, 64, Tile(64, 64, 8, 4), Tile(64, 64, 8, 2)),  # 4 warps spill
        (128, 128, Tile(128, 32, 8, 4), Tile(128, 32, 8, 2)),
        (256, 64, Tile(64, 32, 8, 1), Tile(64, 32, 8, 1)),
        (256, 128, Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    ),
    (86, 2): ((128, 64, Tile(64, 32, 4, 2), Tile(64, 32, 8, 2)), (256, 64, Tile(64, 32, 8, 1), Tile(64, 32, 8, 1))),
    **dict.fromkeys(FLOAT32_CHIPS, ((128, 16, Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),)),
}
RECOMPUTE_GRADIENT = Tile(0, 16, 8, 1)


def heads_held(heads: int, columns: int) -> int:
    """Returns the number of a token's heads in one launch of a kernel: a power of two, at most `columns`."""
    return min(max(FEWEST, 1 << (heads - 1).bit_length()), columns)


def sorts(top_k: int) -> bool:
    """Returns True if one program can sort a row's list of top_k keys; else torch.sort() does it."""
    return top_k <= MOST_SORTED


def write_tile(problem: IndexerProblem) -> Tile:
    """Returns the tile shape of the kernel that sorts and writes the lists of selected keys."""
    return Tile(0, 0, 16 if problem.top_k > 512 else 4, 1) if sorts(problem.top_k) else WRITE


def scores_tile(problem: IndexerProblem, chip: int, align: int = 8) -> Tile | None:
    """Returns the tile shape of the indexer's scores, BM (token, head) columns and BN keys, at most 64 if rows are not
    aligned to 16 bytes; None if no tile fits. chip: compute capability; align: alignment in elements."""
    rows = SCORES[chip, 4 if problem.dtype == "float32" else 2]
    tile = next((tile for dim, tile in rows if problem.dim <= dim), None)
    if tile is None or align >= widest(problem):
        return tile
    return tile._replace(BM=min(tile.BM, 64), BN=min(tile.BN, 64), num_stages=1)


class Sizes(NamedTuple):
    """The properties that select the kernels of the gradient of an indexer's scores: heads, dim, list length, dtype."""

    heads: int
    dim: int
    slots: int
    dtype: str
    viewed: bool  # True: dI is passed by the caller; False: a loss computes it


def sizes_of_gradient(problem: IndexerProblem | IndexerLossProblem) -> Sizes:
    """Returns the properties that select the gradient kernels of an indexer's scores or loss."""
    p = problem
    if isinstance(p, IndexerProblem):
        return Sizes(p.heads, p.dim, p.top_k, p.dtype, True)
    return Sizes(p.heads_index, p.dim_index, p.select_count, p.dtype, False)


def gradient_tile(problem: IndexerProblem | IndexerLossProblem, chip: int, align: int = 8) -> Tile | None:
    """Returns the tile shape of the indexer's gradient, BM heads (more need several launches) and BN selected keys;
    None if no tile fits the dim. chip: compute capability, such as 90; align: alignment of rows in elements."""
    p = sizes_of_gradient(problem)
    fits = [row for row in GRADIENT[chip, 4 if p.dtype == "float32" else 2] if p.dim <= row[0]]
    if not fits:
        return None
    _, _, tile, narrow = next((row for row in fits if p.heads <= row[1]), fits[-1])
    tile = narrow if p.dtype == "float16" or align < 8 else tile
    return tile._replace(BM=max(NARROWEST, heads_held(p.heads, tile.BM)))


# ---------------------------------------------------------------------------------------------------- unsupported calls

# Operation kind -> a function that returns true if its kernels have a tile for a problem on a chip; kinds that are not
# listed have one for every problem.
HOLDS: dict[str, Callable[[Any, int], bool]] = {
    "attention_forward": lambda p, chip: forward_tile(p, chip) is not None,
    "indexer_topk": lambda p, chip: scores_tile(p, chip) is not None and p.top_k <= MOST_CHOSEN,
    "indexer_backward": lambda p, chip: gradient_tile(p, chip) is not None,
    "indexer_lse": lambda p, chip: shapes_loss.warm_tiles(p, chip) is not None,
    "indexer_loss": lambda p, chip: shapes_loss.warm_tiles(p, chip) is not None if not p.select_count else (
        shapes_loss.selected_tiles(p, chip) is not None and gradient_tile(p, chip) is not None
    ),
}  # fmt: skip
OPERATIONS: dict[type[AnyProblem], tuple[str, ...]] = {
    Problem: ("attention_forward", "attention_backward"),
    IndexerProblem: ("indexer_topk", "indexer_backward", "indexer_lse"),
    IndexerLossProblem: ("indexer_loss",),
}


def sizes_of(problem: AnyProblem) -> str:
    """Returns the problem's heads and dims as text for an error message."""
    p: Any = problem
    if isinstance(p, IndexerProblem):
        return f"{p.heads} indexer heads of {p.dim} elements, top_k {p.top_k}"
    sizes = f"dim_qk {p.dim_qk}, dim_rope {p.dim_rope}"
    if isinstance(p, IndexerLossProblem):
        return f"{sizes}, {p.heads_q} heads, and {p.heads_index} indexer heads of {p.dim_index} elements"
    return f"{sizes} and dim_v {p.dim_v}"


def against(problem: AnyProblem, op_kind: str, chip: int) -> list[str]:
    """Returns [a sentence with heads and dims] if no tile shape fits them in the kernels of `op_kind`, such as
    "indexer_topk" ("": of any operation), on a GPU of compute capability `chip`; else []."""
    op_kinds = (op_kind,) if op_kind else OPERATIONS[type(problem)]
    if all(HOLDS[name](problem, chip) for name in op_kinds if name in HOLDS):
        return []
    sizes = f"{sizes_of(problem)} in {problem.dtype}"
    return [f"the triton back end has no tile for {sizes}: shared memory or registers do not hold one."]

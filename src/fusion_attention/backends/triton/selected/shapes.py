"""Tile shapes of lists of selected keys, of the indexer and of its loss; which sizes each operation kind's kernels
hold.

Found as those of shapes.py were: by compiling, not by timing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from fusion_attention.backends.triton.common.shapes import (
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


# Chip -> (most elements of a query row, rope included, most of a value row, tiles of up to 64, 32 and 16 heads).
# A first number is heads of one token, a second slots of its list. LATENT: values are the first elements of the keys
# (MLA), read once. Of heads of one list, 16 are the fewest: fewer are padded to them.
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
# Of float32, whose products are plain multiply-adds, and of rows that do not start on 16 bytes, which nothing loads
# ahead: larger tiles spill.
LEAST = Tile(16, 16, 8, 1)


def shared(problem: Problem) -> bool:
    """Whether a tile of values is the first parts of the tile of keys."""
    if not problem.shares_kv:
        return False
    d, v = parts(problem.dim_qk), parts(problem.dim_v)
    return all(of_v in (of_d, 0) for of_d, of_v in zip(d, v, strict=True))


def forward_tile(problem: Problem, chip: int, align: int = 0) -> Tile | None:
    """BM heads of a token meet BN slots of its list; align: elements of which every row's start is a multiple, 0: those
    of 16 bytes. None: such sizes were never compiled."""
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


# --------------------------------------------------------------------------------------- its backward, sums per key


# ---------------------------------------------------------------------------------------------------- the indexer

SCORED = 16  # rows that a program scores: at most as many as there are columns in a product
ONE_LAUNCH = 64  # heads of a gradient that any chip's tiles hold together
FEWEST = 8  # heads of a token in a product: fewer are filled up, or a product would have more tokens than that
WIDEST = 256  # keys of a tile of scores, at most
CANDIDATES = 6144  # of a row, beyond those that are chosen, before it is sorted out
MOST_CHOSEN = 1 << 20  # by a row: with its other candidates fewer than index_choice counts in one number
MOST_SORTED = 2048  # entries that one program sorts; more are sorted by torch
CHOICE = Tile(0, 2048, 8, 1)  # BN scores at once
WRITE = Tile(0, 1024, 4, 1)

# Chip and bytes of an element -> (most elements of a row, tile). BM columns of (token, head) meet BN keys, which stay;
# three stages, so that the columns of one turn are under way while those of another arrive.
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
    **dict.fromkeys(((90, 4), (80, 4), (86, 4)), ((128, Tile(16, 16, 8, 1)),)),  # 32 x 16 spills
}
# Chip and bytes of an element -> (most elements of a row, most heads, tile, tile where dS is float16 or rows do not
# start on 16 bytes), the first row that fits, or the last that holds the elements. BM heads meet BN slots of a list.
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
    **dict.fromkeys(((90, 4), (80, 4), (86, 4)), ((128, 16, Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),)),
}
RECOMPUTE_GRADIENT = Tile(0, 16, 8, 1)


def heads_held(heads: int, columns: int) -> int:
    """Heads of a token in a product of scores; more take several launches."""
    return min(max(FEWEST, 1 << (heads - 1).bit_length()), columns)


def sorts(top_k: int) -> bool:
    """Whether one program sorts a row's list."""
    return top_k <= MOST_SORTED


def write_tile(problem: IndexerProblem) -> Tile:
    """Of the kernel that sorts and writes lists."""
    return Tile(0, 0, 16 if problem.top_k > 512 else 4, 1) if sorts(problem.top_k) else WRITE


def scores_tile(problem: IndexerProblem, chip: int, align: int = 8) -> Tile | None:
    """BM columns of (token, head) meet BN keys; of rows that do not start on 16 bytes at most 64 of each."""
    rows = SCORES[chip, 4 if problem.dtype == "float32" else 2]
    tile = next((tile for dim, tile in rows if problem.dim <= dim), None)
    if tile is None or align >= widest(problem):
        return tile
    return tile._replace(BM=min(tile.BM, 64), BN=min(tile.BN, 64), num_stages=1)


class Sizes(NamedTuple):
    """What the gradient of an indexer's scores knows of a problem."""

    heads: int
    dim: int
    slots: int
    dtype: str
    viewed: bool  # dI is the caller's; of a loss it is found


def sizes_of_gradient(problem: IndexerProblem | IndexerLossProblem) -> Sizes:
    """Those of a problem."""
    p = problem
    if isinstance(p, IndexerProblem):
        return Sizes(p.heads, p.dim, p.top_k, p.dtype, True)
    return Sizes(p.heads_index, p.dim_index, p.select_count, p.dtype, False)


def gradient_tile(problem: IndexerProblem | IndexerLossProblem, chip: int, align: int = 8) -> Tile | None:
    """BM heads meet BN slots; more heads take several launches."""
    p = sizes_of_gradient(problem)
    fits = [row for row in GRADIENT[chip, 4 if p.dtype == "float32" else 2] if p.dim <= row[0]]
    if not fits:
        return None
    _, _, tile, narrow = next((row for row in fits if p.heads <= row[1]), fits[-1])
    tile = narrow if p.dtype == "float16" or align < 8 else tile
    return tile._replace(BM=max(NARROWEST, heads_held(p.heads, tile.BM)))


def holds_loss(problem: IndexerLossProblem, chip: int) -> bool:
    """Whether some tiles serve a loss."""
    if not problem.select_count:
        return shapes_loss.warm_tiles(problem, chip) is not None
    return shapes_loss.selected_tiles(problem, chip) is not None and gradient_tile(problem, chip) is not None


# -------------------------------------------------------------------------------------------------- what is refused

# Op_kind -> whether its kernels have a tile for a problem on a chip; an operation kind that is not listed has one for
# all.
HOLDS: dict[str, Callable[[Any, int], bool]] = {
    "attention_forward": lambda p, chip: forward_tile(p, chip) is not None,
    "indexer_topk": lambda p, chip: scores_tile(p, chip) is not None and p.top_k <= MOST_CHOSEN,
    "indexer_backward": lambda p, chip: gradient_tile(p, chip) is not None,
    "indexer_lse": shapes_loss.holds_lse,
    "indexer_loss": holds_loss,
}


def op_kinds_of(problem: AnyProblem) -> tuple[str, ...]:
    """The operation kinds that compute a problem."""
    if isinstance(problem, Problem):
        return "attention_forward", "attention_backward"
    return ("indexer_loss",) if isinstance(problem, IndexerLossProblem) else (
        "indexer_topk", "indexer_backward", "indexer_lse"
    )  # fmt: skip


def sizes_of(problem: AnyProblem) -> str:
    """What a refusal says of a problem's sizes."""
    p = problem
    if isinstance(p, IndexerProblem):
        return f"{p.heads} indexer heads of {p.dim} elements, top_k {p.top_k}"
    sizes = f"dim_qk {p.dim_qk}, dim_rope {p.dim_rope}"
    if isinstance(p, IndexerLossProblem):
        return f"{sizes}, {p.heads_q} heads, and {p.heads_index} indexer heads of {p.dim_index} elements"
    return f"{sizes} and dim_v {p.dim_v}"


def against(problem: AnyProblem, op_kind: str, chip: int) -> list[str]:
    """Why no kernel of an operation kind, or without one of all that compute the problem, has code for its sizes."""
    op_kinds = (op_kind,) if op_kind else op_kinds_of(problem)
    if all(HOLDS[name](problem, chip) for name in op_kinds if name in HOLDS):
        return []
    sizes = f"{sizes_of(problem)} in {problem.dtype}"
    return [f"the triton back end has no tile for {sizes}: shared memory or registers do not hold one."]

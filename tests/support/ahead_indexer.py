"""Lists the kernels of the indexer that are compiled ahead of time."""

from typing import Any

from support.ahead_run import Compiled, Config, pointers
from support.triton_ahead import TYPES

from fusion_attention.backends.triton.indexer import launch as launch_indexer
from fusion_attention.backends.triton.indexer.choice import index_choice, index_write
from fusion_attention.backends.triton.indexer.gradient import index_gradient, recompute_gradient
from fusion_attention.backends.triton.indexer.scores import index_scores
from fusion_attention.backends.triton.selected import shapes as shapes_sparse
from fusion_attention.ir.problem import IndexerProblem

WIDEST = {"float32": 4}  # elements of 16 bytes; 8 for other dtypes


def problem(heads: int = 64, dim: int = 128, **more: Any) -> IndexerProblem:
    return IndexerProblem(heads, dim, **{"dtype": "bfloat16", "weights_dtype": "bfloat16", "has_values": True} | more)


def typed(p: IndexerProblem) -> dict[str, str]:
    """Returns the types of the arguments that are pointers."""
    floats = {"scores": "*fp32", "weights": "*bf16", "dweights": "*bf16"}
    row = launch_indexer.row_type(shapes_sparse.sizes_of_gradient(p))
    rows = {"rows": "*" + TYPES[str(row).removeprefix("torch.")]}
    integers = pointers("i32", "counts", "keys", "used", "noted", "indices", "tokens") | {"entries": "*i64"}
    tables = {"strides": "*i64", "lengths": "*i64", "tiles": "*i32"} | ({"table": "*i32"} if p.page_size else {})
    operand_types = pointers(p.dtype, "q", "k", "index_q", "index_k", "values", "dscores", "dq")
    return operand_types | floats | rows | integers | tables


def scores(p: IndexerProblem, align: int = 0, adds: bool = False) -> Config:
    def at(chip: int) -> Compiled | None:
        tile = shapes_sparse.scores_tile(p, chip, align or 8)
        if tile is None:
            return None
        constexprs = launch_indexer.constants(p, tile, align or WIDEST.get(p.dtype, 8))[0] | {"ADDS": adds}
        ahead = max(0, tile.num_stages - 2) if align != 1 else 0
        return Compiled(index_scores, constexprs, typed(p), tile, ahead=ahead, rows=tile.BN)

    return at


def choice(p: IndexerProblem) -> Config:
    constexprs = launch_indexer.constants(p, shapes_sparse.CHOICE, 8)[1]
    return lambda _: Compiled(index_choice, constexprs, typed(p), shapes_sparse.CHOICE, counted=False)


def write(p: IndexerProblem) -> Config:
    constexprs = launch_indexer.constants(p, shapes_sparse.CHOICE, 8)[2]
    return lambda _: Compiled(index_write, constexprs, typed(p), shapes_sparse.write_tile(p), counted=False)


def recomputed(p: IndexerProblem) -> Config:
    constexprs = launch_indexer.recompute_constants(shapes_sparse.sizes_of_gradient(p), WIDEST.get(p.dtype, 8))
    return lambda _: Compiled(recompute_gradient, constexprs, typed(p), shapes_sparse.RECOMPUTE_GRADIENT, counted=False)


def gradient(p: IndexerProblem, align: int = 0, adds: bool = False) -> Config:
    sizes = shapes_sparse.sizes_of_gradient(p)

    def at(chip: int) -> Compiled | None:
        tile = shapes_sparse.gradient_tile(p, chip, align or 8)
        if tile is None:
            return None
        constexprs = launch_indexer.gradient_constants(sizes, tile, align or WIDEST.get(p.dtype, 8)) | {"ADDS": adds}
        ahead = max(0, tile.num_stages - 2) if align != 1 else 0
        return Compiled(index_gradient, constexprs, typed(p), tile, ahead=ahead)

    return at


FLOAT16, FLOAT32 = {"dtype": "float16"}, {"dtype": "float32"}
CONFIGS: dict[str, Config] = {
    "indexer scores 64 heads": scores(problem()),
    "indexer scores 64 heads paged": scores(problem(page_size=64)),
    "indexer scores 33 heads": scores(problem(33)),
    "indexer scores 8 heads": scores(problem(8)),
    "indexer scores 1 head": scores(problem(1)),
    "indexer scores 128 heads": scores(problem(128, **FLOAT16)),
    "indexer scores 128 heads added": scores(problem(128), adds=True),
    "indexer scores 256": scores(problem(dim=256)),
    "indexer scores 768": scores(problem(dim=768)),
    "indexer scores odd strides": scores(problem(), align=1),
    "indexer scores float32": scores(problem(**FLOAT32)),
    "indexer choice 2048": choice(problem()),
    "indexer choice 8192": choice(problem(top_k=8192, page_size=64)),
    "indexer write 2048": write(problem()),
    "indexer write 8192": write(problem(top_k=8192)),
    "indexer gradient 64 heads": gradient(problem()),
    "indexer gradient 64 heads float16": gradient(problem(**FLOAT16)),
    "indexer gradient 16 heads": gradient(problem(16)),
    "indexer gradient 128 heads": gradient(problem(128)),
    "indexer gradient 128 heads float16": gradient(problem(128, **FLOAT16)),
    "indexer gradient 200 heads added": gradient(problem(200), adds=True),
    "indexer gradient 200 heads float16 added": gradient(problem(200, **FLOAT16), adds=True),
    "indexer gradient 256": gradient(problem(dim=256)),
    "indexer gradient odd strides": gradient(problem(), align=1),
    "indexer gradient float32": gradient(problem(**FLOAT32)),
    "indexer recompute": recomputed(problem()),
    "indexer recompute 256": recomputed(problem(dim=256)),
}
EVERYDAY: tuple[str, ...] = ("indexer scores 64 heads", "indexer gradient 64 heads")
# Run that spills registers: reason why no tile without spills is used.
SPILLED = {
    "indexer gradient 128 heads sm_86": "16 bytes with Triton 3.7.1, none with 3.6.0",
    "indexer recompute sm_80": "16 bytes with Triton 3.7.1; runs where something is not finite",
    "indexer scores 33 heads sm_86": "8 bytes with Triton 3.7.1, none with 3.6.0; one instruction of a turn",
}

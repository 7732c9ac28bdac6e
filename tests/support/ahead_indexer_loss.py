"""Lists the kernels of the indexer's loss that are compiled ahead of time, with and without lists."""

from typing import Any

import torch
from support.ahead_run import Compiled, Config, pointers

from fusion_attention.backends.triton.indexer import (
    dense_kl_loss,
    launch_dense_kl_loss,
    launch_loss,
    loss_parts,
    selected_loss,
    shapes_loss,
)
from fusion_attention.backends.triton.indexer import launch as launch_indexer
from fusion_attention.backends.triton.indexer.gradient import index_gradient
from fusion_attention.backends.triton.selected import shapes as shapes_sparse
from fusion_attention.ir.problem import IndexerLossProblem, IndexerProblem

ROWS = ("q", "k", "q_rope", "k_rope", "index_q", "index_k", "keys", "dq", "dk")
FLOAT32_ROWS = (
    "max_",
    "sum_",
    "notes",
    "index_max",
    "index_sum",
    "differences",
    "losses",
    "factors",
    "added",
    "partial",
)
FLOAT32_ROWS += ("dscores", "scores")
TABLES = pointers("i32", "tiles", "tokens", "key_tiles", "used", "noted") | pointers("i64", "strides", "lengths")


def types(problem: IndexerLossProblem | IndexerProblem) -> dict[str, str]:
    """Returns the types of the pointer arguments that a problem has."""
    result = TABLES | pointers(problem.dtype, *ROWS) | pointers("float32", *FLOAT32_ROWS)
    result |= pointers(problem.weights_dtype, "weights", "dweights")
    if problem.dtype == "float16":
        result |= pointers("i32", "largest")
    if isinstance(problem, IndexerLossProblem):
        low = "float32" if problem.dtype != "bfloat16" and problem.select_count else problem.dtype
        result |= pointers(low, "rows")
        result |= pointers("i32", "keys") if problem.select_count else {}
        result |= pointers("float32", "sink") if problem.has_sink else {}
        result |= pointers("float32", "target", "values") if problem.has_target else {}
        if not problem.dim_rope:
            del result["q_rope"], result["k_rope"]
    return result


def warm(kernel: Any, problem: IndexerLossProblem, align: int = 0, ahead: int = 0) -> Config:
    """Returns the compilation of a kernel of the loss without lists."""

    def config(chip: int) -> Compiled | None:
        tiles = shapes_loss.warm_tiles(problem, chip, align or 8)
        if tiles is None:
            return None
        constexprs = launch_dense_kl_loss.warm_constants(problem, tiles, align or 16 // problem.torch_dtype.itemsize)
        tile = {
            "warm_target": tiles.target,
            "warm_difference": tiles.difference,
            "warm_query": tiles.query,
            "warm_key": tiles.key,
        }
        name = kernel.__name__
        small = launch_dense_kl_loss.FINISH if name == "finish_keys" else launch_dense_kl_loss.NOTE
        return Compiled(kernel, constexprs[name], types(problem), tile.get(name, small), name in tile, ahead)

    return config


def lse(problem: IndexerProblem, align: int = 0, ahead: int = 0) -> Config:
    """Returns the compilation of the kernel that computes statistics."""

    def config(chip: int) -> Compiled | None:
        tiles = shapes_loss.warm_tiles(problem, chip)
        if tiles is None:
            return None
        constexprs, _ = launch_dense_kl_loss.lse_constants(
            problem, tiles.lse, align or 16 // problem.torch_dtype.itemsize
        )
        return Compiled(dense_kl_loss.warm_lse, constexprs, types(problem), tiles.lse, True, ahead)

    return config


def selected(kernel: Any, problem: IndexerLossProblem, align: int = 0, ahead: int = 0) -> Config:
    """Returns the compilation of a kernel of the loss over selected keys."""

    def config(chip: int) -> Compiled | None:
        tiles = shapes_loss.selected_tiles(problem, chip)
        if tiles is None:
            return None
        constexprs = launch_loss.selected_constants(problem, tiles, align or 16 // problem.torch_dtype.itemsize)
        tile = {"target": tiles.target, "score": tiles.score}
        name = kernel.__name__
        return Compiled(
            kernel, constexprs[name], types(problem), tile.get(name, launch_dense_kl_loss.NOTE), name in tile, ahead
        )

    return config


def gradient(problem: IndexerLossProblem, align: int = 0) -> Config:
    """Returns the compilation of the gradient of scores, which the indexer's backward also uses."""
    sizes = shapes_sparse.sizes_of_gradient(problem)

    def config(chip: int) -> Compiled | None:
        tile = shapes_sparse.gradient_tile(problem, chip, align or 8)
        if tile is None:
            return None
        constexprs = launch_indexer.gradient_constants(sizes, tile, align or 16 // problem.torch_dtype.itemsize)
        types_of = types(problem) | {"rows": ahead_type(launch_indexer.row_type(sizes))}
        return Compiled(index_gradient, constexprs, types_of, tile, ahead=max(0, tile.num_stages - 2))

    return config


def ahead_type(dtype: torch.dtype) -> str:
    """Returns Triton's name of a pointer type."""
    return "*bf16" if dtype == torch.bfloat16 else "*fp32"


def problem(dim: int = 128, dim_rope: int = 64, heads: int = 64, index: int = 128, **more: Any) -> IndexerLossProblem:
    given = {"heads_q": 128, "heads_kv": 128, "dtype": "bfloat16", "weights_dtype": "bfloat16", "scale": 0.1} | more
    return IndexerLossProblem(dim_qk=dim, dim_rope=dim_rope, heads_index=heads, dim_index=index, **given)


def indexer(dim: int = 128, dtype: str = "bfloat16") -> IndexerProblem:
    return IndexerProblem(64, dim, dtype, dtype, top_k=0)


LATENT = {"dim": 512, "heads_kv": 1, "select_count": 2048}
FLOAT32 = {"dtype": "float32", "weights_dtype": "float32"}
FLOAT16 = {"dtype": "float16", "weights_dtype": "float16"}


def configs() -> dict[str, Config]:
    """Returns the compilations by name: every kernel with every row of its tile table."""
    results: dict[str, Config] = {}
    for kernel in (
        dense_kl_loss.warm_target,
        dense_kl_loss.warm_difference,
        dense_kl_loss.warm_query,
        dense_kl_loss.warm_key,
    ):
        name = kernel.__name__
        results[f"{name}"] = warm(kernel, problem(), ahead=1 if kernel is dense_kl_loss.warm_difference else 2)
        results[f"{name} wide"] = warm(kernel, problem(dim=512, heads_kv=1, index=256))
        results[f"{name} float32"] = warm(kernel, problem(**FLOAT32))
        results[f"{name} float16"] = warm(kernel, problem(**FLOAT16, has_sink=True))
    results["warm_target odd strides"] = warm(dense_kl_loss.warm_target, problem(dim=72, dim_rope=0), align=1)
    results["warm_query odd strides"] = warm(dense_kl_loss.warm_query, problem(index=72), align=1)
    results["warm_lse"] = lse(indexer(), ahead=1)
    results["warm_lse wide"] = lse(indexer(256, "float16"))
    results["warm_lse float32"] = lse(indexer(dtype="float32"))
    for kernel in (selected_loss.target, selected_loss.score):
        name = f"selected_{kernel.__name__}"
        results[f"{name}"] = selected(kernel, problem(**LATENT), ahead=1 if kernel is selected_loss.score else 2)
        results[f"{name} 128 heads"] = selected(kernel, problem(**LATENT, heads=128))
        results[f"{name} wide"] = selected(kernel, problem(**LATENT, heads=128, index=256))
        results[f"{name} float32"] = selected(kernel, problem(**LATENT, **FLOAT32))
        results[f"{name} float16"] = selected(kernel, problem(**LATENT, **FLOAT16, has_sink=True))
    results["selected_gradients"] = gradient(problem(**LATENT))
    results["selected_gradients 128 heads"] = gradient(problem(**LATENT, heads=128))
    results["selected_gradients wide"] = gradient(problem(**LATENT, heads=128, index=256))
    results["selected_gradients float32"] = gradient(problem(**LATENT, **FLOAT32))
    results["selected_gradients float16"] = gradient(problem(**LATENT, **FLOAT16, has_sink=True))
    results["selected_target 8 heads"] = selected(selected_loss.target, problem(**LATENT | {"heads_q": 8}))
    results["selected_target 200 heads"] = selected(selected_loss.target, problem(**LATENT | {"heads_q": 200}), ahead=2)
    results["warm_target 200 heads"] = warm(dense_kl_loss.warm_target, problem(**LATENT | {"heads_q": 200}), ahead=2)
    results["note"] = warm(loss_parts.note, problem(**FLOAT16, has_sink=True))
    results["clean_keys"] = warm(loss_parts.clean_keys, problem())
    results["finish_keys"] = warm(loss_parts.finish_keys, problem(**FLOAT16))
    results["compare"] = selected(selected_loss.compare, problem(**LATENT))
    given = {"heads_q": 0, "heads_kv": 0, "dim_rope": 0}
    results["compare given"] = selected(selected_loss.compare, problem(**LATENT | given))
    results["warm_given"] = warm(dense_kl_loss.warm_given, problem(**given))
    results["warm_difference given"] = warm(dense_kl_loss.warm_difference, problem(**given), ahead=1)
    return results


CONFIGS: dict[str, Config] = configs()
EVERYDAY: tuple[str, ...] = ("warm_target", "selected_gradients")
# Run that spills registers: reason why no tile without spills is used.
SPILLED = {f"selected_score wide {chip}": "8 bytes at its limit of 64 registers" for chip in ("sm_80", "sm_86")}

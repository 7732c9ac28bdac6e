"""Lists the kernels of sparse attention's backward that are compiled ahead of time, and those that sum by key."""

from typing import Any

from support.ahead_run import Compiled, Config, pointers
from support.triton_ahead import TYPES

from fusion_attention.backends.triton.common import shapes
from fusion_attention.backends.triton.dense.backward import prepare
from fusion_attention.backends.triton.selected import backward as kernels
from fusion_attention.backends.triton.selected import key_sum, launch_key_sum
from fusion_attention.backends.triton.selected import launch_backward as launched
from fusion_attention.backends.triton.selected import shapes_backward as cuts
from fusion_attention.backends.triton.selected.recompute_gradients import recompute_rows, recompute_slots
from fusion_attention.backends.triton.selected.selection import read_lists
from fusion_attention.ir.problem import Problem

COUNT = 2048
ROWS = ("q", "k", "v", "k_compressed", "v_compressed", "dout", "q_rope", "k_rope", "x", "also", "out", "o", "rows")
WEIGHTS = ("weights", "weights_also", "ds")
SMALL = pointers("i32", "keys", "ids", "used", "noted", "tokens", "indices", "tiles")
TABLES = {"strides": "*i64", "lengths": "*i64", "flat": "*fp32", "max_": "*fp32", "sum_": "*fp32", "sink": "*fp32"}


def problem(heads: int, dim: int = 512, dim_rope: int = 64, dim_v: int = 512, **more: Any) -> Problem:
    """Makes a problem; the defaults are the sizes of MLA, where values are the first elements of the keys."""
    given = {"dtype": "bfloat16", "heads_kv": 1, "shares_kv": True, "select_count": COUNT} | more
    return Problem(heads, dim_qk=dim, dim_rope=dim_rope, dim_v=dim_v, scale=0.1, **given)


APART = {"dim": 128, "dim_rope": 64, "dim_v": 128, "shares_kv": False}


def types_of(p: Problem, atomic: bool) -> dict[str, str]:
    """Returns the types of the kernels' pointer arguments."""
    result = pointers(p.dtype, *ROWS, *WEIGHTS) | SMALL | TABLES | {"partials": "*fp32"}
    if p.dtype == "float16":
        result["large"] = "*i32"
    if atomic or launched.rows_dtype(p, float32_rows=False).itemsize == 4:
        result["rows"] = "*fp32"
    absent = {"q_rope", "k_rope"} if not p.dim_rope else set()
    absent |= {"v", "v_compressed"} if p.shares_kv else set()
    absent |= set() if p.compressed_ratio else {"k_compressed", "v_compressed"}
    return {name: kind for name, kind in result.items() if name not in absent}


def step(kernel: Any, p: Problem, which: int = 0, *, align: int = 0, atomic: bool = False, ahead: int = 0) -> Config:
    """Returns the compilation of launch number `which` of a kernel in a chunk; ahead: as in Compiled."""

    def compiled(chip: int) -> Compiled:
        alignment = align or shapes.widest(p)
        tiles = {name: cuts.tile_of(name, p, chip, alignment) for name in cuts.KERNELS}
        band, slots = (128, 128) if p.compressed_ratio else (0, 0)
        slots += -(-p.select_count * p.select_block // 128) * 128
        steps = launched.launches(p, tiles, alignment, (band, slots), atomic)
        one = [one for one in steps if one.kernel is kernel][which]
        tile_of_step = one.tile
        if kernel in (read_lists, recompute_rows, recompute_slots):
            small = shapes.Tile(0, 0, tile_of_step.num_warps, tile_of_step.num_stages)
            return Compiled(kernel, one.constexprs, types_of(p, atomic), small, counted=False)
        # Slots are the rows of products that sum over heads, and the columns of others.
        sizes = (
            (tile_of_step.BN, tile_of_step.BC)
            if kernel is kernels.backward_slots
            else (tile_of_step.BH, tile_of_step.BN)
        )
        tile = shapes.Tile(*sizes, tile_of_step.num_warps, tile_of_step.num_stages)
        return Compiled(kernel, one.constexprs, types_of(p, atomic), tile, ahead=ahead)

    return compiled


def of_rows(kernel: Any, dtype: str = "bfloat16") -> Config:
    """Returns the compilation of a kernel that sums rows by key."""
    types = {"rows": "*" + TYPES[dtype], "order": "*i64", "total": "*fp32", "parts": "*fp32"}
    types |= dict.fromkeys(("starts", "marked", "strides", "hot"), "*i32")
    constexprs = {"COLUMNS": 576, "W": launch_key_sum.panel_of(576)}
    tile = launch_key_sum.ADD
    if kernel in (key_sum.mark, key_sum.find_hot):
        tile = launch_key_sum.NOTE
        constexprs = {"BN": tile.BN} | ({"HOT": launch_key_sum.HOT} if kernel is key_sum.find_hot else {})
    return lambda _: Compiled(kernel, constexprs, types, tile, counted=False)


def written() -> Config:
    """Returns the compilation of the kernel that writes the sums as gradients."""
    types = {"total": "*fp32", "out": "*bf16", **SMALL, **TABLES}
    constexprs = {"VIEW": 0, "IDS": 0, "COLUMNS": 576, "FIRST": 0, "DIM": 512, "W": 256, "BN": launch_key_sum.WRITE.BN}
    return lambda _: Compiled(key_sum.write_rows, constexprs, types, launch_key_sum.WRITE, counted=False)


def noted(p: Problem) -> Config:
    """Returns the compilation of the kernel that computes lse and delta of rows."""
    constexprs = launched.prepare_constants(p, shapes.widest(p))
    return lambda _: Compiled(prepare, constexprs, types_of(p, False), launched.PREPARE, counted=False)


def configs() -> dict[str, Config]:
    """Returns the compilations by name: every tile of the tables, without and with features."""
    results: dict[str, Config] = {}
    three = (("weights", kernels.weigh_slots), ("rows", kernels.backward_rows), ("slots", kernels.backward_slots))
    for what, kernel in three:
        for heads in (128, 64, 32, 16):
            # With 16 heads, the loop over heads has one iteration and no loads ahead.
            ahead = 0 if heads == 16 and what == "slots" else 2
            results[f"sparse {what} {heads}"] = step(kernel, problem(heads), ahead=ahead)
        results[f"sparse {what} 128 apart"] = step(kernel, problem(128, **APART), ahead=2)
        results[f"sparse {what} 200"] = step(kernel, problem(200), ahead=2)
        results[f"sparse {what} 128 float16"] = step(kernel, problem(128, dtype="float16"), ahead=2)
        results[f"sparse {what} float32"] = step(kernel, problem(16, dtype="float32"))
        results[f"sparse {what} 128 odd strides"] = step(kernel, problem(128), align=1)
        results[f"sparse {what} 40 grouped"] = step(kernel, problem(80, heads_kv=2, select_block=16, **APART), ahead=2)
        two = problem(64, dim_rope=0, select_count=512, compressed_ratio=4)
        results[f"sparse {what} two sources"] = step(kernel, two, ahead=2)
    results["sparse two sources apart"] = step(
        kernels.weigh_slots, problem(64, **APART | {"dim_rope": 0}, compressed_ratio=4), ahead=2
    )
    results["sparse lists two sources"] = step(read_lists, problem(64, dim_rope=0, compressed_ratio=4))
    results["sparse recompute rows two sources"] = step(recompute_rows, problem(64, dim_rope=0, compressed_ratio=4))
    results["sparse weights 576"] = step(kernels.weigh_slots, problem(128, dim=576, dim_rope=0), ahead=2)
    results["sparse slots 576"] = step(kernels.backward_slots, problem(128, dim=576, dim_rope=0), 1, ahead=2)
    results["sparse rows 128 rope"] = step(kernels.backward_rows, problem(128), -1, ahead=2)
    results["sparse slots 128 rope"] = step(kernels.backward_slots, problem(128), -1, ahead=2)
    results["sparse slots 128 values"] = step(kernels.backward_slots, problem(128, **APART), -1, ahead=2)
    results["sparse slots 128 atomic"] = step(kernels.backward_slots, problem(128), atomic=True, ahead=2)
    results["sparse lists"] = step(read_lists, problem(128))
    for name in ("bfloat16", "float16"):
        results[f"sparse recompute rows {name}"] = step(recompute_rows, problem(128, dtype=name))
        results[f"sparse recompute slots {name}"] = step(recompute_slots, problem(128, dtype=name))
    results["sparse prepare 512"] = noted(problem(128, has_sink=True))
    results |= {"sum rows": of_rows(key_sum.add_rows), "sum rows float32": of_rows(key_sum.add_rows, "float32")}
    results |= {"sum blocks": of_rows(key_sum.add_blocks), "sum blocks float32": of_rows(key_sum.add_blocks, "float32")}
    results |= {"sum hot": of_rows(key_sum.find_hot), "sum marked": of_rows(key_sum.mark), "sum written": written()}
    return results


CONFIGS: dict[str, Config] = configs()
EVERYDAY: tuple[str, ...] = ("sparse weights 128", "sparse slots 128", "sparse rows 16", "sum rows")
# Run that spills registers: reason why no tile without spills is used.
SPILLED = {
    "sparse two sources apart sm_80": "64 bytes, none of them touched in the loop",
    "sparse weights 40 grouped sm_80": "8 bytes with Triton 3.7.1, none with 3.6.0",
    "sparse recompute slots float16 sm_90": "16 bytes with Triton 3.7.1; runs where something is not finite",
}

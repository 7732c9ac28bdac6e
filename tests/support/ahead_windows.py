"""Lists the pooling kernels that are compiled ahead of time."""

from typing import Any

from support.ahead_run import Compiled, Config, pointers

from fusion_attention.backends.triton.windows import launch
from fusion_attention.backends.triton.windows.kernel import pool, pool_bias, pool_gradient
from fusion_attention.ir.pooling import PoolingProblem

ROWS = ("q", "k", "out", "dout", "dq", "dk")
TABLES = pointers("i64", "strides", "lengths") | pointers("i32", "tokens") | pointers("float32", "notes", "added")


def config(kernel: Any, problem: PoolingProblem, align: int = 0) -> Config:
    """Returns the compilation of a kernel; align: elements to which rows are aligned; 0: 16 bytes."""
    aligned = align or (4 if problem.dtype == "float32" else 8)
    types = TABLES | pointers(problem.dtype, *ROWS) | (pointers("float32", "bias") if problem.has_bias else {})
    constants = launch.constants_of(problem, aligned)[kernel.__name__]
    return lambda chip: Compiled(kernel, constants, types, launch.TILE, False)


def configs() -> dict[str, Config]:
    """Returns the compilations by name: every kernel with the sizes of DeepSeek-V4's layers."""
    results: dict[str, Config] = {}
    for kernel in (pool, pool_gradient, pool_bias):
        name = kernel.__name__
        results[name] = config(kernel, PoolingProblem(1, 512, 4, True, "bfloat16", True))
        results[f"{name} 128 rows"] = config(kernel, PoolingProblem(1, 512, 128, False, "bfloat16", True))
    results["pool float32"] = config(pool, PoolingProblem(1, 96, 4, True, "float32"), align=1)
    results["pool_gradient float16"] = config(pool_gradient, PoolingProblem(2, 100, 7, False, "float16"))
    return results


CONFIGS: dict[str, Config] = configs()
EVERYDAY: tuple[str, ...] = ("pool", "pool_gradient")
SPILLED: dict[str, str] = {}

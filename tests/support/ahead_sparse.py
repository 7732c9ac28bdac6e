"""Lists the kernels of attention to selected keys and of pooling that are compiled ahead of time."""

from typing import Any

from support.ahead_calls import Config
from support.ahead_dense import FLOAT16, FLOAT32, LATENT, SIZES, problem

from fusion_attention.ir.pooling import PoolingProblem
from fusion_attention.ir.problem import Problem

TWO: dict[str, Any] = {"dim": 512, "shares_kv": True, "select_count": 512, "compressed_ratio": 4}
LISTED: dict[str, dict[str, Any]] = {"latent": LATENT} | {name: SIZES[name] for name in ("128", "256", "576", "768")}
SPLIT = 1024  # processors of a GPU that is so large that several programs share a list


def forward(align: int = 0, recomputes: bool = False, split: bool = False, **more: Any) -> Config:
    """Returns an entry of the forward; recomputes: use recompute_lists; split: several programs share a list."""
    given = {"heads_q": 128, "heads_kv": 1, "select_count": 2048, "has_sink": True} | more
    kernel = "recompute_lists" if recomputes else "sparse_forward"
    return Config(kernel, problem(**given), align=align, processors=SPLIT if split else 1)


LISTS: dict[str, Config] = {
    **{
        f"{name} {heads} heads": forward(**size, heads_q=heads)
        for name, size in LISTED.items()
        for heads in (64, 32, 16)
    },
    "latent 200 heads": forward(**LATENT, heads_q=200),
    "latent blocks": forward(**LATENT, select_block=16, **FLOAT16),
    "latent pages": forward(**LATENT, page_size=64),
    "latent 8 heads pages": forward(**LATENT, heads_q=8, page_size=64, select_block=4),
    **{f"latent {heads} heads cut": forward(**LATENT, heads_q=heads, split=True) for heads in (64, 32, 16)},
    **{f"{name} cut": forward(**SIZES[name], split=True) for name in ("128", "256", "576", "768")},
    "latent pages cut": forward(**LATENT, page_size=64, split=True),
    "latent odd strides cut": forward(align=1, **LATENT, split=True),
    "latent float32 cut": forward(**FLOAT32, **LATENT, split=True),
    "latent negative scale": forward(**LATENT, scale=-0.1),
    "128 pages": forward(dim=128, page_size=16, **FLOAT16),
    "576 pages": forward(**SIZES["576"], page_size=64),
    **{f"{name} odd strides": forward(align=1, **size) for name, size in LISTED.items()},
    **{f"{name} float32": forward(**FLOAT32, **size) for name, size in LISTED.items()},
    "latent float32 pages": forward(**FLOAT32, **LATENT, page_size=16, select_block=3),
    **{f"{name} recomputed": forward(recomputes=True, **size) for name, size in LISTED.items()},
    "576 pages recomputed": forward(recomputes=True, **SIZES["576"], page_size=64, select_block=16, **FLOAT16),
    "latent odd pages": forward(align=1, **LATENT, page_size=16, select_block=3),
}
TWO_SOURCES: dict[str, Config] = {
    **{f"{heads} heads": forward(**TWO, heads_q=heads) for heads in (64, 32, 16)},
    **{f"{heads} heads split": forward(**TWO, heads_q=heads, split=True) for heads in (64, 16)},
    "all": forward(**TWO | {"select_count": 0, "compressed_ratio": 128}, heads_q=64),
    "pages": forward(**TWO, heads_q=64, page_size=64, split=True),
    "odd strides": forward(align=1, **TWO, heads_q=64),
    "128 apart": forward(dim=128, compressed_ratio=4, heads_q=64, **FLOAT16),
    "float32": forward(**FLOAT32, **TWO, heads_q=64),
    "recomputed": forward(recomputes=True, **TWO, heads_q=64, page_size=64),
}


def latent(heads: int, **more: Any) -> Problem:
    """Returns a problem with the sizes of MLA, in which values are the first elements of keys."""
    return problem(**LATENT | {"heads_q": heads, "heads_kv": 1, "select_count": 2048} | more)


APART: dict[str, Any] = {"dim": 128, "shares_kv": False}
SOURCES: dict[str, Any] = {"dim_rope": 0, "compressed_ratio": 4}


def gradients() -> dict[str, Config]:
    """Returns the entries of the backward: every tile of the tables, without and with features."""
    results: dict[str, Config] = {}
    problems = {f"{heads}": latent(heads) for heads in (128, 64, 32, 16, 200)} | {
        "128 apart": latent(128, **APART),
        "128 float16": latent(128, **FLOAT16),
        "float32": latent(16, **FLOAT32),
        "40 grouped": latent(80, heads_kv=2, select_block=16, **APART),
        "two sources": latent(64, select_count=512, **SOURCES),
    }
    kernels = {"weights": "weigh_slots", "rows": "backward_rows", "slots": "backward_slots"}
    for what, kernel in kernels.items():
        results |= {f"{what} {name}": Config(kernel, p) for name, p in problems.items()}
        results[f"{what} 128 odd strides"] = Config(kernel, latent(128), align=1)
    long_rows = latent(128, dim=576, dim_v=512, dim_rope=0)
    results |= {
        "two sources apart": Config("weigh_slots", latent(64, **APART | SOURCES)),
        "lists two sources": Config("read_lists", latent(64, **SOURCES)),
        "recompute rows two sources": Config("recompute_rows", latent(64, **SOURCES)),
        "weights 576": Config("weigh_slots", long_rows),
        "slots 576": Config("backward_slots", long_rows, 1),
        "rows 128 rope": Config("backward_rows", latent(128), -1),
        "slots 128 rope": Config("backward_slots", latent(128), -1),
        "slots 128 values": Config("backward_slots", latent(128, **APART), -1),
        "lists": Config("read_lists", latent(128)),
        "prepare 512": Config("prepare", latent(128, has_sink=True)),
    }
    for dtype in ("bfloat16", "float16"):
        for what in ("rows", "slots"):
            results[f"recompute {what} {dtype}"] = Config(f"recompute_{what}", latent(128, dtype=dtype))
    return results


# Sums by key: (kernel, further fields of the problem).
SUMS: dict[str, tuple[str, dict[str, Any]]] = {
    "rows": ("add_rows", {}),
    "rows float32": ("add_rows", FLOAT16),
    "blocks": ("add_blocks", {}),
    "blocks float32": ("add_blocks", FLOAT16),
    "hot": ("find_hot", {}),
    "marked": ("mark", {}),
    "written": ("write_rows", {}),
}
LAYERS = {
    "": PoolingProblem(1, 512, 4, True, "bfloat16", True),
    " 128 rows": PoolingProblem(1, 512, 128, False, "bfloat16", True),
}
POOLS: dict[str, Config] = {
    **{
        f"{kernel}{name}": Config(kernel, p)
        for kernel in ("pool", "pool_gradient", "pool_bias")
        for name, p in LAYERS.items()
    },
    "pool float32": Config("pool", PoolingProblem(1, 96, 4, True, "float32"), align=1),
    "pool_gradient float16": Config("pool_gradient", PoolingProblem(2, 100, 7, False, "float16")),
}
FORWARD = {
    **{f"lists {name}": config for name, config in LISTS.items()},
    **{f"two sources {name}": config for name, config in TWO_SOURCES.items()},
}
BACKWARD = {
    **{f"sparse {name}": config for name, config in gradients().items()},
    **{f"sum {name}": Config(kernel, latent(128, **more)) for name, (kernel, more) in SUMS.items()},
}
EVERYDAY = (
    *("lists latent 64 heads", "two sources 64 heads", "lists 128 recomputed"),
    *("sparse weights 128", "sparse slots 128", "sparse rows 16", "sum rows"),
    *("pool", "pool_gradient"),
)
# Reason why no tile without spills is used, by run that spills registers.
OUTSIDE = "at most 16 bytes, written before the main loop and read after it"
FEW = "at most 24 bytes; one instruction of hundreds in a turn touches them"
PAGES = "112 bytes, touched by 7 of 755 instructions of a turn; 32 heads keep none and take twice as long on an H100"
SPILLED = {
    **dict.fromkeys((f"two sources {run} sm_90" for run in ("64 heads", "64 heads split", "all")), FEW),
    "two sources pages sm_90": PAGES,
    **dict.fromkeys(("lists latent pages sm_90", "lists 576 pages sm_90", "lists latent pages cut sm_86"), OUTSIDE),
    **dict.fromkeys(
        ("lists latent 64 heads sm_80", "lists 576 64 heads sm_80", "lists latent 200 heads sm_80"), OUTSIDE
    ),
    **dict.fromkeys(("lists latent pages sm_80", "lists latent negative scale sm_80"), OUTSIDE),
    "lists 768 recomputed sm_90": "8 bytes of a kernel that returns where all results are finite",
    "sparse two sources apart sm_80": "64 bytes, none of them touched in the loop",
    "sparse weights 40 grouped sm_80": "8 bytes with Triton 3.7.1, none with 3.6.0",
    "sparse recompute slots float16 sm_90": "16 bytes with Triton 3.7.1; runs where something is not finite",
}

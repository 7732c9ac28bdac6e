"""Lists the dense and decode kernels that are compiled ahead of time: every row of their tables of tiles."""

from typing import Any

from support.ahead_calls import Config

from fusion_attention.ir.problem import Problem


def problem(dim: int, dim_v: int = 0, **more: Any) -> Problem:
    given = {"dtype": "bfloat16", "scale": 0.1, "heads_q": 16, "heads_kv": 4} | more
    return Problem(dim_qk=dim, dim_v=dim_v or dim, **given)


LIGHT = {"bias": "slopes_sqrt", "has_sink": True}
DRAWN = {"bias": "matrix", "dropout": "philox", "keep_prob": 0.9}
READ = {"bias": "table", "has_blocked": True, "dropout": "bits", "keep_prob": 0.9, "has_sink": True}
SIZES: dict[str, dict[str, Any]] = {
    "64": {"dim": 64},
    "128": {"dim": 128},
    "192": {"dim": 128, "dim_rope": 64},
    "256": {"dim": 256},
    "576": {"dim": 512, "dim_rope": 64},
    "768": {"dim": 768},
}
MEAN, MEAN_IN_BAND = {"empty_rows": "mean"}, {"empty_rows": "mean_in_band"}
FLOAT16, FLOAT32 = {"dtype": "float16"}, {"dtype": "float32"}
PAGES = {"page_size": 64}
PAGED_READ = {"bias": "matrix", "has_blocked": True}
LATENT: dict[str, Any] = {"dim": 512, "dim_rope": 64, "shares_kv": True}
INT8 = {"kv_dtype": "int8", "dequant_k": "channel", "dequant_v": "token"}
BACKWARD = {"query": "backward_query", "key": "backward_key"}
RECOMPUTE = ("recompute_out", "recompute_query", "recompute_key")
MANY = 64  # query rows for which a cache is read by the tiles of a prefill


def of_training() -> dict[str, Config]:
    """Returns the entries of forward and backward, without and with features."""
    problems: dict[str, Problem] = {}
    for name, size in SIZES.items():
        problems[name] = problem(**size, **LIGHT)
        problems[f"{name} read"] = problem(**size, **READ, **(MEAN_IN_BAND if name == "768" else MEAN))
    problems |= {
        "128 plain": problem(128),
        "128 capped": problem(128, softcap=50.0),
        "128 drawn": problem(128, **FLOAT16, **DRAWN),
        "float32": problem(128, **FLOAT32, **LIGHT),
        "float32 read": problem(128, **FLOAT32, **READ, **MEAN),
    }
    results: dict[str, Config] = {}
    for kernel in ("forward", "query", "key"):
        function = BACKWARD.get(kernel, kernel)
        results |= {f"{kernel} {name}": Config(function, p) for name, p in problems.items()}
        for name, align in (("odd", 1), ("even", 2)):
            results[f"{kernel} 128 {name} strides"] = Config(function, problem(128, **LIGHT), align=align)
    return results


# Problems of the forward: plain products have separate tiles; `blocked` is read for every pair of row and key.
FORWARDS = {
    **{f"{name} blocked": problem(**SIZES[name], has_blocked=True) for name in ("64", "128", "192", "256")},
    "64 plain": problem(64),
    "128 mean": problem(128, **LIGHT, **MEAN_IN_BAND),
    "192 capped": problem(**SIZES["192"], softcap=50.0),
    "256 mean": problem(256, **LIGHT, **MEAN_IN_BAND),
    "96": problem(96, **FLOAT16),
}
KEYS = {
    **{f"{name} plain": problem(**SIZES[name]) for name in ("64", "192", "256")},
    "128 float16": problem(128, **FLOAT16),
    "128 mean": problem(128, **MEAN),
    "128 ungrouped": problem(128, heads_kv=16),
    "192 mean": problem(**SIZES["192"], **LIGHT, **MEAN),
}
# Decode entries: (problem, query rows).
DECODES = {
    "128": (problem(128, **PAGES), 8),
    "128 16 rows": (problem(128, **PAGES), 4),
    "128 16 rows int8": (problem(128, **PAGES, **INT8), 4),
    "128 capped": (problem(128, **PAGES, softcap=50.0), 8),
    "128 slopes": (problem(128, **PAGES, **LIGHT), 8),
    "128 int8": (problem(128, **PAGES, **INT8), 8),
    "256": (problem(256, **PAGES), 8),
    **{f"{name} read": (problem(**SIZES[name], **PAGES, **PAGED_READ), 8) for name in ("128", "576", "768")},
    **{f"{name}": (problem(**SIZES[name], **PAGES), 8) for name in ("576", "768")},
    **{f"{name} int8": (problem(**SIZES[name], **PAGES, **INT8), 8) for name in ("576", "768")},
    "float32": (problem(128, **FLOAT32, **PAGES, **PAGED_READ), 8),
}
PREFILLS = {
    **{f"{name}": problem(**SIZES[name], **PAGES, **LIGHT) for name in ("64", "128", "192", "256")},
    **{f"{name} read": problem(**SIZES[name], **PAGES, **PAGED_READ) for name in ("64", "128", "192", "256")},
    "128 int8": problem(128, **PAGES, **INT8),
    "128 int8 read": problem(128, **PAGES, **INT8, **PAGED_READ),
}
CONFIGS: dict[str, Config] = {
    **of_training(),
    **{f"forward {name}": Config("forward", p) for name, p in FORWARDS.items()},
    **{f"query {name} plain": Config("backward_query", problem(**SIZES[name])) for name in ("64", "192")},
    **{f"key {name}": Config("backward_key", p) for name, p in KEYS.items()},
    "prepare 128": Config("prepare", problem(128, has_sink=True)),
    **{f"decode {name}": Config("decode", p, rows=rows) for name, (p, rows) in DECODES.items()},
    **{f"prefill {name}": Config("decode", p, rows=MANY) for name, p in PREFILLS.items()},
    "latent": Config("decode", problem(**LATENT, **PAGES), rows=MANY),
    "latent read": Config("decode", problem(**LATENT, **PAGES, **PAGED_READ), rows=MANY),
    **{f"{kernel} 128": Config(kernel, problem(128, softcap=50.0, **LIGHT)) for kernel in RECOMPUTE},
    **{f"{kernel} 768 read": Config(kernel, problem(768, **READ)) for kernel in RECOMPUTE},
    **{f"{kernel} 576 drawn": Config(kernel, problem(**SIZES["576"], **FLOAT16, **DRAWN)) for kernel in RECOMPUTE},
    "recompute_out 576 int8": Config("recompute_out", problem(**SIZES["576"], **PAGES, **INT8)),
    "join 128": Config("join", problem(128, **PAGES, has_sink=True)),
}
EVERYDAY = (
    *("forward 128 plain", "forward 128 capped", "forward 128 drawn", "forward 128 read", "forward 96"),
    "forward 192",
    *("query 128 plain", "query 64 read", "query float32", "key 128 plain", "key 128 drawn", "key 768", "prepare 128"),
    *("decode 128", "decode 576", "decode 128 16 rows int8", "join 128"),
    *("recompute_out 128", "recompute_query 128", "recompute_key 768 read"),
)
# Daily entries that are compiled for sm_80 too.
OLDER = ("forward 128 plain", "query 64 read", "key 128 drawn", "decode 128 16 rows int8", "recompute_out 128")

"""Lists the kernels of the indexer and of its loss that are compiled ahead of time."""

from typing import Any

from support.ahead_calls import Config

from fusion_attention.ir.problem import IndexerLossProblem, IndexerProblem


def indexer(heads: int = 64, dim: int = 128, **more: Any) -> IndexerProblem:
    return IndexerProblem(heads, dim, **{"dtype": "bfloat16", "weights_dtype": "bfloat16", "has_values": True} | more)


def scores(p: IndexerProblem, **more: Any) -> Config:
    return Config("index_scores", p, **more)


def gradient(p: IndexerProblem | IndexerLossProblem, **more: Any) -> Config:
    return Config("index_gradient", p, **more)


LOW, FLOAT32 = {"dtype": "float16"}, {"dtype": "float32"}
SELECTION: dict[str, Config] = {
    "scores 64 heads": scores(indexer()),
    "scores 64 heads paged": scores(indexer(page_size=64)),
    "scores 33 heads": scores(indexer(33)),
    "scores 8 heads": scores(indexer(8)),
    "scores 1 head": scores(indexer(1)),
    "scores 128 heads": scores(indexer(128, **LOW)),
    "scores 128 heads added": scores(indexer(128), which=1),
    "scores 256": scores(indexer(dim=256)),
    "scores 768": scores(indexer(dim=768)),
    "scores odd strides": scores(indexer(), align=1),
    "scores float32": scores(indexer(**FLOAT32)),
    "choice 2048": Config("index_choice", indexer()),
    "choice 8192": Config("index_choice", indexer(top_k=8192, page_size=64)),
    "write 2048": Config("index_write", indexer()),
    "write 8192": Config("index_write", indexer(top_k=8192)),
    "gradient 64 heads": gradient(indexer()),
    "gradient 64 heads float16": gradient(indexer(**LOW)),
    "gradient 16 heads": gradient(indexer(16)),
    "gradient 128 heads": gradient(indexer(128)),
    "gradient 128 heads float16": gradient(indexer(128, **LOW)),
    "gradient 200 heads added": gradient(indexer(200), which=1),
    "gradient 200 heads float16 added": gradient(indexer(200, **LOW), which=1),
    "gradient 256": gradient(indexer(dim=256)),
    "gradient odd strides": gradient(indexer(), align=1),
    "gradient float32": gradient(indexer(**FLOAT32)),
    "recompute": Config("recompute_gradient", indexer()),
    "recompute 256": Config("recompute_gradient", indexer(dim=256)),
}


INDEXER = {f"indexer {name}": config for name, config in SELECTION.items()}


def loss(dim: int = 128, dim_rope: int = 64, heads: int = 64, index: int = 128, **more: Any) -> IndexerLossProblem:
    given = {"heads_q": 128, "heads_kv": 128, "dtype": "bfloat16", "scale": 0.1} | more
    given["weights_dtype"] = given["dtype"]
    return IndexerLossProblem(dim_qk=dim, dim_rope=dim_rope, heads_index=heads, dim_index=index, **given)


LATENT = {"dim": 512, "heads_kv": 1, "select_count": 2048}
FLOAT16 = {"dtype": "float16", "has_sink": True}
GIVEN = {"heads_q": 0, "heads_kv": 0, "dim_rope": 0}  # the target is an operand
WARM = {
    "": loss(),
    " wide": loss(dim=512, heads_kv=1, index=256),
    " float32": loss(**FLOAT32),
    " float16": loss(**FLOAT16),
}
SELECTED = {
    "": loss(**LATENT),
    " 128 heads": loss(**LATENT, heads=128),
    " wide": loss(**LATENT, heads=128, index=256),
    " float32": loss(**LATENT, **FLOAT32),
    " float16": loss(**LATENT, **FLOAT16),
}
LOSS: dict[str, Config] = {
    **{
        f"{kernel}{name}": Config(kernel, p)
        for kernel in ("warm_target", "warm_difference", "warm_query", "warm_key")
        for name, p in WARM.items()
    },
    "warm_target odd strides": Config("warm_target", loss(dim=72, dim_rope=0), align=1),
    "warm_query odd strides": Config("warm_query", loss(index=72), align=1),
    "warm_lse": Config("warm_lse", indexer(top_k=0)),
    "warm_lse wide": Config("warm_lse", indexer(dim=256, dtype="float16", weights_dtype="float16", top_k=0)),
    "warm_lse float32": Config("warm_lse", indexer(dtype="float32", weights_dtype="float32", top_k=0)),
    **{f"selected_{kernel}{name}": Config(kernel, p) for kernel in ("target", "score") for name, p in SELECTED.items()},
    **{f"selected_gradients{name}": gradient(p) for name, p in SELECTED.items()},
    "selected_target 8 heads": Config("target", loss(**LATENT | {"heads_q": 8})),
    "selected_target 200 heads": Config("target", loss(**LATENT | {"heads_q": 200})),
    "warm_target 200 heads": Config("warm_target", loss(dim=512, heads_kv=1, heads_q=200)),
    "note": Config("note", loss(**FLOAT16)),
    "clean_keys": Config("clean_keys", loss()),
    "finish_keys": Config("finish_keys", loss(dtype="float16")),
    "compare": Config("compare", loss(**LATENT)),
    "compare given": Config("compare", loss(**LATENT | GIVEN)),
    "warm_given": Config("warm_given", loss(**GIVEN)),
    "warm_difference given": Config("warm_difference", loss(**GIVEN)),
}
EVERYDAY = ("indexer scores 64 heads", "indexer gradient 64 heads", "warm_target", "selected_gradients")
# Reason why no tile without spills is used, by run that spills registers.
SPILLED = {
    "indexer gradient 128 heads sm_86": "16 bytes with Triton 3.7.1, none with 3.6.0",
    "indexer recompute sm_80": "16 bytes with Triton 3.7.1; runs where something is not finite",
    "indexer scores 33 heads sm_86": "8 bytes with Triton 3.7.1, none with 3.6.0; one instruction of a turn",
    **{f"selected_score wide {chip}": "8 bytes at its limit of 64 registers" for chip in ("sm_80", "sm_86")},
}

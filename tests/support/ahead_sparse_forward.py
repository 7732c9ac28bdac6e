"""Lists the kernels of sparse attention's forward that are compiled ahead of time."""

from typing import Any

from support.ahead_run import Compiled, Config, pointers
from support.triton_ahead import problem

from fusion_attention.backends.triton.common import shapes
from fusion_attention.backends.triton.selected import launch as launch_sparse
from fusion_attention.backends.triton.selected import shapes as shapes_sparse
from fusion_attention.backends.triton.selected.forward import sparse_forward
from fusion_attention.backends.triton.selected.recompute import recompute_lists

LATENT: dict[str, Any] = {"dim": 512, "dim_rope": 64, "shares_kv": True}
SIZES: dict[str, dict[str, Any]] = {
    "latent": LATENT,
    "128": {"dim": 128},
    "256": {"dim": 256},
    "576": {"dim": 512, "dim_rope": 64},
    "768": {"dim": 768},
}


def config(align: int = 0, recomputes: bool = False, split: bool = False, **more: Any) -> Config:
    """Returns the compilation of a forward kernel; recomputes: of recompute_lists; split: programs share a list."""
    given = {"heads_q": 128, "heads_kv": 1, "select_count": 2048, "has_sink": True} | more
    p = problem(**given)

    def compiled(chip: int) -> Compiled | None:
        tile = shapes_sparse.forward_tile(p, chip, align)
        if tile is None:
            return None
        types = pointers(p.dtype, "q", "k", "out") | pointers("fp32", "max_", "sum_", "sink", *(("partials",) * split))
        types |= pointers("i64", "strides", "lengths") | pointers("i32", "indices", "tokens")
        types |= pointers(p.dtype, "q_rope", "k_rope") if p.dim_rope else {}
        types |= {} if shapes_sparse.shared(p) else pointers(p.dtype, "v")
        types |= pointers("i32", "table") if p.page_size else {}
        pages = p.page_size // 4 if p.compressed_ratio else 0
        if p.compressed_ratio:
            types |= pointers(p.dtype, "k_compressed", *(() if shapes_sparse.shared(p) else ("v_compressed",)))
            types |= pointers("i32", *(("table_compressed",) if pages else ()))
        types = {name: kind for name, kind in types.items() if name != "indices" or p.select_count}
        if recomputes:
            constexprs = launch_sparse.recompute_constants(p, align or shapes.widest(p), page_compressed=pages)
            return Compiled(
                recompute_lists, constexprs, types, shapes.recompute_tile("recompute_out", p), counted=False
            )
        constexprs = launch_sparse.forward_constants(
            p, tile, align or shapes.widest(p), split=split, page_compressed=pages
        )
        return Compiled(
            sparse_forward, constexprs, types, tile, ahead=tile.num_stages - 1 if tile.num_stages > 2 else 0
        )

    return compiled


CONFIGS: dict[str, Config] = {}
for name, size in SIZES.items():
    for heads in (64, 32, 16):
        CONFIGS[f"lists {name} {heads} heads"] = config(**size, heads_q=heads)
CONFIGS |= {
    "lists latent 200 heads": config(**LATENT, heads_q=200),
    "lists latent blocks": config(**LATENT, select_block=16, dtype="float16"),
    "lists latent pages": config(**LATENT, page_size=64),
    "lists latent 8 heads pages": config(**LATENT, heads_q=8, page_size=64, select_block=4),
    **{f"lists latent {heads} heads cut": config(**LATENT, heads_q=heads, split=True) for heads in (64, 32, 16)},
    "lists 128 cut": config(dim=128, split=True),
    "lists 256 cut": config(dim=256, split=True),
    "lists 576 cut": config(**SIZES["576"], split=True),
    "lists 768 cut": config(dim=768, split=True),
    "lists latent pages cut": config(**LATENT, page_size=64, split=True),
    "lists latent odd strides cut": config(align=1, **LATENT, split=True),
    "lists latent float32 cut": config(dtype="float32", **LATENT, split=True),
    "lists latent negative scale": config(**LATENT, scale=-0.1),
    "lists 128 pages": config(dim=128, page_size=16, dtype="float16"),
    "lists 576 pages": config(**SIZES["576"], page_size=64),
    **{f"lists {name} odd strides": config(align=1, **size) for name, size in SIZES.items()},
    **{f"lists {name} float32": config(dtype="float32", **size) for name, size in SIZES.items()},
    "lists latent float32 pages": config(dtype="float32", **LATENT, page_size=16, select_block=3),
    **{f"lists {name} recomputed": config(recomputes=True, **size) for name, size in SIZES.items()},
    "lists 576 pages recomputed": config(
        recomputes=True, **SIZES["576"], page_size=64, select_block=16, dtype="float16"
    ),
    "lists latent odd pages": config(align=1, **LATENT, page_size=16, select_block=3),
}
TWO: dict[str, Any] = {"dim": 512, "shares_kv": True, "select_count": 512, "compressed_ratio": 4}
CONFIGS |= {
    **{f"two sources {heads} heads": config(**TWO, heads_q=heads) for heads in (64, 32, 16)},
    **{f"two sources {heads} heads split": config(**TWO, heads_q=heads, split=True) for heads in (64, 16)},
    "two sources all": config(**TWO | {"select_count": 0, "compressed_ratio": 128}, heads_q=64),
    "two sources pages": config(**TWO, heads_q=64, page_size=64, split=True),
    "two sources odd strides": config(align=1, **TWO, heads_q=64),
    "two sources 128 apart": config(dim=128, compressed_ratio=4, heads_q=64, dtype="float16"),
    "two sources float32": config(dtype="float32", **TWO, heads_q=64),
    "two sources recomputed": config(recomputes=True, **TWO, heads_q=64, page_size=64),
}
EVERYDAY = ("lists latent 64 heads", "two sources 64 heads", "lists 128 recomputed")
# Run that spills registers: reason why no tile without spills is used.
OUTSIDE = "at most 16 bytes, written before the main loop and read after it"
FEW = "at most 24 bytes; one instruction of hundreds in a turn touches them"
PAGES = "112 bytes, touched by 7 of 755 instructions of a turn; 32 heads keep none and take twice as long on an H100"
SPILLED = {
    **dict.fromkeys((f"two sources {run} sm_90" for run in ("64 heads", "64 heads split", "all")), FEW),
    "two sources pages sm_90": PAGES,
    **dict.fromkeys(("lists latent pages sm_90", "lists 576 pages sm_90", "lists latent pages cut sm_86"), OUTSIDE),
    **dict.fromkeys(
        (
            "lists latent 64 heads sm_80",
            "lists 576 64 heads sm_80",
            "lists latent 200 heads sm_80",
            "lists latent pages sm_80",
            "lists latent negative scale sm_80",
        ),
        OUTSIDE,
    ),
    "lists 768 recomputed sm_90": "8 bytes of a kernel that returns where all results are finite",
}

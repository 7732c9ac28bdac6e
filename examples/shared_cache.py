"""Decodes with a cache that is distributed over ranks: each rank has some of the pages, and partial results are merged.

    torchrun --nproc-per-node 2 examples/shared_cache.py

Decodes a few tokens after a prompt, with latents that all heads share (MLA) and with a window in every second layer.
Each step is compared with the same step on a cache that is not distributed.
"""

import os
from typing import Any

import torch
import torch.distributed as dist

import fusion_attention as fa

PROMPT, STEPS, HEADS, LATENT, VALUES, PAGE = 1500, 4, 16, 96, 64, 32
BANDS = (fa.Band.causal(), fa.Band.window(255))  # of the layers


def main() -> None:
    alone: dict[str, Any] = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # All ranks have the same tokens, as the ranks of one model do.
    make = {"heads": 1, "dim": LATENT, "dim_v": VALUES, "shares_kv": True, "page_size": PAGE}
    pages = -(-(PROMPT + STEPS) // PAGE)
    shared = [fa.PagedKVCache(pages=-(-pages // ranks), group=dist.group.WORLD, **make) for _ in BANDS]
    full = [fa.PagedKVCache(pages=pages, **make) for _ in BANDS]
    for caches in zip(shared, full, strict=True):
        prompt = torch.randn(1, PROMPT, 1, LATENT)
        for cache in caches:
            cache.append([cache.allocate()], prompt)
    furthest = 0.0
    for _ in range(STEPS):
        for shared_cache, full_cache, band in zip(shared, full, BANDS, strict=True):
            latent, q = torch.randn(1, 1, 1, LATENT), torch.randn(1, 1, HEADS, LATENT)
            shared_cache.append([0], latent)
            full_cache.append([0], latent)
            out, expected = (fa.decode_attention(q, cache, band=band) for cache in (shared_cache, full_cache))
            furthest = max(furthest, float((out - expected).abs().max()))
            if HEADS % ranks == 0:  # The same if each rank has only some of the query heads.
                local_q = q.chunk(ranks, 2)[rank]
                local_out = fa.distributed.decode_attention(local_q, shared_cache, band=band, own_heads=True)
                assert torch.equal(local_out, out.chunk(ranks, 2)[rank])
    assert furthest < 1e-5, furthest
    page_count = sum(len(page_list) for cache in shared for page_list in cache.own_pages())
    for turn in range(ranks):
        dist.barrier()
        if turn == rank:
            size = sum(cache.nbytes for cache in shared) / 2**20
            pages_here = f"{page_count} pages in {size:.2f} MiB"
            print(f"rank {rank} of {ranks}: {pages_here}, results within {furthest:.1e}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Wrong calls of sparse attention, indexer and shared caches, on one rank or all, raise a clear error on each rank."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.worlds import Worlds, text_of
from torch.distributed.device_mesh import init_device_mesh

import fusion_attention as fa
import fusion_attention.distributed as far
from fusion_attention.distributed import GroupError

S = 128


def rows(*inner: int, tokens: int = S) -> torch.Tensor:
    return torch.randn(1, tokens, *inner)


def indexed(ranks: Any, **changes: Any) -> Any:
    tokens_of_rank = S // dist.get_world_size(ranks)
    given = {
        "q": rows(2, 8, tokens=tokens_of_rank),
        "k": rows(1, 8, tokens=tokens_of_rank),
        "weights": rows(2, tokens=tokens_of_rank),
    }
    return far.lightning_indexer(**{**given, "top_k": 4, "group": ranks, "schedule": "ring", **changes})


CALLS: dict[str, tuple[Callable[[Any], dict[str, Any]], str]] = {
    "top k": (lambda group: {"top_k": 4 + dist.get_rank(group)}, "sparse_count=5"),
    "schedule": (lambda group: {"schedule": ("ring", "ulysses")[dist.get_rank(group)]}, "schedule=ulysses"),
    "dtype": (
        lambda group: (
            {name: rows(n, 8, tokens=64).half() for name, n in (("q", 2), ("k", 1))} if dist.get_rank(group) else {}
        ),
        "torch.float16",
    ),
    "lengths": (lambda group: {"q_len": [100 + dist.get_rank(group)], "kv_len": [128]}, "actual_seq_qlen=[101]"),
    "what is trained": (
        lambda group: {"q": rows(2, 8, tokens=64).requires_grad_(dist.get_rank(group) == 1)},
        "trained=['query']",
    ),
    "a share that is too small": (
        lambda group: (
            {"q": rows(2, 8, tokens=60), "weights": rows(2, tokens=60), "tokens": S}
            if dist.get_rank(group)
            else {"tokens": S}
        ),
        "on rank 1 q has 60 tokens, not the 64 of this rank's layout",
    ),
    "keys that do not add up": (
        lambda group: {"k": rows(1, 8, tokens=63), "tokens": (S, S)} if dist.get_rank(group) else {"tokens": (S, S)},
        "on rank 1 k has 63 tokens",
    ),
}


def message_of(group: Any, name: str) -> str:
    return text_of(lambda: indexed(group, **CALLS[name][0](group)))


@pytest.mark.parametrize("name", CALLS)
def test_ranks_with_different_arguments_all_raise(worlds: Worlds, name: str) -> None:
    for rank, text in enumerate(worlds.run(2, message_of, name)):
        assert f"distributed.lightning_indexer: rank {rank} of 2" in text
        assert CALLS[name][1] in text


def wrong(group: Any) -> list[str]:
    """Error texts of calls that violate the operator definition's rules on all ranks."""
    results = [
        text_of(lambda: indexed(group, weights=rows(3, tokens=64)), fa.ContractError),
        text_of(lambda: indexed(group, top_k=0), fa.ContractError),
        text_of(lambda: indexed(group, schedule="zag"), ValueError),
        text_of(lambda: indexed(group, group=3), GroupError),
    ]
    packed = {"layout": "TND", "q": torch.randn(64, 2, 8), "k": torch.randn(64, 1, 8), "weights": torch.randn(64, 2)}
    results.append(text_of(lambda: indexed(group, **packed), fa.ContractError))
    return results


HOSTILE: list[dict[str, Any]] = [
    *({"tokens": tokens} for tokens in (-1, "12", (1,), (1, 2, 3), 1.5, 2**60, True)),
    *({"q": q} for q in (None, [1.0], 3, torch.zeros(()), torch.zeros(0), rows(2, 8).to(torch.int8))),
    *({"layout": layout} for layout in ("BNSD", "", 3)),
    *({"q_len": lengths} for lengths in ([-1], [129], [1, 2], ["x"], 5, [2**70], [1.5], torch.ones(1))),
    *({"layout": "TND", "q_len": lengths} for lengths in ([-1], [2**70], [2**50], "ab", [[1]], [])),
    {"backend": "abacus"},
    {"top_k": "many"},
]


def hostile(group: Any) -> list[str]:
    return [text_of(lambda words=words: indexed(group, **words), Exception) for words in HOSTILE]  # type: ignore[misc]


def test_malformed_arguments_raise_errors_with_expected_values(worlds: Worlds) -> None:
    for result in worlds.run(2, hostile):
        for words, text in zip(HOSTILE, result, strict=True):
            assert "expected" in text, (words, text)


def test_invalid_calls_raise_the_same_errors_as_one_process(worlds: Worlds) -> None:
    for weights, top_k, schedule, group, lengths in worlds.run(2, wrong):
        assert "weights: expected one weight for every head of q, got weights=float32 [1, 128, 3]" in weights
        assert "top_k: expected" in top_k
        assert "schedule: expected one of allgather" in schedule
        assert "expected a ProcessGroup" in group
        assert "q_len: expected the lengths of packed sequences" in lengths


def on_a_mesh(group: Any) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2))
    how = {"group": mesh, "schedule": "ulysses+ring", "merge_topk": True}
    both = text_of(lambda: indexed(group, merge_topk=True, deterministic=True), ValueError)
    return [text_of(lambda: indexed(group, **how), ValueError), both]


def test_merge_topk_refuses_meshes_and_deterministic(worlds: Worlds) -> None:
    for mesh, both in worlds.run(4, on_a_mesh):
        assert "merge_topk: expected False on a mesh of two dimensions" in mesh
        assert "deterministic: expected False with merge_topk" in both


def listed(group: Any, entry: int) -> str:
    """Error text for a block that does not exist, in the last list of the last rank."""
    lists = torch.zeros(1, 64, 1, 4, dtype=torch.int32)
    lists[0, -1, 0, 2] = entry
    q, kv = rows(2, 8, tokens=64), rows(1, 8, tokens=64)
    return text_of(lambda: far.sparse_attention(q, kv, None, lists, group=group, schedule="ring"), fa.ContractError)


@pytest.mark.parametrize("entry", [-2, 128, 2**31 - 1])
def test_refuses_selected_key_indices_out_of_range(worlds: Worlds, entry: int) -> None:
    for rank, text in enumerate(worlds.run(2, listed, entry)):
        assert f"got {entry} at batch 0, row {64 * rank + 63}, slot 2, outside [-1, 128)" in text


def derived(group: Any) -> list[str]:
    lists = torch.zeros(1, 64, 1, 4, dtype=torch.int32)
    q, kv = rows(2, 8, tokens=64).requires_grad_(), rows(1, 8, tokens=64)
    how = {"group": group, "schedule": "ring"}
    out, lse = far.sparse_attention(q, kv, None, lists, return_lse=True, **how)
    twice = torch.autograd.grad(out.sum(), q, create_graph=True)[0]
    compiled = torch.compile(lambda q: far.sparse_attention(q, kv, None, lists, **how), backend="eager", fullgraph=True)
    return [
        text_of(lambda: lse.sum().backward(), NotImplementedError),
        text_of(lambda: twice.sum().backward(), NotImplementedError),
        text_of(lambda: compiled(q), Exception),
        text_of(lambda: torch.func.grad(lambda q: far.sparse_attention(q, kv, None, lists, **how).sum())(q), Exception),
    ]


def test_lse_gradients_double_backward_and_tracing_raise(worlds: Worlds) -> None:
    for lse, twice, compiled, transformed in worlds.run(2, derived):
        assert "the loss goes through the lse" in lse
        assert "cannot differentiate twice" in twice
        assert "cannot be traced" in compiled
        assert "cannot be traced" in transformed


def other_lengths(group: Any) -> list[str]:
    """Error texts if rank 1 decodes another sequence, has a longer cache or passes another scale."""
    cache = fa.PagedKVCache(1, 8, 8, page_size=4, group=group)
    a, b = cache.allocate(), cache.allocate()
    cache.append([a, b], torch.randn(2, 6, 1, 8), torch.randn(2, 6, 1, 8))
    second = dist.get_rank(group) == 1
    q = torch.randn(1, 1, 2, 8)
    other = text_of(lambda: fa.decode_attention(q, cache, sequences=[b if second else a]))
    if second:
        cache.append([a], torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8))
    longer = text_of(lambda: fa.decode_attention(q, cache, sequences=[a]))
    heads = text_of(lambda: far.decode_attention(q, cache, sequences=[a], own_heads=True))
    scale = text_of(lambda: fa.decode_attention(q, cache, sequences=[b], scale=0.1 + second))
    return [other, longer, heads, scale]


def test_shared_caches_that_differ_raise_on_every_rank(worlds: Worlds) -> None:
    for rank, (other, longer, heads, scale) in enumerate(worlds.run(3, other_lengths)):
        for text in (other, longer, heads):
            assert f"distributed.decode_attention: rank {rank} of 3, comparing caches" in text
            assert "other sequences, or sequences of other lengths" in text
        assert "scale=1.1" in scale


def refused(group: Any) -> list[str]:
    cache = fa.PagedKVCache(1, 8, 1, page_size=4, group=group)
    a = cache.allocate()
    cache.append([a], torch.randn(1, 13, 1, 8), torch.randn(1, 13, 1, 8))
    q, k = torch.randn(1, 1, 2, 8), torch.randn(1, 5, 1, 8)
    full = text_of(lambda: cache.append([a], k, k), fa.CacheFullError)
    lengths, free = cache.lengths(), cache.free_pages
    assert (lengths, free) == ([13], 0)
    decode = [
        {"out_scale": torch.ones(1)},
        {"blocked": torch.zeros(1, 1, 1, 12, dtype=torch.bool)},
        {"bias": torch.zeros(1, 1, 12)},
        {"kv_len": [3]},
        *({"band": band} for band in ("causal", fa.Band.prefix_causal([1, 2]), 3)),
        *({"q_len": lengths} for lengths in ([2], [-1], [1, 1], "x", 1.5)),
        *({"blocked": mask} for mask in (3, torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, 1, 1, 16, dtype=torch.bool))),
        {"sink": torch.zeros(3)},
        {"layout": "TND"},
        {"softcap": -1.0},
        {"scale": float("nan")},
    ]
    results = [
        text_of(lambda words=words: fa.decode_attention(q, cache, **words), fa.ContractError) for words in decode
    ]  # type: ignore[misc]
    queries = [None, 3, torch.randn(1, 2, 8), torch.randn(1, 1, 2, 9), q.half(), q.int(), torch.randn(2, 1, 2, 8)]
    results += [text_of(lambda q=q: fa.decode_attention(q, cache), fa.ContractError) for q in queries]  # type: ignore[misc]
    complete = fa.PagedKVCache(1, 8, 2, page_size=4)
    results.append(text_of(lambda: far.decode_attention(q, complete), fa.ContractError))
    mesh = init_device_mesh("cpu", (2, 2)) if dist.get_world_size(group) == 4 else group
    results.append(text_of(lambda: fa.PagedKVCache(1, 8, 2, group=mesh), ValueError))
    return [full, *results]


def test_shared_cache_refuses_invalid_decode_calls(worlds: Worlds) -> None:
    for full, out_scale, blocked, bias, kv_len, *others, count, complete, mesh in worlds.run(4, refused):
        assert "1 more pages needed on rank 0 of 4, 0 free" in full
        assert "out_scale: expected None over a cache with a group" in out_scale
        assert "blocked: expected" in blocked
        assert "bias: expected" in bias
        assert "kv_len: expected nothing with a PagedKVCache" in kv_len
        assert [text for text in others if "expected" not in text] == []
        assert "sequences: expected 2 sequences of the cache" in count
        assert "cache: expected a PagedKVCache with a group" in complete
        assert "group: expected a group of one dimension" in mesh

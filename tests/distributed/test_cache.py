"""A cache with pages on several ranks has the contents and decode results of one process's cache."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.bits import same_bits
from support.worlds import Worlds

import fusion_attention as fa
import fusion_attention.distributed as far
from fusion_attention.contract import bind
from fusion_attention.judging.chi_square_limits import Expected
from fusion_attention.ops.inference import api_definition as record
from fusion_attention.testing import compare
from fusion_attention.testing.expected import expected_of, sizes

SIZE, HEADS, DIM = 4, 2, 16


class Both:
    """Runs one program on a cache shared by the ranks of a group and on a cache of this process alone."""

    def __init__(self, group: Any, pages: int = 20, **how: Any) -> None:
        heads = how.pop("heads", HEADS)
        self.world = dist.get_world_size(group)
        make = {"heads": heads, "dim": DIM, "page_size": SIZE, **how}
        self.shared = fa.PagedKVCache(pages=pages, group=group, **make)
        self.unsharded = fa.PagedKVCache(pages=pages * self.world, **make)
        self.heads, self.alone = heads, how.get("shares_kv", False)
        self.dtype = how.get("dtype", torch.float32)

    def allocate(self) -> int:
        one, other = self.shared.allocate(), self.unsharded.allocate()
        assert one == other
        return one

    def append(self, sequences: list[int], tokens: int) -> None:
        k, v = (torch.randn(len(sequences), tokens, self.heads, DIM).to(self.dtype) for _ in "kv")
        for cache in (self.shared, self.unsharded):
            cache.append(sequences, k, None if self.alone else v)

    def each(self, method: str, *args: Any) -> None:
        one, other = (getattr(cache, method)(*args) for cache in (self.shared, self.unsharded))
        assert one == other

    def program(self) -> list[int]:
        """Sequences of 13, 30, 2, 14, 3 and no tokens; some have been forked, cropped and slid."""
        a, b, c = (self.allocate() for _ in range(3))
        self.append([a, b], 10)
        self.append([b], 20)
        self.append([c], 2)
        self.each("fork", a)
        d = self.shared.sequences[-1]
        self.append([a, d], 4)  # both write the page that they share
        self.each("crop", a, 1)
        e = self.allocate()
        self.append([e], 19)
        self.each("slide", e, 3)
        self.allocate()
        assert self.shared.lengths() == self.unsharded.lengths() == [13, 30, 2, 14, 3, 0]
        return self.shared.sequences


def holds(group: Any, stored: str) -> int:
    both = Both(group, stored=stored)
    rank = dist.get_rank(group)
    for sequence in both.program():
        (local_pages,) = both.shared.own_pages([sequence])
        tokens = [page * SIZE + slot for page in local_pages for slot in range(SIZE)]
        tokens = [token for token in tokens if token < both.unsharded.lengths([sequence])[0]]
        for got, want in zip(both.shared.rows(sequence), both.unsharded.rows(sequence), strict=True):
            assert torch.equal(got, want[tokens]), (rank, sequence)
    assert both.shared.free_pages == both.unsharded.free_pages
    used = both.shared.pages - both.shared.free_pages
    both.each("add_pages", 0)
    both.shared.add_pages(2)
    assert both.shared.pages == 22 * both.world
    assert both.shared.free_pages == both.shared.pages - used
    for sequence in both.shared.sequences:
        both.each("free", sequence)
    assert both.shared.free_pages == both.shared.pages
    return rank


@pytest.mark.parametrize(("stored", "world"), [("", 1), ("int8", 2), ("int4", 3), ("", 4)])
def test_every_rank_holds_the_tokens_of_its_pages(worlds: Worlds, world: int, stored: str) -> None:
    assert worlds.run(world, holds, stored) == list(range(world))


BANDS = {
    "causal": None,
    "window": fa.Band.window(5),
    "narrow": fa.Band.window(1, 1),
    "full": fa.Band.full(),
    "early": fa.Band(-3, 2, align="start"),
    "prefix": fa.Band.prefix_causal([2, 9, 1, 0, 3, 0]),
    "nothing": fa.Band(hi=-40),
}
CASES: dict[str, dict[str, Any]] = {
    **{name: {"band": band} for name, band in BANDS.items()},
    "speculative": {"rows": 3},
    "rows of their own": {"rows": 3, "q_len": [3, 1, 2, 0, 3, 0]},
    "window of several rows": {"rows": 3, "band": fa.Band.window(6)},
    "heads first": {"rows": 2, "layout": "BNSD"},
    "sink": {"sink": torch.tensor([0.5, -1.0, 3.0, 0.0]), "band": fa.Band.window(5)},
    "blocked": {"blocked": True, "rows": 2},
    "blocked by row": {"blocked": True, "rows": 2, "rows_only": True},
    "bias": {"bias": True, "band": fa.Band.window(6)},
    "softcap": {"softcap": 2.0},
    "bfloat16": {"dtype": torch.bfloat16, "rows": 2},
    "int8": {"stored": "int8"},
    "keys are values": {"shares_kv": True, "dim_v": 8, "heads": 1},
}


def attended(group: Any, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    how = dict(CASES[name])
    make = {key: how.pop(key) for key in ("stored", "dtype", "shares_kv", "dim_v", "heads") if key in how}
    both, rows = Both(group, **make), how.pop("rows", 1)
    sequences = both.program()
    slots = 32  # of the longest sequence's pages
    shape = (6, rows, 4, DIM) if how.get("layout") != "BNSD" else (6, 4, rows, DIM)
    q = torch.randn(shape).to(both.dtype)
    if how.pop("blocked", False):
        only = how.pop("rows_only", False)
        how["blocked"] = torch.rand(6, 1, rows, 1 if only else slots) < 0.4
    if how.pop("bias", False):
        how["bias"] = torch.randn(4, 1, slots)
        how["bias"][1, 0, 3::5] = -torch.inf
    got = fa.decode_attention(q, both.shared, return_lse=True, **how)
    wanted = expected({"q": q, **how, **both.unsharded.arguments(sequences)})
    for what, ours, want in zip(("out", "lse"), got, wanted, strict=True):
        compare(f"{name}: {what}", ours, want)
    alone = fa.decode_attention(q[1:2], both.shared, sequences=[sequences[1]], return_lse=True, **_of_one(how))
    for what, ours, want in zip(("out", "lse"), alone, wanted, strict=True):
        compare(f"{name}: {what} of one sequence", ours, want[1:2])
    if 4 % both.world == 0:
        axis = 1 if how.get("layout") == "BNSD" else 2
        heads_of_rank = [
            t.chunk(both.world, at)[dist.get_rank(group)] for t, at in ((q, axis), (got[0], axis), (got[1], 1))
        ]
        same_bits(
            far.decode_attention(heads_of_rank[0], both.shared, own_heads=True, return_lse=True, **how),
            tuple(heads_of_rank[1:]),
            name,
        )
    return got


def expected(args: dict[str, Any]) -> tuple[Expected, Expected]:
    """Expected (out, lse) of decode_attention; args are by canonical name."""
    call = replace(record.lower(bind(record.RECORD, args)), names=record.RESULTS)
    result = expected_of(call)
    filled = call.fill(call.results())
    filled.begin()
    size = sizes(call.problem, call.extents, filled.operands[0])["lse"]
    value = result["max"].value + result["sum"].value.log()
    return result["out"], Expected(value, size.view(value.shape))


def _of_one(how: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the second sequence, which is the longest."""
    results = dict(how)
    if "blocked" in how:
        results["blocked"] = how["blocked"][1:2]
    if "q_len" in how:
        results["q_len"] = how["q_len"][1:2]
    if how.get("band") is not None and how["band"].prefix:
        results["band"] = fa.Band.prefix_causal(how["band"].prefix[1:2])
    return results


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    ("name", "world"),
    [
        pytest.param(name, world, marks=[pytest.mark.slow] * (world != (2, 3, 4)[at % 3]))
        for at, name in enumerate(CASES)
        for world in (1, 2, 3, 4)
    ],
)
def test_decode_over_shared_cache_matches_one_process(worlds: Worlds, world: int, name: str) -> None:
    first, *others = worlds.run(world, attended, name)
    for other in others:
        same_bits(other, first, "another rank's")

"""Times inference over a cache: prompts, chunks of prompts, mixed batches over pages, a shared prefix, and MLA.

Every row is a planned call in the intermediate representation beside the same work in another form. The cache is in
pages [heads, page, dim] in random order unless a row says otherwise.
"""

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.kv_cache_calls import Case, call
from fusion_attention.bench.pair import Pair


def rows_of_all(quick: bool) -> Iterator[Pair]:
    """Measures all rows, each with its goal."""
    few = 4 if quick else 1

    def pair(name: str, peer: str, ours: Case, other: Case, goal: float, share_goal: float = 0.0) -> Pair:
        goals = (0.0, 0.0) if quick else (goal, share_goal)
        return Pair("inference", name, peer, call(ours), call(other), ours.flops, "bfloat16",
                    peer_flops=other.flops, goal=goals[0], share_goal=goals[1])  # fmt: skip

    size = 2048 // few
    prompt, unpaged = Case((size,), (size,)), Case((size,), (size,), page=0)
    yield pair(f"prompt over pages, S{size} causal", "rows", prompt, unpaged, 0.95)
    new, cached, count = 256 // few, 4096 // few, 8 // few
    chunk = Case((new,) * count, (cached + new,) * count)
    yield pair(f"{new} new rows over {cached} cached, {count} sequences", f"rows, S{size} causal", chunk, unpaged, 0.90)
    yield mixed(1024 // few, 31 // few, cached, quick)
    for heads_kv, goal, share_goal in ((32, 3.0, 0.0), (8, 3.0, 0.7)):
        yield prefix(heads_kv, 8192 // few, 32 // few, goal, share_goal, quick)
    for batch in (1, 8 // few):
        mla = Case((1,) * batch, (cached,) * batch, heads=128, heads_kv=1, dim=512, rope=64, shares=True)
        yield pair(f"MLA, 128 heads, {cached} keys, batch {batch}", "", mla, mla, 0.0, 0.7)
    one = Case((new,), (cached + new,))
    yield pair(f"{new} rows over {cached} int8 keys", "bf16 keys", replace(one, kind="int8"), one, 1 / 1.25)
    alone = Case((new,), (new,))
    yield pair(f"{new} rows, int8 keys", "bf16 keys", replace(alone, kind="int8"), alone, 1 / 1.25)


def mixed(prompt: int, count: int, keys: int, quick: bool) -> Pair:
    """Times a prompt and single rows of other sequences in one call, beside two calls."""
    first, rest = Case((prompt,), (prompt,)), Case((1,) * count, (keys,) * count)
    both = Case(first.q_len + rest.q_len, first.kv_len + rest.kv_len)
    calls = call(first), call(rest)

    def apart() -> None:
        for one in calls:
            one()

    name = f"a prompt of {prompt} and {count} rows over {keys}"
    return Pair("inference", name, "two calls", call(both), apart, both.flops, "bfloat16",
                goal=0.0 if quick else 1 / 1.1)  # fmt: skip


def prefix(heads_kv: int, common: int, count: int, goal: float, share_goal: float, quick: bool) -> Pair:
    """Times one row of each sequence over a prefix in separate memory and in pages of all tables. goal: of the ratio;
    share_goal: of the fraction of the peak instead, unless 0."""
    ours = Case((1,) * count, (common + 64,) * count, heads_kv, common=common, page=0)
    other = replace(ours, page=64, merged=False)
    name = f"shared prefix {common}, suffix 64, batch {count}, {heads_kv} key heads"
    goals = (0.0, 0.0) if quick else (0.0, share_goal) if share_goal else (goal, 0.0)
    return Pair("inference", name, "shared pages", call(ours), call(other), ours.flops, "bfloat16",
                goal=goals[0], share_goal=goals[1])  # fmt: skip

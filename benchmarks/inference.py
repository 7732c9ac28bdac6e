"""Times inference over a cache: prompts, chunks of prompts, mixed batches over pages, a shared prefix, and MLA.

Every row is a planned call in the intermediate representation beside the same work in another form. The cache is in
pages [heads, page, dim] in random order unless a row says otherwise.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from benchmarks.decode import rows
from fusion_attention import plan as planning
from fusion_attention.bench.pair import Pair
from fusion_attention.ir.kv import Dequant, PagedView, RowView
from fusion_attention.ir.mask import Band
from fusion_attention.ir.problem import Extents, Operands, Problem, Stats
from fusion_attention.memory import zeros

HEADS, DIM, PAGE = 32, 128, 128


@dataclass(frozen=True)
class Case:
    """A call: query rows and keys of each sequence; the rows are its last tokens.

    Args:
        page: tokens of a page; 0: rows [sequence, head, token].
        kind: type of the cache: "bfloat16", or "int8" with a scale for each channel.
        common: number of keys in the prefix that all sequences share.
        merged: store the prefix once in separate memory; otherwise in pages that all tables contain.
        rope: number of rotary elements.
        shares: the values are the keys.
    """

    q_len: tuple[int, ...]
    kv_len: tuple[int, ...]
    heads_kv: int = 8
    heads: int = HEADS
    page: int = PAGE
    kind: str = "bfloat16"
    dim: int = DIM
    common: int = 0
    merged: bool = True
    rope: int = 0
    shares: bool = False

    @property
    def problem(self) -> Problem:
        """Returns the call's description for the planner."""
        stored = {"kv_dtype": "int8", "dequant_k": "channel", "dequant_v": "channel"} if self.kind == "int8" else {}
        common = self.common if self.merged else 0
        return Problem(
            self.heads, self.heads_kv, self.dim, self.dim, self.rope, dtype="bfloat16", scale=self.dim**-0.5,
            shares_kv=self.shares, page_size=self.page, common_keys=common, **stored,
        )  # fmt: skip

    @property
    def extents(self) -> Extents:
        """Returns causal visibility in which the last row attends to all keys."""
        lengths = np.array(self.q_len, np.int64), np.array(self.kv_len, np.int64)
        band = Band.causal("end") if max(self.q_len) > 1 else Band.full()
        return Extents(*lengths, *band.resolve(*lengths), np.zeros_like(lengths[0]))


def _numbers(kind: str, *shape: int) -> torch.Tensor:
    if kind == "int8":
        return zeros(shape, torch.int8).copy_(torch.randint(-128, 128, shape, dtype=torch.int8))
    return zeros(shape, torch.bfloat16).copy_(torch.randn(shape))


def _cache(c: Case, dim: int, kind: str, table: torch.Tensor) -> RowView | PagedView:
    suffix_len = max(c.kv_len) - (c.common if c.merged else 0)
    if not c.page:
        return rows(_numbers(kind, len(c.kv_len), c.heads_kv, suffix_len, dim), dim)
    pool = _numbers(kind, int(table.max()) + 1, c.heads_kv, c.page, dim)
    return PagedView(pool, table, c.page, pool.stride(0), pool.stride(2), pool.stride(1), dim)


def _table(c: Case) -> torch.Tensor:
    """Returns the pages of each sequence; pages of the shared prefix come first."""
    count, shared = len(c.kv_len), 0 if c.merged else c.common // max(c.page, 1)
    suffix_pages = -(-(max(c.kv_len) - c.common) // max(c.page, 1))
    order = torch.randperm(shared + count * suffix_pages).int()
    table = torch.cat([order[:shared].expand(count, -1), order[shared:].view(count, suffix_pages)], 1)
    return table.contiguous()


def call(c: Case) -> Callable[[], None]:
    """Returns a function that computes a case with random tensors."""
    torch.manual_seed(0)
    p, count, tokens, table = c.problem, len(c.q_len), max(c.q_len), _table(c)
    queries = [rows(torch.randn(count, c.heads, tokens, d).bfloat16(), d) for d in (c.dim, c.rope) if d]
    k = _cache(c, c.dim, c.kind, table)
    v = k if c.shares else _cache(c, c.dim, c.kind, table)
    out = torch.empty(count, c.heads, tokens, c.dim, dtype=torch.bfloat16)
    stats = Stats(*(rows(torch.empty(count, c.heads, tokens, 1), 1) for _ in range(2)))
    operands = Operands(queries[0], k, v, rows(out, c.dim), stats)
    if c.rope:
        operands = replace(operands, q_rope=queries[1], k_rope=_cache(c, c.rope, c.kind, table))
    if c.kind == "int8":
        scale = torch.full((c.heads_kv * c.dim,), 0.02)
        dequant = Dequant(RowView((scale,), np.zeros(count, np.int64), 0, np.full(count, c.dim), c.dim))
        operands = replace(operands, dequant_k=dequant, dequant_v=dequant)
    if p.common_keys:
        common = [rows(_numbers(c.kind, 1, c.heads_kv, c.common, c.dim), c.dim) for _ in range(2)]
        operands = replace(operands, k_common=common[0], v_common=common[1])
    plan = planning.plan(p, c.extents, torch.device("cpu"))
    return lambda: plan.run(operands)


def flops(c: Case) -> int:
    """Returns the floating-point operations over visible pairs."""
    return c.problem.flops(c.extents)


def rows_of_all(quick: bool) -> Iterator[Pair]:
    """Measures all rows, each with its goal."""
    few = 4 if quick else 1

    def pair(name: str, peer: str, ours: Case, other: Case, goal: float, share_goal: float = 0.0) -> Pair:
        goals = (0.0, 0.0) if quick else (goal, share_goal)
        return Pair("inference", name, peer, call(ours), call(other), flops(ours), "bfloat16",
                    peer_flops=flops(other), goal=goals[0], share_goal=goals[1])  # fmt: skip

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
    return Pair("inference", name, "two calls", call(both), apart, flops(both), "bfloat16",
                goal=0.0 if quick else 1 / 1.1)  # fmt: skip


def prefix(heads_kv: int, common: int, count: int, goal: float, share_goal: float, quick: bool) -> Pair:
    """Times one row of each sequence over a prefix in separate memory and in pages of all tables. goal: of the ratio;
    share_goal: of the fraction of the peak instead, unless 0."""
    ours = Case((1,) * count, (common + 64,) * count, heads_kv, common=common, page=0)
    other = replace(ours, page=64, merged=False)
    name = f"shared prefix {common}, suffix 64, batch {count}, {heads_kv} key heads"
    goals = (0.0, 0.0) if quick else (0.0, share_goal) if share_goal else (goal, 0.0)
    return Pair("inference", name, "shared pages", call(ours), call(other), flops(ours), "bfloat16",
                goal=goals[0], share_goal=goals[1])  # fmt: skip

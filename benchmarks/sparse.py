"""Times attention over selected keys and the lightning indexer beside eager torch."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.backward_only import gradient
from benchmarks.dense import DTYPES, PEAKS
from benchmarks.sparse_calls import BACKWARD, CHOSEN, DIM, FORWARD, INDEX_DIM, SCALE, Index, Selection
from benchmarks.threads import with_threads
from fusion_attention.bench.pair import Pair, seconds

HEADS, KEYS, INDEX_HEADS = 64, 8192, 32
LABELS = ("bf16", "fp32")  # torch multiplies batches of float16 a hundred times slower
# (speed relative to eager torch, fraction of the bfloat16 peak)
FORWARD_GOALS = {"bf16": (2.4, 0.84), "fp32": (1.8, 0.0)}
BACKWARD_GOALS = {"bf16": (4.0, 0.65), "fp32": (3.0, 0.0)}
INDEXER_GOALS = {"bf16": (4.0, 0.70), "fp32": (2.0, 0.0)}
TWO_THREADS = 1.85
Eager = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def joined(s: Selection, rows: int) -> list[torch.Tensor]:
    """Returns queries of the first rows and keys, each with its rope part behind it, for the eager programs."""
    return [torch.cat((s.q[:rows], s.q_rope[:rows]), -1).detach(), torch.cat((s.k, s.k_rope), -1).detach()]


def by_chunks(q: torch.Tensor, kv: torch.Tensor, lists: torch.Tensor) -> torch.Tensor:
    """Computes attention by a gather and batched products of four rows at a time."""
    parts = []
    for i in range(0, len(q), 4):
        gathered = kv[:, 0][lists[i : i + 4, 0].long()]
        scores = (q[i : i + 4] @ gathered.mT).float() * SCALE
        parts.append(torch.softmax(scores, -1).to(q.dtype) @ gathered[..., :DIM])
    return torch.cat(parts)


def by_rows(q: torch.Tensor, kv: torch.Tensor, lists: torch.Tensor) -> torch.Tensor:
    """Computes attention by index_select and products of one row, so that gathered keys stay in the CPU's cache."""
    parts = []
    for i in range(len(q)):
        gathered = kv[:, 0].index_select(0, lists[i, 0])
        scores = (q[i] @ gathered.mT).float() * SCALE
        parts.append(torch.softmax(scores, -1).to(q.dtype) @ gathered[:, :DIM])
    return torch.stack(parts)


def autograd(s: Selection, forward: Eager, rows: int, chunk: int) -> Callable[[], None]:
    """Returns a function that runs the backward of an eager program for some rows, a graph for each chunk of them."""
    q, kv = (t.requires_grad_() for t in joined(s, rows))
    outs = [forward(q[i : i + chunk], kv, s.lists[i : i + chunk]) for i in range(0, rows, chunk)]
    douts = [torch.randn_like(out) for out in outs]

    def run() -> None:
        for out, dout in zip(outs, douts, strict=True):
            torch.autograd.grad(out, (q, kv), dout, retain_graph=True)

    return run


def fastest_first(ways: dict[str, Callable[[], object]]) -> list[tuple[str, Callable[[], object]]]:
    """Sorts programs by the better time of two calls."""
    return sorted(ways.items(), key=lambda way: min(seconds(way[1]) for _ in range(2)))


def attention(quick: bool) -> Iterator[Pair]:
    """Times the forward beside eager programs; goals are those of the fastest."""
    rows = 32 if quick else 256
    for label in LABELS:
        for kind in ("random", "local"):
            s = Selection.of(rows, HEADS, KEYS, kind == "local", dtype=DTYPES[label])
            q, kv = joined(s, rows)
            ways = {
                "index_select + mm": torch.no_grad()(lambda q=q, kv=kv, s=s: by_rows(q, kv, s.lists)),
                "gather + bmm": torch.no_grad()(lambda q=q, kv=kv, s=s: by_chunks(q, kv, s.lists)),
            }
            goals, flops = FORWARD_GOALS[label], rows * HEADS * CHOSEN * FORWARD
            for name, theirs in fastest_first(ways):
                case = f"{label} {rows} rows {kind}"
                yield Pair("sparse forward", case, name, s.ours, theirs, flops, PEAKS[label], None, 0, *goals)
                goals = (0.0, 0.0)


def gradients(quick: bool) -> Iterator[Pair]:
    """Times the backward beside autograd through the eager programs, which run on few rows: rates are compared."""
    rows = 32 if quick else 256
    few, work = rows // 4, HEADS * CHOSEN * BACKWARD
    for label in LABELS:
        for kind in ("random", "local"):
            s = Selection.of(rows, HEADS, KEYS, kind == "local", dtype=DTYPES[label], grad=True)
            ways = {
                f"autograd, row by row, {few} of them": autograd(s, by_rows, few, 1),
                f"autograd, {few} of them": autograd(s, by_chunks, few, 4),
            }
            goals, ours = BACKWARD_GOALS[label], gradient(s.ours, s.leaves)
            for name, theirs in fastest_first(ways):
                case, flops = f"{label} {rows} rows {kind}", (rows * work, few * work)
                yield Pair("sparse backward", case, name, ours, theirs, flops[0], PEAKS[label], None, flops[1], *goals)
                goals = (0.0, 0.0)


def indexing(quick: bool) -> Iterator[Pair]:
    """Times the indexer beside an einsum and topk, 64 rows at a time."""
    rows = 32 if quick else 256
    flops = 2 * rows * INDEX_HEADS * KEYS * INDEX_DIM
    for label in LABELS:
        index = Index.of(rows, INDEX_HEADS, KEYS, dtype=DTYPES[label])
        name, goals, theirs = f"{label} {rows} rows", INDEXER_GOALS[label], partial(index.eager, DTYPES[label])
        yield Pair("indexer", name, "einsum + topk", index.ours, theirs, flops, PEAKS[label], None, 0, *goals)


def threads(quick: bool) -> Iterator[Pair]:
    """Times all threads beside one, for many rows and for a single row."""
    count = torch.get_num_threads()
    for rows in (16 if quick else 64, 1):
        s, index = Selection.of(rows, HEADS, KEYS, grad=True), Index.of(rows, INDEX_HEADS, KEYS)
        calls = (
            ("forward", torch.no_grad()(s.ours), rows * HEADS * CHOSEN * FORWARD),
            ("backward", gradient(s.ours, s.leaves), rows * HEADS * CHOSEN * BACKWARD),
            ("indexer", index.ours, 2 * rows * INDEX_HEADS * KEYS * INDEX_DIM),
        )
        for name, ours, flops in calls:
            # A row's backward clears and writes the gradients of all keys.
            goal = 0.0 if count == 1 or (rows, name) == (1, "backward") else TWO_THREADS / 2 * count
            label = f"{count} threads, {name}, {rows} rows"
            yield Pair("selection on threads", label, "one thread", ours, with_threads(1, ours), flops, goal=goal)

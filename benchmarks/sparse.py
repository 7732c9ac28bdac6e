"""Times attention over selected keys and the lightning indexer beside eager torch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from benchmarks.dense import DTYPES, PEAKS
from benchmarks.features import with_threads
from fusion_attention.backends import cpu
from fusion_attention.bench.pair import Pair, seconds
from fusion_attention.contract import dtype_text
from fusion_attention.ir.kv import RowView
from fusion_attention.ir.mask import INFINITE
from fusion_attention.ir.problem import Extents, Grads, IndexerOperands, IndexerProblem, Operands, Problem, Stats

HEADS, DIM, ROPE, KEYS, CHOSEN = 64, 512, 64, 8192, 2048
INDEX_HEADS, INDEX_DIM = 32, 128
# (speed relative to eager torch, fraction of the bfloat16 peak)
FORWARD = {"bf16": (2.4, 0.84), "fp32": (1.8, 0.0)}
BACKWARD = {"bf16": (4.0, 0.65), "fp32": (3.0, 0.0)}
INDEXER = {"bf16": (4.0, 0.70), "fp32": (2.0, 0.0)}
COST = 1 / 1.1  # Goal for all kinds of lists: the rate per visited key relative to unique random keys.
TWO_THREADS = 1.85


def one(tensor: torch.Tensor, start: int = 0, dim: int = 0) -> RowView:
    """Returns a view of [tokens, heads, elements] as one sequence; dim: view only `dim` elements from `start` on."""
    strides = np.array([tensor.stride(1)])
    return RowView((tensor,), np.array([start]), tensor.stride(0), strides, dim or tensor.shape[2])


def lengths(rows: int, keys: int, vis: int | None = None) -> Extents:
    """Returns one sequence whose rows may attend to all keys, or to the first `vis` keys."""
    q, kv = np.array([rows]), np.array([keys if vis is None else vis])
    return Extents(q, kv, q * 0 - INFINITE, q * 0 + INFINITE, q * 0, q * 0)


@dataclass(eq=False)
class Selection:
    """The tensors of a sequence in which every row selects keys; keys and values use the same memory."""

    q: torch.Tensor  # [rows, heads, DIM + ROPE]
    kv: torch.Tensor  # [keys, 1, DIM + ROPE]
    indices: torch.Tensor  # [rows, 1, slots]
    dout: torch.Tensor
    block: int = 1

    @property
    def problem(self) -> Problem:
        dtype = dtype_text(self.q)
        chosen = dict(select_count=self.indices.shape[2], select_block=self.block)
        return Problem(HEADS, 1, DIM, DIM, ROPE, dtype, (DIM + ROPE) ** -0.5, **chosen)  # type: ignore[arg-type]

    def operands(self) -> Operands:
        """Returns the operands, with new memory for results."""
        rows, stats = len(self.q), [one(torch.empty(len(self.q), HEADS, 1)) for _ in range(2)]
        k, out = one(self.kv, 0, DIM), torch.empty(rows, HEADS, DIM, dtype=self.q.dtype)
        ropes = one(self.q, DIM, ROPE), one(self.kv, DIM, ROPE)
        return Operands(one(self.q, 0, DIM), k, k, one(out), Stats(*stats), *ropes, indices=one(self.indices))

    def forward(self, extents: Extents) -> Callable[[], None]:
        """Returns a function that runs our forward."""
        problem, operands = self.problem, self.operands()
        plan = cpu.schedule(problem, extents, "attention_forward")
        return lambda: cpu.attention_forward(problem, extents, plan, operands)  # type: ignore[arg-type]

    def backward(self, extents: Extents) -> Callable[[], None]:
        """Returns a function that runs our backward, after one forward."""
        problem, operands = self.problem, self.operands()
        cpu.attention_forward(problem, extents, cpu.schedule(problem, extents, "attention_forward"), operands)  # type: ignore[arg-type]
        dq, dkv, dv = torch.empty_like(self.q), torch.empty_like(self.kv), torch.empty_like(self.kv[..., :DIM])
        grads = Grads(
            one(self.dout), one(dq, 0, DIM), one(dkv, 0, DIM), one(dv), one(dq, DIM, ROPE), one(dkv, DIM, ROPE)
        )
        plan = cpu.schedule(problem, extents, "attention_backward")
        return lambda: cpu.attention_backward(problem, extents, plan, operands, grads)  # type: ignore[arg-type]


def select(dtype: torch.dtype, rows: int, local: bool, slots: int = CHOSEN) -> Selection:
    """Makes a selection of random unique keys; local: of the keys around each row's position."""
    torch.manual_seed(0)
    starts = torch.linspace(0, KEYS - slots, rows).long()
    near = starts[:, None] + torch.arange(slots)
    drawn = near if local else torch.stack([torch.randperm(KEYS)[:slots] for _ in range(rows)])
    shapes = (rows, HEADS, DIM + ROPE), (KEYS, 1, DIM + ROPE), (rows, HEADS, DIM)
    q, kv, dout = (torch.randn(shape).to(dtype) for shape in shapes)
    return Selection(q, kv, drawn.int()[:, None], dout)


def eager(q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, chunk: int = 4) -> torch.Tensor:
    """Computes attention by a gather and batched products of `chunk` rows at a time."""
    parts = []
    for i in range(0, len(q), chunk):
        gathered = kv[:, 0][indices[i : i + chunk, 0].long()]
        scores = (q[i : i + chunk] @ gathered.mT).float() * (DIM + ROPE) ** -0.5
        parts.append(torch.softmax(scores, -1).to(q.dtype) @ gathered[..., :DIM])
    return torch.cat(parts)


def row_by_row(q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, chunk: int = 1) -> torch.Tensor:
    """Computes attention by index_select and products of one row, so that gathered keys stay in the CPU's cache."""
    parts = []
    for i in range(0, len(q), chunk):
        gathered = kv[:, 0].index_select(0, indices[i, 0])
        scores = (q[i] @ gathered.mT).float() * (DIM + ROPE) ** -0.5
        parts.append(torch.softmax(scores, -1).to(q.dtype) @ gathered[:, :DIM])
    return torch.stack(parts)


def gathered_sdpa(q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, chunk: int = 4) -> torch.Tensor:
    """Computes attention by a gather and SDPA; its query rows are the heads of a row."""
    parts = []
    for i in range(0, len(q), chunk):
        keys = kv[:, 0][indices[i : i + chunk, 0].long()][:, None]
        scale = (DIM + ROPE) ** -0.5
        parts.append(sdpa(q[i : i + chunk, None], keys, keys[..., :DIM], scale=scale)[:, 0])
    return torch.cat(parts)


def masked_sdpa(s: Selection) -> Callable[[], torch.Tensor]:
    """Returns a function that runs SDPA over all keys with a mask of the selected keys."""
    mask = torch.zeros(len(s.q), KEYS, dtype=torch.bool).scatter_(1, s.indices[:, 0].long(), True)
    k = s.kv.transpose(0, 1)[None].expand(1, HEADS, -1, -1)
    q, scale = s.q.transpose(0, 1)[None], (DIM + ROPE) ** -0.5
    return torch.no_grad()(lambda: sdpa(q, k, k[..., :DIM], attn_mask=mask, scale=scale))


def autograd(s: Selection, forward: Callable[..., torch.Tensor], chunk: int) -> Callable[[], None]:
    """Returns a function that runs the backward of an eager program in chunks; the forward runs here once."""
    q, kv = s.q.clone().requires_grad_(), s.kv.clone().requires_grad_()
    graphs = [
        (forward(q[i : i + chunk], kv, s.indices[i : i + chunk], chunk), s.dout[i : i + chunk])
        for i in range(0, len(q), chunk)
    ]

    def run() -> None:
        for out, dout in graphs:
            torch.autograd.grad(out, (q, kv), dout, retain_graph=True)

    return run


def fastest_first(ways: list[tuple[str, Callable[[], object]]]) -> list[tuple[str, Callable[[], object]]]:
    """Sorts implementations by the better time of two calls."""
    return sorted(ways, key=lambda way: min(seconds(way[1]) for _ in range(2)))


def goals(table: dict[str, tuple[float, float]], label: str, quick: bool) -> dict[str, float]:
    """Returns a row's goals as arguments of Pair; quick runs have none."""
    ratio, share_goal = (0.0, 0.0) if quick else table.get(label, (0.0, 0.0))
    return {"goal": ratio, "share_goal": share_goal}


def as_fast(
    group: str, name: str, ours: Callable[[], None], float32: Callable[[], None], work: int, quick: bool
) -> Pair:
    """Returns the pair of our float16 and our float32, because torch multiplies float16 slowly."""
    return Pair(group, name, "ours in fp32", ours, float32, work, goal=0.0 if quick else 1.0)


def attention(quick: bool) -> Iterator[Pair]:
    """Times the forward beside the fastest eager program, and on fewer rows beside SDPA with a mask."""
    rows, work = 32 if quick else 256, 2 * HEADS * CHOSEN * (2 * DIM + ROPE)
    for label, dtype in DTYPES.items():
        for local in (False, True):
            kind, peak, wanted = "local" if local else "random", PEAKS[label], goals(FORWARD, label, quick)
            s = select(dtype, rows, local)
            forward, tensors = s.forward(lengths(rows, KEYS)), (s.q, s.kv, s.indices)
            if dtype is torch.float16:
                float32 = select(torch.float32, rows, local).forward(lengths(rows, KEYS))
                yield as_fast("sparse forward", f"{label} {rows} rows {kind}", forward, float32, rows * work, quick)
                continue
            peers = ("index_select + mm", row_by_row), ("gather + bmm", eager), ("gather + SDPA", gathered_sdpa)
            ways: list[tuple[str, Callable[[], object]]] = [
                (peer, torch.no_grad()(lambda c=call, t=tensors: c(*t))) for peer, call in peers
            ]
            for peer, theirs in fastest_first(ways):
                yield Pair(
                    "sparse forward", f"{label} {rows} rows {kind}", peer, forward, theirs, rows * work, peak, **wanted
                )
                wanted = {}
            if local:
                continue  # the time of a mask does not depend on its keys
            few = select(dtype, rows // 16, local)
            ours, name = few.forward(lengths(rows // 16, KEYS)), f"{label} {rows // 16} rows {kind}"
            yield Pair("sparse forward", name, "masked SDPA", ours, masked_sdpa(few), rows // 16 * work, peak)


def gradients(quick: bool) -> Iterator[Pair]:
    """Times the backward beside autograd through two eager programs, which run on few rows: rates are compared."""
    rows, work = 32 if quick else 256, 2 * HEADS * CHOSEN * (3 * (DIM + ROPE) + 2 * DIM)
    few_rows = rows // 4
    for label, dtype in DTYPES.items():
        if dtype is torch.float16:
            continue
        for local in (False, True):
            s, name = select(dtype, rows, local), f"{label} {rows} rows {'local' if local else 'random'}"
            backward, wanted = s.backward(lengths(rows, KEYS)), goals(BACKWARD, label, quick)
            few = replace(s, q=s.q[:few_rows], indices=s.indices[:few_rows], dout=s.dout[:few_rows])
            ways: list[tuple[str, Callable[[], object]]] = [
                (peer, autograd(few, call, chunk))
                for peer, call, chunk in (("autograd, row by row", row_by_row, 1), ("autograd", eager, 4))
            ]
            for peer, theirs in fastest_first(ways):
                peer = f"{peer}, {few_rows} of them"
                yield Pair(
                    "sparse backward",
                    name,
                    peer,
                    backward,
                    theirs,
                    rows * work,
                    PEAKS[label],
                    peer_flops=few_rows * work,
                    **wanted,
                )
                wanted = {}


def indexer(q: torch.Tensor, k: torch.Tensor, w: torch.Tensor) -> Callable[[], None]:
    """Returns a function that runs our selection of keys."""
    indices, kind = torch.empty(len(q), 1, CHOSEN, dtype=torch.int32), dtype_text(q)
    problem = IndexerProblem(INDEX_HEADS, INDEX_DIM, kind, kind, CHOSEN)  # type: ignore[arg-type]
    extents, operands = lengths(len(q), len(k)), IndexerOperands(one(q), one(k), one(w), one(indices))
    plan = cpu.schedule(problem, extents, "indexer_topk")
    return lambda: cpu.indexer_topk(problem, extents, plan, operands)  # type: ignore[arg-type]


def index_tensors(dtype: torch.dtype, rows: int) -> list[torch.Tensor]:
    """Returns queries, keys and weights of the indexer."""
    torch.manual_seed(0)
    shapes = (rows, INDEX_HEADS, INDEX_DIM), (KEYS, 1, INDEX_DIM), (rows, 1, INDEX_HEADS)
    return [torch.randn(shape).to(dtype) for shape in shapes]


def indexing(quick: bool) -> Iterator[Pair]:
    """Times the indexer beside an einsum and topk, 64 rows at a time."""
    rows = 32 if quick else 256
    for label, dtype in DTYPES.items():
        q, k, w = index_tensors(dtype, rows)
        ours = indexer(q, k, w)

        def theirs(q=q, k=k, w=w) -> None:  # type: ignore[no-untyped-def]
            for i in range(0, rows, 64):
                scores = torch.einsum("thd,sd->ths", q[i : i + 64], k[:, 0]).relu()
                torch.einsum("ths,th->ts", scores, w[i : i + 64, 0]).topk(CHOSEN)

        flops = 2 * rows * INDEX_HEADS * KEYS * INDEX_DIM
        if dtype is torch.float16:
            float32 = indexer(*index_tensors(torch.float32, rows))
            yield as_fast("indexer", f"{label} {rows} rows", ours, float32, flops, quick)
            continue
        wanted, name = goals(INDEXER, label, quick), f"{label} {rows} rows"
        yield Pair("indexer", name, "einsum + topk", ours, theirs, flops, PEAKS[label], **wanted)


def irregular(rows: int) -> Iterator[tuple[str, torch.Tensor, int, int, int]]:
    """Yields lists with duplicates, limits or blocks: name, indices, visible keys, block size, and visited keys."""
    torch.manual_seed(1)

    def drawn(blocks: int, slots: int) -> torch.Tensor:
        return torch.stack([torch.randperm(blocks)[:slots] for _ in range(rows)])

    yield "duplicates", torch.randint(0, KEYS, (rows, CHOSEN)), KEYS, 1, rows * CHOSEN
    tails = drawn(KEYS, CHOSEN)
    tails[:, CHOSEN // 2 :] = -1
    yield "lists end early", tails, KEYS, 1, rows * CHOSEN // 2
    without = drawn(KEYS, CHOSEN)
    without[::2, 0] = -1
    yield "rows without keys", without, KEYS, 1, rows * CHOSEN // 2
    few = CHOSEN // 2
    padded = torch.cat((drawn(few, few), torch.full((rows, CHOSEN - few), -1)), 1)
    yield "fewer keys than slots", padded, few, 1, rows * few
    block, visible_keys = 64, KEYS - 30
    blocks = drawn(KEYS // block - 1, CHOSEN // block)
    blocks[:, 0] = KEYS // block - 1  # the last block: rows see only its first keys
    yield "blocks of 64", blocks, visible_keys, block, rows * (CHOSEN - 30)


def lists(quick: bool) -> Iterator[Pair]:
    """Times forward and backward over irregular lists; ratio: rate per visited key relative to random unique keys."""
    rows = 16 if quick else 64
    selection, both, goal = select(torch.bfloat16, rows, False), lengths(rows, KEYS), 0.0 if quick else COST
    for name, indices, visible_keys, block, visited in irregular(rows):
        odd, extents = (
            replace(selection, indices=indices.int()[:, None], block=block),
            lengths(rows, KEYS, visible_keys),
        )
        for way, per_key in (("forward", 2 * DIM + ROPE), ("backward", 5 * DIM + 3 * ROPE)):
            ours, theirs = getattr(odd, way)(extents), getattr(selection, way)(both)
            work, usual = (2 * HEADS * per_key * keys for keys in (visited, rows * CHOSEN))
            yield Pair("lists", f"{way}, {name}", "unique keys", ours, theirs, work, peer_flops=usual, goal=goal)


def threads(quick: bool) -> Iterator[Pair]:
    """Times all threads beside one, for many rows and for a single row."""
    count = torch.get_num_threads()
    goal = 0.0 if quick or count == 1 else TWO_THREADS / 2 * count
    for rows in (16 if quick else 64, 1):
        s, few = select(torch.bfloat16, rows, False), index_tensors(torch.bfloat16, rows)
        extents, work = lengths(rows, KEYS), 2 * rows * HEADS * CHOSEN
        calls = (
            ("forward", s.forward(extents), work * (2 * DIM + ROPE)),
            ("backward", s.backward(extents), work * (5 * DIM + 3 * ROPE)),
            ("indexer", indexer(*few), 2 * rows * INDEX_HEADS * KEYS * INDEX_DIM),
        )
        for name, ours, flops in calls:
            label = f"{count} threads, {name}, {rows} rows"
            # A row's backward clears and writes the gradients of all keys.
            wanted = 0.0 if (rows, name) == (1, "backward") else goal
            yield Pair("selection on threads", label, "one thread", ours, with_threads(1, ours), flops, goal=wanted)

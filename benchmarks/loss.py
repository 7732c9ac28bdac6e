"""Times the indexer's loss with its gradients beside eager torch: autograd in chunks of the fastest size."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.dense import DTYPES, PEAKS
from benchmarks.features import with_threads
from benchmarks.sparse import CHOSEN, DIM, HEADS, INDEX_DIM, INDEX_HEADS, KEYS, ROPE, TWO_THREADS, goals, lengths, one
from fusion_attention.backends import cpu
from fusion_attention.bench.pair import Pair
from fusion_attention.contract import dtype_text
from fusion_attention.ir.mask import INFINITE
from fusion_attention.ir.problem import (
    Extents,
    IndexerGrads,
    IndexerLossOperands,
    IndexerLossProblem,
    IndexerOperands,
    IndexerProblem,
    Stats,
)

# (speed relative to eager torch, fraction of the bfloat16 peak)
LISTS = {"bf16": (4.0, 0.60), "fp32": (3.0, 0.0)}
BANDS = {"bf16": (4.0, 0.0), "fp32": (4.0, 0.0)}
WARM_DIM, WARM_LENGTH = 128, 4096  # of attention over all keys, where every head has its own keys
CHUNKS = {"bf16": 32, "fp32": 4}  # rows per chunk at which the gathers are fastest
LEAST = 1e-8


@dataclass(eq=False)
class Loss:
    """The inputs of a loss, [tokens, heads, elements]; indices [rows, 1, slots] or None; lse of the attention."""

    q: torch.Tensor
    k: torch.Tensor
    qi: torch.Tensor
    ki: torch.Tensor
    w: torch.Tensor
    lse: torch.Tensor  # float32 [rows, HEADS, 1]
    scale: float
    indices: torch.Tensor | None = None

    @property
    def problem(self) -> IndexerLossProblem:
        dtype, slots = dtype_text(self.q), 0 if self.indices is None else self.indices.shape[2]
        sizes = HEADS, self.k.shape[1], self.q.shape[2] - ROPE, INDEX_HEADS, INDEX_DIM, ROPE
        return IndexerLossProblem(*sizes, dtype, dtype, self.scale, select_count=slots)  # type: ignore[arg-type]

    def ours(self, extents: Extents) -> Callable[[], None]:
        """Returns a function that runs our loss; without a selection, it first computes the statistics."""
        p, dim = self.problem, self.q.shape[2] - ROPE
        statistics = Stats(*(one(torch.empty(len(self.q), 1, 1)) for _ in range(2)))
        listed = None if self.indices is None else one(self.indices)
        index = IndexerOperands(one(self.qi), one(self.ki), one(self.w), listed, stats=None if listed else statistics)
        stats, heads = Stats(one(self.lse), one(torch.ones_like(self.lse))), one(self.q, 0, dim)
        ropes = one(self.q, dim, ROPE), one(self.k, dim, ROPE)
        operands = IndexerLossOperands(index, torch.empty(1), None, heads, one(self.k, 0, dim), stats, *ropes)
        grads = IndexerGrads(*(one(torch.empty_like(t)) for t in (self.qi, self.ki, self.w)))
        plan = cpu.schedule(p, extents, "indexer_loss")
        before = IndexerProblem(INDEX_HEADS, INDEX_DIM, p.dtype, p.weights_dtype, top_k=0)
        before_plan = None if listed else cpu.schedule(before, extents, "indexer_lse")

        def run() -> None:
            if before_plan:
                cpu.indexer_lse(before, extents, before_plan, index)  # type: ignore[arg-type]
            cpu.indexer_loss(p, extents, plan, operands, grads)  # type: ignore[arg-type]

        return run


def divergence(target: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Returns the loss of rows; without a selection, scores of invisible keys are -inf."""
    log_y = torch.log_softmax(scores, -1).clamp(min=float(np.log(LEAST)))
    return (target * (target.clamp(min=LEAST).log() - log_y)).sum()


def eager_lists(s: Loss, chunk: int) -> Callable[[], None]:
    """Returns a function that runs forward and backward of chunks of rows, with gathers and batched products."""
    qi, ki, w = (t.clone().requires_grad_() for t in (s.qi, s.ki, s.w))
    assert s.indices is not None
    listed = s.indices[:, 0].long()

    def run() -> None:
        for t in (qi, ki, w):
            t.grad = None
        for i in range(0, len(s.q), chunk):
            at = listed[i : i + chunk]
            with torch.no_grad():
                products = (s.q[i : i + chunk] @ s.k[:, 0][at].mT).float()
                target = (products.mul_(s.scale).sub_(s.lse[i : i + chunk])).exp_().mean(1)
            keys = ki[:, 0].index_select(0, at.flatten()).view(*at.shape, INDEX_DIM)
            dots = (qi[i : i + chunk] @ keys.mT).float().relu()  # float32, as for softmax
            scores = (w[i : i + chunk].float() @ dots)[:, 0]
            divergence(target, scores).backward()

    return run


def eager_bands(s: Loss, chunk: int, sliced: bool) -> Callable[[], None]:
    """Returns a function that runs forward and backward of chunks of rows, over all keys or (sliced) visible keys."""
    qi, ki, w = (t.clone().requires_grad_() for t in (s.qi, s.ki, s.w))
    q, k = s.q.transpose(0, 1).contiguous(), s.k.transpose(0, 1).contiguous()
    rows = len(s.q)

    def run() -> None:
        for t in (qi, ki, w):
            t.grad = None
        for i in range(0, rows, chunk):
            stop = min(i + chunk, rows)
            end = stop if sliced else rows
            unseen = torch.arange(end) > torch.arange(i, stop)[:, None]
            with torch.no_grad():
                target = torch.zeros(stop - i, end)
                for h in range(0, HEADS, 8):
                    products = (q[h : h + 8, i:stop] @ k[h : h + 8, :end].mT).float()
                    shift = s.lse[i:stop, h : h + 8].transpose(0, 1)
                    target += products.mul_(s.scale).sub_(shift).exp_().sum(0)
                target.masked_fill_(unseen, 0).div_(HEADS)
            dots = (qi[i:stop].flatten(0, 1) @ ki[:end, 0].mT).view(stop - i, INDEX_HEADS, end).float().relu()
            scores = (w[i:stop].float() @ dots)[:, 0].masked_fill(unseen, -torch.inf)
            divergence(target, scores).backward()

    return run


def lists_of(dtype: torch.dtype, rows: int) -> Loss:
    """Makes a loss over lists of random unique keys, with statistics over the listed keys."""
    torch.manual_seed(0)
    shapes = (rows, HEADS, DIM + ROPE), (KEYS, 1, DIM + ROPE), (rows, INDEX_HEADS, INDEX_DIM), (KEYS, 1, INDEX_DIM)
    q, k, qi, ki = (torch.randn(shape).to(dtype) for shape in shapes)
    w = (torch.randn(rows, 1, INDEX_HEADS) / (INDEX_HEADS * INDEX_DIM) ** 0.5).to(dtype)
    indices = torch.stack([torch.randperm(KEYS)[:CHOSEN] for _ in range(rows)]).int()[:, None]
    scale = (DIM + ROPE) ** -0.5
    sums = [(q[i].float() @ k[indices[i, 0].long(), 0].float().mT * scale).logsumexp(-1) for i in range(rows)]
    return Loss(q, k, qi, ki, w, torch.stack(sums)[..., None], scale, indices)


def bands_of(dtype: torch.dtype, length: int) -> Loss:
    """Makes a causal loss over all keys."""
    torch.manual_seed(0)
    q, k = (torch.randn(length, HEADS, WARM_DIM + ROPE).to(dtype) for _ in range(2))
    qi, ki = (torch.randn(length, heads, INDEX_DIM).to(dtype) for heads in (INDEX_HEADS, 1))
    w = (torch.randn(length, 1, INDEX_HEADS) / (INDEX_HEADS * INDEX_DIM) ** 0.5).to(dtype)
    scale, unseen = (WARM_DIM + ROPE) ** -0.5, torch.ones(length, length, dtype=torch.bool).triu(1)
    products = ((q[:, h].float() @ k[:, h].float().mT * scale).masked_fill(unseen, -torch.inf) for h in range(HEADS))
    return Loss(q, k, qi, ki, w, torch.stack([t.logsumexp(-1) for t in products], 1)[..., None], scale)


def causal(length: int) -> Extents:
    """Returns one sequence with causal visibility."""
    n = np.array([length])
    return Extents(n, n, n * 0 - INFINITE, n * 0 + 1, n * 0, n * 0)


def lists(quick: bool) -> Iterator[Pair]:
    """Times losses over selected keys, and all threads beside one."""
    rows = 32 if quick else 256
    flops = rows * CHOSEN * (2 * HEADS * (DIM + ROPE) + 6 * INDEX_HEADS * INDEX_DIM)
    for label, dtype in DTYPES.items():
        if dtype is torch.float16:
            continue  # torch multiplies batches of float16 a hundred times slower
        s, name, wanted = lists_of(dtype, rows), f"{label} {rows} rows", goals(LISTS, label, quick)
        ours, theirs = s.ours(lengths(rows, KEYS)), eager_lists(s, CHUNKS[label])
        yield Pair("indexer's loss", name, "gather + bmm, autograd", ours, theirs, flops, PEAKS[label], **wanted)
        yield from on_threads(name, ours, flops, quick)


def bands(quick: bool) -> Iterator[Pair]:
    """Times losses over all visible keys of causal rows with their statistics, and all threads beside one."""
    length = 512 if quick else WARM_LENGTH
    flops = length * (length + 1) // 2 * (2 * HEADS * (WARM_DIM + ROPE) + 8 * INDEX_HEADS * INDEX_DIM)
    for label, dtype in DTYPES.items():
        if dtype is torch.float16:
            continue
        s, name, wanted = bands_of(dtype, length), f"{label} causal {length}", goals(BANDS, label, quick)
        ours, masked, sliced = s.ours(causal(length)), eager_bands(s, 256, False), eager_bands(s, 256, True)
        yield Pair("indexer's loss", name, "all keys, autograd", ours, masked, flops, PEAKS[label], **wanted)
        yield Pair("indexer's loss", name, "sliced keys, autograd", ours, sliced, flops)
        yield from on_threads(name, ours, flops, quick)


def on_threads(name: str, ours: Callable[[], None], flops: int, quick: bool) -> Iterator[Pair]:
    """Times all threads beside one."""
    count = torch.get_num_threads()
    goal = 0.0 if quick or count == 1 else TWO_THREADS / 2 * count
    label = f"{name}, {count} threads"
    yield Pair("indexer's loss", label, "one thread", ours, with_threads(1, ours), flops, goal=goal)

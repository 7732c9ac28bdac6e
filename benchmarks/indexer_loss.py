"""Times the indexer's loss with its gradients beside eager torch: autograd in chunks of the fastest size."""

from collections.abc import Callable, Iterator

import torch

from benchmarks.dense import DTYPES, PEAKS
from benchmarks.sparse import HEADS, INDEX_HEADS, KEYS, LABELS, TWO_THREADS, joined
from benchmarks.sparse_calls import CHOSEN, DIM, INDEX_DIM, ROPE, Index, Selection, drawn, loss_with_gradients
from benchmarks.threads import with_threads
from fusion_attention import Band
from fusion_attention import attention as dense_attention
from fusion_attention.bench.pair import Pair

# (speed relative to eager torch, fraction of the bfloat16 peak)
LISTS = {"bf16": (4.0, 0.60), "fp32": (3.0, 0.0)}
BANDS = {"bf16": (4.0, 0.0), "fp32": (4.0, 0.0)}
WARM_DIM, WARM_LENGTH = 128, 4096  # of attention over all keys, where every head has its own keys
CHUNKS = {"bf16": 32, "fp32": 4}  # rows per chunk at which the gathers are fastest
LEAST = 1e-8


def divergence(target: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Returns the loss of rows; without a selection, scores of invisible keys are -inf."""
    log_y = torch.log_softmax(scores, -1).clamp(min=torch.tensor(LEAST).log().item())
    return (target * (target.clamp(min=LEAST).log() - log_y)).sum()


def eager_lists(s: Selection, index: Index, lse: torch.Tensor, chunk: int) -> Callable[[], None]:
    """Returns a function that runs forward and backward of chunks of rows, with gathers and batched products."""
    qi, ki, w = (t.detach().clone().requires_grad_() for t in index.leaves)
    q, k = joined(s, len(s.q))
    listed = s.lists[:, 0].long()

    def run() -> None:
        for t in (qi, ki, w):
            t.grad = None
        for i in range(0, len(q), chunk):
            at = listed[i : i + chunk]
            with torch.no_grad():
                products = (q[i : i + chunk] @ k[:, 0][at].mT).float()
                target = products.mul_((DIM + ROPE) ** -0.5).sub_(lse[i : i + chunk, :, None]).exp_().mean(1)
            keys = ki[:, 0].index_select(0, at.flatten()).view(*at.shape, INDEX_DIM)
            dots = (qi[i : i + chunk] @ keys.mT).float().relu()  # float32, as for softmax
            divergence(target, (w[i : i + chunk, None].float() @ dots)[:, 0]).backward()

    return run


def eager_bands(s: Selection, index: Index, lse: torch.Tensor, sliced: bool) -> Callable[[], None]:
    """Returns a function that runs forward and backward of 256 rows at a time, over all or (sliced) visible keys."""
    qi, ki, w = (t.detach().clone().requires_grad_() for t in index.leaves)
    q, k = (t.transpose(0, 1).contiguous() for t in joined(s, len(s.q)))
    rows, chunk = len(s.q), 256

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
                    shift = lse[i:stop, h : h + 8].T[..., None]
                    target += products.mul_((WARM_DIM + ROPE) ** -0.5).sub_(shift).exp_().sum(0)
                target.masked_fill_(unseen, 0).div_(HEADS)
            dots = (qi[i:stop].flatten(0, 1) @ ki[:end, 0].mT).view(stop - i, INDEX_HEADS, end).float().relu()
            scores = (w[i:stop, None].float() @ dots)[:, 0].masked_fill(unseen, -torch.inf)
            divergence(target, scores).backward()

    return run


def bands_of(dtype: torch.dtype, length: int) -> tuple[Selection, torch.Tensor]:
    """Returns tensors of causal attention over all keys, and its lse [tokens, heads]."""
    torch.manual_seed(0)
    q, k, q_rope, k_rope = drawn("cpu", dtype, *((length, HEADS, n) for n in (WARM_DIM, WARM_DIM, ROPE, ROPE)))
    ropes = {"q_rope": q_rope, "k_rope": k_rope}
    lse = dense_attention(q, k, k, layout="TND", q_len=[length], band=Band.causal(), return_lse=True, **ropes)[1]
    return Selection(q, k, q_rope, k_rope, torch.empty(0)), lse


def lists(quick: bool) -> Iterator[Pair]:
    """Times losses over selected keys, and all threads beside one."""
    rows = 32 if quick else 256
    flops = rows * CHOSEN * (2 * HEADS * (DIM + ROPE) + 6 * INDEX_HEADS * INDEX_DIM)
    for label in LABELS:
        s = Selection.of(rows, HEADS, KEYS, dtype=DTYPES[label])
        index, lse = Index.of(rows, INDEX_HEADS, KEYS, dtype=DTYPES[label], grad=True), s.attend()[1]
        ours, theirs = loss_with_gradients(s, index, lse, s.lists), eager_lists(s, index, lse, CHUNKS[label])
        name, peer, goals = f"{label} {rows} rows", "gather + bmm, autograd", LISTS[label]
        yield Pair("indexer's loss", name, peer, ours, theirs, flops, PEAKS[label], None, 0, *goals)
        yield on_threads(name, ours, flops)


def bands(quick: bool) -> Iterator[Pair]:
    """Times losses over all visible keys of causal rows with their statistics, and all threads beside one."""
    length = 512 if quick else WARM_LENGTH
    flops = length * (length + 1) // 2 * (2 * HEADS * (WARM_DIM + ROPE) + 8 * INDEX_HEADS * INDEX_DIM)
    for label in LABELS:
        s, lse = bands_of(DTYPES[label], length)
        index = Index.of(length, INDEX_HEADS, length, dtype=DTYPES[label], grad=True)
        ours = loss_with_gradients(s, index, lse, None, causal=True)
        name, goals = f"{label} causal {length}", BANDS[label]
        masked, sliced = (eager_bands(s, index, lse, is_sliced) for is_sliced in (False, True))
        yield Pair("indexer's loss", name, "all keys, autograd", ours, masked, flops, PEAKS[label], None, 0, *goals)
        yield Pair("indexer's loss", name, "sliced keys, autograd", ours, sliced, flops)
        yield on_threads(name, ours, flops)


def on_threads(name: str, ours: Callable[[], object], flops: int) -> Pair:
    """Returns the pair of all threads and one."""
    count = torch.get_num_threads()
    goal = 0.0 if count == 1 else TWO_THREADS / 2 * count
    label = f"{name}, {count} threads"
    return Pair("indexer's loss", label, "one thread", ours, with_threads(1, ours), flops, goal=goal)

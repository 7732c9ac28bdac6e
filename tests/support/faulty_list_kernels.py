"""Simulates kernels of sparse attention and of the indexer that handle lists incorrectly, in plain torch.

Shares no code with the judge. A seed determines the fault and the sizes.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from support.planted import Capture, Planted, fault

Tensor = torch.Tensor


@dataclass(frozen=True)
class Call:
    """Causal sparse attention: q [B, S1, N1, D], one key head, lists [B, S1, 1, K] of blocks of keys."""

    q: Tensor
    k: Tensor
    v: Tensor
    lists: Tensor
    block: int
    scale: float
    rng: random.Random

    @property
    def visible(self) -> Tensor:
        rows, keys = self.q.shape[1], self.k.shape[1]
        return torch.arange(keys) <= torch.arange(rows)[:, None] + keys - rows


def drawn(seed: int, ends: bool) -> Call:
    """Draws a call; ends: lists end at -1 before their last entry."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    dtype = rng.choice([torch.float32, torch.float16, torch.bfloat16])
    block, rows, heads, dim = rng.choice([1, 1, 16]), rng.randint(20, 60), rng.choice([2, 4, 8]), rng.choice([32, 64])
    keys = rows + rng.randint(60, 150)
    count = rng.randint(12, 24) if block == 1 else rng.randint(3, 5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    lists = torch.full((2, rows, 1, count), -1, dtype=torch.int32)
    for b in range(2):
        for i in range(rows):
            last = (i + keys - rows) // block  # blocks that begin at or before the row's position
            chosen = torch.randperm(last + 1, generator=generator)[: count - rng.randint(1, count // 3) * ends]
            if block == 1 and len(chosen) > 3:
                chosen[1] = chosen[2]  # listed twice
            lists[b, i, 0, : len(chosen)] = chosen
    q, k, v = draw(2, rows, heads, dim), draw(2, keys, 1, dim), draw(2, keys, 1, dim)
    return Call(q, k, v, lists, block, dim**-0.5 * 2, rng)


def scored(
    x: Call, lists: Tensor | None = None, *, block: int = 0, once: bool = False, ends: str = "", dense: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns (scores, number of times that a row lists a key) [B, N1, S1, S2]; every option is a fault."""
    keys, block = x.k.shape[1], block or x.block
    lists = (x.lists if lists is None else lists)[:, :, 0].long()
    times = torch.zeros(*lists.shape[:2], -(-keys // block) + 1)
    for n in range(lists.shape[2]):
        entry = lists[..., n : n + 1]
        end = {"last": -(-keys // block) - 1, "first": 0}.get(ends, times.shape[-1] - 1)
        entry = entry.where(entry >= 0, end).clamp(max=times.shape[-1] - 1)
        times.scatter_add_(-1, entry, torch.ones(entry.shape))
    times = times[..., :-1].repeat_interleave(block, -1)[..., :keys]
    times = times.clamp(max=1) if once else torch.ones_like(times) if dense else times
    scores = torch.einsum("brhd,bkd->bhrk", x.q.float(), x.k[:, :, 0].float()) * x.scale
    return scores.masked_fill(~x.visible | (times[:, None] == 0), -math.inf), times[:, None]


def softmax(scores: Tensor, times: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (weights, maximum, sum) of rows."""
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top).exp().nan_to_num(0.0) * times
    return weights, top, weights.sum(-1, keepdim=True)


def attended(x: Call, lists: Tensor | None = None, **options: Any) -> Tensor:
    """Computes the output; options: as of scored()."""
    weights, _, total = softmax(*scored(x, lists, **options))
    out = weights.to(x.q.dtype).float() @ x.v.transpose(1, 2).float() / total.where(total > 0, 1.0)
    return out.transpose(1, 2).to(x.q.dtype)


def differentiated(
    x: Call, lists: Tensor | None = None, *, delta: float = 1.0, of_dk: float = 1.0, **options: Any
) -> Capture:
    """Computes dq, dk and dv from q, k, v, lists and dout, without statistics; every option is a fault."""
    dout = torch.randn(x.q.shape, generator=torch.Generator().manual_seed(x.rng.randrange(1 << 30))).to(x.q.dtype)
    _, top, total = softmax(*scored(x))
    scores, times = scored(x, lists, **options)
    p = ((scores - top).exp().nan_to_num(0.0) * times / total.where(total > 0, 1.0)).nan_to_num(0.0)
    q, do, k, v = (t.transpose(1, 2).float() for t in (x.q, dout, x.k, x.v))
    out = attended(x).transpose(1, 2).float()
    ds = p * (do @ v.mT - delta * (do * out).sum(-1, keepdim=True))
    p, ds = p.to(x.q.dtype).float(), ds.to(x.q.dtype).float()
    grads = {"dq": x.scale * ds @ k, "dk": of_dk * x.scale * (ds.mT @ q).sum(1, keepdim=True),
             "dv": (p.mT @ do).sum(1, keepdim=True)}  # fmt: skip
    outputs = {name: g.transpose(1, 2).to(x.q.dtype) for name, g in grads.items()}
    call = capture(x, dout)
    return replace(call, inputs=call.inputs | {"dout": dout}, outputs=outputs)


def capture(x: Call, out: Tensor) -> Capture:
    inputs = {"q": x.q, "k": x.k, "v": x.v, "indices": x.lists, "scale": x.scale, "block": x.block}
    return Capture("sparse_attention", inputs, {"attention_out": out})


def _without_last(lists: Tensor) -> Tensor:
    """Returns the lists without the last entry before -1."""
    count = (lists >= 0).sum(-1, keepdim=True)
    return lists.masked_fill(torch.arange(lists.shape[-1]) == count - 1, -1)


def _moved(lists: Tensor, by: int) -> Tensor:
    """Returns lists shifted by some rows; rows without such a neighbour keep their lists."""
    rows = lists.shape[1]
    return lists[:, (torch.arange(rows) + by).clamp(0, rows - 1)]


# --------------------------------------------------------------------------------------------------------- the indexer


@dataclass(frozen=True)
class Indexer:
    """A causal call of the indexer."""

    q: Tensor  # [2, S1, N1, D]
    k: Tensor
    w: Tensor
    count: int
    rng: random.Random


def drawn_indexer(seed: int, exact: bool = False) -> Indexer:
    """Draws a call; exact: small integers, so that scores tie."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    dtype = rng.choice([torch.float32, torch.float16, torch.bfloat16])
    rows, heads, dim = rng.randint(10, 40), rng.choice([4, 8]), rng.choice([16, 32])
    keys = rows + rng.randint(60, 120)
    draw = partial(torch.randint, -2, 3) if exact else torch.randn
    q, k = (draw(shape, generator=generator).to(dtype) for shape in ((2, rows, heads, dim), (2, keys, 1, dim)))
    w = torch.ones(2, rows, heads) if exact else torch.rand(2, rows, heads, generator=generator)
    return Indexer(q, k, w.to(dtype), rng.randint(8, 20), rng)


def chosen(
    x: Indexer,
    *,
    relu: bool = True,
    weighs: bool = True,
    by: int = 0,
    bound: int = 0,
    shorter: int = 0,
    unread: tuple[int, int] = (0, 0),
    last: bool = False,
) -> Capture:
    """Computes lists and scores; every option is a fault."""
    rows, keys = x.q.shape[1], x.k.shape[1]
    products = torch.einsum("brhd,bkd->brhk", x.q.float(), x.k[:, :, 0].float())
    products = products.relu() if relu else products
    scores = (products * (x.w.float().roll(-by, -1)[..., None] if weighs else 1.0)).sum(2)
    key = torch.arange(keys)
    visible = (key <= torch.arange(rows)[:, None] + keys - rows + bound) & ~((key >= unread[0]) & (key < unread[1]))
    scores = scores.masked_fill(~visible, -math.inf)
    values, order = (scores.flip(-1) if last else scores).sort(dim=-1, descending=True, stable=True)
    order = keys - 1 - order if last else order
    values, order = values[..., : x.count].clone(), order[..., : x.count].clone()
    if shorter:
        values[..., -1], order[..., -1] = -math.inf, -1
    order = order.masked_fill(values == -math.inf, -1)
    names = {"query": x.q, "key": x.k, "weights": x.w, "layout_query": "BSND", "layout_key": "BSND",
             "sparse_count": x.count, "sparse_mode": 3, "return_values": True}  # fmt: skip
    outputs = {"sparse_indices_out": order[:, :, None].int(), "sparse_values_out": values[:, :, None].to(x.q.dtype)}
    return Capture("npu_lightning_indexer", names, outputs)


def divergence(seed: int, wrong: str = "") -> Capture:
    """Makes a call of the indexer's loss over all keys, by autograd of its formula; wrong: a mistake."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    dtype = rng.choice([torch.float32, torch.float16, torch.bfloat16])
    rows, keys, heads, scale = 9, 24, 3, 0.2

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    q, k, iq, ik = draw(2, rows, 4, 16), draw(2, keys, 1, 16), draw(2, rows, heads, 8), draw(2, keys, 1, 8)
    w = torch.rand(2, rows, heads, generator=generator).to(dtype)
    hidden = torch.arange(keys) > torch.arange(rows)[:, None] + keys - rows
    scores = torch.einsum("brhd,bkd->bhrk", q.float(), k[:, :, 0].float()) * scale
    scores = scores.masked_fill(hidden, -math.inf)
    p = scores.softmax(-1)
    p = p.sum(1) if wrong == "target-heads" else p.mean(1)
    leaves = [t.float().requires_grad_() for t in (iq, ik, w)]
    dots = torch.einsum("brhd,bkd->brhk", leaves[0], leaves[1][:, :, 0])
    index = (dots.relu() * leaves[2][..., None]).sum(2)
    y = index.masked_fill(hidden, -1e30).softmax(-1)
    a, b = (y, p) if wrong == "kl-direction" else (p, y)
    loss = (a * (a.clamp(min=1e-8).log() - b.clamp(min=1e-8).log())).masked_fill(hidden, 0).sum()
    loss = loss / (2 * rows) if wrong == "loss-mean" else loss
    differentiated_loss = loss
    if wrong == "target-heads":  # the gradient for a target that is not normalised
        differentiated_loss = (index * (y - p).detach()).masked_fill(hidden, 0).sum()
    grads = torch.autograd.grad(differentiated_loss, leaves)
    names = {"query": q, "key": k, "lse": scores.logsumexp(-1), "query_index": iq, "key_index": ik,
             "weights": w, "layout": "BSND", "scale_value": scale, "causal": True}  # fmt: skip
    outputs = {n: g.to(dtype) for n, g in zip(("dquery_index", "dkey_index", "dweights"), grads, strict=True)}
    return Capture("indexer_loss", names, {**outputs, "loss": loss.detach().reshape(1)})


# ------------------------------------------------------------------------------------------------------------- faults

Faulty = tuple[Capture, tuple[str, ...]]  # a call with the fault, and texts of its parameters in the diagnosis


@fault
def _list(seed: int, change: Callable[[Call], Tensor], word: str, *, ends: bool = True) -> Faulty:
    x = drawn(seed, ends)
    return capture(x, change(x)), (word,)


@fault
def _backward(seed: int, word: str, options: Callable[[Call], dict[str, Any]]) -> Faulty:
    x = drawn(seed, True)
    return differentiated(x, **options(x)), (word,)


def _twice(seed: int) -> Faulty:
    x = drawn(seed, True)
    while x.block > 1:
        seed += 100
        x = drawn(seed, True)
    return capture(x, attended(x, once=True)), ()


@fault
def _loss(seed: int, wrong: str) -> Faulty:
    return divergence(seed, wrong), ("",)


@fault
def _index(seed: int, word: str, options: Callable[[Indexer], dict[str, Any]], *, exact: bool = False) -> Faulty:
    x = drawn_indexer(seed, exact)
    return chosen(x, **options(x)), (word,)


def _last_tile(x: Indexer) -> tuple[int, int]:
    tile = x.rng.choice([16, 32])
    return (x.k.shape[1] - 1) // tile * tile, x.k.shape[1]


FAULTS: dict[str, tuple[Callable[[int], Faulty], tuple[str, ...]]] = {
    "the last entry is not read": (
        _list(lambda x: attended(x, _without_last(x.lists)), "the last before -1"), ("list-shortened",)
    ),
    "the last slot is not read": (
        _list(lambda x: attended(x, x.lists[..., :-1]), "the last", ends=False), ("list-shortened",)
    ),
    "the first entry is not read": (_list(lambda x: attended(x, x.lists[..., 1:]), "the first"), ("list-shortened",)),
    "-1 is the first key": (_list(lambda x: attended(x, ends="first"), "the first key"), ("list-end-read",)),
    "duplicates count once": (_twice, ("list-duplicates",)),
    "lists of the row before": (
        _list(lambda x: attended(x, _moved(x.lists, -1)), "before"),
        ("list-of-another-row",),
    ),
    "lists of the row after": (_list(lambda x: attended(x, _moved(x.lists, 1)), "row after"), ("list-of-another-row",)),
    "lists are ignored": (_list(lambda x: attended(x, dense=True), ""), ("list-ignored",)),
    "blocks of 32": (_list(lambda x: attended(x, block=32), "blocks of 32"), ("list-block",)),
    "a backward without delta": (_backward("", lambda x: {"delta": 0.0}), ("delta-missing",)),
    "dk lacks the scale": (_backward("not at all", lambda x: {"of_dk": 1 / x.scale}), ("gradient-scale",)),
    "a backward without the first entry": (
        _backward("the first", lambda x: {"lists": x.lists[..., 1:]}), ("list-shortened",)
    ),
    "a backward with lists of the row before": (
        _backward("before", lambda x: {"lists": _moved(x.lists, -1)}), ("list-of-another-row",)
    ),
    "no relu": (_index("", lambda x: {"relu": False}), ("relu-missing",)),
    "weights of the next head": (_index("next head", lambda x: {"by": 1}), ("index-weights-moved",)),
    "a bound one too large": (_index("after the right edge", lambda x: {"bound": 1}), ("window-off-by-one",)),
    "a bound one too small": (_index("diagonal", lambda x: {"bound": -1}), ("window-off-by-one",)),
    "lists one short": (_index("", lambda x: {"shorter": 1}), ("list-shortened",)),
    "the last tile is not read": (_index("", lambda x: {"unread": _last_tile(x)}), ("tile-skipped",)),
    "ties go to the last key": (_index("", lambda x: {"last": True}, exact=True), ("topk-ties",)),
    "no weights": (_index("", lambda x: {"weighs": False}), ("index-weights-missing",)),
    "a diagonal from the upper left": (
        _index("", lambda x: {"bound": x.q.shape[1] - x.k.shape[1]}), ("causal-alignment",)
    ),
    **{f"loss: {wrong}": (_loss(wrong), (wrong,)) for wrong in ("kl-direction", "loss-mean", "target-heads")},
}  # fmt: skip


def planted(name: str, seed: int) -> Planted:
    """Returns a call with the fault `name`."""
    program, names = FAULTS[name]
    result, words = program(1000 * seed + [*FAULTS].index(name))
    return result, names, words


def right(seed: int) -> Capture:
    if seed % 8 == 2:
        return divergence(seed)
    if seed % 2:
        return chosen(drawn_indexer(seed))
    x = drawn(seed, seed % 4 == 0)
    if seed % 3 == 0:
        return differentiated(x)
    return capture(x, attended(x))

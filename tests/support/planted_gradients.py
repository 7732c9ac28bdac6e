"""Simulates backward kernels with typical faults, in plain torch: loops over tiles of rows and of keys.

Shares no code with the judge. A seed determines the fault, its tile, head and rows, and the sizes.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from support import right_gradients
from support.planted import Edit, Planted, fault, head_factor, moved, rolled_columns, shifted_rows, zero_tail

Tensor = torch.Tensor
Grads = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Call(right_gradients.Call):
    """A call whose backward is computed by a kernel with tiles of `tile` rows and keys; rng: generator of faults."""

    tile: int = 16
    rng: random.Random = field(default_factory=random.Random)

    @property
    def causal(self) -> bool:
        return not bool(self.visible.all())

    def tiles(self, of: str) -> list[slice]:
        length = self.q.shape[2] if of == "rows" else self.k.shape[2]
        return [slice(a, min(a + self.tile, length)) for a in range(0, length, self.tile)]


def drawn(seed: int, **wanted: Any) -> Call:
    """Draws a call: sizes, dtype, heads and tile; wanted: causal, grouped, square, dropout, softcap, sink."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    dtype = rng.choice([torch.float32, torch.float16, torch.bfloat16])
    tile = rng.choice([16, 32, 64])
    keys = rng.randint(2 * tile + 3, 4 * tile + 20)
    keys += keys % tile == 0  # the last tile is partial
    square = rng.random() < 0.5 if "square" not in wanted else wanted["square"]
    rows = keys if square else rng.randint(2 * tile + 3, 3 * tile + 20)
    rows += rows % tile == 0 and not square
    causal = wanted.get("causal", rng.random() < 0.5 and rows <= keys)
    group = rng.choice([2, 4] if wanted.get("grouped") else [1, 2, 4])
    group, dim = wanted.get("group", group), rng.choice([32, 64])

    def rows_of(count: int, heads: int) -> Tensor:
        return torch.randn(2, heads, count, dim, generator=generator).to(dtype)

    heads = 2 * group
    visible = torch.ones(rows, keys, dtype=torch.bool)
    x = Call(
        rows_of(rows, heads), rows_of(keys, 2), rows_of(keys, 2), rows_of(rows, heads),
        visible.tril(keys - rows) if causal else visible, dim**-0.5 * rng.choice([1.2, 1.7]), tile=tile, rng=rng,
    )  # fmt: skip
    if wanted.get("dropout"):
        keep_prob = rng.choice([0.8, 0.6])
        x = replace(x, keep=torch.rand(2, heads, rows, keys, generator=generator) < keep_prob, keep_prob=keep_prob)
    if wanted.get("softcap"):
        x = replace(x, softcap=2.0)
    return replace(x, sink=torch.randn(heads, generator=generator)) if wanted.get("sink") else x


Times = Callable[[str, int, int], Tensor | float]


def kernel(
    x: Call,
    *,
    delta: str = "",
    masked: bool = True,
    scales: tuple[float, float] | None = None,
    unkept: str = "",
    total: str = "",
    base: float = 1.0,
    sloped: bool = True,
    times: Times = lambda kind, i, j: 1.0,
    stale: tuple[str, int] | None = None,
    heads: tuple[str, Callable[[int, int], int]] | None = None,
    given: tuple[Tensor, ...] = (),
) -> Grads:
    """Computes gradients with float32 sums of weights in the dtype; every option is a fault.

    times: function of a gradient, a tile of rows and a tile of keys; returns how often they count, a number or
        [B, N1, 1, 1].
    heads: ("k", "v" or "kv", function of a query head and the size of a group; returns the key head that is read).
    given: replaces the forward's results.
    """
    group, (out, top, sums) = x.group, given or x.forward()
    if heads is not None:
        which, of = heads
        order = [of(h, x.group) % x.k.shape[1] for h in range(x.q.shape[1])]
        k, v = (t[:, order] if n in which else x.per_head(t) for n, t in (("k", x.k), ("v", x.v)))
        x = replace(x, k=k, v=v)
    q, k, v, dout = (x.per_head(t).float() for t in (x.q, x.k, x.v, x.dout))
    scores, slope = x.scores()
    products = (dout * out.float()).sum(-1, keepdim=True)
    if total == "missing":
        sums = torch.ones_like(sums)
    if total == "next":
        top, sums = top.roll(-1, 1), sums.roll(-1, 1)
    p = ((scores - top) * base).exp() / sums
    p = p.masked_fill(~x.visible, 0) if masked else p
    dp, dropped = dout @ v.mT, p
    if x.keep is not None:
        dropped = p * x.keep / (1 if "dv" in unkept else x.keep_prob)
        dp = dp * x.keep / (1 if "dp" in unkept else x.keep_prob)
    delta_by = {"missing": 0 * products, "added": -products, "next": products.roll(-1, 1)}.get(delta, products)
    ds = p * (dp - delta_by) * (slope if sloped else 1.0)
    dropped, ds = dropped.to(x.q.dtype).float(), ds.to(x.q.dtype).float()
    of_dq, of_dk = scales or (x.scale, x.scale)
    grads = {"dq": torch.zeros_like(q), "dk": torch.zeros_like(k), "dv": torch.zeros_like(v)}
    rows, keys = x.tiles("rows"), x.tiles("keys")
    for i, r in enumerate(rows):
        for j, c in enumerate(keys):
            k_tile, q_tile, dout_tile = k[:, :, c], q[:, :, r], dout[:, :, r]
            if stale is not None:
                before_c, before_r = (slice(t.start - x.tile, t.stop - x.tile) for t in (c, r))
                k_tile = k[:, :, before_c] if stale == ("dq", j) else k_tile
                q_tile = q[:, :, before_r] if stale == ("dk", i) else q_tile
                dout_tile = dout[:, :, before_r] if stale == ("dv", i) else dout_tile
            grads["dq"][:, :, r] += times("dq", i, j) * of_dq * (ds[:, :, r, c] @ k_tile)
            grads["dk"][:, :, c] += times("dk", i, j) * of_dk * (ds[:, :, r, c].mT @ q_tile)
            grads["dv"][:, :, c] += times("dv", i, j) * (dropped[:, :, r, c].mT @ dout_tile)
    grads |= {n: grads[n].unflatten(1, (-1, group)).sum(2) for n in ("dk", "dv")}
    grads = {n: g.to(x.q.dtype) for n, g in grads.items()}
    if x.sink is not None:
        at_sink = (x.sink[:, None, None] - top).exp() / sums
        grads["dsink"] = -(at_sink * products).sum((0, 2, 3))
    return grads


# ------------------------------------------------------------------------------------------------------------- faults

Faulty = tuple[Grads, tuple[str, ...]]  # wrong gradients, and texts of the fault's parameters in the diagnosis


@fault
def _fixed(x: Call, *words: str, **options: Any) -> Faulty:
    return kernel(x, **options), words


@fault
def _scaled(x: Call, dq: float | None, dk: float | None, word: str) -> Faulty:
    scales = tuple(x.scale if by is None else by if word == "not at all" else by * x.scale for by in (dq, dk))
    return kernel(x, scales=scales), (word,)


@fault
def _of_heads(x: Call, weights: Callable[[Call], tuple[list[float], str]]) -> Faulty:
    """Sums dk and dv over a group's heads with wrong weights."""
    factors, word = weights(x)
    by = torch.tensor(factors).repeat(x.k.shape[1])[:, None, None]
    return kernel(x, times=lambda kind, i, j: 1.0 if kind == "dq" else by), (word,)


def _one(x: Call, value: float, other: float) -> tuple[list[float], str]:
    head = x.rng.randrange(x.group)
    word = "alone" if value else "left out"
    return [value if h == head else other for h in range(x.group)], f"query head {head} of each group, {word}"


def _mean(x: Call) -> tuple[list[float], str]:
    return [1 / x.group] * x.group, "mean"


def _side(kinds: str) -> str:
    """Returns the tiles over which a gradient is summed: tiles of keys for dq, of rows for dk and dv."""
    return "keys" if "dq" in kinds else "rows"


@fault
def _tile(x: Call, kinds: str, factor: float, which: str, others: float = 1.0) -> Faulty:
    """Counts a tile of keys (dq) or of rows (dk, dv) `factor` times, others `others` times; which: "inner", "last"."""
    tiles = x.tiles(_side(kinds))
    number = len(tiles) - 1 if which == "last" else x.rng.randrange(0, len(tiles) - 1)

    def times(kind: str, i: int, j: int) -> float:
        return (factor if (j if kind == "dq" else i) == number else others) if kind in kinds else 1.0

    word = "left out" if not factor else "twice" if others else "alone"
    return kernel(x, times=times), (f"{_side(kinds)} {number * x.tile} to", word)


@fault
def _update(x: Call, kind: str, factor: float) -> Faulty:
    """Counts one addition of a concurrent sum `factor` times: of one tile to one tile of a head's gradient."""
    rows, keys = len(x.tiles("rows")), len(x.tiles("keys"))
    b, h = x.rng.randrange(2), x.rng.randrange(x.q.shape[1])
    i = x.rng.randrange(rows)
    offset = x.k.shape[2] - x.q.shape[2]
    last = min((i * x.tile + offset) // x.tile, keys - 1) if x.causal else keys - 1
    j = x.rng.randrange(last + 1)
    by = torch.ones(2, x.q.shape[1], 1, 1)
    by[b, h] = factor

    def times(of: str, m: int, n: int) -> Tensor | float:
        return by if of == kind and (m, n) == (i, j) else 1.0

    first = f"keys {j * x.tile} to" if kind == "dq" else f"rows {i * x.tile} to"
    return kernel(x, times=times), (first, "twice" if factor else "left out")


@fault
def _diagonal(x: Call, kinds: str) -> Faulty:
    """Omits the tile on the diagonal; rows and keys have the same length."""
    which = f"the last visible tile of {x.tile} keys" if "dq" in kinds else f"the first visible tile of {x.tile}"
    return kernel(x, times=lambda kind, i, j: float(kind not in kinds or i != j)), (which, "left out")


@fault
def _stale(x: Call, kind: str) -> Faulty:
    number = x.rng.randrange(1, len(x.tiles(_side(kind))))
    return kernel(x, stale=(kind, number)), (f"{_side(kind)} {number * x.tile} to",)


@fault
def _summed_in_turns(x: Call) -> Faulty:
    """Sums dk and dv of key head n over the query heads n, n + N2, ..."""
    heads = x.k.shape[1]
    order = torch.arange(x.q.shape[1]).view(x.group, heads).T.reshape(-1)
    grads = kernel(x)
    of = kernel(replace(x, q=x.q[:, order], dout=x.dout[:, order]), given=tuple(t[:, order] for t in x.forward()))
    return grads | {name: of[name] for name in ("dk", "dv")}, ("h % N2 = n",)


@fault
def _exchanged(x: Call, one: str, other: str) -> Faulty:
    grads = kernel(x)
    return grads | {one: grads[other], other: grads[one]}, (f"{one} and {other}",)


@fault
def _edited(x: Call, name: str, edit: Edit) -> Faulty:
    """Changes one gradient after it is computed."""
    grads = kernel(x)
    word = edit(grads[name], x.rng)
    return grads, (word,)


_NEXT_HEAD = moved(lambda t: t.roll(-1, 1), "head")
_LOG2E = 1 / math.log(2)
# Faults by name: (the fault, names of the mistakes that describe it, properties of calls that can have it).
FAULTS: dict[str, tuple[Callable[[Call], Faulty], tuple[str, ...], dict[str, Any]]] = {
    "no delta": (_fixed(delta="missing"), ("delta-missing",), {}),
    "delta is added": (_fixed("added", delta="added"), ("delta-wrong",), {}),
    "delta of the next head": (_fixed("next head", delta="next"), ("delta-wrong",), {"grouped": True}),
    "P without the mask": (_fixed(masked=False), ("mask-ignored",), {"causal": True, "square": True}),
    "dq lacks the scale": (_scaled(1.0, None, "not at all"), ("gradient-scale",), {}),
    "dk lacks the scale": (_scaled(None, 1.0, "not at all"), ("gradient-scale",), {}),
    "dq and dk lack the scale": (_scaled(1.0, 1.0, "not at all"), ("gradient-scale",), {}),
    "dq times log2(e)": (_scaled(_LOG2E, None, "times log2(e)"), ("gradient-scale",), {}),
    "a head of the group alone": (_of_heads(lambda x: _one(x, 1.0, 0.0)), ("group-sum",), {"grouped": True}),
    "a head of the group left out": (_of_heads(lambda x: _one(x, 0.0, 1.0)), ("group-sum",), {"group": 4}),
    "the mean of a group": (_of_heads(_mean), ("group-sum",), {"grouped": True}),
    "dv without 1 / keep_prob": (_fixed(unkept="dv"), ("dropout-scale",), {"dropout": True}),
    "dP without 1 / keep_prob": (_fixed(unkept="dp"), ("dropout-scale",), {"dropout": True}),
    "dq without its last tile": (_tile("dq", 0.0, "last"), ("update-lost", "tile-skipped"), {"causal": False}),
    "dq without a tile": (_tile("dq", 0.0, "inner"), ("update-lost",), {}),
    "a tile twice in dq": (_tile("dq", 2.0, "inner"), ("update-twice",), {}),
    "dk and dv without a tile": (_tile("dk dv", 0.0, "inner"), ("update-lost",), {"causal": False}),
    "dv without its last tile": (_tile("dv", 0.0, "last"), ("update-lost",), {}),
    "a tile twice in dk": (_tile("dk", 2.0, "inner"), ("update-twice",), {"causal": False}),
    "a lost addition to dq": (_update("dq", 0.0), ("update-lost",), {"square": True}),
    "a lost addition to dk": (_update("dk", 0.0), ("update-lost",), {"square": True}),
    "an addition twice to dv": (_update("dv", 2.0), ("update-twice",), {"square": True}),
    "dk and dv are stored, not added": (_tile("dk dv", 1.0, "last", 0.0), ("update-alone", "update-lost"), {}),
    "dq is stored, not added": (_tile("dq", 1.0, "last", 0.0), ("update-alone", "update-lost"), {"causal": False}),
    "dq without the diagonal": (_diagonal("dq"), ("update-lost",), {"causal": True, "square": True}),
    "dk and dv without the diagonal": (_diagonal("dk dv"), ("update-lost",), {"causal": True, "square": True}),
    "dq with stale keys": (_stale("dq"), ("update-stale",), {"causal": False}),
    "dv with stale rows of dout": (_stale("dv"), ("update-stale",), {"causal": False}),
    "the sink's gradient has the other sign": (
        _edited("dsink", moved(lambda t: -t, "sign")),
        ("sink-gradient",),
        {"sink": True},
    ),
    "the sink's gradient times 2": (
        _edited("dsink", moved(lambda t: 2 * t, "2 times")),
        ("sink-gradient",),
        {"sink": True},
    ),
    "dq and dk exchanged": (_exchanged("dq", "dk"), ("gradients-exchanged",), {"group": 1, "square": True}),
    "dk and dv exchanged": (_exchanged("dk", "dv"), ("gradients-exchanged",), {}),
    "dv of another head": (_edited("dv", _NEXT_HEAD), ("rows-moved",), {}),
    "dq of another head": (_edited("dq", _NEXT_HEAD), ("rows-moved",), {}),
    "rows of dk shifted": (_edited("dk", shifted_rows(1, 16)), ("rows-moved",), {}),
    "a head of dv times a factor": (_edited("dv", head_factor), ("output-factor",), {}),
    "the last rows of dk are zeros": (_edited("dk", zero_tail), ("rows-unwritten", "tile-skipped"), {}),
    "heads in turns": (_fixed("h % N2", heads=("kv", lambda h, group: h)), ("gqa-order",), {"grouped": True}),
    "keys of the next head": (
        _fixed("keys of the", heads=("k", lambda h, group: h // group + 1)),
        ("head-offset",),
        {},
    ),
    "values of the next head": (
        _fixed("values of the", heads=("v", lambda h, group: h // group + 1)),
        ("head-offset",),
        {},
    ),
    "dk and dv of heads in turns": (_summed_in_turns(), ("gqa-order",), {"grouped": True}),
    "columns of dk rolled": (_edited("dk", rolled_columns), ("columns-order",), {}),
    "P not divided by the sum": (_fixed("not divided", total="missing"), ("probabilities-wrong",), {}),
    "P of the next head's statistics": (_fixed("next head", total="next"), ("probabilities-wrong",), {"grouped": True}),
    "P with 2^s for e^s": (_fixed("2^s for e^s", base=math.log(2)), ("probabilities-wrong",), {}),
    "no slope of the cap": (_fixed(sloped=False), ("softcap-slope",), {"softcap": True}),
}


def planted(name: str, seed: int) -> Planted:
    """Returns a call with the fault `name`."""
    program, names, wanted = FAULTS[name]
    x = drawn(1000 * seed + [*FAULTS].index(name), **wanted)
    grads, words = program(x)
    return x.captured(grads), names, words

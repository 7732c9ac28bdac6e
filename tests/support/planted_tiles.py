"""Simulates tiled kernels with typical faults, in plain torch: a loop over tiles of keys with an online softmax.

Shares no code with the judge. A seed determines the fault, its tile, head and rows, and the sizes.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from support.planted import Capture, Edit, Planted, fault, head_factor, moved, rolled_columns, shifted_rows, zero_tail

Tensor = torch.Tensor


@dataclass(frozen=True)
class Call:
    """A call of fusion_attention.attention, its kernel's tile size, and the random generator of faults."""

    q: Tensor  # [B, S1, N1, D]
    k: Tensor
    v: Tensor
    scale: float
    causal: bool
    tile: int
    rng: random.Random

    @property
    def inputs(self) -> dict[str, Any]:
        import fusion_attention as fa

        return {"q": self.q, "k": self.k, "v": self.v, "scale": self.scale} | (
            {"band": fa.Band.causal()} if self.causal else {}
        )

    def tiles(self) -> list[tuple[int, int]]:
        keys = self.k.shape[1]
        return [(a, min(a + self.tile, keys)) for a in range(0, keys, self.tile)]


def drawn(seed: int) -> Call:
    """Draws a call: sizes, dtype, heads and tile."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    dtype = rng.choice([torch.float32, torch.float16, torch.bfloat16])
    tile = rng.choice([16, 32, 64, 128])
    keys = rng.randint(2 * tile + 3, 4 * tile + 40)
    keys += keys % tile == 0  # the last tile is partial
    rows = keys if rng.random() < 0.5 else rng.randint(40, 150)
    group, dim = rng.choice([1, 2, 4]), rng.choice([32, 64, 80])

    def rows_of(count: int, heads: int) -> Tensor:
        return torch.randn(2, count, heads, dim, generator=generator).to(dtype)

    return Call(
        rows_of(rows, 2 * group), rows_of(keys, 2), rows_of(keys, 2), dim**-0.5 * rng.choice([1.0, 1.7]),
        rng.random() < 0.5, tile, rng,
    )  # fmt: skip


EVERY = -2


def kernel(
    x: Call,
    *,
    order: list[int] | None = None,
    skip: int | None = None,
    again: int | None = None,
    hidden: int | None = None,
    unscaled: str = "",
    base: float = 1.0,
    padded: bool = False,
    moved: tuple[int, str, int] = (-1, "", 0),
    exchanged: tuple[int, ...] = (),
    apart: str = "",
    change: Callable[[Call, Tensor, Tensor], tuple[Tensor, Tensor]] = lambda x, k, v: (k, v),
) -> Tensor:
    """Computes the output with float32 sums of weights in the dtype; every option is a fault.

    moved: (a tile or EVERY, "k", "v" or "kv", offset in keys from which it is read). exchanged: two tiles of values.
    change: of keys and values [B, N1, S2, D].
    """
    q, k, v = (t.transpose(1, 2).float() for t in (x.q, x.k, x.v))
    k, v = change(x, *(t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v)))
    row = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
    tiles = x.tiles()
    top = torch.full((*q.shape[:3], 1), -math.inf)
    total, out = torch.zeros_like(top), torch.zeros_like(q)
    partial = []
    for n in [*range(len(tiles))] if order is None else order:
        for _ in range(2 if n == again else 1):
            a, b = tiles[n]
            keys, values = k[:, :, a:b], v[:, :, a:b]
            if n == skip:
                continue
            if n and moved[0] in (n, EVERY):
                other = slice(a + moved[2], b + moved[2])
                keys = k[:, :, other] if "k" in moved[1] else keys
                values = v[:, :, other] if "v" in moved[1] else values
            if n in exchanged:
                other = [exchanged[1], exchanged[0]][exchanged.index(n)]
                values = v[:, :, slice(*tiles[other])]
            scores = q @ keys.mT * (x.scale * base)
            unseen = torch.arange(a, b) > row if x.causal else torch.zeros(b - a, dtype=torch.bool)
            if hidden is not None:
                unseen = unseen | (torch.arange(a, b) == hidden)
            scores = scores.masked_fill(unseen, -math.inf)
            here = scores.amax(-1, keepdim=True)
            new = here if apart else torch.maximum(top, here)
            shift = new.masked_fill(new == -math.inf, 0)
            weights, fade = (scores - shift).exp(), (top - shift).exp()
            product, added = weights.to(x.q.dtype).float() @ values, weights.sum(-1, keepdim=True)
            partial.append((product, added))
            if padded and b - a < x.tile:
                added = added + (x.tile - (b - a)) * (-shift).exp()
            out = out * (1 if "out" in unscaled else fade) + product
            total = total * (1 if "sum" in unscaled else fade) + added
            top = new
    result = out / total.where(total != 0, 1.0)  # rows without a key are zeros
    if apart:
        each = torch.stack([(o / t).nan_to_num(0.0) for o, t in partial])
        some = torch.stack([t > 0 for _, t in partial]).sum(0)
        result = each.sum(0) / (some.clamp(min=1) if apart == "mean" else 1)
    return result.transpose(1, 2).to(x.q.dtype)


# ------------------------------------------------------------------------------------------------------------- faults

Words = tuple[str, ...]  # texts of the fault's parameters in the diagnosis
Faulty = tuple[Tensor, Words]  # a wrong output, and the words


@fault
def _fixed(x: Call, word: str, **options: Any) -> Faulty:
    """Makes a fault without drawn parameters; word: its description, with {tile} for the tile size."""
    return kernel(x, **options), (word.format(tile=x.tile),)


@fault
def _at_tile(x: Call, which: str, word: str, run: Callable[[Call, int], Tensor]) -> Faulty:
    """Makes a fault in one tile; which: "first", "inner" or "last"."""
    last = len(x.tiles()) - 1
    number = {"first": 0, "last": last}.get(which, x.rng.randrange(1, last))
    partial = "the last, partial tile of", f" {x.tile}"
    return run(x, number), partial if which == "last" else (f"keys {number * x.tile} to", word)


def _stale(what: str) -> Callable[[Call], Faulty]:
    word = {"v": "the values", "k": "the keys", "kv": "keys and values"}[what]
    return _at_tile("inner", f"with {word} of the tile before", lambda x, n: kernel(x, moved=(n, what, -x.tile)))


@fault
def _late(x: Call, what: str, word: str) -> Faulty:
    return kernel(x, moved=(EVERY, what, -x.tile)), (f"every tile of {x.tile}", f"with {word} of the tile")


def _offset(what: str, word: str, by: int) -> Callable[[Call], Faulty]:
    return _at_tile("inner", f"with {word} from one key", lambda x, n: kernel(x, moved=(n, what, by)))


def _exchanged(x: Call) -> Faulty:
    number = x.rng.randrange(len(x.tiles()) - 2)
    return kernel(x, exchanged=(number, number + 1)), (f"keys {number * x.tile} to", "exchanged")


@fault
def _first(x: Call, order: str, word: str) -> Faulty:
    last = len(x.tiles()) - 1
    tiles = [*range(last, -1, -1)] if order == "reversed" else [last, *range(last)]
    return kernel(x, unscaled="out", order=tiles), (f"accumulator, key tiles of {x.tile}", word)


@fault
def _stored(x: Call, edit: Edit) -> Faulty:
    out = kernel(x)
    word = edit(out.transpose(1, 2), x.rng)
    return out, (word,)


def _neighbour(x: Call, t: Tensor) -> Tensor:
    return t.roll(x.q.shape[2] // x.k.shape[2], 1)


def _turned(t: Tensor) -> Tensor:
    """Returns rows [B, N, S2, D] with transposed tiles of D rows."""
    keys, size = t.shape[2:]
    squares = torch.nn.functional.pad(t, (0, 0, 0, -keys % size)).unflatten(2, (-1, size)).mT
    return squares.flatten(2, 3)[:, :, :keys]


def _zero_columns(out: Tensor, rng: random.Random) -> str:
    first = rng.randrange(0, out.shape[3] // 16) * 16
    out[..., first : first + 16] = 0
    return f"columns {first} to {first + 15}"


_HALVES = moved(lambda out: out.roll(out.shape[3] // 2, 3), "halves exchanged")
_TILE_TWICE = moved(lambda out: torch.cat((out[:, :, :-16], out[:, :, -32:-16]), 2), "row r - 16")
_HEAD_TWICE = moved(lambda out: torch.cat((out[:, :1], out[:, :1], out[:, 2:]), 1), "head")
_REVERSED_HEADS, _OTHER_SEQUENCE = moved(lambda out: out.flip(1), "head"), moved(lambda out: out.flip(0), "sequence b")
_TILES = "key tiles of {tile}"
# Faults by name: (the fault, names of the mistakes that describe it).
FAULTS: dict[str, tuple[Callable[[Call], Faulty], tuple[str, ...]]] = {
    "the accumulator is not rescaled": (_fixed(f"accumulator, {_TILES}", unscaled="out"), ("rescale-missing",)),
    "the sum is not rescaled": (_fixed(f"sum of weights, {_TILES}", unscaled="sum"), ("rescale-missing",)),
    "nothing is rescaled": (
        _fixed(f"accumulator and sum of weights, {_TILES}", unscaled="out sum"), ("rescale-missing",)
    ),
    "softmaxes of tiles are added": (_fixed(f"sum of {_TILES}", apart="sum"), ("tile-softmax",)),
    "softmaxes of tiles are averaged": (_fixed(f"mean of {_TILES}", apart="mean"), ("tile-softmax",)),
    "padding counts as zeros": (_fixed(" {tile}", padded=True), ("padding-weighed",)),
    "2^s for e^s": (_fixed("2^s for e^s", base=math.log(2)), ("exponent-base",)),
    "e^(s log2 e)": (_fixed("e^(s log2 e) for e^s", base=1 / math.log(2)), ("exponent-base",)),
    "the first tile left out": (_at_tile("first", "left out", lambda x, n: kernel(x, skip=n)), ("tile-left-out",)),
    "an inner tile left out": (_at_tile("inner", "left out", lambda x, n: kernel(x, skip=n)), ("tile-left-out",)),
    "the last tile left out": (_at_tile("last", "", lambda x, n: kernel(x, skip=n)), ("tile-skipped",)),
    "the last key left out": (
        lambda x: (kernel(x, hidden=x.k.shape[1] - 1), ()),
        ("tile-left-out", "window-off-by-one", "length-off-by-one"),
    ),
    "a tile counted twice": (_at_tile("inner", "twice", lambda x, n: kernel(x, again=n)), ("tile-twice",)),
    "stale values": (_stale("v"), ("tile-stale",)),
    "stale keys": (_stale("k"), ("tile-stale",)),
    "stale keys and values": (_stale("kv"), ("tile-stale",)),
    "every tile of keys is stale": (_late("k", "the keys"), ("tile-stale",)),
    "every tile of values is stale": (_late("v", "the values"), ("tile-stale",)),
    "values a key too early": (_offset("v", "the values", -1), ("tile-stale",)),
    "keys and values a key too late": (_offset("kv", "keys and values", 1), ("tile-stale",)),
    "tiles of values exchanged": (_exchanged, ("tile-stale",)),
    "the edge tile first, the accumulator not rescaled": (_first("last", ""), ("rescale-missing",)),
    "backwards, the accumulator not rescaled": (_first("reversed", "from the last"), ("rescale-missing",)),
    "values of another head": (_fixed("values of", change=lambda x, k, v: (k, _neighbour(x, v))), ("head-offset",)),
    "keys of another head": (_fixed("keys of", change=lambda x, k, v: (_neighbour(x, k), v)), ("head-offset",)),
    "tiles of keys transposed": (_fixed("keys,", change=lambda x, k, v: (_turned(k), v)), ("tile-transposed",)),
    "tiles of values transposed": (_fixed("values,", change=lambda x, k, v: (k, _turned(v))), ("tile-transposed",)),
    "values of another sequence": (_fixed("values:", change=lambda x, k, v: (k, v.flip(0))), ("sequence-offset",)),
    "keys of another sequence": (_fixed("keys:", change=lambda x, k, v: (k.flip(0), v)), ("sequence-offset",)),
    "a head times a factor": (_stored(head_factor), ("output-factor",)),
    "the last rows are zeros": (_stored(zero_tail), ("rows-unwritten",)),
    "16 columns are zeros": (_stored(_zero_columns), ("rows-unwritten",)),
    "halves of columns exchanged": (_stored(_HALVES), ("columns-order",)),
    "columns rolled": (_stored(rolled_columns), ("columns-order",)),
    "a tile of rows stored twice": (_stored(_TILE_TWICE), ("rows-moved",)),
    "a head is a copy of another": (_stored(_HEAD_TWICE), ("rows-moved",)),
    "heads in reverse": (_stored(_REVERSED_HEADS), ("rows-moved",)),
    "rows shifted": (_stored(shifted_rows(1, -1, 16)), ("rows-moved",)),
    "sequences exchanged": (_stored(_OTHER_SEQUENCE), ("rows-moved",)),
}  # fmt: skip


def planted(name: str, seed: int) -> Planted:
    """Returns a call with the fault `name`."""
    program, names = FAULTS[name]
    x = drawn(1000 * seed + [*FAULTS].index(name))
    out, words = program(x)
    return Capture("attention", x.inputs, {"out": out}), names, words


def right(seed: int) -> Capture:
    """Returns a call with correct results, computed in another order of tiles."""
    x = drawn(seed)
    order = [*range(len(x.tiles()))]
    x.rng.shuffle(order)
    return Capture("attention", x.inputs, {"out": kernel(x, order=order)})

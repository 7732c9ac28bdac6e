"""Tiled kernels with the faults that kernels have, in plain torch: a loop over tiles of keys with an online softmax.

Shares nothing with the judge. A fault is drawn by a seed, with its tile, head, rows and sizes.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Tensor = torch.Tensor


@dataclass(frozen=True)
class Call:
    """A call of fusion_attention.attention, its kernel's tile of keys, and values that faults draw from."""

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
    """Sizes, dtype, heads and tile of a call."""
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


def _prepared(x: Call) -> tuple[Tensor, Tensor, Tensor]:
    group = x.q.shape[2] // x.k.shape[2]
    q, k, v = (t.transpose(1, 2).double() for t in (x.q, x.k, x.v))
    return q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)


def kernel(
    x: Call,
    *,
    order: list[int] | None = None,
    skip: int | None = None,
    again: int | None = None,
    stale: tuple[int, str] | None = None,
    hidden: int | None = None,
    unscaled: str = "",
    base: float = 1.0,
    padded: bool = False,
    apart: str = "",
    change: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]] | None = None,
) -> Tensor:
    """The output rows, in float32 sums over weights of the dtype; every argument is a fault."""
    q, k, v = _prepared(x)
    if change is not None:
        q, k, v = change(q, k, v)
    q, k, v = (t.float() for t in (q, k, v))
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
            if stale is not None and stale[0] == n:
                before = slice(a - x.tile, b - x.tile)
                keys = k[:, :, before] if "k" in stale[1] else keys
                values = v[:, :, before] if "v" in stale[1] else values
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

Fault = Callable[[Call], Tensor]


def _inner(x: Call) -> int:
    return x.rng.randrange(1, len(x.tiles()) - 1)


def _stored(edit: Callable[[Tensor, Call], None]) -> Fault:
    def fault(x: Call) -> Tensor:
        out = kernel(x).clone()
        edit(out, x)
        return out

    return fault


def _neighbour(which: str) -> Fault:
    def change(q: Tensor, k: Tensor, v: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
        return q, k.roll(group, 1) if "k" in which else k, v.roll(group, 1) if "v" in which else v

    return lambda x: kernel(x, change=lambda q, k, v: change(q, k, v, q.shape[1] // x.k.shape[2]))


def _other_sequence(which: str) -> Fault:
    return lambda x: kernel(
        x, change=lambda q, k, v: (q, k.flip(0) if "k" in which else k, v.flip(0) if "v" in which else v)
    )


def _half_head(out: Tensor, x: Call) -> None:
    out[:, :, x.rng.randrange(out.shape[2])] *= x.rng.choice([0.5, 2.0, -1.0])


def _zero_tail(out: Tensor, x: Call) -> None:
    out[:, out.shape[1] // 16 * 16 - 16 :] = 0


def _zero_columns(out: Tensor, x: Call) -> None:
    first = x.rng.randrange(0, out.shape[3] // 16) * 16
    out[..., first : first + 16] = 0


def _exchange_halves(out: Tensor, x: Call) -> None:
    out.copy_(out.roll(out.shape[3] // 2, 3))


def _roll_columns(out: Tensor, x: Call) -> None:
    out.copy_(out.roll(x.rng.choice([1, 4, 8]), 3))


def _copy_tile(out: Tensor, x: Call) -> None:
    out[:, -16:] = out[:, -32:-16].clone()


def _copy_head(out: Tensor, x: Call) -> None:
    out[:, :, 1] = out[:, :, 0].clone()


def _reverse_heads(out: Tensor, x: Call) -> None:
    out.copy_(out.flip(2))


def _shift_rows(out: Tensor, x: Call) -> None:
    out.copy_(out.roll(x.rng.choice([1, -1, 16]), 1))


def _swap_sequences(out: Tensor, x: Call) -> None:
    out.copy_(out.flip(0))


# The fault, and the mistakes that name it.
FAULTS: dict[str, tuple[Fault, tuple[str, ...]]] = {
    "the accumulator is not rescaled": (lambda x: kernel(x, unscaled="out"), ("rescale-missing",)),
    "the sum is not rescaled": (lambda x: kernel(x, unscaled="sum"), ("rescale-missing",)),
    "nothing is rescaled": (lambda x: kernel(x, unscaled="out sum"), ("rescale-missing",)),
    "softmaxes of tiles are added": (lambda x: kernel(x, apart="sum"), ("tile-softmax",)),
    "softmaxes of tiles are averaged": (lambda x: kernel(x, apart="mean"), ("tile-softmax",)),
    "padding counts as zeros": (lambda x: kernel(x, padded=True), ("padding-weighed",)),
    "2^s for e^s": (lambda x: kernel(x, base=math.log(2)), ("exponent-base",)),
    "e^(s log2 e)": (lambda x: kernel(x, base=1 / math.log(2)), ("exponent-base",)),
    "the first tile left out": (lambda x: kernel(x, skip=0), ("tile-left-out",)),
    "an inner tile left out": (lambda x: kernel(x, skip=_inner(x)), ("tile-left-out",)),
    "the last tile left out": (lambda x: kernel(x, skip=len(x.tiles()) - 1), ("tile-skipped",)),
    "the last key left out": (lambda x: kernel(x, hidden=x.k.shape[1] - 1), ("tile-left-out", "window-off-by-one")),
    "a tile counted twice": (lambda x: kernel(x, again=_inner(x)), ("tile-twice",)),
    "stale values": (lambda x: kernel(x, stale=(_inner(x), "v")), ("tile-stale",)),
    "stale keys": (lambda x: kernel(x, stale=(_inner(x), "k")), ("tile-stale",)),
    "stale keys and values": (lambda x: kernel(x, stale=(_inner(x), "kv")), ("tile-stale",)),
    "values of another head": (_neighbour("v"), ("head-offset",)),
    "keys of another head": (_neighbour("k"), ("head-offset",)),
    "values of another sequence": (_other_sequence("v"), ("sequence-offset",)),
    "keys of another sequence": (_other_sequence("k"), ("sequence-offset",)),
    "a head times a factor": (_stored(_half_head), ("output-factor",)),
    "the last rows are zeros": (_stored(_zero_tail), ("rows-unwritten",)),
    "16 columns are zeros": (_stored(_zero_columns), ("rows-unwritten",)),
    "halves of columns exchanged": (_stored(_exchange_halves), ("columns-order",)),
    "columns rolled": (_stored(_roll_columns), ("columns-order",)),
    "a tile of rows stored twice": (_stored(_copy_tile), ("rows-moved",)),
    "a head is a copy of another": (_stored(_copy_head), ("rows-moved",)),
    "heads in reverse": (_stored(_reverse_heads), ("rows-moved",)),
    "rows shifted": (_stored(_shift_rows), ("rows-moved",)),
    "sequences exchanged": (_stored(_swap_sequences), ("rows-moved",)),
}


def reordered(x: Call) -> Tensor:
    """A right result whose tiles come in another order."""
    order = [*range(len(x.tiles()))]
    x.rng.shuffle(order)
    return kernel(x, order=order)

"""Tables of the pages of aclnnCompressor and aclnnCompressorGrad."""

from collections.abc import Iterator, Sequence
from functools import wraps
from itertools import accumulate
from typing import Any

import torch

from clauses.checks import NULL, Args, Page, computes, filled, forbids, merged, prototype, refuses, taken_over
from clauses.derived import of_parameters
from clauses.dtype_abbreviations import BF, I32, H
from clauses.error_bounds import Near, cat, near, softmax, stack
from clauses.values import draw, ints, longer, widened

FORWARD = prototype("""
    aclTensor x wkv wgate stateCacheRef=state_cache ape stateBlockTable cuSeqlens seqused startPos
    int64_t   cmpRatio coff cacheMode stateCacheStrideDim0
    bool      gradEnabled
    aclTensor cmpKv softmaxScore kv
""")
GRAD = prototype("""
    aclTensor x wkv wgate dCmpKv softmaxScore kv cuSeqlens seqused startPos
    int64_t   cmpRatio coff
    aclTensor dX dWkv dWgate dApe
""")
SIZE = 16  # rows of a block of the cache
PACKED: dict[str, Any] = {"packed": True, "rows": (9, 6)}


def base(
    rows: Sequence[int] = (9, 9), packed: bool = False, start: Sequence[int] | None = None, coff: int = 2,
    ratio: int = 4, mode: int = 1, saves: bool = True, width: int = 1024, D: int = 128, dtype: torch.dtype = H,
) -> Args:  # fmt: skip
    """Makes a legal call. width: elements of a row of x; saves: request the tensors that the gradient needs."""
    total, items, channels_of_all = sum(rows), len(rows), coff * D
    x = draw(total, width, d=dtype) / 16
    windows = (min(total, total // ratio + items),) if packed else (items, -(-rows[0] // ratio))
    return filled(
        FORWARD,
        x=x if packed else x.unflatten(0, (items, -1)),
        wkv=draw(channels_of_all, width, d=dtype) / 16,
        wgate=draw(channels_of_all, width, d=dtype) / 16,
        stateCacheRef=draw(2 * items + 1, 64 if mode == 2 else SIZE, 2 * channels_of_all),
        ape=draw(ratio, channels_of_all),
        stateBlockTable=torch.arange(1, 2 * items + 1, dtype=I32)[: items if mode == 2 else None].view(
            (items,) if mode == 2 else (items, 2)
        ),
        cuSeqlens=torch.tensor([*accumulate(rows, initial=0)], dtype=I32) if packed else None,
        startPos=None if start is None else torch.tensor(start, dtype=I32),
        cmpRatio=ratio,
        coff=coff,
        cacheMode=mode,
        stateCacheStrideDim0=0,
        gradEnabled=saves,
        cmpKv=torch.empty(*windows, D, dtype=dtype),
        softmaxScore=torch.empty(*windows, coff * ratio, D) if saves else None,
        kv=torch.empty(*windows, coff * ratio, D) if saves else None,
    )


def spans(args: Args) -> Iterator[tuple[int, int, int, int]]:
    """Yields (first row of x, number of rows, position of the first row, first result window) of every sequence."""
    ends, x, window = args["cuSeqlens"], args["x"], 0
    first = ends.tolist() if ends is not None else [b * x.shape[1] for b in range(len(x) + 1)]
    for b in range(len(first) - 1):
        used = first[b + 1] - first[b] if args["seqused"] is None else int(args["seqused"][b])
        start = 0 if args["startPos"] is None else int(args["startPos"][b])
        at = window if ends is not None else b * -(-x.shape[1] // args["cmpRatio"])
        yield first[b], used, start, at
        window += (start + used) // args["cmpRatio"] - start // args["cmpRatio"]


def windows_of(args: Args, D: int) -> Iterator[tuple[int, Near, Near]]:
    """Yields (index in results, rows, gates [coff * ratio, D]) of every complete window; absent rows have gate -inf."""
    x, ratio, coff = args["x"].flatten(0, -2), args["cmpRatio"], args["coff"]
    rows, gates = (near(x) @ near(args[name]).T for name in ("wkv", "wgate"))
    for b, (first, tokens, start, at) in enumerate(spans(args)):

        def token(p: int, half: int, b: int = b, first: int = first, start: int = start) -> tuple[Near, Near]:
            channels = slice(half * D, (half + 1) * D)
            if p < 0:
                return near(torch.zeros(D)), near(torch.full((D,), -torch.inf))
            if p < start:  # from the cache, whose gates include ape
                page = (
                    args["stateBlockTable"].view(-1)[b]
                    if args["cacheMode"] == 2
                    else args["stateBlockTable"][b, p // SIZE]
                )
                cached = args["stateCacheRef"][page, p % args["stateCacheRef"].shape[1]]
                values, scores = cached.chunk(2)
                return near(values[channels]), near(scores[channels])
            row = first + p - start
            return rows[row, channels], gates[row, channels] + near(args["ape"][p % ratio, channels])

        for n, w in enumerate(range(start // ratio, (start + tokens) // ratio)):
            pairs = [token((w - coff + 1 + half) * ratio + i, half) for half in range(coff) for i in range(ratio)]
            yield at + n, stack([value for value, _ in pairs]), stack([gate for _, gate in pairs])


def alternating(rows: Near, coff: int) -> Near:
    """Interleaves the rows of the previous window and of the current window."""
    order = torch.arange(len(rows.value)).view(coff, -1).T.flatten()
    return rows[order]


def formula(args: Args) -> dict[str, Near]:
    """Computes a softmax per channel over the rows of a window, the weighted sum, and optionally weights and rows."""
    D, shape = args["cmpKv"].shape[-1], args["cmpKv"].shape
    count, every = shape[:-1].numel(), args["coff"] * args["cmpRatio"]
    out, score, saved = (
        near(torch.zeros(count, D)),
        near(torch.zeros(count, every, D)),
        near(torch.zeros(count, every, D)),
    )
    for at, rows, gates in windows_of(args, D):
        where = slice(at, at + 1)
        present = gates.value > -torch.inf
        weights = softmax(gates.only(present, 0).T, present.T)[0].only(present.T, 0)
        out.prepare(where, (weights * rows.T).sum(1))
        score.prepare(where, alternating(weights.T, args["coff"]))
        saved.prepare(where, alternating(rows, args["coff"]))
    results = {"cmpKv": out.rounded(args["x"].dtype)}
    results |= {"softmaxScore": score, "kv": saved} if args["gradEnabled"] else {}
    return {name: t.reshape(tuple(args[name].shape)) for name, t in results.items()}


LENGTHS = {
    "Sequences are padded or packed; seqused and startPos say which rows count (ruling 44).": [
        *(computes(coff=n, **over) for n in (1, 2) for over in ({}, PACKED)),
        *(computes(dtype=d) for d in (H, BF)),
        computes(start=(6, 3)),
        computes(start=(5, 0), coff=1, **PACKED),
        computes(seqused=ints(9, 2, d=I32), start=(6, 3)),
        computes(seqused=ints(0, 4, d=I32)),
        computes(ratio=2),
        forbids("cuSeqlens", cuSeqlens=ints(0, 9, 999, d=I32), **PACKED),
        forbids("cuSeqlens", cuSeqlens=ints(1, 9, 15, d=I32), **PACKED),
        *(forbids("seqused", seqused=ints(*n, d=I32)) for n in ((10, 2), (-1, 2), (1,))),
        *(forbids("startPos", startPos=ints(*n, d=I32)) for n in ((-1, 0), (0,))),
    ],
    "x and weights have as many elements; weights coff * D rows, results a row for every window.": [
        *(forbids(name, **{name: widened}) for name in ("wkv", "wgate")),
        forbids("x", width=512),
        *(forbids("wkv", D=n) for n in (64, 256)),
    ],
}
CLAUSES = merged(
    LENGTHS,
    of_parameters(
        "x wkv wgate stateCacheRef ape cmpKv",
        "wkv wgate cmpKv",
        "ape stateCacheRef softmaxScore kv",
        "",
        {"cmpRatio": (0, 129), "coff": (0, 3), "cacheMode": (0, 3)},
        "x wkv wgate cmpKv softmaxScore kv",
        workspace=False,
        repeats=False,
    ),
    {
        "softmaxScore and kv are written where gradEnabled says so (ruling 44).": [
            *(computes(saves=False, coff=n) for n in (1, 2)),
            *(refuses(NULL, name, **{name: None}) for name in ("softmaxScore", "kv")),
            *(forbids(name, **{name: longer}) for name in ("softmaxScore", "kv")),
            forbids("softmaxScore", cmpKv=longer),
            computes(saves=False, gradEnabled=False),
        ],
        "In cacheMode 1 block p // size of a sequence has row p, in 2 a ring has it (ruling 44).": [
            computes(mode=2, start=(6, 3)),
            forbids("stateBlockTable", stateBlockTable=ints(1, 99, d=I32), mode=2, start=(6, 3)),
            forbids("stateCacheRef", stateCacheRef=widened),
            forbids("ape", ape=widened),
            computes(stateCacheStrideDim0=7),
        ],
    },
)
PAGE = Page("aclnnCompressor", FORWARD, base, formula, CLAUSES)


@wraps(base)
def grad_base(**over: Any) -> Args:
    a = base(**over)
    return taken_over(
        GRAD,
        a,
        dCmpKv=draw(*a["cmpKv"].shape, d=a["x"].dtype),
        **{"d" + name.title(): torch.empty_like(a[name]) for name in ("x", "wkv", "wgate", "ape")},
    )


def finish(args: Args, changed: frozenset[str]) -> None:
    """Sets softmaxScore to random numbers that sum to 1 in every channel, and kv to random rows."""
    if args["softmaxScore"] is not None and "softmaxScore" not in changed:
        args["softmaxScore"] = draw(*args["softmaxScore"].shape).softmax(-2)
    if args["kv"] is not None and "kv" not in changed:
        args["kv"] = draw(*args["kv"].shape)


def gradients(args: Args) -> dict[str, Near]:
    """dKr = W dC, dZ = W (dC Kr - sum W dC Kr), by token; then products with x and with the weights."""
    x, ratio, coff, dtype = args["x"].flatten(0, -2), args["cmpRatio"], args["coff"], args["x"].dtype
    D = args["dCmpKv"].shape[-1]
    upstream, weights, rows = (
        near(args[name].reshape(-1, *shape)) for name, shape in
        (("dCmpKv", (D,)), ("softmaxScore", (coff * ratio, D)), ("kv", (coff * ratio, D)))
    )  # fmt: skip
    zero = near(torch.zeros(D))
    d_rows, d_gates = [[cat([zero] * coff)] * len(x) for _ in range(2)]
    d_ape = near(torch.zeros(ratio, coff * D))
    for first, tokens, start, at in spans(args):
        closed = range(start // ratio, (start + tokens) // ratio)
        slopes = {}
        for n, w in enumerate(closed):
            weighted = weights[at + n] * upstream[at + n]
            total = (weighted * rows[at + n]).sum(0)
            slopes[w] = weighted, weights[at + n] * (upstream[at + n] * rows[at + n] - total)
        for i in range(tokens):
            p = start + i
            for side, target in enumerate((d_rows, d_gates)):
                halves = [slopes[w][side][p % ratio * coff + half] if (w := p // ratio + coff - 1 - half) in slopes
                          else zero for half in range(coff)]  # fmt: skip
                target[first + i] = cat(halves)
            place = near(torch.eye(ratio)[:, p % ratio : p % ratio + 1])
            d_ape = d_ape + place @ d_gates[first + i].reshape((1, -1))
    d_kv, d_z = (stack(t).rounded(dtype) for t in (d_rows, d_gates))
    d_x = d_kv @ near(args["wkv"]) + d_z @ near(args["wgate"])
    results = {"dX": d_x, "dWkv": d_kv.T @ near(x), "dWgate": d_z.T @ near(x), "dApe": d_ape}
    return {name: t.rounded(args[name].dtype).reshape(tuple(args[name].shape)) for name, t in results.items()}


GRAD_CLAUSES = merged(
    LENGTHS,
    of_parameters(
        "x wkv wgate dCmpKv softmaxScore kv dX dWkv dWgate dApe",
        "wkv wgate dCmpKv dX dWkv dWgate",
        "softmaxScore kv dApe",
        "",
        {"cmpRatio": (0, 129), "coff": (0, 3)},
        "x wkv wgate dCmpKv dX dWkv dWgate dApe",
        workspace=False,
        repeats=False,
    ),
    {
        "Gradients have the shapes of what they are of.": [
            *(forbids(name, **{name: widened}) for name in ("dWkv", "dWgate", "dApe", "dCmpKv", "softmaxScore", "kv")),
            *(forbids(name, **{name: longer}) for name in ("dApe", "dCmpKv", "softmaxScore", "kv")),
            *(forbids("dWgate", **{name: of}) for name, of in (("dX", widened), ("dWkv", longer))),
        ],
    },
)
GRAD_PAGE = Page("aclnnCompressorGrad", GRAD, grad_base, gradients, GRAD_CLAUSES, finish)

"""Table of the page of aclnnSparseFlashMla: the forms of A2 and A3, and lists of keys."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch

from clauses.checks import (
    INVALID,
    NULL,
    TILING,
    Args,
    Page,
    computes,
    filled,
    forbids,
    merged,
    prototype,
    refuses,
    repeats,
)
from clauses.derived import of_parameters
from clauses.dtype_abbreviations import BF, F32, F64, I32, I64, H
from clauses.error_bounds import Near, cat, near, softmax, stack
from clauses.selected_key_helpers import flat
from clauses.values import GENERATOR, deeper, draw, drawn, fractal, ints, longer, swapped, to, widened, zeros

PROTOTYPE = prototype("""
    aclTensor q oriKv cmpKv oriSparseIndices cmpSparseIndices oriBlockTable cmpBlockTable cuSeqlensQ
    aclTensor cuSeqlensOriKv cuSeqlensCmpKv sequsedQ sequsedOriKv sequsedCmpKv cmpResidualKv oriTopkLength
    aclTensor cmpTopkLength sinks metadata
    double    softmaxScale
    int64_t   cmpRatio oriMaskMode cmpMaskMode oriWinLeft oriWinRight
    char      layoutQ layoutKv
    int64_t   topkValueMode
    bool      returnSoftmaxLse
    aclTensor attnOut softmaxLseOut
""")
SIDES = ("Q", "OriKv", "CmpKv")
ENTRIES = 8  # slots of a list


def base(
    layout: str = "TND",
    rows: Sequence[int] = (3, 5),
    tokens: Sequence[int] = (9, 14),
    N: int = 4,
    D: int = 512,
    ratio: int = 4,
    kind: str = "chosen",
    dtype: torch.dtype = H,
    mode: int = 4,
    window: tuple[int, int] = (5, 0),
    saves: bool = True,
) -> Args:
    """Makes a legal call of attention to a window and to compressed keys.

    Args:
        rows, tokens: number of queries and of keys of every sequence; BSND: equal numbers.
        kind: "window", without compressed keys; "all" visible compressed keys; "chosen" by a list; "keys": lists of
            uncompressed keys, in mode 0.
        mode: mask mode of the uncompressed keys; window: keys before and after a row, in mode 4.
        saves: request softmaxLseOut.
    """
    compressed = [n // ratio for n in tokens]
    lengths = (rows, tokens, compressed)

    def drawn_rows(side: int, heads: int) -> torch.Tensor:
        t = draw(sum(lengths[side]), heads, D, d=dtype)
        return t if layout == "TND" else t.unflatten(0, (len(rows), -1))

    has, total, packed = kind not in ("window", "keys"), sum(rows), layout == "TND"
    mode = 0 if kind == "keys" else mode
    query, (chosen, named, counts) = drawn_rows(0, N), lists_of(rows, tokens, compressed, ratio)
    ends = {f"cuSeqlens{side}": [*accumulate(n, initial=0)] for side, n in zip(SIDES, lengths, strict=True)}
    if not has:
        ends.pop("cuSeqlensCmpKv")
    left, right = window if mode == 4 else (-1, -1)
    return filled(
        PROTOTYPE,
        q=query,
        oriKv=drawn_rows(1, 1),
        cmpKv=drawn_rows(2, 1) if has else None,
        **{
            name: None if kind != of else t if packed else t.unflatten(0, (len(rows), -1))
            for name, of, t in (
                ("cmpSparseIndices", "chosen", chosen),
                ("oriSparseIndices", "keys", named),
                ("oriTopkLength", "keys", counts),
            )
        },
        **{name: torch.tensor(values, dtype=I32) for name, values in ends.items() if packed},
        cmpResidualKv=torch.tensor([n % ratio for n in tokens], dtype=I32) if has else None,
        sinks=draw(N),
        softmaxScale=0.04,
        cmpRatio=ratio if has else 1,
        oriMaskMode=mode,
        cmpMaskMode=3 if has else 0,
        oriWinLeft=left,
        oriWinRight=right,
        layoutQ=layout,
        layoutKv=layout,
        topkValueMode=1,
        returnSoftmaxLse=saves,
        attnOut=torch.empty_like(query),
        softmaxLseOut=torch.empty((1, total, N) if packed else (len(rows), 1, rows[0], N))
        if saves
        else torch.empty(0, dtype=F32),
    )


def lists_of(
    rows: Sequence[int], tokens: Sequence[int], compressed: Sequence[int], ratio: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns lists of visible compressed keys, lists of keys, and the lengths of the latter."""
    total, chosen = sum(rows), torch.full((sum(rows), 1, ENTRIES), -1, dtype=I32)
    starts = list(accumulate(rows, initial=0))
    for b, count in enumerate(rows):
        for i in range(count):
            entries = torch.randperm(bound(i, count, tokens[b], compressed[b], ratio), generator=GENERATOR)[:3]
            chosen[starts[b] + i, 0, : len(entries)] = entries.to(I32)
    named = torch.cat([torch.randint(0, max(n, 1), (count, 1, ENTRIES), generator=GENERATOR)
                       for n, count in zip(tokens, rows, strict=True)]).to(I32)  # fmt: skip
    counts = torch.randint(0, ENTRIES + 1, (total, 1), generator=GENERATOR).to(I32)
    return chosen, named, counts


def bound(row: int, rows: int, tokens: int, compressed: int, ratio: int) -> int:
    """Returns the number of compressed keys that a row sees in a sequence of `tokens` keys."""
    return min(max((tokens - rows + row + 1) // ratio, 0), compressed)


def lengths_of(args: Args, side: int) -> list[tuple[int, int]]:
    """Returns (first row, number of rows) of every sequence of q, oriKv or cmpKv, with the batch axis flattened."""
    name, tensor = SIDES[side], args[("q", "oriKv", "cmpKv")[side]]
    used, ends = args[f"seqused{name}"], args[f"cuSeqlens{name}"]
    if tensor is None:
        return []
    room = ends.tolist() if tensor.dim() == 3 else [b * tensor.shape[1] for b in range(len(tensor) + 1)]
    counts = [b - a for a, b in pairwise(room)] if used is None else used.tolist()
    return list(zip(room, counts, strict=False))


def window_of(args: Args, row: int, rows: int, keys: int) -> tuple[int, int]:
    """Returns the first key of a row's window and the key after its end."""
    diagonal, far = keys - rows + row + 1, 1 << 30
    left, right = (far if args[name] < 0 else args[name] for name in ("oriWinLeft", "oriWinRight"))
    if args["oriMaskMode"] == 0:
        return 0, keys
    first, end = (0, diagonal) if args["oriMaskMode"] == 3 else (diagonal - left - 1, diagonal + right)
    return max(first, 0), min(max(end, 0), keys)


Entry = tuple[int, int, int]


def row_entries(args: Args, b: int, row: int, sides: list[list[tuple[int, int]]]) -> list[Entry]:
    """Returns (source, row in its tensor, slot in its list) of each key that a row reads; source 0: oriKv, 1: cmpKv."""
    (start, rows), (key, keys) = sides[0][b], sides[1][b]
    if args["oriSparseIndices"] is not None:
        count = int(args["oriTopkLength"].flatten()[start + row])
        named = args["oriSparseIndices"].flatten(0, -2)[start + row, :count].tolist()
        named = named[: named.index(-1)] if -1 in named else named
        return [(0, key + n, slot) for slot, n in enumerate(named)]
    read: list[Entry] = [(0, key + n, 0) for n in range(*window_of(args, row, rows, keys))]
    if args["cmpKv"] is not None:
        entry, count = sides[2][b]
        ratio, given = args["cmpRatio"], args["cmpResidualKv"]
        tokens = count * ratio + (0 if given is None else int(given[b]))
        visible = bound(row, rows, tokens, count, ratio)
        slots = list(range(visible))
        if args["cmpSparseIndices"] is not None:
            lists = flat(args["cmpSparseIndices"])[start + row, 0, :visible].tolist()
            slots = lists[: lists.index(-1)] if -1 in lists else lists
        read += [(1, entry + n, slot) for slot, n in enumerate(slots) if n < visible]
    return read


def keys_of(args: Args, read: Sequence[Entry]) -> torch.Tensor:
    """Returns the key rows [keys, D] of entries."""
    sources = [flat(args["oriKv"]), args["cmpKv"] if args["cmpKv"] is None else flat(args["cmpKv"])]
    return torch.stack([sources[source][at, 0] for source, at, _ in read])


def formula(args: Args) -> dict[str, Near]:
    """Computes a softmax over window, compressed keys and sink; rows without keys, and unused rows, are 0."""
    query, dtype = flat(args["q"]), args["q"].dtype
    sides = [lengths_of(args, side) for side in range(3)]
    sink, zero = near(args["sinks"][:, None]), near(torch.zeros(query.shape[1:]))
    outs, lses = [zero] * len(query), [near(torch.zeros(query.shape[1], 1))] * len(query)
    for b, (first, count) in enumerate(sides[0]):
        for i in range(count):
            read = row_entries(args, b, i, sides)
            if not read:
                continue
            keys = keys_of(args, read)
            scores = (near(query[first + i]) @ near(keys).T) * args["softmaxScale"]
            all_scores = cat([scores, sink], 1)
            p, top, total = softmax(all_scores, torch.ones_like(all_scores.value, dtype=torch.bool))
            outs[first + i] = p[:, :-1].rounded(dtype) @ near(keys)
            lses[first + i] = top + total.log()
    results = {"attnOut": stack(outs).rounded(dtype).reshape(tuple(args["attnOut"].shape))}
    if args["returnSoftmaxLse"]:
        results["softmaxLseOut"] = stack(lses).reshape(tuple(args["softmaxLseOut"].shape))
    return results


BSND = {"layout": "BSND", "rows": (4, 4), "tokens": (14, 14)}
KINDS = ("window", "all", "chosen")
ENDS = tuple(f"cuSeqlens{side}" for side in SIDES)
USED = tuple(f"seqused{side}" for side in SIDES)
ROWS = ("q", "oriKv", "cmpKv")


def first_entry(value: int) -> object:
    """Returns a change that sets the first entry of every list."""
    return lambda old: old.index_fill(-1, torch.tensor(0), value)


STATEMENTS = {
    "Rows are FLOAT16 or BFLOAT16, all of one dtype.": [
        *(computes(dtype=BF, **over) for over in ({}, BSND)),
        *(refuses(INVALID, "q", dtype=d) for d in (F32, F64)),
        *(refuses(INVALID, name, **{name: to(d)}) for name in ("oriKv", "cmpKv", "attnOut") for d in (F32, BF)),
    ],
    "Lists and lengths are INT32; INT64 is taken too (ruling 12).": [
        computes(**dict.fromkeys(("cmpSparseIndices", "cmpResidualKv", *ENDS), to(I64))),
        refuses(INVALID, "cmpResidualKv", cmpResidualKv=to(F32)),
    ],
    "Compressed keys are ND too.": [refuses(INVALID, "cmpKv", cmpKv=fractal)],
    "Ends of packed sequences are required, sinks and residuals too, and softmaxLseOut if it is asked for.": [
        *(refuses(NULL, name, **{name: None}) for name in ("softmaxLseOut", *ENDS)),
        refuses(TILING, "sinks", sinks=None),
        refuses(TILING, "cmpResidualKv", cmpResidualKv=None, tokens=(8, 12)),
    ],
    "A window alone, with all compressed keys, or with chosen ones.": [
        *(computes(kind=kind, **over) for kind in KINDS for over in ({}, BSND)),
        refuses(NULL, "cmpSparseIndices", cmpKv=None, cuSeqlensCmpKv=None, cmpResidualKv=None, cmpMaskMode=0),
    ],
    "softmaxLseOut is written where returnSoftmaxLse says so.": [
        computes(saves=False, returnSoftmaxLse=False),
        computes(saves=False, **BSND),
    ],
    "metadata of any content changes nothing.": [
        computes(metadata=ints(*range(-5, 5), d=I32)),
        computes(metadata=drawn(1024)),
    ],
    "oriMaskMode is 0 (all keys), 3 (causal) or 4 (a window).": [
        *(computes(mode=mode, kind=kind) for mode, kind in ((0, "window"), (0, "all"), (3, "chosen"), (3, "window"))),
        *(computes(window=w) for w in ((0, 0), (127, 0), (2, 1), (-1, 0), (3, -1))),
        *(forbids("oriWinLeft", oriMaskMode=n) for n in (0, 3)),
        forbids("oriWinLeft", mode=3, oriWinRight=0),
    ],
    "cmpMaskMode is 3 with compressed keys, 0 without.": [
        *(forbids("cmpMaskMode", kind="window", cmpMaskMode=n) for n in (3, 4)),
    ],
    "cmpRatio is the tokens of a compressed key, 1 without them.": [
        *(computes(ratio=n, kind=kind) for n, kind in ((1, "all"), (2, "chosen"), (128, "chosen"))),
        computes(ratio=128, tokens=(300, 257), kind="all"),
        forbids("cmpRatio", kind="window", cmpRatio=4),
        forbids("cmpResidualKv", cmpRatio=3),
    ],
    "cmpResidualKv is from 0 to cmpRatio - 1, and with the compressed keys the tokens of oriKv (ruling 42).": [
        *(computes(tokens=(8 + n, 12 + n), kind=kind) for n, kind in ((0, "all"), (1, "chosen"), (3, "all"))),
        *(forbids("cmpResidualKv", cmpResidualKv=ints(*n, d=I32)) for n in ((4, 2), (-1, 2), (1,), (1, 2, 0), (2, 2))),
    ],
    "Another chip takes lists of oriKv, with lengths, in oriMaskMode 0; lists of both sources: no (ruling 42).": [
        *(computes(kind="keys", **over) for over in ({}, BSND, {"rows": (0, 5)}, {"dtype": BF})),
        computes(kind="keys", oriSparseIndices=lambda old: torch.full_like(old, -1)),
        refuses(TILING, "oriTopkLength", kind="keys", oriTopkLength=None),
        *(forbids("oriSparseIndices", kind="keys", oriSparseIndices=first_entry(n)) for n in (9, -2, 2**30)),
        *(forbids("oriMaskMode", kind="keys", oriMaskMode=n) for n in (3, 4)),
        refuses(NULL, "oriSparseIndices", oriSparseIndices=zeros(8, 1, 4, d=I32)),
        *(refuses(NULL, name, **{name: zeros(8, 1, d=I32)}) for name in ("oriTopkLength", "cmpTopkLength")),
    ],
    "layoutQ is BSND or TND, layoutKv the same or PA_BBND.": [
        refuses(NULL, " ".join(ENDS), layoutQ="BSND", layoutKv="BSND"),
        refuses(NULL, "oriBlockTable cmpBlockTable sequsedOriKv sequsedCmpKv", layoutKv="PA_BBND"),
        *(refuses(NULL, name, **{name: zeros(2, 1, d=I32)}) for name in ("oriBlockTable", "cmpBlockTable")),
        *(refuses(NULL, name, **{name: ints(0, 4, 8, d=I32)}, **BSND) for name in ENDS),
    ],
    "Shapes agree in T1, T2, T3, N1, D and G.": [
        *(forbids(name, **{name: deeper}) for name in ("cmpKv", "cmpSparseIndices")),
        *(
            forbids(f"{name} cuSeqlensOriKv cuSeqlensCmpKv softmaxLseOut", **{name: longer})
            for name in ("q", "oriKv", "cmpKv", "attnOut", "cmpSparseIndices")
        ),
        *(forbids(name, **{name: widened}) for name in ("oriKv", "cmpKv", "attnOut", "softmaxLseOut")),
        *(forbids("sinks", sinks=zeros(n)) for n in (1, 3, 5)),
        forbids("sinks", sinks=zeros(4, 1)),
    ],
    "N1 is 1 to 128.": [*(computes(N=n, rows=(1, 2)) for n in (1, 64, 128)), forbids("q", N=129)],
    "D is 512.": [*(forbids("q", D=n) for n in (64, 128, 511, 576))],
    "Ends begin with 0, never fall, and end with the tokens of their tensor.": [
        computes(rows=(0, 5), tokens=(9, 14)),
        computes(rows=(3, 0, 2), tokens=(9, 0, 14)),
        *(forbids(name, **{name: ints(*n, d=I32)}) for name in ENDS for n in ((1, 3, 8), (0, 99, 3), (0, 3))),
        forbids("cuSeqlensOriKv", cuSeqlensOriKv=ints(0, 9, 14, 23, d=I32)),
    ],
    "seqused are lengths; the rows behind them are padding, whose results are 0 (ruling 42).": [
        computes(sequsedQ=ints(2, 0, d=I32)),
        computes(
            sequsedQ=ints(2, 5, d=I32),
            sequsedOriKv=ints(9, 11, d=I32),
            sequsedCmpKv=ints(2, 2, d=I32),
            cmpResidualKv=ints(1, 3, d=I32),
            kind="all",
        ),
        computes(sequsedQ=ints(4, 1, d=I32), **BSND),
        computes(
            sequsedOriKv=ints(14, 9, d=I32),
            sequsedCmpKv=ints(3, 2, d=I32),
            cmpResidualKv=ints(2, 1, d=I32),
            **BSND,
            kind="all",
        ),
        *(forbids(name, **{name: ints(*n, d=I32)}) for name in USED for n in ((1, 99), (-1, 2), (1,))),
        *(forbids(name, **{name: ints(*n, d=I32)}, **BSND) for name in USED for n in ((1, 99), (-1, 2), (1, 1, 1))),
    ],
    "One softmax over both sources and the sink, which is part of softmaxLseOut (ruling 42).": [
        *(computes(softmaxScale=s) for s in (0.0, 1.0, -0.04)),
        *(computes(sinks=lambda old, n=n: torch.full_like(old, n)) for n in (-1e4, 0.0, 30.0)),
        computes(rows=(20, 30), tokens=(60, 90), ratio=4, N=8),
    ],
    "A row that sees no key of either source has output 0 and softmaxLseOut 0 (ruling 42).": [
        *(computes(rows=(9, 5), tokens=(4, 5), kind=kind) for kind in KINDS),
    ],
    "A list ends at its first -1; a row reads as many slots as it sees compressed keys, of no later key (ruling 42).": [
        computes(cmpSparseIndices=lambda old: torch.full_like(old, -1)),
        computes(cmpSparseIndices=zeros(8, 1, ENTRIES, d=I32)),  # one entry again and again
        computes(cmpSparseIndices=lambda old: torch.full_like(old, 1)),  # past the bound of the first rows
        computes(cmpSparseIndices=zeros(8, 1, 1, d=I32)),
        forbids("cmpSparseIndices", cmpSparseIndices=lambda old: old.flip(-1)),  # holes
        *(forbids("cmpSparseIndices", cmpSparseIndices=first_entry(n)) for n in (3, -2, 2**30)),
    ],
    "Rows may be transposed.": [computes(q=swapped, attnOut=swapped)],
    "Padded results are the same bits again.": [repeats(kind="all", **BSND)],
}
CLAUSES = merged(
    of_parameters(
        "q oriKv attnOut",
        "q oriKv cmpKv attnOut",
        "sinks softmaxLseOut",
        " ".join(("cmpSparseIndices", *ENDS)),
        {
            "oriMaskMode": (1, 2, 5, -1),
            "cmpMaskMode": (0, 1, 4, -1),
            "cmpRatio": (0, -4),
            "topkValueMode": (0, 2),
            "layoutQ": ("BNSD", "SBH", "tnd"),
            "layoutKv": ("BSND", "PA_BSND", ""),
        },
        " ".join((*ROWS, "attnOut", "cmpSparseIndices")),
    ),
    STATEMENTS,
)

PAGE = Page("aclnnSparseFlashMla", PROTOTYPE, base, formula, CLAUSES)

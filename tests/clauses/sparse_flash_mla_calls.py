"""aclnnSparseFlashMla: its prototype, a legal call, and the formula of its outputs."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch

from clauses.dtypes import F32, I32, H
from clauses.near import Near, cat, near, softmax, stack
from clauses.table import Args, filled, prototype
from clauses.values import GENERATOR, draw

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
    """Attention to a window and to compressed keys.

    Args:
        rows, tokens: of queries and of keys of every sequence; BSND: all alike.
        kind: "window", without compressed keys; "all" that a row sees; "chosen", by a list; "keys" that lists name,
            without compressed ones, in mode 0.
        mode, window: of the keys; window: before and behind a row, in mode 4.
        saves: whether softmaxLseOut is asked for.
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
    """Lists of compressed keys that rows see; lists of keys, and their lengths."""
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
    """How many compressed keys a row sees, of sequences whose keys are `tokens`."""
    return min(max((tokens - rows + row + 1) // ratio, 0), compressed)


def lengths_of(args: Args, side: int) -> list[tuple[int, int]]:
    """(first row, rows) of every sequence on a side, in its tensor's rows end to end."""
    name, tensor = SIDES[side], args[("q", "oriKv", "cmpKv")[side]]
    used, ends = args[f"seqused{name}"], args[f"cuSeqlens{name}"]
    if tensor is None:
        return []
    room = ends.tolist() if tensor.dim() == 3 else [b * tensor.shape[1] for b in range(len(tensor) + 1)]
    counts = [b - a for a, b in pairwise(room)] if used is None else used.tolist()
    return list(zip(room, counts, strict=False))


def window_of(args: Args, row: int, rows: int, keys: int) -> tuple[int, int]:
    """[first, end) of the keys in a row's window."""
    diagonal, far = keys - rows + row + 1, 1 << 30
    left, right = (far if args[name] < 0 else args[name] for name in ("oriWinLeft", "oriWinRight"))
    if args["oriMaskMode"] == 0:
        return 0, keys
    first, end = (0, diagonal) if args["oriMaskMode"] == 3 else (diagonal - left - 1, diagonal + right)
    return max(first, 0), min(max(end, 0), keys)


Entry = tuple[int, int, int]


def row_entries(args: Args, b: int, row: int, sides: list[list[tuple[int, int]]]) -> list[Entry]:
    """(source, row of its tensor, slot of its list) of all keys that a row of sequence b reads; source 0: oriKv."""
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
    """The rows of keys, [keys, D]."""
    sources = [flat(args["oriKv"]), args["cmpKv"] if args["cmpKv"] is None else flat(args["cmpKv"])]
    return torch.stack([sources[source][at, 0] for source, at, _ in read])


def flat(t: torch.Tensor) -> torch.Tensor:
    """Rows [T, N, D] of either layout."""
    return t if t.dim() == 3 else t.flatten(0, 1)


def formula(args: Args) -> dict[str, Near]:
    """softmax over window, compressed keys and sink; a row without keys, and rows of no sequence, are 0."""
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

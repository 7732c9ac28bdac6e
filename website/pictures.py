"""Draws pictures of memory layouts, of a paged cache and of training; masks.py draws masks."""

from typing import Any, get_args

import torch

import fusion_attention as fa
from fusion_attention.nn import SparseSelfAttention, Stage, set_stage
from fusion_attention.ops import RECORDS
from website.svg import Picture

Cell = tuple[int, int, int]  # sequence, token, head
SEQUENCES = ("a", "b", "c", "d")  # a colour each


def in_memory(layout: str, lengths: list[int], heads: int) -> list[Cell]:
    """Returns the rows of a query tensor in memory order, from the axis names in the operator's record."""
    words = RECORDS["attention"].by_name["q"].words(layout)  # type: ignore[attr-defined]
    if words[0] == "T1":
        return [(b, s, n) for b, length in enumerate(lengths) for s in range(length) for n in range(heads)]
    sizes = {"B": len(lengths), "S1": max(lengths), "N1": heads}
    axes = [axis for word in words for axis in word.split("*") if axis in sizes]
    positions = torch.cartesian_prod(*(torch.arange(sizes[axis]) for axis in axes)).tolist()
    return [(p[axes.index("B")], p[axes.index("S1")], p[axes.index("N1")]) for p in positions]


def layouts() -> Picture:
    """Draws the same two sequences of two heads in every layout."""
    lengths, heads, size = [4, 2], 2, 46
    names = RECORDS["attention"].layouts
    picture = Picture(
        900, 84 + 66 * len(names), "How two sequences of four and two tokens lie in memory, layout by layout"
    )
    picture.note(104, 34, "one box: a token's row of one head, D elements; memory runs from left to right")
    for line, layout in enumerate(names):
        y = 54 + 66 * line
        picture.text(28, y + 29, layout, size=17, bold=True, mono=True)
        for place, (b, s, n) in enumerate(in_memory(layout, lengths, heads)):
            x, is_token = 104 + place * (size + 2), s < lengths[b]
            colour = SEQUENCES[b] if n == 0 else SEQUENCES[b] + "2"
            picture.rect(x, y, size, size, colour if is_token else "off", r=5)
            if is_token:
                style: dict[str, Any] = {"anchor": "middle", "fill": "on" if n == 0 else "ink"}
                picture.text(x + size / 2, y + 22, f"t{s}", size=15, bold=True, **style)
                picture.text(x + size / 2, y + 37, f"h{n}", size=11, **style)
    y = 66 + 66 * len(names)
    picture.key(y, ((104, "a", "first sequence"), (244, "b", "second sequence"), (398, "off", "padding")))
    return picture


def packing() -> Picture:
    """Draws three sequences padded and packed, with the computed pairs."""
    lengths = [7, 3, 5]
    longest, total, size = max(lengths), sum(lengths), 13
    picture = Picture(900, 330, "Scores of three sequences: padded to the longest, and packed")
    causal = fa.Band.causal()
    picture.text(32, 38, "padded", size=18, bold=True)
    computed = len(lengths) * longest * longest
    picture.note(32, 60, f"[B, S, N, D]: {len(lengths) * longest} rows, {computed} scores a head")
    for b, length in enumerate(lengths):
        band = causal.visible(length, length)
        cells = [
            [SEQUENCES[b] if i < length and j < length and band[i, j] else "off" for j in range(longest)]
            for i in range(longest)
        ]
        picture.grid(32 + b * (longest * (size + 2) + 18), 84, cells, size)
    x = 500
    used = sum(int(causal.visible(n, n).sum()) for n in lengths)
    picture.text(x, 38, "packed", size=18, bold=True)
    picture.note(x, 60, f'layout="TND": {total} rows, {used} scores a head')
    cells = [["bg"] * total for _ in range(total)]
    for b, length in enumerate(lengths):
        start = sum(lengths[:b])
        for i, row in enumerate(causal.visible(length, length).tolist()):
            cells[start + i][start : start + length] = [SEQUENCES[b] if is_visible else "off" for is_visible in row]
    picture.grid(x, 84, cells, size)
    picture.note(32, 222, "Rows of padding are computed by every layer,")
    picture.note(32, 241, "and a mask tensor hides them from attention.")
    picture.text(32, 272, f"q_len={lengths}", size=14, mono=True)
    picture.note(32, 293, "is all that packing needs")
    return picture


def pages() -> Picture:
    """Draws a real paged cache: two sequences, one of them a fork, and the positions of its tokens."""
    cache = fa.PagedKVCache(heads=1, dim=1, pages=8, page_size=4)

    def append(sequence: int, code: int, first: int, count: int) -> None:
        tokens = (100.0 * code + first + torch.arange(count)).view(1, count, 1, 1)
        cache.append([sequence], tokens, tokens)

    a, b = cache.allocate(), cache.allocate()
    append(a, 1, 0, 6)
    append(b, 2, 0, 5)
    append(a, 1, 6, 4)
    c = cache.fork(a)
    append(c, 3, 10, 3)
    pool = cache.arguments()["k"][:, 0, :, 0].int().tolist()
    holders: dict[int, int] = {}
    picture = Picture(900, 424, "A PagedKVCache: a block table per sequence, and the pool of pages")
    picture.text(32, 38, "block_table", size=17, bold=True, mono=True)
    picture.text(520, 38, "the pool: 8 pages of 4 tokens", size=17, bold=True)
    names = {a: "a", b: "b", c: "c = fork(a)"}
    for line, sequence in enumerate((a, b, c)):
        y = 70 + line * 112
        colour, token_count = SEQUENCES[line], cache.lengths([sequence])[0]
        picture.text(32, y + 14, names[sequence], size=15, bold=True, fill=colour)
        picture.note(32, y + 34, f"{token_count} tokens", 12.5)
        table = cache.block_table([sequence])[0].tolist()
        for place, page in enumerate(table):
            x = 150 + place * 54
            picture.rect(x, y - 4, 48, 42, colour + "2", r=6)
            picture.text(x + 24, y + 23, str(page), size=17, anchor="middle", bold=True)
            holders[page] = holders.get(page, 0) + 1
            bend, target = 390 + line * 26 + place * 6, 62 + page * 42 + 17 + (line - 1) * 6
            line_of = f"M{x + 24} {y + 38}v{14 + place * 8}H{bend}V{target}H514"
            picture.path(line_of, stroke=colour, width=1.4, arrow=True)
    for page, slots in enumerate(pool):
        y = 62 + page * 42
        picture.text(536, y + 22, str(page), size=15, anchor="middle", fill="soft", bold=True)
        for slot, code in enumerate(slots):
            owner = code // 100 - 1
            token_count = owner >= 0
            picture.rect(556 + slot * 62, y, 58, 34, SEQUENCES[owner] + "2" if token_count else "off", r=5)
            if token_count:
                picture.text(585 + slot * 62, y + 22, f"t{code % 100}", size=14, anchor="middle")
        note = "shared" if holders.get(page, 0) > 1 else "" if page in holders else "free"
        picture.text(812, y + 22, note, size=12.5, fill="a" if note == "shared" else "soft")
    return picture


def stages() -> Picture:
    """Draws the inputs and the trained parameters of each stage; integer scores make it equal on every machine."""
    size, tokens, top = 11, 20, 5
    numbers = torch.arange(tokens * 8).reshape(1, tokens, 2, 4)
    q, k = (numbers * 7 % 5 - 2).float(), (numbers[:, :, :1] * 11 % 7 - 3).float()
    weights = torch.tensor([2.0, 1.0]).expand(1, tokens, 2)
    indices, _ = fa.lightning_indexer(q, k, weights, top)
    every, values = fa.lightning_indexer(q, k, weights, tokens)
    causal = fa.Band.causal().visible(tokens, tokens)
    scores = torch.zeros(tokens, tokens)
    for i in range(tokens):
        for j, value in zip(every[0, i, 0].tolist(), values[0, i, 0].tolist(), strict=True):
            if j >= 0:
                scores[i, j] = value
    shades = ("off", "c2", "c")
    limits = scores.max() / 3
    layer = SparseSelfAttention(16, heads=2, kv_heads=1, index_heads=2, index_dim=4, top_k=top)
    picture = Picture(900, 404, "The three stages in which sparse attention is trained")
    texts = {
        "dense": ("attention over all keys", "a model as it is"),
        "warmup": ("the indexer learns where it looks", "loss: KL over all keys"),
        "sparse": (f"attention over the {top} keys of largest score", "loss: the model's + KL over those"),
    }
    for place, stage in enumerate(get_args(Stage)):
        x = 32 + place * 290
        set_stage(layer, stage)
        learns = {name.startswith("indexer"): p.requires_grad for name, p in layer.named_parameters()}
        picture.text(x, 40, f"{place + 1}  {stage}", size=19, bold=True)
        picture.note(x, 62, texts[stage][0], 12.5)
        picture.note(x, 79, texts[stage][1], 12.5)
        chosen = [set(row) for row in indices[0, :, 0].tolist()]
        cells = []
        for i in range(tokens):
            row = []
            for j in range(tokens):
                shade = shades[min(2, int(scores[i, j] / limits))] if limits > 0 else "off"
                colour = {"dense": "a", "warmup": shade, "sparse": "a" if j in chosen[i] else "off"}[stage]
                row.append(colour if causal[i, j] else "bg")
            cells.append(row)
        picture.grid(x, 96, cells, size, gap=1.5)
        for at, indexer, name in ((x, False, "attention"), (x + 132, True, "indexer")):
            fill, word, ink = ("b2", "learns", "ink") if learns[indexer] else ("off", "rests", "soft")
            picture.rect(at, 357, 122, 24, fill, r=12)
            picture.text(at + 61, 374, f"{name} {word}", size=12, anchor="middle", fill=ink)
    return picture

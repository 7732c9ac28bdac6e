"""Draws masks: the sparse modes and bands by the explorer's functions, compressed keys by evaluating calls."""

from typing import Any

import torch

import fusion_attention as fa
from fusion_attention.explorer.draw import REMOVED, cells_of, is_seen
from fusion_attention.explorer.visible import Setting
from website.svg import Picture

ROWS, KEYS = 6, 9
CUTS = (3, 5)  # where the packed modes' second and third sequence begin
# An unstructured mask tensor; 1 removes a pair.
SCATTERED = tuple(tuple(int((i * 5 + j * 3) % 7 == 0 and j > 0) for j in range(KEYS)) for i in range(ROWS))
ONE: dict[str, Any] = {"q_len": (ROWS,), "kv_len": (KEYS,)}
# (name, description of the call, its mask)
MODES = (
    ("window, and your mask", "pre 3, next 2", Setting(0, **ONE, pre=3, next=2, mask="own", own=SCATTERED)),
    ("your mask alone", "a full mask", Setting(1, **ONE, mask="own", own=SCATTERED)),
    ("causal, from the upper left", "compressed mask", Setting(2, **ONE)),
    ("causal, to the lower right", "compressed mask", Setting(3, **ONE)),
    ("band, to the lower right", "pre 3, next 1", Setting(4, **ONE, pre=3, next=1)),
    ("prefix, and a full mask", "prefix 6", Setting(5, **ONE, prefix=(6,))),
    ("prefix, compressed mask", "prefix 6", Setting(6, **ONE, prefix=(6,))),
    ("packed, last sequence cut", "next -2", Setting(7, (3, 2, 3), (3, 2, 5), packed=True, next=-2)),
    ("packed, first sequence cut", "next 2", Setting(8, (3, 2, 3), (5, 2, 3), packed=True, next=2)),
)


def gallery() -> Picture:
    """Draws the nine sparse modes."""
    width, high = 300, 248
    picture = Picture(3 * width + 40, 3 * high + 74, "Which keys a row sees in CANN's nine sparse modes")
    for mode, (name, says, setting) in enumerate(MODES):
        x, y = 32 + mode % 3 * width, 26 + mode // 3 * high
        kinds = cells_of(setting)
        assert kinds is not None
        seen_keys = is_seen(kinds).tolist()
        size = min(176 / len(kinds) - 2, 234 / len(kinds[0]) - 2, 24)
        picture.text(x, y + 14, str(mode), size=20, fill="a", bold=True)
        picture.text(x + 22, y + 14, name, size=15, bold=True)
        picture.note(x + 22, y + 32, says, 12.5)
        cells, tips = [], []
        for i, row in enumerate(seen_keys):
            colour = "abc"[sum(first <= i for first in CUTS)] if setting.packed else "a"
            removed = (kinds[i] == REMOVED).tolist()
            cells.append([colour if s else "c2" if r else "off" for s, r in zip(row, removed, strict=True)])
            tips.append([f"row {i}, key {j}: {'seen' if s else 'not seen'}" for j, s in enumerate(row)])
        picture.grid(x, y + 46, cells, size, tips=tips)
    y = 3 * high + 44
    colours = ((32, "a", "seen"), (112, "off", "not seen"), (214, "c2", "removed by the mask tensor"))
    picture.key(y, (*colours, (428, "b", "another sequence")))
    picture.note(3 * width + 8, y, "rows are queries, columns are keys", anchor="end")
    return picture


def bands() -> Picture:
    """Draws the bands of the Python API."""
    shown = ("Band.full()", "Band.causal()", 'Band.causal("start")', "Band.window(3)", "Band.window(2, 2)",
             "Band.prefix_causal([5])")  # fmt: skip
    width, high = 300, 204
    picture = Picture(3 * width + 40, 2 * high + 24, "What the bands of fa.attention let rows see")
    for place, name in enumerate(shown):
        band = eval(name, {"Band": fa.Band})
        x, y = 32 + place % 3 * width, 28 + place // 3 * high
        picture.text(x, y + 12, name, size=14, mono=True)
        visible = band.visible(ROWS, KEYS).tolist()
        picture.grid(x, y + 28, [["a" if s else "off" for s in row] for row in visible], 20)
    return picture


def two_sources() -> Picture:
    """Draws the keys of a row in a window and among compressed keys: all of them, or a list."""
    tokens, ratio, window = 16, 4, 6
    q, width = torch.zeros(1, tokens, 1, 32), tokens + tokens // ratio
    values = torch.eye(width, 32)[None, :, None]
    k = torch.zeros_like(values)
    row, entry = torch.arange(tokens)[:, None], torch.arange(tokens // ratio)
    chosen = ((entry + 1) * ratio <= row + 1) & ((row // 2 + entry) % 3 > 0)
    lists = fa.pack_lists(entry.expand_as(chosen).masked_fill(~chosen, -1))[None, :, None]
    sources: dict[str, Any] = {"v": values[:, :tokens], "v_compressed": values[:, tokens:]}
    sources |= {"ratio": ratio, "band": fa.Band.window(window - 1)}
    picture = Picture(960, 404, "Which tokens and which compressed keys a row sees")
    shown = (("all compressed keys", "heavily compressed", None), ("those of a list", "compressed sparse", lists))
    for place, (name, kind, indices) in enumerate(shown):
        x = 32 + place * 480
        out = fa.compressed_attention(q, k[:, :tokens], k[:, tokens:], indices, **sources)
        seen_keys = (out[0, :, 0, :width] > 0).tolist()
        picture.text(x, 30, name, size=17, bold=True)
        picture.note(x, 50, f"{kind}: window {window}, ratio {ratio}", 12.5)
        near = [["a" if s else "off" for s in row[:tokens]] for row in seen_keys]
        far = [["c" if s else "off" for s in row[tokens:]] for row in seen_keys]
        picture.grid(x, 66, near, 16)
        picture.grid(x + 18 * tokens + 16, 66, far, 16)
        picture.note(x, 374, "tokens")
        picture.note(x + 18 * tokens + 16, 374, "compressed")
    picture.note(32, 396, "rows are queries, columns are keys")
    return picture

"""Draws masks by evaluating attention calls.

All keys are equal and values are unit vectors, so element j of a row's output is the weight of key j: above 0 where it
is seen.
"""

from itertools import accumulate
from typing import Any

import torch

import fusion_attention as fa
from fusion_attention.npu import npu_fusion_attention
from website.svg import Picture

ROWS, KEYS, DIM = 6, 9, 16
CUTS = (3, 5)  # where the packed modes' second and third sequence begin
COMPRESSED = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
PREFIX_COMPRESSED = torch.cat([COMPRESSED, torch.zeros(1024, 2048, dtype=torch.bool)])
PREFIX_COMPRESSED[2048:, 1024:] = True


def visible_pairs(rows: int = ROWS, keys: int = KEYS, layout: str = "BSND", **call: Any) -> torch.Tensor:
    """Returns [rows, keys] bool: True where npu_fusion_attention has a positive weight."""
    width = max(DIM, keys)
    q, k, v = torch.zeros(rows, 1, width), torch.zeros(keys, 1, width), torch.eye(keys, width)[:, None]
    if layout == "BSND":
        q, k, v = q[None], k[None], v[None]
    out = npu_fusion_attention(q, k, v, 1, layout, **call)[0]
    return out.reshape(rows, width)[:, :keys] > 0


def of_band(band: fa.Band, rows: int = ROWS, keys: int = KEYS) -> torch.Tensor:
    """Returns [rows, keys] bool: True where fa.attention has a positive weight."""
    width = max(DIM, keys)
    out = fa.attention(
        torch.zeros(1, rows, 1, width), torch.zeros(1, keys, 1, width), torch.eye(keys, width)[None, :, None], band=band
    )
    return out.reshape(rows, width)[:, :keys] > 0


def scattered(rows: int = ROWS, keys: int = KEYS) -> torch.Tensor:
    """Returns an unstructured mask tensor; True removes a pair."""
    i, j = torch.arange(rows)[:, None], torch.arange(keys)
    return ((i * 5 + j * 3) % 7 == 0) & (j > 0)


def packed(mode: int, q_len: list[int], kv_len: list[int], next_tokens: int) -> torch.Tensor:
    """Returns visible pairs of a packed call of three sequences; next_tokens shifts one of them."""
    ends = {"actual_seq_qlen": list(accumulate(q_len)), "actual_seq_kvlen": list(accumulate(kv_len))}
    call = {"atten_mask": COMPRESSED, "sparse_mode": mode, "next_tockens": next_tokens, **ends}
    return visible_pairs(sum(q_len), sum(kv_len), "TND", **call)


def modes() -> list[tuple[int, str, str, torch.Tensor, torch.Tensor | None]]:
    """Yields (mode, name, description of the call, visible pairs, pairs that the mask tensor removes in the band)."""
    mask = scattered()
    window: dict[str, Any] = {"pre_tockens": 3, "next_tockens": 2}
    results: list[tuple[int, str, str, torch.Tensor, torch.Tensor | None]] = []

    def add(mode: int, name: str, says: str, result: torch.Tensor, unmasked: torch.Tensor | None = None) -> None:
        results.append((mode, name, says, result, None if unmasked is None else unmasked & ~result))

    add(0, "window, and your mask", "pre 3, next 2", visible_pairs(atten_mask=mask, sparse_mode=0, **window),
        visible_pairs(atten_mask=torch.zeros_like(mask), sparse_mode=0, **window))  # fmt: skip
    add(1, "your mask alone", "a full mask", visible_pairs(atten_mask=mask, sparse_mode=1), torch.ones_like(mask))
    add(2, "causal, from the upper left", "compressed mask", visible_pairs(atten_mask=COMPRESSED, sparse_mode=2))
    add(3, "causal, to the lower right", "compressed mask", visible_pairs(atten_mask=COMPRESSED, sparse_mode=3))
    band: dict[str, Any] = {"pre_tockens": 3, "next_tockens": 1}
    add(4, "band, to the lower right", "pre 3, next 1", visible_pairs(atten_mask=COMPRESSED, sparse_mode=4, **band))
    below = torch.ones(ROWS, KEYS, dtype=torch.bool).triu(KEYS - ROWS + 1)
    below[:, :6] = False
    add(5, "prefix, and a full mask", "prefix 6", visible_pairs(atten_mask=below, sparse_mode=5, prefix=[6]))
    prefix: dict[str, Any] = {"sparse_mode": 6, "prefix": [6]}
    add(6, "prefix, compressed mask", "prefix 6", visible_pairs(atten_mask=PREFIX_COMPRESSED, **prefix))
    add(7, "packed, last sequence cut", "next -2", packed(7, [3, 2, 3], [3, 2, 5], -2))
    add(8, "packed, first sequence cut", "next 2", packed(8, [3, 2, 3], [5, 2, 3], 2))
    return results


def gallery() -> Picture:
    """Draws the nine sparse modes."""
    width, high = 300, 248
    picture = Picture(3 * width + 40, 3 * high + 74, "Which keys a row sees in CANN's nine sparse modes")
    for place, (mode, name, says, result, taken) in enumerate(modes()):
        x, y = 32 + place % 3 * width, 26 + place // 3 * high
        rows, keys = result.shape
        size = min(176 / rows - 2, 234 / keys - 2, 24)
        picture.text(x, y + 14, str(mode), size=20, fill="a", bold=True)
        picture.text(x + 22, y + 14, name, size=15, bold=True)
        picture.note(x + 22, y + 32, says, 12.5)
        cells, tips = [], []
        for i in range(rows):
            removed = [False] * keys if taken is None else taken[i].tolist()
            colour = "abc"[int((torch.tensor(CUTS) <= i).sum())] if mode in (7, 8) else "a"
            cells.append(
                [colour if s else "c2" if t else "off" for s, t in zip(result[i].tolist(), removed, strict=True)]
            )
            tips.append([f"row {i}, key {j}: {'seen' if s else 'not seen'}" for j, s in enumerate(result[i].tolist())])
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
        picture.grid(x, y + 28, [["a" if s else "off" for s in row] for row in of_band(band).tolist()], 20)
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

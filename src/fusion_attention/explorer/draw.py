"""Pictures of the (query, key) matrix of a mask as text, SVG or PNG, and a gallery of CANN's mask modes."""

import struct
import zlib
from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape, quoteattr

import numpy as np

from fusion_attention.explorer.visible import BAND, MODES, Setting, picture
from fusion_attention.explorer.words import NAMES
from fusion_attention.ir.mask import UNLIMITED

# Kinds of cells: outside every sequence; hidden by the band; removed by the mask; visible; visible within the prefix.
OUTSIDE, HIDDEN, REMOVED, VISIBLE, PREFIX = range(5)
# Colours for light and dark pages; SVG files have both.
LIGHT = ("#00000000", "#eceef4", "#f2b8b0", "#4f46e5", "#0d9488")
DARK = ("#00000000", "#262a38", "#7c3a3f", "#818cf8", "#2dd4bf")
MOST_CELLS = 4096 * 4096


class TooLarge(ValueError):
    """The error for a mask with more than MOST_CELLS (query, key) cells."""


def item_cells(s: Setting, p: dict[str, Any], b: int) -> np.ndarray:
    """Returns the kind of each (query, key) cell of sequence b, uint8 [q_len, kv_len]: VISIBLE, HIDDEN, PREFIX or
    REMOVED (by the mask tensor); s: mask arguments; p: their ranges of visible keys, from picture()."""
    rows, keys = p["q_len"][b], p["kv_len"][b]
    row, key = np.arange(rows)[:, None], np.arange(keys)[None]
    visible = (key >= row + p["lo"][b]) & (key < np.maximum(row + p["hi"][b], p["prefix"][b]))
    cells = np.where(visible, VISIBLE, HIDDEN).astype(np.uint8)
    cells[visible & (key < p["prefix"][b])] = PREFIX
    cells[visible & _mask_removes(s, p["mask"], rows, keys)] = REMOVED
    return cells


def _mask_removes(s: Setting, kind: str, rows: int, keys: int) -> np.ndarray:
    """Returns bool [rows, keys], true for cells of one sequence that the mask tensor of `s` removes; kind: "" (no
    mask), "full", or "tree" (the mask covers only the last keys), from picture()."""
    removed = np.zeros((rows, keys), bool)
    if kind == "":
        return removed
    history = max(keys - rows, 0) if kind == "tree" else 0
    skipped = max(rows - keys, 0) if kind == "tree" else 0  # a refused call: a tree with fewer keys than rows
    from_history = removed[:, history:]
    if s.mask == "triangle":
        from_history[:] = np.triu(np.ones((rows, from_history.shape[1] + skipped), bool), 1)[:, skipped:]
    elif s.own is not None:
        matrix = np.asarray(s.own, bool)[:rows, skipped:][:, : from_history.shape[1]]
        from_history[: matrix.shape[0], : matrix.shape[1]] = matrix
    return removed


def cells_of(s: Setting, api: str = "training") -> np.ndarray | None:
    """Returns the kind of each cell (visible, hidden, ...) of a mask `s`, uint8 [queries, keys], with all sequences
    along the diagonal; None if no call of the interface `api` has this mask."""
    p = picture(s, api)
    if p is None:
        return None
    if sum(p["q_len"]) * sum(p["kv_len"]) > MOST_CELLS:
        got = f"{sum(p['q_len'])} x {sum(p['kv_len'])}"
        raise TooLarge(f"expected at most {MOST_CELLS} cells (4096 x 4096), got {got}")
    cells = np.full((sum(p["q_len"]), sum(p["kv_len"])), OUTSIDE, np.uint8)
    row = key = 0
    for b, (rows, keys) in enumerate(zip(p["q_len"], p["kv_len"], strict=True)):
        cells[row : row + rows, key : key + keys] = item_cells(s, p, b)
        row, key = row + rows, key + keys
    return cells


def is_seen(cells: np.ndarray) -> np.ndarray:
    """Returns bool [queries, keys], true for the visible cells of `cells`, uint8 kinds of the same shape."""
    return cells >= VISIBLE


# ---------------------------------------------------------------------------------------------------------------- text

FULL_BLOCKS, ASCII = " ·×█▓", " .x#+"  # by kind of cell
SHADES, ASCII_SHADES = " ░▒▓█", " .:+#"


def text(cells: np.ndarray, width: int, ascii_only: bool = False) -> list[str]:
    """Returns cells (uint8 kinds [queries, keys]) as text lines, at most `width` wide, of two characters per cell, or
    of one per tile if there are many cells; ascii_only: True: use only ASCII characters."""
    rows, keys = cells.shape
    if keys * 2 <= width and rows <= 64:
        signs = ASCII if ascii_only else FULL_BLOCKS
        return ["".join(signs[kind] * 2 for kind in row) for row in cells]
    across = -(-keys // max(width, 1))
    down = 1 if rows <= 64 else max(-(-rows // 64), 2 * across)  # a character is twice as high as wide
    lines = []
    shades = ASCII_SHADES if ascii_only else SHADES
    for i in range(0, rows, down):
        tiles = [is_seen(cells[i : i + down, j : j + across]).mean() for j in range(0, keys, across)]
        lines.append("".join(shades[0 if ratio == 0 else 1 + min(3, int(ratio * 4 - 1e-9))] for ratio in tiles))
    return lines


# ----------------------------------------------------------------------------------------------------------------- SVG


def runs(row: np.ndarray) -> list[tuple[int, int, int]]:
    """Returns (kind, first, end) of each group of adjacent cells of the same kind in a row of cells, uint8 [keys]."""
    edges = np.flatnonzero(np.diff(row)) + 1
    starts, ends = [0, *edges.tolist()], [*edges.tolist(), len(row)]
    return [(int(row[a]), a, b) for a, b in zip(starts, ends, strict=True)] if len(row) else []


def svg(cells: np.ndarray, title: str, size: int = 320, axes: bool = True) -> str:
    """Returns cells (uint8 kinds [queries, keys]) as SVG, for light and dark pages; few cells have gaps between them.
    size: the longer side in pixels; axes: True: label both axes."""
    rows, keys = cells.shape
    unit = size / max(rows, keys, 1)
    gap = min(1.5, unit / 8) if unit >= 4 else 0.0
    left, top = (34.0, 22.0) if axes else (0.0, 0.0)
    paths: dict[int, list[str]] = {}
    for i in range(rows):
        for kind, first, end in runs(cells[i]):
            if kind == OUTSIDE:
                continue
            spans = [(j, j + 1) for j in range(first, end)] if gap else [(first, end)]
            paths.setdefault(kind, []).extend(
                f"M{_n(left + a * unit)} {_n(top + i * unit)}h{_n((b - a) * unit - gap)}v{_n(unit - gap)}"
                f"h{_n(gap - (b - a) * unit)}z"
                for a, b in spans
            )
    width, height = _n(left + keys * unit), _n(top + rows * unit)
    sizes = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {sizes} role="img" aria-label={quoteattr(title)}>',
        f"<title>{escape(title)}</title>",
        _style(),
        *(f'<path class="fa-k{kind}" d="{"".join(segments)}"/>' for kind, segments in sorted(paths.items())),
    ]
    if axes:
        parts += [
            f'<text x="{_n(left)}" y="14">keys 0 to {keys - 1}</text>',
            f'<text transform="rotate(-90)" x="{_n(-top)}" y="22" text-anchor="end">rows 0 to {rows - 1}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def _style() -> str:
    light = "".join(f".fa-k{kind}{{fill:{colour}}}" for kind, colour in enumerate(LIGHT))
    dark = "".join(f".fa-k{kind}{{fill:{colour}}}" for kind, colour in enumerate(DARK))
    words = "text{font:12px system-ui,sans-serif;fill:#666b7d}"
    return f"<style>{light}{words}@media(prefers-color-scheme:dark){{{dark}text{{fill:#9aa0b5}}}}</style>"


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


# ----------------------------------------------------------------------------------------------------------------- PNG


def png(cells: np.ndarray, size: int = 768) -> bytes:
    """Returns cells (uint8 kinds [queries, keys]) as a PNG without text; size: the longer side in pixels."""
    scale = max(1, size // max(*cells.shape, 1))
    gap = 0 if scale < 6 else max(1, scale // 10)
    digits = (colour.removeprefix("#").ljust(8, "f") for colour in ("#ffffff00", *LIGHT[1:]))
    colours = np.array([list(bytes.fromhex(colour)) for colour in digits], np.uint8)
    pixels = colours[cells].repeat(scale, 0).repeat(scale, 1)
    if gap:
        inside = np.arange(max(pixels.shape[:2])) % scale < scale - gap
        pixels[~inside[: pixels.shape[0]]] = colours[OUTSIDE]
        pixels[:, ~inside[: pixels.shape[1]]] = colours[OUTSIDE]
    rows = np.concatenate([np.zeros((len(pixels), 1), np.uint8), pixels.reshape(len(pixels), -1)], 1)
    head = struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], 8, 3, 0, 0, 0)
    head = head[:9] + bytes([6]) + head[10:]  # red, green, blue, alpha
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in ((b"IHDR", head), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b""))
    )


# ------------------------------------------------------------------------------------------------------------- gallery


def example(mode: int) -> Setting:
    """Returns mask arguments with a small mask typical of a CANN mask mode (sparse_mode), or of fa.Band (BAND)."""
    if mode in (7, 8):
        lengths = ((3, 4), (3, 6)) if mode == 7 else ((4, 3), (6, 3))
        return Setting(mode, *lengths, packed=True, next=-1 if mode == 7 else 0)
    pre, next_ = {0: (2, 1), 4: (2, 1), BAND: (3, 0)}.get(mode, (UNLIMITED, UNLIMITED))
    mask, matrix, q_len = "zeros", None, 6
    if mode in (1, 9):
        mask, q_len = "own", 5
        matrix = _TREE if mode == 9 else _SCATTERED
    if mode == 5:
        mask, matrix = "own", _HOLES
    prefix = (4,) if mode in (5, 6) else ()
    return Setting(mode, (q_len,), (8,), pre=pre, next=next_, prefix=prefix, mask=mask, own=matrix)


# Drafted tokens 0 to 4: 1 and 2 follow 0, 3 follows 1, 4 follows 2. A 1 hides a token that is not an ancestor.
_TREE = ((0, 1, 1, 1, 1), (0, 0, 1, 1, 1), (0, 1, 0, 1, 1), (0, 0, 1, 0, 1), (0, 1, 0, 1, 0))
_SCATTERED = tuple(tuple(int((3 * i + 5 * j + i * j) % 7 < 3) for j in range(8)) for i in range(5))
_HOLES = tuple(tuple(int((i, j) in ((0, 1), (1, 4), (3, 2), (4, 5), (5, 0))) for j in range(8)) for i in range(6))


def gallery(modes: Sequence[int] = MODES[:-1], size: int = 160) -> dict[str, str]:
    """Returns the SVG of an example mask of each of CANN's mask modes, by file name ("mode_3.svg"); size: in pixels."""
    pictures = {}
    for mode in modes:
        s = example(mode)
        cells = cells_of(s, "inference" if mode == 9 else "own" if mode == BAND else "training")
        assert cells is not None
        name = "band" if mode == BAND else f"mode_{mode}"
        pictures[f"{name}.svg"] = svg(cells, f"sparse_mode {mode}: {NAMES[str(mode)]}", size, axes=False)
    return pictures

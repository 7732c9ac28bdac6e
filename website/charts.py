"""Draws charts of measured times in docs/figures/*.json, which `python -m benchmarks --output NAME` writes.

A bar begins at 1.0, where both are equally fast, and its length is what is gained.
"""

import json
from pathlib import Path
from typing import Any

from website.svg import Picture

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "figures" / "2026-11.json"
Row = dict[str, Any]


def rows() -> list[Row]:
    """Returns all measured rows."""
    return list(json.loads(FIGURES.read_text(encoding="utf-8"))["rows"])


def machine() -> str:
    """Describes the machine of the measurements in one line."""
    facts = json.loads(FIGURES.read_text(encoding="utf-8"))
    return f"{facts['threads']} threads of an {facts['processor']}, torch {facts['torch']}"


def ratio(group: str, name: str, peer: str = "SDPA") -> float:
    """Returns an alternative's time divided by ours."""
    results = [r["ratio"] for r in rows() if (r["group"], r["name"], r["peer_name"]) == (group, name, peer)]
    if len(results) != 1:
        raise KeyError(f"{FIGURES.name}: expected one row {group!r}, {name!r}, {peer!r}, got {len(results)}")
    return float(results[0])


def beside_sdpa(tall: bool = False) -> Picture:
    """Draws simple attention of each dtype, which every library supports; tall: for a small screen."""
    colours, names = {"bf16": "a", "fp32": "b", "fp16": "c"}, {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}
    picture = Picture(
        440 if tall else 900, 482 if tall else 452,
        "Times faster than torch's SDPA, by dtype, full and causal, forward and backward",
    )  # fmt: skip
    edge = 4 if tall else 32
    picture.text(edge, 36, "Times faster than torch SDPA", size=18, bold=True)
    picture.note(edge, 57, "S 2048, 8 heads of 128" + ("" if tall else f"; {machine()}"))
    left, scale, limit = (136.0, 118.0, 3.0) if tall else (214.0, 280.0, 3.0)
    for tick in (1.0, 1.5, 2.0, 2.5, 3.0):
        x = left + (tick - 1) * scale
        bottom = 446 if tall else 416
        picture.line(x, 76, x, bottom, "ink" if tick == 1 else "rule", width=1.5 if tick == 1 else 1)
        label = "as fast" if tick == 1 else f"{tick:g}" if tall else f"{tick:g} times"
        picture.note(x, bottom + 22, label, 12.5, anchor="middle")
    y = 84.0
    for dtype, colour in colours.items():
        picture.text(edge, y + (12 if tall else 46), names[dtype], size=15, bold=True, fill=colour)
        y += 20 if tall else 0
        for group in ("forward", "backward"):
            for mask in ("full", "causal"):
                value = ratio(group, f"{dtype} D128 S2048 {mask}")
                drawn = min(value, limit)
                picture.note(left - 10, y + 15, f"{group}, {mask}", 12.5, anchor="end")
                picture.rect(left, y + 2, (drawn - 1) * scale, 18, colour, r=2)
                end = left + (drawn - 1) * scale
                if value > limit:  # a bar that leaves the picture says so
                    picture.path(f"M{end - 24} {y - 2}l-8 26h7l8 -26z", fill="bg")
                    picture.path(f"M{end - 10} {y - 2}l-8 26h7l8 -26z", fill="bg")
                picture.text(end + 8, y + 16, f"{value:.1f}" if value > limit else f"{value:.2f}", size=13, bold=True)
                y += 25
        y += 2 if tall else 12
    return picture


SHAPED = (
    ("integrations", "Gemma 3 bf16, S 8192, a layer with a window of 512: attention's forward", "sdpa + mask",
     "a window layer of Gemma 3: 512 of 8192 tokens", "SDPA + mask"),
    ("packed", "bf16, 100 sequences, 9241 of 51200 tokens", "padded SDPA + mask", "100 packed sequences",
     "padded SDPA + mask"),
    ("masks", "window 256, S2048", "SDPA + mask", "a window of 256 over 2048 tokens", "SDPA + mask"),
    ("integrations", "FlexAttention bf16, S 8192, a block mask of 36 documents, forward", "compiled",
     "36 documents in 8192 tokens", "compiled FlexAttention"),
    ("masks", "window 256, S2048", "FlexAttention", "the same window of 256", "compiled FlexAttention"),
    ("masks", "causal ALiBi, S2048", "SDPA + bias", "causal with ALiBi", "SDPA + bias"),
    ("sparse", "indexer and top 2048, bf16", "einsum + topk", "indexer and its top 2048 of 8192 keys", "einsum + topk"),
    ("integrations", "Llama, 4 layers of 1024, bf16, S 2048: attention, forward and backward", "sdpa",
     "Llama's attention, forward and backward", "SDPA"),
    ("integrations", "BERT base bf16, 32 texts, 3769 of 8000 tokens, packed", "padded, sdpa",
     "BERT base on packed texts, a whole model", "padded, SDPA"),
    ("integrations", "the same, whole training step", "sdpa", "a whole training step of that Llama", "SDPA"),
)  # fmt: skip


def beside_masks(tall: bool = False) -> Picture:
    """Draws calls with masks or shapes, and entire models at the end; tall: for a small screen."""
    step = 64 if tall else 40
    picture = Picture(
        440 if tall else 900, 116 + step * len(SHAPED),
        "Times faster where work has a shape, beside what a user would pick instead",
    )  # fmt: skip
    edge = 4 if tall else 32
    picture.text(edge, 36, "Times faster where attention has a shape", size=18, bold=True)
    words = "bfloat16; beside what each line names"
    picture.note(edge, 57, words if tall else f"{words}; {machine()}")
    left, scale, top = (6.0, 9.6, 76.0) if tall else (372.0, 11.6, 76.0)
    bottom = top + step * len(SHAPED)
    for tick in (1, 10, 20, 30, 40):
        x = left + (tick - 1) * scale
        picture.line(x, top, x, bottom, "ink" if tick == 1 else "rule", width=1.5 if tick == 1 else 1)
        label = "as fast" if tick == 1 else f"{tick} times"
        anchor = "start" if tall and tick == 1 else "middle"
        picture.note(x, bottom + 22, label, 12.5, anchor=anchor)
    for place, (group, name, peer, shown, beside) in enumerate(SHAPED):
        y, value = top + 6 + step * place, ratio(group, name, peer)
        if tall:
            picture.text(left + 8, y + 10, shown, size=13.5)
            picture.note(left + 8, y + 26, f"beside {beside}", 12)
            y += 28
        else:
            picture.text(left - 12, y + 12, shown, size=13, anchor="end")
            picture.note(left - 12, y + 28, f"beside {beside}", 11.5, anchor="end")
        picture.rect(left, y + 4, max(1.5, (value - 1) * scale), 22, "a", r=2)
        picture.text(left + (value - 1) * scale + 8, y + 20, f"{value:.3g}", size=13, bold=True)
    return picture

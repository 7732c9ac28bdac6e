"""Draws the mask of a packed batch in the terminal and as pictures, and prints whether the chip computes the call."""

import tempfile
from pathlib import Path

from fusion_attention.explorer import gallery, page
from fusion_attention.explorer.calls import call
from fusion_attention.explorer.draw import cells_of, is_seen, svg, text
from fusion_attention.explorer.violations import remarks_on, verdict
from fusion_attention.explorer.visible import Setting

# Two sequences: five new tokens after three cached ones, and six tokens without a cache; the window has four keys.
batch = Setting(mode=4, q_len=(5, 6), kv_len=(8, 6), packed=True, pre=3, next=0)
cells = cells_of(batch, "training")
assert cells is not None
print("\n".join(text(cells, width=80)))
scores = sum(rows * keys for rows, keys in zip(batch.q_len, batch.kv_len, strict=True))
print(f"{is_seen(cells).sum()} scores are computed, of {scores}")

written = call(batch, "training")
assert written is not None
print(f"{verdict(remarks_on(batch, 'training'))}: {written['call']}")

# With more rows than keys the first rows have no key in their window: this library computes it, the chip refuses it.
more_rows = Setting(mode=4, q_len=(6,), kv_len=(4,), packed=True, pre=3, next=0)
remark = remarks_on(more_rows, "training")[0]
print(f"{verdict([remark])}: {remark['code']}, expected {remark['expected']}, got {remark['got']}")

folder = Path(tempfile.mkdtemp())
(folder / "batch.svg").write_text(svg(cells, "A packed batch in mode 4"), encoding="utf-8")
(folder / "explorer.html").write_text(page(), encoding="utf-8")
for name, picture in gallery().items():
    (folder / name).write_text(picture, encoding="utf-8")
print(f"{len(list(folder.iterdir()))} files in {folder}")

"""Draws overviews of the package: its interfaces, back ends and layers."""

import fusion_attention as fa
from fusion_attention.backends import BACKENDS
from fusion_attention.ops import RECORDS
from website.svg import Picture

INTEGRATIONS = (
    ("transformers", 'attn_implementation="fusion_attention"', "a"),
    ("torch SDPA, FlexAttention", "the same calls, packed and banded", "a"),
    ("flash-attn", "flash_attn_varlen_func on a CPU", "a"),
    ("torch_npu", "npu_fusion_attention and its family", "c"),
    ("aclnn", "two phases, codes, workspaces", "c"),
    ("fusion_attention", "attention(q, k, v, band=...)", "d"),
)
ENGINES = {
    "cpu": ("C++ core", "x86-64 up to AVX-512 BF16, and Arm", "b"),
    "triton": ("Triton kernels", "NVIDIA GPUs, CUDA graphs", "b"),
    "golden": ("golden", "float64: the judge of both", "b"),
}


def overview() -> Picture:
    """Draws the interfaces, the common problem description and the back ends."""
    picture = Picture(1080, 496, "Six APIs, one intermediate representation, three back ends")
    picture.note(170, 34, "code that you have", 14, anchor="middle")
    picture.note(555, 34, "one meaning", 14, anchor="middle")
    picture.note(925, 34, "the machine at hand", 14, anchor="middle")
    wx, wy, ww, wh = 420, 108, 270, 262
    for place, (name, says, colour) in enumerate(INTEGRATIONS):
        y = 54 + place * 68
        middle, into = y + 29, wy + 46 + place * 34
        picture.path(f"M322 {middle}C372 {middle} 366 {into} {wx} {into}", stroke=colour, width=2)
        picture.rect(18, y, 304, 58, "panel", r=9, stroke="rule")
        picture.rect(18, y + 9, 5, 40, colour, r=2)
        picture.text(40, y + 26, name, size=17, bold=True)
        picture.note(40, y + 46, says)
    engines = [ENGINES[name] for name in ("cpu", "triton", "golden") if name in BACKENDS]
    for place, (name, says, colour) in enumerate(engines):
        y = 88 + place * 112
        middle, out = y + 39, wy + 84 + place * 47
        picture.path(f"M{wx + ww} {out}C742 {out} 736 {middle} 788 {middle}", stroke=colour, width=2, arrow=True)
        picture.rect(790, y, 272, 78, "panel", r=9, stroke="rule")
        picture.rect(790, y + 12, 5, 54, colour, r=2)
        picture.text(812, y + 35, name, size=18, bold=True)
        picture.note(812, y + 57, says)
    picture.rect(wx, wy, ww, wh, "panel", r=14, stroke="a")
    picture.text(wx + ww / 2, wy + 32, "softmax over the keys", size=17, bold=True, anchor="middle")
    picture.text(wx + ww / 2, wy + 53, "that each row sees", size=17, bold=True, anchor="middle")
    picture.grid(wx + (ww - 14 * 16 + 2) / 2, wy + 72, _packed_cells(), 14)
    picture.note(wx + ww / 2, wy + 240, f"{len(RECORDS)} operators, one contract each", anchor="middle")
    words = "a wrong call says what to do before anything is computed; golden judges every result in the tests"
    picture.note(540, 480, words, anchor="middle")
    return picture


def overview_tall() -> Picture:
    """Draws the overview from top to bottom, for a small screen."""
    picture = Picture(420, 706, "Six APIs, one intermediate representation, three back ends")
    picture.note(210, 20, "code that you have", 14, anchor="middle")
    for place, (name, _, colour) in enumerate(INTEGRATIONS):
        x, y = 6 + place % 2 * 207, 34 + place // 2 * 58
        picture.rect(x, y, 201, 48, "panel", r=9, stroke="rule")
        picture.rect(x, y + 8, 5, 32, colour, r=2)
        picture.text(x + 18, y + 30, name.replace("torch SDPA, ", "SDPA, "), size=15.5, bold=True)
    for x in (106, 210, 314):
        picture.path(f"M{x} 200C{x} 226 {(x + 630) / 4:g} 222 {(x + 630) / 4:g} 246", stroke="a", width=2)
    picture.rect(75, 246, 270, 224, "panel", r=14, stroke="a")
    picture.text(210, 276, "softmax over the keys", size=17, bold=True, anchor="middle")
    picture.text(210, 297, "that each row sees", size=17, bold=True, anchor="middle")
    picture.grid(99, 314, _packed_cells(), 14)
    picture.note(210, 500, "one meaning", 14, anchor="middle")
    for place, name in enumerate(("cpu", "triton", "golden")):
        x = 6 + place * 138
        title, _says, colour = ENGINES[name]
        begin = (x + 66 + 630) / 4
        curve = f"M{begin:g} 512C{begin:g} 540 {x + 66} 530 {x + 66} 566"
        picture.path(curve, stroke=colour, width=2, arrow=True)
        picture.rect(x, 570, 132, 62, "panel", r=9, stroke="rule")
        picture.text(x + 66, 596, title, size=15.5, bold=True, anchor="middle")
        words = ("x86-64 and Arm", "NVIDIA GPUs", "float64, judges")[place]
        picture.note(x + 66, 617, words, 12.5, anchor="middle")
    picture.note(210, 662, f"{len(RECORDS)} operators, one contract each:", 13.5, anchor="middle")
    picture.note(210, 682, "a wrong call says what to do", 13.5, anchor="middle")
    return picture


def _packed_cells() -> list[list[str]]:
    """Returns two packed sequences, one with a window and one causal."""
    cells = [["bg"] * 14 for _ in range(9)]
    sequences = ((0, 0, 5, 8, fa.Band.window(3), "a"), (5, 8, 4, 6, fa.Band.causal(), "b"))
    for start, first, rows, keys, band, colour in sequences:
        for i, row in enumerate(band.visible(rows, keys).tolist()):
            cells[start + i][first : first + keys] = [colour if is_visible else "off" for is_visible in row]
    return cells

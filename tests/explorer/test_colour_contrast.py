"""The explorer's colours: text has enough contrast with its background, in light and dark (WCAG 2, level AA)."""

import re

import pytest

from fusion_attention.explorer import draw
from fusion_attention.explorer.page import page as text

STYLE = re.search(r"<style>(.*?)</style>", text(), re.DOTALL)
READABLE = 4.5
KNEE = 0.04045  # of sRGB, which is linear below it
SEEN_APART = 3.0  # what is no text: cells beside cells


def themes() -> dict[str, dict[str, str]]:
    """Theme -> colours by name of the CSS variable."""
    assert STYLE
    blocks = [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block)) for block in STYLE[1].split(":root")[1:]]
    return dict(zip(("light", "dark by system", "dark by choice"), blocks, strict=True))


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= KNEE else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark by system", "dark by choice"])
def test_text_colours_have_sufficient_contrast(theme: str) -> None:
    colours = themes()[theme]
    words = ("text", "soft", "ok", "note", "chip", "refused", "none", "string", "number", "word", "comment")
    pairs = [(word, behind) for word in words for behind in ("card", "faint", "page")]
    assert [pair for pair in pairs if contrast(*(colours[name] for name in pair)) < READABLE] == []
    assert contrast(colours["text"], colours["accent-soft"]) >= READABLE
    assert contrast(colours["soft"], colours["accent-soft"]) >= READABLE


@pytest.mark.parametrize("theme", ["light", "dark by system", "dark by choice"])
def test_visible_cells_have_sufficient_contrast(theme: str) -> None:
    colours = themes()[theme]
    for visible_class in ("k3", "k4"):
        assert contrast(colours[visible_class], colours["k1"]) >= SEEN_APART
    assert contrast(colours["k3"], colours["k2"]) >= 2
    assert contrast(colours["accent"], colours["card"]) >= SEEN_APART


def test_system_and_chosen_dark_themes_are_equal() -> None:
    result = themes()
    assert result["dark by system"] == result["dark by choice"]
    assert result["light"].keys() == result["dark by choice"].keys()


def test_pictures_have_the_colours_of_the_page() -> None:
    result = themes()
    for colours, kinds in ((result["light"], draw.LIGHT), (result["dark by choice"], draw.DARK)):
        assert kinds[draw.VISIBLE] == colours["k3"]
        assert kinds[draw.PREFIX] == colours["k4"]


def test_page_declares_language_and_viewport() -> None:
    full = text()
    assert '<html lang="en"' in full
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in full

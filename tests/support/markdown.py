"""Markdown as the tests of pages read it: fenced blocks, links and headings."""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from support.sources import ROOT

_FENCE = re.compile(r"^( *)```([\w+-]*)[^\n]*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?<!`)\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^)\s]+)\)")
_CODE = re.compile(r"`[^`\n]*`")


def pages() -> list[Path]:
    """Every page of the site, and what stands beside it in the tree."""
    others = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "csrc/README.md")]
    return [path for path in (*others, *sorted((ROOT / "docs").rglob("*.md"))) if path.is_file()]


def fenced(path: Path) -> Iterator[tuple[str, str]]:
    """(language, text) of every block, inside lists and tabs too."""
    for _, language, text in _FENCE.findall(path.read_text(encoding="utf-8")):
        yield language, textwrap.dedent(text)


def blocks(path: Path, language: str = "python") -> list[str]:
    """The blocks of a language."""
    return [text for found, text in fenced(path) if found == language]


def links(path: Path) -> list[str]:
    """Where a page's links and pictures lead, those outside the tree left out."""
    text = _CODE.sub("", _FENCE.sub("", path.read_text(encoding="utf-8")))
    return [target for target in _LINK.findall(text) if not re.match(r"[a-z]+:", target)]


def anchors(path: Path) -> set[str]:
    """The names of a page's headings, as the site's builder makes them."""
    text = _FENCE.sub("", path.read_text(encoding="utf-8"))
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("\\", "")
        name = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", shown).strip().lower())
        number = 1
        while name in found:
            name, number = f"{name.rsplit('_', 1)[0] if number > 1 else name}_{number}", number + 1
        found.add(name)
    return found

"""Reads Markdown for the tests of pages: fenced blocks, links and headings."""

import re
import textwrap
from collections.abc import Iterator
from functools import cache

from support.sources import ROOT

from website.everything import generated, with_tables

_FENCE = re.compile(r"^( *)```([\w+-]*)[^\n]*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?<!`)\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^)\s]+)\)")
_CODE = re.compile(r"`[^`\n]*`")


def written() -> dict[str, str]:
    """Returns the text of every page in git, by path."""
    others = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "csrc/README.md")]
    paths = [*others, *sorted((ROOT / "docs").rglob("*.md"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


@cache
def pages() -> dict[str, str]:
    """Returns the text of every page by path, with generated tables and pages; takes 20 seconds."""
    results = {name: with_tables(text) for name, text in written().items()}
    return results | {f"docs/{name}": text for name, text in generated().items() if name.endswith(".md")}


def fenced(page: str) -> Iterator[tuple[str, str]]:
    """Yields (language, text) of every block, also inside lists and tabs."""
    for _, language, text in _FENCE.findall(page):
        yield language, textwrap.dedent(text)


def blocks(page: str, language: str = "python") -> list[str]:
    """Returns the blocks of a language."""
    return [text for result, text in fenced(page) if result == language]


def links(page: str) -> list[str]:
    """Returns the targets of a page's links and pictures inside the tree."""
    text = _CODE.sub("", _FENCE.sub("", page))
    return [target for target in _LINK.findall(text) if not re.match(r"[a-z]+:", target)]


def anchors(page: str) -> set[str]:
    """Returns the anchors of a page's headings, as the site's builder names them."""
    text = _FENCE.sub("", page)
    results: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("\\", "")
        name = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", shown).strip().lower())
        number = 1
        while name in results:
            name, number = f"{name.rsplit('_', 1)[0] if number > 1 else name}_{number}", number + 1
        results.add(name)
    return results

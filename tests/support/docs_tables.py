"""Writes the tables of docs/with_*.md: the tests of an integration and their results.

python tests/integrations/test_sdpa.py          # writes its page's table; also test_flex_docs_table.py
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *rows))


def written(page: str) -> str:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return text.split(BEGIN)[1].split(END)[0]


def write(page: str, lines: str) -> None:
    path = ROOT / "docs" / page
    text = path.read_text(encoding="utf-8")
    path.write_text(re.sub(f"{BEGIN}.*?{END}", lambda _: BEGIN + lines + END, text, flags=re.DOTALL), encoding="utf-8")

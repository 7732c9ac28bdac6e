"""The words of sources and pages: the field's own, in place of those that this project had."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from support.sources import ROOT

# waist is IR, face interface, door integration, verb kind of operation, mend recompute or fix, memo cache, spoil
# invalid, companion auxiliary, stretch segment.
REPLACED = re.compile(
    r"(?<![a-z])(waist|hourglass|faces?|doors?|house|verbs?|mend(s|ed)?|memos?|spoil(s|ed|t)?|companions?|stretch(es)?)"
    r"(?![a-z])|refuses to know",
    re.IGNORECASE,
)
PROSE = re.compile(r"\b(whoever|nobody|somebody)\b", re.IGNORECASE)
UPSTREAM = re.compile(r"__deepcopy__|--face\b|`waist`|font-face|`mend`")  # torch's names, and what kept its name


def texts() -> Iterator[tuple[str, str]]:
    """(file, line) of every text that people read in the repository, this list apart."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in listed:
        path = ROOT / name
        if path.suffix in (".py", ".pyi", ".md", ".h", ".cpp", ".js", ".html", ".toml", ".yml") and path.is_file():
            if name.startswith("docs/assets/") or path == Path(__file__):
                continue
            for line in path.read_text(encoding="utf-8").splitlines():
                yield name, line


def test_no_word_of_our_own_where_the_field_has_one() -> None:
    wrong = [f"{name}: {line.strip()}" for name, line in texts() if REPLACED.search(line) and not UPSTREAM.search(line)]
    assert not wrong, "\n".join(wrong)


def test_sources_and_pages_say_what_does_it() -> None:
    """A noun and a verb, in place of `whoever` and `nobody`."""
    wrong = [
        f"{name}: {line.strip()}" for name, line in texts() if PROSE.search(line) and not name.startswith("tests/")
    ]
    assert not wrong, "\n".join(wrong)

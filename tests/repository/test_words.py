"""Sources and pages use standard terms of the field, not the former terms of this project."""

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from support.sources import ROOT

# Replacements: IR for waist, interface for face, integration for door, kind of operation for verb, recompute or fix for
# mend, cache for memo, invalid for spoil, auxiliary for companion, segment for stretch.
REPLACED = re.compile(
    r"(?<![a-z])(waist|hourglass|faces?|doors?|house|verbs?|mend(s|ed)?|memos?|spoil(s|ed|t)?|companions?|stretch(es)?)"
    r"(?![a-z])|refuses to know",
    re.IGNORECASE,
)
PROSE = re.compile(r"\b(whoever|nobody|somebody)\b", re.IGNORECASE)
# Identifiers that are too vague; each place has a noun (visible, retained, chunk, shard, float32_results, ...).
VAGUE = re.compile(
    r"_*(own|told|found|seen|held|whole|plain|wide|piece|part|share|cut|places|said|asked|kept|known|made)_*",
    re.IGNORECASE,
)
# Names that stay: file -> names and the reason.
STAYS = {
    "explorer/seen.py": ("seen", "the former name of a module, for one release"),
    "explorer/visible.py": ("own", "the explorer's links have this key, and its JavaScript passes it"),
    "testing/cases.py": ("part seen", "exports of fusion_attention.testing"),
    "testing/plain.py": ("plain", "an export of fusion_attention.testing"),
    "testing/sparse.py": ("seen wide", "a method and a field of the public cases"),
    "tests/support/compressed.py": ("seen", "overrides the method of the public cases"),
}
# A docstring that begins with these is a question or a fragment, not a statement about what is returned or done.
OPENING = re.compile(r"(what|whether|how|who|whoever|whose|those|of|that|where)\b", re.IGNORECASE)
# Texts that may break a rule. Only these are parsed, because parsing all sources would take 16 seconds.
PYTHON_LITERAL = re.compile(r'""".*?"""|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|#[^\n]*', re.DOTALL)
VAGUE_WORD = re.compile(rf"(?<!\w){VAGUE.pattern}(?!\w)", re.IGNORECASE)
OPENING_LINE = re.compile(rf'(?:^|:)\s*[rRuU]?(?:"""|\'|")\s*{OPENING.pattern}', re.IGNORECASE | re.MULTILINE)
UPSTREAM = re.compile(r"__deepcopy__|--face\b|`waist`|font-face|`mend`")  # torch's names, and what kept its name


@cache
def texts() -> dict[str, str]:
    """Texts of the repository's sources and pages by file name, without this file."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    kinds = (".py", ".pyi", ".md", ".h", ".cpp", ".js", ".html", ".toml", ".yml")
    paths = {name: ROOT / name for name in listed if name.endswith(kinds) and not name.startswith("docs/assets/")}
    return {n: p.read_text(encoding="utf-8") for n, p in paths.items() if p.is_file() and p != Path(__file__)}


def test_sources_and_docs_avoid_replaced_terms_and_indefinite_pronouns() -> None:
    pattern = re.compile(f"{REPLACED.pattern}|{PROSE.pattern}", re.IGNORECASE)
    wrong = [
        f"{name}: {line.strip()}"
        for name, text in texts().items()
        if pattern.search(text)  # of few files
        for line in text.splitlines()
        if pattern.search(line) and not UPSTREAM.search(line)
    ]
    assert not wrong, "\n".join(wrong)


def bound(nodes: list[ast.AST]) -> Iterator[str]:
    """The identifiers that a source binds."""
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.alias) and node.asname:
            yield node.asname


def vague(name: str, text: str) -> Iterator[str]:
    """The identifiers and the first lines of docstrings of a Python source that are vague."""
    nodes = list(ast.walk(ast.parse(text)))
    stays = STAYS.get(name.removeprefix("src/fusion_attention/"), ("", ""))[0].split()
    for identifier in (Path(name).stem, *bound(nodes)):
        if VAGUE.fullmatch(identifier) and identifier not in stays:
            yield f"{name}: {identifier}"
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node) or ""
            if OPENING.match(docstring):
                yield f"{name}: {docstring.splitlines()[0]}"


def test_identifiers_and_docstring_openings_are_not_vague() -> None:
    wrong = [
        line
        for name, text in texts().items()
        if name.endswith(".py")
        if VAGUE_WORD.search(PYTHON_LITERAL.sub(" ", f"{Path(name).stem} {text}")) or OPENING_LINE.search(text)
        for line in vague(name, text)
    ]
    assert not wrong, "\n".join(wrong)


def test_vague_identifiers_and_docstring_openings_are_reported() -> None:
    source = 'class A:\n    r"""What a row sees."""\ndef seen(part): "Those of a row."\nself.known_, kept_rows = rows\n'
    names = [f"wide.py: {name}" for name in ("Those of a row.", "What a row sees.", "known_", "part", "seen", "wide")]
    assert sorted(vague("wide.py", source)) == names
    assert len(OPENING_LINE.findall(source)) == 2
    assert all(VAGUE_WORD.search(line) for line in ("self.known_, kept_rows = rows", "def f(part):", "with a as seen:"))


# A comment or a literal of a C++ source: raw string, string, character (not a digit separator).
LITERAL = re.compile(
    r"//[^\n]*|/\*.*?\*/|R\"(\w*)\(.*?\)\1\"|\"(?:\\.|[^\"\\\n])*\"|(?<![0-9A-Fa-f])'(?:\\.|[^'\\\n])+'", re.DOTALL
)


def test_cpp_identifiers_are_not_vague() -> None:
    sources = [name for name in texts() if re.match(r"(csrc|tests/native)/.*\.(h|cpp)$", name)]
    identifiers = {n: set(re.findall(r"\b[A-Za-z_]\w*\b", LITERAL.sub(" ", texts()[n]))) for n in sources}
    wrong = [f"{n}: {i}" for n in sources for i in sorted(identifiers[n]) if VAGUE.fullmatch(i)]
    assert len(sources) > 100
    assert not wrong, "\n".join(wrong)


def comments(path: Path) -> Iterator[str]:
    """The first line of every full-line comment of a C++ source."""
    inside = False
    for line in path.read_text(encoding="utf-8").splitlines():
        comment = re.match(r"\s*// *(.*)", line)
        if comment and not inside:
            yield comment[1]
        inside = comment is not None


def test_cpp_comments_begin_with_a_noun_or_a_verb() -> None:
    sources = [path for ending in ("h", "cpp") for path in sorted((ROOT / "csrc").rglob(f"*.{ending}"))]
    wrong = [f"{path.name}: {first}" for path in sources for first in comments(path) if OPENING.match(first)]
    assert len(sources) > 100
    assert not wrong, "\n".join(wrong)

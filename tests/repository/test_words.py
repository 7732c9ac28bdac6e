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
}
# A docstring that begins with these is a question or a fragment, not a statement about what is returned or done.
OPENING = re.compile(r"(what|whether|how|who|whoever|whose|those|of|that|where)\b", re.IGNORECASE)
UPSTREAM = re.compile(r"__deepcopy__|--face\b|`waist`|font-face|`mend`")  # torch's names, and what kept its name


@cache
def texts() -> dict[str, str]:
    """Texts of the repository's sources and pages by file name, without this file."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    kinds = (".py", ".pyi", ".md", ".h", ".cpp", ".js", ".html", ".toml", ".yml")
    paths = {name: ROOT / name for name in listed if name.endswith(kinds) and not name.startswith("docs/assets/")}
    return {n: p.read_text(encoding="utf-8") for n, p in paths.items() if p.is_file() and p != Path(__file__)}


def lines_with(pattern: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    for name, text in texts().items():
        if pattern.search(text):  # of few files
            yield from ((name, line.strip()) for line in text.splitlines() if pattern.search(line))


def test_sources_and_docs_avoid_replaced_project_terms() -> None:
    wrong = [f"{name}: {line}" for name, line in lines_with(REPLACED) if not UPSTREAM.search(line)]
    assert not wrong, "\n".join(wrong)


def test_sources_and_docs_avoid_indefinite_pronouns() -> None:
    wrong = [f"{name}: {line}" for name, line in lines_with(PROSE)]
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


def wrong_names(name: str, nodes: list[ast.AST]) -> Iterator[str]:
    stays = STAYS.get(name.removeprefix("src/fusion_attention/"), ("", ""))[0].split()
    for identifier in (Path(name).stem, *bound(nodes)):
        if VAGUE.fullmatch(identifier) and identifier not in stays:
            yield f"{name}: {identifier}"


def wrong_openings(name: str, nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node) or ""
            if OPENING.match(docstring):
                yield f"{name}: {docstring.splitlines()[0]}"


def test_identifiers_and_docstring_openings_are_not_vague() -> None:
    """One test, because reading all sources takes most of its time."""
    wrong: list[str] = []
    for name, text in texts().items():
        if not name.endswith(".py"):
            continue
        nodes = list(ast.walk(ast.parse(text)))
        wrong += [*wrong_names(name, nodes), *wrong_openings(name, nodes)]
    assert not wrong, "\n".join(wrong)


def test_vague_identifiers_and_docstring_openings_are_reported() -> None:
    source = """
def seen(part, rows):
    'What a row sees.'
    self.known_, kept_rows = rows
    with rows as (held, rest):
        pass
"""
    nodes, exempt = list(ast.walk(ast.parse(source))), "src/fusion_attention/testing/cases.py"
    assert sorted(wrong_names("wide.py", nodes)) == [
        f"wide.py: {n}" for n in ("held", "known_", "part", "seen", "wide")
    ]
    assert sorted(wrong_names(exempt, nodes)) == [f"{exempt}: held", f"{exempt}: known_"]
    assert list(wrong_openings("wide.py", nodes)) == ["wide.py: What a row sees."]


# A comment or a literal of a C++ source: raw string, string, character (not a digit separator).
LITERAL = re.compile(
    r"//[^\n]*|/\*.*?\*/|R\"(\w*)\(.*?\)\1\"|\"(?:\\.|[^\"\\\n])*\"|(?<![0-9A-Fa-f])'(?:\\.|[^'\\\n])+'", re.DOTALL
)


def cpp_identifiers(text: str) -> set[str]:
    return set(re.findall(r"\b[A-Za-z_]\w*\b", LITERAL.sub(" ", text)))


def test_cpp_identifiers_are_not_vague() -> None:
    planted = 'int own = 1\'000; char c = \'"\'; // seen\nauto s = "told\\""; /* cut */ Part held_;'
    assert {name for name in cpp_identifiers(planted) if VAGUE.fullmatch(name)} == {"own", "Part", "held_"}
    sources = [name for name in texts() if re.match(r"(csrc|tests/native)/.*\.(h|cpp)$", name)]
    wrong = [f"{n}: {i}" for n in sources for i in sorted(cpp_identifiers(texts()[n])) if VAGUE.fullmatch(i)]
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

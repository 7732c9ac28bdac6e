"""Pages are correct: generated ones are up to date, links and commands exist, pictures match formulas."""

import posixpath
import re
import shlex
from collections.abc import Callable

import pytest
import torch
from support.markdown import anchors, blocks, fenced, links, pages, written
from support.sources import ROOT
from typer.main import get_command

import fusion_attention as fa
from codegen.__main__ import files
from fusion_attention.cli import app, docstring_markdown, op_pages, op_support
from fusion_attention.contract import BackendError
from fusion_attention.explorer.draw import cells_of, is_seen
from fusion_attention.ops import RECORDS
from fusion_attention.ops.auxiliary_definitions.definitions import AUXILIARY, CONTRACTS
from website import charts, everything, hooks, masks, reference
from website.pictures import in_memory

# Languages of blocks, and the test that runs them, or the reason why none does.
LANGUAGES = {
    "python": "test_examples.py", "pycon": "test_examples.py, as a docstring", "pyi": "a signature",
    "bash": "test_shell_commands_in_docs_exist", "sh": "test_shell_commands_in_docs_exist",
    "text": "not run", "diff": "not run", "": "not run", "c": "a fragment", "json": "a fragment",
}  # fmt: skip


# Pages by path inside docs/, known before they are generated, which takes 20 seconds.
GENERATED = {f"reference/{name}.md" for name in ("index", *reference.PAGES)}
GENERATED |= {f"ops/{name}.md" for name in ("index", "versions", *CONTRACTS)}


def test_generated_files_in_git_are_up_to_date() -> None:
    """`python -m codegen` writes the files."""
    assert [name for name, text in files().items() if (ROOT / name).read_text(encoding="utf-8") != text] == []


def test_code_blocks_have_known_languages() -> None:
    unknown = {(name, kind) for name, text in written().items() for kind, _ in fenced(text) if kind not in LANGUAGES}
    assert not unknown


@pytest.mark.parametrize("texts", [written, pytest.param(pages, marks=pytest.mark.slow)])
def test_links_of_docs_pages_resolve(texts: Callable[[], dict[str, str]]) -> None:
    anchors_of = {name: anchors(text) for name, text in texts().items()}
    targets = anchors_of.keys() | {f"docs/pictures/{name}.svg" for name in everything.PICTURES}
    targets |= {f"docs/{name}" for name in GENERATED}
    dead = []
    for name, text in texts().items():
        for target in links(text):
            file, _, anchor = target.partition("#")
            result = posixpath.normpath(posixpath.join(posixpath.dirname(name), file)) if file else name
            if not (result in targets or (ROOT / result).exists()) or (
                anchor and anchor not in anchors_of.get(result, {anchor})
            ):
                dead.append(f"{name}: {target}")
    assert not dead


def commands() -> list[tuple[str, str]]:
    """(page, command line) of every shell block, without its comment."""
    results = [(name, b) for name, text in written().items() for kind in ("bash", "sh") for b in blocks(text, kind)]
    lines = [(name, line.partition(" #")[0].strip()) for name, block in results for line in block.splitlines()]
    return [(page, line) for page, line in lines if line]


def unknown_words(line: str) -> list[str]:
    """Words of a command line that do not exist: make targets, subcommands, options, test files."""
    words = [word for word in shlex.split(line) if not re.match(r"[A-Z_]+=", word)]
    program, rest = words[0], words[1:]
    if program == "make":
        targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        return [word for word in rest if word not in targets]
    if program == "fusion-attention":
        subcommands = get_command(app).commands  # type: ignore[attr-defined]
        if rest[:1] and rest[0] not in subcommands and not rest[0].startswith("-"):
            return rest[:1]
        options = {name for p in subcommands[rest[0]].params for name in p.opts} | {"--help"} if rest else set()
        return [word for word in rest[1:] if word.startswith("--") and word.partition("=")[0] not in options]
    if program.endswith("python") and "pytest" in rest:
        return [word for word in rest if word.startswith("tests/") and not (ROOT / word).exists()]
    return (
        []
        if program in ("pip", "apt-get", "python", "git", "cd", "torchrun", "cmake", "ctest", "cc")
        or "python" in program
        else [program]
    )


def test_shell_commands_in_docs_exist() -> None:
    listed = commands()
    assert len(listed) > 40
    assert [(page, line) for page, line in listed if unknown_words(line)] == []


def test_every_page_is_in_the_navigation() -> None:
    lines = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").splitlines()
    named = {name for line in lines if "#" not in line for name in re.findall(r"[\w/]+\.md", line)}
    site = {name.removeprefix("docs/") for name in written() if name.startswith("docs/")}
    site |= GENERATED
    assert {name for name in site if not name.startswith(("ops/", "dev/"))} <= named
    grouped = str(hooks.operators())
    assert all(f"'ops/{name}.md'" in grouped for name in CONTRACTS)
    assert op_pages.OTHERS not in grouped, "an operator is in no family: cli/op_pages.py, GROUPS"


@pytest.mark.parametrize("name", CONTRACTS)
def test_operator_page_has_call_example_support_and_parameters(name: str) -> None:
    op, page = CONTRACTS[name], op_pages.page(CONTRACTS[name])
    for heading in ("Call", "Example", "Support", "Parameters"):
        assert page.count(f"\n## {heading}\n") == 1, heading
    [program] = blocks(page)
    assert program.strip() == op_pages.example(op).strip()  # test_examples.py runs it
    assert f"{op.called}(" in program or f"{op.called}GetWorkspaceSize(" in page
    assert "\n$$\n" in page or name in AUXILIARY, "its record has no formula in TeX"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_support_matrix_matches_back_end_behaviour(dtype: str) -> None:
    stated = dict(op_support.matrix(RECORDS["attention"]))[dtype]
    x = torch.randn(1, 4, 2, 16).to(getattr(torch, dtype))
    for backend in ("cpu", "golden"):
        if stated[backend] == "yes":
            assert fa.attention(x, x, x, backend=backend).dtype == x.dtype
        else:
            with pytest.raises(BackendError):
                fa.attention(x, x, x, backend=backend)


def test_operator_pages_show_no_annotated_types() -> None:
    """`Annotated` tells torch's schema that a tensor is written; callers pass tensors."""
    for op in AUXILIARY.values():
        assert "Annotated" not in op_pages.page(op)


def test_docstrings_become_markdown() -> None:
    """Stars and brackets are escaped outside code, and parameters that share a line become list entries."""
    text = "Rows [T, N*D], see docs/decode.md.\n\n    out = a * b\n\nUse `a*b`."
    assert docstring_markdown.prose(text, "../") == (
        "Rows \\[T, N\\*D\\], see [decode](../decode.md).\n\n    out = a * b\n\nUse `a*b`."
    )
    listed = docstring_markdown.arguments("heads: how many. dim: of a row;\n    else: 0.", "", ["heads", "dim"])
    assert listed == ["* `heads`: how many.", "* `dim`: of a row; else: 0."]
    assert list(docstring_markdown.sections("One.\n\nArgs:\n    x: a.\n\nExample:\n    >>> 1\n")) == [
        "",
        "Args",
        "Example",
    ]


def test_operator_page_lists_back_end_limitations() -> None:
    score = "npu_fused_infer_attention_score"
    assert "computes out_quant none, not tensor" in op_support.gaps(RECORDS[score])["triton"]
    assert "computes out\\_quant none, not tensor" in op_pages.page(RECORDS[score])
    assert "| float16 | yes | yes | yes | yes |" in op_pages.page(RECORDS["lightning_indexer"])
    assert op_support.gaps(RECORDS["npu_fusion_attention"]) == {}


def test_sparse_mode_picture_marks_the_visible_keys() -> None:
    """tests/explorer/test_calls.py compares the visible keys with results of the operators."""
    visible = [is_seen(cells_of(setting)) for _, _, setting in masks.MODES]  # type: ignore[arg-type]
    assert [setting.mode for _, _, setting in masks.MODES] == list(range(9))
    assert masks.gallery().render().count(": seen<") == sum(int(one.sum()) for one in visible)


@pytest.mark.parametrize("layout", ["BSND", "BNSD", "SBH", "BSH"])
def test_layout_picture_matches_memory_order(layout: str) -> None:
    sizes = {"B": 2, "S": 4, "N": 2}
    axes = [axis for axis in layout.replace("H", "N") if axis in sizes]
    number = torch.arange(16).reshape([sizes[axis] for axis in axes]).permute([axes.index(axis) for axis in "BSN"])
    positions = in_memory(layout, [4, 4], 2)
    assert [int(number[place]) for place in positions] == list(range(16))


def test_charted_speed_ratio_is_close_to_quotient_of_medians() -> None:
    for row in charts.rows():
        quotient = row["peer_ms"] / row["ours_ms"]  # the ratio is a median over turns
        assert quotient / 2 < row["ratio"] < quotient * 2, row


def test_chart_bar_lengths_match_speed_ratios() -> None:
    text = charts.beside_masks().render()
    widths = [float(w) for w in re.findall(r'<rect x="372" y="[\d.]+" width="([\d.]+)"', text)]
    ratios = [charts.ratio(group, name, peer) for group, name, peer, *_ in charts.SHAPED]
    assert len(widths) == len(ratios)
    for width, value in zip(widths, ratios, strict=True):
        assert round(width / 11.6 + 1, 1) == round(value, 1)


def test_links_between_pages_stay_in_docs() -> None:
    """The site is built from docs alone, and its build stops at a link to another file."""
    docs = ROOT / "docs"
    links = [
        (page, link)
        for page in docs.rglob("*.md")
        for link in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
        if not link.startswith("http")
    ]
    assert len(links) > 100
    outside = [
        f"{page.name}: {link}" for page, link in links if not (page.parent / link).resolve().is_relative_to(docs)
    ]
    assert not outside, "\n".join(outside)

"""`fusion-attention ops`: the list, a page, the pages of a folder, and what every page says."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text
from typer.testing import CliRunner

from fusion_attention import aclnn
from fusion_attention.cli import app, op_pages
from fusion_attention.cli.stubs import stub
from fusion_attention.contract import doc_pages
from fusion_attention.contract.doc_pages import render
from fusion_attention.ops import RECORDS
from fusion_attention.ops.companions import CONTRACTS
from fusion_attention.ops.training import records as training

NAME = "npu_fusion_attention"


def invoke(*arguments: Any) -> tuple[int, str]:
    """Exit code and text, without colours and line ends."""
    # Forced colour would make a terminal of the pipe, and a page is drawn on a terminal.
    runner = CliRunner(env={"FORCE_COLOR": None})
    outcome = runner.invoke(app, ["ops", *map(str, arguments)], terminal_width=200)
    return outcome.exit_code, " ".join(Text.from_ansi(outcome.output).plain.split())


def test_list_names_every_operator() -> None:
    code, text = invoke()
    assert code == 0
    assert all(name in text for name in CONTRACTS)


def test_page() -> None:
    assert invoke(NAME) == (0, " ".join(op_pages.page(RECORDS[NAME]).split()))


def test_unknown_operator_suggests() -> None:
    code, text = invoke("fusion_attention_v2")
    assert code == 2
    assert "no operator 'fusion_attention_v2'" in text
    assert f"{NAME}_v2" in text


def test_write_then_check(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "pages"
    assert invoke("--write", folder)[0] == 0
    assert {path.stem for path in folder.iterdir()} == {*CONTRACTS, "index", "versions"}
    assert f"[{NAME}]({NAME}.md)" in (folder / "index.md").read_text(encoding="utf-8")
    assert invoke("--check", folder)[0] == 0


def test_versions_say_what_each_takes() -> None:
    for page in doc_pages.versions(RECORDS.values()).split("\n## ")[1:]:
        lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines()[2:] if line]
        ops = [RECORDS[re.search(r"\((\w+)\.md\)", title)[1]] for title in lines[0][1:]]  # type: ignore[index]
        assert len(ops) > 1
        taken: dict[str, list[str]] = {op.name: [] for op in ops}
        for name, *cells in lines[2:]:
            for op, cell in zip(ops, cells, strict=True):
                taken[op.name] += [name if cell == "yes" else cell] if cell else []
        for op in ops:
            shown = {f"`{p.shown}`" for p in op.params}
            assert {name for name in taken[op.name] if name[0] == "`"} == shown
            assert {name[7:] for name in taken[op.name] if name[0] != "`"} in (set(op.layouts), set())


def test_check_names_each_wrong_page(tmp_path: Path) -> None:
    invoke("--write", tmp_path)
    (tmp_path / f"{NAME}.md").write_text("old", encoding="utf-8")
    (tmp_path / "index.md").unlink()
    (tmp_path / "gone.md").write_text("", encoding="utf-8")
    code, text = invoke("--check", tmp_path)
    assert code == 1
    for line in (f"stale: {tmp_path / NAME}.md", f"missing: {tmp_path / 'index.md'}", f"extra: {tmp_path / 'gone.md'}"):
        assert line in text
    assert "3 files differ" in text


def test_check_of_an_absent_folder_fails(tmp_path: Path) -> None:
    code, text = invoke("--check", tmp_path / "absent")
    assert code == 1
    assert text.count("missing:") == len(CONTRACTS) + 2  # the index, and what versions take


def test_options_exclude_each_other(tmp_path: Path) -> None:
    code, text = invoke(NAME, "--check", tmp_path)
    assert code == 2
    assert "exclude each other" in text


def test_the_stub_is_written_and_checked_beside_the_pages(tmp_path: Path) -> None:
    stub = tmp_path / "aclnn.pyi"
    assert invoke("--write", tmp_path, "--stub", stub)[0] == 0
    assert invoke("--check", tmp_path, "--stub", stub)[0] == 0
    stub.write_text(stub.read_text(encoding="utf-8").replace("check_content: bool = False", "", 1), encoding="utf-8")
    code, text = invoke("--check", tmp_path, "--stub", stub)
    assert code == 1
    assert f"stale: {stub}" in text
    assert invoke("--check", tmp_path)[0] == 0
    for arguments in (["--stub", stub], [NAME, "--stub", stub]):
        code, text = invoke(*arguments)
        assert code == 2
        assert "--stub goes with --write or --check" in text


def test_the_stub_is_what_runs() -> None:
    """Every function with its parameters, defaults, annotations and documentation, as Python itself reads the stub."""
    text = stub([getattr(aclnn, name) for name in aclnn.__all__])
    space: dict[str, Any] = {}
    exec(compile(text, "_aclnn.pyi", "exec"), space)
    assert [name for name in space if name.startswith("aclnn")] == aclnn.__all__
    for name in aclnn.__all__:
        real, shown = getattr(aclnn, name), space[name]
        assert inspect.signature(shown, eval_str=True) == inspect.signature(real, eval_str=True, globals=vars(aclnn))
        assert inspect.getdoc(shown) == inspect.getdoc(real)


@pytest.mark.parametrize("name", CONTRACTS)
def test_a_page_says_everything(name: str) -> None:
    op, page = CONTRACTS[name], render(CONTRACTS[name])
    assert page == render(op)
    for p in op.params:
        assert f"| `{p.shown}` |" in page
        assert p.text.replace("|", "\\|") in page
    for rule in op.asked:
        assert op.spell(rule.expected).replace("|", "\\|") in page
        assert op.spell(rule.advice).replace("|", "\\|") in page
    for word in re.findall(r"`(\w+)`", page):
        assert not any(word == p.name for p in op.params if p.spelled), f"{word} is spelled otherwise here"


@pytest.mark.parametrize("name", CONTRACTS)
def test_a_page_explains_every_axis_that_it_uses(name: str) -> None:
    page = render(CONTRACTS[name])
    explained = {part.split()[0] for line in re.findall(r"^Axes: (.*)\.$", page, re.M) for part in line.split(", ")}
    tables = page.partition("## Parameters")[2]
    symbols = " ".join(re.findall(r"\[[^\]`]*\]|`[^`]*`", tables))
    assert set(re.findall(r"\b[A-Z][a-z]?[12]?\b", symbols)) <= explained


@pytest.mark.parametrize("name", CONTRACTS)
def test_a_page_has_cann_s_own_names(name: str) -> None:
    op, page = CONTRACTS[name], render(CONTRACTS[name])
    assert bool(op.cann) is name.startswith("aclnn")
    assert ("\nCANN's names are those of " in page) is bool(op.cann)
    for p in op.params if op.cann else ():
        assert f"| `{p.shown}` | `{op.cann[p.shown]}` | " in page


# What our names and CANN's do not share: the rest differs in spelling alone.
OTHERWISE = {
    "pse": {"realShiftOptional", "pseShiftOptional"},
    "scale": {"scaleValue", "scaleValueOptional"},
    "softmax_layout": {"softmaxOutLayout", "softmaxInLayout"},
    "key_rope": {"keyInRope"},
    "layout": {"inputLayout"},
    "actual_seq_lengths_query": {"actualSeqQLenOptional"},
    "actual_seq_lengths_key": {"actualSeqKvLenOptional"},
    "dquery": {"dqOut"},
    "dkey": {"dkOut"},
    "weights": {"weight"},
    "dweights": {"dWeightOut"},
    **{f"dequant_scale{n}": {f"deqScale{n}", f"deqScale{n}Optional"} for n in (1, 2)},
}


@pytest.mark.parametrize("name", aclnn.OPERATORS)
def test_cann_s_names_are_ours_in_other_letters(name: str) -> None:
    for ours, cann in RECORDS[name].cann.items():
        alike = re.fullmatch(ours.replace("_", "_?") + "(in|out)?(optional)?", cann, re.I)
        assert alike or cann in OTHERWISE[ours], (ours, cann)


def test_a_page_says_what_strict_calls_refuse() -> None:
    page = render(RECORDS["aclnnIncreFlashAttentionV4"])
    assert "| `query` | tensor | float16, bfloat16, float32; strict: float16 or bfloat16 |" in page
    assert "| float32, bfloat16, uint64; strict: float32, or bfloat16 as query |" in page
    assert "strict: float16 or bfloat16 |" in render(RECORDS["aclnnSparseFlashAttentionGrad"])
    assert "strict: " not in render(RECORDS["sparse_attention"])


def test_a_page_says_how_packed_statistics_lie() -> None:
    for name, op in RECORDS.items():
        packed = op in training.RECORDS and "TND" in op.layouts
        assert ("[N1, q_len, 8] of each sequence end to end" in render(op)) is packed, name


@pytest.mark.parametrize("name", CONTRACTS)
def test_tables_of_a_page_have_whole_rows(name: str) -> None:
    rows = 0
    for block in render(CONTRACTS[name]).split("\n\n"):
        lines = [line for line in block.splitlines() if line.startswith("|")]
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in lines}
        assert len(widths) <= 1, block
        rows += len(lines)
    assert rows > len(CONTRACTS[name].params)

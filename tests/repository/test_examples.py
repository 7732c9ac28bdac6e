"""Every example runs: scripts, docstrings, and the python blocks of README and docs pages."""

import doctest
import importlib
import math
import re
import runpy
from pathlib import Path

import pytest
import typer
from support import scripts
from support.markdown import blocks, written
from support.sources import ROOT, modules

import fusion_attention as fa
from fusion_attention import npu
from fusion_attention.cli import op_pages
from fusion_attention.ops.auxiliary_definitions.definitions import CONTRACTS

# Arguments that keep training and generation short in `make test`.
ARGUMENTS = {
    "finetune_minilm": ["--steps", "2", "--pairs", "4"],
    "generate": ["--tokens", "8"],
    "pack_and_train": ["--steps", "2", "--texts", "4", "--longest", "128"],
    "serve": ["--tokens", "8"],
    "train_context_parallel": ["--steps", "1", "--tokens", "512", "--folder", "{folder}"],
    "train_dsa": ["--steps", "1", "--folder", "{folder}"],
    "train_sparse_transformers": ["--families", "deepseek_v4", "--steps", "1", "--tokens", "64"],
    "train_v4": ["--steps", "1", "--folder", "{folder}"],
}
# Modules with examples in docstrings, or with functions that get examples from operator definitions.
# tests/acl/test_acl.py runs the examples of acl, which need its runtime.
EXAMPLES = re.compile(r"^ +>>> |^@(from_record|computed)\(", re.M)
DOCUMENTED = [n for n, path in modules().items() if EXAMPLES.search(path.read_text()) and n.split(".")[0] != "acl"]


# tests/judging/test_pictures.py runs find_the_bug, which sets Triton's interpreter before triton is imported.
SCRIPTS = [p for p in sorted((ROOT / "examples").glob("*.py")) if p.stem not in ("find_the_bug", "byte_model")]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_examples_run(path: Path, tmp_path: Path) -> None:
    arguments = [word.format(folder=tmp_path) for word in ARGUMENTS.get(path.stem, [])]
    result = scripts.python(path, *arguments, modules=("torch", "fusion_attention", "transformers.modeling_utils"))
    assert result.returncode == 0, result.stderr
    assert result.stdout


@pytest.mark.sampled(4)
@pytest.mark.parametrize("factor", [1.01, math.nan])
def test_finetune_example_fails_when_loss_curves_differ(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    script = runpy.run_path(str(ROOT / "examples" / "finetune_minilm.py"))
    texts = [
        ("Return the sum.", "Missing values count as zero, others as they are."),
        ("Stop.", "Wait for no thread."),
    ] * 3
    monkeypatch.setitem(script["main"].__globals__, "draw_pairs", lambda count, seed: texts)
    right = fa.attention
    monkeypatch.setattr(fa, "attention", lambda *args, **kwargs: right(*args, **kwargs) * factor)
    with pytest.raises(typer.Exit) as end:
        script["main"](steps=3, pairs=2, seed=0)
    assert end.value.exit_code == 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", DOCUMENTED)
def test_docstring_examples_pass_doctest(name: str) -> None:
    module = importlib.import_module(f"fusion_attention.{name}")
    result = doctest.testmod(module, extraglobs={"torch": importlib.import_module("torch")})
    assert result.attempted > 0
    assert result.failed == 0


def run_page(name: str, programs: list[str]) -> None:
    """Run a page's programs in order, in one namespace, then uninstall "npu", which some programs leave installed."""
    names: dict[str, object] = {}
    try:
        for block in programs:
            exec(compile(block, name, "exec"), names)
    finally:
        npu.uninstall()


# Pages whose blocks run; one compiles graphs of half a minute.
PAGES = [name for name, text in written().items() if name[:4] == "docs" and blocks(text)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=pytest.mark.slow) if p == "docs/ascend_code.md" else p for p in PAGES]
)
def test_python_blocks_of_docs_pages_run(page: str) -> None:
    run_page(page, blocks(written()[page]))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CONTRACTS)
def test_examples_of_operators_run(name: str) -> None:
    """test_pages.py asserts that an operator's page has no other program."""
    run_page(name, [op_pages.example(CONTRACTS[name])])


@pytest.mark.parametrize("block", blocks(written()["README.md"]))
def test_every_block_of_the_readme_runs_alone(block: str) -> None:
    exec(compile(block, "README.md", "exec"), {})


FOLDERS = (".", "src/fusion_attention", "src/fusion_attention/backends/triton", "csrc", "tests")


@pytest.mark.parametrize(
    "page", ["docs/dev/design.md", "docs/dev/testing.md", "docs/sparse_modes.md", "CONTRIBUTING.md"]
)
def test_docs_pages_refer_to_existing_files(page: str) -> None:
    named = re.findall(
        r"`((?!build/)[\w*./]+/[\w*]+\.(?:py|h|cpp|md|json))[`:]", (ROOT / page).read_text(encoding="utf-8")
    )
    assert named
    assert [path for path in named if not any(list((ROOT / folder).glob(path)) for folder in FOLDERS)] == []

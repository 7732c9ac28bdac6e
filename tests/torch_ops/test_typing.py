"""Types agree with the code: overloads, calls of layers, values of parameters. Type checkers read tests/typed."""

import ast
import inspect
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import pytest

from fusion_attention import backends, nn
from fusion_attention.api import attention, decode, sparse
from fusion_attention.ops import RECORDS

ROOT = Path(__file__).resolve().parents[2]
OVERLOADED = {"attention": attention, "sparse_attention": sparse, "decode_attention": decode}


def parameters(function: ast.FunctionDef) -> list[tuple[str, str, str]]:
    """Returns (name, annotation, default) as written; "*" stands before the keyword-only parameters."""
    result = function.args
    assert not result.posonlyargs
    assert result.vararg is None
    assert result.kwarg is None or function.name == "attention"  # what it refuses there: test_foreign_words.py
    rows: list[tuple[str, str, str]] = []
    missing: list[ast.expr | None] = [None] * (len(result.args) - len(result.defaults))
    for names, defaults in ((result.args, missing + list(result.defaults)), (result.kwonlyargs, result.kw_defaults)):
        for p, default in zip(names, defaults, strict=True):
            kind = ast.unparse(p.annotation) if p.annotation else ""
            rows.append((p.arg, kind, ast.unparse(default) if default else "needed"))
        rows.append(("*", "", ""))
    return rows[:-1]


@pytest.mark.parametrize("name", OVERLOADED)
def test_overloads_match_the_implementation_signature(name: str) -> None:
    tree = ast.parse(Path(str(OVERLOADED[name].__file__)).read_text(encoding="utf-8"))
    *overloads, real = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    assert [[ast.unparse(d) for d in f.decorator_list] for f in overloads] == [["overload"]] * 3
    assert [ast.unparse(d) for d in real.decorator_list] in ([], ["aliased"])  # which changes no type
    full = parameters(real)
    parameter = ("return_lse", "bool", "False")
    answers = {
        ("return_lse", "Literal[False]", "False"): "Tensor",
        ("return_lse", "Literal[True]", "needed"): "tuple[Tensor, Tensor]",
        ("return_lse", "bool", "needed"): "Tensor | tuple[Tensor, Tensor]",
    }
    for overload, (literal, answer) in zip(overloads, answers.items(), strict=True):
        assert overload.args.kwarg is None  # Checkers are told of no word that is refused.
        assert parameters(overload) == [literal if row == parameter else row for row in full]
        assert ast.unparse(overload.returns or ast.Constant(None)) == answer
    assert ast.unparse(real.returns or ast.Constant(None)) == answer


@pytest.mark.parametrize(
    "name", ["LightningIndexer", "SparseAttention", "SparseSelfAttention", "SparseLatentAttention"]
)
def test_layer_call_has_the_type_of_forward(name: str) -> None:
    tree = ast.parse(Path(inspect.getfile(getattr(nn, name))).read_text(encoding="utf-8"))
    layer = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    (shown,) = (node for block in layer.body if isinstance(block, ast.If) for node in block.body)
    decorator = "called_as(attend)" if name == "SparseAttention" else "called_as(forward)"
    assert (shown.name, *map(ast.unparse, shown.decorator_list)) == ("__call__", decorator)
    assert "__call__" not in vars(getattr(nn, name))  # For checkers alone: torch's own runs hooks.


def test_literal_types_list_exactly_the_accepted_values() -> None:
    layouts = {"attention": attention, "sparse_attention": sparse, "lightning_indexer": sparse}
    layouts |= {"indexer_loss": sparse, "decode_attention": decode}
    for name, module in layouts.items():
        assert set(get_args(module.Layout)) == set(RECORDS[name].layouts)
    assert repr(get_args(attention.EmptyRows)) in str(RECORDS["attention"].by_name["empty_rows"].domain)
    assert set(get_args(backends.BackendName)) == {"auto", *backends.BACKENDS}
    assert get_args(nn.Stage) == nn.STAGES


@pytest.mark.slow
@pytest.mark.parametrize(
    "checker",
    [pytest.param(c, marks=pytest.mark.skipif(not find_spec(c), reason=f"no {c}")) for c in ("mypy", "basedpyright")],
)
def test_type_checkers_report_every_wrong_call_of_tests_typed(checker: str, tmp_path: Path) -> None:
    """Without `type: ignore`, each call that must be an error is reported in the line of the call."""
    text = (ROOT / "tests/typed/interfaces.py").read_text(encoding="utf-8")
    lines = [number for number, line in enumerate(text.splitlines(), 1) if "# type: ignore[" in line]
    wrong = tmp_path / "wrong.py"
    wrong.write_text(text.replace("# type: ignore[", "# was ["), encoding="utf-8")
    options = ["--config-file=pyproject.toml"] if checker == "mypy" else []
    command = [sys.executable, "-m", checker, *options, str(wrong)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert [n for n in lines if f"wrong.py:{n}:" not in done.stdout] == []
    assert len(lines) > 20

"""Imports load modules only when they are needed, and torch's compiler only at the first trace.

Times vary on a busy machine, so modules are counted. Every program runs in a new interpreter.
"""

import ast
import importlib
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.scripts import python

import fusion_attention as fa
from fusion_attention import cli as command_line
from fusion_attention.cli import app

ROOT = Path(__file__).resolve().parents[2]


def run(program: str, *arguments: str, torch: bool = False) -> Any:
    """Run a program and return its last printed line, parsed as JSON; torch: the process has already imported torch."""
    words = "-c", f"import json, sys\n{program}", *arguments
    done = python(*words) if torch else subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# ---------------------------------------------------------------------------------------------------- package interface


def test_package_import_loads_only_the_standard_library() -> None:
    before = "before = set(sys.modules)\n"
    loaded = run(f"{before}import fusion_attention\nprint(json.dumps([*set(sys.modules) - before]))")
    assert {m for m in loaded if m.split(".")[0] == "fusion_attention"} == {"fusion_attention"}
    assert {m.split(".")[0] for m in loaded} - {"fusion_attention"} <= set(sys.stdlib_module_names)
    assert len(loaded) < 25


EAGER = """
import torch
brought = set(sys.modules)
import fusion_attention as fa
q = torch.randn(1, 4, 2, 16, requires_grad=True)
fa.attention(q, q, q)
loaded = sorted(set(sys.modules) - brought)
"""


def test_first_attention_call_imports_no_other_packages() -> None:
    loaded = run(f"{EAGER}print(json.dumps(loaded))", torch=True)
    # From Python 3.14 on, ast.unparse() is in a separate module of the standard library.
    assert {m for m in loaded if m.split(".")[0] != "fusion_attention"} <= {"_ast_unparse"}
    # The call needs no modules for torch_npu's names, captures, layers or the two-phase interface.
    buffers = {word for m in loaded for word in m.split(".")[1:]}
    unneeded = {"npu", "capture", "nn", "acl", "aclnn", "cli", "testing", "trace_constants", "sampling", "doc_pages"}
    unneeded |= {"integrations"}
    assert not buffers & unneeded
    assert len(loaded) < 80


EVERYTHING = """
with torch.no_grad():
    cache = fa.PagedKVCache(heads=2, dim=16, pages=4, page_size=4)
    cache.append([cache.allocate()], q, q)
    fa.decode_attention(q, cache)
indices, values = fa.lightning_indexer(q, q[:, :, :1], q[..., 0], 2)
out, lse = fa.sparse_attention(q, q[:, :, :1], None, indices, return_lse=True)
(fa.indexer_loss(q, q[:, :, :1], lse, q, q[:, :, :1], q[..., 0], indices) + out.sum() + values.sum()).backward()
from fusion_attention import npu
npu.npu_fusion_attention(q, q, q, 2, "BSND", keep_prob=0.5)[0].sum().backward()
import fusion_attention.aclnn, fusion_attention.nn, fusion_attention.integrations.flex_attention
import tempfile
with tempfile.TemporaryDirectory() as folder:
    with fa.capture(folder) as recorded:
        fa.attention(q, q, q)
    fa.replay(recorded.files[0])
"""


def test_torch_dynamo_is_imported_only_by_a_trace() -> None:
    program = """
compiler = ["torch._dynamo" in brought, "torch._dynamo" in sys.modules]
torch.compile(lambda q: fa.attention(q, q, q), backend="eager", fullgraph=True)(q)
print(json.dumps([*compiler, "fusion_attention.torch_ops.trace_constants" in sys.modules]))
"""
    before, now, traced = run(EAGER + EVERYTHING + program, torch=True)
    assert now is before
    assert traced


FACTS = """
import importlib, pickle, pydoc, rlcompleter
import fusion_attention as fa
facts = {"listed": dir(fa)}
facts["late"] = {name: getattr(fa, name).__module__ for name in fa.__all__}
facts["kept"] = [name for name in fa.__all__ if name in vars(fa)]
from fusion_attention import *
facts["missing"] = [name for name in fa.__all__ if name not in globals()]
facts["completed"] = rlcompleter.Completer({"fa": fa}).attr_matches("fa.")
facts["help"] = pydoc.plain(pydoc.render_doc(fa))
old = fa.attention, fa.Band.causal()
facts["reloaded"] = importlib.reload(fa) is fa and fa.attention is old[0] and fa.Band.causal() == old[1]
several = [fa.attention, fa.Band.window(3, 0), fa.capture, fa.Replay, fa.ContractError]
facts["pickled"] = pickle.loads(pickle.dumps(several)) == several
print(json.dumps(facts))
"""


def test_lazy_public_names_are_listed_reloadable_and_picklable() -> None:
    facts = run(FACTS, torch=True)
    tree = ast.parse(Path(fa.__file__).read_text(encoding="utf-8"))
    shown = {
        alias.name: node.module
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert list(facts["late"]) == fa.__all__ == sorted(shown)
    assert facts["kept"] == fa.__all__  # __getattr__ is not asked again.
    assert {name: f"fusion_attention.{home}" for name, home in fa._MODULES.items()} == shown
    for name, module in shown.items():
        assert getattr(fa, name) is getattr(sys.modules[str(module)], name)
    assert facts["missing"] == []
    assert facts["reloaded"]
    assert facts["pickled"]
    assert [name for name in facts["listed"] if not name.startswith("__")] == fa.__all__
    assert {match.removeprefix("fa.").rstrip("()") for match in facts["completed"]} == set(fa.__all__)
    behind = facts["help"][facts["help"].index("CLASSES") :]
    assert all(f"{name}(" in behind for name in fa.__all__)
    assert not [word for word in ("importlib", "_MODULES", "TYPE_CHECKING") if word in behind]


def test_unknown_attribute_raises_attribute_or_import_error() -> None:
    with pytest.raises(AttributeError, match="module 'fusion_attention' has no attribute 'atention'"):
        fa.atention  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'atention'"):
        from fusion_attention import atention  # type: ignore[attr-defined]  # noqa: F401
    assert not hasattr(fa, "__wrapped__")
    assert not hasattr(fa, "_api")


def test_submodule_import_error_names_the_missing_package() -> None:
    """A missing attribute of the package would hide the cause."""
    program = "sys.modules['torch'] = None\nimport fusion_attention as fa\ntry:\n    fa.memory\n"
    program += "except ImportError as error:\n    print(json.dumps(error.name))"
    assert run(program) == "torch"


@pytest.mark.parametrize(("former", "name"), [("seen", "visible"), ("remarks", "violations")])
def test_former_module_names_are_aliases(former: str, name: str) -> None:
    modules = (importlib.import_module(f"fusion_attention.explorer.{module}") for module in (former, name))
    assert len(set(modules)) == 1


SUBMODULES = ["acl", "aclnn", "api", "captures", "contract", "nn", "npu", "ops", "plan", "ir", "testing"]


def test_submodules_are_imported_on_attribute_access_without_linux_only_modules() -> None:
    program = """
import pkgutil, importlib, torch, rich.console, typer
for name in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[name] = None
import fusion_attention as fa
kinds = {}
for name in sys.argv[1:]:
    first = getattr(fa, name)
    importlib.import_module("fusion_attention." + name)
    kinds[name] = type(first).__name__ if getattr(fa, name) is first else "another"
import fusion_attention.cli.doctor
folders = ("acl", "api", "backends.cpu", "backends.golden", "contract", "ir", "nn", "npu", "ops", "torch_ops")
for folder in folders:
    package = importlib.import_module(f"fusion_attention.{folder}")
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
print(json.dumps(kinds))
"""
    assert run(program, *SUBMODULES, torch=True) == dict.fromkeys(SUBMODULES, "module")


def test_public_names_unpickle_in_a_new_process() -> None:
    program = "import pickle\nfound = pickle.loads(bytes.fromhex(sys.argv[1]))\nimport fusion_attention as fa\n"
    pickled = pickle.dumps([fa.capture, fa.Band]).hex()
    assert run(f"{program}print(json.dumps(found == [fa.capture, fa.Band]))", pickled, torch=True)


def test_concurrent_first_access_to_public_names_is_safe() -> None:
    program = """
import threading
import fusion_attention as fa
start, found = threading.Barrier(8), []
def ask(name):
    start.wait()
    found.append(getattr(fa, name).__name__)
threads = [threading.Thread(target=ask, args=(name,)) for name in sys.argv[1:]]
[t.start() for t in threads], [t.join() for t in threads]
print(json.dumps(sorted(found)))
"""
    names = ["Band", "Replay", "attention", "capture", "decode_attention", "replay", "sparse_attention", "indexer_loss"]
    assert run(program, *names, torch=True) == sorted(names)


# ------------------------------------------------------------------------------------------------------------- traces

TRACE = """
import torch
import fusion_attention as fa
q = torch.randn(1, 4, 2, 16)
def call(q):
    return fa.attention(q, q, q, band=fa.Band.causal())
"""
WAYS = {
    "strict export": "found = torch.export.export(Call(), (q,), strict=True).module()(q)",
    "export": "found = torch.export.export(Call(), (q,), strict=False).module()(q)",
    "vjp": "found = torch.func.vjp(call, q)[0]",
    "make_fx": "from torch.fx.experimental.proxy_tensor import make_fx; found = make_fx(call)(q)(q)",
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_first_import_of_attention_may_happen_inside_a_trace(way: str) -> None:
    """The trace loads the package and registers its operators."""
    module = "class Call(torch.nn.Module):\n    def forward(self, q):\n        return call(q)\n"
    imported_late = "first = 'fusion_attention.api.attention' in sys.modules\n"
    same = "print(json.dumps([first, bool(torch.equal(found, call(q)))]))"
    assert run(f"{TRACE}{module}{imported_late}{WAYS[way]}\n{same}", torch=True) == [False, True]


def test_lazy_imports_after_compile_cause_no_recompilation() -> None:
    """Late names change the package's namespace, which a compiled graph might guard."""
    program = """
made = []
def backend(module, inputs):
    made.append(module)
    return module.forward
first = "fusion_attention.api.attention" in sys.modules
fast = torch.compile(call, backend=backend, fullgraph=True)
same = bool(torch.equal(fast(q), call(q)))
fa.capture, fa.nn, fa.aclnn, fa.decode_attention
fast(q)
print(json.dumps([first, same, len(made)]))
"""
    assert run(TRACE + program, torch=True) == [False, True, 1]


# -------------------------------------------------------------------------------------------------------- command line


def test_the_command_line_starts_without_torch() -> None:
    commands = ["bench", "demo", "doctor", "explain", "npu", "ops", "replay"]
    helped = [f"{command} --help" for command in commands]
    lines = ["--help", "--version", *helped, "capi --cflags", "demo --runs=0", ""]
    program = """
from fusion_attention.cli import main
codes, first, lines = [], {}, sys.argv[1:]
for line in lines:
    sys.argv = ["fusion-attention", *line.split()]
    try:
        main()
    except SystemExit as end:
        codes.append(end.code)
    for module in ("torch", "numpy", "fusion_attention.api.attention"):
        if module in sys.modules:
            first.setdefault(module, line)
print()
print(json.dumps([codes, first]))
"""
    codes, first = run(program, *lines)
    assert first == {}
    assert codes == [0] * (len(lines) - 2) + [2, 2]


def test_cli_import_loads_no_command_specific_packages() -> None:
    """`--help` loads typer and its requirements. The test counts modules, because times vary."""
    program = """
import typer
known = set(sys.modules)
import fusion_attention.cli
print(json.dumps(sorted(set(sys.modules) - known)))
"""
    loaded = run(program)
    ours = [m for m in loaded if m.split(".")[0] == "fusion_attention"]
    assert len(ours) < 20
    assert [m for m in loaded if m.split(".")[0] not in {"fusion_attention", *sys.stdlib_module_names}] == []
    assert len(loaded) < 60


def test_python_m_prints_the_version() -> None:
    for name in ("fusion_attention", "fusion_attention.cli"):
        done = subprocess.run([sys.executable, "-m", name, "--version"], capture_output=True, text=True, check=True)
        assert done.stdout == f"fusion-attention {fa.__version__}\n"


def test_version_equals_pyproject_version() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'\nversion = "{fa.__version__}"\n' in text
    assert command_line.app is app

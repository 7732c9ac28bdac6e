"""Counts the uses of names of Ascend's Python packages in source files, and tells whether this library has the names.

Files are parsed with ast, not executed.
"""

import ast
import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

# A package's name in programs -> its name in the table that `coverage` prints.
ROOTS = {
    "torch_npu": "torch_npu",
    "torch.npu": "torch_npu.npu",
    "torch.ops.npu": "torch.ops.npu",
    "torch.ops.atb": "torch.ops.atb",
    "mindspeed.ops": "mindspeed.ops",
    "cann_ops_transformer": "cann_ops_transformer",
}
DEVICE = "npu"
LARGEST = 8 << 20  # bytes of a source file; a larger one is data
_MARKS = re.compile(rb"(?<![A-Za-z])npu|mindspeed|cann_ops_transformer")  # not the npu of "input"
_FUNCTION = re.compile(r"(?:torch_npu(?:\.atb)?|torch\.ops\.(?:npu|atb))\.(_?npu_\w+)")


@dataclass
class Use:
    """The uses of one name of Ascend's packages in source files."""

    name: str  # the full name, such as "torch_npu.npu_rms_norm"
    calls: int = 0  # number of calls
    others: int = 0  # number of imports and other references
    files: set[str] = field(default_factory=set)  # files with a use

    @property
    def function(self) -> str | None:
        """The name of the operator of torch_npu that this use refers to, also by an overload; None for other names."""
        result = _FUNCTION.match(self.name)
        return result and result[1]


@dataclass
class Reading:
    """The uses of Ascend's names in a tree of source files."""

    uses: dict[str, Use] = field(default_factory=dict)  # by name
    files: int = 0  # number of files that were read
    unread: dict[str, str] = field(default_factory=dict)  # the reason for each file that was not read
    device_tests: int = 0  # number of expressions that test whether a device is "npu"

    def _note(self, name: str, file: str, called: bool) -> None:
        """Counts a use of a full name in a file, if it belongs to an Ascend package; called: True for a call."""
        root = max((root for root in ROOTS if f"{name}.".startswith(f"{root}.")), key=len, default=None)
        if root is None or name == root:
            return
        full = ROOTS[root] + name[len(root) :]
        full = full.removesuffix(".default") if full.startswith("torch.ops.") else full
        use = self.uses.setdefault(full, Use(full))
        use.calls += called
        use.others += not called
        use.files.add(file)


def read(path: Path) -> Reading:
    """Returns a Reading with all uses of Ascend's packages in a file, or in all files *.py below a folder.

    Raises:
        OSError: the path does not exist.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "model.py").write_text("import torch_npu as t\\ny = t.npu_rms_norm(x, w)[0]")
        ...     [(use.name, use.calls) for use in read(Path(folder)).uses.values()]
        [('torch_npu.npu_rms_norm', 1)]
    """
    path.stat()
    reading = Reading()
    for file in _sources(path):
        name = str(file.relative_to(path)) if file != path else file.name
        try:
            if file.stat().st_size > LARGEST:
                raise ValueError(f"larger than {LARGEST >> 20} MiB")
            text, result = file.read_bytes(), Reading()
            if _MARKS.search(text):  # parsing is slow, and few files mention these packages
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # warnings about the source that is read
                    tree = ast.parse(text)
                _File(result, name).read(tree)
        except (OSError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
            reading.unread[name] = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            continue
        reading.files += 1
        reading.device_tests += result.device_tests
        for full, use in result.uses.items():
            total = reading.uses.setdefault(full, Use(full))
            total.calls += use.calls
            total.others += use.others
            total.files |= use.files
    return reading


def present(name: str, modules: dict[str, ModuleType]) -> bool:
    """True if this library has a name of Ascend's packages.

    Args:
        name: a full name, as Use.name.
        modules: all modules that install() provides, by name.
    """
    if name in modules:
        return True
    owner: Any
    if name.startswith("torch.ops."):
        import torch

        owner, rest = torch.ops, name.split(".")[2:]
    else:
        parts = name.split(".")
        at = next((n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in modules), 0)
        if not at:
            return False
        owner, rest = modules[".".join(parts[:at])], parts[at:]
    absent = object()
    for name_part in rest:
        owner = getattr(owner, name_part, absent)
    return owner is not absent


def _is_device(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value == DEVICE


def _sources(path: Path) -> Iterator[Path]:
    """Yields the Python files of a folder in order, without hidden folders and installed packages; or the one file."""
    if path.is_file():
        yield path
        return
    for folder, inner, files in os.walk(path):
        inner[:] = sorted(name for name in inner if not name.startswith(".") and name != "site-packages")
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(".py"))


class _File:
    """Counts uses in one file: reads its imports, which give names meaning, then every chain of names a.b.c."""

    def __init__(self, reading: Reading, file: str) -> None:
        self.reading, self.file = reading, file
        self.meaning: dict[str, str] = {}

    def read(self, tree: ast.AST) -> None:
        """Adds all uses of names in the file's syntax tree to the Reading that was given to the constructor."""
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    first = alias.name.partition(".")[0]
                    self.meaning[alias.asname or first] = alias.name if alias.asname else first
                    self.reading._note(alias.name, self.file, called=False)
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                for alias in node.names:
                    name = node.module if alias.name == "*" else f"{node.module}.{alias.name}"
                    self.meaning[alias.asname or alias.name] = name
                    self.reading._note(name, self.file, called=False)
        inner: set[int] = set()  # nodes inside a collected chain
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                self._call(node, inner)
            elif isinstance(node, (ast.Attribute, ast.Name)) and id(node) not in inner:
                self._chain(node, inner, called=False)
            elif isinstance(node, ast.Compare):  # with the constant "npu" on one side, or in a list on one side
                texts = [node.left, *node.comparators]
                texts += [e for t in texts if isinstance(t, (ast.Tuple, ast.List, ast.Set)) for e in t.elts]
                self.reading.device_tests += any(map(_is_device, texts))
            elif isinstance(node, ast.MatchValue):
                self.reading.device_tests += _is_device(node.value)

    def _call(self, node: ast.Call, inner: set[int]) -> None:
        """Counts the called name, device tests by startswith("npu"), and names as text in getattr() and hasattr().
        inner: ids of syntax nodes inside counted chains of names a.b.c, to which those of this call are added."""
        self._chain(node.func, inner, called=True)
        begins = isinstance(node.func, ast.Attribute) and node.func.attr == "startswith"
        self.reading.device_tests += begins and any(map(_is_device, node.args))
        by_text = isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr") and len(node.args) > 1
        if by_text and isinstance(literal := node.args[1], ast.Constant) and isinstance(literal.value, str):
            owner = self._name(node.args[0], set())
            if owner and literal.value.isidentifier():
                self.reading._note(f"{owner}.{literal.value}", self.file, called=False)

    def _chain(self, node: ast.AST, inner: set[int], *, called: bool) -> None:
        """Counts the full name of the chain a.b.c that ends at a syntax node, unless its id is in `inner`."""
        if id(node) in inner or (isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)):
            return
        if isinstance(node, ast.Attribute) and node.attr == "is_npu":
            self.reading.device_tests += 1
        if name := self._name(node, inner):
            self.reading._note(name, self.file, called)

    def _name(self, node: ast.AST, inner: set[int]) -> str | None:
        """Returns the full name of the chain a.b.c at a syntax node, with imports resolved, or None if it does not
        begin with an imported name; adds the ids of its nodes to `inner`."""
        parts: list[str] = []
        inner.add(id(node))
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
            inner.add(id(node))
        if not isinstance(node, ast.Name):
            inner.discard(id(node))  # for example a call, whose names are read later
            return None
        meaning = self.meaning.get(node.id)
        return meaning and ".".join([meaning, *reversed(parts)])

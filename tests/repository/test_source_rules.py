"""Rules of the source tree (docs/dev/design.md): layers, lengths, tolerances.

The tests read sources as text and syntax trees, and run from the repository root.
"""

import ast
import graphlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from support.sources import PACKAGE, ROOT, SOURCE, modules

# ------------------------------------------------------------------------------------------------------------- layers

# Module or package -> layer. Imports are from the same or a lower layer.
LAYERS = {
    "__main__": 7, "cli": 7, "api": 7, "refusals": 7, "bench": 7, "distributed": 7, "nn": 7, "npu": 7, "captures": 7,
    "integrations": 7, "explorer": 7, "judging": 7, "capi": 7, "fake_npu": 7,
    "aclnn": 6, "acl": 6, "torch_ops": 6, "_aclnn": 6,
    "plan": 5,
    "ops": 4, "backends": 4,
    "ir": 2,
    "contract": 1, "memory": 1, "patches": 1, "settings": 1,
    "_native": 0,
}  # fmt: skip

# Modules without a layer: the interface, which imports late (test_lazy_imports.py), and testing, which may import all
# modules and is imported only by tests and JUDGES.
INTERFACE, TESTING = "", "testing"
JUDGES = ("cli.selftest",)

# Modules that a machine may lack -> the only package in which an import at a module's top is allowed.
LAZY = {"backends.cpu": "backends.cpu", "backends.triton": "backends.triton", "_native": "backends.cpu"}
LAZY_THIRD_PARTY = {"triton": "backends.triton"}


def inside(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def exists(module: str) -> bool:
    return module in modules() or (SOURCE / f"{module.replace('.', '/')}.pyi").exists()


def targets(node: ast.AST, module: str) -> Iterator[str]:
    """The absolute names that an import statement binds, `from x import y` as x.y."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            here = [PACKAGE, *module.split(".")] if module else [PACKAGE]
            if modules()[module].name != "__init__.py":
                here = here[:-1]
            here = here[: len(here) - node.level + 1]
            base = ".".join([*here, *([base] if base else [])])
        yield from (f"{base}.{alias.name}" for alias in node.names)


def module_name(target: str) -> str:
    """The module of an absolute name in this package: the longest prefix that is a module."""
    parts = target.split(".")[1:]
    while parts and not exists(".".join(parts)):
        parts.pop()
    return ".".join(parts)


@cache
def imports(module: str) -> tuple[tuple[str, int, bool], ...]:
    """(absolute target, line, at the module's top) of every import in a module."""
    tree = ast.parse(modules()[module].read_text(encoding="utf-8"))
    return tuple((target, node.lineno, top) for node, top in statements(tree) for target in targets(node, module))


def statements(node: ast.AST, top: bool = True) -> Iterator[tuple[ast.stmt, bool]]:
    """(statement, outside all functions) of every statement beneath a node."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child, top
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from statements(child, top and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))


def package_imports(module: str) -> list[tuple[str, int, bool]]:
    return [
        (module_name(target), line, top) for target, line, top in imports(module) if target.split(".")[0] == PACKAGE
    ]


def layer(module: str) -> int:
    return LAYERS[module.split(".")[0]]


def subpackage(module: str) -> str:
    """Part of a layer: on layer 4 each back end is one part, and ops is one part."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "backends" else parts[0]


def reason_against(importer: str, imported: str) -> str | None:
    """The reason why one module of the package may not import another, or None."""
    if inside(importer, TESTING):
        return None
    if inside(imported, TESTING):
        return None if importer in JUDGES else "only tests import testing"
    if importer == INTERFACE:
        return None
    if imported == INTERFACE:
        return None if layer(importer) == 7 else "only the top layer may see the package's interface"
    if layer(imported) > layer(importer):
        return f"layer {layer(importer)} must not reach up to layer {layer(imported)}"
    if importer == "backends" and inside(imported, importer):
        return None  # It loads the back end that it chose.
    if layer(imported) == layer(importer) == 4 and subpackage(imported) not in (subpackage(importer), "backends"):
        return "ops and every back end never see each other"
    return None


def test_modules_never_import_from_higher_layers() -> None:
    wrong = [
        f"{importer or PACKAGE}:{line} imports {imported or PACKAGE}: {reason}"
        for importer in modules()
        for imported, line, _ in package_imports(importer)
        if (reason := reason_against(importer, imported))
    ]
    assert not wrong, "\n".join(wrong)


def test_modules_and_packages_have_no_circular_imports() -> None:
    """Layers allow imports between modules, and packages, of one layer; circles are errors, late imports included."""
    graph = {module: {name for name, _, _ in package_imports(module)} - {module} for module in modules()}
    packages: dict[str, set[str]] = {}
    for module, used in graph.items():
        package = module.split(".")[0]
        packages.setdefault(package, set()).update({name.split(".")[0] for name in used} - {package})
    free = {INTERFACE, TESTING}  # these may import all others
    between = {name: used - free for name, used in packages.items() if name not in free}
    for imported in (graph, between):
        graphlib.TopologicalSorter(imported).prepare()  # raises CycleError with the circle


def test_contract_names_are_imported_only_from_the_package() -> None:
    """Exceptions are doc_pages and sampling, which only the command and tests use."""
    inner = {"contract", "contract.doc_pages", "contract.sampling"}
    wrong = [
        f"{importer}:{line} imports {imported}: import it from {PACKAGE}.contract"
        for importer in modules()
        for imported, line, _ in package_imports(importer)
        if inside(imported, "contract") and imported not in inner and not inside(importer, "contract")
    ]
    assert not wrong, "\n".join(wrong)


def test_native_and_triton_back_ends_are_imported_lazily() -> None:
    wrong = []
    for importer in modules():
        if inside(importer, TESTING):
            continue
        for target, line, top in imports(importer):
            first = target.split(".")[0]
            table, name = (LAZY, module_name(target)) if first == PACKAGE else (LAZY_THIRD_PARTY, first)
            homes = [home for lazy, home in table.items() if inside(name, lazy)]
            if top and homes and not inside(importer, homes[0]):
                wrong.append(f"{importer}:{line} imports {target} at its top; a machine without it could not load it")
    assert not wrong, "\n".join(wrong)


# -------------------------------------------------------------------------------------------------------------- words

BELOW_THE_IR = ("ir/*.py", "backends/**/*.py")
# Underscores separate words, so npu_x contains npu; aclnn may precede an operator's name.
CANN_WORDS = re.compile(
    r"(?<![a-z0-9])(?:(?:BSND|BNSD|BSH|SBH|TND|sparse_mode|pse_type|npu)(?![a-z0-9])|aclnn)", re.IGNORECASE
)


def test_ir_and_back_ends_contain_no_cann_terms() -> None:
    files = [path for pattern in BELOW_THE_IR for path in SOURCE.glob(pattern)]
    core = ROOT / "csrc"  # of which capi is another interface, and no part of the core
    files += [path for path in core.rglob("*") if path.suffix in (".cpp", ".h") and core / "capi" not in path.parents]
    results = [
        f"{path.relative_to(ROOT)}:{number}: {match.group()}"
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for match in CANN_WORDS.finditer(line)
    ]
    assert not results, "words of CANN below problem.py (law 1):\n" + "\n".join(results)


# ------------------------------------------------------------------------------------------------------------ lengths

FILE_LINES, FUNCTION_LINES, KERNEL_LINES = 500, 60, 150
TRIPLE_QUOTED = re.compile(r'""".*?"""', re.DOTALL)
DEFINITION = re.compile(r"^( *)(?:(async def|def)|class) ", re.MULTILINE)


def package_files() -> list[Path]:
    code = [path for folder in ("src", "tests", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")]
    folders = ("csrc", "tests/native")
    native = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".cpp", ".h")]
    return sorted(code + native)


def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("triton" in ast.unparse(decorator) for decorator in node.decorator_list)


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end; a docstring is documentation and is not counted."""
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if ast.get_docstring(node) is not None:
        text = node.body[0]
        lines -= (text.end_lineno or text.lineno) - text.lineno + 1
    return lines


def may_be_too_long(text: str) -> bool:
    """True if a function's definition is so many lines before the next one that is not inside it; strings count."""
    blank = TRIPLE_QUOTED.sub(lambda match: "\n" * match[0].count("\n"), text)
    starts = [(blank.count("\n", 0, m.start()), len(m[1]), bool(m[2])) for m in DEFINITION.finditer(blank)]
    starts.append((blank.count("\n"), 0, False))
    return any(
        is_function and next(end for end, inner, _ in starts[i + 1 :] if inner <= indent) - line >= FUNCTION_LINES
        for i, (line, indent, is_function) in enumerate(starts)
    )


def too_long() -> dict[str, str]:
    results = {}
    for path in package_files():
        name = path.relative_to(ROOT).as_posix()
        text = path.read_text(encoding="utf-8")
        if (lines := text.count("\n")) >= FILE_LINES:
            results[name] = f"{lines} lines"
        for node, _ in statements(ast.parse(text)) if path.suffix == ".py" and may_be_too_long(text) else ():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                limit = KERNEL_LINES if is_kernel(node) else FUNCTION_LINES
                if length(node) >= limit:
                    results[f"{name}::{node.name}"] = f"{length(node)} lines, line {node.lineno}"
    return results


def test_files_and_functions_stay_short() -> None:
    assert too_long() == {}, "split these"


# --------------------------------------------------------------------------------------------------------- tolerances

# Largest tolerance that a test may set by hand, for comparisons in float64; 0 is an exact comparison.
EXACT = 1e-11
# Function that compares within a tolerance -> position of its first tolerance.
CLOSE = {"assert_close": 3, "allclose": 2, "assert_allclose": 2, "isclose": 2, "approx": 1}
TOLERANCES = {"rtol", "atol", "rel", "abs", "rel_tol", "abs_tol"}
COMPARES = re.compile(rf"{'|'.join(CLOSE)}|<[^\n]*(\.\d|\de-\d)")
# Test file -> the reason why it may set a tolerance by hand (docs/dev/design.md, How results are judged).
HAND_SET = {
    "inference/test_fused_worked_examples.py": "examples printed to six digits",
    "training/test_golden.py": "finite differences: a step's own error",
    "judging/test_error_bound.py": "quantiles as tables print them, and spreads of so many draws",
    "npu/test_transformers_window_warnings.py": "a whole model beside itself on another path",
}


def number(node: ast.expr) -> float | None:
    """Value of a literal or of a product of literals, or None."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return float(node.value)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and number(node.left) and number(node.right):
        return (number(node.left) or 0.0) * (number(node.right) or 0.0)
    return None


def by_hand(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, reason) of every comparison with a tolerance that is a literal number."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name not in CLOSE:
                continue
            given = [word.value for word in node.keywords if word.arg in TOLERANCES] + node.args[CLOSE[name] :]
            if not given:
                yield node.lineno, f"{name} with the tolerance that it has by itself"
            for value in given:
                # Literals count anywhere in it: 1e-4 * (1 + size) is set by hand, finfo(dtype).eps * size is not.
                parts = [
                    result
                    for node_inside in ast.walk(value)
                    if (result := number(node_inside) if isinstance(node_inside, ast.expr) else None)
                ]
                if any(EXACT < result < 1 for result in parts):
                    yield node.lineno, f"{name} within {ast.unparse(value)}"
        elif isinstance(node, ast.Compare) and isinstance(node.ops[-1], ast.Lt | ast.LtE):
            result = number(node.comparators[-1])
            if result is not None and EXACT < result < 0.1:
                yield node.lineno, f"within {result:g}"


def hand_set() -> dict[str, list[str]]:
    results: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for line, why in by_hand(ast.parse(text)) if COMPARES.search(text) else ():
            results.setdefault(path.relative_to(ROOT / "tests").as_posix(), []).append(
                f"tests/{path.name}:{line}: {why}"
            )
    return results


def test_tolerances_in_tests_are_never_set_by_hand() -> None:
    found_by_file = hand_set()
    wrong = [line for name, lines in found_by_file.items() if name not in HAND_SET for line in lines]
    assert not wrong, "judge by testing.compare, derive the bound, or compare in float64:\n" + "\n".join(wrong)
    assert not HAND_SET.keys() - found_by_file.keys(), "no number there any more: take them out of HAND_SET"


# ------------------------------------------------------------------------------------------------------------- tests

# Imports of test files; skips inside functions, which should be marks that a report shows before the test runs.
BETWEEN_TESTS = re.compile(
    r"^ +.*pytest\.(skip|importorskip|xfail)\((?!.*allow_module_level)|^\s*(from|import) (\w+\.)*test_", re.MULTILINE
)


def test_tests_never_skip_in_their_body_or_import_test_files() -> None:
    paths = [path for path in (ROOT / "tests").rglob("*.py") if BETWEEN_TESTS.search(path.read_text(encoding="utf-8"))]
    assert not paths, "mark the test, or move the shared code to tests/support"

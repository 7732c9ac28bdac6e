"""Rules on memory: results and scratch are allocated in memory.py only, where tests poison them.

The tests read syntax trees, as test_source_rules.py does.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache

from support.sources import modules

# Functions that allocate without writing. Results and scratch come from memory.py, where tests poison them, so that an
# unwritten element is a NaN in some comparison, not a number that is right by chance.
UNWRITTEN = {
    "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_", "resize_as_",
}  # fmt: skip
MENTIONED = re.compile(rf"\.({'|'.join(UNWRITTEN)})\b|^ *from (torch|numpy) import", re.MULTILINE)
# "module::function" -> the reason why it may allocate.
MAY_ALLOCATE = {
    "memory::empty": "the place itself",
    "memory::another": "the place itself",
    "memory::zeros": "the place itself",
    "memory::template": "the place itself",
    "memory::_lent": "the place itself",
    "backends.triton.common.layout_table::of": "a table, copied from an array in the next line",
    "acl.rt::_allocate": "memory of the caller's program, which says what it is for",
    "torch_ops.prepared::_stand_in": "an argument without memory",
    "npu.operators::schema_of": "a parameter without a default",
    "npu.functions_from_definitions::": "a parameter without a default",
    "npu.surface.metadata::_parameters": "a parameter without a default",
    "torch_ops.misspelled_arguments::misused": "a parameter without a default",
    "capi.device::allocate": "as acl.rt's",
    "npu.device.compiled::compile_fx": "an input of a trace, which has no memory",
}
COMPUTES_NOTHING = ("cli", "testing")


def allocations(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(innermost function, line) of every name of such an allocation, except allocations of no element."""
    nothing = {
        id(node.func)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and node.args and ast.unparse(node.args[0]) in ("0", "(0,)")
    }

    def visit(node: ast.AST, function: str) -> Iterator[tuple[str, int]]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        if isinstance(node, ast.Attribute) and node.attr in UNWRITTEN and id(node) not in nothing:
            yield function, node.lineno
        if isinstance(node, ast.ImportFrom) and node.module in ("torch", "numpy"):
            yield from ((function, node.lineno) for alias in node.names if alias.name in UNWRITTEN)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, function)

    return visit(tree, "")


@cache
def allocating() -> dict[str, list[int]]:
    """Lines of allocations by "module::function", for every module that computes."""
    results: dict[str, list[int]] = {}
    for module, path in modules().items():
        text = path.read_text(encoding="utf-8")
        if module.split(".")[0] not in COMPUTES_NOTHING and MENTIONED.search(text):  # parsing all takes six seconds
            for function, line in allocations(ast.parse(text)):
                results.setdefault(f"{module}::{function}", []).append(line)
    return results


def test_only_listed_functions_allocate_uninitialized_memory() -> None:
    wrong = {place: lines for place, lines in allocating().items() if place not in MAY_ALLOCATE}
    assert not wrong, (
        f"take memory.empty() instead, or say why not in tests/repository/test_memory_rules.py's MAY_ALLOCATE: {wrong}"
    )
    assert not set(MAY_ALLOCATE) - set(allocating()), "no longer allocates: take it out of MAY_ALLOCATE"

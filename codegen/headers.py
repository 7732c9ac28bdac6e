"""C declarations and definitions of the operators, from their records: aclnnop/*.h and csrc/capi/operators.inc.

What a header holds is the same text for every operator: its two functions with CANN's names and C types. A definition
packs its arguments and calls plan() or run() (csrc/capi/entry.h).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from textwrap import fill, wrap

from fusion_attention.contract import Attr, Op, Param, Prototype, Tensor, Tensors

PHASE_1 = "GetWorkspaceSize"
_NUMBERS = {int: "int64_t ", float: "double ", bool: "bool ", str: "char *"}
_WRITTEN = "Written from the operators' records by `python -m codegen`."
_TAIL = ["uint64_t *workspaceSize", "aclOpExecutor **executor"]
_RUN = ["void *workspace", "uint64_t workspaceSize", "aclOpExecutor *executor", "const aclrtStream stream"]


def c_type(p: Param, name: str, prototype: Prototype) -> str:
    """The C type of a parameter that CANN calls name, up to where that name begins.

    Example:
        >>> c_type(Attr("num_heads", "", type=int), "headNum", Prototype(("headNum",), ""))
        'int64_t '
    """
    if isinstance(p, Attr):
        return _NUMBERS[p.type]
    if isinstance(p, Tensors):
        return "const aclTensorList *"
    return "const aclTensor *" if isinstance(p, Tensor) or name in prototype.tensors else "const aclIntArray *"


def parameters(op: Op) -> list[tuple[str, str]]:
    """(C type, CANN's name) of every parameter, in order."""
    prototype = op.prototypes[op.name]
    return [(c_type(p, name, prototype), name) for p, name in zip(op.params, prototype.names, strict=True)]


def by_header(records: Mapping[str, Op]) -> dict[str, list[Op]]:
    """The operators that are CANN's functions, by the file that declares them; both in order of names."""
    results: dict[str, list[Op]] = {}
    for name, op in sorted(records.items()):
        if name.startswith("aclnn"):
            results.setdefault(op.prototypes[name].header, []).append(op)
    return dict(sorted(results.items()))


def header(name: str, ops: Iterable[Op]) -> str:
    """The text of aclnnop/<name>."""
    guard = "FUSION_ATTENTION_" + name.upper().replace(".", "_")
    explained: set[str] = set()
    functions = "\n".join(
        f"{_comment(op, explained)}\n{_declaration(op, True)};\n{_declaration(op, False)};\n" for op in ops
    )
    return f"""/* {_WRITTEN} */
#ifndef {guard}
#define {guard}

#include "aclnn/aclnn_base.h"

#ifdef __cplusplus
extern "C" {{
#endif

{functions}
#ifdef __cplusplus
}}
#endif

#endif
"""


def definitions(records: Mapping[str, Op]) -> str:
    """The text of operators.inc: every declared function, defined by the library's one plan() and run()."""
    files = by_header(records)
    includes = "\n".join(f'#include "aclnnop/{name}"' for name in files)
    bodies = "\n".join(_definition(op) for ops in files.values() for op in ops)
    return f"// {_WRITTEN}\n\n{includes}\n\n{bodies}"


def _comment(op: Op, explained: set[str]) -> str:
    """The texts of an operator and of its parameters, but for those that the header has explained."""
    lines = [fill(op.summary, 116, initial_indent="/* ", subsequent_indent=" * ")]
    for p, name in zip(op.params, op.prototypes[op.name].names, strict=True):
        text = f"{name}: {p.text}{' Null: absent.' if p.optional else ''}".replace("*/", "* /")
        if text not in explained:
            lines.append(fill(text, 116, initial_indent=" *   ", subsequent_indent=" *       "))
        explained.add(text)
    return "\n".join(lines) + " */"


def _declaration(op: Op, first: bool) -> str:
    words = [kind + name for kind, name in parameters(op)] + _TAIL if first else _RUN
    head = f"aclnnStatus {op.name}{PHASE_1 if first else ''}("
    return "ACL_FUNC_VISIBILITY " + head + "\n" + _flow(words) + ")"


def _definition(op: Op) -> str:
    names = op.prototypes[op.name].names
    outputs = sum(1 << i for i, p in enumerate(op.params) if isinstance(p, Tensor) and p.output)
    quoted = _flow([f'"{name}"' for name in names])
    first, second = (_declaration(op, phase).removeprefix("ACL_FUNC_VISIBILITY ") for phase in (True, False))
    short = op.name.removeprefix("aclnn")
    return f"""static const char *const names_of_{short}[] = {{
{quoted}}};
static const fusion::capi::Operator {short} = {{
    "{op.name}", names_of_{short}, {len(names)}, {outputs:#x}}};
{first} {{
    const fusion::capi::Value values[] = {{
{_flow(list(names), 8)}}};
    return fusion::capi::plan({short}, values, workspaceSize, executor);
}}
{second} {{
    return fusion::capi::run({short}, workspace, workspaceSize, executor, stream);
}}
"""


def _flow(words: Iterable[str], indent: int = 4) -> str:
    """Words with commas between them, in lines of up to 120 columns."""
    space = " " * indent
    joined = ", ".join(word.replace(" ", "\0") for word in words)  # Words with spaces inside stay whole.
    lines = wrap(joined, 117 - indent, break_long_words=False, break_on_hyphens=False)  # Leaves room for what follows.
    return "\n".join(space + line for line in lines).replace("\0", " ")


def files(records: Mapping[str, Op]) -> dict[str, str]:
    """Every written header by its path below the folder of headers."""
    return {f"aclnnop/{name}": header(name, ops) for name, ops in by_header(records).items()}

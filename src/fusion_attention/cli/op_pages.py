"""The page of an operator as Markdown: definition, call, docstring, example, and support by back ends."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from fusion_attention.cli import docstring_markdown, op_examples, op_support

if TYPE_CHECKING:
    from fusion_attention.contract import Op
    from fusion_attention.contract.doc_pages import Shown

ROOT = "../"  # from a page to docs/
OTHERS = "Others"
ONE_INTERFACE = "There is no two-phase function and no C function."
BY_TORCH = (
    "Computed by torch's own operators on every device of torch, with sums in float32 if the chip's sums are. "
    + ONE_INTERFACE
)
# Pattern of auxiliary operators' names -> the function that computes them.
BY_ANOTHER = {
    r"_npu_(paged|flash)_attention.*": "npu_fused_infer_attention_score",
    r"npu_quant_lightning_indexer": "npu_lightning_indexer",
    r"npu_kv_quant_sparse_flash_attention": "npu_sparse_flash_attention",
}
GROUPS = {
    "This library's own": r"(?!npu_|aclnn|cann_ops_transformer).*",
    "torch_npu: training": r"npu_fusion_attention.*",
    "torch_npu: inference": r"npu_(incre|prompt|fused_infer).*",
    "torch_npu: sparse": r"npu_(kv_quant_|block_)?(sparse|dense)_.*|npu_(quant_)?lightning.*",
    "torch_npu: around attention": r"_?npu_.*",
    "cann_ops_transformer": r"cann_ops_transformer\..*",
    "aclnn: training": r"aclnnFlashAttention.*",
    "aclnn: inference": r"aclnn(Incre|Prompt|FusedInfer).*",
    "aclnn: sparse": r"aclnn(Sparse|Dense|Lightning|BlockSparse|Compressor).*",
}


def groups(names: Iterable[str]) -> dict[str, list[str]]:
    """Returns {group title: operator names} in the order of the documentation's index; "Others" is the last group."""
    results: dict[str, list[str]] = {title: [] for title in (*GROUPS, OTHERS)}
    for name in names:
        results[next((title for title, form in GROUPS.items() if re.fullmatch(form, name)), OTHERS)].append(name)
    return {title: listed for title, listed in results.items() if listed}


def index(records: Mapping[str, Op]) -> str:
    """Returns the documentation's index of operators as Markdown; records: operator definitions by name."""
    lines = [
        "# Operators",
        "",
        "Each page is generated from the operator's definition: call, program, support by back ends, parameters,",
        "shapes and rules. [Versions](versions.md) compares the parameters of an operator's versions.",
        "",
    ]
    for title, names in groups(sorted(records)).items():
        lines += [f"## {title}", "", "| operator | description |", "|---|---|"]
        for name in names:
            summary = records[name].summary.replace("|", r"\|").replace("\n", " ")
            lines.append(f"| [{name}]({name}.md) | {summary} |")
        lines.append("")
    return "\n".join(lines)


@cache
def page(op: Op) -> str:
    """Returns an operator's documentation page as Markdown."""
    from fusion_attention.contract.doc_pages import render

    return render(op, shown(op), tex=True)


def terminal_page(op: Op) -> str:
    """Returns an operator's documentation page with formulas as plain text, for a terminal."""
    from fusion_attention.contract.doc_pages import render

    return render(op, shown(op))


def shown(op: Op) -> Shown:
    """Returns the sections of an operator's page besides its definition: signature, docstring, example, back ends."""
    from fusion_attention.contract.doc_pages import Shown

    if op.name.startswith("aclnn"):
        names = [*(p.shown for p in op.params), "*", "strict=True", "check_content=False"]
        first = docstring_markdown.filled(f"ret, workspace_size, executor = aclnn.{op.name}GetWorkspaceSize(", names)
        call = "\n".join([*first, f"ret = aclnn.{op.name}(workspace, workspace_size, executor, stream)"])
    else:
        call = docstring_markdown.signature(function(op), op.name)
    if op.lower:
        support = _support(op)
    elif name := another(op.name):
        support = f"Computed by [{name}]({name}.md), on the same devices. {ONE_INTERFACE}"
    else:
        support = BY_TORCH
    returned = f"**Returns**\n\n{docstring_markdown.prose(op.returns, ROOT)}" if op.returns else ""
    return Shown(call, returned if op.source else _text(function(op)), example(op), support)


def another(name: str) -> str:
    """Returns the name of the function that computes the auxiliary operator `name`; "" if torch computes it."""
    return next((result for form, result in BY_ANOTHER.items() if re.fullmatch(form, name)), "")


def function(op: Op) -> Any:
    """Returns the public Python function of an operator: of torch_npu, of CANN's package, or of this library."""
    import fusion_attention
    from fusion_attention import npu
    from fusion_attention.npu.surface.cann_ops import FROM_RECORDS

    if op.name in FROM_RECORDS:
        return FROM_RECORDS[op.name]
    return getattr(npu if op.name.startswith(("npu_", "_npu_")) else fusion_attention, op.name)


def _text(called: Any) -> str:
    """Returns a function's docstring as Markdown without summary and formulas; the list of arguments is folded."""
    result = docstring_markdown.sections(inspect.getdoc(called) or "")
    paragraphs = result[""].split("\n\n")[1:]  # the first is the summary
    prose_paragraphs = [text for text in paragraphs if " = " not in text.splitlines()[0]]  # formulas are set above
    lines = [docstring_markdown.prose("\n\n".join(prose_paragraphs), ROOT), ""] if prose_paragraphs else []
    if result.get("Args"):
        lines += ['<details markdown="1"><summary>Arguments in the docstring</summary>', ""]
        lines += [
            *docstring_markdown.arguments(result["Args"], ROOT, docstring_markdown.parameters(called)),
            "",
            "</details>",
            "",
        ]
    for name in ("Returns", "Raises"):
        if result.get(name):
            text = result[name]
            block = (
                docstring_markdown.arguments(text, ROOT) if name == "Raises" else [docstring_markdown.prose(text, ROOT)]
            )
            lines += [f"**{name}**", "", *block, ""]
    return "\n".join(lines).rstrip()


def example(op: Op) -> str:
    """Returns an operator's example program for its page, made from its definition or from its docstring."""
    if op.lower:
        return op_examples.program(op)
    code = "\n".join(re.findall(r"^(?:>>>|\.\.\.) (.*)", op.example, re.M))
    if op.name != op.called:
        return f"{op_examples.installed(op)}\n\n{code}"
    used = ", ".join(sorted({op.name, *re.findall(r"\b(?:get)?_?npu_\w+(?=\()", code)}))
    return f"import torch\nfrom fusion_attention.npu import {used}\n\n{code}"


def _support(op: Op) -> str:
    """Returns Markdown: a table of an operator's back ends by dtype, and legal calls that one does not compute."""
    if not op.tensors():
        return "The operator has no tensors, so no back end runs."
    names = [*op_support.COLUMNS.values(), op_support.CHIP]
    lines = [f"| `{op.tensors()[0].shown}` | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for dtype, row in op_support.matrix(op):
        cells = [row[name] or "no" for name in (*op_support.COLUMNS, op_support.CHIP)]
        lines.append(f"| {dtype} | {' | '.join(cells)} |")
    layouts = f", in {', '.join(op.layouts)}" if op.layouts else ""
    lines += [
        "",
        f"The table is for sample calls of the operator's definition{layouts}; the last column is for `strict` calls.",
    ]
    for name, refused in op_support.gaps(op).items():
        if refused:
            lines += ["", f"Limits of the back end {op_support.COLUMNS[name]}, with which it refuses calls:", ""]
            lines += [f"* it {docstring_markdown.markdown(text, ROOT)}" for text in refused]
    return "\n".join(lines)

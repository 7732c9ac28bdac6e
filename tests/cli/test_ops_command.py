"""`fusion-attention ops`: the list of operators, and the page of each."""

import functools
import inspect
import re
from types import ModuleType

import pytest
from support.commands import run

from codegen.stub import stub
from fusion_attention import aclnn
from fusion_attention.cli import op_pages
from fusion_attention.contract import doc_pages
from fusion_attention.contract.doc_pages import render
from fusion_attention.ops import RECORDS
from fusion_attention.ops.auxiliary_definitions.definitions import CONTRACTS
from fusion_attention.ops.training import definitions as training
from fusion_attention.ops.training import score_v4

NAME = "npu_fusion_attention"


def test_list_names_every_operator() -> None:
    outcome = run("ops")
    assert outcome.code == 0
    line = outcome.line
    assert all(name in line for name in CONTRACTS)


def test_ops_with_a_name_prints_the_operator_page() -> None:
    assert run("ops", NAME).line == " ".join(op_pages.page(RECORDS[NAME]).split())


def test_unknown_operator_error_suggests_a_similar_name() -> None:
    outcome = run("ops", "fusion_attention_v2")
    assert outcome.code == 2
    assert "no operator 'fusion_attention_v2'" in outcome.line
    assert f"{NAME}_v2" in outcome.line


def test_versions_page_lists_parameters_and_layouts_of_each_version() -> None:
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


def test_aclnn_stub_signatures_equal_runtime_signatures() -> None:
    text = stub([getattr(aclnn, name) for name in aclnn.__all__])
    module = ModuleType("_aclnn")
    space = vars(module)
    exec(compile(text, "_aclnn.pyi", "exec"), space)
    names = [*space, *inspect.get_annotations(module)]
    assert sorted(name for name in names if name.startswith("aclnn")) == sorted(aclnn.__all__)
    run = functools.partial(space["_Run"].__call__, None)
    for name in aclnn.__all__:
        real = getattr(aclnn, name)
        shown = inspect.signature(space.get(name, run), eval_str=True)
        assert shown == inspect.signature(real, eval_str=True, globals=vars(aclnn))
        if name in space:
            assert (inspect.getdoc(real) or "").startswith(" ".join((inspect.getdoc(space[name]) or "").split()))


@pytest.mark.parametrize("name", CONTRACTS)
def test_operator_page_lists_parameters_rules_and_axes_in_even_tables(name: str) -> None:
    op, page = CONTRACTS[name], render(CONTRACTS[name])
    for p in op.params:
        cann = f" `{op.cann[p.shown]}` | " if op.cann else ""
        assert f"| `{p.shown}` |{cann}" in page
        assert p.text.replace("|", "\\|") in page
    for rule in op.applicable_rules:
        assert op.spell(rule.expected).replace("|", "\\|") in page
        assert op.spell(rule.advice).replace("|", "\\|") in page
    for word in re.findall(r"`(\w+)`", page):
        assert not any(word == p.name for p in op.params if p.spelled), f"{word} is spelled otherwise here"
    explained = {axis.split()[0] for line in re.findall(r"^Axes: (.*)\.$", page, re.M) for axis in line.split(", ")}
    symbols = " ".join(re.findall(r"\[[^\]`]*\]|`[^`]*`", page.partition("## Parameters")[2]))
    assert set(re.findall(r"\b[A-Z][a-z]?[12]?\b", symbols)) <= explained
    assert bool(op.cann) is ("\nCANN's names are those of " in page) is name.startswith("aclnn")
    tables = [re.findall(r"^\|.*", block, re.M) for block in page.split("\n\n")]
    assert all(len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) <= 1 for lines in tables)
    assert sum(map(len, tables)) > len(op.params)


# Canonical names with different names in CANN; all others differ only in spelling.
OTHERWISE = {
    "pse": {"realShift", "realShiftOptional", "pseShift", "pseShiftOptional"},
    "scale": {"scaleValue", "scaleValueOptional"},
    "softmax_layout": {"softmaxOutLayout", "softmaxInLayout"},
    "key_rope": {"keyInRope"},
    "layout": {"inputLayout"},
    "actual_seq_lengths_query": {"actualSeqQLenOptional"},
    "actual_seq_lengths_key": {"actualSeqKvLenOptional"},
    "dquery": {"dqOut"},
    "dkey": {"dkOut"},
    "weights": {"weight"},
    "state_cache": {"stateCacheRef"},
    "dweights": {"dWeightOut"},
    **{f"dequant_scale{n}": {f"deqScale{n}", f"deqScale{n}Optional"} for n in (1, 2)},
}


def test_cann_and_library_parameter_names_differ_only_in_spelling() -> None:
    for ours, cann in (pair for name in aclnn.OPERATORS for pair in RECORDS[name].cann.items()):
        alike = re.fullmatch(ours.replace("_", "_?") + "(in|out)?(optional)?", cann, re.I)
        assert alike or cann in OTHERWISE[ours], (ours, cann)


def test_operator_page_lists_dtypes_of_strict_mode() -> None:
    page = render(RECORDS["aclnnIncreFlashAttentionV4"])
    assert "| `query` | tensor | float16, bfloat16, float32; strict: float16 or bfloat16 |" in page
    assert "| float32, bfloat16, uint64; strict: float32, or bfloat16 as query |" in page
    assert "strict: float16 or bfloat16 |" in render(RECORDS["aclnnSparseFlashAttentionGrad"])
    assert "strict: " not in render(RECORDS["sparse_attention"])


def test_training_pages_describe_layout_of_packed_statistics() -> None:
    for name, op in RECORDS.items():
        packed = op in (*training.RECORDS, *score_v4.RECORDS) and "TND" in op.layouts
        assert ("[N1, q_len, 8] of all sequences, concatenated" in render(op)) is packed, name

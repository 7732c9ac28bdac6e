"""C headers: generated from operator definitions, equal to the declarations of CANN's pages, without warnings."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from clauses.checks import Page
from clauses.pages import PAGES

from codegen import headers
from codegen.c_definitions import definitions
from fusion_attention.capi.environment import INCLUDE
from fusion_attention.contract import Tensor
from fusion_attention.ops import RECORDS

COMPILERS = [name for name in ("gcc", "clang") if shutil.which(name)]
needs_compiler = pytest.mark.skipif(not COMPILERS, reason="no C compiler")
LANGUAGES = {"c11": ".c", "c++11": ".cpp", "c++20": ".cpp"}

C_TYPES = {"char": "char *", **{f"acl{kind}": f"const acl{kind} *" for kind in ("Tensor", "TensorList", "IntArray")}}


def printed(page: Page) -> str:
    """Returns the C declaration of phase 1 by a page's prototype."""
    types = [C_TYPES.get(parameter.kind, parameter.kind) for parameter in page.prototype]
    return f"aclnnStatus {page.operator}GetWorkspaceSize({', '.join((*types, 'uint64_t *', 'aclOpExecutor **'))});\n"


PRINTED = "".join(map(printed, PAGES))
# More declarations: an operator without a table in tests/clauses, and a phase 2.
PRINTED += """
aclnnStatus aclnnLightningIndexerGetWorkspaceSize(const aclTensor *, const aclTensor *, const aclTensor *,
    const aclTensor *, const aclTensor *, const aclTensor *, char *, char *, int64_t, int64_t, int64_t, int64_t, bool,
    const aclTensor *, const aclTensor *, uint64_t *, aclOpExecutor **);
aclnnStatus aclnnIncreFlashAttentionV4(void *, uint64_t, aclOpExecutor *, const aclrtStream);
"""
# Header of each operator; the programs of the pages include these headers.
HOMES = {
    "aclnnFlashAttentionUnpaddingScoreGradV3": "aclnn_flash_attention_score_grad.h",
    "aclnnFlashAttentionVarLenScoreV5": "aclnn_flash_attention_score.h",
    "aclnnFlashAttentionScoreV2": "aclnn_flash_attention_score.h",
    "aclnnSparseFlashAttentionGrad": "aclnn_sparse_flash_attention_grad.h",
    "aclnnIncreFlashAttentionV4": "aclnn_incre_flash_attention_v4.h",
    "aclnnIncreFlashAttention": "aclnn_incre_flash_attention.h",
    "aclnnFusedInferAttentionScoreV5": "aclnn_fused_infer_attention_score_v5.h",
    "aclnnSparseLightningIndexerGradKLLoss": "aclnn_sparse_lightning_indexer_grad_kl_loss.h",
}


def compiles(compiler: str, language: str, text: str, folder: Path) -> None:
    source = folder / f"program{LANGUAGES[language]}"
    source.write_text(text, encoding="utf-8")
    tool = compiler if language == "c11" else {"gcc": "g++", "clang": "clang++"}[compiler]
    flags = [
        f"-std={language}",
        "-Wall",
        "-Wextra",
        "-pedantic",
        "-Werror",
        "-fsyntax-only",
        f"-I{folder}",
        f"-I{INCLUDE}",
    ]
    done = subprocess.run([tool, *flags, str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_committed_headers_match_generated_headers() -> None:
    expected = headers.files(RECORDS)
    there = {path.relative_to(INCLUDE).as_posix(): path for path in (INCLUDE / "aclnnop").iterdir()}
    assert there.keys() == expected.keys()
    for name, text in expected.items():
        assert there[name].read_text(encoding="utf-8") == text, f"{name}: make docs writes it"


def test_every_operator_is_declared_and_defined_once_in_its_file() -> None:
    operators = {name for name in RECORDS if name.startswith("aclnn")}
    texts = headers.files(RECORDS)
    declared = re.findall(r"aclnnStatus (aclnn\w+)\(", "".join(texts.values()))
    assert sorted(declared) == sorted(name + phase for name in operators for phase in ("", "GetWorkspaceSize"))
    defined = re.findall(r"^OPERATOR\((\w+),", definitions(INCLUDE), re.MULTILINE)
    assert sorted(f"aclnn{name}" for name in defined) == sorted(operators)
    for name, home in HOMES.items():
        assert f"aclnnStatus {name}(" in texts[f"aclnnop/{home}"]


def test_outputs_are_the_last_consecutive_tensor_parameters() -> None:
    """csrc/capi/entry.cpp relies on this order."""
    for op in (op for name, op in RECORDS.items() if name.startswith("aclnn")):
        kinds = "".join("t" if kind == "const aclTensor *" else "." for kind, _ in headers.parameters(op))
        last = re.search(r"t+(?=\.*$)", kinds)
        assert last is not None
        assert [i for i, p in enumerate(op.params) if isinstance(p, Tensor) and p.output] == list(range(*last.span()))


@needs_compiler
@pytest.mark.parametrize("language", LANGUAGES)
def test_headers_compile_without_warnings(language: str, tmp_path: Path) -> None:
    """All headers together, and some alone: a header must not depend on the includes of another. One of those that
    codegen writes suffices, because their includes are equal.
    """
    names = sorted(path.relative_to(INCLUDE).as_posix() for path in INCLUDE.rglob("*.h"))
    together = "".join(f'#include "{name}"\n' for name in names)
    for compiler in COMPILERS:
        compiles(compiler, language, together, tmp_path)
    written = [name for name in names if not name.startswith("aclnnop/")]
    for name in [*written, names[-1]] if language == "c11" else []:
        compiles(COMPILERS[0], language, f'#include "{name}"\n', tmp_path)


@needs_compiler
def test_header_declarations_match_cann_pages(tmp_path: Path) -> None:
    """The compiler refuses a second declaration with another type."""
    written = headers.files(RECORDS)
    (tmp_path / "aclnnop").mkdir()
    for name, text in written.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    includes = "".join(f'#include "{name}"\n' for name in ["acl/acl.h", *written])
    compiles(COMPILERS[0], "c11", includes + PRINTED, tmp_path)
    wrong = PRINTED.replace("const aclIntArray *", "const aclTensor *", 1)
    with pytest.raises(AssertionError, match="conflicting types"):
        compiles(COMPILERS[0], "c11", includes + wrong, tmp_path)


@needs_compiler
def test_header_functions_have_c_linkage_in_cpp(tmp_path: Path) -> None:
    """The compiler refuses a declaration with C linkage beside one with C++ linkage."""
    includes = "".join(f'#include "{name}"\n' for name in ["acl/acl.h", *headers.files(RECORDS)])
    compiles(COMPILERS[0], "c++20", f'{includes}extern "C" {{{PRINTED}}}', tmp_path)


@needs_compiler
def test_program_for_the_chip_compiles_with_headers(tmp_path: Path) -> None:
    """One variable receives the codes of all functions, enumerators have a scope (aclFormat::), layouts are char[]."""
    program = """
#include <vector>
#include "acl/acl.h"
#include "aclnnop/aclnn_flash_attention_score.h"
int calls() {
    auto ret = aclInit(nullptr);
    if (ret != ACL_SUCCESS) return ret;
    std::vector<int64_t> shape = {2, 3};
    void *address = nullptr;
    ret = aclrtMalloc(&address, 64, ACL_MEM_MALLOC_HUGE_FIRST);
    aclDataType type = aclDataType::ACL_BF16;
    aclTensor *t = aclCreateTensor(shape.data(), shape.size(), type, shape.data(), 0, aclFormat::ACL_FORMAT_ND,
                                   shape.data(), shape.size(), address);
    aclTensor *list[1] = {t};
    aclTensorList *tensors = aclCreateTensorList(list, 1);
    ret = aclDestroyTensorList(tensors);
    char layout[5] = {'B', 'S', 'N', 'D', 0};
    uint64_t size = 0;
    aclOpExecutor *executor;
    aclrtStream stream;
    ret = aclrtCreateStream(&stream);
    ret = aclnnFlashAttentionScoreGetWorkspaceSize(t, t, t, nullptr, nullptr, nullptr, nullptr, nullptr, 1.0, 1.0, 1, 1,
                                                   1, layout, 0, 0, t, t, nullptr, t, &size, &executor);
    ret = aclnnFlashAttentionScore(address, size, executor, stream);
    switch (ret) { case ACLNN_ERR_PARAM_INVALID: case ACL_ERROR_INVALID_PARAM: return 1; default: return OK; }
}
"""
    compiles(COMPILERS[0], "c++11", program, tmp_path)

"""The C headers: what the records give, what CANN's pages print, and clean for every compiler that programs use."""

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
    """A page's declaration of phase 1, by the kinds of its prototype."""
    types = [C_TYPES.get(parameter.kind, parameter.kind) for parameter in page.prototype]
    return f"aclnnStatus {page.operator}GetWorkspaceSize({', '.join((*types, 'uint64_t *', 'aclOpExecutor **'))});\n"


PRINTED = "".join(map(printed, PAGES))
# Declarations of a page that has no table here, and of a phase 2.
PRINTED += """
aclnnStatus aclnnLightningIndexerGetWorkspaceSize(const aclTensor *, const aclTensor *, const aclTensor *,
    const aclTensor *, const aclTensor *, const aclTensor *, char *, char *, int64_t, int64_t, int64_t, int64_t, bool,
    const aclTensor *, const aclTensor *, uint64_t *, aclOpExecutor **);
aclnnStatus aclnnIncreFlashAttentionV4(void *, uint64_t, aclOpExecutor *, const aclrtStream);
"""
# Which file declares what: the pages' programs include these.
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
    """So csrc/capi/entry.cpp takes them."""
    for op in (op for name, op in RECORDS.items() if name.startswith("aclnn")):
        kinds = "".join("t" if kind == "const aclTensor *" else "." for kind, _ in headers.parameters(op))
        last = re.search(r"t+(?=\.*$)", kinds)
        assert last is not None
        assert [i for i, p in enumerate(op.params) if isinstance(p, Tensor) and p.output] == list(range(*last.span()))


@needs_compiler
@pytest.mark.parametrize("language", LANGUAGES)
def test_headers_compile_without_warnings(language: str, tmp_path: Path) -> None:
    """All together, and each one first in a file: none leans on another's includes."""
    names = sorted(path.relative_to(INCLUDE).as_posix() for path in INCLUDE.rglob("*.h"))
    together = "".join(f'#include "{name}"\n' for name in names)
    for compiler in COMPILERS:
        compiles(compiler, language, together, tmp_path)
    alone = names if language == "c11" else []
    for name in alone:
        compiles(COMPILERS[0], language, f'#include "{name}"\n', tmp_path)


@needs_compiler
def test_header_declarations_match_cann_pages(tmp_path: Path) -> None:
    """A second declaration of another type would not compile."""
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
    """A second declaration with C's linkage would not compile beside one with C++'s."""
    includes = "".join(f'#include "{name}"\n' for name in ["acl/acl.h", *headers.files(RECORDS)])
    compiles(COMPILERS[0], "c++20", f'{includes}extern "C" {{{PRINTED}}}', tmp_path)


@needs_compiler
def test_program_for_the_chip_compiles_with_headers(tmp_path: Path) -> None:
    """Codes and results of all calls land in one variable; enumerators are asked of their type; layouts are char[]."""
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
    for language in ("c++11", "c++20"):
        compiles(COMPILERS[0], language, program, tmp_path)

"""Complete C++ programs of CANN's pages, compiled and run unchanged.

FUSION_SEEDS is the folder of the pages' texts; without it these tests are skipped (examples/capi has other programs
for the same interface). The bytes that the programs copy back must equal those of the same calls in Python, which
tests/contract/test_page_programs.py checks, and those of the golden model.
"""

import os
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from support import cann_sample_programs
from support.c_programs import RECORDER, compiled, ended, needs_compiler
from support.cann_sample_programs import FILL, Given, Printed

from fusion_attention import acl

PAGES = Path(os.environ.get("FUSION_SEEDS", "/nowhere"))
pytestmark = [needs_compiler, pytest.mark.skipif(not PAGES.is_dir(), reason="FUSION_SEEDS names no folder")]
LOSS = "aclnnSparseLightningIndexerGradKLLoss"
TWINS: dict[str, Callable[[Given], Printed]] = {
    "aclnnFlashAttentionUnpaddingScoreGradV3": cann_sample_programs.unpadding_score_grad_v3,
    "aclnnFlashAttentionScoreV2": cann_sample_programs.score_v2,
    "aclnnIncreFlashAttentionV4": cann_sample_programs.incre_flash_attention_v4,
    "aclnnSparseFlashAttentionGrad": cann_sample_programs.sparse_flash_attention_grad,
    LOSS: cann_sample_programs.indexer_grad_kl_loss,
}
EACH = pytest.mark.parametrize("operator", TWINS)
# Corrections of the KL loss program: shapes and host dtypes that the tables of its page require.
CORRECTED = {
    "weightShape = {4,64}": "weightShape = {4,32}",
    "sparseIndicesShape = {1, 2048}": "sparseIndicesShape = {4, 1, 2048}",
    "softmaxMaxShape = {4, 64}": "softmaxMaxShape = {1, 4, 64}",
    "softmaxSumShape = {4, 64}": "softmaxSumShape = {1, 4, 64}",
    "dWeightShape = {4,64}": "dWeightShape = {4,32}",
    "<short> weightHostData(4*64, 1)": "<short> weightHostData(4*32, 1)",
    "<short> dWeightHostData(4*64, 1)": "<short> dWeightHostData(4*32, 1)",
    "<short> sparseIndicesHostData(2048, -1)": "<int> sparseIndicesHostData(4*2048, -1)",
    "sparseIndicesHostData[i] = i;": "for (int t = 0; t < 4; t++) sparseIndicesHostData[t * 2048 + i] = i;",
    "<short> softmaxMaxHostData": "<float> softmaxMaxHostData",
    "<short> softmaxSumHostData": "<float> softmaxSumHostData",
    "<short> lossHostData": "<float> lossHostData",
}
# Defects of the programs, as messages of the checked mode.
TYPES, LEAK = r"dataType: .* the host's type is not the tensor's", r"aclFinalize: leak: "
DEFECTS = {
    "aclnnFlashAttentionUnpaddingScoreGradV3": (TYPES, f"{LEAK}an aclIntArray"),
    "aclnnFlashAttentionScoreV2": ("131072 bytes asked of an allocation of 65536", f"{LEAK}an aclIntArray"),
    "aclnnIncreFlashAttentionV4": (TYPES, "256 bytes asked of an allocation of 128", f"{LEAK}an aclTensorList"),
    "aclnnSparseFlashAttentionGrad": ("aclrtFree: .* got null", f"{LEAK}an allocation of 2048 bytes"),
    LOSS: ("65536 bytes asked of an allocation of 32768", f"{LEAK}an aclIntArray"),
}


@cache
def printed() -> dict[str, str]:
    """Returns the C++ program of each page, by operator."""
    results = {}
    for page in sorted(PAGES.glob("*.txt")):
        blocks = re.findall(r"```[cC]\S*\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
        for block in blocks:
            if "int main()" in block:
                (called,) = set(re.findall(r"(aclnn\w+)GetWorkspaceSize\(", block))
                results[called] = block
    return results


def corrected(operator: str) -> str:
    text = printed()[operator]
    for wrong, right in CORRECTED.items() if operator == LOSS else ():
        assert text.count(wrong) == 1, wrong
        text = text.replace(wrong, right)
    return text


class Ran(NamedTuple):
    code: int
    copies: list[bytes]
    errors: str


class Bench:
    """Builds programs in a folder and runs them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.recorder = compiled(RECORDER, folder / "recorder.so", "-shared", "-fPIC")
        self.programs: dict[tuple[str, str], Path] = {}

    def program(self, text: str, *flags: str) -> Path:
        key = (text, " ".join(flags))
        if key not in self.programs:
            source = self.folder / f"program{len(self.programs)}.cpp"
            source.write_text(text, encoding="utf-8")
            self.programs[key] = compiled(source, source.with_suffix(""), *flags)
        return self.programs[key]

    def run(self, text: str, given: dict[int, bytes], *flags: str, **settings: str) -> Ran:
        program = self.program(text, *flags)
        folder = self.folder / f"run{len(list(self.folder.glob('run*')))}"
        folder.mkdir()
        for number, content in given.items():
            (folder / f"in{number}").write_bytes(content)
        run = ended(program, LD_PRELOAD=str(self.recorder), RECORDER_FOLDER=str(folder), **settings)
        copies = [(folder / f"out{i}").read_bytes() for i in range(len(list(folder.glob("out*"))))]
        return Ran(run.returncode, copies, run.stderr)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("programs"))


@pytest.fixture(autouse=True)
def finalized() -> Iterator[None]:
    yield
    acl.finalize()
    acl.get_recent_err_msg()


def tensors(text: str) -> tuple[list[str], list[str]]:
    """Returns the names of the tensors that a program creates and of those that it copies back, in order."""
    body = text[text.index("int main()") :]
    created = re.findall(r"CreateAclTensor\([^;]*&(\w+)\);", body)
    taken = re.findall(r"PrintOutResult\(\w+, &(\w+)DeviceAddr\)", body) or ["outTensor"]
    return created, taken


def poisoned(text: str, given: dict[str, bytes]) -> dict[int, bytes]:
    """Returns the replacement of host data by tensor index: a fill pattern for outputs, `given` bytes for inputs."""
    created, taken = tensors(text)
    fill = bytes([FILL]) * (1 << 21)
    return {created.index(name): fill for name in taken} | {created.index(name): data for name, data in given.items()}


def same(ran: Ran, twin: Printed) -> None:
    """Checks that copied bytes equal those of the Python call; a program may copy more bytes than a buffer has."""
    assert ran.code == 0, ran
    assert len(ran.copies) == len(twin)
    for copy, (name, values) in zip(ran.copies, twin.items(), strict=True):
        size = min(len(copy), values.nbytes)
        assert copy[:size] == values.tobytes()[:size], name


def drawn(operator: str) -> tuple[dict[str, bytes], dict[str, torch.Tensor]]:
    """Draws 16 numbers for each query, key and value; returns (bytes by C variable, tensors by Python argument)."""
    generator = torch.Generator().manual_seed(25)
    dtype = torch.bfloat16 if "Unpadding" in operator else torch.float16
    file_bytes, twin = {}, {}
    for name in tensors(corrected(operator))[0]:
        argument = name.removesuffix("Tensor")
        if argument in ("q", "k", "v", "query", "key", "value", "dx", "dOut", "qIndex", "kIndex"):
            data = torch.randn(16, generator=generator).mul(0.05).to(dtype)
            file_bytes[name], twin[argument] = data.view(torch.uint8).numpy().tobytes(), data
    return file_bytes, twin


@pytest.mark.sampled(12)
@EACH
def test_cann_c_program_bitwise_equals_python_calls_and_golden(
    operator: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = corrected(operator)
    ran = bench.run(text, poisoned(text, {}))
    twin = TWINS[operator]({})
    same(ran, twin)
    init = acl.init
    monkeypatch.setattr(acl, "init", lambda config: init(config, backend="golden"))
    # A float32 loss differs by processor in its last bit; tests/contract/test_page_programs.py bounds it.
    same(ran, TWINS[operator]({}) | {name: twin[name] for name in ("loss",) if name in twin})


def test_kl_loss_c_program_as_printed_is_refused(bench: Bench) -> None:
    ran = bench.run(printed()[LOSS], {}, FUSION_ATTENTION_CHECKED="1")
    assert (ran.code, ran.copies) == (161002 % 256, [])
    (refused,) = [line for line in ran.errors.splitlines() if f"{LOSS}GetWorkspaceSize: " in line]
    assert "(161002)" in ran.errors
    assert re.search(r"\bweights\b", refused)


@pytest.mark.slow
@EACH
def test_cann_c_program_on_random_data_bitwise_equals_python_calls(operator: str, bench: Bench) -> None:
    text = corrected(operator)
    file_bytes, twin = drawn(operator)
    assert file_bytes
    same(bench.run(text, poisoned(text, file_bytes)), TWINS[operator](twin))


@pytest.mark.slow
@pytest.mark.parametrize("level", ["-O1", "-O2", "-O3"])
@EACH
def test_optimised_cann_c_program_bitwise_equals_python_calls(operator: str, level: str, bench: Bench) -> None:
    text = corrected(operator)
    same(bench.run(text, poisoned(text, {}), level), TWINS[operator]({}))


@pytest.mark.slow
@EACH
def test_checked_mode_keeps_results_and_reports_program_defects(operator: str, bench: Bench) -> None:
    text = corrected(operator)
    ran = bench.run(text, poisoned(text, {}), FUSION_ATTENTION_CHECKED="1")
    same(ran, TWINS[operator]({}))
    for defect in DEFECTS[operator]:
        assert re.search(defect, ran.errors), (defect, ran.errors)

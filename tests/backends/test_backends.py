"""The choice of a back end, the error where none can be chosen, and imports of the package without back ends."""

import pytest
import torch
from support.scripts import python

from fusion_attention.backends import choose
from fusion_attention.contract import BackendError
from fusion_attention.ir.problem import Problem

PROBLEM = Problem(heads_q=4, heads_kv=2, dim_qk=64, dim_v=64, dtype="bfloat16")


def test_cpu_tensors_choose_cpu_back_end_without_importing_triton() -> None:
    program = (
        "import sys, torch; from fusion_attention.backends import choose\n"
        "from fusion_attention.ir.problem import Problem\n"
        "print(choose(Problem(4, 2, 64, 64), torch.device('cpu'), 'auto'))\n"
        "print('fusion_attention.backends.triton' in sys.modules)"
    )
    assert python("-c", program).stdout.split() == ["cpu", "False"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
def test_unsupported_device_error_lists_reasons_of_every_back_end() -> None:
    with pytest.raises(BackendError, match=r"triton: the triton back end .*cpu: the cpu back end computes device cpu"):
        choose(PROBLEM, torch.device("cuda"), "auto")
    with pytest.raises(BackendError, match=r"triton: the triton back end computes device cuda, not cpu"):
        choose(PROBLEM, torch.device("cpu"), "triton")


WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in ("fusion_attention._native", "triton", "safetensors", "rich", "typer"):
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Missing())
import torch
import fusion_attention
import fusion_attention.npu, fusion_attention.testing
from fusion_attention.backends import choose
from fusion_attention.ir.problem import Problem

q = torch.ones(1, 2, 1, 4)
print(fusion_attention.attention(q, q, q, backend="golden").sum().item())
try:
    choose(Problem(4, 2, 64, 64), torch.device("cuda"), "auto")
except fusion_attention.BackendError as error:
    print(error)
"""


def test_package_imports_and_computes_with_torch_alone() -> None:
    computed, refused = python("-c", WITHOUT).stdout.splitlines()
    assert computed == "8.0"
    assert "triton: the triton back end needs the package triton, which is not installed." in refused
    assert "cpu: the cpu back end cannot be loaded" in refused

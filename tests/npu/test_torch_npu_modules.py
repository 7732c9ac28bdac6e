"""Submodules of the installed torch_npu have torch_npu's paths, and every name in them works."""

import importlib
import math
import operator
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fusion_attention import npu
from fusion_attention.npu.surface.missing_name_hints import instead
from fusion_attention.npu.surface.modules import build_modules, functions

pytestmark = pytest.mark.usefixtures("torch_npu")
MODULES = [
    *("npu", "npu.utils", "npu.amp", "npu.amp.autocast_mode", "npu.amp.grad_scaler", "npu.streams", "npu.memory"),
    *("npu.random", "npu.graphs", "profiler", "contrib", "utils", "utils.flops_count", "utils.collect_env"),
    *("_C", "_C._distributed_c10d", "distributed", "atb"),
    *("testing", "testing.testcase", "testing.common_utils"),
]


def test_torch_npu_submodules_are_importable_until_uninstall(torch_npu: Any) -> None:
    for name in MODULES:
        module = importlib.import_module(f"torch_npu.{name}")
        assert importlib.util.find_spec(f"torch_npu.{name}") is not None
        assert operator.attrgetter(name)(torch_npu) is module
        assert module.__name__ == f"torch_npu.{name}"
    npu.uninstall()
    assert not [name for name in MODULES if f"torch_npu.{name}" in sys.modules]


def test_npu_submodules_reexport_functions_of_torch_npu(torch_npu: Any) -> None:
    for submodule in ("utils", "streams", "memory", "random"):
        module = importlib.import_module(f"torch_npu.npu.{submodule}")
        names = {name for name in vars(module) if not name.startswith("__")}
        assert names
        own_names = {"npu_check_overflow", "is_support_inf_nan", "get_soc_version"} & names
        assert all(getattr(module, name) is getattr(torch.npu, name) for name in names - own_names)  # type: ignore[attr-defined]
    assert importlib.import_module("torch_npu.npu.amp.grad_scaler").GradScaler is torch_npu.npu.amp.GradScaler


@pytest.mark.parametrize(("base", "kind"), [("cpu", "npu"), ("cuda", "npu"), ("cpu", "cpu")])
def test_build_modules_has_all_submodules_for_every_device(base: str, kind: str) -> None:
    names = list(build_modules(torch.device(base), kind))
    assert sorted(names) == sorted(["torch_npu", *(f"torch_npu.{name}" for name in MODULES)])
    assert all(name.rpartition(".")[0] in names[:at] for at, name in enumerate(names) if at)  # packages come first


@pytest.mark.parametrize(
    ("module", "name", "text"),
    [
        ("", "npu_of_nobody", "torch_npu has no npu_of_nobody (`fusion-attention npu` lists what is there; docs/asc"),
        ("", "npu_dynamic_mx_quant", "; instead: MX and float8 formats are the chip's alone; npu_dynamic_quant"),
        ("contrib", "module", "fusion_attention's torch_npu.contrib has no module; instead: torch.nn, and"),
        ("npu", "MemPool", "fusion_attention's torch_npu.npu has no MemPool; instead: nothing: the host's allocator"),
        ("", "npu_fusion_atention", "no npu_fusion_atention; it has npu_fusion_attention, npu_fusion_attention_v"),
        ("", "optim", "fusion_attention's torch_npu has no optim; instead: torch.optim's own"),
        ("npu", "mem_get_inf", "fusion_attention's torch_npu.npu has no mem_get_inf"),
        ("npu", "synchronise", "torch_npu.npu has no synchronise; it has synchronize"),
        ("npu.utils", "get_cann_version", "torch_npu.npu.utils has no get_cann_version"),
        ("testing.common_utils", "create_common_tensors", "it has create_common_tensor (`fusion-attention npu`"),
    ],
)
def test_missing_name_raises_attribute_error_with_suggestion(module: str, name: str, text: str, torch_npu: Any) -> None:
    owner = importlib.import_module(f"torch_npu.{module}".rstrip("."))
    with pytest.raises(AttributeError) as caught:
        getattr(owner, name)
    assert text in str(caught.value)
    assert not hasattr(owner, name)
    with pytest.raises(ImportError):
        exec(f"from {owner.__name__} import {name}")


# Functions of torch_npu that this library lacks, of every kind.
ABSENT = re.findall(r"\w+", """
npu_add_rms_norm_quant npu_rms_norm_quant npu_add_rms_norm_dynamic_quant npu_dequant_swiglu_quant npu_swiglu_quant
npu_rope_quant_kvcache npu_quant_scatter npu_weight_quant_batchmatmul npu_anti_quant npu_group_quant
npu_dynamic_quant_asymmetric npu_dynamic_mx_quant npu_dtype_cast
npu_grouped_dynamic_mx_quant npu_multi_head_attention npu_fused_attention_score npu_mla_prolog_v3 npu_nsa_compress
npu_moe_compute_expert_tokens npu_moe_re_routing npu_moe_distribute_dispatch_v2
npu_alltoallv_gmm npu_gmm_alltoallv npu_mm_all_reduce_base npu_all_gather_base_mm npu_mm_reduce_scatter_base npu_ffn
npu_scatter npu_indexing npu_format_cast_ npu_apply_adam npu_bert_apply_adam npu_get_float_status npu_linear npu_bmmV2
npu_silu npu_mish npu_softmax_cross_entropy_with_logits npu_one_hot npu_pad npu_layer_norm_eval npu_group_norm_silu
npu_deep_norm npu_dropout_with_add_softmax _npu_dropout npu_conv2d npu_conv_transpose2d npu_deformable_conv2d npu_lstm
npu_gru npu_transpose npu_reshape npu_broadcast npu_slice npu_max npu_min npu_sort_v2 npu_top_k_top_p npu_iou npu_giou
npu_rotated_iou npu_nms_v4 npu_batch_nms npu_roi_align npu_ps_roi_pooling npu_bounding_box_decode
npu_yolo_boxes_encode npu_anchor_response_flags npu_prefetch empty_with_format npu_chunk_gated_delta_rule
npu_causal_conv1d
""")  # fmt: skip


def test_missing_function_hints_name_existing_replacements(torch_npu: Any) -> None:
    names = set(functions())
    assert [name for name in ABSENT if name not in names and instead(f"torch_npu.{name}") is None] == []
    for name in ABSENT:
        for reference in re.findall(r"\b_?npu_\w+|\btorch(?:_npu)?(?:\.\w+)+", instead(f"torch_npu.{name}") or ""):
            owner, *rest = reference.split(".")
            result: Any = {"torch": torch, "torch_npu": torch_npu}.get(owner, torch_npu)
            for attribute in rest or [owner]:
                result = getattr(result, attribute)


def test_npu_utils_overflow_check_soc_version_and_contexts_work(torch_npu: Any) -> None:
    utils = importlib.import_module("torch_npu.npu.utils")
    for value, wrong in ((1.0, False), (math.inf, True), (math.nan, True)):
        assert utils.npu_check_overflow(value) is wrong
        assert utils.npu_check_overflow(torch.tensor([1.0, value]).half().npu()) is wrong
    with pytest.raises(RuntimeError, match="npu_check_overflow: expected a float or a tensor, got list"):
        utils.npu_check_overflow([1.0])
    assert utils.is_support_inf_nan()
    assert torch.tensor([6e4], dtype=torch.float16).npu().mul(2).isinf().all()
    assert utils.get_soc_version() == -1
    with utils.device_of(torch.ones(1).npu()), utils.device("npu:0"), utils.stream(utils.current_stream()):
        utils.synchronize()
    called: list[int] = []
    torch_npu.npu._lazy_call(lambda: called.append(1))
    assert called == [1]


def test_dropout_seed_and_offset_follow_the_torch_generator(torch_npu: Any) -> None:
    q = torch.randn(1, 2, 24, 16).npu()

    def call(x: torch.Tensor) -> Any:
        return torch_npu.npu_fusion_attention(x, x, x, 2, "BNSD", scale=0.25, keep_prob=0.75)

    for seed in (2, 0, 2**63 + 5):
        for seeds in (torch.npu.manual_seed, torch.manual_seed):  # type: ignore[attr-defined]
            seeds(seed)
            pairs = [call(q)[4:6] for _ in range(2)]
            assert pairs == [(seed - (seed >> 63 << 64), offset) for offset in (0, 12)]
        seeds(seed)
        mask = torch_npu._npu_dropout_gen_mask(q, [1, 2, 24, 24], p=0.25, seed=seed, offset=0)
        given = torch_npu.npu_fusion_attention(q, q, q, 2, "BNSD", scale=0.25, keep_prob=0.75, dropout_mask=mask)
        assert torch.equal(call(q)[0], given[0])
    state = torch.npu.get_rng_state()  # type: ignore[attr-defined]
    one = call(q)
    torch.npu.set_rng_state(state)  # type: ignore[attr-defined]
    assert torch.equal(call(q)[0], one[0])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_recomputes_with_the_same_dropout_mask(torch_npu: Any, reentrant: bool) -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = torch_npu.npu_fusion_attention(x, x, x, 2, "BNSD", scale=0.25, keep_prob=0.75)[0]
        return x

    torch.manual_seed(1)
    q = torch.randn(1, 2, 24, 16).npu().requires_grad_()
    results = []
    for runs_directly in (True, False):
        torch.manual_seed(7)
        x = q * 1
        for _ in range(2):
            x = call(x) if runs_directly else checkpoint(call, x, use_reentrant=reentrant)
        q.grad = None
        x.square().sum().backward()
        results.append(q.grad)
    assert torch.equal(*results)


@pytest.mark.filterwarnings("error")
def test_npu_grad_scaler_scales_gradients_and_refuses_dynamic_false(torch_npu: Any) -> None:
    scaler = torch_npu.npu.amp.GradScaler(init_scale=8.0, dynamic=True)
    assert isinstance(scaler, torch.amp.GradScaler)
    weight = torch.nn.Parameter(torch.ones(2))
    scaler.scale(weight.sum()).backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [8.0, 8.0]
    scaler.step(torch.optim.SGD([weight], lr=0.5))
    assert weight.tolist() == [0.5, 0.5]
    with pytest.raises(NotImplementedError, match="expected dynamic=True"):
        torch_npu.npu.amp.GradScaler(dynamic=False)


# ----------------------------------------------------------------------------------------------------- test programs


def case() -> Any:
    return importlib.import_module("torch_npu.testing.testcase").TestCase()


@pytest.mark.parametrize(
    ("x", "y", "options"),
    [
        (torch.ones(4), torch.ones(4) + 5e-5, {}),
        (torch.full((4,), 1e6), torch.full((4,), 1e6 + 50), {}),
        (torch.ones(100), torch.ones(100).index_fill(0, torch.tensor([3]), 2.0), {"prec": 0.01}),
        (torch.ones(4).half(), torch.ones(4).half() + 9e-4, {}),
        (torch.ones(4).bfloat16(), torch.ones(4).bfloat16(), {}),
        (np.ones(4), np.ones(4), {}),
        (torch.ones(2000).bfloat16(), torch.ones(2000).index_fill(0, torch.tensor([3]), 1.0078125).bfloat16(), {}),
        (torch.tensor([torch.nan, torch.inf, 1]), torch.tensor([torch.nan, torch.inf, 1]), {}),
        (True, True, {}),
        ([torch.ones(2), 3.0], (torch.ones(2), 3.0), {}),
        (torch.ones(2).half(), torch.ones(2), {"auto_trans_dtype": True}),
    ],
)
def test_assert_rtol_equal_accepts_values_within_tolerance(x: Any, y: Any, options: dict[str, Any]) -> None:
    case().assertRtolEqual(x, y, **options)


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (torch.ones(4), torch.ones(4) + 1e-3),
        (torch.ones(100), torch.ones(100).index_fill(0, torch.tensor([3]), 2.0)),
        (torch.ones(4).half(), torch.ones(4).half() + 4e-3),
        (torch.ones(4), torch.ones(5)),
        (torch.ones(4), torch.ones(4).double()),
        (torch.tensor([torch.nan, 1.0]), torch.tensor([1.0, torch.nan])),
        (torch.tensor([torch.inf]), torch.tensor([-torch.inf])),
        (torch.ones(1), torch.tensor([torch.nan])),
        (True, False),
        ([torch.ones(2)], [torch.ones(2), torch.ones(2)]),
    ],
)
def test_assert_rtol_equal_rejects_different_values(x: Any, y: Any) -> None:
    with pytest.raises(AssertionError):
        case().assertRtolEqual(x, y)


def test_assert_equal_respects_the_precision_argument() -> None:
    equal = case().assertEqual
    equal(torch.ones(2), torch.ones(2) + 1e-6)
    equal(torch.ones(2), torch.ones(2) + 0.05, prec=0.1)
    equal(torch.ones(2), torch.ones(2) + 0.05, 0.1)
    equal("a", "a")
    for wrong in ((torch.ones(2), torch.ones(2) + 1e-3), (torch.ones(2), torch.ones(3)), ("a", "b"), (1, 2)):
        with pytest.raises(AssertionError):
            equal(*wrong)


def test_common_utils_create_tensors_and_select_the_npu_device(monkeypatch: pytest.MonkeyPatch) -> None:
    helpers = importlib.import_module("torch_npu.testing.common_utils")
    one, other = helpers.create_common_tensor([np.float16, 2, (3, 4)], -2, 2)
    assert (one.device.type, other.device.type) == ("cpu", "npu")
    assert torch.equal(one, other.cpu())
    assert one.dtype == torch.float16
    assert one.shape == (3, 4)
    assert one.abs().max() <= 2
    other.zero_()
    assert one.any()
    assert helpers.set_npu_device() == "npu:0"
    monkeypatch.setenv("SET_NPU_DEVICE", "9")
    assert helpers.get_npu_device() == "npu:9"
    with pytest.raises(RuntimeError, match="expected npu:0 to npu:7"):
        helpers.set_npu_device()


PROGRAM = """
import torch, torch_npu
from torch_npu.testing.testcase import TestCase, run_tests
from torch_npu.testing.common_utils import SupportedDevices


class Attention(TestCase):
    @SupportedDevices(["Ascend910B"])
    def test_that_passes(self, device="npu"):
        self.assertRtolEqual(torch.ones(2), torch.ones(2, device=device), prec=0.001, prec16=0.001)

    def test_that_fails(self):
        self.assertRtolEqual(torch.ones(2).npu(), torch.zeros(2))


run_tests()
"""


@pytest.mark.slow
def test_torch_npu_test_program_reports_passed_and_failed_tests(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    command = [sys.executable, "-m", "fusion_attention.npu", str(file)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 1
    assert "Ran 2 tests" in run.stderr
    assert "FAILED (failures=1)" in run.stderr
    assert "2 of 2 elements are too far apart" in run.stderr

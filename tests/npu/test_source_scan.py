"""`fusion-attention npu` finds all uses of the chip's packages in sources, and reports unreadable sources."""

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fusion_attention.cli import app
from fusion_attention.npu.source_scan import LARGEST, Reading, read
from fusion_attention.npu.surface import modules
from website.ascend_call_counts import EVERYWHERE


def reading(text: str, folder: Path) -> Reading:
    (folder / "file.py").write_text(textwrap.dedent(text), encoding="utf-8")
    result = read(folder)
    assert not result.unread
    return result


def counted(text: str, folder: Path) -> dict[str, tuple[int, int]]:
    return {name: (use.calls, use.others) for name, use in reading(text, folder).uses.items()}


SWIGLU = "torch_npu.npu_swiglu"
FORMS: dict[str, dict[str, tuple[int, int]]] = {
    "import torch_npu\ntorch_npu.npu_swiglu(x)": {SWIGLU: (1, 0)},
    "import torch_npu as t\nt.npu_swiglu(x)[0].sum()": {SWIGLU: (1, 0)},
    "from torch_npu import npu_swiglu\nnpu_swiglu(npu_swiglu(x))": {SWIGLU: (2, 1)},
    "from torch_npu import npu_swiglu as f\nmap(f, x)": {SWIGLU: (0, 2)},
    "def f():\n    import torch_npu\n    return torch_npu.npu_swiglu": {SWIGLU: (0, 1)},
    "try:\n    import torch_npu\nexcept ImportError:\n    torch_npu = None": {},
    "import torch_npu\nhasattr(torch_npu, 'npu_swiglu') and getattr(torch_npu, 'npu_gelu', None)": {
        SWIGLU: (0, 1),
        "torch_npu.npu_gelu": (0, 1),
    },
    "import torch\ntorch.ops.npu.npu_swiglu.default(x)": {"torch.ops.npu.npu_swiglu": (1, 0)},
    "import torch\ntorch.ops.atb._npu_paged_attention(x)": {"torch.ops.atb._npu_paged_attention": (1, 0)},
    "import torch\ntorch.ops.npu.npu_swiglu.out(x)": {"torch.ops.npu.npu_swiglu.out": (1, 0)},
    "import torch\ntorch.npu.current_stream().synchronize()": {"torch_npu.npu.current_stream": (1, 0)},
    "from torch import npu\nnpu.synchronize()": {"torch_npu.npu.synchronize": (1, 0)},
    "import torch, torch_npu\ntorch.npu.set_device(torch_npu.npu.current_device())": {
        "torch_npu.npu.set_device": (1, 0),
        "torch_npu.npu.current_device": (1, 0),
    },
    "import torch_npu.npu.utils as u\nu.npu_check_overflow(torch_npu)": {
        "torch_npu.npu.utils": (0, 1),
        "torch_npu.npu.utils.npu_check_overflow": (1, 0),
    },
    "from torch_npu.contrib import transfer_to_npu": {"torch_npu.contrib.transfer_to_npu": (0, 1)},
    "from mindspeed.ops import gmm\ngmm.npu_gmm(x)": {
        "mindspeed.ops.gmm": (0, 1),
        "mindspeed.ops.gmm.npu_gmm": (1, 0),
    },
    "import cann_ops_transformer as c\nc.ops.flash_attn(x)": {"cann_ops_transformer.ops.flash_attn": (1, 0)},
    "import torch\ntorch.npu.config.allow_hf32 = False": {"torch_npu.npu.config.allow_hf32": (0, 1)},
    "import torch_npu\n@torch_npu.npu.mstx.mstx_range('x')\ndef f(x: torch_npu.npu.Stream): ...": {
        "torch_npu.npu.mstx.mstx_range": (1, 0),
        "torch_npu.npu.Stream": (0, 1),
    },
    "from .torch_npu import npu_swiglu\nother.npu.thing()\nnpu_swiglu(x)": {},
    "import torch_npucompat\nfrom torch_npu import *": {},
    "x = 'torch_npu.npu_swiglu(x)'  # torch_npu.npu_swiglu(x)": {},
}  # fmt: skip


@pytest.mark.parametrize("text", FORMS, ids=range(len(FORMS)))
def test_scan_counts_calls_and_other_uses_in_each_import_form(text: str, tmp_path: Path) -> None:
    assert counted(text, tmp_path) == FORMS[text]


def test_scan_counts_comparisons_of_the_device_type(tmp_path: Path) -> None:
    text = """
        x.device.type == "npu" or device.type in ("npu", "cuda") or "npu" != kind or x.is_npu
        name == "input" or kind == "npu:0" or y.is_cuda or name.startswith("npu_") or f("npu")
        str(x.device).startswith("npu")
        match x.device.type:
            case "npu": y
            case "cpu": x
    """
    assert reading(text, tmp_path).device_tests == 6


def test_scan_reads_folders_without_hidden_installed_or_linked_files(tmp_path: Path) -> None:
    call = "import torch_npu\ntorch_npu.npu_rms_norm(x)\n"
    for name in ("a.py", "in/ner/b.py", ".hidden/c.py", "env/lib/site-packages/d.py", "e.txt", "in/f.pyc"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(call)
    (tmp_path / "in" / "again").symlink_to(tmp_path)
    result = read(tmp_path)
    assert (result.files, result.uses["torch_npu.npu_rms_norm"].calls) == (2, 2)
    assert result.uses["torch_npu.npu_rms_norm"].files == {"a.py", "in/ner/b.py"}
    assert read(tmp_path / "a.py").files == 1


UNREADABLE = {
    "python2": b"import torch_npu\nprint torch_npu.npu_swiglu(x)",
    "null": b"import torch_npu\x00",
    "latin": b"import torch_npu\nx = '\xe9\xff'",
    "coding": b"# -*- coding: nothing -*-\nimport torch_npu",
    "deep": b"import torch_npu\n" + b"(" * 5000,
    "signs": b"import torch_npu\nx = " + b"-" * 200_000 + b"1",
    "chain": b"import torch_npu\nx = torch_npu" + b".a" * 100_000,
    "large": b"import torch_npu\n" + b"#" * LARGEST,
}


def test_scan_lists_unreadable_files_and_executes_no_code(tmp_path: Path) -> None:
    for name, text in UNREADABLE.items():
        (tmp_path / f"{name}.py").write_bytes(text)
    (tmp_path / "runs.py").write_text(f"import torch_npu\nopen({str(tmp_path / 'made')!r}, 'w')\ntorch_npu.npu_gelu(x)")
    (tmp_path / "odd\x1b[31m.py").write_bytes(UNREADABLE["null"])
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere")
    outcome = CliRunner().invoke(app, ["npu", "--coverage", str(tmp_path)], terminal_width=200)
    assert outcome.exit_code == 0, outcome.exception
    assert not (tmp_path / "made").exists()
    assert "torch_npu.npu_gelu" in outcome.output
    assert "\x1b[31m" not in outcome.output
    result = json.loads(CliRunner().invoke(app, ["npu", "--json", "--coverage", str(tmp_path)]).stdout)
    read_after_all = {"chain.py"}  # a parser may manage it
    assert {*result["unread"], *read_after_all} == {f"{name}.py" for name in UNREADABLE} | {
        "odd\x1b[31m.py", "gone.py", *read_after_all,
    }  # fmt: skip


PROGRAM = """
import torch, torch_npu
from torch_npu import npu_fusion_attention
npu_fusion_attention(q, q, q, 2, "BSND")
npu_fusion_attention(q, q, q, 2, "BSND")
torch_npu.npu_dynamic_mx_quant(x)
torch.npu.synchronize()
torch_npu.npu.nothing
torch_npu.npu_fused_infer_attention_score.out(x)
torch_npu.profiler.ProfilerActivity.NPU
if x.device.type == "npu": pass
"""


def test_coverage_command_reports_present_and_missing_names(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(PROGRAM)
    outcome = CliRunner().invoke(app, ["npu", "--coverage", str(tmp_path)], env={"COLUMNS": "200"})
    assert outcome.exit_code == 0
    lines = [line for line in outcome.output.splitlines() if "torch_npu." in line]
    assert "npu_fusion_attention" in lines[0]
    assert "yes" in lines[0]
    (absent,) = [line for line in lines if "npu_dynamic_mx_quant" in line]
    assert "no: MX and float8 formats are the chip's alone" in absent
    assert "Files read: 1; names of the chip's packages: 6, of which missing here: 2." in outcome.output
    assert "3 of 4 calls of npu functions (75%) exist here." in outcome.output
    assert 'Comparisons of a device with "npu": 1' in outcome.output
    few = CliRunner().invoke(app, ["npu", "--missing", "--coverage", str(tmp_path)], env={"COLUMNS": "200"}).output
    assert "npu_dynamic_mx_quant" in few
    assert "torch_npu.npu_fusion_attention" not in few
    result = json.loads(CliRunner().invoke(app, ["npu", "--json", "--coverage", str(tmp_path)]).stdout)
    here = {row["name"]: row["here"] for row in result["names"]}
    assert here == {
        "torch_npu.npu_fusion_attention": True,
        "torch_npu.npu_dynamic_mx_quant": False,
        "torch_npu.npu.synchronize": True,
        "torch_npu.npu.nothing": False,
        "torch_npu.npu_fused_infer_attention_score.out": True,
        "torch_npu.profiler.ProfilerActivity.NPU": True,
    }
    assert result["share"] == 0.75
    (tmp_path / "model.py").write_text("import torch\n")
    result = json.loads(CliRunner().invoke(app, ["npu", "--json", "--coverage", str(tmp_path)]).stdout)
    assert (result["names"], result["share"], result["function_calls"]) == ([], None, 0)


def test_npu_command_lists_all_implemented_functions() -> None:
    result: dict[str, Any] = json.loads(CliRunner().invoke(app, ["npu", "--json"]).stdout)
    assert set(modules.functions()) <= set(result["torch_npu"])
    assert "mem_get_info" in result["torch_npu.npu"]
    assert "npu_ring_attention_update" in result["mindspeed.ops.npu_ring_attention_update"]
    text = CliRunner().invoke(app, ["npu"]).output
    assert "npu_fusion_attention" in text


# ---------------------------------------------------------------------------------------- calls in published programs


def test_every_function_of_published_programs_is_implemented_except_four_groups() -> None:
    functions_here = set(modules.functions())
    assert {names for names, _ in EVERYWHERE if not set(names.split()) <= functions_here} == {
        "npu_dynamic_mx_quant",
        "npu_mm_reduce_scatter_base npu_all_gather_base_mm",
        "npu_moe_distribute_dispatch_v2 npu_moe_distribute_combine_v2",
        "npu_chunk_gated_delta_rule_fwd_h npu_recompute_w_u_fwd",
    }

"""Unedited programs for the chip: a script or module, child processes, and a pytest run."""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from support.sources import ROOT

from fusion_attention import npu
from fusion_attention.npu import pytest as plugin
from fusion_attention.npu import subprocesses
from fusion_attention.npu.__main__ import main

SRC = str(ROOT / "src")
SCRIPT = """
import json, os, sys
import beside
import torch, torch_npu
x = torch.ones(2, device="npu")
facts = {"argv": sys.argv, "name": __name__, "path": sys.path[0], "type": x.device.type, "beside": beside.VALUE}
open(os.path.join(os.path.dirname(sys.argv[1]), "facts.json"), "w").write(json.dumps(facts))
raise SystemExit(3)
"""


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the process after a program: environment, sys.argv, sys.path, modules and the device."""
    for name in (subprocesses.DEVICE, subprocesses.STRICT, subprocesses.PATH):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    npu.uninstall()
    for name in ("beside", "package", "package.program"):
        sys.modules.pop(name, None)


def run(*command: str | Path, path: str = SRC, code: int = 0, **environment: str) -> str:
    """Run Python with `command`, assert its exit code, and return its output."""
    environment_kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    ran = subprocess.run(
        [sys.executable, *map(str, command)],
        env={
            **environment_kept,
            "PYTHONPATH": os.pathsep.join(filter(None, (path, environment_kept.get("PYTHONPATH")))),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == code, ran.stdout + ran.stderr
    return ran.stdout


# ------------------------------------------------------------------------------------------------------------ programs


@pytest.mark.parametrize("way", ["script", "module"])
def test_runner_passes_arguments_name_path_and_exit_code_like_python(
    way: str, process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 5")
    (tmp_path / "package").mkdir()
    file = tmp_path / ("program.py" if way == "script" else "package/program.py")
    file.write_text(SCRIPT)
    if way == "module":
        monkeypatch.syspath_prepend(str(tmp_path))
    notes = [str(file)] if way == "script" else ["-m", "package.program"]
    with pytest.raises(SystemExit) as end:
        main([*notes, str(tmp_path / "argument"), "--device", "its own", "--strict"])
    assert end.value.code == 3
    assert json.loads((tmp_path / "facts.json").read_text()) == {
        "argv": [str(file), str(tmp_path / "argument"), "--device", "its own", "--strict"],
        "name": "__main__",
        "path": str(tmp_path),
        "type": "npu",
        "beside": 5,
    }
    assert os.environ[subprocesses.DEVICE] == "cpu"
    assert os.environ[subprocesses.STRICT] == ""
    assert os.environ[subprocesses.PATH].split(os.pathsep)[0] == str(Path(subprocesses.__file__).parent)


def test_runner_options_before_the_program_set_device_and_strict(process: None, tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(
        "import torch, fusion_attention.settings as s\n"
        "raise SystemExit(torch.ones(1, device='npu').device.type + str(s.PROCESS.strict))"
    )
    with pytest.raises(SystemExit, match="cpuTrue"):
        main(["--device", "host", "--strict", str(file)])
    assert (os.environ[subprocesses.DEVICE], os.environ[subprocesses.STRICT]) == ("host", "1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py"], "no such file: nowhere.py"),
        (["-m", "nowhere.at_all"], "no such module: nowhere.at_all"),
        (["--device", "tpu", __file__], 'npu.install: device: expected "cpu", "host", or "cuda" where there is one'),
        ([], "the following arguments are required: program"),
    ],
)
def test_runner_reports_missing_program_or_device_as_usage_error(
    arguments: list[str], message: str, process: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert message in capsys.readouterr().err
    assert subprocesses.DEVICE not in os.environ


def test_runner_exits_if_another_torch_npu_is_loaded(
    process: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    with pytest.raises(SystemExit):
        main([__file__])
    assert "expected no other torch_npu" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------- subprocesses

STANDING_IN = """
import importlib.machinery, sys
calls = []
class Loader:
    def create_module(self, spec):
        return sys.modules["torch_npu"]
    def exec_module(self, module):
        pass
def install(device, *, strict):
    calls.append((device, strict))
    sys.meta_path.remove(sys.modules["sitecustomize"].ON_DEMAND)
    sys.modules["torch_npu"] = type(sys)("torch_npu")
    sys.modules["torch_npu"].__spec__ = importlib.machinery.ModuleSpec("torch_npu", Loader())
"""
# PathFinder comes first, because the finder of an editable installation would load the real package.
SITECUSTOMIZE = """
import importlib.machinery, sys
sys.own = "the environment has one too"
sys.meta_path.insert(0, importlib.machinery.PathFinder)
"""
ELSEWHERE = "sys.modules['fusion_attention'] = None"  # as where it is not installed
SAY = "import sys; m = sys.modules.get('fusion_attention.npu'); print(m and m.calls, 'torch_npu' in sys.modules)"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder with stubs of torch and this library, with which a child process starts in milliseconds."""
    (tmp_path / "torch.py").write_text("LOADED = True")
    (tmp_path / "fusion_attention").mkdir()
    (tmp_path / "fusion_attention/__init__.py").write_text("")
    (tmp_path / "fusion_attention/npu.py").write_text(STANDING_IN)
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE)
    return tmp_path


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("", "None False"),
        ("import json", "None False"),
        ("import torch; assert torch.LOADED; import torch_npu", "[('cuda:1', True)] True"),
        ("import torch_npu; import torch", "[('cuda:1', True)] True"),
        ("import importlib.util as u; assert u.find_spec('torch_npu')", "[('cuda:1', True)] True"),
        ("import fusion_attention; import torch", "None False"),
        ("import fusion_attention; import torch; import torch_npu", "[('cuda:1', True)] True"),
        ("import importlib.util as u; assert u.find_spec('torch')", "None False"),
        (f"{ELSEWHERE}; import torch, importlib.util as u; assert u.find_spec('torch_npu') is None", "None False"),
    ],
)
def test_child_process_installs_torch_npu_on_demand(
    program: str, expected: str, folder: Path, process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(subprocesses.PATH, str(folder))
    restore = subprocesses.export("cuda:1", strict=True)
    notes = {name: os.environ[name] for name in (subprocesses.DEVICE, subprocesses.STRICT)}
    path = os.environ[subprocesses.PATH]
    restore()
    assert os.environ[subprocesses.PATH] == str(folder)
    assert subprocesses.DEVICE not in os.environ
    text = run("-c", f"import sys; assert sys.own\n{program}\n{SAY}", path=path, **notes)
    assert text.strip() == expected


SPAWNS = """
import torch, torch.multiprocessing as processes
def work(rank, queue):
    x = torch.ones(2, device="npu", requires_grad=True)
    (x * rank).sum().backward()
    queue.put((rank, x.grad.device.type, x.grad.tolist()))
if __name__ == "__main__":
    context = processes.get_context("spawn")
    queue = context.SimpleQueue()
    child = context.Process(target=work, args=(3, queue))
    child.start()
    child.join()
    print(child.exitcode, queue.get())
"""


@pytest.mark.slow
def test_spawned_child_process_computes_on_npu(tmp_path: Path) -> None:
    """The child does not import torch_npu; torch's autoload of device extensions does."""
    (tmp_path / "spawns.py").write_text(SPAWNS)
    text = run("-m", "fusion_attention.npu", tmp_path / "spawns.py")
    assert text.strip() == "0 (3, 'npu', [3.0, 3.0])"


# -------------------------------------------------------------------------------------------------------------- pytest

CONFTEST = """
import importlib.util
INSTALLED = importlib.util.find_spec("torch_npu") is not None
def pytest_report_header():
    return f"conftest found torch_npu: {INSTALLED}"
"""
TESTS = """
import os, subprocess, sys, torch, torch_npu
def test_that_computes():
    x = torch.randn(2, 8).npu()
    y, _ = torch_npu.npu_rms_norm(x, torch.ones(8).npu())
    torch.testing.assert_close(y.cpu(), torch.nn.functional.rms_norm(x.cpu(), (8,), eps=1e-6))
    assert y.device.type == "npu"
def test_that_fails():
    assert torch_npu.npu_swiglu(torch.ones(2, 4).npu()).sum() < 0
def test_children_are_told():
    assert "FUSION_ATTENTION_NPU_DEVICE" in os.environ
"""
# Options that load the pytest plugin from these sources, also if the environment has its entry point.
OPTION = ("-m", "pytest", "-p", "no:fusion_attention", "-p", "fusion_attention.fake_npu", "-p", "no:cacheprovider")


@pytest.mark.slow
def test_pytest_option_fake_npu_installs_torch_npu(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_of_the_chip.py").write_text(TESTS)
    text = run(*OPTION, "--fake-npu", "--rootdir", tmp_path, tmp_path, code=1)
    assert "conftest found torch_npu: True" in text
    assert "torch_npu: " in text
    assert "test_of_the_chip.py::test_that_fails" in text
    assert "1 failed, 2 passed" in text


def test_pytest_without_option_fake_npu_does_not_import_torch(tmp_path: Path) -> None:
    (tmp_path / "test_nothing.py").write_text(
        "import sys\ndef test_nothing():\n    assert not {'torch', 'fusion_attention.npu'} & set(sys.modules)"
    )
    assert "1 passed" in run(*OPTION, "-p", "no:randomly", "--rootdir", tmp_path, tmp_path)


@pytest.mark.slow
def test_pytest_plugin_loaded_by_name_works_in_xdist_workers(tmp_path: Path) -> None:
    (tmp_path / "test_of_the_chip.py").write_text(TESTS)
    words = ("-m", "pytest", "-p", "fusion_attention.npu.pytest", "-p", "no:cacheprovider", "-n", "2")
    assert "1 failed, 2 passed" in run(*words, "--rootdir", tmp_path, tmp_path, code=1)


def test_pytest_plugin_warns_of_a_mocked_torch_npu(torch_npu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plugin.pytest_collection_finish()
    message = r"torch_npu is <module 'a mock'> and computes nothing"
    with monkeypatch.context() as replaced:
        replaced.setitem(sys.modules, "torch_npu", ModuleType("a mock"))
        with pytest.warns(pytest.PytestWarning, match=message):
            plugin.pytest_collection_finish()

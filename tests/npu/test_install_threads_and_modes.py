"""npu.install() and uninstall() take full effect or none, in any thread, under any mode, and when interrupted.

Threads and modes matter if "npu" is an alias of the host; the npu device is global and enters no mode.
"""

import functools
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import pytest
import torch
from support.installed_state import Recorded, modes, surroundings, there

from fusion_attention import npu, patches
from fusion_attention.npu.device import npu_alias

install = importlib.import_module("fusion_attention.npu.install")  # the package has the function of that name


host = functools.partial(npu.install, "host")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    npu.install()  # whatever the first call of all imports
    npu.uninstall()
    before = surroundings()
    yield
    npu.uninstall()
    assert surroundings() == before
    assert importlib.util.find_spec("torch_npu") is None


def elsewhere(*calls: Callable[[], Any]) -> list[Any]:
    """Run the calls one after the other in another thread, and return their results."""
    with ThreadPoolExecutor(1) as pool:
        return [pool.submit(call).result() for call in calls]


def npu_works(device: str = "host") -> bool:
    try:
        x = torch.ones(2, device="npu:0")
        return x.is_npu and x.device.type == ("cpu" if device == "host" else "npu")  # type: ignore[attr-defined]
    except (RuntimeError, AttributeError):
        return False


# ------------------------------------------------------------------------------------------------------------- threads


def test_uninstall_works_after_install_in_another_thread() -> None:
    assert elsewhere(host, npu_works) == [None, True]
    assert "torch_npu" in sys.modules
    npu.uninstall()
    assert "torch_npu" not in sys.modules
    assert not there()
    host()
    assert npu_works()


def test_uninstall_in_another_thread_removes_the_npu_device() -> None:
    host()
    elsewhere(npu.uninstall)
    assert not there()
    assert not npu_works()
    assert torch.einsum("npu", torch.ones(1, 2, 3)).shape == (1, 2, 3)  # what is left in this thread reads nothing
    host()
    assert npu_works()
    assert len(modes()) == 1


def test_host_alias_npu_works_only_in_threads_that_called_install() -> None:
    host()
    result = elsewhere(npu_works, host, npu_works, host, lambda: len(modes()))
    assert result == [False, None, True, None, 1]
    with ThreadPoolExecutor(1) as pool:
        pool.submit(host).result()
        npu.uninstall()
        assert pool.submit(npu_works).result() is False
        host()
        assert pool.submit(npu_works).result() is True


def test_eight_threads_install_and_uninstall_concurrently() -> None:
    start = threading.Barrier(8, timeout=60)

    def work(i: int) -> bool:
        start.wait()
        for _ in range(20):
            host()
            if i % 2:
                npu.uninstall()
        host()
        start.wait()  # no thread uninstalls any more
        host()
        return npu_works()

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
    assert sum(isinstance(finder, patches.Player) for finder in sys.meta_path) == 1


# --------------------------------------------------------------------------------------------------------------- modes


def test_install_inside_torch_device_context_keeps_the_context() -> None:
    with torch.device("meta"):
        host()
        assert torch.ones(2).device.type == "meta"
        assert torch.ones(2, device="npu").device.type == "cpu"
        assert len(modes()) == 2
    assert torch.ones(2).device.type == "cpu"
    assert npu_works()
    assert len(modes()) == 1
    npu.uninstall()
    assert not modes()


@pytest.mark.parametrize("enter", [host, npu.uninstall, lambda: (npu.uninstall(), host())])
def test_install_and_uninstall_inside_modes_keep_the_mode_stack(enter: Callable[[], Any]) -> None:
    host()
    outer, inner = Recorded(), Recorded()
    with outer, torch.device("meta"), inner:
        before = len(outer.names), len(inner.names)
        enter()
        torch.ones(2)
        assert len(outer.names) > before[0]
        assert len(inner.names) > before[1]
        assert [mode for mode in modes() if isinstance(mode, Recorded)] == [outer, inner]
    assert torch.ones(2).device.type == "cpu"
    assert len(modes()) == (1 if there() else 0)


def test_default_device_set_before_install_can_be_reset() -> None:
    torch.set_default_device("meta")
    try:
        host()
        assert torch.ones(2).device.type == "meta"
        assert torch.ones(2, device="npu").device.type == "cpu"
        with torch.device("cpu"):
            assert torch.ones(2).device.type == "cpu"
    finally:
        torch.set_default_device(None)
    assert torch.ones(2).device.type == "cpu"
    assert npu_works()
    torch.set_default_device("meta")
    npu.uninstall()
    assert torch.ones(2).device.type == "meta"
    torch.set_default_device(None)


def test_install_and_uninstall_tolerate_a_popped_npu_mode() -> None:
    host()
    torch.overrides._pop_mode()
    assert not npu_works()
    host()
    assert npu_works()
    torch.overrides._pop_mode()
    npu.uninstall()


# ---------------------------------------------------------------------------------- interrupted installs, other changes


# Functions that install() calls to change state; each may fail.
STEPS = {name: (install, name) for name in ("build_modules", "watch", "register")} | {"_mapped": (npu_alias, "_mapped")}
STEPS |= {"enter": (npu_alias._Devices, "enter"), "Player": (patches, "Player")}
STEPS |= {name: (patches.Changes, name) for name in ("find", "when_loaded", "set", "wrap")}


@pytest.mark.parametrize(("device", "step"), [*(("host", step) for step in STEPS), ("cpu", "register"), ("cpu", "set")])
def test_interrupted_install_restores_the_previous_state(
    device: str, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt(step)

    before = surroundings()
    with monkeypatch.context() as patch:
        patch.setattr(*STEPS[step], fails)
        with pytest.raises(KeyboardInterrupt, match=step):
            npu.install(device)
    assert surroundings() == before
    npu.install(device)
    assert npu_works(device)


def test_interrupted_uninstall_still_restores_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise KeyboardInterrupt

    host()
    with monkeypatch.context() as patch:
        patch.setattr(npu_alias, "_pop_mode", fails)
        with pytest.raises(KeyboardInterrupt):
            npu.uninstall()
    assert "torch_npu" not in sys.modules
    assert not there()
    assert not hasattr(torch.Tensor, "npu")
    host()
    assert npu_works()
    assert len(modes()) == 1


def test_uninstall_keeps_patches_made_by_other_code() -> None:
    host()
    below = torch.load
    torch.load = theirs = functools.partial(below)
    other = ModuleType("torch_npu")
    sys.modules["torch_npu"] = other
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, patches.Player)]
    npu.uninstall()
    assert torch.load is theirs
    assert sys.modules.pop("torch_npu") is other
    torch.load = below.__wrapped__  # type: ignore[attr-defined]


def test_install_error_names_another_loaded_torch_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
        before = surroundings()
        with pytest.raises(RuntimeError, match=r"expected no other torch_npu, got <module 'torch_npu'"):
            npu.install()
        assert surroundings() == before
        patch.setitem(sys.modules, "torch_npu", None)  # a forbidden import
        npu.install()
        assert npu_works("cpu")
        npu.uninstall()
        assert sys.modules["torch_npu"] is None

"""Fixtures of every test: one thread (waking others takes longer than thousands of tiny operations), a seed per test,
and memory for results and scratch that is NaN before an operator writes it.
"""

import contextlib
import os
import signal
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fusion_attention import memory
from fusion_attention.testing.cases import Named

# The device "npu" is compiled once per checkout, by the first process that needs it; other processes wait.
ROOT = Path(__file__).resolve().parents[1]
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(ROOT / "build" / "torch_extensions"))
sys.path.append(str(ROOT / "examples"))  # of the module that several examples share


FRESH = "FUSION_FRESH_SEED"  # draws every test and case anew; the environment reaches the processes of xdist too


def _seed(name: str) -> int:
    """Seed torch's generators and return the seed; torch.manual_seed would take 0.7 ms on machines without a GPU."""
    seed = zlib.crc32(f"{name}{os.environ.get(FRESH, '')}".encode())
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
    return seed


def pytest_configure(config: pytest.Config) -> None:
    Named.fresh = int(os.environ.get(FRESH, "0"))
    # A shell's background job ignores interrupts, and so would Python and all that tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)


MOST = 12  # cases of one test that run every day
TURN = "FUSION_SLOW_TURN"  # "3/40": every fortieth slow test runs too, drawn by name; another number, other ones


def _is_comparable(value: object) -> bool:
    """True if repr distinguishes values without reading memory; some tests have tensors outside their storage."""
    if isinstance(value, tuple | list):
        return all(map(_is_comparable, value))
    return value is None or isinstance(value, bool | int | float | str | torch.dtype)


def _values(item: pytest.Item) -> set[tuple[str, str]]:
    """(axis, value) of a case: the axes are arguments of the test, and fields of those that are dataclasses."""
    callspec = getattr(item, "callspec", None)
    results = set()
    for name, value in callspec.params.items() if callspec else ():
        if is_dataclass(value) and not isinstance(value, type):
            each = {f"{name}.{field.name}": getattr(value, field.name) for field in fields(value)}
            results |= {(axis, repr(one)) for axis, one in each.items() if _is_comparable(one)}
        else:
            results.add((name, repr(value) if _is_comparable(value) else f"object {id(value)}"))
    return results


def _everyday(cases: list[pytest.Item], most: int) -> list[pytest.Item]:
    """At most `most` cases, drawn by name, that contain every value of each axis of at most `most` values.

    If an argument has more values than that, `most` cases.
    """
    values = {item: _values(item) for item in sorted(cases, key=lambda item: zlib.crc32(item.nodeid.encode()))}
    sizes = Counter(axis for axis, _ in set().union(*values.values()))
    missing = {(axis, value) for case in values.values() for axis, value in case if sizes[axis] <= most}
    least = most if any(size > most and "." not in axis for axis, size in sizes.items()) else 1
    chosen: list[pytest.Item] = []
    while values and len(chosen) < most and (missing or len(chosen) < least):
        item = max(values, key=lambda item: len(values[item] & missing))  # the first of equals
        missing -= values.pop(item)
        chosen.append(item)
    return chosen


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks all but the _everyday() cases of a test as slow: at most MOST, one in n with `sampled(n)`, all with n = 1.

    Tests already marked slow and tests on a GPU are left out. FUSION_SLOW_TURN unmarks a fraction of the slow tests.
    """
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if not item.get_closest_marker("slow") and item.path.parent.name != "gpu":
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        marker = cases[0].get_closest_marker("sampled")
        most = -(-len(cases) // marker.args[0]) if marker else MOST
        if len(cases) > 1 and not (marker and marker.args[0] == 1):
            for item in set(cases) - set(_everyday(cases, most)):
                item.add_marker(pytest.mark.slow)
    turn, _, turns = os.environ.get(TURN, "0/1").partition("/")
    for item in items:
        if int(turns) > 1 and zlib.crc32(item.nodeid.encode()) % int(turns) == int(turn) % int(turns):
            item.own_markers = [mark for mark in item.own_markers if mark.name != "slow"]


def pytest_report_header() -> str:
    try:
        from fusion_attention import _native
    except ImportError as error:  # the GPU tests run without the core
        return f"native core: {error}"
    features = _native.cpu_features()
    return f"native core: {features['chosen']}{', FUSION_ATTENTION_CPU' if features['forced'] else ''}"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Seed per module, so that numbers drawn at import do not depend on other modules."""
    if isinstance(collector, pytest.Module):
        _seed(collector.nodeid)


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """Seed per test, so that a test draws the same numbers alone, after others and in every run."""
    np.random.seed(_seed(request.node.nodeid))  # noqa: NPY002 - for code that draws from numpy's global state


@pytest.fixture(autouse=True, scope="session")
def poisoned_scratch() -> None:
    """Fill the native core's scratch with NaN; machines for GPU tests have no core."""
    with contextlib.suppress(ImportError):
        from fusion_attention import _native

        _native.poison_scratch(True)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill memory from memory.py with NaN, integers with -99, so that unwritten elements fail a comparison.

    No other code allocates results or scratch (test_memory_rules.py); test_poison.py leaves some of them unwritten.
    """
    ready = memory._ready

    def poisoned(fresh: torch.Tensor) -> torch.Tensor:
        fresh = ready(fresh)
        if type(fresh) is torch.Tensor:  # As there: the tensors of a trace have no memory.
            fresh.fill_(torch.nan if fresh.is_floating_point() else -99)
        return fresh

    monkeypatch.setattr(memory, "_ready", poisoned)


@pytest.fixture
def runtime() -> Iterator[None]:
    """acl after aclInit and aclrtSetDevice."""
    from fusion_attention import acl

    assert acl.init() == acl.rt.set_device(0) == 0
    yield
    acl.finalize()
    acl.get_recent_err_msg()


@pytest.fixture
def torch_npu() -> Iterator[Any]:
    """The module torch_npu, imported after npu.install()."""
    from fusion_attention import npu

    npu.install()
    import torch_npu

    yield torch_npu
    npu.uninstall()


@pytest.fixture
def fresh() -> None:
    """Clear torch.compile's caches of other tests."""
    torch._dynamo.reset()

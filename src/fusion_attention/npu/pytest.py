"""`pytest -p fusion_attention.npu.pytest`: tests written for the chip compute, where they had a mock object.

Installs before any conftest is read, and takes it back when the run ends. `--fake-npu` (fake_npu.py) is the same.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from fusion_attention import npu
from fusion_attention.npu.__main__ import DEFAULT
from fusion_attention.npu.subprocesses import tell

NAME = "fusion_attention.npu.pytest"
_UNSAY = pytest.StashKey[Callable[[], None]]()


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Installs, unless installed."""
    npu.install()
    early_config.stash[_UNSAY] = tell(DEFAULT)  # xdist's workers, and programs that tests start


def pytest_report_header() -> str:
    """Whose numbers these are."""
    import torch_npu  # type: ignore[import-not-found]  # the one that is installed

    return f"torch_npu: {torch_npu.__version__}"


def pytest_collection_finish() -> None:
    """Says where a conftest has put a mock object in its place."""
    result: Any = sys.modules.get("torch_npu")
    if result is None or "fusion" not in str(getattr(result, "__version__", "")):
        warnings.warn(
            pytest.PytestWarning(
                f"torch_npu is {result!r} and computes nothing: a conftest or test has replaced the one that "
                "fusion_attention installed (leave that out)"
            ),
            stacklevel=1,
        )


def pytest_unconfigure(config: pytest.Config) -> None:
    """Takes it back."""
    config.stash.get(_UNSAY, lambda: None)()
    npu.uninstall()

"""The plugin of `pytest -p fusion_attention.npu.pytest`, which runs tests that were written for Ascend NPUs.

It calls install() before conftests are read, and uninstall() at the end. The option --fake-npu (fake_npu.py) does the
same.
"""

import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from fusion_attention import npu
from fusion_attention.npu.__main__ import DEFAULT
from fusion_attention.npu.subprocesses import export

NAME = "fusion_attention.npu.pytest"
_RESTORE = pytest.StashKey[Callable[[], None]]()


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Calls npu.install(), which makes `import torch_npu` work, before conftests are imported."""
    npu.install()
    early_config.stash[_RESTORE] = export(DEFAULT)  # for xdist's workers and processes that tests start


def pytest_report_header() -> str:
    """Adds the version of torch_npu in use to pytest's header."""
    import torch_npu  # type: ignore[import-not-found]  # the one that is installed

    return f"torch_npu: {torch_npu.__version__}"


def pytest_collection_finish() -> None:
    """Warns if a conftest has replaced torch_npu by a mock object."""
    result: Any = sys.modules.get("torch_npu")
    if result is None or "fusion" not in str(getattr(result, "__version__", "")):
        warnings.warn(
            pytest.PytestWarning(
                f"torch_npu is {result!r} and computes nothing: a conftest or test has replaced the module that "
                "fusion_attention installed (do not replace it)"
            ),
            stacklevel=1,
        )


def pytest_unconfigure(config: pytest.Config) -> None:
    """Calls npu.uninstall()."""
    config.stash.get(_RESTORE, lambda: None)()
    npu.uninstall()

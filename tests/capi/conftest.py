"""Fixtures of the C libraries: the runtime is stopped before and after each test."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.c_runtime import Runtime


@pytest.fixture
def library() -> Iterator[Runtime]:
    """Yields the runtime before aclInit(), and finalizes it after the test."""
    result = Runtime()
    yield result
    result.aclFinalize()
    result.message()


@pytest.fixture
def acl(library: Runtime) -> Iterator[Runtime]:
    """Yields the runtime after aclInit() with device 0 current, and finalizes it after the test."""
    yield from library.started()


@pytest.fixture
def checked(library: Runtime, tmp_path: Path) -> Iterator[Runtime]:
    """Yields the started runtime in checked mode."""
    config = tmp_path / "acl.json"
    config.write_text('{"dump": {"dump_list": []}, "fusion_attention": {"checked": true}}')
    yield from library.started(config)

"""The C libraries, as a test finds them: none of them runs before it, and none after."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.c_runtime import Runtime


@pytest.fixture
def library() -> Iterator[Runtime]:
    """Before aclInit(); whatever a test leaves running ends with it."""
    result = Runtime()
    yield result
    result.aclFinalize()
    result.message()


@pytest.fixture
def acl(library: Runtime) -> Iterator[Runtime]:
    """Between aclInit() and aclFinalize(), with device 0 current."""
    yield from library.started()


@pytest.fixture
def checked(library: Runtime, tmp_path: Path) -> Iterator[Runtime]:
    """The same in the checked mode."""
    config = tmp_path / "acl.json"
    config.write_text('{"dump": {"dump_list": []}, "fusion_attention": {"checked": true}}')
    yield from library.started(config)

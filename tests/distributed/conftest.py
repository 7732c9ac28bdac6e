"""One pool of processes for all tests of this folder."""

from collections.abc import Iterator

import pytest
from support.worlds import Worlds


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    pool = Worlds()
    yield pool
    pool.end()

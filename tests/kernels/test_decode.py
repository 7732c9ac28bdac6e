"""The decode kernels under Triton's interpreter against golden: pages and quantised caches."""

from __future__ import annotations

import pytest
from support.caches import CACHES, Cache, judge, made

from fusion_attention.backends import triton as backend


@pytest.mark.parametrize("cache", CACHES, ids=lambda cache: cache.id)
def test_caches(cache: Cache) -> None:
    p, e, operands = cache.problem, cache.extents(), made(cache, "cpu")
    assert backend.reasons_against(p, "cpu") == []
    backend.attention_forward(p, e, backend.schedule(p, e, "attention_forward"), operands)
    judge(cache, operands, e)

"""Long rows of keys and long columns of rows under Triton's interpreter, judged at ends, boundaries and drawn tiles."""

from __future__ import annotations

import pytest
from support.long_calls import decode, dense, failing, gradient, pieces, sparse

HERE = {"causal": False, "backend": "triton", "heads_q": 1}


@pytest.mark.parametrize(("q_len", "kv_len"), [(16, 4096), (4096, 16)])
def test_training_attention_and_its_gradients(q_len: int, kv_len: int) -> None:
    for long in dense("bfloat16", q_len, kv_len, **HERE), gradient("float16", q_len, kv_len, **HERE):
        assert not failing(long, [*pieces(long, seed=3)])


def test_lists_of_far_keys_and_long_caches() -> None:
    for long in sparse("bfloat16", 4, 16384, backend="triton"), decode("bfloat16", (4097,), backend="triton"):
        assert not failing(long, [*pieces(long, seed=3)])

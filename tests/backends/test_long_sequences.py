"""Calls of 2600 to 16384 tokens, checked at both ends, at boundaries of tiles and at randomly drawn tiles."""

from typing import Any

import pytest
from support.long_calls import Long, decode, dense, failing, gradient, pieces, sparse, sparse_gradient

DTYPES = ("float32", "float16", "bfloat16")


def judge(long: Long) -> None:
    assert not failing(long, [*pieces(long, seed=3)])


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("length", "causal", "fields"),
    [
        (2600, False, {}),
        (6001, False, {"sparse_mode": 4, "mask": "compressed", "pre": 1500, "next": 0}),
        (8192, True, {"sink": True, "dim_rope": 16}),
        (16384, True, {}),
        (4096, True, {"layout": "TND", "pse": "slopes", "pse_type": 2}),
    ],
    ids=str,
)
def test_training_attention_of_long_sequences_matches_reference(
    length: int, causal: bool, fields: dict[str, Any], dtype: str
) -> None:
    judge(dense(dtype, length, length, causal=causal, **fields))
    judge(gradient(dtype, length, length, causal=causal, **fields))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("q_len", "kv_len"), [(40, 16384), (16384, 40)])
def test_gradients_of_40_rows_by_16384_keys_and_reverse_match_reference(q_len: int, kv_len: int, dtype: str) -> None:
    judge(gradient(dtype, q_len, kv_len, causal=False))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_sparse_attention_over_16384_keys_matches_reference(dtype: str) -> None:
    judge(sparse(dtype, 4096, 16384))
    judge(sparse_gradient(dtype, 300, 16384))


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_decode_over_long_paged_sequences_matches_reference(dtype: str) -> None:
    judge(decode(dtype, (16384, 4097, 8000)))

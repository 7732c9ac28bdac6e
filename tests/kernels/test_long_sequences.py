"""Many keys or many rows under Triton's interpreter, checked at ends, boundaries of tiles and drawn tiles."""

import pytest
from support.long_calls import decode, dense, failing, gradient, pieces, sparse, sparse_gradient

from fusion_attention import memory
from fusion_attention.testing.expected_indexer import check_index
from fusion_attention.testing.sparse import IndexerCase, indexer_arguments, lowered_indexer
from fusion_attention.torch_ops.eager import run

HERE = {"causal": False, "backend": "triton", "heads_q": 1}


@pytest.fixture(autouse=True)
def small_tiles() -> None:
    """Replaces the folder's fixture: with tiles lower than on a GPU, a long call takes minutes."""


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poisons with numbers, not NaN: rows with NaN are recomputed, which hides rows that no tile writes."""
    ready = memory._ready
    monkeypatch.setattr(memory, "_ready", lambda fresh: ready(fresh).fill_(100.0 if fresh.is_floating_point() else -99))


@pytest.mark.parametrize(("q_len", "kv_len"), [(16, 2048), (2048, 16)])
def test_triton_training_attention_of_2048_tokens_matches_reference(q_len: int, kv_len: int) -> None:
    for long in dense("bfloat16", q_len, kv_len, **HERE), gradient("float16", q_len, kv_len, **HERE):
        assert not failing(long, [*pieces(long, seed=3)])


def test_triton_sparse_attention_and_decode_of_many_keys_match_reference() -> None:
    for long in sparse("bfloat16", 4, 16384, backend="triton"), decode("bfloat16", (4097,), backend="triton"):
        assert not failing(long, [*pieces(long, seed=3)])


def test_triton_sparse_gradients_over_1200_keys_match_reference() -> None:
    long = sparse_gradient("bfloat16", 1, 1200, backend="triton", count=64, heads_q=2)
    assert not failing(long, [*pieces(long, seed=3)])


def test_triton_indexer_selection_from_2500_keys_matches_reference() -> None:
    case = IndexerCase(q_len=(1,), kv_len=(2500,), heads=8, dim=16, top_k=20, dtype="bfloat16", weights="bfloat16")
    call = lowered_indexer(indexer_arguments(case))
    check_index(call, {case.id: run(call, "triton")})

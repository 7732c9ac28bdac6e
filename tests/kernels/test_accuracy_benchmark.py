"""The Triton column of docs/accuracy.md: a tiny run of the command that measures it."""

from benchmarks import accuracy


def test_accuracy_benchmark_runs_attention_and_indexer_with_triton() -> None:
    results = [*accuracy.rows(24, triton=True, families=("attention", "indexer"), dtypes=("bfloat16",))]
    assert {row.program for row in results} == {"Triton"}
    outputs = {name for row in results for name in row.z}
    assert outputs == {"out", "max", "sum", "sparse_indices_out", "sparse_values_out"}
    assert all(tile < 3 for row in results for tile in row.tile.values()), results


def test_accuracy_benchmark_omits_calls_that_triton_refuses() -> None:
    results = [*accuracy.rows(24, triton=True, families=("decode, int8 cache",), dtypes=("float16",))]
    assert {row.call for row in results} == {0}  # scales of tokens want to lie in pages

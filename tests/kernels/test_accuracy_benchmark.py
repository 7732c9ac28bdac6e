"""The Triton column of docs/accuracy.md: a tiny run of the command that measures it."""

from benchmarks import accuracy


def test_a_tiny_run() -> None:
    results = [*accuracy.rows(24, triton=True, families=("attention", "indexer"), dtypes=("bfloat16",))]
    assert {row.program for row in results} == {"Triton"}
    outputs = {name for row in results for name in row.z}
    assert outputs == {"out", "max", "sum", "sparse_indices_out", "sparse_values_out"}
    assert all(tile < 3 for row in results for tile in row.tile.values()), results


def test_a_call_that_the_kernels_refuse_has_no_row() -> None:
    results = [*accuracy.rows(24, triton=True, families=("decode, int8 cache",), dtypes=("float16",))]
    assert {row.call for row in results} == {0}  # scales of tokens want to lie in pages

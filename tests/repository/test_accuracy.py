"""The figures of docs/accuracy.md are measured: the table has every family, and small runs are within its limits."""

import re

import pytest

from benchmarks import accuracy as measuring
from benchmarks.accuracy_calls import FAMILIES
from website import accuracy


def test_accuracy_table_lists_every_operator_family() -> None:
    assert re.findall(r"^\| ([^|]+?) \|", accuracy.table(), re.MULTILINE)[1:] == [*FAMILIES]
    for family, tiles in accuracy.figures()["worst"].items():
        assert None not in tiles["golden"] + tiles["core"], family
        assert all(tile <= 3 for tile in tiles["core"] + tiles.get("Triton", []) if tile is not None), (family, tiles)


def test_accuracy_picture_separates_right_from_wrong_results() -> None:
    result = accuracy.figures()["picture"]
    assert {*accuracy.RIGHT} | {*measuring.FAULTS} == {*result["counts"]}
    for fault in result["wrong"].values():
        assert result["largest"] < fault["limit"] < fault["tile"]
        assert fault["z"] < fault["tile"]


@pytest.mark.parametrize(
    ("family", "others"),
    [
        ("attention", {"SDPA", "tiles", "eager"}),
        ("gradients", {"SDPA", "tiles", "eager"}),
        ("decode, int8 cache", {"SDPA", "tiles", "eager"}),
        ("decode, int8 results", set()),
        ("sparse gradients", {"SDPA", "tiles", "eager"}),
        ("indexer", {"eager"}),
        ("indexer gradients", {"eager"}),
        ("indexer loss, chosen keys", set()),
    ],
)
def test_small_accuracy_measurement_is_within_limits(family: str, others: set[str]) -> None:
    results = [*measuring.rows(24, families=(family,), dtypes=("float16",))]
    expected = {*(f"core {variant}" for variant in measuring.VARIANTS), "golden"}
    assert {row.program for row in results} == expected | others
    assert all(0 <= z <= 3 and 0 <= row.tile[name] < 5 for row in results for name, z in row.z.items()), results


def test_small_accuracy_picture_detects_all_faults() -> None:
    result = measuring.right_and_wrong(256)
    assert all(fault["tile"] > fault["limit"] for fault in result["wrong"].values()), result["wrong"]
    assert sum(result["counts"]["SDPA"]) == 2 * 256 // 32
    assert sum(result["counts"]["core"]) == (2 + 2 + 1 + 1) * 256 // 32

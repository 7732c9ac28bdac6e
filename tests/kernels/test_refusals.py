"""Calls that the Triton back end refuses, with every reason; page tables never cause reads outside the pool."""

import dataclasses
import math
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.paged_decode_calls import Cache, judge, operands_on, results

from fusion_attention.backends import choose
from fusion_attention.backends import triton as backend
from fusion_attention.backends.triton.common import layout_table, shapes
from fusion_attention.backends.triton.decode import launch as launch_decode
from fusion_attention.backends.triton.dense import launch as launch_dense
from fusion_attention.contract import BackendError
from fusion_attention.ir.memory_views import PagedView, RowView
from fusion_attention.ir.problem import IndexerLossProblem, IndexerProblem, Operands, Problem
from fusion_attention.testing import Case, arguments, lowered, run
from fusion_attention.testing.sparse import IndexerCase, chosen, indexer_arguments, lowered_indexer

CUDA = torch.device("cuda", 0)
PROBLEM = Problem(4, 2, 128, 128, dtype="bfloat16")
INDEXER = IndexerProblem(heads=4, dim=16, top_k=4)
INTERPRETED = backend.interpreted


@pytest.fixture
def chip(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Simulates a machine with an H200 and the real tables of tiles; tests change its properties."""
    monkeypatch.undo()
    monkeypatch.setattr(backend, "interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return with_chip(monkeypatch, (9, 0), 227)


def with_chip(patch: pytest.MonkeyPatch, capability: tuple[int, int], shared_kb: int) -> pytest.MonkeyPatch:
    patch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    patch.setattr(shapes, "shared_memory", lambda index: shared_kb)
    return patch


def compute(cache: Cache, operands: Operands) -> None:
    p, e = cache.problem, cache.extents()
    backend.attention_forward(p, e, backend.schedule(p, e, "attention_forward"), operands)


# --------------------------------------------------------------------------------------------------- devices and chips


def test_triton_back_end_is_refused_without_triton_package(chip: pytest.MonkeyPatch) -> None:
    chip.setitem(sys.modules, "triton", None)
    assert backend.reasons_against(PROBLEM, CUDA) == [
        "the triton back end needs the package triton, which is not installed."
    ]


def test_triton_back_end_refuses_cpu_old_and_amd_gpus(chip: pytest.MonkeyPatch) -> None:
    assert backend.reasons_against(PROBLEM, "cpu") == ["the triton back end computes device cuda, not cpu."]
    for major in (7, 11, 13):
        with_chip(chip, (major, 0), 227)
        assert f"sm_8x, sm_9x, sm_10x, sm_12x, not for sm_{major}x" in backend.reasons_against(PROBLEM, CUDA)[0]
    with_chip(chip, (8, 8), 64)
    assert backend.reasons_against(PROBLEM, CUDA) == [
        "the triton back end needs 99 KB of shared memory; this GPU has 64 KB."
    ]
    chip.setattr(torch.version, "hip", "6.4")
    assert "not on AMD's" in backend.reasons_against(PROBLEM, CUDA)[0]
    chip.setattr(torch.version, "hip", None)
    chip.setattr(torch.cuda, "is_available", lambda: False)
    assert backend.reasons_against(PROBLEM, CUDA) == ["the triton back end finds no GPU."]


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ((769, 769, 0), "bfloat16"),
        ((64, 769, 0), "float16"),
        ((768, 64, 64), "bfloat16"),
        ((129, 64, 0), "float32"),
        ((128, 64, 8), "float32"),
    ],
)
def test_a_head_dim_without_a_tile_is_refused(
    chip: pytest.MonkeyPatch, sizes: tuple[int, int, int], dtype: str
) -> None:
    larger = dataclasses.replace(PROBLEM, dim_qk=sizes[0], dim_v=sizes[1], dim_rope=sizes[2], dtype=dtype)
    (reason,) = backend.reasons_against(larger, CUDA)
    assert reason == (
        f"the triton back end has no tile for dim_qk {sizes[0]}, dim_rope {sizes[2]} and dim_v {sizes[1]} in {dtype}: "
        "shared memory or registers do not hold one."
    )


@pytest.mark.parametrize(
    ("capability", "shared_kb", "served_as"),
    [
        *(((8, 0), 163, 80), ((8, 6), 99, 86), ((8, 7), 163, 80), ((8, 9), 99, 86), ((9, 0), 227, 90)),
        *(((10, 0), 227, 90), ((10, 3), 227, 90), ((12, 0), 99, 86), ((12, 1), 99, 86)),
    ],
)
def test_gpu_capability_selects_tile_table_that_fits_shared_memory(
    capability: tuple[int, int], shared_kb: int, served_as: int, chip: pytest.MonkeyPatch
) -> None:
    with_chip(chip, capability, shared_kb)
    assert shapes.chip_of(CUDA) == served_as
    for dim in (64, 128, 256):
        assert backend.reasons_against(dataclasses.replace(PROBLEM, dim_qk=dim, dim_v=dim), CUDA) == []


def test_tile_tables_never_exceed_shared_memory_of_the_chip() -> None:
    for table in shapes.TABLES.values():
        for (chip_, _), rows in table.items():
            assert all(row[-1] <= shapes.CHIPS[chip_][1] for row in rows)


def test_forward_is_accepted_if_only_the_backward_lacks_a_tile(chip: pytest.MonkeyPatch) -> None:
    larger = dataclasses.replace(PROBLEM, dim_qk=768, dim_v=768)
    assert backend.reasons_against(larger, CUDA) == []
    with_chip(chip, (8, 9), 99)
    assert backend.reasons_against(larger, CUDA, "attention_forward") == []
    for op_kind in ("attention_backward", ""):
        (reason,) = backend.reasons_against(larger, CUDA, op_kind)
        assert "no tile for dim_qk 768, dim_rope 0 and dim_v 768 in bfloat16" in reason
    assert choose(larger, CUDA, "auto", "attention_forward") == "triton"


@pytest.mark.parametrize("version", ["2.3.1", "3.2.0", "3.3.1", "3.5.1", "3.9.0", "4.0.0", "3.10.0+git1"])
def test_unsupported_triton_version_is_refused_and_named(version: str, chip: pytest.MonkeyPatch) -> None:
    """Includes a version without `knobs`, which tell whether kernels are interpreted."""
    chip.setitem(sys.modules, "triton", SimpleNamespace(__version__=version))
    chip.setattr(backend, "interpreted", INTERPRETED)
    assert backend.reasons_against(PROBLEM, CUDA) == [
        f"the triton back end was compiled with triton 3.6 to 3.8, not with {version}."
    ]
    assert f"not with {version}" in backend.reasons_against(INDEXER, CUDA)[0]


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.8.0", "3.7.0+git1234"])
def test_triton_versions_3_6_to_3_8_are_accepted(version: str, chip: pytest.MonkeyPatch) -> None:
    chip.setattr(sys.modules["triton"], "__version__", version)
    assert backend.reasons_against(PROBLEM, CUDA) == []


def test_back_end_error_lists_every_reason_of_every_back_end(chip: pytest.MonkeyPatch) -> None:
    wrong = dataclasses.replace(
        PROBLEM,
        dim_qk=900,
        dim_rope=300,
        common_keys=3,
        out_quant="tensor",
        page_size=16,
        dropout="philox",
        keep_prob=0.5,
    )
    with_chip(chip, (7, 0), 64)
    with pytest.raises(BackendError) as caught:
        choose(wrong, CUDA, "auto")
    message = str(caught.value)
    words = ("sm_7x", "out_quant", "common_keys", "dim_rope up to 256", "no dropout", "cpu: ")
    assert [word for word in words if word not in message] == []
    assert message.count("triton: ") == 5


def test_triton_interpreter_lists_reasons_against_unsupported_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the real tables
    assert backend.reasons_against(PROBLEM, "cpu") == []
    larger = dataclasses.replace(PROBLEM, dim_qk=600, dim_rope=300, dtype="int8", common_keys=3)
    reasons = backend.reasons_against(larger, "cpu")
    assert [word in reason for word, reason in zip(("int8", "common_keys", "dim_rope"), reasons, strict=True)] == [
        True
    ] * 3
    cache = dataclasses.replace(PROBLEM, page_size=16, dropout="philox", keep_prob=0.5, empty_rows="mean")
    assert len(backend.reasons_against(cache, "cpu")) == 2


@pytest.mark.parametrize(
    ("problem", "op_kind", "words"),
    [
        (Problem(2, 1, 16, 16, select_count=4, bias="matrix"), "attention_forward", ["bias with select_count"]),
        (
            Problem(2, 1, 16, 16, select_count=4, softcap=2.0, dtype="float64", empty_rows="mean"),
            "",
            ["dtype", "empty_rows with select_count", "softcap with select_count"],
        ),
        (Problem(2, 1, 900, 16, select_count=4), "attention_forward", ["no tile for dim_qk 900"]),
        (IndexerProblem(4, 16, "float64"), "indexer_topk", ["dtype float32, float16, bfloat16, not float64"]),
        (IndexerProblem(4, 900), "indexer_topk", ["no tile for 4 indexer heads of 900 elements"]),
        (IndexerProblem(4, 64, top_k=(1 << 20) + 1), "indexer_topk", ["of 64 elements, top_k 1048577"]),
        (IndexerLossProblem(4, 1, 16, 4, 900), "indexer_loss", ["4 indexer heads of 900 elements"]),
        (Problem(2, 1, 16, 16, select_count=4, page_size=16), "attention_forward", []),
    ],
)
def test_triton_back_end_lists_reasons_against_unsupported_sparse_problems(
    problem: Any, op_kind: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the real tables
    reasons = backend.reasons_against(problem, "cpu", op_kind)
    assert [word in reason for word, reason in zip(words, reasons, strict=True)] == [True] * len(words)


# --------------------------------------------------------------------------------------------------------------- calls


def test_tensors_on_several_devices_are_refused_by_name() -> None:
    case = Case()
    args = arguments(case)
    call = lowered(case, args)
    call = dataclasses.replace(call, k=call.k.to("meta"), v=call.v.to("meta"))
    with pytest.raises(BackendError, match=r"expected all tensors on cpu, where q is, got k on meta, v on meta"):
        run(call, args["dy"], "triton")


def test_a_cache_on_another_device_is_refused_before_anything_is_written() -> None:
    operands = operands_on(Cache(), "cpu")
    assert isinstance(operands.k, PagedView)
    elsewhere = dataclasses.replace(operands, k=operands.k.over(operands.k.pool.to("meta")))
    with pytest.raises(BackendError, match="got k on meta"):
        compute(Cache(), elsewhere)
    assert results(elsewhere)[0].isnan().all()


def test_triton_decode_refuses_rows_beside_pages_and_two_page_tables() -> None:
    operands, axis = operands_on(Cache(), "cpu"), np.zeros(3, np.int64)
    odd = dataclasses.replace(operands, v=RowView((torch.zeros(9),), axis, 1, axis, 16))
    with pytest.raises(BackendError, match="expected pages for k and v, got rows for v"):
        compute(Cache(), odd)
    assert isinstance(operands.v, PagedView)
    two = dataclasses.replace(operands, v=dataclasses.replace(operands.v, table=operands.v.table.clone()))
    with pytest.raises(BackendError, match="expected one page table, got another for v"):
        compute(Cache(), two)


def test_decode_and_indexer_without_query_rows_skip_layout_table_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph can then capture such a call first: no table can be copied during capture."""
    cache, index = Cache(q_len=0), lowered_indexer(indexer_arguments(IndexerCase(q_len=(0, 0), kv_len=(4, 4))))
    operands = operands_on(cache, "cpu")
    monkeypatch.setattr(layout_table.Copied, "write", lambda *_: pytest.fail("a table is copied"))
    compute(cache, operands)
    assert [t.numel() for t in chosen(index, "triton")] == [0, 0]


# ---------------------------------------------------------------------------------------------------------- page tables


def with_table(operands: Operands, table: torch.Tensor) -> Operands:
    assert isinstance(operands.k, PagedView)
    assert isinstance(operands.v, PagedView)
    return dataclasses.replace(
        operands, k=dataclasses.replace(operands.k, table=table), v=dataclasses.replace(operands.v, table=table)
    )


def test_triton_decode_survives_page_table_entries_out_of_range() -> None:
    cache = Cache(kv_len=(40,))
    operands = with_table(operands_on(cache, "cpu"), torch.tensor([[-5, 1 << 30, 2]], dtype=torch.int32))
    compute(cache, operands)
    assert results(operands)[0].shape == (1, 1, 4, 16)  # it came back: what it computed is anyone's


def test_triton_decode_reads_strided_and_expanded_page_tables() -> None:
    cache = Cache(kv_len=(40, 33))
    operands = operands_on(cache, "cpu")
    assert isinstance(operands.k, PagedView)
    table = operands.k.table
    padded = torch.full((2, table.shape[1] + 2), 1 << 30, dtype=torch.int32)
    padded[:, 1:-1] = table
    operands_cut = with_table(operands, padded[:, 1:-1])
    compute(cache, operands_cut)
    judge(cache, operands_cut, cache.extents())
    same = dataclasses.replace(cache, kv_len=(40, 40))
    shared = with_table(operands, table[:1].expand(2, -1))
    compute(same, shared)
    judge(same, shared, same.extents())


def test_triton_decode_over_empty_page_pool_returns_zeros() -> None:
    cache = Cache(kv_len=(40,))
    operands = operands_on(cache, "cpu")
    assert isinstance(operands.v, PagedView)
    operands.v.pool = torch.zeros(0, *operands.v.pool.shape[1:])
    compute(cache, operands)
    out, top, total = results(operands)
    assert not out.any()
    assert not total.any()
    assert (top == -math.inf).all()


def test_last_page_of_pool_is_derived_from_pool_memory() -> None:
    view = operands_on(Cache(), "cpu").k
    assert isinstance(view, PagedView)
    pages = view.pool.shape[0]
    assert launch_decode.pool_of(view, 2) == pages - 1
    assert launch_decode.pool_of(view.over(view.pool[1:]), 2) == pages - 2
    assert launch_decode.pool_of(view.over(view.pool[:0]), 2) == pages - 1
    assert launch_decode.pool_of(view.over(torch.zeros(0)), 2) == -1


def test_launch_refuses_unknown_kernel_argument_names() -> None:
    with pytest.raises(TypeError, match="no kernel takes qurey, slope"):
        launch_dense.FAMILY.launch(
            launch_dense.join, (1,), {"q": None, "slope": None}, ("qurey",), {}, shapes.RECOMPUTE["recompute_out"][0]
        )

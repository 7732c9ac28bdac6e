"""capture() and replay(): every call is recorded once and unchanged, also during other captures."""

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import content_of

import fusion_attention as fa
from fusion_attention import npu
from fusion_attention.npu import npu_fusion_attention as imported_before
from fusion_attention.npu import training
from fusion_attention.ops import RECORDS
from fusion_attention.testing import hostile


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def forward(q: torch.Tensor, **given: Any) -> tuple[Any, ...]:
    return imported_before(q, q, q, 4, "BSND", scale=0.25, **given)


def backward(q: torch.Tensor, **given: Any) -> tuple[Any, ...]:
    out, top, total, _, seed, offset, _ = forward(q, **given)
    saved = {"softmax_max": top, "softmax_sum": total, "attention_in": out, "seed": seed, "offset": offset}
    return npu.npu_fusion_attention_grad(q, q, q, q, 4, "BSND", scale_value=0.25, **saved, **given)


def packed(q: torch.Tensor, **given: Any) -> tuple[Any, ...]:
    flat = q.reshape(-1, *q.shape[2:])
    ends = torch.tensor([3, flat.shape[0]])
    return npu.npu_fusion_attention_v3(
        flat, flat, flat, 4, "TND", actual_seq_qlen=ends, actual_seq_kvlen=ends.tolist(), **given
    )


def slopes(q: torch.Tensor, **given: Any) -> tuple[Any, ...]:
    pse = torch.full((4,), 0.5)
    out, top, total, *_ = npu.npu_fusion_attention_v2(q, q, q, 4, "BSND", pse=pse, pse_type=2)
    saved = {"softmax_max": top, "softmax_sum": total, "attention_in": out}
    return npu.npu_fusion_attention_grad_v2(q, q, q, q, 4, "BSND", pse=pse, pse_type=2, **saved)


def attended(q: torch.Tensor, **given: Any) -> torch.Tensor:
    blocked = torch.zeros(5, 5, dtype=torch.bool)
    more = {"band": fa.Band.prefix_causal([1, 2]), "blocked": blocked, "bias": rows(5, 5), "softcap": 0.9}
    return fa.attention(q, q, q, **more, **given)


def golden_replays_golden(call: Callable[[], Any], folder: Path) -> None:
    """Capture `call` on golden, and assert that golden replays every file with equal bits."""
    with fa.use_backend("golden"), fa.capture(folder) as recorded:
        call()
    assert recorded.files
    for file in recorded.files:
        assert fa.replay(file, backend="golden").worst == 0.0, file


CALLS = [forward, backward, packed, slopes, attended]


@pytest.mark.parametrize("given", [{}, {"keep_prob": 0.7}], ids=["plain", "drawn"])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_captured_attention_call_replays_without_difference(
    call: Callable[..., Any], given: dict[str, Any], tmp_path: Path
) -> None:
    q = hostile(rows(2, 5, 4, 16))
    torch.manual_seed(1)
    want = call(q, **given)
    torch.manual_seed(1)
    with fa.capture(tmp_path / "calls") as recorded:
        got = call(q, **given)
    call(q, **given)
    for one, other in zip(want, got, strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    assert recorded.files == sorted((tmp_path / "calls").iterdir())
    for file in recorded.files:
        again = fa.replay(file)
        assert again.operator in file.name
        assert again.recorded.keys() == again.differences.keys() >= {"out"} & again.recorded.keys()
        assert again.worst == 0.0
    golden_replays_golden(lambda: call(q, **given), tmp_path / "golden")
    first = again.recorded[next(iter(again.recorded))]
    assert torch.equal(first, want if isinstance(want, torch.Tensor) else want[0])


def selecting(q: torch.Tensor) -> tuple[list[str], Any]:
    """Call every function of torch_npu that selects keys or trains the selection; return (names, last result)."""
    keys, index, weights = (rows(2, 7, 1, 16, seed=1), rows(2, 7, 1, 8, seed=2), rows(2, 5, 3, seed=3))
    index_q, ends = rows(2, 5, 3, 8, seed=4), {"actual_seq_qlen": [5, 4], "actual_seq_klen": [7, 6]}
    lengths = {"actual_seq_lengths_query": torch.tensor([5, 4]), "actual_seq_lengths_key": [7, 6]}
    lists, values = npu.npu_lightning_indexer(index_q, index, weights, **lengths, sparse_count=3, return_value=True)
    npu.npu_lightning_indexer_grad(index_q, index, values, lists, weights)
    out, *stats = npu.npu_sparse_flash_attention(q, keys, keys, lists, 0.3, attention_mode=2, return_softmax_lse=True)
    npu.npu_sparse_flash_attention_grad(q, keys, None, lists, out, out, *stats, 0.3, 1)
    of_index = (index_q, index, weights)
    npu.npu_sparse_lightning_indexer_grad_kl_loss(q, keys, *of_index, lists, *stats, 0.3, **ends)
    lse_results = npu.npu_dense_lightning_indexer_softmax_lse(*of_index, **ends)
    last = npu.npu_dense_lightning_indexer_grad_kl_loss(q, keys, *of_index, *stats, *lse_results, 0.3, **ends)
    family = ("lightning_indexer", "sparse_flash")
    return [name for name in npu.__all__ if name in RECORDS and any(word in name for word in family)], last


def test_captured_sparse_and_indexer_calls_replay_without_difference(tmp_path: Path) -> None:
    q = hostile(rows(2, 5, 4, 16))
    with fa.capture(tmp_path) as recorded:
        names, (*_, loss) = selecting(q)
    assert sorted(file.stem[5:] for file in recorded.files) == sorted(names)
    for file in recorded.files:
        again = fa.replay(file)
        assert again.worst == 0.0, file
    golden_replays_golden(lambda: selecting(q), tmp_path / "golden")
    assert torch.equal(fa.replay(recorded.files[-1]).recorded["loss"], loss)


@pytest.mark.parametrize("train", [False, True])
def test_captured_indexer_training_replays_without_difference(train: bool, tmp_path: Path) -> None:
    q, k, index_k = rows(2, 5, 4, 16), rows(2, 5, 1, 16, seed=1), rows(2, 5, 1, 8, seed=2)
    index_q, weights = rows(2, 5, 3, 8, seed=4).requires_grad_(train), rows(2, 5, 3, seed=3)
    with fa.capture(tmp_path) as recorded:
        lists, _ = fa.lightning_indexer(index_q, index_k, weights, 3)
        _, lse = fa.sparse_attention(q, k, None, lists, return_lse=True)
        sparse = fa.indexer_loss(q, k, lse, index_q, index_k, weights, lists)
        dense = fa.indexer_loss(q, k, lse, index_q, index_k, weights)
        if train:
            (sparse + dense).backward()
    replayed = [fa.replay(file) for file in recorded.files]
    names = ["lightning_indexer", "sparse_attention", *["indexer_loss"] * (4 if train else 2)]  # with their backward
    assert [again.operator for again in replayed] == names
    assert all(again.worst == 0.0 for again in replayed)
    assert torch.equal(replayed[3].recorded["loss"], dense.detach().reshape(1))


@pytest.mark.parametrize("stored", ["", "int8"])
def test_captured_paged_decode_replays_without_difference(stored: str, tmp_path: Path) -> None:
    cache = fa.PagedKVCache(2, 16, 6, page_size=4, stored=stored)
    sequences = [cache.allocate(), cache.allocate()]
    cache.append(sequences, rows(2, 7, 2, 16), rows(2, 7, 2, 16, seed=1))
    with fa.capture(tmp_path) as recorded:
        got = fa.decode_attention(rows(2, 1, 4, 16, seed=2), cache, band=fa.Band.window(3, 0))
    (file,) = recorded.files
    again = fa.replay(file)
    assert again.operator == "decode_attention"
    assert torch.equal(again.recorded["out"], torch.as_tensor(got))
    assert again.worst == 0.0
    query = rows(2, 1, 4, 16, seed=2)
    golden_replays_golden(lambda: fa.decode_attention(query, cache, band=fa.Band.window(3, 0)), tmp_path / "golden")


def test_capture_file_contains_tensors_attributes_strides_and_arrays(tmp_path: Path) -> None:
    q = rows(2, 4, 5, 16).transpose(1, 2).requires_grad_()
    with fa.capture(tmp_path) as recorded:
        forward(q, atten_mask=torch.ones(5, 5, dtype=torch.bool).triu(1))
        packed(q)
    dense, ragged = recorded.files
    assert (dense.stem, ragged.stem) == ("0000-npu_fusion_attention", "0001-npu_fusion_attention_v3")
    tensors, text = content_of(dense)
    names = {"query", "key", "value", "atten_mask"}
    assert tensors.keys() == names | {f"output.{n}" for n in ("attention_out", "softmax_max", "softmax_sum")}
    assert torch.equal(tensors["key"], q)
    assert text["operator"] == "npu_fusion_attention"
    assert json.loads(text["attributes"])["scale"] == 0.25
    assert json.loads(text["strides"])["query"] == list(q.stride())
    arrays = json.loads(content_of(ragged)[1]["arrays"])
    assert arrays == {"actual_seq_qlen": [3, 10], "actual_seq_kvlen": [3, 10]}


def test_capture_as_decorator_records_legal_calls_despite_exceptions(tmp_path: Path) -> None:
    recorder = fa.capture(tmp_path)

    @recorder
    def work(q: torch.Tensor) -> None:
        forward(q)
        with pytest.raises(fa.ContractError):
            forward(q, keep_prob=2.0)
        raise KeyError

    for count in (1, 2):
        with pytest.raises(KeyError):
            work(rows(1, 4, 4, 8))
        assert len(recorder.files) == len(list(tmp_path.iterdir())) == count
    forward(rows(1, 4, 4, 8))
    assert len(recorder.files) == 2


def test_capture_records_calls_of_installed_torch_npu(tmp_path: Path, torch_npu: Any) -> None:
    with fa.capture(tmp_path) as recorded:
        q = rows(1, 4, 4, 8).npu()
        torch_npu.npu_fusion_attention(q, q, q, 4, "BSND")
    assert len(recorded.files) == 1
    assert fa.replay(recorded.files[0]).worst == 0.0


def test_capture_records_results_of_a_real_torch_npu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = types.ModuleType("torch_npu")

    def npu_fusion_attention(*args: Any, **kwargs: Any) -> Any:
        out, *rest = training.npu_fusion_attention(*args, **kwargs)
        return out + 1e-3, *rest

    def npu_fusion_attention_grad(*args: Any, **kwargs: Any) -> Any:
        return training.npu_fusion_attention_grad(*args, **kwargs)[:4]  # as older releases

    real.npu_fusion_attention = npu_fusion_attention  # type: ignore[attr-defined]
    real.npu_fusion_attention_grad = npu_fusion_attention_grad  # type: ignore[attr-defined]
    real.npu_lightning_indexer = npu.npu_lightning_indexer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_npu", real)
    q = rows(1, 4, 4, 8)
    with fa.capture(tmp_path) as recorded:
        out, top, total, *_ = real.npu_fusion_attention(q, q, q, 4, input_layout="BSND", scale=0.5)
        saved = {"softmax_max": top, "softmax_sum": total, "attention_in": out}
        real.npu_fusion_attention_grad(q, q, q, q, 4, "BSND", scale_value=0.5, **saved)
        real.npu_lightning_indexer(q, q[:, :, :1], q[..., 0], sparse_count=2)
    assert real.npu_fusion_attention is npu_fusion_attention
    # The simulated torch_npu computes with this library's functions, which are recorded too.
    chip = [fa.replay(f) for f in recorded.files if content_of(f)[1]["backend"] == "torch_npu"]
    names = ["npu_fusion_attention", "npu_fusion_attention_grad", "npu_lightning_indexer"]
    assert [call.operator for call in chip] == names
    assert torch.equal(chip[0].recorded["attention_out"], chip[0].recomputed["attention_out"] + 1e-3)
    assert chip[0].differences["attention_out"] > 0
    assert chip[0].differences["softmax_max"] == 0
    assert chip[1].recorded.keys() == {"dq", "dk", "dv"}
    assert chip[1].worst == 0.0


def test_compiled_calls_are_not_recorded(tmp_path: Path) -> None:
    q = rows(1, 4, 4, 8)
    fast = torch.compile(lambda q: forward(q)[0], fullgraph=True, backend="aot_eager")
    with fa.capture(tmp_path) as recorded:
        assert torch.equal(fast(q), imported_before(q, q, q, 4, "BSND", scale=0.25)[0])
    assert len(recorded.files) == 1

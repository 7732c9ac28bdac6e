"""Repeated calls of one signature: the plan is found before the call is lowered, and changed arguments are noticed.

Each test first calls three times: the first call is planned, the second prepared, the third runs on addresses alone.
"""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.bits import same, same_bits
from support.compiled import Recorder
from support.decode_cases import CASES
from torch._subclasses.fake_tensor import FakeTensorMode

import fusion_attention as fa
from fusion_attention import npu
from fusion_attention.contract import ContractError
from fusion_attention.ops import RECORDS
from fusion_attention.testing.cases import Named
from fusion_attention.testing.decode import arguments
from fusion_attention.torch_ops.prepared import Prepared

pytestmark = pytest.mark.filterwarnings("ignore::fusion_attention.ContractWarning")


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def same_bits_of(call: Callable[[], Any]) -> Any:
    """Returns the result of the third of three calls, after checking equal bits in separate memory."""
    result = [call() for _ in range(3)]
    flat = [[t] if isinstance(t, torch.Tensor) else list(t) for t in result]
    addresses = [t.data_ptr() for results in flat for t in results if t.numel()]
    assert len(set(addresses)) == len(addresses), "two results share memory"
    for results in flat[1:]:
        same_bits(results, flat[0])
    return result[-1]


def forgotten(call: Callable[[], Any]) -> Any:
    """Returns the results of a call after all cached signatures are cleared."""
    for op in RECORDS.values():
        op.signatures.clear()
    return call()


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Records the prepared calls that run."""
    ran: list[Any] = []
    before = Prepared.run

    def run(self: Prepared, *args: Any, **kwargs: Any) -> Any:
        ran.append(self)
        return before(self, *args, **kwargs)

    monkeypatch.setattr(Prepared, "run", run)
    return ran


# ------------------------------------------------------------------------------------------------------- the same bits


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_repeated_decode_calls_of_every_cache_format_are_equal(case: Named) -> None:
    args = arguments(case)  # type: ignore[arg-type]
    given = {p.shown: args[p.name] for p in RECORDS["npu_incre_flash_attention"].params if args.get(p.name) is not None}
    same_bits_of(lambda: npu.npu_incre_flash_attention(**given))


TABLE = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)


def half(*shape: int, seed: int) -> torch.Tensor:
    return rows(*shape, seed=seed).half()


def integers(seed: int, *shape: int) -> torch.Tensor:
    return (rows(*shape, seed=seed) * 40).clamp(-127, 127).to(torch.int8)


def fused(seed: int, **more: Any) -> torch.Tensor:
    """Returns fused attention over paged integers with a scale per channel."""
    keys = [integers(seed + n, 4, 16, 64) for n in range(2)]
    scales = {f"{side}_antiquant_scale": half(2, 1, 32, seed=seed).abs() for side in ("key", "value")}
    table = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)
    given = {"input_layout": "BNSD", "num_heads": 4, "num_key_value_heads": 2, "block_table": table, "block_size": 16}
    given |= {"actual_seq_lengths_kv": [30, 17], "scale": 0.2, "key_antiquant_mode": 0, "value_antiquant_mode": 0}
    return npu.npu_fused_infer_attention_score(half(2, 4, 1, 32, seed=seed), *keys, **scales, **given, **more)[0]


def stacked(seed: int) -> torch.Tensor:
    """Returns fused attention with the scales of keys and values in one tensor, keys first."""
    keys = [integers(seed + n, 2, 2, 9, 32) for n in range(2)]
    return npu.npu_fused_infer_attention_score(
        half(2, 4, 1, 32, seed=seed), *keys, num_heads=4, num_key_value_heads=2, input_layout="BNSD", scale=0.2,
        antiquant_scale=half(2, 2, 1, 32, seed=seed).abs(), antiquant_mode=0,
    )[0]  # fmt: skip


def dense(seed: int, **more: Any) -> Any:
    q, k, v = (rows(2, 7, 4, 16, seed=seed + n) for n in range(3))
    return fa.attention(q, k, v, **more)


def decode(seed: int, *shape: int, **more: Any) -> Any:
    """Returns decode_attention() with a cache of this shape."""
    cache = rows(*shape, seed=seed), rows(*shape, seed=seed + 1)
    return fa.decode_attention(rows(2, 1, 4, 16, seed=seed + 2), **{"cache": cache, **more})


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return rows(*shape, seed=seed + 50)


def lists_of(seed: int, *shape: int, keys: int) -> torch.Tensor:
    """Returns lists of distinct keys with random lengths, filled up with -1."""
    order = drawn(seed, *shape[:-1], keys).argsort()[..., : shape[-1]].int()
    length = (drawn(seed, *shape[:-1], 1).abs() * shape[-1]).int()
    return order.masked_fill(torch.arange(shape[-1]) >= length, -1)


def selected(seed: int, **more: Any) -> Any:
    q, k, v = rows(2, 6, 4, 16, seed=seed), rows(2, 9, 2, 16, seed=seed + 1), rows(2, 9, 2, 8, seed=seed + 2)
    return fa.sparse_attention(q, k, v, for_lengths(lists_of(seed, 2, 6, 2, 5, keys=9), **more), **more)


def for_lengths(lists: torch.Tensor, kv_len: Sequence[int] = (), **_: Any) -> torch.Tensor:
    """Returns the lists, emptied for sequences without keys."""
    for b, count in enumerate(kv_len):
        lists[b].masked_fill_(torch.tensor(count == 0), -1)
    return lists


def two_sources(seed: int, **more: Any) -> Any:
    """Returns compressed_attention with keys and compressed keys in pages of different sizes."""
    tables = {"page_table": torch.tensor([[2, 0], [1, 3]]), "compressed_page_table": torch.tensor([[1], [0]])}
    q, k, compressed = rows(2, 3, 4, 16, seed=seed), rows(4, 8, 1, 16, seed=seed), rows(2, 4, 1, 16, seed=seed)
    lengths = {"kv_len": [13, 9], "compressed_len": [3, 2], "residual": [1, 0]}
    given = {"ratio": 4, "band": fa.Band.window(3), "sink": drawn(seed, 4), **lengths}
    given |= {name: table.int() for name, table in tables.items()}
    return fa.compressed_attention(q, k, compressed, lists_of(seed, 2, 3, 1, 2, keys=2), **given, **more)


def chosen_keys(seed: int) -> Any:
    kv = rows(2, 9, 1, 16, seed=seed + 1)
    given = {"attention_mode": 2, "return_softmax_lse": True}
    lists = lists_of(seed, 2, 6, 1, 5, keys=9)
    return npu.npu_sparse_flash_attention(rows(2, 6, 4, 16, seed=seed), kv, kv, lists, 0.25, **given)


OTHERS: dict[str, Callable[[int], Any]] = {
    "decode": lambda seed: decode(seed, 2, 9, 2, 16),
    "decode, lengths and lse": lambda seed: decode(seed, 2, 9, 2, 16, kv_len=[4, 9], return_lse=True),
    "decode, no tokens": lambda seed: decode(seed, 2, 9, 2, 16, kv_len=[0, 9], return_lse=True),
    "decode, pages": lambda seed: decode(seed, 4, 8, 2, 16, kv_len=[13, 9], block_table=TABLE),
    "decode, wide ids": lambda seed: decode(seed, 4, 8, 2, 16, kv_len=[13, 9], block_table=TABLE.long()),
    "decode, keys as values": lambda seed: decode(seed, cache=rows(2, 9, 2, 16, seed=seed), dim_v=12),
    "decode, a list": lambda seed: decode(seed, cache=([rows(1, n, 2, 16, seed=seed) for n in (9, 5)],) * 2),
    "decode, few rows": lambda seed: decode(seed, 2, 9, 2, 16, q_len=[1, 0]),
    "decode, sink": lambda seed: decode(seed, 2, 9, 2, 16, sink=drawn(seed, 4)),
    "decode, heads first": lambda seed: decode(seed, 2, 2, 9, 16, cache_layout="BNSD"),
    "decode, strided": lambda seed: decode(seed, cache=tuple(rows(2, 9, 2, 16, 2, seed=seed).unbind(-1))),
    "dense": dense,
    "dense, lse": lambda seed: dense(seed, return_lse=True),
    "empty rows": lambda seed: dense(seed, band=fa.Band(hi=-2), empty_rows="mean", return_lse=True),
    "one row": lambda seed: fa.attention(*(rows(2, n, 2, 16, seed=seed) for n in (1, 4, 4)), return_lse=True),
    "one empty row": lambda seed: fa.attention(
        *(rows(2, n, 2, 16, seed=seed) for n in (1, 4, 4)), band=fa.Band(hi=-4), empty_rows="mean"
    ),
    "mask": lambda seed: dense(seed, blocked=drawn(seed, 2, 1, 7, 7) > 0.5),
    "mask and lse": lambda seed: dense(seed, blocked=drawn(seed, 2, 1, 7, 7) > 0.5, return_lse=True),
    "bias": lambda seed: dense(seed, bias=drawn(seed, 1, 4, 7, 7)),
    "bias of columns": lambda seed: dense(seed, bias=drawn(seed, 4, 7, 9)[..., 1:8].mT),
    "sink": lambda seed: dense(seed, sink=drawn(seed, 4)),
    "narrow sink": lambda seed: dense(seed, sink=drawn(seed, 4).bfloat16()),
    "strided sink": lambda seed: dense(seed, sink=drawn(seed, 4, 2)[:, 1]),
    "slopes": lambda seed: dense(seed, alibi_slopes=drawn(seed, 4).abs()),
    "rope": lambda seed: dense(seed, q_rope=drawn(seed, 2, 7, 4, 8), k_rope=drawn(seed, 2, 7, 4, 8)),
    "drop bits": lambda seed: dense(seed, keep_prob=0.5, drop_bits=(drawn(seed, 49) * 99).to(torch.uint8)),
    "shifted": lambda seed: dense(seed, bias=drawn(seed, 1 + 4 * 49)[1:].view(1, 4, 7, 7)),
    "expanded values": lambda seed: fa.attention(
        *(half(2, 7, 4, 16, seed=seed + n) for n in range(2)),
        half(7, seed=seed)[None, :, None, None].expand(2, 7, 4, 16),
    ),
    "of npu": lambda seed: npu.npu_fusion_attention(
        *(rows(2, 7, 64, seed=seed + n) for n in range(3)), 4, "BSH", atten_mask=drawn(seed, 7, 7) > 0.5, scale=0.2
    )[:3],
    "fused": fused,
    "fused with a mask": lambda seed: fused(seed, atten_mask=drawn(seed, 2, 1, 32) > 0.8),
    "stacked scales": stacked,
    "indexer": lambda seed: fa.lightning_indexer(
        rows(1, 6, 4, 16, seed=seed), rows(1, 9, 1, 16), drawn(seed, 1, 6, 4), 3
    ),
    "lists": selected,
    "lists, lse, and a sequence without keys": lambda seed: selected(
        seed, sink=drawn(seed, 4).bfloat16(), kv_len=[9, 0], return_lse=True
    ),
    "two sources": two_sources,
    "two sources and lse": lambda seed: two_sources(seed, return_lse=True),
    "of npu, lists": chosen_keys,
    "wide lists": lambda seed: fa.sparse_attention(
        rows(1, 6, 4, 16, seed=seed), rows(1, 9, 1, 16), None, lists_of(seed, 1, 6, 1, 5, keys=9).long()
    ),
}  # fmt: skip
# An operand is a copy; or, in decoding, a list of tensors, or rows of other lengths.
UNPREPARED = {"bias of columns", "expanded values", "wide lists", "decode, wide ids", "decode, a list",
              "decode, few rows", "decode, strided"}  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", OTHERS)
def test_cached_plan_reads_new_tensors_of_the_same_signature(name: str, prepared: list[Any]) -> None:
    call = OTHERS[name]
    for seed in (1, 1, 1):
        call(seed)
    assert bool(prepared) is (name not in UNPREPARED)
    for seed in (2, 3):
        ours, fresh = call(seed), forgotten(lambda seed=seed: call(seed))  # type: ignore[misc]
        several = [(ours, fresh)] if isinstance(ours, torch.Tensor) else zip(ours, fresh, strict=True)
        assert all(same(one, other) for one, other in several)
        for _ in range(2):
            call(seed)


# ----------------------------------------------------------------------------------------- values that change in place


@pytest.mark.parametrize("make", [list, torch.tensor, lambda n: torch.tensor(n, dtype=torch.int32), np.array])
def test_lengths_changed_in_place_are_read_and_checked_again(make: Callable[[Any], Any]) -> None:
    q, k = rows(2, 1, 4, 16), rows(2, 9, 2, 16)
    lengths = make([4, 9])
    same_bits_of(lambda: fa.decode_attention(q, (k, k), kv_len=lengths))
    lengths[0] = 7
    result = fa.decode_attention(q, (k, k), kv_len=lengths)
    assert same(result, fa.decode_attention(q, (k, k), kv_len=(7, 9)))
    assert not same(result, fa.decode_attention(q, (k, k), kv_len=(4, 9)))
    lengths[1] = 10
    with pytest.raises(ContractError, match=r"kv_len: expected 0 <= length"):
        fa.decode_attention(q, (k, k), kv_len=lengths)
    dense = make([4, 9])
    rows_of_batch = rows(2, 9, 4, 16)
    same_bits_of(lambda: fa.attention(rows_of_batch, rows_of_batch, rows_of_batch, kv_len=dense))
    dense[1] = 3
    assert same(
        fa.attention(rows_of_batch, rows_of_batch, rows_of_batch, kv_len=dense),
        fa.attention(rows_of_batch, rows_of_batch, rows_of_batch, kv_len=(4, 3)),
    )


def test_block_table_changed_in_place_is_read_and_checked_again() -> None:
    q, pages, table = rows(2, 1, 4, 16), rows(4, 8, 2, 16), TABLE.clone()
    given: dict[str, Any] = {"kv_len": [13, 9], "block_table": table}
    before = same_bits_of(lambda: fa.decode_attention(q, (pages, pages), **given))
    table[0, 0] = 2
    after = fa.decode_attention(q, (pages, pages), **given)
    assert not same(after[0], before[0])
    assert same(after[1], before[1])
    for wrong in (4, -1):
        table[0, 0] = wrong
        with pytest.raises(
            ContractError, match=rf"block_table: expected numbers of pages that exist, got {wrong} at \[0, 0"
        ):
            fa.decode_attention(q, (pages, pages), **given)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("entry", [5, -2, 2**31 - 1])
def test_selected_key_indices_changed_in_place_are_checked_again(entry: int, dtype: torch.dtype) -> None:
    """The entry is a key of the first sequence, but beyond the keys of the second."""
    q, k = rows(2, 3, 4, 16), rows(2, 9, 1, 16, seed=1)
    lists = torch.arange(4).expand(2, 3, 1, 4).to(dtype).contiguous()
    same_bits_of(lambda: fa.sparse_attention(q, k, None, lists, kv_len=[9, 4]))
    lists[1, 2, 0, 3] = entry
    with pytest.raises(ContractError, match=rf"got {entry} at batch 1, row 2, slot 3, outside \[-1, 4\)"):
        fa.sparse_attention(q, k, None, lists, kv_len=[9, 4])


def test_refuses_tensor_with_shrunk_storage_after_repeated_calls() -> None:
    q, k, v = rows(2, 1, 4, 16), rows(2, 9, 2, 16), rows(2, 9, 2, 16)
    same_bits_of(lambda: fa.decode_attention(q, (k, v)))
    v.untyped_storage().resize_(v.nbytes - 1)
    with pytest.raises(ContractError, match="v: expected a storage that holds its elements"):
        fa.decode_attention(q, (k, v))


def test_cached_plan_of_aliased_inputs_accepts_distinct_tensors() -> None:
    one = rows(1, 5, 2, 16)
    same_bits_of(lambda: fa.attention(one, one, one))
    q, k, v = (rows(1, 5, 2, 16, seed=n) for n in (1, 2, 3))
    assert same(fa.attention(q, k, v), forgotten(lambda: fa.attention(q, k, v)))
    shifted = torch.cat((rows(8), q.flatten()))[8:].view(q.shape)
    assert same(fa.attention(shifted, k, v), fa.attention(q, k, v))
    cache = rows(1, 9, 2, 16)
    row = rows(1, 1, 2, 16)
    same_bits_of(lambda: fa.decode_attention(row, (cache, cache)))
    other = rows(1, 9, 2, 16, seed=5)
    result = fa.decode_attention(row, (cache, other))
    assert same(result, forgotten(lambda: fa.decode_attention(row, (cache, other))))


# --------------------------------------------------------------------------------- autograd, modes, tensor subclasses


def test_attention_computes_gradients_after_repeated_calls_without_grad() -> None:
    q = rows(1, 5, 2, 16)
    before = same_bits_of(lambda: fa.attention(q, q, q))
    trained = q.clone().requires_grad_()
    out = fa.attention(trained, q, q)
    assert same(out.detach(), before)
    out.sum().backward()
    assert trained.grad is not None
    assert trained.grad.any()
    with torch.no_grad():
        assert not fa.attention(trained, q, q).requires_grad
    assert same(torch.func.grad(lambda x: fa.attention(x, q, q).sum())(q), trained.grad)


@pytest.mark.parametrize("given", [{}, {"kv_len": [9, 0], "return_lse": True}], ids=["all", "no keys"])
def test_sparse_attention_computes_gradients_after_calls_without_grad(
    given: dict[str, Any], prepared: list[Any]
) -> None:
    leaves = rows(2, 6, 4, 16), rows(2, 9, 2, 16, seed=1), drawn(0, 4)
    lists = for_lengths(lists_of(0, 2, 6, 2, 5, keys=9), **given)

    def gradients() -> tuple[torch.Tensor, ...]:
        q, k, sink = (leaf.clone().requires_grad_() for leaf in leaves)
        out = fa.sparse_attention(q, k, None, lists, sink=sink, **given)
        results = (out,) if isinstance(out, torch.Tensor) else out
        total = sum(result.nan_to_num(neginf=0).square().sum() for result in results)
        return torch.autograd.grad(total, (q, k, sink))  # type: ignore[arg-type]

    expected = forgotten(gradients)
    assert all(gradient.any() for gradient in expected)
    same_bits_of(lambda: fa.sparse_attention(leaves[0], leaves[1], None, lists, sink=leaves[2], **given))
    assert prepared
    same_bits(same_bits_of(gradients), expected)


def test_autocast_applies_after_repeated_calls_without_autocast() -> None:
    q = rows(1, 5, 2, 16)
    same_bits_of(lambda: fa.attention(q, q, q))
    with torch.autocast("cpu", torch.bfloat16):
        result = same_bits_of(lambda: fa.attention(q, q, q))
    half = q.bfloat16()
    assert same(result, fa.attention(half, half, half))


class Subclass(torch.Tensor):
    """A tensor subclass that counts calls of __torch_function__."""

    call_count = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Subclass.call_count += 1
        return super().__torch_function__(func, types, args, kwargs)


def test_dispatch_modes_and_subclasses_apply_after_repeated_calls() -> None:
    q, k = rows(2, 1, 4, 16), rows(2, 9, 2, 16)
    calls: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: fa.attention(x, k, k),
        lambda x: fa.decode_attention(x, (k, k)),
    ]
    for call in calls:
        wanted = same_bits_of(lambda call=call: call(q))  # type: ignore[misc]
        with Recorder() as recorder:
            assert same(call(q), wanted)
        assert recorder.calls
        before = Subclass.call_count
        assert same(call(q.as_subclass(Subclass)).as_subclass(torch.Tensor), wanted)
        assert Subclass.call_count > before
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            assert call(mode.from_tensor(q)).shape == wanted.shape
        assert same(call(torch.nn.Parameter(q, requires_grad=False)), wanted)


def test_back_end_and_thread_changes_apply_after_repeated_calls() -> None:
    q, k = rows(2, 1, 4, 16), rows(2, 9, 2, 16)
    for call in (lambda **how: fa.attention(q, k, k, **how), lambda **how: fa.decode_attention(q, (k, k), **how)):
        here = same_bits_of(call)
        with fa.use_backend("golden"):
            golden = same_bits_of(call)
        assert not same(golden, here)
        assert same(golden, call(backend="golden"))
        assert same(call(), here)
        threads = torch.get_num_threads()
        try:
            for count in (1, 3):
                torch.set_num_threads(count)
                assert same(call(), here)
        finally:
            torch.set_num_threads(threads)
        with pytest.raises(ValueError, match="backend: expected one of"):
            call(backend="gpu")


def test_strict_setting_applies_after_repeated_calls() -> None:
    q, cache = rows(1, 3, 64).half(), rows(1, 9, 64).half()
    call = lambda: npu.npu_incre_flash_attention(q, cache, cache, scale_value=0.125)  # noqa: E731
    same_bits_of(call)
    with fa.strict(), pytest.raises(ContractError, match="expected S1 == 1"):
        call()
    call()


def test_capture_records_repeated_calls(tmp_path: Path) -> None:
    q, k = rows(2, 1, 4, 16), rows(2, 9, 2, 16)
    out = same_bits_of(lambda: fa.decode_attention(q, (k, k)))
    dense = same_bits_of(lambda: fa.attention(q, k, k))
    with fa.capture(tmp_path) as recorded:
        fa.decode_attention(q, (k, k))
        fa.attention(q, k, k)
    decode, attention = (fa.replay(file) for file in recorded.files)
    assert same(decode.recorded["out"], out)
    assert same(attention.recorded["out"], dense)
    assert {"out", "max", "sum"} == set(decode.recorded) == set(attention.recorded)
    assert decode.worst == attention.worst == 0


def test_repeated_calls_from_several_threads_are_correct() -> None:
    q = [rows(1, n % 7 + 1, 2, 16, seed=n) for n in range(14)]
    wanted = [fa.attention(x, x, x) for x in q]
    wrong: list[int] = []

    def work() -> None:
        for _ in range(30):
            wrong.extend(i for i, x in enumerate(q) if not same(fa.attention(x, x, x), wanted[i]))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []

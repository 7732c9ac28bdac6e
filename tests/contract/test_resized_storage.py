"""A tensor with an emptied or shortened storage causes an error in every interface, and is never read.

Without these checks most of these calls crash the process.
"""

import contextlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fusion_attention as fa
from fusion_attention import acl, aclnn, npu
from fusion_attention.contract import INVALID, RUNTIME, ContractError, Op, Tensor, bind, lost, reach, span
from fusion_attention.contract.sampling import sample
from fusion_attention.ops.auxiliary_definitions.definitions import CONTRACTS

pytestmark = pytest.mark.filterwarnings("ignore::fusion_attention.ContractWarning")


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def empty(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def shorten(tensor: torch.Tensor) -> None:
    """Resizes the storage to one byte less than the tensor needs."""
    needs = span(tensor) + tensor.storage_offset() * tensor.itemsize
    tensor.untyped_storage().resize_(needs - 1)


damages = pytest.mark.parametrize("damage", [empty, shorten], ids=["emptied", "shortened"])

# ------------------------------------------------------------------------------------------------------ span and reach


def test_span_and_reach_match_highest_address_of_strided_views() -> None:
    base = torch.arange(1000, dtype=torch.int16)
    views = [base, base[3:], base[::7], base[5:905].view(9, 100)[:, ::3], base[:1].expand(4, 5), base[:0], base[7]]
    views += [base[8:908].view(3, 30, 10).transpose(0, 2), base[10:510].view(5, 100)[1:1]]
    for view in views:
        addresses = torch.arange(1000).as_strided(view.shape, view.stride(), view.storage_offset())
        behind = int(addresses.max()) + 1 - view.storage_offset() if view.numel() else 0
        assert span(view) == behind * 2
        assert reach(view.shape, view.stride()) == behind
        assert not lost(view)


@damages
def test_view_is_lost_only_if_storage_ends_before_its_last_byte(damage: Callable[[torch.Tensor], None]) -> None:
    base = torch.zeros(100)
    view, before = base[10:60].view(5, 10)[:, :4], base[:10]
    view.untyped_storage().resize_((10 + 44) * 4)
    assert not lost(view)
    assert lost(base)
    damage(view)
    assert lost(view)
    assert lost(before) is (damage is empty)
    assert not lost(base[50:50])


# ---------------------------------------------------------------------------------------------------- every parameter


def damaged(op: Op, args: dict[str, Any], name: str, damage: Callable[[torch.Tensor], None]) -> dict[str, Any]:
    """Returns the arguments with one tensor (the last of a list) moved to a separate storage, which is then damaged."""
    value = args[name]
    several = list(value) if isinstance(value, (list, tuple)) else [value]
    # Start at element 3 of the storage, so that the check must include offsets.
    several[-1] = torch.cat((several[-1].flatten()[:1].expand(3), several[-1].flatten()))[3:].view(several[-1].shape)
    damage(several[-1])
    return {**args, name: several if isinstance(value, (list, tuple)) else several[0]}


def given(op: Op) -> list[str]:
    """Names of the tensor parameters that a sample call of an operator sets."""
    args = sample(op)
    return [p.name for p in op.params if isinstance(p, Tensor) and args[p.name] is not None]


PARAMETERS = [(op, name) for op in CONTRACTS.values() for name in given(op)]


@pytest.mark.sampled(24)
@damages
@pytest.mark.parametrize(("op", "name"), PARAMETERS, ids=lambda value: getattr(value, "name", value))
def test_tensor_argument_with_resized_storage_is_refused(
    op: Op, name: str, damage: Callable[[torch.Tensor], None]
) -> None:
    args = sample(op)
    bind(op, args)  # The signature is known: what is asked of it is asked at every call.
    for strict in (False, True):
        with pytest.raises(
            ContractError, match=r"expected a storage that holds its elements, \d+ bytes, got"
        ) as result:
            bind(op, damaged(op, args, name, damage), strict=strict)
        assert result.value.param.split("[")[0] == op.by_name[name].shown
        assert result.value.code == INVALID
    bind(op, args)


def test_resized_storage_error_names_each_list_element() -> None:
    q, k = rows(2, 1, 4, 8), [rows(1, 5, 2, 8, seed=i) for i in range(2)]
    fa.decode_attention(q, (k, k), kv_len=[5, 3])
    empty(k[1])
    with pytest.raises(ContractError) as result:
        fa.decode_attention(q, (k, k), kv_len=[5, 3])
    assert [f.param for f in result.value.failures] == ["k[1]", "v[1]"]
    assert "decode_attention: k[1]: expected a storage that holds its elements, 320 bytes, got one of 0" in str(
        result.value
    )


@damages
def test_lengths_tensor_with_resized_storage_is_refused(damage: Callable[[torch.Tensor], None]) -> None:
    q, lengths = rows(8, 2, 8), torch.tensor([3, 5]).clone()  # memory that torch may resize, until numpy has seen it
    damage(lengths)
    with pytest.raises(ContractError, match=r"^attention: q_len: expected a storage that holds its elements, 16 bytes"):
        fa.attention(q, q, q, layout="TND", q_len=lengths)


def test_seed_tensor_with_emptied_storage_is_refused() -> None:
    q = rows(1, 4, 2, 8)
    out, top, total, *_ = npu.npu_fusion_attention(q, q, q, 2, "BSND", keep_prob=0.5, seed=3)
    saved = {"softmax_max": top, "softmax_sum": total, "attention_in": out, "keep_prob": 0.5}
    seed = torch.tensor(3).clone()
    empty(seed)
    with pytest.raises(ContractError, match=r"^npu_fusion_attention_grad: seed: expected a storage"):
        npu.npu_fusion_attention_grad(q, q, q, q, 2, "BSND", **saved, seed=seed)


def test_storage_refilled_before_backward_yields_correct_gradient() -> None:
    """FSDP empties a weight's storage after the forward pass and refills it before the backward pass."""
    q, k = rows(2, 5, 4, 8), rows(2, 7, 2, 8)
    weight, original = k.requires_grad_(), k.detach().clone()
    want = torch.autograd.grad(fa.attention(q, weight, weight).sum(), weight)[0]
    out = fa.attention(q, weight, weight)
    weight.untyped_storage().resize_(0)
    weight.untyped_storage().resize_(original.nbytes)
    weight.data.copy_(original)
    assert torch.equal(torch.autograd.grad(out.sum(), weight)[0], want)


# ---------------------------------------------------------------------------------------------------------- gradients


class Nothing(TorchDispatchMode):
    """Dispatch mode without effect: while it is active, calls go to the operators that a trace records."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def trained(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [rows(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]


def padded() -> tuple[torch.Tensor, list[torch.Tensor]]:
    leaves = trained((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 6), (4, 5, 7), (4,))
    q, k, v, bias, sink = leaves
    blocked = rows(5, 7, seed=9) > 1
    return fa.attention(q, k, v, bias=bias, blocked=blocked, sink=sink, kv_len=[7, 4], empty_rows="mean"), leaves


def packed() -> tuple[torch.Tensor, list[torch.Tensor]]:
    leaves = trained((9, 4, 8), (9, 4, 8), (9, 4, 8))
    ends = {"actual_seq_qlen": [3, 8], "actual_seq_kvlen": [3, 8]}
    given = {"keep_prob": 0.8, "dropout_mask": torch.full((64,), 0x6D, dtype=torch.uint8)}
    return npu.npu_fusion_attention(*leaves, 4, "TND", scale=0.3, **ends, **given)[0], leaves


def selected() -> tuple[torch.Tensor, list[torch.Tensor]]:
    leaves = trained((2, 5, 4, 8), (2, 5, 1, 8), (2, 5, 1, 8))
    lists = torch.tensor([0, 2, 1, -1], dtype=torch.int32).expand(2, 5, 1, 4)
    out = fa.sparse_attention(*leaves, lists, sink=rows(4))
    assert isinstance(out, torch.Tensor)
    return out, leaves


INDEXER = ((2, 5, 3, 8), (2, 5, 1, 8), (2, 5, 3))


def indexed() -> tuple[torch.Tensor, list[torch.Tensor]]:
    leaves = trained(*INDEXER)
    _, values = fa.lightning_indexer(*leaves, 4)
    return values, leaves


def divergence() -> tuple[torch.Tensor, list[torch.Tensor]]:
    q, k, lists = rows(2, 5, 4, 8), rows(2, 5, 1, 8, seed=1), torch.arange(4, dtype=torch.int32).expand(2, 5, 1, 4)
    _, lse = fa.sparse_attention(q, k, k, lists, return_lse=True)
    leaves = trained(*INDEXER)
    return fa.indexer_loss(q, k, lse, *leaves, lists), leaves


FAMILIES = [padded, packed, selected, indexed, divergence]
families = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
modes = pytest.mark.parametrize("mode", [contextlib.nullcontext, Nothing], ids=["eager", "operator"])
Family = Callable[[], tuple[torch.Tensor, list[torch.Tensor]]]


def gradients(family: Family, unpack: Callable[[int, torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Returns the gradients of a call after each saved tensor is replaced by unpack(index, tensor)."""
    saved_tensors: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> int:
        saved_tensors.append(tensor)
        return len(saved_tensors) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda place: unpack(place, saved_tensors[place])):
        out, leaves = family()
    weight = torch.linspace(-1, 1, out.numel()).view_as(out) if out.dim() else torch.ones(())
    return torch.autograd.grad(out, leaves, weight)


def scattered(tensor: torch.Tensor) -> torch.Tensor:
    """Copies values to memory with reversed axes and gaps between elements, which hold 77 or NaN."""
    filler = float("nan") if tensor.is_floating_point() else 1 if tensor.dtype is torch.bool else 77
    storage = torch.full([2 * n + 1 for n in tensor.shape[::-1]], filler, dtype=tensor.dtype)
    view = storage.permute(*range(tensor.dim())[::-1])[tuple(slice(1, None, 2) for _ in tensor.shape)]
    return view.copy_(tensor.detach()) if tensor.dim() else tensor


@modes
@families
def test_backward_accepts_unpacked_saved_tensors_of_any_strides(family: Family, mode: Callable[[], Any]) -> None:
    with mode():
        saved_places = []
        want = gradients(family, lambda place, t: saved_places.append(place) or t)  # type: ignore[func-returns-value]
        ways = [{place} for place in saved_places] + [set(saved_places)]
        for chosen in ways:
            got = gradients(family, lambda place, t, chosen=chosen: scattered(t) if place in chosen else t)  # type: ignore[misc]
            for one, other in zip(got, want, strict=True):
                assert torch.equal(one, other), chosen


@damages
@modes
@families
def test_backward_refuses_saved_tensors_with_resized_storage(
    family: Family, mode: Callable[[], Any], damage: Callable[[torch.Tensor], None]
) -> None:
    with mode():
        saved_sizes: dict[int, int] = {}
        gradients(family, lambda place, t: saved_sizes.setdefault(place, t.numel()) and t)  # type: ignore[return-value]
        for lost_one in [place for place, size in saved_sizes.items() if size]:

            def unpack(place: int, t: torch.Tensor, lost_one: int = lost_one) -> torch.Tensor:
                t = t.detach().clone()
                if place == lost_one:
                    damage(t)
                return t

            with pytest.raises(ContractError, match="expected a storage that holds its elements"):
                gradients(family, unpack)


@damages
@families
def test_backward_refuses_output_gradient_with_resized_storage(
    family: Family, damage: Callable[[torch.Tensor], None]
) -> None:
    out, leaves = family()
    out = out if out.dim() else out.sum()

    def gone(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        damage(gradient)
        return gradient

    assert out.grad_fn is not None
    node = out.grad_fn
    while type(node).__name__ not in ("_AttentionBackward", "_RunBackward"):
        node = node.next_functions[0][0]
    node.register_prehook(lambda grads: tuple(None if g is None else gone(g) for g in grads))
    with pytest.raises(ContractError, match=r"backward: (dout|gradient of \w+): expected a storage"):
        torch.autograd.grad(out, leaves, torch.ones_like(out))


# ---------------------------------------------------------------------------------------------------------- the caches


@damages
@pytest.mark.parametrize("stored", ["", "int8"])
def test_paged_cache_with_resized_storage_is_refused(damage: Callable[[torch.Tensor], None], stored: str) -> None:
    def filled() -> tuple[fa.PagedKVCache, int]:
        cache = fa.PagedKVCache(2, 8, 4, page_size=4, stored=stored)
        sequence = cache.allocate()
        cache.append([sequence], rows(1, 5, 2, 8), rows(1, 5, 2, 8))
        return cache, sequence

    cache, _ = filled()
    for at in range(len([*cache._pools, *cache._scales])):
        cache, sequence = filled()
        damage([*cache._pools, *cache._scales][at])
        with pytest.raises(ContractError, match=r"decode_attention: [kv](_scale)?: expected a storage"):
            fa.decode_attention(rows(1, 1, 4, 8), cache)
        with pytest.raises(ContractError, match=r"PagedKVCache: [kv] (pool|scales): expected a storage"):
            cache.append([sequence], rows(1, 1, 2, 8), rows(1, 1, 2, 8))
    cache, sequence = filled()
    new = rows(1, 1, 2, 8)
    damage(new)
    with pytest.raises(ContractError, match="PagedKVCache: k: expected a storage"):
        cache.append([sequence], new, rows(1, 1, 2, 8))
    assert cache.lengths() == [5]


# ----------------------------------------------------------------------------------------------------------- two phases


SCORE = ("query", "key", "value", "atten_mask", "out", "max", "sum")


def score(tensors: dict[str, torch.Tensor]) -> tuple[int, int, Any]:
    """Calls phase 1 of aclnnFlashAttentionScore."""
    t = {name: acl.Tensor.of(tensor) for name, tensor in tensors.items()}
    return aclnn.aclnnFlashAttentionScoreGetWorkspaceSize(
        *(t["query"], t["key"], t["value"], None, None, None, t["atten_mask"], None, 0.3, 1.0, 65536, 65536, 4),
        *("BSND", 0, 0, t["max"], t["sum"], None, t["out"]),
    )


def of_score() -> dict[str, torch.Tensor]:
    shapes = (2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8), (5, 7), (2, 5, 4, 8), (2, 4, 5, 8), (2, 4, 5, 8)
    arguments = dict(zip(SCORE, (rows(*shape) for shape in shapes), strict=True))
    return {**arguments, "atten_mask": arguments["atten_mask"] > 1}


def refused(ret: int, code: int, name: str) -> None:
    text = acl.get_recent_err_msg()
    assert ret == code, text
    assert re.search(rf"{name}( \(\w+\))?: expected a storage that holds its elements", text), text


@damages
@pytest.mark.parametrize("name", SCORE)
@pytest.mark.parametrize("repeatable", [False, True])
def test_aclnn_call_refuses_resized_storage_in_each_phase(
    runtime: None, name: str, damage: Callable[[torch.Tensor], None], repeatable: bool
) -> None:
    shown = {"out": "attention_out", "max": "softmax_max", "sum": "softmax_sum"}.get(name, name)
    tensors = of_score()
    _, size, executor = score(tensors)
    workspace, _ = acl.rt.malloc(max(size, 1))
    if repeatable:
        assert acl.set_acl_op_executor_repeatable(executor) == 0
        assert aclnn.aclnnFlashAttentionScore(workspace, size, executor, None) == 0
    others = {n: t.clone() for n, t in tensors.items() if n != name}
    damage(tensors[name])
    refused(aclnn.aclnnFlashAttentionScore(workspace, size, executor, None), RUNTIME, shown)
    for other, before in others.items():
        assert torch.equal(tensors[other], before), "nothing is written"
    refused(score(tensors)[0], INVALID, shown)


@damages
def test_aclnn_phase_1_refuses_lengths_with_resized_storage(
    runtime: None, damage: Callable[[torch.Tensor], None]
) -> None:
    q, k, out = (acl.Tensor.of(t.half()) for t in (rows(2, 1, 4, 16), rows(2, 6, 2, 16), rows(2, 1, 4, 16)))
    lengths = torch.tensor([3, 5]).clone()
    lengths_handle, keys = acl.Tensor.of(lengths), acl.create_tensor_list([k])
    damage(lengths)
    arguments = (q, keys, keys, None, None, lengths_handle, 4, 0.25, "BSND", 2, out)
    refused(aclnn.aclnnIncreFlashAttentionGetWorkspaceSize(*arguments, strict=False)[0], INVALID, "actual_seq_lengths")


def test_acl_memcpy_from_resized_host_storage_is_refused(runtime: None) -> None:
    address, _ = acl.rt.malloc(64)
    host = torch.zeros(16)
    assert acl.rt.memcpy(address, 64, host, 64, acl.ACL_MEMCPY_HOST_TO_DEVICE) == 0
    empty(host)
    assert acl.rt.memcpy(address, 64, host, 64, acl.ACL_MEMCPY_HOST_TO_DEVICE) == 107000
    assert "resized" in acl.get_recent_err_msg()

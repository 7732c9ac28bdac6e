"""flex_attention on this library: torch's parameters, torch's results, and gradients that torch does not compute."""

import gc
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.flex_cases import DIM, HEADS, ITEMS, MASKS, REFUSED, SCORES, TOKENS, causal, formula, inputs
from torch.nn.attention import flex_attention as theirs
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

from fusion_attention import BackendError
from fusion_attention.integrations.flex_attention import explain, flex_attention, masks, patched
from fusion_attention.testing.estimated_rounding_errors import compare_with

Tensor = torch.Tensor
Mod = Callable[..., Any]
DRAWS = 12  # of calls as large as these; they take most of the time


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """torch's flex_attention, run eagerly; by default it would compile itself."""
    monkeypatch.setattr(theirs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield theirs.flex_attention


def block_mask(mask: Mod, tokens: int = TOKENS, size: Any = 128) -> Any:
    return create_block_mask(mask, ITEMS, HEADS, tokens, tokens, device="cpu", BLOCK_SIZE=size)


def judged(
    score_mod: Mod | None, mask: Mod | None, created_mask: Any, *trained: Tensor, dtype: torch.dtype = torch.float32
) -> None:
    """Compare output, lse and all gradients with the formula in float64."""
    *qkv, dout = inputs(0, dtype=dtype)
    names = ("out", "lse", "dq", "dk", "dv", *(f"dcaptured {i}" for i in range(len(trained))))

    def results(call: Mod, results_dtype: torch.dtype) -> dict[str, Tensor]:
        leaves = [t.detach().to(results_dtype).requires_grad_() for t in qkv]
        out, lse = call(*leaves)
        grads = torch.autograd.grad(out, [*leaves, *trained], dout.to(results_dtype))
        return dict(zip(names, (out, lse, *grads), strict=True))

    ours = results(lambda *t: flex_attention(*t, score_mod, created_mask, enable_gqa=True, return_lse=True), dtype)

    def golden() -> Any:
        return results(lambda *t: formula(*t, score_mod, mask), torch.float64)

    compare_with("flex_attention", ours, golden, draws=DRAWS)


# ------------------------------------------------------------------------------------------------------------ results


@pytest.mark.sampled(32)
@pytest.mark.parametrize("name", MASKS)
def test_block_masks_match_float64_formula(name: str) -> None:
    mask, _ = MASKS[name]
    judged(None, mask, block_mask(mask))


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", SCORES)
def test_score_mods_match_float64_formula(name: str) -> None:
    score_mod, words = SCORES[name]
    judged(score_mod, None, None)
    q, k, *_ = inputs(0)
    assert explain(q, k, score_mod).startswith(words)


BESIDE = ["sliding window", "causal documents", "left padding, causal", "dilated window"]


@pytest.mark.sampled(64)
@pytest.mark.parametrize("mask", BESIDE)
@pytest.mark.parametrize("name", SCORES)
def test_score_mods_with_block_masks_match_float64_formula(name: str, mask: str) -> None:
    judged(SCORES[name][0], MASKS[mask][0], block_mask(MASKS[mask][0]))


@pytest.mark.sampled(64)
@pytest.mark.parametrize("mask", ["causal documents", "neighbourhood of a canvas", "some rows see nothing"])
@pytest.mark.parametrize("name", [None, *SCORES])
def test_output_and_lse_match_torch_flex_attention(eager: Any, name: str | None, mask: str) -> None:
    """torch's results also confirm the formula of these tests."""
    score_mod = None if name is None else SCORES[name][0]
    q, k, v, _ = inputs(1)
    created_mask = block_mask(MASKS[mask][0])
    want = eager(q, k, v, score_mod, created_mask, enable_gqa=True, return_lse=True)
    got = flex_attention(q, k, v, score_mod, created_mask, enable_gqa=True, return_lse=True)
    inputs64 = [t.double() for t in (q, k, v)]
    compare_with("(out, lse)", got + want, lambda: formula(*inputs64, score_mod, MASKS[mask][0]) * 2, draws=DRAWS)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["softcap", "ALiBi", "T5's buckets", "a bias per key"])
def test_bfloat16_and_float16_match_float64_formula(name: str, dtype: torch.dtype) -> None:
    score_mod = SCORES[name][0]
    q, k, v, _ = inputs(2, dtype=dtype)
    out = flex_attention(q, k, v, score_mod, block_mask(causal), enable_gqa=True)
    assert out.dtype == dtype
    inputs64 = [t.double() for t in (q, k, v)]
    compare_with("out", out, lambda: formula(*inputs64, score_mod, causal)[0], dtype=dtype, draws=DRAWS)


def test_float64_inputs_are_computed_in_float64() -> None:
    q, k, v, _ = inputs(3, dtype=torch.float64)
    out = flex_attention(q, k, v, SCORES["softcap"][0], block_mask(causal), enable_gqa=True)
    golden, _ = formula(q, k, v, SCORES["softcap"][0], causal)
    assert (out - golden).abs().max() < 1e-12


@pytest.mark.slow
def test_captured_tensors_of_score_mods_receive_gradients() -> None:
    table = torch.randn(HEADS, 2 * TOKENS, requires_grad=True)
    head = torch.randn(HEADS, requires_grad=True)
    dilated = MASKS["dilated window"][0]

    def relative(score: Any, b: Any, h: Any, row: Any, key: Any) -> Any:
        return score + table[h, row - key + TOKENS]

    def of_keys(score: Any, b: Any, h: Any, row: Any, key: Any) -> Any:
        return score + head[h] * table[h, key]

    def heated(score: Any, b: Any, h: Any, row: Any, key: Any) -> Any:
        return score * heat * head[h] - heat

    heat = torch.tensor(0.7, requires_grad=True)
    for step in range(2):  # the second one evaluates them anew
        judged(heated, None, None, heat, head)
        judged(relative, None, None, table)
        judged(of_keys, dilated, block_mask(dilated), head, table)
        with torch.no_grad():
            table.mul_(0.5 + step)


def test_autocast_casts_qkv_to_bfloat16_but_not_the_score_bias() -> None:
    q, k, v, _ = inputs(4)
    score_mod = SCORES["ALiBi as a difference"][0]
    with torch.autocast("cpu", torch.bfloat16):
        out = flex_attention(q, k, v, score_mod, enable_gqa=True)
    assert out.dtype == torch.bfloat16
    low = [t.bfloat16() for t in (q, k, v)]
    assert torch.equal(out, flex_attention(*low, score_mod, enable_gqa=True))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(out, flex_attention(*low, score_mod, enable_gqa=True))


# ----------------------------------------------------------------------------------------------- parameters and errors


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_score_mods_raise_with_a_reason(name: str) -> None:
    score_mod, words = REFUSED[name]
    q, k, v, _ = inputs(0)
    with pytest.raises(BackendError, match="flex_attention: score_mod: expected score") as error:
        flex_attention(q, k, v, score_mod, enable_gqa=True)
    assert words in str(error.value)


def test_refuses_score_mods_that_behave_differently_when_traced() -> None:
    """The score_mods distinguish the tracing stand-in from a tensor; a comparison with the function detects this."""
    q, k, v, _ = inputs(0)

    def sly(score: Any, b: Any, h: Any, row: Any, key: Any) -> Any:
        return score * 2 if isinstance(score, Tensor) else score

    def slier(score: Any, b: Any, h: Any, row: Any, key: Any) -> Any:
        return score + (row * key * 1e-3 if isinstance(row, Tensor) else row - key)

    for score_mod in (sly, slier):
        with pytest.raises(BackendError, match="where the converted formula"):
            flex_attention(q, k, v, score_mod, enable_gqa=True)


def test_output_strides_equal_torch_flex_attention(eager: Any) -> None:
    q, k, v, _ = inputs(5)
    views = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    for mask in ("causal", "documents", "dilated window"):
        created_mask = block_mask(MASKS[mask][0])
        for tensors in ((q, k, v), views):
            out = flex_attention(*tensors, None, created_mask, enable_gqa=True)
            assert out.stride() == eager(*tensors, None, created_mask, enable_gqa=True).stride()


def test_return_aux_returns_the_same_lse_as_return_lse() -> None:
    q, k, v, _ = inputs(6)
    out, lse = flex_attention(q, k, v, enable_gqa=True, return_lse=True)
    again, aux = flex_attention(q, k, v, enable_gqa=True, return_aux=AuxRequest(lse=True))
    assert torch.equal(out, again)
    assert torch.equal(lse, aux.lse)
    assert aux.max_scores is None
    assert flex_attention(q, k, v, enable_gqa=True, return_aux=AuxRequest())[1].lse is None


def test_keys_of_batch_size_1_broadcast_with_a_block_mask() -> None:
    q, k, v, _ = inputs(7)
    k, v = k[:1].requires_grad_(), v[:1]
    out = flex_attention(q, k, v, None, block_mask(causal), enable_gqa=True)
    full = (t.expand(ITEMS, -1, -1, -1) for t in (k, v))
    assert torch.equal(out, flex_attention(q, *full, None, block_mask(causal), enable_gqa=True))
    out.sum().backward()
    assert k.grad is not None
    assert k.grad.shape == k.shape


def test_invalid_calls_raise_specific_errors() -> None:
    q, k, v, _ = inputs(8)
    created_mask = block_mask(causal)
    full_heads = k.repeat_interleave(2, 1)
    full, one = (q, full_heads, full_heads), (q[:1], full_heads[:1], full_heads[:1])
    wrong: list[tuple[type[Exception], str, tuple[Any, ...], dict[str, Any]]] = [
        (ValueError, "pass enable_gqa=True", (q, k, v), {}),
        (ValueError, "a number of heads that divides", (q[:, :3], k, v), {"enable_gqa": True}),
        (ValueError, "as many elements in its rows", (q[..., :8], *full[1:]), {}),
        (ValueError, "as many rows as the value", (*full[:2], full_heads[:, :, 1:]), {}),
        (NotImplementedError, r"expected \[B, H, L, E\]", tuple(t[0] for t in full), {}),
        (ValueError, "or 1 beside a block_mask", (q, *one[1:]), {}),
        (
            ValueError,
            f"one made for q_len=100 and kv_len={TOKENS}",
            (q[:, :, :100], *full[1:]),
            {"block_mask": created_mask},
        ),
        (ValueError, "of 1 or 1 as its batch size", one, {"block_mask": created_mask}),
        (TypeError, "got <class 'torch.Tensor'>", full, {"block_mask": torch.ones(TOKENS, TOKENS)}),
        (ValueError, "got both", full, {"return_lse": True, "return_aux": AuxRequest()}),
        (NotImplementedError, "max_scores=True", full, {"return_aux": AuxRequest(max_scores=True)}),
        (RuntimeError, "sliced BlockMask", full, {"block_mask": created_mask[:, :, :1]}),
        (ValueError, "returns one bool", full, {"block_mask": lambda b, h, row, key: row - key}),
    ]
    for kind, text, tensors, words in wrong:
        with pytest.raises(kind, match=text):
            flex_attention(*tensors, **words)


def test_empty_keys_return_zeros_and_lse_of_minus_infinity() -> None:
    q, k, v, _ = inputs(9)
    out, lse = flex_attention(q, k[:, :, :0], v[:, :, :0], SCORES["ALiBi"][0], enable_gqa=True, return_lse=True)
    assert not out.any()
    assert bool((lse == -torch.inf).all())
    assert flex_attention(q[:, :, :0], k, v, enable_gqa=True).shape == (ITEMS, HEADS, 0, DIM)
    assert flex_attention(q[:0], k[:0], v[:0], enable_gqa=True).shape == (0, HEADS, TOKENS, DIM)


# ------------------------------------------------------------------------------------------------ cached conversions


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    convert = masks.of_block_mask
    monkeypatch.setattr(masks, "of_block_mask", lambda *args: (calls.append(1), convert(*args))[1])
    return calls


def test_block_mask_conversion_is_cached_until_captured_tensor_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch)
    q, k, v, _ = inputs(10)
    window = torch.tensor(30)

    def mask(b: Any, h: Any, row: Any, key: Any) -> Any:
        return (row >= key) & (row - key < window)

    created_mask = block_mask(mask)
    first = flex_attention(q, k, v, None, created_mask, enable_gqa=True)
    for _ in range(3):
        assert torch.equal(flex_attention(q, k, v, None, created_mask, enable_gqa=True), first)
    assert len(calls) == 1
    window.fill_(20)
    second = flex_attention(q, k, v, None, created_mask, enable_gqa=True)
    assert len(calls) == 2
    assert not torch.equal(second, first)
    created_mask.mask_mod = causal  # full and absent blocks stay what they are
    flex_attention(q, k, v, None, created_mask, enable_gqa=True)
    assert len(calls) == 3
    assert torch.equal(second, flex_attention(q, k, v, None, block_mask(mask), enable_gqa=True))


def test_score_mod_is_converted_again_after_an_attribute_changes() -> None:
    class Cap(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cap, self.weight = 5.0, torch.nn.Parameter(torch.arange(TOKENS) / TOKENS)

        def forward(self, score: Any, b: Any, h: Any, row: Any, key: Any) -> Any:
            return self.cap * torch.tanh(score / self.cap) + self.weight[key]

    cap, changes = Cap(), ("cap", "weight", None)
    q, k, v, _ = inputs(11)
    with torch.no_grad():
        for change in changes:
            before, fresh = flex_attention(q, k, v, cap, enable_gqa=True), Cap()
            if change == "cap":
                cap.cap = 0.5
            elif change == "weight":
                cap.weight.mul_(-2)
            fresh.load_state_dict(cap.state_dict())
            fresh.cap = cap.cap
            after = flex_attention(q, k, v, cap, enable_gqa=True)
            assert torch.equal(after, flex_attention(q, k, v, fresh, enable_gqa=True))
            assert torch.equal(after, before) == (change is None)


class Documents(torch.nn.Module):
    """Has the tensors that masks read, in every kind of attribute."""

    of_class = torch.arange(TOKENS) // 10
    __slots__ = ("slot",)

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("buffer", torch.arange(TOKENS) // 10)
        self.slot = self.documents = torch.arange(TOKENS) // 10

    @property
    def computed(self) -> Tensor:
        return self.documents

    def by_method(self, row: Any, key: Any) -> Any:
        return self.documents[row] == self.documents[key]


OF_OBJECTS: dict[str, Any] = {
    "a buffer": lambda m: (lambda b, h, row, key: m.buffer[row] == m.buffer[key], m.buffer),
    "a plain attribute": lambda m: (lambda b, h, row, key: m.documents[row] == m.documents[key], m.documents),
    "an attribute of its class": lambda m: (lambda b, h, row, key: m.of_class[row] == m.of_class[key], m.of_class),
    "a slot": lambda m: (lambda b, h, row, key: m.slot[row] == m.slot[key], m.slot),
    "a property": lambda m: (lambda b, h, row, key: m.computed[row] == m.computed[key], m.documents),
    "a method": lambda m: (lambda b, h, row, key: m.by_method(row, key), m.documents),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", OF_OBJECTS)
def test_mask_is_converted_again_after_object_attribute_changes(name: str) -> None:
    module = Documents()
    function, table = OF_OBJECTS[name](module)
    before, results = table.clone(), []
    q, k, v, _ = inputs(15)
    try:
        for change in (0, TOKENS // 3, 7):
            table.add_(torch.arange(TOKENS) // 4 * change)
            results.append(flex_attention(q, k, v, None, function, enable_gqa=True))
            fresh, _ = OF_OBJECTS[name](module)  # a function that was never read
            assert torch.equal(results[-1], flex_attention(q, k, v, None, fresh, enable_gqa=True))
    finally:
        table.copy_(before)
    assert not torch.equal(results[0], results[1])


def test_conversion_cache_does_not_keep_block_masks_alive() -> None:
    q, k, v, _ = inputs(12)

    def masked() -> tuple[Any, Any]:
        sequence = torch.zeros(TOKENS, dtype=torch.int64)
        created_mask = block_mask(lambda b, h, row, key: sequence[row] == sequence[key])
        flex_attention(q, k, v, None, created_mask, enable_gqa=True)
        return weakref.ref(sequence), weakref.ref(created_mask)

    table, mask = masked()
    gc.collect()
    assert table() is None
    assert mask() is None


# ------------------------------------------------------------------------------------------------- unedited programs


def test_patched_replaces_and_restores_torch_flex_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, _ = inputs(13)
    original, earlier = theirs.flex_attention, types.ModuleType("took_it_before")
    earlier.flex_attention = original  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, earlier.__name__, earlier)
    q.requires_grad_()
    with patched(), patched():
        from torch.nn.attention.flex_attention import flex_attention as imported

        assert imported is earlier.flex_attention is flex_attention
        imported(q, k, v, enable_gqa=True).sum().backward()
    assert theirs.flex_attention is earlier.flex_attention is original
    assert q.grad is not None


def test_patched_torch_compile_returns_flex_attention_uncompiled() -> None:
    before = torch.compile
    q, k, v, _ = inputs(15)
    with patched():
        compiled = torch.compile(theirs.flex_attention, fullgraph=True, dynamic=False)
        decorated = torch.compile(fullgraph=True)(theirs.flex_attention)
        doubled = torch.compile(lambda x: 2 * x, backend="eager")
        assert torch.equal(doubled(q), 2 * q)
    assert torch.compile is before
    assert compiled is decorated is flex_attention
    with pytest.raises(torch._dynamo.exc.Unsupported):  # compiled apart from it, one cannot leave the graph
        torch.compile(flex_attention, backend="eager", fullgraph=True)(q, k, v, enable_gqa=True)


def test_compiled_code_that_calls_flex_attention_equals_eager() -> None:
    q, k, v, dout = inputs(14)
    slope = torch.randn(HEADS, requires_grad=True)
    created_mask = block_mask(causal)

    def layer(x: Tensor) -> Tensor:
        return 2 * flex_attention(
            x * 3, k, v, lambda s, b, h, row, key: s + slope[h] * (row - key), created_mask, enable_gqa=True
        )

    results = []
    for function in (layer, torch.compile(layer, backend="eager")):
        leaf = q.clone().requires_grad_()
        out = function(leaf)
        results.append((out.detach(), *torch.autograd.grad(out, (leaf, slope), dout)))
    for ours, want in zip(*results, strict=True):
        assert torch.equal(ours, want)
    compiled = torch.compile(flex_attention, backend="eager")
    assert torch.equal(
        compiled(q, k, v, None, created_mask, enable_gqa=True),
        flex_attention(q, k, v, None, created_mask, enable_gqa=True),
    )

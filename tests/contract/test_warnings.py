"""Legal calls that are probably not intended: they warn once, and are errors in strict mode."""

import itertools
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.compiled import compiled
from torch.utils.checkpoint import checkpoint

import fusion_attention as fa
from fusion_attention import npu
from fusion_attention.npu.surface.modules import functions
from fusion_attention.ops import RECORDS

ROWS = torch.randn(300, 2, 16)
HALF = torch.float16


def warned(call: Callable[[], Any], action: str = "always") -> list[str]:
    """Runs a call; returns the texts of its ContractWarnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(action)  # type: ignore[arg-type]
        call()
    return [str(w.message) for w in caught if issubclass(w.category, fa.ContractWarning)]


def refused(call: Callable[[], Any]) -> str:
    """Runs a call in strict mode, which must refuse it; returns the error text."""
    with npu.strict(), pytest.raises(fa.ContractError) as caught:
        call()
    return str(caught.value)


def ends(count: int = 150) -> dict[str, Any]:
    return {"actual_seq_qlen": [50, 100, count], "actual_seq_kvlen": [50, 100, 300]}


# Calls with 300 rows in which the last sequence ends earlier, and the parameter that the warning must name.
SHORT: dict[str, tuple[str, Callable[[], Any]]] = {
    "rows": ("actual_seq_qlen", lambda: npu.npu_fusion_attention(ROWS, ROWS, ROWS, 2, "TND", scale=0.25, **ends())),
    "keys": ("kv_len", lambda: fa.attention(ROWS, ROWS, ROWS, layout="TND", q_len=[100, 200], kv_len=[100, 150])),
}


@pytest.mark.parametrize("name", SHORT)
def test_packed_lengths_shorter_than_tensor_warn_and_strict_mode_raises(name: str) -> None:
    param, call = SHORT[name]
    axis = "T2" if param == "kv_len" else "T1"
    fate = "not read" if axis == "T2" else "zeros"
    text = rf"\w+: {param}: expected sequences that take up all {axis} rows of the tensor \(the rows behind .* {fate}"
    (result,) = warned(call)
    assert re.match(text, result), result
    assert ("did you pass lengths?" in result) == ("actual_seq" in param), result
    assert re.search(rf"got {axis}=300, (q|kv)_len=\[", refused(call))


def test_top_k_far_beyond_the_keys_warns_and_strict_mode_raises() -> None:
    q, weights = torch.randn(1, 3, 2, 8), torch.rand(1, 3, 2)
    calls = {
        count: (lambda count=count: fa.lightning_indexer(q, q[:, :, :1], weights, count)) for count in (8192, 8193)
    }
    assert warned(calls[8192]) == []
    (result,) = warned(calls[8193])
    assert "top_k: expected at most max(S2, 8192)" in result
    assert "top_k=8193, S2=3" in refused(calls[8193])


def test_packed_lengths_that_fill_the_tensor_do_not_warn() -> None:
    def calls() -> None:
        npu.npu_fusion_attention(ROWS, ROWS, ROWS, 2, "TND", scale=0.25, **ends(300))
        tail = ends(300) | {"actual_seq_qlen": [300, 0, 0]}
        npu.npu_fusion_attention(ROWS, ROWS, ROWS, 2, "TND", scale=0.25, **tail)
        fa.attention(ROWS, ROWS, ROWS, layout="TND", q_len=[100, 200, 0])
        fa.attention(ROWS[None], ROWS[None], ROWS[None], q_len=[7], kv_len=[5])  # padded rows end where they end
        fa.attention(ROWS[:0], ROWS[:0], ROWS[:0], layout="TND", q_len=[0])

    with npu.strict():
        assert warned(calls) == []


def test_default_filter_shows_short_lengths_warning_once_for_all_lengths() -> None:
    """A program that pads batches of varying lengths to one size does so on purpose: it must not warn at every step."""

    def steps() -> None:
        for last in (150, 170, 290, 150):
            fa.attention(ROWS, ROWS, ROWS, layout="TND", q_len=[100, last - 100], kv_len=[100, 200])

    assert len(warned(steps, "default")) == 1
    assert len(warned(steps, "always")) == 4
    assert warned(steps, "ignore") == []


# ---------------------------------------------------------------------------------------------------- dropped gradients

Q = torch.randn(1, 6, 2, 16)
WANTING = Q.clone().requires_grad_()
SLOPES = torch.rand(2, requires_grad=True)
CACHE = torch.randn(1, 9, 2, 16)
FLAT = torch.randn(1, 1, 64, dtype=HALF, requires_grad=True)
SLOTS = torch.randn(1, 6, 64, dtype=HALF)
DROPPED: dict[str, tuple[str, Callable[[], Any]]] = {
    "slopes": ("alibi_slopes: .*pass the distances as bias", lambda: fa.attention(Q, Q, Q, alibi_slopes=SLOPES)),
    "pse": (
        "pse: .*slopes have none: pass the biases themselves",
        lambda: npu.npu_fusion_attention_v2(Q, Q, Q, 2, "BSND", pse=SLOPES, pse_type=2, scale=0.25),
    ),
    "keys": ("k: ", lambda: fa.decode_attention(Q[:, :1], ([WANTING], [CACHE[:, :6]]))),
}


@pytest.mark.parametrize("name", DROPPED)
def test_unsupported_gradient_warns_and_strict_mode_raises(name: str) -> None:
    text, call = DROPPED[name]
    for _ in range(2):  # a signature that is known, too
        (result,) = warned(call)
        assert re.search(text, result), result
    assert re.search(text, refused(call))
    with torch.no_grad(), fa.strict():
        assert warned(call) == []
    assert len(warned(call)) == 1


def test_unsupported_gradient_warns_only_if_the_tensor_requires_grad() -> None:
    for slopes, count in ((SLOPES.detach(), 0), (SLOPES, 1), (SLOPES.detach(), 0), (SLOPES, 1)):
        assert len(warned(lambda slopes=slopes: fa.attention(Q, Q, Q, alibi_slopes=slopes))) == count  # type: ignore[misc]


def test_pse_bias_has_a_gradient_and_no_warning() -> None:
    bias = torch.zeros(1, 2, 6, 6, requires_grad=True)
    call = lambda: npu.npu_fusion_attention_v2(Q, Q, Q, 2, "BSND", pse=bias, pse_type=0, scale=0.25)[0]  # noqa: E731
    assert warned(call) == []
    call().sum().backward()
    assert bias.grad is not None


@pytest.mark.usefixtures("fresh")
def test_unsupported_gradient_warns_in_a_compiled_graph() -> None:
    graph, _ = compiled(lambda s: fa.attention(Q, Q, Q, alibi_slopes=s))
    assert any("alibi_slopes" in text for text in warned(lambda: graph(SLOPES)))


def attended(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return fa.attention(q, q, q, return_lse=True)


def selected(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    result: Any = fa.sparse_attention(q, q[:, :, :1], None, torch.zeros(1, 6, 1, 1, dtype=torch.int32), return_lse=True)
    return result


@pytest.mark.parametrize("interface", [attended, selected])
def test_unused_lse_under_reentrant_checkpoint_keeps_the_gradient(
    interface: Callable[..., tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """Reentrant checkpointing passes a gradient of zeros to every unused output."""
    alone, through = Q.clone().requires_grad_(), Q.clone().requires_grad_()
    interface(alone)[0].sum().backward()
    out, lse = checkpoint(interface, through, use_reentrant=True)
    assert lse.requires_grad
    out.sum().backward()
    assert torch.equal(through.grad, alone.grad)  # type: ignore[arg-type]


def test_indexer_loss_treats_attention_rows_and_lse_as_constants() -> None:
    """The loss's backward pass must not refuse lse, nor free tensors that the backward pass of attention needs."""
    q = Q.clone().requires_grad_()
    index_q = torch.randn(1, 6, 2, 8, requires_grad=True)
    rows = q * 2
    out, lse = attended(rows)
    loss = fa.indexer_loss(rows, rows, lse, index_q, torch.randn(1, 6, 1, 8), torch.rand(1, 6, 2))
    loss.backward()
    assert index_q.grad is not None
    assert q.grad is None
    out.sum().backward()
    assert q.grad is not None


# -------------------------------------------------------------------------------------------------- advice in warnings


def test_omitted_scale_of_wide_heads_warns() -> None:
    wide_rows, narrow = torch.randn(1, 4, 2, 64), torch.randn(1, 4, 2, 16)
    half = torch.randn(1, 1, 64).half(), torch.randn(1, 9, 64).half()
    calls: tuple[tuple[str, int, Callable[[], Any]], ...] = (
        ("scale", 1, lambda: npu.npu_fusion_attention(wide_rows, wide_rows, wide_rows, 2, "BSND")),
        ("scale", 0, lambda: npu.npu_fusion_attention(wide_rows, wide_rows, wide_rows, 2, "BSND", scale=0.125)),
        ("scale", 0, lambda: npu.npu_fusion_attention(wide_rows, wide_rows, wide_rows, 2, "BSND", scale=1.0)),
        ("scale", 0, lambda: npu.npu_fusion_attention(narrow, narrow, narrow, 2, "BSND")),
        ("scale_value", 1, lambda: npu.npu_incre_flash_attention(half[0], half[1], half[1])),
    )
    for name, count, call in calls:
        result = warned(call)
        assert len(result) == count
        assert all(f"{name}: expected a {name}" in text and "not 1 / sqrt(D)" in text for text in result)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: npu.npu_fusion_attention(Q, Q, Q, 2, "BSND", pre_tokens=3),
            r"'pre_tokens' \(did you mean pre_tockens=\?",
        ),
        (lambda: fa.sparse_attention(Q, Q, Q, None, blok=3), r"'blok' \(did you mean block=\?"),
        (lambda: functions()["npu_rms_norm"](Q, Q[0, 0, 0], eps=1e-5), r"'eps' \(did you mean epsilon=\?"),
        (lambda: functions()["npu_swiglu"](Q, axes=1), r"'axes' \(it has input, dim\)"),
    ],
)
def test_misspelt_argument_raises_type_error_with_suggestion(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        call()


def test_numbers_are_accepted_as_scalar_tensors_and_numpy_scalars() -> None:
    q, heads = torch.randn(1, 2, 8, 16), torch.tensor(2)
    want = npu.npu_fusion_attention(q, q, q, 2, "BNSD", scale=0.25)
    for scale in (torch.tensor(0.25), np.float32(0.25)):
        assert torch.equal(npu.npu_fusion_attention(q, q, q, heads, "BNSD", scale=scale)[0], want[0])
    heads.fill_(1)  # the same tensor, another number
    with pytest.raises(fa.ContractError, match="expected axis 1 to be N1=1"):
        npu.npu_fusion_attention(q, q, q, heads, "BNSD", scale=0.25)
    with pytest.raises(fa.ContractError, match="head_num: expected an int"):
        npu.npu_fusion_attention(q, q, q, torch.tensor([2]), "BNSD", scale=0.25)
    sizes = [torch.tensor([4]), np.int64(52)]
    masks = [npu._npu_dropout_gen_mask(q, n, p, 3, 0) for n, p in ((sizes, torch.tensor(0.5)), ([4, 52], 0.5))]
    assert torch.equal(*masks)
    assert want[-1] == 2 * 8 * 8  # scores, whatever is kept


def test_same_failure_of_two_parameters_is_one_line_of_the_error() -> None:
    q = torch.randn(8, 2, 16)
    with pytest.raises(fa.ContractError) as caught:
        npu.npu_fusion_attention(q, q, q, 2, "TND", scale=0.25, actual_seq_qlen=[5, 3], actual_seq_kvlen=[5, 3])
    assert [f.param for f in caught.value.failures] == ["actual_seq_qlen", "actual_seq_kvlen"]
    (line,) = str(caught.value).splitlines()
    assert "actual_seq_qlen: expected ends that never fall" in line
    assert line.endswith("; actual_seq_kvlen likewise")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda m: npu.npu_fusion_attention(Q, Q, Q, 2, "BSND", atten_mask=m),
            ("atten_mask: expected bool or uint8, got float32", "~mask", "goes in pse"),
        ),
        (lambda m: fa.attention(Q, Q, Q, blocked=m), ("blocked: expected bool or uint8", "~mask", "goes in bias")),
        (
            lambda m: npu.npu_incre_flash_attention(FLAT.detach(), SLOTS, SLOTS, atten_mask=m[:1]),
            ("atten_mask: expected bool or int8 or uint8", "~mask", "goes in pse_shift"),
        ),
    ],
)
def test_float_mask_error_suggests_inverted_mask_or_bias(call: Callable[..., Any], words: tuple[str, ...]) -> None:
    with pytest.raises(fa.ContractError) as caught:
        call(torch.zeros(6, 6))
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensor_error_suggests_values_and_offsets(layout: torch.layout) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: a prototype
        nested = torch.nested.nested_tensor([torch.randn(n, 2, 16) for n in (3, 5)], layout=layout)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: fa.attention(nested, nested, nested),
        lambda: npu.npu_fusion_attention(nested, nested, nested, 2, "BSND"),
        lambda: fa.lightning_indexer(nested, nested, nested),
        lambda: fa.decode_attention(nested, (nested, nested)),
    )
    for call in calls:
        with pytest.raises(fa.ContractError, match=r"got a nested one .*x\.values\(\).*x\.offsets\(\)\.diff\(\)"):
            call()
    if layout == torch.jagged:
        q = nested.values()
        out = fa.attention(q, q, q, layout="TND", q_len=nested.offsets().diff())
        apart = [fa.attention(*[t[None]] * 3)[0] for t in nested.unbind()]
        assert torch.equal(out, torch.cat(apart))


# --------------------------------------------------------------------------------------------------------------- bands


def test_band_converts_integral_numbers_to_int_and_refuses_others() -> None:
    """The type of a cached band must not depend on the order of equal calls."""
    import numpy as np

    kinds = (-1.0, np.float64(-1), np.int32(-1), torch.tensor(-1), -1)
    for order in itertools.permutations(kinds, 2):
        RECORDS["attention"].signatures.clear()
        for n in order:
            band = fa.Band(n, 1)
            assert (type(band.lo), band.lo, type(band.hi)) == (int, -1, int)
            fa.attention(Q, Q, Q, band=band)
    assert fa.Band(prefix=(1.0, 2)).prefix == (1, 2)
    for wrong in (0.5, "1", None, float("inf")):
        with pytest.raises(fa.ContractError, match="a band with integer edges"):
            fa.attention(Q, Q, Q, band=fa.Band(wrong, 1))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("band", "text"),
    [
        (fa.Band(), "Band.full()"),
        (fa.Band.causal(), "Band.causal()"),
        (fa.Band.causal("start"), "Band.causal('start')"),
        (fa.Band.window(32), "Band.window(32, 0)"),
        (fa.Band.window(-2, 7, "start"), "Band.window(-2, 7, 'start')"),
        (fa.Band.window(1 << 40, 3), "Band.window(2147483647, 3)"),
        (fa.Band.prefix_causal([3, 1]), "Band.prefix_causal([3, 1])"),
        (fa.Band(hi=5, prefix=(3,)), "Band(lo=-1099511627776, hi=5, align='end', prefix=(3,))"),
        (fa.Band(0.5), "Band(lo=0.5, hi=1099511627776, align='end', prefix=())"),  # type: ignore[arg-type]
    ],
)
def test_band_repr_evaluates_to_an_equal_band(band: fa.Band, text: str) -> None:
    assert repr(band) == text
    assert eval(text, {"Band": fa.Band}) == band


def test_band_window_without_right_edge_is_causal() -> None:
    assert fa.Band.window(3) == fa.Band.window(3, 0)
    assert fa.Band.window(3).visible(5, 5).triu(1).sum() == 0

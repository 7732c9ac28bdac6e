"""scaled_dot_product_attention on this library and torch's version are compared with the formula in float64."""

import copy
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
import torch
import torch.nn.functional as F
from support.bits import same_bits
from support.docs_tables import table, write, written

from fusion_attention import npu
from fusion_attention.integrations import sdpa
from fusion_attention.testing.estimated_rounding_errors import attend, compare_with
from fusion_attention.torch_ops import attention_forward

PAGE = "with_sdpa.md"
TORCHS = F.scaled_dot_product_attention
DRAWS = 16
Shape = tuple[int, ...]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """List with one element for every call that this library computes."""
    recorded: list[Any] = []
    forward = attention_forward.forward
    monkeypatch.setattr(
        attention_forward, "forward", lambda *args, **how: recorded.append(args) or forward(*args, **how)
    )
    return recorded


@pytest.fixture(autouse=True)
def torch_is_itself() -> Iterator[None]:
    yield
    assert F.scaled_dot_product_attention is TORCHS


@dataclass(frozen=True)
class Row:
    """Row of the page's table: shapes of query, key, value and mask, and arguments of the call."""

    q: Shape = (2, 4, 5, 16)
    k: Shape = (2, 4, 7, 16)
    v: Shape = (2, 4, 7, 16)
    mask: Shape | None = None
    make: Callable[[Shape], torch.Tensor] = torch.randn
    how: dict[str, Any] = field(default_factory=dict)
    ours: bool = True
    dtype: torch.dtype = torch.float32


def keeps(shape: Shape) -> torch.Tensor:
    return torch.rand(shape) < 0.7


def half_hidden(shape: Shape) -> torch.Tensor:
    """Random floats, half of them -inf; the first row is all -inf."""
    mask = torch.randn(shape).masked_fill(torch.rand(shape) < 0.5, float("-inf"))
    mask[..., 0, :] = float("-inf")
    return mask


ROWS = {
    "[B, N, L, E]": Row(),
    "bfloat16": Row(dtype=torch.bfloat16),
    "float16": Row(dtype=torch.float16),
    "[N, L, E]": Row((4, 5, 16), (4, 7, 16), (4, 7, 16)),
    "[L, E]": Row((5, 16), (7, 16), (7, 16)),
    "five axes": Row((3, 2, 4, 5, 16), (3, 2, 4, 7, 16), (3, 2, 4, 7, 16)),
    "leading axes that broadcast": Row((2, 1, 5, 16), (1, 4, 7, 16), (2, 4, 7, 16)),
    "key and value without leading axes": Row((2, 4, 5, 16), (7, 16), (7, 16)),
    "five axes that broadcast": Row((3, 1, 4, 5, 16), (1, 2, 1, 7, 16), (2, 1, 7, 16)),
    "values of another width": Row(v=(2, 4, 7, 24)),
    "is_causal, fewer rows than keys": Row(how={"is_causal": True}),
    "is_causal, more rows than keys": Row(q=(2, 4, 9, 16), how={"is_causal": True}),
    "scale": Row(how={"scale": 0.3}),
    "scale below 0": Row(how={"scale": -0.3}),
    "enable_gqa": Row((2, 4, 5, 16), (2, 2, 7, 16), (2, 2, 7, 16), how={"enable_gqa": True}),
    "enable_gqa, three axes": Row((4, 5, 16), (2, 7, 16), (2, 7, 16), how={"enable_gqa": True}),
    "bool mask [L, S]": Row(mask=(5, 7), make=keeps),
    "bool mask [B, 1, 1, S]": Row(mask=(2, 1, 1, 7), make=keeps),
    "bool mask [B, N, L, S]": Row(mask=(2, 4, 5, 7), make=keeps),
    "bool mask that hides all": Row(mask=(5, 7), make=functools.partial(torch.zeros, dtype=torch.bool)),
    "float mask [L, S], with its gradient": Row(mask=(5, 7)),
    "float mask [B, 1, 1, S], with its gradient": Row(mask=(2, 1, 1, 7)),
    "float mask [B, N, L, 1], with its gradient": Row(mask=(2, 4, 5, 1)),
    "float mask with rows of -inf": Row(mask=(5, 7), make=half_hidden),
    "float mask in bfloat16": Row(mask=(2, 4, 5, 7), dtype=torch.bfloat16),
    "five axes and a mask of four": Row((3, 2, 4, 5, 16), (3, 2, 4, 7, 16), (3, 2, 4, 7, 16), (2, 4, 5, 7), keeps),
    "five axes, a mask of four, one of them 1": Row((3, 2, 4, 5, 16), (3, 2, 4, 7, 16), (3, 2, 4, 7, 16), (1, 4, 5, 7)),
    "six axes and a mask of five": Row(
        (2, 1, 3, 4, 5, 16), (2, 1, 3, 4, 7, 16), (2, 1, 3, 4, 7, 16), (1, 3, 1, 5, 7), keeps
    ),
    "five axes and a mask of five": Row((3, 2, 4, 5, 16), (3, 2, 4, 7, 16), (3, 2, 4, 7, 16), (3, 1, 4, 5, 7), keeps),
    "key and value with an axis more": Row((4, 5, 16), (2, 3, 4, 7, 16), (2, 3, 4, 7, 16)),
    "no sequences": Row((0, 4, 5, 16), (0, 4, 7, 16), (0, 4, 7, 16)),
    "no rows": Row((2, 4, 0, 16)),
    "no keys": Row(k=(2, 4, 0, 16), v=(2, 4, 0, 16)),
    "no heads": Row((2, 0, 5, 16), (2, 0, 7, 16), (2, 0, 7, 16), ours=False),
    "no elements": Row((2, 4, 5, 0), (2, 4, 7, 0), ours=False),
    "more than 768 elements per head": Row((1, 1, 2, 769), (1, 1, 3, 769), (1, 1, 3, 769), ours=False),
    "float64": Row(dtype=torch.float64, ours=False),
    "enable_gqa, fewer heads of values than of keys": Row(v=(2, 2, 7, 16), how={"enable_gqa": True}, ours=False),
}


def lines() -> str:
    """Markdown table for docs/with_sdpa.md."""
    extra = {
        "dropout_p below 1": True,
        "dropout_p = 1": False,
        "scale that is not finite": False,
        "a mask together with is_causal": False,
        "nested tensors, layout torch.jagged": True,
        "nested tensors, is_causal (torch on a CPU: refused)": True,
        "torch.compile(fullgraph=True)": True,
        "torch.autocast": True,
        "float mask in another dtype than query's": False,
        "torch.func transforms, forward-mode differentiation": False,
        "tensor subclasses, the device meta": False,
    }
    words = {True: "this library", False: "torch"}
    return table(
        ("call", "computed by"), [(n, words[o]) for n, o in ({k: r.ours for k, r in ROWS.items()} | extra).items()]
    )


def test_docs_page_contains_the_generated_support_table() -> None:
    assert written(PAGE) == lines(), "python tests/integrations/test_sdpa.py writes it"


def formula(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The formula of torch's documentation."""
    if enable_gqa:
        k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1 if is_causal else k.shape[-2])
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        hidden = ~attn_mask
    factor = max(q.shape[-1], 1) ** -0.5 if scale is None else scale

    def scores_of() -> torch.Tensor:
        scores = q @ k.mT * factor
        if attn_mask is not None and attn_mask.is_floating_point():
            scores = scores + attn_mask
        return scores.masked_fill(hidden, -torch.inf)

    return attend(scores_of(), v, scores_of)


def results(function: Any, inputs: list[torch.Tensor], mask: Any, how: dict[str, Any], dout: torch.Tensor) -> list[Any]:
    """[out, gradients of inputs and of a float mask]."""
    inputs = [t.detach().to(dout.dtype).requires_grad_() for t in inputs]
    if mask is not None and mask.is_floating_point():
        mask = mask.detach().to(dout.dtype).requires_grad_()
        inputs.append(mask)
    out = function(*inputs[:3], attn_mask=mask, **how)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout, allow_unused=True)]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", ROWS)
def test_documented_sdpa_calls_match_float64_formula(name: str, calls: list[Any]) -> None:
    row = ROWS[name]
    inputs = [torch.randn(shape).to(row.dtype) for shape in (row.q, row.k, row.v)]
    mask = None if row.mask is None else row.make(row.mask)
    if mask is not None and mask.is_floating_point():
        mask = mask.to(row.dtype)
    shape = TORCHS(*inputs, attn_mask=mask, **row.how).shape
    dout = torch.randn(shape).to(row.dtype)
    ours = results(sdpa.scaled_dot_product_attention, inputs, mask, row.how, dout)
    assert bool(calls) == row.ours
    assert {t.dtype for t in ours} == {row.dtype}
    theirs = results(TORCHS, inputs, mask, row.how, dout)

    def golden() -> list[Any]:
        return [results(formula, inputs, mask, row.how, dout.double())] * 2

    compare_with(f"{name}, [ours, torch's][out, dq, dk, dv, dmask]", [ours, theirs], golden, draws=DRAWS)
    with sdpa.patched():
        same_bits(F.scaled_dot_product_attention(*inputs, attn_mask=mask, **row.how), ours[0])


@pytest.mark.parametrize(
    "how",
    [
        {"attn_mask": torch.zeros(5, 7, dtype=torch.int32)},
        {"attn_mask": torch.zeros(5, 7, dtype=torch.float64)},
        {"attn_mask": torch.zeros(5, 6)},
        {"attn_mask": torch.zeros(2, 1, 1, 5, 7)},
        {"dropout_p": -0.5},
        {"key": torch.zeros(2, 2, 7, 16)},
        {"key": torch.zeros(3, 4, 7, 16)},
        {"key": torch.zeros(2, 4, 7, 16, dtype=torch.float64)},
        {"key": torch.zeros(2, 4, 7, 8)},
        {"query": torch.zeros(16)},
    ],
    ids=str,
)
def test_invalid_calls_raise_the_same_errors_as_torch(how: dict[str, Any]) -> None:
    call = {
        name: torch.zeros(shape) for name, shape in zip(("query", "key", "value"), [Row.q, Row.k, Row.v], strict=True)
    }
    with pytest.raises((RuntimeError, IndexError)) as theirs:
        TORCHS(**(call | how))
    with pytest.raises(type(theirs.value)) as ours:
        sdpa.scaled_dot_product_attention(**(call | how))
    assert str(ours.value) == str(theirs.value)


def test_refuses_mask_on_another_device_than_query() -> None:
    q = torch.zeros(2, 4, 5, 16)
    with pytest.raises(RuntimeError, match="attn_mask: expected it on cpu, where query is, got it on meta"):
        sdpa.scaled_dot_product_attention(q, q, q, torch.zeros(5, 5, device="meta"))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_unsupported_calls_fall_back_to_torch(calls: list[Any]) -> None:
    q = torch.randn(2, 4, 5, 16)

    class Subclass(torch.Tensor):
        pass

    call = sdpa.scaled_dot_product_attention
    mapped = torch.func.vmap(lambda x: call(x, x, x))(torch.stack([q, 2 * q]))
    for got, want in zip(mapped, (q, 2 * q), strict=True):
        same_bits(got, TORCHS(want, want, want))
    assert type(call(*[q.as_subclass(Subclass)] * 3)) is Subclass
    assert call(*[q.to("meta")] * 3).is_meta
    low = q.bfloat16()
    same_bits(call(low, low, low, torch.ones(5, 5)), TORCHS(low, low, low, torch.ones(5, 5)))
    same_bits(call(q, q, q, dropout_p=1.0), torch.zeros_like(q))
    assert call(q, q, q, scale=float("inf")).isnan().all()
    assert not calls


def test_dropout_p_is_the_fraction_of_dropped_weights() -> None:
    zeros = sdpa.scaled_dot_product_attention(
        torch.zeros(8, 128, 16), torch.zeros(8, 128, 16), torch.eye(128).expand(8, -1, -1), dropout_p=0.25
    )
    dropped = (zeros == 0).double().mean()
    deviation = (0.25 * 0.75 / zeros.numel()) ** 0.5
    assert abs(dropped - 0.25) < 6 * deviation
    assert torch.equal(zeros[zeros != 0].unique(), torch.tensor([1 / 128 / 0.75]))


# -------------------------------------------------------------------------------------------------------------- nested


def jagged(lengths: list[int], like: torch.dtype = torch.float32) -> torch.Tensor:
    parts = [torch.randn(n, 4, 16, dtype=like) for n in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("lengths", [([3, 0, 5], [4, 2, 5]), ([3, 5], [3, 5]), ([2], [70])], ids=str)
def test_jagged_nested_tensors_match_formula_per_sequence(
    lengths: tuple[list[int], list[int]], causal: bool, calls: list[Any]
) -> None:
    """Each sequence is compared with the formula; torch has no causal nested tensors on a CPU."""
    x, y = map(jagged, lengths)
    out = sdpa.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (x, y, y)), is_causal=causal)
    assert len(calls) == 1
    assert out.shape == x.transpose(1, 2).shape
    dout = torch.randn_like(out.values())
    got = [out.values(), *(g.values() for g in torch.autograd.grad(out.values(), (x, y), dout))]
    ends = [torch.tensor([0, *n]).cumsum(0).tolist() for n in lengths]

    def apart() -> list[torch.Tensor]:
        q, k = (t.values().detach().double().requires_grad_() for t in (x, y))
        parts = []
        for i in range(len(lengths[0])):
            one, other = q[ends[0][i] : ends[0][i + 1]].transpose(0, 1), k[ends[1][i] : ends[1][i + 1]].transpose(0, 1)
            parts.append(formula(one, other, other, is_causal=causal))
        full = torch.cat(parts, 1)
        return [full, *torch.autograd.grad(full, (q, k), dout.double())]

    compare_with("[out, dq, dk]", got, apart, draws=DRAWS)


def test_nested_key_and_value_with_separate_equal_offsets_are_accepted(calls: list[Any]) -> None:
    x, y, z = (jagged([3, 5]).transpose(1, 2) for _ in range(3))
    got = sdpa.scaled_dot_product_attention(x, y, z, is_causal=True)
    same = torch.nested.nested_tensor_from_jagged(z.values().transpose(0, 1), y.offsets()).transpose(1, 2)
    assert len(calls) == 1
    same_bits(got.values(), sdpa.scaled_dot_product_attention(x, y, same, is_causal=True).values())


def test_refuses_nested_tensors_with_mismatched_lengths(calls: list[Any]) -> None:
    x, y = jagged([3, 5]).transpose(1, 2), jagged([4, 4]).transpose(1, 2)
    with pytest.raises((RuntimeError, ValueError)):
        sdpa.scaled_dot_product_attention(x, x, y)
    with pytest.raises((RuntimeError, ValueError)):
        sdpa.scaled_dot_product_attention(x, x.values()[None], x.values()[None])
    assert not calls


# ------------------------------------------------------------------------------------------ compile, autocast, layers


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_sdpa_equals_eager_bitwise(dynamic: bool, calls: list[Any]) -> None:
    q, mask = torch.randn(2, 4, 5, 16, requires_grad=True), torch.rand(5, 5) < 0.7
    mask[2] = False

    def program(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, 2 * q, q, mask) + sdpa.scaled_dot_product_attention(
            q, q, q, is_causal=True
        )

    with sdpa.patched():
        want = program(q, mask)
        got = torch.compile(program, fullgraph=True, backend="aot_eager", dynamic=dynamic)(q, mask)
    same_bits(got, want)
    same_bits(torch.autograd.grad(got.sum(), q)[0], torch.autograd.grad(want.sum(), q)[0])
    x = jagged([3, 5])
    fast = torch.compile(lambda t: sdpa.scaled_dot_product_attention(t, t, t), fullgraph=True, backend="aot_eager")
    same_bits(fast(x.transpose(1, 2)).values(), sdpa.scaled_dot_product_attention(*[x.transpose(1, 2)] * 3).values())


def test_autocast_casts_inputs_and_mask_to_bfloat16() -> None:
    q, k = torch.randn(2, 4, 5, 16), torch.randn(2, 4, 5, 16)
    with torch.autocast("cpu", torch.bfloat16):
        out = sdpa.scaled_dot_product_attention(q, k, k, torch.ones(5, 5))
    assert out.dtype == torch.bfloat16
    low = k.bfloat16()
    same_bits(out, sdpa.scaled_dot_product_attention(q.bfloat16(), low, low, torch.ones(5, 5).bfloat16()))


def layers() -> dict[str, tuple[torch.nn.Module, Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]]]:
    attention = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True), 2)
    full = torch.nn.Transformer(32, 4, 1, 1, 64, 0.0, batch_first=True)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    causal = torch.nn.Transformer.generate_square_subsequent_mask(6)
    return {
        "MultiheadAttention": (attention, lambda m, x: m(x, x, x, need_weights=False)[0]),
        "MultiheadAttention, padded": (
            attention,
            lambda m, x: m(x, x, x, key_padding_mask=padding, need_weights=False)[0],
        ),
        "TransformerEncoder, causal": (encoder, lambda m, x: m(x, mask=causal, is_causal=True)),
        "TransformerEncoder, padded": (encoder, lambda m, x: m(x, src_key_padding_mask=padding)[~padding]),
        "Transformer": (full, lambda m, x: m(x, x, tgt_mask=causal)),
    }


@pytest.mark.parametrize("name", layers())
def test_patched_torch_transformer_layers_match_float64(name: str, calls: list[Any]) -> None:
    """In training the layers call scaled_dot_product_attention; in inference some call a fused function of torch."""
    layer, run = layers()[name]
    x = torch.randn(2, 6, 32)
    layer64 = copy.deepcopy(layer).double()
    with sdpa.patched():
        ours = run(layer, x)
        assert calls
        gradients = torch.autograd.grad(ours.sum(), layer.parameters(), allow_unused=True)
        layer.eval()
        with torch.no_grad():
            inference = run(layer, x)
    compare_with(
        f"{name}, (training, inference)", (ours, inference), lambda: (run(layer64, x.double()),) * 2, draws=DRAWS
    )
    assert all(g is None or g.isfinite().all() for g in gradients)


# ------------------------------------------------------------------------------------------------------------- patched


def test_overlapping_sdpa_patches_are_removed_in_any_order(calls: list[Any]) -> None:
    q = torch.randn(1, 2, 5, 16)
    called: list[str] = []

    def theirs(*args: Any, **how: Any) -> torch.Tensor:
        called.append("theirs")
        return below(*args, **how)

    one, other = sdpa.patched(), sdpa.patched()
    one.__enter__()
    below = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = theirs
    other.__enter__()
    npu.install()
    F.scaled_dot_product_attention(q, q, q)
    assert (len(calls), called) == (1, [])
    F.scaled_dot_product_attention(q.double(), q.double(), q.double())  # handed through all of them to torch
    assert (len(calls), called) == (1, ["theirs"])
    one.__exit__()
    F.scaled_dot_product_attention(q, q, q)
    assert (len(calls), called) == (2, ["theirs"])
    npu.uninstall()
    other.__exit__()
    assert F.scaled_dot_product_attention is theirs
    F.scaled_dot_product_attention(q, q, q)  # a layer that is off, below another library's
    assert (len(calls), called) == (2, ["theirs", "theirs"])
    F.scaled_dot_product_attention = TORCHS


@pytest.mark.parametrize("transposed", [False, True])
def test_output_strides_equal_torch_sdpa(transposed: bool) -> None:
    q = torch.randn(2, 7, 4, 16).transpose(1, 2) if transposed else torch.randn(2, 4, 7, 16)
    assert sdpa.scaled_dot_product_attention(q, q, q).stride() == TORCHS(q, q, q).stride()


if __name__ == "__main__":
    write(PAGE, lines())

"""The door of flash-attn: its functions against formulas in float64, and the module that install() plays.

The formulas are those of flash-attn's documentation, sequence by sequence; in the call's dtype they measure how near.
"""

import importlib.metadata
import importlib.util
import inspect
import math
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from support.bits import same_bits
from support.door_tables import table, written

import fusion_attention as fa
from fusion_attention import npu
from fusion_attention.integrations import flash_attn as door
from fusion_attention.integrations.flash_attn import bert_padding, functions, rotary, words
from fusion_attention.testing.compare import compare

PAGE = "with_flash_attn.md"
Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    door.uninstall()
    assert importlib.util.find_spec("flash_attn") is None
    assert not [name for name in sys.modules if name.split(".")[0] == "flash_attn"]


def formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """(out [S1, N1, Dv], lse [N1, S1]) of one sequence [S, N, D], in its dtype."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    scores = torch.einsum("qnd,knd->nqk", q * (softmax_scale or q.shape[-1] ** -0.5), k)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    row, key = torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0], torch.arange(k.shape[0])
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.to(q.dtype)[:, None, None] * (row - key).abs()
    left, right = (int(n) for n in window_size)
    seen = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool)
    seen &= (key <= row) if causal else (key <= row + right) if right >= 0 else seen
    seen &= (key >= row - left) if left >= 0 else seen
    scores = scores.masked_fill(~seen, -math.inf)
    weights = scores.softmax(-1).masked_fill(~seen.any(-1, keepdim=True), 0)
    return torch.einsum("nqk,knd->qnd", weights, v), scores.logsumexp(-1)


WORDS: dict[str, dict[str, Any]] = {
    "nothing else": {},
    "softmax_scale": {"softmax_scale": 0.3},
    "causal": {"causal": True},
    "window_size": {"window_size": (3, 2)},
    "window_size, one side": {"window_size": (2, -1)},
    "window_size as a tensor": {"window_size": torch.tensor([1, 0])},
    "window_size with causal": {"causal": True, "window_size": (2, 5)},
    "softcap": {"softcap": 1.5},
    "softcap, causal, window": {"softcap": 1.5, "causal": True, "window_size": (4, 0)},
    "alibi_slopes [N]": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.05])},
    "alibi_slopes [B, N], causal": {"alibi_slopes": torch.rand(3, 4), "causal": True},
    "alibi_slopes, softcap": {"alibi_slopes": torch.rand(3, 4), "softcap": 1.5},
    "deterministic": {"deterministic": True},
}
CACHES = ("rows", "pages", "cache_batch_idx", "cache_leftpad")


def lines() -> str:
    """The table of the page."""
    train, run, none = "forward, backward", "forward", "no effect"
    rows = [
        (
            f"`{name}`" if " " not in name else name,
            none if name == "deterministic" else train,
            none if name == "deterministic" else train,
            "-" if name == "deterministic" else run,
        )
        for name in WORDS
    ]
    rows += [
        ("dropout_p", train, train, "-"),
        ("return_attn_probs, return_softmax_lse", "(out, lse, None)", "(out, lse, None)", "(out, lse)"),
        ("N1 a multiple of N2; qkv or kv in one tensor", train, train, run),
        ("float16, bfloat16, and float32", train, train, run),
        ("block_table, pages of any size", "-", run, run),
        ("k, v appended in place; cache_seqlens a number or a tensor", "-", "-", run),
        ("cache_batch_idx, cache_leftpad", "-", "-", run),
        ("rotary_cos, rotary_sin, rotary_interleaved", "-", "-", run),
        ("max_seqlen_q, max_seqlen_k, num_splits", "-", none, none),
        ("torch.compile(fullgraph=True)", train, train, "no"),
    ]
    return table(("call", "`flash_attn_func`", "`flash_attn_varlen_func`", "`flash_attn_with_kvcache`"), rows)


def test_the_page_has_the_table() -> None:
    assert written(PAGE) == lines(), "python tests/support/door_tables.py writes it"


def of_sequence(how: dict[str, Any], b: int) -> dict[str, Any]:
    slopes = how.get("alibi_slopes")
    return how | ({"alibi_slopes": slopes[b]} if slopes is not None and slopes.dim() == 2 else {})


def judged(got: list[Tensor], call: Any, inputs: list[Tensor], dout: Tensor, terms: int) -> None:
    """compare() of [out, lse, gradients] with call(*inputs) -> (out, lse) in float64 and in their own dtype."""

    def computed(dtype: torch.dtype) -> list[Tensor]:
        own = [t.detach().to(dtype).requires_grad_() for t in inputs]
        out, lse = call(*own)
        return [out.detach(), lse.detach(), *torch.autograd.grad(out, own, dout.to(dtype))]

    names = ("out", "lse", "dq", "dk", "dv")
    for name, mine, golden, plain in zip(names, got, computed(torch.float64), computed(dout.dtype), strict=False):
        compare(name, mine.detach(), golden, plain, terms)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", WORDS)
def test_padded(name: str, dtype: torch.dtype) -> None:
    how = WORDS[name]
    inputs = [torch.randn(3, s, n, 16).to(dtype).requires_grad_() for s, n in ((6, 4), (9, 2), (9, 2))]
    out, lse, none = door.flash_attn_func(*inputs, **how, return_attn_probs=True)
    assert none is None
    assert lse.shape == (3, 4, 6)
    same_bits(door.flash_attn_func(*inputs, **how), out)
    dout = torch.randn(out.shape).to(dtype)
    got = [out, lse, *torch.autograd.grad(out, inputs, dout)]

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        found = [formula(q[b], k[b], v[b], **of_sequence(how, b)) for b in range(3)]
        return torch.stack([o for o, _ in found]), torch.stack([x for _, x in found])

    judged(got, call, inputs, dout, 9)


LENGTHS = [3, 0, 7], [5, 4, 2]


def packed_call(how: dict[str, Any], lengths: tuple[list[int], list[int]]) -> Any:
    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        parts = [t.split(n) for t, n in zip((q, k, v), (lengths[0], lengths[1], lengths[1]), strict=True)]
        found = [formula(*three, **of_sequence(how, b)) for b, three in enumerate(zip(*parts, strict=True))]
        return torch.cat([o for o, _ in found]), torch.cat([x for _, x in found], 1)

    return call


def ends(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", WORDS)
def test_packed(name: str, dtype: torch.dtype) -> None:
    how = WORDS[name]
    inputs = [torch.randn(s, n, 16).to(dtype).requires_grad_() for s, n in ((10, 4), (11, 2), (11, 2))]
    cu = ends(LENGTHS[0]), ends(LENGTHS[1])
    out, lse, none = door.flash_attn_varlen_func(*inputs, *cu, 7, 5, **how, return_attn_probs=True)
    assert none is None
    assert lse.shape == (4, 10)
    dout = torch.randn(out.shape).to(dtype)
    judged([out, lse, *torch.autograd.grad(out, inputs, dout)], packed_call(how, LENGTHS), inputs, dout, 7)


def test_one_tensor_of_all() -> None:
    """The same bits as from tensors apart, gradients too."""
    qkv, kv = torch.randn(2, 6, 3, 4, 16, requires_grad=True), torch.randn(2, 6, 2, 2, 16, requires_grad=True)
    q = torch.randn(2, 6, 4, 16, requires_grad=True)
    how = {"causal": True, "window_size": (3, 0), "softcap": 2.0, "return_attn_probs": True}
    cu = ends([6, 6])

    def flat(t: Tensor) -> Tensor:
        return t.flatten(0, 1)

    pairs = [
        (door.flash_attn_qkvpacked_func(qkv, **how), door.flash_attn_func(*qkv.unbind(2), **how)),
        (door.flash_attn_kvpacked_func(q, kv, **how), door.flash_attn_func(q, *kv.unbind(2), **how)),
        (
            door.flash_attn_varlen_qkvpacked_func(flat(qkv), cu, 6, **how),
            door.flash_attn_varlen_func(*flat(qkv).unbind(1), cu, cu, 6, 6, **how),
        ),
        (
            door.flash_attn_varlen_kvpacked_func(flat(q), flat(kv), cu, cu, 6, 6, **how),
            door.flash_attn_varlen_func(flat(q), *flat(kv).unbind(1), cu, cu, 6, 6, **how),
        ),
    ]
    for one, apart in pairs:
        same_bits(one[:2], apart[:2])
        assert one[2] is None
        for t in (qkv, q, kv):
            gradients = [
                torch.autograd.grad(o[0].sum(), t, allow_unused=True, retain_graph=True)[0] for o in (one, apart)
            ]
            assert (gradients[0] is None) == (gradients[1] is None)
            if gradients[0] is not None:
                same_bits(*gradients)


def test_the_backward_is_attentions_own() -> None:
    """No node of autograd beside that of fa.attention(), and nothing is copied."""
    q = torch.randn(7, 2, 16, requires_grad=True)
    cu = ends([3, 4])
    out = door.flash_attn_varlen_func(q, q, q, cu, cu, 4, 4, causal=True)
    own = fa.attention(q, q, q, layout="TND", q_len=[3, 4], kv_len=[3, 4], band=fa.Band.causal())
    assert type(out.grad_fn) is type(own.grad_fn)
    assert [type(node) for node, _ in out.grad_fn.next_functions] == [
        type(node) for node, _ in own.grad_fn.next_functions
    ]
    same_bits(out, own)


def test_dropout() -> None:
    q, ones = torch.randn(2, 64, 4, 16), torch.ones(2, 64, 4, 16)

    def drawn(seed: int, **how: Any) -> Tensor:
        torch.manual_seed(seed)
        return door.flash_attn_func(q, q, ones, dropout_p=0.5, **how)

    same_bits(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))
    torch.manual_seed(1)
    flat = [t.flatten(0, 1) for t in (q, q, ones)]
    packed = door.flash_attn_varlen_func(*flat, ends([64, 64]), ends([64, 64]), 64, 64, dropout_p=0.5)
    same_bits(packed, drawn(1).flatten(0, 1))
    kept = drawn(3)[..., 0]
    # A row's result is twice the sum of what was kept of its probabilities: 1 on average, with this deviation at most.
    weights = torch.einsum("bqnd,bknd->bnqk", q / 4, q).softmax(-1)
    deviation = weights.square().sum().sqrt() / kept.numel()
    assert (kept.mean() - 1).abs() < 6 * deviation


def test_lengths_are_read_as_they_are() -> None:
    q, cu = torch.randn(7, 2, 16), ends([3, 4])
    before = door.flash_attn_varlen_func(q, q, q, cu, cu, 4, 4)
    cu.numpy()[1] = 5  # unseen by torch
    after = door.flash_attn_varlen_func(q, q, q, cu, cu, 5, 5)
    same_bits(after, door.flash_attn_varlen_func(q, q, q, ends([5, 2]), ends([5, 2]), 5, 5))
    assert not torch.equal(before, after)
    for bad, message in ((cu[1:], "begin with 0, got 5 in front"), (cu[:0], "begin with 0, got none")):
        with pytest.raises(ValueError, match=f"flash_attn: cu_seqlens_q: expected cumulative lengths that {message}"):
            door.flash_attn_varlen_func(q, q, q, bad, cu, 4, 4)
    with pytest.raises(fa.ContractError, match="q_len"):
        door.flash_attn_varlen_func(q, q, q, ends([5, 9]), ends([5, 2]), 5, 5)


def test_lengths_of_another_device_are_read_once() -> None:
    class Elsewhere:
        """A tensor on a device that one waits for, as numbers() sees it."""

        device, read, _version, values = torch.device("cuda"), 0, 0, (0, 3)

        def is_inference(self) -> bool:
            return False

        def tolist(self) -> list[int]:
            self.read += 1
            return list(self.values)

    tensor: Any = Elsewhere()
    assert words.numbers(tensor) == words.numbers(tensor) == [0, 3]
    assert tensor.read == 1
    tensor.values, tensor._version = (0, 4), 1
    assert words.numbers(tensor) == words.numbers(tensor) == [0, 4]
    assert tensor.read == 2
    for _ in range(2 * words._KEPT):
        words.numbers(Elsewhere())  # type: ignore[arg-type]
    assert len(words._READ) <= words._KEPT
    words._READ.clear()


# -------------------------------------------------------------------------------------------------------------- caches


def pages_of(cache: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """(pages, table) of a cache [B, S, N, D], its pages in any order among others."""
    batch, count = cache.shape[0], cache.shape[1] // size
    table = torch.randperm(2 * batch * count)[: batch * count].view(batch, count).int()
    pages = torch.full((2 * batch * count, size, *cache.shape[2:]), math.nan, dtype=cache.dtype)
    pages[table.long()] = cache.unflatten(1, (count, size))
    return pages, table


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("name", [name for name in WORDS if name != "deterministic"])
@pytest.mark.parametrize("rows", [1, 3])
def test_caches(name: str, kind: str, rows: int) -> None:
    """Tokens are appended where they belong, and what is there is what is seen."""
    how, before, new = WORDS[name], [9, 0, 4], rows
    batch_idx = torch.tensor([4, 0, 2], dtype=torch.int32) if kind == "cache_batch_idx" else None
    pad = torch.tensor([2, 0, 3], dtype=torch.int32) if kind == "cache_leftpad" else None
    q = torch.randn(3, rows, 4, 16)
    fresh = [torch.randn(3, new, 2, 16) for _ in range(2)]
    held = [torch.randn(5 if batch_idx is not None else 3, 16, 2, 16) for _ in range(2)]
    want = [t.clone() for t in held]
    for b, length in enumerate(before):
        for cache, tokens in zip(want, fresh, strict=True):
            cache[b if batch_idx is None else batch_idx[b], length : length + new] = tokens[b]
    caches, block_table = held, None
    if kind == "pages":
        torch.manual_seed(1)
        k_pages, block_table = pages_of(held[0], 4)
        torch.manual_seed(1)
        caches = [k_pages, pages_of(held[1], 4)[0]]
    out, lse = door.flash_attn_with_kvcache(
        q,
        *caches,
        *fresh,
        cache_seqlens=torch.tensor(before, dtype=torch.int32),
        cache_batch_idx=batch_idx,
        cache_leftpad=pad,
        block_table=block_table,
        return_softmax_lse=True,
        **how,
    )
    stored = caches if block_table is None else [c[block_table.long()].flatten(1, 2) for c in caches]
    same_bits(stored, want)

    def call(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        found = []
        for b, length in enumerate(before):
            seen = slice(0 if pad is None else int(pad[b]), length + new)
            row = b if batch_idx is None else int(batch_idx[b])
            sides = [t[row, seen].to(dtype) for t in want]
            found.append(formula(q[b].to(dtype), *sides, **of_sequence(how, b)))
        return torch.stack([o for o, _ in found]), torch.stack([x for _, x in found])

    for what, mine, golden, plain in zip(
        ("out", "lse"), (out, lse), call(torch.float64), call(torch.float32), strict=True
    ):
        compare(what, mine, golden, plain, 12)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("how", [{}, {"causal": True}, {"window_size": (5, -1)}], ids=str)
def test_rotary_of_a_cache(how: dict[str, Any], interleaved: bool) -> None:
    q, k, v = (torch.randn(2, 3, n, 16) for n in (4, 2, 2))
    caches = [torch.randn(2, 12, 2, 16) for _ in range(2)]
    angles = torch.rand(12, 4) * 6
    cos, sin, lengths = angles.cos(), angles.sin(), torch.tensor([5, 2], dtype=torch.int32)
    one, other = [t.clone() for t in caches], [t.clone() for t in caches]
    out = door.flash_attn_with_kvcache(q, *one, k, v, cos, sin, lengths, rotary_interleaved=interleaved, **how)
    turned_k = by_complex_numbers(k, angles, lengths, interleaved)
    turned_q = by_complex_numbers(q, angles, lengths, interleaved, each=bool(how))
    want = door.flash_attn_with_kvcache(turned_q, *other, turned_k, v, cache_seqlens=lengths, **how)
    for a, b in ((one[0], other[0]), (one[1], other[1]), (out, want)):
        compare("rotated", a, b.double(), b + b.abs() * 2.0**-22, 12)


def by_complex_numbers(x: Tensor, angles: Tensor, starts: Tensor, interleaved: bool, *, each: bool = True) -> Tensor:
    """A rotation written another way: pairs of elements as complex numbers, in float64."""
    size = 2 * angles.shape[1]
    steps = torch.arange(x.shape[1]) if each else torch.zeros(x.shape[1], dtype=torch.long)
    turn = torch.polar(torch.ones((), dtype=torch.float64), angles.double())[
        (starts[:, None] + steps).long()
    ].unsqueeze(2)
    part = x[..., :size].double()
    pairs = part.unflatten(-1, (-1, 2)) if interleaved else part.unflatten(-1, (2, -1)).transpose(-1, -2)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    turned = turned.flatten(-2) if interleaved else turned.transpose(-1, -2).flatten(-2)
    return torch.cat((turned.to(x.dtype), x[..., size:]), -1)


@pytest.mark.parametrize("alibi", [False, True])
def test_packed_rows_over_pages(alibi: bool) -> None:
    held = [torch.randn(3, 8, 2, 16) for _ in range(2)]
    torch.manual_seed(1)
    k_pages, block_table = pages_of(held[0], 4)
    torch.manual_seed(1)
    v_pages, _ = pages_of(held[1], 4)
    q, lengths = torch.randn(10, 4, 16), ([3, 0, 5], [5, 4, 8])
    how: dict[str, Any] = {"causal": True} | ({"alibi_slopes": torch.rand(3, 4)} if alibi else {})
    cu = ends(lengths[0]), ends(lengths[1])
    out, lse, _ = door.flash_attn_varlen_func(
        q, k_pages, v_pages, *cu, 5, 8, **how, block_table=block_table, return_attn_probs=True
    )
    sides = [torch.cat([t[b, :n] for b, n in enumerate(lengths[1])]) for t in held]
    wants = [packed_call(how, lengths)(*(t.to(d) for t in (q[:8], *sides))) for d in (torch.float64, torch.float32)]
    for name, mine, golden, plain in zip(("out", "lse"), (out[:8], lse[:, :8]), *wants, strict=True):
        compare(name, mine, golden, plain, 8)
    assert not out[8:].any()
    assert (lse[:, 8:] == -math.inf).all()


def test_caches_that_are_wrong_are_not_written() -> None:
    q, k = torch.randn(2, 1, 4, 16), torch.randn(2, 1, 2, 16)
    cache, pages = torch.zeros(2, 8, 2, 16), torch.zeros(4, 4, 2, 16)
    good = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    cos = torch.ones(8, 4)

    def call(held: Tensor, *args: Any, **how: Any) -> Any:
        return lambda: door.flash_attn_with_kvcache(q, held, held, *args, **how)

    cases = [
        (
            RuntimeError,
            "block_table: expected pages for 9 tokens, got 2 of 4 tokens",
            call(pages, k, k, cache_seqlens=8, block_table=good),
        ),
        (
            RuntimeError,
            "block_table: expected pages from 0 to 3, got 0 to 4",
            call(pages, k, k, cache_seqlens=5, block_table=good + torch.tensor([[0, 0], [0, 1]])),
        ),
        (
            RuntimeError,
            "block_table: expected pages from 0 to 3, got -1 to 0",
            call(pages, k, k, cache_seqlens=3, block_table=good - torch.tensor([[0, 0], [3, 0]])),
        ),
        (RuntimeError, "k_cache: expected room for 9 tokens, got 8", call(cache, k, k, cache_seqlens=8)),
        (RuntimeError, "expected rows for positions 7 to 7, got 7", call(cache, k, k, cos[:7], cos[:7], 7)),
        (
            ValueError,
            "rotary_cos: expected rotary_sin, k and v beside it",
            call(cache, rotary_cos=cos, rotary_sin=cos, cache_seqlens=3),
        ),
        (
            ValueError,
            "cos, sin: expected at most 8 columns, got 9",
            call(cache, k, k, torch.ones(8, 9), torch.ones(8, 9), 3),
        ),
        (ValueError, "v: expected k and v, or neither", call(cache, k, cache_seqlens=3)),
        (ValueError, "cache_seqlens: expected it beside k", call(cache, k, k)),
        (
            ValueError,
            "cache_seqlens: expected 2 lengths of at least 0, got",
            call(cache, k, k, cache_seqlens=torch.tensor([1])),
        ),
        (ValueError, "cache_seqlens: expected 2 lengths of at least 0, got", call(cache, k, k, cache_seqlens=-1)),
        (ValueError, r"k, v: expected \[2, new, N2, D\]", call(cache, k[:1], k[:1], cache_seqlens=3)),
        (
            ValueError,
            "cache_leftpad: expected it without block_table",
            call(pages, k, k, cache_seqlens=3, cache_leftpad=good[0], block_table=good),
        ),
        (
            ValueError,
            "cache_batch_idx: expected 2 rows from 0 to 1",
            call(cache, k, k, cache_seqlens=3, cache_batch_idx=good[1]),
        ),
        (
            ValueError,
            "cache_batch_idx: expected it without block_table",
            call(pages, k, k, cache_seqlens=3, cache_batch_idx=good[0], block_table=good),
        ),
    ]
    for error, message, run in cases:
        with pytest.raises(error, match=message):
            run()
        assert not cache.any(), message
        assert not pages.any(), message


def test_a_whole_cache_and_a_number() -> None:
    q, cache = torch.randn(2, 1, 4, 16, requires_grad=True), torch.randn(2, 8, 2, 16)
    whole = door.flash_attn_with_kvcache(q, cache, cache)
    same_bits(whole, door.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=8, num_splits=3))
    assert not whole.requires_grad
    with torch.inference_mode():
        same_bits(door.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=8), whole)


# ------------------------------------------------------------------------------------------------------------- padding


def test_padding_there_and_back() -> None:
    x = torch.randn(3, 5, 2, 4, requires_grad=True)
    mask = torch.tensor([[1, 1, 0, 0, 0], [0, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
    unused = torch.tensor([[0, 0, 1, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
    packed, places, cu, longest, used = bert_padding.unpad_input(x, mask, unused)
    same_bits(packed, x[(mask + unused).bool()])
    assert (cu.tolist(), cu.dtype, longest, used.tolist()) == ([0, 3, 7, 7], torch.int32, 4, [2, 4, 0])
    back = bert_padding.pad_input(packed, places, 3, 5)
    same_bits(back, torch.where((mask + unused)[..., None, None].bool(), x, 0.0))
    dx = torch.autograd.grad(back.sum(), x)[0]
    same_bits(dx, (mask + unused)[..., None, None].expand_as(x).float())
    rows = torch.tensor([[2, 3, 0, 0, 0], [4, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
    packed, places, cu, longest = bert_padding.unpad_input_for_concatenated_sequences(x, rows)
    assert (places.tolist(), cu.tolist(), longest) == ([0, 1, 2, 3, 4, 5, 6, 7, 8], [0, 2, 5, 9], 4)
    assert bert_padding.index_first_axis_residual(x.flatten(0, 1), places)[1].shape == (15, 2, 4)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotary(interleaved: bool) -> None:
    x, angles, starts = torch.randn(2, 5, 3, 16, requires_grad=True), torch.rand(9, 6) * 6, torch.tensor([4, 1])
    cos, sin = angles.cos(), angles.sin()
    out = rotary.apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=starts)
    want = by_complex_numbers(x.detach(), angles, starts, interleaved)
    compare("out", out.detach(), want.double(), want + want.abs() * 2.0**-22, 2)
    back = rotary.apply_rotary(out, cos, sin, starts, interleaved=interleaved, conjugate=True)
    compare("and back", back.detach(), x.detach().double(), x.detach() + x.detach().abs() * 2.0**-22, 2)
    assert torch.autograd.grad(out.sum(), x)[0].isfinite().all()
    flat = torch.cat((x.detach()[0], x.detach()[1, :3], x.detach()[1, :1]))
    packed = rotary.apply_rotary_emb(flat, cos, sin, interleaved, True, starts, ends([5, 3]), 5)
    assert packed is flat
    same_bits(packed, torch.cat((out.detach()[0], out.detach()[1, :3], x.detach()[1, :1])))


# --------------------------------------------------------------------------------------------------- compiled, played


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic: bool) -> None:
    q, cu = torch.randn(7, 4, 16, requires_grad=True), ends([3, 4])

    def program(q: Tensor, cu: Tensor) -> Tensor:
        how: dict[str, Any] = {"causal": True, "window_size": (2, 0)}
        padded = door.flash_attn_func(q[None], q[None], q[None], softcap=2.0)
        return door.flash_attn_varlen_func(q, q, q, cu, cu, 4, 4, **how) + padded[0]

    got, want = torch.compile(program, fullgraph=True, backend="aot_eager", dynamic=dynamic)(q, cu), program(q, cu)
    same_bits(got, want)
    same_bits(torch.autograd.grad(got.sum(), q)[0], torch.autograd.grad(want.sum(), q)[0])


def test_the_module_that_is_played() -> None:
    door.install()
    door.install()
    import flash_attn  # type: ignore[import-not-found]
    from flash_attn.bert_padding import pad_input, unpad_input  # type: ignore[import-not-found]  # noqa: F401
    from flash_attn.flash_attn_interface import flash_attn_varlen_func  # type: ignore[import-not-found]
    from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb  # type: ignore[import-not-found]
    from flash_attn.losses.cross_entropy import CrossEntropyLoss  # type: ignore[import-not-found]
    from flash_attn.ops.rms_norm import RMSNorm, rms_norm  # type: ignore[import-not-found]

    assert (
        importlib.metadata.version("flash_attn") == importlib.metadata.version("flash-attn") == flash_attn.__version__
    )
    assert flash_attn.__version__.split(".")[0] == "2"
    assert flash_attn_varlen_func is flash_attn.flash_attn_varlen_func is door.flash_attn_varlen_func
    assert set(flash_attn.__all__) == {n for n in door.__all__ if n.startswith("flash_attn")}
    with pytest.raises(ImportError):
        from flash_attn.ops.triton.layer_norm import layer_norm_fn  # type: ignore[import-not-found]  # noqa: F401
    with pytest.raises(
        AttributeError, match=r"fusion_attention's flash_attn has no flash_attn_3 \(docs/with_flash_attn.md"
    ):
        flash_attn.flash_attn_3  # noqa: B018
    x = torch.randn(2, 5, 3, 2, 16)
    turned = RotaryEmbedding(16)(x)
    angles = torch.outer(torch.arange(5).float(), 10000.0 ** -(torch.arange(0, 16, 2) / 16))
    same_bits(turned[:, :, 0], apply_rotary_emb(x[:, :, 0], angles.cos(), angles.sin()))
    same_bits(turned[:, :, 2], x[:, :, 2])
    same_bits(RMSNorm(16)(x), rms_norm(x, torch.ones(16), 1e-5))
    assert CrossEntropyLoss(inplace_backward=True)(torch.randn(3, 4), torch.tensor([0, 1, -100])).isfinite()


@pytest.mark.parametrize(("version", "count"), [("2.6.3", 4), ("2.7.0.post2", 5), ("2.10.1", 5)])
def test_an_older_release(version: str, count: int) -> None:
    door.install()
    door.install(version)
    from flash_attn.bert_padding import unpad_input

    assert importlib.metadata.version("flash_attn") == sys.modules["flash_attn"].__version__ == version
    assert len(unpad_input(torch.randn(2, 3, 4), torch.ones(2, 3, dtype=torch.bool))) == count


def test_installed_beside_torch_npu_in_any_order() -> None:
    for last in (door.uninstall, npu.uninstall):
        door.install()
        npu.install()
        (npu.uninstall if last is door.uninstall else door.uninstall)()
        assert ("flash_attn" in sys.modules) == (last is door.uninstall)
        last()
        assert not {"flash_attn", "torch_npu"} & set(sys.modules)


def test_another_flash_attn_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
        with pytest.raises(RuntimeError, match=r"expected no other flash_attn, got <module 'flash_attn'"):
            door.install()


def test_signatures_are_flash_attns() -> None:
    """Names and their order, as flash_attn 2.8 has them."""
    tail = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs"
    cu = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
    known = {
        "flash_attn_func": f"q k v {tail}",
        "flash_attn_kvpacked_func": f"q kv {tail}",
        "flash_attn_qkvpacked_func": f"qkv {tail}",
        "flash_attn_varlen_func": f"q k v {cu} {tail} block_table",
        "flash_attn_varlen_kvpacked_func": f"q kv {cu} {tail}",
        "flash_attn_varlen_qkvpacked_func": f"qkv cu_seqlens max_seqlen {tail}",
        "flash_attn_with_kvcache": "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx "
        "cache_leftpad block_table softmax_scale causal window_size softcap rotary_interleaved alibi_slopes num_splits "
        "return_softmax_lse",
    }
    for name, parameters in known.items():
        assert list(inspect.signature(getattr(door, name)).parameters) == parameters.split()
    assert all(name in known for name in vars(functions) if name.startswith("flash_attn_"))


TRANSFORMERS = """
from fusion_attention.integrations import flash_attn
flash_attn.install()
import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

torch.manual_seed(0)
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
ids = torch.randint(0, 64, (2, 24))
mask = torch.ones_like(ids)
mask[1, :9] = 0
for config, kind in (
    (LlamaConfig(**sizes, num_key_value_heads=2), LlamaForCausalLM),
    (MistralConfig(**sizes, num_key_value_heads=2, sliding_window=8), MistralForCausalLM),
    (BertConfig(**sizes), BertModel),
):
    model = kind._from_config(config, attn_implementation="flash_attention_2", dtype=torch.float32).eval()
    found = {}
    for implementation in ("flash_attention_2", "eager"):
        model.set_attn_implementation(implementation)
        out = model(ids, attention_mask=mask)
        out = (out.last_hidden_state if kind is BertModel else out.logits)[mask.bool()]
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        found[implementation] = out, torch.autograd.grad((out * weights).sum(), [*model.parameters()][:3])
    (one, grads), (other, others) = found.values()
    assert (one - other).abs().max() < 1e-5 * other.abs().max(), kind
    assert all((a - b).abs().max() < 1e-4 * b.abs().max() for a, b in zip(grads, others)), kind
    if kind is not BertModel:
        tokens = []
        for implementation in ("flash_attention_2", "eager"):
            model.set_attn_implementation(implementation)
            tokens.append(model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0))
        assert torch.equal(*tokens), kind
flash_attn.uninstall()
from transformers.utils import import_utils
assert import_utils.is_flash_attn_2_available.__name__ == "is_flash_attn_2_available"
"""


def test_transformers_own_flash_attention() -> None:
    """In a process of its own: transformers decides at its import what there is."""
    done = subprocess.run(
        [sys.executable, "-c", TRANSFORMERS], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr

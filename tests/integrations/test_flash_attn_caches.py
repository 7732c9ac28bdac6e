"""flash-attn's calls with KV caches, rotary embedding and padding are compared with float64 formulas."""

import math
from typing import Any

import pytest
import torch
from support.bits import same_bits
from support.flash_attn import WORDS, ends, formula, of_sequence, packed_call

from fusion_attention.integrations import flash_attn as integration
from fusion_attention.integrations.flash_attn import bert_padding, rotary
from fusion_attention.testing.estimated_rounding_errors import compare_with

Tensor = torch.Tensor


def pages_of(cache: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """(pages, table) of a cache [B, S, N, D]; its pages are shuffled among unused NaN pages."""
    batch, count = cache.shape[0], cache.shape[1] // size
    table = torch.randperm(2 * batch * count)[: batch * count].view(batch, count).int()
    pages = torch.full((2 * batch * count, size, *cache.shape[2:]), math.nan, dtype=cache.dtype)
    pages[table.long()] = cache.unflatten(1, (count, size))
    return pages, table


@pytest.mark.sampled(12)
@pytest.mark.parametrize("kind", ["rows", "pages", "cache_batch_idx", "cache_leftpad"])
@pytest.mark.parametrize("name", [name for name in WORDS if name != "deterministic"])
@pytest.mark.parametrize("rows", [1, 3])
def test_flash_attn_with_kvcache_appends_tokens_and_matches_formula(name: str, kind: str, rows: int) -> None:
    how, before, new = WORDS[name], [9, 0, 4], rows
    batch_idx = torch.tensor([4, 0, 2], dtype=torch.int32) if kind == "cache_batch_idx" else None
    pad = torch.tensor([2, 0, 3], dtype=torch.int32) if kind == "cache_leftpad" else None
    q = torch.randn(3, rows, 4, 16)
    fresh = [torch.randn(3, new, 2, 16) for _ in range(2)]
    cache_pair = [torch.randn(5 if batch_idx is not None else 3, 16, 2, 16) for _ in range(2)]
    want = [t.clone() for t in cache_pair]
    for b, length in enumerate(before):
        for cache, tokens in zip(want, fresh, strict=True):
            cache[b if batch_idx is None else batch_idx[b], length : length + new] = tokens[b]
    caches, block_table = cache_pair, None
    if kind == "pages":
        torch.manual_seed(1)
        k_pages, block_table = pages_of(cache_pair[0], 4)
        torch.manual_seed(1)
        caches = [k_pages, pages_of(cache_pair[1], 4)[0]]
    out, lse = integration.flash_attn_with_kvcache(
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

    def golden() -> tuple[Tensor, Tensor]:
        outs, lses = [], []
        for b, length in enumerate(before):
            visible = slice(0 if pad is None else int(pad[b]), length + new)
            row, words = b if batch_idx is None else int(batch_idx[b]), of_sequence(how, b)
            o, x = formula(*(t.double() for t in (q[b], *(t[row, visible] for t in want))), **words)
            outs.append(o)
            lses.append(x)
        return torch.stack(outs), torch.stack(lses)

    compare_with("(out, lse)", (out, lse), golden)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("how", [{}, {"causal": True}, {"window_size": (5, -1)}], ids=str)
def test_flash_attn_with_kvcache_applies_rotary_embedding(how: dict[str, Any], interleaved: bool) -> None:
    q, k, v = (torch.randn(2, 3, n, 16) for n in (4, 2, 2))
    caches = [torch.randn(2, 12, 2, 16) for _ in range(2)]
    angles = torch.rand(12, 4) * 6
    cos, sin, lengths = angles.cos(), angles.sin(), torch.tensor([5, 2], dtype=torch.int32)
    before = [t.clone() for t in caches]
    out = integration.flash_attn_with_kvcache(
        q, *caches, k, v, cos, sin, lengths, rotary_interleaved=interleaved, **how
    )

    def golden() -> tuple[Tensor, Tensor, Tensor]:
        turned_q = by_complex_numbers(q.double(), cos, sin, lengths, interleaved, each=bool(how))
        turned_k = by_complex_numbers(k.double(), cos, sin, lengths, interleaved)
        keys, values = (t.double() for t in before)
        results = []
        for b, n in enumerate(lengths.tolist()):
            keys[b, n : n + 3], values[b, n : n + 3] = turned_k[b], v[b].double()
            results.append(formula(turned_q[b], keys[b, : n + 3], values[b, : n + 3], **how)[0])
        return torch.stack(results), keys, values

    compare_with("(out, keys, values)", (out, *caches), golden)


def by_complex_numbers(
    x: Tensor, cos: Tensor, sin: Tensor, starts: Tensor, interleaved: bool, *, each: bool = True
) -> Tensor:
    """Rotary embedding in float64 with pairs of elements as complex numbers; each: rows have increasing positions."""
    size = 2 * cos.shape[1]
    steps = torch.arange(x.shape[1]) if each else torch.zeros(x.shape[1], dtype=torch.long)
    turn = torch.complex(cos.double(), sin.double())[(starts[:, None] + steps).long()].unsqueeze(2)
    rotated = x[..., :size]
    pairs = rotated.unflatten(-1, (-1, 2)) if interleaved else rotated.unflatten(-1, (2, -1)).transpose(-1, -2)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    turned = turned.flatten(-2) if interleaved else turned.transpose(-1, -2).flatten(-2)
    return torch.cat((turned, x[..., size:]), -1)


@pytest.mark.parametrize("alibi", [False, True])
def test_varlen_func_with_block_table_matches_formula(alibi: bool) -> None:
    caches = [torch.randn(3, 8, 2, 16) for _ in range(2)]
    torch.manual_seed(1)
    k_pages, block_table = pages_of(caches[0], 4)
    torch.manual_seed(1)
    v_pages, _ = pages_of(caches[1], 4)
    q, lengths = torch.randn(10, 4, 16), ([3, 0, 5], [5, 4, 8])
    how: dict[str, Any] = {"causal": True} | ({"alibi_slopes": torch.rand(3, 4)} if alibi else {})
    cu = ends(lengths[0]), ends(lengths[1])
    out, lse, _ = integration.flash_attn_varlen_func(
        q, k_pages, v_pages, *cu, 5, 8, **how, block_table=block_table, return_attn_probs=True
    )
    sides = [torch.cat([t[b, :n] for b, n in enumerate(lengths[1])]) for t in caches]
    call = packed_call(how, lengths)
    compare_with("(out, lse)", (out[:8], lse[:, :8]), lambda: call(*(t.double() for t in (q[:8], *sides))))
    assert not out[8:].any()
    assert (lse[:, 8:] == -math.inf).all()


def wrong_calls() -> dict[str, tuple[type[Exception], str, bool, dict[str, Any]]]:
    """Fault -> (error, text, cache is paged, arguments of the call)."""
    new = dict.fromkeys(("k", "v"), torch.randn(2, 1, 2, 16))
    good = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    rows, table = torch.tensor([0, 1], dtype=torch.int32), {"block_table": good}

    def turned(positions: int, columns: int) -> dict[str, Tensor]:
        return dict.fromkeys(("rotary_cos", "rotary_sin"), torch.ones(positions, columns))

    above, below = good + torch.tensor([[0, 0], [0, 1]]), good - torch.tensor([[0, 0], [3, 0]])
    lengths = "cache_seqlens: expected 2 lengths of at least 0, got"
    pages = "block_table: expected pages"
    short = dict.fromkeys(("k", "v"), new["k"][:1])
    run, bad = RuntimeError, ValueError
    return {
        "few pages": (run, f"{pages} for 9 tokens, got 2 of 4 tokens", True, {**new, **table, "cache_seqlens": 8}),
        "no page": (run, f"{pages} from 0 to 3, got 0 to 4", True, {**new, "block_table": above, "cache_seqlens": 5}),
        "below 0": (run, f"{pages} from 0 to 3, got -1 to 0", True, {**new, "block_table": below, "cache_seqlens": 3}),
        "short cache": (run, "k_cache: expected space for 9 tokens, got 8", False, {**new, "cache_seqlens": 8}),
        "angles": (run, "positions 7 to 7, got 7", False, {**new, **turned(7, 4), "cache_seqlens": 7}),
        "wide angles": (bad, "at most 8 columns, got 9", False, {**new, **turned(8, 9), "cache_seqlens": 3}),
        "angles alone": (bad, "rotary_cos: expected rotary_sin, k and v", False, {**turned(8, 4), "cache_seqlens": 3}),
        "k alone": (bad, "v: expected k and v, or neither", False, {"k": new["k"], "cache_seqlens": 3}),
        "no lengths": (bad, "cache_seqlens: expected the position", False, new),
        "one length": (bad, lengths, False, {"cache_seqlens": torch.tensor([1])}),
        "length below 0": (bad, lengths, False, {"cache_seqlens": -1}),
        "few new": (bad, r"k, v: expected \[2, new, N2, D\]", False, {**short, "cache_seqlens": 3}),
        "left": (
            bad,
            "cache_leftpad: expected it without",
            True,
            {**new, **table, "cache_leftpad": rows, "cache_seqlens": 3},
        ),
        "rows": (bad, "expected 2 rows from 0 to 1", False, {**new, "cache_batch_idx": rows + 1, "cache_seqlens": 3}),
        "both": (
            bad,
            "cache_batch_idx: expected it without",
            True,
            {**table, "cache_batch_idx": rows, "cache_seqlens": 3},
        ),
    }


@pytest.mark.parametrize("name", wrong_calls())
def test_invalid_kvcache_calls_raise_and_leave_the_cache_unwritten(name: str) -> None:
    error, message, over_pages, how = wrong_calls()[name]
    cache = torch.zeros(4, 4, 2, 16) if over_pages else torch.zeros(2, 8, 2, 16)
    with pytest.raises(error, match=message):
        integration.flash_attn_with_kvcache(torch.randn(2, 1, 4, 16), cache, cache, **how)
    assert not cache.any()


def test_kvcache_without_cache_seqlens_reads_the_full_cache() -> None:
    q, cache = torch.randn(2, 1, 4, 16, requires_grad=True), torch.randn(2, 8, 2, 16)
    full = integration.flash_attn_with_kvcache(q, cache, cache)
    same_bits(full, integration.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=8, num_splits=3))
    assert not full.requires_grad
    with torch.inference_mode():
        same_bits(integration.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=8), full)


def test_unpad_input_and_pad_input_round_trip() -> None:
    x = torch.randn(3, 5, 2, 4, requires_grad=True)
    mask = torch.tensor([[1, 1, 0, 0, 0], [0, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
    unused = torch.tensor([[0, 0, 1, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
    packed, indices, cu, longest, used = bert_padding.unpad_input(x, mask, unused)
    same_bits(packed, x[(mask + unused).bool()])
    assert (cu.tolist(), cu.dtype, longest, used.tolist()) == ([0, 3, 7, 7], torch.int32, 4, [2, 4, 0])
    back = bert_padding.pad_input(packed, indices, 3, 5)
    same_bits(back, torch.where((mask + unused)[..., None, None].bool(), x, 0.0))
    dx = torch.autograd.grad(back.sum(), x)[0]
    same_bits(dx, (mask + unused)[..., None, None].expand_as(x).float())
    rows = torch.tensor([[2, 3, 0, 0, 0], [4, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
    packed, indices, cu, longest = bert_padding.unpad_input_for_concatenated_sequences(x, rows)
    assert (indices.tolist(), cu.tolist(), longest) == ([0, 1, 2, 3, 4, 5, 6, 7, 8], [0, 2, 5, 9], 4)
    assert bert_padding.index_first_axis_residual(x.flatten(0, 1), indices)[1].shape == (15, 2, 4)


@pytest.mark.parametrize("interleaved", [True, False])
def test_apply_rotary_emb_matches_complex_rotation(interleaved: bool) -> None:
    x, angles, starts = torch.randn(2, 5, 3, 16, requires_grad=True), torch.rand(9, 6) * 6, torch.tensor([4, 1])
    cos, sin = angles.cos(), angles.sin()
    out = rotary.apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=starts)
    back = rotary.apply_rotary(out, cos, sin, starts, interleaved=interleaved, conjugate=True)

    def golden() -> tuple[Tensor, Tensor]:
        turned = by_complex_numbers(x.detach().double(), cos, sin, starts, interleaved)
        return turned, by_complex_numbers(turned, cos, -sin, starts, interleaved)

    compare_with("(out, back)", (out, back), golden)
    assert torch.autograd.grad(out.sum(), x)[0].isfinite().all()
    flat = torch.cat((x.detach()[0], x.detach()[1, :3], x.detach()[1, :1]))
    packed = rotary.apply_rotary_emb(flat, cos, sin, interleaved, True, starts, ends([5, 3]), 5)
    assert packed is flat
    same_bits(packed, torch.cat((out.detach()[0], out.detach()[1, :3], x.detach()[1, :1])))

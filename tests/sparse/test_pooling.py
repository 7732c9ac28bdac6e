"""Compressed keys: fa.compress and CANN's compressor against loops, in one and in several calls."""

from typing import Any

import pytest
import torch
from support.bits import same_bits
from support.compressed import pooled_by_loops

import fusion_attention as fa
from fusion_attention import ContractError
from fusion_attention.npu.auxiliary.compressor import compressor
from fusion_attention.testing.estimated_rounding_errors import compare_with

Tensor = torch.Tensor
RATIO, DIM = 4, 6


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("overlap", [False, True])
def test_compress_in_several_calls_is_bitwise_equal_to_one_call(overlap: bool) -> None:
    kv, gate, bias = drawn(2, 23, 1, 8), drawn(2, 23, 1, 8, seed=1), drawn(RATIO, 8, seed=2)
    options: dict[str, Any] = {"ratio": RATIO, "position_bias": bias, "overlap": overlap}
    want, state, parts, at = fa.compress(kv, gate, **options), fa.CompressionState(), [], 0
    for n in (1, 5, 3, 1, 0, 8, 2, 3):
        parts.append(fa.compress(kv[:, at : at + n], gate[:, at : at + n], **options, state=state))
        at += n
        assert (state.tokens, state.residual) == (at, at % RATIO)
    same_bits(torch.cat(parts, 1), want, "rows")


@pytest.mark.parametrize(("ratio", "dim", "overlap"), [(24, 488, False), (12, 256, True), (4, 256, True)])
def test_compress_gradients_of_large_call_are_bitwise_equal_to_small_calls(ratio: int, dim: int, overlap: bool) -> None:
    """Gradients of more than 8 MB are written past the caches. Windows without overlap are independent."""
    channels, tokens = dim * (1 + overlap), 4416
    kv, gate = (drawn(1, tokens, 1, channels, seed=n, dtype=torch.bfloat16) for n in range(2))
    dout = drawn(1, tokens // ratio, 1, dim, seed=2, dtype=torch.bfloat16)

    def gradients(first: int, count: int) -> tuple[Tensor, ...]:
        window_tokens = slice(first * ratio, (first + count) * ratio)
        leaves = [t[:, window_tokens].clone().requires_grad_() for t in (kv, gate)]
        out = fa.compress(leaves[0], leaves[1], ratio=ratio, overlap=overlap)
        return torch.autograd.grad(out, leaves, dout[:, first : first + count])

    large = gradients(0, tokens // ratio)
    assert sum(t.nbytes for t in large) > 8 << 20
    for first in (0, 7, tokens // ratio - 12):
        # With overlap a window's rows also count in the next window, and a call's first window pools only its rows.
        inside = slice(ratio * overlap * (first > 0), -ratio if overlap else None)
        for one, small in zip(large, gradients(first, 12), strict=True):
            begin = slice(first * ratio, (first + 12) * ratio)
            same_bits(one[:, begin][:, inside], small[:, inside])


def test_compress_is_bitwise_equal_packed_and_padded_and_ignores_padding() -> None:
    lengths = [9, 0, 3, 8]
    kv, gate, bias = drawn(4, 9, 1, 8), drawn(4, 9, 1, 8, seed=1), drawn(RATIO, 8, seed=2)
    options: dict[str, Any] = {"ratio": RATIO, "position_bias": bias, "overlap": True, "kv_len": lengths}
    for b, n in enumerate(lengths):
        kv[b, n:], gate[b, n:] = float("nan"), float("inf")
    leaves = kv.requires_grad_(), gate.requires_grad_()
    padded = fa.compress(*leaves, **options)
    packed = fa.compress(
        *(torch.cat([t[b, :n] for b, n in enumerate(lengths)]) for t in leaves), **options, layout="TND"
    )
    same_bits(torch.cat([padded[b, : n // RATIO] for b, n in enumerate(lengths)]), packed, "rows")
    for b, n in enumerate(lengths):
        assert not padded[b, n // RATIO :].any()
    for gradient in torch.autograd.grad(padded.sum(), leaves):
        assert gradient.isfinite().all()
        assert gradient.any()


PACKED: dict[str, Any] = {"layout": "TND", "kv": torch.zeros(8, 1, 6), "gate": torch.zeros(8, 1, 6), "ratio": 1}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"layout": "SBH"}, "compress: layout: expected one of BSND, TND, got 'SBH'"),
        ({"kv_len": 8}, "compress: kv_len: expected integers (list, tuple or tensor), got 8"),
        ({"kv": torch.zeros(2, 3)}, "compress: kv: expected 4 dimensions [B, S, N2, C]"),
        ({"gate": torch.zeros(1, 8, 1, 5)}, "compress: gate: expected axis 3 to be C=6 as in kv, got 5"),
        ({"ratio": 0}, "compress: ratio: expected ratio > 0, got 0"),
        (dict.fromkeys(("kv", "gate"), torch.zeros(1, 8, 1, 5)) | {"overlap": True}, "an even number of channels"),
        ({"position_bias": torch.zeros(3, 6)}, "position_bias: expected axis 0 to be R=4 as in ratio, got 3"),
        ({"kv_len": [9]}, "kv_len: expected the lengths of the sequences in kv, got length 9 of sequence 0"),
        ({"layout": "TND"}, "compress: kv_len: expected the lengths of packed sequences, got None"),
        ({"kv_len": [1, 2]}, "compress: kv_len:"),
        (
            {"kv_len": [4], "state": fa.CompressionState()},
            "compress: state: expected None for packed rows or with kv_len",
        ),
        ({"state": 1}, "compress: state: expected a CompressionState, got 1"),
        ({**PACKED, "kv_len": [1 << 62] * 4 + [8]}, "kv_len: expected the lengths of all sequences in kv"),
        ({**PACKED, "kv_len": [(1 << 63) - 1] * 9}, "kv_len: expected the lengths of all sequences in kv"),
        ({**PACKED, "kv_len": [float("inf")]}, "compress: kv_len: expected integers"),
        ({**PACKED, "kv_len": torch.zeros(1, device="meta").long()}, "compress: kv_len: expected integers"),
    ],
)  # fmt: skip
def test_compress_refuses_invalid_arguments(changed: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"kv": torch.zeros(1, 8, 1, 6), "gate": torch.zeros(1, 8, 1, 6), "ratio": RATIO}
    with pytest.raises(ContractError) as error:
        fa.compress(**{**given, **changed})
    assert words in str(error.value)


def test_compress_with_ratio_above_sequence_length_returns_empty_result() -> None:
    rows = drawn(2, 8, 1, 6).requires_grad_()
    out = fa.compress(rows, rows, ratio=1 << 62)
    assert out.shape == (2, 0, 1, 6)
    assert not torch.autograd.grad(out.sum(), rows)[0].any()


def test_compress_refuses_state_of_other_batch_or_window() -> None:
    state = fa.CompressionState()
    fa.compress(drawn(1, 3, 1, 6), drawn(1, 3, 1, 6), ratio=RATIO, state=state)
    with pytest.raises(ContractError, match="start a new CompressionState"):
        fa.compress(drawn(2, 3, 1, 6), drawn(2, 3, 1, 6), ratio=RATIO, state=state)
    for changed in ({"ratio": RATIO + 1}, {"overlap": True}):
        with pytest.raises(ContractError, match=r"state: expected a state of windows .*, got \(4, False\)"):
            fa.compress(drawn(1, 3, 1, 6), drawn(1, 3, 1, 6), **{"ratio": RATIO, "state": state, **changed})


# ------------------------------------------------------------------------------------------ CANN's compressor

H = 10


def weights(coff: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    channels = coff * DIM
    return {
        "wkv": drawn(channels, H, seed=1, dtype=dtype), "wgate": drawn(channels, H, seed=2, dtype=dtype),
        "ape": drawn(RATIO, channels, seed=3),
    }  # fmt: skip


def state_of(coff: int, mode: int, sequences: int) -> dict[str, Tensor]:
    """Returns a state cache of NaN and a block table in mixed order."""
    cache = torch.full((3 * sequences + 1, 16 if mode == 1 else 40, 2 * coff * DIM), float("nan"))
    order = torch.randperm(3 * sequences, generator=torch.Generator().manual_seed(4)).int() + 1
    table = order[: 2 * sequences].view(sequences, 2) if mode == 1 else order[:sequences]
    return {"state_cache": cache, "state_block_table": table}


@pytest.mark.parametrize(
    ("coff", "mode"), [(2, 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 1), (1, 2), (2, 1)))]
)
def test_compressor_in_several_calls_continues_from_saved_state(coff: int, mode: int) -> None:
    """Sequences have different positions; the first rows of windows come from the saved state."""
    x, w, given = drawn(2, 23, H, dtype=torch.float64).float(), weights(coff), state_of(coff, mode, 2)
    parts: list[list[Tensor]] = [[], []]
    at = [0, 0]
    for counts in ((1, 6), (5, 1), (3, 9), (9, 0), (5, 7)):
        rows = torch.zeros(2, max(counts), H)
        for b, n in enumerate(counts):
            rows[b, :n] = x[b, at[b] : at[b] + n]
        out = compressor(
            rows, **w, **given, cmp_ratio=RATIO, coff=coff, cache_mode=mode, start_pos=torch.tensor(at),
            seqused=torch.tensor(counts),
        )  # fmt: skip
        for b, n in enumerate(counts):
            closed = (at[b] + n) // RATIO - at[b] // RATIO
            parts[b].append(out[b, :closed])
            assert not out[b, closed:].any()
            at[b] += n
    assert at == [23, 23]
    got = tuple(torch.cat(rows) for rows in parts)

    def program() -> tuple[Tensor, ...]:
        float64_weights = [t.double() for t in w.values()]
        return tuple(
            pooled_by_loops(
                one @ float64_weights[0].T, one @ float64_weights[1].T, float64_weights[2], RATIO, coff == 2
            )
            for one in x.double()
        )

    compare_with(f"coff {coff}", got, program)


def test_compressor_of_packed_rows_is_bitwise_equal_to_single_sequences() -> None:
    lengths = [9, 0, 7]
    x, w = drawn(16, H).round(), {name: t.round() for name, t in weights(2).items()}  # products of any shape are exact
    table = torch.zeros(3, 2, dtype=torch.int32)  # block 0: nothing is kept
    cache = torch.full((2, 16, 4 * DIM), float("nan"))
    ends = torch.tensor([0, 9, 9, 16])
    given: dict[str, Any] = {"state_cache": cache, "state_block_table": table, "cmp_ratio": RATIO, "coff": 2}
    out = compressor(x, **w, **given, cu_seqlens=ends)
    assert cache.isnan().all()
    alone = {**given, "state_block_table": None}
    first = [0, 9, 9]
    rows = [
        compressor(x[at : at + n][None], **w, **alone)[0, : n // RATIO] for at, n in zip(first, lengths, strict=True)
    ]
    same_bits(out[:3], torch.cat(rows), "rows")
    assert out.shape == (7, DIM)
    assert not out[3:].any()
    used = compressor(x, **w, **given, cu_seqlens=ends, seqused=torch.tensor([4, 0, 7]))
    same_bits(used[:1], out[:1], "rows that count")
    same_bits(used[1:2], out[2:3], "rows that count")


def test_compressor_refuses_missing_state_cache_blocks() -> None:
    w, table = weights(1), torch.tensor([[1, 9]], dtype=torch.int32)
    cache = torch.zeros(4, 16, 2 * DIM)
    with pytest.raises(ContractError, match="state_block_table: expected numbers of blocks of state_cache"):
        compressor(drawn(1, 9, H), **w, state_cache=cache, cmp_ratio=RATIO, state_block_table=table)
    with pytest.raises(ContractError, match="a block for every row that is stored or read"):
        compressor(drawn(1, 9, H), **w, state_cache=cache, cmp_ratio=RATIO, start_pos=[30], state_block_table=table)

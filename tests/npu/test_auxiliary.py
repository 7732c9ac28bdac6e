"""Auxiliary operators are compared with float64 formulas and with autograd."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fusion_attention import ContractError, npu
from fusion_attention.testing.estimated_rounding_errors import compare_with

GENERATOR = torch.Generator().manual_seed(28)
X, DY = torch.randn(2, 3, 6, 8, generator=GENERATOR)
GAMMA = torch.randn(8, generator=GENERATOR)


ANGLES = torch.rand(6, 4, generator=GENERATOR).repeat_interleave(2, -1)
COS, SIN = ANGLES.cos(), ANGLES.sin()


@pytest.mark.parametrize("mode", ["PA_BNSD", "PA_NZ", "PA_BLK_BNSD", "PA_BLK_NZ"])
def test_kv_rmsnorm_rope_cache_writes_rows_to_indexed_slots(mode: str) -> None:
    kv, gamma, angles = torch.randn(2, 1, 5, 48), torch.randn(32), torch.rand(2, 1, 5, 16)
    k, ckv = torch.zeros(6, 4, 1, 16), torch.zeros(6, 4, 1, 32)
    index = torch.tensor([4, 20, 8, 0] if "BLK" in mode else [4, 5, 6, -1, 20, 8, 9, 10, 11, 0])
    args = (kv, gamma, angles.cos(), angles.sin(), index, k, ckv)
    same_k, same_ckv, k_embed, y = npu.npu_kv_rmsnorm_rope_cache(*args, cache_mode=mode, is_output_kv=True)
    assert same_k is k and same_ckv is ckv  # noqa: PT018
    for cache, rows in ((k, k_embed), (ckv, y)):
        for item in range(2):
            for token in range(5):
                first = int(index[item * 2 + token // 4] if "BLK" in mode else index[item * 5 + token])
                if first < 0:
                    continue
                page, slot = first // 4, token % 4 if "BLK" in mode else first % 4
                lines = cache.view(6, -1, 4, 16)[page, :, slot].flatten() if "NZ" in mode else cache[page, slot, 0]
                assert torch.equal(lines, rows[item, 0, token])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("mode", ["Norm", "PA", "PA_NZ"])
def test_kv_rmsnorm_rope_cache_stores_separate_values_unchanged(mode: str, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(4)
    kv, gamma, v = (torch.randn(n, generator=draw).bfloat16() for n in ((2, 1, 3, 192), (192,), (2, 1, 3, 128)))
    angles = torch.rand(2, 1, 3, 64, generator=draw)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    shape, index = ((2, 1, 5), torch.tensor([[0, 3, -1], [4, 1, 2]])) if mode == "Norm" else (
        (4, 4, 1), torch.tensor([4, 5, -1, 13, 0, 9])
    )  # fmt: skip
    k_cache, ckv_cache = torch.zeros(*shape, 192, dtype=dtype), torch.zeros(*shape, 128, dtype=dtype)
    scales: dict[str, torch.Tensor] = {}
    if dtype == torch.int8:
        scales = {"k_rope_scale": torch.rand(192) * 40, "c_kv_scale": torch.rand(128) * 40}
    *_, keys, values = npu.npu_kv_rmsnorm_rope_cache(
        kv, gamma, cos, sin, index, k_cache, ckv_cache, v=v, cache_mode=mode, is_output_kv=True, **scales
    )

    def wanted() -> torch.Tensor:
        x = kv.double()
        y = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gamma.double()
        rope = torch.cat((y[..., :64:2], y[..., 1:64:2]), -1)
        turned = torch.cat((-rope[..., 32:], rope[..., :32]), -1)
        return torch.cat((rope * cos.double() + turned * sin.double(), y[..., 64:]), -1)

    compare_with("keys", keys, wanted, dtype=torch.float32)
    assert torch.equal(values, v)
    for cache, rows, scale in ((k_cache, keys, "k_rope_scale"), (ckv_cache, v, "c_kv_scale")):
        for (item, token), place in zip([(i, j) for i in range(2) for j in range(3)], index.flatten(), strict=True):
            if place < 0:
                continue
            page, slot = (item, int(place)) if mode == "Norm" else divmod(int(place), 4)
            width = 32 if dtype == torch.int8 else 16
            line = cache[page, 0, slot] if mode == "Norm" else cache[page, slot, 0]
            line = cache.view(4, -1, 4, width)[page, :, slot].flatten() if mode == "PA_NZ" else line
            row = rows[item, 0, token]
            if dtype != torch.int8:
                assert torch.equal(line, row)
            else:  # a row was rounded to bfloat16 before it came here
                most = 2**-8 * (row.float() * scales[scale]).abs() + 0.51
                assert ((line - (row.float() * scales[scale]).clamp(-128, 127)).abs() <= most).all()


def test_scatter_pa_kv_cache_with_invalid_slots_leaves_cache_unwritten() -> None:
    cache, rows = torch.zeros(3, 4, 2, 8), torch.ones(2, 2, 8)
    with pytest.raises(ValueError, match="numbers of slots of the cache"):
        npu.npu_scatter_pa_kv_cache(rows, rows, cache, cache.clone(), torch.tensor([0, 12]))
    assert not cache.any()


def test_scatter_with_duplicate_slots_keeps_the_last_row() -> None:
    """4096 rows are shared among threads, so a race would keep another row."""
    slots = torch.arange(4096) % 7
    rows = torch.arange(4096.0).view(-1, 1, 1).expand(-1, 8, 64).contiguous()
    cache, other, flat = torch.zeros(4, 16, 8, 64), torch.zeros(4, 16, 8, 64), torch.zeros(64, 512)
    npu.npu_scatter_pa_kv_cache(rows, rows, cache, other, slots)
    npu.npu_scatter_nd_update_(flat, slots[:, None], rows.flatten(1))
    last = [int((slots == slot).nonzero().max()) for slot in range(7)]
    for result in (cache.view(64, 512), other.view(64, 512), flat):
        assert torch.equal(result[:7], torch.tensor(last, dtype=torch.float32).view(-1, 1).expand(-1, 512))
        assert not result[7:].any()


@pytest.mark.parametrize("view", [lambda t: t, lambda t: t[1:], lambda t: t[:]], ids=["leaf", "rows", "view"])
def test_scatter_into_leaf_raises_after_a_legal_call_of_same_signature(
    view: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Calls of one signature are checked once, but every call must check whether the tensor is a leaf."""
    slots, rows = torch.tensor([[4], [0], [2]]), torch.ones(3, 8)
    size = 6 if view(torch.zeros(6, 8)).shape[0] == 5 else 5
    leaf = torch.zeros(size, 8, requires_grad=True)
    npu.npu_scatter_nd_update_(view(leaf) * 1, slots, rows)
    with pytest.raises(ContractError, match="npu_scatter_nd_update_: input: expected no leaf"):
        npu.npu_scatter_nd_update_(view(leaf), slots, rows)
    assert not leaf.any()


def test_scatter_nd_update_gradient_reaches_only_the_last_duplicate_row() -> None:
    updates = torch.ones(3, 2, requires_grad=True)
    npu.npu_scatter_nd_update(torch.zeros(4, 2), torch.tensor([[1], [3], [1]]), updates).sum().backward()
    assert updates.grad is not None
    assert updates.grad.tolist() == [[0, 0], [1, 1], [1, 1]]


@pytest.mark.parametrize("slots", [[-1, 3, -5, 2], [-1, -1, -2, -3]])
def test_scatter_pa_kv_cache_skips_rows_with_negative_slots(slots: list[int]) -> None:
    cache, rows = torch.full((2, 4, 1, 8), 7.0), torch.randn(4, 1, 8)
    want = cache.clone().view(8, 8)
    for slot, row in zip(slots, rows, strict=True):
        if slot >= 0:
            want[slot] = row[0]
    npu.npu_scatter_pa_kv_cache(rows, rows, cache, cache.clone(), torch.tensor(slots), cache_mode="Norm")
    assert torch.equal(cache.view(8, 8), want)


def test_scatter_pa_kv_cache_reads_overlapping_rows_before_writing() -> None:
    cache, values = torch.randn(2, 4, 1, 8), torch.zeros(2, 4, 1, 8)
    before = cache.clone().view(8, 8)
    npu.npu_scatter_pa_kv_cache(
        cache.view(8, 1, 8)[:3], cache.view(8, 1, 8)[1:4], cache, values, torch.tensor([1, 2, 3])
    )
    assert torch.equal(cache.view(8, 8)[1:4], before[:3])
    assert torch.equal(values.view(8, 8)[1:4], before[1:4])


def test_cache_mode_decides_the_layout_of_an_ambiguous_cache_shape() -> None:
    rows = torch.randn(1, 4, 16, dtype=torch.float16)  # as many heads as slots, as wide as the chip's pieces
    caches = [torch.zeros(2, 4, 4, 16, dtype=torch.float16) for _ in range(4)]
    npu.npu_scatter_pa_kv_cache(rows, rows, caches[0], caches[1], torch.tensor([1]), cache_mode="Norm")
    npu.npu_scatter_pa_kv_cache(rows, rows, caches[2], caches[3], torch.tensor([1]))
    assert torch.equal(caches[0][0, 1], rows[0])
    assert torch.equal(caches[2][0, :, 1], rows[0])


def test_rotary_mul_with_rotate_matrix_matches_interleave_mode() -> None:
    matrix = torch.zeros(8, 8)
    for i in range(0, 8, 2):
        matrix[i + 1, i], matrix[i, i + 1] = -1, 1
    want = npu.npu_rotary_mul(X, COS, SIN, "interleave")
    assert torch.equal(npu.npu_rotary_mul(X, COS, SIN, "interleave", rotate=matrix), want)
    assert torch.equal(npu.npu_rotary_mul(X, COS, SIN, rotate=matrix.bfloat16()), want)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kinds", [3, 4])
def test_mrope_with_sections_matches_naive_loops(kinds: int) -> None:
    sections = [3, 1, 4, 0][:kinds] if kinds == 3 else [3, 1, 2, 2]
    positions, table = torch.randint(0, 9, (kinds, 5)), torch.rand(9, 16)
    rows = torch.randn(5, 2 * 24)

    def turns(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return npu.npu_mrope(positions, q, k, table, 24, mrope_section=sections)

    def golden() -> torch.Tensor:
        heads = rows.double().view(5, 2, 24).clone()
        for token in range(5):
            for angle in range(8):
                kind = [k for k, count in enumerate(sections) for _ in range(count)][angle]
                line = table[positions[kind, token]].double()
                first, second = rows.double().view(5, 2, 24)[token][:, [angle, angle + 8]].T
                heads[token, :, angle] = first * line[angle] - second * line[angle + 8]
                heads[token, :, angle + 8] = second * line[angle] + first * line[angle + 8]
        return heads.view(5, 48)

    compare_with("q", turns(rows, rows[:, :24])[0], golden)
    compiled = torch.compile(turns, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(rows, rows[:, :24])[0], turns(rows, rows[:, :24])[0])
    if kinds == 4:
        with pytest.raises(ValueError, match="'default' beside four kinds"):
            npu.npu_mrope(positions, rows, rows[:, :24], table, 24, mrope_section=sections, cache_mode="interleave")


@pytest.mark.parametrize("first", [True, False])
def test_confusion_transpose_backward_inverts_forward(first: bool) -> None:
    x = torch.randn(2, 3, 4, 5)
    perm, shape = ((1, 2, 3, 0), (12, 10)) if first else ((2, 0, 1), (4, 6, 5))
    result = npu.npu_confusion_transpose(x, perm, shape, first)
    want = x.permute(perm).reshape(shape) if first else x.reshape(shape).permute(perm)
    assert torch.equal(result, want)
    assert torch.equal(npu.npu_confusion_transpose_backward(result, perm, x.shape, not first), x)


def rms(x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gamma


def turned(x: torch.Tensor) -> torch.Tensor:
    (a, b), (cos, sin) = (x[..., ::2], x[..., 1::2]), (t[..., ::2].to(x.dtype) for t in (COS, SIN))
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


def smooth(x: torch.Tensor) -> torch.Tensor:
    return x * (1.702 * x).sigmoid()


def by_tanh(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)).tanh())


T, H, K = 16, 32, 4  # tokens, elements, experts of a token
TOKENS, EXPERTS = torch.randn(T, H, generator=GENERATOR), torch.randint(8, (T, K), generator=GENERATOR)
ORDER = EXPERTS.flatten().argsort(stable=True)
POSITIONS = ORDER.argsort().int()
ROWS, PROBS = torch.randn(T * K, H, generator=GENERATOR), torch.rand(T, K, generator=GENERATOR)
WIDE_GAMMA, LABELS = torch.randn(H, generator=GENERATOR), torch.arange(T)
HIDDEN = torch.rand(T, H, generator=GENERATOR) < 0.5
HIDDEN[:, 0] = False


def softmax(x: torch.Tensor) -> torch.Tensor:
    return (0.5 * x).masked_fill(HIDDEN, -torch.inf).softmax(-1)


# (function, formula, differentiable inputs, bytes that the chip saves for the backward pass besides them, or None,
# function of (dy, *inputs) that calls torch_npu's backward function, or None).
FORMULAS: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[torch.Tensor, ...], int | None, Any]] = {
    "rms_norm": (
        lambda x, g: npu.npu_rms_norm(x, g)[0], rms, (TOKENS, WIDE_GAMMA), T * 4,
        lambda dy, x, g: npu.npu_rms_norm_backward(dy, x, g, npu.npu_rms_norm(x, g)[1]),
    ),
    "add_rms_norm": (
        lambda x, y, g: npu.npu_add_rms_norm(x, y, g)[0], lambda x, y, g: rms(x + y, g), (X, DY, GAMMA), None, None
    ),
    "gemma_rms_norm": (
        lambda x, g: npu.npu_gemma_rms_norm(x, g)[0], lambda x, g: rms(x, 1 + g), (TOKENS, WIDE_GAMMA), T * 4, None
    ),
    "rotary": (
        lambda x: npu.npu_rotary_mul(x, COS, SIN, "interleave"), turned, (X,), None,
        lambda dy, x: npu.npu_rotary_mul_backward(dy, x, COS, SIN, "interleave")[:1],
    ),
    "swiglu": (
        npu.npu_swiglu, lambda x: torch.nn.functional.silu(x[:, : H // 2]) * x[:, H // 2 :], (TOKENS,), 0,
        lambda dy, x: [npu.npu_swiglu_backward(dy, x)],
    ),
    "geglu": (
        lambda x: npu.npu_geglu(x)[0], lambda x: x[:, : H // 2] * by_tanh(x[:, H // 2 :]), (TOKENS,), T * H,
        lambda dy, x: [npu.npu_geglu_grad(dy, x, npu.npu_geglu(x)[1])],
    ),
    "gelu": (
        npu.npu_gelu, torch.nn.functional.gelu, (TOKENS,), 0, lambda dy, x: [npu.npu_gelu_backward(dy, x)]
    ),
    "fast_gelu": (npu.npu_fast_gelu, smooth, (TOKENS,), 0, lambda dy, x: [npu.npu_fast_gelu_backward(dy, x)]),
    "cross_entropy": (
        lambda x: npu.npu_cross_entropy_loss(x, LABELS)[0],
        lambda x: torch.nn.functional.cross_entropy(x, LABELS).reshape(1), (TOKENS,), T * 8, None,
    ),
    "softmax": (
        lambda x: npu.npu_scaled_masked_softmax(x, HIDDEN, 0.5), softmax, (TOKENS,), HIDDEN.numel(),
        lambda dy, x: [npu.npu_scaled_masked_softmax_backward(dy, softmax(x), HIDDEN, 0.5, False)],
    ),
    "permute": (
        lambda x: npu.npu_moe_token_permute(x, EXPERTS)[0], lambda x: x[ORDER // K], (TOKENS,), T * K * 4 - T * H * 2,
        None,
    ),
    "unpermute": (
        lambda x, p: npu.npu_moe_token_unpermute(x, POSITIONS, p),
        lambda x, p: (x[POSITIONS.long()].view(T, K, H) * p.unsqueeze(2)).sum(1), (ROWS, PROBS), T * K * 4, None,
    ),
    "unpermute_one": (
        lambda x: npu.npu_moe_token_unpermute(x, POSITIONS), lambda x: x[POSITIONS.long()], (ROWS,),
        T * K * 4 - T * K * H * 2, None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name, (*_, beside, _) in FORMULAS.items() if beside is not None])
def test_bytes_saved_for_backward_do_not_exceed_those_of_the_chip(name: str) -> None:
    ours, _, given, beside, _ = FORMULAS[name]
    saved_bytes: dict[int, int] = {}

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        saved_bytes[tensor.data_ptr()] = tensor.nbytes
        return tensor

    leaves = [t.bfloat16().requires_grad_() for t in given]
    with torch.autograd.graph.saved_tensors_hooks(noted, lambda t: t):
        ours(*leaves)
    assert beside is not None
    assert sum(saved_bytes.values()) <= 1.1 * (sum(t.nbytes for t in leaves) + beside)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("name", FORMULAS)
def test_results_and_their_first_and_second_gradients_match_formulas(name: str, traced: bool) -> None:
    """traced: in a dispatch mode the function runs torch's operators, as in a trace."""
    ours, formula, given, _, backward = FORMULAS[name]
    dy, further = torch.randn_like(formula(*given)), [torch.randn_like(t) for t in given]

    def results(function: Callable[..., Any], dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in (*given, dy)]
        with FlopCounterMode(display=False) if traced else nullcontext():
            out = function(*leaves[:-1])
            first = torch.autograd.grad(out, leaves[:-1], leaves[-1], create_graph=True)
            weighed = sum((d * w.to(dtype)).sum() for d, w in zip(first, further, strict=True))
            assert isinstance(weighed, torch.Tensor)
            second = torch.autograd.grad(weighed, leaves, materialize_grads=True)
        return [*first, out, *second]

    got = results(ours, torch.float32)
    alone = [] if backward is None else backward(dy, *given)
    compare_with(name, [*alone, *got], lambda: [*(wanted := results(formula, torch.float64))[: len(alone)], *wanted])


def test_unpermute_with_frozen_probs_saves_no_rows_for_backward() -> None:
    saved_bytes: list[int] = []
    rows, probs = ROWS.clone().requires_grad_(), PROBS.clone()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved_bytes.append(t.nbytes) or t, lambda t: t):
        out = npu.npu_moe_token_unpermute(rows, POSITIONS, probs)
    assert sum(saved_bytes) == POSITIONS.nbytes + probs.nbytes
    out.sum().backward()
    assert rows.grad is not None
    assert torch.equal(rows.grad[POSITIONS.long()], probs.reshape(-1, 1).expand(-1, H))


def test_unpermute_gradient_accumulates_over_equal_positions() -> None:
    rows, positions = torch.ones(3, 2, requires_grad=True), torch.tensor([1, 1, 7, 0])
    npu.npu_moe_token_unpermute(rows, positions, torch.tensor([[1.0, 2.0], [4.0, 8.0]])).sum().backward()
    assert rows.grad is not None
    assert rows.grad[:, 0].tolist() == [8, 3, 0]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda x: npu.npu_rotary_mul(x, x, x, rotary_mode="quarter"),
         "The rotary_mode of npu_rotary_mul should be half or interleave, but got "),
        (lambda x: npu.npu_transpose_batchmatmul(x[0], x[0], perm_x1=(0, 0, 1)), "perm_x1 should be"),
        (lambda x: npu.npu_transpose_batchmatmul(x[0].int(), x[0]),
         "input's type supported for float16, float32 and bfloat16"),
        (lambda x: npu.npu_transpose_batchmatmul(x[0], x[0].int()), "weight's type supported for"),
        (lambda x: npu.npu_grouped_matmul([x[0, 0]], [x[0]], group_list=torch.tensor([4]), group_type=1),
         "The group type must be"),
        (lambda x: npu.npu_grouped_matmul([x[0, 0]], [x[0]], group_list=torch.tensor([4])),
         "Requires manual passing group_type"),
    ],
)  # fmt: skip
def test_auxiliary_operator_errors_have_the_text_of_torch_npu(
    call: Callable[[torch.Tensor], object], text: str
) -> None:
    for kind in (RuntimeError, ValueError):
        with pytest.raises(kind, match=text):
            call(torch.randn(1, 4, 4, 4))

"""Functions around attention: what they compute, beside formulas in float64 and beside autograd."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusion_attention import npu
from fusion_attention.testing.drawn import compare_with

GENERATOR = torch.Generator().manual_seed(28)
X, DY = torch.randn(2, 3, 6, 8, generator=GENERATOR)
GAMMA = torch.randn(8, generator=GENERATOR)


def rms(x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gamma


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    pairs = torch.complex(x[..., ::2], x[..., 1::2]) * torch.complex(cos[..., ::2], sin[..., ::2])
    return torch.view_as_real(pairs).flatten(-2)


def gate(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(x[..., :4]) * x[..., 4:]


ANGLES = torch.rand(6, 4, generator=GENERATOR).repeat_interleave(2, -1)
FORMULAS: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "rms_norm": (lambda x, g: npu.npu_rms_norm(x, g)[0], rms, (X, GAMMA)),
    "add_rms_norm": (lambda x, y, g: npu.npu_add_rms_norm(x, y, g)[0], lambda x, y, g: rms(x + y, g), (X, DY, GAMMA)),
    "gemma_rms_norm": (lambda x, g: npu.npu_gemma_rms_norm(x, g)[0], lambda x, g: rms(x, 1 + g), (X, GAMMA)),
    "swiglu": (npu.npu_swiglu, gate, (X,)),
    "rotary": (
        lambda x, c, s: npu.npu_rotary_mul(x, c, s, "interleave"), turned, (X, ANGLES.cos(), ANGLES.sin()),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMULAS)
def test_a_function_is_its_formula(name: str) -> None:
    ours, formula, args = FORMULAS[name]
    compare_with(name, ours(*args), lambda: formula(*(t.double() for t in args)))


def geglu(x: torch.Tensor) -> torch.Tensor:
    return x[..., :4] * torch.nn.functional.gelu(x[..., 4:], approximate="tanh")


HALF = DY[..., :4].contiguous()
BACKWARDS: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[torch.Tensor, ...], torch.Tensor]] = {
    "rms_norm": (lambda dy, x, g: npu.npu_rms_norm_backward(dy, x, g, npu.npu_rms_norm(x, g)[1]), rms, (X, GAMMA), DY),
    "swiglu": (lambda dy, x: (npu.npu_swiglu_backward(dy, x),), gate, (X,), HALF),
    "geglu": (lambda dy, x: (npu.npu_geglu_grad(dy, x, npu.npu_geglu(x)[1]),), geglu, (X,), HALF),
}


@pytest.mark.parametrize("name", BACKWARDS)
def test_backward_functions_are_autograd_s(name: str) -> None:
    ours, formula, args, dy = BACKWARDS[name]

    def gradients() -> Any:
        leaves = [t.double().requires_grad_() for t in args]
        return torch.autograd.grad(formula(*leaves), leaves, dy.double())

    compare_with(name, tuple(ours(dy, *args)), gradients)


@pytest.mark.parametrize("mode", ["PA_BNSD", "PA_NZ", "PA_BLK_BNSD", "PA_BLK_NZ"])
def test_caches_hold_the_rows_where_the_index_says(mode: str) -> None:
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


def test_nothing_is_written_by_a_wrong_call() -> None:
    cache, rows = torch.zeros(3, 4, 2, 8), torch.ones(2, 2, 8)
    with pytest.raises(ValueError, match="slots that the cache has"):
        npu.npu_scatter_pa_kv_cache(rows, rows, cache, cache.clone(), torch.tensor([0, 12]))
    assert not cache.any()


def test_of_equal_places_the_last_row_stays() -> None:
    """Rows are many, so that threads share them: which row stays must be no race."""
    slots = torch.arange(4096) % 7
    rows = torch.arange(4096.0).view(-1, 1, 1).expand(-1, 8, 64).contiguous()
    cache, other, flat = torch.zeros(4, 16, 8, 64), torch.zeros(4, 16, 8, 64), torch.zeros(64, 512)
    npu.npu_scatter_pa_kv_cache(rows, rows, cache, other, slots)
    npu.npu_scatter_nd_update_(flat, slots[:, None], rows.flatten(1))
    last = [int((slots == slot).nonzero().max()) for slot in range(7)]
    for found in (cache.view(64, 512), other.view(64, 512), flat):
        assert torch.equal(found[:7], torch.tensor(last, dtype=torch.float32).view(-1, 1).expand(-1, 512))
        assert not found[7:].any()


def test_the_row_that_stays_alone_has_a_gradient() -> None:
    updates = torch.ones(3, 2, requires_grad=True)
    npu.npu_scatter_nd_update(torch.zeros(4, 2), torch.tensor([[1], [3], [1]]), updates).sum().backward()
    assert updates.grad is not None
    assert updates.grad.tolist() == [[0, 0], [1, 1], [1, 1]]


@pytest.mark.parametrize("slots", [[-1, 3, -5, 2], [-1, -1, -2, -3]])
def test_rows_without_a_place_are_stored_nowhere(slots: list[int]) -> None:
    cache, rows = torch.full((2, 4, 1, 8), 7.0), torch.randn(4, 1, 8)
    want = cache.clone().view(8, 8)
    for slot, row in zip(slots, rows, strict=True):
        if slot >= 0:
            want[slot] = row[0]
    npu.npu_scatter_pa_kv_cache(rows, rows, cache, cache.clone(), torch.tensor(slots), cache_mode="Norm")
    assert torch.equal(cache.view(8, 8), want)


def test_rows_are_read_before_any_is_written() -> None:
    """Rows of the cache that is written are moved as they were."""
    cache, values = torch.randn(2, 4, 1, 8), torch.zeros(2, 4, 1, 8)
    before = cache.clone().view(8, 8)
    npu.npu_scatter_pa_kv_cache(
        cache.view(8, 1, 8)[:3], cache.view(8, 1, 8)[1:4], cache, values, torch.tensor([1, 2, 3])
    )
    assert torch.equal(cache.view(8, 8)[1:4], before[:3])
    assert torch.equal(values.view(8, 8)[1:4], before[1:4])


def test_a_mode_says_how_a_cache_lies_whose_shape_allows_both() -> None:
    rows = torch.randn(1, 4, 16, dtype=torch.float16)  # as many heads as slots, as wide as the chip's pieces
    caches = [torch.zeros(2, 4, 4, 16, dtype=torch.float16) for _ in range(4)]
    npu.npu_scatter_pa_kv_cache(rows, rows, caches[0], caches[1], torch.tensor([1]), cache_mode="Norm")
    npu.npu_scatter_pa_kv_cache(rows, rows, caches[2], caches[3], torch.tensor([1]))
    assert torch.equal(caches[0][0, 1], rows[0])
    assert torch.equal(caches[2][0, :, 1], rows[0])


def test_a_matrix_says_how_pairs_turn() -> None:
    matrix = torch.zeros(8, 8)
    for i in range(0, 8, 2):
        matrix[i + 1, i], matrix[i, i + 1] = -1, 1
    cos, sin = ANGLES.cos(), ANGLES.sin()
    want = npu.npu_rotary_mul(X, cos, sin, "interleave")
    assert torch.equal(npu.npu_rotary_mul(X, cos, sin, "interleave", rotate=matrix), want)
    assert torch.equal(npu.npu_rotary_mul(X, cos, sin, rotate=matrix.bfloat16()), want)


@pytest.mark.parametrize("kinds", [3, 4])
def test_sections_of_positions(kinds: int) -> None:
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


@pytest.mark.parametrize("first", [True, False])
def test_shapes_go_there_and_back(first: bool) -> None:
    x = torch.randn(2, 3, 4, 5)
    perm, shape = ((1, 2, 3, 0), (12, 10)) if first else ((2, 0, 1), (4, 6, 5))
    found = npu.npu_confusion_transpose(x, perm, shape, first)
    want = x.permute(perm).reshape(shape) if first else x.reshape(shape).permute(perm)
    assert torch.equal(found, want)
    assert torch.equal(npu.npu_confusion_transpose_backward(found, perm, x.shape, not first), x)

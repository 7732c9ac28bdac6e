"""Block masks are converted to bands, packed sequences or tiles; each result equals the mask, pair by pair."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.flex_cases import HEADS, ITEMS, MASKS, TOKENS, causal, formula, inputs
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, create_mask, or_masks

from fusion_attention.integrations.flex_attention import flex_attention, masks, mods
from fusion_attention.integrations.flex_attention.masks import Shape, Visible
from fusion_attention.testing.estimated_rounding_errors import compare_with

Tensor = torch.Tensor
Mod = Callable[..., Any]
CPU = torch.device("cpu")
SHAPE = Shape(ITEMS, HEADS, TOKENS, TOKENS, CPU)


def of_tiles(visible: Visible, shape: Shape) -> Tensor:
    """Visible pairs [B or 1, N or 1, S1, S2], from tiles and bits only."""
    assert visible.tiles is not None
    assert visible.bits is not None
    seen_whole = torch.zeros(*visible.tiles.shape[:2], *(128 * n for n in visible.tiles.shape[2:]), dtype=torch.bool)
    for b, n, r, c in np.ndindex(*visible.tiles.shape):
        number = int(visible.tiles[b, n, r, c])
        tile = torch.full((128, 128), number == -2)
        if number >= 0:
            tile = (visible.bits[number, :, :, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1) == 0
        seen_whole[b, n, 128 * r : 128 * r + 128, 128 * c : 128 * c + 128] = tile
    return seen_whole[:, :, : shape.rows, : shape.keys]


def of_band(visible: Visible, shape: Shape) -> Tensor:
    """Visible pairs [B, 1, S1, S2], from the band and lengths only."""
    band = visible.band
    assert band is not None
    if not visible.packed:
        lengths = [n or [size] * shape.items for n, size in ((visible.q_len, shape.rows), (visible.kv_len, shape.keys))]
        mask = torch.zeros(shape.items, 1, shape.rows, shape.keys, dtype=torch.bool)
        for b, (q_len, kv_len) in enumerate(zip(*lengths, strict=True)):
            band_of_item = dataclasses.replace(band, prefix=band.prefix[b : b + 1])
            mask[b, 0, :q_len, :kv_len] = band_of_item.visible(q_len, kv_len)
        return mask
    full = torch.zeros(shape.items * shape.rows, shape.items * shape.keys, dtype=torch.bool)
    row = key = 0
    for q_len, kv_len in zip(visible.q_len or (), visible.kv_len or (), strict=True):
        full[row : row + q_len, key : key + kv_len] = band.visible(q_len, kv_len)
        row, key = row + q_len, key + kv_len
    assert (row, key) == full.shape
    blocks = full.view(shape.items, shape.rows, shape.items, shape.keys)
    mask = torch.stack([blocks[b, :, b] for b in range(shape.items)])
    assert mask.sum() == full.sum()
    return mask[:, None]


def is_exactly(visible: Visible, want: Tensor, shape: Shape) -> None:
    """Assert that every form of the converted mask equals `want`."""
    assert visible.band is not None or visible.tiles is not None
    if visible.tiles is not None:
        assert torch.equal(of_tiles(visible, shape).expand_as(want), want)
        assert torch.equal(~visible.blocked(shape.rows, shape.keys).expand_as(want), want)
    if visible.band is not None:
        assert torch.equal(of_band(visible, shape).expand_as(want), want)
    ahead = torch.ones(shape.rows, shape.keys, dtype=torch.bool).triu(1)
    if visible.past:
        assert not bool((want & ahead).any())
    if visible.packed:
        lengths = [np.array(n) for n in (visible.q_len, visible.kv_len)]
        row, key = (np.cumsum(n) - n for n in lengths)
        begun = (row % shape.rows == key % shape.keys)[(lengths[0] > 0) & (lengths[1] > 0)]
        assert visible.aligned == begun.all()


def form(visible: Visible) -> str:
    return "tiles" if visible.band is None else "packed" if visible.packed else "band"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("size", [128, 32, (64, 256), 100])
@pytest.mark.parametrize("name", MASKS)
def test_block_masks_convert_to_equal_bands_or_tiles(name: str, size: Any) -> None:
    mask, words = MASKS[name]
    want = create_mask(mask, ITEMS, HEADS, TOKENS, TOKENS, device="cpu")
    for full in (True, False):
        created_mask = create_block_mask(
            mask, ITEMS, HEADS, TOKENS, TOKENS, device="cpu", BLOCK_SIZE=size, separate_full_blocks=full
        )
        visible = masks.of_block_mask(created_mask, SHAPE)
        is_exactly(visible, want, SHAPE)
        assert form(visible) == words


@pytest.mark.parametrize("name", MASKS)
def test_mask_functions_convert_to_equal_bands_or_tiles(name: str) -> None:
    mask, words = MASKS[name]
    visible = masks.of_function(mask, SHAPE)
    is_exactly(visible, create_mask(mask, ITEMS, HEADS, TOKENS, TOKENS, device="cpu"), SHAPE)
    assert form(visible) == words
    relative = name in ("causal", "sliding window", "symmetric window", "keys ahead")
    assert (visible.tiles is None) == relative  # a band known from distances alone evaluates no tile


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("rows", "keys"), [(1, 300), (70, 300), (300, 70), (128, 256), (257, 129)])
def test_masks_with_different_query_and_key_lengths_convert_exactly(rows: int, keys: int) -> None:
    shape = Shape(ITEMS, HEADS, rows, keys, CPU)
    document = torch.arange(1000) // 90

    def lower_right(b: Any, h: Any, q: Any, k: Any) -> Any:
        return k <= q + keys - rows

    functions: list[Mod] = [
        causal,
        lower_right,
        lambda b, h, q, k: (q - k < 50) & (k - q < 20),
        lambda b, h, q, k: document[q] == document[k],
        lambda b, h, q, k: (document[q] == document[k]) & lower_right(b, h, q, k),
        and_masks(lower_right, lambda b, h, q, k: k >= 20),
        or_masks(causal, lambda b, h, q, k: k < 30),
        or_masks(causal, lambda b, h, q, k: k % 50 == b),
        lambda b, h, q, k: q >= rows // 2,
    ]
    for mask in functions:
        want = create_mask(mask, ITEMS, HEADS, rows, keys, device="cpu")
        created_mask = create_block_mask(mask, ITEMS, HEADS, rows, keys, device="cpu")
        for visible in (masks.of_block_mask(created_mask, shape), masks.of_function(mask, shape)):
            is_exactly(visible, want, shape)


def test_mask_with_one_flipped_element_is_not_converted_to_a_band() -> None:
    """Only a check of all rows detects one flipped pair in a band or in packed sequences."""
    random = np.random.default_rng(0)
    for name in ("causal", "sliding window", "prefix LM", "right padding, causal", "causal documents", "full"):
        want = create_mask(MASKS[name][0], ITEMS, HEADS, TOKENS, TOKENS, device="cpu")
        for turn in range(6):
            b, h, q, k = (int(random.integers(n)) for n in want.shape)
            head = h if turn % 2 else slice(None)
            if turn % 3:  # the row stays one interval: its last key goes, or one more comes
                k = min(int(want[b, h, q].nonzero()[-1]) + turn % 2, TOKENS - 1)
            flipped = want.clone()
            flipped[b, head, q, k] ^= True
            visible = masks.of_function(lambda b, h, q, k, table=flipped: table[b, h, q, k], SHAPE)
            is_exactly(visible, flipped, SHAPE)
            if turn % 2:
                assert form(visible) == "tiles"


def test_batch_1_block_mask_with_batch_dependent_mask_mod_converts_exactly() -> None:
    """Compiled code has the blocks of the first item, and mask_mod decides partial blocks for each item."""
    prefix = torch.tensor([20, 120])

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k < prefix[b]) | (q >= k)

    created_mask = create_block_mask(mask, None, None, TOKENS, TOKENS, device="cpu", BLOCK_SIZE=256)
    visible = masks.of_block_mask(created_mask, SHAPE)
    is_exactly(visible, create_mask(mask, ITEMS, HEADS, TOKENS, TOKENS, device="cpu"), SHAPE)
    assert not mods.depends(mask, 1, CPU)


def test_block_lists_override_mask_mod_for_full_and_unlisted_blocks() -> None:
    listed = torch.tensor([[[[0, 0], [1, 0]]]], dtype=torch.int32)
    counts = torch.tensor([[[1, 1]]], dtype=torch.int32)
    full = torch.tensor([[[[1, 9], [0, 9]]]], dtype=torch.int32)  # entries behind the counts mean nothing
    some = torch.tensor([[[0, 1]]], dtype=torch.int32)
    want = torch.zeros(TOKENS, TOKENS, dtype=torch.bool)
    want[:128, :128] = True
    want[128:, 128:] = True
    shape = Shape(1, 1, TOKENS, TOKENS, CPU)
    blocks = {"BLOCK_SIZE": 128, "seq_lengths": (TOKENS, TOKENS)}
    is_exactly(masks.of_block_mask(BlockMask.from_kv_blocks(counts, listed, **blocks), shape), want[None, None], shape)
    want &= torch.ones_like(want).tril()
    want[128:, :128] = True
    created_mask = BlockMask.from_kv_blocks(counts, listed, some, full, mask_mod=causal, **blocks)
    is_exactly(masks.of_block_mask(created_mask, shape), want[None, None], shape)


@pytest.mark.slow
def test_sliced_block_mask_with_shifted_mask_mod_matches_formula() -> None:
    """Decoding programs slice one block of rows, shift mask_mod and set seq_lengths."""
    q, k, v, _ = inputs(0, tokens=300)
    created_mask = create_block_mask(causal, None, None, 300, 300, device="cpu")
    sliced = created_mask[:, :, 1]
    sliced.mask_mod = lambda b, h, row, key: causal(b, h, row + 128, key)
    sliced.seq_lengths = (128, 300)
    out = flex_attention(q[:, :, 128:256], k, v, None, sliced, enable_gqa=True)
    inputs64 = [t.double() for t in (q, k, v)]
    compare_with("out", out, lambda: formula(*inputs64, None, causal)[0][:, :, 128:256])


def test_refuses_block_masks_with_invalid_block_indices() -> None:
    listed = torch.tensor([[[[0, 7], [1, 0]]]], dtype=torch.int32)
    shape = Shape(1, 1, TOKENS, TOKENS, CPU)
    for counts, words in (
        ([2, 1], "from 0 to 1, got others"),
        ([1], "at least 2 rows of blocks"),
        ([5, 1], "got others"),
    ):
        number = torch.tensor([[counts]], dtype=torch.int32)
        created_mask = BlockMask((TOKENS, TOKENS), number, listed[:, :, : len(counts)], *(None,) * 6)
        with pytest.raises(ValueError, match=words):
            masks.of_block_mask(created_mask, shape)


def test_mask_functions_are_never_evaluated_beyond_the_last_token() -> None:
    """Tiles extend beyond the last row and key, where a table lookup in mask_mod would fail."""
    tokens = 130
    table = torch.arange(tokens)
    visible = masks.of_function(lambda b, h, q, k: table[q] + table[k] >= 100, Shape(1, 1, tokens, tokens, CPU))
    is_exactly(visible, (table[:, None] + table >= 100)[None, None], Shape(1, 1, tokens, tokens, CPU))

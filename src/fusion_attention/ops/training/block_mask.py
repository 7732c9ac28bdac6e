"""Conversion of block-sparse masks with any block size to 128 x 128 tiles with bit masks, or to a dense matrix."""

import torch

from fusion_attention.ir.mask import ALL_BLOCKED, NONE_BLOCKED, TILE

Tensor = torch.Tensor
Pair = tuple[int, int]


def to_tiles(mask: Tensor, block: Pair, tokens: Pair) -> dict[str, Tensor]:
    """Returns {"blocked_tiles", "blocked_bits"}: tensors for 128 x 128 tiles that hide the same scores as a block mask.

    Args:
        mask: [B, N, blocks of rows, blocks of keys], nonzero: visible.
        block: (rows, keys) of a block.
        tokens: the largest number of rows, and of keys, of a sequence.
    """
    (rows, row_blocks, row_kind), (keys, key_blocks, key_kind) = (
        _blocks_of_tiles(count, size, mask.device) for count, size in zip(tokens, block, strict=True)
    )
    # [B, N, tiles of rows, tiles of keys, blocks of rows in a tile, blocks of keys in a tile]
    visible = (mask[:, :, rows][..., keys] != 0).transpose(3, 4)
    every, some = visible.all(-1).all(-1), visible.any(-1).any(-1)
    tiles = torch.where(every, NONE_BLOCKED, torch.where(some, 0, ALL_BLOCKED)).int()
    divided = some & ~every
    kinds = (kind.expand(divided.shape)[divided].unsqueeze(1) for kind in (row_kind[:, None], key_kind))
    # Equal tiles share bits; a tile's bits depend on its visible blocks and on the position of their edges.
    tile, number = torch.unique(
        torch.cat((visible[divided].flatten(1).int(), *kinds), 1), dim=0, return_inverse=True
    )  # fmt: skip
    tiles[divided] = number.int()
    hidden = tile[:, :-2].view(-1, *visible.shape[4:]) == 0
    row_of, key_of = row_blocks[tile[:, -2]], key_blocks[tile[:, -1]]
    columns = hidden.gather(2, key_of[:, None].expand(-1, hidden.shape[1], -1)).unflatten(2, (-1, 8))
    weights = 1 << torch.arange(8, device=mask.device)
    packed = (columns * weights).sum(-1).to(torch.uint8)
    bits = packed.gather(1, row_of[..., None].expand(-1, -1, packed.shape[2]))
    return {"blocked_tiles": tiles, "blocked_bits": bits}


def _blocks_of_tiles(tokens: int, size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (touched, blocks, kinds): the blocks of `size` tokens in each tile of 128 tokens, along one axis.

    touched: [tiles, n], numbers of the blocks that overlap a tile; the last one fills the row.
    blocks: [kinds, 128], for each token of a tile, the column of its block in `touched`; equal rows occur once.
    kinds: [tiles], index of the tile's row in `blocks`.
    """
    tile = torch.arange(-(-tokens // TILE), device=device)[:, None] * TILE
    token = (tile + torch.arange(TILE, device=device)).clamp_(max=max(tokens - 1, 0))
    block = token // size
    index = block - block[:, :1]
    most = int(index.max()) + 1 if len(index) else 1
    touched = torch.minimum(block[:, :1] + torch.arange(most, device=device), block[:, -1:])
    blocks, kinds = torch.unique(index, dim=0, return_inverse=True)
    return touched, blocks, kinds


def to_matrix(mask: Tensor, block: Pair, tokens: Pair) -> Tensor:
    """Returns uint8 [B, N, rows, keys], 1 where a block mask [B, N, blocks of rows, blocks of keys] (nonzero: visible)
    hides a score; block: (rows, keys) of a block; tokens: the largest number of rows, and of keys, of a sequence."""
    rows, keys = (torch.arange(count, device=mask.device) // size for count, size in zip(tokens, block, strict=True))
    return (mask == 0).to(torch.uint8)[:, :, rows][..., keys]

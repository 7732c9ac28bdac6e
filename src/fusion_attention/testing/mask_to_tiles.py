"""Converts a mask matrix to 128 x 128 tiles, for fusion_attention.attention(blocked_tiles=, blocked_bits=)."""

import torch
import torch.nn.functional as F


def cut_tiles(blocked: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Converts a bool matrix [..., rows, keys] (true: hidden) to 128 x 128 tiles; the last are padded with false.

    Returns:
        blocked_tiles: int32 [..., R, C], for each tile its index in blocked_bits; -1: all blocked, -2: nothing blocked.
        blocked_bits: uint8 [tiles, 128, 16], the elements of partly blocked tiles, least significant bit first.
    """
    rows, keys = blocked.shape[-2:]
    beyond = (0, -keys % 128, 0, -rows % 128)

    def tiles(value: bool) -> torch.Tensor:
        padded = F.pad(blocked.bool(), beyond, value=value)
        return padded.unflatten(-1, (-1, 128)).unflatten(-3, (-1, 128)).transpose(-2, -3)  # [..., R, C, 128, 128]

    tiles_cut = tiles(False)
    every, some = tiles(True).flatten(-2).all(-1), tiles_cut.flatten(-2).any(-1)
    partly = some & ~every
    numbers = torch.full(partly.shape, -2, dtype=torch.int32).masked_fill(every, -1)
    numbers[partly] = torch.arange(int(partly.sum()), dtype=torch.int32)
    bits = tiles_cut[partly].unflatten(-1, (16, 8)).byte() << torch.arange(8, dtype=torch.uint8)
    return numbers, bits.sum(-1, dtype=torch.uint8)

"""Launches of the sums of rows by key: the float32 sums, the sorting of lists, the gradients at last.

    total = KeySum(like, keys, columns)
    for chunk in chunks:            of whole_blocks() of tokens
        total.add(rows, ids, of_token)        [entries, columns] and int32 [entries], -1 for none
    total.write(dk, "dk", 0, where)

The number of a key, its id, counts the keys of all sequences and heads: numbered().
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fusion_attention.backends.triton.common import layout_index, layout_table, shapes
from fusion_attention.backends.triton.common.launching import launch_named, launch_some
from fusion_attention.backends.triton.selected.key_sum import add_blocks, add_rows, find_hot, mark, write_rows
from fusion_attention.ir.kv import RowView
from fusion_attention.ir.problem import Extents
from fusion_attention.memory import empty

PANEL = 256  # columns that one program sums, at most
ADD, WRITE, NOTE = shapes.Tile(0, 0, 2, 1), shapes.Tile(0, 16, 4, 1), shapes.Tile(0, 1024, 4, 1)
# Of an entry of a list, besides its row: its id; ids and their order, sorted, and both again while they are; its block.
BYTES_OF_ENTRY = 4 + 2 * (4 + 8) + 4
BLOCK = 1 << 15  # entries of a block, as many as whole tokens allow, or one token's
HOT = 1024  # rows of a chunk for a key, beyond which several programs sum them


@dataclass(frozen=True, eq=False)
class Where:
    """Tables on a device: of addresses, with the ids and the views that are written; key_tiles(); how many sequences.

    ids: the view of the ids of its keys.
    """

    strides: torch.Tensor
    tiles: torch.Tensor
    count: int
    ids: str = "ids"


def numbered(like: torch.Tensor, lengths: np.ndarray, heads: int, first: int = 0) -> RowView:
    """`ids` of the table of addresses: key j of head h of sequence b has the id (first + start[b] + j) * heads + h.

    lengths: keys of the sequences, which later ones do not exceed (DeviceTables.capacity), so an id stays a key's.
    """
    start = first + np.cumsum(lengths) - lengths
    return RowView((like,), start * heads, heads, np.ones(len(lengths), np.int64), 1)


def compressed_tiles(extents: Extents) -> np.ndarray:
    """key_tiles() of the compressed keys."""
    assert extents.compressed is not None
    return key_tiles(replace(extents, kv_len=extents.compressed.kv_len))


def key_tiles(extents: Extents) -> np.ndarray:
    """[tiles, 8] int32: seq, key0 and key1 of every few keys."""
    turns = -(-extents.kv_len // WRITE.BN)
    seq = np.repeat(np.arange(len(extents)), turns)
    key0 = (np.arange(len(seq)) - np.repeat(np.cumsum(turns) - turns, turns)) * WRITE.BN
    table = np.zeros((len(seq), layout_table.TILE_FIELDS), np.int32)
    table[:, 0], table[:, 1], table[:, 2] = seq, key0, np.minimum(key0 + WRITE.BN, extents.kv_len[seq])
    return table


def block_of(of_token: int) -> int:
    """Tokens of a block, by the entries that a token has."""
    return max(1, BLOCK // of_token)


def whole_blocks(tokens: int, of_token: int) -> int:
    """Tokens of a chunk that is to have so many at most, or one block."""
    block = block_of(of_token)
    return max(tokens // block, 1) * block


def parts_of(entries: int, of_token: int) -> tuple[int, int]:
    """(keys, at most, that have more than HOT of so many entries; blocks)."""
    return entries // (HOT + 1), -(-entries // (block_of(of_token) * of_token))


def workspace_bytes(keys: int, columns: int, entries: int, of_token: int) -> int:
    """What a sum holds, besides the rows and lists of a chunk of so many entries (BYTES_OF_ENTRY)."""
    hot, blocks = parts_of(entries, of_token)
    return 4 * keys * columns + 12 * (keys + 1) + 4 * (hot + 1) + 4 * hot * blocks * columns


def panel_of(columns: int) -> int:
    """Columns that a program sums."""
    return min(PANEL, shapes.power(columns))


class KeySum:
    """The sums of `keys` keys in float32, zero at first.

    Args:
        like: a tensor on the device.
        keys: how many ids there are.
        columns: elements of a row.
    """

    def __init__(self, like: torch.Tensor, keys: int, columns: int) -> None:
        self.total = like.new_zeros((keys, columns), dtype=torch.float32)
        self._every = torch.arange(keys + 1, dtype=torch.int32, device=like.device)

    def add(self, rows: torch.Tensor, ids: torch.Tensor, of_token: int) -> None:
        """Adds rows [entries, columns] to the keys of int32 ids [entries], in the order of the entries; -1: to none.

        Nothing waits for the device, and no row of an entry without a key is read. of_token: entries of a token; all
        calls but the last have whole blocks of tokens.
        """
        keys, columns = self.total.shape
        if not keys or not len(ids):
            return
        result, order = torch.sort(ids, stable=True)
        starts = torch.searchsorted(result, self._every, out_int32=True)
        w, (most, count) = panel_of(columns), parts_of(len(ids), of_token)
        constexprs, panels = {"COLUMNS": columns, "W": w}, -(-columns // w)
        given: dict[str, Any] = {
            "rows": rows, "order": order, "starts": starts, "total": self.total, "count": count, "keys": keys,
            "entries": len(ids), "per": block_of(of_token) * of_token, "hot": ids.new_zeros(1 + most),
            "marked": empty(ids, ids.shape, torch.int32), "strides": empty(ids, (keys,), torch.int32),
            "parts": empty(self.total, (most, count, columns), torch.float32),
        }  # fmt: skip
        launch_some(mark, (-(-len(ids) // NOTE.BN),), given, {"BN": NOTE.BN}, NOTE)
        launch_some(find_hot, (-(-keys // NOTE.BN),), given, {"HOT": HOT, "BN": NOTE.BN}, NOTE)
        if most:
            launch_some(add_blocks, (most, count, panels), given, constexprs, ADD)
        launch_some(add_rows, (keys, panels), given, constexprs, ADD)

    def write(self, out: torch.Tensor, name: str, first: int, dim: int, heads: int, where: Where) -> None:
        """Writes the columns from `first` on to the view `name` of the table of places, whose memory `out` is."""
        if not len(where.tiles) or not heads:
            return
        w = min(PANEL, shapes.power(dim))
        constexprs = {
            "VIEW": layout_index.AT[name],
            "IDS": layout_index.AT[where.ids],
            "COLUMNS": self.total.shape[1],
            "FIRST": first,
            "DIM": dim,
            "W": w,
            "BN": WRITE.BN,
        }
        tables = {"strides": where.strides, "tiles": where.tiles, "count": where.count}
        arguments = {"total": self.total, "out": out, **tables}
        launch_named(write_rows, (len(where.tiles), heads, -(-dim // w)), arguments, constexprs, WRITE)

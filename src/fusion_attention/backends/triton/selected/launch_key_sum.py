"""Launches of the sums of gradient rows per key: sorting of lists, sums in float32, and the gradients written from
them.

    total = KeySum(like, keys, columns)
    for chunk in chunks:            with a multiple of whole_blocks() tokens
        total.add(rows, ids, of_token)        [entries, columns] and int32 [entries], -1 for none
    total.write(dk, "dk", 0, dim, heads, where)

An entry is one gradient row with the id of its key; a token has `of_token` entries. The id of a key numbers the keys of
all sequences and heads: numbered().
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fusion_attention.backends.triton.common import layout_index, layout_table, shapes
from fusion_attention.backends.triton.common.launching import Launch, Ready, launch_some
from fusion_attention.backends.triton.selected.key_sum import add_blocks, add_rows, find_hot, mark, write_rows
from fusion_attention.ir.memory_views import RowView
from fusion_attention.ir.problem import Extents
from fusion_attention.memory import empty

PANEL = 256  # most columns per program
ADD, WRITE, NOTE = shapes.Tile(0, 0, 2, 1), shapes.Tile(0, 16, 4, 1), shapes.Tile(0, 1024, 4, 1)
# Bytes per entry of a list without its row: id; sorted ids and their order, twice during the sort; its mark.
BYTES_OF_ENTRY = 4 + 2 * (4 + 8) + 4
BLOCK = 1 << 15  # most entries of a block of complete tokens, unless one token has more
HOT = 1024  # number of rows of a key in a chunk above which several programs sum them


@dataclass(frozen=True, eq=False)
class Where:
    """Arguments of KeySum.write() about one source of keys (ordinary or compressed): tables and number of sequences."""

    strides: torch.Tensor  # the table of all tensors' strides, with those of the ids and of the written gradients
    tiles: torch.Tensor  # the result of key_tiles(), on the device
    count: int  # number of sequences
    ids: str = "ids"  # name of the tensor of ids in the table of strides


def numbered(like: torch.Tensor, lengths: np.ndarray, heads: int, first: int = 0) -> RowView:
    """Returns a view of ids: the id of key j of head h of sequence b is (first + start[b] + j) * heads + h, with start
    the exclusive sum of lengths.

    like: a tensor on the device. lengths: int [sequences], the maximum number of keys of each sequence, so that ids
    stay the same if a sequence grows. first: number of keys numbered before these (compressed keys follow the others).
    """
    start = first + np.cumsum(lengths) - lengths
    return RowView((like,), start * heads, heads, np.ones(len(lengths), np.int64), 1)


def key_tiles(extents: Extents, compressed: bool = False) -> np.ndarray:
    """Divides the keys, or the compressed keys, of each sequence into tiles; returns int32 [tiles, 8]: sequence, first
    key, end, five zeros."""
    source = extents.compressed if compressed else extents
    assert source is not None
    return layout_table.tiles_of(source.kv_len, WRITE.BN)


def block_of(of_token: int) -> int:
    """Returns the number of tokens whose rows (contributions to keys) form a block of sums; of_token: rows of each."""
    return max(1, BLOCK // of_token)


def whole_blocks(tokens: int, of_token: int) -> int:
    """Returns the number of tokens, at most `tokens`, that fill complete blocks of sums (block_of(of_token) tokens
    each), but at least one block's; of_token: rows to sum per token."""
    block = block_of(of_token)
    return max(tokens // block, 1) * block


def parts_of(entries: int, of_token: int) -> tuple[int, int]:
    """Returns (most keys with more than HOT of `entries` rows, number of blocks of rows); of_token: rows per token."""
    return entries // (HOT + 1), -(-entries // (block_of(of_token) * of_token))


def workspace_bytes(keys: int, columns: int, entries: int, of_token: int) -> int:
    """Returns the bytes that a KeySum (sums per key, float32 [keys, columns]) allocates, without the rows to sum and
    their ids, which its caller passes; entries, of_token: rows of a chunk, and of a token."""
    hot, blocks = parts_of(entries, of_token)
    return 4 * keys * columns + 12 * (keys + 1) + 4 * (hot + 1) + 4 * hot * blocks * columns


def panel_of(columns: int) -> int:
    """Returns the number of columns that one program sums, for rows of `columns` elements."""
    return min(PANEL, shapes.power(columns))


class KeySum:
    """Sums per key of contributions to dk and dv, float32 [keys, columns]: add() adds rows, write() stores the sums.
    Keys have the ids 0 to keys - 1."""

    def __init__(self, like: torch.Tensor, keys: int, columns: int) -> None:
        self.total = like.new_zeros((keys, columns), dtype=torch.float32)
        self._every = torch.arange(keys + 1, dtype=torch.int32, device=like.device)

    def add(self, rows: torch.Tensor, ids: torch.Tensor, of_token: int) -> None:
        """Adds rows [entries, columns] to the keys of int32 ids [entries], in this order; rows with id -1 are not read.

        Does not wait for the device. of_token: entries per token; calls but the last need complete blocks of sums.
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
        """Writes `dim` columns of the sums, from column `first` on, to the gradient of keys `out`, converted to its
        dtype. name: the gradient's name in the table of strides; where: that table, tiles of keys, and ids of keys."""
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
        launch_some(write_rows, (len(where.tiles), heads, -(-dim // w)), arguments, constexprs, WRITE)


@dataclass(eq=False)
class Gradient(Ready):
    """Prepared launches of gradients over lists of selected keys, by chunks of tokens, and the sums of rows
    (contributions) per key. The `launches` of Ready run once, before the chunks."""

    # (number of entries, launches) of each chunk; all use the same scratch.
    chunks: list[tuple[int, list[Launch]]] = field(default_factory=list)
    # (name of a gradient of keys, its first column in a row, its dim, source of keys)
    writes: list[tuple[str, int, int, Where]] = field(default_factory=list)
    keys: int = 0  # number of keys of all sequences and heads
    columns: int = 0  # elements of a row: the gradients of one key, side by side
    heads: int = 1  # number of key heads
    of_token: int = 1  # entries (selected keys) per token

    def run(self, given: dict[str, Any]) -> None:
        """Launches chunk after chunk, sums the rows (contributions to gradients of keys) per key, and writes the sums.
        given: the tensors of this run by kernel argument name, to which scratch is added."""
        total = KeySum(given["q"], self.keys, self.columns)
        super().run(given)
        for entries, launches in self.chunks:
            for each in launches:
                each.start(given)
            total.add(given["rows"].view(-1, self.columns)[:entries], given["ids"][:entries], self.of_token)
        for name, first, dim, where in self.writes:
            total.write(given[name], name, first, dim, self.heads, where)

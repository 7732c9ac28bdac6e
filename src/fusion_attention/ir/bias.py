"""Biases of the scores of one sequence, and the accumulation of their gradients.

A bias is a matrix in memory, a table of the last 1024 rows (TABLE_ROWS) from which earlier rows are rebuilt, or
computed from slopes and distances.
"""

import torch

from fusion_attention.ir.memory_views import MatrixView

TABLE_ROWS = 1024


def from_matrix(view: MatrixView, b: int, heads: int, rows: slice, keys: slice) -> torch.Tensor:
    """Returns the bias of a range of query rows and keys of sequence b, [heads, rows, keys], from the matrix `view`."""
    return view.sequence(b, heads, rows.stop, keys.stop)[:, rows, keys]


def from_slopes(slopes: torch.Tensor, shift: int, rows: slice, keys: slice, root: bool) -> torch.Tensor:
    """Returns bias [heads, rows, keys] of row i and key j: -slope * d, or if `root` -slope * sqrt(d), d = |j - i +
    shift|. slopes: [heads]; shift: the distance of key 0 and row 0 of a sequence; rows, keys: the ranges to compute."""
    row = torch.arange(rows.start, rows.stop, device=slopes.device)[:, None]
    key = torch.arange(keys.start, keys.stop, device=slopes.device)[None, :]
    distance = (key - row + shift).abs().to(slopes.dtype)
    return -slopes[:, None, None] * (distance.sqrt() if root else distance)


def table_position(q_len: int, rows: slice, keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the position of each (query row, key) in a table of the last 1024 rows (TABLE_ROWS) of a sequence's bias:
    table row [rows, 1], column [rows, keys].

    The last 1024 rows are stored. An earlier row i is rebuilt from the stored row with the same remainder modulo 1024,
    at the column with the same distance to the diagonal. Columns beyond the last key have no value; callers clamp them.
    """
    row = torch.arange(rows.start, rows.stop)[:, None]
    key = torch.arange(keys.start, keys.stop)[None, :]
    first = q_len - TABLE_ROWS
    stored = torch.where(row >= first, row - first, row % TABLE_ROWS)
    return stored, key + (first + stored - row)


def from_table(
    view: MatrixView, b: int, heads: int, lengths: tuple[int, int], rows: slice, keys: slice
) -> torch.Tensor:
    """Returns the bias of a range of query rows and keys of sequence b, [heads, rows, keys], rebuilt from its stored
    last 1024 rows (TABLE_ROWS). view: the stored rows in memory; lengths: (q_len, kv_len) of the sequence."""
    table = view.sequence(b, heads, TABLE_ROWS, lengths[1])
    row, column = table_position(lengths[0], rows, keys)
    return table[:, row, column.clamp(max=lengths[1] - 1)]


def add_matrix_gradient(view: MatrixView, b: int, gradient: torch.Tensor, rows: slice, keys: slice) -> None:
    """Adds the bias gradient [heads, rows, keys] of a range of query rows and keys of sequence b to the bias matrix
    `view`, summed over broadcast axes."""
    if not gradient.numel():  # a sequence without rows or keys may have an address behind the memory's end
        return
    broadcast = (view.stride_head[b] == 0, view.stride_row[b] == 0, view.stride_key == 0)
    axes = [axis for axis, repeated in enumerate(broadcast) if repeated]
    if axes:
        gradient = gradient.sum(axes, keepdim=True)
    heads, n_rows, n_keys = gradient.shape
    row0 = 0 if broadcast[1] else rows.start
    key0 = 0 if broadcast[2] else keys.start
    target = view.sequence(b, heads, row0 + n_rows, key0 + n_keys)[:, row0:, key0:]
    target += gradient.to(target.dtype)


def add_table_gradient(
    view: MatrixView, b: int, lengths: tuple[int, int], gradient: torch.Tensor, rows: slice, keys: slice
) -> None:
    """Adds the bias gradient [heads, rows, keys] of a range of query rows and keys of sequence b to `view`, the last
    1024 rows from which its bias is rebuilt, summed over heads that share them. lengths: (q_len, kv_len)."""
    if not gradient.numel():
        return
    if view.stride_head[b] == 0:
        gradient = gradient.sum(0, keepdim=True)
    heads = gradient.shape[0]
    table = view.sequence(b, heads, TABLE_ROWS, lengths[1])
    row, column = table_position(lengths[0], rows, keys)
    head = torch.arange(heads)[:, None, None]
    table.index_put_((head, row, column.clamp(max=lengths[1] - 1)), gradient.to(table.dtype), accumulate=True)

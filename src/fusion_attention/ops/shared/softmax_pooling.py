"""Compressed keys by torch operators: each is the sum of a window of token rows, weighted by a softmax per channel."""

from dataclasses import dataclass

import torch

Tensor = torch.Tensor


@dataclass(frozen=True)
class Windows:
    """The division of token rows into windows, each of which is pooled to one row by softmax weights.

    Args:
        ratio: rows of a window.
        overlap: rows have 2 D channels, of which the first D contribute to the next window's result.
        lengths: used rows of every sequence; None: rows are padded, and all are used.
        packed: rows are [T, N, C], otherwise [B, S, N, C].
        before: the first window in memory has no result; it only contributes to the next window's.
    """

    ratio: int
    overlap: bool
    lengths: tuple[int, ...] | None = None
    packed: bool = False
    before: bool = False

    def results(self, rows: int) -> int:
        """Returns the number of pooled rows of a sequence of `rows` rows."""
        return max(rows // self.ratio - self.before, 0)


def pooled(rows: Tensor, gates: Tensor, bias: Tensor | None, windows: Windows) -> Tensor:
    """Pools windows of rows [B, S, N, C] to [B, windows, N, D], or packed [T, N, C] to [all windows, N, D].

        out[w, d] = sum_p softmax_p(gates[p, d] + bias[p % ratio, d]) * rows[p, d]

    Without overlap, p are the rows of window w and D = C. With overlap, D = C / 2 and p are two sets of rows: the first
    D channels of window w - 1, if there is one, and the last D channels of window w. Computes in float32, or in float64
    for float64 rows. Results beyond a padded sequence's last complete window are 0, and rows beyond its length are not
    read.
    """
    lengths = windows.lengths
    if lengths is None:
        return _complete(rows, gates, bias, windows)
    if windows.packed:
        spans = list(zip(rows.split(lengths), gates.split(lengths), strict=True))
    else:
        spans = [(rows[b, :n], gates[b, :n]) for b, n in enumerate(lengths)]
    results = [_complete(x[None], z[None], bias, windows)[0] for x, z in spans]
    none = rows.new_zeros(0, rows.shape[-2], rows.shape[-1] // (1 + windows.overlap))
    if windows.packed:
        return torch.cat((none, *results))
    count = windows.results(rows.shape[1])
    filled = [torch.cat((one, one.new_zeros(count - len(one), *one.shape[1:]))) for one in results]
    return torch.stack(filled) if filled else none.expand(0, count, *none.shape[1:])


def _complete(rows: Tensor, gates: Tensor, bias: Tensor | None, windows: Windows) -> Tensor:
    """Returns averages [B, windows, N, D] of the windows of rows [B, S, N, C], weighted by softmax(gates + bias)."""
    x, z = rows_of_windows(rows, gates, bias, windows)
    return (z.softmax(2) * x).sum(2).to(rows.dtype)


def rows_of_windows(rows: Tensor, gates: Tensor, bias: Tensor | None, windows: Windows) -> tuple[Tensor, Tensor]:
    """Returns the rows that each complete window of [B, S, N, C] averages, and their gates plus bias: [B, windows,
    ratio or 2 * ratio, N, D] in float32 or float64. Without a previous window, its rows are 0 and their gates -inf."""
    dtype, ratio = torch.promote_types(rows.dtype, torch.float32), windows.ratio
    count = rows.shape[1] // ratio
    x, z = (t[:, : count * ratio].to(dtype).unflatten(1, (count, ratio)) for t in (rows, gates))
    if bias is not None:
        z = z + bias.to(dtype)[:, None]
    if windows.overlap:
        x, z = _with_previous(x, 0.0), _with_previous(z, -torch.inf)
    return (x[:, 1:], z[:, 1:]) if windows.before else (x, z)


def _with_previous(windows: Tensor, absent: float) -> Tensor:
    """Returns windows of twice the rows, [B, windows, 2 * ratio, N, D]: the first D channels of the previous window,
    then the last D channels of the window; absent: value before the first window."""
    half = windows.shape[-1] // 2
    previous, current = windows[..., :half], windows[..., half:]
    none = torch.full_like(previous[:, :1], absent)
    return torch.cat((torch.cat((none, previous[:, :-1]), 1), current), 2)

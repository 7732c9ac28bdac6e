"""Drawing shared by families of dense rows: sequences, matrices over [B, N, S1, S2], dropout, gradients."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .core import Value
from .formulas import HALF, SMALLEST, Slopes, U, drawn_bits, given_bits, rounding
from .storage import DTYPES, Rng, Tensor, dim, garbage, maybe, normal, pick, place, place_dense, place_rows, size

LARGEST = 1_500_000  # elements of a call's scores


@dataclass
class Batch:
    """Sequences of a dense call: float64 parts [length, heads, elements] of every tensor."""

    rng: Rng
    dtype: torch.dtype
    layout: str
    q_len: list[int]
    kv_len: list[int]
    heads: int
    heads_kv: int
    dim: int
    dim_v: int
    dim_rope: int = 0
    tokens: tuple[int, int] = (0, 0)  # S1 and S2, packed: T1 and T2
    parts: dict[str, list[Tensor]] = field(default_factory=dict)

    @property
    def packed(self) -> bool:
        return self.layout == "TND"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape [B, N, S1, S2] of matrices; if packed, S1 and S2 are the longest lengths."""
        s1, s2 = self.tokens
        if self.packed:
            s1, s2 = max(self.q_len, default=0), max(self.kv_len, default=0)
        return len(self.q_len), self.heads, s1, s2

    @property
    def group(self) -> int:
        return self.heads // self.heads_kv

    def draw(self, name: str, side: str, heads: int, elements: int) -> None:
        """Draws the sequences of a tensor, rounded to its dtype."""
        lengths = self.q_len if side == "q" else self.kv_len
        full = normal(self.rng, sum(lengths), heads, elements).to(self.dtype).double()
        self.parts[name] = list(full.split(lengths)) if lengths else []

    def tensor(self, name: str, side: str) -> Tensor:
        """Returns a tensor in the layout of the call with random strides and NaN after every length."""
        parts = [rows.to(self.dtype) for rows in self.parts[name]]
        packed_rows = place_dense(parts, self.layout, self.tokens[side == "kv"], float(garbage(self.rng, self.dtype)))
        return place(self.rng, packed_rows)

    def place_dense(self, parts: Sequence[tuple[Tensor, Tensor]], side: str) -> Value:
        """Returns the expected tensor in the layout from (value, error) [heads, length, elements] per sequence."""
        tokens = self.tokens[side == "kv"]
        value, error = (place_dense([p[i].transpose(0, 1) for p in parts], self.layout, tokens) for i in (0, 1))
        return Value(value, torch.where(error > 0, rounding(value, error, self.dtype), 0.0), self.dtype)

    def by_row(self, parts: Sequence[tuple[Tensor, Tensor]], fill: float = 0.0, head_major: bool = False) -> Value:
        """Returns expected statistics from (value, error) [heads, length] per sequence."""
        value = place_rows([p[0] for p in parts], self.packed, self.tokens[0], fill, head_major)
        error = place_rows([p[1] for p in parts], self.packed, self.tokens[0], 0.0, head_major)
        error = torch.where(value.isfinite(), error, 0.0)
        return Value(value, error + U * value.abs().nan_to_num(0, 0, 0), torch.float32)

    def rows(self, b: int, name: str, group: int = 1) -> Tensor:
        """Returns a sequence [heads, length, elements] with repeated key heads."""
        return self.parts[name][b].transpose(0, 1).repeat_interleave(group, 0)

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Splits [B, S1, ..] or [T1, ..] into the rows of every sequence."""
        if self.packed:
            return list(tensor[: sum(self.q_len)].split(self.q_len))
        return [tensor[b, :m] for b, m in enumerate(self.q_len)]

    def q(self, b: int) -> Tensor:
        return torch.cat([self.rows(b, name) for name in ("q", "q_rope") if name in self.parts], -1)

    def k(self, b: int) -> Tensor:
        return torch.cat([self.rows(b, name, self.group) for name in ("k", "k_rope") if name in self.parts], -1)

    def v(self, b: int) -> Tensor:
        return self.rows(b, "v", self.group)


def draw_batch(rng: Rng, layouts: Sequence[str], rope: float = 0.25) -> Batch:
    """Draws lengths, heads, sizes, layout and dtype."""
    layout, dtype = str(pick(rng, *layouts)), DTYPES[int(rng.choice(3, p=[0.5, 0.3, 0.2]))]
    count = int(rng.integers(1, 5 if layout == "TND" else 4))
    heads_kv, group = int(rng.integers(1, 4)), int(rng.integers(1, 5))
    if layout == "TND":
        q_len, kv_len = [size(rng) for _ in range(count)], [size(rng) for _ in range(count)]
        if maybe(rng, 0.3):
            kv_len = list(q_len)
        tokens = (sum(q_len) + int(rng.integers(0, 4)), sum(kv_len) + int(rng.integers(0, 4)))
    else:
        tokens = (size(rng), size(rng))
        tokens = (tokens[0], tokens[0]) if maybe(rng, 0.3) else tokens
        q_len, kv_len = [tokens[0]] * count, [tokens[1]] * count
    while heads_kv * group * sum(m * n for m, n in zip(q_len, kv_len, strict=True)) > LARGEST and group > 1:
        group -= 1
    batch = Batch(rng, dtype, layout, q_len, kv_len, heads_kv * group, heads_kv, dim(rng), dim(rng), tokens=tokens)
    if maybe(rng, rope):
        batch.dim_rope = dim(rng, 64)
    return batch


def fill_batch(batch: Batch, values: bool = True) -> None:
    """Draws q, k, v and rope parts; values: v is a separate tensor."""
    b = batch
    b.draw("q", "q", b.heads, b.dim)
    b.draw("k", "kv", b.heads_kv, b.dim)
    if values:
        b.draw("v", "kv", b.heads_kv, b.dim_v)
    if b.dim_rope:
        b.draw("q_rope", "q", b.heads, b.dim_rope)
        b.draw("k_rope", "kv", b.heads_kv, b.dim_rope)


def invisible_keys(counted: Tensor, heads_kv: int) -> Tensor:
    """Returns bool [K, heads_kv]: keys that no row of counts [N, R, K] sees."""
    return ~counted.any(1).unflatten(0, (heads_kv, -1)).any(1).T


def hide_unseen(batch: Batch, counts: Sequence[Tensor], mean: bool) -> None:
    """Writes NaN or infinity to key and value rows that no row sees, because results must not depend on them."""
    if not maybe(batch.rng, 0.7):
        return
    names = ("k", "k_rope") if mean else ("k", "v", "k_rope")
    for b, count in enumerate(counts):
        unseen = invisible_keys(count > 0, batch.heads_kv)
        for name in names:
            if name in batch.parts:
                batch.parts[name][b][unseen] = float(garbage(batch.rng, batch.dtype))


@dataclass
class Matrix:
    """A matrix that broadcasts to [B, N, S1, S2]: the tensor that is passed, and its values with all four axes.

    widened: the caller expands the tensor, so torch sums gradients that are already rounded to the dtype.
    """

    tensor: Tensor
    values: Tensor
    widened: bool = False

    def of(self, b: int, rows: int, keys: int, heads: int) -> Tensor:
        matrix = self.values[b if self.values.shape[0] > 1 else 0]
        matrix = matrix.expand(
            heads, max(rows, 1) if matrix.shape[1] == 1 else -1, max(keys, 1) if matrix.shape[2] == 1 else -1
        )
        return matrix[:, :rows, :keys]

    def summed(self, batch: Batch, parts: Sequence[tuple[Tensor, Tensor]]) -> Value:
        """Returns the expected gradient of the tensor: dS [N, R, K] per sequence, summed over broadcast axes."""
        full = torch.zeros(batch.shape, dtype=torch.float64)
        off, terms = torch.zeros_like(full), torch.zeros_like(full)
        for b, (value, error) in enumerate(parts):
            place_ = (b, slice(None), slice(0, value.shape[1]), slice(0, value.shape[2]))
            full[place_], off[place_], terms[place_] = value, error, value.abs()
        axes = [axis for axis, size in enumerate(self.values.shape) if size == 1]
        count = int(np.prod([full.shape[axis] for axis in axes]))
        value, error, most = (t.sum(axes, keepdim=True) if axes else t for t in (full, off, terms))
        error = error + count * U * most
        if self.widened:
            error = torch.where(
                error > 0, error + HALF[self.tensor.dtype] * most + count * SMALLEST[self.tensor.dtype], 0.0
            )
        error = torch.where(error > 0, rounding(value.abs(), error, self.tensor.dtype), 0.0)
        return Value(value.reshape(self.tensor.shape), error.reshape(self.tensor.shape), self.tensor.dtype)


def broadcast_shape(rng: Rng, full_shape: Sequence[int]) -> tuple[int, ...]:
    """Draws a broadcastable shape: some axes have size 1, and leading ones may be absent."""
    shape = [n if maybe(rng, 0.65) else 1 for n in full_shape]
    while len(shape) > 1 and shape[0] == 1 and maybe(rng, 0.6):
        shape.pop(0)
    return tuple(shape)


def expanded(rng: Rng, tensor: Tensor, full_shape: Sequence[int]) -> Tensor:
    """Expands some axes of a matrix with stride 0."""
    tail = tuple(full_shape)[len(full_shape) - tensor.dim() :]
    return tensor.expand([n if maybe(rng, 0.3) else m for m, n in zip(tensor.shape, tail, strict=True)])


def four(tensor: Tensor) -> Tensor:
    return tensor.reshape((1,) * (4 - tensor.dim()) + tuple(tensor.shape))


def draw_blocked(rng: Rng, full_shape: Sequence[int], shape: tuple[int, ...], dtypes: Sequence[torch.dtype]) -> Matrix:
    """Draws a mask (True removes a score) with some entire rows and columns removed."""
    fraction = float(rng.choice([0.1, 0.5, 0.9, 1.0], p=[0.4, 0.4, 0.15, 0.05]))
    values = torch.from_numpy(rng.random(shape) < fraction)
    if values.dim() >= 2 and values.shape[-2] > 1 and maybe(rng, 0.4):
        values[..., int(rng.integers(values.shape[-2])), :] = True
    if values.shape[-1] > 1 and maybe(rng, 0.4):
        values[..., : int(rng.integers(values.shape[-1]))] = True
    dtype = dtypes[int(rng.integers(len(dtypes)))]
    bytes_ = torch.from_numpy(rng.integers(1, 256 if dtype == torch.uint8 else 2, shape).astype(np.uint8))
    stored = torch.where(values, bytes_, torch.zeros((), dtype=torch.uint8)).to(dtype)
    return Matrix(
        expanded(rng, place(rng, stored), full_shape), four(values)
    )  # one without elements at any strides too


def draw_bias(rng: Rng, full_shape: Sequence[int], shape: tuple[int, ...], dtype: torch.dtype) -> Matrix:
    """Draws a bias with some -inf."""
    values = normal(rng, *shape).to(dtype)
    if maybe(rng, 0.3):
        values[torch.from_numpy(rng.random(shape) < rng.choice([0.05, 0.5, 0.95]))] = -torch.inf
    if values.shape[-1] > 1 and maybe(rng, 0.25):
        values[..., int(rng.integers(values.shape[-1])) :] = -torch.inf
    return Matrix(values, four(values.double()))


def poison_matrix(rng: Rng, matrix: Matrix, counts: Sequence[Tensor], full_shape: Sequence[int]) -> None:
    """Writes NaN to elements of a bias that no visible score reads, then moves it to random strides."""
    if maybe(rng, 0.6):
        visible = torch.zeros(tuple(full_shape), dtype=torch.bool)
        for b, count in enumerate(counts):
            visible[b, :, : count.shape[1], : count.shape[2]] = count > 0
        axes = [axis for axis, size in enumerate(matrix.values.shape) if size == 1]
        read = visible.any(axes, keepdim=True) if axes else visible
        matrix.tensor[~read.reshape(matrix.tensor.shape)] = torch.nan
    matrix.values = four(matrix.tensor.double())
    matrix.tensor = place(rng, matrix.tensor)


def hide_by_inf(batch: Batch, counts: Sequence[Tensor], biases: Sequence[Tensor], mean: bool) -> None:
    """Writes NaN to value rows of keys without a finite visible score, because their weights are 0."""
    if mean or not maybe(batch.rng, 0.5):
        return
    for values, count, bias in zip(batch.parts["v"], counts, biases, strict=True):
        values[invisible_keys((count > 0) & (bias != -torch.inf), batch.heads_kv)] = float(
            garbage(batch.rng, batch.dtype)
        )


@dataclass
class Dropout:
    """Dropout: none, given bits, or bits drawn from a seed; keep() returns 0 or 1 / keep_prob of a sequence."""

    keep_prob: float = 1.0
    bits: Tensor | None = None
    seed: int = 0
    offset: int = 0

    def keep(self, batch: Batch, b: int) -> Tensor | None:
        if self.keep_prob == 1.0:
            return None
        shape = (batch.heads, batch.q_len[b], batch.kv_len[b])
        if self.bits is None:
            keep = drawn_bits(self.seed, self.offset, self.keep_prob, b * batch.heads, shape)
        elif batch.packed:
            first = batch.heads * sum(m * n for m, n in zip(batch.q_len[:b], batch.kv_len[:b], strict=True))
            keep = given_bits(self.bits.reshape(-1).numpy(), first, shape)
        else:
            full = (batch.heads, *batch.tokens)
            of_head = given_bits(self.bits.reshape(-1).numpy(), b * int(np.prod(full)), full)
            keep = of_head[:, : shape[1], : shape[2]]
        return keep / self.keep_prob


def draw_bits(batch: Batch) -> Tensor:
    """Draws packed bits for every score, and sometimes more bytes than needed."""
    rng, b = batch.rng, batch
    scores = sum(m * n for m, n in zip(b.q_len, b.kv_len, strict=True))
    scores = scores if b.packed else len(b.q_len) * b.tokens[0] * b.tokens[1]
    count = max(-(-b.heads * scores // 8), 1) + int(rng.integers(0, 20))  # an empty mask counts as none
    return torch.from_numpy(rng.integers(0, 256, count).astype(np.uint8))


def draw_seed(rng: Rng) -> tuple[int, int]:
    seed = int(rng.choice([1, 7, 2**31, 2**32 + 5, 2**62 + 12345])) + int(rng.integers(0, 1000))
    return seed, int(rng.choice([0, 1, 5, 2**31 - 1]))


def gradients(batch: Batch, slopes: Sequence[Slopes], requested: Mapping[str, Any]) -> dict[str, Value]:
    """Returns the expected gradients of q, k, v and the rope parts in `requested`."""
    results: dict[str, Value] = {}
    tail = {"q": slice(0, batch.dim), "q_rope": slice(batch.dim, None)}
    tail |= {"k": tail["q"], "k_rope": tail["q_rope"], "v": slice(None)}
    for name in requested:
        if name not in batch.parts:
            continue
        heads, queries = batch.heads_kv, name.startswith("q")
        full = [slope.dq() if queries else slope.dv(heads) if name == "v" else slope.dk(heads) for slope in slopes]
        parts = [(value[..., tail[name]], error[..., tail[name]]) for value, error in full]
        results["d" + name] = batch.place_dense(parts, "q" if queries else "kv")
    return results


def dsink(batch: Batch, slopes: Sequence[Slopes]) -> Value:
    value = sum((slope.dsink()[0] for slope in slopes), torch.zeros(batch.heads, dtype=torch.float64))
    error = sum((slope.dsink()[1] for slope in slopes), torch.zeros(batch.heads, dtype=torch.float64))
    return Value(value, error + (len(slopes) + 1) * U * value.abs(), torch.float32)

"""pse of torch_npu's training functions: shapes, types, and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from .core import Value
from .dense import Batch
from .formulas import Slopes, U, rounding
from .storage import Tensor, maybe, normal, pick, place

if TYPE_CHECKING:
    from .training import Plan


@dataclass
class Pse:
    """Bias by pse: for every score of a sequence, the row-major index of the element of pse that it reads."""

    values: Tensor
    indices: list[Tensor]
    scale: float
    tensor: Tensor = field(default_factory=lambda: torch.empty(0))

    def bias(self, b: int) -> Tensor:
        return self.scale * self.values.double().reshape(-1)[self.indices[b]]

    def gradient(self, slopes: Sequence[Slopes]) -> Value:
        value, error, terms, count = (torch.zeros(self.values.numel(), dtype=torch.float64) for _ in range(4))
        for indices, slope in zip(self.indices, slopes, strict=True):
            flat = indices.reshape(-1)
            for total, addend in ((value, slope.ds), (error, slope.ds_error), (terms, slope.ds.abs())):
                total.index_add_(0, flat, addend.reshape(-1))
            count.index_add_(0, flat, torch.ones(len(flat), dtype=torch.float64))
        off = abs(self.scale) * (error + (count + 2) * U * terms)
        value = self.scale * value
        off = torch.where(off > 0, rounding(value, off, self.values.dtype), 0.0)
        return Value(value.view(self.values.shape), off.view(self.values.shape), self.values.dtype)


def _pse_places(b: Batch, form: str, shape: tuple[int, ...]) -> list[Tensor]:
    result, first = [], 0
    for s, (m, n) in enumerate(zip(b.q_len, b.kv_len, strict=True)):
        item = s if shape[0] > 1 else 0
        h, i, j = torch.arange(b.heads)[:, None, None], torch.arange(m)[:, None], torch.arange(n)
        if form == "blocks":
            indices = first + (h * m + i) * n + j
            first += b.heads * m * n
        elif form == "lines":
            indices = first + h * n + j + 0 * i
            first += b.heads * n
        elif form == "table":
            stored = torch.where(i >= m - 1024, i - (m - 1024), i % 1024)
            column = (shape[3] - n if b.packed else 0) + j + (m - 1024 + stored) - i
            indices = ((item * b.heads + h) * 1024 + stored) * shape[3] + column.clamp(0, shape[3] - 1)
        else:
            indices = ((item * b.heads + h) * shape[2] + (i if shape[2] > 1 else 0 * i)) * shape[3] + j
        result.append(indices)
    return result


def draw_pse(p: Plan) -> None:
    b, rng = p.batch, p.batch.rng
    kind = int(rng.integers(4)) if p.version == 2 else 1
    if kind in (2, 3):
        return draw_pse_slopes(p, kind)
    batches = len(b.q_len) if maybe(rng, 0.5) else 1
    long = max(b.q_len) > 1024
    if b.packed:
        form = str(pick(rng, "blocks", "lines", "table"))
        shape: tuple[int, ...] = (batches, b.heads, 1024, b.shape[3])
        pairs = list(zip(b.q_len, b.kv_len, strict=True))
        if form != "table":
            shape = (b.heads * sum(m * n if form == "blocks" else n for m, n in pairs),)
    else:
        form = "table" if long and maybe(rng, 0.8) else "full"
        rows = 1024 if form == "table" else b.tokens[0] if maybe(rng, 0.6) else 1
        shape = (batches, b.heads, rows, b.tokens[1])
    if int(np.prod(shape)) > 3_000_000 or not all(shape) or not sum(b.q_len):
        return None
    values = normal(rng, *shape).to(b.dtype)
    scale = p.scale if kind == 1 else 1.0
    if kind == 0 or p.scale > 0:
        if maybe(rng, 0.3):
            values[torch.from_numpy(rng.random(shape) < rng.choice([0.05, 0.5, 0.95]))] = -torch.inf
        if maybe(rng, 0.2):
            values[..., int(rng.integers(shape[-1])) :] = -torch.inf
    pse = Pse(values, _pse_places(b, form, shape), scale)
    _poison_pse(p, pse)
    p.pse = pse
    p.call["pse"] = pse.tensor
    if p.version == 2 and (kind == 0 or maybe(rng, 0.5)):
        p.call["pse_type"] = kind
    return None


def _poison_pse(p: Plan, pse: Pse) -> None:
    """Writes NaN to elements of pse that no visible score reads, and to value rows of keys with only -inf scores."""
    rng = p.batch.rng
    if maybe(rng, 0.6):
        read = torch.zeros(pse.values.numel(), dtype=torch.bool)
        for indices, count in zip(pse.indices, p.counts, strict=True):
            read[indices[count > 0]] = True
        pse.values.view(-1)[~read] = torch.nan
    pse.tensor = place(rng, pse.values, 0.5)


def draw_pse_slopes(p: Plan, kind: int) -> None:
    b, rng = p.batch, p.batch.rng
    shape = [(b.heads,), (1, b.heads), (len(b.q_len), b.heads)][int(rng.integers(3))]
    slopes = normal(rng, *shape).float()
    p.call |= {"pse": place(rng, slopes), "pse_type": kind}
    start = [0, 0]
    mode = p.call["sparse_mode"]
    if maybe(rng, 0.5) and not (mode == 8 and p.call.get("atten_mask") is None):
        start = [int(rng.integers(0, 60)), int(rng.integers(0, 60))]
        p.call |= {"q_start_idx": start[:1], "kv_start_idx": start[1:]}
        if maybe(rng, 0.2):  # one start index alone: the other one is 0
            gone = int(rng.integers(2))
            del p.call[("q_start_idx", "kv_start_idx")[gone]]
            start[gone] = 0
    first = next((s for s, m in enumerate(b.q_len) if m), 0)
    p.slopes = []
    for s, (m, n) in enumerate(zip(b.q_len, b.kv_len, strict=True)):
        shift = start if mode != 8 or s == first else [0, 0]
        distance = (torch.arange(n) + shift[1] - torch.arange(m)[:, None] - shift[0]).abs().double()
        each = slopes.double().reshape(-1, b.heads)
        each = each[s if len(each) > 1 else 0][:, None, None]
        p.slopes.append(-each * (distance if kind == 2 else distance.sqrt()))

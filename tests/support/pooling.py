"""Cases of pooling: rows in strided memory between NaN, and the results expected in float64."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from support.compressed import pooled_by_loops

from fusion_attention.contract import bind
from fusion_attention.ops.compressed.pooling import RECORD, Pooling, PoolingBackward
from fusion_attention.ops.shared.softmax_pooling import Windows, pooled

Tensor = torch.Tensor
Run = Callable[[Any], dict[str, Tensor]]  # computes a lowered call
NAMES = ("out", "dkv", "dgate", "dbias")


@dataclass(frozen=True)
class Case:
    """Sequences of rows, packed or padded to `size` rows.

    Args:
        dim: channels of a result. before: as in Windows.
    """

    ratio: int = 4
    overlap: bool = True
    dim: int = 24
    heads: int = 2
    lengths: tuple[int, ...] = (11, 0, 3, 8)
    size: int = 13
    packed: bool = False
    biased: bool = True
    before: bool = False

    @property
    def channels(self) -> int:
        return self.dim * (1 + self.overlap)

    def rows(self, seed: int, dtype: torch.dtype) -> Tensor:
        """Returns rows [B, size, heads, channels], with NaN around and after every sequence."""
        generator = torch.Generator().manual_seed(seed)
        memory = torch.full((len(self.lengths), self.size, self.heads + 1, self.channels + 3), torch.nan, dtype=dtype)
        rows = memory[:, :, 1:, 2:-1]
        for b, n in enumerate(self.lengths):
            rows[b, :n] = torch.randn(rows[b, :n].shape, generator=generator, dtype=torch.float64).to(dtype)
        return rows

    def pack(self, rows: Tensor, windows: bool = False) -> Tensor:
        """Copies padded rows (or windows) to the memory layout of the case."""
        counts = [max(n // self.ratio - self.before, 0) if windows else n for n in self.lengths]
        return torch.cat([rows[b, :n] for b, n in enumerate(counts)]) if self.packed else rows

    def table(self) -> Tensor | None:
        generator = torch.Generator().manual_seed(9)
        return torch.randn(self.ratio, self.channels, generator=generator) if self.biased else None

    def lowered(self, rows: Tensor, gates: Tensor, bias: Tensor | None) -> Pooling:
        counts = [max(n // self.ratio - self.before, 0) for n in self.lengths]
        args = {
            "kv": rows, "gate": gates, "position_bias": bias, "ratio": self.ratio, "overlap": self.overlap,
            "layout": "TND" if self.packed else "BSND", "kv_len": list(self.lengths), "before": self.before,
            "windows": sum(counts) if self.packed else 0,
        }  # fmt: skip
        call: Pooling = RECORD.lower(bind(RECORD, args))
        return call

    def upstream(self, dtype: torch.dtype) -> Tensor:
        """Returns gradients of padded results, with NaN after the last result."""
        room = max(self.size // self.ratio - self.before, 0)
        dout = torch.randn(len(self.lengths), room, self.heads, self.dim, generator=torch.Generator().manual_seed(5))
        for b, n in enumerate(self.lengths):
            dout[b, max(n // self.ratio - self.before, 0) :] = torch.nan
        return dout.to(dtype)


def both(call: Pooling, dout: Tensor, run: Run) -> tuple[Tensor, ...]:
    """Computes the results of NAMES; without a bias, the last result is absent."""
    return *run(call).values(), *run(PoolingBackward(call, dout)).values()


def computed(case: Case, dtype: torch.dtype, run: Run) -> tuple[Tensor, ...]:
    """Computes the results of NAMES of a case's tensors."""
    rows, gates = (case.pack(case.rows(seed, dtype)) for seed in (1, 2))
    return both(case.lowered(rows, gates, case.table()), case.pack(case.upstream(dtype), windows=True), run)


def expected(case: Case, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Computes the results of computed() in float64: loops over windows, gradients by autograd."""
    leaves = [case.rows(seed, dtype).double().nan_to_num() for seed in (1, 2)]
    table = case.table()
    leaves.append(torch.zeros(case.ratio, case.channels).double() if table is None else table.double())
    leaves = [t.requires_grad_() for t in leaves]
    dout, ones = case.upstream(dtype).double().nan_to_num(), []
    for b, n in enumerate(case.lengths):
        one = pooled_by_loops(leaves[0][b, :n], leaves[1][b, :n], leaves[2], case.ratio, case.overlap)[case.before :]
        ones.append(torch.cat((one, dout.new_zeros(dout.shape[1] - len(one), *dout.shape[2:]))))
    out = torch.stack(ones)
    gradients = torch.autograd.grad(out, leaves, dout) if out.requires_grad else [torch.zeros_like(t) for t in leaves]
    results = case.pack(out.detach(), windows=True), case.pack(gradients[0]), case.pack(gradients[1])
    return *results, *(gradients[2:] if case.biased else ())


def specified(case: Case, rows: Tensor, gates: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    """Computes the results of NAMES of padded tensors, which may be infinite or NaN, by golden's formula."""
    leaves = [t.double().requires_grad_() for t in (rows, gates, case.table())]
    out = pooled(*leaves, Windows(case.ratio, case.overlap, case.lengths))
    used = torch.tensor([n // case.ratio for n in case.lengths])[:, None, None, None]
    dout = dout.double().where(torch.arange(out.shape[1])[None, :, None, None] < used, 0)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)

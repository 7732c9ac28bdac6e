"""Defines cases of attention to a window and compressed keys, and a reference that computes them row by row."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from fusion_attention.contract import bind
from fusion_attention.ir.mask import Band
from fusion_attention.ops.compressed.api_definition import RECORD
from fusion_attention.ops.sparse.lowered_call import COMPRESSED, DIFFERENTIABLE, Sparse
from fusion_attention.testing.sparse import Maker, SparseCase, expected, keys_of, lists_of, selected, sequence_of

Args = dict[str, Any]
Results = dict[str, torch.Tensor]
LEAVES = (*DIFFERENTIABLE, *COMPRESSED)


@dataclass(frozen=True)
class CompressedCase(SparseCase):
    """A call, forward and backward.

    Args:
        ratio, window: arguments of the call.
        c_len: number of compressed keys of every sequence; (): one for each complete group of tokens.
        c_rest: number of compressed keys after those of all sequences.
        lists: "", no lists, or a value of SparseCase for lists of compressed keys.
    """

    ratio: int = 2
    window: int | None = 3
    c_len: tuple[int, ...] = ()
    c_rest: int = 0
    shares_kv: bool = True
    lists: str = ""

    def lengths(self, side: str) -> tuple[int, ...]:
        if side != "c":
            return super().lengths(side)
        return self.c_len or tuple(n // self.ratio for n in self.kv_len)

    def tokens(self, side: str) -> int:
        if side != "c":
            return super().tokens(side)
        lengths = self.lengths("c")
        return self.c_rest + (sum(lengths) if self.packed else max(lengths, default=3))

    def keys(self, b: int) -> int:
        return self.lengths("c")[b]

    def seen(self, b: int, row: int) -> int:
        """Returns the number of compressed keys that a row of sequence b sees."""
        position = self.kv_len[b] - self.q_len[b] + row
        return min(max(position + 1, 0) // self.ratio, self.keys(b))


@cache
def arguments(case: CompressedCase) -> Args:
    """Returns the arguments by canonical name, with dy, as strided views of poisoned memory."""
    make = Maker(case)
    table = make.table() if case.page else None

    def keys(side: str, dim: int) -> torch.Tensor:
        rows = make.rows(side, case.heads_kv, dim)
        return rows if table is None or side == "c" else make.paged(rows, table)

    given: Args = {
        "query": make.rows("q", case.heads_q, case.dim_qk),
        "key": keys("kv", case.dim_qk),
        "key_compressed": keys("c", case.dim_qk),
        "value": None if case.shares_kv else keys("kv", case.dim_v),
        "value_compressed": None if case.shares_kv else keys("c", case.dim_v),
        "dy": make.rows("q", case.heads_q, case.dim_qk if case.shares_kv else case.dim_v),
        "sparse_indices": lists_of(case, make, case.heads_kv) if case.lists else None,
        "sinks": make.draw(case.heads_q) if case.sink else None,
        "ratio": case.ratio,
        "band": Band.window(case.window - 1) if case.window else None,
        "layout": case.layout,
        "scale_value": case.scale,
        "block_table": table,
    }
    lengths = {"actual_seq_qlen": "q", "actual_seq_kvlen": "kv", "compressed_len": "c"}
    return given | {name: list(case.lengths(side)) for name, side in lengths.items()}


def lowered(args: Args) -> Sparse:
    call: Sparse = RECORD.lower(bind(RECORD, {p.name: args.get(p.name) for p in RECORD.params}))
    return call.complete()


def wanted(case: CompressedCase, args: Args) -> Any:
    return expected(lowered(args), None if case.page else args["dy"])


def witness(case: CompressedCase, args: Args) -> Results:
    """Computes out and gradients with torch.autograd in float64, row by row and without the package."""
    leaves = {n: args[n].detach().double().requires_grad_() for n in LEAVES if args.get(n) is not None}
    given = {**args, **leaves}
    out = torch.zeros(args["dy"].shape, dtype=torch.float64)
    group, total = case.heads_q // case.heads_kv, torch.zeros((), dtype=torch.float64)
    for b, rows in enumerate(case.q_len):
        for row in range(rows):
            end = case.kv_len[b] - rows + row + 1
            first = max(0, end - case.window) if case.window else 0
            for kv in range(case.heads_kv):
                heads, listed = slice(kv * group, (kv + 1) * group), list(range(case.seen(b, row)))
                if case.lists:
                    listed = selected(case, sequence_of(case, args["sparse_indices"], "q", b)[row, kv].tolist(), b, row)
                near, far = (
                    [keys_of(case, given, name, b)[first : max(end, 0), kv],
                     sequence_of(case, given[f"{name}_compressed"], "c", b)[listed, kv]]
                    for name in ("key", "key" if case.shares_kv else "value")
                )  # fmt: skip
                k, v = torch.cat(near), torch.cat(far)
                if not len(k):
                    continue
                s = case.scale * (sequence_of(case, given["query"], "q", b)[row, heads] @ k.mT)
                s = torch.cat((s, given["sinks"][heads, None]), -1) if case.sink else s
                result = s.softmax(-1)[:, : len(k)] @ v
                sequence_of(case, out, "q", b)[row, heads] = result.detach()
                total = total + (result * sequence_of(case, args["dy"].double(), "q", b)[row, heads]).sum()
    gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True) if total.requires_grad else ()
    gradients_by_name = {
        f"d{n}": torch.zeros_like(t) if g is None else g for (n, t), g in zip(leaves.items(), gradients, strict=False)
    }
    return {"out": out, **gradients_by_name}


def pooled_by_loops(
    kv: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor, ratio: int, overlap: bool
) -> torch.Tensor:
    """Pools one sequence [tokens, ..., C] to [windows, ..., D], window by window and channel by channel."""
    half, results = kv.shape[-1] // 2, []
    for w in range(len(kv) // ratio):
        current = [(p, slice(half, None) if overlap else slice(None)) for p in range(w * ratio, (w + 1) * ratio)]
        before = [(p - ratio, slice(0, half)) for p, _ in current] if overlap and w else []
        pairs = [(gate[p][..., c] + bias[p % ratio][c], kv[p][..., c]) for p, c in before + current]
        weights = torch.stack([z for z, _ in pairs]).softmax(0)
        results.append(sum(weight * x for weight, (_, x) in zip(weights, pairs, strict=True)))
    return torch.stack(results) if results else kv.new_zeros(0, *kv.shape[1:-1], half if overlap else kv.shape[-1])


DTYPES = ("float32", "float16", "bfloat16")
PACKED = CompressedCase(layout="TND", q_len=(3, 6, 4), kv_len=(5, 6, 9))
CASES = [
    *(CompressedCase(dtype=d, layout=layout, sink=True) for d in DTYPES for layout in ("BSND", "TND")),
    *(CompressedCase(lists=lists, count=5, heads_kv=2) for lists in ("all", "repeated", "wild", "none")),
    *(replace(PACKED, lists=lists, count=7, dtype="bfloat16", sink=True) for lists in ("all", "wild")),
    *(CompressedCase(dtype=d, lists="all", count=9, heads_q=8, dim_qk=32, window=1, sink=True) for d in DTYPES),
    *(CompressedCase(ratio=r, q_len=(9, 5), kv_len=(9, 5), c_len=(9 // r, 5 // r)) for r in (1, 3, 4)),
    CompressedCase(ratio=128, q_len=(9, 2), kv_len=(400, 260), window=100, dim_qk=64, dtype="bfloat16"),
    CompressedCase(ratio=128, q_len=(5, 5), kv_len=(9, 9), window=4),  # no compressed key
    CompressedCase(window=None, shares_kv=False, heads_q=6, heads_kv=3, dim_qk=7, dim_v=5, sink=True),
    CompressedCase(shares_kv=False, dim_v=12, dtype="float16", lists="all", count=3, wide=True),
    CompressedCase(q_len=(9, 9), kv_len=(4, 4), lists="all"),  # rows without keys
    CompressedCase(q_len=(9, 9), kv_len=(4, 4), sink=True, dtype="bfloat16"),
    replace(PACKED, q_len=(9, 2, 0, 3), kv_len=(4, 0, 5, 8), q_rest=2, kv_rest=3, c_rest=2, lists="all", sink=True),
    CompressedCase(q_len=(5, 2, 0), kv_len=(3, 9, 4), q_rest=1, kv_rest=2, c_rest=2, dtype="bfloat16"),
    CompressedCase(q_len=(0, 0), kv_len=(4, 4)),
    CompressedCase(q_len=(4, 4), kv_len=(0, 0), c_len=(2, 2), sink=True),  # only compressed keys
    CompressedCase(q_len=(130,), kv_len=(150,), ratio=4, count=16, heads_q=3, lists="all", window=40),
    CompressedCase(q_len=(3, 5), kv_len=(33, 7), page=16, lists="all", count=6, dtype="bfloat16", dim_qk=32),
    replace(PACKED, q_len=(3, 9), kv_len=(33, 7), page=16, heads_kv=2, sink=True),
]

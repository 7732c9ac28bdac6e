"""Makes long calls of every family and selects the pieces that are judged: both ends, tile boundaries and random ones.

The golden model takes minutes for a call of 16384 tokens; for a piece, its time depends on the keys of its rows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fusion_attention.judging.calls import Recorded, recorded
from fusion_attention.judging.chi_square_limits import Errors, ratios
from fusion_attention.judging.editable_call import Setting
from fusion_attention.judging.expected_error import KERNEL, Grade
from fusion_attention.judging.outputs import Output, Unit, computed, of_heads, setting_of
from fusion_attention.ops import RECORDS
from fusion_attention.testing.cases import Case, arguments
from fusion_attention.testing.sparse import SparseCase
from fusion_attention.testing.sparse import arguments as sparse_arguments

TILE = 32  # rows of a judged tile
PAGE = 128


@dataclass(eq=False)
class Long:
    """A call and the results of a back end."""

    call: Recorded
    setting: Setting
    outputs: list[Output]

    def restored(self) -> Long:
        """Returns a copy with separate results."""
        captured = {o.name: o.tensor.clone() for o in self.outputs}
        return Long(self.call, *setting_of(self.call.lowered(), captured))

    def length(self, o: Output, b: int) -> int:
        return int((self.setting.extents.kv_len if o.by_keys else self.setting.extents.q_len)[b])

    def unit(self, o: Output, b: int, head: int, first: int, count: int = TILE) -> Unit:
        """Returns `count` rows of a head; of gradients of keys: of all query heads that share a key head."""
        group = self.setting.group
        heads = slice(head // group * group, head // group * group + group) if o.by_keys else slice(head, head + 1)
        return Unit(b, heads, slice(first, min(first + count, self.length(o, b))), o.by_keys)


def computed_call(operator: str, inputs: dict[str, Any], backend: str = "cpu") -> Recorded:
    """Computes a call of a record; arguments that are None, or that the operator lacks, are left out."""
    names = RECORDS[operator].by_name.keys() - {"seed", "offset"}
    inputs = {n: v for n, v in inputs.items() if n in names and v is not None}
    call = recorded(operator, inputs, {"none yet": torch.zeros(1)})
    results = call.computed(backend, call.lowered().results())
    assert not isinstance(results, str), results
    return replace(call, outputs={n: t.clone() for n, t in results.items() if t.numel()}, cached={})


def long_call(operator: str, inputs: dict[str, Any], backend: str, saved: dict[str, Any] | None = None) -> Long:
    call = computed_call(operator, inputs | (saved or {}), backend)
    return Long(call, *setting_of(call.lowered(), call.judgeable(call.lowered())))


def dense(dtype: str, q_len: int, kv_len: int, *, causal: bool = True, backend: str = "cpu", **fields: Any) -> Long:
    """Computes training attention."""
    return long_call("npu_fusion_attention_v2", arguments(_case(dtype, q_len, kv_len, causal, **fields)), backend)


def gradient(dtype: str, q_len: int, kv_len: int, *, causal: bool = True, backend: str = "cpu", **fields: Any) -> Long:
    """Computes the backward, from the saved results of the same back end."""
    args = arguments(_case(dtype, q_len, kv_len, causal, **fields))
    saved = long_call("npu_fusion_attention_v2", args, backend).call.outputs
    names = {"attention_in": "attention_out", "softmax_max": "softmax_max", "softmax_sum": "softmax_sum"}
    return long_call("npu_fusion_attention_grad_v2", args, backend, {n: saved[o] for n, o in names.items()})


def _case(dtype: str, q_len: int, kv_len: int, causal: bool, **fields: Any) -> Case:
    mask: dict[str, Any] = {"sparse_mode": 3, "mask": "compressed"} if causal else {}
    sizes: dict[str, Any] = {"heads_q": 2, "heads_kv": 1, "dim_qk": 64, "dim_v": 64, "scale": 0.125}
    return Case(q_len=(q_len,), kv_len=(kv_len,), dtype=dtype, **(mask | sizes | fields))


def decode(dtype: str, lengths: Sequence[int], *, backend: str = "cpu", seed: int = 5) -> Long:
    """Computes a new token of each sequence over pages in random order."""
    make = torch.Generator().manual_seed(seed)
    kind = getattr(torch, dtype)
    pages = [-(-n // PAGE) for n in lengths]
    pool = [torch.randn(sum(pages), PAGE, 2 * 64, generator=make).to(kind) for _ in range(2)]
    order, table = torch.randperm(sum(pages), generator=make).int(), torch.zeros(len(lengths), max(pages)).int()
    for b, taken in enumerate(order.split(pages)):
        table[b, : len(taken)] = taken
    q = torch.randn(len(lengths), 4, 1, 64, generator=make).to(kind)
    inputs = {"query": q, "key": pool[0], "value": pool[1], "block_table": table, "num_heads": 4, "scale_value": 0.125,
              "input_layout": "BNSD", "num_key_value_heads": 2, "block_size": PAGE, "softmax_lse_flag": True,
              "actual_seq_lengths_kv": list(lengths)}  # fmt: skip
    return long_call("npu_fused_infer_attention_score", inputs, backend)


def sparse(dtype: str, q_len: int, kv_len: int, *, backend: str = "cpu", **fields: Any) -> Long:
    """Computes sparse attention over lists of 512 keys."""
    return long_call(
        "npu_sparse_flash_attention", sparse_arguments(_sparse_case(dtype, q_len, kv_len, **fields)), backend
    )


def sparse_gradient(dtype: str, q_len: int, kv_len: int, *, backend: str = "cpu", **fields: Any) -> Long:
    """Computes the backward, from the saved results of the same back end."""
    args = sparse_arguments(_sparse_case(dtype, q_len, kv_len, **fields))
    result = long_call("npu_sparse_flash_attention", args, backend).call.outputs
    saved = {"attention_in" if n == "attention_out" else n: t for n, t in result.items()}
    return long_call("npu_sparse_flash_attention_grad", args, backend, saved)


def _sparse_case(dtype: str, q_len: int, kv_len: int, **fields: Any) -> SparseCase:
    sizes: dict[str, Any] = {"count": 512, "dim_qk": 64, "dim_v": 64, "scale": 0.125, "mode": 0}
    return SparseCase("BSND", 0, dtype, (q_len,), (kv_len,), **(sizes | fields))


def pieces(long: Long, seed: int, drawn: int = 4) -> Iterator[Unit]:
    """Yields pieces of rows and keys: the first, the last, those at boundaries of kernels' tiles, and random ones."""
    rng = random.Random(seed)
    judged_kinds = set()
    for o in long.outputs:
        if o.by_keys in judged_kinds or o.view is None:
            continue
        judged_kinds.add(o.by_keys)
        for b in range(len(long.setting.extents)):
            length = long.length(o, b)
            last = max(length - TILE, 0)
            cuts = [n - TILE for n in (64, 128, 256, 512, 1024, 4096) if n < last]
            anywhere = [rng.randint(0, last) // TILE * TILE for _ in range(drawn)]
            for first in {0, last, *rng.sample(cuts, min(2, len(cuts))), *anywhere}:
                yield long.unit(o, b, rng.randrange(long.setting.problem.heads_q), first, 2 * TILE)


def failing(long: Long, units: Sequence[Unit], grade: Grade = KERNEL) -> dict[str, Any]:
    """Returns the checks that fail in these pieces, by output, with the limits of the whole call."""
    results: dict[str, Errors] = {}
    p, e = long.setting.problem, long.setting.extents
    for unit in units:
        wanted = computed(long.setting, unit, long.outputs, grade, exact=False)
        heads = of_heads(long.setting, unit)
        for o in long.outputs:
            if o.name not in wanted or o.by_keys != unit.by_keys or o.view is None:
                continue
            if o.name not in results:
                lengths, count = (e.kv_len, p.heads_kv) if o.by_keys else (e.q_len, p.heads_q)
                results[o.name] = Errors([int(n) for n in lengths], count, o.view.dim)
            ours, right = o.rows(long.setting, unit.b, heads, unit.rows), wanted[o.name]
            results[o.name].add(unit.b, heads, unit.rows, ratios(ours, right.value, right.variance.sqrt()))
    return {name: look for name, errors in results.items() if (look := errors.fails(0))}

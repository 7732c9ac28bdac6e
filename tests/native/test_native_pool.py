"""Pooling in the native core: every variant, forced, against float64, on strided rows between NaN."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.bits import same_bits, same_where_not_finite
from support.native_dense import VARIANTS
from support.pooling import NAMES, Case, Run, both, computed, expected, specified

from fusion_attention.backends import cpu
from fusion_attention.ops.compressed.pooling import OUT
from fusion_attention.ops.shared.softmax_pooling import Windows, pooled
from fusion_attention.testing.compare import compare
from fusion_attention.testing.estimated_rounding_errors import compare_with, expected_of

Tensor = torch.Tensor
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def core(variant: str | None = None) -> Run:
    """Returns a function that computes lowered calls by a variant of the core."""

    def run(call: Any) -> dict[str, Tensor]:
        results = call.results()
        filled = call.fill(results)
        filled.begin()
        plan: Any = cpu.schedule(call.problem, call.extents, call.op_kind, variant)
        getattr(cpu, call.op_kind)(call.problem, call.extents, plan, *filled.operands)
        filled.finish()
        return results

    return run


CASES = [
    Case(),
    Case(packed=True),
    Case(overlap=False, dim=37, heads=1),
    Case(biased=False, dim=64, heads=1, lengths=(17, 4), size=17),
    Case(ratio=1, overlap=False, dim=5, lengths=(3, 1), size=4),
    Case(ratio=1, dim=33, lengths=(3, 1), size=4),
    Case(ratio=2, dim=16),
    Case(ratio=3, packed=True, dim=7),
    Case(ratio=11, dim=19, heads=1, lengths=(40, 9, 22), size=40),
    Case(ratio=11, overlap=False, dim=40, lengths=(25,), size=30, packed=True),
    Case(ratio=8, overlap=False, dim=128, heads=1, lengths=(16,), size=19),
    Case(ratio=128, overlap=False, dim=18, heads=1, lengths=(300, 128), size=300),
    Case(before=True, lengths=(11, 8, 4), size=12),
    Case(before=True, ratio=12, lengths=(36, 24), size=36, packed=True, biased=False),
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, torch.float32) for case in CASES), *((case, dtype) for case in CASES[::3] for dtype in DTYPES[1:])],
    ids=str,
)
def test_pooling_results_and_gradients_match_float64(case: Case, dtype: torch.dtype) -> None:
    wanted = expected_of(lambda: expected(case, dtype), computed(case, dtype, core()))
    for variant in VARIANTS:
        for name, got, want in zip(NAMES, computed(case, dtype, core(variant)), wanted, strict=False):
            compare(f"{variant} {name}", got, want)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pooling_is_bitwise_equal_for_any_thread_count_and_packing(dtype: torch.dtype, overlap: bool) -> None:
    many = {"lengths": (1200, 0, 7, 333, 64), "size": 1203, "dim": 96, "heads": 1, "overlap": overlap}
    padded, packed = Case(**many), Case(**many, packed=True)
    with threads(1):
        want = computed(padded, dtype, core())
    for case, count in ((padded, 5), (packed, 1), (packed, 3)):
        with threads(count):
            got = computed(case, dtype, core())
        packed_results = (padded.pack(want[0]), *want[1:3]) if case is padded else want[:3]
        if case is packed:
            of = (packed.pack(want[0], windows=True), packed.pack(want[1]), packed.pack(want[2]))
            same_bits(got, (*of, want[3]), "packed")
        else:
            same_bits(got, (*packed_results, want[3]), "padded")


FILLS: dict[str, tuple[str, float]] = {
    "an infinite value": ("rows", torch.inf), "NaN": ("rows", torch.nan), "a gate of NaN": ("gates", torch.nan),
    "an infinite gate": ("gates", torch.inf), "a gate of -inf": ("gates", -torch.inf),
    "an infinite gradient": ("dout", -torch.inf), "a gradient of NaN": ("dout", torch.nan),
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("case", [Case(dim=20), Case(ratio=11, overlap=False, dim=20, heads=1)], ids=str)
def test_pooling_nan_and_infinity_appear_exactly_as_in_float64(case: Case, fill: str, variant: str) -> None:
    given = {"rows": case.rows(1, torch.float32), "gates": case.rows(2, torch.float32)}
    given["dout"] = case.upstream(torch.float32)
    given["gates"][0, 6, :, 11:] -= 200  # weights that no float32 holds, beside the others
    name, value = FILLS[fill]
    given[name][0, 0 if name == "dout" else 1, 0, 3:17] = value
    given["gates"][0, 7:, 0, 4] = -torch.inf if name == "gates" else 0.0
    if name == "rows":
        given[name][0, 6, 0, 15:19] = value
    got = both(case.lowered(given["rows"], given["gates"], case.table()), given["dout"], core(variant))
    want = specified(case, given["rows"], given["gates"], given["dout"])
    same_where_not_finite({"all": got}, {"all": want}, fill)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("overlap", [False, True])
def test_pooling_of_large_values_and_gates_does_not_overflow(variant: str, overlap: bool) -> None:
    case = Case(overlap=overlap, lengths=(24,), size=24, heads=1)
    rows, gates = case.rows(1, torch.float32).sign() * 3.4e38, case.rows(2, torch.float32) * 1e30
    gates[:, ::2] = case.rows(2, torch.float32)[:, ::2]
    for z in (gates, case.rows(2, torch.float32)):
        float64_results = pooled(rows.double(), z.double(), None, Windows(4, overlap))

        def program(z: Tensor = z) -> tuple[Tensor, ...]:
            return (pooled(rows.double(), z.double(), None, Windows(4, overlap)),)

        got = core(variant)(case.lowered(rows, z, None))[OUT]
        assert float64_results.isfinite().all()
        compare_with("large", (got,), program)


def test_pooling_refuses_sequences_with_fewer_rows_than_their_windows() -> None:
    case = Case()
    call = case.lowered(case.rows(1, torch.float32), case.rows(2, torch.float32), None)
    more = replace(call, extents=replace(call.extents, q_len=call.extents.q_len + 4))
    with pytest.raises(ValueError, match="a sequence has fewer rows than its windows"):
        core()(more)

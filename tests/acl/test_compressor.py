"""Compressor and CompressorGrad: the two-phase interface, and the Python function."""

import functools
import itertools
from typing import Any

import pytest
import torch
from support import two_phase
from support.bits import same_bits
from support.compressed import pooled_by_loops

from fusion_attention.npu.auxiliary.compressor import compressor
from fusion_attention.ops import RECORDS
from fusion_attention.testing.estimated_rounding_errors import compare_with

pytestmark = pytest.mark.usefixtures("runtime")
Tensor = torch.Tensor
Args = dict[str, Any]
FORWARD, GRAD = RECORDS["aclnnCompressor"], RECORDS["aclnnCompressorGrad"]
H, DIM, RATIO = 64, 128, 4  # the chip takes 1024 or more elements of a row
done = functools.partial(two_phase.done, strict=False)


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def arguments(coff: int, lengths: Args, packed: bool) -> Args:
    width = coff * DIM
    x = drawn(*((12,) if packed else (2, 11)), H, seed=1)
    return {
        "x": x, "wkv": drawn(width, H, seed=2) / 8, "wgate": drawn(width, H, seed=3) / 8,
        "state_cache": drawn(4, 16, 2 * width, seed=4, dtype=torch.float32), "ape": drawn(RATIO, width, seed=5).float(),
        "state_block_table": torch.tensor([[1, 2], [3, 0]], dtype=torch.int32), "cu_seqlens": None, "seqused": None,
        "start_pos": None, "cmp_ratio": RATIO, "coff": coff, "cache_mode": 1, "state_cache_stride_dim0": 0,
        "grad_enabled": True, **lengths,
    }  # fmt: skip


def outputs(args: Args) -> Args:
    x = args["x"]
    if args["cu_seqlens"] is None:
        shape: tuple[int, ...] = (x.shape[0], -(-x.shape[1] // RATIO))
    else:
        shape = (min(len(x), len(x) // RATIO + len(args["cu_seqlens"]) - 1),)
    saved = torch.full((*shape, args["coff"] * RATIO, DIM), torch.nan)
    return {"cmp_kv": torch.full((*shape, DIM), torch.nan).to(x.dtype), "softmax_score": saved, "kv": saved.clone()}


CASES: list[tuple[int, Args, bool]] = [
    (1, {}, False),
    (2, {}, False),
    (2, {"start_pos": [6, 3], "seqused": [9, 2]}, False),
    (1, {"start_pos": [6, 3]}, False),
    (2, {"cu_seqlens": [0, 9, 12], "start_pos": [5, 0]}, True),
    (1, {"cu_seqlens": [0, 9, 12]}, True),
]


def called(args: Args) -> tuple[Tensor, Tensor]:
    """Calls the Python function; returns its result and the updated cache."""
    names = ("x", "wkv", "wgate", "state_cache", "ape", "cmp_ratio", "state_block_table", "cu_seqlens", "seqused",
             "start_pos", "coff", "cache_mode")  # fmt: skip
    given = {name: args[name] for name in names}
    given["state_cache"] = args["state_cache"].clone()
    return compressor(**given), given["state_cache"]


def by_loops(args: Args) -> Tensor:
    """Computes the result in float64 by loops over channels; the first block of a sequence holds its earlier rows."""
    x, wkv, wgate, ape, cache = (args[n].double() for n in ("x", "wkv", "wgate", "ape", "state_cache"))
    ends = args["cu_seqlens"]
    parts = list(x) if ends is None else [x[a:b] for a, b in itertools.pairwise(ends)]
    results = []
    for b, one in enumerate(parts):
        start = args["start_pos"][b] if args["start_pos"] else 0
        one = one[: args["seqused"][b]] if args["seqused"] else one
        block = cache[args["state_block_table"][b, 0], :start]
        kv, z = (torch.cat(pair) for pair in zip(block.chunk(2, -1), (one @ wkv.T, one @ wgate.T), strict=True))
        z = torch.cat((z[:start] - ape[torch.arange(start) % RATIO], z[start:]))  # the cache has it with ape
        results.append(pooled_by_loops(kv, z, ape, RATIO, args["coff"] == 2)[start // RATIO :])
    if ends is None:
        room = -(-x.shape[1] // RATIO)
        return torch.stack([torch.cat((rows, rows.new_zeros(room - len(rows), DIM))) for rows in results])
    every = torch.cat(results)
    size = min(len(x), len(x) // RATIO + len(results))
    return torch.cat((every, every.new_zeros(size - len(every), DIM)))


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("coff", "lengths", "packed"), CASES, ids=str)
def test_compressor_and_its_gradient_match_naive_loops_and_autograd(coff: int, lengths: Args, packed: bool) -> None:
    args = arguments(coff, lengths, packed)
    want, cache = called(args)
    cached = args["state_cache"].clone()
    got = done(FORWARD, args | {"state_cache": cached}, outputs(args))
    same_bits(cached, cache, "state_cache")

    compare_with("(cmp_kv, of the function)", (got["cmp_kv"], want), lambda: (by_loops(args),) * 2, draws=8)
    dcmp_kv = drawn(*got["cmp_kv"].shape, seed=6)
    given = {p.name: args.get(p.name) for p in GRAD.params}
    given |= {"dcmp_kv": dcmp_kv, "softmax_score": got["softmax_score"], "kv": got["kv"]}
    gradients = done(GRAD, given, {f"d{n}": torch.full_like(args[n], torch.nan) for n in ("x", "wkv", "wgate", "ape")})
    leaves = {n: args[n].clone().requires_grad_() for n in ("x", "wkv", "wgate", "ape")}
    autograd = torch.autograd.grad(called({**args, **leaves})[0], list(leaves.values()), dcmp_kv)

    def program() -> tuple[Tensor, ...]:
        doubles = {n: t.detach().double().requires_grad_() for n, t in leaves.items()}
        return torch.autograd.grad(by_loops({**args, **doubles}), list(doubles.values()), dcmp_kv.double())

    ours = [gradients[f"d{n}"] for n in leaves]
    compare_with("(gradients, autograd)", (*ours, *autograd), lambda: program() * 2, draws=8)


def test_compressor_saves_rows_of_previous_and_current_window_alternately() -> None:
    """Order of saved rows: previous 0, current 0, previous 1, current 1 and so on."""
    args = arguments(2, {}, False)
    got = done(FORWARD, args, outputs(args))
    x, wkv = args["x"][0].double(), args["wkv"].double()
    projected, rounding = x @ wkv.T, x.shape[-1] * 2**-24 * (x.abs() @ wkv.abs().T)
    for p in range(RATIO):
        for row, at in ((2 * p, (p, slice(DIM))), (2 * p + 1, (RATIO + p, slice(DIM, None)))):
            assert ((got["kv"][0, 1, row] - projected[at]).abs() <= rounding[at]).all()
        assert not got["softmax_score"][0, 0, 2 * p].any()
    assert not got["kv"][:, 2].any()  # 11 rows close two windows
    pooled = (got["softmax_score"] * got["kv"]).sum(2)
    assert torch.equal(pooled.bfloat16()[:, 2], got["cmp_kv"][:, 2])


def test_compressor_without_grad_enabled_needs_no_saved_outputs() -> None:
    args = arguments(1, {"grad_enabled": False}, False)
    want = done(FORWARD, arguments(1, {}, False), outputs(args))
    got = done(FORWARD, args, {"cmp_kv": outputs(args)["cmp_kv"]})
    same_bits(got["cmp_kv"], want["cmp_kv"], "cmp_kv")

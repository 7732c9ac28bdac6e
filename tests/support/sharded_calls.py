"""Runs calls of attention on the ranks of a world, and the same calls in one process."""

import random
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from support.bits import same
from support.pieces import Call, expected
from torch.distributed.device_mesh import init_device_mesh

import fusion_attention as fa
from fusion_attention import Band
from fusion_attention.distributed import attention, shard, unshard
from fusion_attention.distributed.groups import group_of
from fusion_attention.judging.chi_square_limits import Expected
from fusion_attention.ops.shared.layouts import LAYOUTS
from fusion_attention.testing import check

S = 4 * 64 + 7  # of four whole tiles and a part: enough to divide them among two ranks as early and late chunks


def tensors(layout: str, dtype: torch.dtype, b: int, s1: int, s2: int, n1: int, n2: int, d: int, **more: Any) -> Any:
    """Makes the complete tensors of a call: q, k, v and those of the case's options."""
    torch.manual_seed(7)

    def rows(s: int, n: int, dim: int) -> torch.Tensor:
        x = torch.randn(b, s, n, dim)
        axes = {"BSND": x, "BNSD": x.transpose(1, 2), "BSH": x.flatten(2), "SBH": x.flatten(2).transpose(0, 1)}
        return (x[0] if layout == "TND" else axes[layout]).to(dtype)

    tensors_made = {"q": rows(s1, n1, d), "k": rows(s2, n2, d), "v": rows(s2, n2, more.pop("dv", d))}
    if dr := more.pop("dr", 0):
        tensors_made |= {"q_rope": rows(s1, n1, dr), "k_rope": rows(s2, n2, dr)}
    if more.pop("sink", False):
        tensors_made["sink"] = torch.randn(n1)
    if more.pop("slopes", False):
        tensors_made["alibi_slopes"] = torch.rand(n1)
    if bias := more.pop("bias", None):
        tensors_made["bias"] = torch.randn(bias).to(dtype)
    if blocked := more.pop("blocked", None):
        tensors_made["blocked"] = torch.rand(blocked) < 0.3
    assert not more
    return tensors_made


GRADIENTS = ("q", "k", "v", "q_rope", "k_rope", "bias", "sink")


def upstream(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(11)
    return torch.randn(shape).to(dtype)


def of_one(case: dict[str, Any]) -> dict[str, torch.Tensor]:
    words = {"layout": "BSND", **case["words"]}
    leaves = tensors(words["layout"], case["dtype"], **case["sizes"])
    leaves = {n: t.requires_grad_(n in GRADIENTS) for n, t in leaves.items()}
    out, lse = fa.attention(**leaves, **words, return_lse=True)
    out.backward(upstream(out.shape, case["dtype"]))
    return {"out": out.detach(), "lse": lse.detach(), **{"d" + n: leaves[n].grad for n in GRADIENTS if n in leaves}}


def summed(local: torch.Tensor, group: Any) -> torch.Tensor:
    """Adds the ranks' parts of the gradient of a replicated tensor, in the order of the ranks."""
    parts = [torch.zeros_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, local.contiguous(), group=group)
    return sum(parts[1:], parts[0].float()).to(local.dtype)


@cache
def mesh_of(rows: int) -> Any:
    """Returns a mesh, made once in a process, because new connections take long."""
    return init_device_mesh("cpu", (rows, 2))


def of_ranks(group: Any, schedule: str, case: dict[str, Any], options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Computes a case on the ranks of a group and returns the unsharded results and gradients."""
    line = group
    if schedule == "ulysses+ring":
        group = mesh_of(group_of(group).world // 2)
    words = {"layout": "BSND", **case["words"]}
    batch, token, _ = LAYOUTS[words["layout"]]
    tensors_made = tensors(words["layout"], case["dtype"], **case["sizes"])
    s1, s2 = case["sizes"]["s1"], case["sizes"]["s2"]
    lengths = {"q": s1, "k": s2}
    if batch is None:
        lengths = {"q": words["q_len"], "k": words.get("kv_len", words["q_len"])}
    lengths |= {"q_rope": lengths["q"], "v": lengths["k"], "k_rope": lengths["k"]}
    # Sharded tensor: (length, axis).
    sharded_axes = {name: (lengths[name], token) for name in tensors_made if name in lengths}
    sharded_axes |= {
        name: (s1, -2) for name in ("bias", "blocked") if name in tensors_made and tensors_made[name].shape[-2] != 1
    }
    local = {
        name: (shard(t, group, schedule, *sharded_axes[name]) if name in sharded_axes else t)
        .detach()
        .requires_grad_(name in GRADIENTS)
        for name, t in tensors_made.items()
    }
    tokens = None if batch is None else (s1, s2)
    out, lse = attention(**local, **words, **options, group=group, schedule=schedule, tokens=tokens, return_lse=True)
    full = unshard(out.detach(), group, schedule, *sharded_axes["q"])
    out.backward(shard(upstream(full.shape, case["dtype"]), group, schedule, *sharded_axes["q"]))
    results = {"out": full, "lse": unshard(lse.detach(), group, schedule, lengths["q"], 0 if batch is None else 2)}
    for name in GRADIENTS:
        if name in local:
            grad = local[name].grad
            assert grad is not None
            results["d" + name] = (
                unshard(grad, group, schedule, *sharded_axes[name]) if name in sharded_axes else summed(grad, line)
            )
    return results


def all_of(group: Any, schedule: str, names: list[Any], options: dict[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
    """Returns the results of several cases, and asserts that the first case gives the same bits in a second run."""
    results = {name: of_ranks(group, schedule, named(name), options) for name in names}
    again = of_ranks(group, schedule, named(names[0]), options)
    assert all(same(results[names[0]][n], t) for n, t in again.items()), "another run gave other bits"
    return results if group_of(group).rank == 0 else {}


def case(dtype: torch.dtype = torch.float32, words: Any = None, **sizes: Any) -> dict[str, Any]:
    sizes = {"b": 1, "s1": S, "s2": sizes.get("s1", S), "n1": 4, "n2": 4, "d": 16} | sizes
    return {"dtype": dtype, "sizes": sizes, "words": words or {}}


CAUSAL = Band.causal()
PACKED = [130, 0, 64, 5, 200, 300, 77]
CASES = {
    "full": case(),
    "causal": case(words={"band": CAUSAL}, s1=8 * 64 + 5),
    "bf16": case(torch.bfloat16, words={"band": CAUSAL, "layout": "BNSD"}, n2=2, s1=520),
    "f16": case(torch.float16, words={"band": Band.window(70, 3)}, b=2, n2=2),
    "cross": case(words={"band": CAUSAL, "layout": "BSH", "heads": 4}, s1=150, s2=520, b=2),
    "padded": case(words={"q_len": [S, 5, 0], "kv_len": [S, 100, 30], "layout": "SBH", "heads": 4}, b=3),
    "packed": case(words={"layout": "TND", "q_len": PACKED, "band": CAUSAL}, s1=sum(PACKED)),
    "packed_cross": case(
        words={"layout": "TND", "q_len": [100, 7, 0, 200], "kv_len": [400, 0, 3, 190], "band": Band.window(60, 60)},
        s1=307,
        s2=593,
    ),
    "sink": case(torch.bfloat16, words={"band": CAUSAL}, n2=2, sink=True, b=2),
    "sink_packed": case(
        words={"layout": "TND", "q_len": PACKED, "kv_len": PACKED[::-1], "band": Band.window(40, 0)},
        s1=sum(PACKED),
        sink=True,
    ),
    "alibi": case(words={"band": CAUSAL}, slopes=True),
    "dropout": case(words={"band": CAUSAL, "keep_prob": 0.8, "seed": 1234, "offset": 3}, b=2),
    "rope": case(torch.bfloat16, words={"band": CAUSAL}, n2=2, dr=8, dv=24),
    "prefix": case(words={"band": Band.prefix_causal([100])}),
    "softcap": case(words={"band": CAUSAL, "softcap": 2.0}),
    "bias": case(words={"band": CAUSAL}, b=2, bias=(2, 4, S, S)),
    "bias_bf16": case(torch.bfloat16, {"band": CAUSAL}, b=2, bias=(2, 4, S, S)),
    "bias_rows": case(b=2, bias=(4, S, S)),
    "bias_keys": case(b=2, bias=(2, 1, 1, S)),
    "blocked": case(words={"band": CAUSAL}, b=2, blocked=(2, 1, S, S)),
    "short": case(s1=3, words={"band": CAUSAL}),
    "one_tile": case(s1=64, s2=70),
    "means": case(words={"band": Band.window(-100, 30), "empty_rows": "mean"}),
}


def drawn(seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    n2 = draw.choice([1, 2, 4])
    sizes: dict[str, Any] = {"b": draw.choice([1, 1, 3]), "n1": 4, "n2": n2, "d": draw.choice([8, 24, 64])}
    words: dict[str, Any] = {"layout": draw.choice(["BSND", "BNSD", "BSH", "SBH", "TND", "TND"])}
    if words["layout"] == "TND":
        count = draw.randint(1, 6)
        q_len = [draw.choice([0, 1, 63, 64, 65, 200, 512, 700]) for _ in range(count)]
        kv_len = q_len if draw.random() < 0.5 else [draw.choice([0, 5, 64, 300, 640]) for _ in range(count)]
        words |= {"q_len": q_len, "kv_len": kv_len}
        sizes |= {"b": 1, "s1": sum(q_len), "s2": sum(kv_len)}
    else:
        sizes |= {"s1": draw.choice([2, 130, 320, 520]), "s2": draw.choice([3, 128, 321, 600])}
        if draw.random() < 0.5:
            words["q_len"] = [draw.randint(0, sizes["s1"]) for _ in range(sizes["b"])]
            words["kv_len"] = [draw.randint(0, sizes["s2"]) for _ in range(sizes["b"])]
        if draw.random() < 0.4:
            shape = (draw.choice([1, sizes["b"]]), draw.choice([1, 4]), sizes["s1"], sizes["s2"])
            sizes[draw.choice(["bias", "blocked"])] = shape
    words["heads"] = 4 if words["layout"] in ("BSH", "SBH") else 0
    words["band"] = draw.choice(
        [None, Band.causal(), Band.window(70, 9), Band.window(-5, 40), Band.causal(align="start")]
    )
    if draw.random() < 0.3 and "bias" not in sizes:
        sizes["slopes"] = True
    sizes |= {name: True for name in ("sink",) if draw.random() < 0.3}
    sizes |= {name: size for name, size in (("dr", 8), ("dv", 16)) if draw.random() < 0.3}
    if draw.random() < 0.3:
        words |= {"keep_prob": 0.7, "seed": seed}
    if draw.random() < 0.2:
        words["softcap"] = 3.0
    if draw.random() < 0.2:
        words["empty_rows"] = "mean"
    return case(draw.choice([torch.float32, torch.bfloat16, torch.float16]), words, **sizes)


def named(name: str | int) -> dict[str, Any]:
    """Returns a case by name, or a random case by seed."""
    return drawn(name) if isinstance(name, int) else CASES[name]


@cache
def one(name: str | int) -> dict[str, torch.Tensor]:
    return of_one(named(name))


@cache
def wanted(name: str | int) -> dict[str, Expected]:
    """Returns the expected results, for any number of processes."""
    case = named(name)
    words = {"layout": "BSND", **case["words"]}
    args = tensors(words["layout"], case["dtype"], **case["sizes"]) | words
    out = fa.attention(**args)
    call = Call(args, upstream(out.shape, case["dtype"]), words.get("seed", 0))
    return {name: e for name, e in expected(call).items() if name not in ("max", "sum")}


def judge(name: str | int, results: dict[str, torch.Tensor]) -> None:
    """Compares results with the golden results of the complete call."""
    check(f"{name}", {output: t for output, t in results.items() if t.numel()}, wanted(name))

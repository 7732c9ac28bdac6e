"""distributed.attention() on worlds of one to four beside one process: bits, or the house rule against golden."""

import inspect
import weakref
from functools import cache
from typing import Any

import pytest
import torch
from support.bits import same
from support.worlds import Worlds
from torch.distributed.device_mesh import init_device_mesh

import fusion_attention as fa
from fusion_attention import Band
from fusion_attention.distributed import attention, schedules, shard, unshard
from fusion_attention.distributed.groups import group_of
from fusion_attention.ops.shared.layouts import LAYOUTS
from fusion_attention.testing.compare import compare

S = 5 * 64 + 7


def tensors(layout: str, dtype: torch.dtype, b: int, s1: int, s2: int, n1: int, n2: int, d: int, **more: Any) -> Any:
    """q, k, v, and what a case asks for, all of the whole call."""
    torch.manual_seed(7)

    def rows(s: int, n: int, dim: int) -> torch.Tensor:
        x = torch.randn(b, s, n, dim)
        axes = {"BSND": x, "BNSD": x.transpose(1, 2), "BSH": x.flatten(2), "SBH": x.flatten(2).transpose(0, 1)}
        return (x[0] if layout == "TND" else axes[layout]).to(dtype)

    made = {"q": rows(s1, n1, d), "k": rows(s2, n2, d), "v": rows(s2, n2, more.pop("dv", d))}
    if dr := more.pop("dr", 0):
        made |= {"q_rope": rows(s1, n1, dr), "k_rope": rows(s2, n2, dr)}
    if more.pop("sink", False):
        made["sink"] = torch.randn(n1)
    if more.pop("slopes", False):
        made["alibi_slopes"] = torch.rand(n1)
    if bias := more.pop("bias", None):
        made["bias"] = torch.randn(bias).to(dtype)
    if blocked := more.pop("blocked", None):
        made["blocked"] = torch.rand(blocked) < 0.3
    assert not more
    return made


GRADIENTS = ("q", "k", "v", "q_rope", "k_rope", "bias", "sink")


def upstream(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(11)
    return torch.randn(shape).to(dtype)


def of_one(case: dict[str, Any], backend: str = "auto") -> dict[str, torch.Tensor]:
    """One process."""
    words = {"layout": "BSND", **case["words"]}
    made = tensors(words["layout"], case["dtype"], **case["sizes"])
    if backend == "golden":
        made = {n: t.double() if t.is_floating_point() else t for n, t in made.items()}
    made = {n: t.requires_grad_(n in GRADIENTS) for n, t in made.items()}
    out, lse = fa.attention(**made, **words, return_lse=True, backend=backend)
    out.backward(upstream(out.shape, case["dtype"]).to(out.dtype))
    return {"out": out.detach(), "lse": lse.detach(), **{"d" + n: made[n].grad for n in GRADIENTS if n in made}}


def of_ranks(group: Any, schedule: str, case: dict[str, Any], options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The ranks of a group, put together again."""
    if schedule == "ulysses+ring":
        group = init_device_mesh("cpu", (group_of(group).world // 2, 2))
    words = {"layout": "BSND", **case["words"]}
    batch, token, _ = LAYOUTS[words["layout"]]
    made = tensors(words["layout"], case["dtype"], **case["sizes"])
    s1, s2 = case["sizes"]["s1"], case["sizes"]["s2"]
    lengths = {"q": s1, "k": s2}
    if batch is None:
        lengths = {"q": words["q_len"], "k": words.get("kv_len", words["q_len"])}
    lengths |= {"q_rope": lengths["q"], "v": lengths["k"], "k_rope": lengths["k"]}
    # What is cut: how long it is, and along which axis.
    cut = {name: (lengths[name], token) for name in made if name in lengths}
    cut |= {name: (s1, -2) for name in ("bias", "blocked") if name in made and made[name].shape[-2] != 1}
    local = {
        name: (shard(t, group, schedule, *cut[name]) if name in cut else t).detach().requires_grad_(name in GRADIENTS)
        for name, t in made.items()
    }
    tokens = None if batch is None else (s1, s2)
    out, lse = attention(**local, **words, **options, group=group, schedule=schedule, tokens=tokens, return_lse=True)
    whole = unshard(out.detach(), group, schedule, *cut["q"])
    out.backward(shard(upstream(whole.shape, case["dtype"]), group, schedule, *cut["q"]))
    found = {"out": whole, "lse": unshard(lse.detach(), group, schedule, lengths["q"], 0 if batch is None else 2)}
    for name in GRADIENTS:
        if name in local:
            grad = local[name].grad
            assert grad is not None
            found["d" + name] = unshard(grad, group, schedule, *cut[name]) if name in cut else grad
    return found


def all_of(group: Any, schedule: str, names: list[str], options: dict[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
    """What rank 0 finds of several cases, and whether every rank finds the same bits as before in the first of them."""
    found = {name: of_ranks(group, schedule, CASES[name], options) for name in names}
    again = of_ranks(group, schedule, CASES[names[0]], options)
    assert all(same(found[names[0]][n], t) for n, t in again.items()), "other bits in another run"
    return found if group_of(group).rank == 0 else {}


def case(dtype: torch.dtype = torch.float32, words: Any = None, **sizes: Any) -> dict[str, Any]:
    sizes = {"b": 1, "s1": S, "s2": sizes.get("s1", S), "n1": 4, "n2": 4, "d": 16} | sizes
    return {"dtype": dtype, "sizes": sizes, "words": words or {}}


CAUSAL = Band.causal()
PACKED = [130, 0, 64, 5, 200, 300, 77]
TURNED = {"layout": "TND", "q_len": PACKED, "kv_len": PACKED[::-1], "band": Band.window(40, 0)}
CASES = {
    "full": case(),
    "causal": case(words={"band": CAUSAL}, s1=9 * 64 + 5),
    "bf16": case(torch.bfloat16, words={"band": CAUSAL, "layout": "BNSD"}, n2=2, s1=600),
    "f16": case(torch.float16, words={"band": Band.window(70, 3)}, b=2, n2=2),
    "cross": case(words={"band": CAUSAL, "layout": "BSH", "heads": 4}, s1=150, s2=600, b=2),
    "padded": case(words={"q_len": [327, 5, 0], "kv_len": [327, 100, 30], "layout": "SBH", "heads": 4}, b=3),
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


@cache
def one(name: str, backend: str = "auto") -> dict[str, torch.Tensor]:
    return of_one(CASES[name], backend)


def judge(name: str, found: dict[str, torch.Tensor]) -> None:
    """The house rule, with one process for the plain program."""
    golden, plain = one(name, "golden"), one(name)
    sizes = CASES[name]["sizes"]
    assert found.keys() == golden.keys()
    for what, ours in found.items():
        compare(f"{name}: {what}", ours, golden[what], plain[what], max(sizes["s1"], sizes["s2"]))


EVERY = list(CASES)
SOME = ["bf16", "packed_cross", "sink_packed", "dropout", "bias", "short"]


@pytest.mark.parametrize(("world", "names"), [(1, SOME), (2, SOME), (3, EVERY), (4, SOME)])
def test_gathered_keys_give_the_bits_of_one_process(worlds: Worlds, world: int, names: list[str]) -> None:
    for name, found in worlds.run(world, all_of, "allgather", names, {"deterministic": True})[0].items():
        for what, ours in found.items():
            assert ours.dtype == one(name)[what].dtype
            # A bias that all rows share is summed over ranks.
            assert same(ours, one(name)[what]) or (name, what) == ("bias_keys", "dbias"), f"{name}: {what}"
            judge(name, found)


def test_gradients_that_ranks_add_leave_the_rest_as_it_is(worlds: Worlds) -> None:
    for name, found in worlds.run(3, all_of, "allgather", EVERY, {})[0].items():
        judge(name, found)
        assert all(same(found[what], one(name)[what]) for what in ("out", "lse", "dq")), name


@pytest.mark.parametrize(
    ("schedule", "world", "names"),
    [
        ("ring", 3, SOME),
        ("zigzag", 2, SOME),
        ("zigzag", 3, EVERY),
        ("zigzag", 4, SOME),
        ("ulysses", 2, EVERY),
        ("ulysses", 4, SOME),
        ("ulysses+ring", 4, EVERY),
        ("ulysses+ring", 2, ["rope", "short"]),
    ],
)
def test_every_schedule_is_as_good_as_one_process(worlds: Worlds, schedule: str, world: int, names: list[str]) -> None:
    for name, found in worlds.run(world, all_of, schedule, names, {})[0].items():
        judge(name, found)
        if schedule == "ulysses" and not CASES[name]["sizes"].get("sink"):
            assert all(same(found[what], one(name)[what]) for what in ("out", "lse", "dq")), name


def blocks(group: Any, tokens: int) -> tuple[int, int]:
    """The most tensors of others' keys, or of what they are given, that a rank holds at once: forward, backward."""
    fresh, held, most = schedules.empty, 0, [0, 0]

    def gone() -> None:
        nonlocal held
        held -= 1

    def counted(*words: Any) -> torch.Tensor:
        nonlocal held
        made = fresh(*words)
        held += 1
        most[backward] = max(most[backward], held)
        weakref.finalize(made, gone)
        return made

    schedules.empty = counted
    try:
        q, k, v = (shard(torch.randn(1, tokens, 2, 8), group, "zigzag", tokens).requires_grad_() for _ in range(3))
        backward = 0
        out = attention(q, k, v, group=group, tokens=tokens)
        backward = 1
        out.sum().backward()
    finally:
        schedules.empty = fresh
    return most[0], most[1]


def test_a_ring_holds_two_blocks_of_keys_whatever_its_size(worlds: Worlds) -> None:
    """Blocks of k and v; backward, besides: gradients that come, and those that this rank hands on."""
    for world in (2, 3, 4):
        for forward, backward in worlds.run(world, blocks, 8 * 64 * world):
            assert forward <= 2 * 2
            assert backward <= 2 * 4


def test_it_takes_what_one_process_takes() -> None:
    """All parameters of fusion_attention.attention with their defaults, but for what is not cut among ranks."""
    ours, theirs = (dict(inspect.signature(f).parameters) for f in (attention, fa.attention))
    for name in ("drop_bits", "blocked_tiles", "blocked_bits"):
        del theirs[name]
    for name in ("group", "schedule", "tokens", "deterministic"):
        del ours[name]
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]

"""distributed.attention() on worlds of one to four beside one process: bits, or the house rule against golden."""

from typing import Any

import pytest
import torch
from support.worlds import Worlds

import fusion_attention as fa
from fusion_attention import Band
from fusion_attention.distributed import attention, shard, unshard
from fusion_attention.distributed.groups import group_of
from fusion_attention.ops.shared.layouts import LAYOUTS

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


def run(call: Any, made: dict[str, Any], words: dict[str, Any]) -> dict[str, torch.Tensor]:
    """out, lse and all gradients of a call whose upstream gradient is known to every rank."""
    made = {n: t.detach().requires_grad_(n in GRADIENTS) for n, t in made.items()}
    out, lse = call(**made, **words, return_lse=True)
    torch.manual_seed(11)
    return made, out, lse


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
        from torch.distributed.device_mesh import init_device_mesh

        group = init_device_mesh("cpu", case["mesh"])
    words = {"layout": "BSND", **case["words"]}
    layout = words["layout"]
    batch, token, _ = LAYOUTS[layout]
    made = tensors(layout, case["dtype"], **case["sizes"])
    s1, s2 = case["sizes"]["s1"], case["sizes"]["s2"]
    lengths = {"q": s1, "k": s2}
    if batch is None:
        lengths = {"q": words["q_len"], "k": words.get("kv_len", words["q_len"])}
    sides = {"q": "q", "q_rope": "q", "k": "k", "v": "k", "k_rope": "k"}
    local = {}
    for name, t in made.items():
        if name in sides:
            t = shard(t, group, schedule, lengths[sides[name]], token)
        elif name in ("bias", "blocked") and t.shape[-2] != 1:
            t = shard(t, group, schedule, s1, -2)
        local[name] = t.detach().requires_grad_(name in GRADIENTS)
    tokens = None if batch is None else (s1, s2)
    out, lse = attention(**local, **words, **options, group=group, schedule=schedule, tokens=tokens, return_lse=True)
    whole = unshard(out.detach(), group, schedule, lengths["q"], token)
    out.backward(shard(upstream(whole.shape, case["dtype"]), group, schedule, lengths["q"], token))
    found = {"out": whole, "lse": unshard(lse.detach(), group, schedule, lengths["q"], 0 if batch is None else 2)}
    for name in GRADIENTS:
        if name in local:
            grad = local[name].grad
            if name in sides:
                grad = unshard(grad, group, schedule, lengths[sides[name]], token)
            elif name == "bias" and made["bias"].shape[-2] != 1:
                grad = unshard(grad, group, schedule, s1, -2)
            found["d" + name] = grad
    assert group_of(group).world
    return found


def case(dtype: torch.dtype = torch.float32, mesh: Any = (2, 2), words: Any = None, **sizes: Any) -> dict[str, Any]:
    sizes = {"b": 1, "s1": S, "s2": sizes.get("s1", S), "n1": 4, "n2": 4, "d": 16} | sizes
    return {"dtype": dtype, "sizes": sizes, "mesh": mesh, "words": words or {}}


CAUSAL = Band.causal()
PACKED = [130, 0, 64, 5, 200, 300, 77]
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
    "bias_rows": case(b=2, bias=(4, S, S)),
    "bias_keys": case(b=2, bias=(2, 1, 1, S)),
    "blocked": case(words={"band": CAUSAL}, b=2, blocked=(2, 1, S, S)),
    "short": case(s1=3, words={"band": CAUSAL}),
    "one_tile": case(s1=64, s2=70),
    "means": case(words={"band": Band.window(-100, 30), "empty_rows": "mean"}),
}

"""Sparse attention, the indexer and its loss on several ranks equal one process, bitwise where that is promised."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.bits import same_bits
from support.sharded_calls import summed
from support.worlds import Worlds
from torch.distributed.device_mesh import init_device_mesh

import fusion_attention as fa
import fusion_attention.distributed as far
from fusion_attention.contract import bind
from fusion_attention.distributed.topk import best
from fusion_attention.judging.chi_square_limits import Expected
from fusion_attention.ops.indexer import api_definition as indexer_own
from fusion_attention.ops.indexer.lower import indexer_call
from fusion_attention.ops.indexer.lowered_call import IndexerBackward
from fusion_attention.ops.indexer_loss import api_definition as loss_own
from fusion_attention.ops.indexer_loss.lower import lower
from fusion_attention.ops.sparse import api_definition as sparse_own
from fusion_attention.ops.sparse.lower import sparse_call
from fusion_attention.testing import check, sparse
from fusion_attention.testing.cases import Named
from fusion_attention.testing.expected_indexer import expected_index
from fusion_attention.torch_ops.eager import run

Tensor = torch.Tensor


@dataclass(frozen=True)
class Case(Named):
    """Lengths of full sequences, padded to `padded` tokens or (0) packed, and options of a call."""

    q_len: tuple[int, ...] = (330,)
    kv_len: tuple[int, ...] = ()
    padded: int = 0
    dtype: str = "float32"
    schedule: str = "zigzag"
    heads_kv: int = 1
    rope: bool = False
    values: bool = True
    sink: bool = False
    block: int = 1
    causal: bool = True
    top_k: int = 24
    seed: int = 0

    @property
    def keys(self) -> tuple[int, ...]:
        return self.kv_len or self.q_len

    def tokens(self, side: str) -> int | tuple[int, ...]:
        lengths = self.q_len if side == "q" else self.keys
        return self.padded + (side == "kv") * 70 * bool(self.kv_len) if self.padded else lengths

    def shape(self, side: str) -> tuple[int, ...]:
        tokens = self.tokens(side)
        return (len(self.q_len), tokens) if isinstance(tokens, int) else (sum(tokens),)

    @property
    def how(self) -> dict[str, Any]:
        lengths = {"q_len": list(self.q_len), "kv_len": list(self.keys)}
        return {"layout": "BSND" if self.padded else "TND", **lengths, "causal": self.causal}


CASES = [
    Case(),
    Case(schedule="ring", rope=True, sink=True, heads_kv=2),
    Case(dtype="bfloat16", values=False, rope=True),
    Case(dtype="float16", q_len=(70, 0, 200, 3, 129), schedule="allgather", sink=True),
    Case(q_len=(100, 30), kv_len=(180, 30), causal=False, schedule="ulysses"),
    Case(q_len=(300, 211), padded=320, heads_kv=2, rope=True),
    Case(q_len=(129, 200), kv_len=(190, 270), padded=200, block=48, top_k=4, dtype="bfloat16", rope=True, sink=True),
    Case(q_len=(40,), schedule="ring"),  # ranks without rows
    Case(q_len=(640, 130), schedule="ulysses+ring", rope=True, sink=True),
    Case(q_len=(300, 211), padded=320, schedule="ulysses+ring", dtype="bfloat16"),
]


def in_worlds(case: Case, at: int) -> list[Any]:
    """A case with each world size; one size, which changes from case to case, is not slow."""
    sizes = (4,) if case.schedule == "ulysses+ring" else (2, 3, 4, 1)
    quick = sizes[at % len(sizes)]
    return [
        pytest.param(case, size, id=f"{case.id}-{size}", marks=[pytest.mark.slow] * (size != quick)) for size in sizes
    ]


WORLDS = [param for at, case in enumerate(CASES) for param in in_worlds(case, at)]


def full_inputs(case: Case) -> dict[str, Tensor | None]:
    """All tensors of the call in one process."""
    generator = torch.Generator().manual_seed(case.seed)
    dtype = getattr(torch, case.dtype)

    def draw(side: str, *inner: int, to: torch.dtype = dtype) -> Tensor:
        """Random rows with gaps between them in memory, and NaN after each sequence's tokens."""
        drawn = torch.randn(*case.shape(side), *inner, generator=generator).to(to)
        for b, length in enumerate(case.q_len if side == "q" else case.keys):
            if case.padded:
                drawn[b, length:] = torch.nan
        return torch.stack((drawn,) * 2, -2)[..., 0, :]

    result: dict[str, Tensor | None] = {
        "q": draw("q", 4, 16),
        "k": draw("kv", case.heads_kv, 16),
        "v": draw("kv", case.heads_kv, 8) if case.values else None,
        "q_rope": draw("q", 4, 8) if case.rope else None,
        "k_rope": draw("kv", case.heads_kv, 8) if case.rope else None,
        "index_q": draw("q", 3, 16),
        "index_k": draw("kv", 1, 16),
        "weights": draw("q", 3, to=torch.float32),
        "dout": draw("q", 4, 8 if case.values else 16),
        "dvalues": draw("q", 1, case.top_k),
    }
    result["sink"] = torch.randn(4, generator=generator) if case.sink else None
    if case.block == 1:  # the indexer's selections
        lists, _ = fa.lightning_indexer(
            result["index_q"], result["index_k"], result["weights"], case.top_k, **case.how
        )  # type: ignore[arg-type]  # fmt: skip
    else:  # up to four random blocks per row, and the loss of all keys, with the lse of a dense attention
        blocks, rows = -(-min(case.keys) // case.block), case.shape("q")[0] * max(case.padded, 1)
        lists = torch.stack([torch.randperm(blocks, generator=generator)[:4] for _ in range(rows)])
        lists = lists.int().view(*case.shape("q"), 1, -1)
        rest = {name: result[name] for name in ("q_rope", "k_rope", "sink")}
        lengths = {name: case.how[name] for name in ("layout", "q_len", "kv_len")}
        band = fa.Band.causal() if case.causal else fa.Band.full()
        _, result["lse"] = fa.attention(
            result["q"], result["k"], result["k"], **rest, **lengths, band=band, return_lse=True
        )  # type: ignore[call-overload]  # fmt: skip
    result["lists"] = lists.expand(*case.shape("q"), case.heads_kv, -1).contiguous()
    return result


INDEX = ("index_q", "index_k", "weights")


def leaves_of(given: dict[str, Any]) -> dict[str, Any]:
    constant = ("dout", "dvalues", "lse", "lists")
    return {n: t if t is None or n in constant else t.detach().clone().requires_grad_() for n, t in given.items()}


def indexed(case: Case, given: dict[str, Any], **how: Any) -> dict[str, Tensor]:
    """Selections and gradients of the indexer, in one process or, with `group` in how, on ranks."""
    library: Any = far if "group" in how else fa
    t = leaves_of(given)
    indices, values = library.lightning_indexer(*(t[name] for name in INDEX), case.top_k, **case.how, **how)
    values.backward(t["dvalues"])
    return {"indices": indices, "values": values.detach(), **{f"indexer's {name}": t[name].grad for name in INDEX}}


def results(case: Case, given: dict[str, Any], **how: Any) -> dict[str, Tensor]:
    """Results and gradients of the three functions, in one process or, with `group` in how, on ranks."""
    library: Any = far if "group" in how else fa
    result, how, t = indexed(case, given, **how), {**case.how, **how}, leaves_of(given)
    ropes = {"q_rope": t["q_rope"], "k_rope": t["k_rope"], "sink": t["sink"]}
    lists = t["lists"]
    out, lse = library.sparse_attention(
        t["q"], t["k"], t["v"], lists, **ropes, block=case.block, return_lse=True, **how
    )
    out.backward(t["dout"])
    result |= {"out": out.detach(), "lse": lse.detach()}
    for name in ("q", "k", "v", "q_rope", "k_rope", "sink"):
        if t[name] is not None:
            result[f"d{name}"] = t[name].grad
    ropes = {name: None if value is None else value.detach() for name, value in ropes.items()}
    loss = library.indexer_loss(
        t["q"].detach(), t["k"].detach(), t.get("lse", lse.detach()), *(t[name] for name in INDEX),
        lists[..., :1, :] if case.block == 1 else None, **ropes, **how,
    )  # fmt: skip
    (loss * 0.5).backward()
    result["loss"] = loss.detach()
    return result | {f"loss's {name}": t[name].grad for name in INDEX}


# Results that are sums over ranks, in another order than in one process.
SUMMED = ("indexer's index_k", "dk", "dv", "dk_rope", "loss", "loss's index_k")


def side_of(name: str) -> str:
    """Tokens of an input or a result: "q" or "kv"; "" if it has no token axis."""
    word = name.split()[-1]
    if word in ("sink", "dsink", "loss"):
        return ""
    return "kv" if word.removeprefix("d") in ("k", "v", "k_rope", "index_k") else "q"


def placed(case: Case, tensors: dict[str, Any], group: Any, place: Any = far.shard) -> dict[str, Any]:
    """This rank's shards of tensors of one process; or, with far.unshard, the reverse."""

    def of(name: str, t: Tensor | None) -> Tensor | None:
        axis = 0 if not case.padded else 2 if name == "lse" else 1
        side = side_of(name)
        return t if t is None or not side else place(t, group, case.schedule, case.tokens(side), axis)

    return {name: of(name, t) for name, t in tensors.items()}


def options(case: Case, group: Any) -> dict[str, Any]:
    tokens = (case.tokens("q"), case.tokens("kv")) if case.padded else None
    return {"group": group, "schedule": case.schedule, "tokens": tokens}


def agree(case: Case, got: dict[str, Tensor], want: dict[str, Tensor], group: Any, free: set[str]) -> dict[str, Tensor]:
    """Returns the unsharded results `free`, and asserts that all others equal those of one process."""
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        if name not in free:
            same_bits(got[name], tensor, f"{case.id}, rank {dist.get_rank()}: {name}")
    return placed(case, {name: t for name, t in got.items() if name in free}, group, far.unshard)


def compared(group: Any, case: Case) -> list[dict[str, Tensor]]:
    """Unsharded results that are sums over ranks, of the default call; in the deterministic one, only a sink's."""
    line = group
    if case.schedule == "ulysses+ring":
        group = init_device_mesh("cpu", (2, 2))
    given = full_inputs(case)
    want, local = (placed(case, tensors, group) for tensors in (results(case, given), given))
    result = []
    for deterministic in (False, True):
        got = results(case, local, **options(case, group), deterministic=deterministic)
        free = set() if deterministic else got.keys() & SUMMED
        if "dsink" in got and dist.get_world_size(line) > 1:
            got["dsink"] = summed(got["dsink"], line)
            free.add("dsink")
        result.append(agree(case, got, want, group, free))
    return result


def merged(group: Any, case: Case) -> dict[str, Tensor]:
    """Unsharded gradients that are sums over ranks, of the indexer with merge_topk (queries are gathered, not keys)."""
    given = full_inputs(case)
    want, local = (placed(case, tensors, group) for tensors in (indexed(case, given), given))
    got = indexed(case, local, **options(case, group), merge_topk=True)
    free = {"indexer's index_q", "indexer's weights"} if dist.get_world_size() > 1 else set()
    return agree(case, got, want, group, free)


@cache
def expected(case: Case) -> dict[str, Expected]:
    """Gradients and loss of one process by golden, with expected errors of a right program."""
    t = full_inputs(case)
    lists: Any = t["lists"]
    of_all = {**case.how, "actual_seq_qlen": case.how["q_len"], "actual_seq_kvlen": case.how["kv_len"]}
    index = {"query": t["index_q"], "key": t["index_k"], "weights": t["weights"], "sparse_count": case.top_k, **of_all}
    chooser = indexer_call(bind(indexer_own.RECORD, index))
    answer = expected_index(IndexerBackward(chooser, t["dvalues"], run(chooser, "auto")["sparse_indices_out"]))
    by_name = {"index_q": "dquery", "index_k": "dkey", "weights": "dweights"}
    result = {f"indexer's {name}": answer[of] for name, of in by_name.items()}
    rows = {"query": t["q"], "key": t["k"], "query_rope": t["q_rope"], "key_rope": t["k_rope"], "sinks": t["sink"]}
    selecting = {"sparse_indices": lists, "sparse_block_size": case.block, "value": t["v"]}
    attends = replace(sparse_call(bind(sparse_own.RECORD, rows | selecting | of_all)), stats=True)
    answer = sparse.expected(attends, t["dout"])
    by_name = {"dk": "dkey", "dv": "dvalue", "dk_rope": "dkey_rope", "dsink": "dsinks"}
    result |= {name: answer[of] for name, of in by_name.items() if of in answer}
    lse = (answer["max"].value + answer["sum"].value.log()).float()
    lse = lse.mT.flatten(1, 2) if case.padded else lse.movedim(0, 1).flatten(1)
    single_lists = lists[..., :1, :] if case.block == 1 else None
    index = {
        "query_index": t["index_q"],
        "key_index": t["index_k"],
        "weights": t["weights"],
        "sparse_indices": single_lists,
    }
    answer = expected_index(lower(bind(loss_own.RECORD, rows | index | of_all | {"lse": t.get("lse", lse)})))
    loss = answer["loss"].map(lambda x: x.reshape(()))
    return result | {"loss": loss, "loss's index_k": answer["dkey_index"].map(lambda x: x / 2)}


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("case", "world"), [p for p in WORLDS if p.values[0].schedule != "ulysses+ring"])
def test_merged_topk_selections_equal_one_process(worlds: Worlds, case: Case, world: int) -> None:
    judge(case, worlds.run(world, merged, case))


def test_topk_orders_nan_first_and_ties_by_index() -> None:
    nan = torch.nan
    indices = torch.tensor([[[7, 2, -1, 5, 3, 9, 1, -1]]], dtype=torch.int32)
    values = torch.tensor([[[0.0, 1.0, -torch.inf, nan, -0.0, 1.0, nan, -torch.inf]]])
    got, result = best(indices, values, 7)
    assert got[0, 0].tolist() == [1, 5, 2, 9, 3, 7, -1]
    same_bits(result, torch.tensor([[[nan, nan, 1.0, 1.0, -0.0, 0.0, -torch.inf]]]))


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("case", "world"), WORLDS)
def test_sparse_attention_and_indexer_on_ranks_match_one_process(worlds: Worlds, case: Case, world: int) -> None:
    by_rank = worlds.run(world, compared, case)
    for one in zip(*by_rank, strict=True):
        judge(case, list(one))


def judge(case: Case, by_rank: list[dict[str, Tensor]]) -> None:
    """Assert equal results on all ranks, within the error bound of golden."""
    first, *others = by_rank
    for other in others:
        same_bits(other, first, "another rank's")
    if first:
        check(case.id, first, {name: expected(case)[name] for name in first})

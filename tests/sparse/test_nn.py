"""The modules: outputs, losses and gradients beside layers written plainly, stages, state, compile, two processes."""

import copy
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import same_bits
from support.compiled import compiled
from support.eager_loss import chosen_keys, one_sequence
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fusion_attention import nn as dsa
from fusion_attention.testing import beside_plain

DIM, HEADS, TOP_K, LENGTHS = 32, 4, 5, [19, 12]
INDEX = {"index_heads": 3, "index_dim": 12, "top_k": TOP_K}
LATENT = {"q_rank": 20, "kv_rank": 16, "nope_dim": 8, "rope_dim": 6, "v_dim": 10}


def make(form: str, stage: str = "sparse") -> dsa.SparseAttention:
    torch.manual_seed(0)
    if form == "latent":
        layer: dsa.SparseAttention = dsa.SparseLatentAttention(DIM, HEADS, **LATENT, **INDEX)
    else:
        layer = dsa.SparseSelfAttention(DIM, HEADS, kv_heads=2 if form == "grouped" else None, **INDEX)
    dsa.set_stage(layer, stage)
    return layer


def turned(rows: Tensor, positions: Tensor, width: int, neighbours: bool = False) -> Tensor:
    """Rotary embedding by complex numbers, in float32 at least: [S, heads, D]."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    pairs = rows[..., :width].to(wide).unflatten(-1, (-1, 2) if neighbours else (2, -1))
    pairs = pairs if neighbours else pairs.transpose(-1, -2)
    rate = torch.tensor([10000.0 ** (-2 * i / width) for i in range(width // 2)], dtype=wide)
    angle = (positions[:, None] * rate)[:, None]
    spun = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle))
    spun = spun.flatten(-2) if neighbours else spun.transpose(-1, -2).flatten(-2)
    return torch.cat([spun.to(rows.dtype), rows[..., width:]], -1)


def plain_rows(layer: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v [S, heads, D] and the indexer's query input, of one sequence; MLA is never absorbed here."""
    at = torch.arange(len(x))
    if isinstance(layer, dsa.SparseSelfAttention):
        q, k, v = (f(x).unflatten(-1, (-1, layer.head_dim)) for f in (layer.q_proj, layer.k_proj, layer.v_proj))
        return turned(q, at, 8), turned(k, at, 8), v, x
    nope, rope = LATENT["nope_dim"], LATENT["rope_dim"]
    q_latent = layer.q_a_layernorm(layer.q_a_proj(x))
    q = layer.q_b_proj(q_latent).unflatten(-1, (HEADS, -1))
    latent, k_rope = layer.kv_a_proj_with_mqa(x).split([LATENT["kv_rank"], rope], -1)
    kv = layer.kv_b_proj(layer.kv_a_layernorm(latent)).unflatten(-1, (HEADS, -1))
    k_rope = turned(k_rope[:, None], at, rope, neighbours=True).expand(-1, HEADS, -1)
    q = torch.cat([q[..., :nope], turned(q[..., nope:], at, rope, neighbours=True)], -1)
    return q, torch.cat([kv[..., :nope], k_rope], -1), kv[..., nope:], q_latent


def plain(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """One sequence [S, DIM] through a layer in its stage, by masks and softmax: out, and the loss summed over rows."""
    q, k, v, query = plain_rows(layer, x)
    indexer, width = layer.indexer, LATENT["rope_dim"] if isinstance(layer, dsa.SparseLatentAttention) else 8
    at = torch.arange(len(x))
    index_q = turned(indexer.wq_b(query.detach()).unflatten(-1, (indexer.heads, -1)), at, width)
    index_k = turned(indexer.k_norm(indexer.wk(x.detach()))[:, None], at, width)
    weights = indexer.weights_proj(x.detach()) / (indexer.heads * indexer.head_dim) ** 0.5
    scores = (torch.einsum("ihd,jd->ihj", index_q, index_k[:, 0]).relu() * weights[..., None]).sum(1)
    keys = chosen_keys(None, len(x))
    if layer.stage == "sparse":
        order = (
            scores.masked_fill(~keys, -torch.inf).sort(dim=-1, descending=True, stable=True).indices[:, : indexer.top_k]
        )
        keys = keys & torch.zeros_like(keys).scatter_(1, order, True)
    loss = one_sequence(q, k, index_q, index_k, weights, keys, q.shape[-1] ** -0.5)
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    p = (torch.einsum("ihd,jhd->hij", q, k) * q.shape[-1] ** -0.5).masked_fill(~keys, -torch.inf).softmax(-1)
    out = layer.o_proj(torch.einsum("hij,jhd->ihd", p, v).flatten(1))
    return out, loss if layer.stage != "dense" else loss.detach() * 0


def run(layer: Any, x: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    """The layer itself, with rope tables of 8 (MLA: 6) elements; packed where x is."""
    width = LATENT["rope_dim"] if isinstance(layer, dsa.SparseLatentAttention) else 8
    packed = x.dim() == 2
    at = torch.cat([torch.arange(n) for n in LENGTHS]) if packed else torch.arange(x.shape[1])
    out: tuple[Tensor, Tensor] = layer(x, rope=dsa.rope_table(at, width), **given)
    return out


def gradients(layer: nn.Module, out: Tensor, loss: Tensor) -> dict[str, Tensor]:
    """Of a number that both results take part in; parameters without a gradient are left out."""
    layer.zero_grad()
    total = (out * torch.linspace(-1, 1, out.shape[-1])).sum() + 3 * loss
    if total.requires_grad:
        total.backward()
    return {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}


Results = dict[str, Tensor]


def plainly(layer: Any, sequences: list[Tensor]) -> Results:
    """What plain() gives of a batch: rows one behind the other, the loss meant over them, and gradients."""
    found = [plain(layer, x) for x in sequences]
    out, loss = torch.cat([out for out, _ in found]), sum(loss for _, loss in found) / sum(map(len, sequences))
    assert isinstance(loss, Tensor)
    return {"out": out, "loss": loss} | gradients(layer, out, loss)


def judge(layer: Any, got: Results, sequences: list[Tensor]) -> None:
    """By the same in float64, and in float32."""
    measure = plainly(layer, sequences)
    exact = plainly(copy.deepcopy(layer).double(), [x.double() for x in sequences])
    assert got.keys() == measure.keys() == exact.keys()
    rows = sum(map(len, sequences))
    for name, tensor in got.items():
        terms = 2.0 if name == "loss" else 0.0  # p log p and p log y, which may cancel
        beside_plain(
            name, tensor, exact[name], measure[name], max(map(len, sequences)) if name == "out" else rows, terms
        )


FORMS, STAGES = ("latent", "heads", "grouped"), ("dense", "warmup", "sparse")


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("form", FORMS)
def test_equals_a_plain_layer(form: str, stage: str, packed: bool) -> None:
    layer = make(form, stage)
    sequences = [torch.randn(n, DIM) for n in LENGTHS]
    if packed:
        out, loss = run(layer, torch.cat(sequences), lengths=LENGTHS)
        real = out
    else:
        x = nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=7.0)
        out, loss = run(layer, x, lengths=torch.tensor(LENGTHS))
        assert not out[1, LENGTHS[1] :].any()
        real = torch.cat([row[:n] for row, n in zip(out, LENGTHS, strict=True)])
    assert loss.shape == ()
    judge(layer, {"out": real, "loss": loss} | gradients(layer, out, loss), sequences)


@pytest.mark.parametrize("form", FORMS)
def test_who_learns(form: str) -> None:
    """Each stage gives exactly its own parameters a gradient; the indexer's loss reaches nothing else."""
    x = torch.randn(2, 16, DIM, requires_grad=True)
    for stage in STAGES:
        layer = make(form, stage)
        out, loss = run(layer, x)
        got = gradients(layer, out, loss)
        indexer = {name for name, _ in layer.named_parameters() if name.startswith("indexer.")}
        everything = {name for name, _ in layer.named_parameters()}
        assert got.keys() == {"dense": everything - indexer, "warmup": indexer, "sparse": everything}[stage]
        if stage == "dense":
            assert not loss.requires_grad
            continue
        x.grad = None
        layer.zero_grad()
        run(layer, x)[1].backward()
        assert x.grad is None
        assert {name for name, p in layer.named_parameters() if p.grad is not None} == indexer


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_recomputed_layers_have_the_same_gradients(stage: str, reentrant: bool) -> None:
    """Checkpointing lets a backward read each saved tensor once."""
    layer = make("heads", stage)

    def gradients(forward: Any) -> list[Tensor | None]:
        layer.zero_grad()
        x = torch.randn(2, 19, DIM, generator=torch.Generator().manual_seed(1)).requires_grad_()
        out, loss = forward(x)
        (out.square().sum() + loss).backward()
        return [x.grad, *(p.grad for p in layer.parameters())]

    got, want = gradients(lambda x: checkpoint(layer, x, use_reentrant=reentrant)), gradients(layer)
    assert [g is None for g in got] == [g is None for g in want]
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True) if g is not None and w is not None)


def test_integers_of_quantised_layers_stay_out_of_stages() -> None:
    model = nn.ModuleList([make("heads")])
    whole = nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
    model.register_parameter("stored", whole)
    for stage in dsa.STAGES:
        dsa.set_stage(model, stage)
        assert not whole.requires_grad


def test_the_indexer_learns() -> None:
    """Warm-up alone lets the selection find what the attention looks at."""
    layer = make("grouped", "warmup")
    with torch.no_grad():
        layer.q_proj.weight *= 5  # an attention that looks at few keys
    x = torch.randn(4, 32, DIM)
    optimizer = torch.optim.Adam(layer.indexer.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        loss = run(layer, x)[1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("stage", STAGES)
def test_evaluation_costs_no_loss(stage: str) -> None:
    layer, x = make("latent", stage), torch.randn(2, 16, DIM)
    out, _ = run(layer, x)
    quiet, loss = run(layer.eval(), x)
    assert torch.equal(out, quiet)
    assert loss == 0
    assert loss.dtype == torch.float32


KEYS = {
    "latent": "indexer.k_norm.bias indexer.k_norm.weight indexer.weights_proj.weight indexer.wk.weight "
    "indexer.wq_b.weight kv_a_layernorm.weight kv_a_proj_with_mqa.weight kv_b_proj.weight o_proj.weight "
    "q_a_layernorm.weight q_a_proj.weight q_b_proj.weight",
    "grouped": "indexer.k_norm.bias indexer.k_norm.weight indexer.weights_proj.weight indexer.wk.weight "
    "indexer.wq_b.weight k_proj.weight o_proj.weight q_proj.weight v_proj.weight",
}


@pytest.mark.parametrize("form", KEYS)
def test_saved_state_is_the_same_in_all_stages(form: str) -> None:
    saved = make(form, "dense").state_dict()
    assert sorted(saved) == KEYS[form].split()
    x = torch.randn(2, 16, DIM)
    expected = run(make(form, "sparse"), x)[0]
    for stage in STAGES:
        layer = make(form, stage)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.zero_()
        layer.load_state_dict(saved, strict=True)
        dsa.set_stage(layer, "sparse")
        assert torch.equal(run(layer, x)[0], expected)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("form", ["latent", pytest.param("grouped", marks=pytest.mark.slow)])
def test_one_graph_with_the_same_bits(form: str, stage: str) -> None:
    torch._dynamo.reset()
    layer = make(form, stage)
    for packed in (False, True):
        x = torch.randn(sum(LENGTHS), DIM) if packed else torch.randn(2, 16, DIM)
        given = {"lengths": torch.tensor(LENGTHS)} if packed else {}
        fast, made = compiled(lambda x, given=given: run(layer, x, **given))
        expected, got = run(layer, x, **given), fast(x)
        assert len(made) == 1
        same_bits(got, expected)
        same_bits(gradients(layer, *got), gradients(layer, *expected))


@pytest.mark.parametrize("stage", STAGES)
def test_bfloat16(stage: str) -> None:
    """A model in bfloat16, the indexer's weights in it or kept in float32, and autocast: as good as a plain layer."""
    layer, batch = make("latent", stage), torch.randn(16, 16, DIM)
    layer.indexer.top_k = 16  # every key, so that rounding changes no choice
    exact = [plain(copy.deepcopy(layer).double(), x.double()) for x in batch]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = [([run(layer, x[None]) for x in batch], [plain(layer, x) for x in batch])]
    layer.bfloat16()
    measure = [plain(layer, x.bfloat16()) for x in batch]
    results.append(([run(layer, x[None].bfloat16()) for x in batch], measure))
    layer.indexer.weights_proj.float()
    results.append(([run(layer, x[None].bfloat16()) for x in batch], measure))
    for got, plainer in results:
        three = [[torch.stack(t) for t in zip(*found, strict=True)] for found in (got, exact, plainer)]
        (out, loss), (want, want_loss), (plain_out, plain_loss) = three
        assert out.dtype == torch.bfloat16
        beside_plain("out", out.squeeze(1), want, plain_out, 16)
        beside_plain("loss", loss, want_loss / 16, plain_loss / 16, 16, 2.0)


def test_wrong_calls() -> None:
    with pytest.raises(ValueError, match="stage: expected one of dense, warmup, sparse, got 'warm'"):
        dsa.set_stage(make("heads"), "warm")
    with pytest.raises(ValueError, match="stage: expected one of"):
        dsa.SparseAttention(dsa.LightningIndexer(8, 2, 4, 3), stage="")
    with pytest.raises(ValueError, match="set_stage: model: expected a SparseAttention among its modules, got none"):
        dsa.set_stage(nn.Linear(2, 2), "dense")
    with pytest.raises(ValueError, match=r"rope: expected at most 4 columns, got 5 \(rows have 8 elements"):
        dsa.apply_rope(torch.zeros(1, 2, 8), dsa.rope_table(torch.arange(1), 10))


# -------------------------------------------------------------------------------------------------------- two processes


def half_of_a_step(stage: str, rank: int) -> None:
    """Gradients of this process's half of a batch, meant over both, are those of the whole batch."""
    torch.manual_seed(1)
    x = torch.randn(4, 16, DIM)
    layer = make("latent", stage)
    shared = nn.parallel.DistributedDataParallel(layer)
    for _ in range(2):  # a parameter that got no gradient would be noticed by the second step
        out, loss = shared(x[2 * rank : 2 * rank + 2], rope=dsa.rope_table(torch.arange(16), LATENT["rope_dim"]))
        got = gradients(layer, 2 * out, loss)  # DDP means over processes; the sum over rows is not a mean
    alone = plainly(make("latent", stage), list(x))
    judge(make("latent", stage), {"out": alone["out"], "loss": alone["loss"]} | got, list(x))


def one_of_two(rank: int, folder: str) -> None:
    """A process that sees half of the batch, in every stage."""
    torch.set_num_threads(1)
    meet, patience = f"file://{folder}/meet", timedelta(seconds=30)
    torch.distributed.init_process_group("gloo", meet, rank=rank, world_size=2, timeout=patience)
    for stage in STAGES:
        half_of_a_step(stage, rank)
        Path(f"{folder}/{stage}{rank}").touch()
    os._exit(0)  # gloo's threads may wait for Python's lock for ever while their group is taken down


def test_two_processes(tmp_path: Path) -> None:
    code = "import sys; from sparse import test_nn; test_nn.one_of_two(int(sys.argv[1]), sys.argv[2])"
    command = [sys.executable, "-c", code]
    pair = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path)], cwd=Path(__file__).parents[1], stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=90)[1] for process in pair]
    finally:
        for process in pair:
            process.kill()
    assert [process.returncode for process in pair] == [0, 0], errors
    assert {f"{stage}{rank}" for stage in STAGES for rank in (0, 1)} <= {path.name for path in tmp_path.iterdir()}

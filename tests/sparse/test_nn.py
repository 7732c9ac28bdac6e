"""Layers: outputs, losses and gradients against plain layers, training stages, state, compile."""

import copy
from functools import cache
from typing import Any

import pytest
import torch
from support.bits import same_bits
from support.compiled import compiled
from support.reference_layers import DIM, LATENT, make, output_and_loss
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fusion_attention import nn as dsa
from fusion_attention.judging.chi_square_limits import Expected
from fusion_attention.testing import check
from fusion_attention.testing.estimated_rounding_errors import compare_with, expected_of

LENGTHS = [19, 12]


def run(layer: Any, x: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    """Calls a layer on padded [B, S, dim] or packed [T, dim] rows, with rope tables of 8 (MLA: 6) elements."""
    width = LATENT["rope_dim"] if isinstance(layer, dsa.SparseLatentAttention) else 8
    packed = x.dim() == 2
    at = torch.cat([torch.arange(n) for n in LENGTHS]) if packed else torch.arange(x.shape[1])
    out: tuple[Tensor, Tensor] = layer(x, rope=dsa.rope_table(at, width), **given)
    return out


Results = dict[str, Tensor]


def gradients(layer: nn.Module, out: Tensor, loss: Tensor) -> Results:
    """Returns the parameters' gradients of a number that depends on out and loss, without absent ones."""
    layer.zero_grad()
    total = (out * torch.linspace(-1, 1, out.shape[-1])).sum() + 3 * loss
    if total.requires_grad:
        total.backward()
    return {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}


FORMS, STAGES = ("latent", "heads", "grouped"), ("dense", "warmup", "sparse")


@pytest.mark.sampled(6)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("form", FORMS)
def test_sparse_attention_layer_matches_plain_layer_in_every_stage(form: str, stage: str, packed: bool) -> None:
    layer, sequences = make(form, stage), drawn()
    if packed:
        out, loss = run(layer, torch.cat(sequences), lengths=LENGTHS)
        real = out
    else:
        x = nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=7.0)
        out, loss = run(layer, x, lengths=torch.tensor(LENGTHS))
        assert not out[1, LENGTHS[1] :].any()
        real = torch.cat([row[:n] for row, n in zip(out, LENGTHS, strict=True)])
    assert loss.shape == ()
    got = {"out": real.detach(), "loss": loss.detach()} | gradients(layer, out, loss)
    check(form, got, expected(form, stage, tuple(got)))


def drawn() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(n, DIM, generator=generator) for n in LENGTHS]


@cache
def expected(form: str, stage: str, names: tuple[str, ...]) -> dict[str, Expected]:
    """Returns the results of the plain layer in float64 for drawn(), with the loss averaged over rows, by name."""
    layer: Any = make(form, stage).double()

    def program() -> Results:
        outs, losses = zip(*(output_and_loss(layer, x.double()) for x in drawn()), strict=True)
        out, loss = torch.cat(outs), torch.stack(losses).sum() / sum(LENGTHS)
        return {"out": out, "loss": loss} | gradients(layer, out, loss)

    result: dict[str, Expected] = expected_of(program, dict.fromkeys(names, torch.empty(0)))
    return result


@pytest.mark.parametrize("form", FORMS)
def test_only_parameters_of_the_training_stage_receive_gradients(form: str) -> None:
    """The indexer's loss gives gradients to the indexer alone, not to other parameters or x."""
    x = torch.randn(2, 16, DIM, requires_grad=True)
    for stage in STAGES:
        layer = make(form, stage)
        out, loss = run(layer, x)
        got = gradients(layer, out, loss)
        indexer = {name for name, _ in layer.named_parameters() if name.startswith("indexer.")}
        everything = {name for name, _ in layer.named_parameters()}
        assert got.keys() == {"dense": everything - indexer, "warmup": indexer, "sparse": everything}[stage]
        assert got.keys() == {name for name, p in layer.named_parameters() if p.requires_grad}  # as DDP expects
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
def test_checkpointed_layer_has_same_gradients(stage: str, reentrant: bool) -> None:
    """A checkpointed layer's backward can read each saved tensor only once."""
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


def test_set_stage_leaves_integer_parameters_without_gradient() -> None:
    model = nn.ModuleList([make("heads")])
    full = nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
    model.register_parameter("stored", full)
    for stage in dsa.STAGES:
        dsa.set_stage(model, stage)
        assert not full.requires_grad


@pytest.mark.parametrize("stage", STAGES)
def test_evaluation_mode_returns_zero_loss_and_same_output(stage: str) -> None:
    layer, x = make("latent", stage), torch.randn(2, 16, DIM)
    out, _ = run(layer, x)
    quiet, loss = run(layer.eval(), x)
    assert torch.equal(out, quiet)
    assert loss == 0
    assert loss.dtype == torch.float32


@pytest.mark.parametrize("form", ["latent", "grouped"])
def test_state_dict_loads_and_computes_the_same_in_every_stage(form: str) -> None:
    saved = make(form, "dense").state_dict()
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


@pytest.mark.sampled(36)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("form", ["latent", pytest.param("grouped", marks=pytest.mark.slow)])
def test_layer_compiles_to_one_graph_with_same_bits(form: str, stage: str, packed: bool) -> None:
    torch._dynamo.reset()
    layer = make(form, stage)
    x = torch.randn(sum(LENGTHS), DIM) if packed else torch.randn(2, 16, DIM)
    given = {"lengths": torch.tensor(LENGTHS)} if packed else {}
    fast, graphs = compiled(lambda x: run(layer, x, **given))
    expected, got = run(layer, x, **given), fast(x)
    assert len(graphs) == 1
    same_bits(got, expected)
    same_bits(gradients(layer, *got), gradients(layer, *expected))


@pytest.mark.sampled(18)
@pytest.mark.parametrize("stage", STAGES)
def test_layer_in_bfloat16_and_under_autocast_matches_float64_layer(stage: str) -> None:
    """Autocast, a model in bfloat16, and a model in bfloat16 with an indexer that has float32 weights."""
    layer, batch = make("latent", stage), torch.randn(4, 16, DIM)
    layer.indexer.top_k = 16  # every key, so that rounding changes no choice
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = [[run(layer, x[None]) for x in batch]]
    layer.bfloat16()  # autocast rounds weights to the same numbers
    float64_layer = copy.deepcopy(layer).double()
    results.append([run(layer, x[None].bfloat16()) for x in batch])
    layer.indexer.weights_proj.float()
    results.append([run(layer, x[None].bfloat16()) for x in batch])
    ours = [torch.stack([t.squeeze(0) for t in each]) for result in results for each in zip(*result, strict=True)]
    assert {t.dtype for t in ours[::2]} == {torch.bfloat16}

    def written_plainly() -> list[Tensor]:
        result = [output_and_loss(float64_layer, x.bfloat16().double()) for x in batch]
        return 3 * [torch.stack([out for out, _ in result]), torch.stack([loss for _, loss in result]) / 16]

    compare_with(stage, ours, written_plainly, dtype=torch.bfloat16)


def test_set_stage_and_apply_rope_refuse_invalid_arguments() -> None:
    with pytest.raises(ValueError, match="stage: expected one of dense, warmup, sparse, got 'warm'"):
        dsa.set_stage(make("heads"), "warm")
    with pytest.raises(ValueError, match="stage: expected one of"):
        dsa.SparseAttention(dsa.LightningIndexer(8, 2, 4, 3), stage="")
    with pytest.raises(ValueError, match="set_stage: model: expected a SparseAttention, a CompressedAttention or a"):
        dsa.set_stage(nn.Linear(2, 2), "dense")
    with pytest.raises(ValueError, match=r"rope: expected at most 4 columns, got 5 \(rows have 8 elements"):
        dsa.apply_rope(torch.zeros(1, 2, 8), dsa.rope_table(torch.arange(1), 10))

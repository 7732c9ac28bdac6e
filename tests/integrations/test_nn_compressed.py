"""CompressedAttention is compared with DeepSeek-V4 layers of transformers in float64: results, gradients, decode."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.bits import same_bits
from support.compiled import compiled
from support.sparse_checks import close
from support.sparse_models import CSA, HCA, SLIDING, code_of, divergence, in_float64, same_losses, scores_of
from torch import Tensor, nn
from transformers import DynamicCache

from fusion_attention.nn import STAGES, CompressedAttention, CompressedCache, Stage, rope_table, set_stage

KINDS = (SLIDING, CSA, HCA)
RATES, WINDOW, TOP_K, DIM = {CSA: 4, HCA: 8}, 6, 3, 32
HEADS = 32  # of the indexer: with few of them some keys score 0, and tie
SIZES: dict[str, Any] = {"head_dim": 16, "q_rank": 24, "window": WINDOW, "out_groups": 2, "out_rank": 8}
INDEX: dict[str, Any] = {"top_k": TOP_K, "index_heads": HEADS, "index_dim": 16}


def ours(kind: str) -> CompressedAttention:
    """Layer of the kind, with weights large enough to affect the results."""
    layer = CompressedAttention(DIM, 4, **SIZES, ratio=RATES.get(kind), **(INDEX if kind == CSA else {}))
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer


class Theirs:
    """transformers' attention layer with the weights of a CompressedAttention layer."""

    def __init__(self, layer: CompressedAttention, kind: str) -> None:
        modeling = code_of("deepseek_v4")
        self.config = modeling.DeepseekV4Config(
            hidden_size=DIM, num_attention_heads=4, head_dim=16, q_lora_rank=24, o_groups=2, o_lora_rank=8,
            index_n_heads=HEADS, index_head_dim=16, index_topk=TOP_K, sliding_window=WINDOW, compress_rates=RATES,
            num_hidden_layers=1, layer_types=[kind], mlp_layer_types=["moe"], attn_implementation="eager",
            partial_rotary_factor=0.5,
        )  # fmt: skip
        self.module: Any = modeling.DeepseekV4Attention(self.config, 0).double().eval()
        self.module.load_state_dict(layer.state_dict(), strict=True)
        self.rotary = modeling.DeepseekV4RotaryEmbedding(self.config)

    def turns(self, tokens: int, first: int = 0) -> dict[str, Any]:
        at = torch.arange(first, tokens)[None]
        like = torch.empty(0, dtype=torch.float64)
        return {name: self.rotary(like, position_ids=at, layer_type=name) for name in ("main", "compress")}

    def rope(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Rotary tables (cos, sin) of all positions, as CompressedAttention takes them."""
        cos, sin = self.turns(tokens)[self.module.rope_layer_type]
        return cos[0], sin[0]

    def arguments(self, hidden: Tensor, first: int = 0, cache: Any = None) -> dict[str, Any]:
        rows = hidden.shape[1]
        at = torch.arange(first, first + rows)[None]
        keys = rows if rows > 1 else min(first, WINDOW - 1) + 1  # one row sees all keys of its cache
        visible = torch.ones(rows, keys).tril(keys - rows).triu(keys - rows + 1 - WINDOW) > 0
        mask = torch.zeros(len(hidden), 1, rows, keys, dtype=torch.float64).masked_fill(~visible, -torch.inf)
        given = {"hidden_states": hidden, "position_embeddings": self.turns(first + rows, first)}
        return given | {"position_ids": at, "attention_mask": mask, "past_key_values": cache}

    def __call__(self, *args: Any) -> Tensor:
        out: Tensor = self.module(**self.arguments(*args))[0]
        return out


@pytest.fixture
def float64_throughout() -> Iterator[None]:
    with in_float64(Theirs(ours(SLIDING), SLIDING).module):
        yield


@pytest.mark.parametrize("rows", [3, 8, 21])
@pytest.mark.parametrize("kind", KINDS)
def test_compressed_attention_equals_deepseek_v4_layer_of_transformers(
    kind: str, rows: int, float64_throughout: None
) -> None:
    layer = ours(kind).double()
    theirs, hidden = Theirs(layer, kind), torch.randn(2, rows, DIM, dtype=torch.float64, requires_grad=True)
    results = layer.eval()(hidden, rope=theirs.rope(rows))[0], theirs(hidden)
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)
    upstream, gradients = torch.randn_like(results[0]), []
    for module, out in zip((layer, theirs.module), results, strict=True):
        leaves = {"x": hidden, **dict(module.named_parameters())}
        computed = torch.autograd.grad(out, [*leaves.values()], upstream, allow_unused=True)
        gradients.append({n: g for n, g in zip(leaves, computed, strict=True) if g is not None and g.any()})
    assert not any("indexer" in name for name in gradients[0])
    close(*gradients)


@pytest.mark.parametrize("kind", KINDS)
def test_decode_with_cache_equals_transformers_and_one_full_call(kind: str, float64_throughout: None) -> None:
    """Prompts of several lengths and single tokens end at every remainder of the compression ratio."""
    layer = ours(kind).double().eval()
    theirs, hidden = Theirs(layer, kind), torch.randn(2, 26, DIM, dtype=torch.float64)
    rope, cache, other = theirs.rope(26), CompressedCache(), DynamicCache(config=theirs.config)
    with torch.no_grad():
        at_once, _ = layer(hidden, rope=rope)
        for first, end in [(0, 9), *((n, n + 1) for n in range(9, 26))]:
            out, loss = layer(hidden[:, first:end], rope=rope, cache=cache)
            assert loss == 0
            torch.testing.assert_close(out, theirs(hidden[:, first:end], first, other), rtol=0, atol=1e-12)
            torch.testing.assert_close(out, at_once[:, first:end], rtol=0, atol=1e-12)
        pieces = CompressedCache()
        parts = [layer(hidden[:, i:j], rope=rope, cache=pieces)[0] for i, j in ((0, 2), (2, 15), (15, 19), (19, 26))]
    torch.testing.assert_close(torch.cat(parts, 1), at_once, rtol=0, atol=1e-12)
    assert cache.tokens == pieces.tokens == 26
    assert cache._keys is not None
    assert cache._keys.shape[1] == WINDOW - 1


# -------------------------------------------------------------------------------------------------------------- stages


@pytest.mark.parametrize("lengths", [None, [19, 10]])
@pytest.mark.parametrize("stage", ["warmup", "sparse"])
def test_indexer_loss_and_gradients_match_kl_divergence(
    stage: Stage, lengths: list[int] | None, float64_throughout: None
) -> None:
    """KL(p || softmax(I)) of transformers' scores and weights; only the indexer's parameters receive gradients."""
    layer = ours(CSA).double()
    set_stage(layer, stage)
    theirs, x = Theirs(layer, CSA), torch.randn(2, 19, DIM, dtype=torch.float64)
    theirs.module.compressor.indexer.index_topk = 64 if stage == "warmup" else TOP_K
    scores, p = scores_of("deepseek_v4", theirs.module, theirs.arguments(x))
    real = torch.arange(19) < torch.tensor(lengths or [19, 19])[:, None]
    expected, size = divergence(scores, p * real[..., None])
    rows = float(real.double().mean())
    (expected / rows).backward()
    _, loss = layer(x, rope=theirs.rope(19), lengths=lengths)
    loss.backward()
    same_losses((layer, loss), (theirs.module, expected / rows), size / rows)


@pytest.mark.parametrize("kind", KINDS)
def test_each_training_stage_trains_the_expected_parameters(kind: str) -> None:
    layer, x = ours(kind), torch.randn(2, 21, DIM)
    everything = {name for name, _ in layer.named_parameters()}
    indexer = {name for name in everything if "indexer" in name}
    for stage in STAGES:
        set_stage(layer, stage)
        out, loss = layer(x, rope=rope_table(torch.arange(21), 8))
        layer.zero_grad()
        if out.requires_grad or loss.requires_grad:
            (out.square().sum() + loss).backward()
        learned = {name for name, parameter in layer.named_parameters() if parameter.grad is not None}
        assert learned == {"dense": everything - indexer, "warmup": indexer, "sparse": everything}[stage]
        assert loss.requires_grad == (kind == CSA and stage != "dense")
        assert layer.eval()(x, rope=rope_table(torch.arange(21), 8))[1] == 0
        layer.train()


@pytest.mark.sampled(12)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_layer_is_one_graph_and_equals_eager_bitwise(kind: str, stage: Stage) -> None:
    torch._dynamo.reset()
    layer = ours(kind)
    set_stage(layer, stage)
    x, rope = torch.randn(2, 21, DIM, requires_grad=True), rope_table(torch.arange(24), 8)
    fast, graphs = compiled(lambda x: layer(x, rope=rope))
    results = []
    for call in (fast, lambda x: layer(x, rope=rope)):
        out, loss = call(x)
        layer.zero_grad()
        x.grad = None
        (out.square().sum() + loss).backward()
        grads = {name: p.grad for name, p in [("x", x), *layer.named_parameters()]}
        results.append({"out": out, "loss": loss, **{name: g.clone() for name, g in grads.items() if g is not None}})
    assert len(graphs) == 1
    same_bits(*results)


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_layer_keeps_dtype_and_has_finite_gradients(kind: str) -> None:
    layer, x, rope = ours(kind), torch.randn(2, 21, DIM), rope_table(torch.arange(21), 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, loss = layer(x, rope=rope)
    assert (out.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
    (out.float().sum() + loss).backward()
    low = copy.deepcopy(layer).bfloat16()
    out, loss = low(x.bfloat16(), rope=rope)
    assert (out.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
    (out.float().sum() + loss).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in (*layer.parameters(), *low.parameters()))


# --------------------------------------------------------------------------------------------------------- wrong calls


def test_invalid_arguments_raise_value_errors() -> None:
    with pytest.raises(ValueError, match="top_k: expected a ratio, index_heads and index_dim with it, got None, 0"):
        CompressedAttention(DIM, 4, **SIZES, top_k=3)
    with pytest.raises(ValueError, match="a divisor of heads, got 6 and 2 of 3"):
        CompressedAttention(DIM, 3, **SIZES)
    with pytest.raises(ValueError, match="CompressedAttention: stage: expected one of"):
        CompressedAttention(DIM, 4, **SIZES, stage="late")  # type: ignore[arg-type]
    layer, rope = ours(CSA).eval(), rope_table(torch.arange(16), 8)
    with pytest.raises(ValueError, match=r"x: expected padded \[B, S, dim\]"):
        layer(torch.randn(8, DIM), rope=rope)
    with pytest.raises(ValueError, match="rope: expected the cosines and sines of positions 0 to 16, of at most 8"):
        layer(torch.randn(2, 17, DIM), rope=rope)
    with pytest.raises(ValueError, match="of at most 8 pairs"):
        layer(torch.randn(2, 16, DIM), rope=rope_table(torch.arange(16), 18))


def test_invalid_cache_calls_raise_and_leave_the_cache_unchanged() -> None:
    layer, rope, cache = ours(CSA).eval(), rope_table(torch.arange(32), 8), CompressedCache()
    with pytest.raises(ValueError, match=r"expected torch.no_grad\(\) around the call"):
        layer(torch.randn(2, 8, DIM), rope=rope, cache=cache)
    with torch.no_grad():
        with pytest.raises(ValueError, match=r"expected a fusion_attention.nn.CompressedCache, got 'all'"):
            layer(torch.randn(2, 8, DIM), rope=rope, cache="all")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="lengths: expected None with a cache"):
            layer(torch.randn(2, 8, DIM), rope=rope, lengths=[8, 7], cache=cache)
        layer(torch.randn(2, 9, DIM), rope=rope, cache=cache)
        before = repr(cache)
        for wrong, match in (
            (torch.randn(3, 3, DIM), "expected rows of 2 sequences in torch.float32 on cpu, as its cache has, got 3"),
            (torch.randn(2, 30, DIM), "rope: expected the cosines and sines of positions 0 to 38"),
        ):
            with pytest.raises(ValueError, match=match):
                layer(wrong, rope=rope, cache=cache)
        with pytest.raises(ValueError, match="expected a cache of this layer, got that of another layer"):
            ours(CSA).eval()(torch.randn(2, 3, DIM), rope=rope, cache=cache)
        dense = CompressedCache()
        set_stage(layer, "dense")
        layer(torch.randn(2, 9, DIM), rope=rope, cache=dense)
        set_stage(layer, "sparse")
        with pytest.raises(ValueError, match="compressed keys of a CompressedIndexer in it, got none"):
            layer(torch.randn(2, 3, DIM), rope=rope, cache=dense)
    assert repr(cache) == before
    assert cache.tokens == 9

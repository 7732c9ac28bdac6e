"""compressed_attention() computes transformers' own DeepSeek-V4 layers of every kind, whole and step by step."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from support.selected import close
from support.sparse_models import code_of
from transformers import DynamicCache

import fusion_attention as fa

SLIDING, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
RATES, WINDOW = {CSA: 4, HCA: 8}, 6
Pair = tuple[torch.Tensor, torch.Tensor]


def layer(kind: str) -> tuple[Any, Any]:
    """An attention layer in float64, with sinks that matter."""
    modeling = code_of("deepseek_v4")
    config = modeling.DeepseekV4Config(
        hidden_size=32, num_attention_heads=4, head_dim=16, q_lora_rank=24, o_groups=2, o_lora_rank=8,
        index_n_heads=64, index_head_dim=16, index_topk=3, sliding_window=WINDOW, compress_rates=RATES,
        num_hidden_layers=1, layer_types=[kind], mlp_layer_types=["moe"], attn_implementation="eager",
    )  # fmt: skip
    module = modeling.DeepseekV4Attention(config, 0).double().eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return config, module


@dataclass
class Both:
    """Runs every attention of a layer in both ways."""

    ratio: int
    before: Any
    pairs: list[Pair] = field(default_factory=list)

    def __call__(self, module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **words: Any) -> Any:
        theirs, weights = self.before(module, query, key, value, mask, scaling, **words)
        self.pairs.append((self.ours(module, query, key, mask, scaling), theirs))
        return theirs, weights

    def ours(self, module: Any, query: Any, key: Any, mask: Any, scaling: float) -> torch.Tensor:
        q, every = query.transpose(1, 2), key.transpose(1, 2)
        compressed = 0 if module.compressor is None else self.tokens // self.ratio
        k, c = every.split([every.shape[1] - compressed, compressed], 1)
        lists = None
        if module.layer_type == CSA:
            shown = mask[:, 0, :, k.shape[1] :] == 0
            order = torch.arange(compressed).expand_as(shown)
            lists = fa.pack_lists(order.masked_fill(~shown, -1))[:, :, None] if compressed else None
        residual = [self.tokens % self.ratio] * len(q)
        return fa.compressed_attention(
            q, k, c, lists, ratio=self.ratio, band=fa.Band.window(WINDOW - 1), residual=residual, scale=scaling,
            sink=module.sinks, backend="golden",
        )  # fmt: skip

    tokens: int = 0  # of the sequence, with those of the present call


@pytest.fixture
def both(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Both:
    modeling = code_of("deepseek_v4")
    result = Both(RATES.get(request.param, 4), modeling.eager_attention_forward)
    monkeypatch.setattr(modeling, "eager_attention_forward", result)
    return result


def run(config: Any, module: Any, hidden: torch.Tensor, first: int = 0, cache: Any = None) -> torch.Tensor:
    rows = hidden.shape[1]
    position = torch.arange(first, first + rows)[None]
    rotary = code_of("deepseek_v4").DeepseekV4RotaryEmbedding(config)
    turned = {name: rotary(hidden, position_ids=position, layer_type=name) for name in ("main", "compress")}
    keys = rows if rows > 1 else min(first + 1, WINDOW)  # without a mask a row would see keys that are not chosen
    visible = torch.ones(rows, keys).tril(keys - rows).triu(1 - WINDOW) > 0
    mask = torch.zeros(len(hidden), 1, rows, keys, dtype=torch.float64).masked_fill(~visible, -torch.inf)
    result: torch.Tensor = module(hidden, turned, position, mask, past_key_values=cache)[0]
    return result


@pytest.mark.parametrize(("both", "kind"), [(kind, kind) for kind in (SLIDING, CSA, HCA)], indirect=["both"])
@pytest.mark.parametrize("rows", [3, 8, 21])
def test_a_layer_and_its_gradients(both: Both, kind: str, rows: int) -> None:
    config, module = layer(kind)
    both.tokens = rows
    hidden = torch.randn(2, rows, 32, dtype=torch.float64, requires_grad=True)
    run(config, module, hidden)
    ((ours, theirs),) = both.pairs
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    leaves = [hidden, *(p for n, p in module.named_parameters() if "indexer" not in n and not n.startswith("o_"))]
    upstream = torch.randn_like(theirs)
    gradients = (
        torch.autograd.grad(out, leaves, upstream, retain_graph=True, allow_unused=True) for out in (ours, theirs)
    )
    for number, (mine, other) in enumerate(zip(*gradients, strict=True)):
        assert (mine is None) == (other is None)
        if mine is not None and other is not None:
            close({str(number): mine}, {str(number): other})


@pytest.mark.parametrize(("both", "kind"), [(kind, kind) for kind in (SLIDING, CSA, HCA)], indirect=["both"])
def test_steps_of_a_decode(both: Both, kind: str) -> None:
    """Every residual is met; the cache holds the window's keys alone. Steps give the rows of a run of all tokens."""
    config, module = layer(kind)
    hidden = torch.randn(1, 26, 32, dtype=torch.float64)
    cache = DynamicCache(config=config)
    with torch.no_grad():
        for first, end in [(0, 9), *((n, n + 1) for n in range(9, 26))]:
            both.tokens = end
            run(config, module, hidden[:, first:end], first, cache)
        run(config, module, hidden)
    *steps, (_, every) = both.pairs
    assert len(steps) == 18
    for ours, theirs in steps:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.cat([ours for ours, _ in steps], 1), every, rtol=0, atol=1e-12)


# --------------------------------------------------------------------------------------------------------- the indexer


def indexer() -> tuple[Any, Any, list[Any]]:
    """An indexer, and the scores that it has computed: rows, keys and weights, and the scores."""
    config, _ = layer(CSA)
    config.index_n_heads = 64  # with few heads some keys score 0, and tie
    chooses, computed = code_of("deepseek_v4").DeepseekV4Indexer(config).eval(), []
    for parameter in chooses.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    scorer = chooses.scorer

    def noted(_: Any, given: Any, scores: torch.Tensor) -> None:
        q, keys, hidden = given
        weights = scorer.weights_proj(hidden) * scorer.weights_scaling * scorer.softmax_scale
        computed.append((q, keys.unsqueeze(2), weights, scores))

    scorer.register_forward_hook(noted)
    return config, chooses, computed


def same_choice(theirs: torch.Tensor, computed: Any, tokens: int, backend: str) -> None:
    q, k, weights, scores = computed
    rows = q.shape[1]
    positions = torch.arange(tokens - rows, tokens)
    for row in range(rows):  # no two of them tie
        visible = scores[0, row, : (int(positions[row]) + 1) // 4]
        assert len(visible.unique()) == len(visible)
    ours, _ = fa.lightning_indexer(q, k, weights, 3, ratio=4, residual=[tokens % 4], backend=backend)
    want = torch.full_like(ours, -1)
    want[:, :, 0, : theirs.shape[-1]] = theirs
    assert torch.equal(ours, want)


@pytest.mark.parametrize("backend", ["golden", "cpu"])
@pytest.mark.parametrize("rows", [3, 8, 21, 40])
@torch.no_grad()
def test_an_indexer_chooses_the_same_keys(rows: int, backend: str) -> None:
    torch.manual_seed(rows)
    _, chooses, computed = indexer()
    position = torch.arange(rows)[None]
    theirs = chooses(torch.randn(1, rows, 32), torch.randn(1, rows, 24), position, None, 0)
    same_choice(theirs, computed[0], rows, backend)


@torch.no_grad()
def test_an_indexer_chooses_the_same_keys_step_by_step() -> None:
    """Every residual is met, behind a first part of any length."""
    torch.manual_seed(0)
    config, chooses, computed = indexer()
    hidden, queries = torch.randn(1, 40, 32), torch.randn(1, 40, 24)
    cache = DynamicCache(config=config)
    for first, end in [(0, 9), (9, 15), *((n, n + 1) for n in range(15, 40))]:
        position = torch.arange(first, end)[None]
        theirs = chooses(hidden[:, first:end], queries[:, first:end], position, cache, 0)
        same_choice(theirs, computed.pop(), end, "cpu")

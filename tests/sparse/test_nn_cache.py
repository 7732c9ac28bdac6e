"""Layers with a cache: prompts, chunks and single tokens against plain layers and one call without a cache."""

import copy
import functools
from typing import Any

import pytest
import torch
from support.bits import same_bits
from support.reference_layers import DIM, LATENT, make, output_and_loss
from torch import Tensor

from fusion_attention import nn as dsa
from fusion_attention.judging.chi_square_limits import Expected
from fusion_attention.testing import check
from fusion_attention.testing.estimated_rounding_errors import expected_of

FORMS, STAGES = ("latent", "heads", "grouped"), dsa.STAGES
LENGTHS = [19, 12]
# Tokens that each call appends to the two sequences: prompts, chunks, one token, none.
CALLS = [[11, 5], [3, 4], [1, 0], *[[1, 1]] * 3, [1, 0]]


def rope_of(layer: Any, at: Tensor) -> tuple[Tensor, Tensor]:
    return dsa.rope_table(at, LATENT["rope_dim"] if isinstance(layer, dsa.SparseLatentAttention) else 8)


def run(layer: Any, x: Tensor, cache: dsa.Cache, **given: Any) -> Tensor:
    """Returns the output of one call; checks that evaluation has loss 0."""
    with torch.no_grad():
        out, loss = layer(x, rope=rope_of(layer, cache.positions(x)), cache=cache, **given)
    assert loss == 0
    assert loss.dtype == torch.float32
    return out


def uncached(layer: Any, x: Tensor) -> Tensor:
    """Returns the output of one call without a cache."""
    with torch.no_grad():
        return layer(x, rope=rope_of(layer, torch.arange(x.shape[1])))[0]


def drawn(count: int = 19) -> Tensor:
    return torch.randn(2, count, DIM, generator=torch.Generator().manual_seed(1))


def in_pieces(layer: Any, x: Tensor, cache: dsa.Cache) -> Tensor:
    """Returns the outputs of CALLS, concatenated by sequence; inputs hold NaN behind the shorter chunks."""
    outputs: list[list[Tensor]] = [[], []]
    for counts in CALLS:
        chunk = torch.full((2, max(counts), DIM), torch.nan, dtype=x.dtype)
        for b, n in enumerate(counts):
            chunk[b, :n] = x[b, cache.lengths[b] : cache.lengths[b] + n]
        out = run(layer, chunk, cache, lengths=torch.tensor(counts))
        for b, n in enumerate(counts):
            assert not out[b, n:].any()
            outputs[b].append(out[b, :n])
    assert cache.lengths == LENGTHS
    return torch.cat([torch.cat(parts) for parts in outputs])


def layer_in(form: str, stage: dsa.Stage, dtype: torch.dtype) -> Any:
    layer = make(form, stage).eval().to(dtype)
    if dtype == torch.bfloat16:
        layer.indexer.top_k = max(LENGTHS)  # every key, so that rounding changes no choice
    return layer


@functools.cache
def expected(form: str, stage: dsa.Stage, dtype: torch.dtype) -> dict[str, Expected]:
    """Returns output_and_loss()'s outputs of the two sequences in float64, concatenated, with error bounds."""
    layer = layer_in(form, stage, dtype).double()
    sequences = [row[:n].to(dtype).double() for row, n in zip(drawn(), LENGTHS, strict=True)]

    def program() -> dict[str, Tensor]:
        with torch.no_grad():
            return {"out": torch.cat([output_and_loss(layer, x)[0] for x in sequences])}

    result: dict[str, Expected] = expected_of(program, {"out": torch.empty(0, dtype=dtype)})
    return result


@pytest.mark.sampled(18)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("form", FORMS)
def test_cached_layer_fed_in_pieces_matches_plain_layer(form: str, stage: dsa.Stage, dtype: torch.dtype) -> None:
    layer, x = layer_in(form, stage, dtype), drawn().to(dtype)
    check(form, {"out": in_pieces(layer, x, dsa.Cache(2, 19))}, expected(form, stage, dtype))


def test_indexer_with_cache_selects_same_keys_as_without_cache() -> None:
    indexer, cache, x = make("heads").indexer.eval(), dsa.Cache(2, 19), drawn()
    with torch.no_grad():
        everything = indexer(x, rope=dsa.rope_table(torch.arange(19), 8))
        indexes = [
            indexer(chunk, rope=dsa.rope_table(cache.positions(chunk), 8), cache=cache) for chunk in x.split([15, 4], 1)
        ]
        assert indexer(x[:, :0], cache=cache, choose=False).indices is None
    assert torch.equal(torch.cat([index.indices for index in indexes], 1), everything.indices)
    assert [list(index.k.shape) for index in indexes] == [[2, 15, 1, 12], [2, 19, 1, 12]]


def test_attend_with_custom_projections_and_cache_matches_one_call() -> None:
    """Rope parts and values have other sizes than in the layer."""
    layer: Any = make("heads").eval()
    x, q, v = drawn(), torch.randn(2, 19, 4, 6), torch.randn(2, 19, 2, 10)
    given = {"q": q, "k": torch.randn(2, 19, 2, 6), "v": v, "q_rope": q[..., :4], "k_rope": v[..., :4], "scale": 0.3}
    for stage in STAGES:
        layer.stage, cache = stage, dsa.Cache(2, 19)
        with torch.no_grad():
            parts = [
                layer.attend(x[:, i:j], **{n: t if n == "scale" else t[:, i:j] for n, t in given.items()}, cache=cache)
                for i, j in ((0, 12), (12, 13), (13, 19))
            ]

        def program(stage: dsa.Stage = stage) -> dict[str, Tensor]:
            layer.stage = stage
            return {"out": attended(layer, x, given)}

        got = {"out": torch.cat([out for out, _ in parts], 1)}
        check(stage, got, expected_of(program, got))


def attended(layer: Any, x: Tensor, given: dict[str, Any]) -> Tensor:
    """Returns attend()'s output in float64, by a softmax over the visible keys."""
    float64_tensors = {name: t.double() for name, t in given.items() if name != "scale"}
    q, k = (
        torch.cat([float64_tensors["q"], float64_tensors["q_rope"]], -1),
        torch.cat([float64_tensors["k"], float64_tensors["k_rope"]], -1),
    )
    k, v = (t.repeat_interleave(2, 2) for t in (k, float64_tensors["v"]))
    visible = torch.ones(19, 19, dtype=torch.bool).tril().expand(2, 1, 19, 19)
    if layer.stage == "sparse":
        lists = layer.indexer(x).indices.transpose(1, 2).long()  # -1: the place behind the last key
        listed = torch.zeros(2, 1, 19, 20, dtype=torch.bool).scatter(3, lists.where(lists >= 0, 19), True)
        visible = listed[..., :19]
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * given["scale"]
    return torch.einsum("bhij,bjhd->bihd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v)


@pytest.mark.sampled(18)
@pytest.mark.parametrize("stage", STAGES)
def test_cached_layer_under_autocast_matches_bfloat16_model(stage: dsa.Stage) -> None:
    layer, x = make("latent", stage).eval(), drawn()
    layer.indexer.top_k = 19
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = in_pieces(layer, x, dsa.Cache(2, 19))
    float64_layer = copy.deepcopy(layer).bfloat16().double()
    sequences = [row[:n].bfloat16().double() for row, n in zip(x, LENGTHS, strict=True)]

    def program() -> dict[str, Tensor]:
        with torch.no_grad():
            return {"out": torch.cat([output_and_loss(float64_layer, one)[0] for one in sequences])}

    check(stage, {"out": got}, expected_of(program, {"out": got}))
    rows = torch.randn(2, 19, 4, 8)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer.attend(x, rows, rows[:, :, :1], query=torch.randn(2, 19, 20))[0].dtype == torch.bfloat16
        alone = dsa.Cache(2, 19)
        out, _ = layer.attend(x, rows, rows[:, :, :1], query=torch.randn(2, 19, 20), cache=alone)
    assert out.dtype == alone._rows["k"].dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("form", ["latent", "grouped"])
def test_compiled_cached_layer_is_bitwise_equal_and_does_not_recompile(form: str) -> None:
    """The graph breaks at the cache."""
    torch._dynamo.reset()
    layer, x = make(form).eval(), drawn()
    want, got = dsa.Cache(2, 19), dsa.Cache(2, 19)

    def call(x: Tensor) -> Tensor:
        return layer(x, rope=rope_of(layer, got.positions(x)), cache=got)[0]

    fast = torch.compile(call, backend="eager", dynamic=True)
    pieces = (x[:, :9], *x[:, 9:].split(1, dim=1))
    for i, chunk in enumerate(pieces):
        with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=i > 2):
            out = fast(chunk)
        same_bits(out, run(layer, chunk, want))


def test_deepcopied_cache_is_independent_of_the_original() -> None:
    """Memory that a cache allocates in inference mode can be written outside inference mode."""
    layer, x = make("latent").eval(), drawn()
    cache = dsa.Cache(2, 19)
    with torch.inference_mode():
        run(layer, x[:, :9], cache)
    other = copy.deepcopy(cache)
    run(layer, -x[:, 9:12], other)
    same_bits(run(layer, x[:, 9:], cache), uncached(layer, x)[:, 9:])
    assert (cache.lengths, other.lengths) == ([19, 19], [12, 12])


def test_default_device_does_not_change_cached_layer_results() -> None:
    layer, x = make("grouped").eval(), drawn()
    want = [run(layer, x, dsa.Cache(2, 19), lengths=lengths) for lengths in (None, LENGTHS)]
    with torch.device("meta"):
        got = [run(layer, x, dsa.Cache(2, 19), lengths=lengths) for lengths in (None, LENGTHS)]
    same_bits(got, want)


def test_cache_repr_shows_lengths_and_zero_length_call_returns_zeros() -> None:
    layer, cache = make("grouped").eval(), dsa.Cache(2, 5)
    assert repr(cache) == "<Cache: [0, 0] of 5 tokens; nothing stored>"
    assert not run(layer, drawn(3), cache, lengths=[0, 0]).any()
    assert cache.lengths == [0, 0]
    run(layer, drawn(3), cache, lengths=[3, 1])
    assert repr(cache).startswith("<Cache: [3, 1] of 5 tokens; k float32 [2, 5, 2, 8], v float32 [2, 5, 2, 8], index_k")


# ---------------------------------------------------------------------------------------------------------- wrong calls

WRONG: dict[str, tuple[Any, str]] = {
    "packed": (lambda x, c: (x[0], c, {"lengths": [4]}), r"x: expected padded \[B, S, dim\] with a cache, got"),
    "batch": (lambda x, c: (x[:1], c, {}), r"x: expected 2 sequences, as its cache has, got float32 \[1, 4, 32\]"),
    "full": (
        lambda x, c: (x, c, {"lengths": [2, 4]}),
        r"cache: expected at most 3 more tokens of sequence 1 \(max_length 8\), got 4",
    ),
    "long": (lambda x, c: (x, c, {"lengths": [2, 5]}), r"lengths: expected 2 integers from 0 to 4, got \[2, 5\]"),
    "negative": (lambda x, c: (x, c, {"lengths": [2, -1]}), "lengths: expected 2 integers from 0 to 4, got"),
    "few": (lambda x, c: (x, c, {"lengths": [2]}), "lengths: expected 2 integers from 0 to 4, got"),
    "halves": (lambda x, c: (x, c, {"lengths": torch.tensor([1.0, 2])}), "lengths: expected 2 integers from 0 to 4"),
    "no cache": (lambda x, c: (x, [x], {}), r"cache: expected a fusion_attention.nn.Cache, got"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("of", ["layer", "indexer"])
def test_invalid_call_raises_and_leaves_cache_unchanged(of: str, name: str) -> None:
    """The error names the layer."""
    arguments, message = WRONG[name]
    layer: Any = make("grouped").eval()
    layer = layer.indexer if of == "indexer" else layer
    cache, x = dsa.Cache(2, 8), drawn(8)
    rope = dsa.rope_table(torch.arange(4), 8)
    with torch.no_grad():
        layer(x[:, :5], cache=cache)
        before = copy.deepcopy(cache)
        given, wrong, rest = arguments(x[:, :4], cache)
        with pytest.raises(ValueError, match=f"{type(layer).__name__}: {message}"):
            layer(given, rope=rope, cache=wrong, **rest)
        assert cache.lengths == before.lengths == [5, 5]
        same_bits(list(cache._rows.values()), list(before._rows.values()))


def test_cache_of_another_layer_dtype_device_or_stage_is_refused() -> None:
    layer, cache, x = make("grouped").eval(), dsa.Cache(2, 8), drawn(4)
    run(layer, x, cache)
    with pytest.raises(ValueError, match=r"SparseSelfAttention: cache: .*got that of another \(make a Cache"):
        run(copy.deepcopy(layer), x, cache)
    with pytest.raises(ValueError, match=r"SparseSelfAttention: k: expected rows .*float32 on cpu, .*bfloat16 on cpu"):
        run(layer.bfloat16(), x.bfloat16(), cache)
    with pytest.raises(ValueError, match=r"SparseSelfAttention: k: expected rows .* on cpu, .* on meta"):
        run(layer.float().to("meta"), x.to("meta"), cache)
    dsa.set_stage(layer, "dense")
    with pytest.raises(ValueError, match=r"cache: expected one with k, v, got k, v, index_k .*another stage"):
        run(layer, x.to("meta"), cache)
    assert cache.lengths == [4, 4]
    with pytest.raises(ValueError, match="Cache: batch, max_length: expected positive numbers, got 0 and 3"):
        dsa.Cache(0, 3)


@pytest.mark.parametrize("form", ["latent", "grouped"])
def test_cache_is_refused_while_gradients_are_enabled(form: str) -> None:
    layer, x, cache = make(form), drawn(4), dsa.Cache(2, 8)
    layer(x, rope=rope_of(layer, torch.arange(4)))
    for given in (x, x.clone().requires_grad_()):
        with pytest.raises(ValueError, match=r"cache: expected torch.no_grad\(\) around the call"):
            layer(given, rope=rope_of(layer, torch.arange(4)), cache=cache)
        layer.requires_grad_(False)
    layer(x, rope=rope_of(layer, torch.arange(4)), cache=cache)  # nothing learns
    assert cache.lengths == [4, 4]


def test_attend_that_raises_leaves_cache_unchanged() -> None:
    layer, x, cache = make("heads").eval(), drawn(4), dsa.Cache(2, 8)
    q, kv = torch.randn(2, 4, 4, 8), torch.randn(2, 4, 2, 8)
    with torch.no_grad():
        with pytest.raises(ValueError, match="sparse_attention"):
            layer.attend(x, q[..., :7], kv, kv, cache=cache)
        with pytest.raises(ValueError, match="SparseSelfAttention: k: expected rows of"):
            layer.attend(x, q, kv[:, 1:], kv, cache=cache)
        assert cache.lengths == [0, 0]
        out, _ = layer.attend(x, q, kv, kv, cache=cache)
        same_bits(out, layer.attend(x, q, kv, kv)[0])


def test_layer_with_process_group_refuses_cache() -> None:
    class Group:
        """Simulates a process group of several ranks."""

    layer = make("heads").eval()
    layer.indexer.ranks = dsa.LightningIndexer(DIM, 3, 12, 5, group=Group()).ranks
    for module in (layer, layer.indexer):
        with torch.no_grad(), pytest.raises(ValueError, match="cache: expected None with a group"):
            module(drawn(4), cache=dsa.Cache(2, 8))

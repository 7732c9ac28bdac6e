"""Calls of fused inference attention as serving programs make them, at smaller sizes, against golden."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.bits import same_bits

import fusion_attention as fa
from fusion_attention import npu
from fusion_attention.contract import bind
from fusion_attention.judging.chi_square_limits import Expected
from fusion_attention.ops import RECORDS
from fusion_attention.testing import compare, expected_of

Tensor = torch.Tensor
Call = tuple[Callable[..., Any], tuple[Tensor, ...], dict[str, Any]]
FIA, FIA_V2, PFA = (
    npu.npu_fused_infer_attention_score,
    npu.npu_fused_infer_attention_score_v2,
    npu.npu_prompt_flash_attention,
)
MASK = torch.ones(2048, 2048, dtype=torch.int8).triu(1)
N, KEY_HEADS, D, SLOTS = 8, 2, 64, 16
SCALE = D**-0.5
HEADS: dict[str, Any] = {"num_heads": N, "num_key_value_heads": KEY_HEADS, "scale": SCALE}
TABLE = torch.tensor([[5, 2, 0], [1, 7, -1], [3, -1, -1]], dtype=torch.int32)


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def cache(seed: int, heads: int = KEY_HEADS, dim: int = D) -> Tensor:
    """Returns pages of a cache; the pages that no sequence uses hold NaN."""
    pages = rows(8, SLOTS, heads, dim, seed=seed)
    pages[[4, 6]] = torch.nan
    return pages


PAGED: dict[str, Any] = {"block_table": TABLE, "block_size": SLOTS}


def chunked_prefill() -> Call:
    k, v = (cache(seed).view(8, SLOTS, KEY_HEADS * D) for seed in (1, 2))
    lengths = {"actual_seq_lengths": [4, 5, 11], "actual_seq_lengths_kv": [40, 17, 9]}
    given = {"key": k, "value": v, "atten_mask": MASK, "input_layout": "TND", "sparse_mode": 3}
    return FIA, (), {"query": rows(11, N, D), **given, **HEADS, **PAGED, **lengths}


def prefill_without_a_cache() -> Call:
    """Passes block_table=None together with the block size of the later cache."""
    k, v = rows(11, KEY_HEADS, D, seed=1), rows(11, KEY_HEADS, D, seed=2)
    ends = {"actual_seq_lengths": [4, 5, 11], "actual_seq_lengths_kv": [4, 5, 11]}
    given = {"atten_mask": MASK, "block_table": None, "block_size": 128, "input_layout": "TND", "sparse_mode": 3}
    return FIA, (), {"query": rows(11, N, D), "key": k, "value": v, **given, **HEADS, **ends}


def window() -> Call:
    function, _, given = chunked_prefill()
    return function, (), {**given, "sparse_mode": 4, "pre_tokens": 8, "next_tokens": 0}


def sinks() -> Call:
    _, _, given = chunked_prefill()
    for old, new in (("num_heads", "num_query_heads"), ("scale", "softmax_scale")):
        given[new] = given.pop(old)
    for old, new in (("actual_seq_lengths", "actual_seq_qlen"), ("actual_seq_lengths_kv", "actual_seq_kvlen")):
        given[new] = given.pop(old)
    return FIA_V2, (), {**given, "learnable_sink": rows(N, seed=9)}


def speculative_steps() -> Call:
    function, _, given = chunked_prefill()
    lengths = {"actual_seq_lengths": np.arange(3, 3 + 9, 3), "actual_seq_lengths_kv": np.array([40, 17, 9], np.int32)}
    return function, (), {**given, "query": rows(9, N, D), **lengths}


def one_token_over_pages() -> Call:
    """The last sequence is padding of a CUDA graph's batch: length 0 and page 0."""
    k, v = (cache(seed).view(-1, SLOTS, KEY_HEADS * D) for seed in (1, 2))
    table = torch.cat((TABLE, torch.zeros(1, 3, dtype=torch.int32)))
    given = {"block_table": table, "block_size": SLOTS, "actual_seq_lengths_kv": [40, 17, 9, 0], "sparse_mode": 0}
    return FIA, (rows(4, 1, N * D), k, v), {**given, **HEADS, "input_layout": "BSH", "atten_mask": None}


def latents(layout: str, **more: Any) -> Call:
    shape = {"B": (3, 8, 1), "T": (8, 8)}[layout[0]] if layout[1] != "S" else (3, 1, 8)
    pool, rope = cache(1, 1, 512), cache(2, 1, 64)
    if layout == "BSND_NBSD":
        pool, rope = (t.view(8, SLOTS, 1, -1, 16).permute(0, 2, 3, 1, 4).contiguous() for t in (pool, rope))
    else:
        pool, rope = (t.transpose(1, 2).contiguous() for t in (pool, rope))
    heads = {"num_heads": 8, "num_key_value_heads": 1, "scale": 0.07}
    given = {"query_rope": rows(*shape, 64, seed=4), "key_rope": rope, "input_layout": layout, **heads, **PAGED}
    return FIA, (rows(*shape, 512), pool, pool), {"actual_seq_lengths_kv": [40, 17, 9], **given, **more}


def latents_of_several_tokens() -> Call:
    return latents("TND_NTD", atten_mask=MASK, sparse_mode=3, actual_seq_lengths=[3, 4, 8])


def latents_in_pieces() -> Call:
    return latents("BSND_NBSD", atten_mask=None, sparse_mode=0)


def latents_in_heads() -> Call:
    return latents("BNSD_NBSD", atten_mask=None, sparse_mode=0)


def latents_for_merging() -> Call:
    return latents("BNSD", softmax_lse_flag=True, actual_seq_lengths_kv=np.array([40, 0, 9]))


def latent_prefill() -> Call:
    """Passes slices of one tensor, which are not contiguous."""
    q, k = rows(9, N, 192), rows(9, N, 192, seed=1)
    q_nope, q_rope = q.split((128, 64), dim=-1)
    k_nope, k_rope = k.split((128, 64), dim=-1)
    lengths = {"actual_seq_lengths": [4, 9], "actual_seq_lengths_kv": [4, 9]}
    nothing = {"antiquant_mode": 0, "antiquant_scale": None, "block_table": None, "block_size": 0}
    given = {"query_rope": q_rope, "key_rope": k_rope, "num_heads": N, "input_layout": "TND", "atten_mask": MASK}
    more = {"sparse_mode": 3, "scale": 192**-0.5, "softmax_lse_flag": True, "next_tokens": 0}
    return FIA, (q_nope, k_nope, rows(9, N, 128, seed=2)), {**given, **more, **nothing, **lengths}


def encoder() -> Call:
    q, k, v = (rows(9, KEY_HEADS, D, seed=seed) for seed in range(3))
    tokens = {"pre_tokens": 2147483647, "next_tokens": 2147483647, "block_table": None, "block_size": 128}
    lengths = {"actual_seq_lengths": [4, 9], "actual_seq_lengths_kv": [4, 9], "sparse_mode": 0}
    return FIA, (q, k, v), {"input_layout": "TND", "num_heads": KEY_HEADS, "scale": SCALE, **tokens, **lengths}


def relative_positions() -> Call:
    q, k, v = (rows(2, 4, 9, D, seed=seed) for seed in range(3))
    return PFA, (q, k, v), {
        "pse_shift": rows(2, 4, 9, 9, seed=7), "input_layout": "BNSD", "scale_value": SCALE, "num_heads": 4,
    }  # fmt: skip


def int8_cache() -> Call:
    def pages(seed: int) -> Tensor:
        stored = torch.randint(
            -127, 128, (8, KEY_HEADS, 2, SLOTS * 2, 32), generator=torch.Generator().manual_seed(seed)
        )
        return stored.to(torch.int8)

    scales = {f"{side}_antiquant_scale": rows(KEY_HEADS, 1, D, seed=5).abs() / 64 for side in ("key", "value")}
    modes = {"antiquant_mode": 0, "key_antiquant_mode": 0, "value_antiquant_mode": 0, "inner_precise": 1}
    given = {"block_table": TABLE, "block_size": 32, "actual_seq_lengths_kv": [90, 33, 7], "sparse_mode": 0}
    return FIA, (rows(3, N, 1, D), pages(1), pages(2)), {**given, **HEADS, **scales, **modes, "input_layout": "BNSD"}


def single_prompt(q_len: int, kv_len: int) -> Call:
    k, v = rows(1, kv_len, KEY_HEADS, D, seed=1), rows(1, kv_len, KEY_HEADS, D, seed=2)
    given = {"atten_mask": MASK[None], "sparse_mode": 3 if q_len != 1 else 0, "next_tokens": 0, "input_layout": "BSND"}
    return FIA, (rows(1, q_len, N, D), k, v), {**given, **HEADS}


def prompt_of_one_sequence() -> Call:
    return single_prompt(6, 6)


def prompt_of_one_token() -> Call:
    return single_prompt(1, 1)


def context_parallel() -> Call:
    k, v = (cache(seed).view(8, SLOTS, KEY_HEADS * D) for seed in (1, 2))
    lengths = {"actual_seq_lengths_kv": np.array([[3, 40], [5, 0], [7, 9]])[:, 1], "softmax_lse_flag": True}
    mask = torch.zeros(3, 2, 48, dtype=torch.bool)
    mask[:, 0, 5:9] = True
    given = {"atten_mask": mask, "sparse_mode": 0, "input_layout": "BSND"}
    return FIA, (rows(3, 2, N, D), k, v), {**given, **HEADS, **PAGED, **lengths}


def shared_prefix() -> Call:
    k, v = rows(2, 6, KEY_HEADS, D, seed=1), rows(2, 6, KEY_HEADS, D, seed=2)
    prefix = {f"{side}_shared_prefix": rows(1, 20, KEY_HEADS, D, seed=3) for side in ("key", "value")}
    tokens = {"pre_tokens": 65535, "next_tokens": 65535, "sparse_mode": 0, "actual_shared_prefix_len": [20]}
    mask = torch.zeros(2, 3, 26, dtype=torch.bool)
    mask[:, 0, 24:] = True
    return FIA, (rows(2, 3, N, D), k, v), {**prefix, **tokens, **HEADS, "atten_mask": mask, "input_layout": "BSND"}


def older_models() -> Call:
    q, k, v = (rows(2, 4, 9, D, seed=seed) for seed in range(3))
    given = {"atten_mask": torch.ones(9, 9, dtype=torch.bool).triu(1), "pre_tokens": 65535, "next_tokens": 65535}
    return PFA, (q, k, v), {**given, "input_layout": "BNSD_BSND", "scale_value": SCALE, "num_heads": 4}


CALLS = [
    *(chunked_prefill, prefill_without_a_cache, window, sinks, speculative_steps, one_token_over_pages),
    *(latents_of_several_tokens, latents_in_pieces, latents_in_heads, latents_for_merging, latent_prefill, encoder),
    *(relative_positions, int8_cache, prompt_of_one_sequence, prompt_of_one_token, context_parallel, shared_prefix),
    older_models,
]


def expected(function: Callable[..., Any], *given: Any, **named: Any) -> list[Expected]:
    """Returns the expected results of a call, in the order of its results."""
    op = RECORDS[function.__name__]
    arguments = inspect.signature(function).bind(*given, **named).arguments
    args = {p.name: arguments[p.shown] for p in op.params if p.shown in arguments}
    assert op.lower is not None
    return [*expected_of(op.lower(bind(op, args))).values()]


@pytest.mark.filterwarnings("error::fusion_attention.ContractWarning")
@pytest.mark.parametrize("make", CALLS, ids=lambda make: make.__name__)
def test_call_of_serving_program_matches_reference(make: Callable[[], Call]) -> None:
    """The call is legal in strict mode, and warns in no mode."""
    function, given, named = make()
    with npu.strict():
        result = function(*given, **named)
    results = result if isinstance(result, tuple) else (result,)
    for ours, wanted in zip(results, expected(function, *given, **named), strict=True):
        assert ours.dtype in (torch.bfloat16, torch.float32)
        compare(make.__name__, ours, wanted)


def test_fused_attention_out_writes_given_buffers_as_lengths_change() -> None:
    """Lengths change between the workspace query, the capture and the replay."""
    _, given, named = chunked_prefill()
    get_workspace = npu._npu_fused_infer_attention_score_get_max_workspace
    workspace = get_workspace(*given, **named)
    assert (workspace.dim(), workspace.dtype) == (1, named["query"].dtype)
    out, lse = torch.empty_like(named["query"]), torch.empty(1, dtype=named["query"].dtype)
    untouched = lse.clone()
    for lengths in ([40, 17, 9], [33, 6, 16]):
        named["actual_seq_lengths_kv"] = lengths
        assert FIA.out(*given, **named, workspace=workspace, out=[out, lse])[0] is out
        same_bits(out, FIA(*given, **named)[0])
        same_bits(lse, untouched)


@pytest.mark.parametrize("layout", ["BSND", "BSH"])
def test_int8_latent_attention_with_divided_rope_matches_float_attention(layout: str) -> None:
    generator = torch.Generator().manual_seed(0)
    stored = {
        name: torch.randint(-127, 128, shape, generator=generator).to(torch.int8)
        for name, shape in (("query", (2, 3, 8, 512)), ("latent", (2, 9, 1, 512)))
    }
    q_scale, k_scale = torch.rand(2, 3, 8, generator=generator) / 64 + 0.01, torch.tensor([0.02])
    q_rope, k_rope = rows(2, 3, 8, 64, seed=1).float(), rows(2, 9, 1, 64, seed=2).float()
    heads: dict[str, Any] = {"num_query_heads": 8, "num_key_value_heads": 1, "input_layout": layout}
    given: dict[str, Any] = {**heads, "softmax_scale": 0.01, "atten_mask": MASK, "sparse_mode": 3}

    def prepared(t: Tensor) -> Tensor:
        return t.flatten(2) if layout == "BSH" else t

    latent = prepared(stored["latent"])
    ours, _ = FIA_V2(
        *(prepared(stored["query"]), latent, latent),
        query_rope=fa.divided_rope(prepared(q_rope), q_scale, k_scale),
        key_rope=prepared(k_rope),
        dequant_scale_query=q_scale,
        dequant_scale_key=k_scale,
        dequant_scale_value=k_scale,
        query_quant_mode=3,
        **given,
    )
    floats = prepared(stored["query"] * q_scale[..., None]), latent * k_scale
    ropes = {"query_rope": prepared(q_rope), "key_rope": prepared(k_rope)}
    compare(layout, ours, expected(FIA_V2, floats[0], floats[1], floats[1], **ropes, **given)[0])


def test_divided_rope_refuses_scales_of_wrong_shape() -> None:
    with pytest.raises(ValueError, match=r"expected one scale per row and head, got \[2, 8\] for \[2, 3, 8, 64\]"):
        fa.divided_rope(rows(2, 3, 8, 64), torch.ones(2, 8), 0.5)

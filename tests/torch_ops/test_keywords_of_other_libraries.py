"""Words of other libraries at attention(): an error that gives ours."""

import inspect
import re

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

import fusion_attention as fa
from fusion_attention.torch_ops.foreign_arguments import _WORDS

OURS = set(inspect.signature(fa.attention).parameters) - {"foreign"}
FLASH = "q k v dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs"
LIBRARIES = {
    "torch SDPA": "attn_mask dropout_p is_causal scale enable_gqa",
    "torch MultiheadAttention": "key_padding_mask need_weights attn_mask is_causal",
    "torch flex_attention": " ".join(inspect.signature(flex_attention).parameters),
    "torch varlen_attn": "query key value cu_seq_q cu_seq_k max_q max_k scale window_size enable_gqa block_table",
    "flash-attn": FLASH,
    "flash-attn packed": f"{FLASH} cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k block_table",
    "flash-attn with a cache": "k_cache v_cache cache_seqlens block_table softmax_scale causal return_softmax_lse",
    "xformers": "query key value attn_bias p scale op",
    "transformers": "query key value attention_mask scaling dropout sliding_window softcap s_aux",
    "torch_npu": "query key value head_num input_layout pse atten_mask scale actual_seq_qlen actual_seq_kvlen",
}
rows = torch.randn(1, 3, 2, 8)


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_word_of_a_library_is_ours_or_known(library: str) -> None:
    strange = set(LIBRARIES[library].split()) - OURS - set(_WORDS) - {"softcap"}
    assert not strange


@pytest.mark.parametrize("word", [word for word in _WORDS if word not in ("query", "key", "value")])
def test_a_foreign_word_is_an_error_that_gives_ours(word: str) -> None:
    assert word not in OURS
    with pytest.raises(TypeError, match=f"^attention: {word}: another library's word; here: ") as result:
        fa.attention(rows, rows, rows, **{word: None})
    named = set(re.findall(r"(\w+)=", str(result.value)))
    assert named <= OURS | {"align", "softcap"}, "it names no parameter of attention()"
    assert named or "leave it out: " in str(result.value) or "decode_attention()" in str(result.value)


def test_every_foreign_word_of_a_call_has_a_line() -> None:
    with pytest.raises(TypeError) as result:
        fa.attention(rows, rows, rows, is_causal=True, dropout_p=0.1)  # type: ignore[call-overload]
    first, second = str(result.value).splitlines()
    assert first.startswith("attention: is_causal: ")
    assert 'Band.causal(align="start")' in first
    assert second.startswith("attention: dropout_p: ")


def test_an_unknown_word_is_an_error_with_the_nearest_of_ours() -> None:
    with pytest.raises(TypeError, match=r"^attention: alibi_slope: no parameter .* \(did you mean alibi_slopes=\?\)$"):
        fa.attention(rows, rows, rows, alibi_slope=None)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"help\(fusion_attention.attention\)"):
        fa.attention(rows, rows, rows, xyzzy=1)  # type: ignore[call-overload]


def test_heads_before_tokens_are_named_where_shapes_betray_them() -> None:
    """[B, N, S, D] as layout BSND: eight heads of 6 and 4 tokens would be eight tokens of 6 and 4 heads."""
    q, k = torch.randn(2, 8, 6, 16), torch.randn(2, 8, 4, 16)
    with pytest.raises(fa.ContractError, match='layout="BNSD"'):
        fa.attention(q, k, k)
    with pytest.warns(fa.ContractWarning, match='layout="BNSD"'):
        fa.attention(*[torch.randn(1, 8, 512, 16)] * 3)

"""Keywords of other libraries passed to attention(): the error names this library's keyword."""

import inspect
import re

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

import fusion_attention as fa
from fusion_attention.torch_ops.foreign_arguments import _WORDS

OURS = set(inspect.signature(fa.attention).parameters) - {"foreign"}
rows = torch.randn(1, 3, 2, 8)


def test_every_flex_attention_keyword_is_accepted_or_explained() -> None:
    assert not set(inspect.signature(flex_attention).parameters) - OURS - set(_WORDS)


@pytest.mark.parametrize("word", [word for word in _WORDS if word not in ("query", "key", "value")])
def test_foreign_keyword_raises_error_with_the_equivalent_parameter(word: str) -> None:
    assert word not in OURS
    with pytest.raises(TypeError, match=f"^attention: {word}: another library's word; here: ") as result:
        fa.attention(rows, rows, rows, **{word: None})
    named = set(re.findall(r"(\w+)=", str(result.value)))
    assert named <= OURS | {"align", "softcap"}, "it names no parameter of attention()"
    assert named or "leave it out: " in str(result.value) or "decode_attention()" in str(result.value)


def test_each_foreign_keyword_of_a_call_has_an_error_line() -> None:
    with pytest.raises(TypeError) as result:
        fa.attention(rows, rows, rows, is_causal=True, dropout_p=0.1)  # type: ignore[call-overload]
    first, second = str(result.value).splitlines()
    assert first.startswith("attention: is_causal: ")
    assert 'Band.causal(align="start")' in first
    assert second.startswith("attention: dropout_p: ")


def test_unknown_keyword_error_suggests_the_nearest_parameter() -> None:
    with pytest.raises(TypeError, match=r"^attention: alibi_slope: no parameter .* \(did you mean alibi_slopes=\?\)$"):
        fa.attention(rows, rows, rows, alibi_slope=None)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"help\(fusion_attention.attention\)"):
        fa.attention(rows, rows, rows, xyzzy=1)  # type: ignore[call-overload]


def test_bnsd_tensors_passed_as_bsnd_raise_or_warn() -> None:
    """Read as [B, S, N, D], 8 heads of 6 and 4 tokens are 8 tokens of 6 query and 4 key heads."""
    q, k = torch.randn(2, 8, 6, 16), torch.randn(2, 8, 4, 16)
    with pytest.raises(fa.ContractError, match='layout="BNSD"'):
        fa.attention(q, k, k)
    with pytest.warns(fa.ContractWarning, match='layout="BNSD"'):
        fa.attention(*[torch.randn(1, 8, 512, 16)] * 3)

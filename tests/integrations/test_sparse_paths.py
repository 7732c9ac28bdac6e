"""`fusion-attention doctor --model` reports the code path of every layer from a model's configuration."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from support.sparse_models import MODELS, config_of, make, tokens
from typer.testing import CliRunner

from fusion_attention.cli import app
from fusion_attention.integrations import sparse_blocks, sparse_compressed, sparse_latent
from fusion_attention.integrations import transformers as integration
from fusion_attention.integrations.sparse_paths import configuration, paths

ROWS = "rows before position 6 read all keys, dense; rows before position 9 read 6 keys, dense with a mask"
EXPECTED = {
    "deepseek_v32": [f"keys of an indexer: 6 of T latents a row; {ROWS}"] * 2,
    "glm_moe_dsa": [
        f"keys of an indexer: 6 of T latents a row; {ROWS}",
        f"keys of layer 0's indexer: 6 of T latents a row; {ROWS}",
    ],
    "deepseek_v4": [
        "a window of 5 keys",
        "a window of 5 keys beside 3 of T / 2 compressed keys",
        "a window of 5 keys beside all T / 4 compressed keys",
    ],
    "qwen4_exp": ["transformers' own code: linear attention", "blocks of an indexer: 2 of T / 2, of 2 keys each"],
}


def doctor(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["doctor", "--model", *arguments])


@pytest.mark.parametrize("name", MODELS)
def test_doctor_model_lists_the_attention_path_of_each_layer(name: str, tmp_path: Path) -> None:
    config_of(name).save_pretrained(tmp_path)
    for source in (tmp_path, tmp_path / "config.json"):
        assert paths(configuration(str(source))).layers == EXPECTED[name]
    shown = doctor(str(tmp_path))
    assert shown.exit_code == 0
    assert all(text in shown.output for text in EXPECTED[name])
    assert "transformers' own code" in shown.output
    result = json.loads(doctor(str(tmp_path), "--json").output)
    assert result["layers"] == EXPECTED[name]
    assert result["problems"] == []


@pytest.mark.parametrize("name", MODELS)
def test_models_call_the_attention_operators_that_doctor_lists(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    integration.register()
    model, ran = make(name).float(), []
    for module in (sparse_latent, sparse_compressed, sparse_blocks, integration):
        for function in ("attention", "sparse_attention", "compressed_attention", "lightning_indexer"):
            if original := getattr(module, function, None):
                monkeypatch.setattr(module, function, lambda *a, f=original, **k: ran.append(f.__name__) or f(*a, **k))
    with torch.no_grad():
        model(tokens(1, 24), use_cache=False)
    latents = ["lightning_indexer", "attention", "sparse_attention"]
    assert (
        ran
        == {
            "deepseek_v32": latents * 2,
            "glm_moe_dsa": [*latents, "attention", "sparse_attention"],
            "deepseek_v4": ["attention", "lightning_indexer", "compressed_attention", "compressed_attention"],
            "qwen4_exp": ["attention", "lightning_indexer", "sparse_attention"],
        }[name]
    )


def test_doctor_model_lists_paths_of_models_without_an_indexer() -> None:
    assert paths(configuration("llama")).layers == ["all keys: attention()"] * 32
    assert paths(configuration("mistral")).layers == ["a window of 4096 keys: attention()"] * 32
    assert {*paths(configuration("gemma3")).layers} == {
        "a window of 4096 keys: attention()", "all keys: attention()"
    }  # fmt: skip
    assert {*paths(configuration("t5")).layers} == {"all keys: attention() with a mask of S x T"}
    refused = doctor("bloom")
    assert refused.exit_code == 1
    assert 'BloomConfig: attention in code of its own: attn_implementation="eager" computes it' in refused.output


def test_doctor_model_refuses_invalid_configurations(tmp_path: Path) -> None:
    wrong = tmp_path / "config.json"
    for text in ("{}", "[1]", "not json"):
        wrong.write_text(text)
        result = doctor(str(wrong))
        assert result.exit_code == 1
        assert f"doctor: --model: {wrong}: " in result.output
    config_of("deepseek_v32", index_head_dim=4).save_pretrained(tmp_path)
    result = doctor(str(tmp_path))
    assert result.exit_code == 1
    assert "index_head_dim: expected at least qk_rope_head_dim (8), got 4" in result.output

"""Defines tiny models of transformers with random weights, and the tests of each; docs/with_transformers.md lists them.

python tests/support/hf_models.py          # writes the page's table
"""

import contextlib
import functools
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from fusion_attention.testing.estimated_rounding_errors import attend

PAGE = Path(__file__).resolve().parents[2] / "docs" / "with_transformers.md"
# The tests of a model, which are the columns of the table: forms of a batch and uses of the model.
COLUMNS = (
    "plain", "padded", "left-padded", "packed", "bfloat16", "generate", "static cache", "paged cache", "torch.compile",
)  # fmt: skip
CAUSAL = COLUMNS
ENCODER = ("plain", "padded", "left-padded", "packed", "bfloat16", "torch.compile")
SEQ2SEQ = ("plain", "padded", "left-padded", "bfloat16", "generate", "static cache", "paged cache", "torch.compile")
IMAGES = ("plain", "bfloat16", "torch.compile")

VOCABULARY = 64
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "pad_token_id": 0, "eos_token_id": None, "bos_token_id": None,
}  # fmt: skip
GROUPED = SIZES | {"num_key_value_heads": 2}
WINDOWS = ["sliding_attention", "full_attention"]
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10,
    "moe_intermediate_size": 24, "first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "num_key_value_heads": 4,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A model of transformers and its tests.

    Args:
        name: usual name.
        model: class, as "module.Class".
        config: name of the configuration class in the same module.
        sizes: arguments of the configuration.
        columns: tests that the model passes.
        special: description of its attention for the table.
    """

    name: str
    model: str
    config: str
    sizes: dict[str, Any]
    columns: tuple[str, ...] = CAUSAL
    special: str = ""

    @property
    def module(self) -> Any:
        """Returns the module of transformers that defines the model."""
        folder = self.model.split(".")[0]
        return importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")

    @property
    def has_experts(self) -> bool:
        return "num_experts_per_tok" in self.sizes

    @property
    def has_plain_scores(self) -> bool:
        """True if its attention is softmax(scale * q @ k.T + mask) @ v."""
        return not any(word in self.special for word in ("softcap", "sinks", "bias", "indexer"))

    def make(self) -> Any:
        """Makes the model in float32 and evaluation mode; its scores differ enough to detect a wrong mask."""
        folder, name = self.model.split(".")
        configuration = importlib.import_module(f"transformers.models.{folder}.configuration_{folder}")
        torch.manual_seed(0)
        model = getattr(self.module, name)(getattr(configuration, self.config)(**self.sizes)).eval()
        for text, parameter in model.named_parameters():
            if parameter.dim() == 2 and "embed" not in text and "router" not in text:
                torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
            if text.endswith("sinks"):
                torch.nn.init.normal_(parameter)
        if self.has_experts:
            model.set_experts_implementation("eager")  # supports float64
        return model


def text(name: str, folder: str, prefix: str, sizes: dict[str, Any], special: str = "") -> Family:
    """Returns the family of a text decoder."""
    return Family(name, f"{folder}.{prefix}ForCausalLM", f"{prefix}Config", sizes, CAUSAL, special)


# fmt: off
_CLIP = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_IMAGE = {"image_size": 16, "patch_size": 4}
FAMILIES = (
    text("Llama", "llama", "Llama", GROUPED),
    text("Qwen2", "qwen2", "Qwen2",
         GROUPED | {"use_sliding_window": True, "sliding_window": 5, "layer_types": WINDOWS}, "windows in some layers"),
    text("Qwen3", "qwen3", "Qwen3", GROUPED | {"head_dim": 16}),
    text("Qwen3-MoE", "qwen3_moe", "Qwen3Moe", GROUPED | EXPERTS | {"head_dim": 16, "num_experts": 4}),
    text("Mistral", "mistral", "Mistral", GROUPED | {"sliding_window": 5}, "window"),
    text("Mixtral", "mixtral", "Mixtral", GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    Family("Gemma 2", "gemma2.Gemma2ForCausalLM", "Gemma2Config",
           GROUPED | {"head_dim": 16, "sliding_window": 5, "layer_types": WINDOWS, "attn_logit_softcapping": 1.5},
           CAUSAL, "softcap, windows in some layers"),
    Family("Gemma 3", "gemma3.Gemma3ForCausalLM", "Gemma3TextConfig",
           GROUPED | {"head_dim": 16, "sliding_window": 5, "layer_types": WINDOWS}, CAUSAL, "windows in some layers"),
    text("Phi-3", "phi3", "Phi3", GROUPED | {"sliding_window": 5}, "window"),
    text("GPT-NeoX", "gpt_neox", "GPTNeoX", SIZES),
    text("GPT-OSS", "gpt_oss", "GptOss",
         GROUPED | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5,
                    "layer_types": WINDOWS}, "sinks, windows in some layers"),
    text("DeepSeek-V3", "deepseek_v3", "DeepseekV3", SIZES | LATENT, "keys longer than values"),
    text("DeepSeek-V3.2", "deepseek_v32", "DeepseekV32",
         SIZES | LATENT | {"index_n_heads": 32, "index_head_dim": 16, "index_topk": 6}, "keys chosen by an indexer"),
    text("GLM-5", "glm_moe_dsa", "GlmMoeDsa",
         SIZES | LATENT | {"index_n_heads": 32, "index_head_dim": 16, "index_topk": 6,
                           "indexer_types": ["full", "shared"]}, "keys chosen by an indexer in some layers"),
    Family("BERT", "bert.BertForMaskedLM", "BertConfig", SIZES, ENCODER),
    Family("RoBERTa", "roberta.RobertaForMaskedLM", "RobertaConfig", SIZES, ENCODER),
    Family("ModernBERT", "modernbert.ModernBertForMaskedLM", "ModernBertConfig",
           SIZES | {"layer_types": WINDOWS, "local_attention": 8, "cls_token_id": 1, "sep_token_id": 2}, ENCODER,
           "windows to both sides in some layers"),
    Family("T5", "t5.T5ForConditionalGeneration", "T5Config",
           {"vocab_size": VOCABULARY, "d_model": 48, "d_kv": 12, "d_ff": 64, "num_layers": 2, "num_heads": 4,
            "pad_token_id": 0, "eos_token_id": None, "decoder_start_token_id": 0}, SEQ2SEQ, "learned bias, no scale"),
    Family("Whisper", "whisper.WhisperForConditionalGeneration", "WhisperConfig",
           {"vocab_size": VOCABULARY, "d_model": 48, "encoder_layers": 2, "decoder_layers": 2,
            "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
            "num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 48, "pad_token_id": 0,
            "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "suppress_tokens": None,
            "begin_suppress_tokens": None}, SEQ2SEQ),
    Family("ViT", "vit.ViTForImageClassification", "ViTConfig", _CLIP | _IMAGE, IMAGES),
    Family("CLIP", "clip.CLIPModel", "CLIPConfig",
           {"text_config": _CLIP | {"vocab_size": VOCABULARY, "eos_token_id": 1}, "vision_config": _CLIP | _IMAGE,
            "projection_dim": 24}, ("plain", "padded", "bfloat16", "torch.compile")),
)
# fmt: on
NOT_SERVED = {
    "Bloom": (
        "its attention does not use the attention interface of transformers: an error; eager attention computes it"
    ),
    "MPT": "the same",
}


BY_NAME = {family.name: family for family in FAMILIES}


@functools.lru_cache(maxsize=1)
def model_of(name: str) -> Any:
    """Makes a family's model, and keeps the last one; tests change only a copy, or its attention implementation."""
    return BY_NAME[name].make()


class Float64Torch:
    """torch with float64 in place of float32, because transformers' modules convert to float32 in any dtype."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def attention_of_kernels(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Eager attention with the gradient formulas of kernels, whose rounding errors do not cancel in sums over keys (the
    gradient of a bias of keys)."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling

    def scores() -> torch.Tensor:
        result = query @ key.mT * scale
        return result if attention_mask is None else result + attention_mask[..., : key.shape[-2]]

    return attend(scores(), value, scores).transpose(1, 2).contiguous(), None


@contextlib.contextmanager
def in_float64(family: Family) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if family.has_plain_scores:
            patch.setattr(family.module, "eager_attention_forward", attention_of_kernels)
        patch.setattr(family.module, "torch", Float64Torch())
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


def table() -> str:
    """Returns the table of docs/with_transformers.md."""
    lines = ["| model | " + " | ".join(COLUMNS) + " | with |", "|---" * (len(COLUMNS) + 2) + "|"]
    for family in FAMILIES:
        marks = ["yes" if column in family.columns else "" for column in COLUMNS]
        lines.append(f"| {family.name} | " + " | ".join(marks) + f" | {family.special} |")
    sentences = [f"{name}: {reason}." for name, reason in NOT_SERVED.items()]
    return "\n".join([*lines, "", *sentences])


def page_with(table_text: str) -> str:
    """Returns the page with its table replaced."""
    start, end = "<!-- table -->\n", "\n<!-- end of table -->"
    text = PAGE.read_text(encoding="utf-8")
    return text[: text.index(start) + len(start)] + table_text + text[text.index(end) :]


if __name__ == "__main__":
    PAGE.write_text(page_with(table()), encoding="utf-8")

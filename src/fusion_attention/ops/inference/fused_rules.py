"""The rules of fused inference attention: what PromptFlashAttention and FusedInferAttentionScore demand of a call."""

from __future__ import annotations

from fusion_attention.contract import Rule

SHARED: tuple[Rule, ...] = ()
PROMPT_ONLY: tuple[Rule, ...] = ()
FUSED: tuple[Rule, ...] = ()
LAST: tuple[Rule, ...] = ()
TORCH_PROMPT: tuple[Rule, ...] = ()
TORCH_FUSED: tuple[Rule, ...] = ()

"""Attention of prompts and new tokens over a cache: PromptFlashAttention and FusedInferAttentionScore."""

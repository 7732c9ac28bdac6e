"""Inference attention for prefill and decoding: PromptFlashAttention and FusedInferAttentionScore."""

"""Attention over a cache: IncreFlashAttention and our own decode_attention()."""

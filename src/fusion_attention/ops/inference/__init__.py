"""Decoding attention over a KV cache: CANN's IncreFlashAttention, and this library's decode_attention()."""

"""Decoding attention over a KV cache: IncreFlashAttention and this library's decode_attention()."""

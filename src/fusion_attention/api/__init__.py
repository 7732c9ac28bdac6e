"""The library's public attention functions (attention(), decode_attention(), ...) and its paged KV cache."""

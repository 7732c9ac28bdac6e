"""This library's own functions, and the cache of decode_attention(). The package shows them under their names."""

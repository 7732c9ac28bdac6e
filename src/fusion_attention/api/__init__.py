"""The public functions of this library, which the package exports, and the cache of decode_attention()."""

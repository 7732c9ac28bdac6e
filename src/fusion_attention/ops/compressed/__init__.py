"""Attention to a window of keys beside compressed keys, in one softmax: our own compressed_attention()."""

"""Attention to a window of keys and to compressed keys in one softmax: SparseFlashMla and compressed_attention()."""

"""Attention to selected blocks of keys: SparseFlashAttention, its gradients, and this library's sparse_attention()."""

"""Attention to selected blocks of keys: SparseFlashAttention, its gradients, and our own sparse_attention()."""

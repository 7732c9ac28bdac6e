"""Attention to selected blocks of keys: CANN's SparseFlashAttention, its gradients, and our sparse_attention()."""

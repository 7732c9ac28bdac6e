"""CANN's BlockSparseAttention: attention to the blocks of keys that a mask leaves to each block of query rows."""

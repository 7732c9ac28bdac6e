"""Training attention: FlashAttentionScore, VarLenScore, their gradients, and our own attention()."""

"""Training attention: FlashAttentionScore, VarLenScore, their gradients, and this library's attention()."""

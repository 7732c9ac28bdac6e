"""Training attention: CANN's FlashAttentionScore, VarLenScore and their gradients, and this library's attention()."""

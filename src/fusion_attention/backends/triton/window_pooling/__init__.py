"""Triton kernels that pool each window of token rows to one compressed key, a sum weighted by a softmax of gates."""

"""Triton kernels of the lightning indexer and their launches: scores, the choice of keys, gradients, losses."""

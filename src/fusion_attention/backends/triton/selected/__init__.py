"""Triton kernels and launches of attention to selected keys, its gradients, and sums of rows per selected key."""

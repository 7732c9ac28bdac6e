"""Attention to selected keys and its gradients, and sums over the rows that selected a key."""

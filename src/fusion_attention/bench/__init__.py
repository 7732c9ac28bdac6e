"""Timing of this library beside its alternatives: alternating pairs (pair.py), the rows of `fusion-attention bench`
(rows.py), and the comparison of two runs (changes.py). The repository's `benchmarks` use this package too."""

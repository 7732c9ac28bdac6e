"""Timing of this library and of alternatives (peers): the timing (pair.py), the cases of `fusion-attention bench`
(cases.py), and the comparison of two runs (changes.py). The repository's `benchmarks` use this package too."""

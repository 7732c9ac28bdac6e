"""Timing this library beside what a user would pick instead: pairs in turns (pair.py), the rows of `fusion-attention
bench` (rows.py), and what changed between two runs (changes.py). The repository's `benchmarks` share it."""

"""Benchmarks: this library beside what a user would pick instead, alternating in one process."""

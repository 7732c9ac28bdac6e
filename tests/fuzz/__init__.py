"""Random calls, including unusual ones, that are compared with formulas; thousands of calls per run.

A family (`FAMILIES` in core.py) draws a legal call from a number, and gives the expected results with error bounds,
without golden, fusion_attention.testing and back ends. Replay: `python -m tests.fuzz FAMILY NUMBER`.
"""

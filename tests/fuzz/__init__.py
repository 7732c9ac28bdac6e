"""Random calls judged by the formulas alone: what a tester who means harm would try, a few thousand times a run.

A family (`FAMILIES` in core.py) draws a legal call from a number, says what may come back, and how far from it;
nothing here knows golden, testing or a back end. Replay: `python -m tests.fuzz FAMILY NUMBER`.
"""

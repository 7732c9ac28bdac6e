"""Calls recorded to files (capture.py), and computed again from them on any machine (replay.py)."""

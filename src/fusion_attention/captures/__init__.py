"""Calls recorded to files (capture.py), and read from them (reader.py)."""

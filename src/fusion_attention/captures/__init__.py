"""Calls recorded to files, and computed again from them on any machine."""

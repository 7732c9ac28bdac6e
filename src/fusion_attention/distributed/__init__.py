"""Attention on sequences that lie spread over the processes of a group."""

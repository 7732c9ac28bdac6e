"""Doors for other libraries' programs: each says their words to our own functions, and computes nothing itself."""

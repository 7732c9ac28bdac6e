"""Doors for programs written against other libraries: each translates their words and calls this library's functions."""

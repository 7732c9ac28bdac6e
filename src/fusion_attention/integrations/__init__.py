"""Doors for programs written against other libraries: their words become calls of this library."""

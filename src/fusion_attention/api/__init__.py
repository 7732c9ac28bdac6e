"""This library's own functions, which the package shows under their names."""

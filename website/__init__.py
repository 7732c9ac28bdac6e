"""Generates the pictures, charts and API reference of the documentation site; defines mkdocs' hooks.

Pictures are drawn from what the library computes. Nothing here is part of the package.
"""

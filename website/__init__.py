"""What the site has besides its pages: pictures and charts, the reference of docstrings, and mkdocs' hooks.

Pictures are drawn from what the library computes. Nothing here is part of the package.
"""

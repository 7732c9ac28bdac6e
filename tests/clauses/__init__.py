"""Tables of CANN's pages: statements of a page, calls that test each statement, and the expected results.

A table is checked against its page by reading: parameters have the names of the page's prototype, and results are
compared with the page's formula in float64, which is implemented here with error bounds (error_bounds.py).
"""
